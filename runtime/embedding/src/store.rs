//! The [`Store`]: slots behind locks, and the calls on them. It gives a batch in [pieces](crate::pieces) to
//! its slots' tables; what happens to a row is the table's business.

use crate::frozen::{FrozenSlot, Saves};
use crate::index::Whereabouts;
use crate::layout::RowLayout;
use crate::optimizer::RowOptimizer;
use crate::pieces::Piece;
use crate::shared::{NoLog, RowLog, UpdateLog};
use crate::snapshot::{self, RestoredSlot, SlotRows, SlotSnapshot};
use crate::table::{Group, LookupCounts, Missing, Table, UpdateCounts};
use crate::{FeatureKey, GroupId, RowSpec, Slot, SlotContent, SnapshotError, StoreConfig, StoreError, slot_of};
use sha2::{Digest as _, Sha256};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// A SHA-256 of rows.
pub type Digest = [u8; 32];

/// Memory of a store, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreBytes {
    /// Embedding values and optimizer state of the rows that exist.
    pub payload: u64,
    /// Everything else that tables use: keys, scores and timestamps, indexes, free rows, padding and the tables themselves.
    pub overhead: u64,
    /// What tables have given back: rows of slots that have left, indexes that became too small. It is used again before more is asked of
    /// the system.
    pub free: u64,
}

/// See the crate's text. All methods take `&self` and may be called from any number of threads; a
/// call locks each slot for as long as it works on it, so it sees and leaves every slot whole, and no call waits for
/// another while holding a lock. ([`Store::freeze`] alone waits for all locks, to hold them for an instant.)
pub struct Store {
    pub(crate) config: StoreConfig,
    pub(crate) groups: Vec<Group>,
    pub(crate) layouts: Vec<RowLayout>,
    pub(crate) slots: Box<[SlotCell]>,
    /// Of the tables' indexes, by slot and then group.
    pub(crate) indexes: Box<[Whereabouts]>,
    pub(crate) saves: Mutex<Saves>,
    /// Whether removals are remembered; see [`Store::track_changes`].
    pub(crate) tracking: AtomicBool,
    /// See [`Store::work_done`].
    work: AtomicU64,
}

/// One slot, on cache lines of its own.
#[repr(align(64))]
pub(crate) struct SlotCell(Mutex<SlotState>);

/// What a slot's lock guards.
pub(crate) struct SlotState {
    /// By group.
    pub(crate) tables: Box<[Table]>,
    /// Whether all tables were replaced since the last mark: then changes row by row do not tell what
    /// happened.
    pub(crate) replaced: bool,
    pub(crate) frozen: Option<FrozenSlot>,
}

impl SlotState {
    /// Puts other tables in the place of the present ones, whose rows of the freeze are kept first.
    fn replace(&mut self, tables: Box<[Table]>) -> Box<[Table]> {
        if let Some(mut frozen) = self.frozen.take() {
            frozen.keep(&mut self.tables);
            self.frozen = Some(frozen);
        }
        self.replaced = true;
        std::mem::replace(&mut self.tables, tables)
    }
}

/// Rows in shared memory stay there for the next process.
impl Drop for Store {
    fn drop(&mut self) {
        self.groups.iter().for_each(|group| group.memory.keep_file(true));
    }
}

