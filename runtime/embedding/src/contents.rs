//! The contents of a store's slots: snapshots, restores, digests and visits.

use crate::key::key_of_bytes;
use crate::layout::META_WORD;
use crate::snapshot::{self, CheckedSnapshot, RestoredSlot, SlotRows, SlotSnapshot, blocks_in_order};
use crate::store::{empty_tables, rows_of};
use crate::table::Table;
use crate::{
    FeatureKey, GroupId, LifePolicy, RowSpec, RowWord, Slot, SlotContent, SnapshotError, Store, StoreConfig, StoreError,
};
use sha2::{Digest as _, Sha256};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// A SHA-256 of rows.
pub type Digest = [u8; 32];

impl Store {
    /// Drops every row of a slot, as after the slot moved to another process; returns their number.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn clear_slot(&self, slot: Slot) -> Result<u64, StoreError> {
        let empty = empty_tables(&self.groups, slot);
        let old = self.cell(slot)?.lock().replace(empty);
        self.has_worked();
        Ok(rows_of(&old))
    }

    /// The slot's rows at this instant, as bytes. The slot is locked while its memory is copied,
    /// not while it is sorted and written out.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn snapshot_slot(&self, slot: Slot) -> Result<SlotSnapshot, StoreError> {
        let rows = self.copy_slot(slot)?;
        Ok(snapshot::write(&self.config, slot, &rows))
    }

    /// Restores a snapshot.
    ///
    /// A whole slot replaces the rows of its slot, which then behaves, to the bit, as it did when
    /// the snapshot was taken. Changes remove the rows of their removed keys, and replace or add
    /// their rows. The caller ensures that the slot's contents are the ones that the changes start
    /// from. If the bytes are refused nothing changes.
    ///
    /// # Errors
    /// [`StoreError::Snapshot`], with the cause: format, version, length, checksum, or a job with
    /// other slots, seed, row groups or optimizers than this store's.
    pub fn restore_slot(&self, bytes: &[u8]) -> Result<RestoredSlot, StoreError> {
        let snapshot = snapshot::read(&self.config, bytes)?;
        let restored = snapshot.counts(&self.config);
        self.put_snapshot(&snapshot)?;
        Ok(restored)
    }

    /// Restores a snapshot of a store with other row groups, seed or initial values than this
    /// one's. `groups` has, for each group of the other store, this store's group that takes its
    /// rows. The rows of a group without one are dropped, and so are the sightings of keys without
    /// a row. Otherwise as [`Self::restore_slot`]. The snapshot gives the counts, so dropped rows
    /// are included.
    ///
    /// # Errors
    /// [`StoreError::Snapshot`], with the cause: as for `restore_slot`. Also if a group cannot take
    /// the rows: its dimension, value type, optimizer or policy differs.
    pub fn adopt_slot(&self, bytes: &[u8], groups: &[Option<GroupId>]) -> Result<RestoredSlot, StoreError> {
        let saved = snapshot::config_of(bytes)?;
        self.check_adoption(&saved, groups)?;
        let snapshot = snapshot::read(&saved, bytes)?;
        let restored = snapshot.counts(&saved);
        let mut rows = vec![Vec::new(); self.groups.len()];
        let mut removed = vec![Vec::new(); self.groups.len()];
        for (position, own) in groups.iter().enumerate() {
            let Some(own) = own.map(|group| usize::from(group.0)) else { continue };
            rows[own].push(snapshot.groups[position]);
            removed[own].extend_from_slice(&snapshot.removed[position]);
        }
        let layouts = self.layouts.iter();
        let rows: Vec<Cow<'_, [u8]>> =
            rows.into_iter().zip(layouts).map(|(parts, layout)| merged(&parts, layout.row_bytes())).collect();
        let adopted = CheckedSnapshot {
            slot: snapshot.slot,
            content: snapshot.content,
            groups: rows.iter().map(|rows| &**rows).collect(),
            side: vec![Vec::new(); self.groups.len()],
            removed,
        };
        self.put_snapshot(&adopted)?;
        Ok(restored)
    }

    /// Whether each group of the store `saved` can give its rows to the group of this one.
    fn check_adoption(&self, saved: &StoreConfig, groups: &[Option<GroupId>]) -> Result<(), SnapshotError> {
        if saved.slots != self.config.slots {
            return Err(SnapshotError::Slots { found: saved.slots, expected: self.config.slots });
        }
        if saved.groups.len() != groups.len() {
            return Err(SnapshotError::Groups { found: saved.groups.len(), expected: groups.len() });
        }
        for (spec, group) in saved.groups.iter().zip(groups) {
            let Some(group) = *group else { continue };
            let expected = self.config.groups.get(usize::from(group.0));
            let expected = expected
                .ok_or(SnapshotError::Groups { found: usize::from(group.0) + 1, expected: self.config.groups.len() })?;
            // Only new rows get initial values. Rows of a store that keeps all of them begin their
            // life here, with a word of 0.
            let life = if spec.life == LifePolicy::KeepAll { expected.life } else { spec.life };
            let same_start = RowSpec { initializer: expected.initializer, life, ..*spec };
            if !expected.continues(&same_start) {
                let (found, expected) = (Box::new(*spec), Box::new(*expected));
                return Err(SnapshotError::Spec { group, found, expected });
            }
        }
        Ok(())
    }

    fn put_snapshot(&self, snapshot: &CheckedSnapshot<'_>) -> Result<(), StoreError> {
        match snapshot.content {
            SlotContent::Whole => self.replace_slot(snapshot)?,
            SlotContent::Changes => self.change_slot(snapshot)?,
        }
        self.has_worked();
        Ok(())
    }

    fn replace_slot(&self, snapshot: &CheckedSnapshot<'_>) -> Result<(), StoreError> {
        let mut tables = Vec::with_capacity(self.groups.len());
        for (group, rows) in self.groups.iter().zip(&snapshot.groups) {
            let too_many = || SnapshotError::TooManyRows { rows: rows.len() / group.layout.row_bytes() };
            tables.push(Table::from_rows(group, snapshot.slot, rows).ok_or_else(too_many)?);
        }
        self.put_side(&mut tables, snapshot);
        let old = self.cell(snapshot.slot)?.lock().replace(tables.into_boxed_slice());
        // The old tables are freed without the lock.
        drop(old);
        Ok(())
    }

    fn change_slot(&self, snapshot: &CheckedSnapshot<'_>) -> Result<(), StoreError> {
        let mut state = self.cell(snapshot.slot)?.lock();
        let record = self.tracking.load(Ordering::Relaxed);
        for ((table, rows), layout) in state.tables.iter().zip(&snapshot.groups).zip(&self.layouts) {
            let rows = table.rows() + rows.len() / layout.row_bytes();
            if rows >= u32::MAX as usize {
                return Err(SnapshotError::TooManyRows { rows }.into());
            }
        }
        for (position, table) in state.tables.iter_mut().enumerate() {
            let group = &self.groups[position];
            for &key in &snapshot.removed[position] {
                table.remove(key, record);
            }
            for row in snapshot.groups[position].chunks_exact(group.layout.row_bytes()) {
                table.put(group, row).ok_or(SnapshotError::TooManyRows { rows: table.rows() })?;
            }
        }
        self.put_side(&mut state.tables, snapshot);
        Ok(())
    }

    /// Puts a snapshot's blocks into the side tables of its slot.
    fn put_side(&self, tables: &mut [Table], snapshot: &CheckedSnapshot<'_>) {
        for ((table, blocks), group) in tables.iter_mut().zip(&snapshot.side).zip(&self.groups) {
            if let Some(side) = &group.side {
                blocks.chunks_exact(side.layout.stride()).for_each(|block| table.put_side(block));
            }
        }
    }

    /// The configuration of the store that wrote a snapshot, for a reader that has no manifest.
    ///
    /// # Errors
    /// [`SnapshotError`] if the bytes are no snapshot.
    pub fn config_of_snapshot(bytes: &[u8]) -> Result<StoreConfig, SnapshotError> {
        snapshot::config_of(bytes)
    }

    /// SHA-256 over the contents of the slot, all numbers little-endian. Equal contents have equal
    /// digests, whatever calls made them. It covers:
    ///
    /// - The rows, by rising (key, group): key (u64), group (u16), the policy's word (u32) if the
    ///   group's [policy](crate::LifePolicy) uses it, values as their stored bytes, and optimizer
    ///   state.
    /// - Then the blocks of the side tables, by rising (group, number): group (u16), number (u32)
    ///   and words.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn slot_digest(&self, slot: Slot) -> Result<Digest, StoreError> {
        let rows = self.copy_slot(slot)?;
        let mut hasher = Sha256::new();
        for row in rows.in_key_order(&self.layouts) {
            let layout = &self.layouts[usize::from(row.group.0)];
            hasher.update(row.key.0.to_le_bytes());
            hasher.update(row.group.0.to_le_bytes());
            if self.config.groups[usize::from(row.group.0)].life.uses_row_word() {
                hasher.update(row.words[META_WORD].to_le_bytes());
            }
            hasher.update(layout.value_bytes(row.words));
            hasher.update(bytemuck::cast_slice::<f32, u8>(layout.state(row.words)));
        }
        for ((position, group), blocks) in self.groups.iter().enumerate().zip(&rows.side) {
            let Some(side) = &group.side else { continue };
            for block in blocks_in_order(blocks, side.layout.stride()) {
                hasher.update((position as u16).to_le_bytes());
                hasher.update(bytemuck::cast_slice::<u32, u8>(block));
            }
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

    /// Calls `visit` with group, key, values and optimizer state of the slot's rows at this
    /// instant, by rising (key, group). The slot is not locked meanwhile.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn for_each_row(
        &self,
        slot: Slot,
        mut visit: impl FnMut(GroupId, FeatureKey, &[f32], &[f32]),
    ) -> Result<(), StoreError> {
        let rows = self.copy_slot(slot)?;
        let largest = self.layouts.iter().map(|layout| layout.dim()).max();
        let mut values = vec![0.0; largest.unwrap_or(0)];
        for row in rows.in_key_order(&self.layouts) {
            let layout = &self.layouts[usize::from(row.group.0)];
            let values = &mut values[..layout.dim()];
            layout.read_values(row.words, values);
            visit(row.group, row.key, values, layout.state(row.words));
        }
        Ok(())
    }

    /// The words of the slot's rows, in the order in which [`Self::for_each_row`] visits them.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn row_words(&self, slot: Slot) -> Result<Vec<(GroupId, RowWord)>, StoreError> {
        let rows = self.copy_slot(slot)?;
        let words = rows.in_key_order(&self.layouts);
        Ok(words.into_iter().map(|row| (row.group, RowWord(row.words[META_WORD]))).collect())
    }

    /// A copy of the slot's rows, taken under its lock.
    pub(crate) fn copy_slot(&self, slot: Slot) -> Result<SlotRows, StoreError> {
        Ok(self.cell(slot)?.lock().copy_rows())
    }
}

/// The rows of several groups of one row size, by rising key.
fn merged<'b>(parts: &[&'b [u8]], row_bytes: usize) -> Cow<'b, [u8]> {
    if let [only] = parts {
        return Cow::Borrowed(only);
    }
    let mut rows: Vec<&[u8]> = parts.iter().flat_map(|part| part.chunks_exact(row_bytes)).collect();
    rows.sort_by_key(|row| key_of_bytes(row));
    rows.dedup_by_key(|row| key_of_bytes(row));
    Cow::Owned(rows.concat())
}
