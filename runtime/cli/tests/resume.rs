//! Runs that resume from a checkpoint with other settings or other files: refused with one sentence
//! and exit code 2 before the first step, unless the change is harmless.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Trains 10 of the 25 steps of an epoch.
const FIRST: &[&str] = &["spec.training.steps=10"];

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: lr}
  features:
    sparse: [{name: user}, {name: tags, multiValue: {separator: '|'}}]
    dense: [{name: age}]
  data: {train: {paths: ['d/*.csv']}}
  training: {globalBatchSize: 8}
  checkpoint: {path: checkpoints, resume: latest}
";

/// Files `d/b.csv` and `d/c.csv` of 100 rows each, and a job on them.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.yaml"), JOB).unwrap();
    std::fs::create_dir(folder.path().join("d")).unwrap();
    write(folder.path(), "b.csv", 0..100);
    write(folder.path(), "c.csv", 100..200);
    folder
}

/// Writes a file with one user a row.
fn write(folder: &Path, name: &str, users: std::ops::Range<u32>) {
    let mut text = "label,other,user,tags,age\n".to_owned();
    for user in users {
        let label = user % 2;
        writeln!(text, "{label},{},u{user:04},a|b;c,{}", 1 - label, user % 7).unwrap();
    }
    std::fs::write(folder.join("d").join(name), text).unwrap();
}

fn run(folder: &Path, sets: &[&str]) -> Output {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let mut command = Command::new(env!("CARGO_BIN_EXE_rectrain"));
    command.args(["run", "job.yaml", "--json"]).args(sets).current_dir(folder).output().unwrap()
}

fn events(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn checkpoints(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join("checkpoints")).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Resumes and expects a refusal: exit code 2 within seconds, no step, and these words.
fn refused(folder: &Path, sets: &[&str], words: &[&str]) {
    let (before, started) = (checkpoints(folder), Instant::now());
    let output = run(folder, sets);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{sets:?}: {message}");
    assert!(started.elapsed() < Duration::from_secs(10), "{sets:?}: {message}");
    for word in words {
        assert!(message.contains(word), "{sets:?}: `{word}` is not in: {message}");
    }
    assert!(!String::from_utf8_lossy(&output.stdout).contains("\"progress\""), "{sets:?}");
    assert_eq!(checkpoints(folder), before, "{sets:?}");
}

#[test]
fn other_meanings_of_rows_and_labels_are_refused_at_resume() {
    let folder = folder();
    events(&run(folder.path(), FIRST));
    for (change, field, saved, wanted) in [
        ("spec.features.label.name=other", "spec.features.label.name", "\"label\"", "\"other\""),
        (
            "spec.features.sparse[1].multiValue.separator=;",
            "spec.features.sparse.tags.multiValue.separator",
            "\"|\"",
            "\";\"",
        ),
        ("spec.features.label.positiveFrom=0.5", "spec.features.label.positiveFrom", "not set", "0.5"),
        ("spec.features.sparse[0].missing=skip", "spec.features.sparse.user.missing", "\"token\"", "\"skip\""),
        ("spec.features.dense[0].transform=log1p", "denseFeatures.0.transform", "\"identity\"", "\"log1p\""),
        ("spec.data.csv.quoting=false", "spec.data.csv.quoting", "true", "false"),
        ("spec.features.group=user", "spec.features.group", "not set", "\"user\""),
    ] {
        refused(folder.path(), &[change], &[field, saved, wanted, "undo that change"]);
    }
    // The length of training and the learning rate may change.
    let after = events(&run(folder.path(), &["spec.training.optimizer.sparse.learningRate=0.5"]));
    assert_eq!(after.last().unwrap()["samples"], 200);
}

/// Positions count good rows if bad ones are skipped.
#[test]
fn bad_rows_may_be_skipped_from_a_resume_on_but_not_read_again() {
    let folder = folder();
    let skip = "spec.data.badRows.action=skip";
    events(&run(folder.path(), FIRST));
    events(&run(folder.path(), &["spec.training.steps=12", skip]));
    refused(folder.path(), &["spec.data.badRows.action=fail"], &["spec.data.badRows", "skip"]);
    assert_eq!(events(&run(folder.path(), &[skip])).last().unwrap()["samples"], 200);
}
