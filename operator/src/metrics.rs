//! The operator's own metrics: reconciles, calls of the API server, and the statuses of jobs.
//! Dashboards and alerts so need no reader of Kubernetes objects.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use prometheus::{
    GaugeVec, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry, TextEncoder,
};
use rectrain_crds::{
    CheckpointStatus, Phase, RecModelServerStatus, RecTrainingJobStatus, ReplicaCount, ReplicaStatuses, SlowestStatus,
    UnseenShares,
};

use crate::names::JobName;

/// 1 ms to 30 s.
const SECONDS: &[f64] = &[1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// Declares every metric once: its field, kind, name, further labels and help. The kinds:
///
/// - `seconds`: a histogram.
/// - `counter` and `gauge`: a single value.
/// - `counters` and `gauges`: one value per combination of labels.
/// - `job`: a gauge of each job, with the labels `job_namespace` and `job_name`.
/// - `server`: a gauge of each RecModelServer, with labels `server_namespace` and `server_name`.
/// - `status`: the same as `job` for a value of the job's status. It is set at each scrape.
macro_rules! metrics {
    ($($field:ident: $kind:ident = $name:literal $([$($label:literal),+])?, $help:literal;)*) => {
        /// All metrics, registered.
        struct Families { $($field: metrics!(@family $kind),)* }

        impl Families {
            fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
                $(
                    let $field = metrics!(@new $kind, $name, $help, [$($($label),+)?])?;
                    registry.register(Box::new($field.clone()))?;
                )*
                Ok(Self { $($field,)* })
            }

            /// Clears the gauges of statuses.
            fn clear_statuses(&self) {
                $(metrics!(@clear $kind, self.$field);)*
            }

            /// Clears the gauges of model servers.
            fn clear_servers(&self) {
                $(metrics!(@clear_server $kind, self.$field);)*
            }
        }

        /// Name, kind and help of every metric, for the reference.
        pub const REFERENCE: &[(&str, &str, &str)] = &[$(($name, metrics!(@kind $kind), $help),)*];
    };
    (@family seconds) => { Histogram };
    (@family counter) => { IntCounter };
    (@family counters) => { IntCounterVec };
    (@family gauge) => { IntGauge };
    (@family gauges) => { IntGaugeVec };
    (@family job) => { GaugeVec };
    (@family status) => { GaugeVec };
    (@family server) => { GaugeVec };
    (@new seconds, $name:literal, $help:literal, []) => {
        Histogram::with_opts(HistogramOpts::new($name, $help).buckets(SECONDS.to_vec()))
    };
    (@new counter, $name:literal, $help:literal, []) => { IntCounter::with_opts(Opts::new($name, $help)) };
    (@new counters, $name:literal, $help:literal, [$($label:literal),+]) => {
        IntCounterVec::new(Opts::new($name, $help), &[$($label),+])
    };
    (@new gauge, $name:literal, $help:literal, []) => { IntGauge::with_opts(Opts::new($name, $help)) };
    (@new gauges, $name:literal, $help:literal, [$($label:literal),+]) => {
        IntGaugeVec::new(Opts::new($name, $help), &[$($label),+])
    };
    (@new job, $name:literal, $help:literal, [$($label:literal),*]) => {
        GaugeVec::new(Opts::new($name, $help), &["job_namespace", "job_name", $($label),*])
    };
    (@new server, $name:literal, $help:literal, []) => {
        GaugeVec::new(Opts::new($name, $help), &["server_namespace", "server_name"])
    };
    (@new status, $name:literal, $help:literal, [$($label:literal),*]) => {
        metrics!(@new job, $name, $help, [$($label),*])
    };
    (@clear status, $family:expr) => { $family.reset() };
    (@clear $kind:ident, $family:expr) => {};
    (@clear_server server, $family:expr) => { $family.reset() };
    (@clear_server $kind:ident, $family:expr) => {};
    (@kind seconds) => { "histogram" };
    (@kind counter) => { "counter" };
    (@kind counters) => { "counter" };
    (@kind $gauge:ident) => { "gauge" };
}

