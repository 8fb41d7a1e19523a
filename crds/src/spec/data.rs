//! `spec.data`: the source of the rows, and which of them are the test.

use std::collections::BTreeMap;

use kube::KubeSchema;
use rectrain_kinds::{DataFormat, DateOrder, TimeUnit};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::{TrainSpec, defaults};

/// A set of files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PathsSpec {
    /// Files, in reading order: local paths (relative to the working directory of `rectrain`), or
    /// gs:// and s3:// URLs. Globs (`*`, `?`, `[…]`, `**`) are read in the order of the matching
    /// names. A glob matches hidden files, and files in folders that begin with `.` or `_`, only if
    /// it names such a name itself. Files without rows are skipped, if others have rows. No file
    /// may match twice, or match both for training and for testing. Every loader lists the files
    /// when it starts. If it does not find the files that the first loader found, the job ends. A
    /// loader that continues from a checkpoint must find the files of the earlier training. So name
    /// the files of one day, not the folder that receives the next day's. At least one, at most
    /// 1,024. Required.
    #[schemars(length(min = 1, max = 1024), inner(length(min = 1, max = 1024)))]
    pub paths: Vec<String>,
}

/// How text files are split into columns.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.header) || self.header || has(self.columns)").message("a file without a header needs the names of its columns: give `columns`, or set header: true").field_path(".header")
)]
pub struct CsvSpec {
    /// Separator of two fields: one ASCII character, such as `;`, or up to 8, such as `::`. Several
    /// characters exclude quoted fields. Write a tab as "\t".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = 8),
        regex(pattern = r#"^([^"\r\n\\]{1,8}|\\t)$"#),
        extend("x-default" = "a comma for csv, a tab for tsv", "x-expected" = "one character, such as ; or a tab written as \"\\t\", or several such as ::")
    )]
    pub delimiter: Option<String>,

    /// True if the first line of each file holds the names of the columns. If `columns` is given as
    /// well, that line is skipped and the names in `columns` are used.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "true, or false when columns is given"))]
    pub header: Option<bool>,

    /// True if a field may be quoted with `"`. It may then contain delimiters, line ends and
    /// (doubled) quotes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "true for csv, false for tsv and for a delimiter of several characters"))]
    pub quoting: Option<bool>,

    /// Names of the columns, left to right, for files without a header. A range such as `C{1..26}`
    /// stands for several columns. At most 1,024 entries.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = 1024),
        inner(length(min = 1, max = 128), regex(pattern = r"^[^{}]+$|^[^{}]*\{[0-9]+\.\.[0-9]+\}[^{}]*$")),
        extend("x-default" = "the header's names")
    )]
    pub columns: Option<Vec<String>>,
}

/// The first rows train, the others test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PositionSplit {
    /// Number of rows to train on, from the first row. All later rows are the test. At least 1.
    /// Required.
    #[schemars(range(min = 1, max = 1_000_000_000_000_000u64))]
    pub train_rows: u64,
}

/// The first share of the rows trains, the others test.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("self.train > 0.0 && self.train < 1.0").message("`train` is a share of the rows: expected a number above 0 and below 1, such as 0.8").field_path(".train")
)]
pub struct FractionSplit {
    /// Share of the rows to train on, from the first row: above 0 and below 1, rounded to a row.
    /// All later rows are the test. The rows are counted before training starts. Required.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub train: f64,
}

/// A moment in the format of the time column.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TimeBoundSpec {
    /// Compared with the column as a number.
    Integer(i64),
    /// Compared as a number if it can be parsed as one, and otherwise as a date.
    Text(String),
}

fn time_bound_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "x-expected": "an integer such as 1700000000, or a date such as \"2026-11-03\" (for a share of the rows use \
                       spec.data.split.fraction)",
    })
}

/// Rows before a moment train, the others test.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TimeSplit {
    /// Name of the column with each row's time. The rows need not be sorted by it. Required.
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[^{}]+$"))]
    pub column: String,

    /// First moment of the test: a number in the column's own unit, such as Unix seconds, or a date
    /// or time in the form of the column. Forms are `2026-11-03`, `2026/11/03` and `2026.11.03`.
    /// Forms with the year at their end are `11/25/2026` and `25.11.2026`. A time may follow, as in
    /// `2026-11-03T10:00:00Z` or `11/25/2026 1:05 PM`. Dates are compared as instants, in UTC where
    /// they have no offset. A cell whose date has another order or separator is a bad row. Its time
    /// and offset may be absent. For timestamp and date columns of Parquet it is a date, or seconds
    /// since 1970, whatever their unit. Required.
    #[schemars(schema_with = "time_bound_schema")]
    pub test_from: TimeBoundSpec,

    /// The order of day and month in dates with the year at their end. Needed where `testFrom` has
    /// two readings, such as `11/1/2026`. Refused where `testFrom` is a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "the one that `testFrom` shows"))]
    pub order: Option<DateOrder>,
}

