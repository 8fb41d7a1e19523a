//! The coordinator's half of `sync` and `hybrid`: hands out whole global batches, one a step, and settles
//! each when it is applied everywhere.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Answers, Batch, CoordinatorHalf, DataList, GlobalStep, Next, Outcome, RowLedger, RowLedgerError};

/// A message that contradicts what was handed out.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BarrierError {
    /// A step that is not out.
    #[error("step {step} was reported as applied, but is not out")]
    StepNotOut {
        /// The step.
        step: GlobalStep,
    },
    /// The account of rows contradicts the step.
    #[error(transparent)]
    Ledger(#[from] RowLedgerError),
}

/// See the module's text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BarrierCoordinator {
    data: DataList,
    ledger: RowLedger,
    /// Steps that are handed out and not applied.
    open: BTreeMap<GlobalStep, Batch>,
    /// The step to hand out next.
    step: GlobalStep,
    draining: bool,
}

impl BarrierCoordinator {
    /// Before `step`, with global batches of `global_rows` rows.
    #[must_use]
    pub fn new(step: GlobalStep, global_rows: u32, mut data: DataList, ledger: RowLedger) -> Self {
        data.set_batch_rows(global_rows);
        Self { data, ledger, open: BTreeMap::new(), step, draining: false }
    }

    /// The next global batch and its step. `None` while there is no data, and while draining. A step that
    /// fails with its workers stays open until it has been trained again and is applied.
    ///
    /// # Errors
    /// The account of rows contradicts the data.
    pub fn next_step_to_train(&mut self) -> Result<Option<(GlobalStep, Batch)>, RowLedgerError> {
        if self.draining {
            return Ok(None);
        }
        let Next::Fresh(batch) = self.data.take(true) else { return Ok(None) };
        self.ledger.hand_out(batch)?;
        let step = self.step;
        self.open.insert(step, batch);
        self.step = step.next();
        Ok(Some((step, batch)))
    }

    /// This step is applied everywhere. Said twice, it changes nothing.
    ///
    /// # Errors
    /// A step that was not handed out.
    pub fn step_applied(&mut self, step: GlobalStep) -> Result<(), BarrierError> {
        if let Some(batch) = self.open.remove(&step) {
            self.ledger.settle(batch, Outcome::Trained)?;
        } else if step >= self.step {
            return Err(BarrierError::StepNotOut { step });
        }
        Ok(())
    }
}

impl CoordinatorHalf for BarrierCoordinator {
    fn extend_data(&mut self, rows: u64) -> Answers {
        self.data.extend(rows);
        Vec::new()
    }

    fn close_data(&mut self) -> Answers {
        self.data.close();
        Vec::new()
    }

    fn start_draining(&mut self) {
        self.draining = true;
    }

    fn paused_at(&self) -> Option<GlobalStep> {
        self.open.is_empty().then_some(self.step)
    }

    fn needs_flush(&self) -> bool {
        false
    }

    fn next_step(&self) -> GlobalStep {
        self.step
    }

    fn data(&self) -> &DataList {
        &self.data
    }

    fn ledger(&self) -> &RowLedger {
        &self.ledger
    }

    fn into_parts(self: Box<Self>) -> (DataList, RowLedger) {
        (self.data, self.ledger)
    }
}
