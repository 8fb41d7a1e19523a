//! A job of many processes survives their deaths and drains, and changes of their number.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod binary;
mod children;
mod common;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use binary::{JOB, folder_with, training};
use children::children_of;
use common::{events, rectrain};

/// The arguments of a job with this name that trains for some seconds.
fn job_to_scale(name: &str) -> Vec<String> {
    let sets = "spec.data.synthetic.rows=40000,spec.checkpoint.everySteps=50,spec.checkpoint.path=checkpoints,\
                spec.faultTolerance.backoffSeconds=1";
    let arguments = ["run", "job.yaml", "--json", "--processes", "--slow", "denseWorker-0=8x", "--set", sets, "--set"];
    arguments.iter().map(|argument| (*argument).to_owned()).chain([format!("metadata.name={name}")]).collect()
}

fn digest_of_the_job_without_scaling() -> Value {
    let folder = folder_with(JOB);
    let alone = ["run", "job.yaml", "--json", "--set", "spec.data.synthetic.rows=40000"];
    events(&rectrain(folder.path(), &alone)).last().unwrap()["parametersSha256"].clone()
}

#[test]
fn scaling_a_running_job_by_its_name_keeps_the_model() {
    let folder = folder_with(JOB);
    let name = format!("scaled-{}", std::process::id());
    let arguments = job_to_scale(&name);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (mut child, lines) = training(folder.path(), &arguments);
    let scale = |servers: &str| rectrain(folder.path(), &["scale", "ps", servers, "--job", &name]);
    let none = scale("0");
    assert_eq!(none.status.code(), Some(2), "{none:?}");
    let (mut sizes, mut moved, mut last) = (vec!["2", "3"], Vec::new(), Value::Null);
    assert!(scale(sizes.pop().unwrap()).status.success());
    for line in lines {
        last = serde_json::from_str(&line.unwrap()).unwrap();
        if last["event"] == "slotsMoved" {
            moved.push((last["from"].as_u64().unwrap(), last["to"].as_u64().unwrap()));
            if let Some(size) = sizes.pop() {
                assert!(scale(size).status.success());
            }
        }
    }
    assert_eq!(moved, [(1, 3), (3, 2)]);
    assert!(child.wait().unwrap().success());
    assert!(children_of(child.id()).is_empty());
    assert_eq!(last["restarts"], 0, "{last}");
    assert_eq!(last["parametersSha256"], digest_of_the_job_without_scaling());
}

#[test]
fn a_kill_while_slots_move_keeps_the_model() {
    let alone = digest_of_the_job_without_scaling();
    // A new server without slots is replaced. A slot in transit is lost if its sender or receiver
    // dies.
    for (role, milliseconds, restarts) in
        [("ps", 0, 0..=1), ("coordinator", 40, 0..=1), ("ps", 80, 0..=1), ("embedding-worker", 120, 0..=0)]
    {
        let folder = folder_with(JOB);
        let name = format!("killed-{}-{milliseconds}", std::process::id());
        let arguments = job_to_scale(&name);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (mut child, lines) = training(folder.path(), &arguments);
        assert!(rectrain(folder.path(), &["scale", "ps", "3", "--job", &name]).status.success());
        // Slots move only when two more servers have joined.
        let deadline = Instant::now() + Duration::from_secs(20);
        while children_of(child.id()).iter().filter(|(_, role)| role == "ps").count() < 3 {
            assert!(Instant::now() < deadline, "no server joins");
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(milliseconds));
        let victim = children_of(child.id()).into_iter().rfind(|(_, of)| of == role).unwrap().0;
        assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap().success());
        let last: Value = serde_json::from_str(&lines.map(Result::unwrap).last().unwrap()).unwrap();
        assert!(child.wait().unwrap().success());
        assert!(restarts.contains(&last["restarts"].as_u64().unwrap()), "{role}: {last}");
        assert_eq!(last["parametersSha256"], alone, "{role} after {milliseconds} ms");
    }
}

