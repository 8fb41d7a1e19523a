//! The store as its callers see it: against a naive reference, through snapshots, from several
//! threads, and with the requests that earlier systems got wrong.

// Helpers outside the test functions unwrap too.
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use half::{bf16, f16};
use proptest::prelude::*;
use rectrain_embedding::{
    FeatureKey, GroupId, Initializer, LifePolicy, LookupCounts, Missing, RowSpec, Slot, SnapshotError, SparseOptimizer,
    Store, StoreConfig, StoreError, UpdateCounts, ValueType, slot_of,
};
use rectrain_kinds::SparseOptimizerKind;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use xxhash_rust::xxh3::xxh3_64;

const SEED: u64 = 11;
const SLOTS: u32 = 3;
const GROUP: GroupId = GroupId(0);

const SGD: SparseOptimizer = SparseOptimizer::Sgd { learning_rate: 0.5 };
const ADAGRAD: SparseOptimizer =
    SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-6 };
const ROW_WISE: SparseOptimizer =
    SparseOptimizer::RowWiseAdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-6 };
const ADAM: SparseOptimizer = SparseOptimizer::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
const FTRL: SparseOptimizer = SparseOptimizer::Ftrl { learning_rate: 0.25, beta: 1.0, l1: 0.01, l2: 0.125 };
const OPTIMIZERS: [SparseOptimizer; 5] = [SGD, ADAGRAD, ROW_WISE, ADAM, FTRL];

fn spec(dim: usize, value_type: ValueType, optimizer: SparseOptimizer) -> RowSpec {
    RowSpec {
        dim,
        value_type,
        optimizer,
        life: LifePolicy::KeepAll,
        initializer: Initializer::Normal { standard_deviation: 0.1 },
        zero_columns: 1,
        first_order: None,
        share: None,
    }
}

/// Every optimizer, every value type, even and odd dimensions.
fn all_specs() -> Vec<RowSpec> {
    let value_types = [ValueType::F32, ValueType::F16, ValueType::Bf16];
    let pairs = OPTIMIZERS.iter().flat_map(|&o| value_types.map(|v| (o, v)));
    pairs.enumerate().map(|(i, (optimizer, value_type))| spec(3 + i % 8, value_type, optimizer)).collect()
}

/// Each pair of optimizers for the first-order weight and for the other columns.
fn specs_of_two_optimizers() -> Vec<RowSpec> {
    let value_types = [ValueType::F32, ValueType::F16, ValueType::Bf16];
    let pairs = OPTIMIZERS.iter().flat_map(|&first_order| OPTIMIZERS.map(|optimizer| (first_order, optimizer)));
    let of_pair = |(i, (first_order, optimizer)): (usize, (SparseOptimizer, SparseOptimizer))| RowSpec {
        first_order: Some(first_order),
        zero_columns: 1 + i % 2,
        ..spec(3 + i % 8, value_types[i % 3], optimizer)
    };
    pairs.enumerate().map(of_pair).collect()
}

fn store_with(slots: u32, groups: Vec<RowSpec>) -> Store {
    Store::new(StoreConfig { slots, seed: SEED, groups, budget: None }).unwrap()
}

/// Key number `i` of a well-mixed sequence.
fn key(i: u64) -> FeatureKey {
    FeatureKey(xxh3_64(&i.to_le_bytes()))
}

fn keys(range: std::ops::Range<u64>) -> Vec<FeatureKey> {
    range.map(key).collect()
}

fn dim(store: &Store, group: GroupId) -> usize {
    store.spec(group).unwrap().dim
}

fn lookup(store: &Store, group: GroupId, keys: &[FeatureKey], missing: Missing) -> (LookupCounts, Vec<f32>) {
    let mut out = vec![f32::NAN; keys.len() * dim(store, group)];
    let counts = store.lookup(group, keys, missing, &mut out).unwrap();
    (counts, out)
}

fn insert(store: &Store, group: GroupId, keys: &[FeatureKey]) {
    lookup(store, group, keys, Missing::Insert);
}

fn read(store: &Store, group: GroupId, key: FeatureKey) -> Vec<f32> {
    lookup(store, group, &[key], Missing::ReadInitial).1
}

fn digests(store: &Store) -> Vec<[u8; 32]> {
    store.digests(0..store.config().slots).unwrap()
}

