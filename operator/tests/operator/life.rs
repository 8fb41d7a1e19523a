//! The life of a job in a small cluster: every phase, every failure, every repair, and every fault
//! of every call to the API server.
use std::sync::Arc;
use std::time::Duration;

use kube_runtime::controller::Action;
use rectrain_crds::{Phase, RecTrainingJob};
use rectrain_operator::coordinator_view::{CoordinatorView, Report, Stage};
use serde_json::json;
use tokio::sync::Notify;

use crate::world::faults::Fault;
use crate::world::{
    self, JOB, MANIFEST, PUT_ASIDE, Script, World, complete, crashing, failed, good, idle, live, long, passes,
};

/// The phases of a job, each once as long as it lasts.
async fn phases(world: &World) -> Vec<Phase> {
    let mut seen: Vec<Phase> = Vec::new();
    for _ in 0..100 {
        world.settle().await;
        let phase = world.phase().unwrap();
        if seen.last() != Some(&phase) {
            seen.push(phase);
        }
        if matches!(phase, Phase::Complete | Phase::Failed) && world.api().list("pods").is_empty() {
            return seen;
        }
        world.tick();
    }
    panic!("the job never ends: {seen:?}");
}

#[tokio::test]
async fn a_job_starts_trains_evaluates_and_is_complete() {
    let world = World::new(MANIFEST, vec![good()]);
    let seen = phases(&world).await;
    // The first reconcile creates the pods, so `Pending` is over after it.
    assert_eq!(seen, [Phase::Starting, Phase::Training, Phase::Evaluating, Phase::Complete]);
    let status = world.job().status.unwrap();
    let summary = status.summary.unwrap();
    assert_eq!((summary.auc, summary.parameters_sha256), (Some(0.7), "ab".repeat(32)));
    assert_eq!((status.step, status.restarts, status.samples_per_second), (Some(4), Some(0), None));
    assert_eq!(status.tables, None, "the summary has the rows");
    assert!(status.completion_time.is_some() && status.start_time < status.completion_time);
    assert_eq!(status.observed_generation, Some(1));
    // It was saved after the last look during training.
    assert_eq!(status.last_checkpoint.as_ref().map(|last| last.step), Some(4));
    assert!(world.condition("Complete").is_some() && world.condition("Ready").is_some());
    assert!(world.condition("Failed").is_none() && world.condition("Reconciling").is_none());
    let sets =
        world.api().list("statefulsets").into_iter().map(|set| set["spec"]["replicas"].clone()).collect::<Vec<_>>();
    assert_eq!(sets, [0; 5], "all roles are scaled to zero");
}

#[tokio::test]
async fn the_status_follows_training_and_counts_ready_pods() {
    let world = World::new(MANIFEST, vec![good()]);
    for _ in 0..4 {
        world.settle().await;
        world.tick();
    }
    world.settle().await;
    let status = world.job().status.unwrap();
    assert_eq!(status.phase, Some(Phase::Training));
    assert_eq!((status.step, status.total_steps, status.samples_per_second), (Some(3), Some(4), Some(1000)));
    assert_eq!((status.auc, status.loss), (Some(0.61235), Some(0.5)));
    assert_eq!(status.unseen.get("C1"), Some(&0.01235));
    assert_eq!(status.tables.map(|tables| (tables.rows, tables.bytes)), Some((300, 27_000)));
    assert_eq!(status.last_checkpoint.map(|last| (last.name, last.step)), Some(("full-3".to_owned(), 3)));
    let replicas = status.replica_statuses.unwrap();
    assert_eq!(replicas.members.ps.unwrap().display, "2/2");
    assert_eq!(replicas.coordinator.unwrap().display, "1/1");
    assert_eq!(status.selector.as_deref(), Some("rectrain.dev/job=clicks,rectrain.dev/role=dense-worker"));
}

/// A job that trains without end.
async fn training() -> World {
    let world = World::new(MANIFEST, vec![vec![live(Stage::Training, 1)]]);
    world.settle().await;
    world.tick();
    world.settle().await;
    world
}

#[tokio::test]
async fn a_settled_job_costs_no_writes_and_no_reads_of_its_objects() {
    let world = training().await;
    world.api().log.clear();
    world.reconcile().await.unwrap();
    let log = world.api().log.clone();
    let reads = log.iter().filter(|call| call.starts_with("GET")).count();
    assert_eq!((reads, log.len()), (8, 8), "one list per kind, and the watch's job: {log:?}");
}

#[tokio::test]
async fn a_new_leader_takes_jobs_from_its_watch() {
    let mut world = training().await;
    world.replace_operator();
    world.api().log.clear();
    world.reconcile().await.unwrap();
    let log = world.api().log.clone();
    assert!(log.len() == 8 && log.iter().all(|call| call.starts_with("GET")), "one list per kind: {log:?}");
}

