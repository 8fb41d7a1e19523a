//! A set of row numbers, stored as runs of consecutive numbers. Workers train batches nearly in
//! order. A set of millions of rows therefore has about as many runs as there are batches in
//! flight. The [`crate::gba::GradientServer`] keeps the rows that it has taken in one, and the
//! [`crate::RowLedger`] the settled rows.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Batch;

/// The result of inserting a batch's rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// No row was in the set before; now all are.
    New,
    /// All rows were in the set before.
    Present,
    /// Some rows were in the set and some were not. The set is unchanged.
    Torn,
}

/// A set of rows; see the module's documentation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowSet {
    /// First row → row after the last. Runs neither overlap nor touch.
    runs: BTreeMap<u64, u64>,
}

impl RowSet {
    /// The rows before `end`.
    #[must_use]
    pub fn up_to(end: u64) -> Self {
        Self { runs: (end > 0).then_some((0, end)).into_iter().collect() }
    }

    /// Adds all rows of `batch`, or none.
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

    /// The number of rows in the set.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.runs.iter().map(|(first, end)| end - first).sum()
    }

    /// The number of runs of consecutive rows, which determines the memory of the set.
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
