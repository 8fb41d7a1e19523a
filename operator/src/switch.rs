//! The switch of a job's training mode while it runs, as far as it can be decided without asking: which mode an attempt starts in,
//! whether its coordinator has to be asked for another one, and what its answer means. Pure; [`crate::phase`] decides with it and
//! `reconcile` asks.
//!
//! What is compared with the manifest is the mode that was last asked for and not the one in use, which a schedule
//! (`spec.training.switchAt`) may have changed since. Only what the coordinator has agreed to is written down, so an operator that
//! dies between asking and writing asks again; a coordinator agrees to go on in the mode that it is in.

use rectrain_crds::{AttemptMode, Mode};

use crate::failure::shorten;
use crate::names::Role;
use crate::pods::PodFacts;

/// Bytes of a refusal that are kept.
const MOST: usize = 1000;

/// A coordinator's answer to being asked for another training mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwitchAnswer {
    /// Training goes on in it from the next global-step boundary on.
    Accepted,
    /// The mode cannot be; one sentence says why.
    Refused(String),
    /// Not now, or nothing was heard: it has to be asked again.
    Again(String),
}

/// The mode that an attempt starts in: that of the manifest, unless the attempt before was told that it cannot be.
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

/// The manifest asks for `wanted` now: an earlier refusal is of another mode.
pub fn want(mode: &mut AttemptMode, wanted: Mode) {
    if mode.wanted != wanted {
        mode.wanted = wanted;
        mode.refused = None;
    }
}

/// The mode to ask the coordinator `run` for, if there is one.
#[must_use]
pub fn to_ask(mode: &AttemptMode, run: &str) -> Option<Mode> {
    let agreed = mode.accepted.filter(|_| mode.accepted_by.as_deref() == Some(run));
    let asked = agreed.unwrap_or(mode.started);
    (mode.refused.is_none() && asked != mode.wanted).then_some(mode.wanted)
}

/// Notes what the coordinator `run` has answered to being asked for the wanted mode.
pub fn note(mode: &mut AttemptMode, run: &str, answer: &SwitchAnswer) {
    match answer {
        SwitchAnswer::Accepted => {
            mode.accepted = Some(mode.wanted);
            mode.accepted_by = Some(run.to_owned());
        }
        SwitchAnswer::Refused(why) => refuse(mode, why),
        SwitchAnswer::Again(_) => {}
    }
}

/// The wanted mode cannot be.
pub fn refuse(mode: &mut AttemptMode, why: &str) {
    mode.refused = Some(shorten(why, MOST));
}

/// Tells a coordinator from the one that its pod, or another pod in its place, ran before.
#[must_use]
pub fn coordinator_run(pods: &[&PodFacts]) -> Option<String> {
    let pod = pods.iter().find(|pod| pod.role == Role::Coordinator && !pod.is_leaving)?;
    Some(format!("{}/{}", pod.uid, pod.restarts))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: &str = "uid-1/0";

    fn accepted(mut mode: AttemptMode, wanted: Mode) -> AttemptMode {
        want(&mut mode, wanted);
        note(&mut mode, RUN, &SwitchAnswer::Accepted);
        mode
    }

    #[test]
    fn a_mode_is_asked_for_until_it_is_agreed_to_and_not_again() {
        let mut mode = starting(Mode::Sync, None);
        assert_eq!(to_ask(&mode, RUN), None, "it has started in what is wanted");
        want(&mut mode, Mode::Gba);
        assert_eq!(to_ask(&mode, RUN), Some(Mode::Gba));
        note(&mut mode, RUN, &SwitchAnswer::Again("another switch is under way".to_owned()));
        assert_eq!(to_ask(&mode, RUN), Some(Mode::Gba));
        note(&mut mode, RUN, &SwitchAnswer::Accepted);
        assert_eq!(to_ask(&mode, RUN), None);
        want(&mut mode, Mode::Sync);
        assert_eq!(to_ask(&mode, RUN), Some(Mode::Sync), "and back");
    }

    #[test]
    fn a_coordinator_that_starts_again_is_in_the_mode_of_its_start_and_is_asked_again() {
        let mode = accepted(starting(Mode::Sync, None), Mode::Gba);
        assert_eq!(to_ask(&mode, "uid-1/1"), Some(Mode::Gba));
        assert_eq!(to_ask(&mode, "uid-2/0"), Some(Mode::Gba));
        let back = accepted(mode, Mode::Sync);
        assert_eq!(to_ask(&back, "uid-1/1"), None);
    }

    #[test]
    fn a_refused_mode_is_not_asked_for_again_until_the_manifest_asks_for_another() {
        let mut mode = accepted(starting(Mode::Sync, None), Mode::Gba);
        want(&mut mode, Mode::HopBw);
        note(&mut mode, RUN, &SwitchAnswer::Refused("too few workers".to_owned()));
        assert_eq!(to_ask(&mode, RUN), None);
        want(&mut mode, Mode::HopBw);
        assert_eq!(to_ask(&mode, RUN), None);
        let next = starting(Mode::HopBw, Some(&mode));
        assert_eq!((next.started, next.accepted, next.refused.is_some()), (Mode::Gba, None, true), "nor started in");
        want(&mut mode, Mode::Gba);
        assert_eq!((to_ask(&mode, RUN), mode.refused.as_ref()), (None, None), "it is in that one");
        want(&mut mode, Mode::HopBw);
        assert_eq!(to_ask(&mode, RUN), Some(Mode::HopBw));
    }

    #[test]
    fn the_next_attempt_starts_in_the_newest_mode_whether_or_not_it_was_asked_for() {
        let mut mode = accepted(starting(Mode::Sync, None), Mode::Gba);
        assert_eq!(starting(Mode::Gba, Some(&mode)).started, Mode::Gba);
        want(&mut mode, Mode::Hybrid);
        let next = starting(Mode::Hybrid, Some(&mode));
        assert_eq!(next, AttemptMode { started: Mode::Hybrid, wanted: Mode::Hybrid, ..AttemptMode::default() });
        assert_eq!(starting(Mode::Hybrid, Some(&next)), next);
    }
}