#[tokio::test]
async fn a_job_with_a_slow_coordinator_is_put_aside() {
    let world = World::new(MANIFEST, vec![long(3)]);
    world.settle().await;
    world.tick();
    let slow = Arc::new(Notify::new());
    world.scripts.lock().slow = Some(Arc::clone(&slow));
    let before = world.job().status;
    for _ in 0..2 {
        assert_eq!(world.reconcile().await.unwrap(), PUT_ASIDE);
    }
    assert_eq!(world.job().status, before, "no decision without its answer");
    slow.notify_one();
    while world.reconcile().await.unwrap() == PUT_ASIDE {
        tokio::task::yield_now().await;
    }
    assert_ne!(world.job().status, before, "the answer counts once it arrives");
}

#[tokio::test]
async fn a_watch_behind_the_operators_own_status_is_not_trusted() {
    let world = World::new(MANIFEST, vec![crashing(), good()]);
    let old = Arc::new(world.job());
    world.settle().await;
    for _ in 0..6 {
        world.tick();
        world.settle().await;
    }
    let (status, revision) = (world.job().status, world.api().revision());
    assert!(status.is_some() && old.status.is_none());
    world.reconcile_as_seen(&old).await.unwrap();
    assert_eq!((world.job().status, world.api().revision()), (status, revision), "nothing restarted");
}

#[tokio::test]
async fn nothing_is_created_for_an_outdated_job() {
    let world = training().await;
    let seen = Arc::new(world.job());
    world.edit(|spec| spec["suspend"] = json!(true));
    world.api().remove("poddisruptionbudgets", "clicks-ps");
    assert_eq!(reconcile_outdated(&world, &seen).await, Action::requeue(Duration::from_millis(100)), "a changed one");
    let seen = Arc::new(world.job());
    // The job is deleted, and the garbage collector is faster than the watch.
    world.api().remove("rectrainingjobs", JOB);
    assert_eq!(reconcile_outdated(&world, &seen).await, Action::await_change(), "a deleted one");
}

/// The result of a reconcile of an outdated job. It writes nothing.
async fn reconcile_outdated(world: &World, seen: &Arc<RecTrainingJob>) -> Action {
    world.api().log.clear();
    let action = world.reconcile_as_seen(seen).await.unwrap();
    let log = world.api().log.clone();
    assert!(log.iter().all(|call| call.starts_with("GET")), "{log:?}");
    action
}

#[tokio::test]
async fn a_status_for_a_job_that_is_gone_is_no_failure() {
    let world = training().await;
    let seen = Arc::new(world.job());
    world.api().remove("rectrainingjobs", JOB);
    assert_eq!(world.reconcile_as_seen(&seen).await.unwrap(), Action::requeue(Duration::from_millis(100)));
    assert_eq!(world.reconcile_as_seen(&seen).await.unwrap(), Action::await_change());
    assert!(world.api().made().is_empty());
}

#[tokio::test]
async fn a_job_of_another_controller_is_not_touched() {
    let manifest = format!("{MANIFEST}  managedBy: kueue.x-k8s.io/multikueue\n");
    let world = World::new(&manifest, vec![good()]);
    world.settle().await;
    assert!(world.api().made().is_empty() && world.job().status.is_none());
}

#[tokio::test]
async fn a_later_suspension_keeps_the_objects_without_pods() {
    let world = World::new(&format!("{MANIFEST}  suspend: true\n"), vec![good()]);
    world.settle().await;
    assert!(world.api().made().is_empty());
    assert_eq!(world.phase(), Some(Phase::Suspended));
    world.edit(|spec| spec["suspend"] = json!(false));
    for _ in 0..4 {
        world.settle().await;
        world.tick();
    }
    assert_eq!(world.phase(), Some(Phase::Training));
    world.edit(|spec| spec["suspend"] = json!(true));
    world.settle().await;
    world.tick();
    world.settle().await;
    assert!(world.api().list("pods").is_empty());
    assert_eq!(world.phase(), Some(Phase::Suspended));
    assert!(world.condition("Suspended").is_some());
    // The pods' manifest is immutable. A suspended job may be changed all the same.
    world.edit(|spec| spec["data"]["synthetic"]["rows"] = json!(3000));
    world.settle().await;
    assert_eq!((world.phase(), world.condition("Stalled")), (Some(Phase::Suspended), None));
    world.edit(|spec| spec["suspend"] = json!(false));
    world.settle().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.attempt.unwrap().number, status.restarts), (Some(Phase::Starting), 2, Some(0)));
    assert_eq!(world.api().list("configmaps").len(), 1);
    world.live().await;
    assert_eq!(world.phase(), Some(Phase::Complete));
}

