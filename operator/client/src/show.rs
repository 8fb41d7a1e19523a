//! A job's state as text, for `rectrain status`.

use std::fmt::Write;

use rectrain_crds::{
    JobSummary, Phase, QualityStatus, RecTrainingJob, RecTrainingJobStatus, ReplicaStatuses, TablesStatus,
    highest_unseen,
};

/// Renders a job's name, phase, progress, results and problem.
#[must_use]
pub fn render(job: &RecTrainingJob) -> String {
    let mut text = String::new();
    let name = job.metadata.name.as_deref().unwrap_or_default();
    let status = job.status.clone().unwrap_or_default();
    let phase = status.phase.map_or("not seen by an operator yet", Phase::name);
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{name}: {phase}");
    for (label, value) in lines(&status) {
        let _ = writeln!(text, "  {label:<12} {value}");
    }
    if let Some(message) = explanation(&status) {
        let _ = writeln!(text, "\n{message}");
    }
    text
}

fn lines(status: &RecTrainingJobStatus) -> Vec<(&'static str, String)> {
    let mut lines = Vec::new();
    if let Some(mode) = status.mode {
        lines.push(("mode", mode.name().to_owned()));
    }
    if let Some(step) = status.step {
        let of = status.total_steps.map(|total| format!(" of {total}")).unwrap_or_default();
        lines.push(("step", format!("{step}{of}")));
    }
    if let Some(speed) = status.samples_per_second {
        lines.push(("samples/s", speed.to_string()));
    }
    if let Some(slowest) = &status.slowest {
        let node = slowest.node.as_deref().map(|node| format!(" on {node}")).unwrap_or_default();
        let since = slowest.since.as_ref().map(|since| format!(", since {}", since.0)).unwrap_or_default();
        lines
            .push(("slowest", format!("{}{node}: costs {:.0} % of a step{since}", slowest.pod, 100.0 * slowest.share)));
    }
    if let Some(replaced) = status.replaced_pods.last() {
        lines.push(("replaced", format!("at {}: {}", replaced.time.0, replaced.reason)));
    }
    if let Some(stream) = &status.stream {
        lines.push(("behind", format!("{} s, {} records wait", stream.lag_seconds, stream.lag_rows)));
    }
    if let Some(text) = status.quality.as_ref().and_then(QualityStatus::text) {
        lines.push(("new rows", text));
    }
    if let Some(loss) = status.loss {
        lines.push(("loss", format!("{loss:.4}")));
    }
    if let Some(auc) = status.auc {
        lines.push(("AUC", format!("{auc:.4}")));
    }
    if let Some((feature, share)) = highest_unseen(&status.unseen, 1).into_iter().find(|(_, share)| *share > 0.0) {
        lines.push(("unseen ids", format!("{:.1} % of {feature}", 100.0 * share)));
    }
    if let Some(size) = &status.tables {
        lines.push(("tables", tables(size)));
    }
    if let Some(replicas) = &status.replica_statuses {
        lines.push(("pods", pods(replicas)));
    }
    if let Some(restarts) = status.restarts.filter(|restarts| *restarts > 0) {
        lines.push(("restarts", restarts.to_string()));
    }
    if let Some(summary) = &status.summary {
        lines.extend(results(summary));
    }
    lines
}

/// The size of the tables, and their budget if they have one.
fn tables(TablesStatus { rows, bytes, budget }: &TablesStatus) -> String {
    let budget = budget.unwrap_or_default();
    let of = |limit: Option<u64>| limit.map(|limit| format!(" of {limit}")).unwrap_or_default();
    format!("{rows}{} rows, {bytes}{} bytes", of(budget.max_rows), of(budget.max_bytes))
}

fn pods(replicas: &ReplicaStatuses) -> String {
    let shown = replicas.by_role().map(|(role, count)| format!("{role} {}", count.display));
    shown.collect::<Vec<_>>().join(", ")
}

fn results(summary: &JobSummary) -> Vec<(&'static str, String)> {
    let mut lines = vec![
        (
            "trained on",
            format!("{} rows in {:.1} s, {:.0} a second", summary.samples, summary.seconds, summary.samples_per_second),
        ),
        ("rows", summary.rows.to_string()),
    ];
    if let Some(table) = &summary.table {
        let dropped = table.gradients_dropped + table.turned_away;
        lines.push((
            "tables",
            format!(
                "{} bytes; {} rows evicted, {} expired, {} admitted; {dropped} gradients dropped",
                table.bytes, table.evicted, table.expired, table.admitted
            ),
        ));
    }
    if let Some(log_loss) = summary.log_loss {
        lines.push(("log loss", format!("{log_loss:.4}")));
    }
    lines.push(("digest", summary.parameters_sha256.clone()));
    lines
}