#[test]
fn draining_one_member_of_each_role_keeps_the_model() {
    let folder = folder_with(JOB);
    let replicas = "spec.roles.embeddingWorker.replicas=2,spec.roles.loader.replicas=2,spec.roles.denseWorker.replicas=2,\
                    spec.roles.ps.replicas=2,spec.data.synthetic.rows=90000,spec.checkpoint=null";
    let common = ["run", "job.yaml", "--json", "--set", replicas];
    let alone = events(&rectrain(folder.path(), &common)).pop().unwrap();
    let slow = ["--processes", "--slow", "denseWorker-0=8x", "--slow", "denseWorker-1=8x"];
    let (mut child, lines) = training(folder.path(), &[&common[..], &slow].concat());
    let (mut events, mut rounds, mut missing) = (Vec::<Value>::new(), 0, 0);
    for line in lines {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let is_back = event["event"] == "rejoined" || event["event"] == "slotsMoved" && event["to"] == 2;
        missing -= i32::from(is_back);
        if event["event"] == "progress" && missing == 0 && rounds < 3 {
            // Four replacements join, and slots move to the new server.
            (rounds, missing) = (rounds + 1, 5);
            for role in ["dense-worker", "embedding-worker", "loader", "ps"] {
                let victim = children_of(child.id()).into_iter().rfind(|(_, of)| of == role).unwrap().0;
                assert!(Command::new("kill").args(["-TERM", &victim.to_string()]).status().unwrap().success());
            }
        }
        events.push(event);
    }
    assert!(child.wait().unwrap().success(), "{:?}", events.last());
    let last = events.pop().unwrap();
    assert_eq!((rounds, missing, &last["restarts"]), (3, 0, &Value::from(0)), "{last}");
    for field in ["parametersSha256", "test", "rows", "trainedRows"] {
        assert_eq!(last[field], alone[field], "{field}");
    }
}

/// Trains with three parameter servers, and sends SIGTERM to two of them, one after the other is
/// back, as when nodes are drained. Each hands its rows over first. Returns the summaries of this
/// run and of an undisturbed one.
fn run_with_drained_servers(sets: &str) -> (Value, Value) {
    let folder = folder_with(JOB);
    let replicas = "spec.roles.ps.replicas=3,spec.data.synthetic.rows=90000,spec.checkpoint=null";
    let common = ["run", "job.yaml", "--json", "--set", replicas, "--set", sets];
    let alone = events(&rectrain(folder.path(), &common)).pop().unwrap();
    let without_shared_memory =
        ["--processes", "--slow", "denseWorker-0=8x", "--set", "spec.faultTolerance.sharedMemory=false"];
    let (mut child, lines) = training(folder.path(), &[&common[..], &without_shared_memory].concat());
    let (mut moved, mut events) = (Vec::new(), Vec::<Value>::new());
    let (mut victims, mut all_are_present) = ([1, 0].into_iter(), true);
    for line in lines {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        if event["event"] == "slotsMoved" {
            moved.push((event["from"].as_u64().unwrap(), event["to"].as_u64().unwrap()));
            all_are_present = moved.len() % 2 == 0;
        }
        let is_due = event["event"] == "progress" && all_are_present;
        if is_due && let Some(index) = victims.next() {
            all_are_present = false;
            let mut servers: Vec<_> = children_of(child.id()).into_iter().filter(|(_, of)| of == "ps").collect();
            servers.sort();
            assert!(Command::new("kill").args(["-TERM", &servers[index].0.to_string()]).status().unwrap().success());
        }
        events.push(event);
    }
    assert!(child.wait().unwrap().success(), "{:?}", events.last());
    assert!(children_of(child.id()).is_empty());
    let of = |kind: &str| {
        events.iter().filter(|event| event["event"] == kind).map(|event| &event["member"]).collect::<Vec<_>>()
    };
    assert_eq!((moved, of("leaving")), (vec![(3, 2), (2, 3), (3, 2), (2, 3)], of("rejoined")), "{events:?}");
    assert_eq!((of("leaving")[0], of("leaving").len()), (&Value::from("ps 1"), 2));
    let last = events.pop().unwrap();
    let restarts: Vec<&Value> = events.iter().filter(|event| event["event"] == "restarting").collect();
    assert_eq!((&last["restarts"], &last["samples"]), (&Value::from(0), &alone["samples"]), "{restarts:?} {last}");
    (last, alone)
}

#[test]
fn draining_parameter_servers_keeps_the_model() {
    // With one dense worker, which waits for its own gradients, gba is deterministic.
    for sets in ["spec.training.mode=sync", "spec.training.mode=gba,spec.training.localBatchSize=32"] {
        let (last, alone) = run_with_drained_servers(sets);
        for field in ["parametersSha256", "test", "rows", "trainedRows"] {
            assert_eq!(last[field], alone[field], "{sets}: {field}");
        }
    }
}

