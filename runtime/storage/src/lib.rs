//! Where files are: from a path or URL with storage options to an object store. Local paths, `file://`, `s3://` (`s3a://`)
//! and `gs://` URLs are understood in one way by everything that reads or writes files: the data sources and the checkpoints.
//! It knows neither what the files hold nor when they are read.

mod directory;
mod local_file;
mod place;

pub use directory::{Directory, Entry, FileWriter};
pub use place::{Bucket, Place, place_of};

/// Why a place cannot be reached. Each message is one sentence that names the path and says what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// An option that the object store does not have.
    #[error("cannot reach {url}: its store has no option `{name}`; the usual ones there are {usual}")]
    UnknownOption {
        /// The bucket.
        url: String,
        /// The option as it was given.
        name: String,
        /// Options that stores of this kind have.
        usual: &'static str,
    },
    /// A path or URL cannot be understood.
    #[error("cannot use the path {path}: {problem}")]
    BadPath {
        /// The path or URL as it was given.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The settings of a store contradict each other, or its credentials cannot be read.
    #[error("cannot reach {url}: {source}")]
    Unreachable {
        /// The bucket.
        url: String,
        /// Why.
        source: object_store::Error,
    },
    /// A file is larger than one of its kind may be.
    #[error("cannot read {path}: it has {found} bytes, more than the {limit} that such a file may have")]
    TooLarge {
        /// The file.
        path: String,
        /// Its bytes.
        found: u64,
        /// The bytes that it may have.
        limit: u64,
    },
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: String,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The store refused.
    #[error("cannot {action} {path}: {source}")]
    Store {
        /// What was attempted.
        action: &'static str,
        /// On what.
        path: String,
        /// Why it failed.
        source: object_store::Error,
    },
}

impl StorageError {
    /// Whether what the user gave (a path, options, rights of files) is at fault, rather than a disk, a network or a defect.
    #[must_use]
    pub fn is_users_input(&self) -> bool {
        use std::io::ErrorKind;
        match self {
            Self::UnknownOption { .. } | Self::BadPath { .. } => true,
            Self::Unreachable { .. } | Self::TooLarge { .. } => false,
            Self::Io { source, .. } => matches!(
                source.kind(),
                ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem
            ),
            Self::Store { source, .. } => is_refusal(source),
        }
    }
}

/// Whether a store has not what is asked of it, which asking again does not mend. One that denies it may give it in a minute: rights that were
/// just granted take a while to be known, and a key that was changed is read anew by whoever starts again.
#[must_use]
pub fn is_refusal(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::NotFound { .. })
}
