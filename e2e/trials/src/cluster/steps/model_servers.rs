//! Servers of a model while their manifest, their load and their nodes change: a canary, a gate, an
//! autoscaler, and a node that loses its power. A client's requests do not fail meanwhile.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rectrain_bring_up::metrics_server::MetricsServer;
use rectrain_harness::files::write;
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::manifests::{endless, merged, with_checkpoints};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use super::serving::{Answers, ROLLOUT, patch, predicts, rows, server, under_load, until_serving};
use crate::TrialError;
use crate::cluster::support::power::out_of_service;
use crate::cluster::support::{TestCluster, object_store};
use crate::error::unmet;

/// Global steps between two checkpoints.
const EVERY: u64 = 2_000;
/// The longest time between two changes of the model, so that only the manifest changes it.
const NEVER: u32 = 2_592_000;

/// Requests to the servers beside a canary.
const REQUESTS: u64 = 120;
/// The canary's share of the requests. It is one of three servers, and each request reaches one of
/// them by chance. A share outside is more than four standard deviations away.
const SHARES: RangeInclusive<f64> = 0.14..=0.52;

/// The file of held-out rows in the bucket `data`.
const HELD_OUT: &str = "held-out.csv";

/// Rows of a request that keeps a server busy.
const MANY: usize = 4_000;
/// How long the autoscaler may take to add a server: it looks every 15 s at a measurement over 15
/// s, and the server must start.
const GROWS: Duration = Duration::from_secs(240);
/// How long it may take to remove one: it waits five minutes after the load.
const SHRINKS: Duration = Duration::from_secs(540);

/// One of three servers tries another model, and then all take it.
pub(in crate::cluster) fn canary(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "tries-a-canary");
    let (first, request) = start(cluster, name, json!({"replicas": 3}))?;
    let newer = newer_checkpoint(jobs, name, first)?;
    let beside = under_load(jobs, name, &request, || {
        let canary = json!({"step": newer, "percent": 33});
        patch(jobs, name, &json!({"spec": {"version": first, "canary": canary}}))?;
        until_versions(jobs, name, &[(newer, 1), (first, 2)])?;
        share_of(jobs, name, &request, newer)
    })?;
    only(&beside, &[first, newer])?;
    let after = under_load(jobs, name, &request, || {
        patch(jobs, name, &json!({"spec": {"version": newer, "canary": null}}))?;
        Ok(until_versions(jobs, name, &[(newer, 3)])?)
    })?;
    only(&after, &[first, newer])?;
    println!("answers by step: {beside:?} with a canary, and {after:?} while all servers took its model");
    end(jobs, name)
}

/// A gate refuses a newer model, and the earlier one goes on. Without the gate it is taken.
pub(in crate::cluster) fn gate(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "has-a-gate");
    upload_held_out(cluster)?;
    let gate = |least_auc: f64| json!({"rows": [format!("s3://data/{HELD_OUT}")], "minAuc": least_auc});
    let (first, request) = start(cluster, name, json!({"gate": gate(0.0)}))?;
    let newer = newer_checkpoint(jobs, name, first)?;
    let refused = under_load(jobs, name, &request, || {
        patch(jobs, name, &json!({"spec": {"version": newer, "gate": gate(1.0)}}))?;
        let reason = eventually(ROLLOUT, "a server whose gate refuses its model", || refusal(jobs, name, newer))?;
        println!("{reason}");
        Ok(())
    })?;
    only(&refused, &[first])?;
    let taken = under_load(jobs, name, &request, || {
        patch(jobs, name, &json!({"spec": {"gate": null}}))?;
        Ok(until_versions(jobs, name, &[(newer, 2)])?)
    })?;
    only(&taken, &[first, newer])?;
    println!("answers by step: {refused:?} with the gate, and {taken:?} after it");
    end(jobs, name)
}

/// A HorizontalPodAutoscaler adds a server under load, and removes it afterwards.
pub(in crate::cluster) fn load(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("metrics-server")? {
        return Ok(());
    }
    let _measures = MetricsServer::start(&cluster.paths)?;
    let (jobs, name) = (&cluster.jobs, "follows-a-load");
    let scaling = json!({"minReplicas": 1, "maxReplicas": 2, "cpuPercent": 50});
    let requested = json!({"resources": {"requests": {"cpu": "20m"}}});
    let (first, request) = start(cluster, name, json!({"autoscaling": scaling, "template": requested}))?;
    // The servers outlive their job, which would fill the object store.
    jobs.delete(name)?;
    write(&request, rows(MANY).to_string())?;
    let answers = under_load(jobs, name, &request, || Ok(until_servers(jobs, name, 2, GROWS)?))?;
    only(&answers, &[first])?;
    until_servers(jobs, name, 1, SHRINKS)?;
    delete_servers(jobs, name)
}

