//! A trained model for inference: loads it from a checkpoint or from an export for serving,
//! predicts batches of rows, and writes exports.
//!
//! There is no second implementation of the model. Keys and transforms are `rectrain-data`'s,
//! pooling is the embedding worker's, initial values are the store's, and the tower is the one that
//! trains. So a prediction equals the one of the job's own evaluation.
//!
//! ```text
//! checkpoint ──┐                              ┌─► Predictor ─► probabilities
//!              ├─► Description, rows, tower ──┤
//! export ──────┘                              └─► export: rows-G.bin, tower.onnx, model.json
//! ```
//!
//! [`publication`] has models that change while they are served, and [`shard`] the division of
//! their rows among servers.
//!
//! This crate prints nothing. Its callers are the commands of `rectrain`.

mod content;
mod description;
mod error;
mod export;
mod hash;
mod model;
mod predictor;
pub mod publication;
pub mod shard;
mod table;
mod value;
mod versioned_table;

pub use content::{GroupContent, RowSum, digest_of_content};
pub use description::Description;
pub use error::ServingError;
pub use export::{Exported, MODEL_FILE, export, is_export, load_export};
pub use model::Model;
pub use predictor::{GroupRows, Predictions, Predictor, PredictorOptions};
pub use rectrain_protocol::unseen::{self, LookUps};
pub use table::{KeyRange, Table};
pub use value::ExportType;
pub use versioned_table::VersionedTable;
