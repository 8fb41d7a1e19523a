//! Counts by id within bounded memory.
//!
//! Up to its limit, [`Ids`] counts every id. Beyond it, it counts a sample of the ids: adaptive
//! sampling by Wegman (Flajolet, "On adaptive sampling", Computing 34, 1990). At depth d it keeps
//! the ids whose key has d certain bits of 0, which is a share of 2⁻ᵈ. An id beyond the
//! limit raises the depth by 1, and about half of the ids leave.
//!
//! A kept id was kept from its first sighting on, so its own counts are always exact. Keys are
//! hashes, so the kept ids are a random sample of all ids. Each figure over ids is the figure over
//! the kept ones times 2ᵈ, without bias. One structure therefore gives the number of distinct ids
//! *and* their frequencies, which HyperLogLog cannot.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::alone::{Halves, auc};

/// The lowest of the bits that decide whether an id is kept. A hash map takes its place from the
/// bits below, and its tag from the highest ones.
const SAMPLE_SHIFT: u32 = 24;
/// The bits that may decide: more than any data set has ids for.
const MOST_DEPTH: u32 = 32;
/// Bytes of one place of the hash map: a key, the counts, and a byte of its tag.
pub(crate) const PLACE_BYTES: usize = size_of::<(u64, IdCount)>() + 1;

/// A hasher of keys, which are hashes already.
#[derive(Debug, Clone, Copy, Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 << 8) | u64::from(byte);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

/// The counts of one id.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct IdCount {
    /// Its look-ups with their labels.
    halves: Halves,
    /// The latest event time of its rows, in seconds.
    pub(crate) last_seen: u64,
}

impl IdCount {
    /// How often it was seen.
    #[inline]
    pub(crate) fn look_ups(&self) -> u64 {
        self.halves.all_rows()
    }
}

/// Counts by id. See the module's text.
#[derive(Debug, Clone)]
pub(crate) struct Ids {
    counts: HashMap<u64, IdCount, BuildHasherDefault<KeyHasher>>,
    limit: usize,
    depth: u32,
    /// All look-ups, also of ids that are not kept.
    look_ups: u64,
}

/// The number of ids within a power of two of it: level i has the ids with 2ⁱ to 2ⁱ⁺¹ − 1 look-ups
/// (Kraken, Fig. 9b).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Level {
    /// Ids.
    pub ids: u64,
    /// Their look-ups.
    pub look_ups: u64,
}

impl Ids {
    /// Counts that are exact for up to 7/8 of `places` ids. `places` is a power of two of 64 or
    /// more. A hash map of so many places holds these ids, and never grows beyond.
    pub(crate) fn new(places: usize) -> Self {
        Self { counts: HashMap::default(), limit: places / 8 * 7, depth: 0, look_ups: 0 }
    }

    /// The most ids that are counted exactly.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Whether no id was left out.
    pub(crate) fn is_exact(&self) -> bool {
        self.depth == 0
    }

    /// Look-ups of all ids.
    pub(crate) fn look_ups(&self) -> u64 {
        self.look_ups
    }

    /// Counts a sighting of an id, in a row of this half. Returns the counts before, or `None` if
    /// the id is not in the sample.
    #[inline]
    pub(crate) fn add(&mut self, key: u64, half: usize, label: f64, time: u64) -> Option<IdCount> {
        self.look_ups += 1;
        if self.counts.len() >= self.limit && !self.counts.contains_key(&key) {
            self.thin_out();
        }
        if !is_kept(key, self.depth) {
            return None;
        }
        let count = self.counts.entry(key).or_default();
        let before = *count;
        count.halves.add(half, label);
        count.last_seen = count.last_seen.max(time);
        Some(before)
    }

    /// Halves the sample until there is room for another id.
    fn thin_out(&mut self) {
        while self.counts.len() >= self.limit && self.depth < MOST_DEPTH {
            self.depth += 1;
            let depth = self.depth;
            self.counts.retain(|key, _| is_kept(*key, depth));
        }
    }

    /// Distinct ids: exact at depth 0, otherwise an estimate.
    pub(crate) fn distinct(&self) -> u64 {
        (self.counts.len() as u64) << self.depth
    }

