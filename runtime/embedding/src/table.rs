//! The table of one (slot, group): an [`Index`] from keys to the rows of a [`Slab`]. It is called
//! under its slot's lock with keys that belong to the slot, and does not check that they do.
//!
//! A piece of a batch is worked through in two passes, with another piece's work in between: ask for the rows
//! that its keys' buckets probably name, and do the work. The first is a hint only; the second searches
//! properly, so keys may repeat and rows may be added in between. That the buckets are there in time is
//! up to the caller ([`crate::pieces`]).

use crate::arena::Arena;
use crate::block_file::FoundBlock;
use crate::index::{Hash, Index, Whereabouts};
use crate::initial::InitialValues;
use crate::layout::{RowLayout, key_of, key_of_bytes};
use crate::optimizer::Step;
use crate::shared::RowLog;
use crate::simd::Simd;
use crate::slab::Slab;
use crate::{FeatureKey, RowSpec, Slot, prefetch};
use std::ops::AddAssign;
use std::sync::Arc;

/// What a look-up does with a key that has no row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Make a row from the initial values: training.
    Insert,
    /// Read the initial values and make no row: evaluation and serving.
    ReadInitial,
}

/// What happened to the keys of a look-up; repeated keys are counted each time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookupCounts {
    /// Keys that had a row.
    pub found: u64,
    /// Keys that got one.
    pub inserted: u64,
    /// Keys that read as their initial value and still have no row.
    pub missing: u64,
}

/// What happened to the keys of an update; repeated keys are counted each time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UpdateCounts {
    /// Gradients applied.
    pub applied: u64,
    /// Gradients dropped because their key has no row.
    pub missing: u64,
    /// Gradients dropped because they hold a NaN or an infinity.
    pub non_finite: u64,
}

impl AddAssign for LookupCounts {
    fn add_assign(&mut self, other: Self) {
        self.found += other.found;
        self.inserted += other.inserted;
        self.missing += other.missing;
    }
}

impl AddAssign for UpdateCounts {
    fn add_assign(&mut self, other: Self) {
        self.applied += other.applied;
        self.missing += other.missing;
        self.non_finite += other.non_finite;
    }
}

/// A row group as the tables need it: its spec, the layout that follows from it, the seed, and the
/// memory that its tables share.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) spec: RowSpec,
    pub(crate) layout: RowLayout,
    pub(crate) memory: Arc<Arena>,
    /// That of their indexes, which lie together, so that few huge pages hold them: they are read at random.
    pub(crate) indexes: Arc<Arena>,
    simd: Simd,
    seed: u64,
}

impl Group {
    pub(crate) fn new(spec: RowSpec, seed: u64, memory: Arc<Arena>) -> Self {
        Self {
            spec,
            layout: RowLayout::new(&spec),
            memory,
            indexes: Arc::default(),
            simd: Simd::for_columns(spec.dim),
            seed,
        }
    }

    /// The values a row of `key` starts from, as they read once stored.
    fn read_initial(&self, key: FeatureKey, out: &mut [f32]) {
        let spec = &self.spec;
        spec.initializer.fill(self.seed, key, spec.zero_columns, out);
        self.layout.round(out);
    }
}

/// See the module's text.
pub(crate) struct Table {
    index: Index,
    slab: Slab,
    removed: Removed,
}

/// Keys whose rows were removed, as far as the changes between two saves have to tell it.
#[derive(Default)]
struct Removed {
    /// Since the last mark; a key may repeat, and may have a row again.
    now: Vec<FeatureKey>,
    /// Between the mark before the freeze and the freeze, while the table is frozen.
    frozen: Option<Vec<FeatureKey>>,
}

impl Table {
    pub(crate) fn new(group: &Group, slot: Slot) -> Self {
        let slab = Slab::new(&group.memory, slot.0, group.layout.stride());
        Self { index: Index::for_rows(&group.indexes, 0), slab, removed: Removed::default() }
    }

