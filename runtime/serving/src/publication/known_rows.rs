//! The rows of the published model, as hashes. A publisher compares a full checkpoint with them. So
//! it publishes the rows that changed, although the checkpoint has all rows and names no changes.
//! Pure.

use std::collections::BTreeSet;

use rectrain_embedding::{FeatureKey, GroupValues, Slot, SlotContent, SlotValues};
use xxhash_rust::xxh3::xxh3_64;

use super::changes::keys_of;
use super::delta::GroupChanges;
use crate::model::Model;
use crate::table::KeyRange;
use crate::versioned_table::VersionedTable;

/// 16 bytes for each row. Two values of a row have equal hashes once in 2⁶⁴ changes.
#[derive(Debug)]
pub(super) struct KnownRows {
    /// By row group, by rising key.
    groups: Vec<Vec<Known>>,
}

/// The most values of a row that is hashed without an allocation.
const SHORT: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq)]
struct Known {
    key: u64,
    /// XXH3-64 of the values (f32, little-endian).
    hash: u64,
}

impl KnownRows {
    pub(super) fn of(model: &Model) -> Self {
        let group = |table: &VersionedTable| table.rows().map(|(key, row)| Known::of(key, row)).collect();
        Self { groups: model.tables.iter().map(group).collect() }
    }

    /// The differences of a chain of checkpoints from these rows.
    pub(super) fn differences(&self) -> Differences<'_> {
        Differences { known: self, seen: BTreeSet::new() }
    }

    /// The changes from these rows to the ones of a whole slot.
    fn changes_to(&self, slot: SlotValues) -> SlotValues {
        let keys = keys_of(slot.slot, slot.slots);
        let groups = self.groups.iter().zip(slot.groups).map(|(known, rows)| changes(within(known, keys), rows));
        SlotValues { content: SlotContent::Changes, groups: groups.collect(), ..slot }
    }

    /// Leaves out the removed keys of rows that are not known. Ranges of several keys stay.
    pub(super) fn forget_unknown(&self, changes: &mut [GroupChanges]) {
        for (known, changes) in self.groups.iter().zip(changes) {
            let is_known = |key: u64| known.binary_search_by_key(&key, |row| row.key).is_ok();
            changes.removed.retain(|range| range.first != range.last || is_known(range.first));
        }
    }

    /// Applies changes that were published.
    pub(super) fn apply(&mut self, changes: &[GroupChanges]) {
        for (known, changes) in self.groups.iter_mut().zip(changes) {
            *known = applied(known, changes);
        }
    }
}

/// The slots of a chain of checkpoints, on their way to a delta.
pub(super) struct Differences<'k> {
    known: &'k KnownRows,
    /// Slots that the full checkpoint has shown.
    seen: BTreeSet<Slot>,
}

impl Differences<'_> {
    /// The changes of the next slot. The full checkpoint has each slot once, whole. Later
    /// checkpoints change it, so their slots stay as they are. A slot with another number of row
    /// groups stays too.
    pub(super) fn of(&mut self, slot: SlotValues) -> SlotValues {
        let is_first = self.seen.insert(slot.slot);
        match is_first && slot.content == SlotContent::Whole && slot.groups.len() == self.known.groups.len() {
            true => self.known.changes_to(slot),
            false => slot,
        }
    }
}

impl Known {
    fn of(key: u64, row: &[f32]) -> Self {
        if row.len() > SHORT {
            let bytes: Vec<[u8; 4]> = row.iter().map(|value| value.to_le_bytes()).collect();
            return Self { key, hash: xxh3_64(bytes.as_flattened()) };
        }
        let mut bytes = [[0; 4]; SHORT];
        bytes.iter_mut().zip(row).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
        Self { key, hash: xxh3_64(&bytes.as_flattened()[..4 * row.len()]) }
    }
}

fn within(known: &[Known], keys: KeyRange) -> &[Known] {
    let start = known.partition_point(|row| row.key < keys.first);
    let end = known.partition_point(|row| row.key <= keys.last);
    &known[start..end]
}

