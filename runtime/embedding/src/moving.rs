//! What moving a slot to another process needs besides [`Store::snapshot_slot`] and [`Store::restore_slot`]: rows of some keys as
//! changes, and what a slot weighs.

use crate::snapshot::{self, SlotRows, SlotSnapshot};
use crate::{FeatureKey, GroupId, Slot, Store, StoreError};

impl Store {
    /// The rows of some keys of a slot as they are now, as changes: a key without a row is told as removed. Taken in where the slot
    /// was restored before, in the order in which they were taken, changes bring it to the state of this slot. Keys may repeat.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`], [`StoreError::UnknownGroup`].
    pub fn snapshot_rows(&self, slot: Slot, keys: &[(GroupId, FeatureKey)]) -> Result<SlotSnapshot, StoreError> {
        let mut keys = keys.to_vec();
        keys.sort_unstable();
        keys.dedup();
        for (group, _) in &keys {
            self.spec(*group)?;
        }
        let groups = self.config.groups.len();
        let (mut rows, mut removed) = (vec![Vec::new(); groups], vec![Vec::new(); groups]);
        {
            let state = self.cell(slot)?.lock();
            for (group, key) in keys {
                let position = usize::from(group.0);
                match state.tables[position].row_of(key) {
                    Some(row) => rows[position].extend_from_slice(row),
                    None => removed[position].push(key),
                }
            }
        }
        Ok(snapshot::write(&self.config, slot, &SlotRows { groups: rows, removed: Some(removed) }))
    }

    /// Bytes of a slot's rows: embedding values and optimizer state.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn slot_bytes(&self, slot: Slot) -> Result<u64, StoreError> {
        let state = self.cell(slot)?.lock();
        let bytes =
            state.tables.iter().zip(self.layouts()).map(|(table, layout)| table.rows() * layout.payload_bytes());
        Ok(bytes.sum::<usize>() as u64)
    }
}
