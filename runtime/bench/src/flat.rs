//! Measures whether a store's speed depends on its number of rows. One process has stores of
//! several sizes, and trains them in alternation with batches of the same ids. Other load of the
//! machine thus affects all stores alike.
//!
//! With `--memory`, plain memory replaces the stores. This shows the machine's share of a
//! difference: a larger index has a smaller part of its lines in a cache.

use std::sync::Barrier;

use comfy_table::Table;
use rectrain_embedding::{FeatureKey, Missing, Store, StoreError};
use serde::Serialize;

use crate::error::BenchError;
use crate::figures::{median, table};
use crate::memory::{self, Memory};
use crate::store::{GROUP, StoreArgs, check, config, draw, fill, join, refuse_shared_memory};
use crate::timing::Clock;
use crate::unique::Unique;
use crate::zipf::{Random, Zipf};

#[derive(Clone, Debug, clap::Args)]
pub struct FlatArgs {
    #[command(flatten)]
    pub store: StoreArgs,
    /// Rows of the stores to compare with the store of --rows, each at least as many as ids
    #[arg(long, value_delimiter = ',', required = true)]
    pub beside: Vec<u64>,
    /// Replace the stores by plain memory: read and write the same lines, without searching keys in
    /// them
    #[arg(long)]
    pub memory: bool,
}

/// The figures of one store, or of plain memory. Medians over all threads and batches.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FlatFigures {
    pub rows: u64,
    pub lookup_seconds: f64,
    pub update_seconds: f64,
    /// The speed relative to the first store's in the same round.
    pub speed: f64,
}

pub(crate) fn figures_table(figures: &[FlatFigures]) -> Table {
    let mut table = table(&["rows", "look-up, ms", "update, ms", "speed relative to the first"]);
    for of_store in figures {
        table.add_row([
            of_store.rows.to_string(),
            format!("{:.2}", of_store.lookup_seconds * 1e3),
            format!("{:.2}", of_store.update_seconds * 1e3),
            format!("{:.3}", of_store.speed),
        ]);
    }
    table
}

/// Fills the stores and trains them in alternation. Returns the figures of each store, beginning
/// with the store of `--rows`.
///
/// # Errors
/// [`BenchError::Argument`], or [`BenchError::Store`].
pub fn bench_flat(args: &FlatArgs) -> Result<Vec<FlatFigures>, BenchError> {
    let ids = check(&args.store)?;
    refuse_shared_memory(&args.store)?;
    if let Some(few) = args.beside.iter().find(|rows| **rows < ids) {
        let (found, expected) = (few.to_string(), "at least as many rows as ids");
        return Err(BenchError::Argument { argument: "beside", found, expected });
    }
    let sizes: Vec<u64> = [args.store.rows].into_iter().chain(args.beside.iter().copied()).collect();
    let zipf = Zipf::new(ids, args.store.zipf);
    let took = match args.memory {
        false => alternate::<Store>(&sizes, &args.store, &zipf)?,
        true => alternate::<Memory>(&sizes, &args.store, &zipf)?,
    };
    let figures = |(position, &rows): (usize, &u64)| {
        let part =
            |part: usize| took.iter().flat_map(move |t| t[position].iter().map(move |took| took[part])).collect();
        let speeds = took.iter().flat_map(|thread| thread[0].iter().zip(&thread[position]));
        let speed = median(speeds.map(|(first, this)| (first[0] + first[1]) / (this[0] + this[1])).collect());
        FlatFigures { rows, lookup_seconds: median(part(0)), update_seconds: median(part(1)), speed }
    };
    Ok(sizes.iter().enumerate().map(figures).collect())
}

/// A store, or plain memory in its place.
trait Trained: Sync + Sized {
    /// Makes one with the rows of `args`, each written once.
    fn filled(args: &StoreArgs) -> Result<Self, StoreError>;
    /// The state of a thread that trains it.
    type Trainer;
    fn trainer(args: &StoreArgs, random: &mut Random) -> Self::Trainer;
    /// Draws the next batch of ids and finds its unique keys.
    fn draw(trainer: &mut Self::Trainer, args: &StoreArgs, zipf: &Zipf, random: &mut Random);
    fn lookup(&self, trainer: &mut Self::Trainer) -> Result<(), StoreError>;
    fn update(&self, trainer: &mut Self::Trainer, round: u64) -> Result<(), StoreError>;
}

struct StoreTrainer {
    unique: Unique,
    gradients: Vec<f32>,
    rows: Vec<f32>,
    dim: usize,
}

impl StoreTrainer {
    /// The number of values in the batch's rows.
    fn values(&self) -> usize {
        self.unique.keys.len() * self.dim
    }
}

impl Trained for Store {
    fn filled(args: &StoreArgs) -> Result<Self, StoreError> {
        let store = Self::new(config(args))?;
        fill(&store, args).map(|_| store)
    }

    type Trainer = StoreTrainer;

