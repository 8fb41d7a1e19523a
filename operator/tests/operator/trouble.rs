//! Trouble that must not end a job that trains. Users make impossible changes, and pods are
//! refused. Coordinators are silent for a moment, and nodes are drained. A job's pods have other
//! containers, and a namesake has left pods.
use rectrain_crds::Phase;
use rectrain_operator::coordinator_view::{CoordinatorView, Report, Stage};
use serde_json::{Value, json};

use crate::world::{MANIFEST, NAMESPACE, Script, World, complete, failed, good, live, passes};

/// A job whose StatefulSets may create no pods, after enough looks to report it.
pub async fn with_refused_pods() -> World {
    let world = World::new(MANIFEST, vec![good()]);
    world.api().pods_refused = Some("pods \"clicks-ps-0\" is forbidden: exceeded quota: cpu".to_owned());
    for _ in 0..5 {
        world.settle().await;
        world.tick();
    }
    world.settle().await;
    world
}

#[tokio::test]
async fn refused_pods_are_a_condition_with_the_reason() {
    let world = with_refused_pods().await;
    let (reason, message) = world.condition("Stalled").unwrap();
    assert!(reason == "PodsRefused" && message.contains("exceeded quota: cpu. Look at"), "{message}");
    assert!(message.contains("StatefulSet clicks-coordinator"), "{message}");
    world.api().pods_refused = None;
    world.live().await;
    assert_eq!((world.phase(), world.condition("Stalled")), (Some(Phase::Complete), None));
}

/// Neither an impossible number nor an impossible template ends a job that trains. Once corrected,
/// it left no trace.
#[tokio::test]
async fn an_impossible_change_ends_no_job_under_way() {
    let long = || vec![vec![live(Stage::Training, 1); 12].into_iter().chain([complete()]).collect::<Script>()];
    let impossible: [fn(&mut Value); 3] = [
        |spec| spec["features"]["sparse"] = json!([{"name": "C1"}, {"name": "C1"}]),
        |spec| spec["roles"]["ps"]["template"] = json!({"env": [{"name": "DEBUG", "value": 1}]}),
        |spec| spec["autoscaling"] = json!({"ps": {"max": 1}}),
    ];
    for change in impossible {
        let world = World::new(MANIFEST, long());
        ticks(&world, 3).await;
        let (pods, objects) = (names_of_pods(&world), world.api().made());
        let good = world.job().spec;
        world.edit(change);
        ticks(&world, 2).await;
        assert_eq!(world.condition("Stalled").unwrap().0, "InvalidSpec");
        assert_eq!((world.phase(), names_of_pods(&world), world.api().made()), (Some(Phase::Training), pods, objects));
        world.edit(|spec| *spec = serde_json::to_value(&good).unwrap());
        world.live().await;
        let status = world.job().status.unwrap();
        assert_eq!((status.phase, status.attempt.unwrap().number), (Some(Phase::Complete), 1));
    }
    // A job whose manifest is never corrected completes all the same.
    let world = World::new(MANIFEST, long());
    ticks(&world, 3).await;
    world.edit(impossible[0]);
    world.live().await;
    assert_eq!((world.phase(), world.condition("Failed")), (Some(Phase::Complete), None));
}

fn refused(text: &str) -> Option<(String, u16, String)> {
    Some((text.to_owned(), 422, "is invalid".to_owned()))
}

const CLASS: &str = "no-such-class";

fn with_class(spec: &mut Value) {
    spec["roles"]["denseWorker"]["template"] = json!({"priorityClassName": CLASS});
}

