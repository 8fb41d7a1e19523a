//! Training without waiting for the slowest: `gba` (global-batch gradient aggregation) and its baselines `async`, `bsp`,
//! `hopBs` and `hopBw`, the switch between them and `sync`, and a simulator in which they run. Values in, decisions out: no
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
mod decay;
mod dispatcher;
mod server;
mod tokens;
mod worker;

pub use aggregate::{DenseSum, EmbeddingPair, EmbeddingRule, KeySteps, LastUpdates};
pub use aggregate::{aggregate_dense, aggregate_embeddings};
pub use buffer_size::{BufferSize, BufferSizeError};
pub use decay::{Decay, staleness};
pub use dispatcher::{DispatchError, Dispatcher, DispatcherSetup, TokenMode};
pub use rectrain_kinds::KeyDivisor;
pub use server::{
    GradientServer, LateGradients, Pair, Push, PushError, Pushed, ServerCounts, ServerStanding, StalenessRecord, Update,
};
pub use tokens::{LostTokens, TokenList};
pub use worker::{PushPullWorker, WorkerAction, WorkerError};
