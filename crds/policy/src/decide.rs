//! One decision a subject.

use crate::{Decision, History, Observations, Policy, mode, replicas};

/// Decides on everything the policy speaks of, in the order of [`crate::Subject::ALL`]. `history` has observed `observations`
/// ([`History::observe`]). The same arguments give the same decisions.
#[must_use]
pub fn decide(policy: &Policy, observations: &Observations, history: &History) -> Vec<Decision> {
    let mode = policy.mode.as_ref().map(|mode| mode::decide(mode, observations, history));
    mode.into_iter().chain(replicas::decide(policy, observations, history)).collect()
}
