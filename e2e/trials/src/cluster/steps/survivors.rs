//! Processes that live on after their pods were deleted, as behind a kubelet that hangs.

use std::time::Duration;

use rectrain_harness::jobs::Jobs;
use rectrain_harness::manifests::manifest;
use rectrain_harness::rectrain::train_outside;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::json;

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::outcome::same_digest;
use crate::cluster::support::stopped::Stopped;

const JOB: &str = "survivors";
/// How long a replacement may take to join, or the next attempt to train.
const REPLACED: Duration = Duration::from_secs(240);
/// How long the process before may disturb its replacement.
const DISTURBS: Duration = Duration::from_secs(5);

/// A pod of each role in turn is deleted by force while its process is stopped, and its node's
/// kubelet with it. Once a replacement has joined from the other node, the process continues. It
/// disturbs nothing: the model is the same, to the bit.
pub(in crate::cluster) fn survivors(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("a kubelet that hangs")? {
        return Ok(());
    }
    let jobs = &cluster.jobs;
    let rows = json!({"data": {"synthetic": {"rows": 3_000_000}}});
    let undisturbed = train_outside(&manifest(JOB, &rows))?;
    jobs.submit(JOB, &rows)?;
    for role in ["loader", "embedding-worker", "dense-worker", "ps", "coordinator"] {
        jobs.until_step_after(JOB, jobs.step(JOB)?)?;
        let pod = format!("{JOB}-{role}-0");
        let node = jobs.node_of(&pod)?;
        jobs.within(&["cordon", &node])?;
        let disturbed = lives_on(jobs, &pod, &node);
        jobs.within(&["uncordon", &node])?;
        disturbed?;
        println!("{pod}: replaced while its process lived on; {} restarts so far", jobs.status(JOB)?["restarts"]);
    }
    same_digest(jobs, JOB, &undisturbed)
}

/// Deletes a pod whose process continues after a replacement has joined.
fn lives_on(jobs: &Jobs, pod: &str, node: &str) -> Result<(), HarnessError> {
    let uid = jobs.pods(JOB)?.get(pod).cloned();
    // Values are dropped in reverse order: first the process continues, then the kubelet, which
    // ends it.
    let kubelet = Stopped::kubelet_of(node)?;
    let process = Stopped::process_of(jobs, pod)?;
    jobs.kill_pod(pod)?;
    let joined = eventually(REPLACED, &format!("another {pod}, and all members"), || {
        let found = jobs.get(&format!("pod/{pod}"))?;
        let is_another = found["metadata"]["uid"].as_str() != uid.as_deref();
        let conditions = found["status"]["conditions"].as_array().into_iter().flatten();
        let mut ready = conditions.filter(|condition| condition["type"] == "Ready" && condition["status"] == "True");
        if is_another && ready.next().is_some() { Ok(()) } else { Err(not_yet(&found["status"]["phase"])) }
    });
    drop(process);
    std::thread::sleep(DISTURBS);
    drop(kubelet);
    joined
}