    /// The standard error of the estimates of distinct ids, as a share of them: 1.20 / √limit
    /// (Flajolet 1990). 0 if they are exact.
    pub(crate) fn error(&self) -> f64 {
        if self.is_exact() { 0.0 } else { 1.2 / (self.limit as f64).sqrt() }
    }

    /// Distinct ids of several features together. Ids of the same key count once.
    pub(crate) fn distinct_of_all(all: &[&Self]) -> u64 {
        let depth = all.iter().map(|ids| ids.depth).max().unwrap_or(0);
        let keys = all.iter().flat_map(|ids| ids.counts.keys());
        let kept: std::collections::HashSet<u64, BuildHasherDefault<KeyHasher>> =
            keys.copied().filter(|key| is_kept(*key, depth)).collect();
        (kept.len() as u64) << depth
    }

    /// The frequency levels, from level 0 to the highest one with an id.
    pub(crate) fn levels(&self) -> Vec<Level> {
        let mut levels = Vec::new();
        for count in self.counts.values() {
            let level = count.look_ups().max(1).ilog2() as usize;
            if levels.len() <= level {
                levels.resize(level + 1, Level::default());
            }
            levels[level].ids += 1 << self.depth;
            levels[level].look_ups += count.look_ups() << self.depth;
        }
        levels
    }

    /// The share of the look-ups that go to the most frequent `share` of the ids, for each of
    /// `shares`. The look-ups of the other ids are subtracted from all look-ups: the frequent ids
    /// are few, and a sample of them would vary much.
    pub(crate) fn shares_of_top(&self, shares: &[f64]) -> Vec<f64> {
        let mut counts: Vec<u64> = self.counts.values().map(IdCount::look_ups).collect();
        counts.sort_unstable();
        let mut up_to = Vec::with_capacity(counts.len() + 1);
        up_to.push(0_u64);
        for count in &counts {
            up_to.push(up_to.last().copied().unwrap_or(0) + count);
        }
        let of_top = |share: f64| {
            let top = ((counts.len() as f64 * share).ceil() as usize).min(counts.len());
            let others = up_to[counts.len() - top] << self.depth;
            (1.0 - others as f64 / self.look_ups.max(1) as f64).clamp(0.0, 1.0)
        };
        shares.iter().map(|share| of_top(*share)).collect()
    }

    /// The AUC of the kept ids; see [`auc`].
    pub(crate) fn auc(&self) -> Option<f64> {
        auc(self.counts.values().map(|count| &count.halves))
    }

    /// The expected outcome if each sighting of an id without a row admits it with probability p.
    /// An id with n look-ups gets a row with probability 1 − (1 − p)ⁿ. Before that, it is seen
    /// (1 − (1 − p)ⁿ)/p times. The first sighting never finds a row, and is not counted.
    pub(crate) fn admitted(&self, probability: f64) -> Admitted {
        let mut admitted = Admitted::default();
        let scale = (1_u64 << self.depth) as f64;
        for count in self.counts.values() {
            let rows = 1.0 - (1.0 - probability).powf(count.look_ups() as f64);
            admitted.rows += rows * scale;
            admitted.look_ups_without_row += (rows / probability - 1.0).max(0.0) * scale;
        }
        admitted
    }
}

/// The expected outcome of an admission by chance.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Admitted {
    /// Ids that get a row.
    pub rows: f64,
    /// Look-ups of an id without a row, beyond the first one of each id.
    pub look_ups_without_row: f64,
}

/// Whether the sample of this depth has an id.
#[inline]
fn is_kept(key: u64, depth: u32) -> bool {
    (key >> SAMPLE_SHIFT) & ((1_u64 << depth) - 1) == 0
}

#[cfg(test)]
mod tests {
    use rectrain_random::mix;

    use super::*;

    /// Sightings of `ids` ids, id k about 1 + most/k times.
    fn zipf(ids: u64, most: u64) -> Vec<u64> {
        (1..=ids).flat_map(|id| std::iter::repeat_n(mix(id), 1 + (most / id) as usize)).collect()
    }

    fn counted(keys: &[u64], places: usize) -> Ids {
        let mut ids = Ids::new(places);
        for key in keys {
            ids.add(*key, 0, 0.0, 0);
        }
        ids
    }

    fn frequencies(keys: &[u64]) -> Vec<u64> {
        let mut counts = std::collections::BTreeMap::new();
        keys.iter().for_each(|key| *counts.entry(*key).or_insert(0) += 1);
        counts.into_values().collect()
    }

