//! `spec.features`: the columns of the data, and their meaning to the model.

use std::collections::BTreeMap;

use kube::KubeSchema;
use rectrain_kinds::{InitializerKind, MissingValue, Pooling, RowPriority, TransformKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{AdmissionSpec, EvictionSpec, MemorySpec, defaults};

/// The initial values of a row that is met for the first time. They are a pure function of the seed
/// and the id. So a row starts the same on any server, in any order, and again after it was lost.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.scale) || self.kind != 'zeros'").message("`zeros` has no scale: remove `scale`, or choose normal or uniform").field_path(".scale")
)]
pub struct InitializerSpec {
    /// The distribution. Required.
    pub kind: InitializerKind,

    /// Standard deviation of `normal`, or half the width of `uniform`; at least 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(
        range(min = 0.0, max = 100.0),
        extend("x-default" = format!("{} for normal, {} for uniform", defaults::NORMAL_STD, defaults::UNIFORM_BOUND))
    )]
    pub scale: Option<f64>,
}

/// A column whose value is a list of values.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MultiValueSpec {
    /// Separator of two values, such as `|` or `::`. It may be a comma if cells are quoted. Empty
    /// pieces are ignored. A list in brackets, such as `[1, 2]`, `(1, 2)` or `{1, 2}`, is a bad
    /// row. Required for text. A list column of a Parquet file needs none: its elements are the
    /// values. At most 8 characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 8), extend("x-default" = "none: the column is a list"))]
    pub separator: Option<String>,
}

/// A column of ids or categories. Each value has its own embedding row.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.share) || self.share > 0.0").message("a share of 0 leaves no row: expected a number above 0, such as 0.25").field_path(".share"),
    validation = Rule::new("!has(self.hashBuckets) || !(has(self.admission) || has(self.expireAfter) || has(self.priority) || has(self.share))").message("a hashed table has a fixed size, and keeps all its rows: remove `hashBuckets`, or `admission`, `expireAfter`, `priority` and `share`").field_path(".hashBuckets")
)]
pub struct SparseFeature {
    /// Name of the column. `C{1..26}` stands for the 26 columns `C1` to `C26`, which share the
    /// other settings given here. They do not share rows unless `table` is set. Numbers keep the
    /// width of the first one: `C{01..26}` starts with `C01`. A value is taken as text, and hashed
    /// together with the table's name to a 64-bit key. So ids need not be small, dense or numeric.
    /// Blanks around an id do not count. `5.0`, `5.` and `5.0e+00` are the id `5`, in all files and
    /// formats. Required.
    #[schemars(
        length(min = 1, max = 128),
        regex(pattern = r"^[^{}]+$|^[^{}]*\{[0-9]+\.\.[0-9]+\}[^{}]*$"),
        extend("x-expected" = "a column name such as user_id, or a range of them such as C{1..26}")
    )]
    pub name: String,

    /// Width of this feature's rows, in values. `dlrm`, `deepfm` and `fm` need the same width for
    /// all features.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096), extend("x-default" = "spec.model.embeddingDim"))]
    pub dim: Option<u32>,

    /// How the rows of several values become one vector.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Pooling::Mean))]
    pub pooling: Option<Pooling>,

    /// For a column whose cells hold several values. Without it, a cell is one value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multi_value: Option<MultiValueSpec>,

    /// Name of the table that holds the rows. Features that name the same table share the rows of
    /// equal values, such as the item shown and the items bought before. They must agree on `dim`
    /// and `initializer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128), extend("x-default" = "the feature's name"))]
    pub table: Option<String>,

    /// The treatment of an empty value. A feature with `multiValue` has no id where its cell has no
    /// values, independent of this setting.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = MissingValue::Token))]
    pub missing: Option<MissingValue>,

    /// The initial values of this feature's rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "spec.features.initializer"))]
    pub initializer: Option<InitializerSpec>,

    /// Which ids of this feature get a row: `{probability: 0.1}` or `{count: 3}`. Take it if most
    /// ids occur once or twice, such as queries. An evaluation admits no id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admission: Option<AdmissionSpec>,

    /// A row is removed once it was not updated for this time, by the clock of the data: a number
    /// with `s`, `m`, `h` or `d`, such as `48h`. From 1 minute to 3650 days. Needs a time column:
    /// `spec.data.timeColumn`. Take it for ids that end, such as listings and sessions.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 2, max = 16),
        regex(pattern = r"^[0-9]+[smhd]$"),
        extend("x-default" = "rows do not expire", "x-expected" = "a time such as 48h or 30d")
    )]
    pub expire_after: Option<String>,

    /// When this feature's rows are evicted. Only with `spec.features.memory`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = RowPriority::Low))]
    pub priority: Option<RowPriority>,

    /// The most of the budget that this feature's rows may use, above 0 and at most 1. Features
    /// with equal widths, initial values and settings of this kind are one row group and use it
    /// together. Only with `spec.features.memory`. Take it to keep one feature with endless ids
    /// from evicting the rows of the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = "1, the whole budget"))]
    pub share: Option<f64>,

    /// Makes this feature's table a hashed one of this many rows, which values share where their
    /// hashes are equal modulo this number. It needs no budget and no clock. Two ids in one row
    /// cannot be told apart, so prefer `spec.features.memory`. Features that share a table must
    /// agree on it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000u64), extend("x-default" = "a row for each id"))]
    pub hash_buckets: Option<u64>,
}

