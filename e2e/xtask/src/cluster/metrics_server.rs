//! metrics-server, as most clusters have it: the operator sees by it how much CPU others use of the nodes of a job's pods, and a
//! HorizontalPodAutoscaler how much the job's dense workers use. It runs on this machine, behind a service without pods, and
//! the API server hands on to it what is asked of its group. Nodes that share a machine both tell of all that the machine does.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::foreign_kubeconfig;
use super::install::{Running, apply, within};
use super::network::{MACHINE, NODES};
use super::operate::{NAMESPACE, SYSTEM, delete_job, endless, leader, merged, metrics, status, submit, until_phase};
use super::paths::Paths;
use super::process::{command, eventually, output};
use super::tools::{self, METRICS_SERVER};

const NAME: &str = "metrics-server";
const ITS_NAMESPACE: &str = "kube-system";
const PORT: u16 = 4443;
const API_SERVICE: &str = "v1beta1.metrics.k8s.io";
/// What the operator tells of the load of nodes.
pub(super) const USED_BY_OTHERS: &str = "rectrain_operator_cpu_used_by_others_ratio";
/// Measured, read by the operator, and shown within this time.
pub(super) const MEASURED: Duration = Duration::from_secs(180);
/// An autoscaler looks every 15 s at what was measured over as long, and pods come and go.
const SCALED: Duration = Duration::from_secs(240);
/// Neighbours that compute all the time are worth at least so much.
const MORE: f64 = 0.25;

/// metrics-server in the cluster, until it is dropped.
pub(super) struct MetricsServer<'a> {
    paths: &'a Paths,
    _process: Running,
}

impl<'a> MetricsServer<'a> {
    /// Measures the nodes; none in a cluster that is not of this machine, which has its own or not.
    pub(super) fn start(paths: &'a Paths) -> Result<Option<Self>, String> {
        if foreign_kubeconfig(paths).is_some() {
            return Ok(None);
        }
        tools::build(paths, &[METRICS_SERVER])?;
        let log = paths.log(NAME);
        let log = std::fs::File::create(&log).map_err(|error| format!("cannot write {}: {error}", log.display()))?;
        let pki = |file: &str| paths.pki().join(file).display().to_string();
        let conf = pki("metrics-server.conf");
        let mut server = command(
            paths.program(NAME),
            [
                format!("--bind-address={MACHINE}"),
                format!("--secure-port={PORT}"),
                format!("--tls-cert-file={}", pki("metrics-server.crt")),
                format!("--tls-private-key-file={}", pki("metrics-server.key")),
                format!("--kubeconfig={conf}"),
                format!("--authentication-kubeconfig={conf}"),
                format!("--authorization-kubeconfig={conf}"),
                format!("--kubelet-certificate-authority={}", pki("ca.crt")),
                "--kubelet-preferred-address-types=InternalIP".to_owned(),
                // As its manifest has it.
                "--metric-resolution=15s".to_owned(),
            ],
        );
        server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let process = Running(server.spawn().map_err(|error| format!("cannot run metrics-server: {error}"))?);
        let started = Self { paths, _process: process };
        apply(paths, ITS_NAMESPACE, &registration(paths)?.to_string())?;
        for node in &NODES {
            let measured = format!("/apis/metrics.k8s.io/v1beta1/nodes/{}", node.name);
            eventually(MEASURED, &format!("a measurement of {}", node.name), || {
                within(paths, ITS_NAMESPACE, &["get", "--raw", &measured])
            })?;
        }
        Ok(Some(started))
    }
}

impl Drop for MetricsServer<'_> {
    fn drop(&mut self) {
        let objects = [format!("apiservice/{API_SERVICE}"), format!("service/{NAME}"), format!("endpointslice/{NAME}")];
        let words = ["delete", "--ignore-not-found"].into_iter().chain(objects.iter().map(String::as_str));
        if let Err(error) = within(self.paths, ITS_NAMESPACE, &words.collect::<Vec<_>>()) {
            eprintln!("xtask: the API server still looks for metrics-server: {error}");
        }
    }
}

/// Where the API server finds it.
fn registration(paths: &Paths) -> Result<Value, String> {
    let authority = output(command("base64", ["--wrap=0"]).arg(paths.pki().join("ca.crt")))?;
    let of_service = json!({"kubernetes.io/service-name": NAME});
    let port = json!({"name": "https", "port": PORT, "protocol": "TCP"});
    Ok(json!({"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}, "spec": {"ports": [port]}},
        {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": {"name": NAME, "labels": of_service},
            "addressType": "IPv4", "ports": [port], "endpoints": [{"addresses": [MACHINE]}],
        },
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": API_SERVICE}, "spec": {
            "group": "metrics.k8s.io", "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
            "caBundle": authority.trim(),
            "service": {"name": NAME, "namespace": ITS_NAMESPACE, "port": PORT},
        }},
    ]}))
}

