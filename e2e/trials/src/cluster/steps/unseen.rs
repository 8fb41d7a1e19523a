//! A job that ends while no operator runs, and whose pods are gone when one does.

use std::time::Duration;

use rectrain_harness::events::final_event;
use rectrain_harness::jobs::{Jobs, NAMESPACE, selector};
use rectrain_harness::kubectl::SYSTEM;
use rectrain_harness::manifests::{manifest, with_checkpoints};
use rectrain_harness::rectrain::train_outside;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::object_store;
use crate::cluster::support::outcome::same_digest;
use crate::error::unmet;

/// How long the job may take to end, and its pods to start again.
const PATIENCE: Duration = Duration::from_secs(300);
const JOB: &str = "unseen";

/// The job completes without an operator. Its pods are deleted: the StatefulSets make new ones,
/// whose coordinator finds the last checkpoint and has nothing left to train. Then the StatefulSets
/// are deleted, too. The next operator completes the job with the same model.
pub(in crate::cluster) fn completes_unseen(cluster: &TestCluster) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    object_store::start(&cluster.paths, NAMESPACE)?;
    object_store::make_bucket(cluster.kubectl(), NAMESPACE)?;
    let rows = json!({"data": {"synthetic": {"rows": 200_000}}});
    let undisturbed = train_outside(&manifest(JOB, &rows))?;
    jobs.submit(JOB, &with_checkpoints(&rows, JOB, 1_000_000))?;
    jobs.until_phase(JOB, "Training")?;
    operators(cluster, 0)?;
    let unseen = ends_unseen(jobs);
    operators(cluster, 2)?;
    unseen?;
    let job = jobs.until_phase(JOB, "Complete")?;
    let (attempt, restarts) = (&job["status"]["attempt"]["number"], &job["status"]["restarts"]);
    if *attempt != 1 || *restarts != 0 {
        let found = format!("attempt {attempt} after {restarts} restarts");
        return Err(unmet("the first attempt without a restart", found));
    }
    same_digest(jobs, JOB, &undisturbed)
}

/// The job ends, and loses its pods, while no operator runs.
fn ends_unseen(jobs: &Jobs) -> Result<(), TrialError> {
    let steps = eventually(PATIENCE, "the end of the job", || ended(jobs))?["steps"].clone();
    let before = jobs.pods(JOB)?;
    jobs.within(&["delete", "pods", "--selector", &selector(JOB), "--timeout=180s"])?;
    eventually(PATIENCE, "the end of the job in new pods", || {
        let after = jobs.pods(JOB)?;
        let coordinator = format!("{JOB}-coordinator-0");
        match after.get(&coordinator) {
            Some(uid) if before.get(&coordinator) != Some(uid) => ended(jobs),
            other => Err(not_yet(format!("the coordinator is {other:?}"))),
        }
    })?;
    let events = jobs.events(JOB)?;
    let resumed =
        events.iter().find(|event| event["event"] == "resumed").map_or(Value::Null, |event| event["step"].clone());
    let trained = events.iter().filter(|event| event["event"] == "progress").count();
    if resumed != steps || trained > 0 {
        let found = format!("a resumption at step {resumed}, and {trained} reports of progress");
        return Err(unmet(format!("a resumption at step {steps} and no step after it"), found));
    }
    println!("{JOB}: new pods resumed at step {steps}, and trained none");
    jobs.within(&["delete", "statefulsets", "--selector", &selector(JOB), "--timeout=180s"])?;
    Ok(eventually(PATIENCE, "the end of its pods", || jobs.has_no_pods(JOB))?)
}

/// The last event of the job, which must be its summary.
fn ended(jobs: &Jobs) -> Result<Value, HarnessError> {
    final_event(&jobs.within(&["logs", &format!("{JOB}-coordinator-0")])?)
}

/// Runs this many instances of the operator.
fn operators(cluster: &TestCluster, replicas: u32) -> Result<(), HarnessError> {
    let kubectl = cluster.kubectl();
    let selector = "--selector=app.kubernetes.io/name=rectrain-operator";
    kubectl.within(SYSTEM, &["scale", "deployment", selector, &format!("--replicas={replicas}")])?;
    eventually(PATIENCE, &format!("{replicas} instances of the operator"), || {
        let pods = kubectl.within(SYSTEM, &["get", "pods", selector, "--output=name"])?;
        match pods.split_whitespace().count() {
            count if count == replicas as usize => Ok(()),
            count => Err(not_yet(format!("there are {count}"))),
        }
    })
}
