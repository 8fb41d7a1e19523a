//! Managed tables as a store's callers see them: admission, score, expiry, priority and one budget.
//! A naive reference keeps exact scores in a map and shares no code with the store.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use proptest::prelude::*;
use rectrain_embedding::{
    Admission, Budget, BudgetUnit, Examples, FeatureKey, GroupId, Initializer, Kept, LifePolicy, Managed, Missing,
    Moment, Priority, RowSpec, RowTimes, RowUses, SaveId, SaveScope, ScoreRule, Seen, Slot, SlotSnapshot,
    SparseOptimizer, SpecError, Store, StoreConfig, StoreError, ValueType,
};
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU64;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

const DIM: usize = 2;
const SLOTS: u32 = 3;
const DAY: u64 = 86_400;
/// The first moment of a trace.
const START: u64 = 1_700_000_000;
/// The span of groups that expire.
const SPAN: u64 = 2 * DAY;
const KRAKEN: ScoreRule = ScoreRule::Score { decay_per_day_millionths: 100_000, positive_weight_thousandths: 3_000 };

fn always(score: ScoreRule) -> Managed {
    Managed { admission: Admission::Always, expire_after: None, score, priority: Priority::Low }
}

fn spec(life: Managed) -> RowSpec {
    RowSpec {
        dim: DIM,
        value_type: ValueType::F32,
        optimizer: SparseOptimizer::RowWiseAdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-6 },
        life: LifePolicy::Managed(life),
        initializer: Initializer::Normal { standard_deviation: 0.1 },
        zero_columns: 0,
        first_order: None,
        share: None,
    }
}

fn rows(limit: u64) -> Option<Budget> {
    Some(Budget { unit: BudgetUnit::Rows, limit })
}

fn config_of(groups: Vec<RowSpec>, budget: Option<Budget>) -> StoreConfig {
    StoreConfig { slots: SLOTS, seed: 7, groups, budget }
}

/// Groups of every admission, score and priority, one of them with a share, and one that keeps
/// every row.
fn config() -> StoreConfig {
    let expiring = Managed { expire_after: NonZeroU64::new(SPAN), ..always(KRAKEN) };
    let counting = Managed { admission: Admission::Count { count: 2, counters: 5_000 }, ..expiring };
    let drawing = Admission::Probability { per_2_32: 1 << 31 };
    let high = Managed { admission: drawing, priority: Priority::High, ..always(ScoreRule::Lfu) };
    let recent = Managed { expire_after: NonZeroU64::new(SPAN), ..always(ScoreRule::Lru) };
    let keeping = RowSpec { life: LifePolicy::KeepAll, ..spec(always(KRAKEN)) };
    let shared = RowSpec { share: Some(250_000), ..spec(counting) };
    let groups = vec![spec(always(KRAKEN)), shared, spec(high), spec(recent), keeping];
    config_of(groups, rows(150))
}

fn store_of(config: StoreConfig) -> Arc<Store> {
    let store = Arc::new(Store::new(config).unwrap());
    store.track_changes(true);
    store
}

fn key(number: u64) -> FeatureKey {
    FeatureKey(xxh3_64(&number.to_le_bytes()))
}

fn random(words: [u64; 3]) -> u64 {
    xxh3_64(&words.map(u64::to_le_bytes).concat())
}

