//! In `sync`: the keys that a parameter server may read before earlier steps are applied.
//!
//! A look-up for step s announces its piece and the keys that the piece has on this server. A step
//! changes no other keys than those that its pieces looked up. So the server knows all keys that
//! the steps before s will change, once every piece of these steps has announced its keys. It then
//! answers the other keys at once.
//!
//! The announcements are bounded: one for each piece of a step, and `window` steps beyond the one
//! to be applied next. The announcements end with the process. A replacement does not know the
//! keys of some steps, so it answers look-ups after these steps only when the steps are applied.

use std::collections::BTreeMap;

use crate::{GlobalStep, Rank};

/// The announcement of one piece. `K` has the keys of the piece.
#[derive(Debug, Clone)]
enum Announced<K> {
    NotYet,
    /// The mode before has trained the piece.
    Nothing,
    /// The keys by the slot map of this epoch.
    Keys {
        epoch: u64,
        keys: K,
    },
}

/// See the module documentation.
#[derive(Debug)]
pub struct LookAhead<K> {
    pieces: u32,
    window: u64,
    steps: BTreeMap<GlobalStep, Vec<Announced<K>>>,
}

impl<K: Clone> LookAhead<K> {
    /// For steps of `pieces` pieces. Looks at most `window` steps ahead; 0 never looks ahead.
    #[must_use]
    pub const fn new(pieces: u32, window: u64) -> Self {
        Self { pieces, window, steps: BTreeMap::new() }
    }

