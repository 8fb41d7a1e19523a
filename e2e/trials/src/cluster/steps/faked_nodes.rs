//! A full cluster: a hundred or a thousand jobs whose pods run on nodes that KWOK fakes. The
//! objects and controllers are real, and there are no containers. No coordinator answers, so the
//! jobs stay in the phase Starting with all pods ready.

use std::time::{Duration, Instant};

use rectrain_bring_up::fakes;
use rectrain_harness::kubectl::SYSTEM;
use rectrain_harness::manifests::{list, manifest};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::costs::Costs;
use crate::error::unmet;

const NODES: usize = 25;
/// Pods of a job.
const PODS: u64 = 5;
/// Jobs that are applied together.
const BATCH: usize = 100;
/// How long all pods may take. The API server and the controllers share the machine with the
/// operator.
const PATIENCE: Duration = Duration::from_secs(1_800);
/// The most requests per job of a new leader that finds nothing to change.
const MOST_CALLS_TO_TAKE_OVER: f64 = 4.0;
const NODES_PATIENCE: Duration = Duration::from_secs(60);

pub(in crate::cluster) fn hundred(cluster: &TestCluster) -> Result<(), TrialError> {
    with_pods(cluster, 100)
}

/// Takes twenty-five minutes on two cores.
pub(in crate::cluster) fn thousand(cluster: &TestCluster) -> Result<(), TrialError> {
    with_pods(cluster, 1000)
}

fn with_pods(cluster: &TestCluster, jobs: usize) -> Result<(), TrialError> {
    if cluster.skips("faked nodes")? {
        return Ok(());
    }
    let _kwok = fakes::start(&cluster.paths)?;
    let nodes: Vec<Value> = (0..NODES).map(|index| fakes::node(&node_name(index))).collect();
    cluster.jobs.apply(&list(nodes))?;
    let result = until_nodes_are_ready(cluster).map_err(TrialError::from).and_then(|()| fill(cluster, jobs));
    cluster.jobs.within(&["delete", "rectrainingjobs", "--all", "--timeout=1200s"])?;
    // Nodes belong to no namespace, so the namespace's deletion does not delete them.
    let names: Vec<String> = (0..NODES).map(node_name).collect();
    let words: Vec<&str> = ["delete", "nodes"].into_iter().chain(names.iter().map(String::as_str)).collect();
    cluster.jobs.within(&words)?;
    result
}

fn until_nodes_are_ready(cluster: &TestCluster) -> Result<(), HarnessError> {
    let log = cluster.paths.log("kwok");
    eventually(NODES_PATIENCE, &format!("{NODES} faked nodes (see {})", log.display()), || {
        let columns =
            "--output=jsonpath={range .items[*]}{.status.conditions[?(@.type=='Ready')].status}{\"\\n\"}{end}";
        let text = cluster.jobs.within(&["get", "nodes", "--selector=type=fake", columns])?;
        let ready = text.lines().filter(|status| *status == "True").count();
        if ready == NODES { Ok(()) } else { Err(not_yet(format!("{ready} are ready"))) }
    })
}

fn fill(cluster: &TestCluster, jobs: usize) -> Result<(), TrialError> {
    let before = Costs::read(cluster.kubectl())?;
    let started = Instant::now();
    let manifests: Vec<Value> = (0..jobs).map(job).collect();
    for batch in manifests.chunks(BATCH) {
        cluster.jobs.apply(&list(batch.to_vec()))?;
    }
    let applied = started.elapsed();
    until_all_are_ready(cluster, jobs)?;
    let ready = started.elapsed();
    let after = Costs::read(cluster.kubectl())?;
    println!(
        "{jobs} jobs with {} pods: applied in {:.0} s, all pods ready and seen after {:.0} s",
        jobs as u64 * PODS,
        applied.as_secs_f64(),
        ready.as_secs_f64(),
    );
    println!("meanwhile {}", after.since(&before));
    println!("{:.1} calls to the API server a job", (after.calls - before.calls) / jobs as f64);
    lose_the_leader(cluster, jobs)
}

/// Kills the leader. Measures how long the other instance takes to look at every job, and its
/// costs.
fn lose_the_leader(cluster: &TestCluster, jobs: usize) -> Result<(), TrialError> {
    let kubectl = cluster.kubectl();
    let old = kubectl.leader()?;
    kubectl.kill_pod(SYSTEM, &old)?;
    let started = Instant::now();
    eventually(PATIENCE, "another leader that has looked at every job", || {
        let now = kubectl.leader()?;
        if now == old || now.is_empty() {
            return Err(not_yet(format!("the leader is {now:?}")));
        }
        let costs = Costs::read(kubectl)?;
        if costs.reconciles >= jobs as f64 {
            return Ok(());
        }
        Err(not_yet(format!("{} reconciles", costs.reconciles)))
    })?;
    let took = started.elapsed();
    let costs = Costs::read(kubectl)?;
    println!(
        "after the leader was killed another one had looked at all jobs after {:.1} s, with {:.2} calls a job: {}",
        took.as_secs_f64(),
        costs.calls / jobs as f64,
        costs.since(&Costs::default()),
    );
    if costs.calls > MOST_CALLS_TO_TAKE_OVER * jobs as f64 {
        let expected = format!("at most {MOST_CALLS_TO_TAKE_OVER} calls a job, with nothing to change");
        return Err(unmet(expected, format!("{} calls for {jobs} jobs", costs.calls)));
    }
    costs.within_bounds(&Costs::default())
}

fn until_all_are_ready(cluster: &TestCluster, jobs: usize) -> Result<(), HarnessError> {
    eventually(PATIENCE, "the pods of all jobs", || {
        let columns = "--output=jsonpath={range .items[*]}{.status.replicaStatuses}{\"\\n\"}{end}";
        let text = cluster.jobs.within(&["get", "rectrainingjobs", columns])?;
        let ready = text.lines().filter(|statuses| is_ready(statuses)).count();
        if ready == jobs { Ok(()) } else { Err(not_yet(format!("{ready} jobs have all their pods"))) }
    })
}

/// Whether a job's `replicaStatuses` count all of its pods as ready.
fn is_ready(statuses: &str) -> bool {
    let Ok(Value::Object(roles)) = serde_json::from_str::<Value>(statuses) else { return false };
    roles.values().filter_map(|role| role["ready"].as_u64()).sum::<u64>() == PODS
}

fn job(index: usize) -> Value {
    let template = fakes::pod_template();
    let role = json!({"replicas": 1, "template": template});
    let roles = json!({
        "coordinator": {"template": template}, "ps": role, "embeddingWorker": role, "denseWorker": role, "loader": role,
    });
    // The silence of the faked coordinator must not restart the job.
    let patient = json!({"stallSeconds": 86_400});
    manifest(&format!("faked-{index}"), &json!({"roles": roles, "faultTolerance": patient}))
}

fn node_name(index: usize) -> String {
    format!("fake-{index}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_ready_once_all_its_pods_are() {
        let all = json!({
            "coordinator": {"ready": 1, "wanted": 1}, "ps": {"ready": 1}, "embeddingWorker": {"ready": 1},
            "denseWorker": {"ready": 1}, "loader": {"ready": 1},
        });
        assert!(is_ready(&all.to_string()));
        assert!(!is_ready(&all.to_string().replacen("\"ready\":1", "\"ready\":0", 1)));
        assert!(!is_ready(""));
    }
}
