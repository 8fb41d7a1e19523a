//! Where the parameter servers of `rectrain run --processes` keep their rows: a directory in `/dev/shm`, which outlives them and is removed
//! with the run.

use std::path::{Path, PathBuf};

/// A file system in memory.
const MEMORY: &str = "/dev/shm";
/// What directories of runs begin with; the number of the process follows.
const PREFIX: &str = "rectrain-";

/// See the module's text.
#[derive(Debug)]
pub(super) struct SharedMemory(PathBuf);

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
        match std::fs::create_dir(&directory) {
            Ok(()) => Some(Self(directory)),
            Err(error) => {
                tracing::warn!(%error, "a parameter server that dies takes its rows with it: cannot make {}", directory.display());
                None
            }
        }
    }

    /// A server's part of it.
    pub(super) fn of_server(&self, index: u32) -> PathBuf {
        self.0.join(format!("ps-{index}"))
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            tracing::warn!(%error, "memory stays taken: cannot remove {}", self.0.display());
        }
    }
}

/// A run that was killed could not remove its own.
fn remove_left_over(memory: &Path) {
    for entry in std::fs::read_dir(memory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(process) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.parse::<u32>().ok()) else {
            continue;
        };
        if !Path::new("/proc").join(process.to_string()).exists()
            && let Err(error) = std::fs::remove_dir_all(entry.path())
        {
            tracing::debug!(%error, "another's: {}", entry.path().display());
        }
    }
}
