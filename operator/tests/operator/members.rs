//! The number of a role's members, changed in the manifest of a job under way. New pods start
//! before the members own anything, and old pods end after the members own nothing. Nothing
//! restarts, and a killed operator makes no difference.

use std::collections::BTreeMap;

use rectrain_crds::{BudgetStatus, DecisionAction, DecisionStatus, Phase, Role, RoleReplicas};
use rectrain_operator::coordinator_view::{CoordinatorView, Report, Stage, Tables};
use serde_json::{Value, json};

use crate::world::{MANIFEST, Script, World, failed, live, long};

fn scale(world: &World, role: Role, replicas: u32) {
    world.edit(|spec| spec["roles"][role.section()]["replicas"] = json!(replicas));
}

/// Names and uids of a role's pods.
fn pods(world: &World, role: Role) -> BTreeMap<String, String> {
    let api = world.api();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let is_it = |pod: &&Value| pod["metadata"]["labels"]["rectrain.dev/role"] == role.name();
    let of_role = api.list("pods").into_iter().filter(is_it);
    of_role.map(|pod| (text(&pod["metadata"]["name"]), text(&pod["metadata"]["uid"]))).collect()
}

/// Ticks in which no pod of a present member goes.
async fn ticks(world: &World, role: Role, count: usize) {
    for _ in 0..count {
        world.settle().await;
        let present = world.scripts.lock().members(role).present;
        world.tick();
        let pods = pods(world, role).len();
        assert!(pods >= present as usize, "{present} members of {role:?} have {pods} pods");
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

/// Two members of each role. Batches have pieces for more dense workers.
fn manifest() -> String {
    let replicas = Role::MEMBERS.map(|role| format!("{}: {{replicas: 2}}", role.section())).join(", ");
    let training = "training: {localBatchSize: 512}\n  roles:";
    MANIFEST
        .replace("{ps: {replicas: 2}, denseWorker: {replicas: 2}}", &format!("{{{replicas}}}"))
        .replace("roles:", training)
}

fn settled(replicas: u32) -> RoleReplicas {
    RoleReplicas { started: 2, wanted: replicas, present: replicas, needed: replicas }
}

fn members_of(world: &World, role: Role) -> RoleReplicas {
    let attempt = world.job().status.unwrap().attempt.unwrap();
    *attempt.replicas.unwrap().get(role).unwrap()
}

fn attempt(world: &World) -> u32 {
    world.job().status.unwrap().attempt.unwrap().number
}

fn asked(world: &World) -> Vec<u32> {
    world.scripts.lock().asked_members.iter().map(|(_, replicas)| *replicas).collect()
}

#[tokio::test]
async fn members_join_and_leave_while_the_job_trains() {
    for role in Role::MEMBERS {
        let world = training(&manifest(), long(40)).await;
        let first = pods(&world, role);
        assert_eq!(first.len(), 2);
        scale(&world, role, 4);
        ticks(&world, role, 6).await;
        let more = pods(&world, role);
        assert_eq!(members_of(&world, role), settled(4), "{role:?}");
        assert!(more.len() == 4 && first.iter().all(|pod| more.get(pod.0) == Some(pod.1)), "{more:?}");
        assert_eq!(world.condition("Ready").map(|(reason, _)| reason).as_deref(), Some("Training"));
        scale(&world, role, 1);
        ticks(&world, role, 6).await;
        assert_eq!(members_of(&world, role), settled(1), "{role:?}");
        assert_eq!((pods(&world, role).len(), asked(&world)), (1, vec![4, 1]));
        world.live().await;
        let status = world.job().status.unwrap();
        assert_eq!((status.phase, status.restarts, attempt(&world)), (Some(Phase::Complete), Some(0), 1));
        let reason = if role == Role::Ps { "SlotsMoved" } else { "Scaled" };
        let events = world.api().list("events").into_iter().filter(|event| event["reason"] == reason).count();
        assert_eq!(events, 2, "{role:?}");
    }
}

#[tokio::test]
async fn a_changed_memory_budget_needs_no_restart() {
    let rows = |rows| BudgetStatus { max_rows: Some(rows), max_bytes: None };
    let with_budget = |view| match view {
        CoordinatorView::Live(report) => {
            let tables = Box::new(Tables { budget: Some(rows(900_000)), ..*report.tables });
            CoordinatorView::Live(Report { tables, ..report })
        }
        other => other,
    };
    let manifest = manifest().replace("features: {", "features: {memory: {maxRows: 900000}, ");
    let world = training(&manifest, long(40).into_iter().map(with_budget).collect()).await;
    let first = pods(&world, Role::Ps);
    for limit in [700_000, 800_000] {
        world.edit(|spec| spec["features"]["memory"]["maxRows"] = json!(limit));
        ticks(&world, Role::Ps, 3).await;
    }
    assert_eq!(world.scripts.lock().asked_budgets, [rows(700_000), rows(800_000)]);
    let attempt = world.job().status.unwrap().attempt.unwrap();
    assert_eq!((attempt.number, attempt.budget), (1, Some(rows(900_000))), "the pods' manifest stays");
    assert_eq!(pods(&world, Role::Ps), first);
    world.live().await;
    assert_eq!(world.job().status.unwrap().phase, Some(Phase::Complete));
}

#[tokio::test]
async fn numbers_may_change_and_operators_die_during_a_change() {
    for role in Role::MEMBERS {
        let mut world = training(&manifest(), long(60)).await;
        for wanted in [5, 3, 1, 2, 4, 1] {
            scale(&world, role, wanted);
            ticks(&world, role, 1).await;
            world.replace_operator();
            ticks(&world, role, 1).await;
        }
        ticks(&world, role, 10).await;
        assert_eq!(members_of(&world, role), settled(1), "{role:?}");
        assert_eq!((pods(&world, role).len(), attempt(&world)), (1, 1));
    }
}

#[tokio::test]
async fn all_roles_may_change_at_once() {
    let world = training(&manifest(), long(60)).await;
    world.edit(|spec| Role::MEMBERS.into_iter().for_each(|role| spec["roles"][role.section()]["replicas"] = json!(3)));
    ticks(&world, Role::Ps, 12).await;
    for role in Role::MEMBERS {
        assert_eq!((members_of(&world, role), pods(&world, role).len()), (settled(3), 3), "{role:?}");
    }
    assert_eq!((asked(&world), attempt(&world)), (vec![3; 4], 1));
}

/// The number of dense workers determines their shares of a batch, so all roles restart.
#[tokio::test]
async fn dense_workers_without_local_batches_need_another_attempt() {
    let more_than_pieces = manifest().replace("localBatchSize: 512", "localBatchSize: 2048");
    for manifest in [MANIFEST, &more_than_pieces] {
        let world = training(manifest, long(40)).await;
        scale(&world, Role::DenseWorker, 3);
        for _ in 0..8 {
            world.settle().await;
            world.tick();
        }
        assert_eq!((attempt(&world), asked(&world)), (2, vec![]));
    }
}

/// Its container restarts within the attempt, and reads the manifest of the attempt's start.
#[tokio::test]
async fn a_restarted_coordinator_gets_its_first_servers_and_is_asked_again() {
    let world = training(MANIFEST, vec![live(Stage::Training, 1)]).await;
    for (wanted, restarts) in [(4, 1), (1, 2)] {
        scale(&world, Role::Ps, wanted);
        ticks(&world, Role::Ps, 6).await;
        assert_eq!(pods(&world, Role::Ps).len(), wanted as usize);
        let coordinator = "clicks-coordinator-0";
        world.api().get_mut("pods", coordinator).unwrap()["status"]["containerStatuses"][0]["restartCount"] =
            json!(restarts);
        world.tick();
        world.settle().await;
        assert_eq!(members_of(&world, Role::Ps).needed, 2);
        ticks(&world, Role::Ps, 8).await;
        assert_eq!(
            (members_of(&world, Role::Ps).present, pods(&world, Role::Ps).len(), attempt(&world)),
            (wanted, wanted as usize, 1)
        );
    }
    assert_eq!(asked(&world), [4, 4, 1, 1]);
}

/// The coordinator cannot be asked before all members have joined, which may never happen.
#[tokio::test]
async fn a_number_changed_while_pods_start_begins_another_attempt() {
    let world = World::new(MANIFEST, vec![vec![live(Stage::Starting, 0)], long(5)]);
    for _ in 0..3 {
        world.settle().await;
        world.tick();
    }
    assert_eq!(world.phase(), Some(Phase::Starting));
    scale(&world, Role::Ps, 1);
    world.live().await;
    let status = world.job().status.unwrap();
    assert_eq!((status.phase, status.restarts, attempt(&world)), (Some(Phase::Complete), Some(0), 2));
    assert_eq!((members_of(&world, Role::Ps).started, asked(&world)), (1, vec![]));
}

#[tokio::test]
async fn a_job_with_an_invalid_manifest_starts_once_it_is_corrected() {
    let manifest = format!("{MANIFEST}  autoscaling: {{ps: {{max: 1}}}}\n");
    let world = World::new(&manifest, vec![long(5)]);
    world.settle().await;
    assert_eq!(world.condition("Failed").unwrap().0, "InvalidSpec");
    scale(&world, Role::Ps, 1);
    world.live().await;
    assert_eq!((world.phase(), members_of(&world, Role::Ps).started), (Some(Phase::Complete), 1));
}

fn killed_for_its_memory() -> Value {
    json!({"containerStatuses": [{"name": "rectrain", "restartCount": 1, "ready": true, "image": "", "imageID": "",
        "state": {"running": {}}, "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2027-01-15T08:00:00Z"}}}]})
}