fn gradients(keys: &[FeatureKey], step: u64) -> Vec<f32> {
    let value = |key: &FeatureKey, column| (random([key.0, step, column]) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    keys.iter().flat_map(|key| (0..DIM as u64).map(move |column| value(key, column))).collect()
}

/// One step of one group.
#[derive(Clone, Debug)]
struct Step {
    group: u16,
    /// Number of the key, positive and negative examples.
    keys: BTreeMap<u64, (u32, u32)>,
    /// Seconds since the step before.
    seconds: u64,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let keys = prop::collection::btree_map(0_u64..60, (0_u32..3, 0_u32..4), 1..40);
    let step = (0_u16..5, keys, 0..DAY / 2).prop_map(|(group, keys, seconds)| Step { group, keys, seconds });
    prop::collection::vec(step, 1..60)
}

/// A long trace with new keys all the time, and now and then a pause of three days.
fn trace(length: u64) -> Vec<Step> {
    let step = |number: u64| {
        let group = number % 5;
        let draw = |of: u64| {
            let bits = random([number, of, 0]);
            let id = if bits >> 32 & 1 == 0 { bits % 20 } else { number * 3 + bits % 50 };
            // The groups that keep their rows longest see few ids.
            let id = [id, id, id % 40, id, id % 20][group as usize];
            (id, ((bits >> 40) as u32 % 2, (bits >> 50) as u32 % 3))
        };
        let pause = if number % 50 == 49 { 3 * DAY } else { 0 };
        let seconds = random([number, 0, 1]) % 9_000 + pause;
        Step { group: group as u16, keys: (0..60).map(draw).collect(), seconds }
    };
    (0..length).map(step).collect()
}

/// Applies a step to the keys that `owns` selects: look-up and update.
fn apply(store: &Store, step: &Step, number: u64, now: u64, owns: impl Fn(FeatureKey) -> bool) {
    let mut batch: Vec<(FeatureKey, Examples)> = Vec::new();
    for (&id, &(positive, negative)) in &step.keys {
        batch.push((key(id), Examples { positive, negative }));
    }
    batch.retain(|&(key, _)| owns(key));
    batch.sort_unstable_by_key(|&(key, _)| key);
    let (keys, examples): (Vec<FeatureKey>, Vec<Examples>) = batch.into_iter().unzip();
    let (group, gradients) = (GroupId(step.group), gradients(&keys, number));
    store.lookup(group, &keys, Missing::Insert, &mut vec![0.0; keys.len() * DIM]).unwrap();
    let seen = Seen { now: Moment(now), examples: &examples };
    store.update_seen(group, &keys, &gradients, number, seen).unwrap();
}

/// Applies a step and keeps the budget of all slots.
fn train(store: &Store, step: &Step, number: u64, now: u64) {
    apply(store, step, number, now, |_| true);
    for slot in (0..SLOTS).map(Slot) {
        store.keep_budget(slot, Moment(now)).unwrap();
    }
}

fn moments(steps: &[Step]) -> Vec<u64> {
    let moment = |now: &mut u64, step: &Step| {
        *now += step.seconds;
        Some(*now)
    };
    steps.iter().scan(START, moment).collect()
}

fn run(store: &Store, steps: &[Step], from: usize, to: usize) {
    let moments = moments(steps);
    for number in from..to {
        train(store, &steps[number], number as u64 + 1, moments[number]);
    }
}

fn digests(store: &Store) -> Vec<[u8; 32]> {
    store.digests(0..SLOTS).unwrap()
}

type Name = (u16, FeatureKey);

fn names(store: &Store, slot: Slot) -> BTreeSet<Name> {
    let mut names = BTreeSet::new();
    let mut add = |group: GroupId, key, _: &[f32], _: &[f32]| {
        names.insert((group.0, key));
    };
    store.for_each_row(slot, &mut add).unwrap();
    names
}

// ---- the naive reference -----------------------------------------------------------------------

/// The error of a score beside one that decays by the second: one unit of time and the coding.
const ERROR: f64 = 0.06;

#[derive(Clone, Copy, Default)]
struct Row {
    /// At the moment `last`.
    score: f64,
    last: u64,
}

#[derive(Default)]
struct Reference {
    rows: BTreeMap<Name, Row>,
    sightings: BTreeMap<Name, u32>,
}

impl Reference {
    fn weight(group: u16) -> f64 {
        if group < 2 { 3.0 } else { 1.0 }
    }

    /// Exact: by the second.
    fn score(&self, (group, key): Name, now: u64) -> f64 {
        let row = self.rows[&(group, key)];
        let days = (now - row.last) as f64 / DAY as f64;
        match group {
            0 | 1 => row.score * 0.9_f64.powf(days),
            2 => row.score,
            _ => row.last as f64,
        }
    }

    fn is_high(group: u16) -> bool {
        group == 2
    }

    fn expires(group: u16) -> bool {
        group == 1 || group == 3
    }

    /// Follows a step. Draws are the store's: `contains` says which keys have a row after it.
    fn train(&mut self, step: &Step, now: u64, contains: impl Fn(Name) -> bool) {
        for (&id, &(positive, negative)) in &step.keys {
            let name = (step.group, key(id));
            if !self.rows.contains_key(&name) {
                let seen = self.sightings.entry(name).or_default();
                *seen += 1;
                let is_admitted = match step.group {
                    1 => *seen >= 2,
                    2 => contains(name),
                    _ => true,
                };
                assert_eq!(contains(name), is_admitted, "{name:?}");
                if !is_admitted {
                    continue;
                }
                self.sightings.remove(&name);
                self.rows.insert(name, Row { score: 0.0, last: now });
            }
            let added = f64::from(positive) * Self::weight(step.group) + f64::from(negative);
            let score = if step.group == 3 { 0.0 } else { self.score(name, now) + added };
            self.rows.insert(name, Row { score, last: now });
        }
    }

    /// Checks the rows that a slot kept, and forgets the others.
    fn kept(&mut self, slot: Slot, after: &BTreeSet<Name>, kept: Kept, now: u64) {
        let own = |(_, key): &Name| rectrain_embedding::slot_of(*key, SLOTS) == slot;
        let before: Vec<Name> = self.rows.keys().copied().filter(own).collect();
        let removed: Vec<Name> = before.iter().copied().filter(|name| !after.contains(name)).collect();
        assert_eq!(after.len() + removed.len(), before.len());
        assert_eq!(removed.len() as u64, kept.expired + kept.evicted);
        let age = |name: &Name| if Self::expires(name.0) { now - self.rows[name].last } else { 0 };
        let may_expire = removed.iter().filter(|name| age(name) > SPAN).count() as u64;
        let must_expire = before.iter().filter(|name| age(name) > SPAN + SPAN / 10).count() as u64;
        assert!((must_expire..=may_expire).contains(&kept.expired), "{must_expire} {may_expire} {kept:?}");
        assert!(after.iter().all(|name| age(name) <= SPAN + SPAN / 10));
        self.check_sizes(before.len() as u64 - kept.expired, after, kept);
        for evicted in removed.iter().filter(|name| age(name) <= SPAN) {
            self.check_order(*evicted, after, now);
        }
        self.rows.retain(|name, _| !removed.contains(name));
    }

    /// The slot's part is 50 rows, and the part of group 1 is 12.
    fn check_sizes(&self, unexpired: u64, after: &BTreeSet<Name>, kept: Kept) {
        let of_share = after.iter().filter(|name| name.0 == 1).count();
        assert!(of_share <= 12, "{of_share}");
        let kept_by_all = after.iter().filter(|name| name.0 == 4).count();
        let size = after.len();
        assert!(size <= 50 || size == kept_by_all, "{size}");
        assert_eq!(unexpired - kept.evicted, size as u64);
        // Trimmed for the budget: to exactly 49, if there are enough rows that may go.
        if unexpired > 50 && of_share < 12 && size > kept_by_all {
            assert!(size <= 49, "{size}");
        }
    }

    fn check_order(&self, evicted: Name, after: &BTreeSet<Name>, now: u64) {
        assert_ne!(evicted.0, 4, "a group that keeps every row");
        // Recency and scores do not compare.
        let comparable = |name: &&Name| match evicted.0 {
            1 | 3 => name.0 == evicted.0,
            _ => name.0 != 3 && name.0 != 4,
        };
        for kept in after.iter().filter(comparable) {
            if Self::is_high(kept.0) != Self::is_high(evicted.0) {
                assert!(Self::is_high(kept.0), "{evicted:?} is high, {kept:?} is low");
                continue;
            }
            let (low, high) = (self.score(evicted, now), self.score(*kept, now));
            let error = if evicted.0 == 3 { 0.0 } else { high * ERROR + 0.05 };
            assert!(low <= high + error, "evicted {low} of {evicted:?}, kept {high} of {kept:?}");
        }
    }
}

proptest! {
    #[test]
    fn the_kept_rows_are_those_of_a_naive_reference(steps in steps()) {
        let (store, mut reference) = (store_of(config()), Reference::default());
        for ((step, now), number) in steps.iter().zip(moments(&steps)).zip(1..) {
            apply(&store, step, number, now, |_| true);
            reference.train(step, now, |(group, key)| store.contains(GroupId(group), key).unwrap());
            for slot in (0..SLOTS).map(Slot) {
                let kept = store.keep_budget(slot, Moment(now)).unwrap();
                reference.kept(slot, &names(&store, slot), kept, now);
                prop_assert_eq!(store.keep_budget(slot, Moment(now)).unwrap(), Kept::default(), "nothing is left");
            }
        }
    }
}

// ---- the semantics, one by one -----------------------------------------------------------------

/// Updates keys one by one, each with these examples.
fn see(store: &Store, group: u16, ids: impl IntoIterator<Item = u64>, examples: (u32, u32), step: u64, now: u64) {
    let keys = ids.into_iter().map(|id| (id, examples)).collect();
    apply(store, &Step { group, keys, seconds: 0 }, step, now, |_| true);
}

fn has(store: &Store, group: u16, id: u64) -> bool {
    store.contains(GroupId(group), key(id)).unwrap()
}

fn keep(store: &Store, now: u64) -> Kept {
    let mut all = Kept::default();
    for slot in (0..store.config().slots).map(Slot) {
        let kept = store.keep_budget(slot, Moment(now)).unwrap();
        all.expired += kept.expired;
        all.evicted += kept.evicted;
        all.youngest_evicted_seconds =
            [all.youngest_evicted_seconds, kept.youngest_evicted_seconds].into_iter().flatten().min();
    }
    all
}

fn one_slot(groups: Vec<RowSpec>, budget: Option<Budget>) -> Arc<Store> {
    store_of(StoreConfig { slots: 1, ..config_of(groups, budget) })
}

#[test]
fn rows_over_the_budget_go_by_score_down_to_31_of_32() {
    let store = one_slot(vec![spec(always(KRAKEN))], rows(64));
    see(&store, 0, 0..64, (0, 5), 1, START);
    assert_eq!(keep(&store, START), Kept::default(), "at the limit");
    see(&store, 0, [100], (2, 0), 2, START);
    see(&store, 0, [101], (1, 1), 3, START);
    let kept = keep(&store, START + 3_600 * 24);
    assert_eq!((kept.expired, kept.evicted), (0, 4));
    assert_eq!(kept.youngest_evicted_seconds, Some(DAY));
    assert!(has(&store, 0, 100), "2 positive examples weigh 6");
    assert!(!has(&store, 0, 101), "1 positive and 1 negative example weigh 4");
    assert_eq!(store.rows(), 62);
}

#[test]
fn an_old_score_decays_below_a_new_one() {
    let store = one_slot(vec![spec(always(KRAKEN))], rows(1));
    see(&store, 0, [1], (0, 4), 1, START);
    see(&store, 0, [2], (0, 3), 2, START + 2 * DAY);
    keep(&store, START + 2 * DAY);
    assert!(has(&store, 0, 1) && !has(&store, 0, 2), "4 · 0.9² is more than 3");
    see(&store, 0, [3], (0, 3), 3, START + 5 * DAY);
    keep(&store, START + 5 * DAY);
    assert!(has(&store, 0, 3) && !has(&store, 0, 1), "4 · 0.9⁵ is less than 3");
}

#[test]
fn lfu_counts_examples_alike_and_lru_keeps_the_latest() {
    let store = one_slot(vec![spec(always(ScoreRule::Lfu))], rows(1));
    see(&store, 0, [1], (2, 0), 1, START);
    see(&store, 0, [2], (0, 3), 2, START);
    keep(&store, START + 900 * DAY);
    assert!(has(&store, 0, 2) && !has(&store, 0, 1));
    for clock in [0, START] {
        let store = one_slot(vec![spec(always(ScoreRule::Lru))], rows(1));
        see(&store, 0, [1], (9, 9), 1, clock);
        see(&store, 0, [2], (0, 1), 2, clock + u64::from(clock > 0));
        let kept = keep(&store, clock + 2 * u64::from(clock > 0));
        assert!(has(&store, 0, 2) && !has(&store, 0, 1), "clock {clock}");
        assert_eq!(kept.youngest_evicted_seconds, (clock > 0).then_some(2), "an age takes a clock");
    }
}

#[test]
fn high_priority_goes_only_when_no_low_row_is_left() {
    let high = Managed { priority: Priority::High, ..always(KRAKEN) };
    let store = one_slot(vec![spec(high), spec(always(KRAKEN))], rows(10));
    see(&store, 0, 0..6, (0, 1), 1, START);
    see(&store, 1, 0..6, (9, 9), 2, START);
    assert_eq!(keep(&store, START).evicted, 2);
    assert_eq!((store.group_rows(GroupId(0)).unwrap(), store.group_rows(GroupId(1)).unwrap()), (6, 4));
    see(&store, 0, 6..12, (0, 1), 3, START);
    keep(&store, START);
    assert_eq!((store.group_rows(GroupId(0)).unwrap(), store.group_rows(GroupId(1)).unwrap()), (10, 0));
}

#[test]
fn a_group_keeps_within_its_share() {
    let shared = RowSpec { share: Some(500_000), ..spec(always(KRAKEN)) };
    let store = one_slot(vec![shared, spec(always(KRAKEN))], rows(20));
    see(&store, 0, 0..15, (9, 0), 1, START);
    see(&store, 1, 0..5, (0, 1), 2, START);
    assert_eq!(keep(&store, START).evicted, 5);
    assert_eq!((store.group_rows(GroupId(0)).unwrap(), store.group_rows(GroupId(1)).unwrap()), (10, 5));
    assert_eq!(store.life_counts()[0].evicted, 5);
}

#[test]
fn a_budget_in_bytes_counts_all_of_a_row() {
    // 8 bytes of values, 4 of state, 12 of key and word, 10 of index.
    let budget = Budget { unit: BudgetUnit::Bytes, limit: 34 * 10 };
    let store = one_slot(vec![spec(always(KRAKEN))], Some(budget));
    see(&store, 0, 0..10, (0, 1), 1, START);
    assert_eq!(keep(&store, START).evicted, 0);
    see(&store, 0, 10..11, (0, 1), 2, START);
    assert_eq!(keep(&store, START).evicted, 2, "to 330 bytes");
}

#[test]
fn a_slot_keeps_one_row_under_the_smallest_budget() {
    let store = store_of(config_of(vec![spec(always(KRAKEN))], rows(1)));
    see(&store, 0, 0..60, (0, 1), 1, START);
    keep(&store, START);
    assert!((0..SLOTS).all(|slot| store.slot_rows(Slot(slot)).unwrap() == 1));
    let shared = RowSpec { share: Some(1), ..spec(always(KRAKEN)) };
    let store = one_slot(vec![shared], rows(100));
    see(&store, 0, 0..60, (0, 1), 1, START);
    assert_eq!((keep(&store, START).evicted, store.rows()), (59, 1));
}

#[test]
fn a_lowered_budget_is_kept_at_the_next_call() {
    let store = one_slot(vec![spec(always(KRAKEN))], None);
    see(&store, 0, 0..200, (0, 1), 1, START);
    assert_eq!(keep(&store, START), Kept::default());
    store.set_budget(rows(64)).unwrap();
    assert_eq!((keep(&store, START).evicted, store.rows()), (138, 62));
    let refused = store.set_budget(rows(0));
    assert!(matches!(refused, Err(StoreError::Spec(SpecError::Budget))));
    assert_eq!(store.budget(), rows(64));
}

#[test]
fn rows_expire_by_event_time_and_not_without_a_clock() {
    for score in [KRAKEN, ScoreRule::Lfu, ScoreRule::Lru] {
        let life = Managed { expire_after: NonZeroU64::new(SPAN), ..always(score) };
        let store = one_slot(vec![spec(life)], None);
        see(&store, 0, 0..10, (0, 1), 1, START);
        see(&store, 0, 5..10, (0, 1), 2, START + DAY);
        assert_eq!(keep(&store, START + SPAN), Kept::default(), "{score:?}: never early");
        assert_eq!(keep(&store, 0), Kept::default());
        let late = START + SPAN + SPAN / 10;
        let expected = Kept { expired: 5, ..Kept::default() };
        assert_eq!(keep(&store, late), expected, "{score:?}");
        assert!(has(&store, 0, 5) && !has(&store, 0, 4));
        // A step back in time expires nothing.
        see(&store, 0, [20], (0, 1), 3, START - DAY);
        assert_eq!(keep(&store, START - DAY), Kept::default());
        assert_eq!(store.life_counts()[0].expired, 5);
    }
}

#[test]
fn a_gradient_of_an_evicted_row_is_dropped_and_counted() {
    let store = one_slot(vec![spec(always(KRAKEN))], rows(2));
    see(&store, 0, 1..3, (0, 5), 1, START);
    store.lookup(GroupId(0), &[key(9)], Missing::Insert, &mut [0.0; DIM]).unwrap();
    keep(&store, START);
    assert!(!has(&store, 0, 9), "the lowest score");
    let before = digests_of_one(&store);
    let counts = store.update(GroupId(0), &[key(9)], &[1.0; DIM], 2).unwrap();
    assert_eq!((counts.missing, counts.applied), (1, 0));
    assert_eq!(digests_of_one(&store), before, "no row, and no neighbour, is changed");
    let counts = store.life_counts()[0];
    assert_eq!((counts.admitted, counts.evicted, counts.gradients_dropped), (3, 1, 1));
}

fn digests_of_one(store: &Store) -> Vec<[u8; 32]> {
    store.digests(0..1).unwrap()
}

#[test]
fn evaluations_and_repeated_look_ups_score_nothing() {
    let store = store_of(config());
    let trace = trace(20);
    run(&store, &trace, 0, 20);
    let before = digests(&store);
    for group in (0..5).map(GroupId) {
        for id in 0..80 {
            store.lookup(group, &[key(id)], Missing::ReadInitial, &mut [0.0; DIM]).unwrap();
            store.read(group, &[key(id)], &mut [0.0; DIM]).unwrap();
            if store.contains(group, key(id)).unwrap() {
                store.lookup(group, &[key(id)], Missing::Insert, &mut [0.0; DIM]).unwrap();
            }
        }
    }
    assert_eq!(digests(&store), before);
}

#[test]
fn examples_of_another_number_of_keys_are_refused() {
    let store = store_of(config());
    let seen = Seen { now: Moment(1), examples: &[Examples::default()] };
    let refused = store.update_seen(GroupId(0), &[key(1), key(2)], &[0.0; 2 * DIM], 1, seen);
    assert!(matches!(refused, Err(StoreError::Examples { keys: 2, found: 1, .. })));
}

#[test]
fn settings_of_managed_tables_are_refused_by_name() {
    let score = |decay_per_day_millionths, positive_weight_thousandths| {
        always(ScoreRule::Score { decay_per_day_millionths, positive_weight_thousandths })
    };
    for (life, name) in [
        (score(1_000_000, 1), "decay per day"),
        (score(0, 1_000_001), "positive weight"),
        (Managed { expire_after: NonZeroU64::new(1 << 33), ..always(KRAKEN) }, "expiry"),
        (Managed { admission: Admission::Probability { per_2_32: 0 }, ..always(KRAKEN) }, "probability"),
        (Managed { admission: Admission::Count { count: 0, counters: 1 }, ..always(KRAKEN) }, "count"),
    ] {
        let refused = Store::new(config_of(vec![spec(life)], None)).map(drop).unwrap_err().to_string();
        assert!(refused.contains(&format!("the row life's {name} is")), "{refused}");
    }
    assert!(matches!(Store::new(config_of(vec![spec(always(KRAKEN))], rows(0))), Err(StoreError::Spec(_))));
}

// ---- scores and ages for a reader ---------------------------------------------------------------

/// The score and the age of each row of a group whose policy records them.
fn uses(store: &Store) -> BTreeMap<Name, (Option<f64>, Option<u64>)> {
    let mut times: Vec<Option<RowTimes>> = store.config().groups.iter().map(RowTimes::of).collect();
    let (mut keys, mut words) = (Vec::new(), Vec::new());
    for slot in (0..store.config().slots).map(Slot) {
        store.for_each_row(slot, |group, key, _, _| keys.push((group.0, key))).unwrap();
        words.extend(store.row_words(slot).unwrap());
    }
    assert_eq!(keys.len(), words.len());
    for &(group, word) in &words {
        if let Some(times) = &mut times[usize::from(group.0)] {
            times.add(word);
        }
    }
    let uses: Vec<Option<RowUses>> = times.iter().map(|times| times.as_ref().map(RowTimes::uses)).collect();
    let named = keys.into_iter().zip(words).filter_map(|(name, (group, word))| {
        assert_eq!(name.0, group.0);
        let uses = uses[usize::from(group.0)]?;
        Some((name, (uses.score(word), uses.age_seconds(word))))
    });
    named.collect()
}

#[test]
fn a_reader_gets_the_scores_and_ages_of_the_latest_update() {
    let (store, mut reference) = (store_of(config()), Reference::default());
    let trace = trace(200);
    for ((step, now), number) in trace.iter().zip(moments(&trace)).zip(1..) {
        apply(&store, step, number, now, |_| true);
        reference.train(step, now, |(group, key)| store.contains(GroupId(group), key).unwrap());
    }
    let found = uses(&store);
    for group in 0..4 {
        let of_group = || reference.rows.iter().filter(|(name, _)| name.0 == group);
        let latest = of_group().map(|(_, row)| row.last).max().unwrap();
        assert!(of_group().count() > 3, "group {group} has rows");
        for (name, row) in of_group() {
            let (score, age) = found[name];
            let (exact, unit) = (latest - row.last, if group == 3 { 0 } else { 5_400 });
            assert!(age.unwrap().abs_diff(exact) <= unit, "{name:?}: {age:?}, exactly {exact}");
            assert_eq!(score.is_some(), group != 3, "LRU has no scores");
            if let Some(score) = score {
                let exact = reference.score(*name, latest);
                assert!((score - exact).abs() <= exact * ERROR + 0.05, "{name:?}: {score}, exactly {exact}");
            }
        }
    }
    assert!(found.keys().all(|name| name.0 < 4), "a group that keeps every row records nothing");
}

#[test]
fn ages_are_right_where_the_times_of_rows_wrap() {
    // The 16 bits of units of 5,400 seconds begin again here.
    let wrap = 5_400 * (1 << 16) * 5;
    let store = one_slot(vec![spec(always(KRAKEN))], None);
    see(&store, 0, [1], (0, 4), 1, wrap - 3 * DAY);
    see(&store, 0, [2], (0, 3), 2, wrap + DAY);
    let found = uses(&store);
    let (score, age) = found[&(0, key(1))];
    assert!((score.unwrap() - 4.0 * 0.9_f64.powi(4)).abs() < 1e-9 && age == Some(4 * DAY), "{score:?} {age:?}");
    assert_eq!(found[&(0, key(2))], (Some(3.0), Some(0)));
    for year in 1..=9 {
        see(&store, 0, [10 + year], (0, 1), 2 + year, wrap + year * 365 * DAY);
    }
    assert_eq!(uses(&store)[&(0, key(2))].1, Some((9 * 365 - 1) * DAY), "nine years");
}

#[test]
fn without_a_clock_a_reader_gets_scores_and_no_ages() {
    let stores = [ScoreRule::Lfu, ScoreRule::Lru].map(|score| {
        let store = one_slot(vec![spec(always(score))], None);
        see(&store, 0, [1], (2, 1), 7, 0);
        store.lookup(GroupId(0), &[key(2)], Missing::Insert, &mut [0.0; DIM]).unwrap();
        uses(&store)
    });
    assert_eq!(stores[0], [((0, key(1)), (Some(3.0), None)), ((0, key(2)), (Some(1.0), None))].into());
    assert_eq!(stores[1], [((0, key(1)), (None, None)), ((0, key(2)), (None, None))].into());
}

// ---- admission and eviction --------------------------------------------------------------------

#[derive(Clone, Copy, Debug)]
enum Event {
    See,
    LookUp,
    Expire,
    Evict,
}

/// Every sequence of six events for one key that is admitted at its third sighting. A counted key
/// is never read as a row, whatever came before.
#[test]
fn a_counted_key_is_never_read_as_a_row() {
    let counting = Managed {
        admission: Admission::Count { count: 3, counters: 100 },
        expire_after: NonZeroU64::new(SPAN),
        ..always(KRAKEN)
    };
    let anchor = Managed { priority: Priority::High, ..always(KRAKEN) };
    for sequence in 0..4_u32.pow(6) {
        let store = one_slot(vec![spec(counting), spec(anchor)], None);
        see(&store, 1, [0], (0, 1), 1, START);
        let mut initial = [0.0; DIM];
        store.lookup(GroupId(0), &[key(7)], Missing::ReadInitial, &mut initial).unwrap();
        let (mut sightings, mut has_row, mut now) = (0, false, START);
        for number in 0..6_u32 {
            let event =
                [Event::See, Event::LookUp, Event::Expire, Event::Evict][(sequence >> (2 * number) & 3) as usize];
            match event {
                Event::See => {
                    see(&store, 0, [7], (1, 0), u64::from(number) + 2, now);
                    sightings += 1;
                    has_row |= sightings == 3;
                }
                Event::LookUp => {
                    store.lookup(GroupId(0), &[key(7)], Missing::Insert, &mut [0.0; DIM]).unwrap();
                }
                Event::Expire => {
                    now += 2 * SPAN;
                    store.keep_budget(Slot(0), Moment(now)).unwrap();
                }
                Event::Evict => {
                    store.set_budget(rows(1)).unwrap();
                    store.keep_budget(Slot(0), Moment(now)).unwrap();
                    store.set_budget(None).unwrap();
                }
            }
            if matches!(event, Event::Expire | Event::Evict) && has_row {
                (has_row, sightings) = (false, 0);
            }
            let mut values = [0.0; DIM];
            store.lookup(GroupId(0), &[key(7)], Missing::ReadInitial, &mut values).unwrap();
            assert_eq!(has(&store, 0, 7), has_row, "{sequence:o} at {number}");
            assert_eq!(values == initial, !has_row, "{sequence:o} at {number}");
            assert!(has(&store, 1, 0));
        }
    }
}

#[test]
fn a_draw_admits_by_seed_key_and_step_alone() {
    let drawing = Managed { admission: Admission::Probability { per_2_32: 1 << 30 }, ..always(KRAKEN) };
    let config = config_of(vec![spec(drawing)], None);
    let store = store_of(config.clone());
    let mut sightings = Vec::new();
    for id in 0..2_000 {
        let first = (1..200).find(|&step| {
            see(&store, 0, [id], (0, 1), step, START);
            has(&store, 0, id)
        });
        sightings.push(first.unwrap() as f64);
    }
    let mean = sightings.iter().sum::<f64>() / sightings.len() as f64;
    assert!((mean - 4.0).abs() < 0.4, "1/p sightings, not {mean}");
    // Another store, in another order of keys and after a look-up, admits the same at each step.
    let other = store_of(config.clone());
    for id in (0..2_000).rev() {
        other.lookup(GroupId(0), &[key(id)], Missing::Insert, &mut [0.0; DIM]).unwrap();
        for step in 1..=sightings[id as usize] as u64 {
            assert!(!has(&other, 0, id));
            see(&other, 0, [id], (0, 1), step, START);
        }
        assert!(has(&other, 0, id));
    }
    let seeded = store_of(StoreConfig { seed: 8, ..config });
    for id in 0..2_000 {
        see(&seeded, 0, [id], (0, 1), 1, START);
    }
    let firsts = |store: &Store| (0..2_000).filter(|&id| has(store, 0, id) && sightings[id as usize] == 1.0).count();
    assert!(firsts(&seeded) < firsts(&store) / 2, "another seed draws others");
}

// ---- snapshots, moves and any number of stores -------------------------------------------------

fn restored(config: StoreConfig, snapshots: &[SlotSnapshot]) -> Arc<Store> {
    let store = store_of(config);
    for snapshot in snapshots {
        store.restore_slot(snapshot.as_bytes()).unwrap();
    }
    store
}

#[test]
fn one_store_and_three_with_restores_and_moves_are_equal() {
    let (trace, moments) = (trace(300), moments(&trace(300)));
    let whole = store_of(config());
    run(&whole, &trace, 0, trace.len());
    let counts = whole.life_counts();
    assert!([0, 1, 3].iter().all(|&group| counts[group].evicted > 10), "{counts:?}");
    // Rows by recency rank below rows by score, so few of group 3 live long enough to expire.
    assert!(counts[1].expired > 10 && counts[3].expired > 0, "{counts:?}");
    assert!([1, 2].iter().all(|&group| counts[group].turned_away > 10) && whole.rows() <= 150, "{counts:?}");
    let mut parts: Vec<Arc<Store>> = (0..SLOTS).map(|_| store_of(config())).collect();
    // The store of each slot.
    let mut owners = [0, 1, 2];
    for (number, (step, &now)) in trace.iter().zip(&moments).enumerate() {
        for (slot, &owner) in owners.iter().enumerate() {
            let slot = Slot(slot as u32);
            apply(&parts[owner], step, number as u64 + 1, now, |key| whole.slot_of(key) == slot);
            parts[owner].keep_budget(slot, Moment(now)).unwrap();
        }
        if number == 100 {
            // The process of slot 0 is replaced by one that restores it.
            let snapshot = parts[0].snapshot_slot(Slot(0)).unwrap();
            parts[0] = restored(config(), &[snapshot]);
        }
        if number == 200 {
            // Slot 2 moves to the process of slot 1.
            for part in parts[2].snapshot_slot_in_parts(Slot(2), 1_000).unwrap() {
                parts[1].restore_slot(part.as_bytes()).unwrap();
            }
            owners[2] = 1;
        }
    }
    for (slot, &owner) in owners.iter().enumerate() {
        let slot = Slot(slot as u32);
        assert_eq!(parts[owner].slot_digest(slot).unwrap(), whole.slot_digest(slot).unwrap(), "slot {slot}");
    }
}

#[test]
fn a_digest_covers_time_and_score() {
    let stores = [(0, START), (1, START), (0, START + DAY)].map(|(positive, now)| {
        let store = one_slot(vec![spec(always(KRAKEN))], None);
        see(&store, 0, [1], (positive, 1), 1, now);
        digests_of_one(&store)
    });
    assert!(stores[0] != stores[1] && stores[0] != stores[2]);
}

fn save(store: &Arc<Store>, save: u128, scope: SaveScope, meanwhile: impl FnOnce()) -> Vec<SlotSnapshot> {
    let frozen = store.freeze(SaveId(save), scope).unwrap();
    meanwhile();
    let snapshots = (0..store.config().slots).map(|slot| frozen.save_slot(Slot(slot)).unwrap()).collect();
    frozen.complete();
    snapshots
}

proptest! {
    #[test]
    fn a_base_and_its_changes_have_words_and_tombstones(steps in steps(), middle in 0.0_f64..1.0) {
        let (store, trace) = (store_of(config()), trace(120));
        let at = (trace.len() as f64 * middle) as usize;
        run(&store, &trace, 0, at);
        let mut chain = save(&store, 0, SaveScope::Everything, || run(&store, &trace, at, trace.len()));
        let base = SaveScope::ChangesSince(SaveId(0));
        let now = *moments(&trace).last().unwrap();
        let before = digests(&store);
        // Rows are evicted between the freeze and the write, too.
        chain.extend(save(&store, 1, base, || {
            for (step, number) in steps.iter().zip(1_000..) {
                train(&store, step, number, now + DAY);
            }
        }));
        prop_assert_eq!(digests(&restored(config(), &chain)), before);
        chain.extend(save(&store, 2, SaveScope::ChangesSince(SaveId(1)), || {}));
        prop_assert_eq!(digests(&restored(config(), &chain)), digests(&store));
    }
}

#[test]
fn an_evicted_key_is_a_tombstone_unless_it_is_a_row_again() {
    let store = one_slot(vec![spec(always(KRAKEN))], rows(4));
    see(&store, 0, 0..4, (0, 5), 1, START);
    save(&store, 1, SaveScope::Everything, || {});
    see(&store, 0, 10..13, (0, 9), 2, START);
    keep(&store, START);
    assert_eq!(store.rows(), 4);
    let gone: Vec<u64> = (0..4).filter(|&id| !has(&store, 0, id)).collect();
    assert_eq!(gone.len(), 3);
    see(&store, 0, [gone[0]], (0, 20), 3, START);
    let changes = save(&store, 2, SaveScope::ChangesSince(SaveId(1)), || {});
    assert_eq!((changes[0].removed(), changes[0].rows()), (2, 4));
}

/// The changes between two checkpoints hold the counters of keys that have no row. So any number of
/// restored stores admits a key at the same sighting as the store that went on.
#[test]
fn a_key_counted_before_a_checkpoint_is_admitted_on_time_after_it() {
    let counting = Managed { admission: Admission::Count { count: 3, counters: 1_000 }, ..always(KRAKEN) };
    let config = config_of(vec![spec(counting)], None);
    let whole = store_of(config.clone());
    see(&whole, 0, 0..40, (1, 0), 1, START);
    let base = save(&whole, 1, SaveScope::Everything, || {});
    see(&whole, 0, 0..40, (1, 0), 2, START);
    let changes = save(&whole, 2, SaveScope::ChangesSince(SaveId(1)), || {});
    assert!(changes.iter().all(|snapshot| snapshot.rows() == 0), "no key has a row");
    let chain: Vec<SlotSnapshot> = base.iter().chain(&changes).cloned().collect();
    let third = Step { group: 0, keys: (0..40).map(|id| (id, (1, 0))).collect(), seconds: 0 };
    apply(&whole, &third, 3, START, |_| true);
    assert_eq!(whole.rows(), 40);
    for slot in 0..SLOTS as usize {
        let of_slot = [chain[slot].clone(), chain[slot + SLOTS as usize].clone()];
        let (slot, own) = (Slot(slot as u32), restored(config.clone(), &of_slot));
        apply(&own, &third, 3, START, |key| whole.slot_of(key) == slot);
        assert_eq!(own.slot_digest(slot).unwrap(), whole.slot_digest(slot).unwrap(), "slot {slot}");
    }
    let without_changes = restored(config, &base);
    apply(&without_changes, &third, 3, START, |_| true);
    assert_eq!(without_changes.rows(), 0, "the second sighting is in the changes");
}

/// A new job may begin with another job's rows, and count its steps on or from the start. Its first
/// sweep expires the rows that are due by the time of the events.
#[test]
fn a_new_job_on_a_checkpoint_expires_only_rows_that_are_due() {
    const HOUR: u64 = 3_600;
    for score in [KRAKEN, ScoreRule::Lfu, ScoreRule::Lru] {
        let life = Managed { expire_after: NonZeroU64::new(SPAN), ..always(score) };
        let (old, roomy) = (one_slot(vec![spec(life)], None), rows(1_000));
        (0..96).for_each(|hour| see(&old, 0, [hour], (0, 1), 10_000 + hour, START + hour * HOUR));
        let snapshot = old.snapshot_slot(Slot(0)).unwrap();
        let now = START + 96 * HOUR;
        let first_sweep = |step, is_adopted: bool| {
            let new = one_slot(vec![spec(life)], roomy);
            match is_adopted {
                true => new.adopt_slot(snapshot.as_bytes(), &[Some(GroupId(0))]).map(drop).unwrap(),
                false => new.restore_slot(snapshot.as_bytes()).map(drop).unwrap(),
            }
            see(&new, 0, [500], (0, 1), step, now);
            keep(&new, now)
        };
        let kept = first_sweep(10_096, false);
        // A row expires after 48 hours, and less than a tenth late.
        assert!((43..=48).contains(&kept.expired) && kept.evicted == 0, "{score:?}: {kept:?}");
        for (step, is_adopted) in [(10_096, true), (1, true), (1, false)] {
            assert_eq!(first_sweep(step, is_adopted), kept, "{score:?}, step {step}");
        }
    }
}

/// Time is the time of the events. A suspended job that goes on with the next events expires
/// nothing, however long it was suspended.
#[test]
fn only_a_pause_of_the_events_expires_rows() {
    let life = Managed { expire_after: NonZeroU64::new(SPAN), ..always(KRAKEN) };
    let store = one_slot(vec![spec(life)], None);
    see(&store, 0, 0..50, (0, 1), 1, START);
    let resumed = one_slot(vec![spec(life)], None);
    resumed.restore_slot(store.snapshot_slot(Slot(0)).unwrap().as_bytes()).unwrap();
    see(&resumed, 0, 40..60, (0, 1), 2, START + 60);
    assert_eq!((keep(&resumed, START + 60), resumed.rows()), (Kept::default(), 60));
    // No event for four days: rows of the first step after the pause stay, and the others are due.
    let after = START + 60 + 2 * SPAN;
    see(&resumed, 0, 55..65, (0, 1), 3, after);
    assert_eq!(keep(&resumed, after), Kept { expired: 55, ..Kept::default() });
    assert!((55..65).all(|id| has(&resumed, 0, id)) && resumed.rows() == 10);
}

#[test]
fn a_later_run_may_change_share_and_priority_only() {
    let store = store_of(config());
    run(&store, &trace(30), 0, 30);
    let snapshot = store.snapshot_slot(Slot(0)).unwrap();
    let with = |change: &dyn Fn(&mut RowSpec, &mut Managed)| {
        let mut later = config();
        let LifePolicy::Managed(mut managed) = later.groups[1].life else { panic!() };
        change(&mut later.groups[1], &mut managed);
        later.groups[1].life = LifePolicy::Managed(managed);
        Store::new(later).unwrap().restore_slot(snapshot.as_bytes()).is_ok()
    };
    assert!(with(&|spec, _| spec.share = None));
    assert!(with(&|_, managed| managed.priority = Priority::High));
    assert!(!with(&|_, managed| managed.score = ScoreRule::Lfu));
    assert!(!with(&|_, managed| managed.expire_after = None));
    assert!(!with(&|_, managed| managed.admission = Admission::Always));
    let found = Store::config_of_snapshot(snapshot.as_bytes()).unwrap();
    assert_eq!(found.groups[2], config().groups[2]);
    assert_eq!((found.budget, found.groups[1].share), (None, None), "no part of a snapshot");
}

#[test]
fn rows_are_adopted_with_their_scores_or_begin_their_life() {
    let (old, moment) = (one_slot(vec![spec(always(KRAKEN))], None), START + DAY);
    see(&old, 0, [1], (3, 0), 1, START);
    see(&old, 0, [2], (0, 1), 2, START);
    let adopt = |source: &Store, life: LifePolicy, limit: u64| {
        let other = RowSpec { life, ..spec(always(KRAKEN)) };
        let target = one_slot(vec![other], rows(limit));
        let snapshot = source.snapshot_slot(Slot(0)).unwrap();
        target.adopt_slot(snapshot.as_bytes(), &[Some(GroupId(0))]).map(|_| target)
    };
    let managed = LifePolicy::Managed(always(KRAKEN));
    let target = adopt(&old, managed, 2).unwrap();
    see(&target, 0, [3], (0, 2), 3, moment);
    keep(&target, moment);
    assert!(has(&target, 0, 1) && has(&target, 0, 3) && !has(&target, 0, 2), "the scores came along");
    assert!(adopt(&old, LifePolicy::KeepAll, 2).is_err());
    assert!(adopt(&old, LifePolicy::Managed(always(ScoreRule::Lfu)), 2).is_err());
    let keeping = RowSpec { life: LifePolicy::KeepAll, ..spec(always(KRAKEN)) };
    let keeping = one_slot(vec![keeping], None);
    see(&keeping, 0, [1], (3, 0), 1, START);
    assert_eq!(adopt(&keeping, managed, 2).unwrap().rows(), 1);
}

#[test]
fn memory_of_evicted_rows_is_used_again() {
    let store = one_slot(vec![spec(always(KRAKEN))], rows(1_000));
    store.track_changes(false);
    let mut bytes = Vec::new();
    for step in 1..=100 {
        see(&store, 0, step * 100..step * 100 + 100, (0, 1), step, START + step * 60);
        keep(&store, START + step * 60);
        bytes.push(store.bytes().payload + store.bytes().overhead);
    }
    assert!(store.rows() <= 1_000 && bytes[99] <= bytes[20], "{bytes:?}");
}
