//! The number of parameter servers of a job under way, changed in its manifest: new ones come before slots move, old ones go after
//! they have, nothing restarts, and an operator that dies anywhere makes no difference.

use std::collections::BTreeMap;

use rectrain_crds::{AttemptServers, Phase};
use rectrain_operator::coordinator::Stage;
use serde_json::json;

use crate::world::{MANIFEST, Script, World, failed, live, long};

fn scale(world: &World, servers: u32) {
    world.edit(|spec| spec["roles"]["ps"]["replicas"] = json!(servers));
}

/// The parameter servers' pods: name and uid.
fn pods(world: &World) -> BTreeMap<String, String> {
    let api = world.api();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let of_role = api.list("pods").into_iter().filter(|pod| pod["metadata"]["labels"]["rectrain.dev/role"] == "ps");
    of_role.map(|pod| (text(&pod["metadata"]["name"]), text(&pod["metadata"]["uid"]))).collect()
}

/// No pod goes that still holds rows.
async fn ticks(world: &World, count: usize) {
    for _ in 0..count {
        world.settle().await;
        let holding = world.scripts.lock().unwrap().servers().present;
        world.tick();
        let there = pods(world).len();
        assert!(there >= holding as usize, "{holding} servers hold rows, and {there} are there");
    }
    world.settle().await;
}

async fn training(manifest: &str, script: Script) -> World {
    let world = World::new(manifest, vec![script]);
    while world.phase() != Some(Phase::Training) {
        world.settle().await;
        world.tick();
    }
    world
}

fn servers(world: &World) -> AttemptServers {
    world.job().status.unwrap().attempt.unwrap().servers.unwrap()
}

fn attempt(world: &World) -> u32 {
    world.job().status.unwrap().attempt.unwrap().number
}

fn asked(world: &World) -> Vec<u32> {
    world.scripts.lock().unwrap().asked_servers.clone()
}

#[tokio::test]
async fn servers_come_and_go_under_a_job_that_trains_on() {
    let world = training(MANIFEST, long(40)).await;
    let first = pods(&world);
    assert_eq!(first.len(), 2);
    scale(&world, 4);
    ticks(&world, 6).await;
    let more = pods(&world);
    assert_eq!(servers(&world), AttemptServers { started: 2, wanted: 4, present: 4, needed: 4 });
    assert!(more.len() == 4 && first.iter().all(|pod| more.get(pod.0) == Some(pod.1)), "{more:?}");
    assert_eq!(world.condition("Ready").map(|(reason, _)| reason).as_deref(), Some("Training"));
    scale(&world, 1);
    ticks(&world, 6).await;
    assert_eq!(servers(&world), AttemptServers { started: 2, wanted: 1, present: 1, needed: 1 });
    assert_eq!(pods(&world).len(), 1);
    assert_eq!(asked(&world), [4, 1]);
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.restarts, attempt(&world)), (Some(Phase::Complete), Some(0), 1));
    let api = world.api();
    let moved = api.list("events").into_iter().filter(|event| event["reason"] == "SlotsMoved").count();
    assert_eq!(moved, 2);
}

#[tokio::test]
async fn minds_may_change_and_operators_die_while_slots_move() {
    let mut world = training(MANIFEST, long(60)).await;
    for wanted in [5, 3, 1, 2, 4, 1] {
        scale(&world, wanted);
        ticks(&world, 1).await;
        world.replace_operator();
        ticks(&world, 1).await;
    }
    ticks(&world, 10).await;
    assert_eq!(servers(&world), AttemptServers { started: 2, wanted: 1, present: 1, needed: 1 });
    assert_eq!((pods(&world).len(), attempt(&world)), (1, 1));
}

/// Its container is started again within the attempt: it finds the manifest of its start, and pods for it.
#[tokio::test]
async fn a_coordinator_that_starts_again_gets_the_servers_of_its_start_and_is_asked_again() {
    let world = training(MANIFEST, vec![live(Stage::Training, 1)]).await;
    for (wanted, restarts) in [(4, 1), (1, 2)] {
        scale(&world, wanted);
        ticks(&world, 6).await;
        assert_eq!(pods(&world).len(), wanted as usize);
        let coordinator = "clicks-coordinator-0";
        world.api().get_mut("pods", coordinator).unwrap()["status"]["containerStatuses"][0]["restartCount"] =
            json!(restarts);
        world.tick();
        world.settle().await;
        assert_eq!(servers(&world).needed, 2);
        ticks(&world, 8).await;
        assert_eq!((servers(&world).present, pods(&world).len(), attempt(&world)), (wanted, wanted as usize, 1));
    }
    assert_eq!(asked(&world), [4, 4, 1, 1]);
}

/// Nobody can be asked before all have joined, which they may never do.
#[tokio::test]
async fn a_number_changed_while_pods_start_is_that_of_another_attempt() {
    let world = World::new(MANIFEST, vec![vec![live(Stage::Starting, 0)], long(5)]);
    for _ in 0..3 {
        world.settle().await;
        world.tick();
    }
    assert_eq!(world.phase(), Some(Phase::Starting));
    scale(&world, 1);
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.restarts, attempt(&world)), (Some(Phase::Complete), Some(0), 2));
    assert_eq!((servers(&world).started, asked(&world)), (1, vec![]));
}

#[tokio::test]
async fn a_job_that_failed_for_an_impossible_manifest_starts_when_that_is_mended() {
    let manifest = format!("{MANIFEST}  autoscaling: {{ps: {{max: 1}}}}\n");
    let world = World::new(&manifest, vec![long(5)]);
    world.settle().await;
    assert_eq!(world.condition("Failed").unwrap().0, "InvalidSpec");
    scale(&world, 1);
    world.live().await;
    assert_eq!((world.phase(), servers(&world).started), (Some(Phase::Complete), 1));
}

/// It has lost its rows, so the job begins again; not with as many servers, for which the rows are too many.
#[tokio::test]
async fn one_that_was_killed_for_its_memory_gets_others_beside_it_where_the_operator_decides() {
    let killed = json!({"containerStatuses": [{"name": "rectrain", "restartCount": 1, "ready": true, "image": "", "imageID": "",
        "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2027-01-15T08:00:00Z"}}}]});
    for (mode, started) in [("apply", 3), ("recommend", 2)] {
        let manifest = format!("{MANIFEST}  autoscaling: {{mode: {mode}}}\n");
        let crashes = vec![live(Stage::Training, 1), failed("ps 0 is gone", false)];
        let world = World::new(&manifest, vec![crashes, long(5)]);
        world.api().pod_status = Some(killed.clone());
        while world.phase() != Some(Phase::Restarting) {
            world.settle().await;
            world.tick();
        }
        world.api().pod_status = None;
        world.live().await;
        let status = world.job().status.unwrap();
        let decision = status.decisions.last().unwrap();
        assert_eq!((decision.from.as_str(), decision.to.as_str(), decision.applied), ("2", "3", mode == "apply"));
        assert!(decision.reason.contains("clicks-ps-0 used up its memory"), "{}", decision.reason);
        assert_eq!((servers(&world).started, status.phase, asked(&world)), (started, Some(Phase::Complete), vec![]));
    }
}
