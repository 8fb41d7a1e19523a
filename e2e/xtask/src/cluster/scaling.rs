//! Parameter servers that come and go under a job that trains: because its manifest is changed, and because the operator decides so.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::install::within;
use super::operate::{
    NAMESPACE, delete_job, endless, get, manifest, merged, outside, patch, status, submit, until_phase,
};
use super::paths::Paths;
use super::process::eventually;

/// New pods start, and slots move, within this time.
const MOVES: Duration = Duration::from_secs(120);
/// A table that grows into its limit is noticed, decided on and spread within this time.
const DECIDES: Duration = Duration::from_secs(240);

pub(super) fn scales(paths: &Paths) -> Result<(), String> {
    by_manifest(paths)?;
    out_by_decision(paths)?;
    in_by_decision(paths)
}

/// One server, three, two: the same model to the bit as without.
fn by_manifest(paths: &Paths) -> Result<(), String> {
    let name = "scaled";
    let changes = json!({
        "data": {"synthetic": {"rows": 2_000_000, "vocabulary": 100_000}},
        "training": {"globalBatchSize": 2_000},
        "roles": {"ps": {"replicas": 1}, "embeddingWorker": {"replicas": 1}},
    });
    let here = outside(&manifest(name, &changes))?;
    submit(paths, name, &changes)?;
    until_phase(paths, name, "Training")?;
    for servers in [3, 2] {
        patch(paths, name, &json!({"spec": {"roles": {"ps": {"replicas": servers}}}}))?;
        let step = status(paths, name)?["step"].as_u64().unwrap_or(0);
        let started = Instant::now();
        let after = eventually(MOVES, &format!("{servers} parameter servers of {name}"), || {
            is_on(&status(paths, name)?, servers).and_then(|after| has_pods(paths, name, servers).map(|()| after))
        })?;
        let steps = after["step"].as_u64().unwrap_or(0).saturating_sub(step);
        println!("{servers} servers after {:.1} s and {steps} steps", started.elapsed().as_secs_f64());
        if after["phase"] != "Training" {
            return Err(format!("the job does not train any more but is {}", after["phase"]));
        }
    }
    let job = until_phase(paths, name, "Complete")?;
    let status = &job["status"];
    let (digest, expected) = (&status["summary"]["parametersSha256"], &here["parametersSha256"]);
    if digest != expected || status["restarts"] != 0 || status["attempt"]["number"] != 1 {
        return Err(format!("digest {digest}, without moves {expected}: {}", status["attempt"]));
    }
    delete_job(paths, name)
}

/// A server whose table grows gets others beside it before its limit is reached.
fn out_by_decision(paths: &Paths) -> Result<(), String> {
    let name = "grows";
    let changes = json!({
        "data": {"synthetic": {"vocabulary": 100_000_000}},
        "training": {"globalBatchSize": 2_000},
        // A worker so slow that the operator has the time that it needs.
        "roles": {"ps": with_limits(&json!({"memory": "1Gi"})), "denseWorker": with_limits(&json!({"cpu": "150m"}))},
        "autoscaling": {"mode": "apply", "upWindowSeconds": 15, "coolDownSeconds": 30, "ps": {"max": 2}},
    });
    submit(paths, name, &merged(endless(), changes))?;
    until_phase(paths, name, "Training")?;
    let started = Instant::now();
    let after = eventually(DECIDES, "a second parameter server", || is_on(&status(paths, name)?, 2))?;
    println!("2 servers after {:.0} s: {}", started.elapsed().as_secs_f64(), after["decisions"][0]["reason"]);
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

/// Two servers that have little to do become one.
fn in_by_decision(paths: &Paths) -> Result<(), String> {
    let name = "shrinks";
    let changes = json!({
        "roles": {"ps": {"replicas": 2}, "denseWorker": with_limits(&json!({"cpu": "150m"}))},
        "autoscaling": {"mode": "apply", "upWindowSeconds": 15, "downWindowSeconds": 15, "ps": {"min": 1}},
    });
    submit(paths, name, &merged(endless(), changes))?;
    until_phase(paths, name, "Training")?;
    let started = Instant::now();
    let after = eventually(DECIDES, "one parameter server", || {
        is_on(&status(paths, name)?, 1).and_then(|after| has_pods(paths, name, 1).map(|()| after))
    })?;
    println!("1 server after {:.0} s: {}", started.elapsed().as_secs_f64(), after["decisions"][0]["reason"]);
    if after["restarts"] != 0 || after["attempt"]["number"] != 1 || after["phase"] != "Training" {
        return Err(format!("{after}"));
    }
    delete_job(paths, name)
}

/// One replica whose container has these limits.
fn with_limits(limits: &Value) -> Value {
    json!({"replicas": 1, "template": {"resources": {"limits": limits}}})
}

/// The status, if the rows are on so many servers and no other is needed.
fn is_on(status: &Value, servers: u32) -> Result<Value, String> {
    let now = &status["attempt"]["servers"];
    if now["present"] == servers && now["needed"] == servers {
        return Ok(status.clone());
    }
    Err(format!("{now}, {}, {}", status["phase"], status["conditions"]))
}

fn has_pods(paths: &Paths, name: &str, servers: u32) -> Result<(), String> {
    let selector = format!("rectrain.dev/job={name},rectrain.dev/role=ps");
    let pods = within(paths, NAMESPACE, &["get", "pods", "--selector", &selector, "--output=name"])?;
    if pods.split_whitespace().count() == servers as usize { Ok(()) } else { Err(pods) }
}