/// Continual training. The rows, in their order, are cut into slices, and training goes through one
/// slice after another. At the end of a slice the model is tested on the next one, before it trains
/// on it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SliceSplit {
    /// Rows of a slice: a multiple of `spec.training.globalBatchSize`. A loader holds about four
    /// slices in memory to train on, and up to two more to test on. Required.
    #[schemars(range(min = 1, max = 1_000_000_000_000u64))]
    pub rows: u64,
}

/// Which rows of one source are the test. Exactly one of four kinds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("[has(self.position), has(self.fraction), has(self.time), has(self.slices)].filter(given, given).size() == 1").message("expected exactly one of `position`, `fraction`, `time` and `slices`")
)]
pub struct SplitSpec {
    /// By position: the job trains on the first rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub position: Option<PositionSplit>,

    /// By share: the job trains on the first share of the rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fraction: Option<FractionSplit>,

    /// By time: the job trains on the earlier rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<TimeSplit>,

    /// By slices: each slice is the test of the model trained on the slices before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slices: Option<SliceSplit>,
}

/// Rows generated on the fly, with Criteo's columns: `label`, counts `I1`, `I2` … and ids `C1`,
/// `C2` …, as many as the features name. Ids are drawn from Zipf distributions, and labels from a
/// hidden teacher. So the best possible AUC is known, and printed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.zipfExponent) || self.zipfExponent > 0.0").message("expected an exponent above 0, such as 1.05").field_path(".zipfExponent")
)]
pub struct SyntheticSpec {
    /// Rows of one epoch of training.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000u64), extend("x-default" = defaults::SYNTHETIC_ROWS))]
    pub rows: Option<u64>,

    /// Rows of the test.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000u64), extend("x-default" = defaults::SYNTHETIC_TEST_ROWS))]
    pub test_rows: Option<u64>,

    /// Number of ids of each sparse feature.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(
        range(min = 2, max = 1_000_000_000_000u64),
        extend("x-default" = "as many as in Criteo's Kaggle set, from 3 to 100000 by column")
    )]
    pub vocabulary: Option<u64>,

    /// Exponent s of the Zipf distribution of the ids, above 0. The probability of the k-th most
    /// frequent id is proportional to 1/k^s. Click logs have about 1.05.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 10.0), extend("x-default" = defaults::SYNTHETIC_ZIPF_EXPONENT))]
    pub zipf_exponent: Option<f64>,

    /// Seed of the rows and of the teacher; independent of the seed of training.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991u64), extend("x-default" = defaults::SYNTHETIC_SEED))]
    pub seed: Option<u64>,
}

/// The column of each row's event time. It is the clock of `spec.features`: scores decay by it and
/// rows expire by it. So a job over old data decides as it would have decided then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TimeColumnSpec {
    /// Name of the column. Its cells are numbers, or dates in a form that `split.time.testFrom`
    /// may have. A row without a time is a bad row. Required.
    #[schemars(length(min = 1, max = 128), regex(pattern = r"^[^{}]+$"))]
    pub name: String,

    /// The unit of a column of numbers. Timestamps and dates of Parquet have their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = TimeUnit::Seconds))]
    pub unit: Option<TimeUnit>,

    /// The order of day and month in dates with the year at their end. Without it, a date with two
    /// readings is a bad row.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "the year comes first"))]
    pub order: Option<DateOrder>,
}

/// Random order of the training rows within windows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShuffleSpec {
    /// Rows of a window. The training rows are read window by window. Seed, epoch and window
    /// determine the order within a window. A window as large as the data shuffles it completely. A
    /// loader holds about four windows in memory, and as many rows again while the model is tested.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 1_000_000_000u64), extend("x-default" = defaults::SHUFFLE_WINDOW_ROWS))]
    pub window_rows: Option<u64>,
}

/// The treatment of a row that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum BadRowAction {
    /// Training ends with an error that names the file, the line, the column and the value.
    Fail,
    /// The row is counted and skipped, up to `limit` rows. A quote that is never closed is always
    /// an error: it could hide any number of rows.
    Skip,
}

/// The treatment of rows that cannot be read: too few fields, text instead of a number, a label
/// outside 0 to 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.limit) || self.action == 'skip'").message("`limit` counts skipped rows: remove it, or set action: skip").field_path(".limit")
)]
pub struct BadRowsSpec {
    /// The treatment of such a row. Required.
    pub action: BadRowAction,

    /// The most rows that may be skipped in one pass over the training rows, or over the test rows.
    /// Beyond it the run ends with an error. Each pass counts from 0. On a stream it is the most
    /// rows that may be skipped for one global batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000u64), extend("x-default" = defaults::BAD_ROWS_LIMIT))]
    pub limit: Option<u64>,
}

