//! Training without waiting for stragglers: `gba` (global-batch gradient aggregation) and its
//! baselines `async`, `bsp`, `hopBs` and `hopBw`. Values in, decisions out: no socket, no clock, no
//! thread, no randomness.
//!
//! Source: Su et al., *GBA: A Tuning-free Approach to Switch between Synchronous and Asynchronous
//! Training for Recommendation Models*, NeurIPS 2022 (sections 3 to 5, appendix B).
//!
//! - [`BufferSize`]: M = B_s·N_s / B_a, or an error if there is no such M.
//! - [`TokenList`]: the tokens that the coordinator hands out with the batches.
//! - [`Dispatcher`]: decides which worker gets which batch and token, and when (coordinator).
//! - [`GradientServer`]: the gradient buffer and its global steps (parameter server).
//!   [`aggregate_dense`] and [`aggregate_embeddings`] make one gradient of a full buffer, under a
//!   [`Decay`].
//! - [`PushPullWorker`]: pulls, computes, pushes and continues (dense worker).
//!
//! Elsewhere in this crate: [`DataList`](crate::DataList) has the batches,
//! [`RowLedger`](crate::RowLedger) records the trained rows, and [`switch`](crate::switch) changes
//! the mode. [`simulate`](crate::simulate) runs all of it with a virtual clock, and with workers,
//! servers and links of unequal speed.
//!
//! Differences from the paper:
//!
//! 1. The paper prints tᵢ = ⌊i/K⌋ with K = ⌈Q/M⌉ steps, which repeats a value K times. Its text and
//!    figure repeat each value M times. So does this code: tᵢ = ⌊i/M⌋.
//! 2. Algorithm 2 divides the dense sum by N_a, and the paper sets N_a = M. The buffer holds M
//!    gradients for any number of workers, so this code divides by M.
//! 3. When a worker dies, the paper loses its batch along with its token. Here only the token is
//!    lost. The coordinator hands the batch out again with a new token. A server counts the rows of
//!    a batch once, even if two workers push them.

mod aggregate;
mod buffer_size;
mod decay;
mod dispatcher;
mod lanes;
mod server;
mod tokens;
mod worker;

pub use aggregate::{DenseSum, EmbeddingPair, EmbeddingRule, KeySteps, LastUpdates};
pub use aggregate::{aggregate_dense, aggregate_embeddings};
pub use buffer_size::{BufferSize, BufferSizeError};
pub use decay::{Decay, staleness};
pub use dispatcher::{DispatchError, Dispatcher, DispatcherSetup, TokenMode};
pub use lanes::{LaneAction, Lanes};
pub use rectrain_kinds::KeyDivisor;
pub use server::{
    GradientServer, LateGradients, Pair, Push, PushError, Pushed, ServerCounts, ServerStanding, StalenessRecord, Update,
};
pub use tokens::{LostTokens, TokenList};
pub use worker::{PushPullWorker, WorkerAction, WorkerError};
