//! Reads the text files that commands take: manifests, simulations, traces. `-` is standard input.

use std::io::{ErrorKind, Read};
use std::path::Path;

use crate::failure::Failure;

/// The path that stands for standard input.
const STANDARD_INPUT: &str = "-";

/// The name of a file in messages.
pub(crate) fn name(path: &Path) -> String {
    if path == Path::new(STANDARD_INPUT) { "standard input".to_owned() } else { path.display().to_string() }
}

/// The text of a file, or of standard input. `what` names the file's content in errors: "manifest".
pub(crate) fn read(path: &Path, what: &str) -> Result<String, Failure> {
    let name = name(path);
    let bytes = bytes(path).map_err(|error| Failure::User(unreadable(path, &name, what, &error)))?;
    String::from_utf8(bytes).map_err(|error| {
        let before = &error.as_bytes()[..error.utf8_error().valid_up_to()];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        Failure::User(format!(
            "{name}:{line}: the {what} cannot be read: this line is not UTF-8: save the file with the encoding UTF-8"
        ))
    })
}

fn bytes(path: &Path) -> std::io::Result<Vec<u8>> {
    if path != Path::new(STANDARD_INPUT) {
        return std::fs::read(path);
    }
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn unreadable(path: &Path, name: &str, what: &str, error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::IsADirectory => format!("{name}: the {what} cannot be read: this is a folder: name a file in it"),
        ErrorKind::NotFound if path.is_relative() => {
            let folder = std::env::current_dir().map(|folder| folder.display().to_string()).unwrap_or_default();
            format!("{name}: the {what} cannot be read: there is no such file in {folder}: check the path")
        }
        _ => format!("{name}: the {what} cannot be read: {error}"),
    }
}
