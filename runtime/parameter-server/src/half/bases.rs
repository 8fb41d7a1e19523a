//! The bases of differences that travel as bf16, in `shadow` (see
//! [`send_difference`](rectrain_modes::shadow::send_difference)). They are in memory only: a
//! replacement of the server has none, and workers then send whole values again.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

use parking_lot::Mutex;

/// See the module documentation. There is at most one base for each fragment of each worker.
pub(super) struct Bases(Mutex<Known>);

struct Known {
    /// The number of the newest base.
    number: u64,
    /// By the worker's rank and the fragment: the number of the base, and its values.
    bases: BTreeMap<(u32, u32), (u64, Vec<f32>)>,
}

impl Bases {
    /// No bases. The numbers begin anywhere above 0, so that a worker's base of another server, or
    /// of an earlier order, has a number that is not used here.
    pub(super) fn new() -> Self {
        let number = RandomState::new().hash_one(0_u8) >> 1;
        Self(Mutex::new(Known { number, bases: BTreeMap::new() }))
    }

    /// A copy of a fragment's base, if it has this number.
    pub(super) fn find(&self, rank: u32, fragment: u32, number: u64) -> Option<Vec<f32>> {
        let known = self.0.lock();
        let (found, values) = known.bases.get(&(rank, fragment))?;
        (*found == number).then(|| values.clone())
    }

    /// Replaces the base of a fragment. Returns its number, which no base had before.
    pub(super) fn put(&self, rank: u32, fragment: u32, values: Vec<f32>) -> u64 {
        let mut known = self.0.lock();
        known.number += 1;
        let number = known.number;
        known.bases.insert((rank, fragment), (number, values));
        number
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_newest_base_of_a_fragment_is_known() {
        let bases = Bases::new();
        let numbers = [(0, 0, 1.0), (0, 1, 2.0), (1, 0, 3.0), (0, 0, 4.0)]
            .map(|(rank, fragment, value)| bases.put(rank, fragment, vec![value]));
        assert_eq!(bases.find(0, 0, numbers[3]), Some(vec![4.0]));
        assert_eq!(bases.find(0, 1, numbers[1]), Some(vec![2.0]));
        assert_eq!(bases.find(1, 0, numbers[2]), Some(vec![3.0]));
        assert_eq!(bases.find(0, 0, numbers[0]), None, "it was replaced");
        assert_eq!(bases.find(1, 0, numbers[0]), None);
        assert!(!numbers.contains(&0));
        assert_eq!(Bases::new().find(0, 0, numbers[3]), None, "a replacement has none");
    }
}
