//! Where a job's checkpoints are and when they are taken.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use rectrain_crds as crds;
use rectrain_storage::{Directory, StorageError};

use crate::error::RoleError;

/// See the module's text.
#[derive(Debug, Clone)]
pub struct CheckpointPlan {
    /// Directory or URL.
    pub path: String,
    /// Options of the object store.
    pub storage_options: BTreeMap<String, String>,
    /// Global batches between two; none: one at the end.
    pub every_steps: Option<u64>,
    /// Every how many a full one is written, at least 1.
    pub full_every: u32,
    /// Full ones that are kept.
    pub keep: NonZeroUsize,
    /// Whether another run's checkpoint is gone on from.
    pub resume_latest: bool,
}

impl CheckpointPlan {
    pub(super) fn new(checkpoint: &crds::ResolvedCheckpoint, storage_options: &BTreeMap<String, String>) -> Self {
        Self {
            path: checkpoint.path.clone(),
            storage_options: storage_options.clone(),
            every_steps: checkpoint.every_steps.map(|every| every.max(1)),
            full_every: checkpoint.full_every.max(1),
            keep: NonZeroUsize::new(checkpoint.keep).unwrap_or(NonZeroUsize::MIN),
            resume_latest: checkpoint.resume == crds::Resume::Latest,
        }
    }

    /// The directory, made if it is one of this machine's and not there. A path that cannot be is the user's error.
    pub(crate) fn directory(&self) -> Result<Directory, RoleError> {
        Directory::open(&self.path, &self.storage_options, true).map_err(|error| match error {
            StorageError::BadPath { .. } | StorageError::UnknownOption { .. } => {
                RoleError::Input(format!("spec.checkpoint.path: {error}"))
            }
            other => RoleError::Checkpoint(Box::new(other.into())),
        })
    }
}
