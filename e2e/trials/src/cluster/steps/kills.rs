//! A job survives the death of its pods and of a node.

use std::time::{Duration, Instant};

use rectrain_harness::jobs::Jobs;
use rectrain_harness::manifests::manifest;
use rectrain_harness::rectrain::train_outside;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::outcome::same_rows;
use crate::cluster::support::power::without_power;
use crate::error::unmet;

/// How long a job may take to train again after a kill.
const RECOVERY: Duration = Duration::from_secs(180);

/// Kills a pod of each role in turn. Training continues each time: without a restart, or from the
/// beginning if the pod had the only copy of rows or of the ledger.
pub(in crate::cluster) fn survives(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "killed");
    jobs.submit(name, &json!({"data": {"synthetic": {"rows": 4_000_000}}, "training": {"mode": "hybrid"}}))?;
    jobs.until_phase(name, "Training")?;
    for role in ["loader", "embedding-worker", "dense-worker", "ps", "coordinator"] {
        let killed = Instant::now();
        let restarts = kill_and_wait(jobs, name, role)?;
        let seconds = killed.elapsed().as_secs_f64();
        println!("{role} killed: trains again after {seconds:.0} s, {restarts} restarts so far");
    }
    println!("phases: {}", jobs.phases(name)?.join(", "));
    let job = jobs.until_phase(name, "Complete")?;
    match job["status"]["restarts"].as_u64() {
        Some(1) => Ok(jobs.delete(name)?),
        other => Err(unmet("one restart in the status, for the parameter server", format!("{other:?}"))),
    }
}

/// Kills the first pod of a role and waits until the job trains with another one; returns the
/// restarts so far.
fn kill_and_wait(jobs: &Jobs, name: &str, role: &str) -> Result<Value, HarnessError> {
    let pod = format!("{name}-{role}-0");
    let uid = jobs.pods(name)?.get(&pod).cloned();
    let before = jobs.status(name)?["restarts"].as_u64().unwrap_or(0);
    // Its rows are lost with the pod. A coordinator recovers from copies of its journal.
    let ends_the_attempt = role == "ps";
    jobs.kill_pod(&pod)?;
    let mut at = None;
    eventually(RECOVERY, &format!("steps of {name} after {role} was killed"), || {
        let status = jobs.status(name)?;
        let is_another = jobs.pods(name)?.get(&pod).is_some_and(|now| Some(now) != uid.as_ref());
        let step = status["step"].as_u64().unwrap_or(0);
        let is_noticed = !ends_the_attempt || status["restarts"].as_u64().unwrap_or(0) > before;
        match at {
            None if is_another && is_noticed && status["phase"] == "Training" => at = Some(step),
            Some(at) if step > at => return Ok(status["restarts"].clone()),
            _ => {}
        }
        Err(not_yet(format!("{} at step {step}", status["phase"])))
    })
}

/// A node loses its power, perhaps with the operator on it, and no administrator reacts. The job
/// trains the lost rows again: every row counts once in the model.
pub(in crate::cluster) fn outlives_a_node(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("the loss of a node")? {
        return Ok(());
    }
    let (jobs, name) = (&cluster.jobs, "outlived");
    let hybrid = json!({"data": {"synthetic": {"rows": 400_000}}, "training": {"mode": "hybrid"}});
    let undisturbed = train_outside(&manifest(name, &hybrid))?;
    jobs.submit(name, &hybrid)?;
    let step = jobs.until_step_after(name, 0)?;
    let node = jobs.node_of(&format!("{name}-ps-1"))?;
    let started = Instant::now();
    let job = without_power(cluster, &node, || Ok(jobs.until_phase(name, "Complete")?))?;
    let seconds = started.elapsed().as_secs_f64();
    println!("complete {seconds:.0} s after the node was lost, near step {step}: {}", job["status"]["attempt"]);
    match job["status"]["restarts"].as_u64() {
        Some(restarts) if restarts >= 1 => same_rows(jobs, name, &undisturbed),
        other => Err(unmet("at least 1 restart in the status", format!("{other:?}"))),
    }
}
