//! Members join and leave, and slots move between parameter servers, while a job trains.
//! No row is lost, and `sync` trains the same model to the bit whatever moves and whenever the job
//! ends.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use rectrain_coordinator::{Coordinator, ResizeRefused, serve_control};
use rectrain_kinds::Role;
use rectrain_member::local::run_with;
use rectrain_modes::shares::EVEN;
use rectrain_proto::v1;
use rectrain_proto::v1::control_client::ControlClient;
use rectrain_protocol::RoleError;
use rectrain_protocol::events::{EventFollower, EventLog, JobEvent, Summary};
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
use tonic::Code;

use crate::common::plan;

/// 630 steps, which take some seconds because the dense workers are slow.
const LONG: [&str; 3] =
    ["spec.data.synthetic.rows=30000", "spec.data.synthetic.testRows=100", "spec.training.epochs=2"];
const ROWS: u64 = 60_000;
/// Enough steps for a checkpoint and for measured look-ups.
const STEPS_BETWEEN: u64 = 30;

struct Run {
    summary: Option<Summary>,
    events: Vec<JobEvent>,
}

impl Run {
    fn summary(&self) -> &Summary {
        self.summary.as_ref().unwrap()
    }

    /// The changes in the number of members, in order.
    fn sizes(&self) -> Vec<(Role, u32)> {
        let scaled = |event: &JobEvent| match event {
            JobEvent::Scaled { role, to, .. } => Some((*role, *to)),
            JobEvent::SlotsMoved { to, .. } => Some((Role::Ps, *to)),
            _ => None,
        };
        self.events.iter().filter_map(scaled).collect()
    }

    /// All migrations: the servers before and after, the slots moved, and the imbalance before.
    fn moves(&self) -> Vec<(u32, u32, u64, f64)> {
        let moved = |event: &JobEvent| match event {
            JobEvent::SlotsMoved { from, to, slots, imbalance, .. } => Some((*from, *to, *slots, *imbalance)),
            _ => None,
        };
        self.events.iter().filter_map(moved).collect()
    }
}

async fn wait_for(follower: &mut EventFollower, mut is_it: impl FnMut(&JobEvent) -> bool) {
    while let Some(event) = follower.next().await {
        if is_it(&event) {
            return;
        }
    }
    std::future::pending().await
}

/// Waits for an event, and keeps `reached` at the step of the last progress event.
async fn wait_until(follower: &mut EventFollower, reached: &mut u64, mut is_it: impl FnMut(&JobEvent, u64) -> bool) {
    let is_there = |event: &JobEvent| {
        if let JobEvent::Progress { step, .. } = event {
            *reached = *step;
        }
        is_it(event, *reached)
    };
    wait_for(follower, is_there).await;
}

/// Trains as run `run` and moves the slots to each number of servers in turn, some steps apart.
/// With `crash`, drops the job this long after the last request.
fn train(run: &str, changes: &[&str], sizes: &[u32], crash: Option<Duration>) -> Result<Run, RoleError> {
    let sizes: Vec<_> = sizes.iter().map(|size| (Role::Ps, *size)).collect();
    train_with(run, changes, &sizes, crash)
}

/// As [`train`], for members of any role.
fn train_with(run: &str, changes: &[&str], sizes: &[(Role, u32)], crash: Option<Duration>) -> Result<Run, RoleError> {
    let requests: Vec<_> = sizes.iter().map(|(role, size)| Request::Size(*role, *size)).collect();
    train_and_request(run, changes, &requests, crash)
}

/// A request in the middle of training.
#[derive(Clone, Copy)]
enum Request {
    /// This many members of a role.
    Size(Role, u32),
    /// A weight for the member with this index.
    Weight(Role, u32, u32),
}

impl Request {
    fn make(self, coordinator: &Coordinator) -> Result<(), ResizeRefused> {
        match self {
            Self::Size(role, size) => coordinator.request_scale(role, size).map(drop),
            Self::Weight(role, member, weight) => coordinator.weigh(role, member, weight),
        }
    }

    /// Whether the event says that the request is carried out. Pieces of batches move without one.
    fn is_done(self, event: &JobEvent) -> bool {
        match (self, event) {
            (Self::Weight(Role::EmbeddingWorker | Role::Loader, ..), _) => true,
            (Self::Size(role, _) | Self::Weight(role, ..), JobEvent::SlotsMoved { .. }) => role == Role::Ps,
            (Self::Size(role, size), JobEvent::Scaled { role: of, to, .. }) => *of == role && *to == size,
            _ => false,
        }
    }
}

