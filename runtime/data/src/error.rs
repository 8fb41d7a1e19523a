//! Errors between a path and a batch. Each message is one sentence that names the file, and the
//! column, line and value if there is one, and says how to correct it. The caller prints it
//! unchanged.

use std::fmt;

use rectrain_kafka::KafkaError;

/// The place of a row in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The line of a text file on which the row begins, from 1.
    Line(u64),
    /// The row of a Parquet file, from 1.
    Row(u64),
    /// The offset of a record in its partition, from 0.
    Offset(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) => write!(f, "line {number}"),
            Self::Row(number) => write!(f, "row {number}"),
            Self::Offset(number) => write!(f, "offset {number}"),
        }
    }
}

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A setting contradicts another, or is out of its range.
    #[error("{setting}: {problem}")]
    Config {
        /// The setting, by its name in [`crate::SourceConfig`], [`crate::Schema`] or a plan.
        setting: String,
        /// The finding, and the expectation.
        problem: String,
    },
    /// A path names nothing.
    #[error("there is no file {path}: check the path")]
    NotFound {
        /// The path or URL, as given.
        path: String,
    },
    /// A pattern matches nothing.
    #[error("no file matches {pattern}: check the path")]
    NoMatch {
        /// The glob, as given.
        pattern: String,
    },
    /// A path names a folder.
    #[error("{path} is a folder: name the files in it, for example {path}/*.csv")]
    Folder {
        /// The path or URL, without a slash at its end.
        path: String,
    },
    /// A path or URL cannot be understood.
    #[error("cannot use the path {path}: {problem}")]
    BadPath {
        /// The path or URL, as given.
        path: String,
        /// The reason.
        problem: String,
    },
    /// The operating system refused an action.
    #[error("cannot {action} {file}: {source}")]
    Io {
        /// The action.
        action: &'static str,
        /// Its object.
        file: String,
        /// The reason.
        source: std::io::Error,
    },
    /// An object store refused an action.
    #[error("cannot {action} {url}: {source}")]
    ObjectStore {
        /// The action.
        action: &'static str,
        /// Its object.
        url: String,
        /// The reason.
        source: object_store::Error,
    },
    /// All files are empty. This is the first.
    #[error("{file} is empty")]
    Empty {
        /// The file.
        file: String,
    },
    /// No file has a row: text files have headers only, Parquet files have columns only. This is
    /// the first.
    #[error("{file} has no rows")]
    NoRows {
        /// The file.
        file: String,
    },
    /// The subset has no rows.
    #[error("there are no {rows}: {problem}")]
    EmptySubset {
        /// `training rows`, `test rows` or `rows`.
        rows: &'static str,
        /// The cause, mostly the split.
        problem: String,
    },
    /// A file does not have its expected format.
    #[error("{file} is not {expected}: {problem}")]
    WrongFormat {
        /// The file.
        file: String,
        /// The expected format.
        expected: &'static str,
        /// The finding that contradicts it.
        problem: String,
    },
    /// The content of a file ends early, or cannot be decoded.
    #[error("{file} is damaged: {problem}")]
    Damaged {
        /// The file.
        file: String,
        /// The message of the decoder.
        problem: String,
    },
    /// A file lacks a column of the schema.
    #[error("{file} has no column `{column}`{hint}; its columns are {available}")]
    MissingColumn {
        /// The file.
        file: String,
        /// The missing column.
        column: String,
        /// Fragments of a sentence: the field of the manifest in parentheses, and `, did you mean
        /// …?` or another remedy. Either may be missing.
        hint: String,
        /// The columns of the file.
        available: String,
    },
    /// A file has an unexpected number of columns, or two columns of one name.
    #[error("{file}: {problem}")]
    Header {
        /// The file.
        file: String,
        /// The finding.
        problem: String,
    },
    /// A Parquet column has a type that does not fit its use.
    #[error("{file}: column `{column}` is of type {found}; {expected}")]
    ColumnType {
        /// The file.
        file: String,
        /// The column.
        column: String,
        /// Its Arrow type.
        found: String,
        /// The expected type.
        expected: &'static str,
    },
    /// A bad row.
    #[error("{file}, {at}, column `{column}`: found {value:?}, expected {expected}")]
    BadRow {
        /// The file.
        file: String,
        /// The place of the row in it.
        at: Place,
        /// The column (or the first missing one).
        column: String,
        /// The value, cut to 80 characters.
        value: String,
        /// The expected value.
        expected: String,
    },
    /// A record whose value is no row at all.
    #[error("{partition}, offset {offset}: {problem}, found {found:?}")]
    BadRecord {
        /// The topic and the partition.
        partition: String,
        /// The offset of the record.
        offset: u64,
        /// The expectation.
        problem: String,
        /// The value or a part of it, cut to 80 characters.
        found: String,
    },
    /// A broker cannot be reached, or refused an action.
    #[error("{0}")]
    Kafka(#[from] KafkaError),
    /// A schema registry cannot be reached, or lacks a schema.
    #[error("spec.data.train.kafka.schemaRegistry: {url}: {problem}")]
    Registry {
        /// The registry.
        url: String,
        /// The schema, and its defect.
        problem: String,
    },
    /// A topic does not exist, or the user may not read it.
    #[error("spec.data.train.kafka.topics: {problem}")]
    Topic {
        /// The topic, and its defect.
        problem: String,
    },
    /// Records were deleted before they were read.
    #[error(
        "{partition}: the records from offset {from} on were deleted before they were read; the first one now is {begin}"
    )]
    Deleted {
        /// The topic and the partition.
        partition: String,
        /// The first offset that is gone.
        from: u64,
        /// The first offset that the broker still has.
        begin: u64,
    },
    /// There are more bad rows than the limit allows.
    #[error("more than {limit} bad rows were skipped; the last: {last}; correct the data or raise the limit")]
    TooManyBadRows {
        /// The limit.
        limit: u64,
        /// The bad row that exceeded it.
        last: Box<DataError>,
    },
    /// A quoted cell that is never closed. All rows after it would become its content. A reader
    /// cannot skip it as a bad row, because the number of lost rows is unknown.
    #[error(
        "{file}, line {line}: expected a closing quote, found the end of the file in a quoted cell; close its quote, or \
         turn quoting off if quotes are ordinary characters here"
    )]
    UnclosedQuote {
        /// The file.
        file: String,
        /// The line on which the row begins.
        line: u64,
    },
    /// A text row without an end, usually because a quote is never closed.
    #[error(
        "{file}, line {line}: the row is longer than {limit} bytes; close its quote, or check that this is a text file"
    )]
    RowTooLong {
        /// The file.
        file: String,
        /// The line on which the row begins.
        line: u64,
        /// The longest row allowed.
        limit: usize,
    },
    /// A data set could not be prepared: a program or a download failed.
    #[error("cannot {action}: {problem}")]
    Prepare {
        /// The action.
        action: String,
        /// The reason, and the remedy.
        problem: String,
    },
    /// A reading thread ended without a result: a defect of this crate.
    #[error("the reading thread stopped unexpectedly; this is a defect of rectrain")]
    Stopped,
}

