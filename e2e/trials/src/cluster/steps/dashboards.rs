//! A real Prometheus answers the query of every dashboard panel with data, and promtool accepts the
//! alert rules.

use std::path::PathBuf;

use rectrain_bring_up::Paths;
use rectrain_bring_up::metrics_server::MetricsServer;
use rectrain_bring_up::prometheus::programs;
use rectrain_harness::command::{command, output};
use rectrain_harness::events::{missing, parse};
use rectrain_harness::files::{read, write};
use rectrain_harness::jobs::NAMESPACE;
use rectrain_harness::kubectl::SYSTEM;
use rectrain_harness::manifests::{endless, merged, with_checkpoints};
use rectrain_harness::waiting::eventually;
use rectrain_harness::workspace::workspace;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use super::serving::{predicts, row, server};
use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::monitoring::{Monitoring, delete_others, patience_for, submit_others};
use crate::cluster::support::object_store;

const DASHBOARDS: [&str; 4] = ["job", "operator", "capacity", "serving"];
/// Global steps between two checkpoints.
const EVERY: u64 = 100;
/// The job that the dashboards show.
const JOB: &str = "shown";
/// The path of its published models, and the server that answers with them.
const PUBLISHED: &str = "s3://data/published/shown";
const SERVER: &str = "answers";
/// Servers with a shard that never answers. Its number is shown all the same.
const SHARDED: &str = "sharded";

pub(in crate::cluster) fn dashboards(cluster: &TestCluster) -> Result<(), TrialError> {
    let Some(monitoring) = Monitoring::start(cluster, None)? else { return Ok(()) };
    let _measures = MetricsServer::start(&cluster.paths)?;
    promtool_accepts_the_rules(&cluster.paths)?;
    object_store::start(&cluster.paths, NAMESPACE)?;
    object_store::make_bucket(cluster.kubectl(), NAMESPACE)?;
    let jobs = &cluster.jobs;
    // First a mode with a barrier, then one without; with checkpoints, evaluations and a memory
    // limit.
    let training = json!({"switchAt": [{"step": 20, "mode": "gba"}], "evaluation": {"every": "steps", "steps": 300}});
    let limits = json!({"ps": {"template": {"resources": {"limits": {"memory": "2Gi"}}}}});
    let publish = json!({"publish": {"path": PUBLISHED, "everySeconds": 5}});
    let job = json!({"training": training, "roles": limits, "serving": publish});
    jobs.submit(JOB, &merged(with_checkpoints(&endless(), JOB, EVERY), job))?;
    submit_others(jobs)?;
    jobs.until_phase(JOB, "Training")?;
    let request = serve(cluster)?;
    monitoring.look_again(cluster)?;
    let mut panels = 0;
    for name in DASHBOARDS {
        for panel in queries(&dashboard(name)?)? {
            let awaited = format!("data of `{}` of {name}.json", panel.title);
            eventually(patience_for(&panel.expression), &awaited, || {
                monitoring.look_again(cluster)?;
                if name == "serving" {
                    // Rates need requests, and servers restart until there is a publication.
                    predicts(jobs, SERVER, &request)?;
                }
                Ok::<(), TrialError>(panel.has_data(&monitoring, &replaced(&panel.expression, name == "operator"))?)
            })?;
            panels += 1;
        }
    }
    println!("{panels} queries of {} dashboards answered with data", DASHBOARDS.len());
    monitoring.end()?;
    jobs.within(&["delete", "recmodelserver", SERVER, SHARDED, "--timeout=120s"])?;
    delete_others(jobs)?;
    Ok(jobs.delete(JOB)?)
}

/// Starts a server of the models that the job publishes. Returns the file of a request.
fn serve(cluster: &TestCluster) -> Result<PathBuf, TrialError> {
    let spec = json!({"model": {"path": PUBLISHED}, "storage": {"secretName": "object-store"}, "replicas": 1});
    cluster.jobs.apply(&server(SERVER, &spec))?;
    let sharded = json!({"model": {"path": "/tmp/none"}, "shards": {"count": 1, "replicas": 1}});
    cluster.jobs.apply(&server(SHARDED, &sharded))?;
    let request = cluster.paths.run().join("dashboards-request.json");
    write(&request, row().to_string())?;
    Ok(request)
}

/// Checks the alert rules with Prometheus' own tool, and runs the rules' tests.
fn promtool_accepts_the_rules(paths: &Paths) -> Result<(), TrialError> {
    let promtool = programs(paths)?.join("promtool");
    let file = |name: &str| workspace().join(name);
    output(command(&promtool, ["check", "rules"]).arg(file("charts/rectrain/alerts.yaml")))?;
    Ok(output(command(&promtool, ["test", "rules"]).arg(file("e2e/cluster/alerts-test.yaml"))).map(drop)?)
}

fn dashboard(name: &str) -> Result<Value, HarnessError> {
    let file = workspace().join(format!("charts/rectrain/dashboards/{name}.json"));
    parse(&file.display().to_string(), &read(&file)?)
}

/// A query of a panel.
#[derive(Debug, PartialEq)]
struct Query {
    title: String,
    expression: String,
    /// The template of the legend, as in `{{pod}}`.
    legend: String,
}

fn queries(dashboard: &Value) -> Result<Vec<Query>, HarnessError> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let mut all = Vec::new();
    for panel in dashboard["panels"].as_array().into_iter().flatten().filter(|panel| panel["type"] != "row") {
        let title = text(&panel["title"]).ok_or_else(|| missing("a panel", panel, "title"))?;
        for target in panel["targets"].as_array().into_iter().flatten() {
            let expression = text(&target["expr"]);
            let expression = expression.ok_or_else(|| missing(&format!("a query of `{title}`"), target, "expr"))?;
            let legend = text(&target["legendFormat"]).unwrap_or_default();
            all.push(Query { title: title.clone(), expression, legend });
        }
    }
    Ok(all)
}

impl Query {
    /// Checks that there are numbers, with every label that the legend names.
    fn has_data(&self, monitoring: &Monitoring, expression: &str) -> Result<(), HarnessError> {
        let samples = monitoring.query(expression)?;
        if samples.is_empty() {
            return Err(not_yet(format!("{expression} returns no number")));
        }
        let names: Vec<_> = self.legend.split("{{").skip(1).filter_map(|rest| rest.split_once("}}")).collect();
        match names.iter().find(|(name, _)| samples.iter().any(|(labels, _)| labels[name.trim()].is_null())) {
            Some((name, _)) => Err(not_yet(format!("{expression} returns no label {name}, which the legend names"))),
            None => Ok(()),
        }
    }
}

/// The expression with a user's choices for the dashboard's variables.
fn replaced(expression: &str, is_about_operator: bool) -> String {
    let namespace = if is_about_operator { SYSTEM } else { NAMESPACE };
    let variables = [
        ("$__rate_interval", "1m"),
        ("$namespace", namespace),
        ("$job", JOB),
        ("$pod", ".*"),
        ("$core_hour", "0.032"),
        ("$gib_hour", "0.0043"),
    ];
    variables.iter().fold(expression.to_owned(), |text, (name, value)| text.replace(name, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_panels_query_is_asked_with_its_variables_replaced() {
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
