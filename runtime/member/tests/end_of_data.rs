//! The end of the data while one dense worker is far behind: the last checkpoint has every row.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use prometheus::Registry;
use rectrain_checkpoint::{Checkpoint, SlotSet, list};
use rectrain_embedding::{FeatureKey, GroupId, Slot, Store};
use rectrain_member::local::run_in_process;
use rectrain_protocol::events::{EventLog, JobEvent, Summary};
use rectrain_protocol::metrics::RoleMetrics;
use rectrain_storage::Directory;

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
    for mode in ["sync", "hybrid", "gba", "async", "bsp", "hopBs", "hopBw", "shadow"] {
        let summary = check(&[&format!("spec.training.mode={mode}")]);
        // `hopBw` ignores the slowest gradients by design.
        assert!(mode == "hopBw" || summary.trained_rows == ROWS, "{mode}: {summary:?}");
    }
}

/// Checkpoints are taken while the slow worker holds batches and the other one inserts rows.
#[test]
fn every_row_of_a_straggling_job_has_finite_values_and_state() {
    let folder = tempfile::tempdir().unwrap();
    let changes = [
        "spec.training.mode=gba",
        "spec.data.synthetic.vocabulary=1000000",
        "spec.checkpoint.everySteps=2",
        "spec.checkpoint.fullEvery=3",
        "spec.checkpoint.keep=1000",
    ];
    train("first", folder.path(), &changes);
    let store = plan(&changes[..2]).store;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let directory = Directory::open(folder.path().to_str().unwrap(), &BTreeMap::new(), false).unwrap();
        let names: Vec<String> = list(&directory).await.unwrap().into_iter().map(|listed| listed.name).collect();
        assert!(names.len() > 1, "{names:?}");
        for name in names {
            let checkpoint = Checkpoint::open(&directory, &name).await.unwrap();
            let restored = Arc::new(Store::new(store.clone()).unwrap());
            checkpoint.restore_rows(&restored, &SlotSet::new((0..store.slots).map(Slot))).await.unwrap();
            let mut rows = 0;
            for slot in 0..store.slots {
                let visit = |_: GroupId, key: FeatureKey, values: &[f32], state: &[f32]| {
                    rows += 1;
                    let is_sound = |value: &f32| value.is_finite() && value.abs() < 1e6;
                    assert!(values.iter().chain(state).all(is_sound), "{name}: {key:?} has {values:?} and {state:?}");
                };
                restored.for_each_row(Slot(slot), visit).unwrap();
            }
            assert!(rows > 0 && rows == restored.rows(), "{name}");
        }
    });
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
