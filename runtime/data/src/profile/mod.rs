//! Statistics of rows, before anything is trained on them: which ids there are, how often and when
//! they are seen, and what the label is. Pure: [`Profile::push`] takes batches in reading order,
//! and [`Profile::finish`] gives the figures.
//!
//! Memory is bounded, whatever the rows hold: [`memory_bound`] has the number of bytes. Features
//! with more distinct ids than fit are counted by a sample of their ids ([`ids`](self::ids)).

mod alone;
mod gaps;
mod ids;

use rectrain_kinds::{Schema, SparseField};

use self::alone::{Halves, auc, half};
use self::gaps::Gaps;
pub use self::ids::{Admitted, Level};
use self::ids::{IdCount, Ids, PLACE_BYTES};
use crate::batch::{Batch, SparseColumn};
use crate::key::TableKeys;

/// Places of the hash maps of all sparse features together.
const ALL_PLACES: usize = 1 << 23;
/// Places of the hash map of one feature: at most 917,504 ids are counted exactly.
const MOST_PLACES: usize = 1 << 20;
/// At least, with very many features.
const LEAST_PLACES: usize = 1 << 12;
/// The share of the gaps that `expireAfter` should not end (Kraken §V-D).
const GAP_SHARE: f64 = 0.999;
/// The most frequent part of the ids, for [`SparseSummary::shares_of_top`].
pub const TOP_SHARES: [f64; 10] = [0.0001, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
/// Kinds of value of a dense feature: the sign, the exponent and 3 bits of the mantissa of its
/// float.
const DENSE_KINDS: usize = 1 << 12;

/// The statistics of the rows so far.
#[derive(Debug, Clone)]
pub struct Profile {
    labels: LabelSummary,
    clock: Option<ClockSummary>,
    sparse: Vec<SparseProfile>,
    dense: Vec<DenseProfile>,
}

/// The labels of all rows.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LabelSummary {
    /// Rows.
    pub rows: u64,
    /// Rows with the label 0.
    pub zeros: u64,
    /// Rows with the label 1.
    pub ones: u64,
    /// The sum of the labels.
    pub sum: f64,
}

impl LabelSummary {
    /// The mean label; 0 without rows.
    #[must_use]
    pub fn mean(&self) -> f64 {
        self.sum / self.rows.max(1) as f64
    }

    fn add(&mut self, label: f32) {
        self.rows += 1;
        self.sum += f64::from(label);
        self.zeros += u64::from(label == 0.0);
        self.ones += u64::from(label == 1.0);
    }
}

/// The event times of all rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockSummary {
    /// The earliest time, in seconds since 1970.
    pub first: u64,
    /// The latest time, in seconds since 1970.
    pub last: u64,
    /// Rows with an earlier time than some row before them.
    pub late_rows: u64,
}

impl ClockSummary {
    /// Seconds from the earliest to the latest time.
    #[must_use]
    pub fn span(&self) -> u64 {
        self.last.saturating_sub(self.first)
    }

    fn add(&mut self, time: u64) {
        self.late_rows += u64::from(time < self.last);
        self.first = self.first.min(time);
        self.last = self.last.max(time);
    }
}

/// The figures of a sparse feature.
#[derive(Debug, Clone, PartialEq)]
pub struct SparseSummary {
    /// Ids of all rows.
    pub look_ups: u64,
    /// Rows without an id, or with the id that stands for a missing one.
    pub missing_rows: u64,
    /// Distinct ids.
    pub ids: u64,
    /// The standard error of `ids` and of the levels, as a share of them; 0 if they are exact.
    pub error: f64,
    /// Ids by frequency.
    pub levels: Vec<Level>,
    /// The share of the look-ups by the most frequent ids, for each of [`TOP_SHARES`].
    pub shares_of_top: Vec<f64>,
    /// Seconds between two sightings of an id that 99.9 % of the gaps do not exceed, at most 1/32
    /// too long. `None` without event times, or without an id that is seen twice.
    pub gap_seconds: Option<u64>,
    /// The number of gaps.
    pub gaps: u64,
    /// The AUC of this feature alone, out of sample (see [`alone`](self::alone)). `None` if the
    /// labels are all equal.
    pub auc: Option<f64>,
}

