//! The [`Store`]: slots behind locks, and the calls on their rows. It cuts a batch into
//! [pieces](crate::pieces), one for each slot's table. The tables read and change the rows.
//!
//! The calls on whole slots are in [`contents`](crate::contents), [`moving`](crate::moving) and
//! [`frozen`](crate::frozen).

use crate::budget::removes_rows;
use crate::counts::{LookupCounts, Missing, UpdateCounts};
use crate::group::{Group, GroupMemory};
use crate::layout::RowLayout;
use crate::life::with_life;
use crate::life_counts::{LifeCounts, SharedLifeCounts};
use crate::log::{NoLog, RowLog, UpdateLog};
use crate::pieces::Piece;
use crate::saves::Saves;
use crate::slot::{SlotCell, Slots};
use crate::table::{GradientRun, KeyRun, Table};
use crate::trimming::Trimming;
use crate::{Budget, FeatureKey, GroupId, LifePolicy, RowSpec, Seen, Slot, StoreConfig, StoreError, slot_of};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
/// Memory of a store, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreBytes {
    /// Embedding values and optimizer state of all rows.
    pub payload: u64,
    /// Everything else that tables use: keys, the words of policies, side tables, indexes, free
    /// rows, padding and the tables themselves.
    pub overhead: u64,
    /// Memory that tables have released, such as rows of slots that moved away and replaced
    /// indexes. The store reuses it before it asks the system for more.
    pub free: u64,
}

/// See the documentation of the crate.
///
/// All methods take `&self` and may be called from any number of threads. A call locks each slot
/// while it works on it, so no call sees a half-changed slot. No call waits for a lock while it
/// holds another. The exception is [`Store::freeze`], which holds all locks for an instant.
pub struct Store {
    pub(crate) config: StoreConfig,
    pub(crate) groups: Vec<Group>,
    pub(crate) layouts: Vec<RowLayout>,
    pub(crate) slots: Slots,
    pub(crate) saves: Mutex<Saves>,
    /// Whether removals are recorded; see [`Store::track_changes`].
    pub(crate) tracking: AtomicBool,
    /// The budget, which may change while the store is in use.
    pub(crate) budget: Mutex<Option<Budget>>,
    /// Whether the policy of some group removes rows.
    pub(crate) removes_rows: bool,
    pub(crate) trimming: Trimming,
    pub(crate) life_counts: SharedLifeCounts,
    /// See [`Store::work_done`].
    work: AtomicU64,
}

/// Rows in shared memory stay there for the next process.
impl Drop for Store {
    fn drop(&mut self) {
        self.groups.iter().for_each(|group| group.keep_dropped(true));
    }
}

impl Store {
    /// An empty store.
    ///
    /// # Errors
    /// [`StoreError::Spec`] if a number of the configuration is out of its range.
    pub fn new(config: StoreConfig) -> Result<Self, StoreError> {
        config.validate()?;
        let group = |&spec| Group::new(spec, &config, GroupMemory::default());
        let groups: Vec<Group> = config.groups.iter().map(group).collect();
        let tables = (0..config.slots).map(|slot| empty_tables(&groups, Slot(slot))).collect();
        Ok(Self::of_tables(config, groups, tables))
    }

    /// A store of these tables, by slot and group.
    pub(crate) fn of_tables(config: StoreConfig, groups: Vec<Group>, tables: Vec<Box<[Table]>>) -> Self {
        Self {
            layouts: groups.iter().map(|group| group.layout).collect(),
            slots: Slots::new(tables, groups.len()),
            budget: Mutex::new(config.budget),
            removes_rows: config.groups.iter().any(|spec| removes_rows(spec.life)),
            trimming: Trimming::default(),
            life_counts: SharedLifeCounts::new(groups.len()),
            config,
            groups,
            saves: Mutex::default(),
            tracking: AtomicBool::new(false),
            work: AtomicU64::new(0),
        }
    }

