//! Members join and leave a running job, because its manifest changes or because the operator
//! decides so.

use std::time::{Duration, Instant};

use rectrain_harness::command::{command, output};
use rectrain_harness::files::write;
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::kubectl::SYSTEM;
use rectrain_harness::manifests::{endless, manifest, merged, several_with_limits, with_limits};
use rectrain_harness::rectrain::train_outside;
use rectrain_harness::waiting::eventually;
use rectrain_harness::workspace::built;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::error::unmet;

/// How long new pods may take to start, and slots to move.
const MOVES: Duration = Duration::from_secs(120);
/// How long a figure may take to appear in a status or on a page.
const SHORT: Duration = Duration::from_secs(30);
/// The time between two decisions about a role, in jobs whose number of replicas has to settle.
const COOL_DOWN: Duration = Duration::from_secs(30);
/// How long the operator may take to observe a load, to decide, and to act.
const DECIDES: Duration = Duration::from_secs(240);

pub(in crate::cluster) fn scales(cluster: &TestCluster) -> Result<(), TrialError> {
    by_manifest(&cluster.jobs)?;
    dense_workers_by_manifest(&cluster.jobs)?;
    in_by_decision(&cluster.jobs)
}

pub(in crate::cluster) fn grows(cluster: &TestCluster) -> Result<(), TrialError> {
    out_by_decision(&cluster.jobs)?;
    memory_by_decision(&cluster.jobs)
}

pub(in crate::cluster) fn settles(cluster: &TestCluster) -> Result<(), TrialError> {
    hot_by_decision(cluster)?;
    queues_by_decision(&cluster.jobs)
}

/// The numbers of servers, embedding workers and loaders change; the model stays the same, to the
/// bit.
fn by_manifest(jobs: &Jobs) -> Result<(), TrialError> {
    let name = "scaled";
    let changes = json!({
        "data": {"synthetic": {"rows": 4_000_000, "vocabulary": 100_000}},
        "training": {"globalBatchSize": 2_000},
        "roles": {"ps": {"replicas": 1}, "embeddingWorker": {"replicas": 1}, "loader": {"replicas": 1}},
    });
    let here = train_outside(&manifest(name, &changes))?;
    jobs.submit(name, &changes)?;
    jobs.until_phase(name, "Training")?;
    for (role, replicas) in [("ps", 3), ("embeddingWorker", 2), ("ps", 2), ("loader", 2), ("embeddingWorker", 1)] {
        change(jobs, name, role, replicas)?;
    }
    let job = jobs.until_phase(name, "Complete")?;
    let status = &job["status"];
    let (digest, expected) = (&status["summary"]["parametersSha256"], &here["parametersSha256"]);
    if digest != expected || status["restarts"] != 0 || status["attempt"]["number"] != 1 {
        let found = format!("digest {digest} after {}", status["attempt"]);
        return Err(unmet(format!("the digest {expected} in the first attempt"), found));
    }
    Ok(jobs.delete(name)?)
}

/// One dense worker, two, one: every row is trained once.
fn dense_workers_by_manifest(jobs: &Jobs) -> Result<(), TrialError> {
    let name = "shared";
    let changes = json!({
        "data": {"synthetic": {"rows": 2_000_000, "vocabulary": 100_000}},
        "training": {"globalBatchSize": 2_000, "localBatchSize": 500},
        "roles": {"denseWorker": {"replicas": 1}},
    });
    let here = train_outside(&manifest(name, &changes))?;
    jobs.submit(name, &changes)?;
    jobs.until_phase(name, "Training")?;
    for replicas in [2, 1] {
        change(jobs, name, "denseWorker", replicas)?;
    }
    let job = jobs.until_phase(name, "Complete")?;
    let (summary, restarts) = (&job["status"]["summary"], &job["status"]["restarts"]);
    let auc = |summary: &Value| summary["auc"].as_f64().or(summary["test"]["auc"].as_f64()).unwrap_or(0.0);
    let difference = (auc(summary) - auc(&here)).abs();
    println!("AUC {} with a varying number of dense workers, {difference:.5} from the AUC with one", summary["auc"]);
    if summary["samples"] != here["samples"]
        || *restarts != 0
        || job["status"]["attempt"]["number"] != 1
        || difference > 0.002
    {
        let found = format!("{summary} after {}", job["status"]["attempt"]);
        return Err(unmet(format!("the samples and the AUC of one dense worker, {here}"), found));
    }
    Ok(jobs.delete(name)?)
}

