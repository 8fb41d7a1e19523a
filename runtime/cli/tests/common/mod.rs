//! Common ground of the tests that run `rectrain`.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Runs `rectrain` in a folder until it ends.
pub fn rectrain(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_rectrain")).args(arguments).current_dir(folder).output().unwrap()
}

/// Runs `job.yaml` of a folder with `--json` and these `--set`s until it ends.
pub fn run_job(folder: &Path, sets: &[&str]) -> Output {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    rectrain(folder, &["run", "job.yaml", "--json"].into_iter().chain(sets).collect::<Vec<_>>())
}

/// The error of a run of `job.yaml` that fails because of its settings or data.
pub fn refusal_of_job(folder: &Path, sets: &[&str]) -> String {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let output = rectrain(folder, &["run", "job.yaml"].into_iter().chain(sets).collect::<Vec<_>>());
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// The last event: the summary of a run that ended well.
pub fn summary(events: &[Value]) -> &Value {
    events.last().unwrap()
}

/// The events that a successful run with `--json` printed.
pub fn events(output: &Output) -> Vec<Value> {
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}