impl DataError {
    /// Whether the user's settings, paths or data caused the error, and not a disk, a network or a
    /// defect. Determines the exit code.
    pub fn is_users_input(&self) -> bool {
        match self {
            Self::Io { source, .. } => {
                matches!(source.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::PermissionDenied)
            }
            Self::ObjectStore { source, .. } => {
                rectrain_storage::is_refusal(source) || matches!(source, object_store::Error::InvalidPath { .. })
            }
            Self::Kafka(KafkaError::Refused { .. } | KafkaError::Security { .. }) => true,
            Self::Prepare { .. } | Self::Registry { .. } | Self::Stopped | Self::Kafka(_) => false,
            _ => true,
        }
    }

    /// Whether a file is not there.
    pub fn is_absence(&self) -> bool {
        match self {
            Self::NotFound { .. } | Self::NoMatch { .. } => true,
            Self::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        }
    }

    /// Whether an object store does not answer now. A later attempt may succeed.
    pub fn is_store_away(&self) -> bool {
        matches!(self, Self::ObjectStore { source: object_store::Error::Generic { .. }, .. })
    }

    /// Whether a later attempt may succeed, because a broker is not there now.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Kafka(error) if error.is_transient())
    }

    pub(crate) fn config(setting: &str, problem: impl Into<String>) -> Self {
        Self::Config { setting: setting.to_owned(), problem: problem.into() }
    }
}

/// A value as an error shows it: at most 80 characters, with replacements for bytes that are not
/// UTF-8.
pub(crate) fn shown(value: &[u8]) -> String {
    let text = String::from_utf8_lossy(&value[..value.len().min(400)]);
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into_owned(),
    }
}

impl From<rectrain_storage::StorageError> for DataError {
    fn from(error: rectrain_storage::StorageError) -> Self {
        use rectrain_storage::StorageError;
        match error {
            StorageError::BadPath { path, problem } => Self::BadPath { path, problem },
            StorageError::Unreachable { url, source } => Self::ObjectStore { action: "reach", url, source },
            other => Self::config("storage options", other.to_string()),
        }
    }
}
