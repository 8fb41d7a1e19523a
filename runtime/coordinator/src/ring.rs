//! The ring of the dense workers that train with a barrier, when one of them dies and another takes its place. All tell before which
//! step their parameters stand, and go on with the parameters of whoever is furthest. Two of them differ by one step at most, because
//! a step's gradients are summed over all.

use std::collections::{BTreeMap, BTreeSet};

use rectrain_modes::{GlobalStep, Rank};
use serde::{Deserialize, Serialize};

/// See the module's text.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Ring {
    /// Counts the replacements.
    number: u64,
    /// Those that have taken the place of one that died while the parameters were with the workers, until they have carried out an order.
    joining: BTreeSet<Rank>,
    /// Before which step the parameters stand of those who have told, in this ring; none: it has no parameters.
    told: BTreeMap<Rank, Option<GlobalStep>>,
}

/// How far the mending of a ring is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mending {
    /// Somebody has been replaced since: another ring is in force.
    Superseded,
    /// Not all have told.
    Waits,
    /// All go on before `step`, with the donor's parameters.
    Mended { step: GlobalStep, donor: Rank },
    /// Nobody has parameters.
    Lost,
}

impl Ring {
    /// Of which ring the workers are now.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Another is in the place of a worker that has died.
    pub(super) fn replaced(&mut self, rank: Rank) {
        self.number += 1;
        self.joining.insert(rank);
        self.told.clear();
    }

    /// Whether this worker has taken a dead one's place and has carried out no order since.
    pub(super) fn joins(&self, rank: Rank) -> bool {
        self.joining.contains(&rank)
    }

    /// Whether somebody may have no parameters.
    pub(super) fn is_incomplete(&self) -> bool {
        !self.joining.is_empty()
    }

    /// Whether this worker has told, in this ring, before which step its parameters stand.
    pub(super) fn has_told(&self, rank: Rank) -> bool {
        self.told.contains_key(&rank)
    }

    /// It has carried an order out: it has what all have.
    pub(super) fn has_joined(&mut self, rank: Rank) {
        self.joining.remove(&rank);
    }

    /// A worker of ring number `ring`, which has so many `workers`, tells before which step its parameters stand.
    pub(super) fn tell(&mut self, rank: Rank, ring: u64, step: Option<GlobalStep>, workers: u32) -> Mending {
        if ring != self.number {
            return Mending::Superseded;
        }
        if rank.0 < workers {
            self.told.insert(rank, step);
        }
        if self.told.len() < workers as usize {
            return Mending::Waits;
        }
        let Some(furthest) = self.told.values().flatten().max() else { return Mending::Lost };
        let donor = self.told.iter().find(|(_, step)| step.as_ref() == Some(furthest));
        donor.map_or(Mending::Lost, |(donor, _)| Mending::Mended { step: *furthest, donor: *donor })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_go_on_with_the_parameters_of_whoever_is_furthest() {
        let mut ring = Ring::default();
        ring.replaced(Rank(1));
        assert!(ring.joins(Rank(1)) && !ring.joins(Rank(0)) && ring.is_incomplete());
        assert_eq!(ring.tell(Rank(0), 1, Some(GlobalStep(7)), 3), Mending::Waits);
        assert_eq!(ring.tell(Rank(0), 1, Some(GlobalStep(7)), 3), Mending::Waits, "asked again");
        assert!(!ring.has_told(Rank(1)));
        assert_eq!(ring.tell(Rank(1), 1, None, 3), Mending::Waits);
        assert!(ring.has_told(Rank(1)));
        let mended = Mending::Mended { step: GlobalStep(8), donor: Rank(2) };
        assert_eq!(ring.tell(Rank(2), 1, Some(GlobalStep(8)), 3), mended);
        assert_eq!(ring.tell(Rank(0), 1, Some(GlobalStep(7)), 3), mended);
        ring.has_joined(Rank(1));
        assert!(!ring.joins(Rank(1)) && !ring.is_incomplete());
    }

    #[test]
    fn who_dies_meanwhile_begins_another_ring() {
        let mut ring = Ring::default();
        ring.replaced(Rank(0));
        assert_eq!(ring.tell(Rank(0), 1, None, 2), Mending::Waits);
        ring.replaced(Rank(0));
        assert_eq!(ring.tell(Rank(1), 1, Some(GlobalStep(3)), 2), Mending::Superseded);
        assert_eq!(
            ring.tell(Rank(1), 2, Some(GlobalStep(3)), 2),
            Mending::Waits,
            "what was told of the ring before is void"
        );
        assert_eq!(ring.tell(Rank(0), 2, None, 2), Mending::Mended { step: GlobalStep(3), donor: Rank(1) });
    }

    #[test]
    fn without_anybody_who_has_parameters_they_are_lost() {
        let mut ring = Ring::default();
        ring.replaced(Rank(0));
        ring.replaced(Rank(1));
        assert_eq!(ring.tell(Rank(0), 2, None, 2), Mending::Waits);
        assert_eq!(ring.tell(Rank(1), 2, None, 2), Mending::Lost);
    }
}