/// A gradient that differs for every seed and column.
fn gradient(seed: u64, dim: usize) -> Vec<f32> {
    let element = |column| {
        let bits = xxh3_64(&(seed * 1_000 + column as u64).to_le_bytes());
        (bits >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..dim).map(element).collect()
}

fn gradients(seeds: std::ops::Range<u64>, dim: usize) -> Vec<f32> {
    seeds.flat_map(|seed| gradient(seed, dim)).collect()
}

/// Trains every group for some steps on overlapping keys.
fn train(store: &Store, updates: std::ops::Range<u64>) {
    for count in updates {
        for group in (0..store.config().groups.len()).map(|g| GroupId(g as u16)) {
            let batch = keys(count * 7..count * 7 + 40);
            insert(store, group, &batch);
            let gradients = gradients(count * 100..count * 100 + 40, dim(store, group));
            store.update(group, &batch, &gradients, count).unwrap();
        }
    }
}

// ---- a naive reference -------------------------------------------------------------------------

/// Rows by (key, group): values as f32 and optimizer state.
type Rows = BTreeMap<(u64, u16), (Vec<f32>, Vec<f32>)>;

struct Model {
    specs: Vec<RowSpec>,
    rows: Rows,
}

fn rounded(value: f32, value_type: ValueType) -> f32 {
    match value_type {
        ValueType::F32 => value,
        ValueType::F16 => f16::from_f32(value).to_f32(),
        ValueType::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

fn initial_state(optimizer: SparseOptimizer, values: &[f32]) -> Vec<f32> {
    match optimizer {
        SparseOptimizer::Sgd { .. } => vec![],
        SparseOptimizer::AdaGrad { initial_accumulator, .. } => vec![initial_accumulator as f32; values.len()],
        SparseOptimizer::RowWiseAdaGrad { initial_accumulator, .. } => vec![initial_accumulator as f32],
        SparseOptimizer::Adam { .. } => vec![0.0; 2 * values.len()],
        SparseOptimizer::Ftrl { learning_rate, beta, l1, l2 } => {
            let scale = beta / learning_rate + l2;
            let z = values.iter().map(|&w| match f64::from(w) {
                0.0 => 0.0,
                w => -(w * scale + w.signum() * l1) as f32,
            });
            z.chain(values.iter().map(|_| 0.0)).collect()
        }
    }
}

/// The state of a new row. The state of the leading columns comes first if they have an optimizer
/// of their own.
fn initial_state_of_row(spec: &RowSpec, values: &[f32]) -> Vec<f32> {
    let Some(first_order) = spec.first_order else { return initial_state(spec.optimizer, values) };
    let (weights, values) = values.split_at(spec.zero_columns);
    [initial_state(first_order, weights), initial_state(spec.optimizer, values)].concat()
}

/// One gradient on one row of one or two optimizers.
fn apply_to_row(spec: &RowSpec, w: &mut [f32], s: &mut [f32], g: &[f32], t: u64) {
    let Some(first_order) = spec.first_order else { return apply(spec.optimizer, w, s, g, t) };
    let columns = spec.zero_columns;
    let state = initial_state(first_order, &w[..columns]).len();
    apply(first_order, &mut w[..columns], &mut s[..state], &g[..columns], t);
    apply(spec.optimizer, &mut w[columns..], &mut s[state..], &g[columns..], t);
}

/// One gradient on one row, element by element, in f32.
fn apply(optimizer: SparseOptimizer, w: &mut [f32], s: &mut [f32], g: &[f32], t: u64) {
    let d = w.len();
    let mean_square =
        if matches!(optimizer, SparseOptimizer::RowWiseAdaGrad { .. }) { lane_sum(g) / d as f32 } else { 0.0 };
    for i in 0..d {
        match optimizer {
            SparseOptimizer::Sgd { learning_rate } => w[i] -= learning_rate as f32 * g[i],
            SparseOptimizer::AdaGrad { learning_rate, epsilon, .. } => {
                s[i] += g[i] * g[i];
                w[i] -= learning_rate as f32 * (g[i] / (s[i].sqrt() + epsilon as f32));
            }
            SparseOptimizer::RowWiseAdaGrad { learning_rate, epsilon, .. } => {
                if i == 0 {
                    s[0] += mean_square;
                }
                w[i] -= learning_rate as f32 * (g[i] / (s[0].sqrt() + epsilon as f32));
            }
            SparseOptimizer::Adam { learning_rate, beta1, beta2, epsilon } => {
                s[i] += (g[i] - s[i]) * (1.0 - beta1) as f32;
                s[d + i] += (g[i] * g[i] - s[d + i]) * (1.0 - beta2) as f32;
                let corrections = (1.0 - power(beta2, t)).sqrt() / (1.0 - power(beta1, t));
                let rate = (learning_rate * (1.0 - power(beta2, t)).sqrt() / (1.0 - power(beta1, t))) as f32;
                assert!((f64::from(rate) - learning_rate * corrections).abs() < 1e-8);
                w[i] -= rate * (s[i] / (s[d + i].sqrt() + epsilon as f32));
            }
            SparseOptimizer::Ftrl { learning_rate, beta, l1, l2 } => {
                let (inverse, beta) = ((1.0 / learning_rate) as f32, beta as f32);
                let (l1, l2) = (l1 as f32, l2 as f32);
                let n = s[d + i];
                s[d + i] = n + g[i] * g[i];
                let sigma = (s[d + i].sqrt() - n.sqrt()) * inverse;
                s[i] += g[i] - sigma * w[i];
                let z = s[i];
                w[i] = if z.abs() <= l1 {
                    0.0
                } else {
                    -(z - z.signum() * l1) / ((beta + s[d + i].sqrt()) * inverse + l2)
                };
            }
        }
    }
}

fn power(base: f64, exponent: u64) -> f64 {
    match exponent {
        0 => 1.0,
        e if e % 2 == 0 => power(base * base, e / 2),
        e => power(base * base, e / 2) * base,
    }
}

/// The order in which the store documents that it adds squares.
fn lane_sum(g: &[f32]) -> f32 {
    let lane = |l: usize| g.iter().skip(l).step_by(8).map(|g| g * g).fold(0.0, |a, b| a + b);
    ((lane(0) + lane(4)) + (lane(2) + lane(6))) + ((lane(1) + lane(5)) + (lane(3) + lane(7)))
}

impl Model {
    fn initial(&self, group: u16, key: FeatureKey) -> (Vec<f32>, Vec<f32>) {
        let spec = self.specs[group as usize];
        let values = read(&store_with(1, self.specs.clone()), GroupId(group), key);
        let state = initial_state_of_row(&spec, &values);
        (values, state)
    }

    fn lookup(&mut self, group: u16, keys: &[FeatureKey], missing: Missing) -> (LookupCounts, Vec<f32>) {
        let mut counts = LookupCounts::default();
        let mut out = vec![];
        for &key in keys {
            let name = (key.0, group);
            if let Some((values, _)) = self.rows.get(&name) {
                counts.found += 1;
                out.extend_from_slice(values);
                continue;
            }
            let row = self.initial(group, key);
            out.extend_from_slice(&row.0);
            if missing == Missing::Insert {
                counts.inserted += 1;
                self.rows.insert(name, row);
            } else {
                counts.missing += 1;
            }
        }
        (counts, out)
    }

    fn update(&mut self, group: u16, keys: &[FeatureKey], gradients: &[f32], t: u64) -> UpdateCounts {
        let spec = self.specs[group as usize];
        let mut counts = UpdateCounts::default();
        for (i, key) in keys.iter().enumerate() {
            let gradient = &gradients[i * spec.dim..(i + 1) * spec.dim];
            match self.rows.get_mut(&(key.0, group)) {
                None => counts.missing += 1,
                Some(_) if gradient.iter().any(|g| !g.is_finite()) => counts.non_finite += 1,
                Some((values, state)) => {
                    apply_to_row(&spec, values, state, gradient, t);
                    for value in values {
                        *value = rounded(*value, spec.value_type);
                    }
                    counts.applied += 1;
                }
            }
        }
        counts
    }

    fn clear(&mut self, slot: Slot, slots: u32) {
        self.rows.retain(|&(key, _), _| slot_of(FeatureKey(key), slots) != slot);
    }

    fn digest(&self, slot: Slot, slots: u32) -> [u8; 32] {
        let mut hasher = Sha256::new();
        for (&(key, group), (values, state)) in &self.rows {
            if slot_of(FeatureKey(key), slots) != slot {
                continue;
            }
            hasher.update(key.to_le_bytes());
            hasher.update(group.to_le_bytes());
            for &value in values {
                match self.specs[group as usize].value_type {
                    ValueType::F32 => hasher.update(value.to_le_bytes()),
                    ValueType::F16 => hasher.update(f16::from_f32(value).to_le_bytes()),
                    ValueType::Bf16 => hasher.update(bf16::from_f32(value).to_le_bytes()),
                }
            }
            for element in state {
                hasher.update(element.to_le_bytes());
            }
        }
        hasher.finalize().into()
    }
}

#[derive(Clone, Debug)]
enum Operation {
    Lookup { group: u16, keys: Vec<u64>, insert: bool },
    Update { group: u16, keys: Vec<u64>, seed: u64, poisoned: bool },
    Remove { group: u16, key: u64 },
    Snapshot { slot: u32 },
    Restore,
    Clear { slot: u32 },
}

fn operation(groups: u16) -> impl Strategy<Value = Operation> {
    let batch = || prop::collection::vec(0_u64..50, 0..80);
    prop_oneof![
        4 => (0..groups, batch(), any::<bool>())
            .prop_map(|(group, keys, insert)| Operation::Lookup { group, keys, insert }),
        6 => (0..groups, batch(), 0_u64..1_000, prop::bool::weighted(0.2))
            .prop_map(|(group, keys, seed, poisoned)| Operation::Update { group, keys, seed, poisoned }),
        3 => (0..groups, 0_u64..50).prop_map(|(group, key)| Operation::Remove { group, key }),
        1 => (0..SLOTS).prop_map(|slot| Operation::Snapshot { slot }),
        1 => Just(Operation::Restore),
        1 => (0..SLOTS).prop_map(|slot| Operation::Clear { slot }),
    ]
}

/// A store and its reference, with the last snapshot and the reference's rows of then.
struct Pair {
    store: Store,
    model: Model,
    saved: Option<(Slot, Vec<u8>, Rows)>,
    updates: u64,
}

impl Pair {
    fn run(&mut self, operation: Operation) {
        let named = |numbers: &[u64]| numbers.iter().map(|&i| key(i)).collect::<Vec<_>>();
        match operation {
            Operation::Lookup { group, keys, insert } => {
                let missing = if insert { Missing::Insert } else { Missing::ReadInitial };
                let found = lookup(&self.store, GroupId(group), &named(&keys), missing);
                assert_eq!(found, self.model.lookup(group, &named(&keys), missing));
            }
            Operation::Update { group, keys, seed, poisoned } => {
                self.updates += 1;
                let dim = self.model.specs[group as usize].dim;
                let mut gradients = gradients(seed..seed + keys.len() as u64, dim);
                if poisoned && !gradients.is_empty() {
                    let middle = gradients.len() / 2;
                    gradients[middle] = f32::NAN;
                }
                let keys = named(&keys);
                let count = self.updates;
                let counts = self.store.update(GroupId(group), &keys, &gradients, count);
                assert_eq!(counts.unwrap(), self.model.update(group, &keys, &gradients, count));
            }
            Operation::Remove { group, key: i } => {
                let removed = self.store.remove(GroupId(group), key(i)).unwrap();
                assert_eq!(removed, self.model.rows.remove(&(key(i).0, group)).is_some());
            }
            Operation::Snapshot { slot } => {
                let snapshot = self.store.snapshot_slot(Slot(slot)).unwrap();
                assert_eq!(snapshot.rows(), self.store.slot_rows(Slot(slot)).unwrap());
                self.saved = Some((Slot(slot), snapshot.into_bytes(), self.model.rows.clone()));
            }
            Operation::Restore => {
                let Some((slot, bytes, rows)) = &self.saved else { return };
                let restored = self.store.restore_slot(bytes).unwrap();
                assert_eq!(restored.slot, *slot);
                self.model.clear(*slot, SLOTS);
                let of_slot = rows.iter().filter(|((key, _), _)| slot_of(FeatureKey(*key), SLOTS) == *slot);
                self.model.rows.extend(of_slot.map(|(name, row)| (*name, row.clone())));
            }
            Operation::Clear { slot } => {
                let before = self.store.slot_rows(Slot(slot)).unwrap();
                assert_eq!(self.store.clear_slot(Slot(slot)).unwrap(), before);
                self.model.clear(Slot(slot), SLOTS);
            }
        }
    }

    fn compare(&self) {
        assert_eq!(self.store.rows(), self.model.rows.len() as u64);
        let mut seen = Rows::new();
        let mut last = None;
        for slot in (0..SLOTS).map(Slot) {
            assert_eq!(self.store.slot_digest(slot).unwrap(), self.model.digest(slot, SLOTS));
            let visit = |group: GroupId, key: FeatureKey, values: &[f32], state: &[f32]| {
                assert!(last < Some((key, group)), "rows come in key order");
                last = Some((key, group));
                seen.insert((key.0, group.0), (values.to_vec(), state.to_vec()));
            };
            self.store.for_each_row(slot, visit).unwrap();
        }
        assert_eq!(seen, self.model.rows);
    }
}

#[test]
fn every_kind_of_optimizer_is_compared() {
    for kind in SparseOptimizerKind::ALL {
        assert!(OPTIMIZERS.iter().any(|optimizer| optimizer.kind() == kind), "OPTIMIZERS lacks {kind}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn the_store_behaves_to_the_bit_as_a_naive_map_does(
        operations in prop::collection::vec(operation(15), 1..60)
    ) {
        let mut pair = Pair {
            store: store_with(SLOTS, all_specs()),
            model: Model { specs: all_specs(), rows: Rows::new() },
            saved: None,
            updates: 0,
        };
        for operation in operations {
            pair.run(operation);
        }
        pair.compare();
    }

    /// The same with an optimizer of the first-order weights.
    #[test]
    fn rows_of_two_optimizers_behave_to_the_bit_as_a_naive_map_does(
        operations in prop::collection::vec(operation(25), 1..60)
    ) {
        let specs = specs_of_two_optimizers();
        let model = Model { specs: specs.clone(), rows: Rows::new() };
        let mut pair = Pair { store: store_with(SLOTS, specs), model, saved: None, updates: 0 };
        for operation in operations {
            pair.run(operation);
        }
        pair.compare();
    }
}

// ---- missing keys and bad gradients ------------------------------------------------------------

#[test]
fn a_missing_key_does_not_shift_the_gradients_of_its_neighbours() {
    for (group, spec) in all_specs().into_iter().enumerate() {
        let group = GroupId(group as u16);
        let batch = keys(0..70);
        let updates = gradients(0..70, spec.dim);
        for absent in [0, 1, 33, 68, 69] {
            let store = store_with(SLOTS, all_specs());
            insert(&store, group, &batch);
            assert!(store.remove(group, batch[absent]).unwrap());
            let counts = store.update(group, &batch, &updates, 1).unwrap();
            assert_eq!((counts.applied, counts.missing), (69, 1));
            assert!(!store.contains(group, batch[absent]).unwrap());

            let alone = store_with(SLOTS, all_specs());
            insert(&alone, group, &batch);
            for (i, gradient) in updates.chunks(spec.dim).enumerate() {
                if i != absent {
                    alone.update(group, &batch[i..=i], gradient, 1).unwrap();
                }
            }
            alone.remove(group, batch[absent]).unwrap();
            assert_eq!(digests(&store), digests(&alone), "{spec:?}, key {absent} absent");
        }
    }
}

#[test]
fn a_non_finite_gradient_is_counted_and_changes_no_row() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let store = store_with(SLOTS, vec![spec(4, ValueType::F32, ADAM)]);
        insert(&store, GROUP, &keys(0..3));
        let before: Vec<_> = (0..3).map(|i| read(&store, GROUP, key(i))).collect();
        let mut updates = gradients(0..3, 4);
        updates[6] = bad;
        let counts = store.update(GROUP, &keys(0..3), &updates, 1).unwrap();
        assert_eq!((counts.applied, counts.missing, counts.non_finite), (2, 0, 1));
        assert_ne!(read(&store, GROUP, key(0)), before[0]);
        assert_eq!(read(&store, GROUP, key(1)), before[1]);
        assert_ne!(read(&store, GROUP, key(2)), before[2]);
    }
}

#[test]
fn a_repeated_key_is_updated_each_time_in_order() {
    let twice = store_with(SLOTS, vec![spec(4, ValueType::F32, ADAGRAD)]);
    let once = store_with(SLOTS, vec![spec(4, ValueType::F32, ADAGRAD)]);
    for store in [&twice, &once] {
        insert(store, GROUP, &keys(0..2));
    }
    let batch = [key(0), key(1), key(0)];
    let updates = gradients(0..3, 4);
    assert_eq!(twice.update(GROUP, &batch, &updates, 1).unwrap().applied, 3);
    for (i, gradient) in updates.chunks(4).enumerate() {
        once.update(GROUP, &batch[i..=i], gradient, 1).unwrap();
    }
    assert_eq!(digests(&twice), digests(&once));
}

#[test]
fn reading_for_evaluation_makes_no_rows() {
    let store = store_with(SLOTS, all_specs());
    let (counts, read_only) = lookup(&store, GROUP, &keys(0..100), Missing::ReadInitial);
    assert_eq!((counts.missing, store.rows()), (100, 0));
    let (counts, inserted) = lookup(&store, GROUP, &keys(0..100), Missing::Insert);
    assert_eq!((counts.inserted, store.rows()), (100, 100));
    assert_eq!(read_only, inserted);
}

#[test]
fn a_read_returns_the_positions_of_keys_without_a_row() {
    for slots in [1, 7] {
        let store = store_with(slots, all_specs());
        let known: Vec<_> = (0..500).filter(|i| i % 3 > 0).map(key).collect();
        insert(&store, GROUP, &known);
        let mut out = vec![f32::NAN; 500 * dim(&store, GROUP)];
        let missing = store.read(GROUP, &keys(0..500), &mut out).unwrap();
        assert!(missing.into_iter().eq((0..500).step_by(3)), "{slots} slots");
        assert_eq!(out, lookup(&store, GROUP, &keys(0..500), Missing::ReadInitial).1);
        assert!(store.read(GROUP, &keys(0..500), &mut out[1..]).is_err());
    }
}

// ---- initial values, order and threads ---------------------------------------------------------

#[test]
fn initial_values_depend_on_seed_and_key_alone() {
    let first = store_with(1, vec![spec(8, ValueType::F32, SGD)]);
    let second = store_with(97, vec![spec(8, ValueType::F32, ADAM), spec(8, ValueType::F32, FTRL)]);
    let mut backwards = keys(0..200);
    backwards.reverse();
    insert(&first, GROUP, &keys(0..200));
    insert(&second, GroupId(1), &backwards);
    for i in 0..200 {
        assert_eq!(read(&first, GROUP, key(i)), read(&second, GroupId(1), key(i)));
    }
    let other_seed =
        Store::new(StoreConfig { slots: 1, seed: SEED + 1, groups: vec![spec(8, ValueType::F32, SGD)], budget: None })
            .unwrap();
    assert_ne!(read(&first, GROUP, key(0)), read(&other_seed, GROUP, key(0)));
}

#[test]
fn a_row_that_was_lost_starts_again_from_its_initial_values() {
    for (group, spec) in all_specs().into_iter().enumerate() {
        let group = GroupId(group as u16);
        let store = store_with(SLOTS, all_specs());
        insert(&store, group, &[key(5)]);
        let fresh = digests(&store);
        store.update(group, &[key(5)], &gradient(1, spec.dim), 1).unwrap();
        assert_ne!(digests(&store), fresh);
        assert!(store.remove(group, key(5)).unwrap());
        assert!(!store.remove(group, key(5)).unwrap());
        insert(&store, group, &[key(5)]);
        assert_eq!(digests(&store), fresh, "values and state start afresh");
    }
}

#[test]
fn a_digest_does_not_depend_on_history() {
    let forwards = store_with(SLOTS, vec![spec(5, ValueType::F16, ADAM)]);
    insert(&forwards, GROUP, &keys(0..5_000));
    let backwards = store_with(SLOTS, vec![spec(5, ValueType::F16, ADAM)]);
    for i in (0..6_000).rev() {
        insert(&backwards, GROUP, &[key(i)]);
    }
    assert_ne!(digests(&forwards), digests(&backwards));
    for i in 5_000..6_000 {
        assert!(backwards.remove(GROUP, key(i)).unwrap());
    }
    assert_eq!(digests(&forwards), digests(&backwards));
    for slot in (0..SLOTS).map(Slot) {
        let bytes = forwards.snapshot_slot(slot).unwrap();
        assert_eq!(bytes, backwards.snapshot_slot(slot).unwrap());
    }
}

#[test]
fn a_digest_notices_every_kind_of_change() {
    let make = || {
        let store = store_with(1, vec![spec(4, ValueType::F32, ADAGRAD); 2]);
        insert(&store, GROUP, &keys(0..10));
        store
    };
    let base = digests(&make());
    let changed = |change: &dyn Fn(&Store)| {
        let store = make();
        change(&store);
        digests(&store) != base
    };
    assert!(changed(&|s| insert(s, GROUP, &[key(10)])));
    assert!(changed(&|s| insert(s, GroupId(1), &[key(0)])));
    assert!(changed(&|s| drop(s.remove(GROUP, key(3)))));
    assert!(changed(&|s| drop(s.update(GROUP, &[key(3)], &[1e-3; 4], 1))));
    let moved = |s: &Store| {
        s.remove(GROUP, key(3)).unwrap();
        insert(s, GroupId(1), &[key(3)]);
    };
    assert!(changed(&moved), "the group is part of a row's name");
    assert!(!changed(&|s| drop(read(s, GROUP, key(50)))));
}

/// Integer gradients with a rate of 1 from integer values: f32 additions are exact, so updates
/// commute and any interleaving must give the same bits.
#[test]
fn threads_that_commute_give_the_digest_of_one_thread() {
    let whole = RowSpec {
        dim: 4,
        value_type: ValueType::F32,
        optimizer: SparseOptimizer::Sgd { learning_rate: 1.0 },
        life: LifePolicy::KeepAll,
        initializer: Initializer::Constant(0.0),
        zero_columns: 0,
        first_order: None,
        share: None,
    };
    let work = |store: &Store, worker: u64| {
        for round in 0..60 {
            let start = (worker * 37 + round * 101) % 3_000;
            let batch = keys(start..start + 200);
            insert(store, GROUP, &batch);
            let step = (worker + round) % 5;
            let updates = vec![step as f32 - 2.0; batch.len() * 4];
            let counts = store.update(GROUP, &batch, &updates, 1).unwrap();
            assert_eq!(counts.applied, 200);
        }
    };
    let alone = store_with(16, vec![whole]);
    (0..4).for_each(|worker| work(&alone, worker));
    let shared = store_with(16, vec![whole]);
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (shared, work) = (&shared, &work);
            scope.spawn(move || work(shared, worker));
        }
        for _ in 0..50 {
            shared.snapshot_slot(Slot(3)).unwrap();
            assert!(shared.bytes().payload <= 3_200 * 16);
        }
    });
    assert_eq!(digests(&shared), digests(&alone));
}

