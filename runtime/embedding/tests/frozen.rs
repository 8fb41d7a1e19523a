//! Saving a store while it is in use. A save holds one instant. Changes on top of their base give
//! the whole store. A save that fails loses no change.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use proptest::prelude::*;
use rectrain_embedding::{
    FeatureKey, FrozenStore, GroupId, Initializer, LifePolicy, Missing, RowSpec, SaveId, SaveScope, Slot, SlotContent,
    SlotSnapshot, SnapshotError, SparseOptimizer, Store, StoreConfig, StoreError, ValueType,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use xxhash_rust::xxh3::xxh3_64;

const SLOTS: u32 = 3;
const DIM: usize = 2;

fn spec(optimizer: SparseOptimizer) -> RowSpec {
    RowSpec {
        dim: DIM,
        value_type: ValueType::F32,
        optimizer,
        life: LifePolicy::KeepAll,
        initializer: Initializer::Normal { standard_deviation: 0.1 },
        zero_columns: 0,
        first_order: None,
        share: None,
    }
}

fn config() -> StoreConfig {
    let adam = SparseOptimizer::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
    StoreConfig {
        slots: SLOTS,
        seed: 1,
        groups: vec![spec(adam), spec(SparseOptimizer::Sgd { learning_rate: 0.1 })],
        budget: None,
    }
}

fn store() -> Arc<Store> {
    let store = Arc::new(Store::new(config()).unwrap());
    store.track_changes(true);
    store
}

fn key(number: u64) -> FeatureKey {
    FeatureKey(xxh3_64(&number.to_le_bytes()))
}

fn insert(store: &Store, group: GroupId, key: FeatureKey) {
    store.lookup(group, &[key], Missing::Insert, &mut [0.0; DIM]).unwrap();
}

fn update(store: &Store, group: GroupId, key: FeatureKey, count: u64) {
    store.update(group, &[key], &[count as f32, -1.0], count).unwrap();
}

fn digests(store: &Store) -> Vec<[u8; 32]> {
    store.digests(0..SLOTS).unwrap()
}

fn save_all(frozen: &FrozenStore) -> Vec<SlotSnapshot> {
    (0..SLOTS).map(|slot| frozen.save_slot(Slot(slot)).unwrap()).collect()
}

/// The digests of a new store into which snapshots were restored, in order.
fn restored(snapshots: &[SlotSnapshot]) -> Vec<[u8; 32]> {
    let store = store();
    for snapshot in snapshots {
        let restored = store.restore_slot(snapshot.as_bytes()).unwrap();
        assert_eq!((restored.slot, restored.content), (snapshot.slot(), snapshot.content()));
        assert_eq!((restored.rows, restored.removed), (snapshot.rows(), snapshot.removed()));
    }
    digests(&store)
}

#[derive(Clone, Debug)]
enum Operation {
    Insert(u16, u64),
    Update(u16, u64),
    Remove(u16, u64),
    Clear(u32),
    /// The slot is replaced by itself, as after a move to another process and back.
    Replace(u32),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        8 => (0_u16..2, 0_u64..60).prop_map(|(group, key)| Operation::Insert(group, key)),
        8 => (0_u16..2, 0_u64..60).prop_map(|(group, key)| Operation::Update(group, key)),
        6 => (0_u16..2, 0_u64..60).prop_map(|(group, key)| Operation::Remove(group, key)),
        1 => (0..SLOTS).prop_map(Operation::Clear),
        1 => (0..SLOTS).prop_map(Operation::Replace),
    ]
}

fn run(store: &Store, operations: &[Operation]) {
    for (count, operation) in (1..).zip(operations) {
        match *operation {
            Operation::Insert(group, number) => insert(store, GroupId(group), key(number)),
            Operation::Update(group, number) => update(store, GroupId(group), key(number), count),
            Operation::Remove(group, number) => drop(store.remove(GroupId(group), key(number)).unwrap()),
            Operation::Clear(slot) => drop(store.clear_slot(Slot(slot)).unwrap()),
            Operation::Replace(slot) => {
                let own = store.snapshot_slot(Slot(slot)).unwrap();
                store.restore_slot(own.as_bytes()).unwrap();
            }
        }
    }
}

/// How a save in between ended.
#[derive(Clone, Copy, Debug, PartialEq)]
enum End {
    Completed,
    /// Abandoned after this many slots were saved.
    Abandoned(u32),
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![Just(End::Completed), (0..=SLOTS).prop_map(End::Abandoned)]
}

