//! The failure of a benchmark.

use rectrain_checkpoint::CheckpointError;
use rectrain_dense::DenseError;
use rectrain_embedding::StoreError;
use rectrain_wire::WireError;

/// The failure of a benchmark.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("--{argument} {found}: expected {expected}")]
    Argument { argument: &'static str, found: String, expected: &'static str },
    #[error("the store refused a request of the benchmark: {0}")]
    Store(#[from] StoreError),
    #[error(transparent)]
    Dense(#[from] DenseError),
    #[error("the wire failed on loopback: {0}")]
    Wire(#[from] WireError),
    #[error("the table's checkpoint failed: {0}")]
    Checkpoint(#[source] Box<CheckpointError>),
    #[error("the table is wrong: {0}")]
    Wrong(String),
    #[error("loopback or a thread failed: {0}")]
    Io(#[from] std::io::Error),
    #[error("cannot write the figures as JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("a part of the benchmark ended early: {0}")]
    Ended(String),
    #[error("cannot write {path}: {source}")]
    NotWritten { path: String, source: std::io::Error },
    #[error("cannot run {program}: {source}; build it first with `cargo build --release`")]
    NoRectrain { program: String, source: std::io::Error },
}

impl From<CheckpointError> for BenchError {
    fn from(error: CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

impl BenchError {
    /// True if the arguments are wrong, so that other arguments would help.
    #[must_use]
    pub fn is_user_error(&self) -> bool {
        matches!(self, Self::Argument { .. } | Self::Dense(DenseError::NoGpu { .. } | DenseError::NoBf16 { .. }))
    }
}
