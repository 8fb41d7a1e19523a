//! `rectrain data profile`: statistics of a job's training data, before anything is trained. It
//! reads the rows by the readers of training ([`rectrain_data::profile`] counts them), and shows
//! the figures as a table, as JSON and as a page. From them it proposes the settings that keep
//! tables within a budget ([`advice`]), and says aloud which columns look wrong ([`doubts`]).

mod advice;
mod decimals;
mod doubts;
mod figures;
mod page;
mod show;

use std::path::Path;
use std::time::Instant;

use rectrain_crds::Manifest;
use rectrain_data::profile::Profile;
use rectrain_data::{Dataset, Format, ReadPlan, Schema, SourceConfig, Subset};
use rectrain_embedding::RowBytes;
use rectrain_protocol::plan::JobPlan;

use self::decimals::Decimals;
use self::figures::{Figures, Read, Widths};
use crate::args::{JobArgs, ProfileArgs};
use crate::failure::Failure;
use crate::outlook::failure;
use crate::output::OutputError;
use crate::partial::write_text;
use crate::row_progress::RowProgress;
use crate::{input, job, output};

/// Rows that are read at a time.
const CHUNK_ROWS: u64 = 16_384;
/// Chunks that are parsed ahead.
const READ_AHEAD: usize = 2;
/// A budget that no job reaches. With any budget, a job has the optimizer of rows in a budget.
const ANY_BUDGET: [&str; 2] = ["spec.features.memory=null", "spec.features.memory.maxRows=1000000000000"];

/// The refusal of a job on a stream.
const STREAM: &str = "spec.data.train.kafka: a profile needs rows that end: give files of the same columns with \
                      `--set spec.data.train.kafka=null --set spec.data.train.paths={rows.csv}`";
/// The refusal of a job that follows paths.
const FOLLOWED: &str = "spec.data.train.follow: a profile needs rows that end: give files of the same columns with \
                        `--set spec.data.train.follow=null --set spec.data.train.paths={rows.csv}`";

pub(crate) fn run(args: &ProfileArgs) -> Result<(), Failure> {
    let text = input::read(&args.job.manifest, "manifest")?;
    let (manifest, plan) = job::parse(&args.job, &text)?;
    for path in args.json.iter().chain(&args.html) {
        check_place(path)?;
    }
    check_end(&plan)?;
    output::check().map_err(OutputError::from)?;
    let schema = schema(&manifest, &plan);
    let data = Dataset::open(plan.train.clone(), schema.clone()).map_err(failure)?;
    let (profile, read) = read(args, &data)?;
    let decimals = look_at_texts(&plan.train, &schema)?;
    let widths = Widths { now: row_bytes(&plan), in_budget: widths_in_budget(&args.job, &text) };
    let mut figures = Figures::new(&plan, &schema, &profile, read, &widths);
    figures.warnings = doubts::doubts(&figures, &decimals);
    figures.proposal = advice::propose(&figures, &widths, plan.global_batch_rows);
    if let Some(path) = &args.json {
        write_text(path, &show::json(&figures)?)?;
    }
    if let Some(path) = &args.html {
        write_text(path, &page::page(&figures))?;
    }
    Ok(output::line(show::text(&figures))?)
}

/// Refuses a job whose training rows do not end.
pub(crate) fn check_end(plan: &JobPlan) -> Result<(), Failure> {
    if plan.follow().is_some() {
        return Err(Failure::User(FOLLOWED.to_owned()));
    }
    match plan.stream() {
        Some(_) => Err(Failure::User(STREAM.to_owned())),
        None => Ok(()),
    }
}

/// Refuses a file in a folder that does not exist, before hours of reading.
fn check_place(path: &Path) -> Result<(), Failure> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    match folder.is_none_or(Path::is_dir) && !path.is_dir() {
        true => Ok(()),
        false => Err(Failure::User(format!(
            "{}: the profile cannot be written there: name a file in a folder that exists",
            path.display()
        ))),
    }
}