#[test]
fn a_visitor_may_call_the_store() {
    let store = store_with(1, vec![spec(4, ValueType::F32, SGD)]);
    insert(&store, GROUP, &keys(0..100));
    let mut removed = 0;
    let visit = |group, key, _: &[f32], _: &[f32]| {
        removed += u64::from(store.remove(group, key).unwrap());
    };
    store.for_each_row(Slot(0), visit).unwrap();
    assert_eq!((removed, store.rows()), (100, 0));
}

// ---- memory ------------------------------------------------------------------------------------

#[test]
fn memory_of_rows_that_have_left_is_free_and_used_again() {
    let store = store_with(4, vec![spec(16, ValueType::F32, ADAGRAD)]);
    insert(&store, GROUP, &keys(0..40_000));
    let (rows, full) = (store.rows(), store.bytes());
    let left: u64 = (0..2).map(|slot| store.clear_slot(Slot(slot)).unwrap()).sum();
    let bytes = store.bytes();
    assert!(left > rows / 4 && bytes.payload == (rows - left) * 8 * 16);
    let (used, was) = (bytes.payload + bytes.overhead, full.payload + full.overhead);
    assert!(used < was - left * 8 * 16, "{used} of {was} bytes are used after {left} of {rows} rows have left");
    assert!(bytes.free > full.free + left * 8 * 16, "{bytes:?}, {full:?} before");
    insert(&store, GROUP, &keys(0..40_000));
    assert_eq!(store.rows(), rows);
    assert!(store.bytes().free < bytes.free, "{:?}", store.bytes());
}

