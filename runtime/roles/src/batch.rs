//! Which piece of which batch a message speaks of.

use std::fmt;

use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;

use crate::error::RoleError;

/// Where in the run a batch stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum BatchPosition {
    /// It is trained in this step.
    Step(GlobalStep),
    /// It is predicted in the evaluation before `at_step`, as its `number`-th batch.
    Evaluation { at_step: GlobalStep, number: u64 },
}

/// One dense worker's piece of one global batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BatchKey {
    pub(crate) position: BatchPosition,
    pub(crate) rank: Rank,
}

impl BatchKey {
    pub(crate) fn read(what: &'static str, id: Option<v1::BatchId>) -> Result<Self, RoleError> {
        let id = id.ok_or(RoleError::Inconsistent { message: what, reason: "the batch is not named".to_owned() })?;
        let position = match id.evaluation {
            None => BatchPosition::Step(GlobalStep(id.number)),
            Some(at_step) => BatchPosition::Evaluation { at_step: GlobalStep(at_step), number: id.number },
        };
        Ok(Self { position, rank: Rank(id.rank) })
    }

    pub(crate) fn write(self) -> v1::BatchId {
        let (number, evaluation) = match self.position {
            BatchPosition::Step(step) => (step.0, None),
            BatchPosition::Evaluation { at_step, number } => (number, Some(at_step.0)),
        };
        v1::BatchId { number, rank: self.rank.0, evaluation }
    }

    /// The embedding worker that keeps this piece: they take turns.
    pub(crate) fn embedding_worker(self, workers: usize, ranks: u32) -> usize {
        let (BatchPosition::Step(GlobalStep(number)) | BatchPosition::Evaluation { number, .. }) = self.position;
        ((number * u64::from(ranks) + u64::from(self.rank.0)) % workers.max(1) as u64) as usize
    }
}

impl fmt::Display for BatchKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.position {
            BatchPosition::Step(step) => write!(f, "the batch of step {step} for dense worker {}", self.rank),
            BatchPosition::Evaluation { at_step, number } => {
                write!(f, "batch {number} of the evaluation at step {at_step} for dense worker {}", self.rank)
            }
        }
    }
}