    /// Starts threads that prepare memory for each group: 8 MiB for its first rows, and as much for
    /// its index. The first requests then do not wait for the kernel, which may take milliseconds a
    /// page. Call this for a store that will soon be filled. It does nothing in shared memory.
    pub fn make_ready(&self) {
        for group in &self.groups {
            group.memory.make_ready();
            group.indexes.make_ready();
        }
    }

    /// The configuration that the store was made with.
    #[must_use]
    pub fn config(&self) -> &StoreConfig {
        &self.config
    }

    /// The spec of a row group.
    ///
    /// # Errors
    /// [`StoreError::UnknownGroup`].
    pub fn spec(&self, group: GroupId) -> Result<&RowSpec, StoreError> {
        Ok(&self.group(group)?.spec)
    }

    /// The slot that a key belongs to.
    #[must_use]
    pub fn slot_of(&self, key: FeatureKey) -> Slot {
        slot_of(key, self.config.slots)
    }

    /// Reads the embeddings of `keys` into `out`, `[keys.len(), dim]`. Keys may come in any order
    /// and repeat. Keys sorted by slot take one lock a slot. Other keys take up to one lock a key.
    ///
    /// # Errors
    /// [`StoreError::UnknownGroup`]; [`StoreError::BufferLength`] if `out` has another length.
    pub fn lookup(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        missing: Missing,
        out: &mut [f32],
    ) -> Result<LookupCounts, StoreError> {
        let id = group;
        let group = self.group_for("a look-up", id, keys.len(), out.len())?;
        let dim = group.layout.dim();
        let mut counts = LookupCounts::default();
        let words = group.layout.look_up_words();
        with_life!(group.spec.life, life => {
            self.slots.each_piece(id, keys, words, |table, Piece { keys: run, hashes, .. }| {
                let out = &mut out[run.start * dim..run.end * dim];
                counts += table.lookup(life, group, KeyRun { keys: &keys[run], hashes }, missing, out);
            });
        });
        self.count_life(id, LifeCounts { admitted: counts.inserted, ..LifeCounts::default() });
        Ok(counts)
    }

    /// Reads the embeddings of `keys` into `out` like [`Self::lookup`] with
    /// [`Missing::ReadInitial`]. Returns the positions in `keys` of the keys without a row,
    /// ascending.
    ///
    /// # Errors
    /// As [`Self::lookup`].
    pub fn read(&self, group: GroupId, keys: &[FeatureKey], out: &mut [f32]) -> Result<Vec<usize>, StoreError> {
        let id = group;
        let group = self.group_for("a look-up", id, keys.len(), out.len())?;
        let dim = group.layout.dim();
        let mut missing = Vec::new();
        self.slots.each_piece(id, keys, group.layout.look_up_words(), |table, Piece { keys: run, hashes, .. }| {
            let out = &mut out[run.start * dim..run.end * dim];
            let first = run.start;
            table.read(group, KeyRun { keys: &keys[run], hashes }, out, |at| missing.push(first + at));
        });
        Ok(missing)
    }

    /// Applies `gradients`, `[keys.len(), dim]`, to the rows of `keys`, in order. A key that
    /// repeats is updated each time. `update_count` is the number of this update in the whole job,
    /// from 1, for Adam's bias correction. The caller maintains the count and saves it in
    /// checkpoints.
    ///
    /// Counts and skips a key without a row, unless the group's [policy](crate::LifePolicy) gives
    /// it a row now. Counts and skips a gradient with a NaN or an infinity, too. A skipped key does
    /// not affect the others.
    ///
    /// # Errors
    /// [`StoreError::UnknownGroup`]; [`StoreError::BufferLength`] if `gradients` has another
    /// length; [`StoreError::UpdateCountZero`].
    pub fn update(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        gradients: &[f32],
        update_count: u64,
    ) -> Result<UpdateCounts, StoreError> {
        self.update_seen(group, keys, gradients, update_count, Seen::default())
    }

