//! A real Prometheus reads the metrics of the operator and of every role of a job: all targets are up, every family that the
//! references document has data, and `promtool` has nothing to say about any of them. It runs on this machine, which reaches the
//! cluster's pods, and is told of those whose annotations say that they are to be read (Debian's cannot ask Kubernetes itself).

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};

use super::dashboards::{delete_others, patience_for, submit_others};
use super::foreign_kubeconfig;
use super::install::Running;
use super::install::within;
use super::metrics_server::MetricsServer;
use super::operate::{NAMESPACE, SYSTEM, delete_job, endless, merged, submit, until_phase};
use super::paths::{Paths, make_folder, remove_folder, write};
use super::process::{command, eventually, output};
use super::tools::by_apt;

/// Targets are found and read, and families have data, within this time.
const PATIENCE: Duration = Duration::from_secs(90);
/// The references that name every metric.
const REFERENCES: [&str; 2] = ["docs/reference/metrics.md", "docs/reference/operator-metrics.md"];

/// A Prometheus that ends with its owner.
pub(super) struct Prometheus {
    _process: Running,
    address: String,
}

/// A step of `cargo xtask cluster operate`.
pub(super) fn scrapes(paths: &Paths) -> Result<(), String> {
    let Some(programs) = available(paths) else { return Ok(()) };
    let _measures = MetricsServer::start(paths)?;
    let name = "scraped";
    // Both kinds of modes, so that what only one of them counts is there.
    submit(paths, name, &merged(endless(), json!({"training": {"switchAt": [{"step": 20, "mode": "gba"}]}})))?;
    submit_others(paths)?;
    until_phase(paths, name, "Training")?;
    let folder = paths.run().join("prometheus");
    let scrape = json!({"job_name": "pods", "static_configs": served(paths)?});
    let prometheus = Prometheus::start(&programs, &folder, json!({"scrape_configs": [scrape]}))?;
    let roles = ["coordinator", "ps", "embedding-worker", "dense-worker", "loader", "operator"];
    let targets = eventually(PATIENCE, "the targets of Prometheus", || prometheus.targets(&roles))?;
    for family in documented()? {
        eventually(patience_for(&family), &format!("data of {family}"), || prometheus.has(&family))?;
    }
    for (role, url) in &targets {
        check(&programs, role, url)?;
    }
    println!(
        "all targets up, {} families with data, promtool has nothing to say of {}",
        documented()?.len(),
        roles.join(", ")
    );
    drop(prometheus);
    remove_folder(&folder)?;
    delete_others(paths)?;
    delete_job(paths, name)
}

/// The folder of Prometheus' programs; none where it cannot be used, which is said.
pub(super) fn available(paths: &Paths) -> Option<PathBuf> {
    let programs = match foreign_kubeconfig(paths) {
        Some(_) => Err("pods of a cluster that is not of this machine cannot be reached".to_owned()),
        None => programs(paths).map_err(|reason| format!("Debian's package cannot be had: {reason}")),
    };
    programs.inspect_err(|reason| eprintln!("xtask: SKIPPED Prometheus, because {reason}")).ok()
}

/// The folder of `prometheus` and `promtool`. Debian's package is unpacked and not installed, which would start a service.
pub(super) fn programs(paths: &Paths) -> Result<PathBuf, String> {
    let folder = paths.root().join("prometheus");
    let programs = folder.join("usr/bin");
    if programs.join("promtool").exists() {
        return Ok(programs);
    }
    let download = folder.join("download");
    remove_folder(&folder)?;
    make_folder(&download)?;
    by_apt(|| output(command("apt-get", ["download", "prometheus"]).current_dir(&download)))?;
    let package = std::fs::read_dir(&download).map_err(|error| error.to_string())?.flatten().next();
    let package = package.ok_or("apt-get downloaded nothing")?.path();
    output(command("dpkg-deb", ["--extract"]).arg(package).arg(&folder))?;
    remove_folder(&download)?;
    Ok(programs)
}

