//! The ends of pods and of jobs: pods that do not end, ends that the operator does not see, and
//! leftovers.

use std::collections::{BTreeMap, BTreeSet};

use rectrain_crds::Phase;
use rectrain_operator::coordinator_view::Stage;
use serde_json::{Value, json};

use crate::world::{JOB, MANIFEST, World, complete, crashing, failed, good, idle, live, passes};

const CHECKPOINTS: &str = "  checkpoint: {path: \"gs://ads/clicks\"}\n";

async fn ticks(world: &World, count: usize) {
    for _ in 0..count {
        world.settle().await;
        world.tick();
    }
    world.settle().await;
}

async fn until(world: &World, phase: Phase) {
    for _ in 0..40 {
        world.settle().await;
        if world.phase() == Some(phase) {
            return;
        }
        world.tick();
    }
    panic!("it never gets to {phase:?}: {:?}", world.job().status);
}

/// Names and uids of all pods.
fn pods(world: &World) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let api = world.api();
    api.list("pods").iter().map(|pod| (text(&pod["metadata"]["name"]), text(&pod["metadata"]["uid"]))).collect()
}

/// The attempts that have pods.
fn attempts(world: &World) -> BTreeSet<String> {
    let api = world.api();
    api.list("pods").iter().map(|pod| pod["metadata"]["labels"]["rectrain.dev/attempt"].to_string()).collect()
}

/// Another program keeps the object of a pod.
fn keep(world: &World, pod: &str) {
    world.api().get_mut("pods", pod).unwrap()["metadata"]["finalizers"] = json!(["example.com/audit"]);
}

fn release(world: &World, pod: &str) {
    world.api().get_mut("pods", pod).unwrap()["metadata"]["finalizers"] = json!([]);
}

/// The operator may not read nodes here, as with `watchNamespace`.
#[tokio::test]
async fn a_stuck_pod_is_named_and_its_attempt_does_not_overlap() {
    let world = World::new(MANIFEST, vec![crashing(), good()]);
    until(&world, Phase::Training).await;
    keep(&world, "clicks-ps-1");
    until(&world, Phase::Restarting).await;
    assert_eq!(world.condition("Reconciling").unwrap().0, "Crash");
    for _ in 0..30 {
        ticks(&world, 1).await;
        assert_eq!(attempts(&world).len(), 1, "pods of two attempts");
    }
    let (reason, message) = world.condition("Stalled").unwrap();
    assert!(reason == "PodStuck" && message.contains("clicks-ps-1"), "{message}");
    assert!(message.contains("example.com/audit"), "{message}");
    assert_eq!((world.phase(), pods(&world).len()), (Some(Phase::Restarting), 1));
    release(&world, "clicks-ps-1");
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.restarts), (Some(Phase::Complete), Some(1)));
    assert_eq!(world.condition("Stalled"), None);
}

/// The next attempt could not have its name either.
#[tokio::test]
async fn a_member_that_does_not_end_is_no_stall() {
    let manifest = format!("{MANIFEST}  faultTolerance: {{stallSeconds: 120, backoffSeconds: 1}}\n");
    let world = World::new(&manifest, vec![vec![live(Stage::Training, 1)]]);
    until(&world, Phase::Training).await;
    let before = pods(&world);
    keep(&world, "clicks-dense-worker-1");
    world.api().end_pod("clicks-dense-worker-1");
    ticks(&world, 60).await;
    assert_eq!(world.condition("Stalled").unwrap().0, "PodStuck");
    assert_eq!((world.job().status.unwrap().restarts, pods(&world)), (Some(0), before));
    release(&world, "clicks-dense-worker-1");
    world.scripts.lock().by_attempt = vec![vec![live(Stage::Training, 2)]];
    ticks(&world, 3).await;
    assert!(world.condition("Ready").is_some());
    assert_eq!(world.job().status.unwrap().attempt.unwrap().number, 1);
}

/// The argument that names the run of the coordinator's checkpoints.
fn run_of_coordinator(world: &World) -> String {
    let set = world.api().get("statefulsets", "clicks-coordinator").unwrap().clone();
    let arguments = set["spec"]["template"]["spec"]["containers"][0]["args"].as_array().unwrap().clone();
    let runs = arguments.iter().filter_map(Value::as_str).filter(|argument| argument.starts_with("--run="));
    runs.map(str::to_owned).collect()
}