/// As [`train_with`], for any requests.
fn train_and_request(
    run: &str,
    changes: &[&str],
    requests: &[Request],
    crash: Option<Duration>,
) -> Result<Run, RoleError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    let events = EventLog::default();
    let summary = runtime.block_on(async {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let plan = Arc::new(plan(&[&LONG[..], changes].concat()));
        let slow: BTreeMap<u32, f64> = (0..plan.replicas.dense_worker).map(|rank| (rank, 6.0)).collect();
        let coordinator_metrics = CoordinatorMetrics::of(&metrics, 0);
        let coordinator = Coordinator::start(Arc::clone(&plan), run, None, events.clone(), coordinator_metrics).await?;
        let coordinator = Arc::new(coordinator);
        let crashing = async {
            let mut follower = events.follow();
            let mut reached = 0;
            for (place, request) in requests.iter().enumerate() {
                let due = reached + STEPS_BETWEEN;
                wait_until(&mut follower, &mut reached, |_, reached| reached >= due).await;
                if let Err(refused) = request.make(&coordinator) {
                    assert_eq!(refused.to_string(), "training has ended");
                }
                if place + 1 == requests.len()
                    && let Some(crash) = crash
                {
                    tokio::time::sleep(crash).await;
                    return;
                }
                wait_until(&mut follower, &mut reached, |event, _| request.is_done(event)).await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            summary = run_with(plan, &slow, Arc::clone(&coordinator), metrics) => summary.map(Some),
            () = crashing => Ok(None),
        }
    });
    runtime.shutdown_background();
    let summary = summary?;
    let seen = events.after(0, usize::MAX).into_iter().map(|logged| logged.event).collect();
    Ok(Run { summary, events: seen })
}

fn digest_without(changes: &[&str]) -> String {
    train("alone", changes, &[], None).unwrap().summary().parameters_sha256.clone()
}

#[test]
fn sync_is_equal_to_the_bit_while_servers_join_and_leave() {
    let several = ["spec.roles.embeddingWorker.replicas=2", "spec.roles.denseWorker.replicas=2"];
    for changes in [&[][..], &several] {
        let moved = train("moved", changes, &[3, 2, 2, 1], None).unwrap();
        let sizes: Vec<_> = moved.moves().iter().map(|(from, to, ..)| (*from, *to)).collect();
        assert_eq!(sizes, [(1, 3), (3, 2), (2, 2), (2, 1)], "{:?}", moved.events);
        assert!(moved.moves()[0].2 > 100, "{:?}", moved.moves());
        assert_eq!(moved.summary().parameters_sha256, digest_without(changes));
        assert_eq!(moved.summary().trained_rows, ROWS);
    }
}

#[test]
fn a_server_that_reuses_a_number_starts_without_slots() {
    for mode in ["sync", "gba"] {
        let mode = format!("spec.training.mode={mode}");
        let moved = train("moved", &[&mode, "spec.roles.ps.replicas=2"], &[1, 2, 3], None).unwrap();
        assert_eq!(moved.moves().len(), 3, "{:?}", moved.events);
        assert_eq!(moved.summary().parameters_sha256, digest_without(&[]), "{mode}");
    }
}

#[test]
fn sync_is_equal_to_the_bit_while_other_roles_are_scaled() {
    use Role::{EmbeddingWorker, Loader, Ps};
    let workers = [
        "spec.roles.denseWorker.replicas=2",
        "spec.training.evaluation.every=steps,spec.training.evaluation.steps=50",
        // Chunks of ten batches: a worker that leaves holds few batches.
        "spec.data.shuffle.windowRows=960",
    ];
    let alone = digest_without(&workers);
    // An embedding worker joins with the index of one that has left.
    let first = [(EmbeddingWorker, 3), (Loader, 2), (EmbeddingWorker, 1), (EmbeddingWorker, 2)];
    let other = [(EmbeddingWorker, 2), (Ps, 2), (Loader, 2), (Loader, 1)];
    for (mode, sizes) in [("sync", first), ("sync", other), ("hybrid", first)] {
        let mode_is = format!("spec.training.mode={mode}");
        let scaled = train_with("scaled", &[&workers[..], &[&mode_is]].concat(), &sizes, None).unwrap();
        assert_eq!(scaled.sizes(), sizes, "{:?}", scaled.events);
        let summary = scaled.summary();
        assert_eq!((summary.samples, summary.trained_rows), (ROWS, ROWS), "{mode}");
        assert!(mode == "hybrid" || summary.parameters_sha256 == alone, "{mode}");
    }
}

