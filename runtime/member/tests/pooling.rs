//! Whole jobs with partial pooling (`spec.training.partialPooling: bySize`) in one process.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[path = "common/manifest.rs"]
mod manifest;
#[path = "common/metrics.rs"]
mod metrics;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use prometheus::Registry;
use rectrain_coordinator::Coordinator;
use rectrain_kinds::Role;
use rectrain_member::local::{run_in_process, run_with};
use rectrain_protocol::events::{EventLog, JobEvent, Summary};
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
use rectrain_protocol::plan::JobPlan;
use rectrain_random::mix;

use crate::manifest::plan_of;
use crate::metrics::values;

const BY_SIZE: &str = "spec.training.partialPooling=bySize";
const TRAIN_ROWS: u64 = 2_000;

/// A file of clicks of one of fifty users, each with the last 8 to 15 of 5,000 items.
fn clicks_with_lists(file: &Path, rows: Range<u64>) {
    let mut text = String::from("label,user,items\n");
    for row in rows {
        let item = |place: u64| (mix(16 * row + place) % 5_000).to_string();
        let items: Vec<String> = (0..8 + row % 8).map(item).collect();
        writeln!(text, "{},{},{}", u64::from(mix(!row).is_multiple_of(4)), mix(row) % 50, items.join("|")).unwrap();
    }
    std::fs::write(file, text).unwrap();
}

/// A job whose samples have many ids of a feature. Users and items are in two row groups.
fn plan(folder: &Path, changes: &[&str]) -> JobPlan {
    let (train, test) = (folder.join("train.csv"), folder.join("test.csv"));
    clicks_with_lists(&train, 0..TRAIN_ROWS);
    clicks_with_lists(&test, TRAIN_ROWS..TRAIN_ROWS + 500);
    let manifest = format!(
        "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {{name: test}}
spec:
  model: {{kind: wideDeep, embeddingDim: 4, hidden: [8]}}
  features:
    sparse: [{{name: user, dim: 2}}, {{name: items, multiValue: {{separator: '|'}}}}]
  data:
    train: {{paths: ['{}']}}
    test: {{paths: ['{}']}}
  training: {{globalBatchSize: 96, epochs: 2}}
",
        train.display(),
        test.display()
    );
    plan_of(&manifest, changes)
}

/// The results of a job.
struct Trained {
    summary: Summary,
    /// The losses of the test rows at each evaluation.
    losses: Vec<f64>,
    /// Tables of pieces that servers pooled.
    pooled_groups: f64,
}

fn train(folder: &Path, changes: &[&str]) -> Trained {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    let metrics = RoleMetrics::new(Registry::new()).unwrap();
    let (events, plan) = (EventLog::default(), Arc::new(plan(folder, changes)));
    let mut follower = events.follow();
    runtime.block_on(async {
        let summary = run_in_process(plan, "test", &BTreeMap::new(), events, metrics.clone()).await.unwrap();
        let mut losses = Vec::new();
        while let Some(event) = follower.next().await {
            if let JobEvent::Evaluation { test, .. } = event {
                losses.extend(test.log_loss);
            }
        }
        losses.extend(summary.test.as_ref().and_then(|test| test.log_loss));
        Trained { summary, losses, pooled_groups: total(&metrics, "rectrain_embedding_worker_pooled_groups_total") }
    })
}

/// The sum of a metric over all replicas of its role.
fn total(metrics: &RoleMetrics, name: &str) -> f64 {
    values(metrics, name).iter().sum()
}

/// Checks that a job in which servers pool has the bits of one in which they do not.
fn equals_never(folder: &Path, changes: &[&str], by_size: &[&str]) {
    let never = train(folder, changes);
    let pooled = train(folder, &[changes, by_size, &[BY_SIZE]].concat());
    assert!(never.pooled_groups == 0.0 && pooled.pooled_groups > 30.0, "{changes:?}: {}", pooled.pooled_groups);
    assert_eq!(pooled.summary.parameters_sha256, never.summary.parameters_sha256, "{changes:?}, {by_size:?}");
    assert_eq!(pooled.summary.rows, never.summary.rows, "{changes:?}");
}

