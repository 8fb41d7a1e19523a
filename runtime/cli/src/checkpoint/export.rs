//! Exports a trained model into a folder, for other programs:
//!
//! - `embeddings-G.parquet` and `embeddings-G.safetensors` for each row group `G`: `key`, `linear`
//!   (the first-order weight, if the model has one), `embedding`, and `optimizer_state` if
//!   requested;
//! - `dense.safetensors`: the parameters by their names in the model's layout, with shapes
//!   `[in, out]`;
//! - `model.onnx`: computes the probability from dense features, pooled embeddings and pooled
//!   first-order weights;
//! - `model.json`: the model and its features in their order, each with its row group and pooling.

use std::fs::File;
use std::io::{BufWriter, Seek, Write};
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, FixedSizeListArray, Float32Array, RecordBatch, UInt64Array};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use rectrain_checkpoint::{Checkpoint, CheckpointError, DenseState};
use rectrain_dense::tasks::{BinaryCrossEntropy, Tasks};
use rectrain_dense::{Model, ModelConfig, ParameterLayout};
use rectrain_embedding::{RowSpec, Slot, Store};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;

use super::uses::LeastScore;
use super::{by_slots, scratch, store_failure};
use crate::args::ExportFormat;
use crate::failure::Failure;
use crate::output;

/// The number of rows that are collected as columns before they are written.
const ROWS_PER_FLUSH: usize = 1 << 16;

/// Writes the files of `formats`, or of all formats if it is empty.
pub(super) async fn run(
    checkpoint: &Checkpoint,
    output: &Path,
    formats: &[ExportFormat],
    optimizer_state: bool,
    least: Option<LeastScore>,
) -> Result<(), Failure> {
    let wants = |format| formats.is_empty() || formats.contains(&format);
    std::fs::create_dir_all(output).map_err(|error| failed("make the folder", output, error))?;
    write_description(checkpoint, output)?;
    if wants(ExportFormat::Parquet) || wants(ExportFormat::Safetensors) {
        let formats = (wants(ExportFormat::Parquet), wants(ExportFormat::Safetensors));
        embeddings(checkpoint, output, formats, optimizer_state, least).await?;
    }
    if wants(ExportFormat::Safetensors) || wants(ExportFormat::Onnx) {
        let dense = match checkpoint.dense().await {
            Err(CheckpointError::NotHeld { .. }) => return Ok(()),
            dense => dense?,
        };
        let model = model(checkpoint)?;
        if wants(ExportFormat::Safetensors) {
            let path = output.join("dense.safetensors");
            let bytes = dense_safetensors(model.layout(), &dense, optimizer_state)?;
            std::fs::write(&path, bytes).map_err(|error| failed("write", &path, error))?;
            output::line(path.display())?;
        }
        if wants(ExportFormat::Onnx) {
            let path = output.join("model.onnx");
            let tasks = Tasks::single(BinaryCrossEntropy);
            let bytes = rectrain_dense::export_onnx(&*model, &tasks, &dense.parameters).map_err(other)?;
            std::fs::write(&path, bytes).map_err(|error| failed("write", &path, error))?;
            output::line(path.display())?;
        }
    }
    Ok(())
}

fn failed(action: &str, path: &Path, error: impl std::fmt::Display) -> Failure {
    Failure::Failed(format!("cannot {action} {}: {error}", path.display()))
}

fn other(error: impl std::fmt::Display) -> Failure {
    Failure::Failed(error.to_string())
}

fn write_description(checkpoint: &Checkpoint, output: &Path) -> Result<(), Failure> {
    let manifest = checkpoint.manifest();
    let description = json!({
        "checkpoint": manifest.id,
        "step": manifest.step,
        "model": manifest.identity.section("model"),
        "features": manifest.identity.section("features"),
        "denseFeatures": manifest.identity.section("denseFeatures"),
    });
    let path = output.join("model.json");
    std::fs::write(&path, format!("{description:#}\n")).map_err(|error| failed("write", &path, error))?;
    output::line(path.display())?;
    Ok(())
}