proptest! {
    /// Takes a base and then any number of saves of changes, which are completed or abandoned.
    /// Operations of all kinds happen before, during and after each save. The base and the
    /// completed changes on top of it equal the store at the last completed freeze.
    #[test]
    fn a_base_and_its_changes_are_the_store_of_that_instant(
        before in prop::collection::vec(operation(), 0..120),
        saves in prop::collection::vec(
            (prop::collection::vec(operation(), 0..60), prop::collection::vec(operation(), 0..60), end()),
            1..5,
        ),
    ) {
        let store = store();
        run(&store, &before);
        let frozen = store.freeze(SaveId(0), SaveScope::Everything).unwrap();
        let mut expected = digests(&store);
        let mut chain = Vec::new();
        let mut base = SaveId(0);
        run(&store, &saves[0].0);
        chain.extend(save_all(&frozen));
        frozen.complete();
        prop_assert!(chain.iter().all(|snapshot| snapshot.content() == SlotContent::Whole));
        prop_assert_eq!(&restored(&chain), &expected);
        for (number, (earlier, during, end)) in (1..).zip(&saves) {
            run(&store, earlier);
            let frozen = store.freeze(SaveId(number), SaveScope::ChangesSince(base)).unwrap();
            let now = digests(&store);
            let (first, rest) = during.split_at(during.len() / 2);
            run(&store, first);
            match *end {
                End::Completed => {
                    chain.push(frozen.save_slot(Slot(0)).unwrap());
                    run(&store, rest);
                    chain.extend((1..SLOTS).map(|slot| frozen.save_slot(Slot(slot)).unwrap()));
                    frozen.complete();
                    (expected, base) = (now, SaveId(number));
                }
                End::Abandoned(slots) => {
                    (0..slots).for_each(|slot| drop(frozen.save_slot(Slot(slot)).unwrap()));
                    run(&store, rest);
                    drop(frozen);
                }
            }
            prop_assert_eq!(&restored(&chain), &expected);
        }
        // Changes since the last base, saved after all operations.
        let frozen = store.freeze(SaveId(99), SaveScope::ChangesSince(base)).unwrap();
        chain.extend(save_all(&frozen));
        prop_assert_eq!(&restored(&chain), &digests(&store));
    }
}

#[test]
fn changes_hold_only_the_rows_that_changed() {
    let store = store();
    (0..30).for_each(|number| insert(&store, GroupId(0), key(number)));
    let frozen = store.freeze(SaveId(1), SaveScope::Everything).unwrap();
    assert_eq!(save_all(&frozen).iter().map(SlotSnapshot::rows).sum::<u64>(), 30);
    frozen.complete();
    update(&store, GroupId(0), key(3), 1);
    insert(&store, GroupId(0), key(100));
    store.remove(GroupId(0), key(7)).unwrap();
    store.remove(GroupId(0), key(8)).unwrap();
    insert(&store, GroupId(0), key(8));
    // Reading changes nothing.
    (0..30).for_each(|number| {
        store.lookup(GroupId(0), &[key(number)], Missing::ReadInitial, &mut [0.0; DIM]).unwrap();
    });
    let frozen = store.freeze(SaveId(2), SaveScope::ChangesSince(SaveId(1))).unwrap();
    let changes = save_all(&frozen);
    assert!(changes.iter().all(|snapshot| snapshot.content() == SlotContent::Changes));
    assert_eq!(changes.iter().map(SlotSnapshot::rows).sum::<u64>(), 3, "updated, new, and back again");
    assert_eq!(changes.iter().map(SlotSnapshot::removed).sum::<u64>(), 1, "a row that is back is not removed");
}

#[test]
fn changes_are_refused_where_their_base_is_unknown() {
    let store = store();
    let unknown = |since| {
        let refused = store.freeze(SaveId(9), SaveScope::ChangesSince(SaveId(since)));
        matches!(refused, Err(StoreError::ChangesUnknown { since: SaveId(found) }) if found == since)
    };
    assert!(unknown(1));
    store.freeze(SaveId(1), SaveScope::Everything).unwrap().complete();
    assert!(!unknown(1) && unknown(2));
    store.freeze(SaveId(3), SaveScope::Everything).unwrap().complete();
    assert!(unknown(1), "what changed between saves 1 and 3 is forgotten");
    assert!(!unknown(3) && store.knows_changes_since(SaveId(3)));
    store.mark_saved(SaveId(4)).unwrap();
    assert!(!unknown(4) && unknown(3));
    store.track_changes(false);
    assert!(unknown(4), "removals may have gone by unseen");
}

#[test]
fn a_save_of_unknown_outcome_may_be_a_base() {
    let store = store();
    (0..30).for_each(|number| insert(&store, GroupId(0), key(number)));
    let frozen = store.freeze(SaveId(1), SaveScope::Everything).unwrap();
    let mut chain = save_all(&frozen);
    frozen.complete();
    (0..10).for_each(|number| update(&store, GroupId(0), key(number), 1));
    store.remove(GroupId(0), key(20)).unwrap();
    let frozen = store.freeze(SaveId(2), SaveScope::ChangesSince(SaveId(1))).unwrap();
    chain.extend(save_all(&frozen));
    drop(frozen);
    // Other processes completed save 2, but this store did not learn of it.
    (5..15).for_each(|number| update(&store, GroupId(0), key(number), 2));
    insert(&store, GroupId(0), key(20));
    let frozen = store.freeze(SaveId(3), SaveScope::ChangesSince(SaveId(2))).unwrap();
    chain.extend(save_all(&frozen));
    assert_eq!(restored(&chain), digests(&store));
}