/// From 5,000 rows a slot, as with 5 M rows in 1,024 slots, to twice that. There are enough slots
/// that an index can move into memory that others have freed.
#[test]
fn a_row_costs_at_most_24_bytes_beyond_its_payload_at_every_size() {
    for dim in [16, 64] {
        let store = store_with(64, vec![spec(dim, ValueType::F32, ADAGRAD)]);
        insert(&store, GROUP, &keys(0..312_000));
        for start in (312_000..640_000).step_by(8_000) {
            insert(&store, GROUP, &keys(start..start + 8_000));
            let (bytes, rows) = (store.bytes(), store.rows());
            assert_eq!(bytes.payload, rows * 8 * dim as u64);
            let overhead = (bytes.overhead + bytes.free) as f64 / rows as f64;
            println!("dim {dim}: {overhead} bytes at {rows} rows");
            assert!(overhead <= 24.0, "dim {dim}: {overhead} bytes at {rows} rows");
        }
    }
}

#[test]
fn rows_are_counted_by_store_slot_and_group() {
    let store = store_with(SLOTS, vec![spec(2, ValueType::F32, SGD); 2]);
    insert(&store, GROUP, &keys(0..100));
    insert(&store, GroupId(1), &keys(0..50));
    assert_eq!(store.rows(), 150);
    assert_eq!(store.group_rows(GROUP).unwrap(), 100);
    assert_eq!(store.group_rows(GroupId(1)).unwrap(), 50);
    let by_slot = (0..SLOTS).map(|slot| store.slot_rows(Slot(slot)).unwrap());
    assert_eq!(by_slot.sum::<u64>(), 150);
}

