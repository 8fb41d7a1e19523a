//! Pods that the cluster does not create or cannot start while the job trains, because of a quota
//! or of an image. The running pods stay, and no restart is spent on them.

use std::collections::BTreeMap;
use std::sync::Arc;

use rectrain_crds::{Phase, RoleReplicas};
use rectrain_operator::coordinator_view::Stage;
use serde_json::{Value, json};

use crate::world::{MANIFEST, Script, World, live, long};

/// Pods of [`MANIFEST`]: two servers, two dense workers, and one of each other role.
const PODS: usize = 7;

/// A job that trains. It restarts after 30 s without progress.
async fn training(more: &str, scripts: Vec<Script>) -> World {
    let world = World::new(&format!("{MANIFEST}{more}"), scripts);
    until_training(&world).await;
    world
}

const IMPATIENT: &str = "  faultTolerance: {stallSeconds: 30, backoffSeconds: 1, maxRestarts: 2}\n";

/// A job that makes no progress.
fn standing(step: u64) -> Script {
    vec![live(Stage::Training, step)]
}

async fn until_training(world: &World) {
    for _ in 0..20 {
        if world.phase() == Some(Phase::Training) {
            return;
        }
        world.settle().await;
        world.tick();
    }
    panic!("it does not train: {:?}", world.job().status);
}

async fn ticks(world: &World, count: usize) {
    for _ in 0..count {
        world.settle().await;
        world.tick();
    }
    world.settle().await;
}

fn scale_servers(world: &World, replicas: u32) {
    world.edit(|spec| spec["roles"]["ps"]["replicas"] = json!(replicas));
}

/// Names and uids of all pods.
fn pods(world: &World) -> BTreeMap<String, String> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let api = world.api();
    api.list("pods").iter().map(|pod| (text(&pod["metadata"]["name"]), text(&pod["metadata"]["uid"]))).collect()
}

fn servers(world: &World) -> RoleReplicas {
    world.job().status.unwrap().attempt.unwrap().replicas.unwrap().ps
}

/// The number of the attempt, and the restarts so far.
fn attempt(world: &World) -> (u32, Option<u32>) {
    let status = world.job().status.unwrap();
    (status.attempt.unwrap().number, status.restarts)
}

fn is_ready(world: &World) -> bool {
    world.condition("Ready").is_some()
}

/// Fails unless the job is stalled for this reason, with this text in the message.
fn assert_stalled(world: &World, reason: &str, says: &str) {
    let (found, message) = world.condition("Stalled").expect("it is stalled");
    assert!(found == reason && message.contains(says), "{found}: {message}");
    assert!(!is_ready(world));
}

#[tokio::test]
async fn a_quota_stops_a_scale_out_and_not_the_training() {
    for gives_up in [false, true] {
        let world = training("", vec![long(80)]).await;
        world.api().most_pods = Some(PODS);
        let before = (pods(&world), world.job().status.unwrap().step);
        scale_servers(&world, 4);
        ticks(&world, 6).await;
        assert_stalled(&world, "PodsRefused", "exceeded quota");
        let status = world.job().status.unwrap();
        assert!(status.phase == Some(Phase::Training) && status.step > before.1, "training continues");
        assert_eq!((pods(&world), servers(&world).present), (before.0.clone(), 2), "the slots stay");
        let wanted = if gives_up {
            scale_servers(&world, 2);
            2
        } else {
            world.api().most_pods = None;
            4
        };
        ticks(&world, 6).await;
        let settled = RoleReplicas { started: 2, wanted, present: wanted, needed: wanted };
        assert_eq!((servers(&world), is_ready(&world)), (settled, true));
        assert!(before.0.iter().all(|pod| pods(&world).get(pod.0) == Some(pod.1)), "no pod was replaced");
        assert_eq!(attempt(&world), (1, Some(0)));
    }
}

/// The quota is lowered below the present pods, and one of them is deleted. Another attempt could
/// not have its pods either.
#[tokio::test]
async fn a_refused_replacement_is_no_stall() {
    let world = training(IMPATIENT, vec![standing(1)]).await;
    world.api().most_pods = Some(PODS - 1);
    world.api().end_pod("clicks-loader-0");
    ticks(&world, 1).await;
    let left = pods(&world);
    assert_eq!(left.len(), PODS - 1);
    ticks(&world, 30).await;
    assert_stalled(&world, "PodsRefused", "clicks-loader");
    assert_eq!((attempt(&world), pods(&world)), ((1, Some(0)), left));
    // From then on the job has its time for a step, and no longer.
    world.api().most_pods = None;
    ticks(&world, 5).await;
    assert_eq!((attempt(&world), pods(&world).len()), ((1, Some(0)), PODS));
    ticks(&world, 4).await;
    assert_eq!(attempt(&world), (2, Some(1)));
}

/// A new operator does not know at once why a pod is missing.
#[tokio::test]
async fn a_new_operator_restarts_no_job_with_a_refused_pod() {
    let mut world = training(IMPATIENT, vec![standing(1)]).await;
    world.api().most_pods = Some(PODS - 1);
    world.api().end_pod("clicks-loader-0");
    ticks(&world, 20).await;
    for _ in 0..3 {
        world.replace_operator();
        ticks(&world, 10).await;
        assert_stalled(&world, "PodsRefused", "exceeded quota");
    }
    assert_eq!(attempt(&world), (1, Some(0)));
}

