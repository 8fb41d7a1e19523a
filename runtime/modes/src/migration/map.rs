//! Which parameter server holds which slot.

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

/// The owner of every slot. All members of a job that are at one epoch hold the same map.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlotMap {
    epoch: Epoch,
    owners: Vec<u16>,
    servers: u16,
}

impl SlotMap {
    /// `slots` slots dealt out to `servers` parameter servers in contiguous, equal runs: the first map of a job.
    #[must_use]
    pub fn even(slots: u32, servers: u16) -> Self {
        let servers = servers.max(1);
        let owner = |slot: u32| (u64::from(slot) * u64::from(servers) / u64::from(slots.max(1))) as u16;
        Self { epoch: Epoch(0), owners: (0..slots).map(owner).collect(), servers }
    }

    /// A map that was told. `None` if an owner is not one of the servers.
    #[must_use]
    pub fn new(epoch: Epoch, owners: Vec<u16>, servers: u16) -> Option<Self> {
        let is_known = owners.iter().all(|owner| *owner < servers);
        (servers > 0 && is_known).then_some(Self { epoch, owners, servers })
    }

    /// The map after this one.
    pub(super) fn successor(&self, owners: Vec<u16>, servers: u16) -> Self {
        let most = owners.iter().map(|owner| owner + 1).max().unwrap_or(1);
        Self { epoch: self.epoch.next(), owners, servers: servers.max(most) }
    }

    /// Which map it is.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// The owners, by slot.
    #[must_use]
    pub fn owners(&self) -> &[u16] {
        &self.owners
    }

    /// Parameter servers in the map.
    #[must_use]
    pub fn servers(&self) -> usize {
        self.servers as usize
    }

    /// Slots in the map.
    #[must_use]
    pub fn slots(&self) -> u32 {
        self.owners.len() as u32
    }

    /// The parameter server that holds `slot`.
    #[must_use]
    pub fn owner(&self, slot: Slot) -> usize {
        self.owners[slot.0 as usize] as usize
    }

    /// The slots that parameter server `server` holds.
    pub fn slots_of(&self, server: u16) -> impl Iterator<Item = Slot> + '_ {
        (0..).zip(&self.owners).filter(move |(_, owner)| **owner == server).map(|(slot, _)| Slot(slot))
    }

    /// For each parameter server, the runs of `keys` (ascending) that are its own, in order.
    #[must_use]
    pub fn split(&self, keys: &[u64]) -> Vec<Vec<Range<usize>>> {
        let mut runs: Vec<Vec<Range<usize>>> = vec![Vec::new(); self.servers()];
        if self.servers == 1 {
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
        assert!(SlotMap::new(Epoch(3), vec![0, 2], 2).is_none());
        assert!(SlotMap::new(Epoch(3), vec![], 0).is_none());
        assert_eq!(SlotMap::new(Epoch(3), vec![0, 1], 2).unwrap().owner(Slot(1)), 1);
    }
}
