//! A slot that moves while it is in use: first the whole slot, then its changes. The target ends up
//! equal.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use rectrain_embedding::{
    FeatureKey, GroupId, Initializer, LifePolicy, Missing, RowSpec, Slot, SlotContent, SparseOptimizer, Store,
    StoreConfig, ValueType,
};

fn store() -> Store {
    let optimizer = SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.0, epsilon: 1e-10 };
    let ftrl = SparseOptimizer::Ftrl { learning_rate: 0.05, beta: 1.0, l1: 0.001, l2: 0.01 };
    let initializer = Initializer::Normal { standard_deviation: 0.01 };
    let group = |dim| RowSpec {
        dim,
        value_type: ValueType::F32,
        optimizer,
        life: LifePolicy::KeepAll,
        initializer,
        zero_columns: 1,
        first_order: (dim > 2).then_some(ftrl),
        share: None,
    };
    Store::new(StoreConfig { slots: 2, seed: 3, groups: vec![group(4), group(2)], budget: None }).unwrap()
}

fn train(store: &Store, group: u16, keys: &[u64], step: u64) {
    let keys: Vec<FeatureKey> = keys.iter().copied().map(FeatureKey).collect();
    let dim = store.spec(GroupId(group)).unwrap().dim;
    let mut rows = vec![0.0; keys.len() * dim];
    store.lookup(GroupId(group), &keys, Missing::Insert, &mut rows).unwrap();
    store.update(GroupId(group), &keys, &vec![0.5; rows.len()], step).unwrap();
}

#[test]
fn a_whole_slot_and_its_changes_give_the_source() {
    let (source, target) = (store(), store());
    train(&source, 0, &[1, 2, 3, 4], 1);
    train(&source, 1, &[2, 5], 1);
    let whole = source.snapshot_slot(Slot(0)).unwrap();
    target.restore_slot(whole.as_bytes()).unwrap();
    train(&source, 0, &[2, 7], 2);
    train(&source, 1, &[9], 2);
    source.remove(GroupId(0), FeatureKey(3)).unwrap();
    let key = |group, key| (GroupId(group), FeatureKey(key));
    let changed = [key(0, 7), key(0, 2), key(0, 3), key(1, 9), key(0, 2)];
    let changes = source.snapshot_rows(Slot(0), &changed).unwrap();
    assert_eq!((changes.content(), changes.rows(), changes.removed()), (SlotContent::Changes, 3, 1));
    target.restore_slot(changes.as_bytes()).unwrap();
    assert_eq!(target.slot_digest(Slot(0)).unwrap(), source.slot_digest(Slot(0)).unwrap());
    assert_eq!(target.rows(), source.rows());
}

#[test]
fn a_slot_restored_from_parts_equals_its_source() {
    let source = store();
    train(&source, 0, &(1..=23).collect::<Vec<_>>(), 1);
    train(&source, 1, &(5..=17).collect::<Vec<_>>(), 1);
    let whole = source.snapshot_slot(Slot(0)).unwrap();
    let empty = store().snapshot_slot(Slot(0)).unwrap().as_bytes().len();
    let mut numbers = Vec::new();
    for most in [0, 1, 50, 100, 333, 1_000, 100_000] {
        let parts = source.snapshot_slot_in_parts(Slot(0), most).unwrap();
        let target = store();
        // Rows that the slot had before the move, as after an aborted migration.
        train(&target, 0, &[2, 99], 1);
        for (number, part) in parts.iter().enumerate() {
            let expected = if number == 0 { SlotContent::Whole } else { SlotContent::Changes };
            assert_eq!((part.content(), part.removed()), (expected, 0));
            assert!(part.rows() == 1 || part.as_bytes().len() <= most + empty, "{most}: {}", part.as_bytes().len());
            target.restore_slot(part.as_bytes()).unwrap();
        }
        assert_eq!(target.snapshot_slot(Slot(0)).unwrap(), whole, "{most}");
        assert!(most > 0 || source.rows_within(most) == 1);
        numbers.push(parts.len());
    }
    assert_eq!((numbers[0], numbers[1], numbers[6]), (36, 36, 1));
    assert!(numbers.is_sorted_by(|more, fewer| more >= fewer), "{numbers:?}");
    let empty = store().snapshot_slot_in_parts(Slot(0), 0).unwrap();
    assert_eq!(empty, [store().snapshot_slot(Slot(0)).unwrap()]);
    assert!(source.snapshot_slot_in_parts(Slot(2), 100).is_err());
}

#[test]
fn slot_bytes_counts_rows_and_refuses_unknown_slots() {
    let store = store();
    train(&store, 0, &[1, 2, 3], 1);
    // FTRL keeps two numbers for the first-order weight, AdaGrad one for each of the other values.
    assert_eq!(store.slot_bytes(Slot(0)).unwrap(), 3 * 4 * (4 + 2 + 3));
    assert_eq!(store.slot_bytes(Slot(1)).unwrap(), 0);
    assert!(store.slot_bytes(Slot(2)).is_err());
    assert!(store.snapshot_rows(Slot(0), &[(GroupId(2), FeatureKey(1))]).is_err());
}
