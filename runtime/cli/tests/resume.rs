//! Runs that resume from a checkpoint with other settings or other files: refused with one sentence
//! and exit code 2 before the first step, unless the change is harmless.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod children;
mod common;

use std::fmt::Write as _;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use children::children_of;
use common::{events, run_job};

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

fn checkpoints(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder.join("checkpoints")).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Resumes and expects a refusal: exit code 2 within seconds, no step, and these words.
fn refused(folder: &Path, sets: &[&str], words: &[&str]) {
    let (before, started) = (checkpoints(folder), Instant::now());
    let output = run_job(folder, sets);
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
    events(&run_job(folder.path(), FIRST));
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
    let after = events(&run_job(folder.path(), &["spec.training.optimizer.sparse.learningRate=0.5"]));
    assert_eq!(after.last().unwrap()["samples"], 200);
}

#[test]
fn a_second_run_in_a_path_is_told_how_to_go_on() {
    let folder = folder();
    events(&run_job(folder.path(), FIRST));
    let (none, other) = ("spec.checkpoint.resume=none", "spec.model.kind=dnn");
    let start = "to train from the start, set another path, or save none with --set spec.checkpoint=null";
    refused(folder.path(), &[none], &["set spec.checkpoint.resume to `latest` to resume from it; ", start]);
    let kinds = "spec.model.kind is `\"lr\"` in the checkpoint and `\"dnn\"` in the job";
    refused(folder.path(), &[none, other], &[kinds, "so this job cannot resume from it", start]);
    refused(folder.path(), &[other], &[kinds, "undo that change"]);
    assert!(run_job(folder.path(), &["spec.checkpoint=null"]).status.success());
}

/// Positions count good rows if bad ones are skipped.
#[test]
fn bad_rows_may_be_skipped_from_a_resume_on_but_not_read_again() {
    let folder = folder();
    let skip = "spec.data.badRows.action=skip";
    events(&run_job(folder.path(), FIRST));
    events(&run_job(folder.path(), &["spec.training.steps=12", skip]));
    refused(folder.path(), &["spec.data.badRows.action=fail"], &["spec.data.badRows", "skip"]);
    assert_eq!(events(&run_job(folder.path(), &[skip])).last().unwrap()["samples"], 200);
}

#[test]
fn other_files_within_an_epoch_are_refused_before_the_first_step() {
    let folder = folder();
    let files = |name: &str| folder.path().join("d").join(name);
    events(&run_job(folder.path(), FIRST));
    let restore = || {
        std::fs::remove_dir_all(folder.path().join("d")).unwrap();
        std::fs::create_dir(folder.path().join("d")).unwrap();
        write(folder.path(), "b.csv", 0..100);
        write(folder.path(), "c.csv", 100..200);
    };
    let changes: &[(&dyn Fn(), &str)] = &[
        (&|| write(folder.path(), "a.csv", 200..230), "d/a.csv was added"),
        (&|| write(folder.path(), "d.csv", 200..230), "d/d.csv was added"),
        (&|| write(folder.path(), "b.csv", 300..400), "d/b.csv was replaced"),
        (&|| write(folder.path(), "c.csv", 100..250), "d/c.csv grew from"),
        (&|| write(folder.path(), "c.csv", 100..150), "d/c.csv shrank from"),
        (&|| std::fs::remove_file(files("b.csv")).unwrap(), "d/b.csv was removed"),
        (&|| std::fs::remove_file(files("c.csv")).unwrap(), "d/c.csv was removed"),
        (&|| std::fs::rename(files("b.csv"), files("z.csv")).unwrap(), "d/b.csv was removed or renamed"),
    ];
    for (change, words) in changes {
        change();
        refused(folder.path(), &[], &[words, "within an epoch", "restore the files", "spec.checkpoint.path"]);
        restore();
    }
    refused(folder.path(), &["spec.data.train.paths={d/c.csv,d/b.csv}"], &["d/c.csv now comes before d/b.csv"]);
    std::fs::remove_dir_all(folder.path().join("d")).unwrap();
    refused(folder.path(), &[], &["d/*.csv"]);
    std::fs::create_dir(folder.path().join("d")).unwrap();
    // Written again, the files have another time of modification and their content.
    restore();
    let after = events(&run_job(folder.path(), &[]));
    let summary = after.last().unwrap();
    assert_eq!((&summary["samples"], &summary["steps"]), (&200.into(), &25.into()));
}

