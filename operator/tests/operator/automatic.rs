//! A job with automatic training mode and autoscaling: measurements lead to decisions. The status
//! has them before they are carried out, they survive the operator, and nothing restarts.

use std::net::IpAddr;

use rectrain_crds::{DecisionSubject, Mode, Phase, RecTrainingJobStatus, Role};
use rectrain_operator::coordinator_view::{Rebalance, Stage};
use rectrain_operator::names::JobName;

use crate::manifests::AUTOMATIC_SERVERS as MANIFEST;
use crate::world::{Script, World, live};

/// A batch per second; every second dense worker computes four times as long. Tables of 0.9 GiB,
/// and batches that wait for an embedding worker ten times as long as it works on them.
fn measured(address: IpAddr, now: i64) -> String {
    measured_of_servers(address, now, 0.9 * f64::from(1 << 30), 0.2)
}

/// Like [`measured`], with tables of `bytes` bytes; servers are `busy` for that share of the time.
fn measured_of_servers(address: IpAddr, now: i64, bytes: f64, busy: f64) -> String {
    let IpAddr::V4(address) = address else { return String::new() };
    let compute = if address.octets()[3] % 2 == 0 { 0.1 } else { 0.4 };
    let steps = (now - 1_700_000_000) as f64;
    [
        ("dense_worker_compute_seconds_sum", steps * compute),
        ("dense_worker_compute_seconds_count", steps),
        ("dense_worker_step_seconds_sum", steps * (compute + 0.02)),
        ("dense_worker_all_reduce_seconds_sum", steps * 0.02),
        ("dense_worker_batch_wait_seconds_sum", 0.0),
        ("dense_worker_embedding_wait_seconds_sum", 0.0),
        ("dense_worker_samples_total", steps * 2048.0),
        ("embedding_worker_queue_seconds_sum", steps * 0.1),
        ("embedding_worker_service_seconds_sum", steps * 0.01),
        ("embedding_worker_service_seconds_count", steps),
        ("ps_bytes", bytes),
        ("ps_lookup_seconds_sum", steps * busy / 2.0),
        ("ps_update_seconds_sum", steps * busy / 2.0),
    ]
    .map(|(name, value)| format!("rectrain_{name}{{replica=\"0\"}} {value}\n"))
    .concat()
}

fn long() -> Script {
    let mut script = vec![live(Stage::Starting, 0)];
    script.extend((1..=1000).map(|step| live(Stage::Training, step)));
    script
}

async fn ticks(world: &World, count: usize) {
    for _ in 0..count {
        world.settle().await;
        world.tick();
    }
    world.settle().await;
}

fn world() -> World {
    let world = World::new(MANIFEST, vec![long()]);
    world.scripts.lock().metrics = Some(measured);
    world
}

fn status(world: &World) -> RecTrainingJobStatus {
    world.job().status.unwrap()
}

fn about(world: &World, subject: DecisionSubject) -> Vec<(String, String, bool)> {
    let decisions = status(world).decisions.into_iter().filter(|decision| decision.subject == subject);
    decisions.map(|decision| (decision.action.from_text(), decision.action.to_text(), decision.applied)).collect()
}

