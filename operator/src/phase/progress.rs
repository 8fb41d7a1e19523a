//! The progress of an attempt: the coordinator's report, and the absence of progress.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{Phase, Role, UnseenShares};

use super::draft::Draft;
use super::settings::stall_seconds;
use super::time::is_over;
use crate::attempt_signals::AttemptSignals;
use crate::coordinator_view::{CoordinatorView, Report, Stage};
use crate::failure::{Cause, Problem};
use crate::members;
use crate::pods::PodFacts;

/// Least seconds for the start of training, however short the job's steps are. They cover names,
/// certificates and GPUs.
const LEAST_START_SECONDS: u32 = 120;

impl Draft<'_> {
    /// Follows the coordinator. Silence is no news; before the first report the pods are starting.
    pub(super) fn follow_coordinator(&mut self, phase: Phase) -> Phase {
        match self.live_report() {
            Some(report) => self.follow(report),
            None if matches!(phase, Phase::Training | Phase::Evaluating) => phase,
            None => Phase::Starting,
        }
    }

    /// Takes over the coordinator's report.
    fn follow(&mut self, report: &Report) -> Phase {
        if let Some(replicas) = self.status.attempt.as_mut().and_then(|attempt| attempt.replicas.as_mut()) {
            members::follow(replicas, report);
        }
        if report.stage != Stage::Starting {
            self.status.last_progress_time = Some(Time(self.last_progress(report)));
            self.status.step = Some(report.step);
            self.status.total_steps = report.total_steps;
            self.status.samples_per_second = Some(report.samples_per_second.max(0.0).round() as u64);
            self.status.loss = report.loss.is_finite().then(|| rounded(report.loss, 6)).filter(|_| report.step > 0);
            self.status.auc = report.auc.map(|auc| rounded(auc, 5)).or(self.status.auc);
            self.note_unseen(&report.unseen);
            self.status.tables = report.tables.status().or(self.status.tables);
        }
        self.status.slowest = report.slowest.as_deref().map(|slow| self.slowest(*slow));
        self.status.stream = report.stream.as_deref().cloned();
        self.status.quality = report.quality.as_deref().copied();
        self.status.mode = report.mode.or(self.status.mode);
        self.note_checkpoint(report.last_checkpoint.as_ref());
        match report.stage {
            Stage::Starting => Phase::Starting,
            Stage::Training => Phase::Training,
            Stage::Evaluating => Phase::Evaluating,
        }
    }

    /// Takes over the shares of unseen test ids. A report before the first evaluation has none.
    pub(super) fn note_unseen(&mut self, unseen: &UnseenShares) {
        if !unseen.is_empty() {
            self.status.unseen = unseen.iter().map(|(feature, share)| (feature.clone(), rounded(*share, 5))).collect();
        }
    }

    /// The time of the last progress. The coordinator's idle time is rounded, and rounding alone
    /// must not change the status.
    fn last_progress(&self, report: &Report) -> Timestamp {
        let now = self.facts.now;
        let Some(before) = &self.before.last_progress_time else { return now };
        let Some(idle) = report.idle_seconds else {
            // A coordinator of an earlier version.
            let progresses = self.before.step != Some(report.step) || report.stage == Stage::Evaluating;
            return if progresses { now } else { before.0 };
        };
        let idle = Duration::try_from_secs_f64(idle).unwrap_or_default();
        let reported = now.checked_sub(Duration::from_secs(idle.as_secs())).unwrap_or(now);
        if reported > before.0 + Duration::from_secs(1) { reported } else { before.0 }
    }

    /// The problem of an attempt without progress for `stallSeconds`.
    pub(super) fn no_progress(&self, phase: Phase) -> Option<Problem> {
        let seconds = stall_seconds(self.facts.job);
        if !matches!(phase, Phase::Training | Phase::Evaluating) {
            return self.does_not_start(seconds);
        }
        let last = self.status.last_progress_time.as_ref()?.0;
        // A new operator does not know the progress before a coordinator fell silent. While a
        // member's pod cannot start, another attempt could not start either.
        let AttemptSignals { silent_since, blocked_at, .. } = self.facts.signals;
        let last = [*silent_since, *blocked_at].into_iter().flatten().fold(last, Timestamp::max);
        is_over(self.facts.now, last, u64::from(seconds)).then(|| {
            let message = format!(
                "no step was completed for {seconds} seconds: look at the logs of its pods; if a step takes that long, raise spec.faultTolerance.stallSeconds"
            );
            Problem::new(Cause::NoProgress, message)
        })
    }

    /// All pods run, and training does not start.
    fn does_not_start(&self, stall_seconds: u32) -> Option<Problem> {
        let seconds = stall_seconds.max(LEAST_START_SECONDS);
        let since = self.facts.signals.unchanged_since.filter(|_| self.all_run())?;
        is_over(self.facts.now, since, u64::from(seconds)).then(|| {
            let hint = start_hint(self.facts.coordinator);
            let message = format!("all pods have run for {seconds} seconds and training has not started; {hint}");
            Problem::new(Cause::NoProgress, message)
        })
    }

    /// Whether each role has all its pods, and their containers run.
    fn all_run(&self) -> bool {
        let attempt = self.status.attempt.as_ref().map_or(0, |attempt| attempt.number);
        let runs = |role: Role| move |pod: &&PodFacts| pod.role == role && pod.attempt == attempt && pod.is_running;
        Role::ALL.into_iter().all(|role| {
            let running = self.facts.pods.iter().filter(runs(role)).count();
            running >= self.pods_of(role) as usize
        })
    }
}

/// Advice about a job that does not start.
fn start_hint(coordinator: &CoordinatorView) -> String {
    match coordinator {
        CoordinatorView::Live(report) if !report.missing.is_empty() => format!(
            "{} have not joined: look at their logs, and whether they reach the coordinator's pod (cluster DNS, NetworkPolicies)",
            report.missing.join(", ")
        ),
        CoordinatorView::Live(_) => "look at the logs of its pods".to_owned(),
        _ => "its coordinator does not answer the operator: look at its log, and whether the operator reaches its pod (NetworkPolicies)".to_owned(),
    }
}

/// A number rounded to `decimals` decimals.
pub(super) fn rounded(value: f64, decimals: i32) -> f64 {
    let scale = 10f64.powi(decimals);
    (value * scale).round() / scale
}