/// Kills of embedding workers and loaders, which have no state that would be lost.
const KILLS_WITHOUT_STATE: [(&str, usize); 6] = [
    ("embedding-worker", 0),
    ("loader", 0),
    ("embedding-worker", 1),
    ("embedding-worker", 0),
    ("loader", 1),
    ("loader", 0),
];

/// Kills of parameter servers, whose rows outlive them, and of others.
const KILLS_OF_SERVERS: [(&str, usize); 8] =
    [("ps", 0), ("ps", 1), ("embedding-worker", 0), ("ps", 1), ("ps", 0), ("loader", 1), ("ps", 0), ("ps", 1)];

/// Kills of dense workers, whose parameters other dense workers or the servers have, and of others.
const KILLS_OF_DENSE_WORKERS: [(&str, usize); 8] = [
    ("dense-worker", 0),
    ("dense-worker", 1),
    ("loader", 0),
    ("dense-worker", 1),
    ("dense-worker", 0),
    ("embedding-worker", 1),
    ("dense-worker", 0),
    ("dense-worker", 1),
];

/// Kills of the coordinator, whose journal also records the members that died, and of others.
const KILLS_OF_THE_COORDINATOR: [(&str, usize); 8] = [
    ("coordinator", 0),
    ("coordinator", 0),
    ("embedding-worker", 0),
    ("coordinator", 0),
    ("coordinator", 0),
    ("loader", 1),
    ("coordinator", 0),
    ("coordinator", 0),
];

/// Kills the coordinator and removes its journal, as the loss of its machine does.
const MACHINE_OF_THE_COORDINATOR: &str = "coordinator and journal";

/// Losses of the coordinator's journal, and deaths of members that the copies record.
const LOSSES_OF_THE_JOURNAL: [(&str, usize); 6] = [
    (MACHINE_OF_THE_COORDINATOR, 0),
    ("ps", 0),
    (MACHINE_OF_THE_COORDINATOR, 0),
    ("embedding-worker", 0),
    ("coordinator", 0),
    (MACHINE_OF_THE_COORDINATOR, 0),
];

/// Trains a job and kills the `victims`, given by role and number, one after the other. It must not
/// restart, and must train as many samples as an undisturbed run. Returns the summaries of this run
/// and of the undisturbed one.
fn run_with_kills(sets: &str, victims: &[(&str, usize)]) -> (Value, Value) {
    run_in_with_kills(folder_with(JOB).path(), &format!("spec.data.synthetic.rows=90000,{sets}"), victims)
}

/// As [`run_with_kills`], for the job of this folder.
fn run_in_with_kills(folder: &Path, sets: &str, victims: &[(&str, usize)]) -> (Value, Value) {
    let replicas = "spec.roles.embeddingWorker.replicas=2,spec.roles.loader.replicas=2,spec.roles.denseWorker.replicas=2,\
                    spec.roles.ps.replicas=2";
    let common = ["run", "job.yaml", "--json", "--set", replicas, "--set", sets];
    let no_checkpoints = [&common[..], &["--set", "spec.checkpoint=null,spec.training.sync.lookAhead=0"]].concat();
    let alone = events(&rectrain(folder, &no_checkpoints)).pop().unwrap();
    // Without a barrier a worker that is not slow would train everything before all victims are
    // killed.
    let slow: &[&str] = match sets.contains("denseWorker.replicas=1") {
        true => &["--slow", "denseWorker-0=8x"],
        false => &["--slow", "denseWorker-0=8x", "--slow", "denseWorker-1=8x"],
    };
    let arguments = [&common[..], &["--processes"], slow].concat();
    let (mut child, lines) = training(folder, &arguments);
    let is_back =
        |event: &Value| ["rejoined", "serverKeptRows", "coordinatorTakenUp"].iter().any(|back| event["event"] == *back);
    // Replacements must use the manifest from the start of the run.
    std::fs::write(folder.join("job.yaml"), "the next experiment").unwrap();
    let (kills, mut victims, mut events) = (victims.len(), victims.iter(), Vec::<Value>::new());
    let mut all_are_present = true;
    for line in lines {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        all_are_present |= is_back(&event);
        // The next victim is killed when training progresses after the previous one's replacement.
        let is_due = event["event"] == "progress" && all_are_present;
        if is_due && let Some((role, index)) = victims.next() {
            all_are_present = false;
            let role = match *role {
                MACHINE_OF_THE_COORDINATOR => {
                    // The coordinator still writes to the removed files.
                    let journal = format!("/dev/shm/rectrain-{}/coordinator", child.id());
                    std::fs::remove_dir_all(journal).unwrap();
                    "coordinator"
                }
                role => role,
            };
            let of_role: Vec<_> = children_of(child.id()).into_iter().filter(|(_, of)| of == role).collect();
            // The processes are not in the order of their indices: a replacement has a new process
            // id.
            let (victim, _) = of_role[index % of_role.len()];
            assert!(Command::new("kill").args(["-9", &victim.to_string()]).status().unwrap().success());
        }
        events.push(event);
    }
    assert!(child.wait().unwrap().success(), "{:?}", events.last());
    assert!(children_of(child.id()).is_empty());
    assert_eq!(victims.next(), None, "the job was over before all were killed: {} events", events.len());
    let last = events.pop().unwrap();
    assert_eq!(events.iter().filter(|event| is_back(event)).count(), kills);
    let restarts: Vec<&Value> = events.iter().filter(|event| event["event"] == "restarting").collect();
    assert_eq!((&last["restarts"], &last["samples"]), (&Value::from(0), &alone["samples"]), "{restarts:?} {last}");
    (last, alone)
}

