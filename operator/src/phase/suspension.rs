//! The suspension of a job, and the checkpoint before an attempt ends.

use std::time::Duration;

use rectrain_crds::Phase;

use super::decision::{Decision, Run};
use super::draft::Draft;
use crate::attempt_signals::Saving;
use crate::coordinator_view::CoordinatorView;

impl Draft<'_> {
    pub(super) fn suspend(mut self) -> Decision {
        self.clear_progress();
        self.forget_lost_steps();
        self.count_replicas(false);
        let run = if self.status.attempt.is_some() { Run::Hold } else { Run::Nothing };
        self.finish(Phase::Suspended, None, run)
    }

    /// Whether the attempt saves a checkpoint before a suspension or a change ends it. The grace
    /// period of its pods may be too short for one.
    pub(super) fn saves_first(&self, is_impossible: bool) -> bool {
        let attempt = self.status.attempt.as_ref();
        let is_changed = || !is_impossible && attempt.is_some_and(|attempt| attempt.spec_hash != self.facts.spec_hash);
        self.has_checkpoint_path()
            && matches!(self.before.phase, Some(Phase::Training | Phase::Evaluating))
            && self.facts.signals.saving != Saving::Over
            && self.can_save()
            && (self.is_suspended() || is_changed())
    }

    /// Whether the coordinator can save a checkpoint. Silence does not end a request that is under
    /// way.
    fn can_save(&self) -> bool {
        match self.facts.coordinator {
            CoordinatorView::Live(_) => true,
            CoordinatorView::Silent => self.facts.signals.saving == Saving::UnderWay,
            _ => false,
        }
    }

    /// The attempt ended by itself while it saved. It ends as the user wants, without a restart:
    /// the job is suspended, or the changed manifest is carried out, which may correct the cause.
    pub(super) fn end_while_saving(mut self, ended: Decision) -> Decision {
        if self.is_suspended() {
            return self.suspend();
        }
        if ended.problem.as_ref().is_some_and(|problem| problem.cause.is_final()) {
            return ended;
        }
        let phase = self.settle_attempt();
        self.hold(phase, Duration::ZERO)
    }
}
