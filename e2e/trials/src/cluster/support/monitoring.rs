//! A Prometheus that scrapes the operator, the pods of jobs, and the kubelets' cAdvisor, as one in
//! a cluster would. It can evaluate alert rules too.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use rectrain_bring_up::network::NODES;
use rectrain_bring_up::prometheus::{Prometheus, available, targets};
use rectrain_harness::command::Running;
use rectrain_harness::files::{remove_folder, write};
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::kubectl::SYSTEM;
use rectrain_harness::manifests::{endless, merged, without_a_node};
use rectrain_harness::{HarnessError, skips};
use serde_json::{Value, json};

use crate::cluster::support::TestCluster;

/// How long data of most metrics may take to appear.
const DATA: Duration = Duration::from_secs(150);
/// How long metrics-server and the operator may take for a first measurement of a node.
pub(crate) const MEASURED: Duration = Duration::from_secs(180);
/// How long the automatic mode may take to predict a speed and to measure the prediction's error.
const PREDICTED: Duration = Duration::from_secs(300);
/// The operator's metric of the CPU that other pods use on a job's nodes.
pub(crate) const USED_BY_OTHERS: &str = "rectrain_operator_cpu_used_by_others_ratio";
/// Jobs without which some metrics have no data: one chooses its mode, and no node accepts the
/// other.
const OTHERS: [&str; 2] = ["automatic", "waits"];

/// Submits the jobs without which some metrics have no data.
pub(crate) fn submit_others(jobs: &Jobs) -> Result<(), HarnessError> {
    let [automatic, waits] = OTHERS;
    let mode = json!({"training": {"mode": "auto", "auto": {"windowSeconds": 15, "dwellSeconds": 30}}});
    jobs.submit(automatic, &merged(endless(), mode))?;
    jobs.submit(waits, &json!({"roles": {"loader": {"template": without_a_node()}}}))
}

/// Deletes the jobs of [`submit_others`].
pub(crate) fn delete_others(jobs: &Jobs) -> Result<(), HarnessError> {
    OTHERS.into_iter().try_for_each(|job| jobs.delete(job))
}

/// How long data of a metric, or of a query that names it, may take to appear.
pub(crate) fn patience_for(metric: &str) -> Duration {
    match metric {
        metric if metric.contains("prediction_error") => PREDICTED,
        metric if metric.contains(USED_BY_OTHERS) => MEASURED,
        _ => DATA,
    }
}

/// The folder of Prometheus' programs; `None` if Prometheus was skipped.
pub(crate) fn programs(cluster: &TestCluster) -> Result<Option<PathBuf>, HarnessError> {
    match available(&cluster.paths) {
        Ok(programs) => Ok(Some(programs)),
        Err(reason) => skips::skip("Prometheus", reason).map(|()| None),
    }
}

/// The scrape targets of the trials: the operator, and the pods of jobs.
pub(crate) fn scrape_targets(cluster: &TestCluster) -> Result<Value, HarnessError> {
    Ok(Value::from(targets(cluster.kubectl(), &[NAMESPACE, SYSTEM])?))
}

/// A running Prometheus with its configuration.
pub(crate) struct Monitoring {
    pub(crate) prometheus: Prometheus,
    folder: PathBuf,
    /// The way to the kubelets.
    _proxy: Running,
}

impl Monitoring {
    /// Starts Prometheus, with alert rules if there are any; `None` if Prometheus was skipped.
    pub(crate) fn start(cluster: &TestCluster, rules: Option<&str>) -> Result<Option<Self>, HarnessError> {
        let Some(programs) = programs(cluster)? else { return Ok(None) };
        let folder = cluster.paths.run().join("monitoring");
        remove_folder(&folder)?;
        let (proxy, kubelets) = cluster.kubectl().proxy()?;
        let targets = folder.join("targets.json");
        write(&targets, scrape_targets(cluster)?.to_string())?;
        let pods = json!({"job_name": "pods", "file_sd_configs": [{"files": [targets], "refresh_interval": "2s"}]});
        let mut configuration = json!({"scrape_configs": Value::from([vec![pods], cadvisor(kubelets)].concat())});
        if let Some(rules) = rules {
            let file = folder.join("alerts.yaml");
            write(&file, rules)?;
            configuration["rule_files"] = json!([file]);
        }
        let prometheus = Prometheus::start(&programs, &folder, configuration)?;
        Ok(Some(Self { prometheus, folder, _proxy: proxy }))
    }

    /// Updates the scrape targets to the present pods.
    pub(crate) fn look_again(&self, cluster: &TestCluster) -> Result<(), HarnessError> {
        let targets = scrape_targets(cluster)?;
        // Prometheus must not read half a file, so it is written aside and moved.
        let (new, now) = (self.folder.join("targets.new"), self.folder.join("targets.json"));
        write(&new, targets.to_string())?;
        std::fs::rename(&new, &now).map_err(HarnessError::io("move", new.display()))
    }

    /// The samples of a query whose value is a finite number: labels and value.
    pub(crate) fn query(&self, query: &str) -> Result<Vec<(Value, f64)>, HarnessError> {
        let samples = self.prometheus.samples(query)?;
        let value = |sample: &Value| sample["value"][1].as_str()?.parse::<f64>().ok().filter(|value| value.is_finite());
        Ok(samples.iter().filter_map(|sample| Some((sample["metric"].clone(), value(sample)?))).collect())
    }

    /// Ends Prometheus and deletes its data.
    pub(crate) fn end(self) -> Result<(), HarnessError> {
        let folder = self.folder.clone();
        drop(self);
        remove_folder(&folder)
    }
}

/// The scrape configuration of the containers' memory and CPU, as the kubelets measure them.
fn cadvisor(api_server: SocketAddr) -> Vec<Value> {
    let of_node = |node: &str| {
        json!({
            "job_name": format!("cadvisor-{node}"),
            "metrics_path": format!("/api/v1/nodes/{node}/proxy/metrics/cadvisor"),
            "static_configs": [{"targets": [api_server.to_string()]}],
            "metric_relabel_configs": [{"source_labels": ["__name__"], "action": "keep",
                "regex": "container_(cpu_usage_seconds_total|memory_working_set_bytes|spec_memory_limit_bytes)"}],
        })
    };
    NODES.iter().map(|node| of_node(node.name)).collect()
}