#[test]
fn killing_embedding_workers_and_loaders_keeps_the_model() {
    let (last, alone) = run_with_kills("spec.training.mode=sync", &KILLS_WITHOUT_STATE);
    assert_eq!(last["parametersSha256"], alone["parametersSha256"]);
    assert!(alone["test"]["auc"].is_f64(), "{alone}");
    assert_eq!(last["test"], alone["test"]);
}

#[test]
#[cfg(target_os = "linux")]
fn killing_parameter_servers_keeps_the_model() {
    let (last, alone) = run_with_kills("spec.training.mode=sync", &KILLS_OF_SERVERS);
    assert_eq!(last["parametersSha256"], alone["parametersSha256"]);
    assert_eq!((&last["test"], &last["rows"]), (&alone["test"], &alone["rows"]));
}

/// The servers and workers die while rows of several later steps are on their way.
#[test]
#[cfg(target_os = "linux")]
fn looking_far_ahead_killing_servers_and_workers_keeps_the_model() {
    let sets = "spec.training.mode=sync,spec.training.sync.lookAhead=4";
    for victims in [KILLS_OF_SERVERS, KILLS_OF_DENSE_WORKERS] {
        let (last, alone) = run_with_kills(sets, &victims);
        assert_eq!(last["parametersSha256"], alone["parametersSha256"], "{victims:?}");
        assert_eq!((&last["test"], &last["rows"]), (&alone["test"], &alone["rows"]), "{victims:?}");
    }
}

/// A replacement of a server does not have the ids of pieces, and requests them again.
#[test]
#[cfg(target_os = "linux")]
fn in_des_killing_servers_and_workers_keeps_the_model() {
    let sets = "spec.training.mode=des,spec.model.kind=fm,spec.model.hidden=null";
    for victims in [KILLS_OF_SERVERS, KILLS_OF_DENSE_WORKERS] {
        let (last, alone) = run_with_kills(sets, &victims);
        assert_eq!(last["parametersSha256"], alone["parametersSha256"], "{victims:?}");
        assert_eq!((&last["test"], &last["rows"]), (&alone["test"], &alone["rows"]), "{victims:?}");
    }
}

/// A replacement of a server has the first layer of the step, and its part of the gradient.
#[test]
#[cfg(target_os = "linux")]
fn in_des_killing_servers_and_workers_keeps_the_model_with_a_tower() {
    let sets = "spec.training.mode=des,spec.model.kind=wideDeep";
    for victims in [KILLS_OF_SERVERS, KILLS_OF_DENSE_WORKERS] {
        let (last, alone) = run_with_kills(sets, &victims);
        assert_eq!(last["parametersSha256"], alone["parametersSha256"], "{victims:?}");
        assert_eq!((&last["test"], &last["rows"]), (&alone["test"], &alone["rows"]), "{victims:?}");
    }
}