metrics! {
    outcomes: counters = "rectrain_operator_reconciles_total" ["outcome"], "Reconciles by outcome: `ok` or `error`.";
    seconds: seconds = "rectrain_operator_reconcile_seconds", "Time of a reconcile. The first ones do not include the wait for the watches' first complete lists.";
    waits: seconds = "rectrain_operator_reconcile_wait_seconds", "Time that a job waited for a reconcile, because as many others as allowed were under way.";
    errors: counters = "rectrain_operator_reconcile_errors_total" ["step"], "Failed reconciles, by the step that failed.";
    watch_errors: counter = "rectrain_operator_watch_errors_total", "Watches that broke off and were restarted.";
    unreadable_jobs: counter = "rectrain_operator_unreadable_jobs_total", "Encounters with a job that this version cannot read, because a later one has written its status. The operator does not touch it.";
    late_answers: counter = "rectrain_operator_late_answers_total", "Reconciles that were put aside and are not counted as such: the coordinator did not answer within a tenth of a second, or was late the last time. The answer, or its deadline, triggers another reconcile.";
    requests: counters = "rectrain_operator_api_requests_total" ["method"], "Requests to the API server, by HTTP method; a watch is one `GET`.";
    jobs: gauges = "rectrain_operator_jobs" ["phase"], "Jobs by phase.";
    phases: status = "rectrain_operator_job_phase" ["phase"], "1 for the phase of a job.";
    conditions: status = "rectrain_operator_job_condition" ["condition", "reason"], "1 for each condition of a job that is true, with its reason. The good conditions `Ready` and `Complete` are not shown.";
    modes: status = "rectrain_operator_job_mode" ["mode"], "1 for the training mode of a job under way.";
    steps: status = "rectrain_operator_job_step", "Completed global steps of a job under way.";
    losses: status = "rectrain_operator_job_loss", "Mean loss of a job under way: cross entropy, in nats, of the last report.";
    aucs: status = "rectrain_operator_job_auc", "AUC of a job under way: of its latest evaluation, or of the training rows before the first.";
    unseen: status = "rectrain_operator_job_unseen_share" ["feature"], "Share of a feature's test ids that no training row had, in the latest evaluation of a job under way. The 32 features with the highest shares.";
    restarts: status = "rectrain_operator_job_restarts", "Restarts after crashes of a job under way, all roles together, that count against spec.faultTolerance.maxRestarts.";
    max_restarts: status = "rectrain_operator_job_max_restarts", "Restarts that spec.faultTolerance allows the job.";
    replicas: status = "rectrain_operator_job_replicas" ["role"], "Pods that a job under way should have, by role.";
    ready_replicas: status = "rectrain_operator_job_ready_replicas" ["role"], "Ready pods of a job under way, by role.";
    ages: status = "rectrain_operator_job_status_age_seconds", "Time since the status of a job was last checked.";
    slowest: status = "rectrain_operator_job_slowest_share" ["role", "index", "member_pod", "member_node"], "Share of a step's time that the slowness of a job's slowest member costs. Absent if no member is slow.";
    prediction_errors: job = "rectrain_operator_mode_prediction_error_ratio", "Relative error of the speed predicted for the training mode of a job in `auto`: 0.1 means a tenth faster than predicted.";
    used_by_others: job = "rectrain_operator_cpu_used_by_others_ratio", "CPU in use by other pods over the CPU that a job has not requested, as its automatic mode sees it: the mean over the nodes of its pods.";
    servers: server = "rectrain_operator_server_replicas", "Servers that a RecModelServer should have.";
    ready_servers: server = "rectrain_operator_server_ready_replicas", "Servers of a RecModelServer that answer.";
    server_steps: server = "rectrain_operator_server_step", "Global step of the model that the servers of a RecModelServer should have. Absent for a path without a version.";
    server_served_steps: server = "rectrain_operator_server_served_step", "Lowest global step among the servers of a RecModelServer that answer, without its canary. It differs from `rectrain_operator_server_step` during a rollout.";
    server_latest_steps: server = "rectrain_operator_server_latest_step", "Global step of the newest known checkpoint of a RecModelServer that follows its job. Absent for a pinned version.";
    shards: server = "rectrain_operator_server_shards", "Shards of the rows that a RecModelServer should have. Absent without `spec.shards`.";
    ready_shards: server = "rectrain_operator_server_ready_shards", "Shards of a RecModelServer with at least one pod that answers.";
    lost_pods: counter = "rectrain_operator_lost_pods_total", "Pods that the operator deleted because their node was lost and their grace period was over.";
    replaced_pods: counter = "rectrain_operator_replaced_pods_total", "Pods that the operator deleted because they stayed slow (spec.faultTolerance.replaceSlow).";
    api_server: gauge = "rectrain_operator_api_server_answers", "1 while the API server answers this instance, 0 while it is silent. The instance waits for it, and is not ready meanwhile.";
    lost_leases: counters = "rectrain_operator_leases_lost_total" ["cause"], "Times that this instance stopped leading without ending: `silent` if the lease was not renewed in time, `taken` if another instance took it or it was deleted. The instance joins the election again.";
    leader: gauge = "rectrain_operator_is_leader", "1 in the instance that reconciles, 0 in standby instances.";
    memory: gauge = "process_resident_memory_bytes", "Resident memory of the process.";
}

