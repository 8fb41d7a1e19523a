//! Data: the formats of files, the meaning of columns, and the division of rows into training and
//! test rows. The manifest resolves to these types, and `rectrain-data` reads by them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Date, DateOrder, MissingValue, TimeUnit, Transform};

named! {
    /// The formats of files.
    #[derive(Default)]
    pub enum DataFormat as "format of files" {
        /// By the end of the paths: .csv, .tsv or .parquet, before .gz or .zst.
        #[default]
        Auto = "auto",
        /// Fields between commas, quoted with `"` where needed; may be compressed (.gz, .zst).
        Csv = "csv",
        /// Fields between tabs; may be compressed (.gz, .zst).
        Tsv = "tsv",
        /// Apache Parquet.
        Parquet = "parquet",
    }
}

impl DataFormat {
    /// The format that the end of a path names: `.csv`, `.tsv` or `.parquet`, before `.gz` or
    /// `.zst`.
    #[must_use]
    pub fn of_path(path: &str) -> Option<Self> {
        let path = path.to_ascii_lowercase();
        let path = path.strip_suffix(".gz").or(path.strip_suffix(".zst")).unwrap_or(&path);
        match path.rsplit_once('.')?.1 {
            "csv" => Some(Self::Csv),
            "tsv" => Some(Self::Tsv),
            "parquet" => Some(Self::Parquet),
            _ => None,
        }
    }
}

/// A format of files with its settings. The first bytes of each text file say whether it is
/// compressed (gzip, Zstandard), whatever its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum FileFormat {
    /// Text, one row a line.
    Csv(CsvFormat),
    /// Apache Parquet.
    Parquet,
}

/// How text is cut into rows and cells. Lines end in `\n` or `\r\n`. An empty line is not a row. A
/// byte-order mark is skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CsvFormat {
    /// ASCII characters between two cells, mostly one. Only one goes with `quoting`.
    pub delimiter: String,
    /// Whether the first line of each file names the columns.
    pub header: bool,
    /// Names of the columns in order, ranges written out. Required without a header. With a header
    /// they replace its names, and there must be as many.
    pub columns: Option<Vec<String>>,
    /// Whether a cell may stand in double quotes (RFC 4180). Delimiters and line ends between the
    /// quotes belong to the cell, and `""` is one quote.
    pub quoting: bool,
}

impl Default for CsvFormat {
    /// Commas, a header, quotes.
    fn default() -> Self {
        Self { delimiter: ",".to_owned(), header: true, columns: None, quoting: true }
    }
}

impl CsvFormat {
    /// The layout of Criteo's Kaggle and terabyte sets: tabs, no header, no quotes, and the columns
    /// `label`, `I1` … `I13`, `C1` … `C26`.
    #[must_use]
    pub fn criteo() -> Self {
        Self { columns: Some(criteo_columns(13, 26)), header: false, ..Self::tabs() }
    }

    /// Tabs, a header, no quotes.
    #[must_use]
    pub fn tabs() -> Self {
        Self { delimiter: "\t".to_owned(), quoting: false, ..Self::default() }
    }
}

/// The columns of Criteo's layout: `label`, `I1` …, `C1` ….
#[must_use]
pub fn criteo_columns(dense: usize, sparse: usize) -> Vec<String> {
    let mut names = vec!["label".to_owned()];
    names.extend((1..=dense).map(|i| format!("I{i}")));
    names.extend((1..=sparse).map(|i| format!("C{i}")));
    names
}

/// The treatment of a bad row: one with a wrong number of cells, or with a cell that cannot be
/// read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum BadRows {
    /// Reading fails with an error that names file, line, column and value.
    #[default]
    Fail,
    /// The row is left out and counted. Reading fails once more than `limit` rows were left out.
    /// Readers then also parse the rows that they pass over, so that all of them count the same.
    Skip {
        /// The largest number of bad rows that is tolerated, counted from the first row of a pass.
        limit: u64,
    },
}

/// How the rows of a source are divided into training rows and test rows. Position and fraction
/// count all rows of the files in order, bad ones included.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Split {
    /// The first rows are for training, the others for the test.
    Position {
        /// Number of training rows.
        train_rows: u64,
    },
    /// The first share of the rows is for training, rounded to the nearest row. The rows are
    /// counted before the first one is read, without parsing them.
    Fraction {
        /// The share, in (0, 1).
        train: f64,
    },
    /// Rows before a moment are for training, the others for the test. The rows need not be in the
    /// order of time. A reader of either looks at every row.
    Time {
        /// The column of the time.
        column: String,
        /// The first moment of the test.
        test_from: TimeBound,
    },
}

