//! The errors that end the server. A request that is refused is a [`Refusal`](crate::refusal).

use std::net::SocketAddr;
use std::path::PathBuf;

use rectrain_data::DataError;
use rectrain_serving::ServingError;

use crate::tls::TlsError;

/// Every error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InferenceError {
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The reason.
        source: std::io::Error,
    },
    /// The features of the model cannot be encoded.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The model cannot predict a row of missing values.
    #[error("the model cannot predict: {0}")]
    Model(#[from] ServingError),
    /// The metrics cannot be registered.
    #[error("cannot register metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The files of the TLS certificate cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// A recorded request cannot be answered.
    #[error("{file}, line {line}: {problem}", file = .file.display())]
    Recorded {
        /// The file of recorded requests.
        file: PathBuf,
        /// The line, from 1.
        line: u64,
        /// The finding.
        problem: String,
    },
    /// A file of recorded requests cannot be read or written.
    #[error("cannot {action} {file}: {source}", file = .file.display())]
    File {
        /// The action.
        action: &'static str,
        /// The file.
        file: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The thread of the model cannot start, or the server failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// The action.
        action: &'static str,
        /// The reason.
        source: std::io::Error,
    },
    /// An address of a shard cannot be used.
    #[error("`{address}` is no address of a shard: {problem}; expected HOST:PORT")]
    Address {
        /// The address.
        address: String,
        /// The finding.
        problem: String,
    },
    /// The thread of the model ended before the server: a defect.
    #[error("the thread that predicts ended unexpectedly; this is a defect of rectrain")]
    ModelEnded,
}