    /// The share of the look-ups by the top of the ids, by sorting all of them.
    fn naive_top(keys: &[u64], share: f64) -> f64 {
        let mut counts = frequencies(keys);
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let top = (counts.len() as f64 * share).ceil() as usize;
        counts[..top].iter().sum::<u64>() as f64 / keys.len() as f64
    }

    #[test]
    fn counts_are_exact_up_to_the_limit() {
        let keys = zipf(896, 5_000);
        let ids = counted(&keys, 1024);
        assert_eq!((ids.limit(), ids.is_exact(), ids.distinct(), ids.error()), (896, true, 896, 0.0));
        let counts = frequencies(&keys);
        let levels = ids.levels();
        for (level, found) in levels.iter().enumerate() {
            let expected: Vec<u64> = counts.iter().copied().filter(|n| n.ilog2() as usize == level).collect();
            assert_eq!((found.ids, found.look_ups), (expected.len() as u64, expected.iter().sum()), "{level}");
        }
        assert_eq!(levels.iter().map(|level| level.ids).sum::<u64>(), 896);
        for (share, found) in [0.01, 0.1, 1.0].iter().zip(ids.shares_of_top(&[0.01, 0.1, 1.0])) {
            assert!((found - naive_top(&keys, *share)).abs() < 1e-12, "{share}");
        }
    }

    #[test]
    fn beyond_the_limit_estimates_stay_near_the_truth() {
        let keys = zipf(120_000, 40_000);
        let ids = counted(&keys, 1 << 14);
        assert!(!ids.is_exact() && ids.counts.len() <= ids.limit());
        // Four standard errors.
        let bound = 4.0 * ids.error();
        assert!(bound < 0.05);
        let error = ids.distinct() as f64 / 120_000.0 - 1.0;
        assert!(error.abs() < bound, "{error}");
        let once = frequencies(&keys).iter().filter(|n| **n == 1).count() as f64;
        let error = ids.levels()[0].ids as f64 / once - 1.0;
        assert!(error.abs() < bound, "{error}");
        let error = ids.shares_of_top(&[0.01])[0] - naive_top(&keys, 0.01);
        assert!(error.abs() < 0.01, "{error}");
    }

    #[test]
    fn a_kept_id_has_all_its_sightings() {
        let keys = zipf(50_000, 3_000);
        let ids = counted(&keys, 1 << 12);
        assert!(ids.depth > 1);
        let mut exact = HashMap::new();
        keys.iter().for_each(|key| *exact.entry(*key).or_insert(0) += 1);
        assert!(ids.counts.iter().all(|(key, count)| count.look_ups() == exact[key]));
    }

    #[test]
    fn ids_of_two_features_count_once() {
        let (a, b) = (counted(&zipf(600, 0), 1024), counted(&zipf(896, 0), 1024));
        assert_eq!(Ids::distinct_of_all(&[&a, &b]), 896);
        let thin = counted(&zipf(50_000, 0), 1 << 12);
        let together = Ids::distinct_of_all(&[&a, &thin]) as f64;
        assert!((together / 50_000.0 - 1.0).abs() < 0.08, "{together}");
    }

    /// The process itself, drawn many times.
    #[test]
    fn admission_by_chance_is_as_a_simulation_has_it() {
        let ids = counted(&zipf(40, 60), 64);
        let (probability, draws) = (0.1, 4_000_u64);
        let mut random = rectrain_random::SplitMix64::new(7);
        let (mut rows, mut without) = (0_u64, 0_u64);
        for _ in 0..draws {
            for count in ids.counts.values() {
                let tries = (1..=count.look_ups()).find(|_| rectrain_random::unit(random.next_u64()) < probability);
                rows += u64::from(tries.is_some());
                without += tries.unwrap_or(count.look_ups()) - 1;
            }
        }
        let found = ids.admitted(probability);
        assert!((rows as f64 / draws as f64 / found.rows - 1.0).abs() < 0.02, "{found:?}");
        assert!((without as f64 / draws as f64 / found.look_ups_without_row - 1.0).abs() < 0.02, "{found:?}");
        let all = ids.admitted(1.0);
        assert_eq!((all.rows, all.look_ups_without_row), (40.0, 0.0));
    }
}
