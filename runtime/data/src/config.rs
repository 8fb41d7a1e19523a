//! Where the data is and how it is to be read: plain values that the caller fills from its manifest.

use crate::synthetic::SyntheticConfig;
use std::collections::BTreeMap;

/// A source of rows.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SourceConfig {
    /// Local paths, `file://`, `s3://` and `gs://` URLs, each also as a glob (`*`, `?`, `[…]`; `**` for
    /// folders of any depth). Files are read in the order of this list, those of one glob sorted by
    /// name; no file may be found twice. Empty for [`Format::Synthetic`].
    pub paths: Vec<String>,
    /// What the files are.
    pub format: Format,
    /// What is done with a row that cannot be used.
    pub bad_rows: BadRows,
    /// How the rows are divided into a training and a test part.
    pub split: Option<Split>,
    /// Which part is read. `Train` and `Test` need a `split`.
    pub part: Part,
    /// Settings of the object store, by the names of the `object_store` crate without regard to case:
    /// `endpoint`, `access_key_id`, `secret_access_key`, `region`, `allow_http`,
    /// `google_service_account`, `google_skip_signature` … What is not given is taken from the
    /// environment (`AWS_*`, `GOOGLE_*`).
    pub storage_options: BTreeMap<String, String>,
}

/// What the files of a source are. Compression (gzip, Zstandard) of text is recognised by the first
/// bytes of each file, whatever it is called.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Format {
    /// By the extension of each file, `.gz` and `.zst` aside: `.csv` (commas), `.tsv` (tabs), both
    /// with a header, or `.parquet`.
    #[default]
    Auto,
    /// Text, one row a line.
    Csv(CsvFormat),
    /// Apache Parquet.
    Parquet,
    /// Rows drawn from a known distribution; no files.
    Synthetic(SyntheticConfig),
}

/// How text is cut into rows and cells. Lines end in `\n` or `\r\n`; empty lines are no rows; a byte-order
/// mark is skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CsvFormat {
    /// Between two cells.
    pub delimiter: u8,
    /// Whether the first line names the columns.
    pub header: bool,
    /// Names of the columns, in order: needed where there is no header; where there is one, they take
    /// its place and must be as many.
    pub columns: Option<Vec<String>>,
    /// Whether a cell may be put in double quotes (RFC 4180): delimiters and line ends in it are then
    /// part of it, and `""` is one quote.
    pub quoting: bool,
}

impl Default for CsvFormat {
    /// Commas, a header, quotes.
    fn default() -> Self {
        Self { delimiter: b',', header: true, columns: None, quoting: true }
    }
}

impl CsvFormat {
    /// Tabs, no header, no quotes, the columns `label`, `I1` … `I13`, `C1` … `C26`: the layout of
    /// Criteo's Kaggle and terabyte sets.
    pub fn criteo() -> Self {
        Self {
            delimiter: b'\t',
            header: false,
            columns: Some(crate::synthetic::criteo_columns(13, 26)),
            quoting: false,
        }
    }
}

/// What is done with a row that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum BadRows {
    /// Reading fails with an error that names file, line, column and value.
    #[default]
    Fail,
    /// The row is left out and counted; reading fails once more than `limit` were. Rows that are only passed
    /// over must then be parsed too, so that every reader counts the same: a reader of few chunks gains less.
    Skip {
        /// The largest number of bad rows that is tolerated from the beginning of the part on.
        limit: u64,
    },
}

/// How rows are divided into a training part and a test part. Position and fraction count all rows of the
/// files in order, bad ones included.
#[derive(Debug, Clone, PartialEq)]
pub enum Split {
    /// The first rows are for training, the rest for the test.
    Position {
        /// How many.
        train_rows: u64,
    },
    /// The first `train` of the rows (rounded to the nearest row) are for training. The rows are counted
    /// once, without parsing them, before the first one is read.
    Fraction {
        /// In (0, 1).
        train: f64,
    },
    /// Rows whose time is before a moment are for training, the others for the test. The rows need not
    /// be in the order of time; every row is looked at for either part.
    Time {
        /// The column of the time.
        column: String,
        /// The first moment of the test.
        test_from: TimeBound,
    },
}

/// A moment, as a time column writes it.
#[derive(Debug, Clone, PartialEq)]
pub enum TimeBound {
    /// Compared as a number. Timestamp and date columns of Parquet count as seconds since 1970.
    Number(f64),
    /// Compared byte by byte as text, right for ISO 8601 (`2026-11-03`).
    Text(String),
}

/// Which rows of a split are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Part {
    /// All of them.
    #[default]
    All,
    /// Those for training.
    Train,
    /// Those for the test.
    Test,
}

impl Part {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::All => "whole",
            Self::Train => "train",
            Self::Test => "test",
        }
    }
}

/// How a part is cut into chunks and in what order its rows come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadPlan {
    /// Rows of a chunk, at least 1 and below 2³². Chunk c is the rows
    /// `c · chunk_rows .. (c + 1) · chunk_rows` of the part.
    pub chunk_rows: u64,
    /// `Some(seed)`: the rows of each chunk are permuted by a pure function of (seed, epoch, chunk).
    /// Rows never leave their chunk, so the chunk is the window of the shuffle: the larger, the better
    /// mixed. `None`: the order of the files.
    pub shuffle: Option<u64>,
    /// Which pass over the data this is.
    pub epoch: u64,
    /// How many chunks are read ahead, at most. 0 reads only what is asked for.
    pub read_ahead_chunks: usize,
}
