//! The scores and ages of rows, for a reader of a checkpoint.
//!
//! A checkpoint has no present moment, and a row has 16 bits of time, which wrap. So ages count
//! from the latest update of the group's rows. On the circle of all times, the latest one lies
//! before the longest stretch without any. That is right while the rows leave a longer stretch
//! free than lies between two neighbours.

use super::ManagedRows;
use crate::{LifePolicy, RowSpec};

/// LRU without a clock records numbers of updates. A smaller word is one, a larger one is a time
/// after March 1973.
const FIRST_CLOCK: u32 = 100_000_000;

/// What the policy of a row group has recorded in a row. [`RowTimes`] reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowWord(pub(crate) u32);

/// Collects the times of the rows of one group.
#[derive(Clone)]
pub struct RowTimes {
    rows: ManagedRows,
    /// By time: whether a row has it.
    is_seen: Vec<bool>,
    /// The largest word.
    largest: u32,
}

/// The scores and ages of the rows of one group, as of its latest update.
#[derive(Clone, Copy)]
pub struct RowUses {
    rows: ManagedRows,
    latest: u16,
    largest: u32,
    has_clock: bool,
}

impl RowTimes {
    /// Starts with no row. `None` if the policy of the group records nothing in its rows.
    #[must_use]
    pub fn of(spec: &RowSpec) -> Option<Self> {
        let LifePolicy::Managed(managed) = spec.life else { return None };
        Some(Self { rows: managed.rows(), is_seen: vec![false; 1 << u16::BITS], largest: 0 })
    }

    /// Whether the policy scores rows. LRU does not.
    #[must_use]
    pub fn has_scores(&self) -> bool {
        self.rows.has_scores()
    }

    /// Adds a row. A row without an update has no time.
    pub fn add(&mut self, RowWord(word): RowWord) {
        if word != 0 {
            self.is_seen[(word >> 16) as usize] = true;
            self.largest = self.largest.max(word);
        }
    }

    /// The scores and ages of rows, once all rows were added.
    #[must_use]
    pub fn uses(&self) -> RowUses {
        let has_clock = match self.rows.has_scores() {
            true => self.is_seen.iter().skip(1).any(|is_seen| *is_seen),
            false => self.largest >= FIRST_CLOCK,
        };
        RowUses { rows: self.rows, latest: self.latest(), largest: self.largest, has_clock }
    }

    /// The time before the longest stretch without any. 0 without a time.
    fn latest(&self) -> u16 {
        let seen: Vec<u16> = (0..=u16::MAX).filter(|time| self.is_seen[usize::from(*time)]).collect();
        let later = seen.iter().cycle().skip(1);
        let stretches = seen.iter().zip(later).map(|(time, next)| (next.wrapping_sub(*time).wrapping_sub(1), *time));
        stretches.max().map_or(0, |(_, time)| time)
    }
}

impl RowUses {
    /// The score of a row, decayed to the latest update. `None` if the policy does not score. A row
    /// without an update counts as one negative example.
    #[must_use]
    pub fn score(&self, RowWord(word): RowWord) -> Option<f64> {
        let score = || self.rows.score_after(word, self.latest.wrapping_sub((word >> 16) as u16));
        self.rows.has_scores().then(|| if word == 0 { 1.0 } else { score() })
    }

    /// Seconds from the last update of a row to the latest one, to one unit of the group's clock.
    /// `None` without a clock.
    #[must_use]
    pub fn age_seconds(&self, RowWord(word): RowWord) -> Option<u64> {
        self.has_clock.then(|| match (word, self.rows.has_scores()) {
            (0, _) => 0,
            (_, true) => self.rows.seconds(self.latest.wrapping_sub((word >> 16) as u16)),
            (_, false) => u64::from(self.largest.saturating_sub(word)),
        })
    }
}
