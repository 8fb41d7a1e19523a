//! Soaks a store within a budget: ids that keep coming, for minutes. The figures say whether its
//! memory stays flat, how long requests wait for evictions, and how many look-ups find their row.
//!
//! Half of the ids are of a population that stays. The other half are new ones: the most frequent
//! of them are the newest. Both follow Zipf's law. Batch `n` is the same in every run.
//!
//! A naive reference replays the batches afterwards. It holds exact scores in one map for the whole
//! budget, evicts the lowest, and shares no code with the store. A store that evicts as well as the
//! policy can has its hit rate. The reference takes minutes too, so that `--part` runs it alone.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use comfy_table::Table;
use rectrain_embedding::{
    Admission, Budget, BudgetUnit, Examples, FeatureKey, GroupId, Initializer, LifePolicy, Managed, Missing, Moment,
    Priority, RowSpec, ScoreRule, Seen, Slot, SparseOptimizer, Store, StoreConfig, StoreError, ValueType,
};
use serde::Serialize;

use crate::error::BenchError;
use crate::figures::table;
use crate::store::join;
use crate::timing::timed;
use crate::zipf::{Random, Zipf, key};

const GROUP: GroupId = GroupId(0);
/// Seconds of event time between two batches.
const BATCH_SECONDS: u64 = 60;
/// The moment of the first batch.
const START: u64 = 1_700_000_000;
/// β of the score for a day, and the weight of a positive example.
const DECAY_PER_DAY: f64 = 0.1;
const POSITIVE_WEIGHT: f64 = 3.0;
/// Ids of a request beside the training.
const READ_IDS: usize = 1_024;
/// The most rows of a store that is trained for comparison.
const MOST_COMPARED: u64 = 200_000_000;

/// The parts of a soak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SoakPart {
    /// The store, and then the reference
    All,
    /// The store alone
    Store,
    /// The naive reference alone
    Reference,
}

#[derive(Clone, Debug, clap::Args)]
pub struct SoakArgs {
    /// The part to run
    #[arg(long, value_enum, default_value_t = SoakPart::All)]
    pub part: SoakPart,
    /// Columns per row
    #[arg(long, default_value_t = 4)]
    pub dim: usize,
    /// Rows of the budget
    #[arg(long, default_value_t = 3_000_000)]
    pub budget: u64,
    /// New ids in all; as many as the budget are drawn from at a time
    #[arg(long, default_value_t = 75_000_000)]
    pub ids: u64,
    /// Batches
    #[arg(long, default_value_t = 60_000)]
    pub batches: u64,
    /// Ids of a batch
    #[arg(long, default_value_t = 8_192)]
    pub batch: usize,
    /// The time of all batches in seconds. 0: as fast as possible
    #[arg(long, default_value_t = 600.0)]
    pub seconds: f64,
    /// Slots of the store
    #[arg(long, default_value_t = 1_024)]
    pub slots: u32,
    /// Exponent of Zipf's law, not 1
    #[arg(long, default_value_t = 1.05)]
    pub zipf: f64,
    /// Also train a store without a budget, in alternation. The resident memory is then for both
    #[arg(long)]
    pub compare: bool,
    /// Also print a line of JSON
    #[arg(long)]
    pub json: bool,
}

/// The figures of [`bench_soak`].
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SoakFigures {
    /// `None` without the store.
    #[serde(flatten)]
    pub store: Option<SoakedFigures>,
    /// The hit rate of the naive reference. `None` without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference_hit_rate: Option<f64>,
}