#[test]
fn sync_is_equal_to_the_bit_while_work_moves_from_slow_members_and_back() {
    use Request::Weight;
    use Role::{EmbeddingWorker, Loader, Ps};
    let members = [
        "spec.roles.ps.replicas=3",
        "spec.roles.embeddingWorker.replicas=2",
        "spec.roles.denseWorker.replicas=2",
        "spec.roles.loader.replicas=2",
        "spec.training.evaluation.every=steps,spec.training.evaluation.steps=50",
        "spec.data.shuffle.windowRows=960",
    ];
    let requests = [
        // From then on, loader 0 reads each chunk of loader 1, too.
        Weight(Loader, 1, EVEN / 16),
        Weight(EmbeddingWorker, 1, EVEN / 32),
        Weight(Ps, 1, EVEN / 32),
        Weight(EmbeddingWorker, 1, EVEN),
        Weight(Ps, 1, EVEN),
        Weight(EmbeddingWorker, 0, EVEN / 4),
    ];
    let weighed = train_and_request("weighed", &members, &requests, None).unwrap();
    let moves = weighed.moves();
    let [(3, 3, away, _), (3, 3, back, _), ..] = moves[..] else { panic!("{moves:?}") };
    // A server of three has 341 of 1,024 slots.
    assert!((50..400).contains(&away) && (50..400).contains(&back), "{moves:?}");
    let summary = weighed.summary();
    assert_eq!((summary.samples, summary.trained_rows), (ROWS, ROWS));
    assert_eq!(summary.parameters_sha256, digest_without(&members));
}

#[test]
fn scaling_dense_workers_trains_every_row_once() {
    use Role::{DenseWorker, EmbeddingWorker, Ps};
    let pieces = "spec.training.localBatchSize=16";
    let alone = train("alone", &[pieces], &[], None).unwrap().summary().test.as_ref().unwrap().auc.unwrap();
    let sizes = [(DenseWorker, 3), (Ps, 2), (DenseWorker, 2), (EmbeddingWorker, 2), (DenseWorker, 1)];
    for mode in ["sync", "hybrid", "gba", "async", "des"] {
        let mode_is = format!("spec.training.mode={mode}");
        // Every run checks at its end that the workers of a barrier have the same dense parameters.
        let scaled = train_with("scaled", &[pieces, &mode_is], &sizes, None).unwrap();
        assert_eq!(scaled.sizes(), sizes, "{mode}: {:?}", scaled.events);
        let summary = scaled.summary();
        assert_eq!((summary.samples, summary.trained_rows), (ROWS, ROWS), "{mode}");
        let auc = summary.test.as_ref().unwrap().auc.unwrap();
        assert!(
            !["sync", "des"].contains(&mode) || (auc - alone).abs() < 0.005,
            "{mode}: {auc}, {alone} with one worker"
        );
        assert!(auc > 0.5, "{mode}: {auc}");
    }
}

#[test]
fn dense_workers_join_while_the_mode_changes() {
    let switches = "spec.training.switchAt[0].step=60,spec.training.switchAt[0].mode=gba,\
                    spec.training.switchAt[1].step=120,spec.training.switchAt[1].mode=sync";
    let pieces = "spec.training.localBatchSize=16";
    let sizes = [(Role::DenseWorker, 2), (Role::DenseWorker, 3), (Role::DenseWorker, 2), (Role::DenseWorker, 1)];
    let folder = tempfile::tempdir().unwrap();
    let job = [&*path_of(folder.path()), "spec.checkpoint.everySteps=25", pieces, switches];
    let scaled = train_with("scaled", &job, &sizes, None).unwrap();
    assert_eq!((scaled.sizes(), scaled.summary().mode_switches), (sizes.to_vec(), 2), "{:?}", scaled.events);
    assert_eq!(scaled.summary().trained_rows, ROWS);
    let two = [&job[..], &["spec.checkpoint.resume=latest", "spec.roles.denseWorker.replicas=2"]].concat();
    let again = train("again", &two, &[], None).unwrap();
    assert_eq!(again.summary().parameters_sha256, scaled.summary().parameters_sha256);
}

#[test]
fn one_worker_without_a_barrier_equals_sync_over_migrations() {
    let sync = digest_without(&[]);
    for mode in ["gba", "async"] {
        let mode = format!("spec.training.mode={mode}");
        let moved = train("moved", &[&mode], &[3, 2], None).unwrap();
        assert_eq!(moved.moves().len(), 2, "{:?}", moved.events);
        assert_eq!(moved.summary().parameters_sha256, sync, "{mode}");
    }
}

