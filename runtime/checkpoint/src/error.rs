//! The errors of checkpoints, as sentences that name the file, the finding and the expectation.

use rectrain_embedding::{Slot, StoreError};
use rectrain_storage::StorageError;

use crate::identity::Difference;
use crate::name::CheckpointId;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The storage failed: a full disk, a bucket that cannot be reached.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The name is not a checkpoint's.
    #[error(
        "`{name}` is not the name of a checkpoint; expected a name like step-000000001234 or step-000000001234-delta"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// Files without a manifest: the checkpoint was never finished.
    #[error("{checkpoint} has no manifest.json: it was never finished; use another checkpoint")]
    Unfinished {
        /// The directory.
        checkpoint: String,
    },
    /// The manifest's content is invalid.
    #[error("{file} is damaged: {problem}; use another checkpoint")]
    Manifest {
        /// The manifest.
        file: String,
        /// The problem with it.
        problem: String,
    },
    /// The file was written by a newer program.
    #[error(
        "{file} has format version {found} and this program reads versions up to {supported}; use the program that wrote it \
         or a newer one"
    )]
    FutureVersion {
        /// The manifest or rows file.
        file: String,
        /// Its version.
        found: u64,
        /// The newest version that this program reads.
        supported: u64,
    },
    /// A file named by the manifest does not exist.
    #[error("{file} is missing: the manifest names it with {expected} bytes")]
    Missing {
        /// The file.
        file: String,
        /// Its size in the manifest.
        expected: u64,
    },
    /// A file with a wrong size.
    #[error("{file} has {found} bytes and should have {expected}: it was truncated or extended")]
    Size {
        /// The file.
        file: String,
        /// Its size.
        found: u64,
        /// Its size in the manifest.
        expected: u64,
    },
    /// A file with wrong content.
    #[error("{file} is damaged: its checksum (XXH3-64) is {found:016x} and should be {expected:016x}")]
    Checksum {
        /// The file, or the part of it that the checksum covers.
        file: String,
        /// The checksum of the bytes that were read.
        found: u64,
        /// The checksum stored when the file was written.
        expected: u64,
    },
    /// A file of another checkpoint, or another file of this one.
    #[error("{file} belongs elsewhere: its {what} is {found} and should be {expected}")]
    MixedUp {
        /// The file.
        file: String,
        /// The property that reveals it.
        what: &'static str,
        /// Its value in the file.
        found: String,
        /// Its value in the manifest.
        expected: String,
    },
    /// A file of the right size with invalid content.
    #[error("{file} is damaged: {problem}")]
    Damaged {
        /// The file.
        file: String,
        /// The problem with it.
        problem: String,
    },
    /// A delta whose base cannot be used.
    #[error("{checkpoint} holds changes since {base}, which cannot be used: {problem}")]
    Base {
        /// The delta.
        checkpoint: String,
        /// Its base.
        base: String,
        /// Why the base cannot be used.
        problem: String,
    },
    /// A checkpoint of a job with another model, other features or other optimizers.
    #[error(
        "{checkpoint} belongs to another job: {difference}; undo that change, or give this job its own checkpoint path (with spec.checkpoint.from it begins with this model)"
    )]
    OtherJob {
        /// The checkpoint.
        checkpoint: String,
        /// The first difference.
        difference: Difference,
    },
    /// Another process has the lease on the checkpoint path.
    #[error(
        "{path} is in use by {held_by}: wait for its end or stop it, or set another path; delete {path}/lease.json only if no run uses the path"
    )]
    Leased {
        /// The checkpoint path.
        path: String,
        /// The run that has the lease.
        held_by: String,
    },
    /// Another process of the same run has the lease on the checkpoint path: the replacement of
    /// this one.
    #[error("{path} is in use by another process of this run, which has replaced this one")]
    Replaced {
        /// The checkpoint path.
        path: String,
    },
    /// The files passed to `commit` do not form a checkpoint.
    #[error("cannot finish checkpoint {checkpoint}: {problem}")]
    Incomplete {
        /// The checkpoint.
        checkpoint: String,
        /// The missing or duplicate part.
        problem: String,
    },
    /// The store refuses the rows.
    #[error("cannot restore slot {slot} from {file}: {source}")]
    Rows {
        /// The file.
        file: String,
        /// The slot.
        slot: Slot,
        /// The store's reason.
        source: StoreError,
    },
    /// The store cannot be saved.
    #[error("cannot save the embedding rows: {0}")]
    Save(#[source] StoreError),
    /// The checkpoint does not hold the requested part.
    #[error("{checkpoint} holds no {what}")]
    NotHeld {
        /// The checkpoint.
        checkpoint: String,
        /// The requested part.
        what: String,
    },
    /// A blocking task did not finish its work.
    #[error("the task to {what} ended early: {reason}")]
    Task {
        /// The work.
        what: &'static str,
        /// Why it ended.
        reason: String,
    },
}

impl CheckpointError {
    /// True if the checkpoint itself is bad, so that an older one may be used. False for a storage
    /// that cannot be reached, since falling back would lose steps for nothing. False for another
    /// job's checkpoint, too.
    #[must_use]
    pub fn is_checkpoints_fault(&self) -> bool {
        !matches!(
            self,
            Self::Storage(_)
                | Self::OtherJob { .. }
                | Self::Leased { .. }
                | Self::Replaced { .. }
                | Self::Save(_)
                | Self::Task { .. }
                | Self::Incomplete { .. }
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
