//! Changes of the manifest: the ones that correct a failed job, and the ones that cannot be carried
//! out.

use rectrain_crds::{FieldError, Phase, RecTrainingJobStatus};

use super::draft::Draft;
use super::settings;
use crate::failure::{Cause, Problem};

/// Why the pods stay as they are, though the manifest has changed.
pub(super) enum Unchanged {
    /// The change cannot be carried out.
    UntilCorrected(Problem),
    /// The attempt saves a checkpoint first.
    UntilSaved,
    /// Two programs write a number of replicas in turn.
    WhileContested(Problem),
}

impl<'a> Draft<'a> {
    /// Whether the job failed and its manifest has changed since, in the settings of its pods or
    /// after it was invalid. Such a job starts over.
    pub(super) fn is_corrected(&self) -> bool {
        let was_invalid = self.problem_before("Failed").is_some_and(|problem| problem.cause == Cause::InvalidSpec);
        let is_another = self.before.observed_generation != self.facts.job.metadata.generation;
        let changed = match &self.before.attempt {
            Some(attempt) => {
                let wanted = settings::wanted_mode(self.facts.job);
                attempt.spec_hash != self.facts.spec_hash
                    || attempt.mode.as_ref().is_some_and(|mode| mode.wanted != wanted)
                    || self.wants_other_members(attempt)
            }
            None => is_another,
        };
        self.before.phase == Some(Phase::Failed) && (changed || was_invalid && is_another)
    }

    /// Clears the status but for the number of the last attempt: pods of the failed attempt must
    /// not be taken for pods of the next one.
    pub(super) fn start_over(&mut self) {
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

    /// Why the changed manifest cannot be carried out, if pods of an earlier one run. A mistake in
    /// a manifest should end no job, so they train on as long as they need nothing new.
    pub(super) fn impossible_change(&self) -> Option<Problem> {
        if !matches!(self.before.phase, Some(Phase::Starting | Phase::Training | Phase::Evaluating)) {
            return None;
        }
        let needs_another = self.status.attempt.as_ref()?.spec_hash != self.facts.spec_hash;
        let errors = self.facts.verdict.err().or_else(|| self.facts.impossible_mode.filter(|_| needs_another));
        let invalid = |errors: &[FieldError]| {
            let advice = "Training continues with the manifest before: correct it and apply it again";
            Problem::new(Cause::InvalidSpec, format!("{}. {advice}", sentences(errors)))
        };
        errors.map(invalid).or_else(|| self.facts.signals.change_refused.clone())
    }

    /// The number of replicas that two programs write in turn, if pods run. Each change costs a
    /// pause or an attempt, so the pods stay as they are.
    pub(super) fn contested(&self) -> Option<Problem> {
        let has_pods = matches!(self.before.phase, Some(Phase::Starting | Phase::Training | Phase::Evaluating));
        self.facts.signals.contested.clone().filter(|_| has_pods && self.status.attempt.is_some())
    }

    /// Takes over the manifest. An error in it is fatal, because no pods of an earlier one run.
    pub(super) fn note_manifest(&mut self) -> Result<(), &'a [FieldError]> {
        self.facts.verdict?;
        self.note_wanted_mode()
    }
}

/// The errors of a manifest in one line.
pub(super) fn sentences(errors: &[FieldError]) -> String {
    let errors: Vec<String> = errors.iter().map(ToString::to_string).collect();
    errors.join("; ")
}
