//! Measures the memory's share of the [store's benchmark](crate::store). It reads and writes as
//! much memory with the same batches, without hashing, comparing, locks, growth or arithmetic. It
//! does not prefetch either, so a store can be faster.
//!
//! A look-up reads the key's line of an index, and copies the row that the line leads to. An update
//! reads that line again and writes the row. This time is the machine's. The rest of a store's time
//! is the store's.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

use comfy_table::Table;
use serde::Serialize;

use crate::error::BenchError;
use crate::figures::{median, table};
use crate::store::{StoreArgs, check, join, refuse_shared_memory};
use crate::timing::{Clock, Took, longest, timed};
use crate::zipf::{Random, Zipf, key};

/// The average size of the store's index.
const INDEX_BYTES_PER_ROW: f64 = 7.4;
/// Bytes of a row beyond values and state: its key and the step of its last change.
const HEADER_BYTES: usize = 12;
/// Lines of the index that are read before the first of their rows.
const AHEAD: usize = 64;

/// The figures of [`bench_memory`]. Rates are sums over all threads.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct MemoryFigures {
    /// Ids per second by look-up and update of unique, sorted keys.
    pub store_ids_per_second: f64,
    /// Mean over the threads of the median seconds of a batch's look-up.
    pub lookup_seconds: f64,
    pub update_seconds: f64,
    /// Seconds of the longest request. A request writes fresh memory for the rows of `request_keys`
    /// new keys.
    pub longest_request_seconds: f64,
    /// The processor time of the longest request, in the process or in the kernel. `None` if the
    /// kernel does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub longest_request_cpu_seconds: Option<f64>,
    pub median_request_seconds: f64,
    pub request_keys: usize,
    pub dim: usize,
    pub rows: u64,
    pub threads: usize,
}

impl MemoryFigures {
    pub(crate) fn table(&self) -> Table {
        let mut table = table(&["", "", "unit"]);
        let mut row = |name: &str, value: f64, unit: &str| {
            table.add_row([name.to_owned(), format!("{value:.2}"), unit.to_owned()]);
        };
        row("look-up + update", self.store_ids_per_second / 1e6, "M ids/s");
        row("a batch: look-up", self.lookup_seconds * 1e3, "ms");
        row("a batch: update", self.update_seconds * 1e3, "ms");
        row("a request's fresh memory: median", self.median_request_seconds * 1e3, "ms");
        row("a request's fresh memory: longest", self.longest_request_seconds * 1e3, "ms");
        if let Some(seconds) = self.longest_request_cpu_seconds {
            row("  processor time of the longest", seconds * 1e3, "ms");
        }
        table
    }
}

/// Writes as much memory as a store of rows for AdaGrad has. Then reads and writes the rows of
/// batches.
///
/// # Errors
/// [`BenchError::Argument`].
pub fn bench_memory(args: &StoreArgs) -> Result<MemoryFigures, BenchError> {
    let ids = check(args)?;
    refuse_shared_memory(args)?;
    let (memory, requests) = Memory::fill(args);
    let zipf = Zipf::new(ids, args.zipf);
    let batches: Vec<Vec<Vec<Unique>>> = (0..args.threads)
        .map(|thread| {
            let mut random = Random::new(thread as u64 + 1);
            (0..args.batches).map(|_| unique(&zipf, &mut random, args.samples * args.features)).collect()
        })
        .collect();
    let start = Barrier::new(args.threads);
    let seconds: Vec<[f64; 2]> = std::thread::scope(|scope| {
        let (memory, start) = (&memory, &start);
        let mut running = Vec::with_capacity(args.threads);
        for batches in &batches {
            running.push(scope.spawn(move || memory.train(batches, start)));
        }
        running.into_iter().map(join).collect()
    });
    let (ids, threads) = ((args.samples * args.features) as f64, args.threads as f64);
    let mean = |part: usize| seconds.iter().map(|thread| thread[part]).sum::<f64>() / threads;
    let longest = longest(&requests);
    Ok(MemoryFigures {
        store_ids_per_second: seconds.iter().map(|[lookup, update]| ids / (lookup + update)).sum(),
        lookup_seconds: mean(0),
        update_seconds: mean(1),
        longest_request_seconds: longest.seconds,
        longest_request_cpu_seconds: longest.cpu_seconds,
        median_request_seconds: median(requests.into_iter().map(|took| took.seconds).collect()),
        request_keys: args.request,
        dim: args.dim,
        rows: args.rows,
        threads: args.threads,
    })
}

/// A key of a batch and the index of its row.
pub(crate) struct Unique {
    key: u64,
    row: u64,
}

/// Draws a batch and returns its unique keys in order.
pub(crate) fn unique(zipf: &Zipf, random: &mut Random, ids: usize) -> Vec<Unique> {
    let drawn = (0..ids).map(|_| zipf.rank(random));
    let mut keys: Vec<Unique> = drawn.map(|row| Unique { key: key(row).0, row }).collect();
    keys.sort_unstable_by_key(|unique| unique.key);
    keys.dedup_by_key(|unique| unique.key);
    keys
}