#[tokio::test]
async fn a_refused_template_is_found_by_a_dry_run() {
    let twice = "failed to create typed patch object: duplicate entries for key";
    for (code, why) in [(422, "is invalid"), (500, twice), (500, "a webhook is down"), (504, "timeout")] {
        let manifest = format!("{MANIFEST}  checkpoint: {{path: \"gs://ads/clicks\"}}\n");
        let world = World::new(&manifest, vec![vec![live(Stage::Training, 1)], good()]);
        world.scripts.lock().saved = Some(Ok("full-1".to_owned()));
        ticks(&world, 3).await;
        let pods = names_of_pods(&world);
        world.api().refused_text = Some((CLASS.to_owned(), code, why.to_owned()));
        world.edit(with_class);
        ticks(&world, 5).await;
        let (reason, message) = world.condition("Stalled").unwrap();
        assert!(reason == "ObjectRefused" && message.contains("training continues"), "{message}");
        assert!(message.contains(why), "{message}");
        assert_eq!((world.phase(), names_of_pods(&world)), (Some(Phase::Training), pods));
        assert_eq!(world.scripts.lock().asked_saves, 0, "it needs no checkpoint");
        // Once the API server accepts it, the change is carried out.
        world.api().refused_text = None;
        world.live().await;
        let status = world.job().status.unwrap();
        assert_eq!((status.phase, status.attempt.unwrap().number), (Some(Phase::Complete), 2));
        assert_eq!(world.scripts.lock().asked_saves, 1);
    }
}

/// The API server refuses a list with two entries of one key with an internal error. A retry does
/// not help.
#[tokio::test]
async fn a_template_that_cannot_be_merged_is_a_condition() {
    let world = World::new(MANIFEST, vec![good()]);
    let why = "failed to create typed patch object (ads/clicks-dense-worker; apps/v1, Kind=StatefulSet): duplicate entries for key";
    world.api().refused_text = Some((CLASS.to_owned(), 500, why.to_owned()));
    world.edit(with_class);
    ticks(&world, 2).await;
    let (reason, message) = world.condition("Stalled").unwrap();
    assert!(reason == "ObjectRefused" && message.contains("duplicate entries"), "{message}");
}

/// It would get its deadline and its restarts a second time.
#[tokio::test]
async fn a_refused_change_does_not_revive_a_job_that_failed_since() {
    let world =
        World::new(&format!("{MANIFEST}  activeDeadlineSeconds: 40\n"), vec![vec![live(Stage::Training, 1)], good()]);
    ticks(&world, 3).await;
    world.api().refused_text = refused(CLASS);
    world.edit(with_class);
    ticks(&world, 2).await;
    assert_eq!(world.phase(), Some(Phase::Training));
    passes(40);
    ticks(&world, 5).await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.attempt.unwrap().number), (Some(Phase::Failed), 1));
    assert_eq!(world.condition("Failed").unwrap().0, "DeadlineExceeded");
    // Another change does.
    world.edit(|spec| spec["roles"]["denseWorker"]["template"] = json!({"priorityClassName": "batch"}));
    world.live().await;
    assert_eq!(world.phase(), Some(Phase::Complete));
}

#[tokio::test]
async fn a_pending_change_corrects_a_job_with_bad_input() {
    let wrong = vec![live(Stage::Training, 1), live(Stage::Training, 1), failed("train.csv:7: the label is `x`", true)];
    let world = World::new(MANIFEST, vec![wrong, good()]);
    while world.phase() != Some(Phase::Training) {
        ticks(&world, 1).await;
    }
    world.api().refused_text = refused(CLASS);
    world.edit(with_class);
    while world.phase() == Some(Phase::Training) {
        ticks(&world, 1).await;
    }
    world.api().refused_text = None;
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.attempt.unwrap().number), (Some(Phase::Complete), 2));
}

/// Only the node's events tell it. Some events are from before the pod had a node.
#[tokio::test]
async fn a_volume_that_cannot_be_mounted_is_a_condition() {
    let world = World::new(MANIFEST, vec![good()]);
    let creating = json!({"reason": "ContainerCreating"});
    world.api().pod_status = Some(json!({"conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [
        {"name": "rectrain", "restartCount": 0, "ready": false, "image": "", "imageID": "", "state": {"waiting": creating}}]}));
    ticks(&world, 2).await;
    let pod = world.api().get("pods", "clicks-coordinator-0").unwrap().clone();
    let event = |minute: u32, reason: &str, message: &str| {
        json!({"metadata": {"name": format!("event-{minute}"), "namespace": NAMESPACE}, "reason": reason, "message": message,
            "involvedObject": {"uid": pod["metadata"]["uid"]}, "lastTimestamp": format!("2027-01-15T08:{minute:02}:00Z")})
    };
    // A mount that failed at first and a pull under way are no problem.
    for (minute, reason) in [(2, "FailedMount"), (1, "FailedScheduling"), (3, "Pulling")] {
        world.api().create("events", event(minute, reason, "for a moment"));
    }
    passes(60);
    ticks(&world, 5).await;
    assert_eq!((world.condition("Stalled"), world.phase()), (None, Some(Phase::Starting)));
    world.api().create("events", event(4, "FailedMount", "MountVolume.SetUp failed: secret \"keys\" not found"));
    ticks(&world, 5).await;
    let (reason, message) = world.condition("Stalled").unwrap();
    assert!(reason == "ContainerConfigError" && message.contains("secret \"keys\" not found"), "{message}");
}

