//! The format of files with rows for a trained model.

use rectrain_data::{FileFormat, Format};
use rectrain_kinds::DataFormat;
use rectrain_serving::Description;

/// Text has the format of the training files, if those were text.
pub(crate) fn format(paths: &[String], description: &Description) -> Format {
    let is_parquet = |path: &String| DataFormat::of_path(path) == Some(DataFormat::Parquet);
    match &description.csv {
        Some(format) if !paths.iter().any(is_parquet) => Format::Files(FileFormat::Csv(format.clone())),
        _ => Format::Auto,
    }
}