impl SparseSummary {
    /// Ids that occur once.
    #[must_use]
    pub fn ids_seen_once(&self) -> u64 {
        self.levels.first().map_or(0, |level| level.ids)
    }
}

/// The figures of a dense feature, after its transform.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenseSummary {
    /// The smallest value; infinite without rows.
    pub min: f32,
    /// The largest value; infinite without rows.
    pub max: f32,
    /// The mean.
    pub mean: f64,
    /// Rows with the value that stands for a missing one.
    pub at_missing: u64,
    /// The AUC of this feature alone, out of sample, with values rounded to 1/8 of their octave.
    /// `None` if the labels are all equal.
    pub auc: Option<f64>,
}

/// The figures of all rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// The labels.
    pub labels: LabelSummary,
    /// The event times; `None` if the schema names no column of times, or without rows.
    pub clock: Option<ClockSummary>,
    /// By sparse feature.
    pub sparse: Vec<SparseSummary>,
    /// By dense feature.
    pub dense: Vec<DenseSummary>,
}

/// The places of the hash map of each of `features` sparse features.
fn places(features: usize) -> usize {
    let share = ALL_PLACES / features.max(1);
    // The power of two at or below the share.
    (1_usize << share.max(1).ilog2()).clamp(LEAST_PLACES, MOST_PLACES)
}

/// The most ids of one feature that are counted exactly, with so many sparse features.
#[must_use]
pub fn exact_ids(features: usize) -> usize {
    Ids::new(places(features)).limit()
}

/// The most bytes of memory of the statistics over so many sparse and dense features. While a hash
/// map grows, its half is held besides.
#[must_use]
pub fn memory_bound(sparse: usize, dense: usize) -> usize {
    // The counts of gaps take at most 16 kB.
    let (map, gaps) = (places(sparse) * PLACE_BYTES, 1 << 14);
    sparse * (map + gaps) + map / 2 + dense * (DENSE_KINDS * size_of::<Halves>())
}

impl Profile {
    /// Statistics of no rows of this schema. The ids of hashed tables are counted by their keys:
    /// remove `hash_buckets` from the schema to count ids.
    #[must_use]
    pub fn new(schema: &Schema) -> Self {
        let places = places(schema.sparse.len());
        Self {
            labels: LabelSummary::default(),
            clock: None,
            sparse: schema.sparse.iter().map(|field| SparseProfile::new(field, places)).collect(),
            dense: schema.dense.iter().map(|field| DenseProfile::new(field.missing)).collect(),
        }
    }

    /// Adds the rows of a batch of this schema, which follow the rows before.
    pub fn push(&mut self, batch: &Batch) {
        let first = self.rows();
        batch.labels.iter().for_each(|label| self.labels.add(*label));
        for time in batch.times.iter().flatten() {
            self.clock.get_or_insert(ClockSummary { first: *time, last: *time, late_rows: 0 }).add(*time);
        }
        let rows = Rows { first, labels: &batch.labels, times: batch.times.as_deref() };
        for (feature, column) in self.sparse.iter_mut().zip(&batch.sparse) {
            feature.push(column, &rows);
        }
        for (column, feature) in self.dense.iter_mut().enumerate() {
            let values = batch.dense.iter().skip(column).step_by(batch.dense_width.max(1));
            feature.push(values.copied(), &rows);
        }
    }

    /// Rows so far.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.labels.rows
    }

    /// The figures of the rows so far.
    #[must_use]
    pub fn finish(&self) -> Summary {
        Summary {
            labels: self.labels,
            clock: self.clock,
            sparse: self.sparse.iter().map(SparseProfile::finish).collect(),
            dense: self.dense.iter().map(|feature| feature.finish(self.labels.rows)).collect(),
        }
    }

    /// Distinct ids of the features at these positions together, in which ids of the same key count
    /// once: the rows of a table that they share.
    #[must_use]
    pub fn ids_of_table(&self, features: &[usize]) -> u64 {
        let ids: Vec<&Ids> = features.iter().filter_map(|at| Some(&self.sparse.get(*at)?.ids)).collect();
        Ids::distinct_of_all(&ids)
    }

    /// The expected outcome for the sparse feature at this position if each sighting of an id
    /// without a row admits it with this probability, above 0.
    #[must_use]
    pub fn admitted(&self, feature: usize, probability: f64) -> Admitted {
        self.sparse.get(feature).map_or_else(Admitted::default, |feature| feature.ids.admitted(probability))
    }
}