    /// Like [`Self::update`], with the event time and the examples of the keys, for a policy that
    /// scores rows. `seen.examples` is empty or has one item for each key.
    ///
    /// # Errors
    /// As [`Self::update`]; [`StoreError::Examples`] if there is another number of examples.
    pub fn update_seen(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        gradients: &[f32],
        update_count: u64,
        seen: Seen<'_>,
    ) -> Result<UpdateCounts, StoreError> {
        self.update_through(group, keys, gradients, update_count, seen, &mut NoLog)
    }

    /// Like [`Self::update`], but as a part of the update that `log` has under way. If an earlier
    /// process began that update, this applies only the rest of it. The counts cover the whole
    /// update, except `admitted` and `forgotten`. Those two cover only the rest.
    ///
    /// # Errors
    /// As [`Self::update`].
    pub fn update_logged(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        gradients: &[f32],
        update_count: u64,
        log: &mut UpdateLog,
    ) -> Result<UpdateCounts, StoreError> {
        self.update_seen_logged(group, keys, gradients, update_count, Seen::default(), log)
    }

    /// Like [`Self::update_logged`] and [`Self::update_seen`]. A killed update scores each row
    /// once.
    ///
    /// # Errors
    /// As [`Self::update_seen`].
    pub fn update_seen_logged(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        gradients: &[f32],
        update_count: u64,
        seen: Seen<'_>,
        log: &mut UpdateLog,
    ) -> Result<UpdateCounts, StoreError> {
        self.update_through(group, keys, gradients, update_count, seen, log)
    }

    /// See [`Self::update_logged`].
    pub(crate) fn update_through<L: RowLog>(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        gradients: &[f32],
        update: u64,
        seen: Seen<'_>,
        log: &mut L,
    ) -> Result<UpdateCounts, StoreError> {
        let id = group;
        let group = self.group_for("an update", id, keys.len(), gradients.len())?;
        check_update(id, keys.len(), update, seen)?;
        let dim = group.layout.dim();
        let step = group.spec.step(update);
        let mut scratch = vec![0.0; dim];
        let mut counts = UpdateCounts::default();
        with_life!(group.spec.life, life => {
            self.slots.each_piece(id, keys, group.layout.stride(), |table, Piece { slot, keys: run, hashes }| {
                let gradients = &gradients[run.start * dim..run.end * dim];
                let seen = seen.of_keys(run.clone());
                let run = GradientRun { keys: KeyRun { keys: &keys[run], hashes }, gradients, step, update, seen };
                log.at(id, slot);
                counts += table.update(life, group, run, &mut scratch, log);
            });
        });
        let UpdateCounts { admitted, turned_away, missing, .. } = counts;
        self.count_life(id, LifeCounts { admitted, turned_away, gradients_dropped: missing, ..LifeCounts::default() });
        Ok(counts)
    }

    /// Adds to the counts of a group that exists. Groups that keep every key have none.
    fn count_life(&self, group: GroupId, counts: LifeCounts) {
        let position = usize::from(group.0);
        if self.groups[position].spec.life != LifePolicy::KeepAll {
            self.life_counts.add(position, counts);
        }
    }

    /// Removes a row, and returns whether there was one. A later look-up of the key reads its
    /// initial values.
    ///
    /// # Errors
    /// [`StoreError::UnknownGroup`].
    pub fn remove(&self, group: GroupId, key: FeatureKey) -> Result<bool, StoreError> {
        self.group(group)?;
        let mut state = self.slots.of_key(key).lock();
        let record = self.tracking.load(Ordering::Relaxed);
        Ok(state.tables[usize::from(group.0)].remove(key, record))
    }