/// Changes a role's replicas in the manifest, and waits until exactly these are ready.
fn change(jobs: &Jobs, name: &str, role: &str, replicas: u32) -> Result<(), TrialError> {
    jobs.set_replicas(name, role, replicas)?;
    let step = jobs.status(name)?["step"].as_u64().unwrap_or(0);
    let started = Instant::now();
    let after = eventually(MOVES, &format!("{replicas} of {role} of {name}"), || {
        let after = is_at(&jobs.status(name)?, role, replicas)?;
        has_pods(jobs, name, role, replicas).map(|()| after)
    })?;
    let steps = after["step"].as_u64().unwrap_or(0).saturating_sub(step);
    println!("{role}: {replicas} after {:.1} s and {steps} steps", started.elapsed().as_secs_f64());
    if after["phase"] != "Training" {
        return Err(unmet("the phase Training", &after["phase"]));
    }
    Ok(())
}

/// A server with a growing table is relieved by another one before it reaches its memory limit.
fn out_by_decision(jobs: &Jobs) -> Result<(), TrialError> {
    let name = "grows";
    let changes = json!({
        "data": {"synthetic": {"vocabulary": 100_000_000}},
        "training": {"globalBatchSize": 2_000},
        // A slow worker gives the operator time.
        "roles": {"ps": with_limits(&json!({"memory": "2Gi"})), "denseWorker": with_limits(&json!({"cpu": "100m"}))},
        "autoscaling": {"mode": "apply", "upWindowSeconds": 15, "coolDownSeconds": 30, "ps": {"max": 2}},
    });
    jobs.submit(name, &merged(endless(), changes))?;
    jobs.until_phase(name, "Training")?;
    let started = Instant::now();
    let after = eventually(DECIDES, "a second parameter server", || is_at(&jobs.status(name)?, "ps", 2))?;
    println!("2 servers after {:.0} s: {}", started.elapsed().as_secs_f64(), reason(&after, "ps"));
    let page = jobs.page(name)?;
    let has_reason = |logged: &Value| logged["event"]["event"] == "scaling" && logged["event"]["reason"].is_string();
    if !page["events"].as_array().is_some_and(|events| events.iter().any(has_reason)) {
        return Err(unmet("the reason on the job's page", &page["events"]));
    }
    let spec = jobs.job(name)?["spec"]["roles"]["ps"]["replicas"].clone();
    if spec != 1 || after["restarts"] != 0 || after["attempt"]["number"] != 1 {
        let found = format!("{spec} replicas in the manifest, and the status {after}");
        return Err(unmet("1 replica in the manifest, and no restart", found));
    }
    Ok(jobs.delete(name)?)
}

/// A server killed for exceeding its memory gets a higher limit at the restart, as often as
/// necessary.
fn memory_by_decision(jobs: &Jobs) -> Result<(), TrialError> {
    let name = "raised";
    let given: u64 = 256 << 20;
    let changes = json!({
        "data": {"synthetic": {"rows": 1_500_000, "vocabulary": 1_000_000}},
        "training": {"globalBatchSize": 2_000},
        "roles": {"ps": with_limits(&json!({"memory": given.to_string()}))},
        "autoscaling": {"mode": "apply", "ps": {"max": 1, "maxMemoryGib": 1}},
    });
    jobs.submit(name, &changes)?;
    let job = jobs.until_phase(name, "Complete")?;
    let (attempt, restarts) = (&job["status"]["attempt"], &job["status"]["restarts"]);
    let raised = attempt["psMemoryBytes"].as_u64().unwrap_or(0);
    println!("complete with {} MiB after {restarts} kills: {}", raised >> 20, reason(&job["status"], "ps"));
    let set = jobs.get(&format!("statefulset/{name}-ps"))?;
    let limit = set["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"].as_str();
    if raised <= given || attempt["number"].as_u64() < Some(2) || limit != Some(raised.to_string().as_str()) {
        return Err(unmet(format!("a limit above {given} bytes"), format!("the limit {limit:?} in {attempt}")));
    }
    Ok(jobs.delete(name)?)
}

