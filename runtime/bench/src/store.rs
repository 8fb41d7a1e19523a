//! Measures the embedding store under the load of training. Several threads look up and update
//! batches of Zipf-distributed ids on one store.
//!
//! A step is the work of an embedding layer for a batch of n ids (4096 samples × 26 features):
//!
//! | part | from | to |
//! |---|---|---|
//! | de-duplication | n keys, 64-bit hashes | u unique keys in ascending order, and the index of each id's key |
//! | look-up | u keys | u rows |
//! | expansion | u rows | n rows, one per id |
//! | sum | n gradients, one per id | u gradients |
//! | update | u keys and gradients | the optimizer applied to u rows |
//!
//! The store, and so a parameter server, does the look-up and the update. An embedding worker does
//! the other parts. Libraries without parameter servers do all parts in a step. So there are four
//! rates. They count all n ids of a batch, including repeated ones:
//!
//! | rate | counted parts |
//! |---|---|
//! | `lookupUpdateIdsPerSecond` | ids by de-duplication, look-up and update |
//! | `stepIdsPerSecond` | ids by all five parts |
//! | `storeIdsPerSecond` | ids by look-up and update of unique, sorted keys |
//! | `storeUniqueKeysPerSecond` | unique keys by look-up and update |
//!
//! Batches and gradients are drawn before the clock starts.
//!
//! With `--managed`, a second store trains each batch after the first. It has a budget, scores and
//! admission. Its `speed` is the ratio of the two times of the same batch.

use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use comfy_table::Table;
use parking_lot::Mutex;
use rectrain_embedding::{
    Examples, FeatureKey, GroupId, Initializer, LifePolicy, Missing, RowSpec, SparseOptimizer, Store, StoreConfig,
    StoreError, UpdateLog, ValueType,
};
use serde::Serialize;

use crate::error::BenchError;
use crate::figures::{median, table};
use crate::managed::{ManagedBatch, ManagedFigures, ManagedStore};
use crate::timing::{Clock, Took, longest, timed};
use crate::unique::Unique;
use crate::zipf::{Random, Zipf, key};

pub(crate) const GROUP: GroupId = GroupId(0);

#[derive(Clone, Debug, clap::Args)]
pub struct StoreArgs {
    /// Columns per row
    #[arg(long, default_value_t = 16)]
    pub dim: usize,
    /// Rows in the store
    #[arg(long, default_value_t = 5_000_000)]
    pub rows: u64,
    /// The number of ids that batches are drawn from, at most the number of rows (by default all)
    #[arg(long)]
    pub ids: Option<u64>,
    /// Threads that train concurrently
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// Batches per thread
    #[arg(long, default_value_t = 60)]
    pub batches: usize,
    /// Samples per batch
    #[arg(long, default_value_t = 4_096)]
    pub samples: usize,
    /// Ids per sample
    #[arg(long, default_value_t = 26)]
    pub features: usize,
    /// Exponent of the Zipf distribution, not 1
    #[arg(long, default_value_t = 1.05)]
    pub zipf: f64,
    /// Slots of the store
    #[arg(long, default_value_t = 1_024)]
    pub slots: u32,
    /// New keys per request while the store is filled
    #[arg(long, default_value_t = 8_192)]
    pub request: usize,
    /// Milliseconds between these requests, as in a job with new keys at this rate; 0 sends them
    /// without pauses
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 0)]
    pub request_every: u64,
    /// Keep the rows in this directory of a file system in memory, as parameter servers with their
    /// own process do. Needs one thread, since a server applies one update at a time
    #[arg(long, value_name = "DIRECTORY")]
    pub shared_memory: Option<PathBuf>,
    /// Also train a store with a budget, scores and admission, in alternation with the plain one
    #[arg(long, conflicts_with = "shared_memory")]
    pub managed: bool,
    /// Also print a line of JSON
    #[arg(long)]
    pub json: bool,
}