/// The rows that are new or have other values, and the keys of known rows that are not there.
fn changes(known: &[Known], rows: GroupValues) -> GroupValues {
    let (mut known, dim) = (known.iter().peekable(), rows.dim);
    let (mut removed, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
    for (key, row) in rows.keys.iter().zip(rows.values.chunks_exact(dim.max(1))) {
        while let Some(gone) = known.next_if(|known| known.key < key.0) {
            removed.push(FeatureKey(gone.key));
        }
        let before = known.next_if(|known| known.key == key.0);
        if before != Some(&Known::of(key.0, row)) {
            keys.push(*key);
            values.extend_from_slice(row);
        }
    }
    removed.extend(known.map(|gone| FeatureKey(gone.key)));
    GroupValues { dim, removed, keys, values }
}

fn applied(known: &[Known], changes: &GroupChanges) -> Vec<Known> {
    let mut next = Vec::with_capacity(known.len() + changes.rows.keys().len());
    let mut changed = changes.rows.rows().map(|(key, row)| Known::of(key, row)).peekable();
    let mut removed = changes.removed.iter().peekable();
    for row in known {
        while let Some(changed) = changed.next_if(|changed| changed.key < row.key) {
            next.push(changed);
        }
        while removed.next_if(|range| range.last < row.key).is_some() {}
        let is_replaced = changed.peek().is_some_and(|changed| changed.key == row.key);
        let is_removed = removed.peek().is_some_and(|range| range.first <= row.key);
        if !is_replaced && !is_removed {
            next.push(*row);
        }
    }
    next.extend(changed);
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Table;

    fn known(rows: &[(u64, f32)]) -> KnownRows {
        KnownRows { groups: vec![rows.iter().map(|(key, value)| Known::of(*key, &[*value])).collect()] }
    }

    fn slot(content: SlotContent, rows: &[(u64, f32)]) -> SlotValues {
        let keys = rows.iter().map(|(key, _)| FeatureKey(*key)).collect();
        let values = rows.iter().map(|(_, value)| *value).collect();
        let group = GroupValues { dim: 1, removed: Vec::new(), keys, values };
        SlotValues { slot: Slot(0), slots: 2, content, groups: vec![group] }
    }

    /// A key of slot 1.
    const OTHER: u64 = 1 << 63;

    #[test]
    fn a_whole_slot_becomes_its_changes() {
        let known = known(&[(1, 0.1), (3, 0.3), (5, 0.5), (7, 0.7), (OTHER, 0.9)]);
        let found = known.changes_to(slot(SlotContent::Whole, &[(2, 0.2), (3, 0.3), (5, -0.5), (9, 0.9)]));
        let group = &found.groups[0];
        assert_eq!((found.content, &group.removed), (SlotContent::Changes, &vec![FeatureKey(1), FeatureKey(7)]));
        assert_eq!((&group.keys, &group.values), (&[2, 5, 9].map(FeatureKey).to_vec(), &vec![0.2, -0.5, 0.9]));
        let empty = known.changes_to(slot(SlotContent::Whole, &[]));
        assert_eq!(empty.groups[0].removed, [1, 3, 5, 7].map(FeatureKey), "rows of another slot stay");
        let zero = slot(SlotContent::Whole, &[(1, -0.0)]);
        assert_eq!(self::known(&[(1, 0.0)]).changes_to(zero).groups[0].keys.len(), 1, "bits count");
    }

    /// A row may come back to its known value.
    #[test]
    fn slots_of_later_checkpoints_stay_as_they_are() {
        let known = known(&[(1, 0.1)]);
        let mut differences = known.differences();
        assert_eq!(differences.of(slot(SlotContent::Whole, &[(1, 0.2)])).content, SlotContent::Changes);
        for later in [slot(SlotContent::Changes, &[(1, 0.1)]), slot(SlotContent::Whole, &[(1, 0.1)])] {
            assert_eq!(differences.of(later.clone()), later);
        }
    }

    #[test]
    fn long_rows_and_short_ones_have_the_same_hash_of_their_bytes() {
        for dim in [1, SHORT, SHORT + 1] {
            let row: Vec<f32> = (0..dim).map(|place| place as f32).collect();
            let bytes: Vec<u8> = row.iter().flat_map(|value| value.to_le_bytes()).collect();
            assert_eq!(Known::of(1, &row).hash, xxh3_64(&bytes), "{dim} values");
        }
    }

    #[test]
    fn removed_keys_that_are_not_known_are_left_out() {
        let range = |first, last| KeyRange { first, last };
        let rows = || Table::of(1, vec![4], vec![0.4]).expect("one key rises");
        let mut changes = [GroupChanges { removed: vec![range(1, 1), range(2, 2), range(5, 9)], rows: rows() }];
        known(&[(1, 0.1), (3, 0.3)]).forget_unknown(&mut changes);
        assert_eq!(changes[0].removed, [range(1, 1), range(5, 9)]);
        assert_eq!(changes[0].rows.keys(), [4]);
    }

    #[test]
    fn published_changes_are_known() {
        let mut found = known(&[(1, 0.1), (3, 0.3), (5, 0.5), (7, 0.7)]);
        let rows = Table::of(1, vec![0, 3, 6, 9], vec![0.0, -0.3, 0.6, 0.9]).expect("the keys rise");
        found.apply(&[GroupChanges { removed: vec![KeyRange { first: 5, last: 6 }], rows }]);
        let expected = known(&[(0, 0.0), (1, 0.1), (3, -0.3), (6, 0.6), (7, 0.7), (9, 0.9)]);
        assert_eq!(found.groups, expected.groups);
    }
}
