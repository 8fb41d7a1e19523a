//! metrics-server measures the nodes. The operator reads how much CPU a neighbour uses, and a
//! HorizontalPodAutoscaler scales that neighbour's dense workers.

use std::time::{Duration, Instant};

use rectrain_bring_up::metrics_server::MetricsServer;
use rectrain_bring_up::network::NODES;
use rectrain_harness::jobs::Jobs;
use rectrain_harness::manifests::{endless, merged};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::monitoring::{MEASURED, USED_BY_OTHERS};
use crate::error::unmet;

/// How long the autoscaler may take: it looks every 15 s at a measurement over 15 s, and pods must
/// start or end.
const SCALED: Duration = Duration::from_secs(240);
/// A neighbour that always computes must add at least this share of the nodes' CPU.
const MORE: f64 = 0.25;

pub(in crate::cluster) fn measured(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("metrics-server")? {
        return Ok(());
    }
    let _server = MetricsServer::start(&cluster.paths)?;
    let (jobs, watches, hungry) = (&cluster.jobs, "watches", "hungry");
    jobs.submit(watches, &modest())?;
    jobs.until_phase(watches, "Training")?;
    let alone = eventually(MEASURED, "the CPU that others use", || used_by_others(jobs, watches))?;
    if alone + MORE > 1.0 {
        return Err(unmet("an idle machine", format!("others use {alone} of the nodes' CPU already")));
    }
    jobs.submit(hungry, &autoscaled())?;
    jobs.until_phase(hungry, "Training")?;
    let beside = eventually(MEASURED, "a higher use by others", || match used_by_others(jobs, watches)? {
        share if share >= alone + MORE => Ok(share),
        share => Err(not_yet(format!("others use {share}, and used {alone}"))),
    })?;
    println!("others use {:.0} % of the nodes' CPU, and used {:.0} %", 100.0 * beside, 100.0 * alone);
    autoscales(jobs, hungry)?;
    // The first measurement is a mean over some seconds in which the neighbour was still starting.
    let beside = beside.max(used_by_others(jobs, watches)?);
    jobs.delete(hungry)?;
    let after = eventually(MEASURED, "a lower use by others", || match used_by_others(jobs, watches)? {
        share if share < f64::midpoint(alone, beside) => Ok(share),
        share => Err(not_yet(format!("others use {share}; {beside} beside {hungry}, and {alone} before"))),
    })?;
    println!("others use {:.0} % again", 100.0 * after);
    let status = jobs.status(watches)?;
    if status["phase"] != "Training" || status["restarts"] != 0 {
        return Err(unmet("the neighbour to affect only the speed", status));
    }
    Ok(jobs.delete(watches)?)
}

/// A job in mode auto that leaves almost the whole machine to others. All of its pods are on one
/// node: the nodes share one machine, so each reports the whole machine's use. The operator could
/// not tell that the use on the other node is the job's own.
fn modest() -> Value {
    let little = json!({
        "nodeSelector": {"kubernetes.io/hostname": NODES[0].name},
        "resources": {"requests": {"cpu": "10m"}, "limits": {"cpu": "50m"}},
    });
    let roles = ["coordinator", "ps", "embeddingWorker", "denseWorker", "loader"]
        .map(|role| (role.to_owned(), json!({"template": little})));
    let roles: serde_json::Map<_, _> = roles.into_iter().collect();
    merged(endless(), json!({"training": {"mode": "auto"}, "roles": roles}))
}

/// A job that always computes, and leaves its number of dense workers to an external autoscaler.
fn autoscaled() -> Value {
    let requests = json!({"template": {"resources": {"requests": {"cpu": "200m"}}}});
    let changes = json!({
        "model": {"hidden": [1024, 1024]},
        "training": {"mode": "hybrid", "globalBatchSize": 2_000, "localBatchSize": 250},
        "roles": {"denseWorker": requests},
        "autoscaling": {
            "mode": "apply",
            "ps": {"scaler": "external"}, "embeddingWorker": {"scaler": "external"}, "denseWorker": {"scaler": "external"},
        },
    });
    merged(endless(), changes)
}

/// A second dense worker joins because the first one exceeds its request. It leaves once the target
/// allows that.
fn autoscales(jobs: &Jobs, job: &str) -> Result<(), TrialError> {
    for (utilization, workers) in [(50, 2), (100_000, 1)] {
        jobs.apply(&autoscaler(job, utilization))?;
        let started = Instant::now();
        let status = eventually(SCALED, &format!("{workers} dense workers"), || {
            let status = jobs.status(job)?;
            let now = &status["attempt"]["replicas"]["denseWorker"];
            if now["present"] == workers && now["needed"] == workers {
                return Ok(status);
            }
            Err(not_yet(format!("{now}; {}", messages_of_autoscaler(jobs, job)?)))
        })?;
        println!("{workers} by a HorizontalPodAutoscaler after {:.0} s", started.elapsed().as_secs_f64());
        if status["restarts"] != 0 || status["attempt"]["number"] != 1 || status["phase"] != "Training" {
            return Err(unmet("scaling without a restart", status));
        }
    }
    Ok(jobs.within(&["delete", "horizontalpodautoscaler", job]).map(drop)?)
}

fn autoscaler(job: &str, utilization: u32) -> Value {
    json!({
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": job},
        "spec": {
            "scaleTargetRef": {"apiVersion": "rectrain.dev/v1alpha1", "kind": "RecTrainingJob", "name": job},
            "minReplicas": 1, "maxReplicas": 2,
            "metrics": [{"type": "Resource", "resource": {
                "name": "cpu", "target": {"type": "Utilization", "averageUtilization": utilization},
            }}],
            // The default delay of scaling down is five minutes.
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    })
}

fn messages_of_autoscaler(jobs: &Jobs, job: &str) -> Result<String, HarnessError> {
    jobs.within(&["get", "horizontalpodautoscaler", job, "--output=jsonpath={.status.conditions[*].message}"])
}

/// The share of the nodes' CPU that other pods use, from the leader's metrics.
fn used_by_others(jobs: &Jobs, job: &str) -> Result<f64, HarnessError> {
    let kubectl = jobs.kubectl();
    let text = kubectl.operator_metrics(&kubectl.leader()?)?;
    let of_job = format!("job_name=\"{job}\"");
    let line = text.lines().find(|line| line.starts_with(USED_BY_OTHERS) && line.contains(&of_job));
    let value = line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok());
    value.ok_or_else(|| not_yet(format!("the operator has no {USED_BY_OTHERS} of {job}")))
}
