//! The inference server: answers requests of the Open Inference Protocol v2, over REST and gRPC,
//! with the predictions of one trained model. A request has named columns, and gets one probability
//! a row.
//!
//! ```text
//! rest ─► protocol ─┐
//!  HTTP    JSON      ├─► service ─► queue ─► batcher ─► Predict
//! grpc ─────────────┘    limits     rows     thread     rectrain-serving
//!                                                          └─► rows: a cache, and shards
//! ```
//!
//! [`protocol`] and [`queue`] are pure. [`batcher`] owns the one thread that predicts, and merges
//! waiting requests into batches. Everything is bounded: the body of a request, its rows, the
//! requests in progress, the rows that wait, and the time of an answer. A request beyond a bound
//! is refused, and counted. [`mod@warm_up`] replays requests that [`record`] has written, before a
//! server answers.
//!
//! Cells become keys and inputs in `rectrain-data`, and a model predicts in `rectrain-serving`. So
//! this crate knows no transform, no key and no tower.

mod batcher;
mod error;
mod grpc;
mod limits;
mod metrics;
mod progress;
mod protocol;
mod queue;
mod record;
mod refusal;
mod rest;
mod rows;
mod server;
mod service;
mod tls;
mod updates;
mod version;
mod warm_up;

pub use batcher::{Arrived, BatchRows, Patience, Predict, predict_now};
pub use error::InferenceError;
pub use limits::Limits;
pub use metrics::reference_markdown;
pub use record::RecordOptions;
pub use rows::{RowClient, RowOptions, ShardedPredictor};
pub use server::{Server, listen};
pub use service::ServedModel;
pub use tls::{Tls, TlsError, TlsFiles};
pub use updates::Updates;
pub use version::{NextModel, Publication};
pub use warm_up::{WarmedUp, warm_up};