/// A StatefulSet without pods is deleted if its new template is refused.
#[tokio::test]
async fn a_suspended_job_has_no_pods_although_its_sets_are_refused() {
    let world = World::new(MANIFEST, vec![vec![live(Stage::Training, 1)]]);
    ticks(&world, 3).await;
    world.api().refused_text = refused(CLASS);
    world.edit(|spec| {
        with_class(spec);
        spec["suspend"] = json!(true);
    });
    ticks(&world, 3).await;
    assert_eq!((world.phase(), names_of_pods(&world)), (Some(Phase::Suspended), vec![]));
}

/// A new operator does not know the progress before. It must not take that for a stalled job.
#[tokio::test]
async fn a_coordinator_that_is_silent_to_a_new_operator_has_its_time() {
    let manifest = format!("{MANIFEST}  faultTolerance: {{stallSeconds: 30, backoffSeconds: 1}}\n");
    let mut script = vec![live(Stage::Training, 1), CoordinatorView::Silent, CoordinatorView::Silent];
    script.extend([live(Stage::Training, 2), complete()]);
    let mut world = World::new(&manifest, vec![script]);
    ticks(&world, 2).await;
    passes(3600);
    world.replace_operator();
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.restarts.unwrap_or(0)), (Some(Phase::Complete), 0));
    // A coordinator that stays silent is a crash after that time.
    let silent = vec![live(Stage::Training, 1), CoordinatorView::Silent];
    let world = World::new(&manifest, vec![silent, good()]);
    world.live().await;
    assert_eq!(world.job().status.unwrap().restarts, Some(1));
}

/// A drain ends the attempt if a pod cannot be replaced, and is no fault of the job.
#[tokio::test]
async fn drains_do_not_count_as_restarts() {
    let manifest = format!("{MANIFEST}  faultTolerance: {{maxRestarts: 1, backoffSeconds: 1}}\n");
    let crash = || vec![live(Stage::Training, 1), live(Stage::Training, 1), failed("ps 0 is gone", false)];
    let world = World::new(&manifest, vec![crash(), crash(), crash(), good()]);
    for _ in 0..60 {
        world.settle().await;
        if world.phase() == Some(Phase::Complete) {
            break;
        }
        world.tick();
        displace(&world, "clicks-ps-0");
    }
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.restarts, status.attempt.unwrap().number), (Some(Phase::Complete), Some(0), 4));
}

