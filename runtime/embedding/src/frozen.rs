//! Saving a store while it is in use. [`Store::freeze`] fixes an instant.
//! [`FrozenStore::save_slot`] returns the rows of that instant slot by slot. Look-ups and updates
//! continue meanwhile. Checkpoints call this module; it writes no file.
//!
//! It copies on write, row by row: before the first change to an unsaved row, the store keeps a
//! copy of it. So a freeze costs memory for the rows that change before their slot is saved. No
//! request waits longer than it takes to copy one slot. Copying whole slots on write would copy the
//! whole store: keys are spread evenly, so one batch touches nearly all slots.

use crate::SaveId;
use crate::saves::{SaveScope, Saves};
use crate::slot::SlotState;
use crate::snapshot::{self, SlotSnapshot};
use crate::{Slot, Store, StoreError};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;
impl Store {
    /// Turns the recording of removals on or off. The store then keeps the key of each removed row
    /// until the next completed save, 8 bytes each, so that changes can be saved. Off at first.
    /// Changed rows are always known, by one bit for each row. Turning it off forgets all bases.
    pub fn track_changes(&self, on: bool) {
        let mut saves = self.saves();
        self.tracking.store(on, Ordering::Relaxed);
        if !on {
            saves.forget();
        }
    }

    /// Records that the store's contents equal save `save`, as after a restore of all slots of this
    /// store. Later changes are the changes since that save.
    ///
    /// # Errors
    /// [`StoreError::FrozenAlready`].
    pub fn mark_saved(&self, save: SaveId) -> Result<(), StoreError> {
        let mut saves = self.saves();
        saves.check(SaveScope::Everything)?;
        self.slots.iter().for_each(|cell| cell.lock().mark());
        saves.set_base(save, self.tracking.load(Ordering::Relaxed));
        Ok(())
    }

    /// Whether the changes since a save can be saved.
    #[must_use]
    pub fn knows_changes_since(&self, save: SaveId) -> bool {
        self.saves().knows(save)
    }

    /// Fixes this instant for saving. All slots are of one instant: their locks are held together
    /// while a flag and a bitmap are set in each, which takes microseconds a slot and copies no
    /// row. Another thread's update may be done with only some of its slots, so a caller that needs
    /// the end of a step freezes between steps.
    ///
    /// # Errors
    /// [`StoreError::FrozenAlready`] if another save is under way; [`StoreError::ChangesUnknown`]
    /// if the changes since this base are unknown.
    pub fn freeze(self: &Arc<Self>, save: SaveId, scope: SaveScope) -> Result<FrozenStore, StoreError> {
        let mut saves = self.saves();
        let changes_only = saves.check(scope)?;
        let mut all: Vec<MutexGuard<'_, SlotState>> = self.slots.iter().map(|cell| cell.lock()).collect();
        all.iter_mut().for_each(|state| state.freeze(changes_only));
        drop(all);
        saves.start(self.tracking.load(Ordering::Relaxed));
        drop(saves);
        Ok(FrozenStore { store: Arc::clone(self), save, done: false })
    }

    fn saves(&self) -> MutexGuard<'_, Saves> {
        self.saves.lock()
    }

    fn thaw(&self, save: SaveId, saved: bool) {
        let mut saves = self.saves();
        self.slots.iter().for_each(|cell| cell.lock().thaw(saved));
        saves.end(save, saved);
    }
}

/// A store while one instant of it is being saved. Dropping it abandons the save.
pub struct FrozenStore {
    store: Arc<Store>,
    save: SaveId,
    done: bool,
}

impl FrozenStore {
    /// The store, which stays in use.
    #[must_use]
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The save under way.
    #[must_use]
    pub fn save(&self) -> SaveId {
        self.save
    }

    /// The slot as it was at the freeze: its changes, if the scope is changes and the slot was not
    /// replaced since the base, else the whole slot. The slot is locked while its rows are copied,
    /// not while they are sorted and written out.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`]; [`StoreError::SavedAlready`] for a second call with one slot.
    pub fn save_slot(&self, slot: Slot) -> Result<SlotSnapshot, StoreError> {
        let rows = self.store.cell(slot)?.lock().take_frozen();
        let rows = rows.ok_or(StoreError::SavedAlready { slot })?;
        let snapshot = snapshot::write(&self.store.config, slot, &rows);
        self.store.has_worked();
        Ok(snapshot)
    }

    /// The save is complete in every process. The next save's changes start from its instant.
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
