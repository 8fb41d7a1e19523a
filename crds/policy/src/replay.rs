//! Repeats a recorded history. A trace is JSON lines, each an object with one of three keys:
//!
//! - `{"policy": …}` applies to all following lines.
//! - `{"observations": …}` are decided on.
//! - `{"decision": …}` is the recorded decision on the observations before it, for comparison.

use serde::{Deserialize, Serialize};

use crate::{Decision, History, ObservationError, Observations, Policy, PolicyError};

/// A line of a trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Record {
    /// The policy for all following records.
    Policy(Box<Policy>),
    /// Observations to decide on.
    Observations(Box<Observations>),
    /// A recorded decision that changed something.
    Decision(Decision),
}

/// A line that is no valid record.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {cause}")]
pub struct ReplayError {
    /// The line's number, from 1.
    pub line: usize,
    /// The error in it.
    pub cause: ReplayCause,
}

/// The error in a line.
#[derive(Debug, thiserror::Error)]
pub enum ReplayCause {
    /// It is no record.
    #[error("expected an object with `policy`, `observations` or `decision`: {0}")]
    Json(#[from] serde_json::Error),
    /// A setting is out of its range.
    #[error("policy: {0}")]
    Policy(#[from] PolicyError),
    /// A measurement is out of its range.
    #[error("observations: {0}")]
    Observations(#[from] ObservationError),
    /// Time runs backwards.
    #[error("observations: atSeconds is {now}: expected more than {before}, the time of the previous observations")]
    Order {
        /// The time found.
        now: u64,
        /// The time of the previous observations.
        before: u64,
    },
    /// No policy came before the observations.
    #[error("observations without a `policy` on an earlier line")]
    NoPolicy,
}

/// One decision of a replay.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Replayed {
    /// The line of its observations.
    pub line: usize,
    /// The decision.
    #[serde(flatten)]
    pub decision: Decision,
    /// Whether the trace has the same decision, or no decisions at all.
    pub agrees: bool,
}

/// The result of a replay.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Replay {
    /// The number of observations decided on.
    pub observations: usize,
    /// Every decision that changes something, in order.
    pub decisions: Vec<Replayed>,
    /// Recorded decisions that the replay did not repeat, each with its line.
    pub missing: Vec<(usize, Decision)>,
    /// The last decision about each subject, including decisions to keep everything.
    pub standing: Vec<Decision>,
}

/// Decides again on all observations of the trace `text`. Empty lines are skipped.
///
/// # Errors
/// The first line that is no record, or that has a number outside its range.
pub fn replay(text: &str) -> Result<Replay, ReplayError> {
    let mut state = State::default();
    for (line, text) in (1..).zip(text.lines()).filter(|(_, text)| !text.trim().is_empty()) {
        state.take(line, text).map_err(|cause| ReplayError { line, cause })?;
    }
    Ok(state.finish())
}

#[derive(Default)]
struct State {
    policy: Option<Policy>,
    history: History,
    seen_seconds: Option<u64>,
    recorded: Vec<(usize, Decision)>,
    replay: Replay,
}

impl State {
    fn take(&mut self, line: usize, text: &str) -> Result<(), ReplayCause> {
        match serde_json::from_str(text)? {
            Record::Policy(policy) => {
                policy.check()?;
                self.policy = Some(*policy);
            }
            Record::Observations(observations) => self.decide(line, &observations)?,
            Record::Decision(decision) => self.recorded.push((line, decision)),
        }
        Ok(())
    }

    fn decide(&mut self, line: usize, observations: &Observations) -> Result<(), ReplayCause> {
        observations.check()?;
        let now = observations.at_seconds;
        if let Some(before) = self.seen_seconds.filter(|before| now <= *before) {
            return Err(ReplayCause::Order { now, before });
        }
        let policy = self.policy.as_ref().ok_or(ReplayCause::NoPolicy)?;
        self.seen_seconds = Some(now);
        self.replay.observations += 1;
        self.replay.standing = self.history.advance(policy, observations);
        let acting = self.replay.standing.iter().filter(|decision| decision.acts()).cloned();
        self.replay.decisions.extend(acting.map(|decision| Replayed { line, decision, agrees: true }));
        Ok(())
    }

    fn finish(self) -> Replay {
        let mut replay = self.replay;
        let same =
            |a: &Decision, b: &Decision| (a.at_seconds, a.subject, a.action) == (b.at_seconds, b.subject, b.action);
        if !self.recorded.is_empty() {
            for made in &mut replay.decisions {
                made.agrees = self.recorded.iter().any(|(_, recorded)| same(recorded, &made.decision));
            }
        }
        let is_missing =
            |(_, recorded): &(usize, Decision)| !replay.decisions.iter().any(|made| same(recorded, &made.decision));
        replay.missing = self.recorded.into_iter().filter(is_missing).collect();
        replay
    }
}
