//! Tests the histories that runs leave, and `rectrain runs`.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod binary;
mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use binary::{JOB, folder_with, training};
use common::{events, rectrain};

/// The folders of runs in `folder/runs`, the oldest first.
fn histories(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(folder.join("runs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.retain(|path| path.is_dir());
    all.sort();
    all
}

fn said(output: &std::process::Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The data in a page.
fn data_of(page: &Path) -> Value {
    let page = std::fs::read_to_string(page).unwrap();
    let (_, data) = page.split_once("id=\"data\">").unwrap();
    serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap()
}

#[test]
fn a_run_leaves_a_page_with_its_result() {
    let folder = folder_with(JOB);
    let mode = ["--set", "spec.training.mode=hybrid"];
    let run = rectrain(folder.path(), &[&["run", "job.yaml", "--json"], &mode[..]].concat());
    let events = events(&run);
    let summary = events.last().unwrap();
    let [history] = &histories(folder.path())[..] else { panic!("{:?}", histories(folder.path())) };
    let manifest = std::fs::read_to_string(history.join("manifest.yaml")).unwrap();
    assert!(manifest.contains("mode: hybrid"), "{manifest}");
    let data = data_of(&history.join("page.html"));
    let record = &data["runs"][0];
    assert_eq!((&record["phase"], &record["step"]), (&"Complete".into(), &summary["steps"]));
    assert!(record["plan"]["denseOptimizer"]["learningRate"].as_f64().unwrap() > 0.0, "{}", record["plan"]);
    assert!(!record["curve"]["step"].as_array().unwrap().is_empty(), "{}", record["curve"]);
    let kept = record["events"].as_array().unwrap().last().unwrap();
    assert_eq!(kept["event"]["parametersSha256"], summary["parametersSha256"]);
    assert_eq!(record["command"], "rectrain run job.yaml --json --set spec.training.mode=hybrid");
    assert!(record["state"]["rows"].as_u64().unwrap() > 0, "{}", record["state"]);
}

#[test]
fn processes_leave_the_same_history() {
    let folder = folder_with(JOB);
    let run = rectrain(folder.path(), &["run", "job.yaml", "--processes"]);
    assert!(run.status.success(), "{}", said(&run));
    let [history] = &histories(folder.path())[..] else { panic!("{:?}", histories(folder.path())) };
    assert!(said(&run).contains(&format!("the page of this run: runs/{}", history.file_name().unwrap().display())));
    assert_eq!(data_of(&history.join("page.html"))["runs"][0]["phase"], "Complete");
}

#[test]
fn no_history_is_left_if_it_is_not_wanted() {
    let folder = folder_with(JOB);
    assert!(rectrain(folder.path(), &["run", "job.yaml", "--no-history"]).status.success());
    assert!(!folder.path().join("runs").exists());
}

#[test]
fn runs_are_listed_shown_and_compared() {
    let folder = folder_with(JOB);
    for learning_rate in ["0.01", "0.001"] {
        let set = format!("spec.training.optimizer.dense.learningRate={learning_rate}");
        let run = rectrain(folder.path(), &["run", "job.yaml", "--json", "--set", &set]);
        assert!(run.status.success(), "{}", said(&run));
    }
    let all = histories(folder.path());
    assert_eq!(all.len(), 2, "{all:?}");
    let names: Vec<&str> = all.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
    let listed = said(&rectrain(folder.path(), &["runs", "ls"]));
    assert!(names.iter().all(|name| listed.contains(name)) && listed.contains("Complete"), "{listed}");
    let listed = events(&rectrain(folder.path(), &["runs", "ls", "--json"]));
    assert_eq!((listed.len(), &listed[0]["phase"]), (2, &"Complete".into()), "{listed:?}");

    std::fs::remove_file(all[0].join("page.html")).unwrap();
    let shown = rectrain(folder.path(), &["runs", "show", names[0]]);
    assert!(shown.status.success() && said(&shown).contains("parameters sha256"), "{}", said(&shown));
    assert!(all[0].join("page.html").exists(), "the page is made again");

    let compared = rectrain(folder.path(), &["runs", "compare", names[0], names[1]]);
    assert!(compared.status.success(), "{}", said(&compared));
    let rates = "spec.training.optimizer.dense.learningRate";
    let row = said(&compared).lines().find(|line| line.contains(rates)).unwrap_or_default().to_owned();
    let cells: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(cells, [rates, "0.01", "0.001"], "{}", said(&compared));
    assert!(!said(&compared).contains("spec.model"), "{}", said(&compared));
    let runs = &data_of(&folder.path().join("runs/compare.html"))["runs"];
    let rate = |run: usize| runs[run]["plan"]["denseOptimizer"]["learningRate"].as_f64().unwrap();
    assert_eq!((rate(0), rate(1)), (0.01, 0.001));

    let missing = rectrain(folder.path(), &["runs", "show", "other"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(said(&missing).contains("no run `other` in runs"), "{}", said(&missing));
}

#[test]
fn a_run_that_fails_in_training_keeps_the_cause() {
    let folder = folder_with(JOB);
    let rates = ["dense", "sparse"].map(|part| {
        let optimizer = format!("spec.training.optimizer.{part}");
        format!("{optimizer}.kind=sgd,{optimizer}.learningRate=1000")
    });
    let steps = "spec.training.epochs=5,spec.training.globalBatchSize=64";
    let run = rectrain(folder.path(), &["run", "job.yaml", "--set", &rates[0], "--set", &rates[1], "--set", steps]);
    assert!(!run.status.success(), "{}", said(&run));
    let [history] = &histories(folder.path())[..] else { panic!("{:?}", histories(folder.path())) };
    let data = data_of(&history.join("page.html"));
    let record = &data["runs"][0];
    assert_eq!(record["phase"], "Failed");
    assert!(said(&run).contains(record["message"].as_str().unwrap()), "{}: {}", record["message"], said(&run));
}

#[test]
fn an_interrupted_run_says_so_on_its_page() {
    let folder = folder_with(&JOB.replace("rows: 3000", "rows: 30000000"));
    let (mut child, lines) = training(folder.path(), &["run", "job.yaml", "--json"]);
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    drop(lines);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let [history] = &histories(folder.path())[..] else { panic!("{:?}", histories(folder.path())) };
    let data = data_of(&history.join("page.html"));
    assert_eq!(data["runs"][0]["phase"], "Interrupted", "{}", data["runs"][0]["message"]);
}

#[test]
fn the_events_of_a_killed_run_are_kept() {
    let folder = folder_with(&JOB.replace("rows: 3000", "rows: 30000000"));
    let (mut child, _lines) = training(folder.path(), &["run", "job.yaml", "--json"]);
    child.kill().unwrap();
    child.wait().unwrap();
    let [history] = &histories(folder.path())[..] else { panic!("{:?}", histories(folder.path())) };
    assert!(!history.join("page.html").exists());
    let shown = rectrain(folder.path(), &["runs", "show", "test", "--json"]);
    let record: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(record["phase"], "Interrupted");
    assert!(!record["curve"]["step"].as_array().unwrap().is_empty(), "{record}");
}