/// Three servers, one, and three again, before or after two of them have handed their rows over. A
/// pod that leaves is not taken for the new pod of its name.
#[tokio::test]
async fn servers_that_leave_and_come_back_are_new_pods() {
    for ticks_between in [0, 1] {
        let world = training(&manifest(), long(60)).await;
        scale(&world, Role::Ps, 3);
        ticks(&world, Role::Ps, 6).await;
        let before = pods(&world, Role::Ps);
        scale(&world, Role::Ps, 1);
        ticks(&world, Role::Ps, ticks_between).await;
        scale(&world, Role::Ps, 3);
        ticks(&world, Role::Ps, 10).await;
        let after = pods(&world, Role::Ps);
        assert_eq!((members_of(&world, Role::Ps), after.len()), (settled(3), 3));
        assert_eq!(after["clicks-ps-0"], before["clicks-ps-0"]);
        let is_same = after["clicks-ps-2"] == before["clicks-ps-2"];
        assert_eq!(is_same, ticks_between == 0, "it has left if there was time");
        assert_eq!((attempt(&world), world.job().status.unwrap().restarts), (1, Some(0)));
    }
}

/// The first server restarts in its pod while the others hand their rows over.
#[tokio::test]
async fn a_server_may_restart_in_its_pod_while_others_leave() {
    let world = training(&manifest(), long(60)).await;
    scale(&world, Role::Ps, 1);
    world.settle().await;
    world.api().get_mut("pods", "clicks-ps-0").unwrap()["status"]["containerStatuses"][0]["restartCount"] = json!(1);
    ticks(&world, Role::Ps, 6).await;
    assert_eq!((members_of(&world, Role::Ps), pods(&world, Role::Ps).len()), (settled(1), 1));
    assert_eq!((attempt(&world), world.job().status.unwrap().restarts), (1, Some(1)));
}

