//! Jobs that continue from their checkpoints, or from memory that survived. In `sync` a job ends
//! with the model of an undisturbed run, to the bit.

use std::time::{Duration, Instant};

use rectrain_bring_up::network::NODES;
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::manifests::{manifest, merge, merged, with_checkpoints};
use rectrain_harness::rectrain::train_outside;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet, processes};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::object_store;
use crate::cluster::support::outcome::{no_restart, same_digest, same_rows};
use crate::cluster::support::power::without_power;
use crate::error::unmet;

/// How long a job may take to recover, restarts included.
const RECOVERY: Duration = Duration::from_secs(180);
/// Global steps between two checkpoints.
const EVERY: u64 = 50;

/// Kills pods, deletes the job, and suspends it. Each time it continues from a checkpoint in the
/// object store.
pub(in crate::cluster) fn goes_on(cluster: &TestCluster) -> Result<(), TrialError> {
    object_store::start(&cluster.paths, NAMESPACE)?;
    object_store::make_bucket(cluster.kubectl(), NAMESPACE)?;
    let rows = json!({"data": {"synthetic": {"rows": 600_000}}});
    let undisturbed = train_outside(&manifest("undisturbed", &rows))?;
    killed(&cluster.jobs, &rows, &undisturbed)?;
    applied_again(&cluster.jobs, &rows, &undisturbed)?;
    suspended(&cluster.jobs, &rows, &undisturbed)
}

/// A suspended job saves a checkpoint before its pods end, although they have little grace, and
/// resumes from it.
fn suspended(jobs: &Jobs, rows: &Value, undisturbed: &Value) -> Result<(), TrialError> {
    let name = "held";
    let hurried = json!({"template": {"terminationGracePeriodSeconds": 10}});
    let roles = json!({"coordinator": hurried, "ps": hurried, "embeddingWorker": hurried, "denseWorker": hurried, "loader": hurried});
    jobs.submit(name, &merged(with_checkpoints(rows, name, 1_000_000), json!({"roles": roles})))?;
    let step = jobs.until_step_after(name, EVERY)?;
    let began = Instant::now();
    jobs.patch(name, &json!({"spec": {"suspend": true}}))?;
    let job = jobs.until_phase(name, "Suspended")?;
    let saved = job["status"]["lastCheckpoint"]["step"].as_u64().unwrap_or(0);
    let seconds = began.elapsed().as_secs_f64();
    println!("suspended near step {step}: held after {seconds:.1} s, with a checkpoint of step {saved}");
    jobs.patch(name, &json!({"spec": {"suspend": false}}))?;
    let resumed = resumed_at(jobs, name)?;
    if saved < step || resumed < saved {
        let found = format!("a checkpoint of step {saved}, and a resumption at step {resumed}");
        return Err(unmet(format!("a checkpoint of step {step} or later, and a resumption from it"), found));
    }
    same_digest(jobs, name, undisturbed)
}

/// Pods of every role are killed, one after the other.
fn killed(jobs: &Jobs, rows: &Value, undisturbed: &Value) -> Result<(), TrialError> {
    let name = "killed-often";
    jobs.submit(name, &with_checkpoints(rows, name, EVERY))?;
    ["embedding-worker", "loader", "dense-worker"].into_iter().try_for_each(|role| replaced(jobs, name, role))?;
    for (kills, role) in (1..).zip(["ps", "coordinator"]) {
        restarted(jobs, name, role, kills)?;
    }
    same_digest(jobs, name, undisturbed)
}

/// A pod of this role is killed, and the job restarts from its last checkpoint. It is restart
/// number `kills`.
fn restarted(jobs: &Jobs, name: &str, role: &str, kills: u64) -> Result<(), TrialError> {
    let step = jobs.until_step_after(name, jobs.step(name)? + EVERY)?;
    jobs.kill_pod(&format!("{name}-{role}-0"))?;
    eventually(RECOVERY, &format!("restart {kills} of {name}"), || match jobs.status(name)?["restarts"].as_u64() {
        Some(restarts) if restarts >= kills => Ok(()),
        other => Err(not_yet(format!("{other:?} restarts"))),
    })?;
    let resumed = resumed_at(jobs, name)?;
    println!("{role} killed near step {step}: resumed at step {resumed}");
    if resumed == 0 {
        return Err(unmet("a resumption from a checkpoint", format!("a new beginning after {role} was killed")));
    }
    eventually(RECOVERY, "the last checkpoint in the status", || {
        match jobs.status(name)?["lastCheckpoint"]["step"].as_u64() {
            Some(last) if last >= resumed => Ok(()),
            other => Err(not_yet(format!("step {other:?}"))),
        }
    })?;
    Ok(())
}

