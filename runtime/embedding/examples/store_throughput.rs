//! How fast the store looks up and updates, and what a row costs: batches of Zipf-distributed ids,
//! 26 features of 4,096 samples, unique and sorted by key as an embedding worker sends them.
//!
//! `cargo run --release -p rectrain-embedding --example store_throughput -- [DIM] [ROWS] [THREADS] [BATCHES]`
//! (16, 5,000,000, 2, 100)

use rectrain_embedding::{
    FeatureKey, GroupId, Initializer, Missing, RowSpec, SparseOptimizer, Store, StoreConfig, StoreError, ValueType,
};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

const IDS_PER_BATCH: usize = 4_096 * 26;
const ZIPF_EXPONENT: f64 = 1.05;
const SLOTS: u32 = 1_024;
const GROUP: GroupId = GroupId(0);

/// What one thread measured.
#[derive(Clone, Copy, Default)]
struct Measured {
    ids: usize,
    unique: usize,
    look_up: Duration,
    update: Duration,
    longest: Duration,
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (xxh3_64(&self.0.to_le_bytes()) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A rank in `0 .. rows`, by the continuous Zipf distribution's inverse.
    fn zipf(&mut self, rows: u64) -> u64 {
        let power = 1.0 - ZIPF_EXPONENT;
        let top = (rows as f64 + 1.0).powf(power);
        let x = (1.0 + self.unit() * (top - 1.0)).powf(1.0 / power);
        (x as u64 - 1).min(rows - 1)
    }
}

fn key(id: u64) -> FeatureKey {
    FeatureKey(xxh3_64(&id.to_le_bytes()))
}

fn batch(random: &mut Random, rows: u64) -> Vec<FeatureKey> {
    let mut keys: Vec<_> = (0..IDS_PER_BATCH).map(|_| key(random.zipf(rows))).collect();
    keys.sort_unstable();
    keys.dedup();
    keys
}

/// Inserts every row, in batches; the longest call shows what growing costs a request.
fn fill(store: &Store, dim: usize, rows: u64) -> Result<(Duration, Duration), StoreError> {
    let mut out = vec![0.0; 65_536 * dim];
    let (mut total, mut longest) = (Duration::ZERO, Duration::ZERO);
    for start in (0..rows).step_by(65_536) {
        let mut keys: Vec<_> = (start..rows.min(start + 65_536)).map(key).collect();
        keys.sort_unstable();
        let begin = Instant::now();
        store.lookup(GROUP, &keys, Missing::Insert, &mut out[..keys.len() * dim])?;
        total += begin.elapsed();
        longest = longest.max(begin.elapsed());
    }
    Ok((total, longest))
}

fn measure(store: &Store, dim: usize, rows: u64, batches: u64, seed: u64) -> Result<Measured, StoreError> {
    let mut random = Random(seed << 32);
    let mut measured = Measured::default();
    let mut out = vec![0.0; IDS_PER_BATCH * dim];
    let gradients: Vec<f32> = (0..out.len()).map(|_| random.unit() as f32 - 0.5).collect();
    for count in 1..=batches {
        let keys = batch(&mut random, rows);
        let values = keys.len() * dim;
        let begin = Instant::now();
        store.lookup(GROUP, &keys, Missing::Insert, &mut out[..values])?;
        let looked_up = begin.elapsed();
        store.update(GROUP, &keys, &gradients[..values], count)?;
        let both = begin.elapsed();
        measured.ids += IDS_PER_BATCH;
        measured.unique += keys.len();
        measured.look_up += looked_up;
        measured.update += both - looked_up;
        measured.longest = measured.longest.max(looked_up).max(both - looked_up);
    }
    Ok(measured)
}

fn argument(position: usize, default: u64) -> u64 {
    let given = std::env::args().nth(position);
    given.and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn report(measured: &[Measured]) {
    let rate = |count: fn(&Measured) -> usize, time: fn(&Measured) -> Duration| -> f64 {
        let one = |m: &Measured| count(m) as f64 / time(m).as_secs_f64() / 1e6;
        measured.iter().map(one).sum()
    };
    let longest = measured.iter().map(|m| m.longest).max().unwrap_or_default();
    println!("M ids/s, all threads      unique   with repeats");
    println!(
        "  look-up                 {:6.1}   {:6.1}",
        rate(|m| m.unique, |m| m.look_up),
        rate(|m| m.ids, |m| m.look_up)
    );
    println!(
        "  update                  {:6.1}   {:6.1}",
        rate(|m| m.unique, |m| m.update),
        rate(|m| m.ids, |m| m.update)
    );
    println!(
        "  look-up + update        {:6.1}   {:6.1}",
        rate(|m| m.unique, |m| m.look_up + m.update),
        rate(|m| m.ids, |m| m.look_up + m.update)
    );
    println!("longest call: {:.1} ms", longest.as_secs_f64() * 1e3);
}

fn main() -> Result<(), StoreError> {
    let dim = argument(1, 16) as usize;
    let rows = argument(2, 5_000_000).max(1);
    let threads = argument(3, 2);
    let batches = argument(4, 100);
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
    let (time, longest) = fill(&store, dim, rows)?;
    let bytes = store.bytes();
    println!("dim {dim}, {rows} rows, {threads} threads, {batches} batches a thread");
    println!(
        "insert: {:.1} M rows/s by one thread, longest call of 65,536 rows {:.1} ms",
        rows as f64 / time.as_secs_f64() / 1e6,
        longest.as_secs_f64() * 1e3
    );
    println!(
        "memory: payload {:.1}, overhead {:.1} bytes a row",
        bytes.payload as f64 / rows as f64,
        bytes.overhead as f64 / rows as f64
    );
    let measured = std::thread::scope(|scope| {
        let store = &store;
        let start = |seed| scope.spawn(move || measure(store, dim, rows, batches, seed));
        let running: Vec<_> = (1..=threads).map(start).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, _>| match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        running.into_iter().map(join).collect::<Result<Vec<_>, _>>()
    })?;
    report(&measured);
    Ok(())
}
