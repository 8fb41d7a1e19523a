//! The managed store of the store's benchmark: the same rows under a budget, with scores and
//! admission. It is trained in alternation with the plain store, on the same batches.

use std::time::Duration;

use comfy_table::Table;
use rectrain_embedding::{
    Admission, Budget, BudgetUnit, Examples, FeatureKey, LifePolicy, Managed, Missing, Moment, Priority, ScoreRule,
    Seen, Store, StoreConfig, StoreError, slot_of,
};
use serde::Serialize;

use crate::figures::median;
use crate::store::{GROUP, StoreArgs, config};
use crate::timing::Clock;
use crate::zipf::key;

/// Seconds of event time between two batches.
const BATCH_SECONDS: u64 = 60;
/// The moment of the first batch.
const START: u64 = 1_700_000_000;

/// The figures of the managed store.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ManagedFigures {
    /// Unique keys by look-up, update and the keeping of the budget.
    pub store_unique_keys_per_second: f64,
    /// The speed of these, where the plain store has 1: the median over the batches.
    pub speed: f64,
    /// Memory beyond values and optimizer state when the store is filled.
    pub overhead_bytes_per_row: f64,
    /// Rows at the end.
    pub rows: u64,
    /// Rows removed for the budget.
    pub evicted: u64,
    /// Gradients of keys that were not admitted yet.
    pub turned_away: u64,
}

/// A filled managed store.
pub(crate) struct ManagedStore {
    store: Store,
    overhead_bytes_per_row: f64,
}

fn managed_config(args: &StoreArgs) -> StoreConfig {
    let mut config = config(args);
    let score = ScoreRule::Score { decay_per_day_millionths: 100_000, positive_weight_thousandths: 3_000 };
    // Few keys are counted at a time: the store has rows for nearly all.
    let admission = Admission::Count { count: 2, counters: (args.rows / 16).max(1) };
    let life = Managed { admission, expire_after: None, score, priority: Priority::Low };
    config.groups.iter_mut().for_each(|group| group.life = LifePolicy::Managed(life));
    config.budget = Some(Budget { unit: BudgetUnit::Rows, limit: args.rows });
    config
}

impl ManagedStore {
    /// Sees every key twice, so that it gets its row.
    pub(crate) fn filled(args: &StoreArgs) -> Result<Self, StoreError> {
        let store = Store::new(managed_config(args))?;
        store.make_ready();
        let gradients = vec![0.0; args.request * args.dim];
        for start in (0..args.rows).step_by(args.request) {
            let mut keys: Vec<_> = (start..args.rows.min(start + args.request as u64)).map(key).collect();
            keys.sort_unstable();
            for update in [1, 2] {
                let seen = Seen { now: Moment(START), examples: &[] };
                store.update_seen(GROUP, &keys, &gradients[..keys.len() * args.dim], update, seen)?;
            }
        }
        let bytes = store.bytes();
        let overhead_bytes_per_row = (bytes.overhead + bytes.free) as f64 / store.rows().max(1) as f64;
        Ok(Self { store, overhead_bytes_per_row })
    }

    /// Looks up and updates a batch of unique keys, rising, and keeps the budget of their slots.
    /// Returns the time that took.
    pub(crate) fn train(&self, batch: ManagedBatch<'_>) -> Result<Duration, StoreError> {
        let ManagedBatch { keys, gradients, rows, examples, count } = batch;
        let now = Moment(START + count * BATCH_SECONDS);
        let mut clock = Clock::start();
        self.store.lookup(GROUP, keys, Missing::Insert, rows)?;
        self.store.update_seen(GROUP, keys, gradients, count, Seen { now, examples })?;
        let slots = self.store.config().slots;
        let mut last = None;
        for &key in keys {
            let slot = slot_of(key, slots);
            if last.replace(slot) != Some(slot) {
                self.store.keep_budget(slot, now)?;
            }
        }
        Ok(clock.lap())
    }

    /// The figures. `took` has for each batch: unique keys, seconds of this store, and seconds of
    /// the plain one. `threads` of them ran at a time.
    pub(crate) fn figures(&self, took: &[[f64; 3]], threads: usize) -> ManagedFigures {
        let of_batches = |figure: fn(&[f64; 3]) -> f64| median(took.iter().map(figure).collect());
        let counts = self.store.life_counts().into_iter().next().unwrap_or_default();
        ManagedFigures {
            store_unique_keys_per_second: of_batches(|[keys, own, _]| keys / own) * threads as f64,
            speed: of_batches(|[_, own, plain]| plain / own),
            overhead_bytes_per_row: self.overhead_bytes_per_row,
            rows: self.store.rows(),
            evicted: counts.evicted,
            turned_away: counts.turned_away,
        }
    }
}

/// The work of one batch, and the memory for its rows.
pub(crate) struct ManagedBatch<'b> {
    pub(crate) keys: &'b [FeatureKey],
    pub(crate) gradients: &'b [f32],
    pub(crate) rows: &'b mut [f32],
    pub(crate) examples: &'b [Examples],
    pub(crate) count: u64,
}

impl ManagedFigures {
    pub(crate) fn add_to(&self, table: &mut Table) {
        let mut row = |name: &str, value: f64, digits: usize, unit: &str| {
            table.add_row([name.to_owned(), format!("{value:.digits$}"), unit.to_owned()]);
        };
        row("managed: look-up + update", self.store_unique_keys_per_second / 1e6, 1, "M unique keys/s");
        row("managed: speed", self.speed, 3, "of the plain store");
        row("managed: memory beyond values and state", self.overhead_bytes_per_row, 1, "bytes/row");
        row("managed: rows", self.rows as f64 / 1e6, 3, "M");
        row("managed: rows evicted", self.evicted as f64 / 1e6, 3, "M");
        row("managed: gradients turned away", self.turned_away as f64 / 1e6, 3, "M");
    }
}
