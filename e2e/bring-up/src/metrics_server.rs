//! metrics-server, as most clusters have it. The operator reads from it how much CPU other pods use
//! on the nodes of a job. A HorizontalPodAutoscaler reads how much the job's dense workers use.
//!
//! It runs on this machine, behind a Service without pods; the API server forwards the requests of
//! its API group. Both nodes share one machine, so each of them reports the use of the whole
//! machine.

use std::process::Stdio;
use std::time::Duration;

use rectrain_harness::HarnessError;
use rectrain_harness::command::{Running, command, output};
use rectrain_harness::files::log_file;
use rectrain_harness::kubectl::Kubectl;
use rectrain_harness::say;
use rectrain_harness::waiting::eventually;
use serde_json::{Value, json};

use crate::access::foreign_kubeconfig;
use crate::network::{MACHINE, NODES};
use crate::paths::Paths;
use crate::tools::{self, METRICS_SERVER};
use crate::{BringUpError, kubectl};

const NAME: &str = "metrics-server";
const NAMESPACE: &str = "kube-system";
const PORT: u16 = 4443;
const API_SERVICE: &str = "v1beta1.metrics.k8s.io";
/// How long the first measurement of a node may take.
const FIRST_MEASUREMENT: Duration = Duration::from_secs(180);

/// metrics-server in the cluster, until it is dropped.
#[derive(Debug)]
pub struct MetricsServer {
    kubectl: Kubectl,
    _process: Running,
}

impl MetricsServer {
    /// Starts metrics-server and waits for a measurement of each node. Returns `None` for another
    /// cluster, whose owner decides whether it has one.
    ///
    /// # Errors
    /// The program cannot be built or started; no measurement in time.
    pub fn start(paths: &Paths) -> Result<Option<Self>, BringUpError> {
        if foreign_kubeconfig(paths).is_some() {
            return Ok(None);
        }
        tools::build(paths, &[METRICS_SERVER])?;
        let mut server = command(paths.program(NAME), flags(paths));
        server.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log_file(&paths.log(NAME))?);
        let process = Running::start(&mut server)?;
        let started = Self { kubectl: kubectl(paths)?, _process: process };
        started.kubectl.apply(NAMESPACE, &registration(paths)?.to_string())?;
        for node in &NODES {
            let page = format!("/apis/metrics.k8s.io/v1beta1/nodes/{}", node.name);
            eventually(FIRST_MEASUREMENT, &format!("a measurement of {}", node.name), || {
                started.kubectl.within(NAMESPACE, &["get", "--raw", &page])
            })?;
        }
        Ok(Some(started))
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        let objects = [format!("apiservice/{API_SERVICE}"), format!("service/{NAME}"), format!("endpointslice/{NAME}")];
        let words = ["delete", "--ignore-not-found"].into_iter().chain(objects.iter().map(String::as_str));
        if let Err(error) = self.kubectl.within(NAMESPACE, &words.collect::<Vec<_>>()) {
            say(format!("the API server still forwards requests to metrics-server: {error}"));
        }
    }
}

fn flags(paths: &Paths) -> [String; 10] {
    let pki = |file: &str| paths.pki().join(file).display().to_string();
    let conf = pki("metrics-server.conf");
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
        // The value in metrics-server's own manifest.
        "--metric-resolution=15s".to_owned(),
    ]
}

/// The objects that tell the API server where metrics-server is.
fn registration(paths: &Paths) -> Result<Value, HarnessError> {
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
            "service": {"name": NAME, "namespace": NAMESPACE, "port": PORT},
        }},
    ]}))
}
