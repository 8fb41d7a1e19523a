//! Storage of files: local paths, `file://`, `s3://` (`s3a://`) and `gs://` URLs, with the options
//! of an object store. Data sources and checkpoints share it, so all of them understand paths in
//! the same way. The crate knows neither the contents of files nor when they are read.

mod credentials;
mod directory;
mod free_space;
mod local_file;
mod place;
mod renewing;
mod version;

pub use directory::{Directory, Entry, FileWriter};
pub use place::{Bucket, Place, place_of, use_ring};
pub use version::Version;

/// Why a path or URL cannot be used. Each message is one sentence that names the path and says what
/// to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The object store has no such option.
    #[error("cannot reach {url}: its store has no option `{name}`; the common options are {usual}")]
    UnknownOption {
        /// The bucket.
        url: String,
        /// The option as it was given.
        name: String,
        /// The common options of such a store.
        usual: &'static str,
    },
    /// The endpoint, from the options or the environment, cannot be used.
    #[error("cannot reach {url}: the option `endpoint` is `{endpoint}`: {problem}")]
    Endpoint {
        /// The bucket.
        url: String,
        /// The endpoint as it was given.
        endpoint: String,
        /// The problem and the expectation.
        problem: String,
    },
    /// The path or URL cannot be parsed.
    #[error("cannot use the path {path}: {problem}")]
    BadPath {
        /// The path or URL as it was given.
        path: String,
        /// The problem with it.
        problem: String,
    },
    /// The settings of a store contradict each other, or its credentials cannot be read.
    #[error("cannot reach {url}: {source}")]
    Unreachable {
        /// The bucket.
        url: String,
        /// The cause.
        source: object_store::Error,
    },
    /// The file is larger than the caller allows.
    #[error("cannot read {path}: it has {found} bytes, and such a file may have at most {limit}")]
    TooLarge {
        /// The file.
        path: String,
        /// Its size in bytes.
        found: u64,
        /// The largest size allowed, in bytes.
        limit: u64,
    },
    /// The operating system refused.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The action that failed.
        action: &'static str,
        /// Its path.
        path: String,
        /// The cause.
        source: std::io::Error,
    },
    /// The store refused.
    #[error("cannot {action} {path}: {source}")]
    Store {
        /// The action that failed.
        action: &'static str,
        /// Its path.
        path: String,
        /// The cause.
        source: object_store::Error,
    },
}

impl StorageError {
    /// True if the user's input is at fault (a path, options, file permissions). False for a disk,
    /// a network or a defect.
    #[must_use]
    pub fn is_users_input(&self) -> bool {
        use std::io::ErrorKind;
        match self {
            Self::UnknownOption { .. } | Self::Endpoint { .. } | Self::BadPath { .. } => true,
            Self::Unreachable { .. } | Self::TooLarge { .. } => false,
            Self::Io { source, .. } => matches!(
                source.kind(),
                ErrorKind::NotFound
                    | ErrorKind::PermissionDenied
                    | ErrorKind::ReadOnlyFilesystem
                    | ErrorKind::AlreadyExists
                    | ErrorKind::NotADirectory
            ),
            Self::Store { source, .. } => is_refusal(source),
        }
    }

    /// True if the store denies access. New permissions take up to a minute to spread.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        use object_store::Error;
        matches!(self, Self::Store { source: Error::PermissionDenied { .. } | Error::Unauthenticated { .. }, .. })
    }

    /// True if the store may not have been reached, or failed on its own side.
    #[must_use]
    pub fn is_outage(&self) -> bool {
        use object_store::Error;
        matches!(self, Self::Store { source: Error::Generic { .. } | Error::JoinError { .. }, .. })
    }
}

/// True if retrying cannot help: the object does not exist. Denied access may be granted within a
/// minute, because new permissions take a while to spread and a restart reads changed keys again.
#[must_use]
pub fn is_refusal(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::NotFound { .. })
}
