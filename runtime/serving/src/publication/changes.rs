//! The changes of several checkpoints, merged into one delta. Pure.

use std::collections::BTreeMap;

use rectrain_embedding::{GroupValues, Slot, SlotContent, SlotValues};

use super::delta::GroupChanges;
use crate::table::{KeyRange, Table};

/// Changes in the order of their checkpoints. The last value of a row counts.
#[derive(Debug)]
pub(super) struct Changes {
    groups: Vec<Group>,
}

#[derive(Debug)]
struct Group {
    dim: usize,
    /// Slots that were given whole: none of their earlier rows is left.
    whole: BTreeMap<u64, KeyRange>,
    /// In the order of the checkpoints.
    rows: Vec<Change>,
    /// The values of changed rows, `[rows, dim]`.
    values: Vec<f32>,
}

/// A row that was changed or removed.
#[derive(Debug)]
struct Change {
    key: u64,
    /// Its place among the values. `None` if it was removed.
    row: Option<usize>,
}

impl Changes {
    /// No changes of row groups with these widths.
    pub(super) fn new(dims: &[usize]) -> Self {
        let group = |dim: &usize| Group { dim: *dim, whole: BTreeMap::new(), rows: Vec::new(), values: Vec::new() };
        Self { groups: dims.iter().map(group).collect() }
    }

    /// Adds the changes of a slot. False if its row groups have other widths.
    #[must_use]
    pub(super) fn add(&mut self, slot: SlotValues) -> bool {
        let keys = keys_of(slot.slot, slot.slots);
        if self.groups.iter().map(|group| group.dim).ne(slot.groups.iter().map(|group| group.dim)) {
            return false;
        }
        for (group, values) in self.groups.iter_mut().zip(slot.groups) {
            if slot.content == SlotContent::Whole {
                group.rows.retain(|row| row.key < keys.first || row.key > keys.last);
                group.whole.insert(keys.first, keys);
            }
            group.add(values);
        }
        true
    }

    /// The merged changes, by row group.
    pub(super) fn finish(self) -> Vec<GroupChanges> {
        self.groups.into_iter().map(Group::finish).collect()
    }
}

impl Group {
    fn add(&mut self, values: GroupValues) {
        self.rows.extend(values.removed.iter().map(|key| Change { key: key.0, row: None }));
        let first = self.values.len() / self.dim.max(1);
        self.rows.extend((first..).zip(&values.keys).map(|(row, key)| Change { key: key.0, row: Some(row) }));
        self.values.extend_from_slice(&values.values);
    }

    fn finish(mut self) -> GroupChanges {
        let (mut removed, mut rows) = (Vec::new(), Table::new(self.dim));
        // Equal keys keep their order.
        self.rows.sort_by_key(|row| row.key);
        for Change { key, row } in self.rows.chunk_by(|one, next| one.key == next.key).filter_map(<[Change]>::last) {
            match row {
                Some(row) => rows.push(*key, &self.values[row * self.dim..(row + 1) * self.dim]),
                None => removed.push(KeyRange { first: *key, last: *key }),
            }
        }
        let is_apart = |range: &KeyRange| {
            let before = self.whole.range(..=range.first).next_back();
            before.is_none_or(|(_, whole)| whole.last < range.first)
        };
        removed.retain(is_apart);
        removed.extend(self.whole.values());
        removed.sort_unstable();
        GroupChanges { removed, rows }
    }
}

/// The keys of a slot.
pub(super) fn keys_of(slot: Slot, slots: u32) -> KeyRange {
    KeyRange::of_part(slot.0, slots)
}

#[cfg(test)]
mod tests {
    use rectrain_embedding::{FeatureKey, slot_of};

    use super::*;

    const SLOTS: u32 = 4;
    /// The first key of slot 1.
    const SLOT_1: u64 = 1 << 62;

    fn change(slot: u32, content: SlotContent, removed: &[u64], rows: &[(u64, f32)]) -> SlotValues {
        let group = GroupValues {
            dim: 1,
            removed: removed.iter().map(|key| FeatureKey(*key)).collect(),
            keys: rows.iter().map(|(key, _)| FeatureKey(*key)).collect(),
            values: rows.iter().map(|(_, value)| *value).collect(),
        };
        SlotValues { slot: Slot(slot), slots: SLOTS, content, groups: vec![group] }
    }

    /// The bounds of removed ranges.
    type Removed = Vec<(u64, u64)>;
    /// Keys and values.
    type Rows = Vec<(u64, f32)>;

    fn merged(changes: Vec<SlotValues>) -> (Removed, Rows) {
        let mut all = Changes::new(&[1]);
        assert!(changes.into_iter().all(|change| all.add(change)));
        let group = all.finish().remove(0);
        let removed = group.removed.iter().map(|range| (range.first, range.last)).collect();
        (removed, group.rows.rows().map(|(key, values)| (key, values[0])).collect())
    }

    #[test]
    fn the_keys_of_a_slot_are_the_stores() {
        for slots in [1, 3, 4, 1000] {
            for slot in [0, slots / 2, slots - 1] {
                let range = keys_of(Slot(slot), slots);
                assert_eq!([range.first, range.last].map(|key| slot_of(FeatureKey(key), slots)), [Slot(slot); 2]);
                assert!(range.first == 0 || slot_of(FeatureKey(range.first - 1), slots) == Slot(slot - 1));
                assert!(range.last == u64::MAX || slot_of(FeatureKey(range.last + 1), slots) == Slot(slot + 1));
            }
        }
    }

    #[test]
    fn the_last_change_of_a_row_counts() {
        let changes = vec![
            change(0, SlotContent::Changes, &[5, 7], &[(1, 0.1), (3, 0.3)]),
            change(0, SlotContent::Changes, &[3], &[(1, 1.1), (7, 0.7)]),
        ];
        assert_eq!(merged(changes), (vec![(3, 3), (5, 5)], vec![(1, 1.1), (7, 0.7)]));
    }

    #[test]
    fn rows_of_another_width_are_refused() {
        let mut two = Changes::new(&[2]);
        assert!(!two.add(change(0, SlotContent::Changes, &[], &[(1, 0.1)])));
        assert!(!Changes::new(&[1, 1]).add(change(0, SlotContent::Changes, &[], &[])));
        let none = Changes::new(&[1, 3]).finish();
        assert_eq!(none.iter().map(|group| group.rows.dim()).collect::<Vec<_>>(), [1, 3]);
    }

    #[test]
    fn a_whole_slot_replaces_its_rows_and_no_others() {
        let last = 2 * SLOT_1 - 1;
        let changes = vec![
            change(0, SlotContent::Changes, &[4], &[(SLOT_1 - 1, 0.5)]),
            change(1, SlotContent::Changes, &[SLOT_1 + 9], &[(SLOT_1, 0.1), (last, 0.2)]),
            change(1, SlotContent::Whole, &[], &[(SLOT_1 + 2, 0.3)]),
            change(1, SlotContent::Changes, &[SLOT_1 + 2], &[(SLOT_1 + 3, 0.4)]),
        ];
        let (removed, rows) = merged(changes);
        assert_eq!(removed, [(4, 4), (SLOT_1, last)]);
        assert_eq!(rows, [(SLOT_1 - 1, 0.5), (SLOT_1 + 3, 0.4)]);
    }
}
