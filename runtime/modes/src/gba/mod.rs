//! Training without waiting for the slowest: `gba` (global-batch gradient aggregation) and its baselines `async`, `bsp`,
//! `hop-bs` and `hop-bw`, the switch between them and `sync`, and a simulator in which they run. Values in, decisions out: no
//! socket, no clock, no thread, no randomness. Source: Su et al., *GBA: A Tuning-free Approach to Switch between Synchronous
//! and Asynchronous Training for Recommendation Models*, NeurIPS 2022 (sections 3 to 5, appendix B).
//!
//! - [`BufferSize`]: M = B_s·N_s / B_a, or why there is no such M.
//! - [`TokenList`], [`DataList`]: what a worker takes along before it computes (coordinator).
//! - [`Dispatcher`]: who gets which batch with which token, and when (coordinator).
//! - [`GradientServer`]: the gradient buffer and its global steps (parameter server); [`aggregate_dense`] and
//!   [`aggregate_embeddings`] make one gradient of a full buffer, under a [`Decay`].
//! - [`PushPullWorker`]: pull, compute, push and go on (dense worker).
//! - [`RowLedger`]: which rows are trained; [`TrainingRun`]: the switch between modes at a global-step boundary.
//! - [`simulate`]: all of the above with a virtual clock and workers, servers and links of unequal speed.
//!
//! Where this departs from the paper. (1) The paper prints tᵢ = ⌊i/K⌋ with K = ⌈Q/M⌉ steps, which repeats a value K times; its
//! text and figure repeat each value M times, which is tᵢ = ⌊i/M⌋, and so it is here. (2) Algorithm 2 divides the dense sum by
//! N_a; the paper sets N_a = M, and the buffer holds M gradients however many workers there are, so it is divided by M here.
//! (3) The paper forgets the batch of a worker that dies along with its token. Here only the token is lost: the batch goes out
//! again with a new one, and a server takes the rows of a batch once, whoever brings them.

mod aggregate;
mod buffer_size;
mod data_list;
mod decay;
mod dispatcher;
mod ledger;
mod row_set;
mod server;
pub mod simulate;
mod switch;
mod tokens;
mod worker;

pub use aggregate::{DenseSum, EmbeddingPair, EmbeddingRule, KeySteps, LastUpdates};
pub use aggregate::{aggregate_dense, aggregate_embeddings};
pub use buffer_size::{BufferSize, BufferSizeError};
pub use data_list::{DataList, Next};
pub use decay::{Decay, staleness};
pub use dispatcher::{Answers, Assignment, DispatchError, Dispatcher, DispatcherSetup, Reply, TokenMode};
pub use ledger::{RowCounts, RowLedger, RowLedgerError, Settled};
pub use rectrain_kinds::KeyDivisor;
pub use row_set::{Inserted, RowSet};
pub use server::{
    GradientServer, LateGradients, Pair, Push, PushError, Pushed, ServerCounts, ServerStanding, StalenessRecord, Update,
};
pub use switch::{Boundary, Order, RunMode, RunPlan, SwitchError, SwitchPhase, TrainingRun};
pub use tokens::{LostTokens, TokenList};
pub use worker::{PushPullWorker, WorkerAction, WorkerError};

use std::fmt;

use serde::{Deserialize, Serialize};

/// The global step that a batch was sent out for (τ): attached to the batch when a worker takes it and to its gradient when the
/// worker pushes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Token(pub u64);

impl fmt::Display for Token {
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
    /// Every server turned it away: it came after its step was applied (`hop-bw`).
    Dropped,
    /// In a gradient buffer, to be applied with the weight of its staleness.
    Trained,
    /// A server had these rows already, from a worker that was thought dead.
    Repeated,
}
