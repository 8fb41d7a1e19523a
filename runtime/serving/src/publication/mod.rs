//! Models that are published while they are trained. A publisher turns the checkpoints of a job
//! into full models and deltas, and inference servers follow them.
//!
//! ```text
//! checkpoints ─► Publisher ─► PATH/full-000000000001/   as an export for serving
//!                             PATH/delta-000000000002.bin
//!                             PATH/latest.json          written last
//!                                      ├─► Follower ─► ServedVersion: one model in memory
//!                                      └─► DenseFollower ─► DenseVersion: without its rows
//! full checkpoint ─► Publisher ─► PATH/delta-000000000003.bin, and later
//!                    FullModel ─► PATH/full-000000000003/, the same model
//! ```
//!
//! Each model has a sequence number and a digest. A delta names the ones of the model that it
//! changes. So a follower applies no delta to another model. `docs/reference/delta-format.md`
//! describes the bytes.

mod changes;
mod delta;
mod dense_follower;
mod follower;
mod full;
mod known_rows;
mod latest;
mod names;
mod publisher;
mod trouble;

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rectrain_storage::Directory;

pub use self::delta::{Base, Delta, DeltaError, GroupChanges};
pub use self::dense_follower::{DenseFollower, DenseUpdate, DenseVersion, RowChanges};
pub use self::follower::{Follower, ServedVersion, Update};
pub use self::full::{FullModel, WrittenFull};
pub use self::publisher::{Published, Publisher};
pub use self::trouble::Trouble;
use crate::error::ServingError;

/// Whether models are published in a directory.
///
/// # Errors
/// Errors of the storage.
pub async fn is_publication(directory: &Directory) -> Result<bool, ServingError> {
    Ok(directory.size(latest::LATEST).await?.is_some())
}

/// Whether models are published in a local folder.
#[must_use]
pub fn is_local_publication(folder: &Path) -> bool {
    folder.join(latest::LATEST).is_file()
}

/// The time now, in milliseconds since 1970.
#[must_use]
pub fn unix_milliseconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
