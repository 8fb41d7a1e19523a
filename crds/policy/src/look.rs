//! The arguments of every decision.

use crate::{History, Observations, Policy};

/// One look at a job. `history` has observed `observations` ([`History::observe`]).
#[derive(Clone, Copy)]
pub(crate) struct Look<'a> {
    pub(crate) policy: &'a Policy,
    pub(crate) observations: &'a Observations,
    pub(crate) history: &'a History,
}
