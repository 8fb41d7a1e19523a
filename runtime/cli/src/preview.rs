//! `rectrain validate --data`: opens the data of a manifest, checks its columns and first rows, and
//! shows the numbers of rows.

use rectrain_data::{Batch, Dataset, FollowConfig, ReadPlan, SourceConfig, list_files};
use rectrain_protocol::plan::JobPlan;

use crate::failure::Failure;
use crate::human::{list, percent, thousands};
use crate::outlook::{Outlook, failure, is_local, open};
use crate::output;

/// The rows of each part that are read and checked.
const CHECKED: u64 = 1_000;

/// Prints the numbers of rows of each part, and the first row of the training part. Prints a
/// warning where the job could learn little.
pub(crate) fn show(plan: &JobPlan) -> Result<(), Failure> {
    if let Some(follow) = plan.follow() {
        return show_followed(plan, follow);
    }
    let train = open(&plan.train, plan)?;
    if !train.is_finite() {
        return show_stream(plan, &train);
    }
    let (first, rows) = show_part("training", &train, &plan.train)?;
    if let Some(config) = &plan.test {
        let test = open(config, plan)?;
        test.refuse_files_of(&train).map_err(failure)?;
        show_part("test", &test, config)?;
    }
    output::line("first training row, as the model gets it:")?;
    let lines = list(&row(plan, &first)).replace('\n', "\n  ");
    output::line(format_args!("  {lines}"))?;
    if let Some(doubt) = Outlook::of(plan, Some(rows)).doubt() {
        output::line(format_args!("warning: {doubt}"))?;
    }
    Ok(())
}

/// Prints how many records the partitions of a stream have, and the figures of the test part.
fn show_stream(plan: &JobPlan, train: &Dataset) -> Result<(), Failure> {
    let partitions = train.partitions().map_err(failure)?;
    let records = partitions.iter().map(|found| found.state.end.saturating_sub(found.state.begin)).sum();
    output::line(format_args!(
        "training data: a stream of {} partitions with {} records now",
        thousands(partitions.len() as u64),
        thousands(records)
    ))?;
    if let Some(config) = &plan.test {
        show_part("test", &open(config, plan)?, config)?;
    }
    Ok(())
}

/// Prints how many files the followed paths have now, and the figures of the first one and of the
/// test part.
fn show_followed(plan: &JobPlan, follow: &FollowConfig) -> Result<(), Failure> {
    let files = list_files(follow, &plan.train.storage_options).map_err(failure)?;
    output::line(format_args!("training data: followed paths with {} files now", thousands(files.len() as u64)))?;
    if let Some(first) = files.iter().find(|file| file.size > 0) {
        let config = plan.train.of_file(&first.name);
        show_part("first file's", &open(&config, plan)?, &config)?;
    }
    if let Some(config) = &plan.test {
        show_part("test", &open(config, plan)?, config)?;
    }
    Ok(())
}

/// Prints the figures of a part. Returns its first rows, and the number of its rows.
fn show_part(name: &str, data: &Dataset, config: &SourceConfig) -> Result<(Batch, u64), Failure> {
    let plan = ReadPlan { chunk_rows: CHECKED, shuffle: None, epoch: 0, read_ahead_chunks: 0 };
    let mut reader = data.reader(plan).map_err(failure)?;
    // A part without rows is an error of the reader.
    let first = reader.read(0).map_err(failure)?.unwrap_or_default();
    // Counting reads all text: objects in buckets are estimated.
    let (rows, about) = match is_local(config) && data.is_finite() {
        true => (data.count_rows().map_err(failure)?, ""),
        false => (data.estimated_rows(), "about "),
    };
    let files = match data.files().len() {
        0 => String::new(),
        1 => " in 1 file".to_owned(),
        files => format!(" in {} files", thousands(files as u64)),
    };
    let skipped = match reader.skipped() {
        0 => String::new(),
        skipped => format!(", {} bad rows skipped", thousands(skipped)),
    };
    let positive = percent(first.label_sum() / first.samples.max(1) as f64);
    output::line(format_args!(
        "{name} data: {about}{} rows{files}; the first {} were read: {positive} positive{skipped}",
        thousands(rows),
        thousands(first.samples as u64)
    ))?;
    if let Some(label) = only_label(&first) {
        output::line(format_args!(
            "warning: the label is {label} in all of these rows: is spec.features.label the right column, and are the \
             rows sorted by it?"
        ))?;
    }
    Ok((first, rows))
}

/// The label of all rows, if they have only one.
fn only_label(batch: &Batch) -> Option<f32> {
    let (first, others) = batch.labels.split_first()?;
    (!others.is_empty() && others.iter().all(|label| label == first)).then_some(*first)
}

/// The first row, by column.
fn row(plan: &JobPlan, batch: &Batch) -> Vec<(String, String)> {
    let mut row = Vec::new();
    if let Some(label) = batch.labels.first() {
        row.push((format!("{} (label)", plan.schema.label.name), label.to_string()));
    }
    if batch.samples == 0 {
        return row;
    }
    for (field, column) in plan.schema.sparse.iter().zip(&batch.sparse) {
        let keys = column.row(0);
        let shown: Vec<String> = keys.iter().take(3).map(|key| format!("{key:016x}")).collect();
        let text = match keys.len() {
            0 => "no id".to_owned(),
            1 => format!("1 id, hashed to {}", shown.join(", ")),
            count => format!("{count} ids, hashed to {}{}", shown.join(", "), if count > 3 { ", …" } else { "" }),
        };
        row.push((field.name.clone(), text));
    }
    let dense = batch.dense.iter().take(batch.dense_width);
    row.extend(plan.schema.dense.iter().zip(dense).map(|(field, value)| (field.name.clone(), value.to_string())));
    row
}
