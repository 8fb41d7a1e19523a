//! `rectrain data placement`: how evenly parameter servers would share the look-ups of a job,
//! before anything is trained. ShadowSync profiles the cost of look-ups and places by bin packing
//! (Zheng et al. 2020, section 3.1). Fields that are placed whole are compared with slots.

mod balance;
mod costs;
mod show;

use rectrain_data::{Batch, Dataset, ReadPlan};
use rectrain_protocol::plan::JobPlan;

use self::balance::{Halves, Read, Report};
use self::costs::Costs;
use crate::args::PlacementArgs;
use crate::failure::Failure;
use crate::outlook::failure;
use crate::output::OutputError;
use crate::profile::check_end;
use crate::row_progress::RowProgress;
use crate::{input, job, output};

/// Global batches that are parsed ahead.
const READ_AHEAD: usize = 2;

pub(crate) fn run(args: &PlacementArgs) -> Result<(), Failure> {
    let text = input::read(&args.job.manifest, "manifest")?;
    let (_, plan) = job::parse(&args.job, &text)?;
    check_end(&plan)?;
    output::check().map_err(OutputError::from)?;
    let (halves, read) = read(args.sample, &plan)?;
    let names: Vec<String> = plan.schema.sparse.iter().map(|field| field.name.clone()).collect();
    let report = Report::new(plan.name.clone(), read, &names, &halves, &args.servers);
    if args.json {
        let json = serde_json::to_string_pretty(&report).map_err(|error| Failure::Failed(error.to_string()))?;
        return Ok(output::line(json)?);
    }
    Ok(output::line(show::text(&report))?)
}

/// Counts the look-ups of the first `limit` rows, in the order of the files. Each global batch is
/// cut into pieces as in training.
fn read(limit: u64, plan: &JobPlan) -> Result<(Halves, Read), Failure> {
    let data = Dataset::open(plan.train.clone(), plan.schema.clone()).map_err(failure)?;
    let chunk_rows = plan.global_batch_rows;
    let reading = ReadPlan { chunk_rows, shuffle: None, epoch: 0, read_ahead_chunks: READ_AHEAD };
    let mut reader = data.reader(reading).map_err(failure)?;
    let mut progress = RowProgress::new(false, data.estimated_rows().min(limit));
    let costs = Costs::new(plan.layout.features.len(), plan.store.slots);
    let mut halves = Halves { deciding: costs.clone(), measuring: costs };
    let (mut rows, mut is_all) = (0, false);
    for chunk in 0.. {
        let Some(batch) = reader.read(chunk).map_err(failure)? else {
            is_all = true;
            break;
        };
        let taken = (limit - rows).min(batch.samples as u64);
        push(&batch, taken as usize, plan, &mut halves);
        rows += taken;
        progress.show(rows);
        if rows == limit {
            break;
        }
    }
    progress.end();
    Ok((halves, Read { rows, is_all, piece_rows: plan.local_batch_rows.min(chunk_rows) }))
}

/// Counts the first `samples` rows of a global batch. Every second piece goes to each half.
fn push(batch: &Batch, samples: usize, plan: &JobPlan, halves: &mut Halves) {
    for rows in (0..plan.pieces()).map(|piece| plan.rows_of_piece(samples, piece)).filter(|rows| !rows.is_empty()) {
        let Halves { deciding, measuring } = &mut *halves;
        let half = if deciding.pieces <= measuring.pieces { deciding } else { measuring };
        half.push(&batch.slice(rows), &plan.layout);
    }
}
