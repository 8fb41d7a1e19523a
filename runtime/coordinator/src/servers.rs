//! The parameter servers of a job: the ones that hold slots, those that have joined and hold none
//! yet, and those that drain.
//! Servers are numbered from 0. When the job wants fewer, those with the highest numbers leave. A
//! server that drains leaves whatever its number is, and its replacement gets slots again.

use std::collections::{BTreeMap, BTreeSet};

use rectrain_modes::migration::SlotMap;
use rectrain_modes::shares::Shares;
use serde::{Deserialize, Serialize};

use super::refused::{DrainRefused, ResizeRefused};

/// The parameter servers, by number.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Servers {
    /// Servers in the slot map with their addresses; `None` until a server has joined at the start
    /// of the job.
    in_map: BTreeMap<u32, Option<String>>,
    /// Servers that have joined and hold no slots yet.
    spare: BTreeMap<u32, String>,
    resize: Resize,
    /// Servers in the map that are about to end.
    draining: BTreeSet<u32>,
    /// Servers that drained and ended, with their addresses. They may come back.
    drained: BTreeMap<u32, String>,
    slots: u32,
    /// The shares of slots that they are to have, by their speed.
    pub(super) shares: Shares,
}

/// Whether slots have to move to other servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Resize {
    No,
    /// This many servers are wanted. Not all may have joined. If it is the present number, slots
    /// are rebalanced.
    Wanted(u32),
    /// Slots are moving. Afterwards this many servers are wanted.
    Moving {
        wanted: u32,
    },
}

/// The result of a server's joining.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Joined {
    /// The job expected it.
    Expected,
    /// It replaces a server in the slot map.
    Rejoined { same_address: bool },
    /// It holds no slots yet. `returns`: it replaces one that drained.
    Spare { returns: bool },
    /// It replaces a server to which slots were moving, so these rows are lost.
    WhileSlotsMove,
    /// The job cannot have a server of this number.
    Unexpected,
}

/// The servers that hold all slots after the next migration.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ResizeToBegin {
    /// Numbers, ascending.
    pub(super) servers: Vec<u16>,
    /// Addresses of these servers and of the present ones.
    pub(super) addresses: BTreeMap<u16, String>,
}

impl Servers {
    /// Expects `servers` servers. None has joined yet. The rows are divided into `slots` slots.
    pub(super) fn new(servers: u32, slots: u32) -> Self {
        Self {
            in_map: (0..servers).map(|server| (server, None)).collect(),
            spare: BTreeMap::new(),
            resize: Resize::No,
            draining: BTreeSet::new(),
            drained: BTreeMap::new(),
            slots,
            shares: Shares::default(),
        }
    }

    /// Whether no slots move, and none are about to.
    pub(super) fn is_settled(&self) -> bool {
        self.resize == Resize::No && self.draining.is_empty()
    }

    /// A server joins. It may replace another of the same number. `all_had_joined`: members may
    /// know the address of the one before.
    pub(super) fn join(&mut self, number: u32, address: &str, all_had_joined: bool) -> Joined {
        match self.in_map.get_mut(&number) {
            Some(Some(before)) => {
                // The server that drained has ended, and its replacement does not drain.
                self.draining.remove(&number);
                let same_address = before == address;
                if !all_had_joined {
                    address.clone_into(before);
                }
                Joined::Rejoined { same_address }
            }
            Some(place) => {
                *place = Some(address.to_owned());
                Joined::Expected
            }
            None if number >= u32::from(u16::MAX) => Joined::Unexpected,
            None => {
                let before = self.spare.insert(number, address.to_owned());
                if before.is_some() && self.is_moving() {
                    return Joined::WhileSlotsMove;
                }
                Joined::Spare { returns: self.drained.remove(&number).is_some() }
            }
        }
    }

    /// Addresses of the servers in the map, in its order, once all have joined.
    pub(super) fn all(&self) -> Option<Vec<String>> {
        self.in_map.values().cloned().collect()
    }

    /// The servers that have not joined yet.
    pub(super) fn absent(&self) -> impl Iterator<Item = u32> {
        self.in_map.iter().filter_map(|(server, place)| place.is_none().then_some(*server))
    }

    /// The number of servers in the map.
    pub(super) fn present(&self) -> u32 {
        self.in_map.len() as u32
    }

