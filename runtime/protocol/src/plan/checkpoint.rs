//! Where a job's checkpoints are and when they are taken.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use rectrain_checkpoint::CheckpointError;
use rectrain_crds as crds;
use rectrain_embedding::LeastCount;
use rectrain_storage::{Directory, StorageError};

use crate::error::RoleError;

/// The settings of a job's checkpoints.
#[derive(Debug, Clone)]
pub struct CheckpointPlan {
    /// Directory or URL.
    pub path: String,
    /// Options of the object store.
    pub storage_options: BTreeMap<String, String>,
    /// Global batches between two checkpoints; `None`: one checkpoint at the end.
    pub every_steps: Option<u64>,
    /// Time between two checkpoints; `None`: none by time.
    pub every: Option<Duration>,
    /// Every `full_every`-th checkpoint is full; at least 1.
    pub full_every: u32,
    /// Full checkpoints to keep.
    pub keep: NonZeroUsize,
    /// Whether the job may resume from the checkpoint of another run.
    pub resume_latest: bool,
}

/// Publications of the model for inference servers. They are in the store of the checkpoints.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishPlan {
    /// Directory or URL.
    pub path: String,
    /// The least time between two publications; `None`: one for each checkpoint.
    pub every: Option<Duration>,
    /// Full models to keep.
    pub keep: NonZeroUsize,
    /// Rows with fewer examples are not published.
    pub least_count: Option<LeastCount>,
}

/// The shortest time between two checkpoints or publications, in seconds.
const SHORTEST: f64 = 0.1;

/// A time between two checkpoints or publications.
fn interval(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(SHORTEST)).unwrap_or(Duration::MAX)
}

impl PublishPlan {
    pub(super) fn new(publish: &crds::ResolvedPublish) -> Self {
        Self {
            path: publish.path.clone(),
            every: publish.every_seconds.map(interval),
            keep: NonZeroUsize::new(publish.keep).unwrap_or(NonZeroUsize::MIN),
            least_count: publish.min_count.and_then(NonZeroU32::new).map(LeastCount),
        }
    }
}

impl CheckpointPlan {
    pub(super) fn new(checkpoint: &crds::ResolvedCheckpoint, storage_options: &BTreeMap<String, String>) -> Self {
        Self {
            path: checkpoint.path.clone(),
            storage_options: storage_options.clone(),
            every_steps: checkpoint.every_steps.map(|every| every.max(1)),
            every: checkpoint.every_seconds.map(interval),
            full_every: checkpoint.full_every.max(1),
            keep: NonZeroUsize::new(checkpoint.keep).unwrap_or(NonZeroUsize::MIN),
            resume_latest: checkpoint.resume == crds::Resume::Latest,
        }
    }

    /// Opens the directory, and creates a local one if it does not exist.
    ///
    /// # Errors
    /// [`RoleError::Input`] if the path cannot be created or used.
    pub fn directory(&self) -> Result<Directory, RoleError> {
        Directory::open(&self.path, &self.storage_options, true)
            .map_err(|error| Self::at_start(RoleError::Checkpoint(Box::new(error.into()))))
    }

    /// Turns a storage error at the start of a job into [`RoleError::Input`] if the path is wrong.
    /// A retry would not help then.
    pub fn at_start(error: RoleError) -> RoleError {
        let reason = match &error {
            RoleError::Checkpoint(reason) => match &**reason {
                CheckpointError::Storage(reason) if reason.is_users_input() => reason.to_string(),
                _ => return error,
            },
            _ => return error,
        };
        Self::unusable(&reason)
    }

    /// The error of a coordinator that cannot write, read or delete a file in the path. It is the
    /// user's unless the store of a bucket failed or was not reached, which a retry may cure.
    pub fn probe_failed(error: StorageError, is_local: bool) -> RoleError {
        match is_local || !error.is_outage() {
            true => Self::unusable(&error.to_string()),
            false => RoleError::Checkpoint(Box::new(error.into())),
        }
    }

    fn unusable(reason: &str) -> RoleError {
        RoleError::Input(format!(
            "spec.checkpoint.path: {reason}: expected a writable folder (in a cluster, on a volume that coordinator, ps and denseWorker mount) \
             or a gs:// or s3:// URL that they may read and write"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_cannot_be_created_is_the_users_error() {
        let plan = |path: &str| CheckpointPlan {
            path: path.to_owned(),
            storage_options: BTreeMap::new(),
            every_steps: None,
            every: None,
            full_every: 1,
            keep: NonZeroUsize::MIN,
            resume_latest: true,
        };
        let error = plan("/proc/cannot-be-created").directory().expect_err("/proc has no new folders");
        assert!(error.is_user_error(), "{error}");
        assert!(error.to_string().contains("spec.checkpoint.path: cannot"), "{error}");
        let folder = tempfile::tempdir().expect("a folder");
        assert!(plan(&folder.path().join("checkpoints").display().to_string()).directory().is_ok());
        std::fs::write(folder.path().join("file"), "").expect("a file");
        for path in ["file", "file/below"] {
            let error = plan(&folder.path().join(path).display().to_string()).directory().expect_err("it is a file");
            assert!(error.is_user_error(), "{error}");
        }
    }

    #[test]
    fn an_interval_is_a_part_of_a_second_or_longer() {
        let milliseconds = |seconds| interval(seconds).as_millis();
        assert_eq!([0.2, 5.0, 86_400.0].map(milliseconds), [200, 5_000, 86_400_000]);
        assert_eq!([0.0, -1.0, f64::NAN].map(milliseconds), [100; 3], "never without a pause");
        assert_eq!(interval(f64::INFINITY), Duration::MAX);
    }

    #[test]
    fn a_failed_probe_is_the_users_error_unless_a_store_was_not_reached() {
        use object_store::Error;
        let store = |source| StorageError::Store { action: "write", path: "s3://b/ck/probe".to_owned(), source };
        let path = || "ck/probe".to_owned();
        let generic = || store(Error::Generic { store: "S3", source: "no route".into() });
        let io = |kind: std::io::ErrorKind| StorageError::Io { action: "delete", path: path(), source: kind.into() };
        for (error, is_local, is_users) in [
            (io(std::io::ErrorKind::ReadOnlyFilesystem), true, true),
            (io(std::io::ErrorKind::StorageFull), true, true),
            (store(Error::PermissionDenied { path: path(), source: "403".into() }), false, true),
            (store(Error::NotFound { path: path(), source: "no bucket".into() }), false, true),
            (store(Error::Precondition { path: path(), source: "changed".into() }), false, true),
            (generic(), false, false),
        ] {
            let reason = error.to_string();
            let error = CheckpointPlan::probe_failed(error, is_local);
            assert_eq!(error.is_user_error(), is_users, "{error}");
            assert!(error.to_string().contains(&reason), "{error}");
            assert_eq!(error.to_string().contains("spec.checkpoint.path: cannot"), is_users, "{error}");
        }
    }
}
