//! The members of an attempt, and automatic decisions about them and about the mode.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{AttemptStatus, BudgetStatus, DecisionAction, DecisionSubject, ModeSpec, Phase, Role};

use super::draft::Draft;
use crate::automatic::memory::{KilledServer, after_a_kill};
use crate::budget;
use crate::coordinator_view::Rebalance;
use crate::decisions;
use crate::members;
use crate::pods::PodFacts;
use crate::text::shorten;

/// Bytes of a reason in a status.
const MOST_REASON: usize = 1000;

impl Draft<'_> {
    /// Whether the wanted numbers of members have changed since the last look at the attempt.
    pub(super) fn wants_other_members(&self, attempt: &AttemptStatus) -> bool {
        let (Some(replicas), Ok(resolved)) = (&attempt.replicas, self.facts.verdict) else { return false };
        members::are_others(replicas, Some(&self.status), resolved)
    }

    /// Takes the wanted numbers of members over into the attempt.
    pub(super) fn want_members(&mut self) {
        let Ok(resolved) = self.facts.verdict else { return };
        let starting = members::starting(Some(&self.status), resolved, None);
        let Some(attempt) = &self.status.attempt else { return };
        let mut replicas = attempt.replicas.unwrap_or(starting);
        members::want(&mut replicas, Some(&self.status), resolved);
        if let Some(attempt) = &mut self.status.attempt {
            attempt.replicas = Some(replicas);
        }
    }

    /// The numbers of members to ask the coordinator for.
    pub(super) fn members_to_ask_for(&self) -> Vec<(Role, u32)> {
        let Some(report) = self.live_report() else { return Vec::new() };
        let replicas = self.status.attempt.as_ref().and_then(|attempt| attempt.replicas.as_ref());
        replicas.map_or_else(Vec::new, |replicas| members::to_ask(replicas, report, self.facts.pods))
    }

    /// The rebalance to ask the coordinator for, if the status before has decided on it.
    pub(super) fn rebalance_to_ask_for(&self) -> Option<Rebalance> {
        let report = self.live_report()?;
        let decided = decisions::rebalance(&self.before, self.facts.verdict.ok()?, self.facts.now)?;
        members::rebalance_to_ask(self.status.attempt.as_ref()?.replicas.as_ref()?, report, decided)
    }

    /// The memory budget to ask the coordinator for. A manifest with errors changes nothing.
    pub(super) fn budget_to_ask_for(&self) -> Option<BudgetStatus> {
        let report = self.live_report().filter(|_| self.facts.verdict.is_ok())?;
        budget::to_ask(&self.facts.job.spec, self.status.attempt.as_ref()?, report.tables.budget)
    }

    /// Writes automatic decisions down. They are carried out from the next look on.
    pub(super) fn note_automatic(&mut self, phase: Phase) {
        if let Some(findings) = self.facts.automatic.filter(|_| phase == Phase::Training) {
            self.status.decisions = decisions::kept(&self.before.decisions, &findings.decisions);
            self.status.mode_prediction = findings.prediction.or(self.before.mode_prediction);
        }
        let training = self.facts.job.spec.training.as_ref();
        if training.and_then(|training| training.mode) != Some(ModeSpec::Auto) {
            self.status.mode_since = None;
            self.status.mode_reason = None;
            self.status.mode_prediction = None;
        } else if self.status.mode != self.before.mode || self.before.mode_since.is_none() {
            self.status.mode_since = Some(Time(self.facts.now));
            self.status.mode_reason = Some(self.mode_reason());
        }
    }

    /// Why the mode in use was chosen automatically, with the time of the decision.
    fn mode_reason(&self) -> String {
        match decisions::last(&self.before.decisions, DecisionSubject::Mode) {
            Some(decided) if is_switch_to(&decided.action, self.status.mode) => {
                shorten(&format!("decided at {}: {}", decided.time.0, decided.reason), MOST_REASON)
            }
            _ => "automatic training starts in it".to_owned(),
        }
    }

    /// Decides after a kill for memory. The attempt ends with it, and the measurements for a later
    /// decision end, too.
    pub(super) fn decide_after_a_kill(&mut self, pods: &[&PodFacts]) {
        let is_killed =
            |pod: &&&PodFacts| pod.role == Role::Ps && pod.ended.as_ref().is_some_and(|ended| ended.out_of_memory);
        let (Some(killed), Ok(resolved)) = (pods.iter().find(is_killed), self.facts.verdict) else { return };
        let servers = members::wanted(Some(&self.status), resolved, Role::Ps);
        let killed = KilledServer { replica: killed.index().unwrap_or_default(), servers };
        let Some(decision) = after_a_kill(self.facts.job, resolved, killed, self.facts.now) else { return };
        if let Some(attempt) = &mut self.status.attempt {
            attempt.ps_memory_bytes = decisions::raised_memory(&decision).or(attempt.ps_memory_bytes);
        }
        self.status.decisions = decisions::kept(&self.before.decisions, &[decision]);
    }
}

fn is_switch_to(action: &DecisionAction, mode: Option<rectrain_crds::Mode>) -> bool {
    matches!(action, DecisionAction::SwitchMode { to, .. } if Some(*to) == mode)
}
