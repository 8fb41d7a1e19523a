//! A thousand suspended jobs: how long the operator takes to see all of them, and its costs.

use std::time::{Duration, Instant};

use rectrain_harness::manifests::{list, manifest};
use rectrain_harness::not_yet;
use rectrain_harness::waiting::eventually;
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::costs::Costs;

const JOBS: usize = 1000;
const NAMESPACE: &str = "rectrain-held";
/// How long all jobs may take to get a phase.
const PATIENCE: Duration = Duration::from_secs(900);

pub(in crate::cluster) fn thousand(cluster: &TestCluster) -> Result<(), TrialError> {
    let kubectl = cluster.kubectl();
    kubectl.fresh_namespace(NAMESPACE)?;
    let jobs: Vec<Value> =
        (0..JOBS).map(|index| manifest(&format!("held-{index}"), &json!({"suspend": true}))).collect();
    let before = Costs::read(kubectl)?;
    let started = Instant::now();
    kubectl.apply(NAMESPACE, &list(jobs).to_string())?;
    let applied = started.elapsed();
    eventually(PATIENCE, "the phase Suspended of all jobs", || {
        let phases =
            kubectl.within(NAMESPACE, &["get", "rectrainingjobs", "--output=jsonpath={.items[*].status.phase}"])?;
        let suspended = phases.split_whitespace().filter(|phase| *phase == "Suspended").count();
        if suspended >= JOBS { Ok(()) } else { Err(not_yet(format!("{suspended} jobs have it"))) }
    })?;
    let all = started.elapsed();
    let after = Costs::read(kubectl)?;
    println!(
        "{JOBS} jobs applied in {:.1} s, all seen after {:.1} s; {}",
        applied.as_secs_f64(),
        all.as_secs_f64(),
        after.since(&before),
    );
    after.within_bounds(&before)?;
    // No step needs the end of the deletion.
    Ok(kubectl.within(NAMESPACE, &["delete", "namespace", NAMESPACE, "--wait=false"]).map(drop)?)
}
