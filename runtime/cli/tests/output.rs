//! Every command with a reader that closes the pipe, and with a full disk. None panics: a closed
//! pipe changes nothing, and a full disk is a failure.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod binary;

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use binary::{JOB, folder_with, training};

const SIMULATION: &str = "{apiVersion: rectrain.dev/v1alpha1, kind: Simulation, spec: {workers: 2, seconds: 1}}";

/// A folder with a job, a checkpoint in `ck`, a profile of the data, and a simulation.
fn folder() -> tempfile::TempDir {
    let folder = folder_with(JOB);
    std::fs::write(folder.path().join("s.yaml"), SIMULATION).unwrap();
    let saved = command(folder.path(), &["run", "job.yaml", "--set", "spec.checkpoint.path=ck"]).output().unwrap();
    assert!(saved.status.success(), "{saved:?}");
    let profile = ["data", "profile", "job.yaml", "--json", "profile.json"];
    let profiled = command(folder.path(), &profile).output().unwrap();
    assert!(profiled.status.success(), "{profiled:?}");
    folder
}

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rectrain"));
    command.args(arguments).current_dir(folder).stdin(Stdio::null());
    command
}

/// Runs a command whose standard output is a pipe that nothing reads.
fn without_reader(folder: &Path, arguments: &[&str]) -> Output {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    command(folder, arguments).stdout(writer).stderr(Stdio::piped()).output().unwrap()
}

/// Runs a command whose standard output is a full disk.
fn with_full_disk(folder: &Path, arguments: &[&str]) -> Output {
    let full = File::options().write(true).open("/dev/full").unwrap();
    command(folder, arguments).stdout(full).stderr(Stdio::piped()).output().unwrap()
}

fn assert_no_panic(output: &Output, code: i32, arguments: &[&str]) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!message.contains("panicked"), "{arguments:?}: {message}");
    assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
}

/// The commands that end by themselves and print something.
const COMMANDS: [&[&str]; 23] = [
    &["--help"],
    &["run", "--help"],
    &["--version"],
    &["version"],
    &["completion", "bash"],
    &["completion", "zsh"],
    &["completion", "fish"],
    &["man"],
    &["explain", "spec"],
    &["explain", "--recursive"],
    &["validate", "job.yaml"],
    &["validate", "job.yaml", "--data"],
    &["data", "profile", "job.yaml"],
    &["data", "profile", "job.yaml", "--sample", "100"],
    &["plan", "job.yaml", "--profile", "profile.json"],
    &["simulate", "s.yaml"],
    &["simulate", "s.yaml", "--json"],
    &["devices"],
    &["checkpoint", "ls", "ck"],
    &["checkpoint", "inspect", "ck"],
    &["checkpoint", "verify", "ck"],
    &["checkpoint", "diff", "ck", "ck"],
    &["checkpoint", "export", "ck", "--output", "exported"],
];

#[test]
fn a_reader_that_goes_away_changes_nothing() {
    let folder = folder();
    for arguments in COMMANDS {
        let output = without_reader(folder.path(), arguments);
        assert_no_panic(&output, 0, arguments);
        assert!(output.stderr.is_empty(), "{arguments:?}: {output:?}");
    }
    assert!(folder.path().join("exported/model.onnx").exists(), "the export was finished");
}

#[test]
fn a_full_disk_is_a_failure_of_every_command() {
    let folder = folder();
    for arguments in COMMANDS {
        let output = with_full_disk(folder.path(), arguments);
        assert_no_panic(&output, 1, arguments);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(message.contains("cannot write to standard output: No space left"), "{arguments:?}: {message}");
    }
}

#[test]
fn commands_on_a_running_job_survive_a_closed_pipe_and_a_full_disk() {
    let folder = folder_with(JOB);
    let name = format!("piped-{}", std::process::id());
    let sets = format!("metadata.name={name},spec.data.synthetic.rows=30000000");
    let (mut job, _lines) = training(folder.path(), &["run", "job.yaml", "--json", "--set", &sets]);
    for arguments in [&["status", &name][..], &["mode", &name], &["logs", &name], &["logs", &name, "--tail", "1"]] {
        assert_no_panic(&without_reader(folder.path(), arguments), 0, arguments);
        assert_no_panic(&with_full_disk(folder.path(), arguments), 1, arguments);
    }
    let follow = ["logs", &name, "--follow"];
    assert_no_panic(&without_reader(folder.path(), &follow), 0, &follow);
    job.kill().unwrap();
    job.wait().unwrap();
}
