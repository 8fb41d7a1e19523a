//! The lives of rows as a store's callers see them: keys that get a row at their n-th update,
//! beside groups that keep every key. Sightings are counted exactly, and survive everything that
//! rows survive.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use proptest::prelude::*;
use rectrain_embedding::{
    AdmitAfter, Budget, BudgetUnit, FeatureKey, FrozenStore, GroupId, Initializer, Kept, LifePolicy, Missing, Moment,
    RowSpec, SaveId, SaveScope, Slot, SlotContent, SlotSnapshot, SnapshotError, SparseOptimizer, SpecError, Store,
    StoreConfig, StoreError, UpdateCounts, ValueType,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

const SLOTS: u32 = 3;
const DIM: usize = 3;
/// Admits at the third update.
const THIRD: GroupId = GroupId(0);
/// Keeps every key.
const ALL: GroupId = GroupId(1);

fn admit_after(count: u32, counters: u64) -> LifePolicy {
    LifePolicy::AdmitAfter(AdmitAfter { count, counters })
}

fn spec(life: LifePolicy) -> RowSpec {
    RowSpec {
        dim: DIM,
        value_type: ValueType::F32,
        optimizer: SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-6 },
        life,
        initializer: Initializer::Normal { standard_deviation: 0.1 },
        zero_columns: 0,
        first_order: None,
        share: None,
    }
}

fn config_of(groups: Vec<RowSpec>) -> StoreConfig {
    StoreConfig { slots: SLOTS, seed: 7, groups, budget: None }
}

fn config() -> StoreConfig {
    let adam = SparseOptimizer::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
    let half = RowSpec { value_type: ValueType::F16, optimizer: adam, ..spec(admit_after(2, 10_000)) };
    config_of(vec![spec(admit_after(3, 10_000)), spec(LifePolicy::KeepAll), half, spec(admit_after(1, 1))])
}

fn store() -> Arc<Store> {
    let store = Arc::new(Store::new(config()).unwrap());
    store.track_changes(true);
    store
}

fn key(number: u64) -> FeatureKey {
    FeatureKey(xxh3_64(&number.to_le_bytes()))
}

fn keys(numbers: impl IntoIterator<Item = u64>) -> Vec<FeatureKey> {
    numbers.into_iter().map(key).collect()
}