#[test]
fn one_save_at_a_time_and_one_time_a_slot() {
    let store = store();
    let frozen = store.freeze(SaveId(1), SaveScope::Everything).unwrap();
    assert!(matches!(store.freeze(SaveId(2), SaveScope::Everything), Err(StoreError::FrozenAlready)));
    assert!(matches!(store.mark_saved(SaveId(2)), Err(StoreError::FrozenAlready)));
    frozen.save_slot(Slot(0)).unwrap();
    assert!(matches!(frozen.save_slot(Slot(0)), Err(StoreError::SavedAlready { slot: Slot(0) })));
    assert!(matches!(frozen.save_slot(Slot(SLOTS)), Err(StoreError::UnknownSlot { .. })));
    drop(frozen);
    assert!(store.freeze(SaveId(2), SaveScope::Everything).is_ok());
}

#[test]
fn a_snapshot_with_impossible_fields_is_refused() {
    let store = store();
    (0..9).for_each(|number| insert(&store, GroupId(0), key(number)));
    let frozen = store.freeze(SaveId(1), SaveScope::Everything).unwrap();
    let whole = save_all(&frozen).swap_remove(0).into_bytes();
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = whole.clone();
        change(&mut bytes);
        let body = bytes.len() - 8;
        let checksum = xxh3_64(&bytes[..body]).to_le_bytes();
        bytes[body..].copy_from_slice(&checksum);
        match store.restore_slot(&bytes) {
            Err(StoreError::Snapshot(error)) => error,
            other => panic!("{other:?}"),
        }
    };
    assert!(matches!(refused(&|b| b[40] = 2), SnapshotError::Field { field: "kind", .. }));
    assert!(matches!(refused(&|b| b[44] = 1), SnapshotError::Field { field: "reserved word", .. }));
    assert!(matches!(refused(&|b| b[48 + 60] = 1), SnapshotError::Field { field: "count of removed keys", .. }));
    let changes_of_too_many = |b: &mut Vec<u8>| {
        b[40] = 1;
        b[48 + 60..48 + 68].fill(0xff);
    };
    assert!(matches!(refused(&changes_of_too_many), SnapshotError::Length { .. }));
    assert_eq!(Store::config_of_snapshot(&whole).unwrap(), config());
}

/// Threads update, remove and add rows while the store is saved again and again. Every copy is
/// restored without an error. It lacks at most the one row that each thread has removed at that
/// instant.
#[test]
fn a_save_of_a_busy_store_holds_one_instant() {
    let group = GroupId(1);
    let keys: Vec<FeatureKey> = (0..3_000).map(key).collect();
    let store = store();
    store.lookup(group, &keys, Missing::Insert, &mut vec![0.0; keys.len() * DIM]).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for worker in 0..2 {
            let (store, keys, stop) = (&store, &keys, &stop);
            scope.spawn(move || {
                let mut count = 0;
                while !stop.load(Ordering::Relaxed) {
                    count += 1;
                    let gradients = vec![1.0; keys.len() * DIM];
                    store.update(group, keys, &gradients, count).unwrap();
                    let gone = keys[(count as usize * 2 + worker) % keys.len()];
                    store.remove(group, gone).unwrap();
                    store.lookup(group, &[gone], Missing::Insert, &mut [0.0; DIM]).unwrap();
                }
            });
        }
        for save in 0..20 {
            let frozen = store.freeze(SaveId(save), SaveScope::Everything).unwrap();
            let copy = Store::new(config()).unwrap();
            for snapshot in save_all(&frozen) {
                copy.restore_slot(snapshot.as_bytes()).unwrap();
            }
            frozen.complete();
            assert!(copy.rows() >= 2_998, "{} rows", copy.rows());
        }
        stop.store(true, Ordering::Relaxed);
    });
}

/// A watchdog on a restore, a save or a digest of many rows sees progress. Training does not count
/// as such.
#[test]
fn every_slot_cleared_restored_or_saved_counts_as_work() {
    let store = store();
    let mut before = store.work_done();
    let mut slots_since = || store.work_done() - std::mem::replace(&mut before, store.work_done());
    insert(&store, GroupId(0), key(1));
    update(&store, GroupId(0), key(1), 1);
    assert_eq!(slots_since(), 0);
    digests(&store);
    assert_eq!(slots_since(), u64::from(SLOTS));
    let frozen = store.freeze(SaveId(1), SaveScope::Everything).unwrap();
    let snapshots = save_all(&frozen);
    frozen.complete();
    assert_eq!(slots_since(), u64::from(SLOTS));
    store.clear_slot(Slot(0)).unwrap();
    assert_eq!(slots_since(), 1);
    for snapshot in &snapshots {
        store.restore_slot(snapshot.as_bytes()).unwrap();
    }
    assert_eq!(slots_since(), u64::from(SLOTS));
    assert!(store.restore_slot(&[]).is_err());
    assert_eq!(slots_since(), 0);
}