/// docs/reference/operator-metrics.md.
#[must_use]
pub fn reference_markdown() -> String {
    let mut text = String::from(
        "# Metrics of the operator\n\nThe operator serves them on `/metrics`, port 8080. Metrics of a job's pods are [on their own page](metrics.md).\n\n\
         | metric | kind | meaning |\n|---|---|---|\n",
    );
    for (name, kind, help) in REFERENCE {
        text.push_str(&format!("| `{name}` | {kind} | {help} |\n"));
    }
    text
}

/// A step of a reconcile, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Read the job.
    Get,
    /// Read its objects.
    List,
    /// Write its status.
    Status,
    /// Apply its objects.
    Apply,
    /// Delete objects.
    Delete,
    /// Build its objects.
    Build,
    /// The operator ends.
    Stopped,
}

impl Step {
    /// All steps.
    pub const ALL: [Self; 7] =
        [Self::Get, Self::List, Self::Status, Self::Apply, Self::Delete, Self::Build, Self::Stopped];

    /// The value of the label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "get",
            Self::List => "list",
            Self::Status => "status",
            Self::Apply => "apply",
            Self::Delete => "delete",
            Self::Build => "build",
            Self::Stopped => "stopped",
        }
    }
}

/// Why an instance stopped leading without ending, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// The lease was not renewed in time, for instance because the API server is silent.
    Silent,
    /// Another instance took the lease, or it was deleted.
    Taken,
}

impl Loss {
    /// All causes.
    pub const ALL: [Self; 2] = [Self::Silent, Self::Taken];

    /// The value of the label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::Taken => "taken",
        }
    }
}

/// The operator's metrics. Cheap to clone.
#[derive(Clone)]
pub struct OperatorMetrics(Arc<Inner>);

struct Inner {
    registry: Registry,
    families: Families,
    /// The last snapshot of each job and its time. One entry per existing job.
    snapshots: Mutex<HashMap<JobName, (Instant, JobSnapshot)>>,
}

/// The values of a job's status that metrics show.
#[derive(Clone, Debug, PartialEq)]
pub struct JobSnapshot {
    phase: Phase,
    /// Types and reasons of bad conditions that are true.
    conditions: Vec<(String, String)>,
    /// `None` for a job that is suspended or has ended: its summary has the results.
    progress: Option<Progress>,
}

