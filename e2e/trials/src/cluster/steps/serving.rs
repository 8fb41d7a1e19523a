//! Servers of a model: they follow the checkpoints of a job, go back to an earlier one, and outlive
//! the job. A client's requests do not fail meanwhile.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rectrain_harness::events::parse;
use rectrain_harness::files::write;
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::manifests::{endless, merged, with_checkpoints};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::{TestCluster, object_store};
use crate::error::unmet;

/// How long a rollout may take.
pub(super) const ROLLOUT: Duration = Duration::from_secs(300);
/// How long a rollback may take.
const ROLLBACK: Duration = Duration::from_secs(30);
/// Global steps between two checkpoints.
const EVERY: u64 = 2_000;
/// The job, and its servers.
const NAME: &str = "served";

/// The number of answers of each model, by its global step.
pub(super) type Answers = BTreeMap<u64, u64>;

/// The servers start with a checkpoint, roll to a newer one, and back. Then their job is deleted,
/// and one of them is killed. A client asks for predictions all the time.
pub(in crate::cluster) fn serves_a_model(cluster: &TestCluster) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    object_store::start(&cluster.paths, NAMESPACE)?;
    object_store::make_bucket(cluster.kubectl(), NAMESPACE)?;
    let kept = json!({"checkpoint": {"keep": 1000}});
    jobs.submit(NAME, &merged(with_checkpoints(&endless(), NAME, EVERY), kept))?;
    jobs.apply(&server(NAME, &json!({"model": {"job": NAME}, "updateEverySeconds": 10})))?;
    let first = until_serving(jobs, NAME, "servers with the first model", |step| step > 0)?;
    let request = cluster.paths.run().join("prediction-request.json");
    write(&request, row().to_string())?;
    let answers = under_load(jobs, NAME, &request, || rolls_and_outlives(jobs, first))?;
    println!("{} requests answered during rollouts, and none refused", answers.values().sum::<u64>());
    Ok(jobs.within(&["delete", "recmodelserver", NAME, "--timeout=120s"]).map(drop)?)
}

fn rolls_and_outlives(jobs: &Jobs, first: u64) -> Result<(), TrialError> {
    let newer = until_serving(jobs, NAME, "servers with a newer model", |step| step > first)?;
    rolls_back(jobs, newer, first)?;
    jobs.delete(NAME)?;
    patch(jobs, NAME, &json!({"spec": {"version": newer, "replicas": 3}}))?;
    until_serving(jobs, NAME, "three servers without their job", |step| step == newer)?;
    Ok(())
}

/// All servers go back to the model of the step `first`, in time.
fn rolls_back(jobs: &Jobs, newer: u64, first: u64) -> Result<(), TrialError> {
    let started = Instant::now();
    patch(jobs, NAME, &json!({"spec": {"version": first}}))?;
    until_serving(jobs, NAME, "servers with the first model again", |step| step == first)?;
    let time = started.elapsed();
    println!("rolled from step {first} to {newer}, and back in {:.0} s", time.as_secs_f64());
    if time < ROLLBACK {
        Ok(())
    } else {
        Err(unmet(format!("a rollback in less than {ROLLBACK:?}"), format!("{time:?}")))
    }
}

/// Asks the servers with a name for predictions until `work` is done.
pub(super) fn under_load(
    jobs: &Jobs,
    name: &str,
    request: &Path,
    work: impl FnOnce() -> Result<(), TrialError>,
) -> Result<Answers, TrialError> {
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut answers = Answers::new();
            while !is_done.load(Ordering::Relaxed) {
                *answers.entry(predicts(jobs, name, request)?).or_default() += 1;
            }
            Ok::<Answers, TrialError>(answers)
        });
        let worked = work();
        is_done.store(true, Ordering::Relaxed);
        let answers = load.join().map_err(|_| HarnessError::Panicked)?;
        worked?;
        answers
    })
}

/// One request to the servers with a name, through the API server. Returns the step of the model
/// that answered.
pub(super) fn predicts(jobs: &Jobs, name: &str, request: &Path) -> Result<u64, TrialError> {
    let service = format!("/api/v1/namespaces/{NAMESPACE}/services/{name}-server:http");
    let infer = format!("{service}/proxy/v2/models/{name}/infer");
    let file = request.display().to_string();
    let answer = parse("a prediction", &jobs.within(&["create", "--raw", &infer, "--filename", &file])?)?;
    let probability = answer["outputs"][0]["data"][0].as_f64();
    let step = answer["model_version"].as_str().and_then(|version| version.parse().ok());
    match (probability, step) {
        (Some(probability), Some(step)) if probability > 0.0 && probability < 1.0 => Ok(step),
        _ => Err(unmet("a probability, and the step of its model", answer)),
    }
}

