//! The files of the checkout.

use std::path::{Path, PathBuf};

use crate::error::LintError;

/// Folders with a leading dot that contain sources. The walk skips all others.
const HIDDEN_SOURCES: &[&str] = &[".cargo", ".ci", ".config", ".github"];

/// Reads a file of the checkout.
pub fn read(path: &Path) -> Result<String, LintError> {
    std::fs::read_to_string(path).map_err(|error| LintError::read(path, error))
}

/// Files below `root` that `wanted` accepts, sorted, as paths relative to `root`.
///
/// The walk skips the folders that `root/.gitignore` names, hidden folders, and the build folders
/// of cargo.
pub fn files(root: &Path, wanted: impl Fn(&Path) -> bool) -> Result<Vec<PathBuf>, LintError> {
    let ignored = ignored_folders(&std::fs::read_to_string(root.join(".gitignore")).unwrap_or_default());
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let full = root.join(&folder);
        let entries = std::fs::read_dir(&full).map_err(|error| LintError::read(&full, error))?;
        for entry in entries {
            let entry = entry.map_err(|error| LintError::read(&full, error))?;
            let kind = entry.file_type().map_err(|error| LintError::read(&entry.path(), error))?;
            let path = folder.join(entry.file_name());
            if kind.is_dir() {
                if is_source_folder(root, &path, &ignored) {
                    folders.push(path);
                }
            } else if kind.is_file() && wanted(&path) {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

fn is_source_folder(root: &Path, folder: &Path, ignored: &[IgnoredFolder]) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let is_hidden = name.starts_with('.') && !HIDDEN_SOURCES.contains(&name);
    let is_build_output = root.join(folder).join("CACHEDIR.TAG").exists();
    !is_hidden && !is_build_output && !ignored.iter().any(|pattern| pattern.matches(folder))
}

/// A line of `.gitignore` that names a folder.
#[derive(Debug, PartialEq, Eq)]
struct IgnoredFolder {
    path: PathBuf,
    /// The path starts at the root. Otherwise the folder may be anywhere.
    is_anchored: bool,
}

impl IgnoredFolder {
    fn matches(&self, folder: &Path) -> bool {
        if self.is_anchored { folder == self.path } else { folder.ends_with(&self.path) }
    }
}

/// The folders that a `.gitignore` names. Only `a/`, `/a/` and `**/a/b/` are understood.
fn ignored_folders(gitignore: &str) -> Vec<IgnoredFolder> {
    let mut folders = Vec::new();
    for line in gitignore.lines() {
        let Some(path) = line.trim().strip_suffix('/') else { continue };
        let anywhere = path.strip_prefix("**/");
        let is_anchored = anywhere.is_none() && path.contains('/');
        let path = anywhere.unwrap_or(path).trim_start_matches('/');
        folders.push(IgnoredFolder { path: path.into(), is_anchored });
    }
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_folders_may_be_anchored_or_anywhere() {
        let ignored = ignored_folders("target/\n/data/\n*.log\n**/fuzz/corpus/\n");
        let is_ignored = |path: &str| ignored.iter().any(|pattern| pattern.matches(Path::new(path)));
        for path in ["target", "a/target", "data", "wire/fuzz/corpus"] {
            assert!(is_ignored(path), "{path}");
        }
        for path in ["runtime/data", "corpus", "targets"] {
            assert!(!is_ignored(path), "{path}");
        }
    }
}