/// A pod whose node cannot pull the image.
fn without_image() -> Value {
    json!({"phase": "Pending", "conditions": [{"type": "Ready", "status": "False"}], "containerStatuses": [
        {"name": "rectrain", "restartCount": 0, "ready": false, "image": "", "imageID": "",
            "state": {"waiting": {"reason": "ImagePullBackOff", "message": "401 Unauthorized"}}}]})
}

/// The registry accepts the Secret again, and the pod starts.
fn start(world: &World, name: &str) {
    let mut api = world.api();
    api.status_of.clear();
    let status = &mut api.get_mut("pods", name).unwrap()["status"];
    status["conditions"][0]["status"] = json!("True");
    status["containerStatuses"][0]["state"] = json!({"running": {"startedAt": "2027-01-15T08:00:00Z"}});
    api.touch("pods", name);
}

/// The pull secret is deleted while the job trains, and a pod is evicted.
#[tokio::test]
async fn a_replacement_without_its_image_is_no_stall() {
    let mut world = World::new(&format!("{MANIFEST}{IMPATIENT}"), vec![standing(1)]);
    Arc::get_mut(&mut world.operator).unwrap().config.image_pull_secrets = vec!["registry".to_owned()];
    until_training(&world).await;
    let name = "clicks-dense-worker-1";
    world.api().status_of.insert(name.to_owned(), without_image());
    world.api().end_pod(name);
    ticks(&world, 1).await;
    let all = pods(&world);
    ticks(&world, 30).await;
    assert_stalled(&world, "ImagePullFailed", name);
    assert_stalled(&world, "ImagePullFailed", "(registry)");
    assert_eq!((attempt(&world), pods(&world)), ((1, Some(0)), all), "no running pod ended");
    start(&world, name);
    world.scripts.lock().by_attempt = vec![standing(2)];
    ticks(&world, 2).await;
    assert_eq!((is_ready(&world), attempt(&world)), (true, (1, Some(0))));
}

#[tokio::test]
async fn a_joiner_without_its_image_is_reported_and_hides_no_stall() {
    for (script, ends) in [(long(80), (1, Some(0))), (standing(1), (2, Some(1)))] {
        let world = training(IMPATIENT, vec![script, long(80)]).await;
        world.api().status_of.insert("clicks-ps-2".to_owned(), without_image());
        scale_servers(&world, 3);
        ticks(&world, 3).await;
        assert_stalled(&world, "ImagePullFailed", "clicks-ps-2");
        assert_eq!((servers(&world).present, attempt(&world)), (2, (1, Some(0))));
        ticks(&world, 5).await;
        assert_eq!(attempt(&world), ends);
    }
}

fn suspend(world: &World, suspend: bool) {
    world.edit(|spec| spec["suspend"] = json!(suspend));
}

/// The operator has decided on four servers; the quota has room for two.
#[tokio::test]
async fn decided_servers_that_had_not_joined_come_after_a_suspension() {
    let world = training("  autoscaling: {mode: apply}\n", vec![long(80)]).await;
    world.api().most_pods = Some(PODS);
    {
        let mut api = world.api();
        let status = &mut api.get_mut("rectrainingjobs", "clicks").unwrap()["status"];
        status["decisions"] = json!([{"subject": "ps", "time": "2027-01-15T08:00:00Z", "from": "2", "to": "4", "applied": true, "reason": "memory"}]);
        api.touch("rectrainingjobs", "clicks");
    }
    ticks(&world, 6).await;
    assert_stalled(&world, "PodsRefused", "exceeded quota");
    suspend(&world, true);
    ticks(&world, 2).await;
    assert_eq!((world.phase(), pods(&world).len()), (Some(Phase::Suspended), 0));
    suspend(&world, false);
    until_training(&world).await;
    assert_eq!((servers(&world).started, servers(&world).wanted, pods(&world).len()), (2, 4, PODS));
    ticks(&world, 6).await;
    assert_stalled(&world, "PodsRefused", "exceeded quota");
    world.api().most_pods = None;
    ticks(&world, 6).await;
    assert_eq!((servers(&world).present, is_ready(&world), attempt(&world)), (4, true, (2, Some(0))));
}

/// The user has asked for four servers. The job waits for them, says why, and accepts fewer.
#[tokio::test]
async fn the_number_of_the_manifest_holds_after_a_suspension() {
    let world = training("", vec![long(80), vec![live(Stage::Starting, 0)], long(80)]).await;
    world.api().most_pods = Some(PODS);
    scale_servers(&world, 4);
    ticks(&world, 6).await;
    suspend(&world, true);
    ticks(&world, 2).await;
    suspend(&world, false);
    ticks(&world, 40).await;
    assert_eq!((world.phase(), servers(&world).started), (Some(Phase::Starting), 4));
    assert_stalled(&world, "PodsRefused", "exceeded quota");
    scale_servers(&world, 2);
    until_training(&world).await;
    assert_eq!((servers(&world).started, attempt(&world)), (2, (3, Some(0))));
}
