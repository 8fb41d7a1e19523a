//! The switch of a job's training mode while it runs. Pure; [`crate::phase`] decides with it and
//! `reconcile` sends the request.
//!
//! It decides which mode an attempt starts in, whether to ask the coordinator for another mode, and
//! how to interpret the answer.
//!
//! The manifest is compared with the mode that was last asked for. The mode in use may differ: the
//! schedule `spec.training.switchAt` may have changed it since. Only an accepted mode is written
//! down. So an operator that dies between the request and the write asks again, which changes
//! nothing.

use rectrain_crds::{AttemptMode, Mode, Role};

use crate::coordinator_view::SwitchAnswer;
use crate::pods::PodFacts;
use crate::text::shorten;

/// Bytes of a refusal that a status keeps.
const MOST: usize = 1000;

/// The mode that an attempt starts in: the manifest's, unless the attempt before has refused it.
#[must_use]
pub fn starting(wanted: Mode, before: Option<&AttemptMode>) -> AttemptMode {
    match before {
        Some(before) if before.wanted == wanted && before.refused.is_some() => AttemptMode {
            started: before.accepted.unwrap_or(before.started),
            accepted: None,
            accepted_by: None,
            ..before.clone()
        },
        _ => AttemptMode { started: wanted, wanted, ..AttemptMode::default() },
    }
}

/// Notes that the manifest asks for `wanted` now. A refusal of another mode is dropped.
pub fn want(mode: &mut AttemptMode, wanted: Mode) {
    if mode.wanted != wanted {
        mode.wanted = wanted;
        mode.refused = None;
    }
}

/// The mode to ask the coordinator `incarnation` for, if there is one.
#[must_use]
pub fn to_ask(mode: &AttemptMode, incarnation: &str) -> Option<Mode> {
    let accepted = mode.accepted.filter(|_| mode.accepted_by.as_deref() == Some(incarnation));
    let asked = accepted.unwrap_or(mode.started);
    (mode.refused.is_none() && asked != mode.wanted).then_some(mode.wanted)
}

/// Notes the answer of the coordinator `incarnation` to the request for the wanted mode.
pub fn note(mode: &mut AttemptMode, incarnation: &str, answer: &SwitchAnswer) {
    match answer {
        SwitchAnswer::Accepted => {
            mode.accepted = Some(mode.wanted);
            mode.accepted_by = Some(incarnation.to_owned());
        }
        SwitchAnswer::Refused(why) => refuse(mode, why),
        SwitchAnswer::Again(_) => {}
    }
}

/// Notes that the job cannot train in the wanted mode.
pub fn refuse(mode: &mut AttemptMode, why: &str) {
    mode.refused = Some(shorten(why, MOST));
}

/// The incarnation of the coordinator: its pod and the number of restarts.
#[must_use]
pub fn coordinator_incarnation(pods: &[&PodFacts]) -> Option<String> {
    let pod = pods.iter().find(|pod| pod.role == Role::Coordinator && !pod.is_terminating)?;
    Some(format!("{}/{}", pod.uid, pod.restarts))
}

#[cfg(test)]
mod tests {
    use super::*;

    const COORDINATOR: &str = "uid-1/0";

    fn accepted(mut mode: AttemptMode, wanted: Mode) -> AttemptMode {
        want(&mut mode, wanted);
        note(&mut mode, COORDINATOR, &SwitchAnswer::Accepted);
        mode
    }

    #[test]
    fn a_mode_is_asked_for_until_it_is_accepted() {
        let mut mode = starting(Mode::Sync, None);
        assert_eq!(to_ask(&mode, COORDINATOR), None, "it has started in the wanted mode");
        want(&mut mode, Mode::Gba);
        assert_eq!(to_ask(&mode, COORDINATOR), Some(Mode::Gba));
        note(&mut mode, COORDINATOR, &SwitchAnswer::Again("another switch is under way".to_owned()));
        assert_eq!(to_ask(&mode, COORDINATOR), Some(Mode::Gba));
        note(&mut mode, COORDINATOR, &SwitchAnswer::Accepted);
        assert_eq!(to_ask(&mode, COORDINATOR), None);
        want(&mut mode, Mode::Sync);
        assert_eq!(to_ask(&mode, COORDINATOR), Some(Mode::Sync), "and back");
    }

    #[test]
    fn a_restarted_coordinator_is_asked_again() {
        let mode = accepted(starting(Mode::Sync, None), Mode::Gba);
        assert_eq!(to_ask(&mode, "uid-1/1"), Some(Mode::Gba));
        assert_eq!(to_ask(&mode, "uid-2/0"), Some(Mode::Gba));
        let back = accepted(mode, Mode::Sync);
        assert_eq!(to_ask(&back, "uid-1/1"), None);
    }

    #[test]
    fn a_refused_mode_is_not_asked_for_until_the_manifest_changes() {
        let mut mode = accepted(starting(Mode::Sync, None), Mode::Gba);
        want(&mut mode, Mode::HopBw);
        note(&mut mode, COORDINATOR, &SwitchAnswer::Refused("too few workers".to_owned()));
        assert_eq!(to_ask(&mode, COORDINATOR), None);
        want(&mut mode, Mode::HopBw);
        assert_eq!(to_ask(&mode, COORDINATOR), None);
        let next = starting(Mode::HopBw, Some(&mode));
        assert_eq!(
            (next.started, next.accepted, next.refused.is_some()),
            (Mode::Gba, None, true),
            "the next attempt does not start in it"
        );
        want(&mut mode, Mode::Gba);
        assert_eq!(
            (to_ask(&mode, COORDINATOR), mode.refused.as_ref()),
            (None, None),
            "the coordinator is in that mode"
        );
        want(&mut mode, Mode::HopBw);
        assert_eq!(to_ask(&mode, COORDINATOR), Some(Mode::HopBw));
    }

    #[test]
    fn the_next_attempt_starts_in_the_newest_mode() {
        let mut mode = accepted(starting(Mode::Sync, None), Mode::Gba);
        assert_eq!(starting(Mode::Gba, Some(&mode)).started, Mode::Gba);
        want(&mut mode, Mode::Hybrid);
        let next = starting(Mode::Hybrid, Some(&mode));
        assert_eq!(next, AttemptMode { started: Mode::Hybrid, wanted: Mode::Hybrid, ..AttemptMode::default() });
        assert_eq!(starting(Mode::Hybrid, Some(&next)), next);
    }
}