/// A job that trains with checkpoints.
async fn saving() -> World {
    let manifest = format!(
        "{MANIFEST}  checkpoint: {{path: \"gs://ads/clicks\"}}\n  faultTolerance: {{stallSeconds: 60, backoffSeconds: 1}}\n"
    );
    let world = World::new(&manifest, vec![vec![live(Stage::Training, 1); 100]]);
    while world.phase() != Some(Phase::Training) {
        world.settle().await;
        world.tick();
    }
    world
}

/// The operator looks for a while. Returns whether the attempt is still under way.
async fn keeps_training(world: &World) -> bool {
    for _ in 0..3 {
        world.tick();
        world.settle().await;
    }
    let status = world.job().status.unwrap();
    status.phase == Some(Phase::Training) && status.attempt.unwrap().number == 1
}

#[tokio::test]
async fn an_attempt_saves_a_checkpoint_before_it_ends() {
    let ends: [fn(&World); 2] = [
        |world| world.edit(|spec| spec["suspend"] = json!(true)),
        |world| world.edit(|spec| spec["data"]["synthetic"]["rows"] = json!(2000)),
    ];
    for ends in ends {
        for saved in [Ok("full-1".to_owned()), Err("the bucket is full".to_owned())] {
            let world = saving().await;
            world.scripts.lock().saved = Some(saved);
            ends(&world);
            assert!(!keeps_training(&world).await, "with or without a checkpoint");
            assert_eq!(world.scripts.lock().asked_saves, 1);
        }
    }
}

#[tokio::test]
async fn all_pods_stay_while_a_checkpoint_is_written() {
    let world = saving().await;
    let before = world.api().list("pods").len();
    world.edit(|spec| spec["suspend"] = json!(true));
    assert!(keeps_training(&world).await && world.api().list("pods").len() == before);
    assert!(world.condition("Ready").is_none() && world.condition("Reconciling").is_some());
    assert_eq!(world.scripts.lock().asked_saves, 1, "it is asked once");
    // The suspension is withdrawn, and later repeated.
    world.edit(|spec| spec["suspend"] = json!(false));
    assert!(keeps_training(&world).await && world.condition("Ready").is_some());
    world.scripts.lock().saved = Some(Ok("full-2".to_owned()));
    world.edit(|spec| spec["suspend"] = json!(true));
    assert!(!keeps_training(&world).await);
    assert_eq!((world.phase(), world.scripts.lock().asked_saves), (Some(Phase::Suspended), 2));
}

/// A coordinator that is silent for a moment does not end its attempt. Neither a deadline nor a
/// crash fails the job.
#[tokio::test]
async fn a_suspension_that_saves_ends_in_no_failure() {
    let world = saving().await;
    world.edit(|spec| {
        spec["suspend"] = json!(true);
        spec["activeDeadlineSeconds"] = json!(3600);
    });
    assert!(keeps_training(&world).await);
    world.scripts.lock().by_attempt = vec![vec![CoordinatorView::Silent]];
    assert!(keeps_training(&world).await);
    world.scripts.lock().by_attempt = vec![vec![idle(Stage::Training, 1, 1.0)]];
    assert!(keeps_training(&world).await);
    passes(3600);
    world.settle().await;
    assert_eq!((world.phase(), world.condition("Failed")), (Some(Phase::Suspended), None));
    // No progress.
    let world = saving().await;
    world.edit(|spec| spec["suspend"] = json!(true));
    assert!(keeps_training(&world).await);
    world.scripts.lock().by_attempt = vec![vec![idle(Stage::Training, 1, 100.0)]];
    passes(100);
    assert!(!keeps_training(&world).await);
    assert_eq!((world.phase(), world.job().status.unwrap().restarts), (Some(Phase::Suspended), Some(0)));
}

/// The coordinator crashes meanwhile, or the job writes no checkpoints.
#[tokio::test]
async fn a_suspension_without_a_checkpoint_to_save_does_not_wait() {
    let world = training().await;
    world.edit(|spec| spec["suspend"] = json!(true));
    world.settle().await;
    assert_eq!((world.phase(), world.scripts.lock().asked_saves), (Some(Phase::Suspended), 0));
    let world = saving().await;
    world.edit(|spec| spec["suspend"] = json!(true));
    world.settle().await;
    world.scripts.lock().by_attempt = vec![vec![failed("ps 1 is gone", false)]];
    assert!(!keeps_training(&world).await);
    assert_eq!(world.phase(), Some(Phase::Suspended));
}

