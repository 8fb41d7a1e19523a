//! The rows of a slot snapshot without a store, for readers that need values and no optimizer
//! state.

use crate::layout::{META_WORD, RowLayout};
use crate::snapshot::{self, SlotContent};
use crate::{FeatureKey, LeastCount, RowSpec, RowWord, Slot, SnapshotError, Store};

/// The rows and removed keys of a snapshot.
#[derive(Clone, Debug, PartialEq)]
pub struct SlotValues {
    /// The slot.
    pub slot: Slot,
    /// Slots of the job.
    pub slots: u32,
    /// Whether these are all rows of the slot, or its changes.
    pub content: SlotContent,
    /// By row group.
    pub groups: Vec<GroupValues>,
}

/// The rows and removed keys of one row group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupValues {
    /// Values of a row.
    pub dim: usize,
    /// The removed keys, rising. A whole slot has none.
    pub removed: Vec<FeatureKey>,
    /// The keys of the rows, rising.
    pub keys: Vec<FeatureKey>,
    /// The values of the rows, `[keys, dim]`.
    pub values: Vec<f32>,
}

impl Store {
    /// The rows and removed keys in a snapshot, which says itself how its rows are stored.
    ///
    /// # Errors
    /// [`SnapshotError`] if the bytes are no snapshot, or a damaged one.
    pub fn values_of_snapshot(bytes: &[u8]) -> Result<SlotValues, SnapshotError> {
        Self::thin_values_of_snapshot(bytes, None)
    }

    /// As [`Self::values_of_snapshot`], without the rows of fewer examples. Among changes their
    /// keys count as removed: an earlier row of the key may have had enough.
    ///
    /// # Errors
    /// As [`Self::values_of_snapshot`].
    pub fn thin_values_of_snapshot(bytes: &[u8], least: Option<LeastCount>) -> Result<SlotValues, SnapshotError> {
        let config = snapshot::config_of(bytes)?;
        let read = snapshot::read(&config, bytes)?;
        let parts = config.groups.iter().zip(read.groups).zip(read.removed);
        let is_changes = read.content == SlotContent::Changes;
        let groups = parts.map(|((spec, rows), removed)| {
            let mut found = group_values(spec, rows, removed, least);
            if !is_changes {
                found.removed.clear();
            }
            found
        });
        Ok(SlotValues { slot: read.slot, slots: config.slots, content: read.content, groups: groups.collect() })
    }
}