/// The node of one of two servers loses its power. The other server answers alone, until another
/// one has taken the place of the lost one.
pub(in crate::cluster) fn node(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("the loss of a node")? {
        return Ok(());
    }
    let (jobs, name) = (&cluster.jobs, "loses-a-node");
    let (first, request) = start(cluster, name, json!({"replicas": 2, "template": {"affinity": apart(name)}}))?;
    // The store keeps its objects in memory, so its node has to stay.
    let store = nodes_of(jobs, "app=object-store")?;
    let servers = nodes_of(jobs, &format!("rectrain.dev/model-server={name}"))?;
    let lost = servers.iter().find(|node| !store.contains(node));
    let lost = lost.ok_or_else(|| unmet(format!("a server on another node than {store:?}"), format!("{servers:?}")))?;
    let began = Instant::now();
    let answers = out_of_service(cluster, lost, || {
        let first_answer = || predicts(jobs, name, &request).map_err(not_yet);
        eventually(ROLLOUT, "an answer of the other server", first_answer)?;
        println!("an answer {:.0} s after {lost} lost its power", began.elapsed().as_secs_f64());
        under_load(jobs, name, &request, || Ok(until_versions(jobs, name, &[(first, 2)])?))
    })?;
    only(&answers, &[first])?;
    println!("two servers again {:.0} s after the loss; answers by step: {answers:?}", began.elapsed().as_secs_f64());
    end(jobs, name)
}

