//! Members that come and go under a job that trains: because its manifest is changed, and because the operator decides so.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::install::within;
use super::operate::{
    NAMESPACE, SYSTEM, delete_job, endless, get, leader, manifest, merged, metrics, outside, patch, status, submit,
    until_phase,
};
use super::paths::{Paths, write};
use super::process::{command, eventually, output};

/// New pods start, and slots move, within this time.
const MOVES: Duration = Duration::from_secs(120);
/// Something that is only to be looked up is there within this time.
const SHORT: Duration = Duration::from_secs(30);
/// Between two decisions about a role, in jobs whose decisions are to settle.
const COOL_DOWN: Duration = Duration::from_secs(30);
/// A table that grows into its limit is noticed, decided on and spread within this time.
const DECIDES: Duration = Duration::from_secs(240);

pub(super) fn scales(paths: &Paths) -> Result<(), String> {
    by_manifest(paths)?;
    dense_workers_by_manifest(paths)?;
    in_by_decision(paths)
}

/// A step of `cargo xtask cluster operate`.
pub(super) fn grows(paths: &Paths) -> Result<(), String> {
    out_by_decision(paths)?;
    memory_by_decision(paths)
}

/// A step of `cargo xtask cluster operate`.
pub(super) fn settles(paths: &Paths) -> Result<(), String> {
    hot_by_decision(paths)?;
    queues_by_decision(paths)
}

/// Other servers, embedding workers and loaders: the same model to the bit as without.
fn by_manifest(paths: &Paths) -> Result<(), String> {
    let name = "scaled";
    let changes = json!({
        "data": {"synthetic": {"rows": 4_000_000, "vocabulary": 100_000}},
        "training": {"globalBatchSize": 2_000},
        "roles": {"ps": {"replicas": 1}, "embeddingWorker": {"replicas": 1}, "loader": {"replicas": 1}},
    });
    let here = outside(&manifest(name, &changes))?;
    submit(paths, name, &changes)?;
    until_phase(paths, name, "Training")?;
    for (role, replicas) in [("ps", 3), ("embeddingWorker", 2), ("ps", 2), ("loader", 2), ("embeddingWorker", 1)] {
        change(paths, name, role, replicas)?;
    }
    let job = until_phase(paths, name, "Complete")?;
    let status = &job["status"];
    let (digest, expected) = (&status["summary"]["parametersSha256"], &here["parametersSha256"]);
    if digest != expected || status["restarts"] != 0 || status["attempt"]["number"] != 1 {
        return Err(format!("digest {digest}, without moves {expected}: {}", status["attempt"]));
    }
    delete_job(paths, name)
}

/// One dense worker, two, one: every row is trained once.
fn dense_workers_by_manifest(paths: &Paths) -> Result<(), String> {
    let name = "shared";
    let changes = json!({
        "data": {"synthetic": {"rows": 2_000_000, "vocabulary": 100_000}},
        "training": {"globalBatchSize": 2_000, "localBatchSize": 500},
        "roles": {"denseWorker": {"replicas": 1}},
    });
    let here = outside(&manifest(name, &changes))?;
    submit(paths, name, &changes)?;
    until_phase(paths, name, "Training")?;
    for replicas in [2, 1] {
        change(paths, name, "denseWorker", replicas)?;
    }
    let job = until_phase(paths, name, "Complete")?;
    let (summary, restarts) = (&job["status"]["summary"], &job["status"]["restarts"]);
    let auc = |summary: &Value| summary["auc"].as_f64().or(summary["test"]["auc"].as_f64()).unwrap_or(0.0);
    let difference = (auc(summary) - auc(&here)).abs();
    println!("AUC {} with other dense workers, {difference:.5} from that with one", summary["auc"]);
    if summary["samples"] != here["samples"]
        || *restarts != 0
        || job["status"]["attempt"]["number"] != 1
        || difference > 0.002
    {
        return Err(format!("{summary}, with one dense worker {here}: {}", job["status"]["attempt"]));
    }
    delete_job(paths, name)
}