impl SlotCell {
    /// A panic under the lock (out of memory, a bug) poisons it. A table is never left in pieces by
    /// code that can panic, so the lock is taken all the same.
    pub(crate) fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, if nobody has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, SlotState>> {
        match self.0.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Store {
    /// An empty store.
    ///
    /// # Errors
    /// [`StoreError::Spec`] if a number of the configuration is out of its range.
    pub fn new(config: StoreConfig) -> Result<Self, StoreError> {
        config.validate()?;
        let group = |&spec| Group::new(spec, config.seed, Arc::default());
        let groups: Vec<Group> = config.groups.iter().map(group).collect();
        let tables = (0..config.slots).map(|slot| empty_tables(&groups, Slot(slot))).collect();
        Ok(Self::of_tables(config, groups, tables))
    }

    /// Has the memory of the first rows of each group, 8 MiB and as much for their indexes, made ready by other threads, so that the first
    /// requests do not wait for the kernel, which may take milliseconds a page. For a store that will soon be filled and is in the
    /// process's own memory; with any other nothing happens.
    pub fn make_ready(&self) {
        for group in &self.groups {
            group.memory.make_ready();
            group.indexes.make_ready();
        }
    }

    /// A store of these tables, by slot and group.
    pub(crate) fn of_tables(config: StoreConfig, groups: Vec<Group>, tables: Vec<Box<[Table]>>) -> Self {
        let slot = |tables| SlotCell(Mutex::new(SlotState { tables, replaced: false, frozen: None }));
        Self {
            layouts: groups.iter().map(|group| group.layout).collect(),
            indexes: (0..tables.len() * groups.len()).map(|_| Whereabouts::default()).collect(),
            config,
            groups,
            slots: tables.into_iter().map(slot).collect(),
            saves: Mutex::default(),
            tracking: AtomicBool::new(false),
            work: AtomicU64::new(0),
        }
    }

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

    /// The slot a key belongs to.
    #[must_use]
    pub fn slot_of(&self, key: FeatureKey) -> Slot {
        slot_of(key, self.config.slots)
    }

    /// Reads the embeddings of `keys` into `out`, `[keys.len(), dim]`. Any order is right; keys
    /// sorted by slot (or just sorted) take one lock a slot instead of up to one a key.
    ///
    /// # Errors
    /// An unknown group, or `out` of another length.
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
        self.each_piece(id, keys, group.layout.look_up_words(), |table, Piece { keys: run, hashes, .. }| {
            let out = &mut out[run.start * dim..run.end * dim];
            counts += table.lookup(group, &keys[run], hashes, missing, out);
        });
        Ok(counts)
    }

    /// Applies `gradients`, `[keys.len(), dim]`, to the rows of `keys`, in order; a key that repeats
    /// is updated each time. `update_count` is the number of this update in the whole job, 1-based,
    /// which Adam's bias correction needs; the caller keeps it, and saves it with checkpoints.
    ///
    /// A key without a row (never admitted, or evicted since it was looked up) is counted and
    /// skipped; so is a gradient with a NaN or an infinity. Neither touches any other row.
    ///
    /// # Errors
    /// An unknown group, `gradients` of another length, or an update count of 0.
    pub fn update(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        gradients: &[f32],
        update_count: u64,
    ) -> Result<UpdateCounts, StoreError> {
        self.update_run_by_run(group, keys, gradients, update_count, &mut NoLog, |_, _| {})
    }

    /// As [`Self::update`], as part of the update that `log` has under way: of one that was cut short and is begun again, only what
    /// is still to be done. The counts are those of the whole.
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
        self.update_run_by_run(group, keys, gradients, update_count, log, |log, slot| log.at(group, slot))
    }

    fn update_run_by_run<L: RowLog>(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        gradients: &[f32],
        update_count: u64,
        log: &mut L,
        enter: impl Fn(&mut L, Slot),
    ) -> Result<UpdateCounts, StoreError> {
        let id = group;
        let group = self.group_for("an update", id, keys.len(), gradients.len())?;
        if update_count == 0 {
            return Err(StoreError::UpdateCountZero);
        }
        let dim = group.layout.dim();
        let step = group.spec.optimizer.step(update_count);
        let mut scratch = vec![0.0; group.layout.scratch_len()];
        let mut counts = UpdateCounts::default();
        self.each_piece(id, keys, group.layout.stride(), |table, Piece { slot, keys: run, hashes }| {
            let gradients = &gradients[run.start * dim..run.end * dim];
            enter(log, slot);
            counts += table.update(group, (&keys[run], hashes), gradients, step, &mut scratch, log);
        });
        Ok(counts)
    }

    /// Removes a row; says whether there was one. If the key is met again it starts from its initial
    /// values.
    ///
    /// # Errors
    /// [`StoreError::UnknownGroup`].
    pub fn remove(&self, group: GroupId, key: FeatureKey) -> Result<bool, StoreError> {
        self.group(group)?;
        let mut state = self.slots[self.slot_of(key).0 as usize].lock();
        let record = self.tracking.load(Ordering::Relaxed);
        Ok(state.tables[usize::from(group.0)].remove(key, record))
    }