#[test]
fn every_mode_loses_no_row_and_no_gradient() {
    for mode in ["hybrid", "gba", "async", "bsp", "hopBs", "hopBw", "shadow"] {
        let mode_is = format!("spec.training.mode={mode}");
        let workers = ["spec.roles.denseWorker.replicas=2", "spec.roles.embeddingWorker.replicas=2"];
        let moved = train("moved", &[&[&*mode_is][..], &workers].concat(), &[3, 2], None).unwrap();
        let summary = moved.summary();
        assert_eq!(moved.moves().len(), 2, "{mode}: {:?}", moved.events);
        assert_eq!(summary.samples, ROWS, "{mode}");
        assert!(mode == "hopBw" || summary.trained_rows == ROWS, "{mode}: {summary:?}");
        assert!(summary.test.as_ref().unwrap().auc.unwrap() > 0.5, "{mode}");
    }
}

#[test]
fn modes_are_switched_between_migrations() {
    let switches = "spec.training.switchAt[0].step=60,spec.training.switchAt[0].mode=gba,\
                    spec.training.switchAt[1].step=200,spec.training.switchAt[1].mode=sync,\
                    spec.training.switchAt[2].step=300,spec.training.switchAt[2].mode=async";
    let moved = train("moved", &[switches], &[2, 3, 2], None).unwrap();
    assert_eq!((moved.moves().len(), moved.summary().mode_switches), (3, 3), "{:?}", moved.events);
    assert_eq!(moved.summary().parameters_sha256, digest_without(&[]));
}

#[test]
fn rebalanced_servers_have_nearly_equal_look_ups() {
    // Enough look-ups in a step to make random differences small.
    let large = ["spec.training.globalBatchSize=1440", "spec.data.synthetic.rows=300000"];
    let skewed = ["spec.data.synthetic.vocabulary=20000", "spec.data.synthetic.zipfExponent=1.2"];
    let moved = train("moved", &[large, skewed].concat(), &[3, 3, 3], None).unwrap();
    let last = moved.moves().last().unwrap().3;
    assert!(moved.moves().len() == 3 && last <= 1.1, "{:?}", moved.moves());
}

#[test]
fn training_that_ends_during_a_migration_is_equal_to_the_bit() {
    let short = ["spec.data.synthetic.rows=4500", "spec.training.epochs=1"];
    let alone = digest_without(&short);
    for sizes in [&[4][..], &[1]] {
        let moved = train("moved", &short, sizes, None).unwrap();
        assert_eq!(moved.summary().parameters_sha256, alone);
        assert_eq!(moved.summary().trained_rows, 4500);
    }
}

fn path_of(folder: &Path) -> String {
    format!("spec.checkpoint.path={}", folder.join("checkpoints").display())
}

#[test]
fn a_job_that_dies_in_a_migration_resumes_to_the_bit() {
    let alone = digest_without(&[]);
    for (milliseconds, servers) in
        [0, 1, 3, 7, 15, 30, 60, 90, 120, 200, 400].into_iter().zip([1, 3, 2].into_iter().cycle())
    {
        let folder = tempfile::tempdir().unwrap();
        let path = path_of(folder.path());
        let job = [&*path, "spec.checkpoint.everySteps=10", "spec.checkpoint.fullEvery=3"];
        let died = train("crashed", &job, &[3, 2], Some(Duration::from_millis(milliseconds))).unwrap();
        assert!(died.summary.is_none(), "the job ended within {milliseconds} ms of the last request");
        let servers = format!("spec.roles.ps.replicas={servers}");
        let after = train("crashed", &[&job[..], &[&servers]].concat(), &[], None).unwrap();
        let resumed = after.events.iter().any(|event| matches!(event, JobEvent::Resumed { .. }));
        assert!(resumed, "{milliseconds} ms: {:?}", after.events);
        assert_eq!(after.summary().parameters_sha256, alone, "{milliseconds} ms");
    }
}

#[test]
fn checkpoints_continue_during_migrations() {
    let alone = digest_without(&[]);
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(folder.path());
    let job = [&*path, "spec.checkpoint.everySteps=10", "spec.checkpoint.fullEvery=4"];
    let moved = train("moved", &job, &[3, 1, 2], None).unwrap();
    assert_eq!(moved.summary().parameters_sha256, alone);
    let failed = |event: &JobEvent| matches!(event, JobEvent::Warning { message } if message.contains("checkpoint"));
    assert!(!moved.events.iter().any(failed), "{:?}", moved.events);
    let again = train("again", &[&job[..], &["spec.checkpoint.resume=latest"]].concat(), &[], None).unwrap();
    assert_eq!(again.summary().parameters_sha256, alone);
}