/// Servers prefer different nodes. After the loss of a node they have to share one.
fn apart(name: &str) -> Value {
    let term = json!({
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"rectrain.dev/model-server": name}},
    });
    let preferred = json!([{"weight": 100, "podAffinityTerm": term}]);
    json!({"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}})
}

/// The nodes of the pods with a label.
fn nodes_of(jobs: &Jobs, label: &str) -> Result<Vec<String>, HarnessError> {
    let nodes = "--output=jsonpath={range .items[*]}{.spec.nodeName}{\"\\n\"}{end}";
    let printed = jobs.within(&["get", "pods", "--selector", label, nodes])?;
    Ok(printed.lines().map(str::to_owned).collect())
}

/// Starts a job, and servers that stay at its first checkpoint. All of its checkpoints are full, so
/// a step has the name of its checkpoint. Returns the step, and the file of a request.
fn start(cluster: &TestCluster, name: &str, spec: Value) -> Result<(u64, PathBuf), TrialError> {
    let jobs = &cluster.jobs;
    object_store::start(&cluster.paths, NAMESPACE)?;
    object_store::make_bucket(cluster.kubectl(), NAMESPACE)?;
    let full = json!({"checkpoint": {"fullEvery": 1, "keep": 1000}});
    jobs.submit(name, &merged(with_checkpoints(&endless(), name, EVERY), full))?;
    let stays = json!({"model": {"job": name}, "updateEverySeconds": NEVER});
    jobs.apply(&server(name, &merged(stays, spec)))?;
    let first = until_serving(jobs, name, "servers with the first model", |step| step > 0)?;
    let request = cluster.paths.run().join(format!("{name}-request.json"));
    write(&request, rows(1).to_string())?;
    Ok((first, request))
}

fn end(jobs: &Jobs, name: &str) -> Result<(), TrialError> {
    delete_servers(jobs, name)?;
    Ok(jobs.delete(name)?)
}

fn delete_servers(jobs: &Jobs, name: &str) -> Result<(), TrialError> {
    Ok(jobs.within(&["delete", "recmodelserver", name, "--timeout=120s"]).map(drop)?)
}

fn status(jobs: &Jobs, name: &str) -> Result<Value, HarnessError> {
    Ok(jobs.get(&format!("recmodelserver/{name}"))?["status"].take())
}

/// Waits for a checkpoint after the step `first`; returns its step.
fn newer_checkpoint(jobs: &Jobs, name: &str, first: u64) -> Result<u64, HarnessError> {
    eventually(ROLLOUT, "a newer checkpoint", || {
        let status = status(jobs, name)?;
        let step = status["latest"]["step"].as_u64().filter(|step| *step > first);
        step.ok_or_else(|| not_yet(&status["latest"]))
    })
}

/// Waits until the servers have these steps, each with a number of servers that answer. The newest
/// step is first.
fn until_versions(jobs: &Jobs, name: &str, wanted: &[(u64, u32)]) -> Result<(), HarnessError> {
    let wanted = versions(wanted);
    eventually(ROLLOUT, &format!("servers with {wanted}"), || {
        let status = status(jobs, name)?;
        if status["versions"] == wanted && status["phase"] == "Ready" { Ok(()) } else { Err(not_yet(status)) }
    })
}

/// The field `versions` of a status.
fn versions(servers: &[(u64, u32)]) -> Value {
    servers.iter().map(|(step, servers)| json!({"step": step, "replicas": servers, "ready": servers})).collect()
}

/// Waits until there are this many servers, and all answer.
fn until_servers(jobs: &Jobs, name: &str, servers: u32, patience: Duration) -> Result<(), HarnessError> {
    let started = Instant::now();
    eventually(patience, &format!("{servers} servers by an autoscaler"), || {
        let status = status(jobs, name)?;
        let replicas = &status["replicas"];
        let is_there = replicas["wanted"] == servers && replicas["ready"] == servers;
        if is_there { Ok(()) } else { Err(not_yet(replicas)) }
    })?;
    println!("{servers} servers by an autoscaler after {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// Asks for predictions, and checks the canary's share of the answers.
fn share_of(jobs: &Jobs, name: &str, request: &Path, canary: u64) -> Result<(), TrialError> {
    let steps: Result<Vec<u64>, TrialError> = (0..REQUESTS).map(|_| predicts(jobs, name, request)).collect();
    let of_canary = steps?.iter().filter(|step| **step == canary).count();
    let share = of_canary as f64 / REQUESTS as f64;
    println!("the canary has {:.0} % of the answers", 100.0 * share);
    if SHARES.contains(&share) { Ok(()) } else { Err(unmet(format!("a share in {SHARES:?}"), share)) }
}

/// Checks that only models of these steps answered.
fn only(answers: &Answers, steps: &[u64]) -> Result<(), TrialError> {
    match answers.keys().all(|step| steps.contains(step)) {
        true => Ok(()),
        false => Err(unmet(format!("answers of the steps {steps:?}"), format!("{answers:?}"))),
    }
}

/// Uploads rows whose labels follow from none of their features. No model has an AUC of 1 on them.
fn upload_held_out(cluster: &TestCluster) -> Result<(), TrialError> {
    object_store::start(&cluster.paths, NAMESPACE)?;
    let folder = cluster.paths.run();
    write(&folder.join(HELD_OUT), held_out(200))?;
    object_store::upload(cluster.kubectl(), NAMESPACE, &folder, &[HELD_OUT])
}

/// Rows with the columns of the small job. Each row comes twice, with both labels.
fn held_out(rows: usize) -> String {
    let mut text = "label,C1,C2,C3,C4,C5,C6,I1,I2,I3,I4\n".to_owned();
    for row in 0..rows {
        let (id, number) = (row / 2 % 7 + 1, row / 2 % 3);
        let features = [vec![id.to_string(); 6], vec![format!("0.{number}"); 4]].concat().join(",");
        text += &format!("{},{features}\n", row % 2);
    }
    text
}

/// The last words of a server that has ended because its gate refused the model of a step.
fn refusal(jobs: &Jobs, name: &str, step: u64) -> Result<String, HarnessError> {
    let selector = format!("--selector=rectrain.dev/model-server={name},rectrain.dev/step={step}");
    let path = "--output=jsonpath={range .items[*].status.containerStatuses[*]}{.state.terminated.message}\
                {.lastState.terminated.message}{\"\\n\"}{end}";
    let said = jobs.within(&["get", "pods", &selector, path])?;
    let reason = said.lines().find(|line| line.contains("has an AUC of"));
    reason.map(str::to_owned).ok_or_else(|| not_yet(format!("the servers of step {step} said {said:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn held_out_rows_have_both_labels_for_the_same_features() {
        let text = held_out(4);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5);
        let columns = lines[0].split(',').count();
        assert!(lines.iter().all(|line| line.split(',').count() == columns), "{text}");
        assert_eq!(lines[1], "0,1,1,1,1,1,1,0.0,0.0,0.0,0.0");
        assert_eq!((&lines[1][1..], &lines[2][..1]), (&lines[2][1..], "1"));
        assert_ne!(lines[3][1..], lines[1][1..]);
    }

    #[test]
    fn versions_have_the_form_of_a_status() {
        let expected = json!([{"step": 9, "replicas": 1, "ready": 1}, {"step": 4, "replicas": 2, "ready": 2}]);
        assert_eq!(versions(&[(9, 1), (4, 2)]), expected);
    }
}