    /// Whether a key has a row.
    ///
    /// # Errors
    /// [`StoreError::UnknownGroup`].
    pub fn contains(&self, group: GroupId, key: FeatureKey) -> Result<bool, StoreError> {
        self.group(group)?;
        let state = self.slots.of_key(key).lock();
        Ok(state.tables[usize::from(group.0)].contains(key))
    }

    /// The number of times that a slot was cleared, restored, saved or digested. Such work on all
    /// slots takes long if there are many rows. The watchdog reads its progress from this number.
    #[must_use]
    pub fn work_done(&self) -> u64 {
        self.work.load(Ordering::Relaxed)
    }

    /// Counts one slot; see [`Self::work_done`].
    pub(crate) fn has_worked(&self) {
        self.work.fetch_add(1, Ordering::Relaxed);
    }

    /// Rows in the whole store.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.slots.iter().map(|cell| rows_of(&cell.lock().tables)).sum()
    }

    /// Rows of one slot, all groups together.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn slot_rows(&self, slot: Slot) -> Result<u64, StoreError> {
        Ok(rows_of(&self.cell(slot)?.lock().tables))
    }

    /// Rows of one group, all slots together.
    ///
    /// # Errors
    /// [`StoreError::UnknownGroup`].
    pub fn group_rows(&self, group: GroupId) -> Result<u64, StoreError> {
        self.group(group)?;
        let rows = |cell: &SlotCell| cell.lock().tables[usize::from(group.0)].rows() as u64;
        Ok(self.slots.iter().map(rows).sum())
    }

    /// Memory in use.
    #[must_use]
    pub fn bytes(&self) -> StoreBytes {
        let (mut payload, mut used) = (0, 0);
        for cell in self.slots.iter() {
            used += self.slots.bytes_per_slot();
            for (table, layout) in cell.lock().tables.iter().zip(&self.layouts) {
                payload += table.rows() * layout.payload_bytes();
                used += table.bytes();
            }
        }
        let free: usize = self.groups.iter().map(Group::free_bytes).sum();
        StoreBytes { payload: payload as u64, overhead: (used - payload) as u64, free: free as u64 }
    }

    /// Whether shared memory was full at some time, so that some rows are in the process's own
    /// memory. Those rows are lost when the process ends.
    #[must_use]
    pub fn is_shared_memory_full(&self) -> bool {
        self.groups.iter().any(Group::is_incomplete)
    }

    pub(crate) fn group(&self, group: GroupId) -> Result<&Group, StoreError> {
        let groups = self.groups.len();
        self.groups.get(usize::from(group.0)).ok_or(StoreError::UnknownGroup { group, groups })
    }

    /// The group of a request. Its buffer must have one value for each key and column, and has
    /// `actual` values.
    fn group_for(&self, what: &'static str, id: GroupId, keys: usize, actual: usize) -> Result<&Group, StoreError> {
        let group = self.group(id)?;
        let expected = keys * group.layout.dim();
        if actual != expected {
            return Err(StoreError::BufferLength { what, group: id, keys, expected, actual });
        }
        Ok(group)
    }

    pub(crate) fn cell(&self, slot: Slot) -> Result<&SlotCell, StoreError> {
        let slots = self.config.slots;
        self.slots.get(slot).ok_or(StoreError::UnknownSlot { slot, slots })
    }
}

fn check_update(group: GroupId, keys: usize, update: u64, seen: Seen<'_>) -> Result<(), StoreError> {
    if update == 0 {
        return Err(StoreError::UpdateCountZero);
    }
    match seen.examples.len() {
        0 => Ok(()),
        found if found == keys => Ok(()),
        found => Err(StoreError::Examples { group, keys, found }),
    }
}

pub(crate) fn empty_tables(groups: &[Group], slot: Slot) -> Box<[Table]> {
    groups.iter().map(|group| Table::new(group, slot)).collect()
}

pub(crate) fn rows_of(tables: &[Table]) -> u64 {
    tables.iter().map(|table| table.rows() as u64).sum()
}
