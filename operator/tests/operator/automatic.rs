//! A job whose training mode and replicas the operator decides on: what its processes measure leads to decisions, which are in its
//! status before anything is done, survive the operator, and are carried out without a restart.

use std::net::IpAddr;

use rectrain_crds::{DecisionSubject, Mode, Phase, RecTrainingJobStatus};
use rectrain_operator::coordinator::{Rebalance, Stage};
use rectrain_operator::names::Role;

use crate::world::{Script, World, live};

const MANIFEST: &str = r#"
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: deepfm}
  features: {sparse: [{name: "C{1..4}"}]}
  data: {synthetic: {rows: 1000}}
  training: {mode: auto}
  autoscaling: {embeddingWorker: {scaler: external}, denseWorker: {scaler: external}}
  roles: {ps: {replicas: 2, template: {resources: {limits: {memory: 1Gi}}}}, denseWorker: {replicas: 2}}
"#;

/// A batch a second of every process; every second dense worker computes four times as long. Tables of nine tenths of a GiB, and
/// batches that wait ten times as long for an embedding worker as it works on them.
fn measured(address: IpAddr, now: i64) -> String {
    measured_of_servers(address, now, 0.9 * f64::from(1 << 30), 0.2)
}

/// As [`measured`], with tables of so many bytes, on which servers work for that share of the time.
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
    world.scripts.lock().unwrap().metrics = Some(measured);
    world
}

fn status(world: &World) -> RecTrainingJobStatus {
    world.job().status.unwrap()
}

fn about(world: &World, subject: DecisionSubject) -> Vec<(String, String, bool)> {
    let decisions = status(world).decisions.into_iter().filter(|decision| decision.subject == subject);
    decisions.map(|decision| (decision.from, decision.to, decision.applied)).collect()
}

