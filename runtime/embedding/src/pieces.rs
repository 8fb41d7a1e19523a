//! A batch in pieces: runs of keys of one slot, cut where they are long. A read of memory takes as long as the
//! work on several keys, and a key needs two that follow each other, of its bucket and of its row. So while one
//! piece is worked on the rows of the next are on their way, and the buckets of those after it:
//!
//! ```text
//!      done         │ piece   │ next        │ AHEAD keys          │ keys
//!                     worked    rows asked    buckets asked for,
//!                     on        for           without a lock
//! ```
//!
//! A slot of a batch that is sorted by slot is locked once. The next piece's is locked while the present one is worked on if nobody
//! else has it, and waited for only when no lock is held.

use crate::index::{Hash, Whereabouts};
use crate::store::{SlotState, Store};
use crate::table::Table;
use crate::{FeatureKey, GroupId, Slot};
use std::ops::Range;
use std::sync::MutexGuard;

/// Keys of a piece, at most, whose rows are asked for at once: enough to hide a memory read behind the others, few
/// enough that what was asked for is still there when it is used.
const MOST_KEYS: usize = 32;
/// Keys after the next piece whose buckets are asked for.
const AHEAD: usize = 128;

/// Some of a batch's keys, of one slot.
pub(crate) struct Piece<'a> {
    pub(crate) slot: Slot,
    /// Which of the batch they are.
    pub(crate) keys: Range<usize>,
    /// What they hash to.
    pub(crate) hashes: &'a [Hash],
}

/// Hashes of the keys of one piece.
type Hashes = [Hash; MOST_KEYS];

impl Store {
    /// Does `work` on each piece of `keys` in order, under its slot's lock, with its slot's table of the group, which there must be. It
    /// is going to touch the first `words` words of rows.
    pub(crate) fn each_piece(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        words: usize,
        mut work: impl FnMut(&mut Table, Piece<'_>),
    ) {
        let table = usize::from(group.0);
        let ask = |state: &SlotState, piece: &Range<usize>, hashes: &mut Hashes| {
            for (hash, &key) in hashes.iter_mut().zip(&keys[piece.clone()]) {
                *hash = Hash::of(key);
            }
            state.tables[table].prefetch(&hashes[..piece.len()], words);
        };
        let (mut hashes, mut next_hashes) = (Hashes::default(), Hashes::default());
        let mut asked = 0;
        let mut pieces = self.pieces(keys);
        let mut present = pieces.next();
        // The lock of the present piece's slot, whose rows have been asked for then.
        let mut held: Option<MutexGuard<'_, SlotState>> = None;
        while let Some((slot, piece)) = present {
            self.ask_for_buckets(table, keys, &mut asked, piece.end + MOST_KEYS + AHEAD);
            let mut state = held.take().unwrap_or_else(|| {
                let state = self.slots[slot.0 as usize].lock();
                ask(&state, &piece, &mut hashes);
                state
            });
            present = pieces.next();
            let is_last = match &present {
                Some((next_slot, next)) if *next_slot == slot => {
                    ask(&state, next, &mut next_hashes);
                    false
                }
                Some((next_slot, next)) => {
                    held = self.slots[next_slot.0 as usize].try_lock();
                    if let Some(state) = &held {
                        ask(state, next, &mut next_hashes);
                    }
                    true
                }
                None => true,
            };
            let of_piece = &hashes[..piece.len()];
            work(&mut state.tables[table], Piece { slot, keys: piece, hashes: of_piece });
            if is_last {
                state.tables[table].note(self.index_of(slot, table));
            } else {
                held = Some(state);
            }
            std::mem::swap(&mut hashes, &mut next_hashes);
        }
    }

    /// Asks for the buckets of `keys` from the `asked`-th on, to the one before `end`.
    fn ask_for_buckets(&self, table: usize, keys: &[FeatureKey], asked: &mut usize, end: usize) {
        let end = end.min(keys.len());
        for &key in &keys[*asked..end] {
            self.index_of(self.slot_of(key), table).prefetch(Hash::of(key));
        }
        *asked = end;
    }

    fn index_of(&self, slot: Slot, table: usize) -> &Whereabouts {
        &self.indexes[slot.0 as usize * self.groups.len() + table]
    }

    /// Cuts keys into pieces, in order.
    fn pieces(&self, keys: &[FeatureKey]) -> impl Iterator<Item = (Slot, Range<usize>)> {
        let mut start = 0;
        std::iter::from_fn(move || {
            let slot = self.slot_of(*keys.get(start)?);
            let most = &keys[start..keys.len().min(start + MOST_KEYS)];
            let others = most.iter().position(|&key| self.slot_of(key) != slot);
            let piece = start..start + others.unwrap_or(most.len());
            start = piece.end;
            Some((slot, piece))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Missing, RowSpec, StoreConfig};

    fn store(slots: u32) -> Store {
        Store::new(StoreConfig { slots, seed: 1, groups: vec![RowSpec::plain(1)] }).unwrap()
    }

    fn keys(count: u64) -> Vec<FeatureKey> {
        (0..count).map(|number| FeatureKey(xxhash_rust::xxh3::xxh3_64(&number.to_le_bytes()))).collect()
    }

    /// Works through the keys and checks each piece; gives how many there were.
    fn pieces_of(store: &Store, keys: &[FeatureKey]) -> usize {
        let (mut pieces, mut done) = (0, 0);
        store.each_piece(GroupId(0), keys, 1, |_, piece| {
            assert_eq!(piece.keys.start, done, "in order, and none left out");
            assert!((1..=MOST_KEYS).contains(&piece.keys.len()));
            let of_piece = &keys[piece.keys.clone()];
            assert!(of_piece.iter().all(|&key| store.slot_of(key) == piece.slot));
            let home = |hash: Hash| hash.home(1 << 40);
            assert!(of_piece.iter().map(|&key| home(Hash::of(key))).eq(piece.hashes.iter().map(|&hash| home(hash))));
            (pieces, done) = (pieces + 1, piece.keys.end);
        });
        assert_eq!(done, keys.len());
        pieces
    }

    #[test]
    fn every_key_is_in_one_piece_of_its_slot_in_order() {
        for slots in [1, 2, 7, 300] {
            let store = store(slots);
            let mut keys = keys(1_000);
            store.lookup(GroupId(0), &keys, Missing::Insert, &mut [0.0; 1_000]).unwrap();
            let unsorted = pieces_of(&store, &keys);
            keys.sort_unstable();
            let sorted = pieces_of(&store, &keys);
            assert!(sorted <= unsorted && sorted < 1_000 / MOST_KEYS + 1 + slots as usize, "{sorted} of {slots} slots");
        }
        assert_eq!(pieces_of(&store(1), &[]), 0);
    }

    #[test]
    fn a_slot_that_somebody_has_is_waited_for_without_a_lock() {
        let store = store(2);
        let mut keys = keys(100);
        keys.sort_unstable();
        let others = store.slots[1].lock();
        std::thread::scope(|scope| {
            let all = scope.spawn(|| pieces_of(&store, &keys));
            // Not before the first slot has been worked on and left.
            while store.index_of(Slot(0), 0).is_unknown() {
                std::thread::yield_now();
            }
            drop(store.slots[0].lock());
            drop(others);
            assert!(all.join().unwrap() >= 4);
        });
    }
}
