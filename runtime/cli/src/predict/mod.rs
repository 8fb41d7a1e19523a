//! `rectrain predict`: the probabilities of the rows of files, by a trained model.

mod report;
mod table;

use std::collections::BTreeSet;
use std::time::Instant;

use rectrain_data::{BadRows, Batch, Dataset, ReadPlan, SourceConfig};
use rectrain_dense::metrics::Evaluation;
use rectrain_serving::{Description, Predictor, PredictorOptions, unseen};

use self::report::Report;
use self::table::{Output, PROBABILITY};
use crate::args::{BadRowsChoice, PredictArgs};
use crate::failure::Failure;
use crate::human::thousands;
use crate::outlook::failure;
use crate::row_files::source;
use crate::row_progress::RowProgress;
use crate::{checkpoint, output, trained};

/// The standard output as an `--output`.
const STANDARD_OUTPUT: &str = "-";
/// Batches that are parsed ahead.
const READ_AHEAD: usize = 2;

pub(crate) fn run(args: &PredictArgs) -> Result<(), Failure> {
    check(args)?;
    let started = Instant::now();
    let model = trained::load(&args.model, &args.options)?;
    note(args, &format!("{}: step {}, {} rows", model.name, model.step, thousands(model.rows())));
    let dataset = open(args, &model.description)?;
    if dataset.files().contains(&args.output) {
        return Err(Failure::User(format!("--output {}: it is one of the input files; name another", args.output)));
    }
    let options = PredictorOptions { threads: args.threads, precision: args.precision };
    let mut predictor = Predictor::new(model, options)?;
    let mut output = Output::create(&args.output, &args.ids)?;
    let mut totals = Totals::default();
    predict(args, &dataset, &mut predictor, |batch, probabilities| output.write(batch, probabilities), &mut totals)?;
    output.finish()?;
    let report = Report::new(predictor.model(), totals, started.elapsed());
    if args.json { report.print_json() } else { report.print(args.output == STANDARD_OUTPUT) }
}

/// The results over all batches.
#[derive(Default)]
pub(crate) struct Totals {
    pub(crate) rows: u64,
    /// Bad rows that were left out.
    pub(crate) skipped: u64,
    /// The rows with labels.
    pub(crate) evaluation: Evaluation,
    /// By sparse feature.
    pub(crate) look_ups: Vec<unseen::LookUps>,
}

fn check(args: &PredictArgs) -> Result<(), Failure> {
    if args.json && args.output == STANDARD_OUTPUT {
        return Err(Failure::User("--json and --output - both print to standard output: use one of them".to_owned()));
    }
    let mut seen = BTreeSet::from([PROBABILITY]);
    match args.ids.iter().find(|column| !seen.insert(column.as_str())) {
        Some(column) => {
            Err(Failure::User(format!("--id {column}: the output already has a column of this name; leave it out")))
        }
        None => Ok(()),
    }
}

fn open(args: &PredictArgs, description: &Description) -> Result<Dataset, Failure> {
    let bad_rows = match args.bad_rows {
        BadRowsChoice::Fail => BadRows::Fail,
        BadRowsChoice::Skip => BadRows::Skip { limit: args.bad_rows_limit },
    };
    let config = SourceConfig {
        bad_rows,
        carried: args.ids.clone(),
        label_is_optional: true,
        ..source(&args.input, description, checkpoint::store_options(&args.options)?)
    };
    Dataset::open(config, description.schema.clone()).map_err(failure)
}

/// Predicts all rows, a batch at a time. While one batch is predicted, the next ones are read.
fn predict(
    args: &PredictArgs,
    dataset: &Dataset,
    predictor: &mut Predictor,
    mut write: impl FnMut(&Batch, &[f32]) -> Result<(), Failure>,
    totals: &mut Totals,
) -> Result<(), Failure> {
    let chunk_rows = u64::from(args.batch_rows);
    let plan = ReadPlan { chunk_rows, shuffle: None, epoch: 0, read_ahead_chunks: READ_AHEAD };
    let mut reader = dataset.reader(plan).map_err(failure)?;
    let mut progress = RowProgress::new(args.json, dataset.estimated_rows());
    for chunk in 0.. {
        let Some(batch) = reader.read(chunk).map_err(failure)? else { break };
        let predictions = predictor.predict(&batch)?;
        write(&batch, &predictions.probabilities)?;
        unseen::add(&mut totals.look_ups, &predictions.look_ups);
        for (probability, label) in predictions.probabilities.iter().zip(&batch.labels) {
            if !label.is_nan() {
                totals.evaluation.push(&[*probability], &[*label]);
            }
        }
        totals.rows += batch.samples as u64;
        totals.skipped += reader.skipped();
        progress.show(totals.rows);
    }
    progress.end();
    Ok(())
}

fn note(args: &PredictArgs, text: &str) {
    if !args.json {
        output::say(text);
    }
}
