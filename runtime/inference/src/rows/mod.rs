//! The rows of a model whose rows are on shards: prediction parameter servers. The thread that
//! predicts keeps hot rows in a cache, and looks up the others.
//!
//! ```text
//! predictor ─► cache          hot rows of one version; no lock: only the thread has it
//!          └─► client ─► shards ─► replicas    look-ups, with hedging; a thread with a runtime
//! ```
//!
//! [`cache`] and [`shard`] are pure.

mod cache;
mod client;
mod predictor;
mod shard;

pub use client::{RowClient, RowOptions};
pub use predictor::ShardedPredictor;
