//! The members of a role that come and go while the job trains, other than parameter servers: who takes part, who has come and is to,
//! and how many there are to be. Indices are those of the replicas, so that whoever leaves has the highest.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// See the module's text.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Crew {
    /// Addresses of those who take part; none for whoever has not joined when the job begins.
    present: Vec<Option<String>>,
    /// Those who are to take part and have joined already.
    waiting: BTreeMap<u32, String>,
    wanted: u32,
}

/// What came of a member's joining.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Joined {
    /// It is one of those expected.
    Expected,
    /// One that had joined before has this address, or had this place.
    Again { same_address: bool },
    /// One at another address had come to take part, and is not to any more.
    Instead { of: String },
    /// Nobody of this index is asked for.
    Unexpected,
}

impl Crew {
    /// Of so many, who are still to join.
    pub(super) fn new(members: u32) -> Self {
        Self { present: vec![None; members as usize], waiting: BTreeMap::new(), wanted: members }
    }

    /// A member joins; another of its index may have died.
    pub(super) fn join(&mut self, index: u32, address: &str) -> Joined {
        match self.present.get_mut(index as usize) {
            Some(place) => match place.replace(address.to_owned()) {
                Some(before) => Joined::Again { same_address: before == address },
                None => Joined::Expected,
            },
            None if index < self.wanted => match self.waiting.insert(index, address.to_owned()) {
                Some(before) if before != address => Joined::Instead { of: before },
                _ => Joined::Expected,
            },
            None => Joined::Unexpected,
        }
    }

    /// Where everybody is who takes part, once all have joined.
    pub(super) fn all(&self) -> Option<Vec<String>> {
        self.present.iter().cloned().collect()
    }

    /// Who has not joined since the job began.
    pub(super) fn absent(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.present).filter_map(|(index, place)| place.is_none().then_some(index))
    }

    /// Who takes part.
    pub(super) fn present(&self) -> u32 {
        self.present.len() as u32
    }

    /// How many there are to be.
    pub(super) fn wanted(&self) -> u32 {
        self.wanted
    }

    /// Who takes part, or may as soon as it has joined.
    pub(super) fn needed(&self) -> u32 {
        self.present().max(self.wanted)
    }

    /// Whether nobody is to come or to go.
    pub(super) fn is_settled(&self) -> bool {
        self.present() == self.wanted
    }

    /// There are to be so many; gives where those are who have come and are not to take part any more.
    pub(super) fn want(&mut self, members: u32) -> Vec<String> {
        self.wanted = members;
        self.waiting.split_off(&members).into_values().collect()
    }

    /// Members that are asked for and have not joined.
    pub(super) fn missing(&self) -> usize {
        (self.present()..self.wanted).filter(|index| !self.waiting.contains_key(index)).count()
    }

    /// Whether all have come who are to.
    pub(super) fn can_grow(&self) -> bool {
        self.wanted > self.present() && self.missing() == 0
    }

    /// Whoever has come takes part.
    pub(super) fn grow(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        self.present.extend(waiting.into_values().map(Some));
    }

    /// Those above `members` take part no more; gives where they were.
    pub(super) fn shrink(&mut self, members: u32) -> Vec<String> {
        let from = self.present.len().min(members as usize);
        self.present.drain(from..).flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_take_part_when_all_have_come() {
        let mut crew = Crew::new(1);
        assert!(crew.absent().eq([0]));
        assert_eq!((crew.all(), crew.join(0, "a"), crew.join(1, "b")), (None, Joined::Expected, Joined::Unexpected));
        assert_eq!(crew.absent().count(), 0);
        assert!(crew.want(3).is_empty());
        assert_eq!((crew.join(2, "c"), crew.can_grow(), crew.missing()), (Joined::Expected, false, 1));
        assert_eq!((crew.join(1, "b"), crew.can_grow()), (Joined::Expected, true));
        assert_eq!((crew.present(), crew.needed(), crew.is_settled()), (1, 3, false));
        crew.grow();
        assert_eq!(crew.all().unwrap(), ["a", "b", "c"]);
        assert!(crew.is_settled() && !crew.can_grow());
    }

    #[test]
    fn the_highest_leave_and_what_never_came_is_given_up() {
        let mut crew = Crew::new(3);
        (0..3).for_each(|index| assert_eq!(crew.join(index, &index.to_string()), Joined::Expected));
        assert!(crew.want(1).is_empty());
        assert_eq!((crew.needed(), crew.is_settled()), (3, false), "they still hold something");
        assert_eq!(crew.shrink(1), ["1", "2"]);
        assert!(crew.is_settled());
        crew.want(2);
        assert_eq!(crew.join(1, "x"), Joined::Expected);
        assert_eq!(crew.join(1, "y"), Joined::Instead { of: "x".to_owned() });
        assert_eq!(crew.want(1), ["y"], "it has come for nothing");
        assert_eq!((crew.is_settled(), crew.join(1, "x")), (true, Joined::Unexpected));
    }

    #[test]
    fn a_successor_takes_the_place_and_the_address() {
        let mut crew = Crew::new(1);
        crew.join(0, "a");
        assert_eq!(crew.join(0, "b"), Joined::Again { same_address: false });
        assert_eq!(crew.join(0, "b"), Joined::Again { same_address: true });
        assert_eq!(crew.all().unwrap(), ["b"]);
    }
}