/// The figures of [`bench_store`]. A rate is the sum over the threads of a batch's size divided by
/// the median time of a batch.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StoreFigures {
    /// Ids by de-duplication, look-up and update.
    pub lookup_update_ids_per_second: f64,
    /// Memory beyond values and optimizer state when the store is filled.
    pub overhead_bytes_per_row: f64,
    /// The longest request while the store was filled. A request has `request_keys` new keys.
    pub longest_request_seconds: f64,
    /// The processor time of the longest request. For the rest of its time the processor ran other
    /// programs. `None` if the kernel does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_request_cpu_seconds: Option<f64>,
    /// The largest processor time of a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_cpu_seconds: Option<f64>,
    pub median_request_seconds: f64,
    pub request_keys: usize,
    /// Ids by de-duplication, look-up, expansion, sum of gradients and update.
    pub step_ids_per_second: f64,
    /// Ids by look-up and update alone.
    pub store_ids_per_second: f64,
    /// Unique keys by look-up and update alone.
    pub store_unique_keys_per_second: f64,
    pub lookup_unique_keys_per_second: f64,
    pub update_unique_keys_per_second: f64,
    pub inserted_rows_per_second: f64,
    pub unique_share: f64,
    /// Time to reopen the rows as another process would. `None` without shared memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reopen_seconds: Option<f64>,
    /// The store with a budget, scores and admission. `None` without `--managed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed: Option<ManagedFigures>,
    /// Mean over the threads of the median seconds of a batch's parts.
    pub parts: Parts,
    pub dim: usize,
    pub rows: u64,
    pub threads: usize,
}

/// Seconds of the parts of a step.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Parts {
    pub deduplication: f64,
    pub lookup: f64,
    pub expansion: f64,
    pub sum: f64,
    pub update: f64,
}

impl StoreFigures {
    pub(crate) fn table(&self) -> Table {
        let mut table = table(&["", "", "unit"]);
        let mut row = |name: &str, value: f64, digits: usize, unit: &str| {
            table.add_row([name.to_owned(), format!("{value:.digits$}"), unit.to_owned()]);
        };
        row("de-duplication + look-up + update", self.lookup_update_ids_per_second / 1e6, 1, "M ids/s");
        row("with expansion and sum of gradients", self.step_ids_per_second / 1e6, 1, "M ids/s");
        row("look-up + update", self.store_ids_per_second / 1e6, 1, "M ids/s");
        row("look-up + update", self.store_unique_keys_per_second / 1e6, 1, "M unique keys/s");
        row("look-up", self.lookup_unique_keys_per_second / 1e6, 1, "M unique keys/s");
        row("update", self.update_unique_keys_per_second / 1e6, 1, "M unique keys/s");
        row("unique keys", self.unique_share, 3, "of the ids");
        for (name, seconds) in [
            ("a batch: de-duplication", self.parts.deduplication),
            ("a batch: look-up", self.parts.lookup),
            ("a batch: expansion", self.parts.expansion),
            ("a batch: sum of gradients", self.parts.sum),
            ("a batch: update", self.parts.update),
        ] {
            row(name, seconds * 1e3, 2, "ms");
        }
        row("memory beyond values and state", self.overhead_bytes_per_row, 1, "bytes/row");
        row("filling, one thread", self.inserted_rows_per_second / 1e6, 2, "M rows/s");
        row("a request while filling: median", self.median_request_seconds * 1e3, 2, "ms");
        row("a request while filling: longest", self.longest_request_seconds * 1e3, 2, "ms");
        if let (Some(of_longest), Some(longest)) = (self.longest_request_cpu_seconds, self.longest_cpu_seconds) {
            row("  processor time of the longest", of_longest * 1e3, 2, "ms");
            row("  largest processor time", longest * 1e3, 2, "ms");
        }
        if let Some(seconds) = self.reopen_seconds {
            row("reopening the rows", seconds, 3, "s");
        }
        if let Some(managed) = &self.managed {
            managed.add_to(&mut table);
        }
        table
    }
}

