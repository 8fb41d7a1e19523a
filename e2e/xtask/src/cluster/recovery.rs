//! Jobs in the cluster that go on from their checkpoints, in an object store of the cluster: after pods of each role are killed,
//! after the whole job was deleted and applied again, and after it was suspended. `sync` ends with the digest of a run that nobody disturbed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::install::{object_store, upload, within};
use super::operate::{
    NAMESPACE, delete_job, get, kill_pod, manifest, merge, merged, outside, patch, process_of_pod, status, submit,
    until_phase,
};
use super::paths::Paths;
use super::process::{command, eventually, output};

/// How long a step forward may take, restarts included.
const FORWARD: Duration = Duration::from_secs(180);
/// Global steps between two checkpoints.
const EVERY: u64 = 50;

/// See the module's text.
pub(super) fn goes_on(paths: &Paths) -> Result<(), String> {
    object_store(paths, NAMESPACE)?;
    upload(paths, NAMESPACE, &crate::workspace(), &[])?;
    let rows = json!({"data": {"synthetic": {"rows": 600_000}}});
    let undisturbed = outside(&manifest("undisturbed", &rows))?;
    killed(paths, &rows, &undisturbed)?;
    applied_again(paths, &rows, &undisturbed)?;
    held(paths, &rows, &undisturbed)
}

/// The job is suspended, for which a checkpoint is saved though its pods have no time for one when they end, and goes on from it.
fn held(paths: &Paths, rows: &Value, undisturbed: &Value) -> Result<(), String> {
    let name = "held";
    let hurried = json!({"template": {"terminationGracePeriodSeconds": 10}});
    let roles = json!({"coordinator": hurried, "ps": hurried, "embeddingWorker": hurried, "denseWorker": hurried, "loader": hurried});
    submit(paths, name, &merged(saved(rows, name, 1_000_000), json!({"roles": roles})))?;
    let step = until_step_after(paths, name, EVERY)?;
    let began = Instant::now();
    patch(paths, name, &json!({"spec": {"suspend": true}}))?;
    let job = until_phase(paths, name, "Suspended")?;
    let saved = job["status"]["lastCheckpoint"]["step"].as_u64().unwrap_or(0);
    println!(
        "suspended near step {step}: held after {:.1} s, with a checkpoint of step {saved}",
        began.elapsed().as_secs_f64()
    );
    patch(paths, name, &json!({"spec": {"suspend": false}}))?;
    let resumed = resumed_at(paths, name)?;
    if saved < step || resumed < saved {
        return Err(format!("it was at step {step}, and goes on from {resumed}"));
    }
    same_digest(paths, name, undisturbed)
}

/// Pods of every role are killed, one after the other.
fn killed(paths: &Paths, rows: &Value, undisturbed: &Value) -> Result<(), String> {
    let name = "killed-often";
    submit(paths, name, &saved(rows, name, EVERY))?;
    ["embedding-worker", "loader", "dense-worker"].into_iter().try_for_each(|role| replaced(paths, name, role))?;
    for (kills, role) in (1..).zip(["ps", "coordinator"]) {
        let step = until_step_after(paths, name, reached(paths, name)? + EVERY)?;
        kill_pod(paths, NAMESPACE, &format!("{name}-{role}-0"))?;
        eventually(FORWARD, &format!("restart {kills} of {name}"), || {
            match status(paths, name)?["restarts"].as_u64() {
                Some(restarts) if restarts >= kills => Ok(()),
                other => Err(format!("{other:?} restarts")),
            }
        })?;
        let resumed = resumed_at(paths, name)?;
        println!("{role} killed near step {step}: went on from step {resumed}");
        if resumed == 0 {
            return Err(format!("it began anew after {role} was killed"));
        }
        eventually(
            FORWARD,
            "the last checkpoint in the status",
            || match status(paths, name)?["lastCheckpoint"]["step"].as_u64() {
                Some(last) if last >= resumed => Ok(()),
                other => Err(format!("step {other:?}")),
            },
        )?;
    }
    same_digest(paths, name, undisturbed)
}