/// A column of numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(has(self.transform) && self.transform == 'standardize') || (has(self.mean) && has(self.std))").message("transform: standardize needs `mean` and `std`"),
    validation = Rule::new("(has(self.transform) && self.transform == 'standardize') || !(has(self.mean) || has(self.std))").message("`mean` and `std` belong to transform: standardize: remove them, or set it"),
    validation = Rule::new("!(has(self.transform) && self.transform == 'minMax') || (has(self.min) && has(self.max))").message("transform: minMax needs `min` and `max`"),
    validation = Rule::new("(has(self.transform) && self.transform == 'minMax') || !(has(self.min) || has(self.max))").message("`min` and `max` belong to transform: minMax: remove them, or set it"),
    validation = Rule::new("!has(self.std) || self.std > 0.0").message("`std` is a divisor: expected a number above 0").field_path(".std"),
    validation = Rule::new("!has(self.min) || !has(self.max) || self.min < self.max").message("expected `min` below `max`").field_path(".max")
)]
pub struct DenseFeature {
    /// Name of the column, or a range of columns such as `I{1..13}` that share the settings given
    /// here. Required.
    #[schemars(
        length(min = 1, max = 128),
        regex(pattern = r"^[^{}]+$|^[^{}]*\{[0-9]+\.\.[0-9]+\}[^{}]*$"),
        extend("x-expected" = "a column name such as age, or a range of them such as I{1..13}")
    )]
    pub name: String,

    /// The function applied to the number before the model sees it. The number is first rounded to
    /// a 32-bit float, which has about seven digits: Unix seconds become multiples of 128.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = TransformKind::Identity))]
    pub transform: Option<TransformKind>,

    /// Mean that `standardize` subtracts. Required by it, refused without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean: Option<f64>,

    /// Standard deviation that `standardize` divides by, above 0. Required by it, refused without
    /// it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub std: Option<f64>,

    /// Number that `minMax` maps to 0. Required by it, refused without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,

    /// Number that `minMax` maps to 1, above `min`. Required by it, refused without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,

    /// The model's input for an empty cell, after the transform.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = defaults::DENSE_MISSING))]
    pub missing: Option<f64>,

    /// The largest magnitude of the model's input, after the transform, above 0. A cell beyond it
    /// is a bad row. One cell such as 1e25 would freeze the state of an optimizer for good.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0), extend("x-default" = "1e15"))]
    pub limit: Option<f64>,
}