/// A step of `cargo xtask cluster operate`: a job whose dense workers a HorizontalPodAutoscaler has is the neighbour of another one, whose
/// mode the operator chooses.
pub(super) fn measured(paths: &Paths) -> Result<(), String> {
    let Some(_server) = MetricsServer::start(paths)? else {
        eprintln!("xtask: SKIPPED metrics-server, because the cluster is not of this machine");
        return Ok(());
    };
    let (watches, hungry) = ("watches", "hungry");
    submit(paths, watches, &modest())?;
    until_phase(paths, watches, "Training")?;
    let alone = eventually(MEASURED, "what others use", || used_by_others(paths, watches))?;
    if alone + MORE > 1.0 {
        return Err(format!("others use {alone} of the nodes' CPU already: this needs a machine that is quiet"));
    }
    submit(paths, hungry, &autoscaled())?;
    until_phase(paths, hungry, "Training")?;
    let beside = eventually(MEASURED, "more that others use", || match used_by_others(paths, watches)? {
        share if share >= alone + MORE => Ok(share),
        share => Err(format!("others use {share}, and used {alone}")),
    })?;
    println!("others use {:.0} % of the nodes' CPU, and used {:.0} %", 100.0 * beside, 100.0 * alone);
    autoscales(paths, hungry)?;
    // What was seen first is a mean over some seconds in which the neighbour was still starting.
    let beside = beside.max(used_by_others(paths, watches)?);
    delete_job(paths, hungry)?;
    let after = eventually(MEASURED, "less that others use", || match used_by_others(paths, watches)? {
        share if share < f64::midpoint(alone, beside) => Ok(share),
        share => Err(format!("others use {share}, used {beside} beside {hungry} and {alone} before")),
    })?;
    println!("others use {:.0} % again", 100.0 * after);
    let status = status(paths, watches)?;
    if status["phase"] != "Training" || status["restarts"] != 0 {
        return Err(format!("the neighbour disturbed more than the speed of training: {status}"));
    }
    delete_job(paths, watches)
}

/// A job whose mode is chosen and that leaves nearly all of the machine to others. It has all of its pods on one node: nodes that share a
/// machine tell of what the job uses on the other one as well, and that is not known to be its own.
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

/// A job that computes all the time and leaves the number of its dense workers to somebody else.
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

/// A second dense worker comes because the first one uses more than its request, and goes when that is no longer too much.
fn autoscales(paths: &Paths, job: &str) -> Result<(), String> {
    for (utilization, workers) in [(50, 2), (100_000, 1)] {
        apply(paths, NAMESPACE, &autoscaler(job, utilization).to_string())?;
        let started = Instant::now();
        let status = eventually(SCALED, &format!("{workers} dense workers"), || {
            let status = status(paths, job)?;
            let now = &status["attempt"]["replicas"]["denseWorker"];
            let is_done = now["present"] == workers && now["needed"] == workers;
            if is_done { Ok(status) } else { Err(format!("{now}; {}", autoscaler_says(paths, job)?)) }
        })?;
        println!("{workers} by a HorizontalPodAutoscaler after {:.0} s", started.elapsed().as_secs_f64());
        if status["restarts"] != 0 || status["attempt"]["number"] != 1 || status["phase"] != "Training" {
            return Err(format!("{status}"));
        }
    }
    within(paths, NAMESPACE, &["delete", "horizontalpodautoscaler", job]).map(drop)
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
            // Going down waits five minutes by default.
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    })
}

fn autoscaler_says(paths: &Paths, job: &str) -> Result<String, String> {
    within(
        paths,
        NAMESPACE,
        &["get", "horizontalpodautoscaler", job, "--output=jsonpath={.status.conditions[*].message}"],
    )
}

/// As the leader tells it.
fn used_by_others(paths: &Paths, job: &str) -> Result<f64, String> {
    let text = metrics(paths, SYSTEM, &leader(paths)?, 8080)?;
    let of_job = format!("job_name=\"{job}\"");
    let line = text.lines().find(|line| line.starts_with(USED_BY_OTHERS) && line.contains(&of_job));
    let value = line.and_then(|line| line.rsplit_once(' ')?.1.parse().ok());
    value.ok_or_else(|| format!("the operator has no {USED_BY_OTHERS} of {job}"))
}
