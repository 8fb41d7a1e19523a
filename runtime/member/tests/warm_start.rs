//! Jobs that begin with another job's model. In `sync` they continue to the bit, with any numbers
//! of members. In every mode they train every row once. All attempts begin with the same
//! checkpoint.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use prometheus::Registry;
use rectrain_member::local::run_in_process;
use rectrain_protocol::RoleError;
use rectrain_protocol::events::{EventLog, JobEvent, Summary, WarmStartOrigin};
use rectrain_protocol::metrics::RoleMetrics;

use crate::common::plan;

/// Trains as run `run`.
fn try_train(run: &str, changes: &[&str]) -> Result<(Summary, Vec<JobEvent>), RoleError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    let events = EventLog::default();
    let metrics = RoleMetrics::new(Registry::new()).unwrap();
    let plan = Arc::new(plan(changes));
    let summary = runtime.block_on(run_in_process(plan, run, &BTreeMap::new(), events.clone(), metrics));
    runtime.shutdown_background();
    Ok((summary?, events.after(0, usize::MAX).into_iter().map(|logged| logged.event).collect()))
}

fn train(run: &str, changes: &[&str]) -> (Summary, Vec<JobEvent>) {
    try_train(run, changes).unwrap()
}

fn path(folder: &Path, name: &str) -> String {
    format!("spec.checkpoint.path={}", folder.join(name).display())
}

fn from(folder: &Path, name: &str) -> String {
    format!("spec.checkpoint.from={}@latest", folder.join(name).display())
}

/// The checkpoint in the first event.
fn origin(events: &[JobEvent]) -> WarmStartOrigin {
    let Some(JobEvent::Started { from: Some(from), .. }) = events.first() else { panic!("{events:?}") };
    from.clone()
}

/// An epoch of 2000 rows in batches of 96: 21 steps.
const EPOCH: &str = "spec.training.epochs=1";

#[test]
fn two_jobs_of_one_epoch_equal_one_job_of_two() {
    let alone = train("alone", &["spec.roles.denseWorker.replicas=2"]).0;
    let folder = tempfile::tempdir().unwrap();
    let first = [&*path(folder.path(), "first"), EPOCH, "spec.roles.denseWorker.replicas=2"];
    train("first", &first);
    for others in [
        &["spec.roles.ps.replicas=3"][..],
        &["spec.roles.ps.replicas=2", "spec.roles.embeddingWorker.replicas=2", "spec.roles.loader.replicas=2"],
    ] {
        let second = [&*from(folder.path(), "first"), EPOCH, "spec.roles.denseWorker.replicas=2"];
        let (second, events) = train("second", &[&second[..], others].concat());
        assert_eq!(second.parameters_sha256, alone.parameters_sha256, "{others:?}");
        assert_eq!((second.steps, second.samples, second.test), (42, 2000, alone.test.clone()));
        assert_eq!(origin(&events).step, 21);
    }
}

#[test]
fn in_every_mode_a_new_job_trains_each_row_once() {
    let folder = tempfile::tempdir().unwrap();
    let workers = ["spec.training.localBatchSize=48", "spec.roles.denseWorker.replicas=2", "spec.roles.ps.replicas=2"];
    for mode in ["sync", "hybrid", "gba", "async", "bsp", "hopBs"] {
        let mode = format!("spec.training.mode={mode}");
        let saved = path(folder.path(), &mode);
        let first = train("first", &[&[&*mode, EPOCH, &*saved], &workers[..]].concat()).0;
        let from = from(folder.path(), &mode);
        for next in ["sync", "gba"] {
            let next = format!("spec.training.mode={next}");
            let (second, events) = train("second", &[&[&*next, EPOCH, &*from], &workers[..]].concat());
            assert_eq!((second.trained_rows, second.samples), (2000, 2000), "{mode}, {next}");
            assert_eq!(origin(&events).step, first.steps, "{mode}, {next}");
            assert!(second.steps > first.steps, "{mode}, {next}");
        }
    }
}

/// Removes the job's own checkpoints, as after a crash before the first one.
fn crash_before_the_first_checkpoint(own: &Path) {
    for entry in std::fs::read_dir(own).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() {
            std::fs::remove_dir_all(entry).unwrap();
        }
    }
}

#[test]
fn all_attempts_of_a_run_begin_with_the_same_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let first = [&*path(folder.path(), "first"), "spec.checkpoint.resume=latest"];
    train("first", &[&first[..], &[EPOCH]].concat());
    let second = [&*path(folder.path(), "second"), &*from(folder.path(), "first"), EPOCH];
    let (whole, events) = train("second", &second);
    // The other job trains on, so that `latest` means another checkpoint.
    train("more", &[&first[..], &["spec.training.epochs=2"]].concat());
    crash_before_the_first_checkpoint(&folder.path().join("second"));
    let (again, events_again) = train("second", &second);
    assert_eq!(origin(&events_again), origin(&events));
    assert_eq!(again.parameters_sha256, whole.parameters_sha256);
    // Another run begins with the newest checkpoint.
    let third = [&*path(folder.path(), "third"), &*from(folder.path(), "first"), EPOCH];
    assert_eq!(origin(&train("third", &third).1).step, 42);
}

#[test]
fn an_attempt_after_the_checkpoint_was_replaced_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let first = [&*path(folder.path(), "first"), EPOCH];
    train("first", &first);
    let second = [&*path(folder.path(), "second"), &*from(folder.path(), "first"), EPOCH];
    train("second", &second);
    crash_before_the_first_checkpoint(&folder.path().join("second"));
    crash_before_the_first_checkpoint(&folder.path().join("first"));
    train("replaced", &first);
    let error = try_train("second", &second).unwrap_err();
    assert!(error.is_user_error(), "{error}");
    assert!(error.to_string().contains("which was replaced since"), "{error}");
}