/// The model in the checkpoint's identity.
fn model(checkpoint: &Checkpoint) -> Result<Arc<dyn Model>, Failure> {
    let section = checkpoint.manifest().identity.section("model");
    let section =
        section.ok_or_else(|| Failure::Failed(format!("the identity of {} has no model", checkpoint.name())))?;
    let config: ModelConfig = serde_json::from_value(section.clone()).map_err(|error| {
        Failure::Failed(format!("{}: the model in its identity cannot be read: {error}", checkpoint.name()))
    })?;
    config.build().map_err(other)
}

fn dense_safetensors(layout: &ParameterLayout, dense: &DenseState, optimizer_state: bool) -> Result<Vec<u8>, Failure> {
    let total = layout.total();
    if total != dense.parameters.len() {
        return Err(Failure::Failed(format!(
            "the checkpoint holds {} dense parameters and its model has {total}",
            dense.parameters.len()
        )));
    }
    let mut vectors = vec![(String::new(), &dense.parameters[..])];
    if optimizer_state {
        let states = dense.state.chunks_exact(total.max(1));
        vectors.extend(dense.state_names.iter().map(|name| format!("optimizer.{name}.")).zip(states));
    }
    let bytes: Vec<(String, [usize; 2], Vec<u8>)> = vectors
        .iter()
        .flat_map(|(prefix, values)| {
            layout.entries().iter().map(move |entry| {
                let bytes = values[entry.range()].iter().flat_map(|value| value.to_le_bytes()).collect();
                (format!("{prefix}{}", entry.name), entry.shape, bytes)
            })
        })
        .collect();
    let tensors: Result<Vec<_>, _> = bytes
        .iter()
        .map(|(name, shape, bytes)| TensorView::new(Dtype::F32, shape.to_vec(), bytes).map(|view| (name, view)))
        .collect();
    safetensors::serialize(tensors.map_err(other)?, None).map_err(other)
}

async fn embeddings(
    checkpoint: &Checkpoint,
    output: &Path,
    (parquet, safetensors): (bool, bool),
    optimizer_state: bool,
    mut least: Option<LeastScore>,
) -> Result<(), Failure> {
    let store = match scratch(checkpoint).await {
        Err(Failure::User(_)) => return Ok(()),
        store => store?,
    };
    let mut groups = Vec::new();
    for (group, spec) in store.config().groups.iter().enumerate() {
        let columns = Columns::new(spec, optimizer_state);
        let name = |kind: &str| output.join(format!("embeddings-{group}.{kind}"));
        let parquet = parquet.then(|| ParquetFile::create(&name("parquet"), &columns)).transpose()?;
        let safetensors = safetensors.then(|| SafetensorsFile::create(&name("safetensors"))).transpose()?;
        groups.push(GroupFiles { columns, parquet, safetensors });
    }
    by_slots(checkpoint, &store, async |range| {
        for slot in range {
            export_slot(&store, Slot(slot), least.as_mut(), &mut groups)?;
        }
        Ok(())
    })
    .await?;
    groups.into_iter().try_for_each(GroupFiles::finish)?;
    if let Some(least) = least {
        output::line(least.report())?;
    }
    Ok(())
}

fn export_slot(
    store: &Store,
    slot: Slot,
    mut least: Option<&mut LeastScore>,
    groups: &mut [GroupFiles],
) -> Result<(), Failure> {
    let words = if least.is_some() { store.row_words(slot).map_err(store_failure)? } else { Vec::new() };
    let (mut words, mut result) = (words.into_iter(), Ok(()));
    store
        .for_each_row(slot, |group, key, values, state| {
            if let (Some(least), Some((_, word))) = (&mut least, words.next())
                && !least.keeps(group, word)
            {
                return;
            }
            let group = &mut groups[usize::from(group.0)];
            group.columns.push(key.0, values, state);
            if group.columns.keys.len() >= ROWS_PER_FLUSH && result.is_ok() {
                result = group.flush();
            }
        })
        .map_err(store_failure)?;
    result
}