// ---- refusals ----------------------------------------------------------------------------------

#[test]
fn requests_that_do_not_fit_are_refused_and_change_nothing() {
    let store = store_with(SLOTS, vec![spec(4, ValueType::F32, ADAM)]);
    insert(&store, GROUP, &keys(0..2));
    let before = digests(&store);
    let mut short = [0.0; 7];
    let two = keys(7..9);
    let refused = store.lookup(GROUP, &two, Missing::Insert, &mut short);
    assert!(matches!(refused, Err(StoreError::BufferLength { expected: 8, actual: 7, .. })));
    let refused = store.update(GROUP, &keys(0..2), &short, 1);
    assert!(matches!(refused, Err(StoreError::BufferLength { .. })));
    let refused = store.update(GROUP, &keys(0..2), &[0.1; 8], 0);
    assert!(matches!(refused, Err(StoreError::UpdateCountZero)));
    let refused = store.lookup(GroupId(1), &[], Missing::Insert, &mut []);
    assert!(matches!(refused, Err(StoreError::UnknownGroup { .. })));
    assert!(matches!(store.remove(GroupId(9), key(0)), Err(StoreError::UnknownGroup { .. })));
    let refused = store.slot_digest(Slot(SLOTS));
    assert!(matches!(refused, Err(StoreError::UnknownSlot { .. })));
    assert!(store.snapshot_slot(Slot(SLOTS)).is_err());
    assert!(store.digests(0..SLOTS + 1).is_err());
    assert_eq!(digests(&store), before);
    let groups = vec![];
    let refused = Store::new(StoreConfig { slots: 1, seed: 0, groups, budget: None });
    assert!(matches!(refused, Err(StoreError::Spec(_))));
}