/// Fills a store of rows for AdaGrad, and trains it.
///
/// # Errors
/// [`BenchError::Argument`], or [`BenchError::Store`].
pub fn bench_store(args: &StoreArgs) -> Result<StoreFigures, BenchError> {
    let ids = check(args)?;
    let config = config(args);
    let (store, log) = match &args.shared_memory {
        None => {
            let store = Store::new(config.clone())?;
            store.make_ready();
            (store, None)
        }
        Some(directory) => {
            let (store, log, _) = Store::in_shared_memory(config.clone(), directory)?;
            (store, Some(Mutex::new(log)))
        }
    };
    let requests = fill(&store, args)?;
    let bytes = store.bytes();
    let managed = args.managed.then(|| ManagedStore::filled(args)).transpose()?;
    let zipf = Zipf::new(ids, args.zipf);
    let batches: Vec<Vec<Vec<FeatureKey>>> = (0..args.threads)
        .map(|thread| {
            let mut random = Random::new(thread as u64 + 1);
            (0..args.batches).map(|_| draw(args, &zipf, &mut random)).collect()
        })
        .collect();
    let start = Barrier::new(args.threads);
    let measured = std::thread::scope(|scope| {
        let (store, log, start, managed) = (&store, log.as_ref(), &start, managed.as_ref());
        let mut running = Vec::with_capacity(batches.len());
        for batches in &batches {
            running.push(scope.spawn(move || train(store, log, managed, args.dim, batches, start)));
        }
        running.into_iter().map(join).collect::<Result<Vec<_>, _>>()
    })?;
    let reopen_seconds =
        args.shared_memory.as_ref().map(|directory| reopen(store, log, config, directory)).transpose()?;
    let longest = longest(&requests);
    let longest_cpu_seconds = requests.iter().filter_map(|took| took.cpu_seconds).reduce(f64::max);
    let seconds: Vec<f64> = requests.into_iter().map(|took| took.seconds).collect();
    let filling: f64 = seconds.iter().sum();
    Ok(StoreFigures {
        overhead_bytes_per_row: (bytes.overhead + bytes.free) as f64 / args.rows as f64,
        longest_request_seconds: longest.seconds,
        longest_request_cpu_seconds: longest.cpu_seconds,
        longest_cpu_seconds,
        median_request_seconds: median(seconds),
        request_keys: args.request,
        managed: managed.map(|managed| managed.figures(&measured_managed(&measured), args.threads)),
        inserted_rows_per_second: args.rows as f64 / filling,
        reopen_seconds,
        dim: args.dim,
        rows: args.rows,
        threads: args.threads,
        ..rates(&measured, (args.samples * args.features) as f64)
    })
}

/// The configuration of a store of rows for AdaGrad.
pub(crate) fn config(args: &StoreArgs) -> StoreConfig {
    StoreConfig {
        slots: args.slots,
        seed: 1,
        groups: vec![RowSpec {
            dim: args.dim,
            value_type: ValueType::F32,
            optimizer: SparseOptimizer::AdaGrad { learning_rate: 0.05, initial_accumulator: 0.1, epsilon: 1e-10 },
            life: LifePolicy::KeepAll,
            initializer: Initializer::Uniform { low: -0.01, high: 0.01 },
            zero_columns: 0,
            first_order: None,
            share: None,
        }],
        budget: None,
    }
}

/// Draws a batch and returns the keys of its ids, in order of the ids.
pub(crate) fn draw(args: &StoreArgs, zipf: &Zipf, random: &mut Random) -> Vec<FeatureKey> {
    (0..args.samples * args.features).map(|_| key(zipf.rank(random))).collect()
}

/// Checks the arguments. Returns the number of ids that batches are drawn from.
pub(crate) fn check(args: &StoreArgs) -> Result<u64, BenchError> {
    let ids = args.ids.unwrap_or(args.rows);
    let refuse = |argument, found: String, expected| Err(BenchError::Argument { argument, found, expected });
    for (argument, found) in [
        ("threads", args.threads),
        ("batches", args.batches),
        ("samples", args.samples),
        ("features", args.features),
        ("request", args.request),
    ] {
        if found == 0 {
            return refuse(argument, found.to_string(), "at least 1");
        }
    }
    if ids == 0 || ids > args.rows {
        return refuse("ids", ids.to_string(), "at least 1, and at most as many as rows");
    }
    if args.shared_memory.is_some() && args.threads != 1 {
        return refuse("threads", args.threads.to_string(), "1 with --shared-memory");
    }
    if !args.zipf.is_finite() || args.zipf == 1.0 {
        return refuse("zipf", args.zipf.to_string(), "a number other than 1");
    }
    Ok(ids)
}

/// Refuses `--shared-memory`, for benchmarks that only use the process's own memory.
pub(crate) fn refuse_shared_memory(args: &StoreArgs) -> Result<(), BenchError> {
    let Some(directory) = &args.shared_memory else { return Ok(()) };
    let found = directory.display().to_string();
    Err(BenchError::Argument { argument: "shared-memory", found, expected: "the process's own memory" })
}

