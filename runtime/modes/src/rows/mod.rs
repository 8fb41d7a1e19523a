//! The run's rows: which batches they make, which are trained, and which are still to come.
//!
//! - [`DataList`]: the batches of the run in order, each to be taken by one worker.
//! - [`RowLedger`]: which rows are trained.
//! - [`RowSet`]: sets of rows in little memory.

mod data_list;
mod ledger;
mod row_set;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use data_list::{DataList, Next};
pub use ledger::{RowCounts, RowLedger, RowLedgerError, Settled};
pub use row_set::{Inserted, RowSet};

/// One worker's batch: consecutive rows of the run's row sequence (all epochs, one after the other). The rows are its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Batch {
    /// Number of its first row, from the beginning of the run.
    pub first_row: u64,
    /// How many rows; at least 1.
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

/// What became of a pushed batch on the parameter servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Outcome {
    /// Every server turned it away: it came after its step was applied (`hopBw`).
    Dropped,
    /// In a gradient buffer, to be applied with the weight of its staleness.
    Trained,
    /// A server had these rows already, from a worker that was thought dead.
    Repeated,
}
