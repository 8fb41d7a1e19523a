//! The training mode of an attempt.

use rectrain_crds::{AttemptMode, FieldError, Mode};

use super::changes::sentences;
use super::draft::Draft;
use super::settings;
use crate::coordinator_view::Stage;
use crate::failure::{self, Problem};
use crate::pods::PodFacts;
use crate::switch;

impl<'a> Draft<'a> {
    pub(super) fn wanted_mode(&self) -> Mode {
        settings::wanted_mode(self.facts.job)
    }

    /// Takes the wanted mode over into the present attempt.
    ///
    /// An impossible mode is only refused if the attempt can continue in another one. Otherwise the
    /// manifest is invalid.
    pub(super) fn note_wanted_mode(&mut self) -> Result<(), &'a [FieldError]> {
        let wanted = self.wanted_mode();
        let starts_over = self.before.phase.is_none();
        let attempt = self.status.attempt.as_mut();
        let same = attempt.filter(|attempt| attempt.spec_hash == self.facts.spec_hash);
        let Some(mode) = same.and_then(|attempt| attempt.mode.as_mut()) else {
            return self.facts.impossible_mode.map_or(Ok(()), Err);
        };
        switch::want(mode, wanted);
        match self.facts.impossible_mode {
            Some(errors) if starts_over => return Err(errors),
            Some(errors) => switch::refuse(mode, &sentences(errors)),
            None => {}
        }
        Ok(())
    }

    /// Sets the initial mode of an attempt whose pods do not exist yet.
    pub(super) fn start_in(&mut self, before: Option<&AttemptMode>) {
        let mode = switch::starting(self.wanted_mode(), before);
        self.status.mode = Some(mode.started);
        if let Some(attempt) = &mut self.status.attempt {
            attempt.mode = Some(mode);
        }
    }

    /// The mode to ask the coordinator for. If it has answered already, its answer goes into the
    /// status. A coordinator whose members are still joining is not asked yet.
    pub(super) fn switch(&mut self, pods: &[&PodFacts]) -> Option<Mode> {
        let report = self.live_report()?;
        if !matches!(report.stage, Stage::Training | Stage::Evaluating) {
            return None;
        }
        let incarnation = switch::coordinator_incarnation(pods)?;
        let mode = self.status.attempt.as_mut()?.mode.as_mut()?;
        let ask = switch::to_ask(mode, &incarnation)?;
        match self.facts.answer {
            None => Some(ask),
            Some(answer) => {
                switch::note(mode, &incarnation, answer);
                None
            }
        }
    }

    /// The problem of a refused mode.
    pub(super) fn mode_refused(&self) -> Option<Problem> {
        let mode = self.status.attempt.as_ref()?.mode.as_ref()?;
        let present = self.status.mode.unwrap_or(mode.started);
        Some(failure::mode_refused(mode.wanted, present, mode.refused.as_ref()?))
    }
}