/// A row of the small job.
pub(super) fn row() -> Value {
    rows(1)
}

/// This many equal rows of the small job.
pub(super) fn rows(count: usize) -> Value {
    let column = |name: String, datatype: &str, value: Value| {
        let data = vec![value; count];
        json!({"name": name, "shape": [count], "datatype": datatype, "data": data})
    };
    let ids = (1..=6).map(|n| column(format!("C{n}"), "INT64", json!(n)));
    let numbers = (1..=4).map(|n| column(format!("I{n}"), "FP32", json!(0.5)));
    json!({"inputs": ids.chain(numbers).collect::<Vec<_>>()})
}

/// A `RecModelServer`.
pub(super) fn server(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "rectrain.dev/v1alpha1", "kind": "RecModelServer", "metadata": {"name": name}, "spec": spec})
}

/// Changes a `RecModelServer`.
pub(super) fn patch(jobs: &Jobs, name: &str, patch: &Value) -> Result<(), HarnessError> {
    jobs.within(&["patch", "recmodelserver", name, "--type=merge", &format!("--patch={patch}")]).map(drop)
}

/// Waits until all servers with a name answer with a wanted model; returns its step.
pub(super) fn until_serving(
    jobs: &Jobs,
    name: &str,
    awaited: &str,
    is_wanted: impl Fn(u64) -> bool,
) -> Result<u64, HarnessError> {
    eventually(ROLLOUT, awaited, || {
        let server = jobs.get(&format!("recmodelserver/{name}"))?;
        let status = &server["status"];
        let step = status["checkpoint"]["step"].as_u64().unwrap_or(0);
        let is_seen = status["observedGeneration"] == server["metadata"]["generation"];
        if is_seen && status["phase"] == "Ready" && is_wanted(step) { Ok(step) } else { Err(not_yet(status)) }
    })
}

/// Servers gain an autoscaler, change it, and lose it. They need no model for that.
pub(super) fn gains_and_loses_an_autoscaler(jobs: &Jobs) -> Result<(), HarnessError> {
    let name = "autoscaled";
    let cpu = json!({"resources": {"requests": {"cpu": "10m"}}});
    let spec =
        |most: u32| json!({"model": {"path": "/tmp/none"}, "autoscaling": {"maxReplicas": most}, "template": cpu});
    let most = || -> Result<Option<u64>, HarnessError> {
        let all = jobs.get("horizontalpodautoscalers")?;
        let its = all["items"].as_array().into_iter().flatten();
        let mut its = its.filter(|autoscaler| autoscaler["metadata"]["name"] == "autoscaled-server");
        Ok(its.next().and_then(|autoscaler| autoscaler["spec"]["maxReplicas"].as_u64()))
    };
    let until = |wanted: Option<u64>| {
        eventually(ROLLOUT, &format!("an autoscaler up to {wanted:?}"), || match most()? {
            found if found == wanted => Ok(()),
            found => Err(not_yet(format!("{found:?}"))),
        })
    };
    for most in [1, 2] {
        jobs.apply(&server(name, &spec(most)))?;
        until(Some(u64::from(most)))?;
    }
    patch(jobs, name, &json!({"spec": {"autoscaling": null}}))?;
    until(None)?;
    jobs.within(&["delete", "recmodelserver", name, "--timeout=120s"]).map(drop)
}

/// Servers gain a canary, and lose it. They need no model for that.
pub(super) fn gains_and_loses_a_canary(jobs: &Jobs) -> Result<(), HarnessError> {
    let name = "tried";
    let spec = json!({"model": {"path": "/tmp/none"}, "version": 1, "replicas": 2, "canary": {"step": 2}});
    jobs.apply(&server(name, &spec))?;
    let until = |is_wanted: bool| {
        let awaited = if is_wanted { "a canary" } else { "the end of the canary" };
        eventually(ROLLOUT, awaited, || {
            let all = jobs.get("deployments")?;
            let mut deployments = all["items"].as_array().into_iter().flatten();
            let is_there = deployments.any(|deployment| deployment["metadata"]["name"] == "tried-canary");
            if is_there == is_wanted { Ok(()) } else { Err(not_yet(format!("it is there: {is_there}"))) }
        })
    };
    until(true)?;
    patch(jobs, name, &json!({"spec": {"canary": null}}))?;
    until(false)?;
    jobs.within(&["delete", "recmodelserver", name, "--timeout=120s"]).map(drop)
}