/// The reason why the job does not train, from its conditions.
fn explanation(status: &RecTrainingJobStatus) -> Option<String> {
    let holds = |kind: &str| status.conditions.iter().find(|c| c.type_ == kind && c.status == "True");
    let condition = holds("Failed")
        .or_else(|| holds("Stalled"))
        .or_else(|| holds("Reconciling").filter(|_| status.phase == Some(Phase::Restarting)))?;
    Some(format!("{}: {}", condition.reason, condition.message))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn job(status: serde_json::Value) -> RecTrainingJob {
        let job = json!({"apiVersion": "rectrain.dev/v1alpha1", "kind": "RecTrainingJob", "metadata": {"name": "clicks"},
            "spec": {"model": {"kind": "lr"}, "features": {"sparse": [{"name": "C1"}]}, "data": {"synthetic": {}}}, "status": status});
        serde_json::from_value(job).expect("a job")
    }

    #[test]
    fn a_waiting_job_shows_its_step_and_the_reason() {
        let condition = json!({"type": "Stalled", "status": "True", "reason": "Unschedulable", "message": "no node takes clicks-ps-0",
            "lastTransitionTime": "2026-11-21T20:00:00Z"});
        let text = render(&job(
            json!({"phase": "Starting", "mode": "sync", "step": 3, "totalSteps": 9, "conditions": [condition],
            "slowest": {"role": "ps", "index": 1, "pod": "clicks-ps-1", "node": "node-a", "share": 0.6, "since": "2026-11-21T20:00:00Z"},
            "replacedPods": [{"role": "ps", "pod": "clicks-ps-2", "uid": "u", "time": "2026-11-21T19:00:00Z", "reason": "clicks-ps-2 has been slow"}],
            "stream": {"lagRows": 7, "lagSeconds": 40, "lostRecords": 0},
            "quality": {"window": {"auc": 0.7, "rows": 9}, "baseline": {"auc": 0.65, "rows": 9}, "hasFallen": true, "isHeld": false},
            "replicaStatuses": {"ps": {"ready": 1, "wanted": 2, "display": "1/2"}}}),
        ));
        let slow = "slowest      clicks-ps-1 on node-a: costs 60 % of a step, since 2026-11-21T20:00:00Z";
        assert!(text.contains(slow), "{text}");
        assert!(text.starts_with("clicks: Starting\n"), "{text}");
        for line in [
            "step         3 of 9",
            "pods         ps 1/2",
            "replaced     at 2026-11-21T19:00:00Z: clicks-ps-2 has been slow",
            "behind       40 s, 7 records wait",
            "new rows     AUC 0.7000, frozen 0.6500; it has fallen",
            "Unschedulable: no node takes clicks-ps-0",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
    }

    #[test]
    fn a_job_that_is_held_says_so_without_a_prediction() {
        let text = render(&job(
            json!({"phase": "Training", "quality": {"window": {"rows": 0}, "hasFallen": false, "isHeld": true}}),
        ));
        assert!(text.contains("new rows     the quality has fallen, and training waits"), "{text}");
    }

    #[test]
    fn a_job_shows_its_tables_and_their_budget() {
        let shown = |tables| render(&job(json!({"phase": "Training", "tables": tables})));
        let text = shown(json!({"rows": 812, "bytes": 7000, "budget": {"maxRows": 1000}}));
        assert!(text.contains("tables       812 of 1000 rows, 7000 bytes"), "{text}");
        let text = shown(json!({"rows": 812, "bytes": 7000, "budget": {"maxBytes": 9000}}));
        assert!(text.contains("812 rows, 7000 of 9000 bytes"), "{text}");
        let text = shown(json!({"rows": 812, "bytes": 7000}));
        assert!(text.contains("812 rows, 7000 bytes"), "{text}");
    }

    #[test]
    fn a_complete_job_shows_its_results() {
        let text = render(&job(
            json!({"phase": "Complete", "auc": 0.79, "summary": {"steps": 9, "samples": 100, "seconds": 2.0,
            "samplesPerSecond": 50.0, "rows": 7, "parametersSha256": "abc"}}),
        ));
        for part in ["AUC          0.7900", "100 rows in 2.0 s", "digest       abc"] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
