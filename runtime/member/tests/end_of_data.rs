//! The end of the data while one dense worker is far behind: the last checkpoint has every row.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use prometheus::Registry;
use rectrain_member::local::run_in_process;
use rectrain_protocol::events::{EventLog, JobEvent, Summary};
use rectrain_protocol::metrics::RoleMetrics;

use crate::common::plan;

/// Ten steps of 96 rows.
const ROWS: u64 = 960;
const LOCAL_BATCH: u64 = 48;

/// Trains with a dense worker 1 that takes fifty times as long as dense worker 0.
fn train(run: &str, folder: &Path, changes: &[&str]) -> (Summary, Vec<JobEvent>) {
    let path = format!("spec.checkpoint.path={}", folder.display());
    let job = [
        &*path,
        "spec.data.synthetic.rows=960",
        "spec.data.synthetic.testRows=100",
        "spec.training.epochs=1",
        "spec.training.localBatchSize=48",
        "spec.roles.denseWorker.replicas=2",
        "spec.roles.ps.replicas=2",
    ];
    let plan = Arc::new(plan(&[&job[..], changes].concat()));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    let events = EventLog::default();
    let metrics = RoleMetrics::new(Registry::new()).unwrap();
    let slow = BTreeMap::from([(1, 50.0)]);
    let summary = runtime.block_on(run_in_process(plan, run, &slow, events.clone(), metrics)).unwrap();
    runtime.shutdown_background();
    (summary, events.after(0, usize::MAX).into_iter().map(|logged| logged.event).collect())
}

/// Trains a job, and then resumes from its last checkpoint, which must be the whole model.
fn check(changes: &[&str]) -> Summary {
    let folder = tempfile::tempdir().unwrap();
    let (summary, _) = train("first", folder.path(), changes);
    assert_eq!(summary.samples, ROWS, "{changes:?}");
    assert_eq!(summary.trained_rows + summary.dropped_batches * LOCAL_BATCH, ROWS, "{changes:?}: {summary:?}");
    assert_eq!(summary.tokens_lost, 0, "{changes:?}");
    let (again, events) = train("again", folder.path(), &[changes, &["spec.checkpoint.resume=latest"]].concat());
    let resumed =
        events.iter().find_map(|event| if let JobEvent::Resumed { step, .. } = event { Some(*step) } else { None });
    assert_eq!(resumed, Some(summary.steps), "{changes:?}");
    assert_eq!(again.parameters_sha256, summary.parameters_sha256, "{changes:?}");
    assert_eq!((again.trained_rows, again.samples), (summary.trained_rows, ROWS), "{changes:?}");
    summary
}

#[test]
fn in_every_mode_a_straggler_settles_its_rows_before_the_end() {
    for mode in ["sync", "hybrid", "gba", "async", "bsp", "hopBs", "hopBw"] {
        let summary = check(&[&format!("spec.training.mode={mode}")]);
        // `hopBw` ignores the slowest gradients by design.
        assert!(mode == "hopBw" || summary.trained_rows == ROWS, "{mode}: {summary:?}");
    }
}

#[test]
fn a_switch_in_the_last_step_loses_no_row() {
    for (from, to) in [("sync", "gba"), ("gba", "sync"), ("hopBs", "async"), ("bsp", "hybrid")] {
        let summary = check(&[
            &format!("spec.training.mode={from}"),
            "spec.training.switchAt[0].step=9",
            &format!("spec.training.switchAt[0].mode={to}"),
        ]);
        assert_eq!((summary.trained_rows, summary.mode_switches, &*summary.mode), (ROWS, 1, to), "{from}");
    }
}
