//! The errors of this crate, as sentences that name the file, the finding and the expectation.

use std::path::{Path, PathBuf};

use rectrain_checkpoint::CheckpointError;
use rectrain_dense::DenseError;
use rectrain_embedding::StoreError;
use rectrain_storage::StorageError;
use rectrain_wire::WireError;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServingError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(Box<CheckpointError>),
    /// The tower cannot be built, or cannot compute.
    #[error(transparent)]
    Dense(#[from] DenseError),
    /// The store of initial values refused a configuration or a look-up.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The ids of a batch contradict each other.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The description of the model lacks a part, or has one that cannot be read.
    #[error("{model} cannot be served: {problem}")]
    Description {
        /// The checkpoint or the folder.
        model: String,
        /// The finding, and the way out.
        problem: String,
    },
    /// A file of an export is not the one that was written.
    #[error("{} is damaged: {problem}; export the checkpoint again", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// The finding.
        problem: String,
    },
    /// A file of a publication path cannot be used, or there is none.
    #[error("{file} cannot be used: {problem}")]
    Publication {
        /// The file or the path.
        file: String,
        /// The finding.
        problem: String,
    },
    /// The storage of a publication path failed.
    #[error(transparent)]
    Storage(Box<StorageError>),
    /// The folder for an export has content.
    #[error("{} is not empty: name a folder that does not exist, or an empty one", folder.display())]
    NotEmpty {
        /// The folder.
        folder: PathBuf,
    },
    /// A type of exported values cannot hold a value.
    #[error(
        "row group {group}, key {key:016x}: {value} cannot be exported as {value_type}; use --values bf16 or --values f32"
    )]
    Value {
        /// The row group.
        group: usize,
        /// The key of the row.
        key: u64,
        /// The value.
        value: f32,
        /// The name of the type.
        value_type: &'static str,
    },
    /// The rows of a batch cannot be read at present.
    #[error("the rows of shard {shard} cannot be read at present: {problem}")]
    RowsUnavailable {
        /// The shard, from 0.
        shard: usize,
        /// The finding.
        problem: String,
    },
    /// The operating system refused an action.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The action.
        action: &'static str,
        /// Its object.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
}

impl From<CheckpointError> for ServingError {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

impl From<StorageError> for ServingError {
    fn from(error: StorageError) -> Self {
        Self::Storage(Box::new(error))
    }
}

impl ServingError {
    /// Whether the user's input caused the error.
    #[must_use]
    pub fn is_users_input(&self) -> bool {
        match self {
            Self::Description { .. } | Self::NotEmpty { .. } | Self::Value { .. } => true,
            Self::Storage(error) => error.is_users_input(),
            Self::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            _ => false,
        }
    }

    /// A conversion of the problem with a file of a publication path.
    pub(crate) fn publication(file: String) -> impl FnOnce(String) -> Self {
        move |problem| Self::Publication { file, problem }
    }

    /// A conversion of an error of the operating system.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }
}