/// A pod of this role is killed. Its replacement rejoins, and the job does not restart.
fn replaced(jobs: &Jobs, name: &str, role: &str) -> Result<(), TrialError> {
    let step = jobs.until_step_after(name, jobs.step(name)? + EVERY)?;
    let restarts = jobs.status(name)?["restarts"].clone();
    jobs.kill_pod(&format!("{name}-{role}-0"))?;
    let member = format!("{role} 0");
    eventually(RECOVERY, &format!("another {role} of {name}"), || {
        let has_rejoined = |event: &Value| event["event"] == "rejoined" && event["member"] == *member;
        if jobs.events(name)?.iter().any(has_rejoined) { Ok(()) } else { Err(not_yet("it has not rejoined")) }
    })?;
    let later = jobs.until_step_after(name, step + EVERY)?;
    println!("{role} killed near step {step}: replaced, and the others trained on to step {later}");
    match jobs.status(name)?["restarts"].clone() {
        same if same == restarts => Ok(()),
        more => Err(unmet(format!("{restarts} restarts, as before"), more)),
    }
}

/// The container of a parameter server is killed, and the next one in its pod finds the rows. Then
/// the same happens to the coordinator and its journal. There are no checkpoints. One job has a
/// barrier. The other has none, but a single dense worker, so it trains the same model every time.
pub(in crate::cluster) fn keeps_rows(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("the death of a container")? {
        return Ok(());
    }
    let rows = json!({"data": {"synthetic": {"rows": 400_000}}});
    let gba = json!({"training": {"mode": "gba", "localBatchSize": 125}, "roles": {"denseWorker": {"replicas": 1}}});
    keeps_rows_in(&cluster.jobs, "keeps-rows", &rows)?;
    keeps_rows_in(&cluster.jobs, "keeps-rows-gba", &merged(rows, gba))
}

fn keeps_rows_in(jobs: &Jobs, name: &str, rows: &Value) -> Result<(), TrialError> {
    let undisturbed = train_outside(&manifest(name, rows))?;
    jobs.submit(name, rows)?;
    comes_back(jobs, name, "ps-1", |event| event["event"] == "serverKeptRows" && event["member"] == "ps 1")?;
    comes_back(jobs, name, "coordinator-0", |event| event["event"] == "coordinatorTakenUp")?;
    let attempt = jobs.status(name)?["attempt"]["number"].clone();
    same_digest(jobs, name, &undisturbed)?;
    no_restart(name, &attempt)
}

/// The container of a pod is killed, and an event reports its replacement.
fn comes_back(jobs: &Jobs, name: &str, pod: &str, is_back: impl Fn(&Value) -> bool) -> Result<(), HarnessError> {
    let step = jobs.until_step_after(name, jobs.step(name)? + EVERY)?;
    processes::signal(jobs.process_of(&format!("{name}-{pod}"))?, "KILL")?;
    let killed = Instant::now();
    eventually(RECOVERY, &format!("the replacement of {pod} of {name}"), || {
        if jobs.events(name)?.iter().any(&is_back) { Ok(()) } else { Err(not_yet("no event reports it")) }
    })?;
    let seconds = killed.elapsed().as_secs_f64();
    println!("{pod} killed after step {step}: back with its state within {seconds:.1} s");
    Ok(())
}

/// A node with parameter servers and workers of a job without checkpoints is drained. The servers'
/// rows move to others before their pods end, and nothing restarts. With a barrier the model is the
/// same; without one every row is trained once.
pub(in crate::cluster) fn drained(cluster: &TestCluster) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    let two = json!({"replicas": 2});
    let roles = json!({"ps": {"replicas": 4}, "embeddingWorker": two, "loader": two, "denseWorker": two});
    let rows = json!({"data": {"synthetic": {"rows": 1_500_000}}, "roles": roles});
    let gba = merged(rows.clone(), json!({"training": {"mode": "gba", "localBatchSize": 125}}));
    drained_in(jobs, "drained", &rows, same_digest)?;
    drained_in(jobs, "drained-gba", &gba, same_rows)?;
    // Checkpoints change no model, and a run outside of the cluster has no access to its store.
    let alone = train_outside(&manifest("drained-alone", &rows))?;
    let alone_gba = train_outside(&manifest("drained-alone-gba", &gba))?;
    let in_sync = |name, job: &Value| coordinator_drained_in(jobs, name, job, (same_digest, &alone));
    let in_gba = |name, job: &Value| coordinator_drained_in(jobs, name, job, (same_rows, &alone_gba));
    in_sync("drained-lead", &rows)?;
    in_gba("drained-lead-gba", &gba)?;
    object_store::start(&cluster.paths, NAMESPACE)?;
    object_store::make_bucket(cluster.kubectl(), NAMESPACE)?;
    let saved = |job, name| with_checkpoints(job, name, EVERY);
    in_sync("drained-saved", &saved(&rows, "drained-saved"))?;
    in_gba("drained-saved-gba", &saved(&gba, "drained-saved-gba"))
}