#[tokio::test]
async fn a_job_whose_members_never_join_names_them_and_restarts() {
    let missing = |missing: &[&str]| {
        let CoordinatorView::Live(report) = live(Stage::Starting, 0) else { unreachable!() };
        let missing = missing.iter().map(|&member| member.to_owned()).collect();
        CoordinatorView::Live(Report { missing, ..report })
    };
    let scripts = [
        (vec![missing(&["dense-worker 1", "loader 0"])], "dense-worker 1, loader 0 have not joined"),
        (vec![missing(&[])], "logs of its pods"),
        (vec![CoordinatorView::Silent], "its coordinator does not answer the operator"),
    ];
    for (script, says) in scripts {
        let manifest = format!("{MANIFEST}  faultTolerance: {{stallSeconds: 30, backoffSeconds: 100}}\n");
        let world = World::new(&manifest, vec![script, good()]);
        let mut ticks = 0;
        world.settle().await;
        while world.job().status.unwrap().restarts == Some(0) {
            assert!(ticks < 40, "it waits forever");
            world.tick();
            world.settle().await;
            ticks += 1;
        }
        // Five seconds each; the pods start in the first. A start may take longer than a step.
        assert_eq!(ticks, 25);
        let (reason, message) = world.condition("Reconciling").unwrap();
        assert_eq!(reason, "NoProgress");
        assert!(message.contains(says) && message.contains("120 seconds"), "{message}");
        passes(100);
        world.live().await;
        let status = world.job().status.unwrap();
        assert_eq!((status.phase, status.restarts), (Some(Phase::Complete), Some(1)));
    }
}

#[tokio::test]
async fn after_a_crash_another_attempt_completes_the_job() {
    let world = World::new(MANIFEST, vec![crashing(), crashing(), good()]);
    let seen = phases(&world).await;
    use Phase::{Complete, Evaluating, Restarting, Starting, Training};
    let once = [Starting, Training, Restarting];
    assert_eq!(seen, [&once[..], &once, &[Starting, Training, Evaluating, Complete]].concat());
    let status = world.job().status.unwrap();
    assert_eq!((status.restarts, status.attempt.unwrap().number), (Some(2), 3));
}

#[tokio::test]
async fn the_back_off_doubles_and_no_pod_starts_before_its_end() {
    let world = World::new(MANIFEST, vec![crashing(), crashing(), good()]);
    let mut waits = Vec::new();
    for attempt in 1..=2 {
        while world.phase() != Some(Phase::Restarting) || world.job().status.unwrap().attempt.unwrap().number == attempt
        {
            world.settle().await;
            world.tick();
        }
        let status = world.job().status.unwrap();
        let begin = status.attempt.unwrap().not_before.unwrap().0;
        let (reason, message) = world.condition("Reconciling").unwrap();
        assert_eq!(reason, "Crash");
        assert!(message.contains("ps 1 was restarted"), "{message}");
        let mut waited = 0;
        while world.phase() == Some(Phase::Restarting) {
            world.settle().await;
            world.tick();
            waited += 5;
            assert!(waited < 120, "{begin}");
        }
        waits.push(waited);
    }
    assert!(waits[0] >= 5 && waits[1] >= waits[0] + 5, "{waits:?}");
}

#[tokio::test]
async fn a_job_that_crashes_too_often_fails_with_the_last_crash() {
    let world =
        World::new(&format!("{MANIFEST}  faultTolerance: {{maxRestarts: 2, backoffSeconds: 1}}\n"), vec![crashing()]);
    world.live().await;
    let (reason, message) = world.condition("Failed").unwrap();
    assert_eq!(reason, "RestartsExhausted");
    assert!(message.contains("ps 1 was restarted in the middle") && message.contains("more than 2 times"), "{message}");
    assert_eq!(world.job().status.unwrap().attempt.unwrap().number, 3);
}

#[tokio::test]
async fn a_divergence_is_not_retried() {
    let message = "training diverged: the loss is 2.6e18".to_owned();
    let world = World::new(MANIFEST, vec![vec![live(Stage::Training, 1), CoordinatorView::Diverged { message }]]);
    world.live().await;
    let (reason, message) = world.condition("Failed").unwrap();
    assert!(reason == "Diverged" && message.starts_with("training diverged: the loss is 2.6e18. The job"), "{message}");
    let status = world.job().status.unwrap();
    assert_eq!((status.attempt.unwrap().number, status.restarts), (1, Some(0)));
}

