//! The life of a job as one pure function: what is known now and the status of before give the new status and whether the job's
//! pods should be there. No clock, no network; `reconcile` gathers the facts and carries out the decision.
//!
//! ```text
//!  Pending ──> Starting ──> Training <──> Evaluating ──> Complete
//!     │            ^ │          │              │
//!     │            │ └──────────┴──────┬───────┘  a crash: all pods go, back-off, a new attempt
//!     │            └──── Restarting <──┘
//!     └── any of them: Suspended (spec.suspend) and back, or Failed
//! ```
//!
//! A *crash* is the coordinator's word that the job has failed, or no progress for `stallSeconds`. A container that ends is started
//! again by its node; whether that disturbs the job is the coordinator's to say. Every restart of either kind counts.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{
    AttemptMode, AttemptReplicas, AttemptStatus, CheckpointStatus, DecisionSubject, FieldError, JobSummary, Mode,
    ModeSpec, Phase, RecTrainingJob, RecTrainingJobStatus, ReplicaCount, ReplicaStatuses, ResolvedJob, defaults,
};

use crate::automatic::{self, Findings};
use crate::coordinator::{CoordinatorView, Rebalance, Report, Stage};
use crate::failure::{self, Cause, Problem};
use crate::members;
use crate::names::{self, Role};
use crate::notice::{Noticed, Saving};
use crate::pods::PodFacts;
use crate::reconcile::status::conditions;
use crate::switch::{self, SwitchAnswer};

/// Processes have so long to begin, names, certificates and GPUs included, however short the steps of their job are.
const LEAST_BEGIN_SECONDS: u32 = 120;
/// A job that has trained for so long without a restart has its restarts counted anew.
const FORGIVEN_AFTER_SECONDS: u64 = 24 * 60 * 60;
/// The longest back-off after a crash.
const MAX_BACKOFF_SECONDS: u64 = 300;

/// Everything that is known of a job.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// The present, in whole seconds.
    pub now: Timestamp,
    /// The job as the API server has it.
    pub job: &'a RecTrainingJob,
    /// What its manifest says, or what is wrong with it.
    pub verdict: Result<&'a ResolvedJob, &'a [FieldError]>,
    /// What is wrong with its training mode, where nothing else is and the mode that the job is in could stay.
    pub impossible_mode: Option<&'a [FieldError]>,
    /// Digest of the parts of the spec that pods depend on.
    pub spec_hash: &'a str,
    /// The image that new pods get.
    pub image: &'a str,
    /// Whether new pods speak with members of their job only.
    pub tls: bool,
    /// The job's pods.
    pub pods: &'a [PodFacts],
    /// Ready pods of each role's StatefulSet.
    pub ready: &'a BTreeMap<Role, u32>,
    /// What the coordinator of the present attempt says.
    pub coordinator: &'a CoordinatorView,
    /// Its answer, if it was asked for what an earlier decision on these facts says ([`Decision::ask_mode`]).
    pub answer: Option<&'a SwitchAnswer>,
    /// What was decided automatically, if the job was looked at for that just now.
    pub automatic: Option<&'a Findings>,
    /// What keeps the operator from making an object of the job.
    pub obstacle: Option<&'a Problem>,
    /// What this operator has noticed lately.
    pub noticed: &'a Noticed,
    /// Time between two questions to a coordinator.
    pub poll: Duration,
}

/// Whether the job's pods should be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// No object of the job should be there.
    Nothing,
    /// Its objects should, its pods should not.
    Hold,
    /// Whatever is there should stay as it is.
    AsIs,
    /// Both should.
    Go,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The job's new status.
    pub status: RecTrainingJobStatus,
    /// Whether its pods should be there.
    pub run: Run,
    /// The training mode that its coordinator is to be asked for; what it answers has to be decided on before anything is written.
    pub ask_mode: Option<Mode>,
    /// The roles and the numbers of their members that its coordinator is to be asked for.
    pub ask_members: Vec<(Role, u32)>,
    /// Whether it is to be asked to spread its slots anew.
    pub ask_rebalance: Option<Rebalance>,
    /// Whether it is to be asked for a checkpoint, before its attempt ends.
    pub ask_save: bool,
    /// Whether that checkpoint is waited for.
    pub is_saving: bool,
    /// What keeps it from training, if anything does.
    pub problem: Option<Problem>,
    /// Whether the job's time to live is over.
    pub delete: bool,
    /// When to look again if nothing is heard of it; `None` waits for a change.
    pub look_again: Option<Duration>,
}

/// See the module's text.
#[must_use]
pub fn decide(facts: &Facts<'_>) -> Decision {
    let draft = Draft::new(facts);
    match draft.before.phase {
        Some(Phase::Complete | Phase::Failed) if !draft.is_mended() => draft.stay_ended(),
        _ => draft.live(),
    }
}

/// Why the pods that there are stay as they are, though the manifest has changed.
enum Stays {
    /// It cannot be carried out.
    UntilMended(Problem),
    /// They save a checkpoint first.
    UntilSaved,
}

impl Stays {
    fn problem(self) -> Option<Problem> {
        match self {
            Self::UntilMended(problem) => Some(problem),
            Self::UntilSaved => None,
        }
    }
}