/// Two servers that cannot keep up with their look-ups are relieved by others, and their number
/// settles. The ids are as skewed as the ids of clicks. A loader with a fifth of a core limits the
/// rows per second.
fn hot_by_decision(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "hot");
    let servers = several_with_limits(2, &json!({"cpu": "100m"}));
    let changes = json!({
        "model": {"hidden": [8], "embeddingDim": 64},
        "data": {"synthetic": {"vocabulary": 100_000, "zipfExponent": 1.05}},
        "training": {"mode": "hybrid", "globalBatchSize": 4_000},
        "roles": {"ps": servers, "loader": with_limits(&json!({"cpu": "200m"}))},
        "autoscaling": {
            "mode": "apply", "upWindowSeconds": 15, "downWindowSeconds": 20, "coolDownSeconds": COOL_DOWN.as_secs(),
            "ps": {"max": 8}, "denseWorker": {"scaler": "external"}, "embeddingWorker": {"scaler": "external"},
        },
    });
    jobs.submit(name, &merged(endless(), changes))?;
    jobs.until_phase(name, "Training")?;
    let before = eventually(SHORT, "a speed", || {
        let status = jobs.status(name)?;
        status["samplesPerSecond"].as_u64().filter(|now| *now > 0).ok_or_else(|| not_yet(&status["phase"]))
    })?;
    let first = first_decision(jobs, name, "ps")?;
    let after = settled(jobs, name, "ps", first)?;
    let servers = &after["attempt"]["replicas"]["ps"]["present"];
    println!("{servers} servers: {} samples/s, {before} with two", after["samplesPerSecond"]);
    if servers.as_u64() <= Some(2) || after["restarts"] != 0 || after["attempt"]["number"] != 1 {
        return Err(unmet("more than 2 servers without a restart", after));
    }
    replay_agrees(cluster, name)?;
    Ok(jobs.delete(name)?)
}

/// A server that cannot keep up with its look-ups is relieved by another one. When three of four
/// dense workers leave, the load falls, and so does the number of servers.
pub(in crate::cluster) fn falls_back(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "back");
    let workers = several_with_limits(4, &json!({"cpu": "100m"}));
    let changes = json!({
        "model": {"hidden": [256], "embeddingDim": 64},
        "data": {"synthetic": {"vocabulary": 100_000, "zipfExponent": 1.05}},
        "training": {"mode": "hybrid", "globalBatchSize": 2_000, "localBatchSize": 500},
        "roles": {"ps": with_limits(&json!({"cpu": "200m"})), "denseWorker": workers},
        "autoscaling": {
            "mode": "apply", "upWindowSeconds": 15, "downWindowSeconds": 20, "coolDownSeconds": COOL_DOWN.as_secs(),
            "ps": {"max": 2}, "denseWorker": {"scaler": "external"}, "embeddingWorker": {"scaler": "external"},
        },
    });
    jobs.submit(name, &merged(endless(), changes))?;
    jobs.until_phase(name, "Training")?;
    let first = first_decision(jobs, name, "ps")?;
    let after = settled(jobs, name, "ps", first)?;
    let servers = &after["attempt"]["replicas"]["ps"]["present"];
    println!("{servers} servers: {} samples/s", after["samplesPerSecond"]);
    change(jobs, name, "denseWorker", 1)?;
    let fallen = Instant::now();
    let fewer = eventually(DECIDES, "one server after the load has fallen", || {
        is_at(&jobs.status(name)?, "ps", 1).map(|_| Instant::now())
    })?;
    println!("one server {:.0} s after the load had fallen", (fewer - fallen).as_secs_f64());
    let last = settled(jobs, name, "ps", fewer)?;
    println!("one server: {} samples/s", last["samplesPerSecond"]);
    let has_fallen_back = servers.as_u64() > Some(1) && is_at(&last, "ps", 1).is_ok() && last["restarts"] == 0;
    if !has_fallen_back || last["attempt"]["number"] != 1 {
        return Err(unmet("more than 1 server, then 1 again, without a restart", last));
    }
    Ok(jobs.delete(name)?)
}