fn gradients(seed: u64, keys: usize) -> Vec<f32> {
    let number = |i: u64| (xxh3_64(&(seed << 32 | i).to_le_bytes()) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    (0..(keys * DIM) as u64).map(number).collect()
}

fn read(store: &Store, group: GroupId, key: FeatureKey, missing: Missing) -> [f32; DIM] {
    let mut values = [f32::NAN; DIM];
    store.lookup(group, &[key], missing, &mut values).unwrap();
    values
}

/// A training step: look-up and update.
fn train(store: &Store, group: GroupId, keys: &[FeatureKey], step: u64) -> UpdateCounts {
    store.lookup(group, keys, Missing::Insert, &mut vec![0.0; keys.len() * DIM]).unwrap();
    store.update(group, keys, &gradients(step, keys.len()), step).unwrap()
}

/// Steps over overlapping keys in every group.
fn train_all(store: &Store, steps: std::ops::Range<u64>) {
    for step in steps {
        for group in 0..store.config().groups.len() as u16 {
            train(store, GroupId(group), &keys(step * 5..step * 5 + 30), step);
        }
    }
}

fn digests(store: &Store) -> Vec<[u8; 32]> {
    store.digests(0..store.config().slots).unwrap()
}

// ---- admission ---------------------------------------------------------------------------------

#[test]
fn a_key_gets_its_row_at_its_third_update() {
    let store = store();
    let initial = read(&store, THIRD, key(1), Missing::ReadInitial);
    for step in 1..=2 {
        let counts = train(&store, THIRD, &[key(1)], step);
        assert_eq!(counts, UpdateCounts { turned_away: 1, ..UpdateCounts::default() });
        assert_eq!(read(&store, THIRD, key(1), Missing::Insert), initial, "a counted key is no row");
        assert!(!store.contains(THIRD, key(1)).unwrap());
    }
    let counts = train(&store, THIRD, &[key(1)], 3);
    assert_eq!(counts, UpdateCounts { admitted: 1, applied: 1, ..UpdateCounts::default() });
    assert!(store.contains(THIRD, key(1)).unwrap());
    assert_ne!(read(&store, THIRD, key(1), Missing::ReadInitial), initial, "its gradient is applied");
    let counts = train(&store, THIRD, &[key(1)], 4);
    assert_eq!(counts, UpdateCounts { applied: 1, ..UpdateCounts::default() });
    // A removed row's key is counted from 0.
    store.remove(THIRD, key(1)).unwrap();
    assert_eq!(train(&store, THIRD, &[key(1)], 5).turned_away, 1);
    assert_eq!(train(&store, THIRD, &[key(1)], 6).turned_away, 1);
    assert_eq!(train(&store, THIRD, &[key(1)], 7).admitted, 1);
}

/// The rows of a store, in key order: group, key, values and optimizer state.
fn rows(store: &Store) -> Vec<(GroupId, FeatureKey, Vec<f32>, Vec<f32>)> {
    let mut rows = Vec::new();
    for slot in (0..SLOTS).map(Slot) {
        let visit =
            |group, key, values: &[f32], state: &[f32]| rows.push((group, key, values.to_vec(), state.to_vec()));
        store.for_each_row(slot, visit).unwrap();
    }
    rows
}

#[test]
fn a_row_is_trained_from_the_update_that_admits_it() {
    let admitting = store();
    let keeping = Store::new(config_of(config().groups.into_iter().map(keeping_all).collect())).unwrap();
    for (group, count) in [(THIRD, 3), (ALL, 1), (GroupId(2), 2), (GroupId(3), 1)] {
        for step in 1..6 {
            train(&admitting, group, &keys(0..40), step);
            if step >= count {
                train(&keeping, group, &keys(0..40), step);
            }
        }
    }
    assert_eq!(rows(&admitting), rows(&keeping));
    assert_eq!(digests(&admitting), digests(&keeping), "no counter of an admitted key is left");
}

fn keeping_all(spec: RowSpec) -> RowSpec {
    RowSpec { life: LifePolicy::KeepAll, ..spec }
}

#[test]
fn look_ups_count_no_sighting() {
    let store = store();
    train(&store, THIRD, &[key(1)], 1);
    let before = digests(&store);
    for missing in [Missing::Insert, Missing::ReadInitial] {
        for _ in 0..5 {
            let mut values = [0.0; DIM];
            let counts = store.lookup(THIRD, &[key(1)], missing, &mut values).unwrap();
            assert_eq!((counts.found, counts.inserted, counts.missing), (0, 0, 1));
        }
    }
    assert_eq!(digests(&store), before);
    assert_eq!(store.rows(), 0);
}

#[test]
fn a_turned_away_gradient_never_reaches_its_neighbours() {
    for turned_away in [0, 1, 33, 68, 69] {
        let batch = keys(0..70);
        let (store, alone) = (store(), store());
        for (position, &key) in batch.iter().enumerate() {
            let sightings = if position == turned_away { 1 } else { 3 };
            for step in 1..=sightings {
                for store in [&store, &alone] {
                    store.update(THIRD, &[key], &[0.5; DIM], step).unwrap();
                }
            }
        }
        let gradients = gradients(9, batch.len());
        let counts = store.update(THIRD, &batch, &gradients, 9).unwrap();
        assert_eq!((counts.applied, counts.turned_away), (69, 1));
        for (position, gradient) in gradients.chunks(DIM).enumerate() {
            alone.update(THIRD, &batch[position..=position], gradient, 9).unwrap();
        }
        assert_eq!(digests(&store), digests(&alone), "key {turned_away} is turned away");
    }
}

#[test]
fn a_gradient_that_is_not_finite_is_a_sighting_and_is_not_applied() {
    let store = store();
    let initial = read(&store, THIRD, key(1), Missing::ReadInitial);
    for step in 1..=2 {
        let counts = store.update(THIRD, &[key(1)], &[f32::NAN; DIM], step).unwrap();
        assert_eq!((counts.turned_away, counts.non_finite), (1, 0));
    }
    let counts = store.update(THIRD, &[key(1)], &[f32::INFINITY; DIM], 3).unwrap();
    assert_eq!((counts.admitted, counts.non_finite, counts.applied), (1, 1, 0));
    assert_eq!(read(&store, THIRD, key(1), Missing::ReadInitial), initial);
}

#[test]
fn a_key_that_repeats_in_a_batch_is_seen_each_time() {
    let store = store();
    let batch = keys([1, 2, 1, 1, 2, 1]);
    let counts = store.update(THIRD, &batch, &gradients(1, batch.len()), 1).unwrap();
    assert_eq!((counts.turned_away, counts.admitted, counts.applied), (4, 1, 2));
    assert!(store.contains(THIRD, key(1)).unwrap() && !store.contains(THIRD, key(2)).unwrap());
}

#[test]
fn a_budget_removes_no_row_of_these_policies() {
    let store = Store::new(StoreConfig { budget: Some(Budget { unit: BudgetUnit::Rows, limit: 1 }), ..config() });
    let store = store.unwrap();
    train_all(&store, 1..5);
    let rows = store.rows();
    assert_eq!(store.keep_budget(Slot(0), Moment(u64::MAX)).unwrap(), Kept::default());
    assert_eq!(store.rows(), rows);
    assert!(matches!(store.keep_budget(Slot(SLOTS), Moment(1)), Err(StoreError::UnknownSlot { .. })));
}

// ---- a naive reference -------------------------------------------------------------------------

#[derive(Clone, Debug)]
enum Operation {
    Train(u16, Vec<u64>),
    Evaluate(u16, Vec<u64>),
    Remove(u16, u64),
    /// The slot is replaced by itself, as after a move to another process and back.
    Replace(u32),
    Clear(u32),
}

fn operation() -> impl Strategy<Value = Operation> {
    let batch = || prop::collection::vec(0_u64..40, 0..30);
    prop_oneof![
        8 => (0_u16..4, batch()).prop_map(|(group, keys)| Operation::Train(group, keys)),
        2 => (0_u16..4, batch()).prop_map(|(group, keys)| Operation::Evaluate(group, keys)),
        3 => (0_u16..4, 0_u64..40).prop_map(|(group, key)| Operation::Remove(group, key)),
        1 => (0..SLOTS).prop_map(Operation::Replace),
        1 => (0..SLOTS).prop_map(Operation::Clear),
    ]
}

fn run(store: &Store, operations: &[Operation], first_step: u64) {
    for (step, operation) in (first_step..).zip(operations) {
        match operation {
            Operation::Train(group, numbers) => {
                train(store, GroupId(*group), &keys(numbers.clone()), step);
            }
            Operation::Evaluate(group, numbers) => {
                let keys = keys(numbers.clone());
                let mut values = vec![0.0; keys.len() * DIM];
                store.lookup(GroupId(*group), &keys, Missing::ReadInitial, &mut values).unwrap();
            }
            Operation::Remove(group, number) => {
                store.remove(GroupId(*group), key(*number)).unwrap();
            }
            Operation::Replace(slot) => {
                let own = store.snapshot_slot(Slot(*slot)).unwrap();
                store.restore_slot(own.as_bytes()).unwrap();
            }
            Operation::Clear(slot) => {
                store.clear_slot(Slot(*slot)).unwrap();
            }
        }
    }
}

/// A map of sightings beside a store that keeps every key and is trained with admitted keys only.
struct Reference {
    plain: Store,
    sightings: BTreeMap<(u16, u64), u32>,
}

impl Reference {
    fn new() -> Self {
        let groups = config().groups.into_iter().map(keeping_all).collect();
        Self { plain: Store::new(config_of(groups)).unwrap(), sightings: BTreeMap::new() }
    }

    fn train(&mut self, group: u16, numbers: &[u64], step: u64) -> UpdateCounts {
        let count = [3, 0, 2, 1][usize::from(group)];
        let (keys, gradients) = (keys(numbers.to_vec()), gradients(step, numbers.len()));
        let mut counts = UpdateCounts::default();
        for (key, gradient) in keys.iter().zip(gradients.chunks(DIM)) {
            if !self.plain.contains(GroupId(group), *key).unwrap() {
                let seen = self.sightings.entry((group, key.0)).or_default();
                *seen += 1;
                if *seen < count {
                    counts.turned_away += 1;
                    continue;
                }
                self.sightings.remove(&(group, key.0));
                read(&self.plain, GroupId(group), *key, Missing::Insert);
                counts.admitted += u64::from(GroupId(group) != ALL);
            }
            self.plain.update(GroupId(group), &[*key], gradient, step).unwrap();
            counts.applied += 1;
        }
        counts
    }

    fn clear(&mut self, slot: Slot) {
        self.plain.clear_slot(slot).unwrap();
        let plain = &self.plain;
        self.sightings.retain(|&(_, key), _| plain.slot_of(FeatureKey(key)) != slot);
    }

    /// Brings every counted key of the store to its row, which is at the update that the map says.
    fn check(mut self, store: &Store) {
        for group in 0..4 {
            for number in 0..40 {
                let seen = self.sightings.get(&(group, key(number).0)).copied();
                let contains = self.plain.contains(GroupId(group), key(number)).unwrap();
                assert_eq!(store.contains(GroupId(group), key(number)).unwrap(), contains);
                assert!(seen.is_none() || !contains);
                for step in 1_000..1_003 {
                    assert_eq!(train(store, GroupId(group), &[key(number)], step), self.train(group, &[number], step));
                }
            }
        }
        assert!(self.sightings.is_empty());
        assert_eq!(digests(store), digests(&self.plain));
    }
}

proptest! {
    #[test]
    fn sightings_are_those_of_a_naive_map(operations in prop::collection::vec(operation(), 1..60)) {
        let (store, mut reference) = (store(), Reference::new());
        for (step, operation) in (1..).zip(&operations) {
            match operation {
                Operation::Train(group, numbers) => {
                    let counts = train(&store, GroupId(*group), &keys(numbers.clone()), step);
                    prop_assert_eq!(counts, reference.train(*group, numbers, step));
                }
                Operation::Remove(group, number) => {
                    run(&store, std::slice::from_ref(operation), step);
                    reference.plain.remove(GroupId(*group), key(*number)).unwrap();
                }
                Operation::Clear(slot) => {
                    run(&store, std::slice::from_ref(operation), step);
                    reference.clear(Slot(*slot));
                }
                Operation::Evaluate(..) | Operation::Replace(_) => run(&store, std::slice::from_ref(operation), step),
            }
        }
        reference.check(&store);
    }
}

// ---- threads and stores ------------------------------------------------------------------------

#[test]
fn the_digest_is_the_same_for_any_number_of_threads() {
    let alone = store();
    for worker in 0..4 {
        work(&alone, worker);
    }
    let shared = store();
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let shared = &shared;
            scope.spawn(move || work(shared, worker));
        }
        for save in 0..10 {
            let frozen = shared.freeze(SaveId(save), SaveScope::Everything).unwrap();
            save_all(&frozen);
            frozen.complete();
        }
    });
    assert_eq!(digests(&shared), digests(&alone));
}

