//! A real Prometheus answers the query of every panel of the chart's dashboards with data. It reads the operator, the pods of jobs and
//! the kubelets' cAdvisor, as one in a cluster does; [`super::alerts`] gives it the chart's rules as well.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};

use super::install::{Running, object_store, upload};
use super::kubectl;
use super::metrics_server::{MEASURED, MetricsServer, USED_BY_OTHERS};
use super::network::NODES;
use super::operate::{NAMESPACE, SYSTEM, delete_job, endless, merged, submit, until_phase};
use super::paths::{Paths, remove_folder, write};
use super::process::{command, eventually, output};
use super::prometheus::{Prometheus, available, free_address, programs, served};
use super::recovery::saved;

/// A panel has data within this time; most have at once.
const PATIENCE: Duration = Duration::from_secs(150);
/// The automatic mode has predicted, and measured what came of it, within this time.
const PREDICTED: Duration = Duration::from_secs(300);
const DASHBOARDS: [&str; 3] = ["job", "operator", "capacity"];
/// Global steps between two of its checkpoints.
pub(super) const EVERY: u64 = 100;
/// The job that is looked at.
const JOB: &str = "shown";
/// Jobs beside the one that is looked at, without which some metrics have no data.
const OTHERS: [&str; 2] = ["automatic", "waits"];

/// One job that chooses its mode itself, and one that no node takes.
pub(super) fn submit_others(paths: &Paths) -> Result<(), String> {
    let [automatic, waits] = OTHERS;
    let mode = json!({"training": {"mode": "auto", "auto": {"windowSeconds": 15, "dwellSeconds": 30}}});
    submit(paths, automatic, &merged(endless(), mode))?;
    submit(paths, waits, &json!({"roles": {"loader": {"template": no_node()}}}))
}

pub(super) fn delete_others(paths: &Paths) -> Result<(), String> {
    OTHERS.into_iter().try_for_each(|job| delete_job(paths, job))
}

/// How long data of a metric, or of a query that names it, may take to be there.
pub(super) fn patience_for(metric: &str) -> Duration {
    match metric {
        metric if metric.contains("prediction_error") => PREDICTED,
        metric if metric.contains(USED_BY_OTHERS) => MEASURED,
        _ => PATIENCE,
    }
}

/// Prometheus, what it reads, and what belongs to it.
pub(super) struct Monitoring {
    pub(super) prometheus: Prometheus,
    folder: PathBuf,
    /// To the kubelets.
    _proxy: Running,
}

impl Monitoring {
    /// Reads everything; evaluates the rules, if there are any. None where it cannot be had, which was said.
    pub(super) fn start(paths: &Paths, rules: Option<&str>) -> Result<Option<Self>, String> {
        let Some(programs) = available(paths) else { return Ok(None) };
        let folder = paths.run().join("monitoring");
        remove_folder(&folder)?;
        let (proxy, kubelets) = proxy(paths)?;
        let targets = folder.join("targets.json");
        write(&targets, Value::from(served(paths)?).to_string())?;
        let pods = json!({"job_name": "pods", "file_sd_configs": [{"files": [targets], "refresh_interval": "2s"}]});
        let mut configuration = json!({"scrape_configs": Value::from([vec![pods], cadvisor(&kubelets)].concat())});
        if let Some(rules) = rules {
            let file = folder.join("alerts.yaml");
            write(&file, rules)?;
            configuration["rule_files"] = json!([file]);
        }
        let prometheus = Prometheus::start(&programs, &folder, configuration)?;
        Ok(Some(Self { prometheus, folder, _proxy: proxy }))
    }

    /// Tells Prometheus of the processes that are there now.
    pub(super) fn look_again(&self, paths: &Paths) -> Result<(), String> {
        let targets = served(paths)?;
        // Written aside and moved: half a file is no list.
        let (new, now) = (self.folder.join("targets.new"), self.folder.join("targets.json"));
        write(&new, Value::from(targets).to_string())?;
        std::fs::rename(&new, &now).map_err(|error| format!("cannot move {}: {error}", new.display()))
    }

    /// The samples that a query gives: labels, and a value that is a number.
    pub(super) fn query(&self, query: &str) -> Result<Vec<(Value, f64)>, String> {
        let answer = self.prometheus.ask("query", &[format!("query={query}")])?;
        let samples = answer["data"]["result"].as_array().cloned().unwrap_or_default();
        let value = |sample: &Value| sample["value"][1].as_str()?.parse::<f64>().ok().filter(|value| value.is_finite());
        Ok(samples.iter().filter_map(|sample| Some((sample["metric"].clone(), value(sample)?))).collect())
    }

    pub(super) fn end(self) -> Result<(), String> {
        let folder = self.folder.clone();
        drop(self);
        remove_folder(&folder)
    }
}

/// The API server, which leads to the kubelets, where nobody has to show a certificate.
pub(super) fn proxy(paths: &Paths) -> Result<(Running, String), String> {
    let address = free_address()?;
    let port = address.rsplit(':').next().unwrap_or_default();
    let mut proxy = kubectl(paths)?;
    proxy.args(["proxy", "--port", port]).stdin(Stdio::null()).stdout(Stdio::null());
    let proxy = Running(proxy.spawn().map_err(|error| format!("cannot run kubectl: {error}"))?);
    Ok((proxy, address))
}