/// Three servers, which is the maximum, get uneven loads, because each batch has few keys. The
/// operator rebalances their slots, and the model is the one of an undisturbed run.
pub(in crate::cluster) fn evens_out(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "uneven");
    let servers = several_with_limits(3, &json!({"cpu": "100m"}));
    let changes = json!({
        "model": {"hidden": [8], "embeddingDim": 64},
        "features": {"sparse": [{"name": "C{1..10}"}]},
        "data": {"synthetic": {"rows": 2_000_000, "vocabulary": 2}},
        "training": {"globalBatchSize": 50},
        "roles": {"ps": servers, "embeddingWorker": {"replicas": 1}, "denseWorker": {"replicas": 1}},
    });
    let here = train_outside(&manifest(name, &changes))?;
    let decided_on = json!({"autoscaling": {
        "mode": "apply", "upWindowSeconds": 15, "coolDownSeconds": COOL_DOWN.as_secs(),
        "ps": {"max": 3, "busyTarget": 0.1}, "denseWorker": {"scaler": "external"}, "embeddingWorker": {"scaler": "external"},
    }});
    jobs.submit(name, &merged(changes, decided_on))?;
    jobs.until_phase(name, "Training")?;
    let before = unevenness(jobs, name, 3)?;
    let first = first_decision(jobs, name, "ps")?;
    eventually(SHORT, "a migration of slots", || {
        let page = jobs.metrics(&format!("{name}-coordinator-0"))?;
        if page.lines().any(|line| line.starts_with("rectrain_coordinator_migrations_total") && line.ends_with(" 1")) {
            return Ok(());
        }
        Err(not_yet("the coordinator has counted none"))
    })?;
    let after = unevenness(jobs, name, 3)?;
    println!("the server with the most look-ups had {before:.2} times the mean, and has {after:.2}");
    let job = jobs.until_phase(name, "Complete")?;
    let seconds = first.elapsed().as_secs_f64();
    println!("complete {seconds:.0} s after the only decision: {}", reason(&job["status"], "ps"));
    let (digest, expected) = (&job["status"]["summary"]["parametersSha256"], &here["parametersSha256"]);
    let is_balanced = decided(&job["status"], "ps") == ["\"3\" -> \"3\""] && before > 1.2 && after <= 1.1;
    if !is_balanced || digest != expected || job["status"]["restarts"] != 0 {
        let claim = format!("one rebalance to at most 1.1 times the mean, and the digest {expected}");
        return Err(unmet(claim, format!("{after:.2} times the mean, digest {digest}: {}", job["status"])));
    }
    Ok(jobs.delete(name)?)
}

/// The largest number of rows that one server looked up, divided by the mean, over some seconds.
fn unevenness(jobs: &Jobs, name: &str, servers: u32) -> Result<f64, HarnessError> {
    let looked_up = || {
        let of_server = |index| {
            let page = jobs.metrics(&format!("{name}-ps-{index}"))?;
            let value = |line: &str| line.rsplit_once(' ')?.1.parse::<f64>().ok();
            let found = page.lines().filter(|line| line.starts_with("rectrain_ps_found_rows_total"));
            Ok::<f64, HarnessError>(found.filter_map(value).sum())
        };
        (0..servers).map(of_server).collect::<Result<Vec<f64>, HarnessError>>()
    };
    let before = looked_up()?;
    std::thread::sleep(Duration::from_secs(8));
    let rows: Vec<f64> = looked_up()?.iter().zip(&before).map(|(after, before)| after - before).collect();
    Ok(rows.iter().copied().fold(0.0, f64::max) * f64::from(servers) / rows.iter().sum::<f64>())
}