#[test]
fn pooling_on_one_server_equals_sync_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    for changes in [
        &[][..],
        &["spec.model.kind=fm,spec.model.hidden=null,spec.features.sparse[0].dim=4"],
        &["spec.model.kind=lr,spec.model.hidden=null,spec.features.sparse[0].dim=null"],
        &["spec.features.sparse[1].pooling=sum", "spec.roles.denseWorker.replicas=2"],
        &["spec.features.sparse[1].pooling=sqrtN", "spec.training.sync.lookAhead=0"],
        &["spec.training.localBatchSize=32", "spec.training.sync.pieces=pulled"],
    ] {
        equals_never(folder.path(), changes, &["spec.roles.embeddingWorker.replicas=2"]);
    }
}

/// Ids that are not admitted read as their initial values, and their examples count.
#[test]
fn pooling_on_one_server_equals_sync_with_managed_tables() {
    let folder = tempfile::tempdir().unwrap();
    let managed = ["spec.features.memory.maxRows=3000", "spec.features.sparse[1].admission.count=2"];
    equals_never(folder.path(), &managed, &[]);
}

#[test]
fn pooling_on_several_servers_repeats_and_equals_sync_within_rounding() {
    let folder = tempfile::tempdir().unwrap();
    let job = ["spec.training.evaluation.every=steps", "spec.training.evaluation.steps=3", "spec.roles.ps.replicas=3"];
    let sync = train(folder.path(), &job);
    let pooled = train(folder.path(), &[&job[..], &[BY_SIZE]].concat());
    assert!(pooled.pooled_groups > 30.0);
    assert_eq!((pooled.summary.trained_rows, pooled.summary.rows), (sync.summary.trained_rows, sync.summary.rows));
    assert!(sync.losses.len() > 10 && pooled.losses.len() == sync.losses.len());
    for (found, expected) in pooled.losses.iter().zip(&sync.losses) {
        assert!((found - expected).abs() <= 1e-5 * expected, "{found}, not {expected}");
    }
    let others = ["spec.roles.embeddingWorker.replicas=2", "spec.roles.loader.replicas=2", BY_SIZE];
    let again = train(folder.path(), &[&job[..], &others].concat());
    assert_eq!(again.summary.parameters_sha256, pooled.summary.parameters_sha256, "repeated");
}

#[test]
fn compressed_sums_cost_little_accuracy() {
    let folder = tempfile::tempdir().unwrap();
    let job = ["spec.roles.ps.replicas=2", "spec.training.compression=fp16"];
    let never = train(folder.path(), &job);
    let pooled = train(folder.path(), &[&job[..], &[BY_SIZE]].concat());
    assert!(pooled.pooled_groups > 30.0);
    for (found, expected) in pooled.losses.iter().zip(&never.losses) {
        assert!((found - expected).abs() <= 1e-3 * expected, "{found}, not {expected}");
    }
}

/// Alone, a worker of `gba` with a buffer of one computes as `sync`.
#[test]
fn gba_alone_pools_on_one_server_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    equals_never(folder.path(), &["spec.training.mode=gba"], &[]);
    let sync = train(folder.path(), &[]);
    let gba = train(folder.path(), &["spec.training.mode=gba", BY_SIZE]);
    assert_eq!(gba.summary.parameters_sha256, sync.summary.parameters_sha256);
}

#[test]
fn every_mode_pools_on_servers_and_trains_every_row_once() {
    let folder = tempfile::tempdir().unwrap();
    let sync = train(folder.path(), &["spec.roles.ps.replicas=2"]);
    for mode in ["hybrid", "gba", "async", "bsp", "hopBs", "shadow"] {
        let mode = format!("spec.training.mode={mode}");
        let job = [
            mode.as_str(),
            BY_SIZE,
            "spec.roles.ps.replicas=2",
            "spec.roles.denseWorker.replicas=3",
            "spec.roles.embeddingWorker.replicas=2",
            "spec.roles.loader.replicas=2",
            "spec.training.localBatchSize=32",
            "spec.training.evaluation.every=epoch",
        ];
        let trained = train(folder.path(), &job);
        assert!(trained.pooled_groups > 30.0, "{mode}");
        assert_eq!((trained.summary.trained_rows, trained.summary.tokens_lost), (2 * TRAIN_ROWS, 0), "{mode}");
        assert_eq!(trained.summary.rows, sync.summary.rows, "{mode}: every id has its row");
        assert!(trained.losses.last().is_some_and(|loss| *loss < 0.7), "{mode}: {:?}", trained.losses);
    }
}