/// Asks for so many of a role in the manifest, and waits until they are there and nobody else is.
fn change(paths: &Paths, name: &str, role: &str, replicas: u32) -> Result<(), String> {
    patch(paths, name, &json!({"spec": {"roles": {role: {"replicas": replicas}}}}))?;
    let step = status(paths, name)?["step"].as_u64().unwrap_or(0);
    let started = Instant::now();
    let after = eventually(MOVES, &format!("{replicas} of {role} of {name}"), || {
        let after = is_at(&status(paths, name)?, role, replicas)?;
        has_pods(paths, name, role, replicas).map(|()| after)
    })?;
    let steps = after["step"].as_u64().unwrap_or(0).saturating_sub(step);
    println!("{role}: {replicas} after {:.1} s and {steps} steps", started.elapsed().as_secs_f64());
    if after["phase"] != "Training" {
        return Err(format!("the job does not train any more but is {}", after["phase"]));
    }
    Ok(())
}

/// A server whose table grows gets others beside it before its limit is reached.
fn out_by_decision(paths: &Paths) -> Result<(), String> {
    let name = "grows";
    let changes = json!({
        "data": {"synthetic": {"vocabulary": 100_000_000}},
        "training": {"globalBatchSize": 2_000},
        // A worker so slow that the operator has the time that it needs.
        "roles": {"ps": with_limits(&json!({"memory": "2Gi"})), "denseWorker": with_limits(&json!({"cpu": "100m"}))},
        "autoscaling": {"mode": "apply", "upWindowSeconds": 15, "coolDownSeconds": 30, "ps": {"max": 2}},
    });
    submit(paths, name, &merged(endless(), changes))?;
    until_phase(paths, name, "Training")?;
    let started = Instant::now();
    let after = eventually(DECIDES, "a second parameter server", || is_at(&status(paths, name)?, "ps", 2))?;
    println!("2 servers after {:.0} s: {}", started.elapsed().as_secs_f64(), reason(&after, "ps"));
    // The page of the job tells why.
    let page = format!("/api/v1/namespaces/{NAMESPACE}/pods/{name}-coordinator-0:9090/proxy/job.json");
    let page: Value = serde_json::from_str(&within(paths, NAMESPACE, &["get", "--raw", &page])?)
        .map_err(|error| error.to_string())?;
    let is_told = |logged: &Value| logged["event"]["event"] == "scaling" && logged["event"]["reason"].is_string();
    if !page["events"].as_array().is_some_and(|events| events.iter().any(is_told)) {
        return Err(format!("the page does not say why: {}", page["events"]));
    }
    let spec = get(paths, &format!("rectrainingjob/{name}"))?["spec"]["roles"]["ps"]["replicas"].clone();
    if spec != 1 || after["restarts"] != 0 || after["attempt"]["number"] != 1 {
        return Err(format!("the manifest says {spec}, and the status {after}"));
    }
    delete_job(paths, name)
}

/// A server that was killed for its memory has more of it when the job begins again, as often as it takes.
fn memory_by_decision(paths: &Paths) -> Result<(), String> {
    let name = "raised";
    let given: u64 = 256 << 20;
    let changes = json!({
        "data": {"synthetic": {"rows": 1_500_000, "vocabulary": 1_000_000}},
        "training": {"globalBatchSize": 2_000},
        "roles": {"ps": with_limits(&json!({"memory": given.to_string()}))},
        "autoscaling": {"mode": "apply", "ps": {"max": 1, "maxMemoryGib": 1}},
    });
    submit(paths, name, &changes)?;
    let job = until_phase(paths, name, "Complete")?;
    let (attempt, restarts) = (&job["status"]["attempt"], &job["status"]["restarts"]);
    let raised = attempt["psMemoryBytes"].as_u64().unwrap_or(0);
    println!("complete with {} MiB after {restarts} kills: {}", raised >> 20, reason(&job["status"], "ps"));
    let set = get(paths, &format!("statefulset/{name}-ps"))?;
    let limit = set["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"].as_str();
    if raised <= given || attempt["number"].as_u64() < Some(2) || limit != Some(raised.to_string().as_str()) {
        return Err(format!("the limit is {limit:?} in {attempt}"));
    }
    delete_job(paths, name)
}

