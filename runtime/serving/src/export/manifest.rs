//! `model.json`: everything that another program needs in order to predict.

use rectrain_checkpoint::Identity;
use rectrain_data::key::TableSeed;
use rectrain_data::{DenseField, SparseField};
use rectrain_embedding::{Initializer, RowSpec, ValueType};
use rectrain_protocol::layout::FeaturePlace;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::rows::RowsFile;
use crate::error::ServingError;
use crate::hash::sha256;
use crate::model::Model;
use crate::value::ExportType;

const FORMAT: &str = "rectrain-serving";
/// The newest version that this program reads, and the one it writes.
const VERSION: u64 = 1;

/// A file of an export.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct FileOfExport {
    #[serde(rename = "file")]
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

impl FileOfExport {
    pub(super) fn of(name: &str, bytes: &[u8]) -> Self {
        Self { name: name.to_owned(), bytes: bytes.len() as u64, sha256: sha256(bytes) }
    }
}

/// The part of `model.json` that this program reads back. The other part repeats the identity for
/// programs in other languages: see [`ServedModel::encode`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct ServedModel {
    pub(super) format: String,
    pub(super) version: u64,
    /// The name of the job.
    pub(super) job: Option<String>,
    /// Global steps that the model was trained.
    pub(super) step: u64,
    /// SHA-256 over the identity and the digests of all files: equal for equal models.
    pub(super) digest: String,
    /// The digest of rows and dense parameters, if all values are the checkpoint's.
    #[serde(rename = "contentDigest", default, skip_serializing_if = "Option::is_none")]
    pub(super) content_digest: Option<String>,
    /// The identity of the checkpoint.
    pub(super) identity: Identity,
    /// By row group.
    pub(super) rows: Vec<RowsFile>,
    pub(super) tower: FileOfExport,
    pub(super) dense: FileOfExport,
    /// Repeats the identity for other programs.
    #[serde(flatten)]
    details: serde_json::Map<String, Value>,
}

impl ServedModel {
    pub(super) fn new(model: &Model, rows: Vec<RowsFile>, tower: FileOfExport, dense: FileOfExport) -> Self {
        let digests = rows.iter().map(|rows| &rows.file).chain([&tower, &dense]).map(|file| file.sha256.as_str());
        let identity = json!(model.identity).to_string();
        let all: Vec<&str> = digests.chain([identity.as_str()]).collect();
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            job: model.job.clone(),
            step: model.step,
            digest: sha256(all.join("\n").as_bytes()),
            content_digest: content_digest_of(model, &rows),
            identity: model.identity.clone(),
            rows,
            tower,
            dense,
            details: details(model),
        }
    }

    /// The bytes of the file. They end with a newline.
    pub(super) fn encode(&self) -> Vec<u8> {
        // Through a value: its maps have sorted keys. Strings, numbers and maps with string keys
        // always serialize.
        format!("{:#}\n", json!(self)).into_bytes()
    }

    /// Reads the bytes of a file. Messages call it `name`.
    pub(super) fn decode(name: &str, bytes: &[u8]) -> Result<Self, ServingError> {
        let fault = |problem: String| ServingError::Description { model: name.to_owned(), problem };
        let value: Value = serde_json::from_slice(bytes).map_err(|error| fault(error.to_string()))?;
        if value["format"] != FORMAT {
            return Err(fault(
                "it is no export for serving; write one with `rectrain checkpoint export --for serving`".to_owned(),
            ));
        }
        match value["version"].as_u64() {
            Some(found) if found > VERSION => Err(fault(format!(
                "its format has version {found}, and this program reads versions up to {VERSION}; use a newer program"
            ))),
            _ => serde_json::from_value(value).map_err(|error| fault(error.to_string())),
        }
    }
}

/// The content digest of an export, if it has the values of the checkpoint.
fn content_digest_of(model: &Model, rows: &[RowsFile]) -> Option<String> {
    rows.iter().all(|rows| rows.value_type == ExportType::F32.name()).then(|| model.content_digest())
}

/// How cells become inputs, spelled out for programs that do not know this one's rules.
fn details(model: &Model) -> serde_json::Map<String, Value> {
    let description = &model.description;
    let sparse = description.schema.sparse.iter().zip(&description.layout.features);
    let details = json!({
        "writtenBy": concat!("rectrain ", env!("CARGO_PKG_VERSION")),
        "label": description.schema.label,
        "sparseFeatures": sparse.map(|(field, place)| sparse_feature(field, place)).collect::<Vec<_>>(),
        "denseFeatures": description.schema.dense.iter().map(dense_feature).collect::<Vec<_>>(),
        "linear": description.layout.linear,
        "nullValues": description.null_values,
        "csv": description.csv,
        "initialValues": initial_values(model),
        "keys": keys(model),
        "inputs": { "dense": "dense", "embeddings": "embeddings", "linear": "linear" },
        "output": "probability",
    });
    match details {
        Value::Object(details) => details,
        _ => serde_json::Map::new(),
    }
}

fn dense_feature(field: &DenseField) -> Value {
    json!({ "name": field.name, "transform": field.transform, "missing": field.missing, "limit": field.limit })
}

fn sparse_feature(field: &SparseField, place: &FeaturePlace) -> Value {
    json!({
        "name": field.name,
        "table": field.table,
        "tableSeed": hex(TableSeed::of(&field.table).0),
        "separator": field.multi_value,
        "missing": field.missing,
        "hashBuckets": field.hash_buckets,
        "group": place.group,
        "dim": place.dim,
        "offset": place.offset,
        "pooling": place.pooling,
    })
}

/// The rule for keys without a row.
fn initial_values(model: &Model) -> Value {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Group {
        initializer: Initializer,
        zero_columns: usize,
        value_type: ValueType,
    }
    let store = &model.description.store;
    let group = |group: &RowSpec| Group {
        initializer: group.initializer,
        zero_columns: group.zero_columns,
        value_type: group.value_type,
    };
    json!({ "seed": store.seed, "groups": store.groups.iter().map(group).collect::<Vec<_>>() })
}

/// Values for the test vectors: integers, floats, texts, and the bounds of 64-bit integers.
const VECTORS: [&str; 14] = [
    "5",
    "5.0",
    "5.000e+00",
    " 7 ",
    "-3",
    "0",
    "-0",
    "05",
    "9223372036854775807",
    "9223372036854775808",
    "New York",
    "Zürich",
    "a text of more than sixteen bytes",
    "",
];

/// The hash of values, and vectors to test an implementation with. The longest texts pass all
/// branches of XXH3.
fn keys(model: &Model) -> Value {
    let table = model.description.schema.sparse.first().map_or("item", |field| field.table.as_str());
    let seed = TableSeed::of(table);
    let long = [100, 200, 241, 1500].map(|bytes| "abcdefghij".repeat(150)[..bytes].to_owned());
    let values = VECTORS.iter().map(|value| (*value).to_owned()).chain(long);
    let vector = |value: String| json!({ "key": hex(seed.text(value.as_bytes())), "value": value });
    json!({
        "hash": "XXH3_64bits_withSeed(text, tableSeed), then mix; an integer n has mix(n XOR tableSeed); with hashBuckets, a key k becomes that of the integer k mod hashBuckets",
        "tableSeed": "XXH3_64bits(table)",
        "mix": {
            "shifts": [30, 27, 31],
            "multipliers": [hex(0xbf58_476d_1ce4_e5b9), hex(0x94d0_49bb_1331_11eb)],
        },
        "table": table,
        "vectors": values.map(vector).collect::<Vec<_>>(),
    })
}

fn hex(word: u64) -> String {
    format!("{word:016x}")
}
