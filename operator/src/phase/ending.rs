//! The end of a job: complete, failed, and the time that it is kept afterwards.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{CheckpointStatus, FieldError, JobSummary, Phase};

use super::changes::sentences;
use super::decision::{Decision, Run};
use super::draft::Draft;
use super::progress::rounded;
use super::time::{is_over, left};
use crate::failure::{Cause, Problem};
use crate::switch;

impl Draft<'_> {
    /// The job has ended before.
    pub(super) fn stay_ended(mut self) -> Decision {
        let phase = self.before.phase;
        let problem = (phase == Some(Phase::Failed)).then(|| self.problem_before("Failed")).flatten();
        self.count_replicas(false);
        let left = self.time_to_live();
        let is_invalid = problem.as_ref().is_some_and(|problem| problem.cause == Cause::InvalidSpec);
        let has_objects = self.facts.verdict.is_ok() && !is_invalid && self.before.attempt.is_some();
        let run = if has_objects { Run::Hold } else { Run::Nothing };
        let decision = self.finish(phase.unwrap_or(Phase::Failed), problem, run);
        Decision { delete: left == Some(Duration::ZERO), look_again: left, ..decision }
    }

    /// The time until an ended job is deleted.
    fn time_to_live(&self) -> Option<Duration> {
        let seconds = self.facts.job.spec.ttl_seconds_after_finished?;
        let ended = self.before.completion_time.as_ref()?;
        Some(left(self.facts.now, ended.0, u64::from(seconds)))
    }

    /// The coordinator has a complete model.
    pub(super) fn complete(mut self, summary: &JobSummary, last_checkpoint: Option<&CheckpointStatus>) -> Decision {
        if let Some(attempt) = self.status.attempt.clone() {
            let pods: Vec<_> = self.facts.pods.iter().filter(|pod| pod.attempt == attempt.number).collect();
            self.count_restarts(&attempt, &pods);
        }
        self.note_checkpoint(last_checkpoint);
        self.status.step = Some(summary.steps);
        self.status.total_steps = Some(summary.steps);
        self.status.auc = summary.auc.map(|auc| rounded(auc, 5)).or(self.status.auc);
        self.note_unseen(&summary.unseen);
        self.status.summary = Some(summary.clone());
        self.end(Phase::Complete, None, Run::Hold)
    }

    /// The deadline in seconds, if it has passed.
    pub(super) fn deadline_passed(&self) -> Option<u32> {
        let seconds = self.facts.job.spec.active_deadline_seconds?;
        let start = self.before.start_time.as_ref().filter(|_| self.before.phase != Some(Phase::Suspended))?;
        is_over(self.facts.now, start.0, u64::from(seconds)).then_some(seconds)
    }

    pub(super) fn end_at_deadline(self, seconds: u32) -> Decision {
        if self.is_suspended() {
            return self.suspend();
        }
        let message = format!(
            "the job did not end within {seconds} seconds and was stopped: raise spec.activeDeadlineSeconds in a new job, or give it more workers"
        );
        self.fail(Problem::new(Cause::DeadlineExceeded, message), Run::Hold)
    }

    pub(super) fn fail_invalid(self, errors: &[FieldError]) -> Decision {
        let message = format!("{}. Correct the manifest and apply it again", sentences(errors));
        self.fail(Problem::new(Cause::InvalidSpec, message), Run::Nothing)
    }

    /// Fails the job. It starts over after the next change of its manifest.
    ///
    /// A change from before the failure counts as carried out, so it does not revive the job:
    /// neither a refused change nor a number decided just before. Exceptions are wrong input and a
    /// divergence: a change that was not carried out yet may correct it.
    pub(super) fn fail(mut self, problem: Problem, run: Run) -> Decision {
        let wanted = self.wanted_mode();
        let may_be_corrected = problem.cause.is_final() && self.facts.verdict.is_ok();
        if let Some(attempt) = self.status.attempt.as_mut().filter(|_| !may_be_corrected) {
            self.facts.spec_hash.clone_into(&mut attempt.spec_hash);
            if let Some(mode) = &mut attempt.mode {
                switch::want(mode, wanted);
            }
        }
        self.want_members();
        let run = if self.status.attempt.is_none() { Run::Nothing } else { run };
        self.end(Phase::Failed, Some(problem), run)
    }

    fn end(mut self, phase: Phase, problem: Option<Problem>, run: Run) -> Decision {
        self.status.completion_time = Some(Time(self.facts.now));
        self.status.samples_per_second = None;
        self.status.slowest = None;
        self.status.tables = None;
        self.count_replicas(false);
        let ttl = self.facts.job.spec.ttl_seconds_after_finished;
        let look_again = ttl.map(|seconds| Duration::from_secs(u64::from(seconds)));
        Decision { look_again, ..self.finish(phase, problem, run) }
    }
}