/// A pod of this role is killed, and the others go on as soon as there is another.
fn replaced(paths: &Paths, name: &str, role: &str) -> Result<(), String> {
    let step = until_step_after(paths, name, reached(paths, name)? + EVERY)?;
    let restarts = status(paths, name)?["restarts"].clone();
    kill_pod(paths, NAMESPACE, &format!("{name}-{role}-0"))?;
    eventually(FORWARD, &format!("another {role} of {name}"), || {
        let log = within(paths, NAMESPACE, &["logs", &format!("{name}-coordinator-0")])?;
        let mut events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let member = format!("{role} 0");
        let has_rejoined = events.any(|event| event["event"] == "rejoined" && event["member"] == *member);
        if has_rejoined { Ok(()) } else { Err("nobody has taken its place".to_owned()) }
    })?;
    let later = until_step_after(paths, name, step + EVERY)?;
    println!("{role} killed near step {step}: replaced, and at step {later} the others had not begun again");
    match status(paths, name)?["restarts"].clone() {
        same if same == restarts => Ok(()),
        more => Err(format!("{more} restarts, and {restarts} before")),
    }
}

/// A container of a parameter server is killed, and the next one in its pod goes on with what it held; then the coordinator's, and the next one
/// knows what it knew. Without a checkpoint; with a barrier and without one, where a single dense worker trains the same every time.
pub(super) fn keeps_rows(paths: &Paths) -> Result<(), String> {
    if super::foreign_kubeconfig(paths).is_some() {
        eprintln!("xtask: SKIPPED the death of a container, because the cluster is not of this machine");
        return Ok(());
    }
    let rows = json!({"data": {"synthetic": {"rows": 400_000}}});
    let gba = json!({"training": {"mode": "gba", "localBatchSize": 125}, "roles": {"denseWorker": {"replicas": 1}}});
    keeps_rows_in(paths, "keeps-rows", &rows)?;
    keeps_rows_in(paths, "keeps-rows-gba", &merged(rows, gba))
}

fn keeps_rows_in(paths: &Paths, name: &str, rows: &Value) -> Result<(), String> {
    let undisturbed = outside(&manifest(name, rows))?;
    submit(paths, name, rows)?;
    comes_back(paths, name, "ps-1", |event| event["event"] == "serverKeptRows" && event["member"] == "ps 1")?;
    comes_back(paths, name, "coordinator-0", |event| event["event"] == "coordinatorTakenUp")?;
    let attempt = status(paths, name)?["attempt"]["number"].clone();
    same_digest(paths, name, &undisturbed)?;
    if attempt == 1 { Ok(()) } else { Err(format!("it is attempt {attempt}: the others began anew")) }
}

/// The container of a pod is killed, and an event says that the next one is there.
fn comes_back(paths: &Paths, name: &str, pod: &str, is_back: impl Fn(&Value) -> bool) -> Result<(), String> {
    let step = until_step_after(paths, name, reached(paths, name)? + EVERY)?;
    let process = process_of_pod(paths, &format!("{name}-{pod}"))?;
    output(&mut command("kill", ["-KILL", &process.to_string()]))?;
    let killed = Instant::now();
    eventually(FORWARD, &format!("{pod} of {name}"), || {
        let log = within(paths, NAMESPACE, &["logs", &format!("{name}-coordinator-0")])?;
        let mut events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        if events.any(|event| is_back(&event)) { Ok(()) } else { Err("it is not back".to_owned()) }
    })?;
    let seconds = killed.elapsed().as_secs_f64();
    println!("{pod} killed after step {step}: back with what it held within {seconds:.1} s");
    Ok(())
}

