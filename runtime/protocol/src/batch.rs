//! Identifies a piece of a global batch in messages.

use std::fmt;

use rectrain_modes::GlobalStep;
use rectrain_proto::v1;

use crate::error::RoleError;

/// The position of a global batch in the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BatchPosition {
    /// The number of the batch in the training data, counted over all epochs.
    Train(u64),
    /// The `number`-th batch that is predicted in the evaluation before `at_step`.
    Evaluation { at_step: GlobalStep, number: u64 },
}

impl BatchPosition {
    /// The position `batches` later.
    pub fn after(self, batches: u64) -> Self {
        match self {
            Self::Train(number) => Self::Train(number + batches),
            Self::Evaluation { at_step, number } => Self::Evaluation { at_step, number: number + batches },
        }
    }

    /// The number of the batch, in the training data or in the evaluation.
    pub fn number(self) -> u64 {
        let (Self::Train(number) | Self::Evaluation { number, .. }) = self;
        number
    }
}

/// The key of a piece: one local batch of a global batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BatchKey {
    pub position: BatchPosition,
    pub piece: u32,
}

impl BatchKey {
    pub fn read(what: &'static str, id: Option<v1::BatchId>) -> Result<Self, RoleError> {
        let id = id.ok_or(RoleError::Inconsistent { message: what, reason: "the batch ID is missing".to_owned() })?;
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
