//! Whole jobs whose tables stay within a budget. In `sync` the rows that are kept are a function of
//! the data alone: equal digests for any number of members, while slots move, and after a crash.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[path = "common/manifest.rs"]
mod manifest;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use prometheus::Registry;
use rectrain_coordinator::{Coordinator, serve_control};
use rectrain_crds::TableSummary;
use rectrain_kinds::Role;
use rectrain_member::local::run_with;
use rectrain_proto::v1;
use rectrain_proto::v1::control_client::ControlClient;
use rectrain_protocol::events::{EventFollower, EventLog, JobEvent, Summary};
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
use rectrain_protocol::plan::JobPlan;
use rectrain_random::mix;

use crate::manifest::plan_of;

const ROWS: u64 = 6_000;

/// Clicks, a minute apart. Some ids stay and some are new.
fn clicks(rows: std::ops::Range<u64>) -> String {
    let mut text = String::from("label,time,C1,C2,C3,C4\n");
    for row in rows {
        let id = |feature: u64| {
            let bits = mix(row * 4 + feature);
            if bits & 1 == 0 { bits >> 32 & 63 } else { row / 2 + (bits >> 32 & 127) }
        };
        let (label, time) = (u64::from(mix(!row) & 3 == 0), 1_700_000_000 + row * 60);
        writeln!(text, "{label},{time},{},{},{},{}", id(0), id(1), id(2), id(3)).unwrap();
    }
    text
}

/// The rows of a table go by score, by the update that admits them, by a draw within a share, or by
/// the time of their last update.
fn plan(folder: &Path, changes: &[&str]) -> Arc<JobPlan> {
    let (train, test) = (folder.join("train.csv"), folder.join("test.csv"));
    if !train.exists() {
        std::fs::write(&train, clicks(0..ROWS)).unwrap();
        std::fs::write(&test, clicks(ROWS..ROWS + 500)).unwrap();
    }
    let manifest = format!(
        "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {{name: test}}
spec:
  model: {{kind: deepfm, embeddingDim: 4, hidden: [8]}}
  features:
    memory: {{maxRows: 3000}}
    sparse:
      - {{name: C1}}
      - {{name: C2, admission: {{count: 2}}}}
      - {{name: C3, admission: {{probability: 0.5}}, share: 0.25}}
      - {{name: C4, expireAfter: 24h, priority: high}}
  data:
    timeColumn: {{name: time}}
    train: {{paths: [{}]}}
    test: {{paths: [{}]}}
  training: {{globalBatchSize: 48, epochs: 2}}
",
        train.display(),
        test.display()
    );
    Arc::new(plan_of(&manifest, changes))
}

/// Trains as run `run` until the job or `meanwhile` ends, which gets the coordinator and the
/// events. Dense workers are slow if they are to leave time for it.
fn train_while<F: Future<Output = ()>>(
    run: &str,
    plan: Arc<JobPlan>,
    is_slow: bool,
    meanwhile: impl FnOnce(Arc<Coordinator>, EventFollower) -> F,
) -> Option<Summary> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    let events = EventLog::default();
    let summary = runtime.block_on(async {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let workers = if is_slow { plan.replicas.dense_worker } else { 0 };
        let slow: BTreeMap<u32, f64> = (0..workers).map(|rank| (rank, 6.0)).collect();
        let own = CoordinatorMetrics::of(&metrics, 0);
        let coordinator = Coordinator::start(Arc::clone(&plan), run, None, events.clone(), own).await.unwrap();
        let coordinator = Arc::new(coordinator);
        let meanwhile = meanwhile(Arc::clone(&coordinator), events.follow());
        tokio::select! {
            summary = run_with(plan, &slow, coordinator, metrics) => Some(summary.unwrap()),
            () = meanwhile => None,
        }
    });
    runtime.shutdown_background();
    summary
}

fn train(folder: &Path, changes: &[&str]) -> Summary {
    let never = |_, _| std::future::pending::<()>();
    train_while("alone", plan(folder, changes), false, never).unwrap()
}

async fn wait_for(follower: &mut EventFollower, is_it: impl Fn(&JobEvent) -> bool) {
    while let Some(event) = follower.next().await {
        if is_it(&event) {
            return;
        }
    }
    std::future::pending().await
}

async fn wait_for_step(follower: &mut EventFollower, due: u64) {
    wait_for(follower, |event| matches!(event, JobEvent::Progress { step, .. } if *step >= due)).await;
}