/// The figures of the store that was soaked.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SoakedFigures {
    pub distinct_ids: u64,
    pub rows: u64,
    pub evicted: u64,
    /// The store's bytes after a third of the batches, and the most after that.
    pub third_bytes: u64,
    pub most_bytes: u64,
    /// The process's resident memory at these times. `None` if the kernel does not report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub third_resident_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub most_resident_bytes: Option<u64>,
    /// Share of the look-ups after a third of the batches that find their row.
    pub hit_rate: f64,
    /// Seconds of the longest look-up or update of a batch.
    pub longest_request_seconds: f64,
    /// Seconds of the longest read beside the training.
    pub longest_read_seconds: f64,
    /// Seconds of the longest removal of rows after a batch.
    pub longest_sweep_seconds: f64,
    /// As above, of the store without a budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plain_longest_request_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plain_longest_read_seconds: Option<f64>,
}

impl SoakFigures {
    pub(crate) fn table(&self) -> Table {
        let mut table = table(&["", "", "unit"]);
        let mut row = |name: &str, value: f64, digits: usize, unit: &str| {
            table.add_row([name.to_owned(), format!("{value:.digits$}"), unit.to_owned()]);
        };
        if let Some(store) = &self.store {
            store.rows_of_table(&mut row);
        }
        if let Some(rate) = self.reference_hit_rate {
            row("look-ups that find their row in the naive reference", 100.0 * rate, 2, "%");
        }
        table
    }
}

impl SoakedFigures {
    /// Passes each figure to `row`: its name, value, digits and unit.
    fn rows_of_table(&self, row: &mut impl FnMut(&str, f64, usize, &str)) {
        row("distinct ids", self.distinct_ids as f64 / 1e6, 2, "M");
        row("rows", self.rows as f64 / 1e6, 3, "M");
        row("rows evicted", self.evicted as f64 / 1e6, 2, "M");
        row("store after a third", self.third_bytes as f64 / 1e6, 1, "MB");
        row("store at most after that", self.most_bytes as f64 / 1e6, 1, "MB");
        if let (Some(third), Some(most)) = (self.third_resident_bytes, self.most_resident_bytes) {
            row("process after a third", third as f64 / 1e6, 1, "MB");
            row("process at most after that", most as f64 / 1e6, 1, "MB");
        }
        row("look-ups that find their row", 100.0 * self.hit_rate, 2, "%");
        row("longest request", 1e3 * self.longest_request_seconds, 2, "ms");
        row("longest read beside", 1e3 * self.longest_read_seconds, 2, "ms");
        row("longest sweep", 1e3 * self.longest_sweep_seconds, 2, "ms");
        if let (Some(request), Some(read)) = (self.plain_longest_request_seconds, self.plain_longest_read_seconds) {
            row("without a budget: longest request", 1e3 * request, 2, "ms");
            row("without a budget: longest read beside", 1e3 * read, 2, "ms");
        }
    }
}

/// Trains a store within a budget on ids that keep coming.
///
/// # Errors
/// [`BenchError::Argument`]; [`BenchError::Store`].
pub fn bench_soak(args: &SoakArgs) -> Result<SoakFigures, BenchError> {
    check(args)?;
    let draw = Draw::new(args);
    let store = (args.part != SoakPart::Reference).then(|| soak(args, &draw)).transpose()?;
    let reference_hit_rate = (args.part != SoakPart::Store).then(|| reference_hits(args, &draw).rate());
    Ok(SoakFigures { store, reference_hit_rate })
}

