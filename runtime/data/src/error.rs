//! What can go wrong between a path and a batch. Each message is one sentence that names the file (and
//! the column, line and value where there is one) and says what to do; the caller prints it as it is.

use std::fmt;

/// Where a row stands in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Line of a text file, from 1 (the line on which the row begins).
    Line(u64),
    /// Row of a Parquet file, from 1.
    Row(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(number) => write!(f, "line {number}"),
            Self::Row(number) => write!(f, "row {number}"),
        }
    }
}

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A setting contradicts another or is out of its range.
    #[error("{setting}: {problem}")]
    Config {
        /// The setting, by its name in [`crate::SourceConfig`], [`crate::Schema`] or a plan.
        setting: String,
        /// What is wrong with it and what is expected.
        problem: String,
    },
    /// A path names nothing.
    #[error("there is no file {path}: check the path")]
    NotFound {
        /// The path or URL as it was given.
        path: String,
    },
    /// A pattern matches nothing.
    #[error("no file matches {pattern}: check the path")]
    NoMatch {
        /// The glob as it was given.
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
        /// The path or URL as it was given.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {file}: {source}")]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On what.
        file: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// An object store refused.
    #[error("cannot {action} {url}: {source}")]
    ObjectStore {
        /// What was attempted.
        action: &'static str,
        /// On what.
        url: String,
        /// Why it failed.
        source: object_store::Error,
    },
    /// A file of no bytes, the first of none with any.
    #[error("{file} is empty")]
    Empty {
        /// The file.
        file: String,
    },
    /// The first of files none of which has a row: nothing but headers, or Parquet without rows.
    #[error("{file} has no rows")]
    NoRows {
        /// The file.
        file: String,
    },
    /// The part that was asked for has no rows.
    #[error("the {part} part has no rows: {problem}")]
    EmptyPart {
        /// `train`, `test` or `whole`.
        part: &'static str,
        /// Which split makes it so.
        problem: String,
    },
    /// A file is not what it was taken for.
    #[error("{file} is not {expected}: {problem}")]
    WrongFormat {
        /// The file.
        file: String,
        /// What it was taken for.
        expected: &'static str,
        /// What shows that it is not.
        problem: String,
    },
    /// A file whose content breaks off or does not decode.
    #[error("{file} is damaged: {problem}")]
    Damaged {
        /// The file.
        file: String,
        /// What the decoder said.
        problem: String,
    },
    /// A column of the schema is not in a file.
    #[error("{file} has no column `{column}`{hint}; its columns are {available}")]
    MissingColumn {
        /// The file.
        file: String,
        /// The column that was looked for.
        column: String,
        /// A sentence fragment such as `, did you mean …?`, or nothing.
        hint: String,
        /// The columns there are.
        available: String,
    },
    /// A file has another number of columns than was said, or one name twice.
    #[error("{file}: {problem}")]
    Header {
        /// The file.
        file: String,
        /// What is wrong with its header or its number of columns.
        problem: String,
    },
    /// A Parquet column has a type that its use does not allow.
    #[error("{file}: column `{column}` is of type {found}; {expected}")]
    ColumnType {
        /// The file.
        file: String,
        /// The column.
        column: String,
        /// Its Arrow type.
        found: String,
        /// What is expected.
        expected: &'static str,
    },
    /// A row that cannot be used.
    #[error("{file}, {at}, column `{column}`: found {value:?}, expected {expected}")]
    BadRow {
        /// The file.
        file: String,
        /// Where in it.
        at: Place,
        /// The column (or the first missing one).
        column: String,
        /// What stands there, cut to 80 characters.
        value: String,
        /// What should.
        expected: String,
    },
    /// More bad rows than the limit allows.
    #[error("more than {limit} bad rows were skipped; the last: {last}; mend the data or raise the limit")]
    TooManyBadRows {
        /// The limit that was set.
        limit: u64,
        /// The bad row that went beyond it.
        last: Box<DataError>,
    },
    /// A quoted cell that is never closed: all rows after it would be taken for its content. Never skipped as a bad row,
    /// since how many rows are lost by it is not known.
    #[error(
        "{file}, line {line}: expected a closing quote, but a quoted cell of this row goes on to the end of the file; close \
         it, or turn quoting off if quotes are ordinary characters here"
    )]
    UnclosedQuote {
        /// The file.
        file: String,
        /// The line on which the row begins.
        line: u64,
    },
    /// A text row that does not end, usually because of a quote that is never closed.
    #[error(
        "{file}, line {line}: the row is longer than {limit} bytes; is a quote not closed, or is \
         this no text file?"
    )]
    RowTooLong {
        /// The file.
        file: String,
        /// The line on which the row begins.
        line: u64,
        /// The longest row allowed.
        limit: usize,
    },
    /// A program that had to be run could not be run, or failed.
    #[error("cannot {action}: {problem}")]
    Prepare {
        /// What was attempted.
        action: String,
        /// Why it failed and what to do.
        problem: String,
    },
    /// A reading thread ended without a word: a defect of this crate.
    #[error("the reading thread stopped unexpectedly; this is a defect of rectrain")]
    Stopped,
}

impl DataError {
    /// Whether what the user gave (settings, paths, data) is at fault, rather than a disk, a network or
    /// a defect. Decides between exit codes.
    pub fn is_users_input(&self) -> bool {
        match self {
            Self::Io { source, .. } => {
                matches!(source.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::PermissionDenied)
            }
            Self::ObjectStore { source, .. } => {
                rectrain_storage::is_refusal(source) || matches!(source, object_store::Error::InvalidPath { .. })
            }
            Self::Prepare { .. } | Self::Stopped => false,
            _ => true,
        }
    }

    pub(crate) fn config(setting: &str, problem: impl Into<String>) -> Self {
        Self::Config { setting: setting.to_owned(), problem: problem.into() }
    }
}

/// A value as it stands in an error: at most 80 characters, bytes that are not UTF-8 replaced.
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