/// Drops the store, and measures how long the next process takes to reopen its rows. Then removes
/// the directory.
fn reopen(
    store: Store,
    log: Option<Mutex<UpdateLog>>,
    config: StoreConfig,
    directory: &Path,
) -> Result<f64, BenchError> {
    let rows = store.rows();
    drop((store, log));
    let started = Instant::now();
    let (_store, _log, reopened) = Store::in_shared_memory(config, directory)?;
    let seconds = started.elapsed().as_secs_f64();
    if reopened.rows != rows {
        return Err(BenchError::Argument {
            argument: "shared-memory",
            found: format!("{} of {rows} rows after reopening", reopened.rows),
            expected: "a directory with memory for all rows",
        });
    }
    std::fs::remove_dir_all(directory).map_err(|error| BenchError::Argument {
        argument: "shared-memory",
        found: error.to_string(),
        expected: "a directory that can be removed",
    })?;
    Ok(seconds)
}

pub(crate) fn join<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Inserts every row and returns the times of each request.
pub(crate) fn fill(store: &Store, args: &StoreArgs) -> Result<Vec<Took>, StoreError> {
    let mut out = vec![0.0; args.request * args.dim];
    let mut requests = Vec::new();
    let every = Duration::from_millis(args.request_every);
    let mut next = Instant::now() + every;
    for start in (0..args.rows).step_by(args.request) {
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        next += every;
        let mut keys: Vec<_> = (start..args.rows.min(start + args.request as u64)).map(key).collect();
        keys.sort_unstable();
        let (done, took) = timed(|| store.lookup(GROUP, &keys, Missing::Insert, &mut out[..keys.len() * args.dim]));
        done?;
        requests.push(took);
    }
    Ok(requests)
}

/// The measurements of one thread, one element per batch.
#[derive(Default)]
struct Measured {
    unique: Vec<f64>,
    parts: [Vec<f64>; 5],
    /// Seconds of look-up and update by the managed store.
    managed: Vec<f64>,
}

/// For each batch of all threads: unique keys, and seconds of the managed and of the plain store.
fn measured_managed(measured: &[Measured]) -> Vec<[f64; 3]> {
    let mut batches = Vec::new();
    for thread in measured {
        let plain = thread.parts[1].iter().zip(&thread.parts[4]).map(|(lookup, update)| lookup + update);
        let own = thread.unique.iter().zip(&thread.managed);
        batches.extend(own.zip(plain).map(|((&unique, &managed), plain)| [unique, managed, plain]));
    }
    batches
}

fn train(
    store: &Store,
    log: Option<&Mutex<UpdateLog>>,
    managed: Option<&ManagedStore>,
    dim: usize,
    batches: &[Vec<FeatureKey>],
    start: &Barrier,
) -> Result<Measured, StoreError> {
    let most = batches.iter().map(Vec::len).max().unwrap_or(0);
    let mut random = Random::new(0);
    let gradients: Vec<f32> = (0..most * dim).map(|_| random.unit() as f32 - 0.5).collect();
    let mut unique = Unique::default();
    let (mut rows, mut sums, mut outputs) = (vec![0.0; most * dim], vec![0.0; most * dim], vec![0.0; most * dim]);
    let examples: Vec<Examples> = (0..most as u32).map(|at| Examples { positive: at % 2, negative: 1 }).collect();
    let mut measured = Measured::default();
    start.wait();
    for (batch, count) in batches.iter().zip(1..) {
        let mut clock = Clock::start();
        unique.take(batch);
        let deduplication = clock.lap();
        let (keys, values) = (&unique.keys, unique.keys.len() * dim);
        store.lookup(GROUP, keys, Missing::Insert, &mut rows[..values])?;
        let lookup = clock.lap();
        for (output, &number) in outputs.chunks_exact_mut(dim).zip(&unique.of) {
            output.copy_from_slice(&rows[number as usize * dim..][..dim]);
        }
        std::hint::black_box(&mut outputs);
        let expansion = clock.lap();
        sums[..values].fill(0.0);
        for (gradient, &number) in gradients.chunks_exact(dim).zip(&unique.of) {
            let sum = &mut sums[number as usize * dim..][..dim];
            sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += g);
        }
        let sum = clock.lap();
        match log.map(|log| log.lock()) {
            None => store.update(GROUP, keys, &sums[..values], count)?,
            Some(mut log) => {
                log.begin();
                let counts = store.update_logged(GROUP, keys, &sums[..values], count, &mut log)?;
                log.finish();
                counts
            }
        };
        let update = clock.lap();
        measured.unique.push(keys.len() as f64);
        for (part, seconds) in measured.parts.iter_mut().zip([deduplication, lookup, expansion, sum, update]) {
            part.push(seconds.as_secs_f64());
        }
        if let Some(managed) = managed {
            let (gradients, rows, examples) = (&sums[..values], &mut rows[..values], &examples[..keys.len()]);
            let took = managed.train(ManagedBatch { keys, gradients, rows, examples, count })?;
            measured.managed.push(took.as_secs_f64());
        }
    }
    Ok(measured)
}