    /// Whether look-ups may be answered before earlier steps are applied.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        self.window > 0
    }

    /// The number of announcements that are stored, at most `pieces * (window + 1)`.
    #[must_use]
    pub fn announcements(&self) -> usize {
        let is_known = |piece: &&Announced<K>| !matches!(piece, Announced::NotYet);
        self.steps.values().flatten().filter(is_known).count()
    }

    /// Records that a piece changes no row of `step`.
    pub fn skip(&mut self, step: GlobalStep, piece: Rank) {
        self.put(step, piece, Announced::Nothing);
    }

    /// Records the keys of a piece of `step` by the slot map of `epoch`. Steps before `applied` are
    /// applied. Announcements outside the window are not recorded. A repeated announcement replaces
    /// the one before.
    pub fn announce(&mut self, applied: GlobalStep, step: GlobalStep, piece: Rank, epoch: u64, keys: K) {
        let is_within = step.0.checked_sub(applied.0).is_some_and(|ahead| ahead <= self.window);
        if self.is_on() && is_within {
            self.put(step, piece, Announced::Keys { epoch, keys });
        }
    }

    /// The keys of all pieces of the steps from `applied` until `step`, by the slot map of `epoch`.
    /// `None` while some are not known. Empty if every step before `step` is applied.
    #[must_use]
    pub fn keys_before(&self, step: GlobalStep, applied: GlobalStep, epoch: u64) -> Option<Vec<K>> {
        let mut all = Vec::new();
        for earlier in applied.0..step.0 {
            for piece in self.steps.get(&GlobalStep(earlier))? {
                match piece {
                    Announced::Nothing => {}
                    Announced::Keys { epoch: known, keys } if *known == epoch => all.push(keys.clone()),
                    _ => return None,
                }
            }
        }
        Some(all)
    }

    /// Drops the announcements of the steps before `applied`, which are applied.
    pub fn forget_before(&mut self, applied: GlobalStep) {
        self.steps = self.steps.split_off(&applied);
    }

    fn put(&mut self, step: GlobalStep, piece: Rank, announced: Announced<K>) {
        let pieces = self.pieces as usize;
        let of_step = self.steps.entry(step).or_insert_with(|| vec![Announced::NotYet; pieces]);
        if let Some(place) = of_step.get_mut(piece.0 as usize) {
            *place = announced;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const EPOCH: u64 = 7;

    fn step(number: u64) -> GlobalStep {
        GlobalStep(number)
    }

    #[test]
    fn keys_are_known_once_every_piece_of_every_step_between_came() {
        let mut ahead = LookAhead::new(2, 2);
        assert_eq!(ahead.keys_before(step(0), step(0), EPOCH), Some(Vec::new()), "nothing is between");
        ahead.announce(step(0), step(0), Rank(0), EPOCH, 'a');
        ahead.announce(step(0), step(1), Rank(1), EPOCH, 'd');
        assert_eq!(ahead.keys_before(step(1), step(0), EPOCH), None);
        ahead.announce(step(0), step(0), Rank(1), EPOCH, 'b');
        assert_eq!(ahead.keys_before(step(1), step(0), EPOCH), Some(vec!['a', 'b']));
        assert_eq!(ahead.keys_before(step(2), step(0), EPOCH), None, "a piece of step 1 is missing");
        ahead.announce(step(0), step(1), Rank(0), EPOCH, 'c');
        assert_eq!(ahead.keys_before(step(2), step(0), EPOCH), Some(vec!['a', 'b', 'c', 'd']));
        ahead.forget_before(step(1));
        assert_eq!(ahead.keys_before(step(2), step(1), EPOCH), Some(vec!['c', 'd']));
        assert_eq!(ahead.keys_before(step(1), step(3), EPOCH), Some(Vec::new()), "it is applied");
    }

    #[test]
    fn keys_by_another_slot_map_are_not_known() {
        let mut ahead = LookAhead::new(1, 1);
        ahead.announce(step(0), step(0), Rank(0), EPOCH, 'a');
        assert_eq!(ahead.keys_before(step(1), step(0), EPOCH + 1), None);
        ahead.announce(step(0), step(0), Rank(0), EPOCH + 1, 'b');
        assert_eq!(ahead.keys_before(step(1), step(0), EPOCH + 1), Some(vec!['b']));
    }

    #[test]
    fn pieces_of_the_mode_before_have_no_keys() {
        let mut ahead = LookAhead::new(2, 1);
        ahead.skip(step(5), Rank(0));
        ahead.announce(step(5), step(5), Rank(1), EPOCH, 'b');
        assert_eq!(ahead.keys_before(step(6), step(5), EPOCH), Some(vec!['b']));
    }

    #[test]
    fn announcements_outside_the_window_are_not_stored() {
        let mut ahead = LookAhead::new(3, 2);
        for number in 0..20 {
            for piece in 0..5 {
                ahead.announce(step(4), step(number), Rank(piece), EPOCH, 'k');
            }
        }
        assert_eq!(ahead.announcements(), 9, "three pieces of steps 4, 5 and 6");
        let mut off = LookAhead::new(3, 0);
        off.announce(step(0), step(0), Rank(0), EPOCH, 'k');
        assert_eq!((off.announcements(), off.is_on()), (0, false));
    }

    /// The keys of a step's pieces on a server, and the rows. The update of a step adds a number
    /// that depends on the row before, so an update that is missed or repeated shows.
    type Pieces = Vec<BTreeSet<u8>>;

    fn updated(row: u64, step: u64) -> u64 {
        row.wrapping_mul(31).wrapping_add(step + 1)
    }

    /// The rows that each step reads if one step is trained after the other.
    fn sequential(steps: &[Pieces]) -> Vec<BTreeMap<u8, u64>> {
        let mut rows = BTreeMap::<u8, u64>::new();
        let mut read = Vec::new();
        for (number, pieces) in steps.iter().enumerate() {
            let keys: BTreeSet<u8> = pieces.iter().flatten().copied().collect();
            read.push(keys.iter().map(|key| (*key, rows.get(key).copied().unwrap_or(0))).collect());
            for key in keys {
                let row = rows.entry(key).or_default();
                *row = updated(*row, number as u64);
            }
        }
        read
    }

    proptest! {
        /// A server that answers what it may, at random moments, returns the rows of the sequential
        /// computation. With a replacement that knows no announcements, too.
        #[test]
        fn early_rows_equal_the_rows_of_a_sequential_computation(
            pieces in 1usize..4,
            window in 1u64..5,
            keys in proptest::collection::vec(proptest::collection::btree_set(0u8..24, 0..8), 36),
            choices in proptest::collection::vec(any::<u32>(), 400),
        ) {
            let steps: Vec<Pieces> = keys.chunks_exact(pieces).map(<[_]>::to_vec).collect();
            let expected = sequential(&steps);
            let mut rows = BTreeMap::<u8, u64>::new();
            let mut ahead = LookAhead::new(pieces as u32, window);
            let mut applied = 0u64;
            // By step and piece: the keys that are still to be read. `None` before the first ask.
            let mut open: BTreeMap<(u64, usize), Option<BTreeSet<u8>>> = BTreeMap::new();
            for choice in choices {
                let last = (applied + window).min(steps.len() as u64 - 1);
                if applied > last {
                    break;
                }
                let asked = applied + u64::from(choice >> 8) % (last - applied + 1);
                let piece = (choice as usize >> 4) % pieces;
                let own = &steps[asked as usize][piece];
                match choice % 16 {
                    0 => ahead = LookAhead::new(pieces as u32, window),
                    1..8 => {
                        ahead.announce(step(applied), step(asked), Rank(piece as u32), EPOCH, own.clone());
                        let Some(before) = ahead.keys_before(step(asked), step(applied), EPOCH) else { continue };
                        let rest = open.entry((asked, piece)).or_default().get_or_insert_with(|| own.clone());
                        let changed: BTreeSet<u8> = before.into_iter().flatten().collect();
                        let now: Vec<u8> = rest.difference(&changed).copied().collect();
                        for key in now {
                            prop_assert_eq!(rows.get(&key).copied().unwrap_or(0), expected[asked as usize][&key]);
                            rest.remove(&key);
                        }
                    }
                    _ => {
                        // The step is applied once all its rows were read.
                        let of_step = |piece| open.get(&(applied, piece)).and_then(Option::as_ref);
                        if (0..pieces).all(|piece| of_step(piece).is_some_and(BTreeSet::is_empty)) {
                            let keys: BTreeSet<u8> = steps[applied as usize].iter().flatten().copied().collect();
                            for key in keys {
                                let row = rows.entry(key).or_default();
                                *row = updated(*row, applied);
                            }
                            applied += 1;
                            ahead.forget_before(step(applied));
                        }
                    }
                }
                prop_assert!(ahead.announcements() <= pieces * (window as usize + 1));
            }
        }
    }
}
