//! Every command with a reader that closes the pipe, and with a full disk. None panics: a closed
//! pipe changes nothing, and a full disk is a failure.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod binary;

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use binary::{JOB, folder_with, training};

const SIMULATION: &str = "{apiVersion: rectrain.dev/v1alpha1, kind: Simulation, spec: {workers: 2, seconds: 1}}";

/// The record of a page, as a coordinator leaves it beside checkpoints.
const PAGE: &str = r#"{"name": "clicks", "phase": "Complete"}"#;

/// A folder with a job, its run in `runs`, a checkpoint in `ck`, and an input of every other
/// command.
fn folder() -> tempfile::TempDir {
    let folder = folder_with(JOB);
    std::fs::create_dir(folder.path().join("paged")).unwrap();
    for (file, text) in
        [("s.yaml", SIMULATION), ("paged/page.json", PAGE), ("trace.jsonl", ""), ("rows.csv", rows().as_str())]
    {
        std::fs::write(folder.path().join(file), text).unwrap();
    }
    let saved = command(folder.path(), &["run", "job.yaml", "--set", "spec.checkpoint.path=ck"]).output().unwrap();
    assert!(saved.status.success(), "{saved:?}");
    let profile = ["data", "profile", "job.yaml", "--json", "profile.json"];
    let profiled = command(folder.path(), &profile).output().unwrap();
    assert!(profiled.status.success(), "{profiled:?}");
    folder
}

/// One row of the job, without a label.
fn rows() -> String {
    let ids = (1..=26).map(|n| (format!("C{n}"), "1"));
    let numbers = (1..=13).map(|n| (format!("I{n}"), "0.5"));
    let (names, cells): (Vec<String>, Vec<&str>) = ids.chain(numbers).unzip();
    format!("{}\n{}\n", names.join(","), cells.join(","))
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
const COMMANDS: [&[&str]; 30] = [
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
    &["devices", "--json"],
    &["policy", "replay", "trace.jsonl"],
    &["runs", "ls"],
    &["runs", "ls", "--json"],
    &["runs", "show", "test"],
    &["runs", "compare", "test", "test"],
    &["page", "./paged"],
    &["checkpoint", "ls", "ck"],
    &["checkpoint", "inspect", "ck"],
    &["checkpoint", "verify", "ck"],
    &["checkpoint", "diff", "ck", "ck"],
    &["checkpoint", "export", "ck", "--output", "exported"],
];

/// The commands that other tests here or in other files try.
const ELSEWHERE: [(&str, &str); 7] = [
    ("run", "a_summary_that_is_lost_is_not_success in command.rs"),
    ("predict", "predictions_survive_a_closed_pipe_and_not_a_full_disk"),
    ("serve", "a_server_that_cannot_tell_its_address_ends"),
    ("status", "commands_on_a_running_job_survive_a_closed_pipe_and_a_full_disk"),
    ("logs", "commands_on_a_running_job_survive_a_closed_pipe_and_a_full_disk"),
    ("mode", "commands_on_a_running_job_survive_a_closed_pipe_and_a_full_disk"),
    ("scale", "commands_on_a_running_job_survive_a_closed_pipe_and_a_full_disk"),
];

/// A new command has to be tried, too.
#[test]
fn every_command_of_the_help_is_tried() {
    let help = command(Path::new("."), &["--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let (_, list) = help.split_once("\nCommands:\n").unwrap();
    let (list, _) = list.split_once("\n\n").unwrap();
    let listed: Vec<&str> = list.lines().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert!(listed.len() > 15 && listed.contains(&"checkpoint"), "{listed:?}");
    for name in listed.into_iter().filter(|name| *name != "help") {
        let is_here = COMMANDS.iter().any(|arguments| arguments[0] == name && arguments.last() != Some(&"--help"));
        let is_elsewhere = ELSEWHERE.iter().any(|(command, _)| *command == name);
        assert!(is_here || is_elsewhere, "no test closes the pipe of `rectrain {name}`");
    }
}

#[test]
fn predictions_survive_a_closed_pipe_and_not_a_full_disk() {
    let folder = folder();
    let arguments = ["predict", "ck", "--input", "rows.csv", "--output", "-"];
    assert_no_panic(&without_reader(folder.path(), &arguments), 0, &arguments);
    let full = with_full_disk(folder.path(), &arguments);
    assert_no_panic(&full, 1, &arguments);
    assert!(String::from_utf8_lossy(&full.stderr).contains("No space left"), "{full:?}");
}

#[test]
fn a_server_that_cannot_tell_its_address_ends() {
    let folder = folder();
    let arguments = ["serve", "ck", "--name", "clicks", "--listen", "127.0.0.1:0"];
    assert_no_panic(&with_full_disk(folder.path(), &arguments), 1, &arguments);
}

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
    let scale = ["scale", "ps", "1", "--job", &name];
    for arguments in [
        &["status", &name][..],
        &["mode", &name],
        &["logs", &name],
        &["logs", &name, "--tail", "1"],
        &["page", &name],
        &scale,
    ] {
        assert_no_panic(&without_reader(folder.path(), arguments), 0, arguments);
        assert_no_panic(&with_full_disk(folder.path(), arguments), 1, arguments);
    }
    let follow = ["logs", &name, "--follow"];
    assert_no_panic(&without_reader(folder.path(), &follow), 0, &follow);
    job.kill().unwrap();
    job.wait().unwrap();
}
