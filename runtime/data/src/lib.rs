//! Sources of rows: files, a stream or a synthetic distribution → batches. CSV and TSV, plain or
//! compressed with gzip or Zstandard, and Parquet; on local disks, S3 and Google Cloud Storage.
//!
//! A [`ColumnEncoder`] makes batches of rows in memory by the same rules.
//!
//! Readers use bounded memory and read ahead on threads of their own. They are deterministic, and
//! can seek to any chunk. The crate knows nothing of manifests, roles or training. Its API blocks,
//! and any thread may call it.
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
mod clock;
mod columns;
mod config;
mod dataset;
mod error;
mod fingerprint;
mod follow;
mod identity;
mod ids;
mod json;
pub mod key;
mod null;
mod number;
mod pace;
pub mod profile;
mod random;
mod reader;
mod remarks;
mod schema;
mod source;
mod sources;
mod span;
mod spelling;
mod storage;
mod stream;
pub mod synthetic;
mod text;
mod time;

pub use batch::{Batch, SparseColumn, TextColumn};
pub use columns::{Column, ColumnEncoder, Values};
pub use config::{Format, ReadPlan, SourceConfig, Subset};
pub use dataset::Dataset;
pub use error::{DataError, Place};
pub use fingerprint::{Fingerprint, Fingerprints};
pub use follow::{FileState, FoundFile, list_files, look_at_file};
pub use identity::{Identity, PartIdentity, Version};
pub use pace::passed;
pub use random::chunk_permutation;
pub use reader::{ChunkReader, SpanReader, SpanRows};
pub use rectrain_kinds::{
    BadRows, CsvFormat, Date, DateOrder, DenseField, FileFormat, FollowConfig, KafkaConfig, LabelField, MissingValue,
    Offset, PartId, PartitionState, Position, Schema, Segment, SegmentRead, SparseField, Split, Start, SyntheticConfig,
    TimeBound, Transform,
};
pub use span::{Order, Span};
pub use stream::{PartitionFound, Probe};