/// What the kubelets measure of containers.
fn cadvisor(api_server: &str) -> Vec<Value> {
    let of = |node: &str| {
        json!({
            "job_name": format!("cadvisor-{node}"),
            "metrics_path": format!("/api/v1/nodes/{node}/proxy/metrics/cadvisor"),
            "static_configs": [{"targets": [api_server]}],
            "metric_relabel_configs": [{"source_labels": ["__name__"], "action": "keep",
                "regex": "container_(cpu_usage_seconds_total|memory_working_set_bytes|spec_memory_limit_bytes)"}],
        })
    };
    NODES.iter().map(|node| of(node.name)).collect()
}

/// What Prometheus' own tool says of the rules, and of what fires them and what does not.
fn promtool(paths: &Paths) -> Result<(), String> {
    let promtool = programs(paths)?.join("promtool");
    let file = |name: &str| crate::workspace().join(name);
    output(command(&promtool, ["check", "rules"]).arg(file("charts/rectrain/alerts.yaml")))?;
    output(command(&promtool, ["test", "rules"]).arg(file("e2e/cluster/alerts-test.yaml"))).map(drop)
}

/// A step of `cargo xtask cluster operate`.
pub(super) fn dashboards(paths: &Paths) -> Result<(), String> {
    let Some(monitoring) = Monitoring::start(paths, None)? else { return Ok(()) };
    let _measures = MetricsServer::start(paths)?;
    promtool(paths)?;
    object_store(paths, NAMESPACE)?;
    upload(paths, NAMESPACE, &crate::workspace(), &[])?;
    // In a mode without a barrier after one with, with checkpoints.
    let training = json!({"switchAt": [{"step": 20, "mode": "gba"}], "evaluation": {"every": "steps", "steps": 300}});
    let limits = json!({"ps": {"template": {"resources": {"limits": {"memory": "2Gi"}}}}});
    submit(paths, JOB, &merged(saved(&endless(), JOB, EVERY), json!({"training": training, "roles": limits})))?;
    submit_others(paths)?;
    until_phase(paths, JOB, "Training")?;
    monitoring.look_again(paths)?;
    let mut panels = 0;
    for name in DASHBOARDS {
        for panel in queries(&dashboard(name)?)? {
            eventually(patience_for(&panel.expression), &format!("data of `{}` of {name}.json", panel.title), || {
                monitoring.look_again(paths)?;
                panel.has_data(&monitoring, &replaced(&panel.expression, name == "operator"))
            })?;
            panels += 1;
        }
    }
    println!("{panels} queries of {} dashboards answered with data", DASHBOARDS.len());
    monitoring.end()?;
    delete_others(paths)?;
    delete_job(paths, JOB)
}

/// What no node is.
pub(super) fn no_node() -> Value {
    json!({"nodeSelector": {"rectrain.dev/no-such-node": "true"}})
}

fn dashboard(name: &str) -> Result<Value, String> {
    let file = crate::workspace().join(format!("charts/rectrain/dashboards/{name}.json"));
    read_json(&file)
}

fn read_json(file: &Path) -> Result<Value, String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    serde_json::from_str(&text).map_err(|error| format!("{}: {error}", file.display()))
}

/// One query of a panel.
#[derive(Debug, PartialEq)]
struct Query {
    title: String,
    expression: String,
    /// As in `{{pod}}`.
    legend: String,
}

fn queries(dashboard: &Value) -> Result<Vec<Query>, String> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let mut all = Vec::new();
    for panel in dashboard["panels"].as_array().into_iter().flatten().filter(|panel| panel["type"] != "row") {
        let title = text(&panel["title"]).ok_or("a panel has no title")?;
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = text(&target["expr"]).ok_or_else(|| format!("a query of `{title}` is none"))?;
            let legend = text(&target["legendFormat"]).unwrap_or_default();
            all.push(Query { title: title.clone(), expression, legend });
        }
    }
    Ok(all)
}

impl Query {
    /// Numbers, with every label that the legend names.
    fn has_data(&self, monitoring: &Monitoring, expression: &str) -> Result<(), String> {
        let samples = monitoring.query(expression)?;
        if samples.is_empty() {
            return Err(format!("{expression} gives nothing"));
        }
        let names: Vec<_> = self.legend.split("{{").skip(1).filter_map(|rest| rest.split_once("}}")).collect();
        match names.iter().find(|(name, _)| samples.iter().any(|(labels, _)| labels[name.trim()].is_null())) {
            Some((name, _)) => Err(format!("{expression} gives no label {name}, which the legend names")),
            None => Ok(()),
        }
    }
}

/// The variables of the dashboards as somebody would choose them.
fn replaced(expression: &str, is_about_operator: bool) -> String {
    let namespace = if is_about_operator { SYSTEM } else { NAMESPACE };
    let variables = [
        ("$__rate_interval", "1m"),
        ("$namespace", namespace),
        ("$job", JOB),
        ("$core_hour", "0.032"),
        ("$gib_hour", "0.0043"),
    ];
    variables.iter().fold(expression.to_owned(), |text, (name, value)| text.replace(name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_query_of_a_panel_is_asked_with_its_variables_replaced() {
        let panels = json!({"panels": [{"type": "row", "title": "R"}, {"type": "stat", "title": "S",
            "targets": [{"expr": "rate(a{n=\"$namespace\",j=\"$job\"}[$__rate_interval])", "legendFormat": "{{pod}}"}]}]});
        let found = queries(&panels).unwrap();
        assert_eq!(found.len(), 1);
        assert_eq!(replaced(&found[0].expression, false), "rate(a{n=\"rectrain-operate\",j=\"shown\"}[1m])");
        for name in DASHBOARDS {
            let all = queries(&dashboard(name).unwrap()).unwrap();
            assert!(all.len() > 10, "{name}");
            assert!(all.iter().all(|query| !replaced(&query.expression, false).contains('$')), "{name}");
        }
    }
}
