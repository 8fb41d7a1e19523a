//! The prediction parameter server: holds a shard of the rows of a published model, and answers
//! look-ups of inference servers (Kraken, §III-C). It follows the publications by itself, and keeps
//! the last few versions. So all rows of an answer are of one version, whichever server it asks.
//!
//! ```text
//! publication path ─► follow ─► held ─► rows (gRPC)   look-ups, and the versions that are held
//!                     thread    versions └─► http     health and metrics
//! ```
//!
//! Versions, deltas and the division into shards are in `rectrain-serving`, without sockets. This
//! crate adds the network.

mod error;
mod follow;
mod held;
mod http;
mod metrics;
mod options;
mod rows;
mod server;

pub use error::RowsServerError;
pub use metrics::reference_markdown;
pub use options::Options;
pub use server::RowsServer;
