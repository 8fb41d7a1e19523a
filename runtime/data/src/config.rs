//! Where data is and how it is read: plain values that the caller fills from its manifest.

use std::collections::BTreeMap;

use rectrain_kinds::{BadRows, FileFormat, FollowConfig, KafkaConfig, Split, Start, SyntheticConfig};

use crate::span::{Order, Span};

/// A subset of the rows of a source.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct SourceConfig {
    /// Local paths, `file://`, `s3://` and `gs://` URLs, each also as a glob (`*`, `?`, `[…]`; `**`
    /// for folders of any depth). Files are read in the order of this list, and the files of one
    /// glob in the order of their names. No file may be found twice. Empty for
    /// [`Format::Synthetic`].
    pub paths: Vec<String>,
    /// The format of the rows.
    pub format: Format,
    /// The treatment of bad rows.
    pub bad_rows: BadRows,
    /// Texts that stand for a missing value, in columns of text. Upper and lower case are equal. An
    /// empty text is always one.
    pub null_values: Vec<String>,
    /// The division of the rows into training and test rows.
    pub split: Option<Split>,
    /// The rows that are read. `Train` and `Test` need a `split`.
    pub subset: Subset,
    /// Settings of the object store, by the names of the `object_store` crate without regard to
    /// case: `endpoint`, `access_key_id`, `secret_access_key`, `region`, `allow_http`,
    /// `google_service_account`, `google_skip_signature` …. The environment (`AWS_*`, `GOOGLE_*`)
    /// gives the others.
    pub storage_options: BTreeMap<String, String>,
    /// Columns whose texts travel with the rows, besides the columns of the schema: see
    /// [`Batch::carried`](crate::Batch::carried).
    pub carried: Vec<String>,
    /// Whether a file may lack the label column. Its labels are then NaN. Training needs labels.
    pub label_is_optional: bool,
}

impl SourceConfig {
    /// The source of one followed file, with the other settings of this one.
    #[must_use]
    pub fn of_file(&self, name: &str) -> Self {
        let format = match &self.format {
            Format::Follow(format, _) => Format::Files(format.clone()),
            format => format.clone(),
        };
        Self { paths: vec![name.to_owned()], format, ..self.clone() }
    }
}

/// The format of a source's rows.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Format {
    /// By the extension of each file, before `.gz` or `.zst`: `.csv` (commas), `.tsv` (tabs), both
    /// with a header, or `.parquet`. A resolved job names its format instead.
    #[default]
    Auto,
    /// Files of one format.
    Files(FileFormat),
    /// Rows drawn from a known distribution. There are no files.
    Synthetic(SyntheticConfig),
    /// Records of Kafka topics. There are no files, and the rows do not end.
    Kafka(KafkaConfig),
    /// Files of one format that keep coming. A data set reads one of them: see
    /// [`SourceConfig::of_file`].
    Follow(FileFormat, FollowConfig),
}

/// Training rows, test rows, or both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Subset {
    /// All rows.
    #[default]
    All,
    /// The training rows of the split.
    Train,
    /// The test rows of the split.
    Test,
}

impl Subset {
    /// The name in error messages.
    pub(crate) fn rows(self) -> &'static str {
        match self {
            Self::All => "rows",
            Self::Train => "training rows",
            Self::Test => "test rows",
        }
    }
}

/// The cut of a finite data set into chunks, and the order of the rows in a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReadPlan {
    /// Rows of a chunk, at least 1 and below 2³². Chunk c holds the rows
    /// `c · chunk_rows .. (c + 1) · chunk_rows` of the data set.
    pub chunk_rows: u64,
    /// `Some(seed)`: the rows of each chunk are permuted by a pure function of (seed, epoch,
    /// chunk). Rows never leave their chunk. So the chunk is the window of the shuffle, and a
    /// larger window mixes better. `None`: the order of the files.
    pub shuffle: Option<u64>,
    /// The pass over the data, from 0.
    pub epoch: u64,
    /// The largest number of chunks that are read ahead. 0 reads only the requested ones.
    pub read_ahead_chunks: usize,
}

impl ReadPlan {
    /// The rows of a chunk.
    pub fn span(&self, chunk: u64) -> Span {
        let order = match self.shuffle {
            Some(seed) => Order::Shuffled { seed, epoch: self.epoch, chunk },
            None => Order::Stored,
        };
        Span { from: Start::Row(chunk.saturating_mul(self.chunk_rows)), rows: self.chunk_rows, until: None, order }
    }
}
