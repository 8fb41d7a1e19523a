//! A hundred or a thousand jobs whose pods run on nodes that KWOK fakes: real objects, real controllers, no containers. What the
//! operator costs when a cluster is full. Its coordinators answer nobody, so the jobs stay in the phase Starting, with all pods ready.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::foreign_kubeconfig;
use super::install::{Running, apply, within};
use super::operate::{Costs, NAMESPACE, SYSTEM, kill_pod, leader, manifest};
use super::paths::{Paths, sources};
use super::process::{command, eventually};
use super::tools::{self, KWOK};

const NODES: usize = 25;
/// Pods of a job.
const PODS: u64 = 5;
/// Jobs that are applied at a time.
const AT_A_TIME: usize = 100;
/// All pods of all jobs are made within this time; the API server and its controllers share the machine with the operator.
const PATIENCE: Duration = Duration::from_secs(1_800);
/// Calls to the API server a job of an operator that begins to lead and finds everything as it should be.
const MOST_CALLS_TO_TAKE_OVER: f64 = 4.0;
const NODES_PATIENCE: Duration = Duration::from_secs(60);
/// Addresses that no machine of the cluster has.
const ADDRESSES: &str = "198.19.0.1/16";
/// The annotation by which KWOK knows its nodes, and the taint that keeps other pods away.
const FAKE: &str = "kwok.x-k8s.io/node";

/// A step of `cargo xtask cluster operate`.
pub(super) fn hundred_with_pods(paths: &Paths) -> Result<(), String> {
    with_pods(paths, 100)
}

/// A step of `cargo xtask cluster operate`: twenty-five minutes on two cores.
pub(super) fn thousand_with_pods(paths: &Paths) -> Result<(), String> {
    with_pods(paths, 1000)
}

fn with_pods(paths: &Paths, jobs: usize) -> Result<(), String> {
    if foreign_kubeconfig(paths).is_some() {
        eprintln!("xtask: SKIPPED the nodes that are faked, because the cluster is not of this machine");
        return Ok(());
    }
    tools::build(paths, &[KWOK])?;
    let _kwok = start(paths)?;
    let nodes: Vec<Value> = (0..NODES).map(node).collect();
    apply(paths, NAMESPACE, &list(nodes).to_string())?;
    let result = nodes_ready(paths).and_then(|()| filled(paths, jobs));
    // Nodes outlive a namespace.
    let names: Vec<String> = (0..NODES).map(node_name).collect();
    let words: Vec<&str> = ["delete", "nodes"].into_iter().chain(names.iter().map(String::as_str)).collect();
    within(paths, NAMESPACE, &["delete", "rectrainingjobs", "--all", "--timeout=1200s"])?;
    within(paths, NAMESPACE, &words)?;
    result
}

/// What KWOK has nodes and pods do, of its own module.
const STAGES: [&str; 3] = ["node/fast/node-initialize.yaml", "pod/fast/pod-ready.yaml", "pod/fast/pod-delete.yaml"];

fn start(paths: &Paths) -> Result<Running, String> {
    let log = std::fs::File::create(paths.log("kwok")).map_err(|error| format!("cannot write KWOK's log: {error}"))?;
    // Ended by the kernel if this process is killed.
    let mut kwok = command("setpriv", ["--pdeathsig=KILL", "--"]);
    kwok.arg(paths.program("kwok")).arg("--manage-all-nodes=false");
    let stages = tools::sources_of(&KWOK)?.join("kustomize/stage");
    kwok.args(STAGES.map(|stage| format!("--config={}", stages.join(stage).display())));
    kwok.arg(format!("--config={}", sources().join("config/kwok-heartbeat.yaml").display()));
    kwok.arg(format!("--kubeconfig={}", paths.kubeconfig().display()));
    kwok.arg(format!("--manage-nodes-with-annotation-selector={FAKE}=fake"));
    kwok.arg(format!("--cidr={ADDRESSES}"));
    kwok.arg("--node-lease-duration-seconds=0");
    kwok.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    Ok(Running(kwok.spawn().map_err(|error| format!("cannot run KWOK: {error}"))?))
}

fn nodes_ready(paths: &Paths) -> Result<(), String> {
    eventually(NODES_PATIENCE, "the nodes that KWOK fakes", || {
        let columns =
            "--output=jsonpath={range .items[*]}{.status.conditions[?(@.type=='Ready')].status}{\"\\n\"}{end}";
        let text = within(paths, NAMESPACE, &["get", "nodes", "--selector=type=fake", columns])?;
        let ready = text.lines().filter(|status| *status == "True").count();
        if ready == NODES { Ok(()) } else { Err(format!("{ready} are ready: see {}", paths.log("kwok").display())) }
    })
}

