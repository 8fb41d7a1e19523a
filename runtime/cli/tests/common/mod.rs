//! Common ground of the tests that run `rectrain`.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Runs `rectrain` in a folder until it ends.
pub fn rectrain(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rectrain")).args(arguments).current_dir(folder).output().unwrap()
}

/// The events that a successful run with `--json` printed.
pub fn events(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
