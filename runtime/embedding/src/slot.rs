//! The slots of a store: for each a table per group behind one lock, and the slot's part in a save.

use crate::index::IndexAddress;
use crate::side_table::SideTable;
use crate::snapshot::SlotRows;
use crate::table::Table;
use crate::{FeatureKey, GroupId, Slot, slot_of};

use parking_lot::{Mutex, MutexGuard};
/// All slots of a store, and the addresses of their tables' indexes, which are read without a lock.
pub(crate) struct Slots {
    cells: Box<[SlotCell]>,
    /// By slot, then by group.
    indexes: Box<[IndexAddress]>,
    groups: usize,
}

/// One slot, on cache lines of its own.
#[repr(align(64))]
pub(crate) struct SlotCell(Mutex<SlotState>);

/// The state behind a slot's lock.
pub(crate) struct SlotState {
    /// By group.
    pub(crate) tables: Box<[Table]>,
    /// Whether all tables were replaced since the last mark. The bits of changed rows then say
    /// nothing, and the slot is saved whole.
    replaced: bool,
    frozen: Option<FrozenSlot>,
}

/// A slot's part in a save.
struct FrozenSlot {
    /// Whether the slot's tables had been replaced between the mark before and the freeze.
    replaced: bool,
    changes_only: bool,
    rows: FrozenRows,
}

/// The rows of a slot at the instant of the freeze.
enum FrozenRows {
    /// In the tables, which keep each row aside before it changes.
    InTables,
    /// Copied out of tables that were replaced.
    Copied(SlotRows),
    Saved,
}

impl Slots {
    /// Slots with these tables, by slot and group.
    pub(crate) fn new(tables: Vec<Box<[Table]>>, groups: usize) -> Self {
        Self {
            indexes: (0..tables.len() * groups).map(|_| IndexAddress::default()).collect(),
            cells: tables.into_iter().map(SlotCell::new).collect(),
            groups,
        }
    }

    /// Bytes of one slot beyond the memory of its tables.
    pub(crate) fn bytes_per_slot(&self) -> usize {
        self.groups * (size_of::<Table>() + size_of::<IndexAddress>()) + size_of::<SlotCell>()
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, SlotCell> {
        self.cells.iter()
    }

    /// `None` if there is no such slot.
    pub(crate) fn get(&self, slot: Slot) -> Option<&SlotCell> {
        self.cells.get(slot.0 as usize)
    }

    pub(crate) fn slot_of(&self, key: FeatureKey) -> Slot {
        slot_of(key, self.cells.len() as u32)
    }

    /// The slot that `key` belongs to.
    pub(crate) fn of_key(&self, key: FeatureKey) -> &SlotCell {
        self.cell(self.slot_of(key))
    }

    /// A slot that exists.
    pub(crate) fn cell(&self, slot: Slot) -> &SlotCell {
        &self.cells[slot.0 as usize]
    }

    /// The address of the index of an existing slot's table.
    pub(crate) fn index_of(&self, slot: Slot, group: GroupId) -> &IndexAddress {
        &self.indexes[slot.0 as usize * self.groups + usize::from(group.0)]
    }
}

impl SlotCell {
    fn new(tables: Box<[Table]>) -> Self {
        Self(Mutex::new(SlotState { tables, replaced: false, frozen: None }))
    }

    /// A panic under the lock (out of memory, a bug) poisons it. Code that can panic never leaves a
    /// table in pieces, so the lock is taken all the same.
    pub(crate) fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.0.lock()
    }

    /// The lock, unless another thread has it.
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, SlotState>> {
        self.0.try_lock()
    }
}

impl SlotState {
    /// Replaces all tables and returns the old ones, after copying the rows of a freeze out of
    /// them.
    pub(crate) fn replace(&mut self, tables: Box<[Table]>) -> Box<[Table]> {
        if let Some(frozen) = &mut self.frozen {
            frozen.copy_out(&mut self.tables);
        }
        self.replaced = true;
        std::mem::replace(&mut self.tables, tables)
    }

    /// A copy of all rows.
    pub(crate) fn copy_rows(&self) -> SlotRows {
        SlotRows {
            groups: self.tables.iter().map(Table::copy_rows).collect(),
            side: self.tables.iter().map(|table| table.side().map_or_else(Vec::new, SideTable::copy)).collect(),
            removed: None,
        }
    }

    /// Fixes this instant for a save and sets a mark: later changes belong to the next save.
    pub(crate) fn freeze(&mut self, changes_only: bool) {
        self.tables.iter_mut().for_each(Table::freeze);
        let replaced = std::mem::take(&mut self.replaced);
        self.frozen = Some(FrozenSlot { replaced, changes_only, rows: FrozenRows::InTables });
    }

    /// The rows at the freeze. `None` if the slot is not frozen or its rows were taken already.
    pub(crate) fn take_frozen(&mut self) -> Option<SlotRows> {
        let frozen = self.frozen.as_mut()?;
        match std::mem::replace(&mut frozen.rows, FrozenRows::Saved) {
            FrozenRows::InTables => Some(frozen.copy(&mut self.tables)),
            FrozenRows::Copied(rows) => Some(rows),
            FrozenRows::Saved => None,
        }
    }

    /// Ends the freeze. If the save failed, the changes before it count as changes again.
    pub(crate) fn thaw(&mut self, saved: bool) {
        self.tables.iter_mut().for_each(|table| table.thaw(saved));
        if let Some(frozen) = self.frozen.take()
            && !saved
        {
            self.replaced |= frozen.replaced;
        }
    }

    /// Sets a mark: the present contents count as saved.
    pub(crate) fn mark(&mut self) {
        self.tables.iter_mut().for_each(Table::mark);
        self.replaced = false;
    }
}

impl FrozenSlot {
    /// Copies the rows out of tables that are about to be replaced.
    fn copy_out(&mut self, tables: &mut [Table]) {
        if matches!(self.rows, FrozenRows::InTables) {
            self.rows = FrozenRows::Copied(self.copy(tables));
        }
    }

    fn copy(&self, tables: &mut [Table]) -> SlotRows {
        let changes = self.changes_only && !self.replaced;
        SlotRows {
            groups: tables.iter_mut().map(|table| table.frozen_rows(changes)).collect(),
            side: tables.iter_mut().map(|table| table.frozen_side(changes)).collect(),
            removed: changes.then(|| tables.iter().map(|table| table.frozen_removed().to_vec()).collect()),
        }
    }
}