/// A decision in the making.
#[derive(Clone)]
struct Draft<'a> {
    facts: &'a Facts<'a>,
    before: RecTrainingJobStatus,
    status: RecTrainingJobStatus,
}

impl<'a> Draft<'a> {
    fn new(facts: &'a Facts<'a>) -> Self {
        let before = facts.job.status.clone().unwrap_or_default();
        let status = RecTrainingJobStatus { observed_generation: facts.job.metadata.generation, ..before.clone() };
        Self { facts, before, status }
    }

    /// Whether the job failed and its manifest has changed since in what its pods depend on, or was wrong: then it starts afresh.
    fn is_mended(&self) -> bool {
        let was_wrong = told(&self.before, "Failed").is_some_and(|problem| problem.cause == Cause::InvalidSpec);
        let is_another = self.before.observed_generation != self.facts.job.metadata.generation;
        let changed = match &self.before.attempt {
            Some(attempt) => {
                attempt.spec_hash != self.facts.spec_hash
                    || attempt.mode.as_ref().is_some_and(|mode| mode.wanted != self.wanted_mode())
                    || self.wants_other_members(attempt)
            }
            None => self.before.observed_generation != self.facts.job.metadata.generation,
        };
        self.before.phase == Some(Phase::Failed) && (changed || was_wrong && is_another)
    }

    fn stay_ended(mut self) -> Decision {
        let phase = self.before.phase;
        let problem = (phase == Some(Phase::Failed)).then(|| told(&self.before, "Failed")).flatten();
        self.count_replicas(false);
        let left = self.time_to_live();
        let is_invalid = problem.as_ref().is_some_and(|problem| problem.cause == Cause::InvalidSpec);
        let is_made = self.facts.verdict.is_ok() && !is_invalid && self.before.attempt.is_some();
        let run = if is_made { Run::Hold } else { Run::Nothing };
        let mut decision = self.finish(phase.unwrap_or(Phase::Failed), problem, run);
        decision.delete = left == Some(Duration::ZERO);
        decision.look_again = left;
        decision
    }

    /// What is left of the time that an ended job is kept.
    fn time_to_live(&self) -> Option<Duration> {
        let seconds = self.facts.job.spec.ttl_seconds_after_finished?;
        let ended = self.before.completion_time.as_ref()?;
        Some(left(self.facts.now, ended.0, u64::from(seconds)))
    }

    fn live(mut self) -> Decision {
        if self.is_mended() {
            self.start_afresh();
        }
        // Before all that would end it otherwise: a model that is there is not lost to a deadline that has passed since.
        if let CoordinatorView::Complete { summary, last_checkpoint } = self.facts.coordinator {
            return self.complete(summary, last_checkpoint.as_ref());
        }
        // An attempt that is about to end for the user's will leaves the checkpoint that it was asked for.
        if let (CoordinatorView::Live(report), Some(Phase::Training | Phase::Evaluating)) =
            (self.facts.coordinator, self.before.phase)
        {
            self.note_checkpoint(report.last_checkpoint.as_ref());
        }
        let impossible = self.impossible_change();
        if impossible.is_none() {
            if let Err(errors) = self.facts.verdict {
                return self.fail_invalid(errors);
            }
            if let Err(errors) = self.note_wanted_mode() {
                return self.fail_invalid(errors);
            }
        }
        let saves_first = self.saves_first(impossible.as_ref());
        if self.is_suspended() && !saves_first {
            return self.suspend();
        }
        if let Some(seconds) = self.deadline_passed() {
            if self.is_suspended() {
                return self.suspend();
            }
            let problem = Problem::new(
                Cause::DeadlineExceeded,
                format!(
                    "the job had not ended {seconds} seconds after its start and was stopped: raise spec.activeDeadlineSeconds in a new job, or give it more workers"
                ),
            );
            return self.fail(problem, Run::Hold);
        }
        let stays = if saves_first { Some(Stays::UntilSaved) } else { impossible.map(Stays::UntilMended) };
        let phase = match (&stays, self.before.phase) {
            (Some(_), Some(phase)) => phase,
            _ => self.settle_attempt(),
        };
        let Some(attempt) = self.status.attempt.clone() else { return self.fail_invalid(&[]) };
        let (present, stale): (Vec<_>, Vec<_>) = self.facts.pods.iter().partition(|pod| pod.attempt == attempt.number);
        let back_off = attempt.not_before.as_ref().map_or(Duration::ZERO, |time| left(self.facts.now, time.0, 0));
        if stays.is_none() && (!stale.is_empty() || !back_off.is_zero()) {
            return self.hold(phase, back_off);
        }
        // Somebody may have scaled a StatefulSet; what becomes of pods that the job does not have says nothing about it.
        let members: Vec<_> =
            present.into_iter().filter(|pod| pod.index().is_none_or(|index| index < self.pods_of(pod.role))).collect();
        let saving = saves_first.then(|| self.clone());
        let decision = self.go(&attempt, &members, phase, stays);
        match saving {
            Some(draft) if matches!(decision.status.phase, Some(Phase::Restarting | Phase::Failed)) => {
                draft.instead_of(decision)
            }
            _ => decision,
        }
    }