/// Trains keys of this worker alone. They share slots and blocks with the keys of other workers.
fn work(store: &Store, worker: u64) {
    for step in 1..40 {
        let numbers = (step * 3..step * 3 + 50).map(|number| number * 4 + worker);
        let batch = keys(numbers);
        for group in 0..4 {
            train(store, GroupId(group), &batch, step);
        }
    }
}

#[test]
fn the_digest_is_the_same_for_any_number_of_stores_and_pieces() {
    // Too few counters, so that sightings are forgotten too.
    let config = config_of(vec![spec(admit_after(3, 100))]);
    let whole = Store::new(config.clone()).unwrap();
    let parts: Vec<Store> = (0..SLOTS).map(|_| Store::new(config.clone()).unwrap()).collect();
    let (mut forgotten, mut forgotten_by_parts) = (0, 0);
    for step in 1..60 {
        let mut batch = keys((0..80).map(|number| number * number * step % 700));
        batch.sort_unstable();
        batch.dedup();
        let gradients = gradients(step, batch.len());
        forgotten += whole.update(THIRD, &batch, &gradients, step).unwrap().forgotten;
        // Each store gets the keys of its slot, after any number of look-ups.
        for (slot, store) in parts.iter().enumerate() {
            for (key, gradient) in batch.iter().zip(gradients.chunks(DIM)) {
                if whole.slot_of(*key) == Slot(slot as u32) {
                    for _ in 0..slot {
                        read(store, THIRD, *key, Missing::Insert);
                    }
                    forgotten_by_parts += store.update(THIRD, &[*key], gradient, step).unwrap().forgotten;
                }
            }
        }
    }
    assert!(forgotten > 100 && whole.rows() > 100, "{forgotten} forgotten, {} rows", whole.rows());
    assert_eq!(forgotten, forgotten_by_parts);
    let by_parts: Vec<[u8; 32]> =
        (0..SLOTS).map(|slot| parts[slot as usize].slot_digest(Slot(slot)).unwrap()).collect();
    assert_eq!(digests(&whole), by_parts);
}