/// A moment, as a time column writes it. Columns of timestamps and dates in Parquet are compared as
/// instants, whatever their unit.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum TimeBound {
    /// Compared as a 64-bit float. For timestamps it is a number of seconds since 1970.
    Number(f64),
    /// An integer beyond 2^53, where 64-bit floats do not hold all integers. Integers are compared
    /// with it exactly.
    Integer(i64),
    /// Compared as an instant.
    #[serde(rename = "text")]
    Date(Date),
}

impl std::fmt::Display for TimeBound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Number(bound) => write!(f, "{bound}"),
            Self::Integer(bound) => write!(f, "{bound}"),
            Self::Date(bound) => write!(f, "{bound}"),
        }
    }
}

/// Synthetic rows with Criteo's columns ([`criteo_columns`]), drawn from a distribution with a
/// known best possible AUC.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SyntheticConfig {
    /// Rows of one epoch of training.
    pub rows: u64,
    /// Rows of the test. They follow the training rows.
    pub test_rows: u64,
    /// Number of different ids of `C1`, `C2` …, at least 1 each.
    pub vocabularies: Vec<u64>,
    /// Number of dense columns `I1`, `I2` ….
    pub dense: usize,
    /// Exponent s of the ids' Zipf law, P(rank k) ∝ k^−s, above 0.
    pub zipf_exponent: f64,
    /// Seed of the rows and of the labels' hidden teacher.
    pub seed: u64,
    /// Standard deviation of the ids' contribution to a row's logit, if the ids were uniform.
    #[serde(skip)]
    pub sparse_effect: f64,
    /// About the standard deviation of the counts' contribution to a row's logit.
    #[serde(skip)]
    pub dense_effect: f64,
    /// The logit of a row without effects.
    #[serde(skip)]
    pub bias: f64,
}

impl SyntheticConfig {
    /// Number of different ids of each sparse column of Criteo's Kaggle set, cut at 100,000.
    pub const CRITEO_VOCABULARIES: [u64; 26] = [
        1_460, 583, 100_000, 100_000, 305, 24, 12_517, 633, 3, 93_145, 5_683, 100_000, 3_194, 27, 14_992, 100_000, 10,
        5_652, 2_173, 4, 100_000, 18, 15, 100_000, 105, 100_000,
    ];

    /// Training rows and test rows.
    #[must_use]
    pub const fn all_rows(&self) -> u64 {
        self.rows + self.test_rows
    }
}

impl Default for SyntheticConfig {
    /// A million training rows with Criteo's columns.
    fn default() -> Self {
        Self {
            rows: 1_000_000,
            test_rows: 0,
            vocabularies: Self::CRITEO_VOCABULARIES.into(),
            dense: 13,
            zipf_exponent: 1.05,
            seed: 0,
            sparse_effect: 1.5,
            dense_effect: 0.7,
            bias: -1.8,
        }
    }
}

/// The columns that are read, and their meaning.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Schema {
    /// Columns of ids, ranges written out, in the order of the model's inputs.
    pub sparse: Vec<SparseField>,
    /// Columns of numbers, ranges written out, in the order of the model's inputs.
    pub dense: Vec<DenseField>,
    /// The column to predict.
    pub label: LabelField,
    /// The column that groups the rows for GAUC, such as a user id. Its values are hashed as ids of
    /// a table with the column's name. A missing value is [`NO_GROUP`].
    pub group: Option<String>,
    /// The column of each row's event time. `None` if no table needs a clock: the column is then
    /// not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<TimeField>,
}

/// The column of each row's event time: numbers, or dates as text. Columns of timestamps and dates
/// in Parquet have their own unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TimeField {
    /// The column.
    pub name: String,
    /// The unit of a column of numbers.
    pub unit: TimeUnit,
    /// The order of day and month in dates with the year at their end.
    pub order: Option<DateOrder>,
}

impl TimeField {
    /// The whole seconds since 1970 that a cell names, or `None` if the cell is not a time. A time
    /// before 1970 is second 0.
    #[must_use]
    pub fn seconds_of_text(&self, cell: &[u8]) -> Option<u64> {
        let text = std::str::from_utf8(cell).ok()?.trim();
        if let Ok(number) = text.parse::<f64>() {
            return self.unit.seconds(number);
        }
        let date = Date::read(text, self.order).ok()?;
        Some(u64::try_from(date.moment().seconds).unwrap_or(0))
    }
}

/// The group of a row whose group cell is missing. GAUC leaves such a row out, and all other
/// metrics count it. One integer in 2^64 has this hash, and counts as missing too.
pub const NO_GROUP: u64 = u64::MAX;

