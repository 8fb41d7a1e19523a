//! Saving a store while it is in use: [`Store::freeze`] fixes an instant, [`FrozenStore::save_slot`]
//! gives the rows of that instant slot by slot, and look-ups and updates go on meanwhile. Checkpoints
//! call it; it writes no file.
//!
//! Copy on write, row by row: a row that has not been saved yet is kept aside before it changes for
//! the first time after the instant, so what a freeze costs is memory for the rows that change before
//! their slot is saved, and nobody waits for more than the copying of one slot. (Copying whole slots
//! would be no better than copying the store: keys are spread over slots evenly, so one batch
//! touches nearly all of them.)
//!
//! The same marks tell what changed between two saves. A save is counted as a base for later changes
//! when it is [completed](FrozenStore::complete). One that is given up moves no mark: what had changed
//! before it counts as changed still. Because rows are saved whole, changes since an earlier base
//! are right on top of a later one too, and so a base stays usable while one does not know whether a
//! save after it was completed elsewhere.

use crate::snapshot::{self, SlotRows, SlotSnapshot};
use crate::store::SlotState;
use crate::table::Table;
use crate::{Slot, Store, StoreError};
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

/// Names a save: a random number, the same in all processes that save at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SaveId(pub u128);

impl fmt::Display for SaveId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

/// What is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveScope {
    /// All rows.
    Everything,
    /// Rows that changed since an earlier save, and the keys of rows that were removed since then.
    ChangesSince(SaveId),
}

/// Bases remembered at most: the last completed save, and saves after it whose end is not known.
const MOST_BASES: usize = 16;

/// Which saves the marks in the tables are good for.
#[derive(Default)]
pub(crate) struct Saves {
    frozen: bool,
    /// Whether everything since the freeze was tracked.
    tracked: bool,
    bases: Vec<SaveId>,
}

/// A slot's part in a freeze.
pub(crate) struct FrozenSlot {
    /// Whether the slot's tables had been replaced between the mark before and the freeze.
    replaced: bool,
    changes_only: bool,
    rows: FrozenRows,
}

enum FrozenRows {
    /// In the tables, which keep what changes.
    InTables,
    /// Copied out, because the tables went.
    Kept(SlotRows),
    Saved,
}

impl FrozenSlot {
    /// Copies the rows out of tables that are about to go.
    pub(crate) fn keep(&mut self, tables: &mut [Table]) {
        if matches!(self.rows, FrozenRows::InTables) {
            self.rows = FrozenRows::Kept(self.copy(tables));
        }
    }

    fn copy(&self, tables: &mut [Table]) -> SlotRows {
        let changes = self.changes_only && !self.replaced;
        SlotRows {
            groups: tables.iter_mut().map(|table| table.frozen_rows(changes)).collect(),
            removed: changes.then(|| tables.iter().map(|table| table.frozen_removed().to_vec()).collect()),
        }
    }
}

impl SlotState {
    fn freeze(&mut self, changes_only: bool) {
        self.tables.iter_mut().for_each(Table::freeze);
        let replaced = std::mem::take(&mut self.replaced);
        self.frozen = Some(FrozenSlot { replaced, changes_only, rows: FrozenRows::InTables });
    }

    fn thaw(&mut self, saved: bool) {
        self.tables.iter_mut().for_each(|table| table.thaw(saved));
        if let Some(frozen) = self.frozen.take().filter(|_| !saved) {
            self.replaced |= frozen.replaced;
        }
    }

    fn mark(&mut self) {
        self.tables.iter_mut().for_each(Table::mark);
        self.replaced = false;
    }
}

impl Store {
    /// Whether the keys of removed rows are remembered until the next completed save, so that changes
    /// can be saved: 8 bytes a removed row. Off at first. Which rows changed is always known (a bit
    /// a row). Turning it off forgets the bases.
    pub fn track_changes(&self, on: bool) {
        let mut saves = self.saves();
        self.tracking.store(on, Ordering::Relaxed);
        if !on {
            saves.bases.clear();
            saves.tracked = false;
        }
    }