// ---- bounds ------------------------------------------------------------------------------------

#[test]
fn counters_take_no_more_than_their_size_and_losses_are_counted() {
    // 21 counters a block, and 16 blocks a slot.
    let counters = u64::from(SLOTS) * 16 * 21;
    let store = Store::new(config_of(vec![spec(admit_after(3, counters))])).unwrap();
    let (mut turned_away, mut forgotten) = (0, 0);
    for step in 1..200 {
        // Keys of one sighting each, and one that is seen every time.
        let numbers = (0..200).map(|number| if number == 0 { 0 } else { step * 1_000 + number });
        let batch = keys(numbers);
        let counts = store.update(THIRD, &batch, &gradients(step, batch.len()), step).unwrap();
        (turned_away, forgotten) = (turned_away + counts.turned_away, forgotten + counts.forgotten);
    }
    assert!(store.contains(THIRD, key(0)).unwrap(), "a flood of rare keys does not keep a frequent one out");
    assert_eq!(store.rows(), 1);
    // Two sightings of the admitted key were turned away. All others are counted still, or
    // forgotten.
    let counted = turned_away - 2 - forgotten;
    assert!(counted <= counters && counted > counters * 9 / 10, "{counted} of {counters}");
    let bytes = store.bytes();
    assert!(bytes.overhead < 16 * 3 * 256 + 10_000, "{bytes:?}");
}