#[derive(Clone)]
#[repr(align(64))]
struct Line(u64);

/// The size of a store's row in 64-bit words, rounded up.
pub(crate) fn row_words(args: &StoreArgs) -> usize {
    (2 * args.dim * size_of::<f32>() + HEADER_BYTES).div_ceil(size_of::<u64>())
}

pub(crate) struct Memory {
    index: Vec<Line>,
    rows: Vec<AtomicU64>,
    row_words: usize,
}

impl Memory {
    /// Writes all rows for the first time. Returns the times of each request too.
    pub(crate) fn fill(args: &StoreArgs) -> (Self, Vec<Took>) {
        let row_words = row_words(args);
        let lines = (args.rows as f64 * INDEX_BYTES_PER_ROW) as usize / size_of::<Line>() + 1;
        let mut rows: Vec<AtomicU64> = Vec::with_capacity(args.rows as usize * row_words);
        let mut requests = Vec::new();
        while rows.len() < rows.capacity() {
            let words = (args.request * row_words).min(rows.capacity() - rows.len()) as u64;
            let ((), took) = timed(|| rows.extend((0..words).map(AtomicU64::new)));
            requests.push(took);
        }
        // Write all lines, because unwritten ones would share one page of zeros. `black_box` hides
        // from the compiler that they contain 0.
        let index = vec![Line(std::hint::black_box(0)); lines];
        (Self { index, rows, row_words }, requests)
    }

    /// Trains with the batches. Returns the median seconds of a look-up and of an update.
    fn train(&self, batches: &[Vec<Unique>], start: &Barrier) -> [f64; 2] {
        let most = batches.iter().map(Vec::len).max().unwrap_or_default();
        let mut out = vec![0; most * self.row_words];
        let (mut lookups, mut updates) = (Vec::new(), Vec::new());
        start.wait();
        for batch in batches {
            let mut clock = Clock::start();
            self.lookup(batch, &mut out);
            lookups.push(clock.lap().as_secs_f64());
            self.update(batch);
            updates.push(clock.lap().as_secs_f64());
            std::hint::black_box(&mut out);
        }
        [median(lookups), median(updates)]
    }

    pub(crate) fn lookup(&self, batch: &[Unique], out: &mut [u64]) {
        for (keys, out) in batch.chunks(AHEAD).zip(out.chunks_mut(AHEAD * self.row_words)) {
            for (&row, out) in self.find(keys)[..keys.len()].iter().zip(out.chunks_exact_mut(self.row_words)) {
                out.iter_mut().zip(self.row(row)).for_each(|(out, word)| *out = word.load(Ordering::Relaxed));
            }
        }
    }

    pub(crate) fn update(&self, batch: &[Unique]) {
        for keys in batch.chunks(AHEAD) {
            for &row in &self.find(keys)[..keys.len()] {
                for word in self.row(row) {
                    word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                }
            }
        }
    }

    /// Finds the rows of some keys through the index.
    fn find(&self, keys: &[Unique]) -> [u64; AHEAD] {
        let mut found = [0; AHEAD];
        for (unique, found) in keys.iter().zip(&mut found) {
            let line = (u128::from(unique.key) * self.index.len() as u128) >> u64::BITS;
            *found = unique.row + self.index[line as usize].0;
        }
        found
    }

    fn row(&self, row: u64) -> &[AtomicU64] {
        &self.rows[row as usize * self.row_words..][..self.row_words]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::args;

    #[test]
    fn every_row_of_a_batch_is_read_and_written_once() {
        let (memory, requests) = Memory::fill(&args());
        assert_eq!(requests.len(), 30);
        let sum = |memory: &Memory| memory.rows.iter().map(|word| word.load(Ordering::Relaxed)).sum::<u64>();
        let before = sum(&memory);
        let batch = unique(&Zipf::new(3_000, 1.05), &mut Random::new(1), 192);
        let mut out = vec![0; batch.len() * memory.row_words];
        memory.lookup(&batch, &mut out);
        let words = |unique: &Unique| memory.row(unique.row).iter().map(|word| word.load(Ordering::Relaxed));
        assert!(out.iter().copied().eq(batch.iter().flat_map(words)));
        memory.update(&batch);
        assert_eq!(sum(&memory) - before, (batch.len() * memory.row_words) as u64);
    }

    #[test]
    fn figures_are_positive_and_shared_memory_is_refused() {
        let figures = bench_memory(&args()).unwrap();
        assert!(figures.store_ids_per_second > 0.0);
        assert!(figures.longest_request_seconds >= figures.median_request_seconds);
        let shared = StoreArgs { threads: 1, shared_memory: Some("rows".into()), ..args() };
        let error = bench_memory(&shared).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("shared-memory"), "{error}");
    }
}