/// The node of the coordinator, which has no other member of the job, loses its power. The
/// replacement continues on the other node from the copies of the journal.
pub(in crate::cluster) fn coordinator_lost(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("the loss of a node")? {
        return Ok(());
    }
    let [members, coordinator] = [NODES[0].name, NODES[1].name];
    let two = json!({"replicas": 2, "template": {"nodeSelector": {"kubernetes.io/hostname": members}}});
    let elsewhere = json!({"template": {"affinity": {"nodeAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": {"matchExpressions": [
            {"key": "kubernetes.io/hostname", "operator": "In", "values": [coordinator]},
        ]}}],
    }}}});
    let roles = json!({"coordinator": elsewhere, "ps": two, "embeddingWorker": two, "loader": two, "denseWorker": two});
    let rows = json!({"data": {"synthetic": {"rows": 1_500_000}}, "roles": roles});
    let gba = merged(rows.clone(), json!({"training": {"mode": "gba", "localBatchSize": 125}}));
    coordinator_lost_in(cluster, "lost-lead", &rows, same_digest)?;
    coordinator_lost_in(cluster, "lost-lead-gba", &gba, same_rows)
}

fn coordinator_lost_in(cluster: &TestCluster, name: &str, job: &Value, compare: Compare) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    let undisturbed = train_outside(&manifest(name, job))?;
    jobs.submit(name, job)?;
    let step = jobs.until_step_after(name, EVERY)?;
    let node = jobs.node_of(&format!("{name}-coordinator-0"))?;
    if node != NODES[1].name {
        return Err(unmet(format!("the coordinator of {name} on {}", NODES[1].name), node));
    }
    let began = Instant::now();
    without_power(cluster, &node, || {
        until_taken_up(jobs, name)?;
        let seconds = began.elapsed().as_secs_f64();
        println!("{node} lost its power after step {step}: the coordinator of {name} was back after {seconds:.1} s");
        let attempt = jobs.status(name)?["attempt"]["number"].clone();
        compare(jobs, name, &undisturbed)?;
        no_restart(name, &attempt)
    })
}

/// Waits until an event reports that another process continues the coordinator's work.
fn until_taken_up(jobs: &Jobs, name: &str) -> Result<(), HarnessError> {
    eventually(RECOVERY, &format!("the replacement of the coordinator of {name}"), || {
        let has_recovered = jobs.events(name)?.iter().any(|event| event["event"] == "coordinatorTakenUp");
        if has_recovered { Ok(()) } else { Err(not_yet("no event reports it")) }
    })
}

/// Compares the end of a job, by its name, with the summary of an undisturbed run.
type Compare = fn(&Jobs, &str, &Value) -> Result<(), TrialError>;

fn drained_in(jobs: &Jobs, name: &str, job: &Value, compare: Compare) -> Result<(), TrialError> {
    let undisturbed = train_outside(&manifest(name, job))?;
    jobs.submit(name, job)?;
    let step = jobs.until_step_after(name, EVERY)?;
    let (node, servers) = node_to_drain(jobs, name)?;
    let (drain, seconds) = drain(jobs, name, &node);
    println!("{node} was drained of parameter servers {servers:?} after step {step}, in {seconds:.1} s");
    let ended = drain.and_then(|()| {
        until_servers_are_back(jobs, name, &servers)?;
        let attempt = jobs.status(name)?["attempt"]["number"].clone();
        compare(jobs, name, &undisturbed)?;
        no_restart(name, &attempt)
    });
    jobs.within(&["uncordon", &node])?;
    ended
}

/// Drains a node of a job's pods. Also returns the seconds that this took.
fn drain(jobs: &Jobs, name: &str, node: &str) -> (Result<(), TrialError>, f64) {
    let began = Instant::now();
    let selector = format!("--pod-selector=rectrain.dev/job={name}");
    let drained = jobs.within(&["drain", node, &selector, "--delete-emptydir-data", "--timeout=170s"]);
    (drained.map(drop).map_err(TrialError::from), began.elapsed().as_secs_f64())
}

