//! The row ledger: the coordinator's account of the rows that workers hold, and of the trained and
//! dropped rows. It outlives the switches between modes. At every boundary it can prove that each
//! row before it was settled once, and that no row after it was touched. The coordinator halves and
//! the [`crate::switch::TrainingRun`] call it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Batch, Inserted, Outcome, RowSet};

/// The reason why the ledger rejects a batch, a report or a boundary.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RowLedgerError {
    /// A batch was handed out as new, but some of its rows are trained or held by a worker.
    #[error("{batch} cannot be handed out as new: some of them were handed out before")]
    HandedOutTwice { batch: Batch },
    /// A report about rows that were not handed out as this batch.
    #[error("{batch} were reported, but the coordinator never handed them out as one batch")]
    NeverHandedOut { batch: Batch },
    /// Some batches are not settled yet.
    #[error("row {next_row} cannot be a boundary: {open} batches are not settled yet, the first of them is {first}")]
    Open { next_row: u64, open: usize, first: Batch },
    /// Rows before the boundary are not settled, or rows after it are.
    #[error("row {next_row} cannot be a boundary: rows are settled without a gap only up to row {settled}")]
    Gap { next_row: u64, settled: u64 },
}

/// Whether a report was the first one about its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It was the first.
    Now,
    /// Another worker had reported them before.
    Before,
}

/// The outcome of all rows before a boundary.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowCounts {
    /// Rows in gradient buffers or applied.
    pub trained_rows: u64,
    /// Rows that the mode dropped (`hopBw`).
    pub dropped_rows: u64,
    /// Batches that the mode dropped (`hopBw`).
    pub dropped_batches: u64,
}

/// The row ledger; see the module's documentation.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RowLedger {
    /// Batches handed out and not settled, by first row.
    open: BTreeMap<u64, Batch>,
    settled: RowSet,
    trained_rows: u64,
    dropped_rows: u64,
    dropped_batches: u64,
}

impl RowLedger {
    /// A ledger that starts at row `first_row`. All rows before it are trained.
    #[must_use]
    pub fn starting_at(first_row: u64) -> Self {
        Self::resume(RowCounts { trained_rows: first_row, ..RowCounts::default() })
    }

    /// A ledger that continues at a boundary of an earlier run. All rows before it were trained or
    /// dropped.
    #[must_use]
    pub fn resume(counts: RowCounts) -> Self {
        let RowCounts { trained_rows, dropped_rows, dropped_batches } = counts;
        let settled = RowSet::up_to(trained_rows + dropped_rows);
        Self { open: BTreeMap::new(), settled, trained_rows, dropped_rows, dropped_batches }
    }

    /// The outcome of the settled rows.
    #[must_use]
    pub fn counts(&self) -> RowCounts {
        let Self { trained_rows, dropped_rows, dropped_batches, .. } = *self;
        RowCounts { trained_rows, dropped_rows, dropped_batches }
    }

    /// Records that the coordinator hands out `batch` for the first time.
    pub fn hand_out(&mut self, batch: Batch) -> Result<(), RowLedgerError> {
        let out = self.open.range(..batch.end()).next_back().is_some_and(|(_, open)| open.end() > batch.first_row);
        if out || self.settled.overlaps(batch) {
            return Err(RowLedgerError::HandedOutTwice { batch });
        }
        self.open.insert(batch.first_row, batch);
        Ok(())
    }

    /// Records the outcome of `batch` on the servers. Reports about settled rows change nothing.
    pub fn settle(&mut self, batch: Batch, outcome: Outcome) -> Result<Settled, RowLedgerError> {
        if self.open.get(&batch.first_row) != Some(&batch) {
            return if self.settled.contains(batch) {
                Ok(Settled::Before)
            } else {
                Err(RowLedgerError::NeverHandedOut { batch })
            };
        }
        if self.settled.insert(batch) != Inserted::New {
            return Err(RowLedgerError::HandedOutTwice { batch });
        }
        self.open.remove(&batch.first_row);
        if outcome == Outcome::Dropped {
            self.dropped_rows += u64::from(batch.rows);
            self.dropped_batches += 1;
        } else {
            self.trained_rows += u64::from(batch.rows);
        }
        Ok(Settled::Now)
    }

    /// Proves that row `next_row` is a boundary. All rows before it must be settled once. No batch
    /// may be open, and no row from it on may be settled.
    pub fn prove_boundary(&self, next_row: u64) -> Result<(), RowLedgerError> {
        if let Some(first) = self.open.values().next() {
            return Err(RowLedgerError::Open { next_row, open: self.open.len(), first: *first });
        }
        let settled = self.settled.first_missing();
        if settled != next_row || self.settled.rows() != next_row {
            return Err(RowLedgerError::Gap { next_row, settled });
        }
        Ok(())
    }

    /// The first row that is not settled. All rows before it are.
    #[must_use]
    pub fn first_unsettled(&self) -> u64 {
        self.settled.first_missing()
    }

    /// Batches that workers hold, or that wait to be handed out again.
    #[must_use]
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Rows in gradient buffers or applied.
    #[must_use]
    pub fn trained_rows(&self) -> u64 {
        self.trained_rows
    }

    /// Rows that the mode dropped (`hopBw`).
    #[must_use]
    pub fn dropped_rows(&self) -> u64 {
        self.dropped_rows
    }

    /// Batches that the mode dropped (`hopBw`).
    #[must_use]
    pub fn dropped_batches(&self) -> u64 {
        self.dropped_batches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(first_row: u64, rows: u32) -> Batch {
        Batch { first_row, rows }
    }

    #[test]
    fn a_boundary_is_proved_only_if_every_row_before_it_is_settled_once() {
        let mut ledger = RowLedger::starting_at(10);
        ledger.hand_out(batch(10, 4)).unwrap();
        ledger.hand_out(batch(14, 4)).unwrap();
        assert_eq!(ledger.settle(batch(14, 4), Outcome::Trained), Ok(Settled::Now));
        assert!(matches!(ledger.prove_boundary(18), Err(RowLedgerError::Open { open: 1, .. })));
        assert_eq!(ledger.settle(batch(10, 4), Outcome::Dropped), Ok(Settled::Now));
        assert_eq!(ledger.settle(batch(10, 4), Outcome::Trained), Ok(Settled::Before));
        assert_eq!(ledger.prove_boundary(18), Ok(()));
        assert!(matches!(ledger.prove_boundary(17), Err(RowLedgerError::Gap { .. })));
        assert!(matches!(ledger.prove_boundary(19), Err(RowLedgerError::Gap { .. })));
        assert_eq!((ledger.trained_rows(), ledger.dropped_rows(), ledger.dropped_batches()), (14, 4, 1));
    }

    #[test]
    fn rows_are_new_only_once() {
        let mut ledger = RowLedger::starting_at(10);
        ledger.hand_out(batch(10, 4)).unwrap();
        for again in [batch(10, 4), batch(12, 4), batch(8, 3), batch(9, 20), batch(0, 1)] {
            assert_eq!(ledger.hand_out(again), Err(RowLedgerError::HandedOutTwice { batch: again }));
        }
        assert_eq!(
            ledger.settle(batch(10, 3), Outcome::Trained),
            Err(RowLedgerError::NeverHandedOut { batch: batch(10, 3) })
        );
    }
}