#[derive(Clone, Debug, PartialEq)]
struct Progress {
    mode: Option<&'static str>,
    step: Option<u64>,
    loss: Option<f64>,
    auc: Option<f64>,
    unseen: UnseenShares,
    restarts: u32,
    max_restarts: u32,
    slowest: Option<SlowestStatus>,
    /// By role.
    replicas: Vec<(&'static str, ReplicaCount)>,
}

impl JobSnapshot {
    /// The values of `status`. The job may restart `max_restarts` times.
    #[must_use]
    pub fn new(status: &RecTrainingJobStatus, max_restarts: u32) -> Self {
        let phase = status.phase.unwrap_or(Phase::Pending);
        let bad = |kind: &str| !matches!(kind, "Ready" | "Complete");
        let holding = status.conditions.iter().filter(|condition| condition.status == "True" && bad(&condition.type_));
        let replicas = status.replica_statuses.iter().flat_map(ReplicaStatuses::by_role);
        Self {
            phase,
            conditions: holding.map(|condition| (condition.type_.clone(), condition.reason.clone())).collect(),
            progress: phase.is_under_way().then(|| Progress {
                mode: status.mode.map(|mode| mode.name()),
                step: status.step,
                loss: status.loss,
                auc: status.auc,
                unseen: status.unseen.clone(),
                slowest: status.slowest.clone(),
                restarts: status.counted_restarts(),
                max_restarts,
                replicas: replicas.map(|(role, count)| (role.name(), count.clone())).collect(),
            }),
        }
    }
}

impl Families {
    /// Sets the gauges of a job's status.
    fn show(&self, job: &JobName, snapshot: &JobSnapshot) {
        let (namespace, name) = (job.namespace.as_str(), job.name.as_str());
        self.phases.with_label_values(&[namespace, name, snapshot.phase.name()]).set(1.0);
        for (kind, reason) in &snapshot.conditions {
            self.conditions.with_label_values(&[namespace, name, kind, reason]).set(1.0);
        }
        let Some(progress) = &snapshot.progress else { return };
        if let Some(mode) = progress.mode {
            self.modes.with_label_values(&[namespace, name, mode]).set(1.0);
        }
        let figures = [
            (&self.steps, progress.step.map(|step| step as f64)),
            (&self.losses, progress.loss),
            (&self.aucs, progress.auc),
            (&self.restarts, Some(f64::from(progress.restarts))),
            (&self.max_restarts, Some(f64::from(progress.max_restarts))),
        ];
        for (gauge, value) in figures.into_iter().filter_map(|(gauge, value)| Some((gauge, value?))) {
            gauge.with_label_values(&[namespace, name]).set(value);
        }
        for (feature, share) in &progress.unseen {
            self.unseen.with_label_values(&[namespace, name, feature.as_str()]).set(*share);
        }
        if let Some(slowest) = &progress.slowest {
            let SlowestStatus { role, index, pod, node, share, .. } = slowest;
            let (index, node) = (index.to_string(), node.as_deref().unwrap_or_default());
            self.slowest.with_label_values(&[namespace, name, role, &index, pod, node]).set(*share);
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
        let registry = Registry::new();
        let families = Families::new(&registry)?;
        // A counter that appears with its first increment has no rate for it.
        for outcome in ["ok", "error"] {
            families.outcomes.with_label_values(&[outcome]);
        }
        for step in Step::ALL {
            families.errors.with_label_values(&[step.name()]);
        }
        for loss in Loss::ALL {
            families.lost_leases.with_label_values(&[loss.name()]);
        }
        Ok(Self(Arc::new(Inner { registry, families, snapshots: Mutex::default() })))
    }

    fn families(&self) -> &Families {
        &self.0.families
    }

    /// A reconcile succeeded (`None`), or failed in a step.
    pub fn reconciled(&self, took: Duration, failed: Option<Step>) {
        let families = self.families();
        families.seconds.observe(took.as_secs_f64());
        families.outcomes.with_label_values(&[if failed.is_some() { "error" } else { "ok" }]).inc();
        if let Some(step) = failed {
            families.errors.with_label_values(&[step.name()]).inc();
        }
    }

    /// A job has waited for its reconcile.
    pub fn waited(&self, time: Duration) {
        self.families().waits.observe(time.as_secs_f64());
    }

    /// A watch broke off.
    pub fn watch_broke(&self) {
        self.families().watch_errors.inc();
    }

    /// A job could not be read.
    pub fn job_was_unreadable(&self) {
        self.families().unreadable_jobs.inc();
    }

    /// A coordinator did not answer in time.
    pub fn answer_is_late(&self) {
        self.families().late_answers.inc();
    }

    /// A request to the API server.
    pub fn requests(&self, method: &str) {
        self.families().requests.with_label_values(&[method]).inc();
    }

    /// Whether the API server answers.
    pub fn api_server_answers(&self, answers: bool) {
        self.families().api_server.set(i64::from(answers));
    }

    /// This instance stopped leading. The status of jobs is another instance's now.
    pub fn lost_lease(&self, loss: Loss) {
        self.families().lost_leases.with_label_values(&[loss.name()]).inc();
        let jobs: Vec<JobName> = self.snapshots().keys().cloned().collect();
        for job in jobs {
            self.forget_job(&job);
        }
    }

    /// Whether this instance reconciles.
    pub fn leads(&self, leads: bool) {
        let families = self.families();
        families.leader.set(i64::from(leads));
        if !leads {
            // Only the leader knows them.
            families.clear_servers();
        }
    }

    /// The job's status was checked just now.
    pub fn saw_job(&self, job: &JobName, snapshot: JobSnapshot) {
        self.snapshots().insert(job.clone(), (Instant::now(), snapshot));
    }

    /// Jobs that have neither ended nor are suspended.
    #[must_use]
    pub fn jobs_under_way(&self) -> usize {
        self.snapshots().values().filter(|(_, snapshot)| snapshot.phase.is_under_way()).count()
    }

    /// The error of the predicted speed of a job, if its mode is automatic and its speed was
    /// measured.
    pub fn predicted(&self, job: &JobName, error: Option<f64>) {
        set_or_remove(&self.families().prediction_errors, job, error);
    }

    /// Pods of lost nodes were deleted.
    pub fn lost_pods(&self, count: u64) {
        self.families().lost_pods.inc_by(count);
    }

    /// Slow pods were deleted.
    pub fn replaced_pods(&self, count: u64) {
        self.families().replaced_pods.inc_by(count);
    }

    /// The use of a job's nodes by other pods, if it is known.
    pub fn crowded(&self, job: &JobName, used_by_others: Option<f64>) {
        set_or_remove(&self.families().used_by_others, job, used_by_others);
    }

    /// Removes the results of the last look at a job without automatic decisions at present.
    pub fn forget_look(&self, job: &JobName) {
        self.predicted(job, None);
        self.crowded(job, None);
    }

    /// Forgets a job that is gone, or that another controller runs.
    pub fn forget_job(&self, job: &JobName) {
        self.snapshots().remove(job);
        self.forget_look(job);
    }

    /// A RecModelServer was reconciled. `served` is the lowest step among its servers that answer,
    /// without the canary. `follows` says whether it takes newer checkpoints.
    pub fn saw_server(&self, server: &JobName, status: &RecModelServerStatus, served: Option<u64>, follows: bool) {
        let step = |checkpoint: &Option<CheckpointStatus>| checkpoint.as_ref().map(|known| known.step as f64);
        let families = self.families();
        let replicas = status.replicas.as_ref();
        set_or_remove(&families.servers, server, replicas.map(|count| f64::from(count.wanted)));
        set_or_remove(&families.ready_servers, server, replicas.map(|count| f64::from(count.ready)));
        let shards = status.shards.as_ref();
        set_or_remove(&families.shards, server, shards.map(|count| f64::from(count.wanted)));
        set_or_remove(&families.ready_shards, server, shards.map(|count| f64::from(count.ready)));
        set_or_remove(&families.server_steps, server, step(&status.checkpoint));
        set_or_remove(&families.server_served_steps, server, served.map(|step| step as f64));
        set_or_remove(&families.server_latest_steps, server, step(&status.latest).filter(|_| follows));
    }

    /// Forgets a RecModelServer that is gone.
    pub fn forget_server(&self, server: &JobName) {
        self.saw_server(server, &RecModelServerStatus::default(), None, false);
    }

    /// All metrics in Prometheus' text format.
    ///
    /// # Errors
    /// Never in practice.
    pub fn encode(&self) -> Result<String, prometheus::Error> {
        self.refresh();
        TextEncoder::new().encode_to_string(&self.0.registry.gather())
    }

    /// Computes ages and counts for a scrape.
    fn refresh(&self) {
        let families = self.families();
        families.memory.set(resident_bytes().unwrap_or(0));
        let snapshots = self.snapshots();
        families.clear_statuses();
        families.jobs.reset();
        for (job, (at, snapshot)) in snapshots.iter() {
            let age = at.elapsed().as_secs_f64();
            families.ages.with_label_values(&[&job.namespace, &job.name]).set(age);
            families.jobs.with_label_values(&[snapshot.phase.name()]).inc();
            families.show(job, snapshot);
        }
    }

    fn snapshots(&self) -> MutexGuard<'_, HashMap<JobName, (Instant, JobSnapshot)>> {
        self.0.snapshots.lock()
    }
}

fn set_or_remove(gauge: &GaugeVec, job: &JobName, value: Option<f64>) {
    let job = [&job.namespace, &job.name];
    match value {
        Some(value) => gauge.with_label_values(&job).set(value),
        // It fails if the value was never set, as for most jobs.
        None => drop(gauge.remove_label_values(&job)),
    }
}

/// The resident memory of this process on Linux; `None` on other systems.
fn resident_bytes() -> Option<i64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<i64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn j() -> JobName {
        JobName::new("n", "j")
    }