    /// The number of servers that the job wants.
    pub(super) fn wanted(&self) -> u32 {
        match self.resize {
            Resize::No => self.present(),
            Resize::Wanted(wanted) | Resize::Moving { wanted } => wanted,
        }
    }

    /// The number of replicas that must run for all present and wanted servers.
    pub(super) fn needed(&self) -> u32 {
        self.above_all().max(self.wanted())
    }

    /// The number after the highest in the map.
    fn above_all(&self) -> u32 {
        self.in_map.keys().next_back().map_or(0, |highest| highest + 1)
    }

    /// Whether slots are moving.
    pub(super) fn is_moving(&self) -> bool {
        matches!(self.resize, Resize::Moving { .. })
    }

    /// Whether a server that still has slots, or is about to get some, drains.
    pub(super) fn is_draining(&self) -> bool {
        !self.draining.is_empty()
    }

    /// Changes the number of wanted servers. Returns the number after the highest present one, and
    /// whether the request is new.
    pub(super) fn set_wanted(&mut self, servers: u32) -> Result<(u32, bool), ResizeRefused> {
        let slots = self.slots;
        if servers == 0 || servers > slots {
            return Err(ResizeRefused::Number(format!(
                "a job has 1 to {slots} parameter servers, because that is how many slots its rows are divided into, not {servers}"
            )));
        }
        let from = self.above_all();
        match self.resize {
            Resize::Moving { .. } => {
                return Err(ResizeRefused::Now(
                    "slots are moving already: ask again when they have settled".to_owned(),
                ));
            }
            Resize::Wanted(before) if before == servers => return Ok((from, false)),
            Resize::Wanted(before) if before > from && servers > from => {
                let missing = (from..before).filter(|number| !self.spare.contains_key(number)).count();
                return Err(ResizeRefused::Now(format!(
                    "{missing} of {before} parameter servers have not joined yet: ask again when they have, or for {from} to give that up"
                )));
            }
            Resize::No | Resize::Wanted(_) => self.resize = Resize::Wanted(servers),
        }
        Ok((from, true))
    }

    /// Drains a server: its slots have to move to others before it ends. If all servers drain, no
    /// other can take the slots, and none drains.
    ///
    /// # Errors
    /// [`DrainRefused::NoRows`] or [`DrainRefused::NoOtherServer`].
    pub(super) fn drain(&mut self, number: u32) -> Result<(), DrainRefused> {
        if self.is_moving() && self.spare.contains_key(&number) {
            // Slots may be moving to this server. They move on to others afterwards.
            self.draining.insert(number);
            return Ok(());
        }
        if !self.in_map.contains_key(&number) {
            return Err(DrainRefused::NoRows);
        }
        self.draining.insert(number);
        if self.in_map.keys().all(|server| self.draining.contains(server)) {
            self.draining.clear();
            return Err(DrainRefused::NoOtherServer);
        }
        if self.resize == Resize::No {
            self.resize = Resize::Wanted(self.present());
        }
        Ok(())
    }

    /// Whether a draining server has lost all its slots and serves no more calls. An error if its
    /// drain was abandoned.
    pub(super) fn is_drained(&self, number: u32) -> Result<bool, DrainRefused> {
        if !self.in_map.contains_key(&number) {
            return Ok(!self.is_moving());
        }
        if self.draining.contains(&number) { Ok(false) } else { Err(DrainRefused::AllServersDrain) }
    }

    /// The servers of the next migration, as soon as all of them have joined. Draining servers
    /// leave, missing ones join, or surplus ones leave, each in a migration of its own. So each map
    /// has more servers than the one before, fewer, or the same.
    pub(super) fn resize_to_begin(&mut self) -> Option<ResizeToBegin> {
        let Resize::Wanted(wanted) = self.resize else { return None };
        let here: BTreeSet<u32> = self.in_map.keys().copied().collect();
        let missing: Vec<u32> = (0..wanted).filter(|number| !here.contains(number)).collect();
        let next: BTreeSet<u32> = if !self.draining.is_empty() {
            here.difference(&self.draining).copied().collect()
        } else if missing.is_empty() {
            (0..wanted).collect()
        } else {
            here.iter().copied().chain(missing).collect()
        };
        let address = |number: &u32| match self.in_map.get(number) {
            Some(address) => address.clone(),
            None => self.spare.get(number).cloned(),
        };
        let all: BTreeMap<u16, String> =
            here.union(&next).map(|number| Some((*number as u16, address(number)?))).collect::<Option<_>>()?;
        self.resize = Resize::Moving { wanted };
        Some(ResizeToBegin { servers: next.into_iter().map(|number| number as u16).collect(), addresses: all })
    }

