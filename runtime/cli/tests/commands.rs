//! The commands around a run: manifests from standard input, data looked at before training,
//! running jobs found by name or address, completion and manual.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod binary;
mod common;

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use binary::{JOB, folder_with, training};
use common::{events, rectrain};
use serde_json::Value;

/// A job on a CSV file with a user, tags and a price.
const CLICKS: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features:
    sparse: [{name: user}, {name: tags, multiValue: {separator: '|'}}]
    dense: [{name: price}]
  data:
    source: {paths: [clicks.csv]}
    split: {fraction: {train: 0.8}}
";

fn clicks() -> tempfile::TempDir {
    let folder = folder_with(CLICKS);
    let rows: String = (0..2000)
        .map(|row| format!("{},{},a|b,{}.5,2026-11-{:02}\n", row % 3 % 2, row % 50, row % 7, 1 + row / 100))
        .collect();
    std::fs::write(folder.path().join("clicks.csv"), format!("label,user,tags,price,day\n{rows}")).unwrap();
    folder
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

#[test]
fn a_manifest_is_read_from_standard_input() {
    let folder = tempfile::tempdir().unwrap();
    let from_stdin = |arguments: &[&str], manifest: &str| {
        let mut child = Command::new(env!("CARGO_BIN_EXE_rectrain"))
            .args(arguments)
            .current_dir(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(manifest.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    let valid = from_stdin(&["validate", "-"], JOB);
    assert_eq!(said(&valid), "standard input: valid (deepfm in mode sync)\n");
    let one = events(&from_stdin(&["run", "-", "--json"], JOB));
    let many = events(&from_stdin(&["run", "-", "--json", "--processes"], JOB));
    assert_eq!(one.last().unwrap()["parametersSha256"], many.last().unwrap()["parametersSha256"]);
    let wrong = from_stdin(&["validate", "-"], "spec: [");
    assert!(said(&wrong).contains("standard input:"), "{wrong:?}");
}

#[test]
fn a_manifest_that_cannot_be_read_says_why() {
    let folder = folder_with(JOB);
    std::fs::write(folder.path().join("latin.yaml"), b"a: 1\nb: \xe4\n").unwrap();
    for (file, part) in [
        (".", "this is a folder: name a file in it"),
        ("none.yaml", "there is no such file in "),
        ("latin.yaml", "latin.yaml:2: the manifest cannot be read: this line is not UTF-8"),
    ] {
        let output = rectrain(folder.path(), &["validate", file]);
        assert_eq!(output.status.code(), Some(2));
        assert!(said(&output).contains(part), "{part}: {output:?}");
    }
}

#[test]
fn validate_data_shows_counts_and_the_first_row() {
    let folder = clicks();
    let output = rectrain(folder.path(), &["validate", "job.yaml", "--data"]);
    let text = said(&output);
    assert!(output.status.success(), "{text}");
    for part in [
        "job.yaml: valid (deepfm in mode sync)\n",
        "training data: 1,600 rows in 1 file; the first 1,000 were read: 33.3 % positive\n",
        "test data: 400 rows in 1 file; the first 400 were read: ",
        "first training row, as the model gets it:\n  label (label)  0\n",
        "  tags           2 ids, hashed to ",
        "  price          0.5\n",
        "warning: training takes a single step",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn validate_data_refuses_wrong_data_with_exit_code_2() {
    let folder = clicks();
    for (set, part) in [
        ("spec.features.dense[0].name=prize", "has no column `prize` (spec.features.dense), did you mean `price`?"),
        ("spec.data.source.paths={clikcs.csv}", "there is no file clikcs.csv"),
        ("spec.data.csv.delimiter=;", "`,` seems to separate its cells: set spec.data.csv.delimiter"),
        ("spec.features.label.name=clicked", "set spec.features.label.name to the column to predict"),
        ("spec.features.label.name=day", "for words set spec.features.label.values, such as {'yes': 1, 'no': 0}"),
        (
            "spec.features.dense=null,spec.features.label.name=price",
            "for other values set spec.features.label.positiveFrom",
        ),
        ("spec.features.group=usr", "has no column `usr` (spec.features.group), did you mean `user`?"),
        (
            "spec.data.split=null,spec.data.split.time.column=when,spec.data.split.time.testFrom=2026-11-03",
            "has no column `when` (spec.data.split.time.column); its columns are label, user",
        ),
        ("spec.features.sparse[1].multiValue.separator=null", "set `multiValue.separator`"),
        (
            "spec.data.split=null,spec.data.split.time.column=day,spec.data.split.time.testFrom=2030-01-01",
            "there are no test rows",
        ),
    ] {
        let output = rectrain(folder.path(), &["validate", "job.yaml", "--data", "--set", set]);
        assert_eq!(output.status.code(), Some(2), "{set}: {output:?}");
        assert!(said(&output).contains(part), "{set}: {output:?}");
    }
}

#[test]
fn a_remark_about_ids_is_printed_once() {
    let folder = clicks();
    let rows: String = (0..400).map(|row| format!("{},0{},a|b,1.5,2026-11-01\n", row % 2, row % 10)).collect();
    std::fs::write(folder.path().join("clicks.csv"), format!("label,user,tags,price,day\n{rows}")).unwrap();
    for command in [&["validate", "job.yaml", "--data"][..], &["data", "profile", "job.yaml"]] {
        let output = rectrain(folder.path(), command);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(said(&output).matches("ids with leading zeros are other ids").count(), 1, "{output:?}");
    }
}

#[test]
fn words_and_paths_that_a_cluster_takes_otherwise_are_told() {
    let folder = clicks();
    let label = "  features:\n    label: {values: {yes: 1, no: 0}}\n";
    std::fs::write(folder.path().join("job.yaml"), CLICKS.replacen("  features:\n", label, 1)).unwrap();
    let text = said(&rectrain(folder.path(), &["validate", "job.yaml"]));
    for part in [
        "note: the pods of a cluster do not see this folder: for a cluster, name a bucket or a mounted volume in \
         spec.data.source.paths[0] (`clicks.csv`)",
        "warning: job.yaml:8:22: spec.features.label.values.yes: `kubectl` reads the word `yes` without quotes as true",
        "`kubectl` reads the word `no` without quotes as false: write 'no'",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn an_empty_test_is_refused_before_training() {
    let folder = clicks();
    let late = "spec.data.split=null,spec.data.split.time.column=day,spec.data.split.time.testFrom=2030-01-01";
    let output = rectrain(folder.path(), &["run", "job.yaml", "--json", "--set", late]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(said(&output).contains("there are no test rows"), "{output:?}");
    assert!(output.stdout.is_empty(), "nothing was started: {output:?}");
}

#[test]
fn a_run_that_cannot_learn_is_warned() {
    let folder = clicks();
    let warnings = |sets: &str| {
        let events = events(&rectrain(folder.path(), &["run", "job.yaml", "--json", "--set", sets]));
        let warnings = events.iter().filter(|event| event["event"] == "warning");
        warnings.map(|event| event["message"].to_string()).collect::<Vec<_>>().join("\n")
    };
    let one_step = warnings("spec.training.seed=1");
    assert!(one_step.contains("training takes a single step"), "{one_step}");
    assert!(!warnings("spec.training.globalBatchSize=8").contains("training takes"));
    let far_off = "spec.training.globalBatchSize=8,spec.training.optimizer.dense.learningRate=1e-9";
    assert!(warnings(far_off).contains("far below the usual"));
}

#[test]
fn models_are_compared_by_their_kind_alone() {
    let folder = folder_with(JOB);
    for kind in ["lr", "fm", "dcn", "dcnV2"] {
        let set = format!("spec.model.kind={kind}");
        let output = rectrain(folder.path(), &["run", "job.yaml", "--set", &set]);
        assert!(output.status.success(), "{kind}: {output:?}");
        let is_told = said(&output).contains("note: spec.model.hidden is set aside");
        assert_eq!(is_told, !kind.starts_with("dcn"), "{kind}: {output:?}");
    }
}

#[test]
fn json_has_the_addresses_times_and_epochs() {
    let folder = folder_with(JOB);
    let sets = "spec.training.epochs=2,spec.training.evaluation.every=epoch";
    let events = events(&rectrain(folder.path(), &["run", "job.yaml", "--json", "--set", sets]));
    let serving = events.iter().find(|event| event["event"] == "serving").unwrap();
    for address in ["page", "metrics", "control"] {
        assert!(serving[address].as_str().unwrap().starts_with("http://127.0.0.1:"), "{serving}");
    }
    let times: Vec<f64> = events.iter().map(|event| event["at"].as_f64().unwrap()).collect();
    assert!(times.is_sorted() && times[0] > 1.7e9, "{times:?}");
    let evaluations: Vec<&Value> = events.iter().filter(|event| event["event"] == "evaluation").collect();
    let epochs: Vec<u64> = evaluations.iter().map(|event| event["epoch"].as_u64().unwrap()).collect();
    assert_eq!(epochs, [1, 2]);
}

/// Waits for `rectrain` to succeed: a job may just be starting.
fn eventually(folder: &Path, arguments: &[&str]) -> String {
    for _ in 0..100 {
        let output = rectrain(folder, arguments);
        if output.status.success() {
            return String::from_utf8_lossy(&output.stdout).into_owned();
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    panic!("{arguments:?}: {}", said(&rectrain(folder, arguments)));
}

#[test]
fn a_local_job_is_found_by_its_name_and_by_its_address() {
    let folder = folder_with(JOB);
    let name = format!("found-{}", std::process::id());
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let sets = format!("metadata.name={name},spec.data.synthetic.rows=30000000");
    let run = ["run", "job.yaml", "--json", "--control", &address, "--set", &sets];
    let (mut job, _lines) = training(folder.path(), &run);
    for job in [&name, &address] {
        let status = eventually(folder.path(), &["status", job]);
        assert!(status.starts_with(&format!("{job}: Training\n")), "{status}");
        assert!(status.contains("ps 1/1"), "{status}");
        assert_eq!(eventually(folder.path(), &["mode", job]), "sync\n");
        let logs = eventually(folder.path(), &["logs", job]);
        assert!(logs.starts_with(&format!("{name}: deepfm in mode sync")), "{logs}");
        assert_eq!(eventually(folder.path(), &["logs", job, "--tail", "1"]).lines().count(), 1);
    }
    let other = rectrain(folder.path(), &["logs", &name, "--role", "ps"]);
    assert_eq!(other.status.code(), Some(2));
    assert!(said(&other).contains("only its coordinator keeps events"), "{other:?}");
    job.kill().unwrap();
    job.wait().unwrap();
    let gone = rectrain(folder.path(), &["status", &name]);
    assert!(said(&gone).contains(&format!("no job `{name}` runs on this machine")), "{gone:?}");
}

#[test]
fn shells_and_manuals_know_the_commands() {
    let folder = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let script = said(&rectrain(folder.path(), &["completion", shell]));
        assert!(script.contains("validate") && script.contains("checkpoint"), "{shell}: {script}");
    }
    let page = said(&rectrain(folder.path(), &["man"]));
    assert!(page.contains(".TH rectrain 1"), "{page}");
    assert!(rectrain(folder.path(), &["man", "--output", "pages"]).status.success());
    assert!(folder.path().join("pages/rectrain-run.1").exists());
    let version = said(&rectrain(folder.path(), &["version"]));
    assert_eq!(version, format!("rectrain {}\n", env!("CARGO_PKG_VERSION")));
}