/// The node of the coordinator is drained. Its replacement continues from the copies of the journal
/// on the parameter servers.
fn coordinator_drained_in(
    jobs: &Jobs,
    name: &str,
    job: &Value,
    (compare, undisturbed): (Compare, &Value),
) -> Result<(), TrialError> {
    jobs.submit(name, job)?;
    let step = jobs.until_step_after(name, EVERY)?;
    let node = jobs.node_of(&format!("{name}-coordinator-0"))?;
    let (drain, seconds) = drain(jobs, name, &node);
    println!("{node} was drained of the coordinator after step {step}, in {seconds:.1} s");
    let ended = drain.and_then(|()| {
        until_taken_up(jobs, name)?;
        let attempt = jobs.status(name)?["attempt"]["number"].clone();
        compare(jobs, name, undisturbed)?;
        no_restart(name, &attempt)
    });
    jobs.within(&["uncordon", &node])?;
    ended
}

/// A node without the job's coordinator, and the parameter servers on it.
fn node_to_drain(jobs: &Jobs, name: &str) -> Result<(String, Vec<u32>), TrialError> {
    let coordinator = jobs.node_of(&format!("{name}-coordinator-0"))?;
    let mut away = Vec::new();
    for server in 0..4 {
        let node = jobs.node_of(&format!("{name}-ps-{server}"))?;
        if node != coordinator {
            away.push((node, server));
        }
    }
    let Some((node, _)) = away.first().cloned() else {
        return Err(unmet(
            "parameter servers on two nodes",
            format!("all are on {coordinator}, as the coordinator is"),
        ));
    };
    let servers = away.into_iter().filter(|(of, _)| *of == node).map(|(_, server)| server);
    Ok((node.clone(), servers.collect()))
}

/// Waits until each server has handed its rows over, and has rows again.
fn until_servers_are_back(jobs: &Jobs, name: &str, servers: &[u32]) -> Result<(), HarnessError> {
    eventually(RECOVERY, "the replacements of the drained parameter servers", || {
        let events = jobs.events(name)?;
        let reported = |kind: &str, server: &u32| {
            let member = format!("ps {server}");
            events.iter().any(|event| event["event"] == kind && event["member"] == *member)
        };
        if let Some(server) =
            servers.iter().find(|server| !reported("leaving", server) || !reported("rejoined", server))
        {
            return Err(not_yet(format!("ps {server} has not left and rejoined")));
        }
        let moved: Vec<&Value> = events.iter().filter(|event| event["event"] == "slotsMoved").collect();
        match moved.last() {
            Some(last) if last["to"] == 4 && moved.len() >= 2 * servers.len() => {
                moved.iter().for_each(|moved| println!("slots moved: {moved}"));
                Ok(())
            }
            _ => Err(not_yet(format!("slots have moved {} times", moved.len()))),
        }
    })
}

/// Deleting the job saves a checkpoint. Applied again, the job resumes from it.
fn applied_again(jobs: &Jobs, rows: &Value, undisturbed: &Value) -> Result<(), TrialError> {
    let name = "applied-again";
    let mut job = with_checkpoints(rows, name, EVERY);
    jobs.submit(name, &job)?;
    let step = jobs.until_step_after(name, 2 * EVERY + EVERY / 2)?;
    jobs.delete(name)?;
    eventually(RECOVERY, "the end of its pods", || jobs.has_no_pods(name))?;
    merge(&mut job, &json!({"checkpoint": {"resume": "latest"}}));
    jobs.submit(name, &job)?;
    let resumed = resumed_at(jobs, name)?;
    println!("deleted near step {step}, applied again: resumed at step {resumed}");
    if resumed < 2 * EVERY {
        return Err(unmet(format!("a resumption at step {} or later", 2 * EVERY), format!("step {resumed}")));
    }
    same_digest(jobs, name, undisturbed)
}

/// The step at which the present attempt started, once its coordinator has reported it; 0 for a new
/// beginning.
pub(super) fn resumed_at(jobs: &Jobs, name: &str) -> Result<u64, HarnessError> {
    eventually(RECOVERY, &format!("the beginning of {name}"), || {
        // The previous attempt's coordinator may still be there, with a log of its own.
        let coordinator = format!("{name}-coordinator-0");
        let pod = jobs.get(&format!("pod/{coordinator}"))?;
        let attempt = jobs.status(name)?["attempt"]["number"].to_string();
        let label = &pod["metadata"]["labels"]["rectrain.dev/attempt"];
        if label.as_str() != Some(&attempt) {
            return Err(not_yet(format!("{coordinator} belongs to attempt {label}, the job is at {attempt}")));
        }
        for event in jobs.events(name)? {
            match event["event"].as_str() {
                Some("resumed") => return Ok(event["step"].as_u64().unwrap_or(0)),
                Some("progress") => return Ok(0),
                _ => {}
            }
        }
        Err(not_yet("it has reported no step"))
    })
}