// ---- snapshots ---------------------------------------------------------------------------------

fn trained() -> Store {
    let store = store_with(SLOTS, all_specs());
    train(&store, 1..6);
    for i in 20..30 {
        store.remove(GROUP, key(i)).unwrap();
    }
    store
}

#[test]
fn a_restored_store_continues_to_the_bit_as_the_first() {
    let first = trained();
    let second = store_with(SLOTS, all_specs());
    train(&second, 50..52);
    for slot in (0..SLOTS).map(Slot) {
        let snapshot = first.snapshot_slot(slot).unwrap();
        assert_eq!(snapshot.slot(), slot);
        let restored = second.restore_slot(snapshot.as_bytes()).unwrap();
        assert_eq!((restored.slot, restored.rows), (slot, snapshot.rows()));
    }
    assert_eq!(digests(&first), digests(&second), "what was there before is gone");
    train(&first, 6..10);
    train(&second, 6..10);
    assert_eq!(digests(&first), digests(&second));
}

/// Group, key, values and state of every row.
fn all_rows(store: &Store) -> Vec<(u16, FeatureKey, Vec<f32>, Vec<f32>)> {
    let mut rows = Vec::new();
    for slot in (0..SLOTS).map(Slot) {
        let visit = |group: GroupId, key, values: &[f32], state: &[f32]| {
            rows.push((group.0, key, values.to_vec(), state.to_vec()));
        };
        store.for_each_row(slot, visit).unwrap();
    }
    rows
}