/// The column to predict.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LabelSpec {
    /// Name of the column.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[^{}]+$"), extend("x-default" = defaults::LABEL))]
    pub name: Option<String>,

    /// A row is positive if its label is at least this number: 4 makes ratings of 4 and 5 positive.
    /// Both are compared as 64-bit floats, so it is below 2^53. Without it, labels must be from 0
    /// to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "the label is 0 or 1 already"))]
    pub positive_from: Option<f64>,

    /// The labels of words, from 0 to 1, such as `{click: 1, skip: 0}`. The column is then text. A
    /// row with any other text is a bad row. Upper and lower case differ. Blanks around a word do
    /// not count, so no two words may differ by them only. At most 64.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64, "x-default" = "labels are numbers"))]
    pub values: BTreeMap<String, f64>,
}

/// The columns to read, and their roles. Other columns are skipped. Only `memory` can be changed
/// once the job exists, because the trained rows and layers depend on all others.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!self.sparse.exists(f, f.name == (has(self.label) && has(self.label.name) ? self.label.name : 'label'))").message("the label is also a sparse feature: the model would read the answer; remove it from `sparse`").field_path(".sparse"),
    validation = Rule::new("!has(self.dense) || !self.dense.exists(f, f.name == (has(self.label) && has(self.label.name) ? self.label.name : 'label'))").message("the label is also a dense feature: the model would read the answer; remove it from `dense`").field_path(".dense"),
    validation = Rule::new("self.sparse.all(f, self.sparse.exists_one(g, g.name == f.name))").message("a sparse feature is named twice").field_path(".sparse"),
    validation = Rule::new("!has(self.dense) || self.dense.all(f, self.dense.exists_one(g, g.name == f.name))").message("a dense feature is named twice").field_path(".dense"),
    validation = Rule::new("!has(self.dense) || !self.dense.exists(d, self.sparse.exists(s, s.name == d.name))").message("a column is either sparse or dense: one name is in both lists").field_path(".dense"),
    validation = Rule::new("has(self.memory) || !has(self.eviction)").message("without a budget nothing is evicted: remove `eviction`, or set `memory`, such as {maxBytes: 40Gi}").field_path(".eviction"),
    validation = Rule::new("!has(self.group) || self.group != (has(self.label) && has(self.label.name) ? self.label.name : 'label')").message("`group` selects the rows that are ranked against each other, such as user_id: it cannot be the label").field_path(".group")
)]
pub struct FeaturesSpec {
    /// The column to predict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<LabelSpec>,

    /// Columns of ids and categories, in the order of the model's inputs. At least one; at most 256
    /// entries, which may be ranges. Required.
    #[schemars(length(min = 1, max = 256))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub sparse: Vec<SparseFeature>,

    /// Columns of numbers, in the order of the model's inputs. At most 256 entries, which may be
    /// ranges.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-default" = "none"))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub dense: Vec<DenseFeature>,

    /// Column whose value groups the rows for GAUC, such as `user_id`. GAUC is the mean over groups
    /// of the AUC within each. The column may also be a sparse feature. A row whose group is
    /// missing counts for all metrics but GAUC. Without this field, GAUC is not computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[^{}]+$"), extend("x-default" = "no GAUC"))]
    pub group: Option<String>,

    /// The initial values of every feature's rows, unless the feature has its own `initializer`.
    /// They are a pure function of the seed and the id. So a row starts the same on any server, in
    /// any order, and again after it was lost.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = format!("normal with standard deviation {}", defaults::NORMAL_STD)))]
    pub initializer: Option<InitializerSpec>,

    /// One budget for the rows of all tables: `{maxRows: N}`, `{maxBytes: 40Gi}` or `{auto: true}`.
    /// Rows of the lowest score are removed where the tables would exceed it. Without it every
    /// trained id keeps its row, and tables over ids that keep coming grow until a pod is killed.
    /// Its number is the only part of the features that may change once the job exists. The job
    /// then resumes from its last checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemorySpec>,

    /// The order in which rows are removed. Only with `memory`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub eviction: Option<EvictionSpec>,
}
