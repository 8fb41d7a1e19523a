//! Where the parameter servers of `rectrain run --processes` keep their rows, and the coordinator its journal: a directory in `/dev/shm`,
//! which outlives them and is removed with the run.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// A file system in memory.
const MEMORY: &str = "/dev/shm";
/// What directories of runs begin with; the number of the process follows.
const PREFIX: &str = "rectrain-";

/// A file that a run holds locked in its directory as long as it lives.
const LOCK: &str = "lock";

/// See the module's text.
#[derive(Debug)]
pub(super) struct SharedMemory {
    directory: PathBuf,
    /// Unlocked when the process ends, however that is.
    _lock: File,
}

impl SharedMemory {
    /// Of this run. `None`, and a word in the log, where there is no such file system.
    pub(super) fn of_run() -> Option<Self> {
        let memory = Path::new(MEMORY);
        if !memory.is_dir() {
            tracing::info!("there is no {MEMORY}: a parameter server that dies takes its rows with it");
            return None;
        }
        remove_left_over(memory);
        let directory = memory.join(format!("{PREFIX}{}", std::process::id()));
        match lock(&directory) {
            Ok(_lock) => Some(Self { directory, _lock }),
            Err(error) => {
                tracing::warn!(%error, "a parameter server that dies takes its rows with it: cannot use {}", directory.display());
                None
            }
        }
    }

    /// The coordinator's part of it.
    pub(super) fn of_coordinator(&self) -> PathBuf {
        self.directory.join("coordinator")
    }

    /// Forgets what the coordinator of an attempt that is over knew.
    pub(super) fn forget_coordinator(&self) -> std::io::Result<()> {
        match std::fs::remove_dir_all(self.of_coordinator()) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }

    /// A server's part of it.
    pub(super) fn of_server(&self, index: u32) -> PathBuf {
        self.directory.join(format!("ps-{index}"))
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.directory) {
            tracing::warn!(%error, "memory stays taken: cannot remove {}", self.directory.display());
        }
    }
}

/// Makes the directory of a run, for its user alone.
fn lock(directory: &Path) -> std::io::Result<File> {
    DirBuilder::new().mode(0o700).create(directory)?;
    let lock = File::create(directory.join(LOCK))?;
    lock.lock()?;
    Ok(lock)
}

/// A run that was killed could not remove its own.
fn remove_left_over(memory: &Path) {
    for entry in std::fs::read_dir(memory).into_iter().flatten().flatten() {
        let is_a_runs = entry.file_name().to_str().is_some_and(|name| {
            name.strip_prefix(PREFIX)
                .is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
        });
        // One without a lock is just being made.
        let Ok(lock) = File::open(entry.path().join(LOCK)) else { continue };
        if is_a_runs
            && lock.try_lock().is_ok()
            && let Err(error) = std::fs::remove_dir_all(entry.path())
        {
            tracing::debug!(%error, "it stays: {}", entry.path().display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_that_was_killed_has_left_is_removed_and_what_is_in_use_is_not() {
        let memory = tempfile::tempdir().unwrap();
        let [killed, living, others] = ["rectrain-1", "rectrain-2", "rectrain-x"].map(|name| memory.path().join(name));
        drop(lock(&killed).unwrap());
        let held = lock(&living).unwrap();
        drop(lock(&others).unwrap());
        remove_left_over(memory.path());
        assert_eq!([killed.exists(), living.exists(), others.exists()], [false, true, true]);
        drop(held);
    }
}