#[tokio::test]
async fn bad_input_is_not_retried_until_the_manifest_changes() {
    let wrong: Script = vec![failed("train.csv:7: the label is `x`", true)];
    let world = World::new(MANIFEST, vec![wrong, good()]);
    world.live().await;
    let (reason, message) = world.condition("Failed").unwrap();
    assert!(reason == "BadInput" && message.starts_with("train.csv:7"), "{message}");
    assert_eq!(world.condition("Stalled").unwrap().0, "BadInput");
    for _ in 0..5 {
        world.tick();
        world.settle().await;
    }
    assert_eq!(world.job().status.unwrap().attempt.unwrap().number, 1);
    // Only a change of a pods' setting starts it over.
    world.edit(|spec| spec["ttlSecondsAfterFinished"] = json!(1_000_000));
    world.settle().await;
    assert_eq!(world.phase(), Some(Phase::Failed));
    world.edit(|spec| spec["data"]["synthetic"]["rows"] = json!(2000));
    world.live().await;
    assert_eq!((world.phase(), world.condition("Failed")), (Some(Phase::Complete), None));
}

/// The statuses of waiting pods, and their conditions.
#[tokio::test]
async fn a_waiting_pod_is_a_condition_until_it_starts() {
    let not_ready = json!([{"type": "Ready", "status": "False"}]);
    let waiting = |reason: &str| {
        json!({"conditions": not_ready, "containerStatuses": [{"name": "rectrain", "restartCount": 0, "ready": false,
            "image": "", "imageID": "", "state": {"waiting": {"reason": reason, "message": "because"}}}]})
    };
    let homeless = json!({"podIP": null, "containerStatuses": null, "conditions": [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are available"}]});
    for (status, reason, hint) in [
        (waiting("ImagePullBackOff"), "ImagePullFailed", "runtimeImage"),
        (waiting("CreateContainerConfigError"), "ContainerConfigError", "secretName"),
        (homeless, "Unschedulable", "template"),
    ] {
        let world = World::new(MANIFEST, vec![good()]);
        world.api().pod_status = Some(status);
        world.settle().await;
        world.tick();
        world.settle().await;
        let (told, message) = world.condition("Stalled").unwrap();
        assert!(told == reason && message.contains(hint), "{told}: {message}");
        assert_eq!(world.phase(), Some(Phase::Starting));
        world.api().pod_status = None;
        let pods: Vec<String> =
            world.api().list("pods").iter().map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned()).collect();
        pods.iter().for_each(|pod| world.api().remove("pods", pod));
        world.live().await;
        assert_eq!((world.phase(), world.condition("Stalled")), (Some(Phase::Complete), None));
    }
}

#[tokio::test]
async fn a_memory_limit_is_named_and_exit_code_2_is_bad_input() {
    let ended = |code: i32, reason: &str| {
        json!({"containerStatuses": [{"name": "rectrain", "restartCount": 1, "ready": true, "image": "", "imageID": "",
            "state": {"running": {}}, "lastState": {"terminated": {"exitCode": code, "reason": reason,
            "message": "rectrain: the file is missing\n", "finishedAt": "2027-01-15T08:00:00Z"}}}]})
    };
    let world = World::new(MANIFEST, vec![vec![live(Stage::Training, 1), failed("ps 0 is gone", false)], good()]);
    world.api().pod_status = Some(ended(137, "OOMKilled"));
    while world.phase() != Some(Phase::Restarting) {
        world.settle().await;
        world.tick();
    }
    let (reason, message) = world.condition("Reconciling").unwrap();
    assert!(reason == "OutOfMemory" && message.contains("resources.limits.memory"), "{message}");
    let world = World::new(MANIFEST, vec![vec![CoordinatorView::Silent]]);
    world.api().pod_status = Some(ended(2, "Error"));
    world.live().await;
    let (reason, message) = world.condition("Failed").unwrap();
    assert!(reason == "BadInput" && message.contains("rectrain: the file is missing"), "{message}");
}

/// A coordinator that cannot start gives no answer. Only the end of its container tells the reason.
#[tokio::test]
async fn a_container_that_cannot_start_is_reported_with_its_last_line() {
    let world = World::new(MANIFEST, vec![vec![CoordinatorView::Silent]]);
    world.api().pod_status = Some(json!({"conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [
        {"name": "rectrain", "restartCount": 1, "ready": false, "image": "", "imageID": "",
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
            "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "rectrain: cannot list gs://bucket\n",
                "finishedAt": "2027-01-15T08:00:00Z"}}}]}));
    world.settle().await;
    world.tick();
    world.settle().await;
    let (reason, message) = world.condition("Reconciling").unwrap();
    assert!(reason == "Crash" && message.contains("cannot list gs://bucket"), "{reason}: {message}");
    assert_eq!((world.phase(), world.condition("Stalled")), (Some(Phase::Starting), None));
}

