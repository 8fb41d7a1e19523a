//! What moving a slot to another process needs besides [`Store::snapshot_slot`] and [`Store::restore_slot`]: a slot in parts that a message
//! may hold, rows of some keys as changes, and what a slot weighs.

use crate::snapshot::{self, SlotRows, SlotSnapshot};
use crate::{FeatureKey, GroupId, Slot, Store, StoreError};

impl Store {
    /// The slot's rows at this instant, in parts with at most so many bytes of rows, or with one row if that has more: the first part is a
    /// whole slot of its rows, the others are changes that add the rest. Taken in in this order they bring a slot to the state of this one.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn snapshot_slot_in_parts(&self, slot: Slot, most_bytes: usize) -> Result<Vec<SlotSnapshot>, StoreError> {
        let rows = self.copy_slot(slot)?;
        let most_words = most_bytes / size_of::<u32>();
        if rows.groups.iter().map(Vec::len).sum::<usize>() <= most_words {
            return Ok(vec![snapshot::write(&self.config, slot, &rows)]);
        }
        let nothing = || SlotRows { groups: vec![Vec::new(); self.config.groups.len()], removed: None };
        let (mut part, mut left, mut parts) = (nothing(), most_words, Vec::new());
        for (group, (rows, layout)) in rows.groups.into_iter().zip(self.layouts()).enumerate() {
            let mut rest = &*rows;
            while !rest.is_empty() {
                if left < layout.stride() && part.groups.iter().any(|rows| !rows.is_empty()) {
                    parts.push(self.write_part(slot, std::mem::replace(&mut part, nothing()), parts.is_empty()));
                    left = most_words;
                }
                let fitting = (left / layout.stride()).max(1) * layout.stride();
                let (now, later) = rest.split_at(fitting.min(rest.len()));
                part.groups[group].extend_from_slice(now);
                left = left.saturating_sub(now.len());
                rest = later;
            }
        }
        parts.push(self.write_part(slot, part, parts.is_empty()));
        Ok(parts)
    }

    fn write_part(&self, slot: Slot, rows: SlotRows, is_first: bool) -> SlotSnapshot {
        let removed = if is_first { None } else { Some(vec![Vec::new(); rows.groups.len()]) };
        snapshot::write(&self.config, slot, &SlotRows { removed, ..rows })
    }

    /// So many rows of any groups have at most so many bytes together, or are one row.
    #[must_use]
    pub fn rows_within(&self, bytes: usize) -> usize {
        let largest = self.layouts().iter().map(|layout| layout.stride() * size_of::<u32>()).max();
        (bytes / largest.unwrap_or(1)).max(1)
    }

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