    fn trainer(args: &StoreArgs, random: &mut Random) -> StoreTrainer {
        let most = args.samples * args.features * args.dim;
        let gradients = (0..most).map(|_| random.unit() as f32 - 0.5).collect();
        StoreTrainer { unique: Unique::default(), gradients, rows: vec![0.0; most], dim: args.dim }
    }

    fn draw(trainer: &mut StoreTrainer, args: &StoreArgs, zipf: &Zipf, random: &mut Random) {
        let batch: Vec<FeatureKey> = draw(args, zipf, random);
        trainer.unique.take(&batch);
    }

    fn lookup(&self, trainer: &mut StoreTrainer) -> Result<(), StoreError> {
        let values = trainer.values();
        self.lookup(GROUP, &trainer.unique.keys, Missing::Insert, &mut trainer.rows[..values]).map(drop)
    }

    fn update(&self, trainer: &mut StoreTrainer, round: u64) -> Result<(), StoreError> {
        let values = trainer.values();
        self.update(GROUP, &trainer.unique.keys, &trainer.gradients[..values], round).map(drop)
    }
}

#[derive(Default)]
struct MemoryTrainer {
    batch: Vec<memory::Unique>,
    rows: Vec<u64>,
}

impl Trained for Memory {
    fn filled(args: &StoreArgs) -> Result<Self, StoreError> {
        Ok(Self::fill(args).0)
    }

    type Trainer = MemoryTrainer;

    fn trainer(_: &StoreArgs, _: &mut Random) -> MemoryTrainer {
        MemoryTrainer::default()
    }

    fn draw(trainer: &mut MemoryTrainer, args: &StoreArgs, zipf: &Zipf, random: &mut Random) {
        trainer.batch = memory::unique(zipf, random, args.samples * args.features);
        trainer.rows.resize(trainer.batch.len() * memory::row_words(args), 0);
    }

    fn lookup(&self, trainer: &mut MemoryTrainer) -> Result<(), StoreError> {
        self.lookup(&trainer.batch, &mut trainer.rows);
        Ok(())
    }

    fn update(&self, trainer: &mut MemoryTrainer, _: u64) -> Result<(), StoreError> {
        self.update(&trainer.batch);
        Ok(())
    }
}

/// Seconds of look-up and update, by store and round.
type TookByStore = Vec<Vec<[f64; 2]>>;

/// Fills one of each size and trains them in alternation. Returns the times of each thread.
fn alternate<T: Trained>(sizes: &[u64], args: &StoreArgs, zipf: &Zipf) -> Result<Vec<TookByStore>, StoreError> {
    let filled = |&rows: &u64| T::filled(&StoreArgs { rows, ..args.clone() });
    let stores = sizes.iter().map(filled).collect::<Result<Vec<T>, _>>()?;
    let start_together = Barrier::new(args.threads);
    std::thread::scope(|scope| {
        let (stores, start_together) = (&stores, &start_together);
        let start = |thread| scope.spawn(move || train(stores, args, zipf, thread, start_together));
        let running: Vec<_> = (0..args.threads).map(start).collect();
        running.into_iter().map(join).collect()
    })
}

/// Trains each store with a batch in each round. All threads train the same store at a time, and
/// draw their batches before they start together.
fn train<T: Trained>(
    stores: &[T],
    args: &StoreArgs,
    zipf: &Zipf,
    thread: usize,
    start_together: &Barrier,
) -> Result<TookByStore, StoreError> {
    let mut random = Random::new(thread as u64 + 1);
    let mut trainer = T::trainer(args, &mut random);
    let mut took = vec![Vec::new(); stores.len()];
    for round in 1..=args.batches as u64 {
        for (store, took) in stores.iter().zip(&mut took) {
            T::draw(&mut trainer, args, zipf, &mut random);
            start_together.wait();
            let mut clock = Clock::start();
            store.lookup(&mut trainer)?;
            let lookup = clock.lap();
            store.update(&mut trainer, round)?;
            took.push([lookup, clock.lap()].map(|time| time.as_secs_f64()));
        }
    }
    Ok(took)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::args;

    #[test]
    fn every_store_has_figures_and_the_first_has_speed_1() {
        for memory in [false, true] {
            let figures = bench_flat(&FlatArgs { store: args(), beside: vec![4_000, 6_000], memory }).unwrap();
            assert_eq!(figures.iter().map(|of_store| of_store.rows).collect::<Vec<_>>(), [3_000, 4_000, 6_000]);
            assert_eq!(figures[0].speed, 1.0);
            assert!(figures.iter().all(|f| f.lookup_seconds > 0.0 && f.update_seconds > 0.0 && f.speed > 0.0));
        }
    }

    #[test]
    fn a_store_with_fewer_rows_than_ids_is_refused() {
        let error = bench_flat(&FlatArgs { store: args(), beside: vec![4_000, 2_999], memory: false }).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("--beside 2999"), "{error}");
    }
}