    /// An attempt that ends by itself while it saves ends as the user wants it to, and counts nothing: it is suspended, or the changed
    /// manifest is carried out, which may be what mends it.
    fn instead_of(mut self, ended: Decision) -> Decision {
        if self.is_suspended() {
            return self.suspend();
        }
        if ended.problem.as_ref().is_some_and(|problem| problem.cause == Cause::BadInput) {
            return ended;
        }
        let phase = self.settle_attempt();
        self.hold(phase, Duration::ZERO)
    }

    /// Whether a checkpoint is waited for because the user's will ends the attempt: the grace period of its pods may not do for one.
    fn saves_first(&self, impossible: Option<&Problem>) -> bool {
        let is_changed = || {
            let attempt = self.status.attempt.as_ref();
            impossible.is_none() && attempt.is_some_and(|attempt| attempt.spec_hash != self.facts.spec_hash)
        };
        let saves = self.facts.job.spec.checkpoint.as_ref().is_some_and(|checkpoint| checkpoint.path.is_some());
        saves
            && matches!(self.before.phase, Some(Phase::Training | Phase::Evaluating))
            && self.facts.noticed.saving != Saving::Over
            // A question that is not answered is no news of what was asked for before.
            && match self.facts.coordinator {
                CoordinatorView::Live(_) => true,
                CoordinatorView::Silent => self.facts.noticed.saving == Saving::UnderWay,
                _ => false,
            }
            && (self.is_suspended() || is_changed())
    }

    /// The coordinator has the model.
    fn complete(mut self, summary: &JobSummary, last_checkpoint: Option<&CheckpointStatus>) -> Decision {
        if let Some(attempt) = self.status.attempt.clone() {
            let pods: Vec<_> = self.facts.pods.iter().filter(|pod| pod.attempt == attempt.number).collect();
            self.count_restarts(&attempt, &pods);
        }
        self.note_checkpoint(last_checkpoint);
        self.status.step = Some(summary.steps);
        self.status.total_steps = Some(summary.steps);
        self.status.auc = summary.auc.map(|auc| rounded(auc, 5)).or(self.status.auc);
        self.status.summary = Some(summary.clone());
        self.end(Phase::Complete, None, Run::Hold)
    }

    /// Why the manifest cannot be carried out, if pods are there that were made of an earlier one: nobody means to end a job by a number
    /// that does not divide another. They train on as they are, for as long as they need nothing new.
    fn impossible_change(&self) -> Option<Problem> {
        if !matches!(self.before.phase, Some(Phase::Starting | Phase::Training | Phase::Evaluating)) {
            return None;
        }
        let needs_another = self.status.attempt.as_ref()?.spec_hash != self.facts.spec_hash;
        let errors = self.facts.verdict.err().or_else(|| self.facts.impossible_mode.filter(|_| needs_another));
        let invalid = |errors: &[FieldError]| {
            let what = "Training goes on as the manifest was before: mend it and apply it again";
            Problem::new(Cause::InvalidSpec, format!("{}. {what}", sentences(errors)))
        };
        errors.map(invalid).or_else(|| self.facts.noticed.change_refused.clone())
    }

    /// Forgets all but how many attempts there were: pods of the attempt that failed must not be taken for those of the next one.
    fn start_afresh(&mut self) {
        let attempt = self.status.attempt.take();
        let conditions = std::mem::take(&mut self.status.conditions);
        let decisions = std::mem::take(&mut self.status.decisions);
        let observed_generation = self.status.observed_generation;
        self.before = RecTrainingJobStatus { attempt: attempt.clone(), ..RecTrainingJobStatus::default() };
        self.status = RecTrainingJobStatus {
            conditions,
            observed_generation,
            attempt,
            decisions,
            ..RecTrainingJobStatus::default()
        };
    }

    fn is_suspended(&self) -> bool {
        self.facts.job.spec.suspend == Some(true)
    }

    fn suspend(mut self) -> Decision {
        self.forget_progress();
        self.count_replicas(false);
        let run = if self.status.attempt.is_some() { Run::Hold } else { Run::Nothing };
        self.finish(Phase::Suspended, None, run)
    }

    /// The deadline, if it is over.
    fn deadline_passed(&self) -> Option<u32> {
        let seconds = self.facts.job.spec.active_deadline_seconds?;
        let start = self.before.start_time.as_ref().filter(|_| self.before.phase != Some(Phase::Suspended))?;
        left(self.facts.now, start.0, u64::from(seconds)).is_zero().then_some(seconds)
    }

    /// Begins an attempt if a new one is due; gives the phase until more is known.
    fn settle_attempt(&mut self) -> Phase {
        let now = self.facts.now;
        match self.status.attempt.clone() {
            None => {
                self.begin_attempt(1, 0, None, now);
                Phase::Pending
            }
            Some(attempt) if self.before.phase == Some(Phase::Suspended) => {
                self.begin_attempt(attempt.number + 1, self.restarts(), None, now);
                Phase::Starting
            }
            // One that starts afresh has no phase.
            Some(attempt)
                if attempt.spec_hash != self.facts.spec_hash
                    || self.before.phase.is_none()
                    // Until all have joined nobody can be asked for others.
                    || self.before.phase == Some(Phase::Starting) && self.wants_other_members(&attempt) =>
            {
                let start = self.status.start_time.as_ref().map_or(now, |time| time.0);
                self.begin_attempt(attempt.number + 1, self.restarts(), None, start);
                Phase::Restarting
            }
            Some(attempt) => {
                let phase = self.before.phase.unwrap_or(Phase::Pending);
                // Before its pods are made the status says that they are starting.
                if matches!(phase, Phase::Pending | Phase::Restarting) {
                    self.start_in(attempt.mode.as_ref());
                    self.start_with(attempt.replicas.as_ref());
                }
                self.want_members();
                phase
            }
        }
    }

