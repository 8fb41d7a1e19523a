//! A job that has not ended: the order in which its circumstances are checked, and an attempt under
//! way.

use std::time::Duration;

use rectrain_crds::{AttemptStatus, Phase};

use super::changes::Unchanged;
use super::decision::{Decision, Run};
use super::draft::Draft;
use super::time::{at_most_ten_a_second, left};
use crate::attempt_signals::Saving;
use crate::coordinator_view::CoordinatorView;
use crate::failure::{self, Cause, Problem};
use crate::pods::PodFacts;

/// An attempt under way.
struct RunningAttempt<'a> {
    attempt: &'a AttemptStatus,
    /// The pods of its members.
    pods: Vec<&'a PodFacts>,
    /// The phase before the coordinator's report.
    phase: Phase,
}

impl<'a> Draft<'a> {
    /// Decides about a job that has not ended.
    pub(super) fn live(mut self) -> Decision {
        if self.is_corrected() {
            self.start_over();
        }
        // A complete model takes precedence over a deadline that has passed since.
        if let CoordinatorView::Complete { summary, last_checkpoint } = self.facts.coordinator {
            return self.complete(summary, last_checkpoint.as_ref());
        }
        self.note_last_checkpoint();
        let impossible = self.impossible_change();
        if impossible.is_none()
            && let Err(errors) = self.note_manifest()
        {
            return self.fail_invalid(errors);
        }
        if let Some(problem) = self.facts.signals.path_in_use.clone() {
            return self.wait_for_path(problem);
        }
        let contested = self.contested();
        let saves_first = self.saves_first(impossible.is_some() || contested.is_some());
        if self.is_suspended() && !saves_first {
            return self.suspend();
        }
        if let Some(seconds) = self.deadline_passed() {
            return self.end_at_deadline(seconds);
        }
        let unchanged = match (impossible, contested) {
            _ if saves_first => Some(Unchanged::UntilSaved),
            (Some(problem), _) => Some(Unchanged::UntilCorrected(problem)),
            (None, contested) => contested.map(Unchanged::WhileContested),
        };
        self.continue_attempt(unchanged)
    }

    /// An attempt that is about to end for a suspension or a change leaves the checkpoint that it
    /// was asked for.
    fn note_last_checkpoint(&mut self) {
        let is_live = matches!(self.before.phase, Some(Phase::Training | Phase::Evaluating));
        if let Some(report) = self.live_report().filter(|_| is_live) {
            self.note_checkpoint(report.last_checkpoint.as_ref());
        }
    }

    /// Waits for another job's end before the first attempt, or before the first one after a
    /// suspension.
    fn wait_for_path(mut self, problem: Problem) -> Decision {
        self.count_replicas(false);
        let phase = self.before.phase.unwrap_or(Phase::Pending);
        let run = if self.status.attempt.is_some() { Run::Hold } else { Run::Nothing };
        let look_again = Some(at_most_ten_a_second(self.facts.poll));
        Decision { look_again, ..self.finish(phase, Some(problem), run) }
    }

    /// Begins an attempt if a new one is due, and runs the present one.
    fn continue_attempt(mut self, unchanged: Option<Unchanged>) -> Decision {
        let phase = match (&unchanged, self.before.phase) {
            (Some(_), Some(phase)) => phase,
            _ => self.settle_attempt(),
        };
        let Some(attempt) = self.status.attempt.clone() else { return self.fail_invalid(&[]) };
        let has_stale_pods = self.facts.pods.iter().any(|pod| pod.attempt != attempt.number);
        let back_off = attempt.not_before.as_ref().map_or(Duration::ZERO, |time| left(self.facts.now, time.0, 0));
        let may_start_pods = matches!(unchanged, None | Some(Unchanged::WhileContested(_)));
        if may_start_pods && (has_stale_pods || !back_off.is_zero()) {
            return self.hold(phase, back_off);
        }
        let saving = matches!(unchanged, Some(Unchanged::UntilSaved)).then(|| self.clone());
        let running = RunningAttempt { attempt: &attempt, pods: self.members(&attempt), phase };
        let decision = self.run_attempt(&running, unchanged);
        match saving {
            Some(draft) if matches!(decision.status.phase, Some(Phase::Restarting | Phase::Failed)) => {
                draft.end_while_saving(decision)
            }
            _ => decision,
        }
    }