/// A drain evicts a pod.
fn displace(world: &World, name: &str) {
    let mut api = world.api();
    if let Some(pod) = api.get_mut("pods", name) {
        let conditions = pod["status"]["conditions"].as_array_mut().unwrap();
        conditions.push(json!({"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}));
        api.touch("pods", name);
    }
}

/// Its replacement found no copy of the journal and refuses all members, whose containers restart.
/// That is no fault of the job.
#[tokio::test]
async fn a_displaced_coordinator_ends_the_attempt_without_a_restart() {
    for displaced in [true, false] {
        let manifest = format!("{MANIFEST}  faultTolerance: {{maxRestarts: 1, backoffSeconds: 1}}\n");
        let world = World::new(&manifest, vec![vec![live(Stage::Training, 1); 50]]);
        while world.phase() != Some(Phase::Training) {
            world.settle().await;
            world.tick();
        }
        if displaced {
            displace(&world, "clicks-coordinator-0");
        }
        world.settle().await;
        world.api().remove("pods", "clicks-coordinator-0");
        world.settle().await;
        world.tick();
        world.settle().await;
        for _ in 0..4 {
            world.tick();
            world.settle().await;
        }
        let status = world.job().status.unwrap();
        assert_eq!((status.attempt.unwrap().number, status.restarts), (1 + u32::from(displaced), Some(0)));
        assert_eq!(world.phase(), Some(Phase::Training));
    }
}

/// Its replacement continues from a copy of the journal. Until it has found one, it is silent.
#[tokio::test]
async fn a_displaced_coordinator_that_recovers_ends_no_attempt() {
    let recovered = |step| match live(Stage::Training, step) {
        CoordinatorView::Live(report) => CoordinatorView::Live(Report { recovered: true, ..report }),
        other => other,
    };
    let manifest = format!("{MANIFEST}  faultTolerance: {{stallSeconds: 60, backoffSeconds: 1}}\n");
    let world = World::new(&manifest, vec![vec![live(Stage::Training, 1); 50]]);
    ticks(&world, 3).await;
    assert_eq!(world.phase(), Some(Phase::Training));
    displace(&world, "clicks-coordinator-0");
    world.settle().await;
    world.scripts.lock().by_attempt = vec![vec![CoordinatorView::Silent, CoordinatorView::Silent, recovered(2)]];
    world.api().remove("pods", "clicks-coordinator-0");
    for _ in 0..6 {
        world.tick();
        world.settle().await;
        let status = world.job().status.unwrap();
        assert_eq!((status.phase, status.attempt.unwrap().number), (Some(Phase::Training), 1));
    }
    let status = world.job().status.unwrap();
    assert_eq!((status.step, status.restarts), (Some(2), Some(0)));
}

/// The node is short of memory or disk, for which a neighbour may be to blame.
#[tokio::test]
async fn an_evicted_pod_counts_no_restart() {
    let low = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi.";
    let own = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi.";
    for (message, restarts) in [(low, 0), (own, 1)] {
        let manifest = format!("{MANIFEST}  faultTolerance: {{maxRestarts: 1, backoffSeconds: 1}}\n");
        let crash = vec![live(Stage::Training, 1), live(Stage::Training, 1), failed("ps 0 is gone", false)];
        let world = World::new(&manifest, vec![crash, good()]);
        ticks(&world, 1).await;
        {
            let mut api = world.api();
            let status = &mut api.get_mut("pods", "clicks-ps-0").unwrap()["status"];
            status["phase"] = json!("Failed");
            status["reason"] = json!("Evicted");
            status["message"] = json!(message);
            api.touch("pods", "clicks-ps-0");
        }
        world.live().await;
        let status = world.job().status.unwrap();
        assert_eq!((status.phase, status.restarts), (Some(Phase::Complete), Some(restarts)), "{message}");
        assert_eq!(status.attempt.unwrap().number, 2);
    }
}

#[tokio::test]
async fn a_job_without_checkpoints_warns_of_a_suspension() {
    for (has_path, manifest) in
        [(false, MANIFEST.to_owned()), (true, format!("{MANIFEST}  checkpoint: {{path: \"gs://ads/clicks\"}}\n"))]
    {
        let world = World::new(&manifest, vec![vec![live(Stage::Training, 2); 50]]);
        world.scripts.lock().saved = Some(Ok("full-2".to_owned()));
        ticks(&world, 4).await;
        assert_eq!(world.condition("Checkpointed").is_some(), has_path);
        let events =
            world.api().list("events").into_iter().filter(|event| event["reason"] == "NoCheckpointPath").count();
        assert_eq!(events, usize::from(!has_path), "before anything is lost");
        world.edit(|spec| spec["suspend"] = json!(true));
        ticks(&world, 4).await;
        let message = world.condition("Suspended").unwrap().1;
        assert_eq!(message.contains("Its training is lost"), !has_path, "{message}");
        let status = world.job().status.unwrap();
        assert_eq!(status.step, has_path.then_some(2), "the step that the next attempt continues from");
        assert_eq!(status.loss.is_some(), has_path);
    }
}

/// The containers of a mesh or an agent end and restart by themselves.
#[tokio::test]
async fn injected_containers_say_nothing_about_the_job() {
    let beside = json!([
        {"name": "proxy", "restartCount": 30, "ready": true, "image": "", "imageID": "",
            "state": {"terminated": {"exitCode": 2, "reason": "OOMKilled"}}},
        {"name": "rectrain", "restartCount": 0, "ready": true, "image": "", "imageID": "",
            "state": {"running": {"startedAt": "2027-01-15T08:00:00Z"}}},
    ]);
    let world = World::new(MANIFEST, vec![good()]);
    for _ in 0..40 {
        world.settle().await;
        world.tick();
        let pods: Vec<String> = names_of_pods(&world);
        for pod in &pods {
            let mut api = world.api();
            api.get_mut("pods", pod).unwrap()["status"]["containerStatuses"] = beside.clone();
            api.touch("pods", pod);
        }
    }
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.restarts.unwrap_or(0)), (Some(Phase::Complete), 0));
}

/// Pods of a deleted job of the same name may still run. The job waits for their end, and does not
/// count their restarts.
#[tokio::test]
async fn a_job_waits_for_the_pods_of_a_deleted_namesake() {
    let world = World::new(MANIFEST, vec![good()]);
    let other = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "clicks-ps-7", "namespace": NAMESPACE, "labels": {
            "app.kubernetes.io/managed-by": "rectrain-operator", "rectrain.dev/job": "clicks", "rectrain.dev/role": "ps",
            "rectrain.dev/attempt": "1", "rectrain.dev/job-uid": "another"}},
        "spec": {"containers": []},
        "status": {"containerStatuses": [{"name": "rectrain", "restartCount": 9, "ready": false, "image": "", "imageID": "",
            "state": {"terminated": {"exitCode": 2}}}]}});
    world.api().create("pods", other);
    for _ in 0..3 {
        world.settle().await;
    }
    assert_eq!((world.condition("Failed"), world.phase()), (None, Some(Phase::Pending)));
    world.api().remove("pods", "clicks-ps-7");
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.restarts.unwrap_or(0)), (Some(Phase::Complete), 0));
}