/// A server that is killed for its memory before it has handed its rows over takes them with it.
/// One that is killed afterwards is no part of the job.
#[tokio::test]
async fn a_server_killed_while_it_leaves_is_a_crash() {
    for (ticks_before, is_crash) in [(0, true), (3, false)] {
        let world = training(&manifest(), long(60)).await;
        let leaving = world.api().get("pods", "clicks-ps-1").unwrap().clone();
        scale(&world, Role::Ps, 1);
        ticks(&world, Role::Ps, ticks_before).await;
        let mut killed = leaving;
        killed["status"]["containerStatuses"] = killed_for_its_memory()["containerStatuses"].clone();
        world.api().remove("pods", "clicks-ps-1");
        world.api().create("pods", killed);
        world.settle().await;
        let (reason, _) = world.condition("Reconciling").unwrap_or_default();
        assert_eq!(reason == "OutOfMemory", is_crash, "{reason}");
        ticks_until(&world, |world| world.phase() == Some(Phase::Starting)).await;
        let restarts = world.job().status.unwrap().restarts;
        assert_eq!((attempt(&world), restarts), if is_crash { (2, Some(1)) } else { (1, Some(0)) });
        assert_eq!(members_of(&world, Role::Ps).started, if is_crash { 1 } else { 2 });
    }
}

/// The number of the last attempt.
fn last_attempt(world: &World) -> u32 {
    world.job().status.and_then(|status| status.attempt).map_or(0, |attempt| attempt.number)
}

/// Ticks until `is_it`, ten at most.
async fn ticks_until(world: &World, is_it: impl Fn(&World) -> bool) {
    for _tick in 0..10 {
        if !is_it(world) {
            world.settle().await;
            world.tick();
        }
    }
}