fn filled(paths: &Paths, jobs: usize) -> Result<(), String> {
    let before = Costs::of(paths)?;
    let started = Instant::now();
    let manifests: Vec<Value> = (0..jobs).map(job).collect();
    for some in manifests.chunks(AT_A_TIME) {
        apply(paths, NAMESPACE, &list(some.to_vec()).to_string())?;
    }
    let applied = started.elapsed();
    all_ready(paths, jobs)?;
    let ready = started.elapsed();
    let after = Costs::of(paths)?;
    println!(
        "{jobs} jobs with {} pods: applied in {:.0} s, all pods ready and seen after {:.0} s",
        jobs as u64 * PODS,
        applied.as_secs_f64(),
        ready.as_secs_f64(),
    );
    println!("meanwhile {}", after.since(&before));
    println!("{:.1} calls to the API server a job", (after.calls - before.calls) / jobs as f64);
    restarted(paths, jobs)
}

/// The leader is killed: how long until the other one has looked at every job, and what that costs.
fn restarted(paths: &Paths, jobs: usize) -> Result<(), String> {
    let old = leader(paths)?;
    kill_pod(paths, SYSTEM, &old)?;
    let started = Instant::now();
    eventually(PATIENCE, "another leader that has looked at every job", || {
        let now = leader(paths)?;
        if now == old || now.is_empty() {
            return Err(format!("the leader is {now:?}"));
        }
        let looked = Costs::of(paths)?;
        if looked.reconciles >= jobs as f64 { Ok(()) } else { Err(format!("{} reconciles", looked.reconciles)) }
    })?;
    let took = started.elapsed();
    let costs = Costs::of(paths)?;
    println!(
        "after the leader was killed another one had looked at all jobs after {:.1} s, with {:.2} calls a job: {}",
        took.as_secs_f64(),
        costs.calls / jobs as f64,
        costs.since(&Costs::default()),
    );
    if costs.calls > MOST_CALLS_TO_TAKE_OVER * jobs as f64 {
        return Err(format!("more than {MOST_CALLS_TO_TAKE_OVER} calls a job, though nothing had to be made"));
    }
    costs.within_bounds(&Costs::default())
}

fn all_ready(paths: &Paths, jobs: usize) -> Result<(), String> {
    eventually(PATIENCE, "the pods of all jobs", || {
        let columns = "--output=jsonpath={range .items[*]}{.status.replicaStatuses}{\"\\n\"}{end}";
        let text = within(paths, NAMESPACE, &["get", "rectrainingjobs", columns])?;
        let ready = text.lines().filter(|statuses| is_ready(statuses)).count();
        if ready == jobs { Ok(()) } else { Err(format!("{ready} jobs have all their pods")) }
    })
}

/// Whether a job's status counts all of its pods as ready.
fn is_ready(statuses: &str) -> bool {
    let Ok(Value::Object(roles)) = serde_json::from_str::<Value>(statuses) else { return false };
    roles.values().filter_map(|role| role["ready"].as_u64()).sum::<u64>() == PODS
}

fn job(index: usize) -> Value {
    let template = json!({
        "nodeSelector": {"type": "fake"},
        "tolerations": [{"key": FAKE, "operator": "Exists"}],
    });
    let role = json!({"replicas": 1, "template": template});
    let roles = json!({
        "coordinator": {"template": template}, "ps": role, "embeddingWorker": role, "denseWorker": role, "loader": role,
    });
    // Nobody answers for as long as the trial takes, which is no reason to begin anew.
    let patient = json!({"stallSeconds": 86_400});
    manifest(&format!("faked-{index}"), &json!({"roles": roles, "faultTolerance": patient}))
}

fn node_name(index: usize) -> String {
    format!("fake-{index}")
}

fn node(index: usize) -> Value {
    let name = node_name(index);
    let room = json!({"cpu": "256", "memory": "2Ti", "pods": "1000", "ephemeral-storage": "2Ti"});
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {FAKE: "fake"},
            "labels": {"type": "fake", "kubernetes.io/hostname": name},
        },
        "spec": {"taints": [{"key": FAKE, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    })
}

fn list(items: Vec<Value>) -> Value {
    json!({"apiVersion": "v1", "kind": "List", "items": items})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_ready_with_all_its_pods_and_not_before() {
        let all = json!({
            "coordinator": {"ready": 1, "wanted": 1}, "ps": {"ready": 1}, "embeddingWorker": {"ready": 1},
            "denseWorker": {"ready": 1}, "loader": {"ready": 1},
        });
        assert!(is_ready(&all.to_string()));
        assert!(!is_ready(&all.to_string().replacen("\"ready\":1", "\"ready\":0", 1)));
        assert!(!is_ready(""));
    }
}
