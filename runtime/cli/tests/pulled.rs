//! `sync` with pulled pieces (`spec.training.sync.pieces: pulled`): whole jobs end with the same
//! model for any number of dense workers, also if some are slow or die.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod binary;
mod children;
mod common;

use std::process::Command;

use serde_json::Value;

use binary::{JOB, folder_with, training};
use children::children_of;
use common::{events, rectrain, refusal_of_job, summary};

/// Eight pieces in a step. The masks of dropout depend on the piece alone.
const PULLED: &str = "spec.training.sync.pieces=pulled,spec.training.localBatchSize=16,spec.model.dropout=0.2";
/// The parts of the summary that do not depend on the members.
const RESULTS: [&str; 6] = ["parametersSha256", "test", "rows", "trainedRows", "samples", "steps"];

/// The summary of a job with these `--set`s and further arguments.
fn run(sets: &[&str], arguments: &[&str]) -> Value {
    let folder = folder_with(JOB);
    let sets = std::iter::once(&PULLED).chain(sets).flat_map(|set| ["--set", set]);
    let all: Vec<&str> =
        ["run", "job.yaml", "--json"].into_iter().chain(sets).chain(arguments.iter().copied()).collect();
    summary(&events(&rectrain(folder.path(), &all))).clone()
}

fn workers(count: u32) -> String {
    format!("spec.roles.denseWorker.replicas={count}")
}

fn assert_same(found: &Value, expected: &Value, what: &str) {
    for field in RESULTS {
        assert!(!expected[field].is_null(), "{field}: {expected}");
        assert_eq!(found[field], expected[field], "{what}: {field}");
    }
}

#[test]
fn the_model_does_not_depend_on_the_number_of_dense_workers() {
    let expected = run(&[&workers(1)], &[]);
    for count in [2, 4, 11] {
        assert_same(&run(&[&workers(count)], &[]), &expected, &format!("{count} workers, of 8 pieces"));
    }
    let others = "spec.roles.ps.replicas=3,spec.roles.embeddingWorker.replicas=2,spec.roles.loader.replicas=2";
    assert_same(&run(&[&workers(3), others], &[]), &expected, "other members");
    for count in [1, 2, 4] {
        assert_same(&run(&[&workers(count)], &["--processes"]), &expected, &format!("{count} processes"));
    }
}

#[test]
fn the_model_depends_on_the_pieces_and_masks() {
    let expected = run(&[&workers(2)], &[]);
    for set in ["spec.training.localBatchSize=32", "spec.model.dropout=0.1", "spec.training.sync.pieces=fixed"] {
        assert_ne!(run(&[&workers(2), set], &[])["parametersSha256"], expected["parametersSha256"], "{set}");
    }
}

#[test]
fn one_slow_worker_of_four_changes_no_bit() {
    let sets = "spec.data.synthetic.rows=12000,spec.training.evaluation.every=steps,spec.training.evaluation.steps=40";
    let expected = run(&[&workers(1), sets], &[]);
    let slow = ["--slow", "denseWorker-2=40x"];
    assert_same(&run(&[&workers(4), sets], &slow), &expected, "in one process");
    let processes = [&slow[..], &["--processes"]].concat();
    assert_same(&run(&[&workers(4), sets], &processes), &expected, "in several processes");
}

/// A switch moves the dense parameters only if the workers hold them in the other mode.
#[test]
fn switches_and_checkpoints_keep_the_model() {
    let switches = "spec.training.mode=hybrid,spec.training.hybrid.staleness=0,spec.training.switchAt[0].step=7,\
                    spec.training.switchAt[0].mode=sync";
    // The first seven steps have fixed shares, so the number of workers is the same.
    let expected = run(&[&workers(2), switches], &[]);
    assert_eq!((&expected["modeSwitches"], &expected["mode"]), (&Value::from(1), &Value::from("sync")));
    let slow = ["--slow", "denseWorker-1=10x"];
    assert_same(&run(&[&workers(2), switches], &slow), &expected, "one of them is slow");

    let expected = run(&[&workers(1)], &[]);
    let folder = folder_with(JOB);
    let path = "spec.checkpoint.path=checkpoints,spec.checkpoint.resume=latest,spec.checkpoint.everySteps=5";
    for (count, steps) in [(4, "spec.training.epochs=null,spec.training.steps=9"), (2, "spec.training.epochs=1")] {
        let arguments =
            ["run", "job.yaml", "--json", "--set", PULLED, "--set", path, "--set", &workers(count), "--set", steps];
        let last = events(&rectrain(folder.path(), &arguments)).pop().unwrap();
        if count == 2 {
            for field in ["parametersSha256", "test", "rows", "trainedRows"] {
                assert_eq!(last[field], expected[field], "resumed with {count} workers: {field}");
            }
        }
    }
}

