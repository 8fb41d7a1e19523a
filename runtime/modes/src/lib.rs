//! The training algorithms as pure state machines: values in, decisions out. Nothing here holds a
//! socket, a clock or a thread. The same code therefore runs in the roles, under a simulated
//! network and in unit tests.
//!
//! - [`barrier`]: the modes with a barrier, `sync` and `hybrid`.
//! - [`des`]: partial results of the mode whose parameter servers compute the layers with weights
//!   of ids.
//! - [`gba`]: the modes without a barrier, based on tokens.
//! - [`shares`]: the shares of work that members get by their measured speed.
//! - [`loader_pace`]: the chunks that a slow loader gets, and that two loaders read.
//! - [`turns`]: which member gets which unit of work, by shares.
//! - [`shadow`]: the mode whose dense workers train replicas, synchronised beside training.
//! - [`switch`]: the switch from one mode to another at a global-step boundary.
//! - [`DataLedger`]: the coordinator's account of the training data: the leased chunks, the global
//!   step at which each begins, and the end of training. [`Chunks`] is its interface to a kind of
//!   source.
//! - [`EvaluationPoints`]: the batches before which the model is evaluated.
//! - [`migration`]: which parameter server holds which slot, and how slots move between them while
//!   training continues.
//! - [`packing`]: items of known cost on servers, as evenly as possible.

mod assignment;
pub mod barrier;
mod chunks;
mod coordinator_half;
mod data_ledger;
pub mod des;
mod evaluation;
pub mod gba;
pub mod loader_pace;
pub mod migration;
mod mode;
pub mod packing;
mod rows;
pub mod shadow;
pub mod shares;
pub mod simulate;
mod stream_chunks;
pub mod switch;
pub mod turns;

use std::fmt;

use serde::{Deserialize, Serialize};

pub use assignment::{Answers, Assignment, Reply, Token};
pub use chunks::{Chunks, FiniteChunks, JobChunks};
pub use coordinator_half::CoordinatorHalf;
pub use data_ledger::{ChunkLease, DataLedger, DataPlan, DataPosition, FirstPass, Lease, LedgerError, TrainingLength};
pub use evaluation::EvaluationPoints;
pub use mode::{DenseHome, ModeSettings, TrainingMode};
pub use rows::{Batch, DataList, Inserted, Next, Outcome, RowCounts, RowLedger, RowLedgerError, RowSet, Settled};
pub use stream_chunks::{
    BegunChunk, Lost, PartitionPlace, StreamChunks, StreamError, StreamParts, StreamPlace, StreamPlan,
};

/// Counts optimizer steps over the global batch, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GlobalStep(pub u64);

impl GlobalStep {
    /// The step after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for GlobalStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A parameter server's number among the parameter servers, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Server(pub u32);

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A dense worker's number among the dense workers, from 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank(pub u32);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The rows of a global batch of `samples` that rank `rank` of `ranks` trains. Shares are
/// contiguous and in rank order, and their sizes differ by at most one.
#[must_use]
pub fn share_of_batch(samples: usize, rank: Rank, ranks: u32) -> std::ops::Range<usize> {
    let (rank, ranks) = (rank.0 as usize, ranks.max(1) as usize);
    samples * rank / ranks..samples * (rank + 1) / ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_the_batch_once_and_in_order() {
        for samples in [0usize, 1, 2, 7, 4096, 65_537] {
            for ranks in [1u32, 2, 3, 8] {
                let mut next = 0;
                for rank in 0..ranks {
                    let share = share_of_batch(samples, Rank(rank), ranks);
                    assert_eq!(share.start, next);
                    assert!(share.len().abs_diff(samples / ranks as usize) <= 1);
                    next = share.end;
                }
                assert_eq!(next, samples);
            }
        }
    }
}
