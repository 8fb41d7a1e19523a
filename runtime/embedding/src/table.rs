//! The table of one (slot, group): an [`Index`] from keys to the rows of a [`Slab`], and the
//! [`SideTable`] of the group's [policy](crate::life), if it has one. Its caller holds the slot's
//! lock and passes only keys that belong to the slot; the table does not check that.
//!
//! A piece of a batch takes two passes, with the work on another piece in between. The first pass
//! prefetches the rows that the keys' buckets probably name; it is only a hint. The second pass
//! searches properly and does the work. So keys may repeat, and rows may be added in between. The
//! [pieces](crate::pieces) prefetch the buckets.

use crate::arena::Arena;
use crate::block_file::FoundBlock;
use crate::counts::{LookupCounts, Missing, UpdateCounts};
use crate::group::Group;
use crate::index::{Hash, Index, IndexAddress};
use crate::key::{key_of, key_of_bytes};
use crate::layout::META_WORD;
use crate::life::{Rank, Refusal, RowLife, Side, SightedKey, Touch, with_life};
use crate::log::{Part, RowLog};
use crate::row_update::RowUpdate;
use crate::side_table::SideTable;
use crate::slab::Slab;
use crate::{FeatureKey, Moment, Seen, Slot, prefetch};
use std::sync::Arc;

/// Keys of a batch with their hashes.
#[derive(Clone, Copy)]
pub(crate) struct KeyRun<'a> {
    pub(crate) keys: &'a [FeatureKey],
    pub(crate) hashes: &'a [Hash],
}

/// Gradients of a batch, keys × dim, with the step to apply them by and the number of the update.
pub(crate) struct GradientRun<'a> {
    pub(crate) keys: KeyRun<'a>,
    pub(crate) gradients: &'a [f32],
    pub(crate) step: RowUpdate,
    pub(crate) update: u64,
    pub(crate) seen: Seen<'a>,
}

/// A row as an eviction sees it.
#[derive(Clone, Copy)]
pub(crate) struct RankedRow {
    pub(crate) rank: Rank,
    pub(crate) key: FeatureKey,
    pub(crate) age_seconds: u64,
}

impl KeyRun<'_> {
    fn iter(&self) -> impl Iterator<Item = (FeatureKey, Hash)> {
        self.keys.iter().copied().zip(self.hashes.iter().copied())
    }
}

/// See the module's text.
pub(crate) struct Table {
    index: Index,
    slab: Slab,
    side: Option<Box<SideTable>>,
    removed: Removed,
    /// No row expires before this moment. 0 if that is not known.
    due: Moment,
}

/// The blocks that a file holds of one table.
#[derive(Default)]
pub(crate) struct FoundTable {
    pub(crate) rows: Vec<FoundBlock>,
    pub(crate) side: Vec<FoundBlock>,
}

fn empty_side(group: &Group, slot: Slot) -> Option<Box<SideTable>> {
    let side = group.side.as_ref()?;
    Some(Box::new(SideTable::new(&side.memory, slot.0, side.layout)))
}

/// Keys whose rows were removed, for saves of changes. A key may repeat, and may have a row again.
#[derive(Default)]
struct Removed {
    /// Removed since the last mark.
    now: Vec<FeatureKey>,
    /// Removed between the mark before the freeze and the freeze. `None` unless frozen.
    frozen: Option<Vec<FeatureKey>>,
}

impl Table {
    pub(crate) fn new(group: &Group, slot: Slot) -> Self {
        let slab = Slab::new(&group.memory, slot.0, group.layout.stride());
        let index = Index::for_rows(&group.indexes, 0);
        Self { index, slab, side: empty_side(group, slot), removed: Removed::default(), due: Moment(0) }
    }

    /// The table whose rows and side table were found in the files behind the group's memory.
    /// `None` if the blocks do not fit together.
    pub(crate) fn adopt(group: &Group, slot: Slot, found: FoundTable) -> Option<Self> {
        let stride = group.layout.stride();
        let slab = match found.rows.is_empty() {
            true => Slab::new(&group.memory, slot.0, stride),
            false => Slab::adopt(&group.memory, slot.0, stride, found.rows)?,
        };
        let side = match &group.side {
            Some(side) if !found.side.is_empty() => {
                Some(Box::new(SideTable::adopt(&side.memory, slot.0, side.layout, found.side)?))
            }
            _ => empty_side(group, slot),
        };
        let mut index = Index::for_rows(&group.indexes, slab.rows());
        for (row, words) in slab.iter() {
            index.insert(Hash::of(key_of(words)), row);
        }
        Some(Self { index, slab, side, removed: Removed::default(), due: Moment(0) })
    }