impl Prometheus {
    /// Reads and evaluates every two seconds what `configuration` says.
    pub(super) fn start(programs: &Path, folder: &Path, mut configuration: Value) -> Result<Self, String> {
        let address = free_address()?;
        let file = folder.join("prometheus.json");
        configuration["global"] = json!({"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "2s"});
        write(&file, configuration.to_string())?;
        let log = folder.join("log");
        write(&log, "")?;
        let log = std::fs::File::options().append(true).open(&log).map_err(|error| error.to_string())?;
        let mut prometheus = command(programs.join("prometheus"), [format!("--web.listen-address={address}")]);
        prometheus.arg(format!("--config.file={}", file.display()));
        prometheus.arg(format!("--storage.tsdb.path={}", folder.join("data").display()));
        prometheus.stdout(Stdio::null()).stderr(log);
        let process = Running(prometheus.spawn().map_err(|error| format!("cannot run Prometheus: {error}"))?);
        Ok(Self { _process: process, address })
    }

    pub(super) fn ask(&self, path: &str, query: &[String]) -> Result<Value, String> {
        let mut curl = command("curl", ["--silent", "--show-error", "--fail", "--get"]);
        curl.args(query.iter().flat_map(|query| ["--data-urlencode", query]));
        let answer = output(curl.arg(format!("http://{}/api/v1/{path}", self.address)))?;
        serde_json::from_str(&answer).map_err(|error| format!("Prometheus answers no JSON: {error}"))
    }

    /// By role, where one of its processes is read, if every process of every role is and can be.
    fn targets(&self, roles: &[&str]) -> Result<BTreeMap<String, String>, String> {
        let answer = self.ask("targets", &["state=active".to_owned()])?;
        let active = answer["data"]["activeTargets"].as_array().cloned().unwrap_or_default();
        let mut up = BTreeMap::new();
        for target in &active {
            let role = target["labels"]["rectrain_dev_role"].as_str().unwrap_or("operator").to_owned();
            let url = target["scrapeUrl"].as_str().unwrap_or_default().to_owned();
            if target["health"] != "up" {
                return Err(format!("{role} at {url} is {}: {}", target["health"], target["lastError"]));
            }
            up.insert(role, url);
        }
        match roles.iter().find(|role| !up.contains_key(**role)) {
            Some(role) => Err(format!("{role} is no target; there are {:?}", up.keys())),
            None => Ok(up),
        }
    }

    fn has(&self, family: &str) -> Result<(), String> {
        let query = format!("query=count({{__name__=~\"{family}|{family}_count\"}})");
        let answer = self.ask("query", &[query])?;
        match answer["data"]["result"].as_array() {
            Some(result) if !result.is_empty() => Ok(()),
            _ => Err("a query gives nothing".to_owned()),
        }
    }
}

/// An address of this machine that is free now; nobody else is likely to take it within the next second.
pub(super) fn free_address() -> Result<String, String> {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    Ok(port.map_err(|error| format!("no port is free: {error}"))?.to_string())
}

/// The processes of the operator and of jobs, as Prometheus is told of them: those of pods whose annotations say so.
pub(super) fn served(paths: &Paths) -> Result<Vec<Value>, String> {
    let mut all = Vec::new();
    for namespace in [NAMESPACE, SYSTEM] {
        let pods = within(paths, namespace, &["get", "pods", "--output=json"])?;
        let pods: Value = serde_json::from_str(&pods).map_err(|error| error.to_string())?;
        all.extend(pods["items"].as_array().into_iter().flatten().filter_map(target));
    }
    Ok(all)
}

/// With the labels that the chart's PodMonitor gives.
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

/// The metrics of the references: the first column of their tables.
fn documented() -> Result<BTreeSet<String>, String> {
    let mut all = BTreeSet::new();
    for reference in REFERENCES {
        let text = std::fs::read_to_string(crate::workspace().join(reference))
            .map_err(|error| format!("cannot read {reference}: {error}"))?;
        all.extend(names(&text));
    }
    Ok(all)
}

fn names(reference: &str) -> Vec<String> {
    let rows = reference.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(name, _)| name.to_owned()).collect()
}

/// What `promtool` says of the text that a process serves.
fn check(programs: &Path, role: &str, url: &str) -> Result<(), String> {
    let served = "curl --silent --show-error --fail \"$0\" | \"$1\" check metrics 2>&1";
    let said = output(command("sh", ["-c", served, url]).arg(programs.join("promtool")));
    match said {
        Ok(nothing) if nothing.trim().is_empty() => Ok(()),
        Ok(said) | Err(said) => Err(format!("promtool says of {role} at {url}: {said}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_read_where_its_annotations_say() {
        let mut pod = json!({"status": {"podIP": "10.0.0.1"}, "metadata": {"name": "j-ps-0", "namespace": "n",
            "labels": {"rectrain.dev/role": "ps", "rectrain.dev/job": "j"}, "annotations": {"prometheus.io/scrape": "true",
            "prometheus.io/port": "9090", "prometheus.io/path": "/metrics"}}});
        let expected = json!({"targets": ["10.0.0.1:9090"], "labels": {"__metrics_path__": "/metrics",
            "namespace": "n", "pod": "j-ps-0", "rectrain_dev_job": "j", "rectrain_dev_role": "ps"}});
        assert_eq!(target(&pod), Some(expected));
        pod["metadata"]["annotations"]["prometheus.io/scrape"] = json!("false");
        assert_eq!(target(&pod), None);
    }

    #[test]
    fn the_references_name_every_metric_in_their_first_column() {
        let table = "# Metrics\n\n| metric | kind |\n|---|---|\n| `a_total` | counter |\n| `b_seconds` | `c` |\n";
        assert_eq!(names(table), ["a_total", "b_seconds"]);
        let all = documented().unwrap();
        assert!(
            all.len() > 40 && all.contains("rectrain_operator_jobs") && all.contains("rectrain_ps_rows"),
            "{all:?}"
        );
    }
}