/// The schema with all that a profile counts: the event times, also if no table needs a clock, and
/// the ids of hashed tables instead of their rows.
fn schema(manifest: &Manifest, plan: &JobPlan) -> Schema {
    let mut schema = plan.schema.clone();
    schema.time = schema.time.or_else(|| manifest.job.spec.data.clock());
    schema.group = None;
    for field in &mut schema.sparse {
        field.hash_buckets = None;
    }
    schema
}

/// Reads the rows in the order of the files.
fn read(args: &ProfileArgs, data: &Dataset) -> Result<(Profile, Read), Failure> {
    let started = Instant::now();
    let limit = args.sample.unwrap_or(u64::MAX);
    let estimated = data.estimated_rows();
    let plan = ReadPlan { chunk_rows: CHUNK_ROWS.min(limit), shuffle: None, epoch: 0, read_ahead_chunks: READ_AHEAD };
    let mut reader = data.reader(plan).map_err(failure)?;
    let mut progress = RowProgress::new(false, estimated.min(limit));
    let mut profile = Profile::new(data.schema());
    let (mut bad_rows, mut is_all) = (0, false);
    for chunk in 0.. {
        let Some(batch) = reader.read(chunk).map_err(failure)? else {
            is_all = true;
            break;
        };
        let left = limit - profile.rows();
        if batch.samples as u64 > left {
            profile.push(&batch.slice(0..left as usize));
            break;
        }
        profile.push(&batch);
        bad_rows += reader.skipped();
        progress.show(profile.rows());
    }
    progress.end();
    let all_rows = if is_all { profile.rows() } else { estimated.max(profile.rows()) };
    let (files, seconds) = (data.files().len() as u64, started.elapsed().as_secs_f64());
    let read = Read { rows: profile.rows(), is_all, all_rows, bad_rows, files, seconds };
    Ok((profile, read))
}

/// Looks at the texts of ids in the first rows of the files. Batches have keys only.
fn look_at_texts(train: &SourceConfig, schema: &Schema) -> Result<Vec<Decimals>, Failure> {
    let mut found = vec![Decimals::default(); schema.sparse.len()];
    if matches!(train.format, Format::Synthetic(_)) {
        return Ok(found);
    }
    let carried = schema.sparse.iter().map(|field| field.name.clone()).collect();
    // Without the split: a share of the rows would have to be counted again.
    let config = SourceConfig { carried, split: None, subset: Subset::All, ..train.clone() };
    let data = Dataset::open(config, schema.clone()).map_err(failure)?;
    let plan = ReadPlan { chunk_rows: decimals::LOOKED_AT, shuffle: None, epoch: 0, read_ahead_chunks: 0 };
    let batch = data.reader(plan).map_err(failure)?.read(0).map_err(failure)?.unwrap_or_default();
    for ((found, field), column) in found.iter_mut().zip(&schema.sparse).zip(&batch.carried) {
        let separator = field.multi_value.as_deref();
        (0..column.rows()).filter_map(|row| column.text(row)).for_each(|cell| found.add(cell, separator));
    }
    Ok(found)
}

/// The bytes of a row of each sparse feature.
pub(crate) fn row_bytes(plan: &JobPlan) -> Vec<RowBytes> {
    let groups = plan.layout.features.iter().filter_map(|place| plan.store.groups.get(place.group));
    groups.map(rectrain_embedding::RowSpec::row_bytes).collect()
}

/// The bytes of a row of each sparse feature if the job had a budget. `None` if it can have none,
/// because a table is a hashed one.
fn widths_in_budget(args: &JobArgs, text: &str) -> Option<Vec<RowBytes>> {
    let mut args = args.clone();
    args.set.extend(ANY_BUDGET.map(str::to_owned));
    job::parse(&args, text).ok().map(|(_, plan)| row_bytes(&plan))
}