    /// The training mode that the manifest asks for.
    fn wanted_mode(&self) -> Mode {
        wanted_mode(self.facts.job)
    }

    /// Takes the wanted mode over into the attempt that there is. One that cannot be is refused for as long as there is another one
    /// to train on in; where there is none, the manifest is wrong.
    fn note_wanted_mode(&mut self) -> Result<(), &'a [FieldError]> {
        let wanted = self.wanted_mode();
        let starts_anew = self.before.phase.is_none();
        let attempt = self.status.attempt.as_mut();
        let same = attempt.filter(|attempt| attempt.spec_hash == self.facts.spec_hash);
        let mode = same.and_then(|attempt| attempt.mode.as_mut());
        match (mode, self.facts.impossible_mode) {
            (Some(mode), impossible) => {
                switch::want(mode, wanted);
                match impossible {
                    Some(errors) if starts_anew => return Err(errors),
                    Some(errors) => switch::refuse(mode, &sentences(errors)),
                    None => {}
                }
            }
            (None, Some(errors)) => return Err(errors),
            (None, None) => {}
        }
        Ok(())
    }

    /// Decides in which mode the attempt, whose pods are still to be made, starts.
    fn start_in(&mut self, before: Option<&AttemptMode>) {
        let mode = switch::starting(self.wanted_mode(), before);
        self.status.mode = Some(mode.started);
        if let Some(attempt) = &mut self.status.attempt {
            attempt.mode = Some(mode);
        }
    }

    /// Decides with how many members the attempt, whose pods are still to be made, starts. What was decided on before them still holds.
    fn start_with(&mut self, before: Option<&AttemptReplicas>) {
        let Ok(resolved) = self.facts.verdict else { return };
        let replicas = members::starting(Some(&self.status), resolved, before);
        if let Some(attempt) = &mut self.status.attempt {
            attempt.replicas = Some(replicas);
        }
    }

    /// Whether others are asked for than when the attempt was looked at last.
    fn wants_other_members(&self, attempt: &AttemptStatus) -> bool {
        let (Some(replicas), Ok(resolved)) = (&attempt.replicas, self.facts.verdict) else { return false };
        members::are_others(replicas, Some(&self.status), resolved)
    }

    fn want_members(&mut self) {
        let Ok(resolved) = self.facts.verdict else { return };
        let starting = members::starting(Some(&self.status), resolved, None);
        let Some(attempt) = &self.status.attempt else { return };
        let mut replicas = attempt.replicas.unwrap_or(starting);
        members::want(&mut replicas, Some(&self.status), resolved);
        if let Some(attempt) = &mut self.status.attempt {
            attempt.replicas = Some(replicas);
        }
    }

    /// Pods of a role that the present attempt has to have.
    fn pods_of(&self, role: Role) -> u32 {
        let replicas = self.status.attempt.as_ref().and_then(|attempt| attempt.replicas.as_ref());
        match replicas.and_then(|replicas| members::of(replicas, role)) {
            Some(of_role) => of_role.needed,
            None => self.facts.verdict.map_or(u32::from(role == Role::Coordinator), |resolved| role.replicas(resolved)),
        }
    }

    fn begin_attempt(&mut self, number: u32, restarts_before: u32, not_before: Option<Timestamp>, start: Timestamp) {
        let before = self.status.attempt.take();
        let replicas = before.as_ref().and_then(|before| before.replicas.as_ref());
        let replicas =
            self.facts.verdict.ok().map(|resolved| members::starting(Some(&self.status), resolved, replicas));
        let raised = before.as_ref().and_then(|before| before.ps_memory_bytes);
        let is_as_given =
            automatic::memory_before_raises(&self.status) == automatic::given_memory_limit(self.facts.job);
        let before = before.filter(|before| before.spec_hash == self.facts.spec_hash);
        self.status.attempt = Some(AttemptStatus {
            number,
            generation: self.facts.job.metadata.generation.unwrap_or_default(),
            spec_hash: self.facts.spec_hash.to_owned(),
            image: self.facts.image.to_owned(),
            tls: self.facts.tls,
            restarts_before,
            not_before: not_before.map(Time),
            mode: None,
            replicas,
            // Another memory limit of the manifest counts as it is written.
            ps_memory_bytes: raised.filter(|_| before.is_some() || is_as_given),
        });
        self.start_in(before.and_then(|before| before.mode).as_ref());
        self.status.start_time = Some(Time(start));
        self.status.restarts = Some(restarts_before);
        self.forget_progress();
    }

    /// What is true only while pods train.
    fn forget_progress(&mut self) {
        self.status.samples_per_second = None;
        self.status.last_progress_time = None;
    }

    fn restarts(&self) -> u32 {
        self.before.restarts.unwrap_or(0)
    }

    /// Pods of another attempt go, or time passes, before those of this one come.
    fn hold(mut self, phase: Phase, back_off: Duration) -> Decision {
        self.count_replicas(false);
        let poll = self.facts.poll;
        let obstacle = self.facts.obstacle.cloned();
        let crash = || told(&self.before, "Reconciling").filter(|problem| problem.cause.is_crash());
        let problem = obstacle.or_else(|| crash().filter(|_| phase == Phase::Restarting));
        let mut decision = self.finish(phase, problem, Run::Hold);
        decision.look_again = Some(if back_off.is_zero() { at_most_ten_a_second(poll) } else { back_off });
        decision
    }

    fn go(mut self, attempt: &AttemptStatus, pods: &[&PodFacts], phase: Phase, stays: Option<Stays>) -> Decision {
        if self.facts.noticed.coordinator_made_way {
            let what = "the coordinator's pod had to make way, and with it what it knew of the attempt";
            return self.crash(attempt, 0, Problem::new(Cause::Crash, what));
        }
        let (restarts, container_restarts) = self.count_restarts(attempt, pods);
        self.count_replicas(true);
        if let Some(problem) = failure::bad_input(pods, self.facts.coordinator) {
            return self.fail(problem, Run::Hold);
        }
        if let Some(problem) = failure::crash(pods, self.facts.coordinator) {
            self.decide_after_a_kill(pods);
            return self.crash(attempt, container_restarts, problem);
        }
        if restarts > self.max_restarts() {
            let last = failure::last_crash(pods);
            return self.exhausted(last.as_ref());
        }
        let phase = match self.facts.coordinator {
            CoordinatorView::Live(report) => self.follow(report),
            // A question that is not answered is no news; before the first answer the pods are starting.
            _ if matches!(phase, Phase::Training | Phase::Evaluating) => phase,
            _ => Phase::Starting,
        };
        if let Some(problem) = self.no_progress(phase) {
            return self.crash(attempt, container_restarts, problem);
        }
        self.forgive_restarts(phase);
        self.note_automatic(phase);
        let all_ready = self.all_ready();
        if let Some(Stays::UntilSaved) = stays {
            let poll = self.facts.poll;
            let ask_save = self.facts.noticed.saving == Saving::No;
            let decision = self.finish(phase, None, Run::AsIs);
            return Decision { ask_save, is_saving: true, look_again: Some(at_most_ten_a_second(poll)), ..decision };
        }
        let ask_mode = self.switch(pods);
        let ask_members = self.scale();
        let ask_rebalance = self.rebalance();
        let run = if stays.is_some() { Run::AsIs } else { Run::Go };
        let problem = stays.and_then(Stays::problem).or_else(|| self.facts.obstacle.cloned());
        let problem = problem.or_else(|| failure::waiting(pods, self.facts.now).filter(|_| !all_ready));
        // Before there is a coordinator to ask, containers that end are all that is known.
        let ends = phase == Phase::Starting && container_restarts > 0 && !all_ready;
        let problem = problem.or_else(|| ends.then(|| failure::last_crash(pods)).flatten());
        let problem = problem.or_else(|| self.facts.noticed.pods_refused.clone()).or_else(|| self.mode_refused());
        let poll = self.facts.poll;
        let mut decision = self.finish(phase, problem, run);
        decision.ask_mode = ask_mode;
        decision.ask_members = ask_members;
        decision.ask_rebalance = ask_rebalance;
        decision.look_again = Some(at_most_ten_a_second(poll));
        decision
    }

    /// Gives the restarts that count, and those of the attempt's containers.
    fn count_restarts(&mut self, attempt: &AttemptStatus, pods: &[&PodFacts]) -> (u32, u32) {
        // One crash often takes other containers with it, so the most restarted pod counts, not the sum.
        let container_restarts = pods.iter().map(|pod| pod.restarts).max().unwrap_or(0);
        self.note_restarts(attempt.restarts_before + container_restarts);
        (self.status.counted_restarts(), container_restarts)
    }

    /// So many there are in the job's life; it has no fewer than before.
    fn note_restarts(&mut self, restarts: u32) {
        let before = self.status.restarts.unwrap_or(0);
        self.status.restarts = Some(restarts.max(before));
        if restarts > before {
            self.status.last_restart_time = Some(Time(self.facts.now));
        }
    }

    /// What happened long ago neither ends a job that has trained since, nor makes it wait.
    fn forgive_restarts(&mut self, phase: Phase) {
        let is_long_ago = |last: &Time| left(self.facts.now, last.0, FORGIVEN_AFTER_SECONDS).is_zero();
        let trains = matches!(phase, Phase::Training | Phase::Evaluating);
        if trains && self.status.last_restart_time.as_ref().is_some_and(is_long_ago) {
            self.status.restarts_forgiven = self.status.restarts;
        }
    }

    /// Whether each role has all the pods that it has to have, and will keep them.
    fn all_ready(&self) -> bool {
        let replicas = self.status.attempt.as_ref().and_then(|attempt| attempt.replicas.as_ref());
        let is_settled = replicas.is_none_or(members::are_settled);
        is_settled
            && Role::ALL.iter().all(|role| self.facts.ready.get(role).copied().unwrap_or(0) >= self.pods_of(*role))
    }

    /// When the job last made progress. What the coordinator says of it is rounded, and the status is not written anew for that.
    fn progressed(&self, report: &Report) -> Timestamp {
        let now = self.facts.now;
        let Some(before) = &self.before.last_progress_time else { return now };
        let Some(idle) = report.idle_seconds else {
            // A coordinator of an earlier version.
            let progresses = self.before.step != Some(report.step) || report.stage == Stage::Evaluating;
            return if progresses { now } else { before.0 };
        };
        let idle = Duration::try_from_secs_f64(idle).unwrap_or_default();
        let told = now.checked_sub(Duration::from_secs(idle.as_secs())).unwrap_or(now);
        if told > before.0 + Duration::from_secs(1) { told } else { before.0 }
    }

    /// Takes over what the coordinator reports.
    fn follow(&mut self, report: &Report) -> Phase {
        if let Some(replicas) = self.status.attempt.as_mut().and_then(|attempt| attempt.replicas.as_mut()) {
            members::follow(replicas, report);
        }
        if report.stage != Stage::Starting {
            self.status.last_progress_time = Some(Time(self.progressed(report)));
            self.status.step = Some(report.step);
            self.status.total_steps = report.total_steps;
            self.status.samples_per_second = Some(report.samples_per_second.max(0.0).round() as u64);
            self.status.loss = report.loss.is_finite().then(|| rounded(report.loss, 6)).filter(|_| report.step > 0);
            self.status.auc = report.auc.map(|auc| rounded(auc, 5)).or(self.status.auc);
        }
        self.status.mode = report.mode.or(self.status.mode);
        self.note_checkpoint(report.last_checkpoint.as_ref());
        match report.stage {
            Stage::Starting => Phase::Starting,
            Stage::Training => Phase::Training,
            Stage::Evaluating => Phase::Evaluating,
        }
    }

    /// A coordinator that has just begun knows of none.
    fn note_checkpoint(&mut self, told: Option<&CheckpointStatus>) {
        if told.is_some() {
            self.status.last_checkpoint = told.cloned();
        }
    }

    /// The mode that the coordinator has to be asked for; its answer, if it was, goes into the status. One whose members are still
    /// joining is not asked yet.
    fn switch(&mut self, pods: &[&PodFacts]) -> Option<Mode> {
        let CoordinatorView::Live(Report { stage: Stage::Training | Stage::Evaluating, .. }) = self.facts.coordinator
        else {
            return None;
        };
        let run = switch::coordinator_run(pods)?;
        let mode = self.status.attempt.as_mut()?.mode.as_mut()?;
        let ask = switch::to_ask(mode, &run)?;
        match self.facts.answer {
            None => Some(ask),
            Some(answer) => {
                switch::note(mode, &run, answer);
                None
            }
        }
    }

    /// The numbers of roles' members that the coordinator has to be asked for.
    fn scale(&self) -> Vec<(Role, u32)> {
        let CoordinatorView::Live(report) = self.facts.coordinator else { return Vec::new() };
        let replicas = self.status.attempt.as_ref().and_then(|attempt| attempt.replicas.as_ref());
        replicas.map_or_else(Vec::new, |replicas| members::to_ask(replicas, report, self.facts.pods))
    }

    /// Whether its slots are to be spread anew.
    fn rebalance(&self) -> Option<Rebalance> {
        let CoordinatorView::Live(report) = self.facts.coordinator else { return None };
        // Only what was written down before.
        let decided = automatic::rebalance(&self.before, self.facts.verdict.ok()?, self.facts.now)?;
        members::rebalance_to_ask(self.status.attempt.as_ref()?.replicas.as_ref()?, report, decided)
    }

    /// What was decided automatically is written down now and carried out from the next look on.
    fn note_automatic(&mut self, phase: Phase) {
        if let Some(findings) = self.facts.automatic.filter(|_| phase == Phase::Training) {
            self.status.decisions = automatic::kept(&self.before.decisions, &findings.decisions);
            self.status.mode_prediction = findings.prediction.or(self.before.mode_prediction);
        }
        let training = self.facts.job.spec.training.as_ref();
        if training.and_then(|training| training.mode) != Some(ModeSpec::Auto) {
            self.status.mode_since = None;
            self.status.mode_reason = None;
            self.status.mode_prediction = None;
        } else if self.status.mode != self.before.mode || self.before.mode_since.is_none() {
            let decided = automatic::last(&self.before.decisions, DecisionSubject::Mode);
            let reason = decided.filter(|decided| self.status.mode.is_some_and(|mode| mode.name() == decided.to));
            self.status.mode_since = Some(Time(self.facts.now));
            self.status.mode_reason =
                Some(reason.map_or("automatic training starts in it", |decided| &decided.reason).to_owned());
        }
    }

    /// Whoever was killed for its memory is gone with the attempt, and with it the measurements that would lead to a decision.
    fn decide_after_a_kill(&mut self, pods: &[&PodFacts]) {
        let is_killed =
            |pod: &&&PodFacts| pod.role == Role::Ps && pod.ended.as_ref().is_some_and(|ended| ended.out_of_memory);
        let (Some(killed), Ok(resolved)) = (pods.iter().find(is_killed), self.facts.verdict) else { return };
        let present = members::wanted(Some(&self.status), resolved, Role::Ps);
        let killed = killed.index().unwrap_or_default();
        let Some(decision) = automatic::after_a_kill(self.facts.job, resolved, present, killed, self.facts.now) else {
            return;
        };
        if let Some(attempt) = &mut self.status.attempt {
            attempt.ps_memory_bytes = automatic::raised_memory(&decision).or(attempt.ps_memory_bytes);
        }
        self.status.decisions = automatic::kept(&self.before.decisions, &[decision]);
    }

    fn mode_refused(&self) -> Option<Problem> {
        let mode = self.status.attempt.as_ref()?.mode.as_ref()?;
        let present = self.status.mode.unwrap_or(mode.started);
        Some(failure::mode_refused(mode.wanted, present, mode.refused.as_ref()?))
    }

    fn no_progress(&self, phase: Phase) -> Option<Problem> {
        let seconds = stall_seconds(self.facts.job);
        if !matches!(phase, Phase::Training | Phase::Evaluating) {
            return self.does_not_begin(seconds);
        }
        let told = self.status.last_progress_time.as_ref()?.0;
        // Who begins to look does not know what was done before a coordinator fell silent.
        let last = self.facts.noticed.silent_since.map_or(told, |silent| silent.max(told));
        left(self.facts.now, last, u64::from(seconds)).is_zero().then(|| {
            Problem::new(
                Cause::NoProgress,
                format!("no step was completed for {seconds} seconds: look at the logs of its pods; if a step takes that long, raise spec.faultTolerance.stallSeconds"),
            )
        })
    }

    /// Whether each role has all the pods that it has to have, and their containers run.
    fn all_run(&self) -> bool {
        let attempt = self.status.attempt.as_ref().map_or(0, |attempt| attempt.number);
        let runs = |role: Role| move |pod: &&PodFacts| pod.role == role && pod.attempt == attempt && pod.is_running;
        Role::ALL.into_iter().all(|role| {
            let running = self.facts.pods.iter().filter(runs(role)).count();
            running >= self.pods_of(role) as usize
        })
    }

    /// All pods run, and training does not begin.
    fn does_not_begin(&self, stall_seconds: u32) -> Option<Problem> {
        let seconds = stall_seconds.max(LEAST_BEGIN_SECONDS);
        let since = self.facts.noticed.unchanged_since.filter(|_| self.all_run())?;
        let why = match self.facts.coordinator {
            CoordinatorView::Live(report) if !report.missing.is_empty() => {
                format!("{} have not joined: look at their logs, and whether they reach the coordinator's pod (cluster DNS, NetworkPolicies)", report.missing.join(", "))
            }
            CoordinatorView::Live(_) => "look at the logs of its pods".to_owned(),
            _ => "its coordinator does not answer the operator: look at its log, and whether the operator reaches its pod (NetworkPolicies)".to_owned(),
        };
        left(self.facts.now, since, u64::from(seconds)).is_zero().then(|| {
            let what = format!("all pods have run for {seconds} seconds and training has not begun; {why}");
            Problem::new(Cause::NoProgress, what)
        })
    }

    fn fault_tolerance(&self) -> rectrain_crds::FaultToleranceSpec {
        self.facts.job.spec.fault_tolerance.clone().unwrap_or_default()
    }

    fn max_restarts(&self) -> u32 {
        max_restarts(self.facts.job)
    }

    /// All roles start again after a back-off, or the job has failed.
    fn crash(mut self, attempt: &AttemptStatus, container_restarts: u32, problem: Problem) -> Decision {
        // A node that is drained or taken back is no fault of the job's, however often that happens in its life.
        let made_way = problem.cause == Cause::Crash && self.facts.noticed.made_way;
        let counted = container_restarts.max(u32::from(!made_way));
        self.note_restarts(attempt.restarts_before + counted);
        if self.status.counted_restarts() > self.max_restarts() {
            return self.exhausted(Some(&problem));
        }
        let used = self.status.restarts.unwrap_or(0);
        let first = u64::from(self.fault_tolerance().backoff_seconds.unwrap_or(defaults::BACKOFF_SECONDS));
        let wait = back_off_seconds(first, if made_way { 1 } else { self.status.counted_restarts() });
        let start = self.status.start_time.as_ref().map_or(self.facts.now, |time| time.0);
        let not_before = self.facts.now + SignedDuration::from_secs(i64::try_from(wait).unwrap_or(0));
        self.begin_attempt(attempt.number + 1, used, Some(not_before), start);
        self.count_replicas(false);
        let mut decision = self.finish(Phase::Restarting, Some(problem), Run::Hold);
        decision.look_again = Some(Duration::from_secs(wait.max(1)));
        decision
    }

    fn exhausted(self, last: Option<&Problem>) -> Decision {
        let allowed = self.max_restarts();
        let last = last.map_or_else(|| "its containers keep ending".to_owned(), |problem| problem.message.clone());
        let problem = Problem::new(
            Cause::RestartsExhausted,
            format!(
                "{last}. The job crashed more than {allowed} times without a day between them (spec.faultTolerance.maxRestarts): look at the cause, then make the job anew"
            ),
        );
        self.fail(problem, Run::Hold)
    }

    fn fail_invalid(self, errors: &[FieldError]) -> Decision {
        self.fail(invalid(errors), Run::Nothing)
    }

    /// The job starts afresh when its manifest changes again, and for no change that was there when it failed: not for one that could not be
    /// carried out, and not for a number decided on just before. But one that was not carried out yet may mend what was wrong.
    fn fail(mut self, problem: Problem, run: Run) -> Decision {
        let wanted = self.wanted_mode();
        let may_be_mended = problem.cause == Cause::BadInput && self.facts.verdict.is_ok();
        if let Some(attempt) = self.status.attempt.as_mut().filter(|_| !may_be_mended) {
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
        self.count_replicas(false);
        let ttl = self.facts.job.spec.ttl_seconds_after_finished.map(|seconds| Duration::from_secs(u64::from(seconds)));
        let mut decision = self.finish(phase, problem, run);
        decision.look_again = ttl;
        decision
    }

    /// Ready pods as they are counted by the StatefulSets, and how many there should be now.
    fn count_replicas(&mut self, should_be: bool) {
        let Ok(resolved) = self.facts.verdict else {
            self.status.replica_statuses.take_if(|_| !should_be);
            return;
        };
        let count = |role: Role| {
            let wanted = if should_be { members::wanted(Some(&self.status), resolved, role) } else { 0 };
            Some(ReplicaCount::new(self.facts.ready.get(&role).copied().unwrap_or(0), wanted))
        };
        self.status.replica_statuses = Some(ReplicaStatuses {
            coordinator: count(Role::Coordinator),
            ps: count(Role::Ps),
            embedding_worker: count(Role::EmbeddingWorker),
            dense_worker: count(Role::DenseWorker),
            loader: count(Role::Loader),
        });
        let job = self.facts.job.metadata.name.as_deref().unwrap_or_default();
        let selector = names::pod_selector(job, Role::DenseWorker);
        self.status.selector =
            Some(selector.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(","));
        if self.status.mode.is_none() {
            self.status.mode = Some(resolved.training.mode);
        }
    }

    fn finish(mut self, phase: Phase, problem: Option<Problem>, run: Run) -> Decision {
        let all_ready = self.facts.verdict.is_ok() && run == Run::Go && self.all_ready();
        let problem = problem.or_else(|| self.facts.obstacle.cloned().filter(|_| is_under_way(phase)));
        self.status.phase = Some(phase);
        self.status.conditions = conditions(
            &self.before_conditions(),
            phase,
            problem.as_ref(),
            all_ready,
            self.facts.job.metadata.generation,
            self.facts.now,
        );
        Decision {
            status: self.status,
            run,
            ask_mode: None,
            ask_members: Vec::new(),
            ask_rebalance: None,
            ask_save: false,
            is_saving: false,
            problem,
            delete: false,
            look_again: None,
        }
    }

    fn before_conditions(&self) -> Vec<k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition> {
        self.facts.job.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default()
    }
}

