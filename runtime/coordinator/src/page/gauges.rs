//! Figures of the members that run in this process, from its metrics. The coordinator of a job of
//! several processes has none, because each member serves its own metrics. It has the sizes of the
//! tables that the parameter servers report to it.

use std::collections::BTreeMap;

use prometheus::Registry;
use prometheus::proto::{Metric, MetricFamily};
use rectrain_proto::{metric_names, v1};
use serde::Serialize;

const ROWS: &str = "rectrain_ps_rows";
const EVICTED: &str = "rectrain_ps_evicted_rows_total";
const STALENESS: &str = "rectrain_ps_dense_gradient_staleness_steps";
/// The counters whose growth is the throughput of a role.
const WORK: [(&str, &[&str]); 4] = [
    ("ps", &[metric_names::PS_FOUND_ROWS_TOTAL, metric_names::PS_INSERTED_ROWS_TOTAL]),
    ("embedding-worker", &["rectrain_embedding_worker_unique_ids_total"]),
    ("dense-worker", &[metric_names::DENSE_WORKER_SAMPLES_TOTAL]),
    ("loader", &[metric_names::LOADER_ROWS_TOTAL]),
];

/// The figures of all members in this process.
#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Gauges {
    /// Rows in the embedding stores.
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<u64>,
    /// Bytes of the embedding stores.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
    /// The memory budget of the tables: rows or bytes. Absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    budget_rows: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    budget_bytes: Option<u64>,
    /// Rows removed for the budget, since the start of the process. Absent without a budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    evicted_rows: Option<u64>,
    /// Mean staleness of the dense gradients applied without a barrier, in global steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    mean_staleness: Option<f64>,
    /// By role: the work done since the start of the process.
    totals: BTreeMap<&'static str, u64>,
    /// By number of the server: its rows and bytes.
    #[serde(skip)]
    pub(super) servers: BTreeMap<usize, (u64, u64)>,
}

impl Gauges {
    /// Adds the sizes of tables that parameter servers in other processes have reported, and the
    /// budget of the job.
    pub(super) fn with_reported(self, reported: BTreeMap<usize, (u64, u64)>, budget: Option<v1::TableBudget>) -> Self {
        let servers = if self.servers.is_empty() { reported } else { self.servers };
        let sum = |of: fn(&(u64, u64)) -> u64| (!servers.is_empty()).then(|| servers.values().map(of).sum::<u64>());
        let v1::TableBudget { rows, bytes } = budget.unwrap_or_default();
        Self {
            rows: sum(|(rows, _)| *rows),
            bytes: sum(|(_, bytes)| *bytes),
            budget_rows: (rows > 0).then_some(rows),
            budget_bytes: (bytes > 0).then_some(bytes),
            servers,
            ..self
        }
    }

    /// The present figures, without sums over the servers.
    pub(super) fn read(registry: &Registry) -> Self {
        let families = registry.gather();
        let metrics =
            |name: &str| families.iter().find(|family| family.name() == name).map_or(&[][..], MetricFamily::get_metric);
        let servers = per_server(metrics(ROWS), metrics(metric_names::PS_BYTES));
        let evicted = metrics(EVICTED).iter().map(|metric| metric.get_counter().get_value() as u64);
        let mut totals = BTreeMap::new();
        for (role, counters) in WORK {
            let counted: Vec<&Metric> = counters.iter().flat_map(|name| metrics(name)).collect();
            if !counted.is_empty() {
                totals.insert(role, counted.iter().map(|metric| metric.get_counter().get_value()).sum::<f64>() as u64);
            }
        }
        Self {
            evicted_rows: (!metrics(EVICTED).is_empty()).then(|| evicted.sum()),
            mean_staleness: mean(metrics(STALENESS)),
            totals,
            servers,
            ..Self::default()
        }
    }
}

/// Rows and bytes by the label `replica`.
fn per_server(rows: &[Metric], bytes: &[Metric]) -> BTreeMap<usize, (u64, u64)> {
    let mut servers = BTreeMap::<usize, (u64, u64)>::new();
    for metric in rows {
        servers.entry(replica(metric)).or_default().0 = metric.get_gauge().get_value() as u64;
    }
    for metric in bytes {
        servers.entry(replica(metric)).or_default().1 = metric.get_gauge().get_value() as u64;
    }
    servers
}

fn replica(metric: &Metric) -> usize {
    let label = metric.get_label().iter().find(|label| label.name() == "replica");
    label.and_then(|label| label.value().parse().ok()).unwrap_or(0)
}

/// The mean of all observations of histograms; `None` without one.
fn mean(histograms: &[Metric]) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0);
    for metric in histograms {
        sum += metric.get_histogram().get_sample_sum();
        count += metric.get_histogram().get_sample_count();
    }
    (count > 0).then(|| sum / count as f64)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use rectrain_protocol::metrics::{LoaderMetrics, PsMetrics, RoleMetrics};

    use super::*;

    #[test]
    fn figures_of_all_replicas_are_summed() {
        let all = RoleMetrics::new(Registry::new()).unwrap();
        assert_eq!(Gauges::read(all.registry()), Gauges::default());
        for (replica, rows) in [(0, 30), (2, 12)] {
            let server = PsMetrics::of(&all, replica);
            server.rows_held.set(rows);
            server.bytes.set(100 * rows);
            server.found_rows.inc_by(5);
            server.inserted_rows.inc_by(2);
            server.dense_staleness.observe(rows as f64);
        }
        LoaderMetrics::of(&all, 0).rows.inc_by(9);
        let found = Gauges::read(all.registry()).with_reported(BTreeMap::new(), None);
        assert_eq!((found.rows, found.bytes, found.mean_staleness), (Some(42), Some(4200), Some(21.0)));
        assert_eq!(found.totals, BTreeMap::from([("ps", 14), ("loader", 9)]));
        assert_eq!((found.budget_rows, found.budget_bytes, found.evicted_rows), (None, None, None));
        let server = PsMetrics::of(&all, 2);
        server.evicted.inc_by("C1", 3);
        server.evicted.inc_by("C2", 4);
        // The metrics of this process are newer than the reports.
        let budget = Some(v1::TableBudget { rows: 50, bytes: 0 });
        let found = Gauges::read(all.registry()).with_reported(BTreeMap::from([(0, (1, 1))]), budget);
        assert_eq!((found.budget_rows, found.budget_bytes, found.evicted_rows), (Some(50), None, Some(7)));
        assert_eq!(found.servers, BTreeMap::from([(0, (30, 3000)), (2, (12, 1200))]));
    }

    #[test]
    fn servers_in_other_processes_report_their_tables() {
        let budget = Some(v1::TableBudget { rows: 0, bytes: 9000 });
        let found = Gauges::default().with_reported(BTreeMap::from([(0, (30, 3000)), (1, (12, 1200))]), budget);
        assert_eq!((found.rows, found.bytes), (Some(42), Some(4200)));
        assert_eq!((found.budget_rows, found.budget_bytes), (None, Some(9000)));
        assert_eq!(found.servers.get(&1), Some(&(12, 1200)));
        let none = Gauges::default().with_reported(BTreeMap::new(), None);
        assert_eq!(none, Gauges::default());
    }
}
