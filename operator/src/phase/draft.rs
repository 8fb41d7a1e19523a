//! A decision in the making.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use rectrain_crds::{CheckpointStatus, Phase, RecTrainingJobStatus, ReplicaCount, ReplicaStatuses, Role};

use super::conditions::{ConditionFacts, conditions};
use super::decision::{Decision, Run};
use super::facts::Facts;
use super::settings;
use crate::coordinator_view::{CoordinatorView, Report};
use crate::failure::{Cause, Problem};
use crate::members;
use crate::names::{self, manifest_replicas};

/// A decision in the making: the facts, the status before and the new status so far.
#[derive(Clone)]
pub(super) struct Draft<'a> {
    pub(super) facts: &'a Facts<'a>,
    pub(super) before: RecTrainingJobStatus,
    pub(super) status: RecTrainingJobStatus,
}

impl<'a> Draft<'a> {
    pub(super) fn new(facts: &'a Facts<'a>) -> Self {
        let before = facts.job.status.clone().unwrap_or_default();
        let status = RecTrainingJobStatus { observed_generation: facts.job.metadata.generation, ..before.clone() };
        Self { facts, before, status }
    }

    pub(super) fn is_suspended(&self) -> bool {
        self.facts.job.spec.suspend == Some(true)
    }

    pub(super) fn max_restarts(&self) -> u32 {
        settings::max_restarts(self.facts.job)
    }

    /// The coordinator's report, if it is live.
    pub(super) fn live_report(&self) -> Option<&'a Report> {
        match self.facts.coordinator {
            CoordinatorView::Live(report) => Some(report),
            _ => None,
        }
    }

    /// Clears values that are valid only while pods train.
    pub(super) fn clear_progress(&mut self) {
        self.status.samples_per_second = None;
        self.status.slowest = None;
        self.status.quality = None;
        self.status.tables = None;
        self.status.last_progress_time = None;
    }

    /// The attempt ends: shows the step from which the next one continues. Loss and AUC belong to
    /// the step that is gone.
    pub(super) fn forget_lost_steps(&mut self) {
        let saved = self.status.last_checkpoint.as_ref().filter(|_| self.has_checkpoint_path());
        let kept = saved.map(|checkpoint| checkpoint.step);
        if self.status.step != kept {
            self.status.step = kept;
            self.status.loss = None;
            self.status.auc = None;
        }
    }

    /// Whether the job saves checkpoints, so that another attempt continues from the last one.
    pub(super) fn has_checkpoint_path(&self) -> bool {
        self.facts.job.spec.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.path.is_some())
    }

    /// Takes over the last checkpoint. A coordinator that has just started reports none.
    pub(super) fn note_checkpoint(&mut self, reported: Option<&CheckpointStatus>) {
        if reported.is_some() {
            self.status.last_checkpoint = reported.cloned();
        }
    }

    /// Pods of a role that the present attempt needs.
    pub(super) fn pods_of(&self, role: Role) -> u32 {
        let replicas = self.status.attempt.as_ref().and_then(|attempt| attempt.replicas.as_ref());
        match replicas.and_then(|replicas| replicas.get(role)) {
            Some(of_role) => of_role.needed,
            None => self
                .facts
                .verdict
                .map_or(u32::from(role == Role::Coordinator), |resolved| manifest_replicas(role, resolved)),
        }
    }

    /// Whether each role has all its pods, and no member has to join or to leave.
    pub(super) fn all_ready(&self) -> bool {
        let replicas = self.status.attempt.as_ref().and_then(|attempt| attempt.replicas.as_ref());
        let ready = |role: &Role| self.facts.ready.get(role).copied().unwrap_or(0);
        replicas.is_none_or(members::are_settled) && Role::ALL.iter().all(|role| ready(role) >= self.pods_of(*role))
    }

    /// Counts ready pods, as the StatefulSets do, and wanted pods; none are wanted unless
    /// `should_run`.
    pub(super) fn count_replicas(&mut self, should_run: bool) {
        let Ok(resolved) = self.facts.verdict else {
            self.status.replica_statuses.take_if(|_| !should_run);
            return;
        };
        let count = |role: Role| {
            let wanted = if should_run { members::wanted(Some(&self.status), resolved, role) } else { 0 };
            ReplicaCount::new(self.facts.ready.get(&role).copied().unwrap_or(0), wanted)
        };
        self.status.replica_statuses = Some(ReplicaStatuses::from_fn(count));
        let job = self.facts.job.metadata.name.as_deref().unwrap_or_default();
        let selector = names::pod_selector(job, Role::DenseWorker);
        self.status.selector =
            Some(selector.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(","));
        if self.status.mode.is_none() {
            self.status.mode = Some(resolved.training.mode);
        }
    }

    /// The decision with this phase and problem.
    pub(super) fn finish(mut self, phase: Phase, problem: Option<Problem>, run: Run) -> Decision {
        let problem = problem.or_else(|| self.facts.obstacle.cloned().filter(|_| phase.is_under_way()));
        self.status.phase = Some(phase);
        self.status.conditions = conditions(&ConditionFacts {
            before: &self.conditions_before(),
            phase,
            problem: problem.as_ref(),
            no_step: self.no_step_message(phase).as_deref(),
            has_checkpoint_path: self.has_checkpoint_path(),
            all_ready: self.facts.verdict.is_ok() && run == Run::Go && self.all_ready(),
            generation: self.facts.job.metadata.generation,
            now: self.facts.now,
        });
        Decision::new(self.status, run, problem)
    }

    fn conditions_before(&self) -> Vec<Condition> {
        self.facts.job.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default()
    }

    /// The problem in a condition of the status before.
    pub(super) fn problem_before(&self, kind: &str) -> Option<Problem> {
        let condition = self.before.conditions.iter().find(|c| c.type_ == kind && c.status == "True")?;
        let cause = Cause::ALL.into_iter().find(|cause| cause.reason() == condition.reason)?;
        Some(Problem::new(cause, condition.message.clone()))
    }
}
