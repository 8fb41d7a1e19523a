//! Where the checkout, the built programs and the cache are.

use std::path::{Path, PathBuf};

use crate::HarnessError;
use crate::processes::own_program;

/// The checkout.
#[must_use]
pub fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// A program in the target folder of the running program, as in `rectrain` and `examples/generate`.
///
/// # Errors
/// [`HarnessError::Io`] if the running program's own path is unknown.
pub fn built(name: &str) -> Result<PathBuf, HarnessError> {
    Ok(own_program()?.with_file_name(name))
}

/// The folder for downloads and builds that outlive a run: `$XDG_CACHE_HOME/rectrain`, by default
/// `~/.cache/rectrain`.
///
/// # Errors
/// [`HarnessError::NoCache`] if neither XDG_CACHE_HOME nor HOME is set.
pub fn cache() -> Result<PathBuf, HarnessError> {
    let cache = match std::env::var_os("XDG_CACHE_HOME").filter(|folder| !folder.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(&std::env::var_os("HOME").ok_or(HarnessError::NoCache)?).join(".cache"),
    };
    Ok(cache.join("rectrain"))
}

/// The target folder that the running program was built into.
///
/// # Errors
/// [`HarnessError::Io`] if the running program's own path is unknown.
pub fn target_folder() -> Result<PathBuf, HarnessError> {
    let own = own_program()?;
    Ok(own.ancestors().nth(2).unwrap_or(&own).to_path_buf())
}
