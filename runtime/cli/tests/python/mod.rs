//! Python for the tests that compare the product with other programs.

use std::path::{Path, PathBuf};
use std::process::Command;

/// All packages that any test imports. They share one virtual environment.
const INSTALLED: [&str; 4] = ["numpy", "pyarrow", "safetensors", "onnxruntime"];

/// A Python with `packages`, from a virtual environment in the user's cache. `None` if the packages
/// cannot be installed.
pub fn find(packages: &[&str]) -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))?;
    let folder = cache.join("rectrain/venv-export");
    let python = folder.join("bin/python");
    let imports = format!("import {}", packages.join(", "));
    let works = || Command::new(&python).args(["-c", &imports]).output().is_ok_and(|output| output.status.success());
    if works() {
        return Some(python);
    }
    let made = Command::new("python3").args(["-m", "venv"]).arg(&folder).output();
    let installed =
        made.and_then(|_| Command::new(&python).args(["-m", "pip", "install", "--quiet"]).args(INSTALLED).output());
    if works() {
        return Some(python);
    }
    eprintln!("SKIPPED: {packages:?} cannot be installed: {installed:?}");
    None
}
