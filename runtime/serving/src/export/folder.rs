//! A folder that appears with all of its files at once, or not at all.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::error::ServingError;

/// A folder under construction, beside its final place. Dropping it before
/// [`finish`](Folder::finish) deletes it.
pub(super) struct Folder {
    output: PathBuf,
    partial: PathBuf,
}

impl Folder {
    /// Begins the folder `output`, which does not exist yet or is empty.
    pub(super) fn begin(output: &Path) -> Result<Self, ServingError> {
        match fs::read_dir(output).map(|mut entries| entries.next().is_none()) {
            Ok(true) => {}
            Ok(false) => return Err(ServingError::NotEmpty { folder: output.to_owned() }),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(ServingError::io("list the folder", output)(error)),
        }
        let absolute = std::path::absolute(output).map_err(ServingError::io("find", output))?;
        let name = absolute.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parent = absolute.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(parent).map_err(ServingError::io("make the folder", parent))?;
        let partial = parent.join(format!(".{name}.partial-{}", std::process::id()));
        fs::create_dir(&partial).map_err(ServingError::io("make the folder", &partial))?;
        Ok(Self { output: absolute, partial })
    }

    /// Writes a file durably.
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> Result<(), ServingError> {
        let path = self.partial.join(name);
        let write = || {
            let mut file = File::create(&path)?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().map_err(ServingError::io("write", &path))
    }

    /// Moves the folder to its place. It replaces an empty folder.
    pub(super) fn finish(self) -> Result<(), ServingError> {
        fs::rename(&self.partial, &self.output).map_err(ServingError::io("make the folder", &self.output))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // After `finish` the folder is no longer there.
        let _ = fs::remove_dir_all(&self.partial);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unfinished_folder_leaves_nothing_behind() {
        let place = tempfile::tempdir().unwrap();
        let output = place.path().join("export");
        let folder = Folder::begin(&output).unwrap();
        folder.write("a", b"b").unwrap();
        drop(folder);
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
        let folder = Folder::begin(&output).unwrap();
        folder.write("a", b"b").unwrap();
        folder.finish().unwrap();
        assert_eq!(fs::read(output.join("a")).unwrap(), b"b");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
        assert!(matches!(Folder::begin(&output), Err(ServingError::NotEmpty { .. })));
    }
}