#[test]
fn rows_move_to_other_groups_of_another_store() {
    let specs = [spec(3, ValueType::F32, ADAM), spec(4, ValueType::F32, ADAM), spec(5, ValueType::F16, ADAGRAD)];
    let source = store_with(SLOTS, specs.to_vec());
    train(&source, 1..4);
    // The third group is left out, and the second group of the target is new.
    let other_start = RowSpec { initializer: Initializer::Constant(0.5), ..specs[0] };
    let own = vec![specs[1], spec(7, ValueType::F32, SGD), other_start];
    let target = Store::new(StoreConfig { slots: SLOTS, seed: SEED + 1, groups: own, budget: None }).unwrap();
    let groups = [Some(GroupId(2)), Some(GroupId(0)), None];
    for slot in (0..SLOTS).map(Slot) {
        let snapshot = source.snapshot_slot(slot).unwrap();
        let restored = target.adopt_slot(snapshot.as_bytes(), &groups).unwrap();
        assert_eq!((restored.slot, restored.rows), (slot, snapshot.rows()));
    }
    let mut expected = all_rows(&source);
    expected.retain(|row| groups[usize::from(row.0)].is_some());
    expected.iter_mut().for_each(|row| row.0 = groups[usize::from(row.0)].unwrap().0);
    let mut found = all_rows(&target);
    let order = |row: &(u16, FeatureKey, Vec<f32>, Vec<f32>)| (row.0, row.1);
    expected.sort_by_key(order);
    found.sort_by_key(order);
    assert!(!found.is_empty());
    assert_eq!(found, expected);
}

#[test]
fn two_groups_of_rows_can_become_one() {
    let one = spec(3, ValueType::F32, ADAM);
    let other = RowSpec { initializer: Initializer::Constant(0.5), ..one };
    let (source, target) = (store_with(SLOTS, vec![one, other]), store_with(SLOTS, vec![other]));
    insert(&source, GroupId(0), &keys(0..20));
    insert(&source, GroupId(1), &keys(20..50));
    for slot in (0..SLOTS).map(Slot) {
        let snapshot = source.snapshot_slot(slot).unwrap();
        target.adopt_slot(snapshot.as_bytes(), &[Some(GROUP), Some(GROUP)]).unwrap();
    }
    assert_eq!(target.rows(), 50);
    for (group, numbers) in [(GroupId(0), 0..20), (GroupId(1), 20..50)] {
        for number in numbers {
            assert_eq!(read(&target, GROUP, key(number)), read(&source, group, key(number)));
        }
    }
}

#[test]
fn rows_of_another_shape_are_not_adopted() {
    let source = store_with(SLOTS, vec![spec(3, ValueType::F32, ADAM)]);
    train(&source, 1..3);
    let snapshot = source.snapshot_slot(Slot(1)).unwrap();
    for own in [spec(4, ValueType::F32, ADAM), spec(3, ValueType::F16, ADAM), spec(3, ValueType::F32, ADAGRAD)] {
        let target = store_with(SLOTS, vec![own]);
        let error = target.adopt_slot(snapshot.as_bytes(), &[Some(GROUP)]).unwrap_err();
        assert!(matches!(error, StoreError::Snapshot(SnapshotError::Spec { .. })), "{error}");
        assert_eq!(target.rows(), 0);
        assert!(target.adopt_slot(snapshot.as_bytes(), &[]).is_err());
        assert!(target.adopt_slot(snapshot.as_bytes(), &[Some(GroupId(1))]).is_err());
    }
}

#[test]
fn an_empty_slot_can_be_saved_and_restored() {
    let store = trained();
    let empty = store_with(SLOTS, all_specs()).snapshot_slot(Slot(1)).unwrap();
    assert_eq!(empty.rows(), 0);
    store.restore_slot(empty.as_bytes()).unwrap();
    assert_eq!(store.slot_rows(Slot(1)).unwrap(), 0);
}

fn snapshot() -> Vec<u8> {
    trained().snapshot_slot(Slot(1)).unwrap().into_bytes()
}

/// Makes the checksum right again after a change.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let body = bytes.len() - 8;
    let checksum = xxh3_64(&bytes[..body]).to_le_bytes();
    bytes[body..].copy_from_slice(&checksum);
    bytes
}

fn refusal(store: &Store, bytes: &[u8]) -> SnapshotError {
    let before = digests(store);
    let error = store.restore_slot(bytes).unwrap_err();
    assert_eq!(digests(store), before, "a refused snapshot changes nothing");
    match error {
        StoreError::Snapshot(error) => error,
        other => panic!("{other}"),
    }
}

#[test]
fn a_wrong_format_version_length_or_checksum_is_refused_by_name() {
    let store = trained();
    let good = snapshot();
    let changed = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        refusal(&store, &bytes)
    };
    let error = changed(&|b| b[0] ^= 1);
    assert!(matches!(error, SnapshotError::NotASnapshot { .. }));
    assert!(matches!(refusal(&store, &[]), SnapshotError::NotASnapshot { actual: 0 }));
    let error = changed(&|b| b[8] = 3);
    assert_eq!(error, SnapshotError::Version { found: 3, supported: 2 });
    let error = changed(&|b| b[8] = 1);
    assert_eq!(error, SnapshotError::Version { found: 1, supported: 2 });
    let error = changed(&|b| b.truncate(b.len() - 1));
    assert!(matches!(error, SnapshotError::Length { .. }));
    let error = changed(&|b| b.push(0));
    assert!(matches!(error, SnapshotError::Length { .. }));
    let error = changed(&|b| *b.last_mut().unwrap() ^= 1);
    assert!(matches!(error, SnapshotError::Checksum { .. }));
}