/// Whether the job has not come to an end or to rest.
#[must_use]
pub fn is_under_way(phase: Phase) -> bool {
    !matches!(phase, Phase::Complete | Phase::Failed | Phase::Suspended)
}

fn at_most_ten_a_second(poll: Duration) -> Duration {
    poll.max(Duration::from_millis(100))
}

fn invalid(errors: &[FieldError]) -> Problem {
    Problem::new(Cause::InvalidSpec, format!("{}. Mend the manifest and apply it again", sentences(errors)))
}

fn sentences(errors: &[FieldError]) -> String {
    let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
    errors.join("; ")
}

/// The training mode that a job's manifest asks for, or that was decided on where it leaves that to the operator.
#[must_use]
pub fn wanted_mode(job: &RecTrainingJob) -> Mode {
    match job.spec.training.as_ref().and_then(|training| training.mode).unwrap_or_default() {
        ModeSpec::Fixed(mode) => mode,
        ModeSpec::Auto => automatic::mode(job.status.as_ref()),
    }
}

/// How often the job may restart.
#[must_use]
pub fn max_restarts(job: &RecTrainingJob) -> u32 {
    job.spec.fault_tolerance.as_ref().and_then(|given| given.max_restarts).unwrap_or(defaults::MAX_RESTARTS)
}

