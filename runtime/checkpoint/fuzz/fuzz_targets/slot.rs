//! Any bytes as a slot snapshot, with header and checksum put right: the store takes them or refuses them, and refusing changes
//! nothing. Run with `cargo +nightly fuzz run slot` in `runtime/checkpoint`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rectrain_embedding::{
    FeatureKey, GroupId, Initializer, Missing, RowSpec, Slot, SparseOptimizer, Store, StoreConfig, ValueType,
};
use xxhash_rust::xxh3::xxh3_64;

fn store() -> Store {
    let spec = RowSpec {
        dim: 3,
        value_type: ValueType::F16,
        optimizer: SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-8 },
        initializer: Initializer::Constant(0.5),
        zero_columns: 0,
    };
    let store = Store::new(StoreConfig { slots: 2, seed: 1, groups: vec![spec] }).expect("a valid configuration");
    store.lookup(GroupId(0), &[FeatureKey(1), FeatureKey(9)], Missing::Insert, &mut [0.0; 6]).expect("a valid request");
    store
}

fuzz_target!(|input: &[u8]| {
    let store = store();
    let before = store.slot_digest(Slot(0)).expect("slot 0 is there");
    let good = store.snapshot_slot(Slot(0)).expect("slot 0 is there").into_bytes();
    // The first bytes of a good snapshot, then the input.
    for kept in [0, 48, 48 + 52] {
        let mut bytes = [&good[..kept], input, &[0; 8]].concat();
        if bytes.len() >= 56 {
            let length = bytes.len() as u64;
            bytes[32..40].copy_from_slice(&length.to_le_bytes());
        }
        let body = bytes.len() - 8;
        let sum = xxh3_64(&bytes[..body]).to_le_bytes();
        bytes[body..].copy_from_slice(&sum);
        let _any = Store::config_of_snapshot(&bytes);
        if store.restore_slot(&bytes).is_err() {
            assert_eq!(store.slot_digest(Slot(0)).expect("slot 0 is there"), before);
        } else {
            store.restore_slot(&good).expect("a good snapshot");
        }
    }
});
