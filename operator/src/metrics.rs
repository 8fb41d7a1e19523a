//! The operator's own metrics: outcomes and durations of reconciles, jobs by phase, and how old each job's status is.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus::{
    GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};
use rectrain_crds::Phase;

use crate::phase::is_under_way;
use crate::reconcile::ReconcileError;

/// 1 ms to 30 s.
const SECONDS: &[f64] = &[1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// Name, kind and meaning of every metric, for the reference.
pub const REFERENCE: &[(&str, &str, &str)] = &[
    ("rectrain_operator_reconciles_total", "counter", "Reconciles by outcome: `ok` or `error`."),
    ("rectrain_operator_reconcile_seconds", "histogram", "Time of a reconcile."),
    ("rectrain_operator_reconcile_errors_total", "counter", "Reconciles that failed, by the step that failed."),
    ("rectrain_operator_watch_errors_total", "counter", "Watches that broke off and were begun again."),
    ("rectrain_operator_jobs", "gauge", "Jobs by phase."),
    (
        "rectrain_operator_job_status_age_seconds",
        "gauge",
        "Time since the status of a job was last checked against what is there.",
    ),
    (
        "rectrain_operator_mode_prediction_error_ratio",
        "gauge",
        "By how much a job's measured speed is off what is predicted for its training mode (`auto`): 0.1 is a tenth faster.",
    ),
    ("rectrain_operator_is_leader", "gauge", "1 in the instance that reconciles, 0 in those that stand by."),
    ("process_resident_memory_bytes", "gauge", "Memory that the process holds."),
];

/// docs/reference/operator-metrics.md.
#[must_use]
pub fn reference_markdown() -> String {
    let mut text = String::from(
        "# Metrics of the operator\n\nServed on `/metrics`, port 8080. Those of a job's pods are in [metrics](metrics.md).\n\n\
         | metric | kind | meaning |\n|---|---|---|\n",
    );
    for (name, kind, help) in REFERENCE {
        text.push_str(&format!("| `{name}` | {kind} | {help} |\n"));
    }
    text
}

/// See the module's text. Cheap to clone.
#[derive(Clone)]
pub struct OperatorMetrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    outcomes: IntCounterVec,
    seconds: Histogram,
    errors: IntCounterVec,
    watch_errors: IntCounter,
    jobs: IntGaugeVec,
    ages: GaugeVec,
    prediction_errors: GaugeVec,
    leader: IntGauge,
    memory: IntGauge,
    /// By namespace and name: when the job was last seen and in what phase. One entry a job that exists.
    seen: Mutex<HashMap<(String, String), (Instant, Phase)>>,
}

impl OperatorMetrics {
    /// Registers every metric.
    ///
    /// # Errors
    /// Never in practice: names are registered once.
    pub fn new() -> Result<Self, prometheus::Error> {
        let help = |name: &str| {
            REFERENCE
                .iter()
                .find(|(known, _, _)| *known == name)
                .map(|(_, _, help)| (*help).to_owned())
                .unwrap_or_default()
        };
        let opts = |name: &str| Opts::new(name, help(name));
        let seconds = "rectrain_operator_reconcile_seconds";
        let inner = Inner {
            registry: Registry::new(),
            outcomes: IntCounterVec::new(opts("rectrain_operator_reconciles_total"), &["outcome"])?,
            seconds: Histogram::with_opts(HistogramOpts::new(seconds, help(seconds)).buckets(SECONDS.to_vec()))?,
            errors: IntCounterVec::new(opts("rectrain_operator_reconcile_errors_total"), &["step"])?,
            watch_errors: IntCounter::with_opts(opts("rectrain_operator_watch_errors_total"))?,
            jobs: IntGaugeVec::new(opts("rectrain_operator_jobs"), &["phase"])?,
            ages: GaugeVec::new(opts("rectrain_operator_job_status_age_seconds"), &["job_namespace", "job_name"])?,
            prediction_errors: GaugeVec::new(
                opts("rectrain_operator_mode_prediction_error_ratio"),
                &["job_namespace", "job_name"],
            )?,
            leader: IntGauge::with_opts(opts("rectrain_operator_is_leader"))?,
            memory: IntGauge::with_opts(opts("process_resident_memory_bytes"))?,
            seen: Mutex::default(),
        };
        // A counter that is not there yet hides its first increment from whoever asks for its rate.
        for outcome in ["ok", "error"] {
            inner.outcomes.with_label_values(&[outcome]);
        }
        for step in ReconcileError::STEPS {
            inner.errors.with_label_values(&[step]);
        }
        for collector in [
            Box::new(inner.outcomes.clone()) as Box<dyn prometheus::core::Collector>,
            Box::new(inner.seconds.clone()),
            Box::new(inner.errors.clone()),
            Box::new(inner.watch_errors.clone()),
            Box::new(inner.jobs.clone()),
            Box::new(inner.ages.clone()),
            Box::new(inner.prediction_errors.clone()),
            Box::new(inner.leader.clone()),
            Box::new(inner.memory.clone()),
        ] {
            inner.registry.register(collector)?;
        }
        Ok(Self(Arc::new(inner)))
    }