    #[test]
    fn the_reference_is_up_to_date() {
        let written = include_str!("../../docs/reference/operator-metrics.md");
        assert_eq!(written, reference_markdown(), "generate it with `cargo xtask docs`");
    }

    #[test]
    fn every_metric_of_the_reference_is_served() {
        let metrics = OperatorMetrics::new().expect("they register");
        metrics.reconciled(Duration::from_millis(2), None);
        metrics.reconciled(Duration::from_millis(2), Some(Step::Apply));
        metrics.watch_broke();
        metrics.answer_is_late();
        metrics.requests("GET");
        metrics.saw_job(&j(), JobSnapshot::new(&training(), 10));
        metrics.predicted(&j(), Some(0.25));
        metrics.crowded(&j(), Some(0.5));
        metrics.saw_server(&j(), &served(), Some(700), true);
        let text = metrics.encode().expect("they are served");
        for (name, kind, help) in REFERENCE {
            assert!(text.contains(&format!("# TYPE {name} {kind}")), "{name}");
            assert!(help.ends_with('.'), "{name}");
        }
    }

    fn served() -> RecModelServerStatus {
        let checkpoint = |step| Some(CheckpointStatus { name: String::new(), step });
        RecModelServerStatus {
            checkpoint: checkpoint(800),
            latest: checkpoint(900),
            replicas: Some(rectrain_crds::ServerCount::new(1, 2)),
            shards: Some(rectrain_crds::ShardCount::new(3, 4)),
            ..RecModelServerStatus::default()
        }
    }