#[test]
fn a_snapshot_of_another_job_is_refused_by_name() {
    let good = snapshot();
    let base = trained().config().clone();
    let with = |change: &dyn Fn(&mut StoreConfig)| {
        let mut config = base.clone();
        change(&mut config);
        refusal(&Store::new(config).unwrap(), &good)
    };
    assert!(matches!(with(&|c| c.slots = 4), SnapshotError::Slots { found: SLOTS, expected: 4 }));
    assert!(matches!(with(&|c| c.seed = 12), SnapshotError::Seed { .. }));
    let error = with(&|c| c.groups.truncate(14));
    assert_eq!(error, SnapshotError::Groups { found: 15, expected: 14 });
    let error = with(&|c| c.groups[2].optimizer = ADAM);
    assert!(matches!(error, SnapshotError::Spec { group: GroupId(2), .. }));
    let error = with(&|c| c.groups[2].first_order = Some(FTRL));
    assert!(matches!(error, SnapshotError::Spec { group: GroupId(2), .. }));
    assert!(matches!(with(&|c| c.groups[3].dim += 1), SnapshotError::Spec { .. }));
    let error = with(&|c| c.groups[3].value_type = ValueType::Bf16);
    assert!(matches!(error, SnapshotError::Spec { .. }));
}

/// The record of a row group says that the first-order weights have an optimizer, and which.
#[test]
fn a_snapshot_knows_the_optimizer_of_first_order_weights() {
    let saved = store_with(SLOTS, specs_of_two_optimizers());
    train(&saved, 1..4);
    let bytes = saved.snapshot_slot(Slot(1)).unwrap().into_bytes();
    let restored = store_with(SLOTS, specs_of_two_optimizers());
    restored.restore_slot(&bytes).unwrap();
    assert_eq!(restored.slot_digest(Slot(1)).unwrap(), saved.slot_digest(Slot(1)).unwrap());
    let mut config = saved.config().clone();
    for (spec, other) in config.groups.iter_mut().zip(OPTIMIZERS.iter().cycle()) {
        spec.first_order = Some(*other);
    }
    let error = refusal(&Store::new(config.clone()).unwrap(), &bytes);
    assert!(matches!(error, SnapshotError::Spec { group: GroupId(1), .. }), "{error}");
    for spec in &mut config.groups {
        spec.first_order = None;
    }
    let error = refusal(&Store::new(config).unwrap(), &bytes);
    assert!(matches!(error, SnapshotError::Spec { group: GroupId(0), .. }), "{error}");
}

#[test]
fn a_learning_rate_may_change_across_a_restore() {
    let mut config = trained().config().clone();
    config.groups[0].optimizer = SparseOptimizer::Sgd { learning_rate: 0.01 };
    let store = Store::new(config).unwrap();
    assert!(store.restore_slot(&snapshot()).is_ok());
}

#[test]
fn a_snapshot_whose_keys_are_foreign_or_out_of_order_is_refused() {
    let store = trained();
    let good = snapshot();
    let first_row = 48 + 68 * 15;
    let row_bytes = (3 + 3) * 4;
    let mut foreign = good.clone();
    foreign[first_row..first_row + 8].fill(0);
    assert!(matches!(refusal(&store, &sealed(foreign)), SnapshotError::ForeignKey { .. }));
    let mut repeated = good.clone();
    repeated.copy_within(first_row..first_row + row_bytes, first_row + row_bytes);
    assert!(matches!(refusal(&store, &sealed(repeated)), SnapshotError::KeyOrder { .. }));
    let mut too_many = good.clone();
    too_many[48 + 52..48 + 60].fill(0xff);
    assert!(matches!(refusal(&store, &sealed(too_many)), SnapshotError::Length { .. }));
}

#[test]
fn no_flipped_bit_goes_unnoticed() {
    let store = store_with(1, vec![spec(2, ValueType::F32, SGD)]);
    insert(&store, GROUP, &keys(0..3));
    let good = store.snapshot_slot(Slot(0)).unwrap().into_bytes();
    for bit in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        refusal(&store, &bytes);
    }
    for length in 0..good.len() {
        refusal(&store, &good[..length]);
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_refused_without_panic(bytes: Vec<u8>) {
        prop_assert!(store_with(SLOTS, all_specs()).restore_slot(&bytes).is_err());
    }

    /// Bytes that pass the outer checks reach the inner ones.
    #[test]
    fn damaged_bytes_with_a_right_checksum_never_panic(
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut: Option<prop::sample::Index>,
    ) {
        let store = store_with(1, vec![spec(2, ValueType::F16, FTRL), spec(1, ValueType::F32, SGD)]);
        insert(&store, GROUP, &keys(0..5));
        let mut bytes = store.snapshot_slot(Slot(0)).unwrap().into_bytes();
        if let Some(cut) = cut {
            bytes.truncate(56 + cut.index(bytes.len() - 56));
            let length = bytes.len() as u64;
            bytes[32..40].copy_from_slice(&length.to_le_bytes());
        }
        for (place, value) in damage {
            let place = place.index(bytes.len() - 8);
            bytes[place] = value;
        }
        let before = digests(&store);
        if store.restore_slot(&sealed(bytes)).is_err() {
            prop_assert_eq!(digests(&store), before);
        }
    }
}