    /// A reconcile got through (`None`) or failed in a step.
    pub fn reconciled(&self, took: Duration, failed_step: Option<&str>) {
        self.0.seconds.observe(took.as_secs_f64());
        self.0.outcomes.with_label_values(&[if failed_step.is_some() { "error" } else { "ok" }]).inc();
        if let Some(step) = failed_step {
            self.0.errors.with_label_values(&[step]).inc();
        }
    }

    /// A watch broke off.
    pub fn watch_broke(&self) {
        self.0.watch_errors.inc();
    }

    /// Whether this instance reconciles.
    pub fn leads(&self, leads: bool) {
        self.0.leader.set(i64::from(leads));
    }

    /// The job's status is that of now.
    pub fn saw_job(&self, namespace: &str, name: &str, phase: Phase) {
        let mut seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.insert((namespace.to_owned(), name.to_owned()), (Instant::now(), phase));
    }

    /// Jobs that have not come to an end or to rest.
    #[must_use]
    pub fn jobs_under_way(&self) -> usize {
        let seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.values().filter(|(_, phase)| is_under_way(*phase)).count()
    }

    /// How far off the prediction of a job's speed was.
    pub fn predicted(&self, namespace: &str, name: &str, error: f64) {
        self.0.prediction_errors.with_label_values(&[namespace, name]).set(error);
    }

    /// The job is gone, or somebody else's.
    pub fn forget_job(&self, namespace: &str, name: &str) {
        let mut seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.remove(&(namespace.to_owned(), name.to_owned()));
        // It is not there for most jobs.
        let _ = self.0.prediction_errors.remove_label_values(&[namespace, name]);
    }

    /// In Prometheus' text format.
    ///
    /// # Errors
    /// Never in practice.
    pub fn encode(&self) -> Result<String, prometheus::Error> {
        self.refresh();
        TextEncoder::new().encode_to_string(&self.0.registry.gather())
    }

    /// Ages and counts are computed when they are asked for.
    fn refresh(&self) {
        self.0.memory.set(resident_bytes().unwrap_or(0));
        let seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        self.0.ages.reset();
        self.0.jobs.reset();
        for ((namespace, name), (at, phase)) in seen.iter() {
            self.0.ages.with_label_values(&[namespace.as_str(), name.as_str()]).set(at.elapsed().as_secs_f64());
            self.0.jobs.with_label_values(&[phase.name()]).inc();
        }
    }
}

/// What Linux says of this process; nothing on other systems.
fn resident_bytes() -> Option<i64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<i64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_up_to_date() {
        let written = include_str!("../../docs/reference/operator-metrics.md");
        assert_eq!(written, reference_markdown(), "write it anew with `cargo xtask docs`");
    }

    #[test]
    fn every_metric_of_the_reference_is_served_and_named_alike() {
        let metrics = OperatorMetrics::new().expect("they register");
        metrics.reconciled(Duration::from_millis(2), None);
        metrics.reconciled(Duration::from_millis(2), Some("apply"));
        metrics.watch_broke();
        metrics.saw_job("n", "j", Phase::Training);
        metrics.predicted("n", "j", 0.25);
        let text = metrics.encode().expect("they are served");
        for (name, kind, help) in REFERENCE {
            assert!(text.contains(&format!("# TYPE {name} {kind}")), "{name}");
            assert!(help.ends_with('.'), "{name}");
        }
        assert!(text.contains("rectrain_operator_jobs{phase=\"Training\"} 1"), "{text}");
        metrics.forget_job("n", "j");
        assert!(!metrics.encode().expect("they are served").contains("job_name=\"j\""));
    }
}