fn notes(world: &World, reason: &str) -> Vec<String> {
    let api = world.api();
    let events = api.list("events").into_iter().filter(|event| event["reason"] == reason);
    events.map(|event| event["note"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_slow_worker_switches_the_mode_and_a_full_table_is_told_of() {
    let world = world();
    ticks(&world, 8).await;
    let before = status(&world);
    assert_eq!((before.mode, before.decisions.len()), (Some(Mode::Sync), 0), "less than a window was measured");
    assert_eq!(before.mode_reason.as_deref(), Some("automatic training starts in it"));
    let pods: Vec<_> = world.api().list("pods").iter().map(|pod| pod["metadata"]["uid"].clone()).collect();
    ticks(&world, 30).await;
    let after = status(&world);
    assert_eq!(after.mode, Some(Mode::Gba));
    assert!(after.mode_reason.unwrap().contains("faster than sync") && after.mode_since > before.mode_since);
    assert_eq!(about(&world, DecisionSubject::Mode), [("sync".to_owned(), "gba".to_owned(), true)]);
    assert_eq!(about(&world, DecisionSubject::Ps), [("2".to_owned(), "3".to_owned(), false)]);
    assert_eq!(world.scripts.lock().unwrap().asked, [Mode::Gba]);
    assert_eq!((notes(&world, "Decided").len(), notes(&world, "Recommended").len()), (1, 1));
    let prediction = after.mode_prediction.unwrap();
    assert!(prediction.gba > prediction.sync && prediction.error_percent.is_some(), "{prediction:?}");
    // Nothing but the mode was touched.
    assert_eq!(after.attempt.unwrap().number, 1);
    assert_eq!(pods, world.api().list("pods").iter().map(|pod| pod["metadata"]["uid"].clone()).collect::<Vec<_>>());
}

#[tokio::test]
async fn an_operator_that_takes_over_goes_on_from_what_was_decided() {
    let mut world = world();
    ticks(&world, 38).await;
    let before = status(&world);
    assert_eq!(before.mode, Some(Mode::Gba));
    world.replace_operator();
    ticks(&world, 20).await;
    let after = status(&world);
    assert_eq!(
        (after.mode, after.decisions),
        (Some(Mode::Gba), before.decisions),
        "within the dwell nothing is undone"
    );
    assert_eq!(world.scripts.lock().unwrap().asked, [Mode::Gba]);
}

#[tokio::test]
async fn the_mode_of_the_manifest_ends_the_automatic_one() {
    let world = world();
    ticks(&world, 38).await;
    world.edit(|spec| spec["training"]["mode"] = "sync".into());
    ticks(&world, 40).await;
    let after = status(&world);
    assert_eq!((after.mode, after.mode_reason), (Some(Mode::Sync), None));
    assert_eq!(about(&world, DecisionSubject::Mode).len(), 1, "what was decided stays on record");
    assert_eq!(after.attempt.unwrap().number, 1, "no pod was restarted");
}

/// Of the metrics that a look gives, those that are shown of the job.
fn shown(world: &World) -> Vec<&'static str> {
    let text = world.operator.metrics.encode().unwrap();
    let looked = ["mode_prediction_error_ratio", "cpu_used_by_others_ratio"];
    looked.into_iter().filter(|name| text.contains(&format!("rectrain_operator_{name}{{"))).collect()
}

#[tokio::test]
async fn what_was_seen_of_a_job_is_shown_as_long_as_there_is_something_to_decide() {
    let both = ["mode_prediction_error_ratio", "cpu_used_by_others_ratio"];
    let looked_at = || async {
        let world = world();
        ticks(&world, 20).await;
        assert_eq!(shown(&world), both[..1]);
        // The nodes of this world tell nothing.
        world.operator.metrics.crowded("ads", "clicks", Some(0.5));
        world.reconcile().await.unwrap();
        assert_eq!(shown(&world), both, "a reconcile that follows at once changes nothing");
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
    assert_eq!(shown(&world), [""; 0], "replicas are still decided on");

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
async fn processes_that_do_not_answer_decide_nothing() {
    let world = World::new(MANIFEST, vec![long()]);
    ticks(&world, 40).await;
    assert_eq!((status(&world).mode, status(&world).decisions.len()), (Some(Mode::Sync), 0));
}

#[tokio::test]
async fn a_full_table_and_waiting_batches_get_others_where_decisions_are_carried_out() {
    let manifest = MANIFEST.replace(
        "autoscaling: {embeddingWorker: {scaler: external}, denseWorker: {scaler: external}}",
        "autoscaling: {mode: apply}",
    );
    let world = World::new(&manifest, vec![long()]);
    world.scripts.lock().unwrap().metrics = Some(measured);
    ticks(&world, 38).await;
    let after = status(&world);
    assert_eq!(about(&world, DecisionSubject::Ps), [("2".to_owned(), "3".to_owned(), true)]);
    let attempt = after.attempt.unwrap();
    assert_eq!((attempt.number, attempt.replicas.unwrap().ps.present, after.restarts), (1, 3, Some(0)));
    assert_eq!(world.scripts.lock().unwrap().asked_members, [(Role::Ps, 3), (Role::EmbeddingWorker, 2)]);
    assert_eq!(about(&world, DecisionSubject::EmbeddingWorker), [("1".to_owned(), "2".to_owned(), true)]);
    let decided = after.decisions.iter().filter(|decision| decision.subject != DecisionSubject::Mode);
    let reasons: Vec<_> = decided.map(|decision| decision.reason.clone()).collect();
    assert_eq!(world.scripts.lock().unwrap().reasons, reasons);
    assert_eq!(world.job().spec.roles.unwrap().ps.unwrap().replicas, Some(2), "the manifest is the user's");
}

/// As [`measured`], of servers that have room, are busy for half of the time, and of which every second one looks up a third of the others.
fn measured_unevenly(address: IpAddr, now: i64) -> String {
    let IpAddr::V4(of) = address else { return String::new() };
    let (steps, share) = ((now - 1_700_000_000) as f64, if of.octets()[3] % 2 == 0 { 0.25 } else { 0.75 });
    let rows = format!("rectrain_ps_found_rows_total {}\nrectrain_ps_inserted_rows_total 1\n", steps * share * 1e6);
    measured_of_servers(address, now, 1e6, 0.5) + &rows
}

#[tokio::test]
async fn slots_that_lie_unevenly_are_spread_anew_once_a_decision() {
    let manifest = |mode: &str| {
        MANIFEST.replace(
            "autoscaling: {embeddingWorker: {scaler: external}, denseWorker: {scaler: external}}",
            &format!("autoscaling: {{mode: {mode}, embeddingWorker: {{scaler: external}}, denseWorker: {{scaler: external}}}}"),
        )
    };
    let mut world = World::new(&manifest("apply"), vec![long()]);
    world.scripts.lock().unwrap().metrics = Some(measured_unevenly);
    ticks(&world, 38).await;
    assert_eq!(about(&world, DecisionSubject::Ps), [("2".to_owned(), "2".to_owned(), true)]);
    let decided = |world: &World| {
        let decisions = status(world).decisions.into_iter();
        decisions
            .filter(|decision| decision.subject == DecisionSubject::Ps)
            .map(|decision| decision.time.0.as_second() as u64)
            .collect::<Vec<_>>()
    };
    let asked = |world: &World| world.scripts.lock().unwrap().asked_rebalances.clone();
    assert_eq!(asked(&world), [Rebalance { servers: 2, decided_seconds: decided(&world)[0] }]);
    let note = notes(&world, "Decided").into_iter().find(|note| note.starts_with("ps")).unwrap();
    assert!(note.contains("spread anew over 2: one server has 1.50 times the mean"), "{note}");
    world.replace_operator();
    ticks(&world, 20).await;
    assert_eq!((asked(&world).len(), decided(&world).len()), (1, 1), "neither asked nor decided again");
    assert_eq!((status(&world).attempt.unwrap().number, world.scripts.lock().unwrap().asked_members.len()), (1, 0));

    let told = World::new(&manifest("recommend"), vec![long()]);
    told.scripts.lock().unwrap().metrics = Some(measured_unevenly);
    ticks(&told, 38).await;
    assert_eq!(about(&told, DecisionSubject::Ps), [("2".to_owned(), "2".to_owned(), false)]);
    assert_eq!(asked(&told), []);
}