    /// Whether a key has a row.
    ///
    /// # Errors
    /// [`StoreError::UnknownGroup`].
    pub fn contains(&self, group: GroupId, key: FeatureKey) -> Result<bool, StoreError> {
        self.group(group)?;
        let state = self.slots[self.slot_of(key).0 as usize].lock();
        Ok(state.tables[usize::from(group.0)].contains(key))
    }

    /// Drops every row of a slot, as when the slot has moved elsewhere; says how many there were.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn clear_slot(&self, slot: Slot) -> Result<u64, StoreError> {
        let empty = empty_tables(&self.groups, slot);
        let old = self.cell(slot)?.lock().replace(empty);
        self.has_worked();
        Ok(rows_of(&old))
    }

    /// The slot's rows at this instant, as bytes. The slot is locked while its memory is copied, not
    /// while it is sorted and written out.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn snapshot_slot(&self, slot: Slot) -> Result<SlotSnapshot, StoreError> {
        let rows = self.copy_slot(slot)?;
        Ok(snapshot::write(&self.config, slot, &rows))
    }

    /// Takes in a snapshot. If it holds the whole slot, the rows of the slot that it names are
    /// replaced by the snapshot's, and the slot then behaves, to the bit, as it did where the snapshot
    /// was taken. If it holds changes, the rows it says were removed are removed and its rows put in
    /// the place of those of their keys, or added; whether the slot's contents are those that the
    /// changes start from is the caller's to know. If the bytes are refused nothing changes.
    ///
    /// # Errors
    /// [`StoreError::Snapshot`], naming what is wrong: format, version, length, checksum, or a job
    /// with other slots, seed, row groups or optimizers than this store's.
    pub fn restore_slot(&self, bytes: &[u8]) -> Result<RestoredSlot, StoreError> {
        let snapshot = snapshot::read(&self.config, bytes)?;
        let mut restored = RestoredSlot { slot: snapshot.slot, content: snapshot.content, rows: 0, removed: 0 };
        match snapshot.content {
            SlotContent::Whole => {
                let mut tables = Vec::with_capacity(self.groups.len());
                for (group, rows) in self.groups.iter().zip(&snapshot.groups) {
                    let too_many = || SnapshotError::TooManyRows { rows: rows.len() / row_bytes(&group.layout) };
                    tables.push(Table::from_rows(group, snapshot.slot, rows).ok_or_else(too_many)?);
                }
                let tables: Box<[Table]> = tables.into_boxed_slice();
                restored.rows = rows_of(&tables);
                let old = self.cell(snapshot.slot)?.lock().replace(tables);
                drop(old);
            }
            SlotContent::Changes => {
                let mut state = self.cell(snapshot.slot)?.lock();
                let sizes = self.layouts.iter().map(row_bytes);
                let added = || snapshot.groups.iter().zip(sizes.clone()).map(|(rows, size)| rows.len() / size);
                for (table, added) in state.tables.iter().zip(added()) {
                    let rows = table.rows() + added;
                    if rows >= u32::MAX as usize {
                        return Err(SnapshotError::TooManyRows { rows }.into());
                    }
                }
                let record = self.tracking.load(Ordering::Relaxed);
                for (position, table) in state.tables.iter_mut().enumerate() {
                    for &key in &snapshot.removed[position] {
                        table.remove(key, record);
                    }
                    for row in snapshot.groups[position].chunks_exact(row_bytes(&self.layouts[position])) {
                        table
                            .put(&self.groups[position], row)
                            .ok_or(SnapshotError::TooManyRows { rows: table.rows() })?;
                    }
                }
                restored.rows = added().sum::<usize>() as u64;
                restored.removed = snapshot.removed.iter().map(|keys| keys.len() as u64).sum();
            }
        }
        self.has_worked();
        Ok(restored)
    }

    /// The configuration of the store that wrote a snapshot, for a reader that knows nothing of the
    /// job.
    ///
    /// # Errors
    /// [`SnapshotError`], if the bytes are not a snapshot.
    pub fn config_of_snapshot(bytes: &[u8]) -> Result<StoreConfig, SnapshotError> {
        snapshot::config_of(bytes)
    }

    /// SHA-256 over the slot's rows by rising (key, group): for each its key (u64), group (u16),
    /// values as their stored bytes and optimizer state, little-endian. Scores and timestamps are
    /// left out. Equal contents have equal digests however they came about.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn slot_digest(&self, slot: Slot) -> Result<Digest, StoreError> {
        let rows = self.copy_slot(slot)?;
        let mut hasher = Sha256::new();
        for (key, group, row) in rows.in_key_order(&self.layouts) {
            let layout = &self.layouts[usize::from(group.0)];
            hasher.update(key.0.to_le_bytes());
            hasher.update(group.0.to_le_bytes());
            hasher.update(layout.value_bytes(row));
            hasher.update(bytemuck::cast_slice::<f32, u8>(layout.state(row)));
        }
        self.has_worked();
        Ok(hasher.finalize().into())
    }

    /// The digests of a range of slots, in order.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn digests(&self, slots: Range<u32>) -> Result<Vec<Digest>, StoreError> {
        slots.map(|slot| self.slot_digest(Slot(slot))).collect()
    }

    /// Calls `visit` with group, key, values and optimizer state of the slot's rows at this instant,
    /// by rising (key, group). The slot is not locked meanwhile.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn for_each_row(
        &self,
        slot: Slot,
        mut visit: impl FnMut(GroupId, FeatureKey, &[f32], &[f32]),
    ) -> Result<(), StoreError> {
        let rows = self.copy_slot(slot)?;
        let largest = self.layouts.iter().map(RowLayout::dim).max();
        let mut values = vec![0.0; largest.unwrap_or(0)];
        for (key, group, row) in rows.in_key_order(&self.layouts) {
            let layout = &self.layouts[usize::from(group.0)];
            let values = &mut values[..layout.dim()];
            layout.read_values(row, values);
            visit(group, key, values, layout.state(row));
        }
        Ok(())
    }

    /// Rises with every slot that is cleared, restored, saved or digested. To go through all slots takes long where there are many rows:
    /// by this number whoever waits for it knows that it goes on.
    #[must_use]
    pub fn work_done(&self) -> u64 {
        self.work.load(Ordering::Relaxed)
    }

    /// A slot was gone through.
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

    /// Memory held.
    #[must_use]
    pub fn bytes(&self) -> StoreBytes {
        let table_bytes = self.groups.len() * (size_of::<Table>() + size_of::<Whereabouts>()) + size_of::<SlotCell>();
        let (mut payload, mut used) = (0, 0);
        for cell in &self.slots {
            used += table_bytes;
            for (table, layout) in cell.lock().tables.iter().zip(&self.layouts) {
                payload += table.rows() * layout.payload_bytes();
                used += table.bytes();
            }
        }
        let free =
            self.groups.iter().map(|group| group.memory.free_bytes() + group.indexes.free_bytes()).sum::<usize>();
        StoreBytes { payload: payload as u64, overhead: (used - payload) as u64, free: free as u64 }
    }

    /// Whether rows of a store in shared memory had to be put elsewhere, because it was full: they end with the process.
    #[must_use]
    pub fn is_shared_memory_full(&self) -> bool {
        self.groups.iter().any(|group| group.memory.is_incomplete())
    }

    pub(crate) fn group(&self, group: GroupId) -> Result<&Group, StoreError> {
        let groups = self.groups.len();
        self.groups.get(usize::from(group.0)).ok_or(StoreError::UnknownGroup { group, groups })
    }

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
        self.slots.get(slot.0 as usize).ok_or(StoreError::UnknownSlot { slot, slots })
    }

    pub(crate) fn layouts(&self) -> &[RowLayout] {
        &self.layouts
    }

    pub(crate) fn copy_slot(&self, slot: Slot) -> Result<SlotRows, StoreError> {
        let state = self.cell(slot)?.lock();
        Ok(SlotRows { groups: state.tables.iter().map(Table::copy_rows).collect(), removed: None })
    }
}

fn empty_tables(groups: &[Group], slot: Slot) -> Box<[Table]> {
    groups.iter().map(|group| Table::new(group, slot)).collect()
}

/// Bytes of a whole row.
fn row_bytes(layout: &RowLayout) -> usize {
    layout.stride() * size_of::<u32>()
}

fn rows_of(tables: &[Table]) -> u64 {
    tables.iter().map(|table| table.rows() as u64).sum()
}