/// The files of one row group.
struct GroupFiles {
    columns: Columns,
    parquet: Option<ParquetFile>,
    safetensors: Option<SafetensorsFile>,
}

impl GroupFiles {
    fn flush(&mut self) -> Result<(), Failure> {
        if let Some(file) = &mut self.safetensors {
            file.write(&self.columns)?;
        }
        let batch = self.columns.take();
        if let Some(file) = &mut self.parquet {
            file.write(&batch)?;
        }
        Ok(())
    }

    fn finish(mut self) -> Result<(), Failure> {
        self.flush()?;
        if let Some(file) = self.parquet {
            file.finish()?;
        }
        if let Some(file) = self.safetensors {
            file.finish(&self.columns)?;
        }
        Ok(())
    }
}

/// Rows of one group, by column.
struct Columns {
    /// True if column 0 of a row is a first-order weight.
    has_linear: bool,
    /// Values per embedding.
    dim: usize,
    /// Values of optimizer state per row; 0 if they are not exported.
    state_len: usize,
    keys: Vec<u64>,
    linear: Vec<f32>,
    embeddings: Vec<f32>,
    state: Vec<f32>,
}

impl Columns {
    fn new(spec: &RowSpec, optimizer_state: bool) -> Self {
        let has_linear = spec.zero_columns == 1;
        Self {
            has_linear,
            dim: spec.dim - usize::from(has_linear),
            state_len: if optimizer_state { spec.state_len() } else { 0 },
            keys: Vec::new(),
            linear: Vec::new(),
            embeddings: Vec::new(),
            state: Vec::new(),
        }
    }

    fn push(&mut self, key: u64, values: &[f32], state: &[f32]) {
        let (linear, embedding) = values.split_at(usize::from(self.has_linear));
        self.keys.push(key);
        self.linear.extend_from_slice(linear);
        self.embeddings.extend_from_slice(embedding);
        self.state.extend_from_slice(&state[..self.state_len]);
    }

    fn fields(&self) -> Vec<Field> {
        let mut fields = vec![Field::new("key", DataType::UInt64, false)];
        if self.has_linear {
            fields.push(Field::new("linear", DataType::Float32, false));
        }
        if self.dim > 0 {
            fields.push(Field::new("embedding", list_of(self.dim), false));
        }
        if self.state_len > 0 {
            fields.push(Field::new("optimizer_state", list_of(self.state_len), false));
        }
        fields
    }

    /// Takes the rows out as arrays, in the order of the fields.
    fn take(&mut self) -> Vec<ArrayRef> {
        let mut arrays: Vec<ArrayRef> = vec![Arc::new(UInt64Array::from(std::mem::take(&mut self.keys)))];
        if self.has_linear {
            arrays.push(Arc::new(Float32Array::from(std::mem::take(&mut self.linear))));
        }
        if self.dim > 0 {
            arrays.push(lists(std::mem::take(&mut self.embeddings), self.dim));
        }
        if self.state_len > 0 {
            arrays.push(lists(std::mem::take(&mut self.state), self.state_len));
        }
        arrays
    }
}

fn item() -> Arc<Field> {
    Arc::new(Field::new("item", DataType::Float32, false))
}

pub(super) fn list_of(length: usize) -> DataType {
    DataType::FixedSizeList(item(), length as i32)
}

pub(super) fn lists(values: Vec<f32>, length: usize) -> ArrayRef {
    Arc::new(FixedSizeListArray::new(item(), length as i32, Arc::new(Float32Array::from(values)), None))
}

struct ParquetFile {
    path: std::path::PathBuf,
    schema: Arc<Schema>,
    writer: ArrowWriter<File>,
}