    /// The pods of the attempt's members. The user may have scaled a StatefulSet: a pod beyond the
    /// attempt's number says nothing about the job.
    fn members(&self, attempt: &AttemptStatus) -> Vec<&'a PodFacts> {
        let is_member = |pod: &&PodFacts| pod.index().is_none_or(|index| index < self.pods_of(pod.role));
        let pods = self.facts.pods.iter().filter(|pod| pod.attempt == attempt.number);
        pods.filter(is_member).collect()
    }

    /// Waits for pods of another attempt to end, or for the back-off, before new pods start.
    pub(super) fn hold(mut self, phase: Phase, back_off: Duration) -> Decision {
        self.count_replicas(false);
        let crash = || self.problem_before("Reconciling").filter(|problem| problem.cause.is_crash());
        let obstacle = self.facts.obstacle.cloned();
        let pods: Vec<&PodFacts> = self.facts.pods.iter().collect();
        let stuck = failure::stuck(&pods, self.facts.now);
        let problem = obstacle.or(stuck).or_else(|| crash().filter(|_| phase == Phase::Restarting));
        let poll = at_most_ten_a_second(self.facts.poll);
        let look_again = Some(if back_off.is_zero() { poll } else { back_off });
        Decision { look_again, ..self.finish(phase, problem, Run::Hold) }
    }

    fn run_attempt(mut self, running: &RunningAttempt<'_>, unchanged: Option<Unchanged>) -> Decision {
        let RunningAttempt { attempt, pods, phase } = running;
        if self.is_state_lost() {
            let message = "the coordinator's pod was displaced, and its state of the attempt is lost";
            return self.crash(attempt, 0, Problem::new(Cause::Crash, message));
        }
        let restarts = self.count_restarts(attempt, pods);
        self.count_replicas(true);
        let bad_input = failure::bad_input(pods, self.facts.coordinator);
        if let Some(problem) = bad_input.or_else(|| failure::diverged(self.facts.coordinator)) {
            return self.fail(problem, Run::Hold);
        }
        if let Some(problem) = failure::crash(pods, self.facts.coordinator) {
            self.decide_after_a_kill(pods);
            return self.crash(attempt, restarts.of_containers, problem);
        }
        if restarts.counted > self.max_restarts() {
            return self.exhausted(failure::last_crash(pods).as_ref());
        }
        let phase = self.follow_coordinator(*phase);
        if let Some(problem) = self.no_progress(phase) {
            return self.crash(attempt, restarts.of_containers, problem);
        }
        self.forgive_restarts(phase);
        self.note_automatic(phase);
        let (run, problem) = match unchanged {
            Some(Unchanged::UntilSaved) => return self.wait_for_checkpoint(phase),
            Some(Unchanged::UntilCorrected(problem)) => (Run::AsIs, Some(problem)),
            // Objects are built with the manifest, and the attempt's numbers of members.
            Some(Unchanged::WhileContested(problem)) if attempt.spec_hash == self.facts.spec_hash => {
                (Run::Go, Some(problem))
            }
            Some(Unchanged::WhileContested(problem)) => (Run::AsIs, Some(problem)),
            None => (Run::Go, None),
        };
        self.note_replacement(phase, run);
        self.keep_running(pods, Look { phase, restarts: restarts.of_containers, problem, run })
    }

    /// Whether the coordinator's pod was displaced, and the one that replaced it knows nothing of
    /// the attempt. It may know it from the copies of the journal on parameter servers. As long as
    /// it is silent, it waits for them.
    fn is_state_lost(&self) -> bool {
        self.facts.signals.coordinator_displaced && self.live_report().is_some_and(|report| !report.recovered)
    }

    /// Keeps all pods until the checkpoint exists.
    fn wait_for_checkpoint(self, phase: Phase) -> Decision {
        let look_again = Some(at_most_ten_a_second(self.facts.poll));
        let ask_save = self.facts.signals.saving == Saving::No;
        Decision { ask_save, is_saving: true, look_again, ..self.finish(phase, None, Run::AsIs) }
    }

    fn keep_running(mut self, pods: &[&PodFacts], look: Look) -> Decision {
        let ask_mode = self.switch(pods);
        let ask_members = self.members_to_ask_for();
        let ask_rebalance = self.rebalance_to_ask_for();
        let ask_budget = self.budget_to_ask_for();
        let (phase, run) = (look.phase, look.run);
        let problem = self.problem(pods, look);
        let look_again = Some(at_most_ten_a_second(self.facts.poll));
        let decision = self.finish(phase, problem, run);
        Decision { ask_mode, ask_members, ask_rebalance, ask_budget, look_again, ..decision }
    }

    /// The most important problem of an attempt under way.
    fn problem(&self, pods: &[&PodFacts], look: Look) -> Option<Problem> {
        if let Some(problem) = look.problem.or_else(|| self.facts.obstacle.cloned()) {
            return Some(problem);
        }
        if !self.all_ready() {
            // Before there is a coordinator to ask, only the ends of containers are known.
            let ends = look.phase == Phase::Starting && look.restarts > 0;
            let stuck = failure::stuck(pods, self.facts.now);
            let waiting = stuck.or_else(|| failure::waiting(pods, self.facts.now));
            let problem = waiting.or_else(|| ends.then(|| failure::last_crash(pods)).flatten());
            if problem.is_some() {
                return problem;
            }
        }
        self.facts.signals.pods_refused.clone().or_else(|| self.mode_refused())
    }
}

/// An attempt after the coordinator's report.
struct Look {
    phase: Phase,
    /// Restarts of the attempt's containers.
    restarts: u32,
    /// Why the changed manifest is not carried out.
    problem: Option<Problem>,
    run: Run,
}
