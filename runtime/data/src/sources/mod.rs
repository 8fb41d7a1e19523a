//! The sources of rows, one file each. `docs/development/add-a-source-of-rows.md` says how to add
//! one.

mod csv;
mod kafka;
#[cfg(test)]
pub(crate) mod memory;
mod parquet;
mod synthetic;

use std::sync::Arc;

use rectrain_kinds::{DataFormat, FileFormat, TimeBound};

use crate::config::{Format, SourceConfig};
use crate::error::DataError;
use crate::pace;
use crate::schema::Encoder;
use crate::source::Source;
use crate::storage::SourceFile;

use self::csv::CsvSource;
use self::kafka::KafkaSource;
use self::parquet::ParquetSource;
use self::synthetic::SyntheticSource;

/// The context in which a source is opened.
pub(crate) struct Opening<'a> {
    /// The settings.
    pub(crate) config: &'a SourceConfig,
    /// Finds the files of the paths, in reading order. Each exists, and at least one has a byte.
    pub(crate) find_files: &'a dyn Fn() -> Result<Vec<SourceFile>, DataError>,
    /// The columns to read.
    pub(crate) encoder: &'a Arc<Encoder>,
    /// The column and the moment of a split by time.
    pub(crate) time: Option<(&'a str, &'a TimeBound)>,
}

/// Opens the source of a configuration: one line for each source.
pub(crate) fn open(opening: &Opening<'_>) -> Result<Box<dyn Source>, DataError> {
    match &opening.config.format {
        Format::Auto => open_by_name(opening),
        Format::Files(FileFormat::Csv(format)) => Ok(Box::new(CsvSource::open(opening, format)?)),
        Format::Files(FileFormat::Parquet) => Ok(Box::new(ParquetSource::open(opening)?)),
        Format::Synthetic(config) => Ok(Box::new(SyntheticSource::open(opening, config)?)),
        Format::Kafka(config) => Ok(Box::new(KafkaSource::open(opening, config)?)),
        Format::Follow(..) => {
            Err(DataError::config("spec.data.train.follow", "these files are read one by one, as they come"))
        }
    }
}

/// Opens files by their names, as text or as Parquet.
fn open_by_name(opening: &Opening<'_>) -> Result<Box<dyn Source>, DataError> {
    let files = (opening.find_files)()?;
    let (mut text, mut parquet) = (None, None);
    for file in &files {
        match DataFormat::of_path(&file.name) {
            Some(DataFormat::Parquet | DataFormat::Csv | DataFormat::Tsv) if file.size == 0 => {}
            Some(DataFormat::Parquet) => parquet = parquet.or(Some(&file.name)),
            Some(DataFormat::Csv | DataFormat::Tsv) => text = text.or(Some(&file.name)),
            Some(DataFormat::Auto) | None => {
                let name = &file.name;
                let problem =
                    format!("the name of {name} does not say its format (.csv, .tsv, .parquet); set the format");
                return Err(DataError::config("format", problem));
            }
        }
    }
    match (text, parquet) {
        (Some(text), Some(parquet)) => {
            let problem = format!("{text} is text and {parquet} is Parquet; use a source for each");
            Err(DataError::config("paths", problem))
        }
        (None, Some(_)) => {
            let is_parquet = |file: &SourceFile| DataFormat::of_path(&file.name) == Some(DataFormat::Parquet);
            let files = files.into_iter().filter(is_parquet).collect();
            Ok(Box::new(ParquetSource::over(files, opening)?))
        }
        _ => Ok(Box::new(CsvSource::by_names(files, opening)?)),
    }
}

/// Opens files, at most 16 at a time. Returns the results in the order of the files, or the first
/// error in that order.
fn open_each<T: Send>(
    files: Vec<SourceFile>,
    open: impl Fn(SourceFile) -> Result<T, DataError> + Sync,
) -> Result<Vec<T>, DataError> {
    let open = |file| {
        let opened = open(file)?;
        pace::pass(1);
        Ok(opened)
    };
    let mut opened = Vec::with_capacity(files.len());
    let mut files = files.into_iter();
    loop {
        let some: Vec<SourceFile> = files.by_ref().take(16).collect();
        match some.len() {
            0 => return Ok(opened),
            1 => opened.extend(some.into_iter().map(open).collect::<Result<Vec<T>, DataError>>()?),
            _ => {
                let results: Vec<_> = std::thread::scope(|scope| {
                    let threads: Vec<_> = some.into_iter().map(|file| scope.spawn(|| open(file))).collect();
                    threads.into_iter().map(|thread| thread.join()).collect()
                });
                for result in results {
                    opened.push(result.map_err(|_| DataError::Stopped)??);
                }
            }
        }
    }
}
