//! Every failure that a user can cause shows its condition, with a reason and a helpful message.

use std::time::Duration;

use rectrain_harness::jobs::Jobs;
use rectrain_harness::manifests::{endless, merged, without_a_node};
use rectrain_harness::waiting::{ParallelStep, side_by_side};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::chart::{POLL_EVERY_SECOND, install};
use crate::cluster::support::stopped::Stopped;
use crate::error::unmet;

/// A mistake in a manifest, and the condition that the job must get.
struct Mistake {
    job: &'static str,
    changes: Value,
    condition: &'static str,
    reason: &'static str,
    /// A part of the condition's message.
    says: &'static str,
}

pub(in crate::cluster) fn fails(cluster: &TestCluster) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    let shown = mistakes()
        .into_iter()
        .map(|mistake| -> ParallelStep<'_, TrialError> { Box::new(move || shows_its_condition(jobs, &mistake)) });
    let others = [crashes, stands_still, makes_progress, name_conflict];
    let others = others.map(|trial| -> ParallelStep<'_, TrialError> { Box::new(move || trial(cluster)) });
    side_by_side(shown.chain(others).collect())?;
    no_image(cluster)
}

fn mistakes() -> Vec<Mistake> {
    let template = |role: &str, template: Value| json!({"roles": {role: {"template": template}}});
    // The rows of an endless job outgrow this limit.
    let little = template("ps", json!({"resources": {"limits": {"memory": "64Mi"}, "requests": {"memory": "64Mi"}}}));
    let outgrowing =
        |fault_tolerance: Value| merged(merged(endless(), little.clone()), json!({"faultTolerance": fault_tolerance}));
    let mistake = |job, changes, condition, reason, says| Mistake { job, changes, condition, reason, says };
    vec![
        mistake(
            "no-account",
            template("loader", json!({"serviceAccountName": "does-not-exist"})),
            "Stalled",
            "PodsRefused",
            "does-not-exist",
        ),
        // The API server does not validate these lists.
        mistake(
            "no-text",
            template("ps", json!({"env": [{"name": "DEBUG", "value": 1}]})),
            "Failed",
            "InvalidSpec",
            "env[0].value",
        ),
        mistake(
            "bad-input",
            json!({"data": {"synthetic": null, "train": {"paths": ["/data/missing.csv"]}}}),
            "Failed",
            "BadInput",
            "missing.csv",
        ),
        mistake(
            "no-secret",
            json!({"data": {"storage": {"secretName": "does-not-exist"}}}),
            "Stalled",
            "ContainerConfigError",
            "does-not-exist",
        ),
        mistake("no-node", template("loader", without_a_node()), "Reconciling", "Unschedulable", "nodeSelector"),
        mistake(
            "refused",
            template("loader", json!({"volumeMounts": [{"name": "nothing", "mountPath": "/x"}]})),
            "Stalled",
            "ObjectRefused",
            "StatefulSet",
        ),
        mistake(
            "too-late",
            json!({"activeDeadlineSeconds": 1, "data": {"synthetic": {"rows": 1_000_000_000}}}),
            "Failed",
            "DeadlineExceeded",
            "activeDeadlineSeconds",
        ),
        mistake("no-memory", outgrowing(json!({"maxRestarts": 0})), "Failed", "RestartsExhausted", "memory"),
        // The condition lasts while the next attempt waits for its back-off.
        mistake("out-of-memory", outgrowing(json!({"backoffSeconds": 15})), "Reconciling", "OutOfMemory", "memory"),
    ]
}

fn shows_its_condition(jobs: &Jobs, mistake: &Mistake) -> Result<(), TrialError> {
    jobs.submit(mistake.job, &mistake.changes)?;
    let message = jobs.until_condition(mistake.job, mistake.condition, mistake.reason)?;
    if !message.contains(mistake.says) {
        return Err(unmet(format!("`{}` in the message of {}", mistake.says, mistake.job), message));
    }
    println!("{}: {message}", mistake.reason);
    Ok(jobs.delete(mistake.job)?)
}

/// A killed pod is a crash: the job restarts after a back-off, as often as its manifest allows.
fn crashes(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "crashes");
    let once = json!({"faultTolerance": {"maxRestarts": 1, "backoffSeconds": 10}});
    jobs.submit(name, &merged(endless(), once))?;
    for (condition, reason) in [("Reconciling", "Crash"), ("Failed", "RestartsExhausted")] {
        jobs.until_phase(name, "Training")?;
        jobs.kill_pod(&format!("{name}-ps-0"))?;
        println!("{reason}: {}", jobs.until_condition(name, condition, reason)?);
    }
    Ok(jobs.delete(name)?)
}

/// A dense worker hangs, and so the job makes no progress.
fn stands_still(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("a process that hangs")? {
        return Ok(());
    }
    let (jobs, name) = (&cluster.jobs, "stands-still");
    jobs.submit(name, &merged(endless(), json!({"faultTolerance": {"stallSeconds": 10, "backoffSeconds": 15}})))?;
    jobs.until_step_after(name, 0)?;
    let stopped = Stopped::process_of(jobs, &format!("{name}-dense-worker-0"))?;
    println!("NoProgress: {}", jobs.until_condition(name, "Reconciling", "NoProgress")?);
    drop(stopped);
    Ok(jobs.delete(name)?)
}

/// Without a barrier no worker counts steps. The job still makes progress, for longer than its
/// stall limit.
fn makes_progress(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "gets-on");
    let mut changes = json!({"training": {"mode": "gba"}, "faultTolerance": {"stallSeconds": 20}});
    // All these jobs start at once. On two cores, pods without a request got almost no CPU: no step
    // in 20 s.
    for role in ["coordinator", "ps", "embeddingWorker", "denseWorker", "loader"] {
        changes["roles"][role]["template"]["resources"]["requests"]["cpu"] = json!("250m");
    }
    jobs.submit(name, &merged(endless(), changes))?;
    jobs.until_phase(name, "Training")?;
    std::thread::sleep(Duration::from_secs(35));
    let job = jobs.job(name)?;
    let (phase, restarts) = (&job["status"]["phase"], job["status"]["restarts"].as_u64().unwrap_or(0));
    if phase != "Training" || restarts > 0 {
        let found = format!("phase {phase} after {restarts} restarts: {}", job["status"]["conditions"]);
        return Err(unmet(format!("{name} to train without a restart"), found));
    }
    println!("{name}: at step {} after 35 s in gba with stallSeconds: 20", job["status"]["step"]);
    Ok(jobs.delete(name)?)
}

/// Another owner's Service has a name that the job needs.
fn name_conflict(cluster: &TestCluster) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    let theirs = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken-ps"}, "spec": {"ports": [{"port": 80}]}});
    jobs.apply(&theirs)?;
    jobs.submit("taken", &json!({}))?;
    println!("NameConflict: {}", jobs.until_condition("taken", "Stalled", "NameConflict")?);
    jobs.delete("taken")?;
    Ok(jobs.within(&["delete", "service", "taken-ps"]).map(drop)?)
}

/// New jobs use an image that no node can pull.
fn no_image(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, paths) = (&cluster.jobs, &cluster.paths);
    install(paths, &[POLL_EVERY_SECOND, "--set=runtimeImage.tag=no-such-tag"])?;
    jobs.submit("no-image", &json!({}))?;
    println!("ImagePullFailed: {}", jobs.until_condition("no-image", "Stalled", "ImagePullFailed")?);
    jobs.delete("no-image")?;
    install(paths, &[POLL_EVERY_SECOND])
}
