//! Restarts: counting them, the back-off after a crash, and the limit.

use std::time::Duration;

use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{AttemptStatus, Phase};

use super::attempts::NewAttempt;
use super::decision::{Decision, Run};
use super::draft::Draft;
use super::settings::first_back_off_seconds;
use super::time::is_over;
use crate::failure::{Cause, Problem};
use crate::pods::PodFacts;

/// After this time of training without a restart, the restarts so far no longer count.
const FORGIVEN_AFTER_SECONDS: u64 = 24 * 60 * 60;
/// The longest back-off after a crash.
const MAX_BACKOFF_SECONDS: u64 = 300;

/// Restarts of a job and of its attempt's containers.
pub(super) struct Restarts {
    /// Restarts that count against `maxRestarts`.
    pub(super) counted: u32,
    /// Restarts of the attempt's containers.
    pub(super) of_containers: u32,
}

impl Draft<'_> {
    /// Counts the restarts of the attempt's containers. One crash often takes other containers with
    /// it, so the pod with the most restarts counts, and not the sum.
    pub(super) fn count_restarts(&mut self, attempt: &AttemptStatus, pods: &[&PodFacts]) -> Restarts {
        let of_containers = pods.iter().map(|pod| pod.restarts).max().unwrap_or(0);
        self.note_restarts(attempt.restarts_before + of_containers);
        Restarts { counted: self.status.counted_restarts(), of_containers }
    }

    /// Notes the restarts in the job's life; the number never decreases.
    fn note_restarts(&mut self, restarts: u32) {
        let before = self.status.restarts.unwrap_or(0);
        self.status.restarts = Some(restarts.max(before));
        if restarts > before {
            self.status.last_restart_time = Some(Time(self.facts.now));
        }
    }

    /// After a day of training without a restart, earlier ones neither fail the job nor lengthen
    /// its back-off.
    pub(super) fn forgive_restarts(&mut self, phase: Phase) {
        let is_long_ago = |last: &Time| is_over(self.facts.now, last.0, FORGIVEN_AFTER_SECONDS);
        let trains = matches!(phase, Phase::Training | Phase::Evaluating);
        if trains && self.status.last_restart_time.as_ref().is_some_and(is_long_ago) {
            self.status.restarts_forgiven = self.status.restarts;
        }
    }

    /// All roles restart after a back-off, or the job has failed.
    pub(super) fn crash(mut self, attempt: &AttemptStatus, container_restarts: u32, problem: Problem) -> Decision {
        // The displacement of a pod is no fault of the job, however often it happens.
        let displaced = problem.cause == Cause::Crash && self.facts.signals.displaced;
        let counted = container_restarts.max(u32::from(!displaced));
        self.note_restarts(attempt.restarts_before + counted);
        if self.status.counted_restarts() > self.max_restarts() {
            return self.exhausted(Some(&problem));
        }
        let restart = if displaced { 1 } else { self.status.counted_restarts() };
        let wait = back_off_seconds(first_back_off_seconds(self.facts.job), restart);
        let not_before = self.facts.now + SignedDuration::from_secs(i64::try_from(wait).unwrap_or(0));
        self.begin_attempt(NewAttempt {
            number: attempt.number + 1,
            restarts_before: self.status.restarts.unwrap_or(0),
            not_before: Some(not_before),
            job_start: self.status.start_time.as_ref().map_or(self.facts.now, |time| time.0),
        });
        self.count_replicas(false);
        let look_again = Some(Duration::from_secs(wait.max(1)));
        Decision { look_again, ..self.finish(Phase::Restarting, Some(problem), Run::Hold) }
    }

    /// The job has crashed too often.
    pub(super) fn exhausted(self, last: Option<&Problem>) -> Decision {
        let allowed = self.max_restarts();
        let last = last.map_or_else(|| "its containers keep ending".to_owned(), |problem| problem.message.clone());
        let message = format!(
            "{last}. The job crashed more than {allowed} times without a day between them (spec.faultTolerance.maxRestarts): find the cause, then create the job again"
        );
        self.fail(Problem::new(Cause::RestartsExhausted, message), Run::Hold)
    }
}

/// The back-off before the `restart`-th restart, counted from 1: doubled with each, up to five
/// minutes.
fn back_off_seconds(first: u64, restart: u32) -> u64 {
    first.saturating_mul(1 << restart.saturating_sub(1).min(16)).min(MAX_BACKOFF_SECONDS)
}
