//! The rows of a run: their batches, and which of them are trained.
//!
//! - [`DataList`]: the batches of the run in order. One worker takes each batch.
//! - [`RowLedger`]: records which rows are trained.
//! - [`RowSet`]: a set of rows in little memory.

mod data_list;
mod ledger;
mod row_set;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use data_list::{DataList, Next};
pub use ledger::{RowCounts, RowLedger, RowLedgerError, Settled};
pub use row_set::{Inserted, RowSet};

/// One worker's batch: consecutive rows of the run's row sequence (all epochs, one after the
/// other). The rows identify the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Batch {
    /// The number of its first row, from the start of the run.
    pub first_row: u64,
    /// The number of rows; at least 1.
    pub rows: u32,
}

impl Batch {
    /// The row after its last.
    #[must_use]
    pub fn end(self) -> u64 {
        self.first_row + u64::from(self.rows)
    }
}

impl fmt::Display for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rows {}..{}", self.first_row, self.end())
    }
}

/// The outcome of a batch that a worker pushed to the parameter servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Outcome {
    /// Every server dropped it, because it arrived after its step was applied (`hopBw`).
    Dropped,
    /// It is in a gradient buffer, and is applied with the weight of its staleness.
    Trained,
    /// A server already had these rows, from a worker that was presumed dead.
    Repeated,
}
