//! Moving a slot to another process while it is in use: the slot in parts that fit into messages,
//! the rows of some keys as changes, and the slot's size.

use crate::index::Hash;
use crate::snapshot::{self, SlotRows, SlotSnapshot};
use crate::{FeatureKey, GroupId, Slot, Store, StoreError};
use std::collections::BTreeSet;

impl Store {
    /// The slot at this instant, in parts of at most `most_bytes` of rows, or of one row if that is
    /// longer. The first part is a whole slot of its rows, the others are changes that add the
    /// rest. Restored in this order they give another store this slot.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn snapshot_slot_in_parts(&self, slot: Slot, most_bytes: usize) -> Result<Vec<SlotSnapshot>, StoreError> {
        let copied = self.copy_slot(slot)?;
        let mut parts = PartsOfSlot::new(self.groups.len(), most_bytes / size_of::<u32>());
        for (group, (rows, layout)) in copied.groups.iter().zip(&self.layouts).enumerate() {
            parts.add(rows, layout.stride(), |part| &mut part.groups[group]);
        }
        for (position, (blocks, group)) in copied.side.iter().zip(&self.groups).enumerate() {
            if let Some(side) = &group.side {
                parts.add(blocks, side.layout.stride(), |part| &mut part.side[position]);
            }
        }
        let parts = parts.into_parts().into_iter();
        Ok(parts.map(|part| snapshot::write(&self.config, slot, &part)).collect())
    }

    /// The number of rows of any groups that have at most this many bytes together, at least one. A
    /// row counts with the block of the side table that may travel with it.
    #[must_use]
    pub fn rows_within(&self, bytes: usize) -> usize {
        let size = |group: &crate::group::Group| {
            group.layout.row_bytes() + group.side.as_ref().map_or(0, |side| side.layout.stored_bytes())
        };
        let largest = self.groups.iter().map(size).max();
        (bytes / largest.unwrap_or(1)).max(1)
    }

    /// The rows of some keys of a slot as they are now, as changes. A key without a row counts as
    /// removed. Changes restored on top of a copy of the slot, in the order in which they were
    /// taken, bring the copy to the state of this slot. Keys may repeat.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`], [`StoreError::UnknownGroup`].
    pub fn snapshot_rows(&self, slot: Slot, keys: &[(GroupId, FeatureKey)]) -> Result<SlotSnapshot, StoreError> {
        let mut keys = keys.to_vec();
        keys.sort_unstable();
        keys.dedup();
        for (group, _) in &keys {
            self.group(*group)?;
        }
        let mut rows = SlotRows::none(self.groups.len());
        let mut removed = vec![Vec::new(); self.groups.len()];
        let mut blocks = BTreeSet::new();
        {
            let state = self.cell(slot)?.lock();
            for (group, key) in keys {
                let position = usize::from(group.0);
                let table = &state.tables[position];
                match table.row_of(key) {
                    Some(row) => rows.groups[position].extend_from_slice(row),
                    None => removed[position].push(key),
                }
                if let Some(side) = table.side() {
                    blocks.insert((position, side.layout().number_of(Hash::of(key))));
                }
            }
            for (position, number) in blocks {
                let block = state.tables[position].side().and_then(|side| side.stored(number));
                rows.side[position].extend_from_slice(block.unwrap_or_default());
            }
        }
        rows.removed = Some(removed);
        Ok(snapshot::write(&self.config, slot, &rows))
    }

    /// Bytes of a slot's rows: embedding values and optimizer state.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn slot_bytes(&self, slot: Slot) -> Result<u64, StoreError> {
        let state = self.cell(slot)?.lock();
        let bytes = state.tables.iter().zip(&self.layouts).map(|(table, layout)| table.rows() * layout.payload_bytes());
        Ok(bytes.sum::<usize>() as u64)
    }
}

/// A slot's rows and blocks, divided into parts of bounded size.
struct PartsOfSlot {
    groups: usize,
    most_words: usize,
    full: Vec<SlotRows>,
    part: SlotRows,
    /// Words of `part`.
    words: usize,
}

impl PartsOfSlot {
    fn new(groups: usize, most_words: usize) -> Self {
        Self { groups, most_words, full: Vec::new(), part: SlotRows::none(groups), words: 0 }
    }

    /// Adds items of `stride` words to the list of them that `list` selects in each part.
    fn add(&mut self, items: &[u32], stride: usize, list: impl Fn(&mut SlotRows) -> &mut Vec<u32>) {
        let mut rest = items;
        while !rest.is_empty() {
            let mut left = self.most_words.saturating_sub(self.words);
            if left < stride && self.words > 0 {
                self.begin_part();
                left = self.most_words;
            }
            let fitting = (left / stride).max(1) * stride;
            let (now, later) = rest.split_at(fitting.min(rest.len()));
            list(&mut self.part).extend_from_slice(now);
            self.words += now.len();
            rest = later;
        }
    }

    /// The parts after the first are changes that remove nothing.
    fn begin_part(&mut self) {
        let mut next = SlotRows::none(self.groups);
        next.removed = Some(vec![Vec::new(); self.groups]);
        self.full.push(std::mem::replace(&mut self.part, next));
        self.words = 0;
    }

    fn into_parts(mut self) -> Vec<SlotRows> {
        self.full.push(self.part);
        self.full
    }
}
