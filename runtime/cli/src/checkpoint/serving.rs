//! `rectrain checkpoint export --for serving`

use std::num::NonZeroU32;
use std::path::Path;

use rectrain_checkpoint::Checkpoint;
use rectrain_embedding::LeastCount;
use rectrain_serving::{ExportType, Model, export};

use super::uses::LeastScore;
use crate::failure::Failure;
use crate::human::thousands;
use crate::output::line;

/// Exports a checkpoint for programs that predict, and prints the files.
pub(super) async fn run(
    checkpoint: &Checkpoint,
    output: &Path,
    values: ExportType,
    least: Option<LeastScore>,
    min_count: Option<u32>,
) -> Result<(), Failure> {
    let least_count = match min_count.and_then(NonZeroU32::new) {
        Some(count) => Some(least_count(checkpoint, count).await?),
        None => None,
    };
    let mut model = Model::thin_of_checkpoint(checkpoint, least_count).await?;
    if let Some(mut least) = least {
        model.keep_rows(&least.kept_rows(checkpoint).await?);
        line(least.report())?;
    }
    let exported = export(&model, output, values)?;
    for file in &exported.files {
        line(output.join(file).display())?;
    }
    line(format_args!(
        "{} rows as {}, {} bytes; the largest error of a value is {:e}; digest {}",
        thousands(exported.rows),
        values.name(),
        thousands(exported.bytes),
        exported.largest_error,
        exported.digest
    ))?;
    Ok(())
}

/// The least number of examples, if rows of the checkpoint count them.
async fn least_count(checkpoint: &Checkpoint, count: NonZeroU32) -> Result<LeastCount, Failure> {
    if checkpoint.store_config().await?.groups.iter().any(LeastCount::is_known) {
        return Ok(LeastCount(count));
    }
    Err(Failure::User(format!(
        "--min-count: the rows of {} do not count examples; only a job with spec.features.memory and the eviction policy lfu counts them, so leave out --min-count",
        checkpoint.name()
    )))
}
