//! The beginning of attempts.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{AttemptReplicas, AttemptStatus, Phase, Role};

use super::draft::Draft;
use crate::automatic::memory::given_memory_limit;
use crate::budget;
use crate::decisions;
use crate::members;

/// A new attempt.
pub(super) struct NewAttempt {
    pub(super) number: u32,
    /// Restarts of the job before it.
    pub(super) restarts_before: u32,
    /// The end of the back-off.
    pub(super) not_before: Option<Timestamp>,
    /// The start of the job, from which its deadline counts.
    pub(super) job_start: Timestamp,
}

impl Draft<'_> {
    /// Begins an attempt if a new one is due. Returns the phase until the coordinator reports more.
    pub(super) fn settle_attempt(&mut self) -> Phase {
        let now = self.facts.now;
        let restarts_before = self.before.restarts.unwrap_or(0);
        let Some(attempt) = self.status.attempt.clone() else {
            self.begin_attempt(NewAttempt { number: 1, restarts_before: 0, not_before: None, job_start: now });
            return Phase::Pending;
        };
        let number = attempt.number + 1;
        if self.before.phase == Some(Phase::Suspended) {
            self.begin_attempt(NewAttempt { number, restarts_before, not_before: None, job_start: now });
            return Phase::Starting;
        }
        if self.needs_another(&attempt) {
            let job_start = self.status.start_time.as_ref().map_or(now, |time| time.0);
            self.begin_attempt(NewAttempt { number, restarts_before, not_before: None, job_start });
            return Phase::Restarting;
        }
        let phase = self.before.phase.unwrap_or(Phase::Pending);
        // The status says that the pods are starting before they are created.
        if matches!(phase, Phase::Pending | Phase::Restarting) {
            self.start_in(attempt.mode.as_ref());
            self.start_with(attempt.replicas.as_ref());
        }
        self.want_members();
        phase
    }

    /// Whether the manifest needs another attempt.
    fn needs_another(&self, attempt: &AttemptStatus) -> bool {
        attempt.spec_hash != self.facts.spec_hash
            // A job that starts over has no phase.
            || self.before.phase.is_none()
            // Before all members have joined, the coordinator cannot be asked for another number.
            || self.before.phase == Some(Phase::Starting) && self.wants_other_members(attempt)
    }

    pub(super) fn begin_attempt(&mut self, new: NewAttempt) {
        let before = self.status.attempt.take();
        let ps_memory_bytes = self.raised_memory(before.as_ref());
        let replicas_before = before.as_ref().and_then(|before| before.replicas.as_ref());
        let resolved = self.facts.verdict.ok();
        let replicas = resolved.map(|resolved| members::starting(Some(&self.status), resolved, replicas_before));
        let servers = replicas.as_ref().and_then(|replicas| Some(replicas.get(Role::Ps)?.started));
        let unchanged = before.filter(|before| before.spec_hash == self.facts.spec_hash);
        self.status.attempt = Some(AttemptStatus {
            number: new.number,
            generation: self.facts.job.metadata.generation.unwrap_or_default(),
            spec_hash: self.facts.spec_hash.to_owned(),
            image: self.facts.image.to_owned(),
            tls: self.facts.tls,
            restarts_before: new.restarts_before,
            not_before: new.not_before.map(Time),
            mode: None,
            replicas,
            ps_memory_bytes,
            budget: budget::wanted(&self.facts.job.spec, servers),
        });
        self.start_in(unchanged.and_then(|before| before.mode).as_ref());
        self.status.start_time = Some(Time(new.job_start));
        self.status.restarts = Some(new.restarts_before);
        self.clear_progress();
        self.forget_lost_steps();
    }

    /// The raised memory limit of the attempt before. It is dropped if the manifest now sets
    /// another limit, which then counts as it is written.
    fn raised_memory(&self, before: Option<&AttemptStatus>) -> Option<u64> {
        let raised = before?.ps_memory_bytes?;
        let is_unchanged = before.is_some_and(|before| before.spec_hash == self.facts.spec_hash);
        let is_as_given = decisions::memory_before_raises(&self.status) == given_memory_limit(self.facts.job);
        (is_unchanged || is_as_given).then_some(raised)
    }

    /// Sets the initial members of an attempt whose pods do not exist yet. Numbers decided before
    /// still hold.
    fn start_with(&mut self, before: Option<&AttemptReplicas>) {
        let Ok(resolved) = self.facts.verdict else { return };
        let replicas = members::starting(Some(&self.status), resolved, before);
        if let Some(attempt) = &mut self.status.attempt {
            attempt.replicas = Some(replicas);
        }
    }
}