#[tokio::test]
async fn a_job_restarts_without_progress_and_fails_at_its_deadline() {
    let manifest = format!("{MANIFEST}  faultTolerance: {{stallSeconds: 30, backoffSeconds: 1}}\n");
    let world = World::new(&manifest, vec![vec![live(Stage::Training, 1)], good()]);
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.restarts), (Some(Phase::Complete), Some(1)));
    // An evaluation may make progress, or none.
    let world = World::new(&manifest, vec![vec![idle(Stage::Evaluating, 1, 1000.0)], good()]);
    world.live().await;
    assert_eq!(world.job().status.unwrap().restarts, Some(1));
    let long = vec![idle(Stage::Evaluating, 1, 2.0); 40].into_iter().chain([complete()]).collect();
    let world = World::new(&manifest, vec![long]);
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.restarts.unwrap_or(0)), (Some(Phase::Complete), 0));
    let world = World::new(&format!("{MANIFEST}  activeDeadlineSeconds: 40\n"), vec![vec![live(Stage::Evaluating, 1)]]);
    world.live().await;
    assert_eq!(world.condition("Failed").unwrap().0, "DeadlineExceeded");
}

/// The job completed while no operator looked.
#[tokio::test]
async fn a_complete_model_is_not_lost_to_later_events() {
    let later: [fn(&World); 3] = [
        |_| passes(3600),
        |world| world.edit(|spec| spec["suspend"] = json!(true)),
        |world| world.edit(|spec| spec["data"]["synthetic"]["rows"] = json!(2000)),
    ];
    for happens in later {
        let manifest = format!("{MANIFEST}  activeDeadlineSeconds: 1000\n");
        let world = World::new(&manifest, vec![vec![live(Stage::Training, 1), complete()]]);
        while world.phase() != Some(Phase::Training) {
            world.settle().await;
            world.tick();
        }
        happens(&world);
        world.settle().await;
        let status = world.job().status.unwrap();
        assert_eq!((status.phase, status.attempt.unwrap().number), (Some(Phase::Complete), 1));
        assert!(status.summary.is_some() && world.condition("Failed").is_none());
    }
}

#[tokio::test]
async fn an_ended_job_is_deleted_after_its_time_to_live() {
    let world = World::new(&format!("{MANIFEST}  ttlSecondsAfterFinished: 100\n"), vec![good()]);
    world.live().await;
    let action = world.reconcile().await.unwrap();
    assert!(action != Action::await_change() && !world.api().made().is_empty());
    // Its pods ended in one tick after its end.
    passes(94);
    world.settle().await;
    assert!(world.api().get("rectrainingjobs", JOB).is_some());
    passes(1);
    world.reconcile().await.unwrap();
    assert!(world.api().get("rectrainingjobs", JOB).is_none() && world.api().made().is_empty());
}

#[tokio::test]
async fn a_change_of_a_pods_setting_begins_an_attempt_without_a_restart() {
    let world = World::new(MANIFEST, vec![vec![live(Stage::Training, 1)], good()]);
    for _ in 0..3 {
        world.settle().await;
        world.tick();
    }
    world.edit(|spec| spec["roles"]["denseWorker"]["replicas"] = json!(3));
    world.settle().await;
    assert_eq!(world.phase(), Some(Phase::Restarting));
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.restarts, status.attempt.unwrap().number, status.phase), (Some(0), 2, Some(Phase::Complete)));
    let maps = world.api().list("configmaps").len();
    assert_eq!(maps, 1, "the earlier attempt's manifest is deleted");
}

#[tokio::test]
async fn a_new_version_of_the_operator_restarts_nothing() {
    let mut world = World::new(MANIFEST, vec![vec![live(Stage::Training, 1)]]);
    for _ in 0..3 {
        world.settle().await;
        world.tick();
    }
    let pods = |world: &World| -> Vec<_> { world.api().list("pods").into_iter().cloned().collect() };
    let before = pods(&world);
    world.replace_operator();
    Arc::get_mut(&mut world.operator).unwrap().config.runtime_image = "runtime:2".to_owned();
    world.settle().await;
    world.tick();
    world.settle().await;
    assert_eq!(pods(&world), before);
    let image = world.api().list("statefulsets")[0]["spec"]["template"]["spec"]["containers"][0]["image"].clone();
    assert_eq!(image, "runtime:1", "an attempt keeps its image");
}

