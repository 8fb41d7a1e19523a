//! The parameter servers of a job: which of them hold slots, which have come and are to, how many there are to be, and which are about
//! to end. Numbers are those of the replicas. When there are to be fewer, the highest go; one that is about to end, because its node is drained,
//! goes whichever it is, and whoever comes in its place gets slots again.

use std::collections::{BTreeMap, BTreeSet};

use rectrain_modes::migration::SlotMap;
use serde::{Deserialize, Serialize};

use super::state::ResizeRefused;

/// See the module's text.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Servers {
    /// Those in the slot map, and where they are; none for whoever has not joined when the job begins.
    in_map: BTreeMap<u32, Option<String>>,
    /// Others that have joined: they hold nothing until slots move to them.
    spare: BTreeMap<u32, String>,
    resize: Resize,
    /// Of those in the map: they are about to end.
    ending: BTreeSet<u32>,
    /// Who has ended since, where it was, and may come back.
    ended: BTreeMap<u32, String>,
    slots: u32,
}

/// Whether other servers are to hold slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Resize {
    No,
    /// So many; not all of them may be there. As many as there are: their slots are to be spread anew.
    Wanted(u32),
    /// Slots are moving; when they have, so many are wanted.
    Moving {
        wanted: u32,
    },
}

/// What came of a server's joining.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Joined {
    /// It is one of those expected.
    Expected,
    /// One that had joined before has its place in the map.
    Again { same_address: bool },
    /// It holds nothing yet. `returns`: in the place of one that had ended in order.
    Spare { returns: bool },
    /// One to which slots are moving came again: what had come is gone.
    WhileSlotsMove,
    /// There cannot be one of this number.
    Unexpected,
}

/// Slots are to move so that just these servers hold them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ResizeToBegin {
    /// Rising.
    pub(super) servers: Vec<u16>,
    /// Where they are, and those that hold slots now.
    pub(super) addresses: BTreeMap<u16, String>,
}

impl Servers {
    /// Of so many, who are still to join; the rows are divided into so many slots.
    pub(super) fn new(servers: u32, slots: u32) -> Self {
        Self {
            in_map: (0..servers).map(|server| (server, None)).collect(),
            spare: BTreeMap::new(),
            resize: Resize::No,
            ending: BTreeSet::new(),
            ended: BTreeMap::new(),
            slots,
        }
    }

    /// A server joins; another of its number may have died. `all_had_joined`: where the servers are has been told.
    pub(super) fn join(&mut self, number: u32, address: &str, all_had_joined: bool) -> Joined {
        match self.in_map.get_mut(&number) {
            Some(Some(before)) => {
                // Whoever was about to end has, and this one is not.
                self.ending.remove(&number);
                let same_address = before == address;
                if !all_had_joined {
                    address.clone_into(before);
                }
                Joined::Again { same_address }
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
                Joined::Spare { returns: self.ended.remove(&number).is_some() }
            }
        }
    }

    /// Where those in the map are, by place; once all have joined.
    pub(super) fn all(&self) -> Option<Vec<String>> {
        self.in_map.values().cloned().collect()
    }

    /// Who has not joined since the job began.
    pub(super) fn absent(&self) -> impl Iterator<Item = u32> {
        self.in_map.iter().filter_map(|(server, place)| place.is_none().then_some(*server))
    }

    /// Those in the map.
    pub(super) fn present(&self) -> u32 {
        self.in_map.len() as u32
    }

    /// How many there are to be.
    pub(super) fn wanted(&self) -> u32 {
        match self.resize {
            Resize::No => self.present(),
            Resize::Wanted(wanted) | Resize::Moving { wanted } => wanted,
        }
    }

    /// How many replicas there have to be for all that hold slots, or are to.
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