/// The job ends while no operator looks. Then its pods go, alone or with their StatefulSets. The
/// next coordinator finds the last checkpoint of the same run, and has nothing left to train.
#[tokio::test]
async fn a_job_that_ended_unseen_completes_in_the_same_run() {
    for kind in ["pods", "statefulsets"] {
        let mut world = World::new(&format!("{MANIFEST}{CHECKPOINTS}"), vec![vec![live(Stage::Training, 4)]]);
        until(&world, Phase::Training).await;
        let (before, run) = (pods(&world), run_of_coordinator(&world));
        let uid = world.job().metadata.uid.unwrap();
        assert_eq!(run, format!("--run={uid}"));
        let names: Vec<String> = {
            let api = world.api();
            api.list(kind).iter().map(|object| object["metadata"]["name"].as_str().unwrap().to_owned()).collect()
        };
        names.iter().for_each(|name| world.api().remove(kind, name));
        assert!(pods(&world).is_empty());
        passes(3600);
        world.replace_operator();
        // The report of a coordinator that has restored a finished run.
        let restored = vec![live(Stage::Starting, 0), live(Stage::Evaluating, 4), complete()];
        world.scripts.lock().by_attempt = vec![restored];
        ticks(&world, 1).await;
        assert_eq!(run_of_coordinator(&world), run);
        assert!(pods(&world).iter().all(|pod| before.get(pod.0) != Some(pod.1)));
        world.live().await;
        let status = world.job().status.unwrap();
        assert_eq!((status.phase, status.restarts), (Some(Phase::Complete), Some(0)));
        assert_eq!(status.attempt.unwrap().number, 1);
        assert_eq!(status.last_checkpoint.map(|last| last.step), Some(4));
    }
}

/// The coordinator ends between the last checkpoint and its summary, and a worker in the last
/// minute of the evaluation. The parameter servers have the model, and stay.
#[tokio::test]
async fn servers_stay_until_the_job_is_complete() {
    let manifest = format!("{MANIFEST}{CHECKPOINTS}");
    let evaluating = || idle(Stage::Evaluating, 4, 1.0);
    let world = World::new(&manifest, vec![vec![live(Stage::Training, 1), evaluating()]]);
    until(&world, Phase::Evaluating).await;
    passes(1800);
    let servers = |world: &World| {
        let all = pods(world).into_iter();
        all.filter(|(name, _)| name.starts_with("clicks-ps-")).collect::<Vec<_>>()
    };
    let before = servers(&world);
    world.api().end_pod("clicks-dense-worker-0");
    ticks(&world, 3).await;
    assert_eq!((world.phase(), servers(&world)), (Some(Phase::Evaluating), before.clone()));
    let again = vec![live(Stage::Starting, 0), evaluating(), evaluating(), complete()];
    world.scripts.lock().by_attempt = vec![again];
    world.api().end_pod("clicks-coordinator-0");
    ticks(&world, 2).await;
    assert_eq!(servers(&world), before);
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.restarts), (Some(Phase::Complete), Some(0)));
    assert_eq!(status.attempt.unwrap().number, 1);
}

/// Kinds and names of the objects of a job under way.
async fn objects_under_way() -> Vec<(String, String)> {
    let world = World::new(MANIFEST, vec![good()]);
    until(&world, Phase::Training).await;
    world.api().made()
}

#[tokio::test]
async fn an_ended_job_keeps_its_objects_and_no_pod() {
    let under_way = objects_under_way().await;
    let kinds: BTreeSet<&str> = under_way.iter().map(|(kind, _)| kind.as_str()).collect();
    assert!(!kinds.contains("persistentvolumeclaims") && !kinds.contains("jobs"), "{kinds:?}");
    let no_restart = "  faultTolerance: {maxRestarts: 0}\n";
    let late = "  activeDeadlineSeconds: 40\n";
    let wrong = || vec![live(Stage::Training, 1), failed("train.csv:7: the label is `x`", true)];
    let ends = [
        ("", good(), Phase::Complete),
        (no_restart, crashing(), Phase::Failed),
        ("", wrong(), Phase::Failed),
        (late, vec![live(Stage::Training, 1)], Phase::Failed),
    ];
    for (more, script, phase) in ends {
        let world = World::new(&format!("{MANIFEST}{more}  ttlSecondsAfterFinished: 100\n"), vec![script]);
        world.live().await;
        assert_eq!((world.phase(), world.api().made()), (Some(phase), under_way.clone()));
        let replicas: Vec<Value> = {
            let api = world.api();
            api.list("statefulsets").iter().map(|set| set["spec"]["replicas"].clone()).collect()
        };
        assert_eq!(replicas, [0; 5]);
        passes(100);
        world.reconcile().await.unwrap();
        assert!(world.api().get("rectrainingjobs", JOB).is_none() && world.api().made().is_empty());
    }
}