#[tokio::test]
async fn objects_deleted_or_changed_by_others_are_restored() {
    let world = World::new(MANIFEST, vec![vec![live(Stage::Training, 1)]]);
    for _ in 0..3 {
        world.settle().await;
        world.tick();
    }
    world.settle().await;
    let whole = world.outline();
    let made = world.api().made();
    assert_eq!(made.len(), 19);
    for (plural, name) in &made {
        world.api().remove(plural, name);
        world.settle().await;
        world.tick();
        world.settle().await;
        assert_eq!(world.outline(), whole, "{plural}/{name} was deleted");
        let changes: [(&str, serde_json::Value); 4] = [
            ("/metadata/labels/app.kubernetes.io~1name", json!("other")),
            ("/metadata/labels/rectrain.dev~1job", json!("other")),
            ("/metadata/annotations/rectrain.dev~1applied-hash", json!("other")),
            ("/spec/replicas", json!(7)),
        ];
        for (pointer, value) in changes {
            let changed = {
                let mut api = world.api();
                let field = api.get_mut(plural, name).unwrap().pointer_mut(pointer);
                let changed = field.map(|field| *field = value).is_some();
                api.touch(plural, name);
                changed
            };
            if !changed {
                continue;
            }
            world.settle().await;
            world.tick();
            world.settle().await;
            assert_eq!(world.outline(), whole, "{plural}/{name}{pointer} was changed");
        }
    }
}

#[tokio::test]
async fn objects_of_other_owners_are_not_touched_but_reported() {
    let world = World::new(MANIFEST, vec![good()]);
    let foreign = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "clicks-ps", "namespace": world::NAMESPACE,
        "labels": {"rectrain.dev/job": "clicks"}}, "spec": {"ports": [{"port": 80}]}});
    world.api().create("services", foreign);
    let before = world.api().get("services", "clicks-ps").unwrap().clone();
    for _ in 0..3 {
        world.settle().await;
        world.tick();
    }
    let (reason, message) = world.condition("Stalled").unwrap();
    assert!(reason == "NameConflict" && message.contains("Service `clicks-ps`"), "{message}");
    assert_eq!(world.api().get("services", "clicks-ps"), Some(&before));
    world.api().remove("services", "clicks-ps");
    world.settle().await;
    assert_eq!(world.condition("Stalled"), None);
    assert!(world.api().get("services", "clicks-ps").unwrap()["metadata"]["ownerReferences"].is_array());
}

#[tokio::test]
async fn a_recreated_job_waits_for_the_objects_of_its_predecessor() {
    let world = World::new(MANIFEST, vec![good()]);
    let left = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "clicks-ps", "namespace": world::NAMESPACE,
        "labels": {"rectrain.dev/job": "clicks"}, "ownerReferences": [{"apiVersion": "rectrain.dev/v1alpha1",
        "kind": "RecTrainingJob", "name": "clicks", "uid": "of-the-deleted-one", "controller": true}]}});
    world.api().create("services", left);
    assert!(world.reconcile().await.is_err(), "it is retried");
    assert_eq!(world.condition("Stalled"), None);
    world.api().remove("services", "clicks-ps");
    world.live().await;
    assert_eq!(world.phase(), Some(Phase::Complete));
}

#[tokio::test]
async fn a_pod_beyond_the_replicas_cannot_fail_the_job() {
    let world = World::new(MANIFEST, vec![good()]);
    world.settle().await;
    world.tick();
    let mut extra = world.api().get("pods", "clicks-loader-0").unwrap().clone();
    extra["metadata"]["name"] = json!("clicks-loader-7");
    extra["status"]["podIP"] = json!("10.9.9.9");
    extra["status"]["containerStatuses"][0]["lastState"] =
        json!({"terminated": {"exitCode": 2, "message": "--index 7"}});
    world.api().create("pods", extra);
    world.settle().await;
    assert_eq!((world.phase(), world.condition("Failed")), (Some(Phase::Starting), None));
}

#[tokio::test]
async fn a_refused_object_is_a_condition_and_is_retried() {
    let world = World::new(MANIFEST, vec![good()]);
    world.api().refused.insert("statefulsets".to_owned(), (403, "exceeded quota: pods".to_owned()));
    world.settle().await;
    let (reason, message) = world.condition("Stalled").unwrap();
    assert!(reason == "ObjectRefused" && message.contains("exceeded quota"), "{message}");
    assert_eq!(world.reconcile().await.unwrap(), Action::requeue(Duration::from_secs(15)));
    world.api().refused.clear();
    world.live().await;
    assert_eq!((world.phase(), world.condition("Stalled")), (Some(Phase::Complete), None));
}

#[tokio::test]
async fn objects_are_created_side_by_side_and_pods_last() {
    let world = World::new(MANIFEST, vec![good()]);
    world.settle().await;
    let api = world.api();
    let is_of_pods = |call: &&String| call.contains("PATCH statefulsets");
    let first = api.log.iter().position(|call| is_of_pods(&call)).expect("StatefulSets are applied");
    let made = |calls: &[String]| calls.iter().filter(|call| call.starts_with("PATCH") && !is_of_pods(call)).count();
    assert!(made(&api.log[..first]) > 10 && made(&api.log[first..]) == 0, "{:#?}", api.log);
    assert_eq!(api.most_under_way, 14, "all objects that pods need");
}