    /// There are to be so many; gives the number after the highest of those there are, and whether that was not asked for before.
    pub(super) fn want(&mut self, servers: u32) -> Result<(u32, bool), ResizeRefused> {
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

    /// A server is about to end: others are to take what it holds. If all are, none can.
    ///
    /// # Errors
    /// A sentence: it holds nothing, or there is no other.
    pub(super) fn about_to_end(&mut self, number: u32) -> Result<(), String> {
        if self.is_moving() && self.spare.contains_key(&number) {
            // Slots may be on their way to it: when they are here they go on to others.
            self.ending.insert(number);
            return Ok(());
        }
        if !self.in_map.contains_key(&number) {
            return Err("it holds no rows".to_owned());
        }
        self.ending.insert(number);
        if self.in_map.keys().all(|server| self.ending.contains(server)) {
            self.ending.clear();
            return Err("there is no other parameter server to take its rows".to_owned());
        }
        if self.resize == Resize::No {
            self.resize = Resize::Wanted(self.present());
        }
        Ok(())
    }

    /// Whether others hold what a server held that was about to end, and nothing more is asked of it; a sentence, if that was given up.
    pub(super) fn has_left(&self, number: u32) -> Result<bool, String> {
        if !self.in_map.contains_key(&number) {
            return Ok(!self.is_moving());
        }
        if self.ending.contains(&number) { Ok(false) } else { Err("all parameter servers are about to end".to_owned()) }
    }

    /// The servers that are to hold slots next, and where all are that takes: as soon as they are there. Others come and go in steps of their
    /// own, so that a map after another has either more servers or fewer, or the same.
    pub(super) fn resize_to_begin(&mut self) -> Option<ResizeToBegin> {
        let Resize::Wanted(wanted) = self.resize else { return None };
        let here: BTreeSet<u32> = self.in_map.keys().copied().collect();
        let missing: Vec<u32> = (0..wanted).filter(|number| !here.contains(number)).collect();
        let next: BTreeSet<u32> = if !self.ending.is_empty() {
            here.difference(&self.ending).copied().collect()
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

    /// Slots are on just the servers of this map, which are there (by place).
    pub(super) fn changed(&mut self, map: &SlotMap, addresses: &[String]) {
        let places = map.servers().iter().zip(addresses);
        let places = places.map(|(number, address)| (u32::from(*number), Some(address.clone()))).collect();
        let before = std::mem::replace(&mut self.in_map, places);
        self.spare.retain(|number, _| !self.in_map.contains_key(number));
        for (number, address) in before.into_iter().filter(|(number, _)| !self.in_map.contains_key(number)) {
            if self.ending.remove(&number) {
                self.ended.insert(number, address.unwrap_or_default());
            }
        }
    }

    /// Where a server was that has ended.
    pub(super) fn ended_at(&self, number: u32) -> Option<&String> {
        self.ended.get(&number)
    }

    /// Slots move no more. What is still to be done is: whoever is missing is waited for.
    pub(super) fn resize_ended(&mut self, training_has_ended: bool) {
        let Resize::Moving { wanted } = self.resize else { return };
        // One that nothing moved to after all.
        self.ending.retain(|number| self.in_map.contains_key(number));
        let is_done = self.ending.is_empty() && self.in_map.keys().copied().eq(0..wanted);
        self.resize = if is_done || training_has_ended { Resize::No } else { Resize::Wanted(wanted) };
    }

    /// A server ends that no slot was given to yet; says whether that is what it was.
    pub(super) fn spare_leaves(&mut self, number: u32) -> bool {
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

    /// So many that have joined.
    fn joined(servers: u32) -> Servers {
        let mut all = Servers::new(servers, 64);
        (0..servers).for_each(|number| assert_eq!(all.join(number, &at(number), false), Joined::Expected));
        all
    }

    fn at(number: u32) -> String {
        format!("a{number}")
    }

    impl Servers {
        /// Slots move as they are to next; gives the servers that hold them then.
        fn moves(&mut self) -> Option<Vec<u16>> {
            let ResizeToBegin { servers, addresses } = self.resize_to_begin()?;
            let places: Vec<String> = servers.iter().map(|server| addresses[server].clone()).collect();
            assert_eq!(places, servers.iter().map(|server| at(u32::from(*server))).collect::<Vec<_>>());
            assert!(self.is_moving() && self.resize_to_begin().is_none());
            let leaving: Vec<u32> = self.ending.iter().copied().collect();
            self.changed(&SlotMap::new(Epoch(1), servers.clone(), servers.clone()).unwrap(), &places);
            leaving.iter().for_each(|number| assert_eq!(self.has_left(*number), Ok(false), "it is still asked"));
            self.resize_ended(false);
            Some(servers)
        }
    }

    #[test]
    fn servers_come_when_all_are_there_and_the_highest_go() {
        let mut servers = joined(1);
        assert_eq!((servers.want(3).unwrap(), servers.moves()), ((1, true), None));
        assert_eq!((servers.present(), servers.wanted(), servers.needed()), (1, 3, 3));
        assert_eq!(servers.join(2, "a2", true), Joined::Spare { returns: false });
        assert_eq!(servers.moves(), None);
        assert!(matches!(servers.want(4), Err(ResizeRefused::Now(reason)) if reason.starts_with("1 of 3 ")));
        servers.join(1, "a1", true);
        assert_eq!((servers.moves(), servers.moves()), (Some(vec![0, 1, 2]), None));
        assert_eq!((servers.want(3).unwrap(), servers.moves()), ((3, true), Some(vec![0, 1, 2])));
        assert_eq!((servers.want(2).unwrap(), servers.needed(), servers.moves()), ((3, true), 3, Some(vec![0, 1])));
        assert_eq!((servers.present(), servers.wanted(), servers.needed()), (2, 2, 2));
        assert!(
            matches!(servers.want(0), Err(ResizeRefused::Number(_)))
                && matches!(servers.want(65), Err(ResizeRefused::Number(_)))
        );
    }

    #[test]
    fn one_that_is_about_to_end_goes_whichever_it_is_and_whoever_comes_in_its_place_gets_slots_again() {
        let mut servers = joined(3);
        servers.about_to_end(1).unwrap();
        assert_eq!((servers.has_left(1), servers.wanted(), servers.needed()), (Ok(false), 3, 3));
        assert_eq!((servers.moves(), servers.has_left(1), servers.moves()), (Some(vec![0, 2]), Ok(true), None));
        assert_eq!((servers.present(), servers.wanted(), servers.needed()), (2, 3, 3), "it is waited for");
        assert_eq!(servers.all().unwrap(), ["a0", "a2"]);
        assert_eq!(servers.join(1, "a1", true), Joined::Spare { returns: true });
        assert_eq!((servers.moves(), servers.moves()), (Some(vec![0, 1, 2]), None));
        assert_eq!((servers.present(), servers.wanted(), servers.needed()), (3, 3, 3));
    }

    #[test]
    fn fewer_are_wanted_while_one_is_away() {
        let mut servers = joined(3);
        servers.about_to_end(1).unwrap();
        assert_eq!(servers.moves(), Some(vec![0, 2]));
        assert_eq!((servers.want(2).unwrap(), servers.needed(), servers.moves()), ((3, true), 3, None));
        servers.join(1, "a1", true);
        assert_eq!((servers.moves(), servers.moves(), servers.moves()), (Some(vec![0, 1, 2]), Some(vec![0, 1]), None));
    }

    #[test]
    fn one_that_is_to_end_while_slots_move_goes_next_and_before_others_come() {
        let mut servers = joined(2);
        servers.want(3).unwrap();
        servers.join(2, "a2", true);
        let next = servers.resize_to_begin().unwrap();
        servers.about_to_end(0).unwrap();
        let places: Vec<String> = next.addresses.into_values().collect();
        servers.changed(&SlotMap::new(Epoch(1), vec![2], next.servers).unwrap(), &places);
        servers.resize_ended(false);
        assert_eq!((servers.has_left(0), servers.moves(), servers.moves()), (Ok(false), Some(vec![1, 2]), None));
    }

    #[test]
    fn the_last_cannot_go_and_then_none_does() {
        let mut servers = joined(2);
        assert!(servers.about_to_end(7).unwrap_err().contains("holds no rows"));
        servers.about_to_end(0).unwrap();
        assert!(servers.about_to_end(1).unwrap_err().contains("no other"));
        assert!(servers.has_left(0).unwrap_err().contains("all"));
        assert!(joined(1).about_to_end(0).unwrap_err().contains("no other"));
    }

    #[test]
    fn one_that_is_back_where_it_was_is_not_about_to_end() {
        let mut servers = joined(2);
        servers.about_to_end(0).unwrap();
        assert_eq!(servers.join(0, "a0", true), Joined::Again { same_address: true });
        assert!(servers.has_left(0).is_err());
        assert_eq!(servers.moves(), Some(vec![0, 1]), "their slots are spread anew, which moves none");
    }

    #[test]
    fn whoever_comes_again_while_slots_move_to_it_has_lost_them() {
        let mut servers = joined(1);
        servers.want(2).unwrap();
        servers.join(1, "a1", true);
        servers.resize_to_begin().unwrap();
        assert_eq!(servers.join(1, "b1", true), Joined::WhileSlotsMove);
        assert_eq!(servers.join(u32::from(u16::MAX), "x", true), Joined::Unexpected);
    }

    #[test]
    fn what_training_that_has_ended_gives_up_is_not_waited_for() {
        let mut servers = joined(1);
        servers.want(2).unwrap();
        servers.join(1, "a1", true);
        servers.resize_to_begin().unwrap();
        servers.resize_ended(true);
        assert_eq!((servers.present(), servers.wanted(), servers.needed()), (1, 1, 1));
    }
}