/// A node is drained that has parameter servers and workers of a job without checkpoints: the servers' rows go to others before their pods
/// do, and nothing begins anew. With a barrier, and without one, where every row is trained once.
pub(super) fn drained(paths: &Paths) -> Result<(), String> {
    let two = json!({"replicas": 2});
    let roles = json!({"ps": {"replicas": 4}, "embeddingWorker": two, "loader": two, "denseWorker": two});
    let rows = json!({"data": {"synthetic": {"rows": 1_500_000}}, "roles": roles});
    drained_in(paths, "drained", &rows, same_digest)?;
    let gba = json!({"training": {"mode": "gba", "localBatchSize": 125}});
    drained_in(paths, "drained-gba", &merged(rows, gba), same_rows)
}

/// How the end of a job (by its name) is compared with that of an undisturbed run.
type Compare = fn(&Paths, &str, &Value) -> Result<(), String>;

fn drained_in(paths: &Paths, name: &str, job: &Value, compare: Compare) -> Result<(), String> {
    let undisturbed = outside(&manifest(name, job))?;
    submit(paths, name, job)?;
    let step = until_step_after(paths, name, EVERY)?;
    let coordinator = node_of(paths, &format!("{name}-coordinator-0"))?;
    let servers = (0..4).map(|server| Ok((node_of(paths, &format!("{name}-ps-{server}"))?, server)));
    let away: Vec<(String, u32)> =
        servers.collect::<Result<Vec<_>, String>>()?.into_iter().filter(|(node, _)| *node != coordinator).collect();
    let Some((node, _)) = away.first() else {
        return Err(format!("all parameter servers are on {coordinator}, as the coordinator is"));
    };
    let began = Instant::now();
    let selector = format!("--pod-selector=rectrain.dev/job={name}");
    let drain = within(paths, NAMESPACE, &["drain", node, &selector, "--delete-emptydir-data", "--timeout=170s"]);
    let seconds = began.elapsed().as_secs_f64();
    let servers: Vec<u32> = away.iter().filter(|(of, _)| of == node).map(|(_, server)| *server).collect();
    println!("{node} was drained of parameter servers {servers:?} after step {step}, in {seconds:.1} s");
    let ended = drain.and_then(|_| servers_are_back(paths, name, &servers)).and_then(|()| {
        let attempt = status(paths, name)?["attempt"]["number"].clone();
        compare(paths, name, &undisturbed)?;
        if attempt == 1 { Ok(()) } else { Err(format!("it is attempt {attempt}: the others began anew")) }
    });
    within(paths, NAMESPACE, &["uncordon", node])?;
    ended
}

pub(super) fn node_of(paths: &Paths, pod: &str) -> Result<String, String> {
    let node = get(paths, &format!("pod/{pod}"))?["spec"]["nodeName"].as_str().map(str::to_owned);
    node.ok_or_else(|| format!("{pod} is on no node"))
}

/// Each has handed its rows over, and has rows again.
fn servers_are_back(paths: &Paths, name: &str, servers: &[u32]) -> Result<(), String> {
    eventually(FORWARD, "parameter servers in the place of those that were drained", || {
        let log = within(paths, NAMESPACE, &["logs", &format!("{name}-coordinator-0")])?;
        let events: Vec<Value> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let told = |kind: &str, server: &u32| {
            let member = format!("ps {server}");
            events.iter().any(|event| event["event"] == kind && event["member"] == *member)
        };
        if let Some(server) = servers.iter().find(|server| !told("leaving", server) || !told("rejoined", server)) {
            return Err(format!("ps {server} has not left and come back"));
        }
        let moved: Vec<&Value> = events.iter().filter(|event| event["event"] == "slotsMoved").collect();
        match moved.last() {
            Some(last) if last["to"] == 4 && moved.len() >= 2 * servers.len() => {
                moved.iter().for_each(|moved| println!("slots moved: {moved}"));
                Ok(())
            }
            _ => Err(format!("slots have moved {} times", moved.len())),
        }
    })
}

