//! A real Prometheus on this machine, which reaches the cluster's pods. Debian's build has no
//! service discovery for Kubernetes, so it reads its targets from the pods' annotations.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rectrain_harness::command::{Running, command, output};
use rectrain_harness::files::{log_file, make_folder, remove_folder, write};
use rectrain_harness::http::free_address;
use rectrain_harness::kubectl::Kubectl;
use rectrain_harness::{HarnessError, events};
use serde_json::{Value, json};

use crate::BringUpError;
use crate::access::foreign_kubeconfig;
use crate::paths::Paths;
use crate::tools::by_apt;

/// The Debian package.
const PACKAGE: &str = "prometheus";

/// A Prometheus that ends with this value.
#[derive(Debug)]
pub struct Prometheus {
    _process: Running,
    address: SocketAddr,
}

/// The folder of Prometheus' programs, if Prometheus can read the cluster in use.
///
/// # Errors
/// The cluster is another machine's, or see [`programs`].
pub fn available(paths: &Paths) -> Result<PathBuf, BringUpError> {
    if foreign_kubeconfig(paths).is_some() {
        let problem = "pods of the cluster that KUBECONFIG names cannot be reached from here".to_owned();
        return Err(BringUpError::Unavailable { needed: "this machine's network", problem });
    }
    programs(paths)
}

/// The folder with `prometheus` and `promtool`. Debian's package is unpacked and not installed,
/// because installing it would start a service.
///
/// # Errors
/// apt cannot download the package.
pub fn programs(paths: &Paths) -> Result<PathBuf, BringUpError> {
    let folder = paths.root().join("prometheus");
    let programs = folder.join("usr/bin");
    let _lock = paths.lock("prometheus")?;
    if programs.join("promtool").exists() {
        return Ok(programs);
    }
    // The tests of the operator look for the programs too, so the folder appears complete.
    let unfinished = paths.root().join("prometheus.unfinished");
    let download = unfinished.join("download");
    remove_folder(&unfinished)?;
    make_folder(&download)?;
    by_apt(|| output(command("apt-get", ["download", PACKAGE]).current_dir(&download)))?;
    let entries = std::fs::read_dir(&download).map_err(HarnessError::io("list", download.display()))?;
    let package = entries.flatten().next();
    let package = package.ok_or_else(|| BringUpError::NoPackage { package: PACKAGE, folder: download.clone() })?;
    output(command("dpkg-deb", ["--extract"]).arg(package.path()).arg(&unfinished))?;
    remove_folder(&download)?;
    remove_folder(&folder)?;
    std::fs::rename(&unfinished, &folder).map_err(HarnessError::io("write", folder.display()))?;
    Ok(programs)
}

impl Prometheus {
    /// Starts Prometheus with this configuration. It scrapes and evaluates every two seconds.
    ///
    /// # Errors
    /// See [`Running::start`].
    pub fn start(programs: &Path, folder: &Path, mut configuration: Value) -> Result<Self, HarnessError> {
        let address = free_address()?;
        let file = folder.join("prometheus.json");
        configuration["global"] = json!({"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"});
        write(&file, configuration.to_string())?;
        let mut prometheus = command(programs.join("prometheus"), [format!("--web.listen-address={address}")]);
        prometheus.arg(format!("--config.file={}", file.display()));
        prometheus.arg(format!("--storage.tsdb.path={}", folder.join("data").display()));
        prometheus.stdout(Stdio::null()).stderr(log_file(&folder.join("log"))?);
        Ok(Self { _process: Running::start(&mut prometheus)?, address })
    }

    /// Prometheus' answer to a request of its HTTP API.
    ///
    /// # Errors
    /// See [`output`]; [`HarnessError::Json`].
    pub fn ask(&self, path: &str, query: &[String]) -> Result<Value, HarnessError> {
        let mut curl = command("curl", ["--silent", "--show-error", "--fail", "--get"]);
        curl.args(query.iter().flat_map(|query| ["--data-urlencode", query]));
        let answer = output(curl.arg(format!("http://{}/api/v1/{path}", self.address)))?;
        events::parse("the answer of Prometheus", &answer)
    }

    /// The samples that a query returns.
    ///
    /// # Errors
    /// See [`Prometheus::ask`].
    pub fn samples(&self, query: &str) -> Result<Vec<Value>, HarnessError> {
        let answer = self.ask("query", &[format!("query={query}")])?;
        Ok(answer["data"]["result"].as_array().cloned().unwrap_or_default())
    }
}

/// The scrape targets in these namespaces: the pods whose annotations ask for it.
///
/// # Errors
/// See [`Kubectl::json`].
pub fn targets(kubectl: &Kubectl, namespaces: &[&str]) -> Result<Vec<Value>, HarnessError> {
    let mut all = Vec::new();
    for namespace in namespaces {
        let pods = kubectl.json(namespace, &["get", "pods"])?;
        all.extend(pods["items"].as_array().into_iter().flatten().filter_map(target));
    }
    Ok(all)
}

/// A pod's target, with the labels that the chart's PodMonitor gives.
fn target(pod: &Value) -> Option<Value> {
    let metadata = &pod["metadata"];
    let annotation = |name: &str| metadata["annotations"][format!("prometheus.io/{name}")].as_str();
    let port = annotation("port").filter(|_| annotation("scrape") == Some("true"))?;
    let address = format!("{}:{port}", pod["status"]["podIP"].as_str()?);
    let mut labels =
        json!({"__metrics_path__": annotation("path")?, "namespace": metadata["namespace"], "pod": metadata["name"]});
    for (label, name) in [("rectrain.dev/job", "rectrain_dev_job"), ("rectrain.dev/role", "rectrain_dev_role")] {
        if let Some(value) = metadata["labels"][label].as_str() {
            labels[name] = value.into();
        }
    }
    Some(json!({"targets": [address], "labels": labels}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_scraped_as_its_annotations_say() {
        let mut pod = json!({"status": {"podIP": "10.0.0.1"}, "metadata": {"name": "j-ps-0", "namespace": "n",
            "labels": {"rectrain.dev/role": "ps", "rectrain.dev/job": "j"}, "annotations": {"prometheus.io/scrape": "true",
            "prometheus.io/port": "9090", "prometheus.io/path": "/metrics"}}});
        let expected = json!({"targets": ["10.0.0.1:9090"], "labels": {"__metrics_path__": "/metrics",
            "namespace": "n", "pod": "j-ps-0", "rectrain_dev_job": "j", "rectrain_dev_role": "ps"}});
        assert_eq!(target(&pod), Some(expected));
        pod["metadata"]["annotations"]["prometheus.io/scrape"] = json!("false");
        assert_eq!(target(&pod), None);
    }
}