fn soak(args: &SoakArgs, draw: &Draw) -> Result<SoakedFigures, BenchError> {
    let managed = Soaked::new(args, true)?;
    let plain = args.compare.then(|| Soaked::new(args, false)).transpose()?;
    let (present, has_ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let (trained, reads) = std::thread::scope(|scope| {
        let reading = scope.spawn(|| read_beside(&managed, plain.as_ref(), draw, &present, &has_ended));
        let trained = train(args, draw, &managed, plain.as_ref(), &present);
        has_ended.store(true, Ordering::Release);
        Ok::<_, BenchError>((trained?, join(reading)?))
    })?;
    let counts = managed.store.life_counts().into_iter().next().unwrap_or_default();
    Ok(SoakedFigures {
        distinct_ids: trained.distinct,
        rows: managed.store.rows(),
        evicted: counts.evicted,
        third_bytes: trained.third.0,
        most_bytes: trained.most.0,
        third_resident_bytes: trained.third.1,
        most_resident_bytes: trained.most.1,
        hit_rate: trained.hits.rate(),
        longest_request_seconds: trained.longest_request,
        longest_read_seconds: reads.managed,
        longest_sweep_seconds: trained.longest_sweep,
        plain_longest_request_seconds: plain.as_ref().map(|_| trained.plain_longest_request),
        plain_longest_read_seconds: plain.as_ref().map(|_| reads.plain),
    })
}

fn check(args: &SoakArgs) -> Result<(), BenchError> {
    let refuse = |argument, found: String, expected| Err(BenchError::Argument { argument, found, expected });
    if args.budget < u64::from(args.slots) || args.slots == 0 {
        return refuse("budget", args.budget.to_string(), "at least one row for each slot");
    }
    if args.ids == 0 || args.compare && args.ids > MOST_COMPARED {
        return refuse("ids", args.ids.to_string(), "at least 1, and with --compare at most 200000000");
    }
    if args.batches < 3 || args.batch == 0 || args.dim == 0 {
        return refuse("batches", args.batches.to_string(), "at least 3 batches of one id and one column");
    }
    if args.zipf == 1.0 || !args.zipf.is_finite() || args.zipf <= 0.0 {
        return refuse("zipf", args.zipf.to_string(), "a positive number other than 1");
    }
    Ok(())
}

/// Draws the ids of batches.
struct Draw {
    zipf: Zipf,
    /// Ids of the population that stays.
    staying: u64,
    ids: u64,
    batches: u64,
    batch: usize,
}

impl Draw {
    fn new(args: &SoakArgs) -> Self {
        let staying = args.budget.max(2);
        let (ids, batches, batch) = (args.ids, args.batches, args.batch);
        Self { zipf: Zipf::new(staying, args.zipf), staying, ids, batches, batch }
    }

    /// All ids are below this.
    fn end(&self) -> u64 {
        2 * self.staying + self.ids + 1
    }

    fn id(&self, batch: u64, random: &mut Random) -> u64 {
        let rank = self.zipf.rank(random);
        if random.unit() < 0.5 {
            return rank;
        }
        let newest = self.staying + (u128::from(batch) * u128::from(self.ids) / u128::from(self.batches)) as u64;
        newest + self.staying - rank
    }

    /// The different ids of a batch by rising key.
    fn unique(&self, batch: u64) -> Vec<(FeatureKey, u64)> {
        let mut random = Random::new(batch + 1);
        let mut keys: Vec<(FeatureKey, u64)> = Vec::with_capacity(self.batch);
        for _ in 0..self.batch {
            let id = self.id(batch, &mut random);
            keys.push((key(id), id));
        }
        keys.sort_unstable();
        keys.dedup();
        keys
    }
}

fn moment(batch: u64) -> u64 {
    START + batch * BATCH_SECONDS
}

/// Every third id is clicked.
fn examples_of(id: u64) -> Examples {
    let is_positive = id.is_multiple_of(3);
    Examples { positive: u32::from(is_positive), negative: u32::from(!is_positive) }
}

fn score_of(examples: Examples) -> f64 {
    f64::from(examples.positive) * POSITIVE_WEIGHT + f64::from(examples.negative)
}

#[derive(Clone, Copy, Default)]
struct Hits {
    found: u64,
    all: u64,
}

impl Hits {
    fn add(&mut self, found: u64, all: u64) {
        self.found += found;
        self.all += all;
    }

    fn rate(self) -> f64 {
        self.found as f64 / self.all.max(1) as f64
    }
}

/// A store that is trained.
struct Soaked {
    store: Store,
    dim: usize,
}

impl Soaked {
    fn new(args: &SoakArgs, has_budget: bool) -> Result<Self, StoreError> {
        let score = ScoreRule::Score {
            decay_per_day_millionths: (DECAY_PER_DAY * 1e6) as u32,
            positive_weight_thousandths: (POSITIVE_WEIGHT * 1e3) as u32,
        };
        let managed = Managed { admission: Admission::Always, expire_after: None, score, priority: Priority::Low };
        let spec = RowSpec {
            dim: args.dim,
            value_type: ValueType::F32,
            optimizer: SparseOptimizer::RowWiseAdaGrad { learning_rate: 0.05, initial_accumulator: 0.1, epsilon: 1e-8 },
            life: if has_budget { LifePolicy::Managed(managed) } else { LifePolicy::KeepAll },
            initializer: Initializer::Uniform { low: -0.01, high: 0.01 },
            zero_columns: 0,
            first_order: None,
            share: None,
        };
        let budget = has_budget.then_some(Budget { unit: BudgetUnit::Rows, limit: args.budget });
        let store = Store::new(StoreConfig { slots: args.slots, seed: 1, groups: vec![spec], budget })?;
        store.make_ready();
        Ok(Self { store, dim: args.dim })
    }

    /// Looks up and updates a batch. Returns the rows found and the seconds of the longer request.
    fn train(&self, batch: u64, keys: &[FeatureKey], examples: &[Examples]) -> Result<(u64, f64), StoreError> {
        let mut rows = vec![0.0; keys.len() * self.dim];
        let (found, looked_up) = timed(|| self.store.lookup(GROUP, keys, Missing::Insert, &mut rows));
        let seen = Seen { now: Moment(moment(batch)), examples };
        let (updated, took) = timed(|| self.store.update_seen(GROUP, keys, &rows, batch + 1, seen));
        updated?;
        Ok((found?.found, looked_up.seconds.max(took.seconds)))
    }

    /// Keeps the budget in the slots of a batch.
    fn sweep(&self, batch: u64, keys: &[FeatureKey]) -> Result<(), StoreError> {
        let mut last: Option<Slot> = None;
        for &key in keys {
            let slot = self.store.slot_of(key);
            if last.replace(slot) != Some(slot) {
                self.store.keep_budget(slot, Moment(moment(batch)))?;
            }
        }
        Ok(())
    }

    fn bytes(&self) -> u64 {
        let bytes = self.store.bytes();
        bytes.payload + bytes.overhead + bytes.free
    }
}

/// The measurements of the training.
#[derive(Default)]
struct Trained {
    hits: Hits,
    distinct: u64,
    /// Bytes of the store and of the process, after a third of the batches.
    third: (u64, Option<u64>),
    /// The most after that.
    most: (u64, Option<u64>),
    longest_request: f64,
    longest_sweep: f64,
    plain_longest_request: f64,
}

fn train(
    args: &SoakArgs,
    draw: &Draw,
    managed: &Soaked,
    plain: Option<&Soaked>,
    present: &AtomicU64,
) -> Result<Trained, BenchError> {
    let (mut trained, mut ids) = (Trained::default(), Ids::new(draw.end()));
    let begun = Instant::now();
    for batch in 0..args.batches {
        present.store(batch, Ordering::Relaxed);
        let unique = draw.unique(batch);
        let keys: Vec<FeatureKey> = unique.iter().map(|&(key, _)| key).collect();
        let examples: Vec<Examples> = unique.iter().map(|&(_, id)| examples_of(id)).collect();
        unique.iter().for_each(|&(_, id)| ids.add(id));
        let (found, took) = managed.train(batch, &keys, &examples)?;
        let (swept, sweep) = timed(|| managed.sweep(batch, &keys));
        swept?;
        trained.longest_request = trained.longest_request.max(took);
        trained.longest_sweep = trained.longest_sweep.max(sweep.seconds);
        if let Some(plain) = plain {
            trained.plain_longest_request = trained.plain_longest_request.max(plain.train(batch, &keys, &examples)?.1);
        }
        if batch >= args.batches / 3 {
            trained.hits.add(found, keys.len() as u64);
            trained.note_memory(batch == args.batches / 3, batch, managed);
        }
        pace(begun, args.seconds * (batch + 1) as f64 / args.batches as f64);
    }
    trained.distinct = ids.count;
    Ok(trained)
}

impl Trained {
    /// Notes the memory at the third, and then now and then.
    fn note_memory(&mut self, is_third: bool, batch: u64, managed: &Soaked) {
        if !is_third && !batch.is_multiple_of(100) {
            return;
        }
        let now = (managed.bytes(), resident_bytes());
        if is_third {
            self.third = now;
        }
        self.most = (self.most.0.max(now.0), self.most.1.max(now.1));
    }
}

/// Waits until this time after the beginning.
fn pace(begun: Instant, seconds: f64) {
    let due = Duration::from_secs_f64(seconds.max(0.0));
    std::thread::sleep(due.saturating_sub(begun.elapsed()));
}

/// The process's resident memory.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// Seconds of the longest reads beside the training.
struct Reads {
    managed: f64,
    plain: f64,
}

/// Reads rows of the present batch until the training has ended.
fn read_beside(
    managed: &Soaked,
    plain: Option<&Soaked>,
    draw: &Draw,
    present: &AtomicU64,
    has_ended: &AtomicBool,
) -> Result<Reads, BenchError> {
    let mut reads = Reads { managed: 0.0, plain: 0.0 };
    let mut out = vec![0.0; READ_IDS.min(draw.batch) * managed.dim];
    while !has_ended.load(Ordering::Acquire) {
        let unique = draw.unique(present.load(Ordering::Relaxed));
        let keys: Vec<FeatureKey> = unique.iter().take(READ_IDS).map(|&(key, _)| key).collect();
        let out = &mut out[..keys.len() * managed.dim];
        reads.managed = reads.managed.max(read(managed, &keys, out)?);
        if let Some(plain) = plain {
            reads.plain = reads.plain.max(read(plain, &keys, out)?);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(reads)
}

/// Seconds of a read.
fn read(soaked: &Soaked, keys: &[FeatureKey], out: &mut [f32]) -> Result<f64, StoreError> {
    let (read, took) = timed(|| soaked.store.read(GROUP, keys, out));
    read?;
    Ok(took.seconds)
}

/// A set of ids.
struct Ids {
    seen: Vec<u64>,
    count: u64,
}

impl Ids {
    fn new(end: u64) -> Self {
        Self { seen: vec![0; end as usize / 64 + 1], count: 0 }
    }

    fn add(&mut self, id: u64) {
        let (word, bit) = (&mut self.seen[id as usize / 64], 1 << (id % 64));
        self.count += u64::from(*word & bit == 0);
        *word |= bit;
    }
}

/// The naive reference.
fn reference_hits(args: &SoakArgs, draw: &Draw) -> Hits {
    let (mut reference, mut hits) = (Reference::default(), Hits::default());
    for batch in 0..args.batches {
        let unique = draw.unique(batch);
        let found = reference.train(moment(batch), &unique);
        reference.keep(args.budget as usize, moment(batch));
        if batch >= args.batches / 3 {
            hits.add(found, unique.len() as u64);
        }
    }
    hits
}

/// The scores of all rows, and the moments that they are of.
#[derive(Default)]
struct Reference(HashMap<u64, (f64, u64)>);

impl Reference {
    /// Returns the number of ids that had a score.
    fn train(&mut self, now: u64, unique: &[(FeatureKey, u64)]) -> u64 {
        let mut found = 0;
        for &(_, id) in unique {
            let added = score_of(examples_of(id));
            let row = self.0.entry(id);
            found += u64::from(matches!(row, std::collections::hash_map::Entry::Occupied(_)));
            let (score, last) = row.or_insert((0.0, now));
            *score = decayed(*score, *last, now) + added;
            *last = now;
        }
        found
    }

    /// Evicts the lowest scores, down to 31/32 of the budget, if there are more rows.
    fn keep(&mut self, budget: usize, now: u64) {
        if self.0.len() <= budget {
            return;
        }
        let excess = self.0.len() - (budget - budget / 32);
        let mut scores: Vec<(f64, u64)> =
            self.0.iter().map(|(&id, &(score, last))| (decayed(score, last, now), id)).collect();
        scores.select_nth_unstable_by(excess - 1, |a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        for (_, id) in &scores[..excess] {
            self.0.remove(id);
        }
    }
}

fn decayed(score: f64, last: u64, now: u64) -> f64 {
    score * (1.0 - DECAY_PER_DAY).powf((now - last) as f64 / 86_400.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> SoakArgs {
        SoakArgs {
            part: SoakPart::All,
            dim: 2,
            budget: 2_000,
            ids: 20_000,
            batches: 300,
            batch: 512,
            seconds: 0.0,
            slots: 4,
            zipf: 1.05,
            compare: true,
            json: false,
        }
    }

    #[test]
    fn a_small_soak_stays_within_its_budget_and_near_the_reference() {
        let SoakFigures { store, reference_hit_rate } = bench_soak(&args()).unwrap();
        let (figures, reference) = (store.unwrap(), reference_hit_rate.unwrap());
        assert!(figures.rows <= 2_000 && figures.evicted > 5_000, "{figures:?}");
        assert!(figures.distinct_ids > 15_000, "{figures:?}");
        assert!((figures.hit_rate - reference).abs() < 0.03, "{reference} {figures:?}");
        assert!((0.2..1.0).contains(&figures.hit_rate), "{figures:?}");
        assert!(figures.most_bytes as f64 <= 1.03 * figures.third_bytes as f64, "{figures:?}");
        assert!(figures.plain_longest_read_seconds.is_some_and(|seconds| seconds > 0.0), "{figures:?}");
    }

    /// Two commands of one part each have the figures of one command.
    #[test]
    fn the_parts_of_a_soak_have_its_figures() {
        let part = |part| bench_soak(&SoakArgs { part, ..args() }).unwrap();
        let (store, reference) = (part(SoakPart::Store), part(SoakPart::Reference));
        assert!(store.reference_hit_rate.is_none() && reference.store.is_none());
        let whole = part(SoakPart::All);
        assert_eq!(reference.reference_hit_rate, whole.reference_hit_rate);
        assert_eq!(store.store.unwrap().hit_rate, whole.store.unwrap().hit_rate);
        let line = serde_json::to_value(&reference).unwrap();
        assert_eq!(line.as_object().unwrap().keys().collect::<Vec<_>>(), ["referenceHitRate"]);
    }

    #[test]
    fn the_reference_evicts_the_lowest_of_decayed_scores() {
        let mut reference = Reference::default();
        let batch = |ids: &[u64]| -> Vec<(FeatureKey, u64)> { ids.iter().map(|&id| (key(id), id)).collect() };
        assert_eq!(reference.train(START, &batch(&[1, 3])), 0);
        assert_eq!(reference.train(START + 86_400, &batch(&[1, 2])), 1);
        // 3 has 3 · 0.9, 1 has 1 · 0.9 + 1, and 2 has 1.
        reference.keep(2, START + 86_400);
        let mut left: Vec<u64> = reference.0.keys().copied().collect();
        left.sort_unstable();
        assert_eq!(left, [1, 3]);
    }

    #[test]
    fn meaningless_arguments_are_refused_by_name() {
        for (args, argument) in [
            (SoakArgs { budget: 3, ..args() }, "budget"),
            (SoakArgs { ids: 0, ..args() }, "ids"),
            (SoakArgs { batches: 2, ..args() }, "batches"),
            (SoakArgs { zipf: 1.0, ..args() }, "zipf"),
        ] {
            let error = bench_soak(&args).unwrap_err();
            assert!(error.is_user_error() && error.to_string().contains(argument), "{error}");
        }
    }
}
