//! Files and folders, with errors that name them.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::HarnessError;

/// Reads a text file.
///
/// # Errors
/// [`HarnessError::Io`].
pub fn read(path: &Path) -> Result<String, HarnessError> {
    std::fs::read_to_string(path).map_err(HarnessError::io("read", path.display()))
}

/// Writes a file, and makes the folders above it.
///
/// # Errors
/// [`HarnessError::Io`].
pub fn write(path: &Path, text: impl AsRef<[u8]>) -> Result<(), HarnessError> {
    if let Some(folder) = path.parent() {
        make_folder(folder)?;
    }
    std::fs::write(path, text).map_err(HarnessError::io("write", path.display()))
}

/// Makes a folder and those above it.
///
/// # Errors
/// [`HarnessError::Io`].
pub fn make_folder(folder: &Path) -> Result<(), HarnessError> {
    std::fs::create_dir_all(folder).map_err(HarnessError::io("make the folder", folder.display()))
}

/// The path of a folder for this process, where temporary files go.
#[must_use]
pub fn temporary_folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("rectrain-{name}-{}", std::process::id()))
}

/// Removes a folder, if it exists.
///
/// # Errors
/// [`HarnessError::Io`].
pub fn remove_folder(folder: &Path) -> Result<(), HarnessError> {
    match std::fs::remove_dir_all(folder) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(HarnessError::io("remove", folder.display())(source))
        }
        _ => Ok(()),
    }
}

/// Creates or empties a log file for a program's output.
///
/// # Errors
/// [`HarnessError::Io`].
pub fn log_file(path: &Path) -> Result<File, HarnessError> {
    if let Some(folder) = path.parent() {
        make_folder(folder)?;
    }
    File::create(path).map_err(HarnessError::io("write the log", path.display()))
}

/// Waits for an exclusive lock on a file, which other processes honour too. Dropping the file
/// releases it.
///
/// # Errors
/// [`HarnessError::Io`].
pub fn lock(path: &Path) -> Result<File, HarnessError> {
    if let Some(folder) = path.parent() {
        make_folder(folder)?;
    }
    let file = File::create(path).map_err(HarnessError::io("open", path.display()))?;
    file.lock().map_err(HarnessError::io("lock", path.display()))?;
    Ok(file)
}
