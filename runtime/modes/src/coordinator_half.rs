//! The calls that the switch between modes makes to the mode in force.

use crate::{Answers, DataList, GlobalStep, RowLedger};

/// The coordinator's half of a mode, between two step boundaries.
pub trait CoordinatorHalf {
    /// The next segment of the data has `rows` rows.
    fn extend_data(&mut self, rows: u64) -> Answers;

    /// No more data will be announced.
    fn close_data(&mut self) -> Answers;

    /// From now on, hands out only the batches up to the next boundary.
    fn start_draining(&mut self);

    /// The boundary's step, once every row before it is settled; `None` until then.
    fn paused_at(&self) -> Option<GlobalStep>;

    /// Whether parameter servers have to apply an incomplete buffer before training can pause.
    fn needs_flush(&self) -> bool;

    /// The step that training has reached: the next to hand out, or the one that the slowest server
    /// is filling.
    fn next_step(&self) -> GlobalStep;

    /// The data announced so far.
    fn data(&self) -> &DataList;

    /// The row ledger.
    fn ledger(&self) -> &RowLedger;

    /// Ends the mode, and returns the data and the row ledger for the next one.
    fn into_parts(self: Box<Self>) -> (DataList, RowLedger);
}
