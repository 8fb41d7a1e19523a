//! The operator's own metrics: outcomes and durations of reconciles, calls of the API server, and what the statuses of jobs say, so that
//! dashboards and alerts need no reader of Kubernetes objects.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus::{
    GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};
use rectrain_crds::{Phase, RecTrainingJobStatus, ReplicaCount, ReplicaStatuses};

use crate::phase::is_under_way;
use crate::reconcile::ReconcileError;

/// 1 ms to 30 s.
const SECONDS: &[f64] = &[1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// Name, kind and meaning of every metric, for the reference.
pub const REFERENCE: &[(&str, &str, &str)] = &[
    ("rectrain_operator_reconciles_total", "counter", "Reconciles by outcome: `ok` or `error`."),
    (
        "rectrain_operator_reconcile_seconds",
        "histogram",
        "Time of a reconcile, without the wait of the first ones until the watches have seen everything once.",
    ),
    (
        "rectrain_operator_reconcile_wait_seconds",
        "histogram",
        "Time for which a job that was to be reconciled waited because as many others were as may be at a time.",
    ),
    ("rectrain_operator_reconcile_errors_total", "counter", "Reconciles that failed, by the step that failed."),
    ("rectrain_operator_watch_errors_total", "counter", "Watches that broke off and were begun again."),
    (
        "rectrain_operator_unreadable_jobs_total",
        "counter",
        "How often a job was met that this version cannot read, since a later one has written its status; it is left alone.",
    ),
    (
        "rectrain_operator_late_answers_total",
        "counter",
        "Reconciles that were put aside, and are not counted as such, because the coordinator had not answered within a tenth of a second, or had not the last time; the answer, or the silence, asks for another one.",
    ),
    (
        "rectrain_operator_api_requests_total",
        "counter",
        "Requests to the API server, by HTTP method; a watch is one `GET`.",
    ),
    ("rectrain_operator_jobs", "gauge", "Jobs by phase."),
    ("rectrain_operator_job_phase", "gauge", "1 for the phase that a job is in."),
    (
        "rectrain_operator_job_condition",
        "gauge",
        "1 for each condition of a job that holds, with its reason. Of `Ready` and `Complete`, the good ones, nothing is shown.",
    ),
    ("rectrain_operator_job_mode", "gauge", "1 for the training mode that a job under way is in."),
    ("rectrain_operator_job_step", "gauge", "Completed global steps of a job under way."),
    (
        "rectrain_operator_job_loss",
        "gauge",
        "Mean loss of a job under way: cross entropy, in nats, of the last report.",
    ),
    (
        "rectrain_operator_job_auc",
        "gauge",
        "AUC of a job under way: of its latest evaluation, or of the training rows before the first.",
    ),
    (
        "rectrain_operator_job_restarts",
        "gauge",
        "Restarts after crashes of a job under way, all roles together, that count against spec.faultTolerance.maxRestarts.",
    ),
    ("rectrain_operator_job_max_restarts", "gauge", "How many restarts spec.faultTolerance allows it."),
    ("rectrain_operator_job_replicas", "gauge", "Pods that a job under way should have, by role."),
    ("rectrain_operator_job_ready_replicas", "gauge", "Of those, the ones that are ready."),
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
    (
        "rectrain_operator_cpu_used_by_others_ratio",
        "gauge",
        "CPU that pods of others use of what a job's own have not requested, as its automatic mode sees it: the mean over the nodes of its pods.",
    ),
    (
        "rectrain_operator_lost_pods_total",
        "counter",
        "Pods that were taken for dead because their node was lost and their time to end was over.",
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
    waits: Histogram,
    errors: IntCounterVec,
    watch_errors: IntCounter,
    unreadable_jobs: IntCounter,
    late_answers: IntCounter,
    requests: IntCounterVec,
    jobs: IntGaugeVec,
    ages: GaugeVec,
    statuses: Statuses,
    prediction_errors: GaugeVec,
    used_by_others: GaugeVec,
    lost_pods: IntCounter,
    leader: IntGauge,
    memory: IntGauge,
    /// By namespace and name: when the job was last seen and what its status was. One entry a job that exists.
    seen: Mutex<HashMap<(String, String), (Instant, Seen)>>,
}

/// Of a job's status what is shown.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    phase: Phase,
    /// Types and reasons of what holds and is not good.
    conditions: Vec<(String, String)>,
    /// Nothing of a job that is held or has ended: what it did is in its summary.
    progress: Option<Progress>,
}

#[derive(Clone, Debug, PartialEq)]
struct Progress {
    mode: Option<&'static str>,
    step: Option<u64>,
    loss: Option<f64>,
    auc: Option<f64>,
    restarts: u32,
    max_restarts: u32,
    /// By role.
    replicas: Vec<(&'static str, ReplicaCount)>,
}

impl Seen {
    /// What `status` says of a job that may restart so often.
    #[must_use]
    pub fn new(status: &RecTrainingJobStatus, max_restarts: u32) -> Self {
        let phase = status.phase.unwrap_or(Phase::Pending);
        let bad = |kind: &str| !matches!(kind, "Ready" | "Complete");
        let holding = status.conditions.iter().filter(|condition| condition.status == "True" && bad(&condition.type_));
        let replicas = status.replica_statuses.iter().flat_map(ReplicaStatuses::by_role);
        Self {
            phase,
            conditions: holding.map(|condition| (condition.type_.clone(), condition.reason.clone())).collect(),
            progress: is_under_way(phase).then(|| Progress {
                mode: status.mode.map(|mode| mode.name()),
                step: status.step,
                loss: status.loss,
                auc: status.auc,
                restarts: status.counted_restarts(),
                max_restarts,
                replicas: replicas.map(|(role, count)| (role, count.clone())).collect(),
            }),
        }
    }
}

/// What the statuses of jobs say. Empty until it is asked for.
struct Statuses {
    phase: GaugeVec,
    condition: GaugeVec,
    mode: GaugeVec,
    step: GaugeVec,
    loss: GaugeVec,
    auc: GaugeVec,
    restarts: GaugeVec,
    max_restarts: GaugeVec,
    replicas: GaugeVec,
    ready_replicas: GaugeVec,
}

impl Statuses {
    fn new(opts: impl Fn(&str) -> Opts) -> Result<Self, prometheus::Error> {
        let by = |name: &str, more: &[&str]| {
            let name = format!("rectrain_operator_job_{name}");
            GaugeVec::new(opts(&name), &[&["job_namespace", "job_name"], more].concat())
        };
        Ok(Self {
            phase: by("phase", &["phase"])?,
            condition: by("condition", &["condition", "reason"])?,
            mode: by("mode", &["mode"])?,
            step: by("step", &[])?,
            loss: by("loss", &[])?,
            auc: by("auc", &[])?,
            restarts: by("restarts", &[])?,
            max_restarts: by("max_restarts", &[])?,
            replicas: by("replicas", &["role"])?,
            ready_replicas: by("ready_replicas", &["role"])?,
        })
    }

    fn all(&self) -> [&GaugeVec; 10] {
        [
            &self.phase,
            &self.condition,
            &self.mode,
            &self.step,
            &self.loss,
            &self.auc,
            &self.restarts,
            &self.max_restarts,
            &self.replicas,
            &self.ready_replicas,
        ]
    }

    fn show(&self, namespace: &str, name: &str, seen: &Seen) {
        self.phase.with_label_values(&[namespace, name, seen.phase.name()]).set(1.0);
        for (kind, reason) in &seen.conditions {
            self.condition.with_label_values(&[namespace, name, kind, reason]).set(1.0);
        }
        let Some(progress) = &seen.progress else { return };
        if let Some(mode) = progress.mode {
            self.mode.with_label_values(&[namespace, name, mode]).set(1.0);
        }
        let figures = [
            (&self.step, progress.step.map(|step| step as f64)),
            (&self.loss, progress.loss),
            (&self.auc, progress.auc),
            (&self.restarts, Some(f64::from(progress.restarts))),
            (&self.max_restarts, Some(f64::from(progress.max_restarts))),
        ];
        for (gauge, value) in figures.into_iter().filter_map(|(gauge, value)| Some((gauge, value?))) {
            gauge.with_label_values(&[namespace, name]).set(value);
        }
        for (role, count) in &progress.replicas {
            self.replicas.with_label_values(&[namespace, name, role]).set(f64::from(count.wanted));
            self.ready_replicas.with_label_values(&[namespace, name, role]).set(f64::from(count.ready));
        }
    }
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
        let histogram =
            |name: &str| Histogram::with_opts(HistogramOpts::new(name, help(name)).buckets(SECONDS.to_vec()));
        let inner = Inner {
            registry: Registry::new(),
            outcomes: IntCounterVec::new(opts("rectrain_operator_reconciles_total"), &["outcome"])?,
            seconds: histogram("rectrain_operator_reconcile_seconds")?,
            waits: histogram("rectrain_operator_reconcile_wait_seconds")?,
            errors: IntCounterVec::new(opts("rectrain_operator_reconcile_errors_total"), &["step"])?,
            watch_errors: IntCounter::with_opts(opts("rectrain_operator_watch_errors_total"))?,
            unreadable_jobs: IntCounter::with_opts(opts("rectrain_operator_unreadable_jobs_total"))?,
            late_answers: IntCounter::with_opts(opts("rectrain_operator_late_answers_total"))?,
            requests: IntCounterVec::new(opts("rectrain_operator_api_requests_total"), &["method"])?,
            jobs: IntGaugeVec::new(opts("rectrain_operator_jobs"), &["phase"])?,
            ages: GaugeVec::new(opts("rectrain_operator_job_status_age_seconds"), &["job_namespace", "job_name"])?,
            statuses: Statuses::new(opts)?,
            prediction_errors: GaugeVec::new(
                opts("rectrain_operator_mode_prediction_error_ratio"),
                &["job_namespace", "job_name"],
            )?,
            used_by_others: GaugeVec::new(
                opts("rectrain_operator_cpu_used_by_others_ratio"),
                &["job_namespace", "job_name"],
            )?,
            lost_pods: IntCounter::with_opts(opts("rectrain_operator_lost_pods_total"))?,
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
            Box::new(inner.waits.clone()),
            Box::new(inner.errors.clone()),
            Box::new(inner.watch_errors.clone()),
            Box::new(inner.unreadable_jobs.clone()),
            Box::new(inner.late_answers.clone()),
            Box::new(inner.requests.clone()),
            Box::new(inner.jobs.clone()),
            Box::new(inner.ages.clone()),
            Box::new(inner.prediction_errors.clone()),
            Box::new(inner.used_by_others.clone()),
            Box::new(inner.lost_pods.clone()),
            Box::new(inner.leader.clone()),
            Box::new(inner.memory.clone()),
        ] {
            inner.registry.register(collector)?;
        }
        for gauge in inner.statuses.all() {
            inner.registry.register(Box::new(gauge.clone()))?;
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

    /// A job has its turn.
    pub fn waited(&self, time: Duration) {
        self.0.waits.observe(time.as_secs_f64());
    }

    /// A watch broke off.
    pub fn watch_broke(&self) {
        self.0.watch_errors.inc();
    }

    /// A job could not be read.
    pub fn job_was_unreadable(&self) {
        self.0.unreadable_jobs.inc();
    }

    /// A coordinator has not answered at once.
    pub fn answer_is_late(&self) {
        self.0.late_answers.inc();
    }

    /// The API server is asked for something.
    pub fn requests(&self, method: &str) {
        self.0.requests.with_label_values(&[method]).inc();
    }

    /// Whether this instance reconciles.
    pub fn leads(&self, leads: bool) {
        self.0.leader.set(i64::from(leads));
    }

    /// The job's status is that of now.
    pub fn saw_job(&self, namespace: &str, name: &str, job: Seen) {
        let mut seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.insert((namespace.to_owned(), name.to_owned()), (Instant::now(), job));
    }

    /// Jobs that have not come to an end or to rest.
    #[must_use]
    pub fn jobs_under_way(&self) -> usize {
        let seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.values().filter(|(_, seen)| is_under_way(seen.phase)).count()
    }

    /// How far off the prediction of a job's speed was, if its mode is chosen automatically and its speed was measured.
    pub fn predicted(&self, namespace: &str, name: &str, error: Option<f64>) {
        set_or_remove(&self.0.prediction_errors, [namespace, name], error);
    }

    /// So many pods of lost nodes were taken for dead.
    pub fn lost_pods(&self, count: u64) {
        self.0.lost_pods.inc_by(count);
    }

    /// How much others use of the nodes of a job's pods, if that is known.
    pub fn crowded(&self, namespace: &str, name: &str, used_by_others: Option<f64>) {
        set_or_remove(&self.0.used_by_others, [namespace, name], used_by_others);
    }

    /// There is nothing to decide about the job at present: what was last seen of it holds no more.
    pub fn forget_look(&self, namespace: &str, name: &str) {
        self.predicted(namespace, name, None);
        self.crowded(namespace, name, None);
    }

    /// The job is gone, or somebody else's.
    pub fn forget_job(&self, namespace: &str, name: &str) {
        let mut seen = self.0.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.remove(&(namespace.to_owned(), name.to_owned()));
        self.forget_look(namespace, name);
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
        self.0.statuses.all().into_iter().for_each(GaugeVec::reset);
        for ((namespace, name), (at, job)) in seen.iter() {
            self.0.ages.with_label_values(&[namespace.as_str(), name.as_str()]).set(at.elapsed().as_secs_f64());
            self.0.jobs.with_label_values(&[job.phase.name()]).inc();
            self.0.statuses.show(namespace, name, job);
        }
    }
}

fn set_or_remove(gauge: &GaugeVec, job: [&str; 2], value: Option<f64>) {
    match value {
        Some(value) => gauge.with_label_values(&job).set(value),
        // What is not known was perhaps never known: most jobs leave nothing to decide.
        None => drop(gauge.remove_label_values(&job)),
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
        metrics.answer_is_late();
        metrics.requests("GET");
        metrics.saw_job("n", "j", Seen::new(&training(), 10));
        metrics.predicted("n", "j", Some(0.25));
        metrics.crowded("n", "j", Some(0.5));
        let text = metrics.encode().expect("they are served");
        for (name, kind, help) in REFERENCE {
            assert!(text.contains(&format!("# TYPE {name} {kind}")), "{name}");
            assert!(help.ends_with('.'), "{name}");
        }
        for line in [
            "jobs{phase=\"Training\"} 1",
            "job_phase{job_name=\"j\",job_namespace=\"n\",phase=\"Training\"} 1",
            "job_condition{condition=\"Stalled\",job_name=\"j\",job_namespace=\"n\",reason=\"ModeRefused\"} 1",
            "job_mode{job_name=\"j\",job_namespace=\"n\",mode=\"gba\"} 1",
            "job_restarts{job_name=\"j\",job_namespace=\"n\"} 3",
            "job_max_restarts{job_name=\"j\",job_namespace=\"n\"} 10",
            "job_replicas{job_name=\"j\",job_namespace=\"n\",role=\"ps\"} 2",
            "job_ready_replicas{job_name=\"j\",job_namespace=\"n\",role=\"ps\"} 1",
            "cpu_used_by_others_ratio{job_name=\"j\",job_namespace=\"n\"} 0.5",
        ] {
            assert!(text.contains(&format!("rectrain_operator_{line}\n")), "{line}: {text}");
        }
        assert!(!text.contains("condition=\"Ready\""), "{text}");
        metrics.crowded("n", "j", None);
        let text = metrics.encode().expect("they are served");
        assert!(!text.contains("cpu_used_by_others_ratio{") && text.contains("mode_prediction_error_ratio{"), "{text}");
        metrics.forget_look("n", "j");
        let text = metrics.encode().expect("they are served");
        assert!(!text.contains("mode_prediction_error_ratio{") && text.contains("job_step{"), "{text}");
        metrics.forget_job("n", "j");
        assert!(!metrics.encode().expect("they are served").contains("job_name=\"j\""));
    }

    /// In mode gba, with one of two parameter servers ready, and one condition of each kind.
    fn training() -> RecTrainingJobStatus {
        let condition = |kind: &str, status: &str| serde_json::json!({"type": kind, "status": status, "reason": "ModeRefused", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        serde_json::from_value(serde_json::json!({
            "phase": "Training", "mode": "gba", "step": 7, "loss": 0.5, "auc": 0.75, "restarts": 3,
            "conditions": [condition("Ready", "True"), condition("Stalled", "True"), condition("Failed", "False")],
            "replicaStatuses": {"ps": {"ready": 1, "wanted": 2, "display": "1/2"}},
        }))
        .expect("it is a status")
    }

    #[test]
    fn of_a_job_that_has_ended_only_its_phase_and_conditions_are_shown() {
        let metrics = OperatorMetrics::new().expect("they register");
        metrics.saw_job("n", "j", Seen::new(&training(), 10));
        let mut ended = training();
        ended.phase = Some(Phase::Failed);
        metrics.saw_job("n", "j", Seen::new(&ended, 10));
        let text = metrics.encode().expect("they are served");
        assert!(text.contains("rectrain_operator_job_phase{job_name=\"j\",job_namespace=\"n\",phase=\"Failed\"} 1"));
        assert!(!text.contains("phase=\"Training\"") && !text.contains("rectrain_operator_job_step{"), "{text}");
    }
}