/// A replay of the operator's recording of the job must reach the same decisions.
fn replay_agrees(cluster: &TestCluster, name: &str) -> Result<(), TrialError> {
    let kubectl = cluster.kubectl();
    let trace = kubectl.page(SYSTEM, &kubectl.leader()?, 8080, &format!("traces/{NAMESPACE}/{name}"))?;
    let file = cluster.paths.run().join("trace.jsonl");
    write(&file, trace)?;
    let replayed = output(command(built("rectrain")?, ["policy", "replay", "--json"]).arg(&file))?;
    let lines: Vec<Value> = replayed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    println!("{} recorded decisions replayed", lines.len());
    if lines.is_empty() || lines.iter().any(|line| line["agrees"] != true) {
        return Err(unmet("the recorded decisions in a replay", replayed));
    }
    Ok(())
}

/// The decisions about a role, oldest first.
fn decisions<'a>(status: &'a Value, role: &str) -> impl DoubleEndedIterator<Item = &'a Value> {
    let all = status["decisions"].as_array().into_iter().flatten();
    all.filter(move |decision| decision["subject"] == role)
}

/// The decisions about a role as text, oldest first.
fn decided(status: &Value, role: &str) -> Vec<String> {
    decisions(status, role).map(|decision| format!("{} -> {}", decision["from"], decision["to"])).collect()
}

/// Waits for the first decision about a role; returns its time.
fn first_decision(jobs: &Jobs, name: &str, role: &str) -> Result<Instant, HarnessError> {
    let started = Instant::now();
    eventually(DECIDES, &format!("a decision about {role} of {name}"), || {
        let status = jobs.status(name)?;
        if decided(&status, role).is_empty() { Err(not_yet(&status["phase"])) } else { Ok(()) }
    })?;
    println!("first decision about {role} after {:.0} s", started.elapsed().as_secs_f64());
    Ok(Instant::now())
}

/// Checks that a role's replicas settle: three cool-downs after the first decision, one more
/// cool-down passes without a decision. Returns the status.
fn settled(jobs: &Jobs, name: &str, role: &str, first: Instant) -> Result<Value, TrialError> {
    std::thread::sleep((first + 3 * COOL_DOWN).saturating_duration_since(Instant::now()));
    let decisions = decided(&jobs.status(name)?, role);
    std::thread::sleep(COOL_DOWN);
    let after = jobs.status(name)?;
    println!("{role}: {}: {}", decisions.join(", "), reason(&after, role));
    let replicas = &after["attempt"]["replicas"][role];
    if decided(&after, role) != decisions || replicas["present"] != replicas["wanted"] {
        let claim = format!("the number of {role} to settle within three cool-downs");
        return Err(unmet(claim, format!("{}, {replicas}", after["decisions"])));
    }
    Ok(after)
}

