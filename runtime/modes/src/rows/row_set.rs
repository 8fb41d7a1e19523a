//! A set of row numbers as runs of consecutive ones. Batches are trained nearly in order, so that a set of millions of rows has
//! about as many runs as there are batches in flight. Used by the [`crate::gba::GradientServer`] (which rows it has taken) and
//! the [`crate::RowLedger`] (which rows are trained).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Batch;

/// What inserting a batch's rows did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// None was in the set before; now all are.
    New,
    /// All were in the set before.
    Present,
    /// Some were and some were not; nothing was changed.
    Torn,
}

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowSet {
    /// First row → row after the last; runs neither overlap nor touch.
    runs: BTreeMap<u64, u64>,
}

impl RowSet {
    /// The rows before `end`.
    #[must_use]
    pub fn up_to(end: u64) -> Self {
        Self { runs: (end > 0).then_some((0, end)).into_iter().collect() }
    }

    /// Adds the rows of `batch`, all or none.
    pub fn insert(&mut self, batch: Batch) -> Inserted {
        let (first, end) = (batch.first_row, batch.end());
        let before = self.runs.range(..=first).next_back().map(|(f, e)| (*f, *e));
        if let Some((_, run_end)) = before {
            if run_end >= end {
                return Inserted::Present;
            }
            if run_end > first {
                return Inserted::Torn;
            }
        }
        let after = self.runs.range(first..).next().map(|(f, e)| (*f, *e));
        if after.is_some_and(|(run_first, _)| run_first < end) {
            return Inserted::Torn;
        }
        let start = before.filter(|(_, run_end)| *run_end == first).map_or(first, |(run_first, _)| run_first);
        let mut stop = end;
        if let Some((run_first, run_end)) = after.filter(|(run_first, _)| *run_first == end) {
            self.runs.remove(&run_first);
            stop = run_end;
        }
        self.runs.insert(start, stop);
        Inserted::New
    }

    /// The smallest row that is not in the set.
    #[must_use]
    pub fn first_missing(&self) -> u64 {
        self.runs.get(&0).copied().unwrap_or(0)
    }

    /// Whether every row of `batch` is in the set.
    #[must_use]
    pub fn contains(&self, batch: Batch) -> bool {
        self.runs.range(..=batch.first_row).next_back().is_some_and(|(_, end)| *end >= batch.end())
    }

    /// Whether any row of `batch` is in the set.
    #[must_use]
    pub fn overlaps(&self, batch: Batch) -> bool {
        self.runs.range(..batch.end()).next_back().is_some_and(|(_, end)| *end > batch.first_row)
    }

    /// How many rows are in the set.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.runs.iter().map(|(first, end)| end - first).sum()
    }

    /// How many runs of consecutive rows there are: what the set costs to keep.
    #[must_use]
    pub fn runs(&self) -> usize {
        self.runs.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn agrees_with_a_set_of_single_rows(batches in proptest::collection::vec((0u64..40, 1u32..6), 0..40)) {
            let (mut set, mut naive) = (RowSet::default(), BTreeSet::new());
            for (first_row, rows) in batches {
                let batch = Batch { first_row, rows };
                let present = (first_row..batch.end()).filter(|row| naive.contains(row)).count();
                let expected = match present {
                    0 => Inserted::New,
                    n if n == rows as usize => Inserted::Present,
                    _ => Inserted::Torn,
                };
                prop_assert_eq!(set.contains(batch), expected == Inserted::Present);
                prop_assert_eq!(set.overlaps(batch), present > 0);
                prop_assert_eq!(set.insert(batch), expected);
                if expected == Inserted::New {
                    naive.extend(first_row..batch.end());
                }
                prop_assert_eq!(set.rows(), naive.len() as u64);
                prop_assert_eq!(set.first_missing(), (0..).find(|row| !naive.contains(row)).unwrap());
                let starts = naive.iter().filter(|row| **row == 0 || !naive.contains(&(**row - 1))).count();
                prop_assert_eq!(set.runs(), starts);
            }
        }
    }
}
