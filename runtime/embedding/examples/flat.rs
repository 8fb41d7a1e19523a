//! Whether a store's speed depends on how many rows it holds: stores of several sizes in one process, trained by turns with batches of
//! the same ids, so that whatever else the machine does is the same for all. A batch is 26 features of 4,096 samples, Zipf-distributed
//! over the ids, unique and sorted by key as an embedding worker sends them.
//!
//! `cargo run --release -p rectrain-embedding --example flat -- [DIM] [IDS] [ROUNDS] [THREADS] [ROWS…]`
//! (16, 1,000,000, 60, 2, and 1 and 10 million rows)

use rectrain_embedding::{
    FeatureKey, GroupId, Initializer, Missing, RowSpec, SparseOptimizer, Store, StoreConfig, StoreError, ValueType,
};
use std::sync::Barrier;
use std::thread::{self, ScopedJoinHandle};
use std::time::Instant;
use xxhash_rust::xxh3::xxh3_64;

const IDS_PER_BATCH: usize = 4_096 * 26;
const ZIPF_EXPONENT: f64 = 1.05;
const SLOTS: u32 = 1_024;
const GROUP: GroupId = GroupId(0);
/// New keys of a request that fills a store.
const REQUEST: usize = 65_536;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (xxh3_64(&self.0.to_le_bytes()) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A rank in `0 .. ids`, by the continuous Zipf distribution's inverse.
    fn zipf(&mut self, ids: u64) -> u64 {
        let power = 1.0 - ZIPF_EXPONENT;
        let top = (ids as f64 + 1.0).powf(power);
        let x = (1.0 + self.unit() * (top - 1.0)).powf(1.0 / power);
        (x as u64 - 1).min(ids - 1)
    }
}

fn key(id: u64) -> FeatureKey {
    FeatureKey(xxh3_64(&id.to_le_bytes()))
}

fn batch(random: &mut Random, ids: u64) -> Vec<FeatureKey> {
    let mut keys: Vec<_> = (0..IDS_PER_BATCH).map(|_| key(random.zipf(ids))).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

fn filled(rows: u64, dim: usize) -> Result<Store, StoreError> {
    let store = Store::new(StoreConfig {
        slots: SLOTS,
        seed: 1,
        groups: vec![RowSpec {
            dim,
            value_type: ValueType::F32,
            optimizer: SparseOptimizer::AdaGrad { learning_rate: 0.05, initial_accumulator: 0.1, epsilon: 1e-10 },
            initializer: Initializer::Uniform { low: -0.01, high: 0.01 },
            zero_columns: 0,
        }],
    })?;
    let mut out = vec![0.0; REQUEST * dim];
    for start in (0..rows).step_by(REQUEST) {
        let mut keys: Vec<_> = (start..rows.min(start + REQUEST as u64)).map(key).collect();
        keys.sort_unstable();
        store.lookup(GROUP, &keys, Missing::Insert, &mut out[..keys.len() * dim])?;
    }
    Ok(store)
}

/// Milliseconds of a batch's look-up and update.
type Took = [f64; 2];

/// Trains each store with a batch in each round, all threads the same store at a time; what each took, by store and round.
fn train(
    stores: &[Store],
    dim: usize,
    ids: u64,
    rounds: u64,
    seed: u64,
    turn: &Barrier,
) -> Result<Vec<Vec<Took>>, StoreError> {
    let mut random = Random(seed << 40);
    let mut out = vec![0.0; IDS_PER_BATCH * dim];
    let gradients: Vec<f32> = (0..out.len()).map(|_| random.unit() as f32 - 0.5).collect();
    let mut took = vec![Vec::new(); stores.len()];
    for round in 1..=rounds {
        for (store, took) in stores.iter().zip(&mut took) {
            let keys = batch(&mut random, ids);
            let values = keys.len() * dim;
            turn.wait();
            let begin = Instant::now();
            store.lookup(GROUP, &keys, Missing::Insert, &mut out[..values])?;
            let lookup = begin.elapsed();
            store.update(GROUP, &keys, &gradients[..values], round)?;
            took.push([lookup, begin.elapsed() - lookup].map(|time| time.as_secs_f64() * 1e3));
        }
    }
    Ok(took)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn main() -> Result<(), StoreError> {
    let given: Vec<u64> = std::env::args().skip(1).filter_map(|text| text.parse().ok()).collect();
    let argument = |position: usize, default| given.get(position).copied().unwrap_or(default).max(1);
    let (dim, ids, rounds, threads) =
        (argument(0, 16) as usize, argument(1, 1_000_000), argument(2, 60), argument(3, 2));
    let sizes = given.get(4..).filter(|sizes| !sizes.is_empty()).unwrap_or(&[1_000_000, 10_000_000]);
    let stores = sizes.iter().map(|&rows| filled(rows, dim)).collect::<Result<Vec<_>, _>>()?;
    let turn = Barrier::new(threads as usize);
    let took = thread::scope(|scope| {
        let (stores, turn) = (&stores, &turn);
        let start = |seed| scope.spawn(move || train(stores, dim, ids, rounds, seed, turn));
        let running: Vec<_> = (1..=threads).map(start).collect();
        running.into_iter().map(join).collect::<Result<Vec<_>, _>>()
    })?;
    println!(
        "dim {dim}, {ids} ids, {rounds} rounds, {threads} threads; the speed by that of the first store in the same round"
    );
    for (position, rows) in sizes.iter().enumerate() {
        let of_part =
            |part: usize| took.iter().flat_map(move |thread| thread[position].iter().map(move |took| took[part]));
        let speeds = took.iter().flat_map(|thread| thread[0].iter().zip(&thread[position]));
        let speeds = speeds.map(|(first, this)| (first[0] + first[1]) / (this[0] + this[1]));
        println!(
            "{rows:>11} rows: look-up {:.2} ms, update {:.2} ms, speed {:.3}",
            median(of_part(0).collect()),
            median(of_part(1).collect()),
            median(speeds.collect())
        );
    }
    Ok(())
}