/// A column of ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SparseField {
    /// The column.
    pub name: String,
    /// The table of its keys. Features of one table share the keys of equal values.
    pub table: String,
    /// Text between two values of a cell, which then holds any number of them. In Parquet the
    /// column is a list, or text with separators. Empty pieces and nulls are not values. An empty
    /// separator means that the column must be a list. `None` means one value a cell.
    pub multi_value: Option<String>,
    /// The treatment of a missing value where `multi_value` is `None`.
    pub missing: MissingValue,
    /// The rows of the table if it is a hashed one of fixed size. Its keys are the hashes of the
    /// values modulo this number. `None`: each value has a row of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hash_buckets: Option<u64>,
}

impl SparseField {
    /// Whether the number of keys varies between samples.
    #[must_use]
    pub fn is_variable(&self) -> bool {
        self.multi_value.is_some() || self.missing == MissingValue::Skip
    }
}

/// A column of numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DenseField {
    /// The column.
    pub name: String,
    /// The transform of the value.
    pub transform: Transform,
    /// The feature's value, after the transform, where the cell is empty, null, NaN or a marker of
    /// missing values.
    pub missing: f32,
    /// The largest magnitude of the feature's value, after the transform. One value such as 1e25
    /// has gradients with squares beyond f32, which freeze the state of an optimizer.
    pub limit: f32,
}

/// The column to predict.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LabelField {
    /// The column.
    pub name: String,
    /// The label is 1 where the value is at least this number, else 0. Both are compared as 64-bit
    /// floats. `None` means that the value lies in [0, 1] already.
    pub positive_from: Option<f64>,
    /// The labels of words, from 0 to 1. If there are any, the column is text, and other texts are
    /// no labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub values: BTreeMap<String, f64>,
}

impl LabelField {
    /// A column of numbers.
    #[must_use]
    pub fn of_numbers(name: &str, positive_from: Option<f64>) -> Self {
        Self { name: name.to_owned(), positive_from, values: BTreeMap::new() }
    }

    /// The label of a word, without blanks around it, or `None` if it is none of `values`.
    #[inline]
    #[must_use]
    pub fn label_of_word(&self, word: &[u8]) -> Option<f32> {
        let word = std::str::from_utf8(word).ok()?;
        self.values.get(word.trim()).map(|label| *label as f32)
    }

    /// The label of a value, or `None` if the value is not a label.
    #[inline]
    #[must_use]
    pub fn label_of(&self, value: f64) -> Option<f32> {
        match self.positive_from {
            Some(threshold) if value.is_finite() => Some(f32::from(u8::from(value >= threshold))),
            None if (0.0..=1.0).contains(&value) => Some(value as f32),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_path_names_its_format() {
        for (path, format) in [
            ("a.csv", Some(DataFormat::Csv)),
            ("s3://b/day=1/A.TSV.GZ", Some(DataFormat::Tsv)),
            ("a*.parquet", Some(DataFormat::Parquet)),
            ("a.csv.zst", Some(DataFormat::Csv)),
            ("a.txt", None),
            ("csv", None),
        ] {
            assert_eq!(DataFormat::of_path(path), format, "{path}");
        }
    }

    #[test]
    fn a_threshold_makes_labels_and_other_values_lie_in_0_to_1() {
        let label = |positive_from, value| LabelField::of_numbers("y", positive_from).label_of(value);
        assert_eq!(
            (label(Some(4.0), 4.0), label(Some(4.0), 3.5), label(Some(4.0), f64::NAN)),
            (Some(1.0), Some(0.0), None)
        );
        assert_eq!((label(None, 0.25), label(None, 1.5), label(None, f64::NAN)), (Some(0.25), None, None));
        assert_eq!((label(Some(4.0), f64::INFINITY), label(None, f64::INFINITY)), (None, None));
    }

    #[test]
    fn words_are_labels_if_they_are_listed() {
        let values = BTreeMap::from([("click".to_owned(), 1.0), ("skip".to_owned(), 0.0)]);
        let label = LabelField { values, ..LabelField::of_numbers("y", None) };
        assert_eq!((label.label_of_word(b" click"), label.label_of_word(b"skip")), (Some(1.0), Some(0.0)));
        assert_eq!(
            (label.label_of_word(b"Click"), label.label_of_word(b"1"), label.label_of_word(b"\xff")),
            (None, None, None)
        );
    }

    /// 32-bit floats have one value for both numbers of each pair.
    #[test]
    fn a_threshold_is_compared_in_64_bits() {
        for (below, threshold) in [(16_777_216.0, 16_777_217.0), (1_699_999_999.0, 1_700_000_000.0), (0.1, 0.1 + 1e-12)]
        {
            let label = LabelField::of_numbers("y", Some(threshold));
            assert_eq!((label.label_of(below), label.label_of(threshold)), (Some(0.0), Some(1.0)), "{threshold}");
        }
    }
}
