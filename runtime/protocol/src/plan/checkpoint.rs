//! Where a job's checkpoints are and when they are taken.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use rectrain_checkpoint::CheckpointError;
use rectrain_crds as crds;
use rectrain_storage::Directory;

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

    /// The directory, made if it is one of this machine's and not there. A path that cannot be, or be used, is the user's error.
    pub fn directory(&self) -> Result<Directory, RoleError> {
        Directory::open(&self.path, &self.storage_options, true)
            .map_err(|error| Self::at_start(RoleError::Checkpoint(Box::new(error.into()))))
    }

    /// What stands in the way of checkpoints when a job begins. A folder that cannot be made or a bucket that is not there is then the
    /// user's error: trying again would not mend it.
    pub fn at_start(error: RoleError) -> RoleError {
        let reason = match &error {
            RoleError::Checkpoint(reason) => match &**reason {
                CheckpointError::Storage(reason) if reason.is_users_input() => reason.to_string(),
                _ => return error,
            },
            _ => return error,
        };
        RoleError::Input(format!(
            "spec.checkpoint.path: {reason}; it is a folder that can be written to, in a cluster one of a volume that coordinator, ps and \
             denseWorker mount, or a gs:// or s3:// URL that they have the right to use"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_made_is_the_users_error() {
        let plan = |path: &str| CheckpointPlan {
            path: path.to_owned(),
            storage_options: BTreeMap::new(),
            every_steps: None,
            full_every: 1,
            keep: NonZeroUsize::MIN,
            resume_latest: true,
        };
        let error = plan("/proc/nobody-can-make-it").directory().expect_err("/proc takes no folder");
        assert!(error.is_user_error(), "{error}");
        assert!(error.to_string().contains("spec.checkpoint.path: cannot"), "{error}");
        let folder = tempfile::tempdir().expect("a folder");
        assert!(plan(&folder.path().join("checkpoints").display().to_string()).directory().is_ok());
    }
}