#[test]
fn a_group_without_counters_takes_no_memory_for_them() {
    let keeping = Store::new(config_of(vec![spec(LifePolicy::KeepAll)])).unwrap();
    let admitting = Store::new(config_of(vec![spec(admit_after(3, 1 << 30))])).unwrap();
    assert!(admitting.bytes().overhead < keeping.bytes().overhead + 1_000, "no key has been seen yet");
}

#[test]
fn settings_out_of_range_are_refused_by_name() {
    for (life, name) in
        [(admit_after(0, 1), "count"), (admit_after(1, 0), "counters"), (admit_after(1, u64::MAX), "counters")]
    {
        match Store::new(config_of(vec![spec(life)])).map(drop) {
            Err(StoreError::Spec(SpecError::InGroup { source, .. })) => {
                assert!(source.to_string().starts_with(&format!("the row life's {name} is")), "{source}");
            }
            other => panic!("{other:?}"),
        }
    }
}

// ---- snapshots, freezes and moves --------------------------------------------------------------

fn save_all(frozen: &FrozenStore) -> Vec<SlotSnapshot> {
    (0..SLOTS).map(|slot| frozen.save_slot(Slot(slot)).unwrap()).collect()
}

fn restored(snapshots: &[SlotSnapshot]) -> Arc<Store> {
    let store = store();
    for snapshot in snapshots {
        let restored = store.restore_slot(snapshot.as_bytes()).unwrap();
        assert_eq!((restored.rows, restored.removed), (snapshot.rows(), snapshot.removed()));
    }
    store
}

#[test]
fn a_digest_covers_the_counters() {
    let (first, second) = (store(), store());
    train(&first, THIRD, &[key(1)], 1);
    assert_ne!(digests(&first), digests(&second));
    train(&second, THIRD, &[key(2)], 1);
    assert_ne!(digests(&first), digests(&second));
    train(&first, THIRD, &[key(2)], 2);
    train(&second, THIRD, &[key(1)], 2);
    assert_eq!(digests(&first), digests(&second), "in whatever order keys were seen");
    train(&first, THIRD, &[key(1)], 3);
    assert_ne!(digests(&first), digests(&second), "the number of sightings counts");
}