#[test]
fn a_schedule_of_modes_with_pooling_loses_no_row() {
    let folder = tempfile::tempdir().unwrap();
    let modes = ["gba", "sync", "hybrid", "des", "shadow", "sync"];
    let field = |(index, mode): (usize, &&str)| {
        let step = 5 * index + 3;
        format!("spec.training.switchAt[{index}].step={step},spec.training.switchAt[{index}].mode={mode}")
    };
    let switches = modes.iter().enumerate().map(field).collect::<Vec<_>>().join(",");
    let trained =
        train(folder.path(), &[&switches, BY_SIZE, "spec.roles.ps.replicas=2", "spec.roles.denseWorker.replicas=3"]);
    assert_eq!((trained.summary.trained_rows, trained.summary.mode_switches), (2 * TRAIN_ROWS, modes.len() as u64));
    assert!(trained.pooled_groups > 30.0);
}

/// Moves slots to three servers and then to two while a job trains.
fn train_while_slots_move(folder: &Path, changes: &[&str]) -> (Summary, usize, f64) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    let metrics = RoleMetrics::new(Registry::new()).unwrap();
    let (events, plan) = (EventLog::default(), Arc::new(plan(folder, changes)));
    let summary = runtime.block_on(async {
        let of_coordinator = CoordinatorMetrics::of(&metrics, 0);
        let coordinator = Coordinator::start(Arc::clone(&plan), "test", None, events.clone(), of_coordinator);
        let coordinator = Arc::new(coordinator.await.unwrap());
        let moving = async {
            let mut follower = events.follow();
            for servers in [3, 2] {
                let mut evaluations = 0;
                while evaluations < 3 {
                    let event = follower.next().await.unwrap();
                    evaluations += usize::from(matches!(event, JobEvent::Evaluation { .. }));
                }
                coordinator.request_scale(Role::Ps, servers).unwrap();
                while !matches!(follower.next().await.unwrap(), JobEvent::SlotsMoved { .. }) {}
            }
            std::future::pending::<Summary>().await
        };
        let slow = BTreeMap::from([(0, 6.0)]);
        tokio::select! {
            summary = run_with(plan, &slow, Arc::clone(&coordinator), metrics.clone()) => summary.unwrap(),
            summary = moving => summary,
        }
    });
    let seen = events.after(0, usize::MAX).into_iter();
    let moves = seen.filter(|logged| matches!(logged.event, JobEvent::SlotsMoved { .. })).count();
    (summary, moves, total(&metrics, "rectrain_embedding_worker_pooled_groups_total"))
}

/// A look-up that a server refuses is repeated with the new map, and divides the ids by it.
#[test]
fn servers_pool_while_their_slots_move() {
    let folder = tempfile::tempdir().unwrap();
    let evaluations = ["spec.training.evaluation.every=steps", "spec.training.evaluation.steps=10"];
    let long = [&evaluations[..], &["spec.training.epochs=12"]].concat();
    let expected = train(folder.path(), &long);
    for mode in ["sync", "gba"] {
        let mode_is = format!("spec.training.mode={mode}");
        let (summary, moves, pooled_groups) =
            train_while_slots_move(folder.path(), &[&long[..], &[&*mode_is, BY_SIZE]].concat());
        assert!(moves == 2 && pooled_groups > 100.0, "{mode}: {moves} moves, {pooled_groups} groups");
        assert_eq!(summary.trained_rows, expected.summary.trained_rows, "{mode}");
        assert_eq!(summary.rows, expected.summary.rows, "{mode}");
        let loss = summary.test.as_ref().and_then(|test| test.log_loss).unwrap();
        let of_sync = *expected.losses.last().unwrap();
        assert!((loss - of_sync).abs() <= 1e-3 * of_sync, "{mode}: {loss}, not {of_sync}");
    }
}