    /// The slots are on the servers of this map, at these addresses.
    pub(super) fn changed(&mut self, map: &SlotMap, addresses: &[String]) {
        let places = map.servers().iter().zip(addresses);
        let places = places.map(|(number, address)| (u32::from(*number), Some(address.clone()))).collect();
        let before = std::mem::replace(&mut self.in_map, places);
        self.spare.retain(|number, _| !self.in_map.contains_key(number));
        for (number, address) in before.into_iter().filter(|(number, _)| !self.in_map.contains_key(number)) {
            if self.draining.remove(&number) {
                self.drained.insert(number, address.unwrap_or_default());
            }
        }
    }

    /// The address of a server that has drained.
    pub(super) fn drained_address(&self, number: u32) -> Option<&String> {
        self.drained.get(&number)
    }

    /// The migration is over. Servers that are still missing are awaited for the next one.
    pub(super) fn resize_ended(&mut self, training_has_ended: bool) {
        let Resize::Moving { wanted } = self.resize else { return };
        // Forgets a server that got no slots in the end.
        self.draining.retain(|number| self.in_map.contains_key(number));
        let is_done = self.draining.is_empty() && self.in_map.keys().copied().eq(0..wanted);
        self.resize = if is_done || training_has_ended { Resize::No } else { Resize::Wanted(wanted) };
    }

    /// A server without slots ends. Returns whether this server is one.
    pub(super) fn remove_spare(&mut self, number: u32) -> bool {
        let holds_nothing = !self.in_map.contains_key(&number) && !self.is_moving();
        if holds_nothing {
            self.spare.remove(&number);
        }
        holds_nothing
    }
}

#[cfg(test)]
mod tests {
    use rectrain_modes::migration::Epoch;

    use super::*;

    /// Servers that have all joined.
    fn joined(servers: u32) -> Servers {
        let mut all = Servers::new(servers, 64);
        (0..servers).for_each(|number| assert_eq!(all.join(number, &at(number), false), Joined::Expected));
        all
    }

    fn at(number: u32) -> String {
        format!("a{number}")
    }

    impl Servers {
        /// Carries out the next migration. Returns the servers of its map.
        fn moves(&mut self) -> Option<Vec<u16>> {
            let ResizeToBegin { servers, addresses } = self.resize_to_begin()?;
            let places: Vec<String> = servers.iter().map(|server| addresses[server].clone()).collect();
            assert_eq!(places, servers.iter().map(|server| at(u32::from(*server))).collect::<Vec<_>>());
            assert!(self.is_moving() && self.resize_to_begin().is_none());
            let leaving: Vec<u32> = self.draining.iter().copied().collect();
            self.changed(&SlotMap::new(Epoch(1), servers.clone(), servers.clone()).unwrap(), &places);
            leaving.iter().for_each(|number| assert_eq!(self.is_drained(*number), Ok(false), "it still serves calls"));
            self.resize_ended(false);
            Some(servers)
        }
    }

    #[test]
    fn servers_join_together_and_the_highest_leave() {
        let mut servers = joined(1);
        assert_eq!((servers.set_wanted(3).unwrap(), servers.moves()), ((1, true), None));
        assert_eq!((servers.present(), servers.wanted(), servers.needed()), (1, 3, 3));
        assert_eq!(servers.join(2, "a2", true), Joined::Spare { returns: false });
        assert_eq!(servers.moves(), None);
        assert!(matches!(servers.set_wanted(4), Err(ResizeRefused::Now(reason)) if reason.starts_with("1 of 3 ")));
        servers.join(1, "a1", true);
        assert_eq!((servers.moves(), servers.moves()), (Some(vec![0, 1, 2]), None));
        assert_eq!((servers.set_wanted(3).unwrap(), servers.moves()), ((3, true), Some(vec![0, 1, 2])));
        assert_eq!(
            (servers.set_wanted(2).unwrap(), servers.needed(), servers.moves()),
            ((3, true), 3, Some(vec![0, 1]))
        );
        assert_eq!((servers.present(), servers.wanted(), servers.needed()), (2, 2, 2));
        assert!(
            matches!(servers.set_wanted(0), Err(ResizeRefused::Number(_)))
                && matches!(servers.set_wanted(65), Err(ResizeRefused::Number(_)))
        );
    }

