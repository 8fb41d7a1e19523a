//! Which parameter server holds which slot.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use rectrain_embedding::{FeatureKey, Slot, slot_of};
use serde::{Deserialize, Serialize};

/// Numbers the slot maps of a job, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The epoch after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The owner of every slot. All members of a job at one epoch hold the same map. A parameter server
/// keeps its number while it lives. Its *place* is its index among the servers in the map, from 0.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotMap {
    epoch: Epoch,
    /// The number of the owner, indexed by slot.
    owners: Vec<u16>,
    /// The numbers of the servers, ascending.
    servers: Vec<u16>,
}

impl SlotMap {
    /// The first map of a job: `slots` slots, assigned to `servers` parameter servers in
    /// contiguous, equal runs.
    #[must_use]
    pub fn even(slots: u32, servers: u16) -> Self {
        let servers = servers.max(1);
        let owner = |slot: u32| (u64::from(slot) * u64::from(servers) / u64::from(slots.max(1))) as u16;
        Self { epoch: Epoch(0), owners: (0..slots).map(owner).collect(), servers: (0..servers).collect() }
    }

    /// A map received from the coordinator, with these servers. `None` if there are no servers, or
    /// an owner is not one of them.
    #[must_use]
    pub fn new(epoch: Epoch, owners: Vec<u16>, servers: impl IntoIterator<Item = u16>) -> Option<Self> {
        let servers: BTreeSet<u16> = servers.into_iter().collect();
        let is_known = owners.iter().all(|owner| servers.contains(owner));
        let servers: Vec<u16> = servers.into_iter().collect();
        (!servers.is_empty() && is_known).then_some(Self { epoch, owners, servers })
    }

    /// The next map: of `servers`, and of any other server that owns a slot.
    pub(super) fn successor(&self, owners: Vec<u16>, servers: &[u16]) -> Self {
        let servers: BTreeSet<u16> = servers.iter().chain(&owners).copied().collect();
        Self { epoch: self.epoch.next(), owners, servers: servers.into_iter().collect() }
    }

    /// The epoch of this map.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The numbers of the owners, indexed by slot.
    #[must_use]
    pub fn owners(&self) -> &[u16] {
        &self.owners
    }

    /// The numbers of the parameter servers in the map, ascending. The index is the place.
    #[must_use]
    pub fn servers(&self) -> &[u16] {
        &self.servers
    }

    /// The place of a server; `None` if the map does not have it.
    #[must_use]
    pub fn place(&self, server: u16) -> Option<usize> {
        // Usually the numbers have no gap.
        if self.servers.get(usize::from(server)) == Some(&server) {
            return Some(usize::from(server));
        }
        self.servers.binary_search(&server).ok()
    }

    /// The number of slots.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.owners.len() as u32
    }

    /// The place of the parameter server that holds `slot`.
    #[must_use]
    pub fn owner(&self, slot: Slot) -> usize {
        // Every owner is in the map.
        self.place(self.owners[slot.0 as usize]).unwrap_or(0)
    }

    /// The slots that parameter server `server` holds.
    pub fn slots_of(&self, server: u16) -> impl Iterator<Item = Slot> + '_ {
        (0..).zip(&self.owners).filter(move |(_, owner)| **owner == server).map(|(slot, _)| Slot(slot))
    }

    /// For each parameter server, by place: the index ranges of its keys in `keys` (ascending), in
    /// order.
    #[must_use]
    pub fn split(&self, keys: &[u64]) -> Vec<Vec<Range<usize>>> {
        let mut runs: Vec<Vec<Range<usize>>> = vec![Vec::new(); self.servers.len()];
        if self.servers.len() == 1 {
            if !keys.is_empty() {
                runs[0].push(0..keys.len());
            }
            return runs;
        }
        for (index, key) in keys.iter().enumerate() {
            let own = &mut runs[self.owner(slot_of(FeatureKey(*key), self.slots()))];
            match own.last_mut() {
                Some(run) if run.end == index => run.end += 1,
                _ => own.push(index..index + 1),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_goes_to_the_owner_of_its_slot_once() {
        let keys: Vec<u64> = (0..1000u64).map(|i| i.wrapping_mul(u64::MAX / 1000)).collect();
        for servers in [1u16, 2, 3, 7] {
            let map = SlotMap::even(64, servers);
            let mut seen = vec![false; keys.len()];
            for (server, runs) in map.split(&keys).into_iter().enumerate() {
                for index in runs.into_iter().flatten() {
                    assert_eq!(map.owner(slot_of(FeatureKey(keys[index]), 64)), server);
                    assert!(!std::mem::replace(&mut seen[index], true));
                }
            }
            assert!(seen.into_iter().all(|seen| seen));
        }
    }

    #[test]
    fn servers_get_equal_numbers_of_slots() {
        let map = SlotMap::even(1024, 3);
        let counts = (0..3).map(|server| map.slots_of(server).count()).collect::<Vec<_>>();
        assert!(counts.iter().all(|count| (341..=342).contains(count)), "{counts:?}");
    }

    #[test]
    fn a_map_with_an_unknown_owner_is_none() {
        assert!(SlotMap::new(Epoch(3), vec![0, 2], [0, 1]).is_none());
        assert!(SlotMap::new(Epoch(3), vec![], []).is_none());
        assert_eq!(SlotMap::new(Epoch(3), vec![0, 1], [0, 1]).unwrap().owner(Slot(1)), 1);
    }

    #[test]
    fn servers_have_the_places_of_their_numbers_whichever_are_missing() {
        let map = SlotMap::new(Epoch(3), vec![0, 3, 3, 2], [3, 0, 2]).unwrap();
        assert_eq!([0, 1, 2, 3, 4].map(|server| map.place(server)), [Some(0), None, Some(1), Some(2), None]);
        assert_eq!([0, 1, 2, 3].map(|slot| map.owner(Slot(slot))), [0, 2, 2, 1]);
        let keys: Vec<u64> = (0..1000u64).map(|i| i.wrapping_mul(u64::MAX / 1000)).collect();
        let counts: Vec<usize> = map.split(&keys).into_iter().map(|runs| runs.into_iter().flatten().count()).collect();
        assert_eq!((counts.len(), counts.iter().sum()), (3, 1000));
        assert!(counts[2] > counts[1], "two slots of four: {counts:?}");
    }
}