/// Two servers with more look-ups than they have time for get others beside them, and how many there are settles. The ids are as skewed as those
/// of clicks; a loader with a fifth of a core says how many rows there are a second.
fn hot_by_decision(paths: &Paths) -> Result<(), String> {
    let name = "hot";
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
    submit(paths, name, &merged(endless(), changes))?;
    until_phase(paths, name, "Training")?;
    let before = eventually(SHORT, "a speed", || {
        let status = status(paths, name)?;
        status["samplesPerSecond"].as_u64().filter(|now| *now > 0).ok_or_else(|| status["phase"].to_string())
    })?;
    let first = first_decision(paths, name, "ps")?;
    let after = settled(paths, name, "ps", first)?;
    let servers = &after["attempt"]["replicas"]["ps"]["present"];
    println!("{servers} servers: {} samples/s, {before} with two", after["samplesPerSecond"]);
    if servers.as_u64() <= Some(2) || after["restarts"] != 0 || after["attempt"]["number"] != 1 {
        return Err(format!("{after}"));
    }
    is_decided_again(paths, name)?;
    delete_job(paths, name)
}

/// A step of `cargo xtask cluster operate`: one server with more look-ups than it has time for gets another beside it; when three of
/// four dense workers go the load falls, and so does the number of servers.
pub(super) fn falls_back(paths: &Paths) -> Result<(), String> {
    let name = "back";
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
    submit(paths, name, &merged(endless(), changes))?;
    until_phase(paths, name, "Training")?;
    let first = first_decision(paths, name, "ps")?;
    let after = settled(paths, name, "ps", first)?;
    let servers = &after["attempt"]["replicas"]["ps"]["present"];
    println!("{servers} servers: {} samples/s", after["samplesPerSecond"]);
    change(paths, name, "denseWorker", 1)?;
    let fallen = Instant::now();
    let fewer = eventually(DECIDES, "one server after the load has fallen", || {
        is_at(&status(paths, name)?, "ps", 1).map(|_| Instant::now())
    })?;
    println!("one server {:.0} s after the load had fallen", (fewer - fallen).as_secs_f64());
    let last = settled(paths, name, "ps", fewer)?;
    println!("one server: {} samples/s", last["samplesPerSecond"]);
    let is_as_before = servers.as_u64() > Some(1) && is_at(&last, "ps", 1).is_ok() && last["restarts"] == 0;
    if !is_as_before || last["attempt"]["number"] != 1 {
        return Err(format!("{last}"));
    }
    delete_job(paths, name)
}

/// A step of `cargo xtask cluster operate`: three servers, no more of which are allowed, that look up few keys in each batch and those
/// unevenly have their slots spread anew, and the model is that of the job left alone.
pub(super) fn evens_out(paths: &Paths) -> Result<(), String> {
    let name = "uneven";
    let servers = several_with_limits(3, &json!({"cpu": "100m"}));
    let changes = json!({
        "model": {"hidden": [8], "embeddingDim": 64},
        "features": {"sparse": [{"name": "C{1..10}"}]},
        "data": {"synthetic": {"rows": 2_000_000, "vocabulary": 2}},
        "training": {"globalBatchSize": 50},
        "roles": {"ps": servers, "embeddingWorker": {"replicas": 1}, "denseWorker": {"replicas": 1}},
    });
    let here = outside(&manifest(name, &changes))?;
    let decided_on = json!({"autoscaling": {
        "mode": "apply", "upWindowSeconds": 15, "coolDownSeconds": COOL_DOWN.as_secs(),
        "ps": {"max": 3, "busyTarget": 0.1}, "denseWorker": {"scaler": "external"}, "embeddingWorker": {"scaler": "external"},
    }});
    submit(paths, name, &merged(changes, decided_on))?;
    until_phase(paths, name, "Training")?;
    let before = unevenness(paths, name, 3)?;
    let first = first_decision(paths, name, "ps")?;
    eventually(SHORT, "slots that have moved", || {
        let page = metrics(paths, NAMESPACE, &format!("{name}-coordinator-0"), 9090)?;
        if page.lines().any(|line| line.starts_with("rectrain_coordinator_migrations_total") && line.ends_with(" 1")) {
            return Ok(());
        }
        Err("none has".to_owned())
    })?;
    let after = unevenness(paths, name, 3)?;
    println!("the server with the most look-ups had {before:.2} times the mean, and has {after:.2}");
    let job = until_phase(paths, name, "Complete")?;
    let seconds = first.elapsed().as_secs_f64();
    println!("complete {seconds:.0} s after that was decided, once: {}", reason(&job["status"], "ps"));
    let (digest, expected) = (&job["status"]["summary"]["parametersSha256"], &here["parametersSha256"]);
    let is_spread = decided(&job["status"], "ps") == ["\"3\" -> \"3\""] && before > 1.2 && after <= 1.1;
    if !is_spread || digest != expected || job["status"]["restarts"] != 0 {
        return Err(format!("digest {digest}, left alone {expected}: {}", job["status"]));
    }
    delete_job(paths, name)
}