/// The rows of a batch, as a feature sees them.
struct Rows<'a> {
    /// The number of the first row among all rows.
    first: u64,
    labels: &'a [f32],
    times: Option<&'a [u64]>,
}

impl Rows<'_> {
    /// The half and the label of each row.
    fn labels(&self) -> impl Iterator<Item = (usize, f64)> {
        (self.first..).zip(self.labels).map(|(row, label)| (half(row), f64::from(*label)))
    }
}

/// The statistics of a sparse feature.
#[derive(Debug, Clone)]
struct SparseProfile {
    ids: Ids,
    /// The key of a missing value, if it has one.
    missing: Option<u64>,
    missing_rows: u64,
    gaps: Gaps,
}

impl SparseProfile {
    fn new(field: &SparseField, places: usize) -> Self {
        Self {
            ids: Ids::new(places),
            missing: (!field.is_variable()).then(|| TableKeys::of(field).missing()),
            missing_rows: 0,
            gaps: Gaps::default(),
        }
    }

    fn push(&mut self, column: &SparseColumn, rows: &Rows<'_>) {
        for (row, (half, label)) in rows.labels().enumerate() {
            let keys = column.row(row);
            let is_missing = keys.is_empty() || (keys.len() == 1 && keys.first().copied() == self.missing);
            self.missing_rows += u64::from(is_missing);
            let time = rows.times.and_then(|times| times.get(row)).copied();
            for &key in keys {
                let before = self.ids.add(key, half, label, time.unwrap_or(0));
                self.see_again(before, time);
            }
        }
    }

    /// Counts the time since an id was seen before.
    fn see_again(&mut self, before: Option<IdCount>, time: Option<u64>) {
        if let (Some(before), Some(time)) = (before, time)
            && before.look_ups() > 0
        {
            // A late row follows its ids' latest time at once.
            self.gaps.add(time.saturating_sub(before.last_seen));
        }
    }

    fn finish(&self) -> SparseSummary {
        SparseSummary {
            look_ups: self.ids.look_ups(),
            missing_rows: self.missing_rows,
            ids: self.ids.distinct(),
            error: self.ids.error(),
            levels: self.ids.levels(),
            shares_of_top: self.ids.shares_of_top(&TOP_SHARES),
            gap_seconds: self.gaps.percentile(GAP_SHARE),
            gaps: self.gaps.total(),
            auc: self.ids.auc(),
        }
    }
}

/// The statistics of a dense feature.
#[derive(Debug, Clone)]
struct DenseProfile {
    /// The value of a missing cell.
    missing: f32,
    min: f32,
    max: f32,
    sum: f64,
    at_missing: u64,
    /// The rows, by kind of value.
    kinds: Vec<Halves>,
}

impl DenseProfile {
    fn new(missing: f32) -> Self {
        Self {
            missing,
            min: f32::INFINITY,
            max: f32::NEG_INFINITY,
            sum: 0.0,
            at_missing: 0,
            kinds: vec![Halves::default(); DENSE_KINDS],
        }
    }

    fn push(&mut self, values: impl Iterator<Item = f32>, rows: &Rows<'_>) {
        for (value, (half, label)) in values.zip(rows.labels()) {
            self.min = self.min.min(value);
            self.max = self.max.max(value);
            self.sum += f64::from(value);
            self.at_missing += u64::from(value == self.missing);
            self.kinds[kind(value)].add(half, label);
        }
    }

    fn finish(&self, rows: u64) -> DenseSummary {
        DenseSummary {
            min: self.min,
            max: self.max,
            mean: self.sum / rows.max(1) as f64,
            at_missing: self.at_missing,
            auc: auc(self.kinds.iter()),
        }
    }
}

/// The kind of a value: the highest 12 bits of its float.
#[inline]
fn kind(value: f32) -> usize {
    (value.to_bits() >> 20) as usize
}

#[cfg(test)]
mod tests;
