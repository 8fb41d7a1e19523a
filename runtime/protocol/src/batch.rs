//! Which piece of which batch a message speaks of.

use std::fmt;

use rectrain_modes::GlobalStep;
use rectrain_proto::v1;

use crate::error::RoleError;

/// Where in the run a global batch stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BatchPosition {
    /// It is this batch of the training data, counted over all epochs.
    Train(u64),
    /// It is predicted in the evaluation before `at_step`, as its `number`-th batch.
    Evaluation { at_step: GlobalStep, number: u64 },
}

impl BatchPosition {
    /// The position `batches` further on.
    pub fn after(self, batches: u64) -> Self {
        match self {
            Self::Train(number) => Self::Train(number + batches),
            Self::Evaluation { at_step, number } => Self::Evaluation { at_step, number: number + batches },
        }
    }

    /// Of the run's data, or of the evaluation's.
    pub fn number(self) -> u64 {
        let (Self::Train(number) | Self::Evaluation { number, .. }) = self;
        number
    }
}

/// One piece of one global batch: a local batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BatchKey {
    pub position: BatchPosition,
    pub piece: u32,
}

impl BatchKey {
    pub fn read(what: &'static str, id: Option<v1::BatchId>) -> Result<Self, RoleError> {
        let id = id.ok_or(RoleError::Inconsistent { message: what, reason: "the batch is not named".to_owned() })?;
        let position = match id.evaluation {
            None => BatchPosition::Train(id.number),
            Some(at_step) => BatchPosition::Evaluation { at_step: GlobalStep(at_step), number: id.number },
        };
        Ok(Self { position, piece: id.piece })
    }

    pub fn write(self) -> v1::BatchId {
        let evaluation = match self.position {
            BatchPosition::Train(_) => None,
            BatchPosition::Evaluation { at_step, .. } => Some(at_step.0),
        };
        v1::BatchId { number: self.position.number(), piece: self.piece, evaluation }
    }
}

impl fmt::Display for BatchKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.position {
            BatchPosition::Train(number) => write!(f, "piece {} of batch {number}", self.piece),
            BatchPosition::Evaluation { at_step, number } => {
                write!(f, "piece {} of batch {number} of the evaluation at step {at_step}", self.piece)
            }
        }
    }
}