    /// The table whose rows the file behind the group's memory holds. `None` if the blocks are not such a table's.
    pub(crate) fn adopt(group: &Group, slot: Slot, found: Vec<FoundBlock>) -> Option<Self> {
        let slab = Slab::adopt(&group.memory, slot.0, group.layout.stride(), found)?;
        let mut index = Index::for_rows(&group.indexes, slab.rows());
        for (row, words) in slab.iter() {
            index.insert(Hash::of(key_of(words)), row);
        }
        Some(Self { index, slab, removed: Removed::default() })
    }

    /// Puts back a live row's words, as they were before a change that was not completed. `false` if there is no such row.
    pub(crate) fn put_back(&mut self, row: u32, words: &[u32]) -> bool {
        let is_live = self.slab.is_live(row);
        if is_live {
            self.slab.row_mut(row).copy_from_slice(words);
        }
        is_live
    }

    /// A table of whole rows, one after another in `rows` as they are in memory. `None` if there are more than a table can number.
    /// Keys must differ.
    pub(crate) fn from_rows(group: &Group, slot: Slot, rows: &[u8]) -> Option<Self> {
        let stride = group.layout.stride();
        let slab = Slab::from_rows(&group.memory, slot.0, stride, rows)?;
        let mut index = Index::for_rows(&group.indexes, slab.rows());
        for (row, bytes) in rows.chunks_exact(stride * size_of::<u32>()).enumerate() {
            index.insert(Hash::of(key_of_bytes(bytes)), row as u32);
        }
        Some(Self { index, slab, removed: Removed::default() })
    }

    pub(crate) fn rows(&self) -> usize {
        self.slab.rows()
    }

    /// Bytes of memory held beyond the table itself.
    pub(crate) fn bytes(&self) -> usize {
        let removed = self.removed.now.capacity() + self.removed.frozen.as_ref().map_or(0, Vec::capacity);
        self.index.bytes() + self.slab.bytes() + removed * size_of::<FeatureKey>()
    }

    /// A copy of all rows, in no particular order.
    pub(crate) fn copy_rows(&self) -> Vec<u32> {
        self.slab.copy_rows()
    }

    /// The words of a key's row.
    pub(crate) fn row_of(&self, key: FeatureKey) -> Option<&[u32]> {
        self.find(Hash::of(key), key).map(|row| self.slab.row(row))
    }

    #[cfg(test)]
    pub(crate) fn row_number(&self, key: FeatureKey) -> Option<u32> {
        self.find(Hash::of(key), key)
    }

    pub(crate) fn contains(&self, key: FeatureKey) -> bool {
        self.find(Hash::of(key), key).is_some()
    }

    /// Where its index is.
    pub(crate) fn note(&self, whereabouts: &Whereabouts) {
        whereabouts.note(&self.index);
    }

    /// Asks for the first `words` words of the rows of the keys that hash so.
    pub(crate) fn prefetch(&self, hashes: &[Hash], words: usize) {
        for &hash in hashes {
            if let Some(row) = self.index.candidate(hash) {
                prefetch::words(&self.slab.row(row)[..words]);
            }
        }
    }

    /// Reads the values of `keys`, which hash to `hashes`, into `out`, keys × dim.
    pub(crate) fn lookup(
        &mut self,
        group: &Group,
        keys: &[FeatureKey],
        hashes: &[Hash],
        missing: Missing,
        out: &mut [f32],
    ) -> LookupCounts {
        let mut counts = LookupCounts::default();
        for ((&key, &hash), out) in keys.iter().zip(hashes).zip(out.chunks_exact_mut(group.layout.dim())) {
            if let Some(row) = self.find(hash, key) {
                group.layout.read_values(self.slab.row(row), out);
                counts.found += 1;
                continue;
            }
            group.read_initial(key, out);
            if missing == Missing::Insert && self.insert(group, hash, key, out) {
                counts.inserted += 1;
            } else {
                counts.missing += 1;
            }
        }
        counts
    }