fn last_decision(world: &World) -> DecisionStatus {
    world.job().status.unwrap().decisions.pop().unwrap()
}

fn memory_limit_of_servers(world: &World) -> Value {
    let set = world.api().get("statefulsets", "clicks-ps").unwrap().clone();
    set["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"].clone()
}

/// The rows outgrow the servers. The next attempts have more memory up to the limit, and then more
/// servers.
#[tokio::test]
async fn after_a_kill_servers_get_more_memory_and_then_more_servers() {
    let manifest = MANIFEST
        .replace("ps: {replicas: 2}", "ps: {replicas: 2, template: {resources: {limits: {memory: 2Gi}}}}")
        + "  autoscaling: {mode: apply, ps: {maxMemoryGib: 4}}\n  faultTolerance: {backoffSeconds: 1}\n";
    // Only kills end an attempt.
    let world = World::new(&manifest, vec![long(50), long(50), long(50), long(5)]);
    world.api().pod_status = Some(killed_for_its_memory());
    const GIB: u64 = 1 << 30;
    let raised = |from_gib: u64, to_gib: u64| DecisionAction::RaiseMemory {
        replica: 0,
        from_bytes: from_gib * GIB,
        to_bytes: to_gib * GIB,
    };
    let attempts = [
        (2, raised(2, 3), 3 * GIB, 2),
        (3, raised(3, 4), 4 * GIB, 2),
        (4, DecisionAction::Scale { from: 2, to: 3 }, 4 * GIB, 3),
    ];
    for (attempt, action, memory, servers) in attempts {
        ticks_until(&world, |world| last_attempt(world) >= attempt).await;
        // New pods get this status.
        world.api().pod_status = (attempt < 4).then(killed_for_its_memory);
        let decision = last_decision(&world);
        assert_eq!(decision.action, action, "{}", decision.reason);
        assert_eq!(world.job().status.unwrap().attempt.unwrap().ps_memory_bytes, Some(memory));
        assert_eq!(members_of(&world, Role::Ps).started, servers);
        ticks_until(&world, |world| world.phase() == Some(Phase::Starting)).await;
        assert_eq!((world.phase(), last_attempt(&world)), (Some(Phase::Starting), attempt));
        assert_eq!(memory_limit_of_servers(&world), memory.to_string());
    }
    world.live().await;
    assert_eq!(world.phase(), Some(Phase::Complete));
}

/// The rows outgrow the servers, so the next attempt has more of them.
#[tokio::test]
async fn after_a_kill_servers_scale_out_if_decisions_are_applied() {
    let killed = killed_for_its_memory();
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
        assert_eq!(decision.action, DecisionAction::Scale { from: 2, to: 3 });
        assert_eq!(decision.applied, mode == "apply");
        assert!(decision.reason.contains("replica 0 was killed for its memory"), "{}", decision.reason);
        assert_eq!(
            (members_of(&world, Role::Ps).started, status.phase, asked(&world)),
            (started, Some(Phase::Complete), vec![])
        );
    }
}

/// The new attempt asks for the decided number once it trains. Otherwise a missing node would delay
/// it.
#[tokio::test]
async fn an_attempt_after_a_crash_starts_without_members_that_had_not_joined() {
    let manifest = format!("{MANIFEST}  autoscaling: {{mode: apply}}\n");
    let world = World::new(&manifest, vec![vec![live(Stage::Training, 1), failed("ps 0 is gone", false)], long(8)]);
    while world.phase() != Some(Phase::Training) {
        world.settle().await;
        world.tick();
    }
    {
        let mut api = world.api();
        let status = &mut api.get_mut("rectrainingjobs", "clicks").unwrap()["status"];
        status["decisions"] = json!([{"subject": "ps", "time": "2027-01-15T08:00:00Z", "from": "2", "to": "4", "applied": true, "reason": "memory"}]);
        status["attempt"]["replicas"]["ps"] = json!({"started": 2, "wanted": 4, "present": 2, "needed": 4});
        api.touch("rectrainingjobs", "clicks");
    }
    while attempt(&world) == 1 || world.phase() == Some(Phase::Restarting) {
        world.settle().await;
        world.tick();
    }
    let RoleReplicas { started, wanted, .. } = members_of(&world, Role::Ps);
    assert_eq!((started, wanted), (2, 4));
    world.live().await;
    assert_eq!((world.phase(), members_of(&world, Role::Ps).present), (Some(Phase::Complete), 4));
}
