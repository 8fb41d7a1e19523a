//! Whole jobs of `sync` with pulled pieces (`spec.training.sync.pieces: pulled`) in one process.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;
#[path = "common/metrics.rs"]
mod metrics;

use std::collections::BTreeMap;
use std::sync::Arc;

use prometheus::Registry;
use rectrain_member::local::run_in_process;
use rectrain_protocol::events::{EventLog, Summary};
use rectrain_protocol::metrics::RoleMetrics;

use crate::common::plan;
use crate::metrics::values;

/// Six pieces in a step, and masks that depend on the piece. The last batch of an epoch has only
/// five pieces with rows.
const PULLED: &[&str] =
    &["spec.training.sync.pieces=pulled", "spec.training.localBatchSize=16", "spec.model.dropout=0.2"];

/// Trains a job. `slow` multiplies the computing time of a dense worker.
fn train(changes: &[&str], slow: &[(u32, f64)], metrics: &RoleMetrics) -> Summary {
    train_as("test", changes, slow, metrics)
}

fn train_as(run: &str, changes: &[&str], slow: &[(u32, f64)], metrics: &RoleMetrics) -> Summary {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    let slow: BTreeMap<u32, f64> = slow.iter().copied().collect();
    let plan = Arc::new(plan(changes));
    let job = run_in_process(plan, run, &slow, EventLog::default(), metrics.clone());
    runtime.block_on(job).unwrap()
}

fn pulled(changes: &[&str], slow: &[(u32, f64)]) -> Summary {
    train(&[PULLED, changes].concat(), slow, &RoleMetrics::new(Registry::new()).unwrap())
}

/// The parts of the result that must not depend on the members.
fn result(summary: &Summary) -> (&str, u64, u64, u64, Option<f64>) {
    let auc = summary.test.as_ref().and_then(|test| test.auc);
    (&summary.parameters_sha256, summary.rows, summary.trained_rows, summary.samples, auc)
}

/// With a piece for each global batch, the sum has one summand, as with one worker and a ring.
#[test]
fn one_piece_in_a_step_equals_fixed_pieces_to_the_bit() {
    let sets = ["spec.training.localBatchSize=96", "spec.model.dropout=0.2"];
    let metrics = || RoleMetrics::new(Registry::new()).unwrap();
    let fixed = train(&sets, &[], &metrics());
    for workers in ["spec.roles.denseWorker.replicas=1", "spec.roles.denseWorker.replicas=3"] {
        let changes = [&sets[..], &["spec.training.sync.pieces=pulled", "spec.roles.ps.replicas=2", workers]].concat();
        assert_eq!(result(&train(&changes, &[], &metrics())), result(&fixed), "{workers}");
    }
}

#[test]
fn the_model_has_the_same_bits_for_any_number_of_dense_workers() {
    let expected = pulled(&[], &[]);
    assert_eq!((expected.trained_rows, expected.samples), (4000, 4000));
    for changes in [
        &["spec.roles.denseWorker.replicas=2"][..],
        &["spec.roles.denseWorker.replicas=4", "spec.roles.ps.replicas=3", "spec.roles.embeddingWorker.replicas=2"],
        &["spec.roles.denseWorker.replicas=9", "spec.roles.loader.replicas=2", "spec.training.sync.lookAhead=4"],
        &["spec.roles.denseWorker.replicas=3", "spec.training.sync.lookAhead=0"],
        &[
            "spec.roles.denseWorker.replicas=3",
            "spec.training.evaluation.every=steps",
            "spec.training.evaluation.steps=10",
        ],
    ] {
        assert_eq!(result(&pulled(changes, &[])), result(&expected), "{changes:?}");
    }
    for other in ["spec.training.localBatchSize=32", "spec.model.dropout=0.1", "spec.training.sync.pieces=fixed"] {
        assert_ne!(pulled(&[other], &[]).parameters_sha256, expected.parameters_sha256, "{other}");
    }
}

#[test]
fn a_slow_worker_changes_no_bit_and_others_get_its_pieces() {
    let expected = pulled(&[], &[]);
    let metrics = RoleMetrics::new(Registry::new()).unwrap();
    let workers = [PULLED, &["spec.roles.denseWorker.replicas=4"]].concat();
    let slow = train(&workers, &[(2, 200.0)], &metrics);
    assert_eq!(result(&slow), result(&expected));
    // Two workers have computed some pieces, and the predictions of each count once.
    let rows = |summary: &Summary| summary.window.as_ref().map(|window| window.rows);
    assert_eq!((rows(&slow), rows(&expected)), (Some(4000), Some(4000)));
    let auc = |summary: &Summary| summary.window.as_ref().and_then(|window| window.auc);
    assert_eq!(auc(&slow), auc(&expected));
    let pieces = values(&metrics, "rectrain_dense_worker_pieces_total");
    let twice: f64 = values(&metrics, "rectrain_coordinator_pieces_pulled_twice_total").iter().sum();
    // Two epochs of 21 steps with six pieces each.
    let (all, least) = (pieces.iter().sum::<f64>(), 2.0 * 21.0 * 6.0);
    assert!(all >= least && all <= least + twice, "{pieces:?}, {twice} twice");
    assert!(twice > 0.0 && pieces[2] < least / 8.0, "{pieces:?}, {twice} twice");
}

/// A short job leaves no time for a switch.
#[test]
fn auto_begins_with_pulled_pieces() {
    let workers = "spec.roles.denseWorker.replicas=3";
    let auto = pulled(&[workers, "spec.training.mode=auto"], &[(1, 20.0)]);
    assert_eq!((result(&auto), auto.mode_switches), (result(&pulled(&[], &[])), 0));
}

#[test]
fn switches_lose_no_row() {
    let switches = |list: &[(u32, &str)]| {
        let of = |(at, (step, mode)): (usize, &(u32, &str))| {
            format!("spec.training.switchAt[{at}].step={step},spec.training.switchAt[{at}].mode={mode}")
        };
        list.iter().enumerate().map(of).collect::<Vec<_>>().join(",")
    };
    let workers = "spec.roles.denseWorker.replicas=3";
    let all = switches(&[(5, "gba"), (12, "sync"), (19, "hybrid"), (26, "sync"), (33, "shadow")]);
    let summary = pulled(&[workers, "spec.roles.ps.replicas=2", &all], &[(1, 3.0)]);
    assert_eq!((summary.trained_rows, summary.samples, summary.mode_switches), (4000, 4000, 5));
    // From a mode with the dense parameters on the workers, to the bit.
    let there = switches(&[(9, "sync")]);
    let changes = [workers, "spec.training.mode=hybrid", "spec.training.hybrid.staleness=0", &there];
    assert_eq!(result(&pulled(&changes, &[(0, 20.0)])), result(&pulled(&changes, &[])));
}

#[test]
fn a_resumed_job_has_the_same_bits_with_another_number_of_workers() {
    let expected = pulled(&[], &[]);
    let folder = tempfile::tempdir().unwrap();
    let path = format!("spec.checkpoint.path={}", folder.path().display());
    let run = |name: &str, changes: &[&str]| {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        train_as(name, &[PULLED, &[&*path], changes].concat(), &[], &metrics)
    };
    run("first", &["spec.training.epochs=null,spec.training.steps=9", "spec.roles.denseWorker.replicas=4"]);
    let resumed = run("second", &["spec.checkpoint.resume=latest", "spec.roles.denseWorker.replicas=2"]);
    assert_eq!(resumed.parameters_sha256, expected.parameters_sha256);
    assert_eq!((resumed.trained_rows, resumed.rows), (4000, expected.rows));
}
