//! The file of predictions. It appears under its name once it is complete.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::sync::Arc;

use arrow_array::{ArrayRef, Float32Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use rectrain_data::{Batch, TextColumn};

use super::STANDARD_OUTPUT;
use crate::failure::Failure;
use crate::output;
use crate::partial::{Partial, failed};

/// The column of the predictions.
pub(super) const PROBABILITY: &str = "probability";
/// Rows of a row group of Parquet. Its columns are in memory until it is written.
const GROUP_ROWS: usize = 1 << 17;

/// See the module documentation.
pub(super) struct Output {
    writer: Writer,
    file: Option<Partial>,
    name: String,
}

enum Writer {
    Csv(Box<dyn Write>),
    Parquet(Box<ParquetWriter>),
}

struct ParquetWriter {
    schema: Arc<Schema>,
    writer: ArrowWriter<File>,
}

impl Output {
    /// Opens an output with these columns before the predictions.
    pub(super) fn create(name: &str, ids: &[String]) -> Result<Self, Failure> {
        let (writer, file) = match name.to_ascii_lowercase().rsplit_once('.') {
            _ if name == STANDARD_OUTPUT => (Writer::Csv(Box::new(BufWriter::new(output::Results))), None),
            Some((_, "csv")) => {
                let (partial, file) = Partial::create(name)?;
                (Writer::Csv(Box::new(BufWriter::new(file))), Some(partial))
            }
            Some((_, "parquet")) => {
                let (partial, file) = Partial::create(name)?;
                let writer = ParquetWriter::create(file, ids).map_err(|error| failed(name, error))?;
                (Writer::Parquet(Box::new(writer)), Some(partial))
            }
            _ => {
                let expected = "expected a name that ends in .parquet or .csv, or - for standard output";
                return Err(Failure::User(format!("--output {name}: {expected}")));
            }
        };
        let mut output = Self { writer, file, name: name.to_owned() };
        if let Writer::Csv(writer) = &mut output.writer {
            let header = ids.iter().map(String::as_str).chain([PROBABILITY]);
            write_line(writer, header.map(str::as_bytes)).map_err(|error| failed(name, error))?;
        }
        Ok(output)
    }

    /// Appends the rows of a batch.
    pub(super) fn write(&mut self, batch: &Batch, probabilities: &[f32]) -> Result<(), Failure> {
        let name = &self.name;
        match &mut self.writer {
            Writer::Csv(writer) => {
                write_csv(writer, &batch.carried, probabilities).map_err(|error| failed(name, error))
            }
            Writer::Parquet(writer) => writer.write(&batch.carried, probabilities).map_err(|error| failed(name, error)),
        }
    }

    /// Completes the file.
    pub(super) fn finish(self) -> Result<(), Failure> {
        let Self { writer, file, name } = self;
        match writer {
            Writer::Csv(mut writer) => writer.flush().map_err(|error| failed(&name, error))?,
            Writer::Parquet(writer) => drop(writer.writer.close().map_err(|error| failed(&name, error))?),
        }
        file.map_or(Ok(()), |file| file.finish()).map_err(|error| failed(&name, error))
    }
}

fn write_csv(writer: &mut dyn Write, carried: &[TextColumn], probabilities: &[f32]) -> std::io::Result<()> {
    for (row, probability) in probabilities.iter().enumerate() {
        let probability = probability.to_string();
        let cells = carried.iter().map(|column| column.text(row).unwrap_or_default());
        write_line(writer, cells.chain([probability.as_bytes()]))?;
    }
    Ok(())
}

fn write_line<'a>(writer: &mut dyn Write, cells: impl Iterator<Item = &'a [u8]>) -> std::io::Result<()> {
    for (place, cell) in cells.enumerate() {
        if place > 0 {
            writer.write_all(b",")?;
        }
        write_cell(writer, cell)?;
    }
    writer.write_all(b"\n")
}

/// Writes a cell, in quotes where RFC 4180 needs them.
fn write_cell(writer: &mut dyn Write, cell: &[u8]) -> std::io::Result<()> {
    if !cell.iter().any(|byte| matches!(byte, b',' | b'"' | b'\n' | b'\r')) {
        return writer.write_all(cell);
    }
    writer.write_all(b"\"")?;
    for (place, piece) in cell.split(|byte| *byte == b'"').enumerate() {
        if place > 0 {
            writer.write_all(b"\"\"")?;
        }
        writer.write_all(piece)?;
    }
    writer.write_all(b"\"")
}

impl ParquetWriter {
    fn create(file: File, ids: &[String]) -> Result<Self, ParquetError> {
        let mut fields: Vec<Field> = ids.iter().map(|id| Field::new(id, DataType::Utf8, true)).collect();
        fields.push(Field::new(PROBABILITY, DataType::Float32, false));
        let schema = Arc::new(Schema::new(fields));
        let properties = WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default())).build();
        let writer = ArrowWriter::try_new(file, Arc::clone(&schema), Some(properties))?;
        Ok(Self { schema, writer })
    }

    fn write(&mut self, carried: &[TextColumn], probabilities: &[f32]) -> Result<(), ParquetError> {
        let texts = |column: &TextColumn| -> ArrayRef {
            let text = |row| column.text(row).map(String::from_utf8_lossy);
            Arc::new((0..column.rows()).map(text).collect::<StringArray>())
        };
        let mut columns: Vec<ArrayRef> = carried.iter().map(texts).collect();
        columns.push(Arc::new(Float32Array::from(probabilities.to_vec())));
        self.writer.write(&RecordBatch::try_new(Arc::clone(&self.schema), columns)?)?;
        if self.writer.in_progress_rows() >= GROUP_ROWS {
            self.writer.flush()?;
        }
        Ok(())
    }
}
