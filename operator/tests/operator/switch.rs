//! The training mode of a job under way, changed in its manifest. The operator asks the
//! coordinator, and no pod restarts. A coordinator that refuses or does not answer makes no
//! difference, nor does an operator that dies at any call.
use std::collections::BTreeMap;

use rectrain_crds::{AttemptMode, Mode, Phase};
use rectrain_operator::coordinator_view::{Stage, SwitchAnswer};
use serde_json::json;

use crate::life::lives;
use crate::world::faults::Fault;
use crate::world::{JOB, MANIFEST, World, crashing, failed, good, live, long};

fn set_mode(world: &World, mode: Mode) {
    world.edit(|spec| spec["training"]["mode"] = json!(mode));
}

async fn ticks(world: &World, count: usize) {
    for _ in 0..count {
        world.settle().await;
        world.tick();
    }
    world.settle().await;
}

/// Ticks until the job trains.
async fn training(world: &World) {
    while world.phase() != Some(Phase::Training) {
        ticks(world, 1).await;
    }
}

fn asked(world: &World) -> Vec<Mode> {
    world.scripts.lock().asked.clone()
}

fn mode(world: &World) -> AttemptMode {
    world.job().status.unwrap().attempt.unwrap().mode.unwrap()
}

fn attempt(world: &World) -> u32 {
    world.job().status.unwrap().attempt.unwrap().number
}

fn in_use(world: &World) -> Option<Mode> {
    world.job().status?.mode
}

fn pods(world: &World) -> BTreeMap<String, String> {
    let api = world.api();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    api.list("pods").iter().map(|pod| (text(&pod["metadata"]["name"]), text(&pod["metadata"]["uid"]))).collect()
}