#[test]
fn impossible_sizes_are_refused_with_a_sentence() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let metrics = CoordinatorMetrics::of(&metrics, 0);
        let coordinator =
            Coordinator::start(Arc::new(plan(&[])), "run", None, EventLog::default(), metrics).await.unwrap();
        for impossible in [0, 1025] {
            let refused = coordinator.request_scale(Role::Ps, impossible).unwrap_err().to_string();
            assert!(refused.contains("1 to 1024") && refused.ends_with(&format!("not {impossible}")), "{refused}");
        }
        let members = |role: Role| {
            let replicas = coordinator.status().replicas;
            let of_role = replicas.iter().find(|replicas| replicas.role() == v1::Role::from(role)).unwrap();
            (of_role.present, of_role.wanted, of_role.needed)
        };
        let servers = || members(Role::Ps);
        assert_eq!((servers(), coordinator.request_scale(Role::Ps, 3), servers()), ((1, 1, 1), Ok(1), (1, 3, 3)));
        assert_eq!(coordinator.request_scale(Role::Ps, 3), Ok(1), "the same request again");
        let refused = coordinator.request_scale(Role::Ps, 4).unwrap_err().to_string();
        assert!(refused.contains("2 of 3 parameter servers have not joined"), "{refused}");
        assert_eq!((coordinator.request_scale(Role::Ps, 1), servers()), (Ok(1), (1, 1, 1)), "the request is withdrawn");
        for role in [Role::EmbeddingWorker, Role::Loader] {
            assert!(coordinator.request_scale(role, 0).unwrap_err().to_string().contains("1 to 10000"), "{role:?}");
            let wanted = || members(role);
            assert_eq!((wanted(), coordinator.request_scale(role, 3), wanted()), ((1, 1, 1), Ok(1), (1, 3, 3)));
            let refused = coordinator.request_scale(role, 2).unwrap_err().to_string();
            assert!(refused.contains("2 of 3") && refused.contains("have not joined"), "{refused}");
            assert_eq!((coordinator.request_scale(role, 1), wanted()), (Ok(1), (1, 1, 1)), "the request is withdrawn");
        }
        let refused = coordinator.request_scale(Role::DenseWorker, 2).unwrap_err().to_string();
        assert!(refused.contains("has 1: set spec.training.localBatchSize to 48 or less"), "{refused}");
    });
}

#[test]
fn each_decision_rebalances_the_slots_once() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let metrics = CoordinatorMetrics::of(&RoleMetrics::new(Registry::new()).unwrap(), 0);
        let events = EventLog::default();
        let coordinator = Coordinator::start(Arc::new(plan(&[])), "run", None, events.clone(), metrics).await.unwrap();
        let any = "127.0.0.1:0".parse().unwrap();
        let (address, serving) = serve_control(any, Arc::new(coordinator), None).await.unwrap();
        let client = ControlClient::connect(format!("http://{address}")).await.unwrap();
        let ask = async |replicas: u32, decided_seconds: u64| {
            let role = v1::Role::Ps.into();
            let reason = "uneven".to_owned();
            let request = v1::ScaleRequest { role, replicas, reason, decided_seconds: Some(decided_seconds) };
            client.clone().scale(request).await.map(|reply| reply.into_inner().from).map_err(|refused| refused.code())
        };
        let decided = async || {
            let status = client.clone().get_status(v1::StatusRequest {}).await.unwrap();
            status.into_inner().slots_decided_seconds
        };
        assert_eq!((decided().await, ask(2, 7).await), (0, Err(Code::FailedPrecondition)), "the job has one server");
        assert_eq!((decided().await, ask(1, 7).await, decided().await), (0, Ok(1), 7));
        let asked = || {
            let seen = events.after(0, usize::MAX).into_iter();
            seen.filter(|logged| matches!(logged.event, JobEvent::Scaling { from: 1, to: 1, .. })).count()
        };
        assert_eq!(asked(), 1);
        assert_eq!(
            (ask(1, 7).await, ask(1, 6).await, decided().await, asked()),
            (Ok(1), Ok(1), 7, 1),
            "it is done already"
        );
        assert_eq!((ask(1, 8).await, decided().await), (Ok(1), 8));
        serving.abort();
    });
}