    /// Completes the admissions that a killed process left half-done; see [`RowLife::reopened`].
    pub(crate) fn reopened(&mut self, group: &Group) {
        let Self { index, slab, side, .. } = self;
        if let Some(side) = side {
            let has_row = |key| index.find(Hash::of(key), |row| key_of(slab.row(row)) == key).is_some();
            with_life!(group.spec.life, life => life.reopened(side, has_row));
        }
    }

    /// Restores the words of a live row, or of a block of the side table, from before a change that
    /// was not completed. `false` if there is no such row.
    pub(crate) fn put_back(&mut self, part: Part, row: u32, words: &[u32]) -> bool {
        if part == Part::Side {
            return self.side.as_mut().is_some_and(|side| side.put_back(row, words));
        }
        let is_live = self.slab.is_live(row);
        if is_live {
            self.slab.row_mut(row).copy_from_slice(words);
        }
        is_live
    }

    /// A table of whole rows, one after another in `rows` as they are in memory. Keys must differ.
    /// `None` if there are more rows than a table can number.
    pub(crate) fn from_rows(group: &Group, slot: Slot, rows: &[u8]) -> Option<Self> {
        let stride = group.layout.stride();
        let slab = Slab::from_rows(&group.memory, slot.0, stride, rows)?;
        let mut index = Index::for_rows(&group.indexes, slab.rows());
        for (row, bytes) in rows.chunks_exact(stride * size_of::<u32>()).enumerate() {
            index.insert(Hash::of(key_of_bytes(bytes)), row as u32);
        }
        Some(Self { index, slab, side: empty_side(group, slot), removed: Removed::default(), due: Moment(0) })
    }

    pub(crate) fn rows(&self) -> usize {
        self.slab.rows()
    }

    /// Bytes of memory in use beyond the table itself.
    pub(crate) fn bytes(&self) -> usize {
        let removed = self.removed.now.capacity() + self.removed.frozen.as_ref().map_or(0, Vec::capacity);
        let side = self.side.as_ref().map_or(0, |side| side.bytes());
        self.index.bytes() + self.slab.bytes() + side + removed * size_of::<FeatureKey>()
    }

    /// A copy of all rows, in no particular order.
    pub(crate) fn copy_rows(&self) -> Vec<u32> {
        self.slab.copy_rows()
    }

    /// The side table of the group's policy.
    pub(crate) fn side(&self) -> Option<&SideTable> {
        self.side.as_deref()
    }