/// The most rows that one of the job's servers looked up over their mean, measured for some seconds.
fn unevenness(paths: &Paths, name: &str, servers: u32) -> Result<f64, String> {
    let looked_up = || {
        let of = |index| {
            let page = metrics(paths, NAMESPACE, &format!("{name}-ps-{index}"), 9090)?;
            let value = |line: &str| line.rsplit_once(' ')?.1.parse::<f64>().ok();
            let found = page.lines().filter(|line| line.starts_with("rectrain_ps_found_rows_total"));
            Ok::<f64, String>(found.filter_map(value).sum())
        };
        (0..servers).map(of).collect::<Result<Vec<f64>, String>>()
    };
    let before = looked_up()?;
    std::thread::sleep(Duration::from_secs(8));
    let rows: Vec<f64> = looked_up()?.iter().zip(&before).map(|(after, before)| after - before).collect();
    Ok(rows.iter().copied().fold(0.0, f64::max) * f64::from(servers) / rows.iter().sum::<f64>())
}

/// What the operator has recorded of the job is decided again as it was.
fn is_decided_again(paths: &Paths, name: &str) -> Result<(), String> {
    let of_leader = format!("/api/v1/namespaces/{SYSTEM}/pods/{}:8080/proxy", leader(paths)?);
    let trace = within(paths, SYSTEM, &["get", "--raw", &format!("{of_leader}/traces/{NAMESPACE}/{name}")])?;
    let file = paths.run().join("trace.jsonl");
    write(&file, trace)?;
    let replayed = output(command(crate::built("rectrain")?, ["policy", "replay", "--json"]).arg(&file))?;
    let lines: Vec<Value> = replayed.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    println!("{} recorded decisions are made again", lines.len());
    if lines.is_empty() || lines.iter().any(|line| line["agrees"] != true) {
        return Err(format!("what was recorded is decided otherwise: {replayed}"));
    }
    Ok(())
}

/// The decisions about a role, oldest first.
fn decisions<'a>(status: &'a Value, role: &str) -> impl DoubleEndedIterator<Item = &'a Value> {
    let all = status["decisions"].as_array().into_iter().flatten();
    all.filter(move |decision| decision["subject"] == role)
}

/// What was decided about a role, oldest first.
fn decided(status: &Value, role: &str) -> Vec<String> {
    decisions(status, role).map(|decision| format!("{} -> {}", decision["from"], decision["to"])).collect()
}

/// Waits for the first decision about a role.
fn first_decision(paths: &Paths, name: &str, role: &str) -> Result<Instant, String> {
    let started = Instant::now();
    eventually(DECIDES, &format!("a decision about {role} of {name}"), || {
        let status = status(paths, name)?;
        if decided(&status, role).is_empty() { Err(status["phase"].to_string()) } else { Ok(()) }
    })?;
    println!("first decision about {role} after {:.0} s", started.elapsed().as_secs_f64());
    Ok(Instant::now())
}

