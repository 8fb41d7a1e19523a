//! The errors that end the server.

use std::net::SocketAddr;

use rectrain_serving::ServingError;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RowsServerError {
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The reason.
        source: std::io::Error,
    },
    /// The published model cannot be used, and no later one can replace it.
    #[error(transparent)]
    Model(#[from] ServingError),
    /// The metrics cannot be registered.
    #[error("cannot register metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// A thread cannot start, or a server failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// The action.
        action: &'static str,
        /// The reason.
        source: std::io::Error,
    },
    /// The thread that follows the publications ended: a defect.
    #[error("the thread that follows the publications ended unexpectedly; this is a defect of rectrain")]
    FollowEnded,
}
