//! Batches with their tokens, as the coordinator hands them to dense workers.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Batch, Rank};

/// The global step for which a batch was handed out (τ). The coordinator attaches it to the batch,
/// and the worker attaches it to the batch's gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Token(pub u64);

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A batch with its token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// The rows to train.
    pub batch: Batch,
    /// The token to return with the gradient.
    pub token: Token,
}

/// The answer to a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Reply {
    /// Train this batch.
    Work(Assignment),
    /// All data is trained.
    Finished,
}

/// Answers to pulls, in the order in which they were decided.
pub type Answers = Vec<(Rank, Reply)>;
