//! The members of a role that may join and leave while the job trains: embedding workers, dense
//! workers and loaders.
//! Members are numbered from 0, so members with the highest numbers leave first.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The present, waiting and wanted members of one role.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Membership {
    /// Addresses of the present members; `None` until a member has joined at the start of the job.
    present: Vec<Option<String>>,
    /// Members that have joined and will be present as soon as all new members have joined.
    waiting: BTreeMap<u32, String>,
    wanted: u32,
}

/// The result of a member's joining.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Joined {
    /// The job expected it.
    Expected,
    /// It replaces a member that had joined before.
    Rejoined { same_address: bool },
    /// It supersedes a member at another address that was still waiting.
    Superseded { previous: String },
    /// The job does not want a member with this index.
    Unexpected,
}

impl Membership {
    /// Expects `members` members. None has joined yet.
    pub(super) fn new(members: u32) -> Self {
        Self { present: vec![None; members as usize], waiting: BTreeMap::new(), wanted: members }
    }

    /// A member joins. It may replace another of the same index.
    pub(super) fn join(&mut self, index: u32, address: &str) -> Joined {
        match self.present.get_mut(index as usize) {
            Some(place) => match place.replace(address.to_owned()) {
                Some(before) => Joined::Rejoined { same_address: before == address },
                None => Joined::Expected,
            },
            None if index < self.wanted => match self.waiting.insert(index, address.to_owned()) {
                Some(before) if before != address => Joined::Superseded { previous: before },
                _ => Joined::Expected,
            },
            None => Joined::Unexpected,
        }
    }

    /// The addresses of all present members, once they have joined.
    pub(super) fn all(&self) -> Option<Vec<String>> {
        self.present.iter().cloned().collect()
    }

    /// The present members that have not joined yet.
    pub(super) fn absent(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.present).filter_map(|(index, place)| place.is_none().then_some(index))
    }

    /// The number of present members.
    pub(super) fn present(&self) -> u32 {
        self.present.len() as u32
    }

    /// The number of members that the job wants.
    pub(super) fn wanted(&self) -> u32 {
        self.wanted
    }

    /// The number of replicas that must run: the present members and the new ones.
    pub(super) fn needed(&self) -> u32 {
        self.present().max(self.wanted)
    }

    /// Whether all wanted members are present, and no others.
    pub(super) fn is_stable(&self) -> bool {
        self.present() == self.wanted
    }

    /// Changes the number of wanted members. Returns the addresses of waiting members that the job
    /// no longer wants.
    pub(super) fn set_wanted(&mut self, members: u32) -> Vec<String> {
        self.wanted = members;
        self.waiting.split_off(&members).into_values().collect()
    }

    /// The number of new members that have not joined yet.
    pub(super) fn missing(&self) -> usize {
        (self.present()..self.wanted).filter(|index| !self.waiting.contains_key(index)).count()
    }

    /// Whether there are new members and all of them have joined.
    pub(super) fn can_grow(&self) -> bool {
        self.wanted > self.present() && self.missing() == 0
    }

    /// Makes all waiting members present.
    pub(super) fn grow(&mut self) {
        let waiting = std::mem::take(&mut self.waiting);
        self.present.extend(waiting.into_values().map(Some));
    }

    /// Removes the present members from `members` on. Returns their addresses.
    pub(super) fn shrink(&mut self, members: u32) -> Vec<String> {
        let from = self.present.len().min(members as usize);
        self.present.drain(from..).flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_present_once_all_have_joined() {
        let mut membership = Membership::new(1);
        assert!(membership.absent().eq([0]));
        assert_eq!(
            (membership.all(), membership.join(0, "a"), membership.join(1, "b")),
            (None, Joined::Expected, Joined::Unexpected)
        );
        assert_eq!(membership.absent().count(), 0);
        assert!(membership.set_wanted(3).is_empty());
        assert_eq!(
            (membership.join(2, "c"), membership.can_grow(), membership.missing()),
            (Joined::Expected, false, 1)
        );
        assert_eq!((membership.join(1, "b"), membership.can_grow()), (Joined::Expected, true));
        assert_eq!((membership.present(), membership.needed(), membership.is_stable()), (1, 3, false));
        membership.grow();
        assert_eq!(membership.all().unwrap(), ["a", "b", "c"]);
        assert!(membership.is_stable() && !membership.can_grow());
    }

    #[test]
    fn the_highest_leave_and_waiting_ones_are_dropped() {
        let mut membership = Membership::new(3);
        (0..3).for_each(|index| assert_eq!(membership.join(index, &index.to_string()), Joined::Expected));
        assert!(membership.set_wanted(1).is_empty());
        assert_eq!(
            (membership.needed(), membership.is_stable()),
            (3, false),
            "surplus members stay until they are removed"
        );
        assert_eq!(membership.shrink(1), ["1", "2"]);
        assert!(membership.is_stable());
        membership.set_wanted(2);
        assert_eq!(membership.join(1, "x"), Joined::Expected);
        assert_eq!(membership.join(1, "y"), Joined::Superseded { previous: "x".to_owned() });
        assert_eq!(membership.set_wanted(1), ["y"], "it joined and is no longer wanted");
        assert_eq!((membership.is_stable(), membership.join(1, "x")), (true, Joined::Unexpected));
    }

    #[test]
    fn a_replacement_takes_over_index_and_address() {
        let mut membership = Membership::new(1);
        membership.join(0, "a");
        assert_eq!(membership.join(0, "b"), Joined::Rejoined { same_address: false });
        assert_eq!(membership.join(0, "b"), Joined::Rejoined { same_address: true });
        assert_eq!(membership.all().unwrap(), ["b"]);
    }
}
