//! A batch in pieces: runs of keys of one slot, cut if they are long.
//!
//! A read from memory takes as long as the work on several keys, and each key needs two reads that
//! depend on each other: its bucket, then its row. So the reads overlap with the work on other
//! keys:
//!
//! ```text
//!      done         │ piece   │ next        │ AHEAD keys          │ keys
//!                     worked    rows          buckets prefetched
//!                     on        prefetched    without a lock
//! ```
//!
//! A batch that is sorted by slot locks each slot once. The next piece's slot is locked during the
//! work on the present piece if no other thread has it. A thread waits for a lock only while it
//! holds no other.

use crate::index::Hash;
use crate::slot::{SlotState, Slots};
use crate::table::Table;
use crate::{FeatureKey, GroupId, Slot};
use std::ops::Range;

use parking_lot::MutexGuard;
/// The most keys of a piece, whose rows are prefetched together. Enough to hide a memory read
/// behind the others, and few enough that the lines are still in the cache when the work reaches
/// them.
const MOST_KEYS: usize = 32;
/// Keys after the next piece whose buckets are prefetched.
const AHEAD: usize = 128;

/// Keys of a batch that belong to one slot and follow each other.
pub(crate) struct Piece<'a> {
    pub(crate) slot: Slot,
    /// Their positions in the batch.
    pub(crate) keys: Range<usize>,
    pub(crate) hashes: &'a [Hash],
}

/// The positions of a piece's keys.
struct Run {
    slot: Slot,
    keys: Range<usize>,
}

/// Hashes of the keys of one piece.
type Hashes = [Hash; MOST_KEYS];

/// The keys of a batch, of one group, and how far their buckets are prefetched.
struct Batch<'a> {
    slots: &'a Slots,
    group: GroupId,
    keys: &'a [FeatureKey],
    /// Words of each row to prefetch.
    words: usize,
    /// Keys whose buckets have been prefetched.
    prefetched: usize,
}

impl Slots {
    /// Calls `work` for each piece of `keys` in order, under its slot's lock, with the slot's table
    /// of the group, which must exist. The work touches the first `words` words of the rows.
    pub(crate) fn each_piece(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        words: usize,
        mut work: impl FnMut(&mut Table, Piece<'_>),
    ) {
        let table = usize::from(group.0);
        let mut batch = Batch { slots: self, group, keys, words, prefetched: 0 };
        let (mut hashes, mut next_hashes) = (Hashes::default(), Hashes::default());
        let mut runs = self.runs(keys);
        let mut present = runs.next();
        // The lock of the present piece's slot, if it was taken early. Its rows are prefetched
        // then.
        let mut early: Option<MutexGuard<'_, SlotState>> = None;
        while let Some(Run { slot, keys }) = present {
            batch.prefetch_buckets(keys.end + MOST_KEYS + AHEAD);
            let mut state = early.take().unwrap_or_else(|| {
                let state = self.cell(slot).lock();
                batch.prefetch_rows(&state, &keys, &mut hashes);
                state
            });
            present = runs.next();
            let is_last_of_slot = match &present {
                Some(next) if next.slot == slot => {
                    batch.prefetch_rows(&state, &next.keys, &mut next_hashes);
                    false
                }
                Some(next) => {
                    early = self.cell(next.slot).try_lock();
                    if let Some(state) = &early {
                        batch.prefetch_rows(state, &next.keys, &mut next_hashes);
                    }
                    true
                }
                None => true,
            };
            let hashes_of_piece = &hashes[..keys.len()];
            work(&mut state.tables[table], Piece { slot, keys, hashes: hashes_of_piece });
            if is_last_of_slot {
                state.tables[table].record_address(self.index_of(slot, group));
            } else {
                early = Some(state);
            }
            std::mem::swap(&mut hashes, &mut next_hashes);
        }
    }

    /// Cuts keys into runs, in order.
    fn runs(&self, keys: &[FeatureKey]) -> impl Iterator<Item = Run> {
        let mut start = 0;
        std::iter::from_fn(move || {
            let slot = self.slot_of(*keys.get(start)?);
            let most = &keys[start..keys.len().min(start + MOST_KEYS)];
            let others = most.iter().position(|&key| self.slot_of(key) != slot);
            let run = start..start + others.unwrap_or(most.len());
            start = run.end;
            Some(Run { slot, keys: run })
        })
    }
}

impl Batch<'_> {
    /// Prefetches the buckets of keys up to the one before `end`.
    fn prefetch_buckets(&mut self, end: usize) {
        let end = end.min(self.keys.len());
        for &key in &self.keys[self.prefetched..end] {
            self.slots.index_of(self.slots.slot_of(key), self.group).prefetch(Hash::of(key));
        }
        self.prefetched = end;
    }

    /// Hashes the keys of a piece and prefetches their rows.
    fn prefetch_rows(&self, state: &SlotState, piece: &Range<usize>, hashes: &mut Hashes) {
        for (hash, &key) in hashes.iter_mut().zip(&self.keys[piece.clone()]) {
            *hash = Hash::of(key);
        }
        state.tables[usize::from(self.group.0)].prefetch(&hashes[..piece.len()], self.words);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Missing, RowSpec, Store, StoreConfig};

    fn store(slots: u32) -> Store {
        Store::new(StoreConfig { slots, seed: 1, groups: vec![RowSpec::plain(1)], budget: None }).unwrap()
    }

    fn keys(count: u64) -> Vec<FeatureKey> {
        (0..count).map(|number| FeatureKey(xxhash_rust::xxh3::xxh3_64(&number.to_le_bytes()))).collect()
    }

    /// Goes through the keys and checks each piece; returns the number of pieces.
    fn pieces_of(store: &Store, keys: &[FeatureKey]) -> usize {
        let (mut pieces, mut done) = (0, 0);
        store.slots.each_piece(GroupId(0), keys, 1, |_, piece| {
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
    fn a_thread_waits_for_a_slot_without_holding_another() {
        let store = store(2);
        let mut keys = keys(100);
        keys.sort_unstable();
        let others = store.slots.cell(Slot(1)).lock();
        std::thread::scope(|scope| {
            let all = scope.spawn(|| pieces_of(&store, &keys));
            // Wait until the first slot has been worked on and left.
            while store.slots.index_of(Slot(0), GroupId(0)).is_unknown() {
                std::thread::yield_now();
            }
            drop(store.slots.cell(Slot(0)).lock());
            drop(others);
            assert!(all.join().unwrap() >= 4);
        });
    }
}