/// The job is deleted in order, which saves a checkpoint, and applied again.
fn applied_again(paths: &Paths, rows: &Value, undisturbed: &Value) -> Result<(), String> {
    let name = "applied-again";
    let mut job = saved(rows, name, EVERY);
    submit(paths, name, &job)?;
    let step = until_step_after(paths, name, 2 * EVERY + EVERY / 2)?;
    delete_job(paths, name)?;
    eventually(FORWARD, "the end of its pods", || {
        let pods = within(
            paths,
            NAMESPACE,
            &["get", "pods", "--selector", &format!("rectrain.dev/job={name}"), "--output=name"],
        )?;
        if pods.trim().is_empty() { Ok(()) } else { Err(pods) }
    })?;
    merge(&mut job, &json!({"checkpoint": {"resume": "latest"}}));
    submit(paths, name, &job)?;
    let resumed = resumed_at(paths, name)?;
    println!("deleted near step {step}, applied again: went on from step {resumed}");
    if resumed < 2 * EVERY {
        return Err("it did not go on from its last checkpoint".to_owned());
    }
    same_digest(paths, name, undisturbed)
}

/// As `job`, with checkpoints in the object store.
pub(super) fn saved(job: &Value, name: &str, every: u64) -> Value {
    merged(
        job.clone(),
        json!({
            "data": {"storage": {"secretName": "object-store"}},
            "checkpoint": {"path": format!("s3://data/checkpoints/{name}"), "everySteps": every},
        }),
    )
}

pub(super) fn reached(paths: &Paths, name: &str) -> Result<u64, String> {
    Ok(status(paths, name)?["step"].as_u64().unwrap_or(0))
}

pub(super) fn until_step_after(paths: &Paths, name: &str, step: u64) -> Result<u64, String> {
    eventually(FORWARD, &format!("step {step} of {name}"), || match reached(paths, name)? {
        reached if reached > step => Ok(reached),
        reached => Err(format!("it is at step {reached}")),
    })
}

/// The step at which the present attempt goes on, once its coordinator has said so.
fn resumed_at(paths: &Paths, name: &str) -> Result<u64, String> {
    eventually(FORWARD, &format!("the beginning of {name}"), || {
        // The coordinator of the attempt that was ended has a log as well, and may still be there.
        let coordinator = format!("{name}-coordinator-0");
        let pod = get(paths, &format!("pod/{coordinator}"))?;
        let attempt = status(paths, name)?["attempt"]["number"].to_string();
        let label = &pod["metadata"]["labels"]["rectrain.dev/attempt"];
        if label.as_str() != Some(&attempt) {
            return Err(format!("{coordinator} is of attempt {label} and not of {attempt}"));
        }
        let log = within(paths, NAMESPACE, &["logs", &coordinator])?;
        let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        for event in events {
            match event["event"].as_str() {
                Some("resumed") => return Ok(event["step"].as_u64().unwrap_or(0)),
                Some("progress") => return Ok(0),
                _ => {}
            }
        }
        Err("it has not begun".to_owned())
    })
}

/// Without a barrier: every row is trained once, and the model is as good.
pub(super) fn same_rows(paths: &Paths, name: &str, undisturbed: &Value) -> Result<(), String> {
    let job = until_phase(paths, name, "Complete")?;
    let summary = &job["status"]["summary"];
    let auc = |of: &Value| of.as_f64().ok_or_else(|| format!("{name} has no AUC: {summary}"));
    let difference = auc(&summary["auc"])? - auc(&undisturbed["test"]["auc"])?;
    if summary["samples"] != undisturbed["trainedRows"] || difference.abs() > 0.002 {
        return Err(format!("{name} ended with {summary}, and undisturbed {undisturbed}"));
    }
    println!("{name}: {} restarts, every row trained once, AUC {difference:+.4}", job["status"]["restarts"]);
    delete_job(paths, name)
}

fn same_digest(paths: &Paths, name: &str, undisturbed: &Value) -> Result<(), String> {
    let job = until_phase(paths, name, "Complete")?;
    let there = &job["status"]["summary"]["parametersSha256"];
    if *there != undisturbed["parametersSha256"] {
        return Err(format!("{name} trained {there}, and undisturbed {}", undisturbed["parametersSha256"]));
    }
    println!("{name}: {} restarts, the same model to the bit", job["status"]["restarts"]);
    delete_job(paths, name)
}
