//! `rectrain checkpoint export --embeddings`: the ids of one feature with their embeddings, such as
//! for an index of nearest neighbours. Rows have keys, which are hashes of ids, and no ids. So the
//! ids come from files: a list of items, or the training data.

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use rectrain_checkpoint::Checkpoint;
use rectrain_data::{Batch, Dataset, MissingValue, Schema as Columns, SourceConfig, SparseField};
use rectrain_serving::{Description, Model};

use super::export::{list_of, lists};
use crate::failure::Failure;
use crate::human::thousands;
use crate::outlook::failure;
use crate::output;
use crate::partial::{Partial, failed};
use crate::row_files::{each_batch, source};

/// Ids that are collected before they are written.
const IDS_A_GROUP: usize = 1 << 16;

/// The ids of a feature, and the options of their store.
pub(super) struct Ids {
    pub(super) feature: String,
    /// Files with one id a row, in a column with the feature's name.
    pub(super) files: Vec<String>,
    pub(super) options: BTreeMap<String, String>,
}

/// Writes the embeddings of the ids that have a row, and prints their file.
pub(super) async fn run(checkpoint: &Checkpoint, ids: Ids, output: &Path) -> Result<(), Failure> {
    let model = Model::of_checkpoint(checkpoint).await?;
    std::fs::create_dir_all(output).map_err(|error| failed(&output.display().to_string(), error))?;
    let path = output.join(format!("embeddings-{}.parquet", file_name(&ids.feature))).display().to_string();
    // Files are read by threads that wait, so not in an asynchronous task.
    let written = tokio::task::spawn_blocking(move || write(&model, &ids, &path));
    written.await.map_err(|error| Failure::Failed(format!("the export ended unexpectedly: {error}")))?
}

/// A name that is one part of a path.
fn file_name(feature: &str) -> String {
    let is_plain = |character: char| character.is_alphanumeric() || matches!(character, '-' | '_' | '.');
    feature.chars().map(|character| if is_plain(character) { character } else { '_' }).collect()
}

fn write(model: &Model, ids: &Ids, path: &str) -> Result<(), Failure> {
    let vectors = Vectors::of(model, &ids.feature)?;
    let dataset = open(&model.description, ids, vectors.field.clone())?;
    let mut file = VectorFile::create(path, vectors.dim)?;
    let mut found = Found::default();
    each_batch(&dataset, |batch| vectors.add(&batch, &mut found, &mut file))?;
    let written = file.finish()?;
    output::line(path)?;
    output::line(format_args!(
        "{} ids with embeddings of {} values; {} cells have ids without a row, and are left out",
        thousands(written),
        vectors.dim,
        thousands(found.without_row)
    ))?;
    Ok(())
}

fn open(description: &Description, ids: &Ids, field: SparseField) -> Result<Dataset, Failure> {
    let columns = Columns {
        sparse: vec![field],
        dense: Vec::new(),
        label: description.schema.label.clone(),
        group: None,
        time: None,
    };
    let config = SourceConfig {
        carried: vec![ids.feature.clone()],
        label_is_optional: true,
        ..source(&ids.files, description, ids.options.clone())
    };
    Dataset::open(config, columns).map_err(failure)
}

/// The rows of one feature.
struct Vectors<'m> {
    model: &'m Model,
    /// Reads one id a cell, and none from a missing one.
    field: SparseField,
    group: usize,
    /// Values of a row before its embedding: the first-order weight, if there is one.
    weights: usize,
    /// Values of an embedding.
    dim: usize,
}

/// The cells so far.
#[derive(Default)]
struct Found {
    /// The ids that were written, as keys. Ids of a hashed table share keys, and count by hashes of
    /// their texts.
    seen: HashSet<u64>,
    without_row: u64,
}