#[test]
fn a_restored_store_continues_in_mid_count() {
    let first = store();
    train_all(&first, 1..8);
    let snapshots: Vec<SlotSnapshot> = (0..SLOTS).map(|slot| first.snapshot_slot(Slot(slot)).unwrap()).collect();
    let second = restored(&snapshots);
    assert_eq!(digests(&first), digests(&second));
    let again: Vec<SlotSnapshot> = (0..SLOTS).map(|slot| second.snapshot_slot(Slot(slot)).unwrap()).collect();
    assert_eq!(snapshots, again, "equal contents are equal bytes");
    train_all(&first, 8..12);
    train_all(&second, 8..12);
    assert_eq!(digests(&first), digests(&second));
    assert_eq!(Store::config_of_snapshot(snapshots[0].as_bytes()).unwrap(), config());
    // Counters that the slot had before the restore are gone.
    let third = store();
    train_all(&third, 50..53);
    for snapshot in &snapshots {
        third.restore_slot(snapshot.as_bytes()).unwrap();
    }
    assert_eq!(digests(&third), digests(&restored(&snapshots)));
}

proptest! {
    /// Takes a base and then saves of changes, with operations of all kinds before, during and
    /// after each. Restored in order, they equal the store at the last completed freeze, counters
    /// included.
    #[test]
    fn a_base_and_its_changes_are_the_store_of_that_instant(
        before in prop::collection::vec(operation(), 0..40),
        saves in prop::collection::vec(
            (prop::collection::vec(operation(), 0..20), prop::collection::vec(operation(), 0..20), any::<bool>()), 1..4,
        ),
    ) {
        let store = store();
        run(&store, &before, 1);
        let frozen = store.freeze(SaveId(0), SaveScope::Everything).unwrap();
        let mut expected = digests(&store);
        run(&store, &saves[0].1, 100);
        let mut chain = save_all(&frozen);
        frozen.complete();
        let mut base = SaveId(0);
        for (number, (earlier, during, completes)) in (1..).zip(&saves) {
            run(&store, earlier, 200);
            let frozen = store.freeze(SaveId(number), SaveScope::ChangesSince(base)).unwrap();
            let now = digests(&store);
            run(&store, during, 300);
            if *completes {
                chain.extend(save_all(&frozen));
                frozen.complete();
                (expected, base) = (now, SaveId(number));
            } else {
                frozen.save_slot(Slot(0)).unwrap();
                drop(frozen);
            }
            prop_assert_eq!(&digests(&restored(&chain)), &expected);
        }
        let frozen = store.freeze(SaveId(99), SaveScope::ChangesSince(base)).unwrap();
        chain.extend(save_all(&frozen));
        prop_assert_eq!(digests(&restored(&chain)), digests(&store));
    }
}

#[test]
fn changes_hold_only_the_blocks_that_changed() {
    let store = Arc::new(Store::new(config_of(vec![spec(admit_after(3, 100_000))])).unwrap());
    store.track_changes(true);
    train(&store, THIRD, &keys(0..5_000), 1);
    let frozen = store.freeze(SaveId(1), SaveScope::Everything).unwrap();
    let whole: usize = save_all(&frozen).iter().map(|snapshot| snapshot.as_bytes().len()).sum();
    frozen.complete();
    train(&store, THIRD, &keys([17]), 2);
    let frozen = store.freeze(SaveId(2), SaveScope::ChangesSince(SaveId(1))).unwrap();
    let changes = save_all(&frozen);
    assert!(changes.iter().all(|snapshot| snapshot.content() == SlotContent::Changes && snapshot.rows() == 0));
    let changes: usize = changes.iter().map(|snapshot| snapshot.as_bytes().len()).sum();
    let empty = 3 * (48 + 68 + 40 + 8);
    assert_eq!(changes, empty + 256, "one block of 256 bytes");
    assert!(whole > 5_000 * 12, "{whole}");
}

#[test]
fn a_slot_that_moves_in_mid_count_is_the_same_slot() {
    let numbers: Vec<u64> = (0..400).collect();
    let in_slot = |store: &Store, number: &u64| store.slot_of(key(*number)) == Slot(1);
    for most_bytes in [0, 300, 1_000, 5_000, 1 << 20] {
        let (source, target) = (store(), store());
        train_all(&source, 1..10);
        train_all(&target, 30..35);
        let parts = source.snapshot_slot_in_parts(Slot(1), most_bytes).unwrap();
        // Training continues while the parts are sent.
        train_all(&source, 10..14);
        let changed: Vec<FeatureKey> =
            numbers.iter().filter(|number| in_slot(&source, number)).copied().map(key).collect();
        let names: Vec<(GroupId, FeatureKey)> =
            (0..4).flat_map(|group| changed.iter().map(move |&key| (GroupId(group), key))).collect();
        for part in &parts {
            target.restore_slot(part.as_bytes()).unwrap();
        }
        for names in names.chunks(source.rows_within(most_bytes)) {
            target.restore_slot(source.snapshot_rows(Slot(1), names).unwrap().as_bytes()).unwrap();
        }
        assert_eq!(target.slot_digest(Slot(1)).unwrap(), source.slot_digest(Slot(1)).unwrap(), "{most_bytes} bytes");
        source.clear_slot(Slot(1)).unwrap();
        assert_eq!(source.slot_digest(Slot(1)).unwrap(), store().slot_digest(Slot(1)).unwrap());
        if most_bytes >= 300 {
            let head = 48 + 4 * 68 + 3 * 40 + 8;
            assert!(parts.iter().all(|part| part.as_bytes().len() <= most_bytes + head));
        }
    }
}

