//! Everything that can be wrong with a checkpoint, in sentences that name the file, what was found and what was expected.

use rectrain_embedding::{Slot, StoreError};
use rectrain_storage::StorageError;

use crate::identity::Difference;
use crate::name::CheckpointId;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The storage refused: a disk that is full, a bucket that cannot be reached.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A name that no checkpoint has.
    #[error("`{name}` is not the name of a checkpoint; they are called step-000000001234 or step-000000001234-delta")]
    Name {
        /// The name.
        name: String,
    },
    /// Files, but no manifest: the checkpoint was never finished.
    #[error("{checkpoint} has no manifest.json: it was never finished; use another checkpoint")]
    Unfinished {
        /// The directory.
        checkpoint: String,
    },
    /// A manifest that does not say what a manifest says.
    #[error("{file} is damaged: {problem}; use another checkpoint")]
    Manifest {
        /// The manifest.
        file: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Written by a newer program.
    #[error(
        "{file} has format version {found} and this program reads versions up to {supported}; use the program that wrote it \
         or a newer one"
    )]
    FutureVersion {
        /// The manifest or rows file.
        file: String,
        /// Its version.
        found: u64,
        /// The newest that is known.
        supported: u64,
    },
    /// A file that the manifest names is gone.
    #[error("{file} is missing: the manifest names it with {expected} bytes")]
    Missing {
        /// The file.
        file: String,
        /// Its size in the manifest.
        expected: u64,
    },
    /// A file of another size.
    #[error("{file} has {found} bytes and should have {expected}: it was cut short or added to")]
    Size {
        /// The file.
        file: String,
        /// Its size.
        found: u64,
        /// Its size in the manifest.
        expected: u64,
    },
    /// A file of another content.
    #[error("{file} is damaged: its checksum (XXH3-64) is {found:016x} and should be {expected:016x}")]
    Checksum {
        /// The file, or the part of it that the checksum is of.
        file: String,
        /// Of the bytes that were read.
        found: u64,
        /// As it was written.
        expected: u64,
    },
    /// A file of another checkpoint, or of another place in this one.
    #[error("{file} belongs elsewhere: its {what} is {found} and should be {expected}")]
    MixedUp {
        /// The file.
        file: String,
        /// What tells it.
        what: &'static str,
        /// In the file.
        found: String,
        /// In the manifest.
        expected: String,
    },
    /// A file whose bytes make no sense although its size is right.
    #[error("{file} is damaged: {problem}")]
    Damaged {
        /// The file.
        file: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A delta whose base cannot be used.
    #[error("{checkpoint} holds changes since {base}, which cannot be used: {problem}")]
    Base {
        /// The delta.
        checkpoint: String,
        /// Its base.
        base: String,
        /// Why not.
        problem: String,
    },
    /// A checkpoint of a job whose model, features or optimizers are others.
    #[error("{checkpoint} is of another job: {difference}; set it back, or give this job a checkpoint path of its own")]
    OtherJob {
        /// The checkpoint.
        checkpoint: String,
        /// The first thing that differs.
        difference: Difference,
    },
    /// The files given to `commit` are not a checkpoint.
    #[error("cannot finish checkpoint {checkpoint}: {problem}")]
    Incomplete {
        /// The checkpoint.
        checkpoint: String,
        /// What is missing or twice there.
        problem: String,
    },
    /// Rows that the store refuses.
    #[error("cannot restore slot {slot} from {file}: {source}")]
    Rows {
        /// The file.
        file: String,
        /// The slot.
        slot: Slot,
        /// Why.
        source: StoreError,
    },
    /// A store that cannot be saved.
    #[error("cannot save the embedding rows: {0}")]
    Save(#[source] StoreError),
    /// A state that the checkpoint does not hold.
    #[error("{checkpoint} holds no {what}")]
    NotHeld {
        /// The checkpoint.
        checkpoint: String,
        /// What was asked for.
        what: String,
    },
    /// A thread ended before its work.
    #[error("the thread that was to {what} ended early: {reason}")]
    Task {
        /// What it was doing.
        what: &'static str,
        /// Why it ended.
        reason: String,
    },
}

impl CheckpointError {
    /// Whether the checkpoint itself is at fault, so that an older one may be used in its place. Not so for a storage that
    /// cannot be reached, where falling back would lose steps for nothing, nor for another job's checkpoint.
    #[must_use]
    pub fn is_checkpoints_fault(&self) -> bool {
        !matches!(
            self,
            Self::Storage(_) | Self::OtherJob { .. } | Self::Save(_) | Self::Task { .. } | Self::Incomplete { .. }
        )
    }

    pub(crate) fn mixed_up(file: &str, found: CheckpointId, expected: CheckpointId) -> Self {
        Self::MixedUp {
            file: file.to_owned(),
            what: "checkpoint",
            found: found.to_string(),
            expected: expected.to_string(),
        }
    }
}