    /// Applies `gradients`, keys × dim, in order, to the rows of `keys`, which hash to `hashes`. A key's gradient is found by the key's
    /// position and by nothing else, so a key that is skipped moves no other. `log` is told of every change before and after.
    pub(crate) fn update(
        &mut self,
        group: &Group,
        (keys, hashes): (&[FeatureKey], &[Hash]),
        gradients: &[f32],
        step: Step,
        scratch: &mut [f32],
        log: &mut impl RowLog,
    ) -> UpdateCounts {
        let mut counts = UpdateCounts::default();
        let (layout, simd) = (group.layout, group.simd);
        for ((&key, &hash), gradient) in keys.iter().zip(hashes).zip(gradients.chunks_exact(layout.dim())) {
            let is_to_do = log.is_to_do();
            let Some(row) = self.find(hash, key) else {
                counts.missing += 1;
                continue;
            };
            if !simd.all_finite(gradient) {
                counts.non_finite += 1;
                continue;
            }
            counts.applied += 1;
            if !is_to_do {
                continue;
            }
            let words = self.slab.row_mut(row);
            log.changing(row, words);
            layout.modify(words, scratch, |values, state| {
                step.apply(simd, values, state, gradient);
            });
            log.changed();
        }
        counts
    }

    /// Removes a key's row; says whether there was one. With `record` the removal is among the
    /// changes since the last mark.
    pub(crate) fn remove(&mut self, key: FeatureKey, record: bool) -> bool {
        let hash = Hash::of(key);
        let Some(row) = self.find(hash, key) else {
            return false;
        };
        self.index.remove(hash, row);
        self.slab.release(row);
        if record {
            self.removed.now.push(key);
        }
        true
    }

    /// Replaces or adds one row, given as its bytes in memory. `None`, and no change, if every row number is taken.
    pub(crate) fn put(&mut self, group: &Group, bytes: &[u8]) -> Option<()> {
        let key = key_of_bytes(bytes);
        let hash = Hash::of(key);
        let row = match self.find(hash, key) {
            Some(row) => row,
            None => self.add(group, hash)?,
        };
        bytemuck::cast_slice_mut(self.slab.row_mut(row)).copy_from_slice(bytes);
        self.slab.publish(row);
        Some(())
    }

    /// Sets a mark: from now on rows count as unchanged, and no removal is remembered.
    pub(crate) fn mark(&mut self) {
        self.slab.mark();
        self.removed.now = Vec::new();
    }

    /// Sets a mark and keeps the rows of this instant; see [`Slab::freeze`].
    pub(crate) fn freeze(&mut self) {
        self.slab.freeze();
        self.removed.frozen = Some(std::mem::take(&mut self.removed.now));
    }

    /// The rows at the freeze; see [`Slab::frozen_rows`].
    pub(crate) fn frozen_rows(&mut self, changes_only: bool) -> Vec<u32> {
        self.slab.frozen_rows(changes_only)
    }

    /// Keys whose rows were removed between the mark before the freeze and the freeze. A key may
    /// repeat, and may have got a row again.
    pub(crate) fn frozen_removed(&self) -> &[FeatureKey] {
        self.removed.frozen.as_deref().unwrap_or_default()
    }

    /// Ends the freeze; see [`Slab::thaw`].
    pub(crate) fn thaw(&mut self, saved: bool) {
        self.slab.thaw(saved);
        if let Some(mut earlier) = self.removed.frozen.take().filter(|_| !saved) {
            earlier.append(&mut self.removed.now);
            self.removed.now = earlier;
        }
    }

    fn find(&self, hash: Hash, key: FeatureKey) -> Option<u32> {
        self.index.find(hash, |row| key_of(self.slab.row(row)) == key)
    }

    /// Adds a row for a key that has none. `false` if every row number is taken.
    fn insert(&mut self, group: &Group, hash: Hash, key: FeatureKey, values: &[f32]) -> bool {
        let Some(row) = self.add(group, hash) else {
            return false;
        };
        let words = self.slab.row_mut(row);
        group.layout.write_new(words, key, values, &group.spec.optimizer);
        self.slab.publish(row);
        true
    }

