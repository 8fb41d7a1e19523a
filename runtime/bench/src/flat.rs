//! Whether a store's speed depends on how many rows it holds: stores of several sizes in one process, trained by turns with batches of
//! the same ids, so that whatever else the machine does is the same for all.

use std::sync::Barrier;

use comfy_table::Table;
use rectrain_embedding::{FeatureKey, Missing, Store, StoreError};
use serde::Serialize;

use crate::store::{GROUP, StoreArgs, check, config, draw, fill, join, refuse_shared_memory};
use crate::timing::Clock;
use crate::unique::Unique;
use crate::zipf::{Random, Zipf};
use crate::{BenchError, median, table};

#[derive(Clone, Debug, clap::Args)]
pub struct FlatArgs {
    #[command(flatten)]
    pub store: StoreArgs,
    /// Rows of the stores that take turns with the one of --rows, each at least as many as ids
    #[arg(long, value_delimiter = ',', required = true)]
    pub beside: Vec<u64>,
}

/// What one of the stores did. Medians over all threads and batches.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FlatFigures {
    pub rows: u64,
    pub lookup_seconds: f64,
    pub update_seconds: f64,
    /// By that of the first store in the same round.
    pub speed: f64,
}

pub(crate) fn figures_table(figures: &[FlatFigures]) -> Table {
    let mut table = table(&["rows", "look-up, ms", "update, ms", "speed by the first's"]);
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

/// Fills the stores and trains them by turns; the figures of each, that of `--rows` first.
///
/// # Errors
/// [`BenchError::Argument`], or what a store refuses.
pub fn bench_flat(args: &FlatArgs) -> Result<Vec<FlatFigures>, BenchError> {
    let ids = check(&args.store)?;
    refuse_shared_memory(&args.store)?;
    if let Some(few) = args.beside.iter().find(|rows| **rows < ids) {
        let (found, expected) = (few.to_string(), "at least as many rows as ids");
        return Err(BenchError::Argument { argument: "beside", found, expected });
    }
    let sizes: Vec<u64> = [args.store.rows].into_iter().chain(args.beside.iter().copied()).collect();
    let mut stores = Vec::with_capacity(sizes.len());
    for &rows in &sizes {
        let store = Store::new(config(&args.store))?;
        fill(&store, &StoreArgs { rows, ..args.store.clone() })?;
        stores.push(store);
    }
    let (zipf, turn) = (Zipf::new(ids, args.store.zipf), Barrier::new(args.store.threads));
    let took = std::thread::scope(|scope| {
        let (stores, zipf, turn) = (&stores, &zipf, &turn);
        let start = |thread| scope.spawn(move || train(stores, &args.store, zipf, thread, turn));
        let running: Vec<_> = (0..args.store.threads).map(start).collect();
        running.into_iter().map(join).collect::<Result<Vec<_>, _>>()
    })?;
    let figures = |(position, &rows): (usize, &u64)| {
        let part =
            |part: usize| took.iter().flat_map(move |t| t[position].iter().map(move |took| took[part])).collect();
        let speeds = took.iter().flat_map(|thread| thread[0].iter().zip(&thread[position]));
        let speed = median(speeds.map(|(first, this)| (first[0] + first[1]) / (this[0] + this[1])).collect());
        FlatFigures { rows, lookup_seconds: median(part(0)), update_seconds: median(part(1)), speed }
    };
    Ok(sizes.iter().enumerate().map(figures).collect())
}

/// Trains each store with a batch in each round, all threads the same store at a time; the seconds of look-up and update, by store and
/// round. Batches are drawn between the turns.
fn train(
    stores: &[Store],
    args: &StoreArgs,
    zipf: &Zipf,
    thread: usize,
    turn: &Barrier,
) -> Result<Vec<Vec<[f64; 2]>>, StoreError> {
    let mut random = Random::new(thread as u64 + 1);
    let most = args.samples * args.features * args.dim;
    let gradients: Vec<f32> = (0..most).map(|_| random.unit() as f32 - 0.5).collect();
    let mut rows = vec![0.0; most];
    let mut unique = Unique::default();
    let mut took = vec![Vec::new(); stores.len()];
    for round in 1..=args.batches as u64 {
        for (store, took) in stores.iter().zip(&mut took) {
            let batch: Vec<FeatureKey> = draw(args, zipf, &mut random);
            unique.take(&batch);
            let (keys, values) = (&unique.keys, unique.keys.len() * args.dim);
            turn.wait();
            let mut clock = Clock::start();
            store.lookup(GROUP, keys, Missing::Insert, &mut rows[..values])?;
            let lookup = clock.lap();
            store.update(GROUP, keys, &gradients[..values], round)?;
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
    fn every_store_has_its_figures_and_the_first_is_as_fast_as_itself() {
        let figures = bench_flat(&FlatArgs { store: args(), beside: vec![4_000, 6_000] }).unwrap();
        assert_eq!(figures.iter().map(|of_store| of_store.rows).collect::<Vec<_>>(), [3_000, 4_000, 6_000]);
        assert_eq!(figures[0].speed, 1.0);
        assert!(figures.iter().all(|f| f.lookup_seconds > 0.0 && f.update_seconds > 0.0 && f.speed > 0.0));
    }

    #[test]
    fn a_store_without_a_row_for_each_id_is_refused_by_name() {
        let error = bench_flat(&FlatArgs { store: args(), beside: vec![4_000, 2_999] }).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("--beside 2999"), "{error}");
    }
}