fn notes(world: &World, reason: &str) -> Vec<String> {
    let api = world.api();
    let events = api.list("events").into_iter().filter(|event| event["reason"] == reason);
    events.map(|event| event["note"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_slow_worker_switches_the_mode_and_a_full_table_is_reported() {
    let world = world();
    ticks(&world, 8).await;
    let before = status(&world);
    assert_eq!((before.mode, before.decisions.len()), (Some(Mode::Sync), 0), "less than a window was measured");
    assert_eq!(before.mode_reason.as_deref(), Some("automatic training starts in it"));
    let pods: Vec<_> = world.api().list("pods").iter().map(|pod| pod["metadata"]["uid"].clone()).collect();
    ticks(&world, 30).await;
    let after = status(&world);
    assert_eq!(after.mode, Some(Mode::Gba));
    let reason = after.mode_reason.unwrap();
    assert!(reason.starts_with("decided at 2") && reason.contains("faster than sync"), "{reason}");
    assert!(after.mode_since > before.mode_since);
    assert_eq!(about(&world, DecisionSubject::Mode), [("sync".to_owned(), "gba".to_owned(), true)]);
    assert_eq!(about(&world, DecisionSubject::Ps), [("2".to_owned(), "3".to_owned(), false)]);
    assert_eq!(world.scripts.lock().asked, [Mode::Gba]);
    assert_eq!((notes(&world, "Decided").len(), notes(&world, "Recommended").len()), (1, 1));
    let prediction = after.mode_prediction.unwrap();
    assert!(prediction.gba > prediction.sync && prediction.error_percent.is_some(), "{prediction:?}");
    // Only the mode has changed.
    assert_eq!(after.attempt.unwrap().number, 1);
    assert_eq!(pods, world.api().list("pods").iter().map(|pod| pod["metadata"]["uid"].clone()).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_new_operator_continues_from_the_decisions() {
    let mut world = world();
    ticks(&world, 38).await;
    let before = status(&world);
    assert_eq!(before.mode, Some(Mode::Gba));
    world.replace_operator();
    ticks(&world, 20).await;
    let after = status(&world);
    assert_eq!((after.mode, after.decisions), (Some(Mode::Gba), before.decisions), "no decision within the dwell");
    assert_eq!(world.scripts.lock().asked, [Mode::Gba]);
}

#[tokio::test]
async fn a_fixed_mode_in_the_manifest_ends_auto() {
    let world = world();
    ticks(&world, 38).await;
    world.edit(|spec| spec["training"]["mode"] = "sync".into());
    ticks(&world, 40).await;
    let after = status(&world);
    assert_eq!((after.mode, after.mode_reason), (Some(Mode::Sync), None));
    assert_eq!(about(&world, DecisionSubject::Mode).len(), 1, "the decision stays in the status");
    assert_eq!(after.attempt.unwrap().number, 1, "no pod was restarted");
}

/// The metrics of a look that are served for the job.
fn shown(world: &World) -> Vec<&'static str> {
    let text = world.operator.metrics.encode().unwrap();
    let looked = ["mode_prediction_error_ratio", "cpu_used_by_others_ratio"];
    looked.into_iter().filter(|name| text.contains(&format!("rectrain_operator_{name}{{"))).collect()
}

#[tokio::test]
async fn metrics_of_a_look_are_served_while_decisions_are_automatic() {
    let both = ["mode_prediction_error_ratio", "cpu_used_by_others_ratio"];
    let looked_at = || async {
        let world = world();
        ticks(&world, 20).await;
        assert_eq!(shown(&world), both[..1]);
        // The nodes of this world are unknown.
        world.operator.metrics.crowded(&JobName::new("ads", "clicks"), Some(0.5));
        world.reconcile().await.unwrap();
        assert_eq!(shown(&world), both, "the next reconcile changes nothing");
        world
    };
    let world = looked_at().await;
    world.edit(|spec| spec["suspend"] = true.into());
    ticks(&world, 2).await;
    assert_eq!(shown(&world), [""; 0]);
    world.edit(|spec| spec["suspend"] = false.into());
    ticks(&world, 20).await;
    assert_eq!(shown(&world), both[..1]);

    let world = looked_at().await;
    world.edit(|spec| spec["training"]["mode"] = "sync".into());
    ticks(&world, 2).await;
    assert_eq!(shown(&world), [""; 0], "decisions about replicas are still automatic");

    let world = looked_at().await;
    world.edit(|spec| {
        spec["training"]["mode"] = "sync".into();
        spec.as_object_mut().unwrap().remove("autoscaling");
    });
    ticks(&world, 2).await;
    assert_eq!(shown(&world), [""; 0]);

    let world = looked_at().await;
    world.edit(|spec| spec["activeDeadlineSeconds"] = 1.into());
    ticks(&world, 2).await;
    assert_eq!((world.phase(), shown(&world)), (Some(Phase::Failed), vec![]));
}

#[tokio::test]
async fn without_measurements_there_is_no_decision() {
    let world = World::new(MANIFEST, vec![long()]);
    ticks(&world, 40).await;
    assert_eq!((status(&world).mode, status(&world).decisions.len()), (Some(Mode::Sync), 0));
}

#[tokio::test]
async fn apply_scales_out_for_a_full_table_and_waiting_batches() {
    let manifest = MANIFEST.replace(
        "autoscaling: {embeddingWorker: {scaler: external}, denseWorker: {scaler: external}}",
        "autoscaling: {mode: apply}",
    );
    let world = World::new(&manifest, vec![long()]);
    world.scripts.lock().metrics = Some(measured);
    ticks(&world, 38).await;
    let after = status(&world);
    assert_eq!(about(&world, DecisionSubject::Ps), [("2".to_owned(), "3".to_owned(), true)]);
    let attempt = after.attempt.unwrap();
    assert_eq!((attempt.number, attempt.replicas.unwrap().ps.present, after.restarts), (1, 3, Some(0)));
    assert_eq!(world.scripts.lock().asked_members, [(Role::Ps, 3), (Role::EmbeddingWorker, 2)]);
    assert_eq!(about(&world, DecisionSubject::EmbeddingWorker), [("1".to_owned(), "2".to_owned(), true)]);
    let decided = after.decisions.iter().filter(|decision| decision.subject != DecisionSubject::Mode);
    let reasons: Vec<_> = decided.map(|decision| decision.reason.clone()).collect();
    assert_eq!(world.scripts.lock().reasons, reasons);
    assert_eq!(
        world.job().spec.roles.unwrap().ps.unwrap().replicas,
        Some(2),
        "the operator does not change the manifest"
    );
}

/// Like [`measured`], with small tables and servers that are busy for half of the time. Every
/// second one has a third of the others' look-ups.
fn measured_unevenly(address: IpAddr, now: i64) -> String {
    let IpAddr::V4(of) = address else { return String::new() };
    let (steps, share) = ((now - 1_700_000_000) as f64, if of.octets()[3] % 2 == 0 { 0.25 } else { 0.75 });
    let rows = format!("rectrain_ps_found_rows_total {}\nrectrain_ps_inserted_rows_total 1\n", steps * share * 1e6);
    measured_of_servers(address, now, 1e6, 0.5) + &rows
}

#[tokio::test]
async fn uneven_slots_are_rebalanced_once_per_decision() {
    let manifest = |mode: &str| {
        MANIFEST.replace(
            "autoscaling: {embeddingWorker: {scaler: external}, denseWorker: {scaler: external}}",
            &format!("autoscaling: {{mode: {mode}, embeddingWorker: {{scaler: external}}, denseWorker: {{scaler: external}}}}"),
        )
    };
    let mut world = World::new(&manifest("apply"), vec![long()]);
    world.scripts.lock().metrics = Some(measured_unevenly);
    ticks(&world, 38).await;
    assert_eq!(about(&world, DecisionSubject::Ps), [("2".to_owned(), "2".to_owned(), true)]);
    let decided = |world: &World| {
        let decisions = status(world).decisions.into_iter();
        decisions
            .filter(|decision| decision.subject == DecisionSubject::Ps)
            .map(|decision| decision.time.0.as_second() as u64)
            .collect::<Vec<_>>()
    };
    let asked = |world: &World| world.scripts.lock().asked_rebalances.clone();
    assert_eq!(asked(&world), [Rebalance { servers: 2, decided_seconds: decided(&world)[0] }]);
    let note = notes(&world, "Decided").into_iter().find(|note| note.starts_with("ps")).unwrap();
    assert!(note.contains("rebalance over 2: one server has 1.50 times the mean"), "{note}");
    world.replace_operator();
    ticks(&world, 20).await;
    assert_eq!((asked(&world).len(), decided(&world).len()), (1, 1), "no second request and no second decision");
    assert_eq!((status(&world).attempt.unwrap().number, world.scripts.lock().asked_members.len()), (1, 0));

    let recommended = World::new(&manifest("recommend"), vec![long()]);
    recommended.scripts.lock().metrics = Some(measured_unevenly);
    ticks(&recommended, 38).await;
    assert_eq!(about(&recommended, DecisionSubject::Ps), [("2".to_owned(), "2".to_owned(), false)]);
    assert_eq!(asked(&recommended), []);
}
