//! A quota that admits no more pods while a job trains.

use std::time::Duration;

use rectrain_harness::jobs::Jobs;
use rectrain_harness::manifests::{endless, merged};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::error::unmet;

const JOB: &str = "short";
const QUOTA: &str = "no-more-pods";
/// How long the controller of StatefulSets may take to try again, and a pod to join.
const RETRIED: Duration = Duration::from_secs(240);
/// Longer than `stallSeconds` of the job.
const STALLED: Duration = Duration::from_secs(60);

/// A refused joiner does not disturb training, and can be given up. A refused replacement makes the
/// job wait, without a restart, until the quota is raised.
pub(in crate::cluster) fn waits_for_quota(cluster: &TestCluster) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    let waits = waits(jobs);
    jobs.within(&["delete", "resourcequota", QUOTA, "--ignore-not-found"])?;
    waits?;
    Ok(jobs.delete(JOB)?)
}

fn waits(jobs: &Jobs) -> Result<(), TrialError> {
    jobs.submit(JOB, &merged(endless(), json!({"faultTolerance": {"stallSeconds": 30}})))?;
    jobs.until_phase(JOB, "Training")?;
    admit(jobs, count_pods(jobs)?)?;
    let before = jobs.pods(JOB)?;
    jobs.set_replicas(JOB, "ps", 3)?;
    println!("PodsRefused: {}", refused(jobs, &format!("{JOB}-ps"))?);
    jobs.until_step_after(JOB, jobs.step(JOB)?)?;
    jobs.set_replicas(JOB, "ps", 1)?;
    until_ready(jobs, "one parameter server again")?;
    if jobs.pods(JOB)? != before {
        return Err(unmet(format!("the pods {before:?}"), format!("{:?}", jobs.pods(JOB)?)));
    }
    admit(jobs, count_pods(jobs)?.saturating_sub(1))?;
    jobs.kill_pod(&format!("{JOB}-loader-0"))?;
    println!("PodsRefused: {}", refused(jobs, &format!("{JOB}-loader"))?);
    std::thread::sleep(STALLED);
    jobs.within(&["delete", "resourcequota", QUOTA])?;
    let status = until_ready(jobs, "a loader again")?;
    if status["restarts"] != 0 || status["attempt"]["number"] != 1 {
        return Err(unmet("no restart for a missing pod", status));
    }
    Ok(())
}

/// Admits this many pods in the namespace.
fn admit(jobs: &Jobs, pods: usize) -> Result<(), HarnessError> {
    let pods = pods.to_string();
    jobs.apply(&json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": QUOTA},
        "spec": {"hard": {"pods": pods}},
    }))?;
    eventually(RETRIED, "the quota", || {
        let hard = jobs.get(&format!("resourcequota/{QUOTA}"))?["status"]["hard"]["pods"].clone();
        if hard == pods { Ok(()) } else { Err(not_yet(hard)) }
    })
}

/// Pods in the namespace that count against a quota.
fn count_pods(jobs: &Jobs) -> Result<usize, HarnessError> {
    let running = "--field-selector=status.phase!=Succeeded,status.phase!=Failed";
    Ok(jobs.within(&["get", "pods", running, "--output=name"])?.split_whitespace().count())
}

/// Waits until the job reports the quota for a StatefulSet; returns the message.
fn refused(jobs: &Jobs, set: &str) -> Result<String, TrialError> {
    let message = jobs.until_condition(JOB, "Stalled", "PodsRefused")?;
    if message.contains("exceeded quota") && message.contains(set) {
        return Ok(message);
    }
    Err(unmet(format!("the quota and {set} in the message"), message))
}

/// Waits until the job trains with all its members; returns its status.
fn until_ready(jobs: &Jobs, awaited: &str) -> Result<Value, HarnessError> {
    eventually(RETRIED, awaited, || {
        let job = jobs.job(JOB)?;
        match rectrain_harness::jobs::condition(&job, "Ready") {
            Some(_) => Ok(job["status"].clone()),
            None => Err(not_yet(&job["status"]["conditions"])),
        }
    })
}
