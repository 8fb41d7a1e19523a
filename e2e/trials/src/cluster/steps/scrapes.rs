//! A real Prometheus scrapes the operator and every role of a job. All targets are up, every
//! documented metric has data, and `promtool` finds no fault in the text of any of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use rectrain_bring_up::metrics_server::MetricsServer;
use rectrain_bring_up::prometheus::Prometheus;
use rectrain_harness::command::{command, output};
use rectrain_harness::files::{read, remove_folder};
use rectrain_harness::manifests::{endless, merged};
use rectrain_harness::waiting::eventually;
use rectrain_harness::workspace::workspace;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::json;

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::monitoring::{delete_others, patience_for, programs, scrape_targets, submit_others};
use crate::error::unmet;

/// How long all targets may take to be up.
const TARGETS: Duration = Duration::from_secs(90);
/// The references that document every metric.
const REFERENCES: [&str; 2] = ["docs/reference/metrics.md", "docs/reference/operator-metrics.md"];
/// The metrics that this trial's jobs give no data: one exists while a member is slow, the other
/// after a rollback of a stream. Tests of their crates cover them.
const CONDITIONAL: [&str; 2] = ["rectrain_operator_job_slowest_share", "rectrain_coordinator_rolled_back_records"];
/// The start of the metrics that have data only while there are servers of a model. Tests of the
/// operator cover them.
const OF_SERVERS: &str = "rectrain_operator_server_";
const ROLES: [&str; 6] = ["coordinator", "ps", "embedding-worker", "dense-worker", "loader", "operator"];

pub(in crate::cluster) fn scrapes(cluster: &TestCluster) -> Result<(), TrialError> {
    let Some(programs) = programs(cluster)? else { return Ok(()) };
    let _measures = MetricsServer::start(&cluster.paths)?;
    let (jobs, name) = (&cluster.jobs, "scraped");
    // Some metrics need a barrier, others need a mode without one.
    let training = json!({"switchAt": [{"step": 20, "mode": "gba"}], "evaluation": {"every": "steps", "steps": 10}});
    // The metrics of tables need a table that does not keep every row.
    let sparse = json!([{"name": "C{1..6}", "admission": {"probability": 0.5}}]);
    let features = json!({"memory": {"maxRows": 100_000}, "sparse": sparse});
    jobs.submit(name, &merged(endless(), json!({"training": training, "features": features})))?;
    submit_others(jobs)?;
    jobs.until_phase(name, "Training")?;
    let folder = cluster.paths.run().join("prometheus");
    let scrape = json!({"job_name": "pods", "static_configs": scrape_targets(cluster)?});
    let prometheus = Prometheus::start(&programs, &folder, json!({"scrape_configs": [scrape]}))?;
    let targets = eventually(TARGETS, "the targets of Prometheus", || targets(&prometheus))?;
    let awaited: Vec<_> = documented()?.into_iter().filter(|family| has_data_here(family)).collect();
    for family in &awaited {
        eventually(patience_for(family), &format!("data of {family}"), || has_data(&prometheus, family))?;
    }
    for (role, url) in &targets {
        promtool_accepts(&programs, role, url)?;
    }
    println!("all targets up, {} families with data, promtool accepts the text of {}", awaited.len(), ROLES.join(", "));
    drop(prometheus);
    remove_folder(&folder)?;
    delete_others(jobs)?;
    Ok(jobs.delete(name)?)
}

/// One scraped URL of each role, once every process of every role is up.
fn targets(prometheus: &Prometheus) -> Result<BTreeMap<String, String>, HarnessError> {
    let answer = prometheus.ask("targets", &["state=active".to_owned()])?;
    let active = answer["data"]["activeTargets"].as_array().cloned().unwrap_or_default();
    let mut up = BTreeMap::new();
    for target in &active {
        let role = target["labels"]["rectrain_dev_role"].as_str().unwrap_or("operator").to_owned();
        let url = target["scrapeUrl"].as_str().unwrap_or_default().to_owned();
        if target["health"] != "up" {
            return Err(not_yet(format!("{role} at {url} is {}: {}", target["health"], target["lastError"])));
        }
        up.insert(role, url);
    }
    match ROLES.iter().find(|role| !up.contains_key(**role)) {
        Some(role) => Err(not_yet(format!("{role} is no target; there are {:?}", up.keys()))),
        None => Ok(up),
    }
}

/// Whether a documented metric has data in this trial.
fn has_data_here(family: &str) -> bool {
    !CONDITIONAL.contains(&family) && !family.starts_with(OF_SERVERS)
}

fn has_data(prometheus: &Prometheus, family: &str) -> Result<(), HarnessError> {
    let samples = prometheus.samples(&format!("count({{__name__=~\"{family}|{family}_count\"}})"))?;
    if samples.is_empty() { Err(not_yet("there is no sample")) } else { Ok(()) }
}

/// The documented metrics: the first column of the references' tables.
fn documented() -> Result<BTreeSet<String>, HarnessError> {
    let mut all = BTreeSet::new();
    for reference in REFERENCES {
        all.extend(names(&read(&workspace().join(reference))?));
    }
    Ok(all)
}

fn names(reference: &str) -> Vec<String> {
    let rows = reference.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(name, _)| name.to_owned()).collect()
}

/// Checks the text that a process serves with `promtool`.
fn promtool_accepts(programs: &Path, role: &str, url: &str) -> Result<(), TrialError> {
    let pipe = "curl --silent --show-error --fail \"$0\" | \"$1\" check metrics 2>&1";
    let complaint = match output(command("sh", ["-c", pipe, url]).arg(programs.join("promtool"))) {
        Ok(complaint) if complaint.trim().is_empty() => return Ok(()),
        Ok(complaint) => complaint,
        Err(failure) => failure.to_string(),
    };
    Err(unmet(format!("promtool to accept the metrics of {role} at {url}"), complaint))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_references_name_every_metric_in_their_first_column() {
        let table = "# Metrics\n\n| metric | kind |\n|---|---|\n| `a_total` | counter |\n| `b_seconds` | `c` |\n";
        assert_eq!(names(table), ["a_total", "b_seconds"]);
        let all = documented().unwrap();
        assert!(
            all.len() > 40
                && CONDITIONAL.iter().all(|family| all.contains(*family))
                && all.contains("rectrain_operator_jobs")
                && all.contains("rectrain_ps_rows"),
            "{all:?}"
        );
    }
}