    /// An entry and a row, still to be written, for a key that has none.
    fn add(&mut self, group: &Group, hash: Hash) -> Option<u32> {
        if self.index.is_full() {
            self.grow(&group.indexes, hash);
        }
        let row = self.slab.allocate()?;
        self.index.insert(hash, row);
        Some(row)
    }

    /// Replaces the index by a larger one, built from the rows in the order they lie in memory. This
    /// is the longest a request can be held up: measured 3 ms in a table of 80,000 rows, 9 ms in one
    /// of 180,000, so choose the slot count for fewer than that a slot and group.
    fn grow(&mut self, memory: &Arc<Arena>, hash: Hash) {
        let capacity = self.index.next_capacity(hash);
        // The old index goes first, so that the two never take memory together.
        self.index = Index::for_rows(memory, 0);
        self.index = Index::for_rows(memory, capacity);
        for (row, words) in self.slab.iter() {
            self.index.insert(Hash::of(key_of(words)), row);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SparseOptimizer;
    use crate::optimizer::RowOptimizer;
    use crate::shared::NoLog;
    use proptest::prelude::*;

    fn group() -> Group {
        Group::new(RowSpec::plain(2), 1, Arc::default())
    }

    fn hashes(keys: &[FeatureKey]) -> Vec<Hash> {
        keys.iter().copied().map(Hash::of).collect()
    }

    fn lookup(table: &mut Table, keys: &[u64], missing: Missing) -> (LookupCounts, Vec<f32>) {
        let keys: Vec<_> = keys.iter().copied().map(FeatureKey).collect();
        let mut out = vec![f32::NAN; keys.len() * 2];
        let counts = table.lookup(&group(), &keys, &hashes(&keys), missing, &mut out);
        (counts, out)
    }

    #[test]
    fn a_key_repeated_within_a_piece_is_inserted_once() {
        let mut table = Table::new(&group(), Slot(0));
        let (counts, out) = lookup(&mut table, &[7, 7, 8, 7], Missing::Insert);
        assert_eq!((counts.inserted, counts.found, counts.missing), (2, 2, 0));
        assert_eq!(out, [0.5; 8]);
        assert_eq!(table.rows(), 2);
    }

    #[test]
    fn a_table_keeps_every_row_through_many_growths() {
        let mut table = Table::new(&group(), Slot(0));
        let step = SparseOptimizer::Sgd { learning_rate: 1.0 }.step(1);
        let rows = 20_000_u64;
        for key in 0..rows {
            lookup(&mut table, &[key], Missing::Insert);
            let gradient = [0.5 - key as f32, 0.0];
            let keys = [FeatureKey(key)];
            table.update(&group(), (&keys, &hashes(&keys)), &gradient, step, &mut [], &mut NoLog);
        }
        let keys: Vec<u64> = (0..rows + 5).collect();
        let (counts, out) = lookup(&mut table, &keys, Missing::ReadInitial);
        assert_eq!((counts.found, counts.missing), (rows, 5));
        let first_columns = out.chunks(2).take(rows as usize).map(|row| row[0]);
        assert!(first_columns.eq((0..rows).map(|key| key as f32)));
    }

    proptest! {
        /// A removed row's memory, with its stale key, must never be found through the index.
        #[test]
        fn removed_keys_stay_removed_while_their_rows_are_reused(
            operations in prop::collection::vec((any::<bool>(), 0_u64..40), 1..300)
        ) {
            let mut table = Table::new(&group(), Slot(0));
            let mut model = std::collections::BTreeSet::new();
            for (insert, key) in operations {
                if insert {
                    lookup(&mut table, &[key], Missing::Insert);
                    model.insert(key);
                } else {
                    prop_assert_eq!(table.remove(FeatureKey(key), false), model.remove(&key));
                }
                for key in 0..40 {
                    prop_assert_eq!(table.contains(FeatureKey(key)), model.contains(&key));
                }
            }
        }
    }
}
