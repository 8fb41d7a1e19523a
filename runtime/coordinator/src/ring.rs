//! Repairs the ring of dense workers that train with a barrier after one of them was replaced.
//! All workers report the step that their parameters are before. Then all continue with the
//! parameters of the most advanced worker. Two workers differ by at most one step, because each
//! step sums gradients over all of them.

use std::collections::{BTreeMap, BTreeSet};

use rectrain_modes::{GlobalStep, Rank};
use serde::{Deserialize, Serialize};

/// The ring, and the reports of its repair.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Ring {
    /// Counts the replacements.
    number: u64,
    /// Replacements without parameters, until they have carried out an order.
    joining: BTreeSet<Rank>,
    /// Reports in this ring: the step that a worker's parameters are before; `None` if it has no
    /// parameters.
    reported: BTreeMap<Rank, Option<GlobalStep>>,
}

/// The state of a ring repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RingRepair {
    /// Another worker was replaced since: another ring is in force.
    Superseded,
    /// Not all workers have reported.
    Waiting,
    /// All workers continue before `step`, with the parameters of `donor`.
    Repaired { step: GlobalStep, donor: Rank },
    /// No worker has parameters.
    Lost,
}

impl Ring {
    /// The number of the present ring.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// A worker was replaced, so its parameters are lost.
    pub(super) fn replace(&mut self, rank: Rank) {
        self.number += 1;
        self.joining.insert(rank);
        self.reported.clear();
    }

    /// Whether this worker is a replacement that has carried out no order yet.
    pub(super) fn is_joining(&self, rank: Rank) -> bool {
        self.joining.contains(&rank)
    }

    /// Whether a worker may lack parameters.
    pub(super) fn is_incomplete(&self) -> bool {
        !self.joining.is_empty()
    }

    /// Whether this worker has reported in this ring.
    pub(super) fn has_reported(&self, rank: Rank) -> bool {
        self.reported.contains_key(&rank)
    }

    /// This worker has carried out an order, so it has the same parameters as all others.
    pub(super) fn joined(&mut self, rank: Rank) {
        self.joining.remove(&rank);
    }

    /// A worker reports the step that its parameters are before. `ring` is the ring that it knows,
    /// and `workers` the size of the ring.
    pub(super) fn report(&mut self, rank: Rank, ring: u64, step: Option<GlobalStep>, workers: u32) -> RingRepair {
        if ring != self.number {
            return RingRepair::Superseded;
        }
        if rank.0 < workers {
            self.reported.insert(rank, step);
        }
        if self.reported.len() < workers as usize {
            return RingRepair::Waiting;
        }
        let Some(furthest) = self.reported.values().flatten().max() else { return RingRepair::Lost };
        let donor = self.reported.iter().find(|(_, step)| step.as_ref() == Some(furthest));
        donor.map_or(RingRepair::Lost, |(donor, _)| RingRepair::Repaired { step: *furthest, donor: *donor })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_workers_take_the_most_advanced_parameters() {
        let mut ring = Ring::default();
        ring.replace(Rank(1));
        assert!(ring.is_joining(Rank(1)) && !ring.is_joining(Rank(0)) && ring.is_incomplete());
        assert_eq!(ring.report(Rank(0), 1, Some(GlobalStep(7)), 3), RingRepair::Waiting);
        assert_eq!(ring.report(Rank(0), 1, Some(GlobalStep(7)), 3), RingRepair::Waiting, "a repeated report");
        assert!(!ring.has_reported(Rank(1)));
        assert_eq!(ring.report(Rank(1), 1, None, 3), RingRepair::Waiting);
        assert!(ring.has_reported(Rank(1)));
        let repaired = RingRepair::Repaired { step: GlobalStep(8), donor: Rank(2) };
        assert_eq!(ring.report(Rank(2), 1, Some(GlobalStep(8)), 3), repaired);
        assert_eq!(ring.report(Rank(0), 1, Some(GlobalStep(7)), 3), repaired);
        ring.joined(Rank(1));
        assert!(!ring.is_joining(Rank(1)) && !ring.is_incomplete());
    }

    #[test]
    fn a_death_during_a_repair_begins_another_ring() {
        let mut ring = Ring::default();
        ring.replace(Rank(0));
        assert_eq!(ring.report(Rank(0), 1, None, 2), RingRepair::Waiting);
        ring.replace(Rank(0));
        assert_eq!(ring.report(Rank(1), 1, Some(GlobalStep(3)), 2), RingRepair::Superseded);
        assert_eq!(
            ring.report(Rank(1), 2, Some(GlobalStep(3)), 2),
            RingRepair::Waiting,
            "reports of the ring before are void"
        );
        assert_eq!(ring.report(Rank(0), 2, None, 2), RingRepair::Repaired { step: GlobalStep(3), donor: Rank(1) });
    }

    #[test]
    fn without_any_parameters_the_ring_is_lost() {
        let mut ring = Ring::default();
        ring.replace(Rank(0));
        ring.replace(Rank(1));
        assert_eq!(ring.report(Rank(0), 2, None, 2), RingRepair::Waiting);
        assert_eq!(ring.report(Rank(1), 2, None, 2), RingRepair::Lost);
    }
}
