//! The coordinator's half of `sync` and `hybrid`. It hands out whole global batches, one per step,
//! and settles each batch once its step is applied everywhere.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Answers, Batch, CoordinatorHalf, DataList, GlobalStep, Next, Outcome, RowLedger, RowLedgerError};

/// A message that contradicts the steps handed out.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BarrierError {
    /// The step was not handed out.
    #[error("step {step} was reported as applied, but it was not handed out")]
    StepNotOut {
        /// The step.
        step: GlobalStep,
    },
    /// The row ledger contradicts the step.
    #[error(transparent)]
    Ledger(#[from] RowLedgerError),
}

/// The coordinator's state machine; see the module's documentation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct BarrierCoordinator {
    data: DataList,
    ledger: RowLedger,
    /// Steps that are handed out and not applied yet.
    open: BTreeMap<GlobalStep, Batch>,
    /// The step to hand out next.
    step: GlobalStep,
    draining: bool,
}

impl BarrierCoordinator {
    /// A coordinator before `step`, with global batches of `global_rows` rows.
    #[must_use]
    pub fn new(step: GlobalStep, global_rows: u32, mut data: DataList, ledger: RowLedger) -> Self {
        data.set_batch_rows(global_rows);
        Self { data, ledger, open: BTreeMap::new(), step, draining: false }
    }

    /// The next global batch and its step. `None` while there is no data, and while draining. If
    /// workers fail during a step, the step stays open until they have trained it again and it is
    /// applied.
    ///
    /// # Errors
    /// The row ledger contradicts the data.
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

    /// `step` is applied everywhere. A repeated call changes nothing.
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
