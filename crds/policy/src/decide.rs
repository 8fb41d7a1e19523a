//! All decisions of one look at a job.

use crate::look::Look;
use crate::{Decision, History, Observations, Policy, mode, replicas};

/// Decides about every subject of the policy, in the order of [`crate::Subject::ALL`]. `history`
/// has observed `observations` ([`History::observe`]). The same arguments give the same decisions.
#[must_use]
pub fn decide(policy: &Policy, observations: &Observations, history: &History) -> Vec<Decision> {
    let look = Look { policy, observations, history };
    let mode = policy.mode.as_ref().map(|mode| mode::decide(mode, look));
    mode.into_iter().chain(replicas::decide(look)).collect()
}