/// For how long it may make no progress.
#[must_use]
pub fn stall_seconds(job: &RecTrainingJob) -> u32 {
    job.spec.fault_tolerance.as_ref().and_then(|given| given.stall_seconds).unwrap_or(defaults::STALL_SECONDS)
}

/// What is left of `seconds` after `since`; zero when they are over.
fn left(now: Timestamp, since: Timestamp, seconds: u64) -> Duration {
    let end = since + SignedDuration::from_secs(i64::try_from(seconds).unwrap_or(i64::MAX / 4));
    Duration::try_from(end.duration_since(now)).unwrap_or(Duration::ZERO)
}

/// Before the `restart`-th restart, counted from 1: doubled with each, up to five minutes.
fn back_off_seconds(first: u64, restart: u32) -> u64 {
    first.saturating_mul(1 << restart.saturating_sub(1).min(16)).min(MAX_BACKOFF_SECONDS)
}

/// To so many decimals.
fn rounded(value: f64, decimals: i32) -> f64 {
    let scale = 10f64.powi(decimals);
    (value * scale).round() / scale
}

/// The problem that a condition of the status before tells.
fn told(status: &RecTrainingJobStatus, kind: &str) -> Option<Problem> {
    let condition = status.conditions.iter().find(|c| c.type_ == kind && c.status == "True")?;
    let cause = Cause::ALL.into_iter().find(|cause| cause.reason() == condition.reason)?;
    Some(Problem::new(cause, condition.message.clone()))
}