/// Access to object stores.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StorageSpec {
    /// Options of the object store's client by name, such as `endpoint`, `region` or `allow_http`.
    /// They take precedence over the environment (`AWS_ENDPOINT`, …). Credentials belong into the
    /// environment or `secretName`, not here. At most 32.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32, "x-default" = "the environment's"))]
    pub options: BTreeMap<String, String>,

    /// Name of a Secret in the job's namespace. Its entries become environment variables of the
    /// roles that read data or write checkpoints. Only a cluster uses it: `rectrain run` uses its
    /// own environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), extend("x-default" = "none"))]
    pub secret_name: Option<String>,
}

/// The source of the rows. Exactly one of three: `train` (with or without `test`), `source` with
/// `split`, or `synthetic`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("[has(self.train), has(self.source), has(self.synthetic)].filter(given, given).size() == 1").message("expected exactly one of `train` (with separate files for `test`), `source` (one set of files, with `split`) and `synthetic`"),
    validation = Rule::new("!has(self.test) || has(self.train)").message("`test` goes with `train`: with `source` the test comes from `split`, and `synthetic` makes its own").field_path(".test"),
    validation = Rule::new("!has(self.source) || has(self.split)").message("`source` needs `split`, which selects the test rows: position, fraction, time or slices").field_path(".source"),
    validation = Rule::new("!has(self.split) || has(self.source)").message("`split` divides `source`: remove it, or give `source` instead of `train` and `test`").field_path(".split"),
    validation = Rule::new("!(has(self.train) && has(self.train.kafka)) || (!has(self.shuffle) && (has(self.test) || !(has(self.format) || has(self.csv))))").message("a stream is trained in its order, and `format` and `csv` are for the files of `test`: remove them").field_path(".train"),
    validation = Rule::new("!(has(self.train) && has(self.train.follow)) || !has(self.shuffle)").message("files that keep coming are trained in their order: remove `shuffle`").field_path(".shuffle"),
    validation = Rule::new("!has(self.csv) || !(has(self.format) && self.format == 'parquet')").message("`csv` is only for text files: remove it, or set format: csv or tsv").field_path(".csv"),
    validation = Rule::new("!has(self.synthetic) || !has(self.timeColumn)").message("synthetic rows have no column of times: remove `timeColumn`").field_path(".timeColumn"),
    validation = Rule::new("!has(self.synthetic) || !(has(self.format) || has(self.csv) || has(self.badRows) || has(self.nullValues))").message("`format`, `csv`, `badRows` and `nullValues` are for files, and `synthetic` reads none: remove them").field_path(".synthetic")
)]
pub struct DataSpec {
    /// Format of the files.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = DataFormat::Auto))]
    pub format: Option<DataFormat>,

    /// How csv and tsv files are split into columns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub csv: Option<CsvSpec>,

    /// Files or a stream to train on. Goes with `test`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train: Option<TrainSpec>,

    /// Files to test on. Without them the model is trained but not tested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test: Option<PathsSpec>,

    /// Files with training and test rows; `split` divides them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<PathsSpec>,

    /// Which rows of `source` are the test: exactly one of `position`, `fraction`, `time` and
    /// `slices`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<SplitSpec>,

    /// Synthetic rows instead of files, with Criteo's columns: `label`, counts `I1`, `I2` … and ids
    /// `C1`, `C2` …, as many as the features name. Ids are drawn from Zipf distributions, and
    /// labels from a hidden teacher. So the best possible AUC is known, and printed. `synthetic:
    /// {}` takes all its defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub synthetic: Option<SyntheticSpec>,

    /// Random order of the training rows within windows; `shuffle: {}` takes the default window.
    /// Without it rows are read in the order of the files, which keeps a log chronological.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "not shuffled"))]
    pub shuffle: Option<ShuffleSpec>,

    /// The treatment of rows that cannot be read: too few fields, text instead of a number, a label
    /// outside 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "fail at the first"))]
    pub bad_rows: Option<BadRowsSpec>,

    /// Texts that stand for a missing value in columns of ids and numbers, such as `NULL`, `\N` and
    /// `NA`. A list replaces the default one. The whole cell counts, or the whole piece of a cell
    /// with several values. Blanks around it do not count, and upper and lower case are equal.
    /// Empty cells are always missing, and NaN is always a missing number. So `[]` makes `nan` an
    /// id. A number, or `inf`, cannot be a marker. At most 32.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(max = 32),
        inner(length(min = 1, max = 64)),
        extend("x-default" = defaults::NULL_VALUES)
    )]
    pub null_values: Option<Vec<String>>,

    /// The column of each row's event time, the clock of `spec.features.memory` and `expireAfter`.
    /// It is read only if a table needs a clock. Without it, the column of `split.time` is the
    /// clock if there is one. Without either there is no clock: scores do not decay, and
    /// `expireAfter` is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_column: Option<TimeColumnSpec>,

    /// Access to object stores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub storage: Option<StorageSpec>,
}