    /// Notes that the store's contents are just those of a save, as after a restore of all that this
    /// store holds: what changes from here on are the changes since it.
    ///
    /// # Errors
    /// [`StoreError::FrozenAlready`].
    pub fn mark_saved(&self, save: SaveId) -> Result<(), StoreError> {
        let mut saves = self.saves();
        if saves.frozen {
            return Err(StoreError::FrozenAlready);
        }
        self.slots.iter().for_each(|cell| cell.lock().mark());
        saves.bases.clear();
        if self.tracking.load(Ordering::Relaxed) {
            saves.bases.push(save);
        }
        Ok(())
    }

    /// Whether the changes since a save can be saved.
    #[must_use]
    pub fn knows_changes_since(&self, save: SaveId) -> bool {
        self.saves().bases.contains(&save)
    }

    /// Fixes this instant for saving. All slots are of one instant: their locks are held together,
    /// while a flag and a bitmap are set in each (microseconds a slot; no row is copied). An update
    /// that is under way in another thread may be in half of its slots: who wants saves at a step's
    /// end calls this between steps.
    ///
    /// # Errors
    /// [`StoreError::FrozenAlready`] if another save is under way, [`StoreError::ChangesUnknown`] if
    /// changes since a save are asked for that this store does not know as a base.
    pub fn freeze(self: &Arc<Self>, save: SaveId, scope: SaveScope) -> Result<FrozenStore, StoreError> {
        let mut saves = self.saves();
        if saves.frozen {
            return Err(StoreError::FrozenAlready);
        }
        if let SaveScope::ChangesSince(since) = scope
            && !saves.bases.contains(&since)
        {
            return Err(StoreError::ChangesUnknown { since });
        }
        let changes_only = scope != SaveScope::Everything;
        let mut all: Vec<MutexGuard<'_, SlotState>> = self.slots.iter().map(|cell| cell.lock()).collect();
        all.iter_mut().for_each(|state| state.freeze(changes_only));
        drop(all);
        saves.frozen = true;
        saves.tracked = self.tracking.load(Ordering::Relaxed);
        drop(saves);
        Ok(FrozenStore { store: Arc::clone(self), save, done: false })
    }

    fn saves(&self) -> MutexGuard<'_, Saves> {
        self.saves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn thaw(&self, save: SaveId, saved: bool) {
        let mut saves = self.saves();
        self.slots.iter().for_each(|cell| cell.lock().thaw(saved));
        saves.frozen = false;
        if saved {
            saves.bases.clear();
        }
        if saves.tracked {
            saves.bases.push(save);
        }
        let surplus = saves.bases.len().saturating_sub(MOST_BASES);
        saves.bases.drain(..surplus);
    }
}

/// A store of which one instant is being saved. Dropping it gives the save up.
pub struct FrozenStore {
    store: Arc<Store>,
    save: SaveId,
    done: bool,
}

impl FrozenStore {
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    #[must_use]
    pub fn save(&self) -> SaveId {
        self.save
    }

    /// The slot as it was at the freeze: whole, or its changes if changes are saved and the slot was
    /// not replaced since the base. The slot is locked while its rows are copied, not while they are
    /// sorted and written out.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`]; [`StoreError::SavedAlready`] for a second call with one slot.
    pub fn save_slot(&self, slot: Slot) -> Result<SlotSnapshot, StoreError> {
        let rows = {
            let mut state = self.store.cell(slot)?.lock();
            let SlotState { tables, frozen, .. } = &mut *state;
            let frozen = frozen.as_mut().ok_or(StoreError::SavedAlready { slot })?;
            match std::mem::replace(&mut frozen.rows, FrozenRows::Saved) {
                FrozenRows::InTables => frozen.copy(tables),
                FrozenRows::Kept(rows) => rows,
                FrozenRows::Saved => return Err(StoreError::SavedAlready { slot }),
            }
        };
        let snapshot = snapshot::write(&self.store.config, slot, &rows);
        self.store.has_worked();
        Ok(snapshot)
    }

    /// The save is complete everywhere: later changes are counted from its instant.
    pub fn complete(mut self) {
        self.done = true;
        self.store.thaw(self.save, true);
    }
}

impl Drop for FrozenStore {
    fn drop(&mut self) {
        if !self.done {
            self.store.thaw(self.save, false);
        }
    }
}