    #[test]
    fn a_draining_server_leaves_and_its_replacement_gets_slots() {
        let mut servers = joined(3);
        servers.drain(1).unwrap();
        assert_eq!((servers.is_drained(1), servers.wanted(), servers.needed()), (Ok(false), 3, 3));
        assert_eq!((servers.moves(), servers.is_drained(1), servers.moves()), (Some(vec![0, 2]), Ok(true), None));
        assert_eq!((servers.present(), servers.wanted(), servers.needed()), (2, 3, 3), "its replacement is awaited");
        assert_eq!(servers.all().unwrap(), ["a0", "a2"]);
        assert_eq!(servers.join(1, "a1", true), Joined::Spare { returns: true });
        assert_eq!((servers.moves(), servers.moves()), (Some(vec![0, 1, 2]), None));
        assert_eq!((servers.present(), servers.wanted(), servers.needed()), (3, 3, 3));
    }

    #[test]
    fn scaling_down_waits_for_a_drained_server() {
        let mut servers = joined(3);
        servers.drain(1).unwrap();
        assert_eq!(servers.moves(), Some(vec![0, 2]));
        assert_eq!((servers.set_wanted(2).unwrap(), servers.needed(), servers.moves()), ((3, true), 3, None));
        servers.join(1, "a1", true);
        assert_eq!((servers.moves(), servers.moves(), servers.moves()), (Some(vec![0, 1, 2]), Some(vec![0, 1]), None));
    }

    #[test]
    fn a_server_that_drains_during_a_migration_leaves_next() {
        let mut servers = joined(2);
        servers.set_wanted(3).unwrap();
        servers.join(2, "a2", true);
        let next = servers.resize_to_begin().unwrap();
        servers.drain(0).unwrap();
        let places: Vec<String> = next.addresses.into_values().collect();
        servers.changed(&SlotMap::new(Epoch(1), vec![2], next.servers).unwrap(), &places);
        servers.resize_ended(false);
        assert_eq!((servers.is_drained(0), servers.moves(), servers.moves()), (Ok(false), Some(vec![1, 2]), None));
    }

    #[test]
    fn the_last_server_cannot_drain_and_then_none_does() {
        let mut servers = joined(2);
        assert!(servers.drain(7).unwrap_err().to_string().contains("holds no rows"));
        servers.drain(0).unwrap();
        assert!(servers.drain(1).unwrap_err().to_string().contains("no other"));
        assert!(servers.is_drained(0).unwrap_err().to_string().contains("all"));
        assert!(joined(1).drain(0).unwrap_err().to_string().contains("no other"));
    }

    #[test]
    fn a_server_that_restarts_no_longer_drains() {
        let mut servers = joined(2);
        servers.drain(0).unwrap();
        assert_eq!(servers.join(0, "a0", true), Joined::Rejoined { same_address: true });
        assert!(servers.is_drained(0).is_err());
        assert_eq!(servers.moves(), Some(vec![0, 1]), "a rebalance moves no slots");
    }

    #[test]
    fn a_server_that_restarts_during_a_migration_is_lost() {
        let mut servers = joined(1);
        servers.set_wanted(2).unwrap();
        servers.join(1, "a1", true);
        servers.resize_to_begin().unwrap();
        assert_eq!(servers.join(1, "b1", true), Joined::WhileSlotsMove);
        assert_eq!(servers.join(u32::from(u16::MAX), "x", true), Joined::Unexpected);
    }

    #[test]
    fn a_resize_ends_with_training() {
        let mut servers = joined(1);
        servers.set_wanted(2).unwrap();
        servers.join(1, "a1", true);
        servers.resize_to_begin().unwrap();
        servers.resize_ended(true);
        assert_eq!((servers.present(), servers.wanted(), servers.needed()), (1, 1, 1));
    }
}
