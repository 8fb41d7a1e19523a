//! The directory in `/dev/shm` where the parameter servers of `rectrain run --processes` keep their
//! rows, and the coordinator keeps its journal. It outlives these processes. The run removes it at
//! its end.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// A file system in memory.
const MEMORY: &str = "/dev/shm";
/// The prefix of the directories of runs, before the process id.
const PREFIX: &str = "rectrain-";

/// A file in the run's directory, which the run keeps locked as long as it lives.
const LOCK: &str = "lock";

/// See the module's text.
#[derive(Debug)]
pub(super) struct SharedMemory {
    directory: PathBuf,
    /// The system unlocks it when the process ends, even if it is killed.
    _lock: File,
}

impl SharedMemory {
    /// Makes the directory of this run. Without `/dev/shm` it logs the reason and returns `None`.
    pub(super) fn create() -> Option<Self> {
        let memory = Path::new(MEMORY);
        if !memory.is_dir() {
            tracing::info!("there is no {MEMORY}: a parameter server that dies loses its rows");
            return None;
        }
        remove_abandoned(memory);
        let directory = memory.join(format!("{PREFIX}{}", std::process::id()));
        match lock(&directory) {
            Ok(_lock) => Some(Self { directory, _lock }),
            Err(error) => {
                tracing::warn!(%error, "cannot use {}: a parameter server that dies loses its rows", directory.display());
                None
            }
        }
    }

    /// The directory of the coordinator's journal.
    pub(super) fn coordinator_directory(&self) -> PathBuf {
        self.directory.join("coordinator")
    }

    /// Removes the coordinator's journal of the previous attempt.
    pub(super) fn forget_coordinator(&self) -> std::io::Result<()> {
        match std::fs::remove_dir_all(self.coordinator_directory()) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// The directory of a parameter server's rows.
    pub(super) fn server_directory(&self, index: u32) -> PathBuf {
        self.directory.join(format!("ps-{index}"))
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.directory) {
            tracing::warn!(%error, "cannot remove {}: its memory stays in use", self.directory.display());
        }
    }
}

/// Makes and locks the directory of a run. Only its user can access it.
fn lock(directory: &Path) -> std::io::Result<File> {
    DirBuilder::new().mode(0o700).create(directory)?;
    let lock = File::create(directory.join(LOCK))?;
    lock.lock()?;
    Ok(lock)
}

/// Removes the directories of killed runs, which could not remove their own.
fn remove_abandoned(memory: &Path) {
    for entry in std::fs::read_dir(memory).into_iter().flatten().flatten() {
        let is_a_runs = entry.file_name().to_str().is_some_and(|name| {
            name.strip_prefix(PREFIX)
                .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        });
        // A directory without the file is being made at this moment.
        let Ok(lock) = File::open(entry.path().join(LOCK)) else { continue };
        if is_a_runs
            && lock.try_lock().is_ok()
            && let Err(error) = std::fs::remove_dir_all(entry.path())
        {
            tracing::debug!(%error, "cannot remove {}", entry.path().display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_directories_of_killed_runs_are_removed() {
        let memory = tempfile::tempdir().unwrap();
        let [killed, living, others] = ["rectrain-1", "rectrain-2", "rectrain-x"].map(|name| memory.path().join(name));
        drop(lock(&killed).unwrap());
        let held = lock(&living).unwrap();
        drop(lock(&others).unwrap());
        remove_abandoned(memory.path());
        assert_eq!([killed.exists(), living.exists(), others.exists()], [false, true, true]);
        drop(held);
    }
}
