//! Runs of the `rectrain` binary for tests.

use std::io::{BufRead, BufReader, Lines};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

/// A job on synthetic clicks that trains in a second or two.
pub const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [16, 8]}
  features:
    sparse: [{name: 'C{1..26}'}]
    dense: [{name: 'I{1..13}'}]
  data:
    synthetic: {rows: 3000, testRows: 500, vocabulary: 1000}
  training: {globalBatchSize: 128}
";

/// Starts a run and waits until it trains. Returns it and the rest of its output.
pub fn training(folder: &Path, arguments: &[&str]) -> (Child, Lines<BufReader<ChildStdout>>) {
    training_with(folder, arguments, None)
}

pub fn training_with(
    folder: &Path,
    arguments: &[&str],
    variable: Option<(&str, &str)>,
) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_rectrain"))
        .args(arguments)
        .envs(variable)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while !lines.next().unwrap().unwrap().contains("progress") {}
    (child, lines)
}

pub fn folder_with(manifest: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.yaml"), manifest).unwrap();
    folder
}