/// An embedding worker with a queue of batches is relieved by others, and training becomes faster.
fn queues_by_decision(jobs: &Jobs) -> Result<(), TrialError> {
    let name = "queues";
    let changes = json!({
        "data": {"synthetic": {"vocabulary": 100_000}},
        "training": {"mode": "hybrid", "globalBatchSize": 4_000, "localBatchSize": 500},
        "roles": {"embeddingWorker": with_limits(&json!({"cpu": "100m"}))},
        "autoscaling": {
            "mode": "apply", "upWindowSeconds": 15, "coolDownSeconds": 30,
            "ps": {"scaler": "external"}, "denseWorker": {"scaler": "external"}, "embeddingWorker": {"max": 3},
        },
    });
    jobs.submit(name, &merged(endless(), changes))?;
    jobs.until_phase(name, "Training")?;
    let started = Instant::now();
    let mut alone = 0;
    let mut first = None;
    let after = eventually(DECIDES, "a second embedding worker", || {
        let status = jobs.status(name)?;
        if !decided(&status, "embeddingWorker").is_empty() {
            first.get_or_insert_with(Instant::now);
        }
        let enough = is_at(&status, "embeddingWorker", 2).or_else(|_| is_at(&status, "embeddingWorker", 3));
        if enough.is_err() && status["attempt"]["replicas"]["embeddingWorker"]["present"] == 1 {
            alone = status["samplesPerSecond"].as_u64().unwrap_or(alone);
        }
        enough
    })?;
    let workers = &after["attempt"]["replicas"]["embeddingWorker"]["present"];
    let seconds = started.elapsed().as_secs_f64();
    println!("{workers} embedding workers after {seconds:.0} s: {}", reason(&after, "embeddingWorker"));
    let faster = |status: &Value| status["samplesPerSecond"].as_u64().filter(|now| *now as f64 > 1.3 * alone as f64);
    let now = eventually(MOVES, "training that is faster by 30 %", || {
        let status = jobs.status(name)?;
        faster(&status).ok_or_else(|| not_yet(format!("{} samples/s, {alone} with one", status["samplesPerSecond"])))
    })?;
    println!("{now} samples/s with them, {alone} with one");
    let after = settled(jobs, name, "embeddingWorker", first.unwrap_or(started))?;
    if after["restarts"] != 0 || after["attempt"]["number"] != 1 {
        return Err(unmet("scaling without a restart", after));
    }
    Ok(jobs.delete(name)?)
}

/// Two servers and two embedding workers with little load are reduced to one each.
fn in_by_decision(jobs: &Jobs) -> Result<(), TrialError> {
    let name = "shrinks";
    let changes = json!({
        "roles": {
            "ps": {"replicas": 2}, "embeddingWorker": {"replicas": 2}, "denseWorker": with_limits(&json!({"cpu": "150m"})),
        },
        "autoscaling": {
            "mode": "apply", "upWindowSeconds": 15, "downWindowSeconds": 15, "ps": {"min": 1}, "embeddingWorker": {"min": 1},
        },
    });
    jobs.submit(name, &merged(endless(), changes))?;
    jobs.until_phase(name, "Training")?;
    let started = Instant::now();
    let mut after = Value::Null;
    for role in ["ps", "embeddingWorker"] {
        after = eventually(DECIDES, &format!("one of {role}"), || {
            let after = is_at(&jobs.status(name)?, role, 1)?;
            has_pods(jobs, name, role, 1).map(|()| after)
        })?;
        println!("{role}: 1 after {:.0} s: {}", started.elapsed().as_secs_f64(), reason(&after, role));
    }
    if after["restarts"] != 0 || after["attempt"]["number"] != 1 || after["phase"] != "Training" {
        return Err(unmet("scaling without a restart", after));
    }
    Ok(jobs.delete(name)?)
}

/// The reason of the last decision about a role.
fn reason(status: &Value, role: &str) -> String {
    decisions(status, role).next_back().map_or_else(String::new, |decision| decision["reason"].to_string())
}

/// The status, if exactly this many replicas of a role participate and are needed.
fn is_at(status: &Value, role: &str, replicas: u32) -> Result<Value, HarnessError> {
    let now = &status["attempt"]["replicas"][role];
    if now["present"] == replicas && now["needed"] == replicas {
        return Ok(status.clone());
    }
    Err(not_yet(format!("{now}, {}, {}", status["phase"], status["conditions"])))
}

fn has_pods(jobs: &Jobs, name: &str, role: &str, replicas: u32) -> Result<(), HarnessError> {
    let role = match role {
        "embeddingWorker" => "embedding-worker",
        "denseWorker" => "dense-worker",
        other => other,
    };
    let selector = format!("rectrain.dev/job={name},rectrain.dev/role={role}");
    let pods = jobs.within(&["get", "pods", "--selector", &selector, "--output=name"])?;
    if pods.split_whitespace().count() == replicas as usize { Ok(()) } else { Err(not_yet(pods)) }
}