/// The rows of a group. Those with too few examples count as removed.
fn group_values(spec: &RowSpec, bytes: &[u8], mut removed: Vec<FeatureKey>, least: Option<LeastCount>) -> GroupValues {
    let layout = RowLayout::new(spec);
    let (dim, rows) = (layout.dim(), bytes.len() / layout.row_bytes());
    let (mut keys, mut values) = (Vec::with_capacity(rows), vec![0.0; rows * dim]);
    let mut words = Vec::with_capacity(layout.stride());
    let mut places = values.chunks_exact_mut(dim);
    for row in bytes.chunks_exact(layout.row_bytes()) {
        words.clear();
        words.extend(row.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)));
        let key = crate::key::key_of(&words);
        if least.is_some_and(|least| !least.keeps(spec, RowWord(words[META_WORD]))) {
            removed.push(key);
            continue;
        }
        keys.push(key);
        // There is a place for each row.
        if let Some(place) = places.next() {
            layout.read_values(&words, place);
        }
    }
    values.truncate(keys.len() * dim);
    removed.sort_unstable();
    GroupValues { dim, removed, keys, values }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::num::NonZeroU32;
    use std::sync::Arc;

    use super::*;
    use crate::{
        Admission, Budget, BudgetUnit, Examples, GroupId, Initializer, LifePolicy, Managed, Missing, Priority, RowSpec,
        SaveId, SaveScope, ScoreRule, Seen, SparseOptimizer, StoreConfig, ValueType,
    };

    const KEYS: [FeatureKey; 3] = [FeatureKey(3), FeatureKey(5), FeatureKey(9)];

    /// Two groups: one of odd width in half precision, and one with a state.
    fn store() -> Arc<Store> {
        let spec = |dim, value_type, optimizer| RowSpec {
            dim,
            value_type,
            optimizer,
            life: LifePolicy::KeepAll,
            initializer: Initializer::Uniform { low: -1.0, high: 1.0 },
            zero_columns: 0,
            first_order: None,
            share: None,
        };
        let adagrad = SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-8 };
        let groups = vec![
            spec(3, ValueType::F16, SparseOptimizer::Sgd { learning_rate: 0.1 }),
            spec(2, ValueType::F32, adagrad),
        ];
        Arc::new(Store::new(StoreConfig { slots: 1, seed: 1, groups, budget: None }).unwrap())
    }

    fn insert(store: &Store, keys: &[FeatureKey]) -> [Vec<f32>; 2] {
        [(0, 3), (1, 2)].map(|(group, dim)| {
            let mut values = vec![0.0; keys.len() * dim];
            store.lookup(GroupId(group), keys, Missing::Insert, &mut values).unwrap();
            values
        })
    }

    #[test]
    fn a_whole_slot_has_the_values_that_look_ups_give() {
        let store = store();
        let expected = insert(&store, &KEYS);
        let found = Store::values_of_snapshot(&store.snapshot_slot(Slot(0)).unwrap().into_bytes()).unwrap();
        assert_eq!((found.slot, found.slots, found.content), (Slot(0), 1, SlotContent::Whole));
        for (group, values) in found.groups.iter().zip(expected) {
            assert_eq!((&group.keys[..], &group.values, group.removed.len()), (&KEYS[..], &values, 0));
        }
    }

    #[test]
    fn changes_have_the_new_rows_and_the_removed_keys() {
        let store = store();
        store.track_changes(true);
        insert(&store, &KEYS);
        store.mark_saved(SaveId(1)).unwrap();
        assert!(store.remove(GroupId(1), KEYS[1]).unwrap());
        let expected = insert(&store, &[FeatureKey(7)]);
        let frozen = store.freeze(SaveId(2), SaveScope::ChangesSince(SaveId(1))).unwrap();
        let found = Store::values_of_snapshot(&frozen.save_slot(Slot(0)).unwrap().into_bytes()).unwrap();
        assert_eq!(found.content, SlotContent::Changes);
        for (group, values) in found.groups.iter().zip(expected) {
            assert_eq!((&group.keys[..], &group.values), (&[FeatureKey(7)][..], &values));
        }
        assert_eq!((found.groups[0].removed.len(), &found.groups[1].removed[..]), (0, &[KEYS[1]][..]));
    }

    #[test]
    fn rows_with_few_examples_are_left_out_and_removed() {
        let managed = Managed {
            admission: Admission::Always,
            expire_after: None,
            score: ScoreRule::Lfu,
            priority: Priority::Low,
        };
        let mut config = store().config().clone();
        // The first group counts, the second does not.
        config.groups[0].life = LifePolicy::Managed(managed);
        config.budget = Some(Budget { unit: BudgetUnit::Rows, limit: 1000 });
        let store = Arc::new(Store::new(config).unwrap());
        store.track_changes(true);
        insert(&store, &KEYS);
        let see = |key: FeatureKey, times: u32, step: u64| {
            let seen = Seen { examples: &[Examples { positive: times - 1, negative: 1 }], ..Seen::default() };
            store.update_seen(GroupId(0), &[key], &[0.0; 3], step, seen).unwrap();
        };
        see(KEYS[0], 2, 1);
        see(KEYS[1], 3, 2);
        let least = Some(LeastCount(NonZeroU32::new(3).unwrap()));
        let thin = |bytes: &[u8]| {
            let found = Store::thin_values_of_snapshot(bytes, least).unwrap();
            let all = Store::values_of_snapshot(bytes).unwrap();
            assert_eq!(found.groups[1], all.groups[1], "rows that do not count stay");
            let (found, all) = (found.groups[0].clone(), all.groups[0].clone());
            for (key, values) in found.keys.iter().zip(found.values.chunks_exact(3)) {
                let place = all.keys.binary_search(key).unwrap();
                assert_eq!(values, &all.values[3 * place..3 * place + 3]);
            }
            (found.keys, found.removed)
        };
        let whole = store.snapshot_slot(Slot(0)).unwrap().into_bytes();
        assert_eq!(thin(&whole), (vec![KEYS[1]], vec![]));
        store.mark_saved(SaveId(1)).unwrap();
        // A row of many examples is removed, and comes back with few.
        assert!(store.remove(GroupId(0), KEYS[1]).unwrap());
        insert(&store, &KEYS[1..2]);
        see(KEYS[1], 1, 3);
        see(KEYS[0], 1, 4);
        let frozen = store.freeze(SaveId(2), SaveScope::ChangesSince(SaveId(1))).unwrap();
        let changes = frozen.save_slot(Slot(0)).unwrap().into_bytes();
        assert_eq!(thin(&changes), (vec![KEYS[0]], vec![KEYS[1]]));
    }

    #[test]
    fn damaged_bytes_are_refused() {
        let store = store();
        insert(&store, &KEYS);
        let mut bytes = store.snapshot_slot(Slot(0)).unwrap().into_bytes();
        let last = bytes.len() - 20;
        bytes[last] ^= 1;
        assert!(matches!(Store::values_of_snapshot(&bytes), Err(SnapshotError::Checksum { .. })));
        assert!(matches!(Store::values_of_snapshot(b"RECT"), Err(SnapshotError::NotASnapshot { .. })));
    }
}
