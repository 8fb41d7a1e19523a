//! The metrics of a job.

use rectrain_protocol::metrics::RoleMetrics;

/// The values of a metric, one for each replica of its role.
pub(crate) fn values(metrics: &RoleMetrics, name: &str) -> Vec<f64> {
    let text = metrics.encode().unwrap();
    let lines = text.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect()
}
