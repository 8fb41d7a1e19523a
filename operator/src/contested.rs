//! Numbers of replicas that two programs write in turn. A HorizontalPodAutoscaler and a GitOps tool
//! do that for ever if the GitOps tool does not ignore the field.
//!
//! Each change costs a pause of training, or even an attempt. So the operator notices that a number
//! keeps going back to an earlier one, and keeps the present members until that ends.

use std::collections::{BTreeMap, VecDeque};

use jiff::{SignedDuration, Timestamp};
use rectrain_crds::{ResolvedJob, Role};

use crate::failure::{Cause, Problem};
use crate::names::manifest_replicas;

/// Time in which the changes of a number count, and after which it counts as settled.
const WINDOW: SignedDuration = SignedDuration::from_mins(5);
/// Returns of a number to the one before its last change, at most. A user may try two numbers.
const MOST_RETURNS: usize = 3;
/// Changes that are remembered for each role.
const MOST_CHANGES: usize = 16;

/// The last numbers of replicas in the manifest of a job.
#[derive(Clone, Debug, Default)]
pub struct ContestedNumbers(BTreeMap<Role, Numbers>);

/// The last numbers of a role, and when they were first seen; oldest first.
#[derive(Clone, Debug, Default)]
struct Numbers(VecDeque<(Timestamp, u32)>);

impl ContestedNumbers {
    /// Adds a look at a manifest. Returns a number that two programs write in turn, if there is
    /// one.
    pub fn look(&mut self, resolved: &ResolvedJob, now: Timestamp) -> Option<Problem> {
        let mut contested = None;
        for role in Role::MEMBERS {
            let numbers = self.0.entry(role).or_default();
            numbers.note(manifest_replicas(role, resolved), now);
            contested = contested.or_else(|| numbers.problem(role));
        }
        contested
    }
}

impl Numbers {
    fn note(&mut self, number: u32, now: Timestamp) {
        if self.0.back().is_none_or(|(_, last)| *last != number) {
            self.0.push_back((now, number));
        }
        let is_old = |(at, _): &(Timestamp, u32)| now.duration_since(*at) >= WINDOW;
        while self.0.len() > MOST_CHANGES || self.0.len() > 1 && self.0.front().is_some_and(is_old) {
            self.0.pop_front();
        }
    }

    /// How often the number went back to the one before its last change.
    fn returns(&self) -> usize {
        self.0.iter().zip(self.0.iter().skip(2)).filter(|((_, before), (_, now))| before == now).count()
    }

    fn problem(&self, role: Role) -> Option<Problem> {
        if self.returns() <= MOST_RETURNS {
            return None;
        }
        let last = self.0.iter().rev().take(2).map(|(_, number)| *number);
        let (low, high) = (last.clone().min()?, last.max()?);
        let message = format!(
            "spec.roles.{}.replicas keeps changing between {low} and {high}: two programs write it, such as a HorizontalPodAutoscaler and a GitOps tool. Training continues with its present members until the number is the same for five minutes: make one of them ignore the field",
            role.section()
        );
        Some(Problem::new(Cause::ReplicasContested, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a number is contested after each of these looks, ten seconds apart.
    fn contested(numbers: &[u32]) -> Vec<bool> {
        let mut known = Numbers::default();
        let looks = (0..).map(|look| Timestamp::from_second(1_800_000_000 + 10 * look).expect("a time"));
        let mut seen = Vec::new();
        for (number, now) in numbers.iter().zip(looks) {
            known.note(*number, now);
            seen.push(known.problem(Role::DenseWorker).is_some());
        }
        seen
    }

    #[test]
    fn a_number_that_keeps_returning_is_contested() {
        let flips = [2, 4, 2, 4, 2, 4];
        assert_eq!(contested(&flips), [false, false, false, false, false, true]);
        assert!(contested(&[2, 3, 4, 5, 6, 5, 4, 3, 2, 1]).iter().all(|contested| !contested), "one way and back");
        assert!(contested(&[2; 40]).iter().all(|contested| !contested));
    }

    #[test]
    fn a_number_is_settled_five_minutes_after_its_changes() {
        let looks: Vec<u32> = [2, 4, 2, 4, 2, 4].into_iter().chain([4; 40]).collect();
        let seen = contested(&looks);
        let last = seen.iter().rposition(|contested| *contested).expect("it was contested");
        assert!((28..36).contains(&last), "settled after look {last}");
        // An endless quarrel is remembered within bounds.
        let mut known = Numbers::default();
        for look in 0..1000 {
            known.note(look % 2, Timestamp::from_second(1_800_000_000 + i64::from(look)).expect("a time"));
        }
        assert_eq!(known.0.len(), MOST_CHANGES);
    }

    #[test]
    fn the_message_names_the_field_and_both_numbers() {
        let mut known = Numbers::default();
        for (look, number) in [4, 2, 4, 2, 4, 2].into_iter().enumerate() {
            known.note(number, Timestamp::from_second(1_800_000_000 + look as i64).expect("a time"));
        }
        let message = known.problem(Role::DenseWorker).expect("it is contested").message;
        assert!(
            message.contains("spec.roles.denseWorker.replicas") && message.contains("between 2 and 4"),
            "{message}"
        );
    }
}
