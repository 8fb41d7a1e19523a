//! `cargo xtask cluster smoke`: the runtime's image, the network and pod names, without the
//! operator. A job trains in `sync`, and its model must equal bit for bit the one that `rectrain
//! run` trains.

use std::time::Duration;

use rectrain_bring_up::images::{Image, provide};
use rectrain_bring_up::tools::{KUBE, build};
use rectrain_bring_up::{Paths, kubectl, sources};
use rectrain_harness::cargo::build_programs;
use rectrain_harness::command::{command, output};
use rectrain_harness::events::final_event;
use rectrain_harness::files::read;
use rectrain_harness::kubectl::PODS;
use rectrain_harness::waiting::eventually;
use rectrain_harness::workspace::{built, workspace};
use serde_json::Value;

use crate::TrialError;
use crate::error::unmet;

const NAMESPACE: &str = "rectrain-smoke";
const JOB: &str = "docs/examples/synthetic.yaml";
const SETS: [&str; 6] = [
    "spec.training.mode=sync",
    "spec.data.synthetic.rows=40000",
    "spec.data.synthetic.testRows=4000",
    "spec.roles.ps.replicas=2",
    "spec.roles.embeddingWorker.replicas=2",
    "spec.roles.denseWorker.replicas=2",
];
/// How long the job may take on a slow machine.
const PATIENCE: Duration = Duration::from_secs(1200);

/// Runs the trial.
///
/// # Errors
/// A step fails; the models differ; a pod restarted.
pub fn run(paths: &Paths) -> Result<(), TrialError> {
    build(paths, &[KUBE])?;
    build_programs()?;
    provide(paths, &[Image::Runtime])?;
    let mut run = command(built("rectrain")?, ["run", JOB, "--json", "--no-history"]);
    run.args(SETS.iter().flat_map(|set| ["--set", set])).current_dir(workspace());
    let here = final_event(&output(&mut run)?)?;

    let kubectl = kubectl(paths)?;
    let within = |words: &[&str]| kubectl.within(NAMESPACE, words);
    kubectl.fresh_namespace(NAMESPACE)?;
    let job = read(&workspace().join(JOB))?;
    within(&["create", "configmap", "job", &format!("--from-literal=job.yaml={job}")])?;
    // The overrides become arguments of every pod.
    let pods = read(&sources().join("manifests/smoke.yaml"))?;
    let arguments: Vec<_> = SETS.iter().map(|set| format!("--set={set}")).collect();
    let pods = pods.replace("--stay,", &format!("--stay, {},", arguments.join(", ")));
    kubectl.apply(NAMESPACE, &pods)?;
    let there = eventually(PATIENCE, "the job in the cluster", || final_event(&within(&["logs", "coordinator-0"])?))?;
    println!("{}", within(&["get", "pods", "--output", "wide"])?);
    compare(&here, &there)?;
    let restarts = r"jsonpath={.items[*].status.containerStatuses[0].restartCount}";
    let restarts = within(&["get", "pods", "--output", restarts])?;
    if restarts.split_whitespace().any(|count| count != "0") {
        return Err(unmet("no restart of a pod", format!("restarts by pod: {restarts}")));
    }
    Ok(within(&["delete", "namespace", NAMESPACE, PODS]).map(drop)?)
}

/// Compares the digests of the models, the samples, and the metrics on the test rows.
fn compare(here: &Value, there: &Value) -> Result<(), TrialError> {
    for field in ["parametersSha256", "samples", "test"] {
        println!("{field}: {}", there[field]);
        if here[field] != there[field] {
            let expected = format!("{field} {} in the cluster, as outside of it", here[field]);
            return Err(unmet(expected, &there[field]));
        }
    }
    Ok(())
}