/// The rates and the times of the parts. All other fields are 0.
fn rates(measured: &[Measured], ids: f64) -> StoreFigures {
    let seconds = |thread: &Measured, parts: &[usize]| {
        let of_batch = |batch| parts.iter().map(|&part| thread.parts[part][batch]).sum();
        median((0..thread.unique.len()).map(of_batch).collect())
    };
    let rate = |count: &dyn Fn(&Measured) -> f64, parts: &[usize]| -> f64 {
        measured.iter().map(|thread| count(thread) / seconds(thread, parts)).sum()
    };
    let unique = |thread: &Measured| median(thread.unique.clone());
    let mean = |of: &dyn Fn(&Measured) -> f64| measured.iter().map(of).sum::<f64>() / measured.len() as f64;
    let part = |part| mean(&|thread| seconds(thread, &[part]));
    StoreFigures {
        lookup_update_ids_per_second: rate(&|_| ids, &[0, 1, 4]),
        step_ids_per_second: rate(&|_| ids, &[0, 1, 2, 3, 4]),
        store_ids_per_second: rate(&|_| ids, &[1, 4]),
        store_unique_keys_per_second: rate(&unique, &[1, 4]),
        lookup_unique_keys_per_second: rate(&unique, &[1]),
        update_unique_keys_per_second: rate(&unique, &[4]),
        unique_share: mean(&unique) / ids,
        parts: Parts { deduplication: part(0), lookup: part(1), expansion: part(2), sum: part(3), update: part(4) },
        overhead_bytes_per_row: 0.0,
        longest_request_seconds: 0.0,
        longest_request_cpu_seconds: None,
        longest_cpu_seconds: None,
        median_request_seconds: 0.0,
        request_keys: 0,
        inserted_rows_per_second: 0.0,
        reopen_seconds: None,
        managed: None,
        dim: 0,
        rows: 0,
        threads: 0,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn args() -> StoreArgs {
        StoreArgs {
            dim: 4,
            rows: 3_000,
            ids: None,
            threads: 2,
            batches: 3,
            samples: 64,
            features: 3,
            zipf: 1.05,
            slots: 16,
            request: 100,
            request_every: 0,
            shared_memory: None,
            managed: false,
            json: false,
        }
    }

    #[test]
    fn figures_describe_a_filled_and_trained_store() {
        let figures = bench_store(&args()).unwrap();
        assert!(figures.lookup_update_ids_per_second > 0.0);
        assert!(figures.step_ids_per_second < figures.lookup_update_ids_per_second);
        assert!(figures.lookup_update_ids_per_second < figures.store_ids_per_second);
        assert!(figures.unique_share > 0.1 && figures.unique_share < 1.0);
        assert!(figures.longest_request_seconds >= figures.median_request_seconds);
        assert!(figures.overhead_bytes_per_row > 12.0);
        let json = serde_json::to_string(&figures).unwrap();
        let named = ["lookupUpdateIdsPerSecond", "overheadBytesPerRow", "longestRequestSeconds"];
        assert!(named.iter().all(|name| json.contains(name)), "{json}");
    }

    #[test]
    fn a_managed_store_has_figures_of_its_own() {
        let managed = bench_store(&StoreArgs { managed: true, ..args() }).unwrap().managed.unwrap();
        assert!(managed.speed > 0.0 && managed.store_unique_keys_per_second > 0.0);
        assert!(managed.rows > 2_000 && managed.rows <= 3_000, "within the budget: {managed:?}");
        assert!(managed.evicted > 0 && managed.overhead_bytes_per_row > 12.0, "{managed:?}");
        assert!(bench_store(&args()).unwrap().managed.is_none());
    }

    #[test]
    fn meaningless_arguments_are_refused_by_name() {
        for (args, argument) in [
            (StoreArgs { threads: 0, ..args() }, "threads"),
            (StoreArgs { ids: Some(3_001), ..args() }, "ids"),
            (StoreArgs { zipf: 1.0, ..args() }, "zipf"),
        ] {
            let error = bench_store(&args).unwrap_err();
            assert!(error.is_user_error() && error.to_string().contains(argument), "{error}");
        }
    }
}