    #[test]
    fn the_status_of_servers_is_served_until_they_are_gone() {
        let metrics = OperatorMetrics::new().expect("they register");
        metrics.saw_server(&j(), &served(), Some(700), false);
        let text = metrics.encode().expect("they are served");
        assert!(text.contains("rectrain_operator_server_ready_replicas{"), "{text}");
        let shards =
            text.lines().filter(|line| line.contains("shards{")).filter_map(|line| line.split(' ').next_back());
        assert_eq!(shards.collect::<Vec<_>>(), ["3", "4"], "ready and wanted shards: {text}");
        let step = text.lines().find(|line| line.starts_with("rectrain_operator_server_served_step{"));
        assert!(step.is_some_and(|line| line.ends_with("} 700")), "{step:?}");
        assert!(!text.contains("rectrain_operator_server_latest_step{"), "a pinned model is not stale: {text}");
        metrics.saw_server(&j(), &served(), Some(700), true);
        let text = metrics.encode().expect("they are served");
        assert!(text.contains("rectrain_operator_server_latest_step{"), "{text}");
        metrics.forget_server(&j());
        assert!(!metrics.encode().expect("they are served").contains("rectrain_operator_server_"));
    }

    #[test]
    fn the_status_of_a_job_is_served_until_it_is_forgotten() {
        let metrics = OperatorMetrics::new().expect("they register");
        metrics.saw_job(&j(), JobSnapshot::new(&training(), 10));
        metrics.predicted(&j(), Some(0.25));
        metrics.crowded(&j(), Some(0.5));
        metrics.saw_server(&j(), &served(), Some(700), true);
        let text = metrics.encode().expect("they are served");
        for line in [
            "jobs{phase=\"Training\"} 1",
            "job_phase{job_name=\"j\",job_namespace=\"n\",phase=\"Training\"} 1",
            "job_condition{condition=\"Stalled\",job_name=\"j\",job_namespace=\"n\",reason=\"ModeRefused\"} 1",
            "job_mode{job_name=\"j\",job_namespace=\"n\",mode=\"gba\"} 1",
            "job_restarts{job_name=\"j\",job_namespace=\"n\"} 3",
            "job_max_restarts{job_name=\"j\",job_namespace=\"n\"} 10",
            "job_replicas{job_name=\"j\",job_namespace=\"n\",role=\"ps\"} 2",
            "job_ready_replicas{job_name=\"j\",job_namespace=\"n\",role=\"ps\"} 1",
            "job_slowest_share{index=\"1\",job_name=\"j\",job_namespace=\"n\",member_node=\"node-a\",member_pod=\"j-ps-1\",role=\"ps\"} 0.75",
            "job_unseen_share{feature=\"user\",job_name=\"j\",job_namespace=\"n\"} 0.25",
            "cpu_used_by_others_ratio{job_name=\"j\",job_namespace=\"n\"} 0.5",
        ] {
            assert!(text.contains(&format!("rectrain_operator_{line}\n")), "{line}: {text}");
        }
        assert!(!text.contains("condition=\"Ready\""), "{text}");
        metrics.crowded(&j(), None);
        let text = metrics.encode().expect("they are served");
        assert!(!text.contains("cpu_used_by_others_ratio{") && text.contains("mode_prediction_error_ratio{"), "{text}");
        metrics.forget_look(&j());
        let text = metrics.encode().expect("they are served");
        assert!(!text.contains("mode_prediction_error_ratio{") && text.contains("job_step{"), "{text}");
        metrics.forget_job(&j());
        assert!(!metrics.encode().expect("they are served").contains("job_name=\"j\""));
    }