    /// Replaces a block of the side table by a stored one.
    pub(crate) fn put_side(&mut self, stored: &[u32]) {
        if let Some(side) = &mut self.side {
            side.put(stored);
        }
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

    /// Records the address of the index.
    pub(crate) fn record_address(&self, address: &IndexAddress) {
        address.record(&self.index);
    }

    /// Prefetches the first `words` words of the rows of the keys with these hashes.
    pub(crate) fn prefetch(&self, hashes: &[Hash], words: usize) {
        for &hash in hashes {
            if let Some(row) = self.index.candidate(hash) {
                prefetch::words(&self.slab.row(row)[..words]);
            }
        }
    }

    /// Reads the values of keys into `out`, keys × dim.
    pub(crate) fn lookup<L: RowLife>(
        &mut self,
        life: L,
        group: &Group,
        keys: KeyRun<'_>,
        missing: Missing,
        out: &mut [f32],
    ) -> LookupCounts {
        let mut counts = LookupCounts::default();
        for ((key, hash), out) in keys.iter().zip(out.chunks_exact_mut(group.layout.dim())) {
            if let Some(row) = self.find(hash, key) {
                group.layout.read_values(self.slab.row(row), out);
                counts.found += 1;
                continue;
            }
            group.read_initial(key, out);
            let is_admitted = missing == Missing::Insert && life.admits_at_look_up();
            if is_admitted && self.insert(group, hash, key, out).is_some() {
                counts.inserted += 1;
            } else {
                counts.missing += 1;
            }
        }
        counts
    }

    /// Reads the values of keys into `out`, keys × dim, and makes no rows. Calls `missing(i)` for
    /// each key without a row; key number i reads as its initial values.
    pub(crate) fn read(&self, group: &Group, keys: KeyRun<'_>, out: &mut [f32], mut missing: impl FnMut(usize)) {
        for (at, ((key, hash), out)) in keys.iter().zip(out.chunks_exact_mut(group.layout.dim())).enumerate() {
            if let Some(row) = self.find(hash, key) {
                group.layout.read_values(self.slab.row(row), out);
            } else {
                group.read_initial(key, out);
                missing(at);
            }
        }
    }

    /// Applies gradients in order. A key's gradient is found by the key's position alone, so a
    /// skipped key shifts no other. `log` sees every change before and after it is made. `scratch`
    /// has dim floats.
    pub(crate) fn update<L: RowLife>(
        &mut self,
        life: L,
        group: &Group,
        run: GradientRun<'_>,
        scratch: &mut [f32],
        log: &mut impl RowLog,
    ) -> UpdateCounts {
        let mut counts = UpdateCounts::default();
        let (layout, simd) = (group.layout, group.simd);
        let GradientRun { keys, gradients, step, update, seen } = run;
        for (at, ((key, hash), gradient)) in keys.iter().zip(gradients.chunks_exact(layout.dim())).enumerate() {
            let is_to_do = log.is_to_do();
            let found = match self.find(hash, key) {
                Some(row) => Ok(row),
                None if is_to_do => {
                    let sighted = SightedKey { key, hash, seed: group.seed, update };
                    let sighted = self.sight(life, group, sighted, scratch, log);
                    counts.admitted += u64::from(sighted.is_ok());
                    sighted
                }
                None => Err(life.refusal()),
            };
            let row = match found {
                Ok(row) => row,
                Err(refusal) => {
                    counts.refuse(refusal);
                    continue;
                }
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
            log.changing(Part::Rows, row, words);
            life.touched(&mut words[META_WORD], Touch { key, update, now: seen.now, examples: seen.examples_of(at) });
            if L::USES_ROW_WORD {
                self.due = self.due.min(life.due(words[META_WORD], seen.now));
            }
            layout.modify(words, scratch, |values, state| {
                step.apply(simd, values, state, gradient);
            });
            log.changed();
        }
        counts
    }

    /// An update has met a key without a row. Returns its new row if the policy admits it now.
    /// `values` has dim floats, which are overwritten.
    ///
    /// The row is made before the policy forgets the key. After a kill in between,
    /// [`Self::reopened`] makes it forget; after an earlier kill, the log has the key counted as
    /// before. Either way the repeated update completes the admission.
    #[cold]
    fn sight<L: RowLife>(
        &mut self,
        life: L,
        group: &Group,
        sighted: SightedKey,
        values: &mut [f32],
        log: &mut impl RowLog,
    ) -> Result<u32, Refusal> {
        if let Err(refusal) = life.sighted(sighted, &mut Side { table: self.side.as_deref_mut(), log }) {
            if refusal != Refusal::Missing {
                log.changed();
            }
            return Err(refusal);
        }
        group.read_initial(sighted.key, values);
        let row = self.insert(group, sighted.hash, sighted.key, values).ok_or(life.refusal())?;
        life.admitted(sighted, &mut Side { table: self.side.as_deref_mut(), log });
        log.keep();
        Ok(row)
    }

    /// The keys of the rows that have expired. The next call before a row is due costs nothing.
    pub(crate) fn expired<L: RowLife>(&mut self, life: L, now: Moment) -> Vec<FeatureKey> {
        let mut expired = Vec::new();
        if !L::USES_ROW_WORD || now < self.due || now == Moment(0) {
            return expired;
        }
        let mut due = Moment(u64::MAX);
        for (_, words) in self.slab.iter() {
            if life.is_expired(words[META_WORD], now) {
                expired.push(key_of(words));
            } else {
                due = due.min(life.due(words[META_WORD], now));
            }
        }
        self.due = due;
        expired
    }

    /// The rows that may be evicted, in no particular order.
    pub(crate) fn ranked<L: RowLife>(&self, life: L, now: Moment) -> impl Iterator<Item = RankedRow> {
        let rows = L::USES_ROW_WORD.then(|| self.slab.iter()).into_iter().flatten();
        rows.filter_map(move |(_, words)| {
            let (key, word) = (key_of(words), words[META_WORD]);
            let age_seconds = life.age_seconds(word, now);
            life.rank(word, now).map(|rank| RankedRow { rank, key, age_seconds })
        })
    }

    /// Removes a key's row; returns whether there was one. With `record` the removal is one of the
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

    /// Replaces or adds one row, given as its bytes in memory. `None`, and no change, if every row
    /// number is taken.
    pub(crate) fn put(&mut self, group: &Group, bytes: &[u8]) -> Option<()> {
        let key = key_of_bytes(bytes);
        let hash = Hash::of(key);
        let row = match self.find(hash, key) {
            Some(row) => row,
            None => self.add(group, hash)?,
        };
        bytemuck::cast_slice_mut(self.slab.row_mut(row)).copy_from_slice(bytes);
        self.slab.publish(row);
        self.due = Moment(0);
        Some(())
    }

    /// Sets a mark: all rows count as unchanged, and recorded removals are forgotten.
    pub(crate) fn mark(&mut self) {
        self.slab.mark();
        self.side.iter_mut().for_each(|side| side.mark());
        self.removed.now = Vec::new();
    }

    /// Sets a mark and preserves the rows of this instant; see [`Slab::freeze`].
    pub(crate) fn freeze(&mut self) {
        self.slab.freeze();
        self.side.iter_mut().for_each(|side| side.freeze());
        self.removed.frozen = Some(std::mem::take(&mut self.removed.now));
    }

    /// The rows at the freeze; see [`Slab::frozen_rows`].
    pub(crate) fn frozen_rows(&mut self, changes_only: bool) -> Vec<u32> {
        self.slab.frozen_rows(changes_only)
    }

    /// The stored blocks of the side table at the freeze; see [`SideTable::frozen`].
    pub(crate) fn frozen_side(&mut self, changes_only: bool) -> Vec<u32> {
        self.side.as_mut().map_or_else(Vec::new, |side| side.frozen(changes_only))
    }

    /// Keys whose rows were removed between the mark before the freeze and the freeze. A key may
    /// repeat, and may have a row again.
    pub(crate) fn frozen_removed(&self) -> &[FeatureKey] {
        self.removed.frozen.as_deref().unwrap_or_default()
    }

    /// Ends the freeze; see [`Slab::thaw`].
    pub(crate) fn thaw(&mut self, saved: bool) {
        self.slab.thaw(saved);
        self.side.iter_mut().for_each(|side| side.thaw(saved));
        if let Some(mut earlier) = self.removed.frozen.take().filter(|_| !saved) {
            earlier.append(&mut self.removed.now);
            self.removed.now = earlier;
        }
    }

    fn find(&self, hash: Hash, key: FeatureKey) -> Option<u32> {
        self.index.find(hash, |row| key_of(self.slab.row(row)) == key)
    }

    /// Adds a row for a key that has none. `None` if every row number is taken.
    fn insert(&mut self, group: &Group, hash: Hash, key: FeatureKey, values: &[f32]) -> Option<u32> {
        let row = self.add(group, hash)?;
        let words = self.slab.row_mut(row);
        group.layout.write_new(words, key, values, &group.spec);
        self.slab.publish(row);
        Some(row)
    }

    /// Adds an entry and an unwritten row for a key that has none. `None` if every row number is
    /// taken.
    fn add(&mut self, group: &Group, hash: Hash) -> Option<u32> {
        if self.index.is_full() {
            self.grow(&group.indexes, hash);
        }
        let row = self.slab.allocate()?;
        self.index.insert(hash, row);
        Some(row)
    }

    /// Replaces the index by a larger one, built from the rows in the order they lie in memory. No
    /// other step of a request takes longer: measured 3 ms in a table of 80,000 rows, 9 ms in one
    /// of 180,000. Choose the number of slots so that a slot and group has fewer rows.
    fn grow(&mut self, memory: &Arc<Arena>, hash: Hash) {
        let capacity = self.index.next_capacity(hash);
        // The old index is freed first, so that the two never take memory together.
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
    use crate::group::GroupMemory;
    use crate::life::KeepAll;
    use crate::log::NoLog;
    use crate::optimizer::{self, RowOptimizer, RowStep};
    use crate::{Initializer, RowSpec, StoreConfig, ValueType};
    use proptest::prelude::*;

    fn group_of(spec: RowSpec) -> Group {
        let config = StoreConfig { slots: 1, seed: 1, groups: vec![spec], budget: None };
        Group::new(spec, &config, GroupMemory::default())
    }

    fn group() -> Group {
        group_of(RowSpec::plain(2))
    }

    fn hashes(keys: &[FeatureKey]) -> Vec<Hash> {
        keys.iter().copied().map(Hash::of).collect()
    }

    fn lookup(table: &mut Table, group: &Group, keys: &[u64], missing: Missing) -> (LookupCounts, Vec<f32>) {
        let keys: Vec<_> = keys.iter().copied().map(FeatureKey).collect();
        let mut out = vec![f32::NAN; keys.len() * group.layout.dim()];
        let run = KeyRun { keys: &keys, hashes: &hashes(&keys) };
        let counts = table.lookup(KeepAll, group, run, missing, &mut out);
        (counts, out)
    }

    fn update(table: &mut Table, group: &Group, keys: &[u64], gradients: &[f32], count: u64) -> UpdateCounts {
        let keys: Vec<_> = keys.iter().copied().map(FeatureKey).collect();
        let run = KeyRun { keys: &keys, hashes: &hashes(&keys) };
        let step = group.spec.step(count);
        let run = GradientRun { keys: run, gradients, step, update: count, seen: Seen::default() };
        table.update(KeepAll, group, run, &mut vec![0.0; group.layout.dim()], &mut NoLog)
    }

    #[test]
    fn a_key_repeated_within_a_piece_is_inserted_once() {
        let mut table = Table::new(&group(), Slot(0));
        let (counts, out) = lookup(&mut table, &group(), &[7, 7, 8, 7], Missing::Insert);
        assert_eq!((counts.inserted, counts.found, counts.missing), (2, 2, 0));
        assert_eq!(out, [0.5; 8]);
        assert_eq!(table.rows(), 2);
    }

    #[test]
    fn a_table_keeps_every_row_through_many_growths() {
        let group = group();
        let mut table = Table::new(&group, Slot(0));
        let rows = 20_000_u64;
        for key in 0..rows {
            lookup(&mut table, &group, &[key], Missing::Insert);
            update(&mut table, &group, &[key], &[0.5 - key as f32, 0.0], 1);
        }
        let keys: Vec<u64> = (0..rows + 5).collect();
        let (counts, out) = lookup(&mut table, &group, &keys, Missing::ReadInitial);
        assert_eq!((counts.found, counts.missing), (rows, 5));
        let first_columns = out.chunks(2).take(rows as usize).map(|row| row[0]);
        assert!(first_columns.eq((0..rows).map(|key| key as f32)));
    }

    /// For every optimizer and value type: the rows after some batches are those that each key's
    /// gradients give when they are applied alone.
    #[test]
    fn a_batch_equals_row_by_row_updates_to_the_bit() {
        let keys: Vec<u64> = (0..50).collect();
        let gradient = |update: u64, key: u64, column: usize| {
            let name = (update << 40 | key << 8 | column as u64).to_le_bytes();
            (xxhash_rust::xxh3::xxh3_64(&name) >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        for optimizer in optimizer::examples() {
            for value_type in ValueType::ALL {
                let initializer = Initializer::Normal { standard_deviation: 0.1 };
                let spec = RowSpec { value_type, optimizer, initializer, ..RowSpec::plain(5) };
                let group = group_of(spec);
                let mut table = Table::new(&group, Slot(0));
                let initial = lookup(&mut table, &group, &keys, Missing::Insert).1;
                for update in 1..=3 {
                    let of_key = |&key: &u64| (0..5).map(move |column| gradient(update, key, column));
                    let gradients: Vec<f32> = keys.iter().flat_map(of_key).collect();
                    let counts = self::update(&mut table, &group, &keys, &gradients, update);
                    assert_eq!(counts.applied, 50);
                }
                let found = lookup(&mut table, &group, &keys, Missing::ReadInitial).1;
                for (row, &key) in keys.iter().enumerate() {
                    let mut values = initial[row * 5..row * 5 + 5].to_vec();
                    let mut state = vec![0.0; optimizer.state_len(5)];
                    optimizer.initial_state(&values, &mut state);
                    for update in 1..=3 {
                        let gradient: Vec<f32> = (0..5).map(|column| gradient(update, key, column)).collect();
                        optimizer.step(update).apply(&mut values, &mut state, &gradient);
                        group.layout.round(&mut values);
                    }
                    assert_eq!(found[row * 5..row * 5 + 5], values, "{optimizer:?} {value_type} key {key}");
                    assert_eq!(group.layout.state(table.row_of(FeatureKey(key)).unwrap()), state);
                }
            }
        }
    }

    proptest! {
        /// A removed row's memory, with its stale key, must never be found through the index.
        #[test]
        fn removed_keys_stay_removed_while_their_rows_are_reused(
            operations in prop::collection::vec((any::<bool>(), 0_u64..40), 1..300)
        ) {
            let group = group();
            let mut table = Table::new(&group, Slot(0));
            let mut model = std::collections::BTreeSet::new();
            for (insert, key) in operations {
                if insert {
                    lookup(&mut table, &group, &[key], Missing::Insert);
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
