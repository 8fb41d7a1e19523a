//! The longest name of a job, and pods with the highest index of a large role.

use std::time::{Duration, Instant};

use rectrain_bring_up::fakes;
use rectrain_harness::jobs::Jobs;
use rectrain_harness::manifests::manifest;
use rectrain_harness::not_yet;
use rectrain_harness::rectrain::train_outside;
use rectrain_harness::waiting::eventually;
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::outcome::same_digest;

/// 35 characters, which is the most.
const NAME: &str = "a-name-of-exactly-thirty-five-bytes";
/// Another one, for pods on faked nodes.
const FAKED: &str = "another-name-of-thirty-five-letters";
/// Embedding workers of the job on faked nodes.
const WORKERS: usize = 1_000;
const NODES: usize = 2;
/// How long a thousand faked pods may take.
const PATIENCE: Duration = Duration::from_secs(900);

pub(in crate::cluster) fn long_names(cluster: &TestCluster) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    let undisturbed = train_outside(&manifest(NAME, &json!({})))?;
    jobs.submit(NAME, &json!({}))?;
    same_digest(jobs, NAME, &undisturbed)?;
    if cluster.skips("faked nodes")? {
        return Ok(());
    }
    let _kwok = fakes::start(&cluster.paths)?;
    for index in 0..NODES {
        jobs.apply(&fakes::node(&node(index)))?;
    }
    let thousand = a_thousand_workers(jobs);
    jobs.within(&["delete", "rectrainingjob", FAKED, "--ignore-not-found", "--timeout=600s"])?;
    for index in 0..NODES {
        jobs.within(&["delete", "node", &node(index)])?;
    }
    thousand
}

/// The API server and its controllers accept the name, the labels and the host name of every pod.
fn a_thousand_workers(jobs: &Jobs) -> Result<(), TrialError> {
    let template = fakes::pod_template();
    let one = json!({"replicas": 1, "template": template});
    let workers = json!({"replicas": WORKERS, "template": template});
    let changes = json!({
        "roles": {
            "coordinator": {"template": template}, "ps": one, "embeddingWorker": workers, "denseWorker": one, "loader": one,
        },
        // No coordinator answers on faked nodes.
        "faultTolerance": {"stallSeconds": 86_400},
    });
    jobs.submit(FAKED, &changes)?;
    let started = Instant::now();
    eventually(PATIENCE, &format!("{WORKERS} embedding workers"), || {
        let ready: Value = jobs.status(FAKED)?["replicaStatuses"]["embeddingWorker"]["ready"].clone();
        if ready == WORKERS { Ok(()) } else { Err(not_yet(format!("{ready} are ready"))) }
    })?;
    let last = jobs.get(&format!("pod/{FAKED}-embedding-worker-{}", WORKERS - 1))?;
    println!("{} after {:.0} s", last["spec"]["hostname"], started.elapsed().as_secs_f64());
    Ok(())
}

fn node(index: usize) -> String {
    format!("fake-{index}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_names_are_as_long_as_they_may_be() {
        assert_eq!([NAME.len(), FAKED.len()], [35, 35]);
    }
}