// ---- refusals ----------------------------------------------------------------------------------

/// Makes the checksum right again after a change.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let body = bytes.len() - 8;
    let checksum = xxh3_64(&bytes[..body]).to_le_bytes();
    bytes[body..].copy_from_slice(&checksum);
    bytes
}

fn refusal(store: &Store, bytes: &[u8]) -> SnapshotError {
    let before = digests(store);
    match store.restore_slot(bytes) {
        Err(StoreError::Snapshot(error)) => {
            assert_eq!(digests(store), before, "a refused snapshot changes nothing");
            error
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_snapshot_of_another_life_is_refused_by_name() {
    let admitting = Store::new(config_of(vec![spec(admit_after(3, 100))])).unwrap();
    let bytes = admitting.snapshot_slot(Slot(0)).unwrap().into_bytes();
    for life in [LifePolicy::KeepAll, admit_after(2, 100), admit_after(3, 101)] {
        let other = Store::new(config_of(vec![spec(life)])).unwrap();
        assert!(matches!(refusal(&other, &bytes), SnapshotError::Spec { .. }), "{life:?}");
        let bytes = other.snapshot_slot(Slot(0)).unwrap().into_bytes();
        assert!(matches!(refusal(&admitting, &bytes), SnapshotError::Spec { .. }), "{life:?}");
    }
    let mut unknown = bytes;
    unknown[48 + 11] = 9;
    let error = refusal(&admitting, &sealed(unknown));
    assert_eq!(error, SnapshotError::Field { field: "row life", found: 9 });
}

#[test]
fn a_block_that_no_policy_wrote_is_refused() {
    let store = Store::new(config_of(vec![spec(admit_after(3, 1_000))])).unwrap();
    train(&store, THIRD, &keys(0..100), 1);
    let good = store.snapshot_slot(Slot(1)).unwrap().into_bytes();
    let first_block = 48 + 68 + 40;
    let changed = |change: &dyn Fn(&mut [u8])| {
        let mut bytes = good.clone();
        change(&mut bytes[first_block..]);
        refusal(&store, &sealed(bytes))
    };
    let is_block = |error: SnapshotError| matches!(error, SnapshotError::Block { group: THIRD, .. });
    assert!(is_block(changed(&|block| block[0..4].fill(0xff))), "an unknown number");
    assert!(is_block(changed(&|block| block.copy_within(256..260, 0))), "a number that repeats");
    assert!(is_block(changed(&|block| block[12] = 3)), "a count that gives a row");
    assert!(is_block(changed(&|block| block[4..12].fill(0))), "a key of another slot");
    assert!(is_block(changed(&|block| block[255] = 1)), "a counter behind free ones");
}

proptest! {
    #[test]
    fn damaged_counters_with_a_right_checksum_never_panic(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let store = Store::new(config_of(vec![spec(admit_after(3, 1_000)), spec(LifePolicy::KeepAll)])).unwrap();
        train(&store, THIRD, &keys(0..20), 1);
        train(&store, THIRD, &keys(0..5), 2);
        train(&store, THIRD, &keys(0..2), 3);
        let mut bytes = store.snapshot_slot(Slot(0)).unwrap().into_bytes();
        for (place, value) in damage {
            let place = place.index(bytes.len() - 8);
            bytes[place] = value;
        }
        let before = digests(&store);
        if store.restore_slot(&sealed(bytes)).is_err() {
            prop_assert_eq!(digests(&store), before);
        }
        train(&store, THIRD, &keys(0..30), 4);
    }
}