/// A job whose samples have twenty items. Parameter servers pool them.
const LISTS: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: lists}
spec:
  model: {kind: wideDeep, embeddingDim: 4, hidden: [8]}
  features: {sparse: [{name: user, dim: 2}, {name: items, multiValue: {separator: '|'}}]}
  data: {train: {paths: [train.csv]}, test: {paths: [test.csv]}}
  training: {globalBatchSize: 96, partialPooling: bySize}
";

fn folder_with_lists() -> tempfile::TempDir {
    let folder = folder_with(LISTS);
    for (name, rows) in [("train.csv", 0..90_000u64), ("test.csv", 90_000..90_500)] {
        let mut text = String::from("label,user,items\n");
        for row in rows {
            let items: Vec<String> =
                (0..20).map(|place| ((row * 7_919 + place * 104_729) % 9_973).to_string()).collect();
            writeln!(text, "{},{},{}", u64::from(row * 31 % 101 < 25), row % 50, items.join("|")).unwrap();
        }
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

/// A replacement of a server does not have the ids of pieces, and requests them again.
#[test]
#[cfg(target_os = "linux")]
fn pooling_on_servers_killing_servers_and_workers_keeps_the_model() {
    let folder = folder_with_lists();
    for victims in [KILLS_OF_SERVERS, KILLS_OF_DENSE_WORKERS] {
        std::fs::write(folder.path().join("job.yaml"), LISTS).unwrap();
        let (last, alone) = run_in_with_kills(folder.path(), "spec.training.mode=sync", &victims);
        assert_eq!(last["parametersSha256"], alone["parametersSha256"], "{victims:?}");
        assert_eq!((&last["test"], &last["rows"]), (&alone["test"], &alone["rows"]), "{victims:?}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn without_a_barrier_killed_servers_that_pool_lose_no_row() {
    let folder = folder_with_lists();
    let (last, alone) = run_in_with_kills(folder.path(), "spec.training.mode=gba", &KILLS_OF_SERVERS);
    assert_eq!((&last["trainedRows"], &last["rows"]), (&alone["trainedRows"], &alone["rows"]), "{last}");
}

#[test]
#[cfg(target_os = "linux")]
fn in_hybrid_killing_parameter_servers_loses_no_row() {
    let (last, alone) = run_with_kills("spec.training.mode=hybrid", &KILLS_OF_SERVERS);
    assert_eq!((&last["trainedRows"], &last["rows"]), (&alone["trainedRows"], &alone["rows"]), "{last}");
}

#[test]
fn killing_dense_workers_keeps_the_model() {
    let (last, alone) = run_with_kills("spec.training.mode=sync,spec.model.dropout=0.2", &KILLS_OF_DENSE_WORKERS);
    assert_eq!(last["parametersSha256"], alone["parametersSha256"]);
    assert_eq!(last["test"], alone["test"]);
}

/// A dense worker dies together with the embedding worker that knows its piece. The kills hit any
/// point of a step: before the update of the rows, after it, or between the two parameter servers.
#[test]
fn killing_an_embedding_and_a_dense_worker_together_keeps_the_model() {
    kill_together("spec.training.mode=sync", |_| true);
}

/// The replacement gets the rows of a step in the two parts that its predecessor got.
#[test]
fn looking_far_ahead_killing_both_workers_keeps_the_model() {
    kill_together("spec.training.mode=sync,spec.training.sync.lookAhead=4", |_| true);
}

/// The replacement predicts the same test data again, from pieces that are sent again. Meanwhile
/// the other dense worker is far ahead.
#[test]
fn killing_both_workers_during_an_evaluation_keeps_the_model() {
    let sets = "spec.training.mode=sync,spec.training.evaluation.every=steps,spec.training.evaluation.steps=50,\
                spec.data.synthetic.testRows=60000";
    // The last progress before training paused for an evaluation.
    kill_together(sets, |step| step % 50 == 0);
}

/// Trains with two members of each role, and kills an embedding worker and a dense worker together,
/// five times, at progress of a step for which `is_due_at` is true. The model must equal that
/// from an undisturbed run.
fn kill_together(sets: &str, is_due_at: impl Fn(u64) -> bool) {
    let folder = folder_with(JOB);
    let replicas = "spec.roles.embeddingWorker.replicas=2,spec.roles.loader.replicas=2,spec.roles.denseWorker.replicas=2,\
                    spec.roles.ps.replicas=2,spec.data.synthetic.rows=90000,spec.faultTolerance.maxRestarts=20";
    let common = ["run", "job.yaml", "--json", "--set", replicas, "--set", sets];
    let alone = events(&rectrain(folder.path(), &common)).pop().unwrap();
    let slow = ["--processes", "--slow", "denseWorker-0=8x", "--slow", "denseWorker-1=8x"];
    let (mut child, lines) = training(folder.path(), &[&common[..], &slow].concat());
    let (mut rounds, mut missing, mut last) = (0, 0, Value::Null);
    for line in lines {
        last = serde_json::from_str(&line.unwrap()).unwrap();
        missing -= i32::from(last["event"] == "rejoined");
        let is_due = last["event"] == "progress" && last["step"].as_u64().is_some_and(&is_due_at);
        if is_due && missing == 0 && rounds < 5 {
            (rounds, missing) = (rounds + 1, 2);
            let of =
                |role: &str| children_of(child.id()).into_iter().rfind(|(_, of)| of == role).unwrap().0.to_string();
            let victims = ["embedding-worker", "dense-worker"].map(of);
            assert!(Command::new("kill").arg("-9").args(victims).status().unwrap().success());
        }
    }
    assert!(child.wait().unwrap().success(), "{last}");
    assert_eq!((rounds, missing, &last["restarts"]), (5, 0, &Value::from(0)), "{last}");
    for field in ["parametersSha256", "test", "rows", "trainedRows"] {
        assert_eq!(last[field], alone[field], "{field}");
    }
}

/// Makes training pause often for evaluations and checkpoints: the job evaluates most of the time.
const PAUSES: &str = "spec.training.evaluation.every=steps,spec.training.evaluation.steps=100,spec.data.synthetic.testRows=10000,\
                       spec.checkpoint.path=checkpoints,spec.checkpoint.everySteps=100";

#[test]
fn killing_dense_workers_while_training_is_paused_keeps_the_model() {
    let (last, alone) = run_with_kills(&format!("spec.training.mode=sync,{PAUSES}"), &KILLS_OF_DENSE_WORKERS);
    for field in ["parametersSha256", "test", "rows", "trainedRows", "skippedRows"] {
        assert_eq!(last[field], alone[field], "{field}");
    }
}

#[test]
fn with_switches_killing_dense_workers_while_paused_drops_no_batch() {
    let sets = "spec.training.mode=gba,spec.training.switchAt[0].step=300,spec.training.switchAt[0].mode=sync,\
                spec.training.switchAt[1].step=500,spec.training.switchAt[1].mode=gba";
    let (last, alone) = run_with_kills(&format!("{sets},{PAUSES}"), &KILLS_OF_DENSE_WORKERS);
    assert_eq!((&last["mode"], &last["modeSwitches"]), (&Value::from("gba"), &Value::from(2)));
    assert_eq!((&last["trainedRows"], &last["droppedBatches"]), (&alone["trainedRows"], &Value::from(0)), "{last}");
}

#[test]
#[cfg(target_os = "linux")]
fn killing_the_coordinator_keeps_the_model() {
    // Some kills happen during evaluations, because reports of progress are more than 30 steps
    // apart.
    let sets = "spec.training.mode=sync,spec.training.evaluation.every=steps,spec.training.evaluation.steps=30";
    let (last, alone) = run_with_kills(sets, &KILLS_OF_THE_COORDINATOR);
    for field in ["parametersSha256", "test", "rows", "trainedRows", "skippedRows"] {
        assert_eq!(last[field], alone[field], "{field}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn without_a_barrier_killing_the_coordinator_loses_no_batch() {
    let sets = "spec.training.mode=gba,spec.training.switchAt[0].step=300,spec.training.switchAt[0].mode=sync,\
                spec.training.switchAt[1].step=500,spec.training.switchAt[1].mode=gba";
    let (last, alone) = run_with_kills(sets, &KILLS_OF_THE_COORDINATOR);
    assert_eq!((&last["mode"], &last["modeSwitches"]), (&Value::from("gba"), &Value::from(2)));
    assert_eq!((&last["trainedRows"], &last["droppedBatches"]), (&alone["trainedRows"], &Value::from(0)), "{last}");
}

#[test]
#[cfg(target_os = "linux")]
fn losing_the_coordinators_journal_keeps_the_model() {
    let sets = "spec.training.mode=sync,spec.training.evaluation.every=steps,spec.training.evaluation.steps=30";
    let (last, alone) = run_with_kills(sets, &LOSSES_OF_THE_JOURNAL);
    for field in ["parametersSha256", "test", "rows", "trainedRows", "skippedRows"] {
        assert_eq!(last[field], alone[field], "{field}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn without_a_barrier_losing_the_journal_loses_no_batch() {
    let (last, alone) = run_with_kills("spec.training.mode=gba", &LOSSES_OF_THE_JOURNAL);
    assert_eq!((&last["trainedRows"], &last["droppedBatches"]), (&alone["trainedRows"], &Value::from(0)), "{last}");
}

#[test]
fn in_hybrid_killing_dense_workers_loses_no_batch() {
    let (last, alone) = run_with_kills("spec.training.mode=hybrid", &KILLS_OF_DENSE_WORKERS);
    assert_eq!(last["trainedRows"], alone["trainedRows"], "{last}");
}

#[test]
fn without_a_barrier_killing_dense_workers_loses_no_row() {
    // After the switch to sync the replacements sum their gradients in the ring.
    let sets = "spec.training.mode=gba,spec.training.switchAt[0].step=670,spec.training.switchAt[0].mode=sync";
    let (last, alone) = run_with_kills(sets, &KILLS_OF_DENSE_WORKERS);
    assert_eq!((&last["mode"], &last["modeSwitches"]), (&Value::from("sync"), &Value::from(1)));
    assert_eq!((&last["trainedRows"], &last["droppedBatches"]), (&alone["trainedRows"], &Value::from(0)), "{last}");
}

#[test]
fn in_shadow_killing_dense_workers_loses_no_row() {
    let (last, alone) = run_with_kills("spec.training.mode=shadow", &KILLS_OF_DENSE_WORKERS[..5]);
    assert_eq!((&last["trainedRows"], &last["droppedBatches"]), (&alone["trainedRows"], &Value::from(0)), "{last}");
    let (auc, expected) = (last["test"]["auc"].as_f64().unwrap(), alone["test"]["auc"].as_f64().unwrap());
    assert!((auc - expected).abs() < 0.03, "{auc} and {expected}");
}

#[test]
fn in_shadow_ma_a_killed_dense_worker_does_not_stop_the_other() {
    let sets = "spec.training.mode=shadow,spec.training.shadow.algorithm=ma";
    let (last, alone) = run_with_kills(sets, &KILLS_OF_DENSE_WORKERS[..2]);
    assert_eq!((&last["trainedRows"], &last["droppedBatches"]), (&alone["trainedRows"], &Value::from(0)), "{last}");
    let (auc, expected) = (last["test"]["auc"].as_f64().unwrap(), alone["test"]["auc"].as_f64().unwrap());
    assert!((auc - expected).abs() < 0.03, "{auc} and {expected}");
}

/// A replacement begins with another fragment than the round that is open.
#[test]
fn in_shadow_fragments_in_bf16_outlive_killed_dense_workers() {
    let settings = ["algorithm=bmuf", "momentum=0.5", "nesterov=true", "fragments=3", "wirePrecision=bf16"];
    let settings = settings.map(|setting| format!("spec.training.shadow.{setting}")).join(",");
    let (last, alone) = run_with_kills(&format!("spec.training.mode=shadow,{settings}"), &KILLS_OF_DENSE_WORKERS[..2]);
    assert_eq!((&last["trainedRows"], &last["droppedBatches"]), (&alone["trainedRows"], &Value::from(0)), "{last}");
    let (auc, expected) = (last["test"]["auc"].as_f64().unwrap(), alone["test"]["auc"].as_f64().unwrap());
    assert!((auc - expected).abs() < 0.03, "{auc} and {expected}");
}

#[test]
fn in_shadow_a_killed_dense_worker_loses_its_last_gap() {
    // No exchange is due before the end.
    let sets = "spec.training.mode=shadow,spec.training.shadow.everySteps=1000000";
    let (last, alone) = run_with_kills(sets, &KILLS_OF_DENSE_WORKERS[..2]);
    assert_eq!((&last["trainedRows"], &last["droppedBatches"]), (&alone["trainedRows"], &Value::from(0)), "{last}");
    let lost = |summary: &Value| summary["lostReplicaBatches"].as_u64().unwrap();
    assert!(lost(&last) > 0 && lost(&alone) == 0, "{last}");
}

#[test]
#[cfg(target_os = "linux")]
fn in_shadow_killing_parameter_servers_loses_no_row() {
    let (last, alone) = run_with_kills("spec.training.mode=shadow", &KILLS_OF_SERVERS[..5]);
    assert_eq!((&last["trainedRows"], &last["droppedBatches"]), (&alone["trainedRows"], &Value::from(0)), "{last}");
    assert_eq!(last["lostReplicaBatches"], 0, "{last}");
}

#[test]
fn without_shared_memory_a_killed_server_restarts_the_job() {
    let folder = folder_with(JOB);
    let sets =
        "spec.data.synthetic.rows=40000,spec.faultTolerance.backoffSeconds=1,spec.faultTolerance.sharedMemory=false";
    let arguments = ["run", "job.yaml", "--json", "--processes", "--set", sets];
    let (mut child, lines) = training(folder.path(), &arguments);
    let server = children_of(child.id()).into_iter().find(|(_, role)| role == "ps").unwrap().0;
    assert!(Command::new("kill").args(["-9", &server.to_string()]).status().unwrap().success());
    let last: Value = serde_json::from_str(&lines.map(Result::unwrap).last().unwrap()).unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(last["restarts"], 1, "{last}");
    assert_eq!(last["parametersSha256"], digest_of_the_job_without_scaling());
}

/// With one dense worker, which waits for its own gradients, gba is deterministic.
#[test]
#[cfg(target_os = "linux")]
fn without_a_barrier_killing_parameter_servers_keeps_the_model() {
    let sets = "spec.training.mode=gba,spec.training.localBatchSize=32,spec.roles.denseWorker.replicas=1";
    let (last, alone) = run_with_kills(sets, &KILLS_OF_SERVERS);
    for field in ["parametersSha256", "test", "rows", "trainedRows"] {
        assert_eq!(last[field], alone[field], "{field}");
    }
    assert_eq!((&last["repeatedBatches"], &last["droppedBatches"]), (&Value::from(0), &Value::from(0)), "{last}");
}

#[test]
#[cfg(target_os = "linux")]
fn with_switches_killing_parameter_servers_loses_no_row() {
    let sets = "spec.training.mode=gba,spec.training.switchAt[0].step=300,spec.training.switchAt[0].mode=sync,\
                spec.training.switchAt[1].step=500,spec.training.switchAt[1].mode=gba";
    let (last, alone) = run_with_kills(sets, &KILLS_OF_SERVERS[..6]);
    assert_eq!((&last["mode"], &last["modeSwitches"]), (&Value::from("gba"), &Value::from(2)));
    assert_eq!((&last["trainedRows"], &last["droppedBatches"]), (&alone["trainedRows"], &Value::from(0)), "{last}");
}

#[test]
fn without_a_barrier_killing_workers_and_loaders_loses_no_batch() {
    let (last, alone) = run_with_kills("spec.training.mode=gba", &KILLS_WITHOUT_STATE);
    assert_eq!((&last["tokensLost"], &last["trainedRows"]), (&Value::from(0), &alone["trainedRows"]), "{last}");
}

#[test]
fn hybrid_trains_in_processes() {
    let folder = folder_with(JOB);
    let arguments = ["run", "job.yaml", "--json", "--processes", "--set", "spec.training.mode=hybrid"];
    let events = events(&rectrain(folder.path(), &arguments));
    assert_eq!(events.first().unwrap()["mode"], "hybrid");
    assert_eq!(events.last().unwrap()["samples"], 3000);
}

#[test]
fn without_restarts_a_killed_server_ends_the_job_with_a_message() {
    let folder = folder_with(&JOB.replace("rows: 3000", "rows: 3000000"));
    let (child, _output) = training(
        folder.path(),
        &["run", "job.yaml", "--json", "--processes", "--set", "spec.faultTolerance.maxRestarts=0"],
    );
    let server = children_of(child.id()).into_iter().find(|(_, role)| role == "ps").unwrap().0;
    assert!(Command::new("kill").args(["-9", &server.to_string()]).status().unwrap().success());
    let killed = Instant::now();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(killed.elapsed() < Duration::from_secs(20), "{:?}", killed.elapsed());
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("ps 0 was killed"), "{message}");
}
