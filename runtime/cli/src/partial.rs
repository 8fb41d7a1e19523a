//! Files that appear under their names once they are complete.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// A file that gets its name when it is complete. Dropping it before deletes it.
pub(crate) struct Partial {
    path: PathBuf,
    partial: PathBuf,
}

impl Partial {
    /// Opens a file that will have this name.
    pub(crate) fn create(name: &str) -> Result<(Self, File), Failure> {
        let path = Path::new(name);
        let file_name = path.file_name().unwrap_or_default().to_string_lossy();
        let partial = path.with_file_name(format!(".{file_name}.partial-{}", std::process::id()));
        let file = File::create(&partial).map_err(|error| failed(name, error))?;
        Ok((Self { path: path.to_owned(), partial }, file))
    }

    /// Gives the file its name.
    pub(crate) fn finish(&self) -> std::io::Result<()> {
        std::fs::rename(&self.partial, &self.path)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // After `finish` the file is no longer there.
        let _ = std::fs::remove_file(&self.partial);
    }
}

/// The failure to write a file of this name.
pub(crate) fn failed(name: &str, error: impl std::fmt::Display) -> Failure {
    Failure::Failed(format!("cannot write {name}: {error}"))
}

/// Writes a whole file of text. A file that exists is replaced at once; a device or a pipe of this
/// name is written to.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<(), Failure> {
    let name = path.display().to_string();
    if path.metadata().is_ok_and(|found| !found.is_file()) {
        return std::fs::write(path, text).map_err(|error| failed(&name, error));
    }
    let (partial, mut file) = Partial::create(&name)?;
    file.write_all(text.as_bytes()).and_then(|()| partial.finish()).map_err(|error| failed(&name, error))
}