/// Kills `victims` of four, one after the other is back, in a job with a slow worker. Each is a
/// role and a number.
fn run_with_kills(dense_workers: u32, victims: &[(&str, usize)]) {
    let folder = folder_with(JOB);
    let replicas = format!(
        "spec.roles.embeddingWorker.replicas=2,spec.roles.loader.replicas=2,spec.roles.ps.replicas=2,\
         spec.data.synthetic.rows=90000,spec.faultTolerance.maxRestarts=20,{}",
        workers(dense_workers)
    );
    let common = ["run", "job.yaml", "--json", "--set", PULLED, "--set", &replicas];
    let alone = events(&rectrain(folder.path(), &common)).pop().unwrap();
    let mut slow = vec!["--processes".to_owned()];
    for rank in 0..dense_workers {
        let factor = if rank == 1 { 40 } else { 8 };
        slow.extend(["--slow".to_owned(), format!("denseWorker-{rank}={factor}x")]);
    }
    let slow: Vec<&str> = slow.iter().map(String::as_str).collect();
    let (mut child, lines) = training(folder.path(), &[&common[..], &slow].concat());
    let (mut victims, mut all_are_present, mut last) = (victims.iter(), true, Value::Null);
    for line in lines {
        last = serde_json::from_str(&line.unwrap()).unwrap();
        let is_back = ["rejoined", "serverKeptRows", "coordinatorTakenUp"].iter().any(|back| last["event"] == *back);
        all_are_present |= is_back;
        if last["event"] == "progress"
            && all_are_present
            && let Some((role, index)) = victims.next()
        {
            all_are_present = false;
            let of_role: Vec<_> = children_of(child.id()).into_iter().filter(|(_, of)| of == role).collect();
            let (victim, _) = of_role[index % of_role.len()];
            assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap().success());
        }
    }
    assert!(child.wait().unwrap().success(), "{last}");
    assert!(children_of(child.id()).is_empty());
    assert_eq!(victims.next(), None, "the job was over before all were killed");
    assert_eq!(last["restarts"], 0, "{last}");
    assert_same(&last, &alone, "with kills");
}

#[test]
fn killing_dense_workers_keeps_the_model() {
    let victims: Vec<(&str, usize)> = [0, 1, 2, 3, 1, 0].map(|index| ("dense-worker", index)).into();
    run_with_kills(4, &victims);
}

#[test]
#[cfg(target_os = "linux")]
fn killing_members_of_each_role_keeps_the_model() {
    let victims = ["ps", "dense-worker", "embedding-worker", "coordinator", "ps", "loader", "coordinator", "ps"];
    let victims: Vec<(&str, usize)> = (0..).zip(victims).map(|(index, role)| (role, index)).collect();
    run_with_kills(3, &victims);
}

#[test]
fn impossible_combinations_name_their_field() {
    let folder = folder_with(JOB);
    for (sets, field) in [
        ("spec.training.sync.pieces=pulled", "spec.training.localBatchSize"),
        (
            "spec.training.sync.pieces=pulled,spec.training.localBatchSize=16,spec.training.barrierWorkers=1",
            "spec.training.barrierWorkers",
        ),
    ] {
        let error = refusal_of_job(folder.path(), &[sets]);
        assert!(error.contains(field), "{sets}: {error}");
    }
}
