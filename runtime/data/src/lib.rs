//! Data sources: from files (or a synthetic distribution) to batches. CSV and TSV, plain, gzip or
//! Zstandard, and Parquet; local disks, S3 and Google Cloud Storage. Streaming with bounded memory, read
//! ahead on threads of its own, deterministic and seekable by chunk. Knows nothing of manifests, roles
//! or training; its API blocks and may be called from any thread.
//!
//! ```no_run
//! use rectrain_data::{Dataset, ReadPlan, Schema, SourceConfig};
//!
//! fn read(config: SourceConfig, schema: Schema) -> Result<(), rectrain_data::DataError> {
//!     let dataset = Dataset::open(config, schema)?;
//!     let mut reader = dataset.reader(ReadPlan {
//!         chunk_rows: 65_536,
//!         shuffle: Some(7),
//!         epoch: 0,
//!         read_ahead_chunks: 2,
//!     })?;
//!     for chunk in 0.. {
//!         let Some(batch) = reader.read(chunk)? else { break };
//!         println!("{} rows, {} positives", batch.samples, batch.label_sum());
//!     }
//!     Ok(())
//! }
//! ```

mod batch;
mod blocking;
mod blocks;
mod config;
mod dataset;
mod error;
pub mod key;
mod number;
mod pace;
mod random;
mod reader;
mod rows;
mod schema;
mod storage;
pub mod synthetic;
mod text;

pub use batch::{Batch, SparseColumn};
pub use config::{BadRows, CsvFormat, Format, Part, ReadPlan, SourceConfig, Split, TimeBound};
pub use dataset::Dataset;
pub use error::{DataError, Place};
pub use pace::passed;
pub use random::chunk_permutation;
pub use reader::ChunkReader;
pub use rectrain_kinds::{MissingValue, Transform};
pub use schema::{DenseField, LabelField, Schema, SparseField};
pub use synthetic::SyntheticConfig;