#[test]
fn files_may_move_to_another_folder() {
    let folder = folder();
    events(&run_job(folder.path(), FIRST));
    std::fs::rename(folder.path().join("d"), folder.path().join("e")).unwrap();
    let after = events(&run_job(folder.path(), &["spec.data.train.paths={e/*.csv}"]));
    assert_eq!(after.last().unwrap()["samples"], 200);
}

#[test]
fn other_files_may_follow_at_the_end_of_an_epoch() {
    let folder = folder();
    events(&run_job(folder.path(), &[]));
    std::fs::remove_file(folder.path().join("d/b.csv")).unwrap();
    write(folder.path(), "d.csv", 200..330);
    let after = run_job(folder.path(), &["spec.training.epochs=3"]);
    let all = String::from_utf8_lossy(&after.stdout).into_owned();
    assert!(all.contains("epoch 1 begins on other files"), "{all}");
    let after = events(&after);
    let summary = after.last().unwrap();
    // 200 rows in the first epoch, 230 in each of the two others: 25 and twice 29 steps.
    assert_eq!((&summary["samples"], &summary["trainedRows"]), (&660.into(), &660.into()), "{summary}");
    assert_eq!(summary["steps"], 25 + 2 * 29);
    // Within the third epoch, the files of that epoch count.
    write(folder.path(), "e.csv", 400..410);
    events(&run_job(folder.path(), &["spec.training.epochs=4"]));
    let last = events(&run_job(folder.path(), &["spec.training.epochs=4"]));
    assert_eq!(last.last().unwrap()["samples"], 660 + 240);
}

/// Of two loaders, either may report its files first.
#[test]
fn a_run_of_processes_refuses_other_files_too() {
    let folder = folder();
    let processes = |sets: &[&str]| {
        let sets = sets.iter().flat_map(|set| ["--set", set]);
        let mut command = Command::new(env!("CARGO_BIN_EXE_rectrain"));
        command.args(["run", "job.yaml", "--json", "--processes"]).args(sets);
        command.args(["--set", "spec.roles.loader.replicas=2"]).current_dir(folder.path()).output().unwrap()
    };
    assert!(processes(FIRST).status.success());
    write(folder.path(), "a.csv", 200..230);
    let output = processes(&[]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("d/a.csv was added"), "{message}");
    std::fs::remove_file(folder.path().join("d/a.csv")).unwrap();
    assert_eq!(events(&processes(&[])).last().unwrap()["samples"], 200);
}

/// The only dense worker cannot be replaced, so its death begins another attempt.
#[test]
fn an_attempt_after_a_crash_refuses_a_replaced_file() {
    let folder = folder();
    std::fs::remove_file(folder.path().join("d/c.csv")).unwrap();
    // An epoch of 50,000 steps.
    write(folder.path(), "b.csv", 100_000..500_000);
    write(folder.path(), "other", 500_000..900_000);
    let mut command = Command::new(env!("CARGO_BIN_EXE_rectrain"));
    command.args(["run", "job.yaml", "--json", "--processes", "--set"]);
    command.arg("spec.checkpoint.everySteps=50,spec.faultTolerance.backoffSeconds=1");
    command.current_dir(folder.path()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while !lines.next().unwrap().unwrap().contains("checkpointSaved") {}
    std::fs::rename(folder.path().join("d/other"), folder.path().join("d/b.csv")).unwrap();
    let worker = children_of(child.id()).into_iter().find(|(_, role)| role == "dense-worker").unwrap().0;
    assert!(Command::new("kill").args(["-9", &worker.to_string()]).status().unwrap().success());
    let rest: Vec<String> = lines.map(|line| line.unwrap()).collect();
    let output = child.wait_with_output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("d/b.csv was replaced") && message.contains("within an epoch"), "{message}");
    assert!(!rest.iter().any(|line| line.contains("\"resumed\"")), "{rest:?}");
}
