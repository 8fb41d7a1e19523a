//! Pulled pieces: `sync` in which free dense workers pull the pieces of a global batch, and a late
//! piece is given to a second worker. The model does not depend on which worker computed a piece.
//! The page `docs/development/pulled-pieces.md` has the protocol.
//!
//! - [`PieceQueue`]: the coordinator's half. It decides which worker gets which piece.
//! - [`PieceGate`]: a parameter server's half, for its partition of the dense parameters. The rows
//!   have the [`StepGate`](super::StepGate), as in `sync` with fixed shares.
//! - [`PieceWorker`]: the dense worker's half.
//! - [`PieceSum`]: the sum over the pieces of a step.

mod gate;
mod queue;
#[cfg(test)]
mod speed_tests;
mod sum;
mod worker;

use std::fmt;

pub use gate::{PieceGate, PiecePushed, Reading};
pub use queue::{CompleteStep, PieceQueue, PulledPiece, ReportedPiece};
pub use sum::{PieceSum, Summand};
pub use worker::{PieceAction, PieceOutcome, PieceWorker};

use crate::{GlobalStep, Rank};

/// A piece of a step's global batch. Pieces order by step, then by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StepPiece {
    /// The step that trains the piece.
    pub step: GlobalStep,
    /// The number of the piece in the global batch, from 0.
    pub piece: Rank,
}

impl fmt::Display for StepPiece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "piece {} of step {}", self.piece, self.step)
    }
}

/// A message that no correct peer sends, or a piece that can no longer be computed.
#[derive(Debug, Clone, Copy, thiserror::Error, PartialEq, Eq)]
pub enum PieceError {
    /// A global batch has fewer pieces.
    #[error("expected a piece below {pieces}, the pieces of a global batch, and received piece {piece}")]
    UnknownPiece {
        /// The piece.
        piece: Rank,
        /// The pieces of a global batch.
        pieces: u32,
    },
    /// A worker computed a piece before the step of the piece began.
    #[error("{piece} came while step {open} is open: expected no piece of a later step")]
    TooEarly {
        /// The piece.
        piece: StepPiece,
        /// The oldest step that is not applied.
        open: GlobalStep,
    },
    /// A worker reports a piece that it cannot have.
    #[error("{piece} was reported: expected a step before {granted}, the steps handed out")]
    NotHandedOut {
        /// The piece.
        piece: StepPiece,
        /// The steps before this one are handed out.
        granted: GlobalStep,
    },
    /// A worker hears of a piece that it does not have.
    #[error("{piece} was {event}, and this worker does not have it")]
    NotHeld {
        /// The piece.
        piece: StepPiece,
        /// What happened to it.
        event: &'static str,
    },
    /// The rows from before a step are lost, and a server still needs gradients of the step.
    #[error("the rows of {piece} are gone, and a parameter server still needs its gradients")]
    RowsLost {
        /// The piece.
        piece: StepPiece,
    },
}