/// The status once the number of a role has settled: within three cool-downs of the first decision about it, after which one more passes
/// with no other.
fn settled(paths: &Paths, name: &str, role: &str, first: Instant) -> Result<Value, String> {
    std::thread::sleep((first + 3 * COOL_DOWN).saturating_duration_since(Instant::now()));
    let decisions = decided(&status(paths, name)?, role);
    std::thread::sleep(COOL_DOWN);
    let after = status(paths, name)?;
    println!("{role}: {}: {}", decisions.join(", "), reason(&after, role));
    let replicas = &after["attempt"]["replicas"][role];
    if decided(&after, role) != decisions || replicas["present"] != replicas["wanted"] {
        return Err(format!("{role} is not settled after three cool-downs: {}, {replicas}", after["decisions"]));
    }
    Ok(after)
}

/// Embedding workers in which batches wait get others beside them, and training is the faster for it.
fn queues_by_decision(paths: &Paths) -> Result<(), String> {
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
    submit(paths, name, &merged(endless(), changes))?;
    until_phase(paths, name, "Training")?;
    let started = Instant::now();
    let mut alone = 0;
    let mut first = None;
    let after = eventually(DECIDES, "a second embedding worker", || {
        let status = status(paths, name)?;
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
        let status = status(paths, name)?;
        faster(&status).ok_or_else(|| format!("{} samples/s now, {alone} with one", status["samplesPerSecond"]))
    })?;
    println!("{now} samples/s with them, {alone} with one");
    let after = settled(paths, name, "embeddingWorker", first.unwrap_or(started))?;
    if after["restarts"] != 0 || after["attempt"]["number"] != 1 {
        return Err(format!("{after}"));
    }
    delete_job(paths, name)
}

/// Two servers and two embedding workers that have little to do become one each.
fn in_by_decision(paths: &Paths) -> Result<(), String> {
    let name = "shrinks";
    let changes = json!({
        "roles": {
            "ps": {"replicas": 2}, "embeddingWorker": {"replicas": 2}, "denseWorker": with_limits(&json!({"cpu": "150m"})),
        },
        "autoscaling": {
            "mode": "apply", "upWindowSeconds": 15, "downWindowSeconds": 15, "ps": {"min": 1}, "embeddingWorker": {"min": 1},
        },
    });
    submit(paths, name, &merged(endless(), changes))?;
    until_phase(paths, name, "Training")?;
    let started = Instant::now();
    let mut after = Value::Null;
    for role in ["ps", "embeddingWorker"] {
        after = eventually(DECIDES, &format!("one of {role}"), || {
            let after = is_at(&status(paths, name)?, role, 1)?;
            has_pods(paths, name, role, 1).map(|()| after)
        })?;
        println!("{role}: 1 after {:.0} s: {}", started.elapsed().as_secs_f64(), reason(&after, role));
    }
    if after["restarts"] != 0 || after["attempt"]["number"] != 1 || after["phase"] != "Training" {
        return Err(format!("{after}"));
    }
    delete_job(paths, name)
}

/// One replica whose container has these limits.
pub(super) fn with_limits(limits: &Value) -> Value {
    several_with_limits(1, limits)
}

/// As [`with_limits`], so many of them.
fn several_with_limits(replicas: u32, limits: &Value) -> Value {
    json!({"replicas": replicas, "template": {"resources": {"limits": limits}}})
}

/// Why there are as many of a role as there are.
fn reason(status: &Value, role: &str) -> String {
    decisions(status, role).next_back().map_or_else(String::new, |decision| decision["reason"].to_string())
}

/// The status, if so many of a role take part and no other is needed.
fn is_at(status: &Value, role: &str, replicas: u32) -> Result<Value, String> {
    let now = &status["attempt"]["replicas"][role];
    if now["present"] == replicas && now["needed"] == replicas {
        return Ok(status.clone());
    }
    Err(format!("{now}, {}, {}", status["phase"], status["conditions"]))
}

fn has_pods(paths: &Paths, name: &str, role: &str, replicas: u32) -> Result<(), String> {
    let role = match role {
        "embeddingWorker" => "embedding-worker",
        "denseWorker" => "dense-worker",
        other => other,
    };
    let selector = format!("rectrain.dev/job={name},rectrain.dev/role={role}");
    let pods = within(paths, NAMESPACE, &["get", "pods", "--selector", &selector, "--output=name"])?;
    if pods.split_whitespace().count() == replicas as usize { Ok(()) } else { Err(pods) }
}