fn events(world: &World, reason: &str) -> Vec<String> {
    let api = world.api();
    let events = api.list("events").into_iter().filter(|event| event["reason"] == reason);
    events.map(|event| event["note"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_job_under_way_switches_its_mode_without_a_restart() {
    let world = World::new(MANIFEST, vec![long(20)]);
    training(&world).await;
    let before = pods(&world);
    set_mode(&world, Mode::Gba);
    ticks(&world, 3).await;
    assert_eq!((asked(&world), in_use(&world), attempt(&world)), (vec![Mode::Gba], Some(Mode::Gba), 1));
    assert_eq!(world.condition("Ready").map(|(reason, _)| reason).as_deref(), Some("Training"));
    set_mode(&world, Mode::Sync);
    ticks(&world, 3).await;
    assert_eq!(asked(&world), [Mode::Gba, Mode::Sync]);
    assert_eq!(pods(&world), before);
    let notes = events(&world, "ModeSwitched");
    assert_eq!(notes.len(), 2, "{notes:?}");
    assert!(notes.iter().any(|note| note.contains("from mode sync to gba")), "{notes:?}");
    world.live().await;
    assert_eq!((world.phase(), world.job().status.unwrap().restarts), (Some(Phase::Complete), Some(0)));
}

/// A schedule has changed the mode since. Only the mode that was last asked for counts.
#[tokio::test]
async fn a_mode_changed_by_a_schedule_is_not_asked_about() {
    let world = World::new(MANIFEST, vec![long(20)]);
    training(&world).await;
    world.scripts.lock().switch_all(Mode::Gba);
    ticks(&world, 3).await;
    assert_eq!((asked(&world), in_use(&world), attempt(&world)), (vec![], Some(Mode::Gba), 1));
    set_mode(&world, Mode::Hybrid);
    ticks(&world, 2).await;
    assert_eq!((asked(&world), in_use(&world)), (vec![Mode::Hybrid], Some(Mode::Hybrid)));
}

#[tokio::test]
async fn a_busy_or_silent_coordinator_is_asked_again() {
    let world = World::new(MANIFEST, vec![long(20)]);
    training(&world).await;
    for _ in 0..2 {
        let again = SwitchAnswer::Again("another switch of the training mode is under way".to_owned());
        world.scripts.lock().answers.push_back(again);
    }
    set_mode(&world, Mode::Gba);
    world.reconcile().await.unwrap();
    assert_eq!((asked(&world).len(), mode(&world).accepted, world.condition("Stalled")), (1, None, None));
    ticks(&world, 4).await;
    assert_eq!(asked(&world), [Mode::Gba; 3]);
    assert_eq!((mode(&world).accepted, in_use(&world), attempt(&world)), (Some(Mode::Gba), Some(Mode::Gba), 1));
}

#[tokio::test]
async fn a_refused_mode_is_a_condition_and_training_continues() {
    let world = World::new(MANIFEST, vec![long(20)]);
    training(&world).await;
    let before = pods(&world);
    let why =
        "a global batch of 4096 rows cannot be cut into local batches of 1000 rows: set spec.training.localBatchSize";
    world.scripts.lock().answers.push_back(SwitchAnswer::Refused(why.to_owned()));
    set_mode(&world, Mode::Gba);
    ticks(&world, 4).await;
    let (reason, message) = world.condition("Stalled").unwrap();
    assert!(reason == "ModeRefused" && message.contains(why) && message.contains("in mode sync"), "{message}");
    assert_eq!(
        (asked(&world), in_use(&world), world.phase()),
        (vec![Mode::Gba], Some(Mode::Sync), Some(Phase::Training))
    );
    assert_eq!((pods(&world), events(&world, "ModeRefused").len()), (before, 1));
    // A change of another setting asks for no mode.
    world.edit(|spec| spec["ttlSecondsAfterFinished"] = json!(1_000_000));
    ticks(&world, 1).await;
    assert_eq!(asked(&world).len(), 1);
    set_mode(&world, Mode::Sync);
    ticks(&world, 1).await;
    assert_eq!((asked(&world).len(), world.condition("Stalled")), (1, None), "the job is in that mode");
    set_mode(&world, Mode::Gba);
    ticks(&world, 1).await;
    assert_eq!((asked(&world).len(), in_use(&world)), (2, Some(Mode::Gba)));
}

/// The manifest's own rules exclude the mode, so the coordinator is not asked, and nothing stops.
#[tokio::test]
async fn a_mode_that_the_manifest_rules_out_stops_no_job_under_way() {
    let manifest = format!("{MANIFEST}  training: {{hopBw: {{backups: 2}}}}\n");
    let world = World::new(&manifest, vec![vec![live(Stage::Training, 1), live(Stage::Training, 2)], long(5)]);
    training(&world).await;
    set_mode(&world, Mode::HopBw);
    ticks(&world, 2).await;
    let (reason, message) = world.condition("Stalled").unwrap();
    assert!(reason == "ModeRefused" && message.contains("slowest of 2 dense workers"), "{message}");
    assert_eq!((asked(&world), world.phase(), attempt(&world)), (vec![], Some(Phase::Training), 1));
    // The next attempt can start, too.
    world.edit(|spec| spec["suspend"] = json!(true));
    ticks(&world, 2).await;
    world.edit(|spec| spec["suspend"] = json!(false));
    ticks(&world, 2).await;
    assert_eq!((attempt(&world), mode(&world).started, world.condition("Failed")), (2, Mode::Sync, None));
    // A change that needs another attempt needs a valid manifest.
    world.edit(|spec| spec["data"]["synthetic"]["rows"] = json!(3000));
    ticks(&world, 2).await;
    assert_eq!((world.condition("Stalled").unwrap().0.as_str(), attempt(&world)), ("InvalidSpec", 2));
    assert_eq!((world.phase(), world.condition("Failed")), (Some(Phase::Training), None));
    set_mode(&world, Mode::Gba);
    world.live().await;
    assert_eq!((world.phase(), mode(&world).started), (Some(Phase::Complete), Mode::Gba));
}

#[tokio::test]
async fn pods_start_in_a_mode_that_changed_before() {
    // Suspended from the start.
    let world = World::new(&format!("{MANIFEST}  suspend: true\n"), vec![long(3)]);
    world.settle().await;
    set_mode(&world, Mode::Gba);
    world.settle().await;
    world.edit(|spec| spec["suspend"] = json!(false));
    training(&world).await;
    assert_eq!((in_use(&world), attempt(&world)), (Some(Mode::Gba), 1));
    // Suspended later.
    world.edit(|spec| spec["suspend"] = json!(true));
    ticks(&world, 2).await;
    set_mode(&world, Mode::Hybrid);
    world.settle().await;
    world.edit(|spec| spec["suspend"] = json!(false));
    training(&world).await;
    assert_eq!((in_use(&world), attempt(&world)), (Some(Mode::Hybrid), 2));
    assert_eq!(asked(&world), []);
    assert!(events(&world, "ModeSwitched").is_empty(), "that was another attempt");
    // In the back-off after a crash.
    let world = World::new(&format!("{MANIFEST}  faultTolerance: {{backoffSeconds: 60}}\n"), vec![crashing(), long(3)]);
    while world.phase() != Some(Phase::Restarting) {
        ticks(&world, 1).await;
    }
    set_mode(&world, Mode::Gba);
    training(&world).await;
    assert_eq!((asked(&world), in_use(&world), attempt(&world)), (vec![], Some(Mode::Gba), 2));
    assert_eq!(world.api().list("configmaps").len(), 1);
}

#[tokio::test]
async fn a_mode_changed_while_pods_start_is_asked_for_later() {
    let mut script = vec![live(Stage::Starting, 0); 4];
    script.extend(long(6));
    let world = World::new(MANIFEST, vec![script]);
    ticks(&world, 2).await;
    assert_eq!(world.phase(), Some(Phase::Starting));
    let before = pods(&world);
    set_mode(&world, Mode::Gba);
    ticks(&world, 1).await;
    assert_eq!((asked(&world), world.phase()), (vec![], Some(Phase::Starting)));
    training(&world).await;
    ticks(&world, 1).await;
    assert_eq!((asked(&world), in_use(&world), pods(&world)), (vec![Mode::Gba], Some(Mode::Gba), before));
}

#[tokio::test]
async fn the_attempt_after_a_crash_starts_in_the_newest_mode() {
    let mut first = long(4);
    first.pop();
    first.push(failed("ps 1 was restarted in the middle of the job", false));
    let world = World::new(MANIFEST, vec![first, good()]);
    training(&world).await;
    set_mode(&world, Mode::Gba);
    world.live().await;
    assert_eq!((attempt(&world), mode(&world).started, asked(&world)), (2, Mode::Gba, vec![Mode::Gba]));
    assert_eq!((world.phase(), in_use(&world)), (Some(Phase::Complete), Some(Mode::Gba)));
}

/// Its container or its pod restarts within the attempt, and reads the manifest of the attempt's
/// start.
#[tokio::test]
async fn a_restarted_coordinator_is_asked_again() {
    let world = World::new(MANIFEST, vec![vec![live(Stage::Training, 1)]]);
    training(&world).await;
    set_mode(&world, Mode::Gba);
    ticks(&world, 2).await;
    world.api().get_mut("pods", "clicks-coordinator-0").unwrap()["status"]["containerStatuses"][0]["restartCount"] =
        json!(1);
    world.tick();
    ticks(&world, 2).await;
    assert_eq!((asked(&world), in_use(&world), attempt(&world)), (vec![Mode::Gba; 2], Some(Mode::Gba), 1));
    world.api().remove("pods", "clicks-coordinator-0");
    ticks(&world, 2).await;
    assert_eq!((asked(&world), in_use(&world), attempt(&world)), (vec![Mode::Gba; 3], Some(Mode::Gba), 1));
}

#[tokio::test]
async fn a_failed_job_starts_over_when_its_mode_changes() {
    let world = World::new(MANIFEST, vec![vec![failed("this mode cannot be", true)], long(2)]);
    world.live().await;
    assert_eq!(world.condition("Failed").unwrap().0, "BadInput");
    ticks(&world, 3).await;
    assert_eq!((world.phase(), attempt(&world)), (Some(Phase::Failed), 1));
    set_mode(&world, Mode::Gba);
    world.live().await;
    assert_eq!((world.phase(), attempt(&world), asked(&world)), (Some(Phase::Complete), 2, vec![]));
    // A change from before the failure does not revive the job, though it was not carried out.
    let manifest = format!("{MANIFEST}  activeDeadlineSeconds: 30\n");
    let world = World::new(&manifest, vec![vec![live(Stage::Starting, 0)]]);
    ticks(&world, 2).await;
    set_mode(&world, Mode::Gba);
    world.live().await;
    ticks(&world, 3).await;
    assert_eq!((world.phase(), attempt(&world)), (Some(Phase::Failed), 1));
}

/// Changes the mode when the job first trains.
fn change_once(changed: &mut bool) -> impl FnMut(&World) {
    move |world| {
        if !*changed && world.phase() == Some(Phase::Training) {
            *changed = true;
            set_mode(world, Mode::Gba);
        }
    }
}

#[tokio::test]
async fn any_failed_call_during_a_switch_leads_to_the_same_end() {
    let script = long(8);
    let world = World::new(MANIFEST, vec![script.clone()]);
    training(&world).await;
    set_mode(&world, Mode::Gba);
    world.live().await;
    let expected = world.outline();
    assert_eq!(expected[format!("rectrainingjobs/{JOB}")]["status"]["mode"], "gba");
    // The calls of a life without a failure, from the change of the manifest until the status has
    // the new mode.
    let (mut first, mut last) = (0, 0);
    let mut world = World::new(MANIFEST, vec![script.clone()]);
    let mut changed = false;
    let mut change = change_once(&mut changed);
    let undisturbed = lives(&mut world, Fault::Conflict, 0, &expected, |world| {
        change(world);
        let calls = world.api().calls;
        match in_use(world) {
            Some(Mode::Gba) if last == 0 => last = calls,
            _ if first == 0 && mode_is_wanted(world) => first = calls,
            _ => {}
        }
    });
    assert!(undisturbed.await);
    assert!(first > 0 && last - first > 15, "from call {first} to {last}");
    // Calls to the API server, from before the change until after the switch, and the call to the
    // coordinator.
    for fault in Fault::ALL {
        for at in first - 5..last + 5 {
            let mut world = World::new(MANIFEST, vec![script.clone()]);
            world.api().fault = Some((at, fault));
            assert!(lives(&mut world, fault, at, &expected, change_once(&mut false)).await, "fewer than {at} calls");
            assert_switched_once(&world, &format!("{fault:?} at call {at}"));
        }
        let mut world = World::new(MANIFEST, vec![script.clone()]);
        world.scripts.lock().fault = Some(fault);
        assert!(lives(&mut world, fault, 0, &expected, change_once(&mut false)).await);
        assert_switched_once(&world, &format!("{fault:?} of the coordinator"));
    }
}

fn mode_is_wanted(world: &World) -> bool {
    world.job().spec.training.is_some_and(|training| training.mode == Some(Mode::Gba.into()))
}

/// The coordinator has switched once, and no attempt has begun. A second request for the same mode
/// is harmless.
fn assert_switched_once(world: &World, fault: &str) {
    let asked = asked(world);
    assert!((1..=2).contains(&asked.len()) && asked.iter().all(|mode| *mode == Mode::Gba), "{fault}: {asked:?}");
    assert_eq!(world.scripts.lock().switches, 1, "{fault}");
    assert_eq!(attempt(world), 1, "{fault}");
}