impl ParquetFile {
    fn create(path: &Path, columns: &Columns) -> Result<Self, Failure> {
        let schema = Arc::new(Schema::new(columns.fields()));
        let file = File::create(path).map_err(|error| failed("make", path, error))?;
        let properties = WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default())).build();
        let writer = ArrowWriter::try_new(file, Arc::clone(&schema), Some(properties))
            .map_err(|error| failed("write", path, error))?;
        Ok(Self { path: path.to_owned(), schema, writer })
    }

    fn write(&mut self, columns: &[ArrayRef]) -> Result<(), Failure> {
        let batch = RecordBatch::try_new(Arc::clone(&self.schema), columns.to_vec()).map_err(other)?;
        self.writer.write(&batch).map_err(|error| failed("write", &self.path, error))
    }

    fn finish(self) -> Result<(), Failure> {
        self.writer.close().map_err(|error| failed("write", &self.path, error))?;
        output::line(self.path.display())?;
        Ok(())
    }
}

/// Writes a safetensors file whose number of rows is known only at the end. Each tensor goes into
/// its own temporary file first.
struct SafetensorsFile {
    path: std::path::PathBuf,
    rows: usize,
    /// The temporary files of `key`, `linear`, `embedding` and `optimizer_state`.
    parts: [BufWriter<File>; 4],
}

impl SafetensorsFile {
    fn create(path: &Path) -> Result<Self, Failure> {
        let folder = path.parent().unwrap_or(Path::new("."));
        let part = || tempfile::tempfile_in(folder).map(BufWriter::new).map_err(|error| failed("make", path, error));
        Ok(Self { path: path.to_owned(), rows: 0, parts: [part()?, part()?, part()?, part()?] })
    }

    fn write(&mut self, columns: &Columns) -> Result<(), Failure> {
        self.rows += columns.keys.len();
        let keys = columns.keys.iter().flat_map(|key| key.to_le_bytes()).collect::<Vec<u8>>();
        let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let all = [keys, floats(&columns.linear), floats(&columns.embeddings), floats(&columns.state)];
        for (part, bytes) in self.parts.iter_mut().zip(all) {
            part.write_all(&bytes).map_err(|error| failed("write", &self.path, error))?;
        }
        Ok(())
    }

    /// Writes the header, then the tensors in its order.
    fn finish(self, columns: &Columns) -> Result<(), Failure> {
        let Self { path, rows, parts } = self;
        let failed = |error: std::io::Error| failed("write", &path, error);
        let shapes = [
            ("key", "U64", vec![rows]),
            ("linear", "F32", vec![if columns.has_linear { rows } else { 0 }]),
            ("embedding", "F32", vec![rows, columns.dim]),
            ("optimizer_state", "F32", vec![rows, columns.state_len]),
        ];
        let mut header = serde_json::Map::new();
        let (mut offset, mut present) = (0_u64, Vec::new());
        for ((name, dtype, shape), part) in shapes.into_iter().zip(parts) {
            let mut file = part.into_inner().map_err(|error| failed(error.into_error()))?;
            let length = file.stream_position().map_err(failed)?;
            if length == 0 && name != "key" {
                continue;
            }
            header.insert(
                name.to_owned(),
                json!({ "dtype": dtype, "shape": shape, "data_offsets": [offset, offset + length] }),
            );
            offset += length;
            present.push(file);
        }
        let mut header = serde_json::to_vec(&header).map_err(other)?;
        // The format wants tensors to start at a multiple of 8 bytes.
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut output = BufWriter::new(File::create(&path).map_err(failed)?);
        output.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
        output.write_all(&header).map_err(failed)?;
        for mut file in present {
            file.rewind().map_err(failed)?;
            std::io::copy(&mut file, &mut output).map_err(failed)?;
        }
        output.into_inner().map_err(|error| failed(error.into_error()))?;
        output::line(path.display())?;
        Ok(())
    }
}
