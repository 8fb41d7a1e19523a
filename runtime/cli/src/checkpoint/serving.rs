//! `rectrain checkpoint export --for serving`

use std::path::Path;

use rectrain_checkpoint::Checkpoint;
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
) -> Result<(), Failure> {
    let mut model = Model::of_checkpoint(checkpoint).await?;
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