impl<'m> Vectors<'m> {
    fn of(model: &'m Model, feature: &str) -> Result<Self, Failure> {
        let Description { schema, layout, store, .. } = &model.description;
        let Some(place) = schema.sparse.iter().position(|field| field.name == feature) else {
            let names: Vec<&str> = schema.sparse.iter().map(|field| field.name.as_str()).collect();
            let problem = format!("the model has no sparse feature of this name; it has {}", names.join(", "));
            return Err(Failure::User(format!("--embeddings {feature}: {problem}")));
        };
        let group = layout.features[place].group;
        let weights = store.groups[group].zero_columns;
        let dim = store.groups[group].dim - weights;
        if dim == 0 {
            let problem = "the rows of this model are first-order weights, and have no embeddings";
            return Err(Failure::User(format!("--embeddings {feature}: {problem}")));
        }
        let field = SparseField { multi_value: None, missing: MissingValue::Skip, ..schema.sparse[place].clone() };
        Ok(Self { model, field, group, weights, dim })
    }

    /// Writes the ids of a batch that are new and have a row.
    fn add(&self, batch: &Batch, found: &mut Found, file: &mut VectorFile) -> Result<(), Failure> {
        let (ids, keys) = (&batch.carried[0], &batch.sparse[0]);
        for row in 0..batch.samples {
            let (Some(id), [key]) = (ids.text(row), keys.row(row)) else { continue };
            let Some(values) = self.model.tables[self.group].row(*key) else {
                found.without_row += 1;
                continue;
            };
            let id = std::str::from_utf8(id).map_err(|_| {
                let shown = String::from_utf8_lossy(id);
                Failure::User(format!("--ids: the id {shown:?} is not UTF-8, and the file of embeddings has UTF-8"))
            })?;
            if found.seen.insert(self.identity(id, *key)) {
                file.push(id, &values[self.weights..])?;
            }
        }
        Ok(())
    }

    fn identity(&self, id: &str, key: u64) -> u64 {
        match self.field.hash_buckets {
            Some(_) => {
                let mut hasher = DefaultHasher::new();
                id.hash(&mut hasher);
                hasher.finish()
            }
            None => key,
        }
    }
}

/// The file of ids and embeddings. It appears under its name once it is complete.
struct VectorFile {
    name: String,
    partial: Partial,
    writer: ArrowWriter<File>,
    schema: Arc<Schema>,
    dim: usize,
    ids: Vec<String>,
    values: Vec<f32>,
    written: u64,
}

impl VectorFile {
    fn create(name: &str, dim: usize) -> Result<Self, Failure> {
        let fields = vec![Field::new("id", DataType::Utf8, false), Field::new("embedding", list_of(dim), false)];
        let schema = Arc::new(Schema::new(fields));
        let (partial, file) = Partial::create(name)?;
        let properties = WriterProperties::builder().set_compression(Compression::ZSTD(ZstdLevel::default())).build();
        let writer = ArrowWriter::try_new(file, Arc::clone(&schema), Some(properties));
        let writer = writer.map_err(|error| failed(name, error))?;
        let (ids, values) = (Vec::new(), Vec::new());
        Ok(Self { name: name.to_owned(), partial, writer, schema, dim, ids, values, written: 0 })
    }

    fn push(&mut self, id: &str, embedding: &[f32]) -> Result<(), Failure> {
        self.ids.push(id.to_owned());
        self.values.extend_from_slice(embedding);
        self.written += 1;
        if self.ids.len() < IDS_A_GROUP { Ok(()) } else { self.flush() }
    }

    fn flush(&mut self) -> Result<(), Failure> {
        let ids: ArrayRef = Arc::new(StringArray::from(std::mem::take(&mut self.ids)));
        let embeddings = lists(std::mem::take(&mut self.values), self.dim);
        let batch = RecordBatch::try_new(Arc::clone(&self.schema), vec![ids, embeddings]);
        let batch = batch.map_err(|error| failed(&self.name, error))?;
        self.writer.write(&batch).map_err(|error| failed(&self.name, error))
    }

    /// Completes the file. Returns the number of ids.
    fn finish(mut self) -> Result<u64, Failure> {
        self.flush()?;
        self.writer.close().map_err(|error| failed(&self.name, error))?;
        self.partial.finish().map_err(|error| failed(&self.name, error))?;
        Ok(self.written)
    }
}
