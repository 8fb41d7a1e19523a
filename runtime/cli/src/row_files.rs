//! Files with rows for a trained model. They are read as its training files were.

use std::collections::BTreeMap;

use rectrain_data::{Batch, Dataset, FileFormat, Format, ReadPlan, SourceConfig};
use rectrain_kinds::DataFormat;
use rectrain_serving::Description;

use crate::failure::Failure;
use crate::outlook::failure;

/// Rows of a batch.
const BATCH_ROWS: u64 = 4096;
/// Batches that are parsed ahead.
const READ_AHEAD: usize = 2;

/// The source of the rows in `paths`, with the options of their store.
pub(crate) fn source(
    paths: &[String],
    description: &Description,
    storage_options: BTreeMap<String, String>,
) -> SourceConfig {
    SourceConfig {
        paths: paths.to_vec(),
        format: format(paths, description),
        null_values: description.null_values.clone(),
        storage_options,
        ..SourceConfig::default()
    }
}

/// Text has the format of the training files, if those were text.
fn format(paths: &[String], description: &Description) -> Format {
    let is_parquet = |path: &String| DataFormat::of_path(path) == Some(DataFormat::Parquet);
    match &description.csv {
        Some(format) if !paths.iter().any(is_parquet) => Format::Files(FileFormat::Csv(format.clone())),
        _ => Format::Auto,
    }
}

/// Visits all rows in their order, a batch at a time.
pub(crate) fn each_batch(
    dataset: &Dataset,
    mut visit: impl FnMut(Batch) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let plan = ReadPlan { chunk_rows: BATCH_ROWS, shuffle: None, epoch: 0, read_ahead_chunks: READ_AHEAD };
    let mut reader = dataset.reader(plan).map_err(failure)?;
    for chunk in 0.. {
        let Some(batch) = reader.read(chunk).map_err(failure)? else { break };
        visit(batch)?;
    }
    Ok(())
}