#[test]
fn the_same_rows_are_kept_with_any_replicas() {
    let folder = tempfile::tempdir().unwrap();
    let alone = train(folder.path(), &[]);
    let table = alone.table.unwrap();
    assert!(table.evicted > 1_000 && table.expired > 100 && table.turned_away > 1_000, "{table:?}");
    assert!(table.admitted - table.expired - table.evicted == table.rows && table.rows <= 3_000, "{table:?}");
    assert_eq!((table.gradients_dropped, table.rows, table.bytes), (0, alone.rows, alone.store_bytes), "{table:?}");
    for replicas in
        [&["spec.roles.ps.replicas=3"][..], &["spec.roles.embeddingWorker.replicas=2", "spec.roles.loader.replicas=2"]]
    {
        let several = train(folder.path(), replicas);
        assert_eq!(several.parameters_sha256, alone.parameters_sha256, "{replicas:?}");
        let other = several.table.unwrap();
        assert_eq!(TableSummary { bytes: table.bytes, ..other }, table, "{replicas:?}");
    }
    let roomy = train(folder.path(), &["spec.features.memory.maxRows=1000000"]);
    assert_ne!(roomy.parameters_sha256, alone.parameters_sha256, "evictions change the model");
    assert_eq!(roomy.table.unwrap().evicted, 0);
}

#[test]
fn the_same_rows_are_kept_while_slots_move() {
    let folder = tempfile::tempdir().unwrap();
    let long = "spec.training.epochs=4";
    let alone = train(folder.path(), &[long]);
    let resize = async |coordinator: Arc<Coordinator>, mut follower: EventFollower| {
        for (due, servers) in [(30, 3), (110, 2)] {
            wait_for_step(&mut follower, due).await;
            coordinator.request_scale(Role::Ps, servers).unwrap();
            wait_for(&mut follower, |event| matches!(event, JobEvent::SlotsMoved { .. })).await;
        }
        std::future::pending::<()>().await
    };
    let moved = train_while("moved", plan(folder.path(), &[long]), true, resize).unwrap();
    assert_eq!(moved.parameters_sha256, alone.parameters_sha256);
    let (moved, alone) = (moved.table.unwrap(), alone.table.unwrap());
    assert_eq!(TableSummary { bytes: alone.bytes, ..moved }, alone, "counts survive the moves");
}

#[test]
fn the_same_rows_are_kept_after_a_crash() {
    let folder = tempfile::tempdir().unwrap();
    let alone = train(folder.path(), &[]);
    let path = format!("spec.checkpoint.path={}", folder.path().join("checkpoints").display());
    let job = [&*path, "spec.checkpoint.everySteps=20", "spec.checkpoint.fullEvery=3"];
    let crash = async |_: Arc<Coordinator>, mut follower: EventFollower| {
        for _ in 0..5 {
            wait_for(&mut follower, |event| matches!(event, JobEvent::CheckpointSaved { .. })).await;
        }
    };
    assert!(train_while("crashed", plan(folder.path(), &job), true, crash).is_none());
    let servers = [&job[..], &["spec.roles.ps.replicas=3"]].concat();
    let never = |_, _| std::future::pending::<()>();
    let after = train_while("crashed", plan(folder.path(), &servers), false, never).unwrap();
    assert_eq!(after.parameters_sha256, alone.parameters_sha256);
}

#[test]
fn other_modes_train_every_row_within_the_budget() {
    let folder = tempfile::tempdir().unwrap();
    for mode in ["hybrid", "gba", "async"] {
        let mode_is = format!("spec.training.mode={mode}");
        let summary = train(folder.path(), &[&mode_is, "spec.roles.denseWorker.replicas=2"]);
        let table = summary.table.unwrap();
        assert_eq!(summary.trained_rows, 2 * ROWS, "{mode}");
        assert!(table.rows <= 3_100 && table.evicted > 1_000 && table.expired > 50, "{mode}: {table:?}");
    }
}

#[test]
fn a_lowered_budget_takes_effect_without_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let any = "127.0.0.1:0".parse().unwrap();
    let lower = async |coordinator: Arc<Coordinator>, mut follower: EventFollower| {
        wait_for_step(&mut follower, 60).await;
        let (address, _serving) = serve_control(any, Arc::clone(&coordinator), None).await.unwrap();
        let mut client = ControlClient::connect(format!("http://{address}")).await.unwrap();
        let budget = Some(v1::TableBudget { rows: 1_500, bytes: 0 });
        let from = client.set_budget(v1::SetBudgetRequest { budget }).await.unwrap().into_inner().from;
        assert_eq!(from, Some(v1::TableBudget { rows: 3_000, bytes: 0 }));
        assert_eq!(coordinator.status().budget, budget);
        // A new server learns the budget when it starts.
        coordinator.request_scale(Role::Ps, 2).unwrap();
        wait_for(&mut follower, |event| matches!(event, JobEvent::SlotsMoved { .. })).await;
        std::future::pending::<()>().await
    };
    let plan = plan(folder.path(), &["spec.training.epochs=4"]);
    let summary = train_while("lowered", plan, true, lower).unwrap();
    assert_eq!((summary.restarts, summary.trained_rows), (0, 4 * ROWS));
    let rows = summary.table.unwrap().rows;
    assert!(rows <= 1_600, "{rows} rows, where the budget was lowered from 3000 to 1500");
}
