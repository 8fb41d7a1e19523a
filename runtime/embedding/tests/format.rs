//! Pins the bytes of snapshots and the digests. A checkpoint of an earlier build must restore, and
//! a model trained from the same seed must have the same digest, whatever is restructured inside.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::sync::Arc;

use rectrain_embedding::{
    FeatureKey, FrozenStore, GroupId, Initializer, LifePolicy, Missing, RowSpec, SaveId, SaveScope, Slot,
    SparseOptimizer, Store, StoreConfig, ValueType,
};
use sha2::{Digest, Sha256};
use xxhash_rust::xxh3::xxh3_64;

const SLOTS: u32 = 3;

/// Every optimizer with every value type and two initializers.
fn specs() -> Vec<RowSpec> {
    let optimizers = [
        SparseOptimizer::Sgd { learning_rate: 0.5 },
        SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-6 },
        SparseOptimizer::RowWiseAdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-6 },
        SparseOptimizer::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 },
        SparseOptimizer::Ftrl { learning_rate: 0.25, beta: 1.0, l1: 0.01, l2: 0.125 },
    ];
    let initializers =
        [Initializer::Normal { standard_deviation: 0.1 }, Initializer::Uniform { low: -0.5, high: 0.25 }];
    let mut specs = Vec::new();
    for optimizer in optimizers {
        for value_type in [ValueType::F32, ValueType::F16, ValueType::Bf16] {
            let number = specs.len();
            let initializer = initializers[number % 2];
            specs.push(RowSpec {
                dim: 3 + number % 8,
                value_type,
                optimizer,
                life: LifePolicy::KeepAll,
                initializer,
                zero_columns: number % 3,
                first_order: None,
                share: None,
            });
        }
    }
    specs
}

fn key(number: u64) -> FeatureKey {
    FeatureKey(xxh3_64(&number.to_le_bytes()))
}

fn gradient(seed: u64) -> f32 {
    (xxh3_64(&seed.to_le_bytes()) >> 40) as f32 / (1 << 23) as f32 - 1.0
}

fn train(store: &Store, updates: std::ops::Range<u64>) {
    for update in updates {
        for (group, spec) in specs().iter().enumerate() {
            let group = GroupId(group as u16);
            let keys: Vec<FeatureKey> = (update * 7..update * 7 + 40).map(key).collect();
            let mut values = vec![0.0; keys.len() * spec.dim];
            store.lookup(group, &keys, Missing::Insert, &mut values).unwrap();
            let gradients: Vec<f32> = (0..values.len() as u64).map(|value| gradient(update << 32 | value)).collect();
            store.update(group, &keys, &gradients, update).unwrap();
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn sha256_of_slots(frozen: &FrozenStore) -> String {
    let mut hasher = Sha256::new();
    for slot in 0..SLOTS {
        hasher.update(frozen.save_slot(Slot(slot)).unwrap().as_bytes());
    }
    hex(&hasher.finalize())
}

#[test]
fn snapshots_and_digests_keep_their_bytes() {
    let store = Arc::new(Store::new(StoreConfig { slots: SLOTS, seed: 11, groups: specs(), budget: None }).unwrap());
    store.track_changes(true);
    train(&store, 1..6);
    let frozen = store.freeze(SaveId(1), SaveScope::Everything).unwrap();
    let whole = sha256_of_slots(&frozen);
    frozen.complete();
    train(&store, 6..8);
    for number in 30..45 {
        store.remove(GroupId(0), key(number)).unwrap();
    }
    let frozen = store.freeze(SaveId(2), SaveScope::ChangesSince(SaveId(1))).unwrap();
    let changes = sha256_of_slots(&frozen);
    let digests: Vec<String> = store.digests(0..SLOTS).unwrap().iter().map(|digest| hex(digest)).collect();
    assert_eq!(whole, "574abd3929f0585ccd56ffb0e85f8121712c6bec515e462fb1d91ee194474360");
    assert_eq!(changes, "968a6755805a38d69770097edaabe9ff750ef45e8efafce095719b84de794e97");
    assert_eq!(
        digests,
        [
            "c4a6a04320ccd53b7848d61c8188b240837ab878c1ec78e0cd04920eca2fd6d8",
            "4f63c4c46ea2ce77199aa905e2c36e280a6132a1f776bb19960ddabf531c3009",
            "1a0422b154c2d7fd14cc4acc63aca5ca43c84fc30bd6a0e52204406f610063c4"
        ]
    );
}