/// An immutable object is not applied again if a later version of the operator writes it
/// differently.
#[tokio::test]
async fn the_manifest_of_running_pods_is_never_changed() {
    let world = World::new(MANIFEST, vec![vec![live(Stage::Training, 1)]]);
    ticks(&world, 3).await;
    let name = world.api().made().into_iter().find(|(plural, _)| plural == "configmaps").unwrap().1;
    world.api().get_mut("configmaps", &name).unwrap()["data"]["resolved.json"] = json!("of an earlier version");
    ticks(&world, 3).await;
    assert_eq!((world.condition("Stalled"), world.phase()), (None, Some(Phase::Training)));
    // Its digest is the old one again, and a suspension does not write it either.
    let applied = |world: &World| world.api().log.iter().filter(|call| call.starts_with("PATCH configmaps")).count();
    let before = applied(&world);
    world.edit(|spec| spec["suspend"] = json!(true));
    ticks(&world, 3).await;
    assert_eq!((world.phase(), applied(&world)), (Some(Phase::Suspended), before));
}

/// Another digest would end every attempt under way when the operator is upgraded. So a new field
/// must not be in the digest of manifests without it.
#[test]
fn the_digest_of_pod_settings_is_the_same_in_every_version() {
    let job = rectrain_crds::parse_manifest(MANIFEST, "job.yaml").unwrap();
    assert_eq!(rectrain_operator::reconcile::validate::spec_hash(&job.spec), "7bd7f6602c21b040481245b88c00a3a4");
}

async fn ticks(world: &World, count: usize) {
    for _ in 0..count {
        world.settle().await;
        world.tick();
    }
    world.settle().await;
}

fn names_of_pods(world: &World) -> Vec<String> {
    let api = world.api();
    api.list("pods").iter().map(|pod| pod["metadata"]["name"].as_str().unwrap().to_owned()).collect()
}