    /// In mode gba, with one of two parameter servers ready, and one condition of each kind.
    fn training() -> RecTrainingJobStatus {
        let condition = |kind: &str, status: &str| serde_json::json!({"type": kind, "status": status, "reason": "ModeRefused", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"});
        serde_json::from_value(serde_json::json!({
            "phase": "Training", "mode": "gba", "step": 7, "loss": 0.5, "auc": 0.75, "restarts": 3, "unseen": {"user": 0.25},
            "conditions": [condition("Ready", "True"), condition("Stalled", "True"), condition("Failed", "False")],
            "replicaStatuses": {"ps": {"ready": 1, "wanted": 2, "display": "1/2"}},
            "slowest": {"role": "ps", "index": 1, "pod": "j-ps-1", "node": "node-a", "share": 0.75},
        }))
        .expect("it is a status")
    }

    #[test]
    fn a_lost_lease_is_counted_and_hides_the_jobs() {
        let metrics = OperatorMetrics::new().expect("they register");
        metrics.saw_job(&j(), JobSnapshot::new(&training(), 10));
        metrics.lost_lease(Loss::Silent);
        let text = metrics.encode().expect("they are served");
        assert!(text.contains("rectrain_operator_leases_lost_total{cause=\"silent\"} 1\n"), "{text}");
        assert!(text.contains("rectrain_operator_leases_lost_total{cause=\"taken\"} 0\n"), "{text}");
        assert!(!text.contains("job_name=\"j\""), "{text}");
    }

    #[test]
    fn an_ended_job_shows_only_its_phase_and_conditions() {
        let metrics = OperatorMetrics::new().expect("they register");
        metrics.saw_job(&j(), JobSnapshot::new(&training(), 10));
        let mut ended = training();
        ended.phase = Some(Phase::Failed);
        metrics.saw_job(&j(), JobSnapshot::new(&ended, 10));
        let text = metrics.encode().expect("they are served");
        assert!(text.contains("rectrain_operator_job_phase{job_name=\"j\",job_namespace=\"n\",phase=\"Failed\"} 1"));
        assert!(!text.contains("phase=\"Training\"") && !text.contains("rectrain_operator_job_step{"), "{text}");
    }
}