#[tokio::test]
async fn each_transition_has_one_event() {
    let world = World::new(MANIFEST, vec![crashing(), good()]);
    world.live().await;
    let mut reasons = Vec::new();
    for event in world.api().list("events") {
        // A repeated event is the same event, counted.
        let times = event["series"]["count"].as_u64().unwrap_or(1);
        reasons.extend((0..times).map(|_| event["reason"].as_str().unwrap().to_owned()));
    }
    let mut sorted = reasons.clone();
    sorted.sort();
    assert_eq!(
        sorted,
        ["Complete", "Crash", "NoCheckpointPath", "Restarting", "Starting", "Starting", "Training", "Training"],
        "{reasons:?}"
    );
}

/// A whole life with one fault of one call. It has the same end, without duplicates or leftovers.
async fn lives_through(fault: Fault, at: usize, expected: &serde_json::Value, script: &[Script]) -> bool {
    let mut world = World::new(MANIFEST, script.to_vec());
    world.api().fault = Some((at, fault));
    lives(&mut world, fault, at, expected, |_| {}).await
}

/// Lets the job live to its end. False if it has no call with the number `at`. `meanwhile` is
/// called before each reconcile.
pub async fn lives(
    world: &mut World,
    fault: Fault,
    at: usize,
    expected: &serde_json::Value,
    mut meanwhile: impl FnMut(&World),
) -> bool {
    let killed = world.api().killed.clone();
    for round in 0..400 {
        meanwhile(world);
        let result = tokio::select! {
            biased;
            result = world.reconcile() => Some(result),
            () = killed.notified() => None,
        };
        if result.is_none() {
            world.replace_operator();
        }
        assert_no_two_attempts(world);
        let ended = matches!(world.phase(), Some(Phase::Complete | Phase::Failed));
        if ended && world.api().list("pods").is_empty() && matches!(result, Some(Ok(_))) && world.api().calls > at {
            world.settle().await;
            assert_eq!(&world.outline(), expected, "{fault:?} at call {at}");
            return true;
        }
        if ended && world.api().calls <= at && world.api().list("pods").is_empty() {
            return false;
        }
        // Usually a failed reconcile is retried before time passes.
        if matches!(result, Some(Ok(_))) || round % 3 == 2 {
            world.tick();
        }
    }
    panic!("{fault:?} at call {at}: the job never ends: {:?}", world.job().status);
}

fn assert_no_two_attempts(world: &World) {
    let api = world.api();
    let mut attempts: Vec<_> =
        api.list("pods").iter().map(|pod| pod["metadata"]["labels"]["rectrain.dev/attempt"].to_string()).collect();
    attempts.sort();
    attempts.dedup();
    assert!(attempts.len() <= 1, "pods of several attempts at once: {attempts:?}");
}

#[tokio::test]
async fn any_fault_of_any_call_leads_to_the_same_end() {
    let script = [crashing(), good()];
    let world = World::new(MANIFEST, script.to_vec());
    world.live().await;
    let expected = world.outline();
    let mut lives = 0;
    for fault in Fault::ALL {
        for at in 1.. {
            if !lives_through(fault, at, &expected, &script).await {
                break;
            }
            lives += 1;
        }
    }
    assert!(lives > 500, "only {lives} lives were tried");
}

/// Another job, which was created first, uses the checkpoint path.
#[tokio::test]
async fn a_job_waits_while_another_uses_its_checkpoint_path() {
    let manifest = format!("{MANIFEST}  checkpoint: {{path: \"gs://ads/clicks\"}}\n");
    let world = World::new(&manifest, vec![vec![live(Stage::Training, 1), complete()]]);
    let mut first = world.api().get("rectrainingjobs", JOB).unwrap().clone();
    first["metadata"]["name"] = json!("first");
    first["metadata"]["creationTimestamp"] = json!("2020-01-01T00:00:00Z");
    world.api().create("rectrainingjobs", first);
    for _ in 0..3 {
        world.settle().await;
        world.tick();
    }
    assert_eq!(world.phase(), Some(Phase::Pending));
    assert!(world.api().list("pods").is_empty());
    assert!(world.api().made().is_empty());
    let (reason, message) = world.condition("Reconciling").unwrap();
    assert!(reason == "CheckpointPathInUse" && message.starts_with("job first uses"), "{reason}: {message}");
    assert!(world.condition("Stalled").is_none());
    world.api().get_mut("rectrainingjobs", "first").unwrap()["status"] = json!({"phase": "Complete"});
    world.live().await;
    assert_eq!(world.phase(), Some(Phase::Complete));
}
