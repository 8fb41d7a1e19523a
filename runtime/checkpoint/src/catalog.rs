//! The list of checkpoints, and the last good one. Called when a job starts, when a role is lost,
//! and by the command line.

use futures::{StreamExt, TryStreamExt};
use rectrain_storage::Directory;

use crate::error::CheckpointError;
use crate::identity::Identity;
use crate::manifest::Manifest;
use crate::name::{Kind, parse_directory_name};
use crate::reader::{Checkpoint, Depth};
use crate::writer::find_manifest;

/// Manifests that are read concurrently.
const CONCURRENT_READS: usize = 16;

/// The directory of a checkpoint, and its state.
#[derive(Debug)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// The step in its name.
    pub step: u64,
    /// The kind in its name.
    pub kind: Kind,
    /// The result of reading its manifest.
    pub state: ListedState,
}

/// The state of a checkpoint's directory.
#[derive(Debug)]
pub enum ListedState {
    /// It has a manifest. Its files have not been checked.
    Complete(Box<Manifest>),
    /// It has no manifest: the attempt was never finished, or is being written now.
    Unfinished,
    /// Its manifest cannot be used.
    Refused(CheckpointError),
}

/// All checkpoints of a directory by rising step; of one step, the delta before the full one.
/// Directories with other names are ignored.
///
/// # Errors
/// Errors of the storage.
pub async fn list(directory: &Directory) -> Result<Vec<Listed>, CheckpointError> {
    let names = directory.folders().await?.into_iter();
    let named = names.filter_map(|name| parse_directory_name(&name).map(|(step, kind)| (name, step, kind)));
    let looks = named.map(|(name, step, kind)| async move {
        let state = match find_manifest(directory, &name).await {
            Ok(Some(manifest)) => ListedState::Complete(Box::new(manifest)),
            Ok(None) => ListedState::Unfinished,
            Err(error) if error.is_checkpoints_fault() => ListedState::Refused(error),
            Err(error) => return Err(error),
        };
        Ok(Listed { name, step, kind, state })
    });
    let mut found: Vec<Listed> = futures::stream::iter(looks).buffered(CONCURRENT_READS).try_collect().await?;
    found.sort_by_key(|listed| (listed.step, listed.kind));
    Ok(found)
}

/// The last good checkpoint, and why newer ones were skipped.
#[derive(Debug)]
pub struct Latest {
    /// `None` if there is no good one.
    pub checkpoint: Option<Checkpoint>,
    /// The newer ones, newest first.
    pub skipped: Vec<Skipped>,
}

/// A checkpoint that was not used.
#[derive(Debug)]
pub struct Skipped {
    /// Its name.
    pub name: String,
    /// Why it was skipped.
    pub reason: CheckpointError,
}

/// Finds the newest checkpoint that passes [`Checkpoint::verify`] to the given depth. Ignores the
/// checkpoints in `exclude`, which the caller found damaged. `identity` is the identity of the job
/// that wants to continue from the checkpoint.
///
/// # Errors
/// [`CheckpointError::OtherJob`] if the newest good checkpoint belongs to a job with another model,
/// other features or other optimizers: an older one, or none, would hide that. Also errors of the
/// storage: a storage that fails for a moment must not cost training steps.
pub async fn latest_good(
    directory: &Directory,
    identity: Option<&Identity>,
    depth: Depth,
    exclude: &[String],
) -> Result<Latest, CheckpointError> {
    let mut skipped = Vec::new();
    for listed in list(directory).await?.into_iter().rev().filter(|listed| !exclude.contains(&listed.name)) {
        match open_good(directory, &listed, identity, depth).await {
            Ok(checkpoint) => return Ok(Latest { checkpoint: Some(checkpoint), skipped }),
            Err(reason) if reason.is_checkpoints_fault() => skipped.push(Skipped { name: listed.name, reason }),
            Err(error) => return Err(error),
        }
    }
    Ok(Latest { checkpoint: None, skipped })
}

async fn open_good(
    directory: &Directory,
    listed: &Listed,
    identity: Option<&Identity>,
    depth: Depth,
) -> Result<Checkpoint, CheckpointError> {
    let checkpoint = Checkpoint::open(directory, &listed.name).await?;
    if let Some(difference) = identity.and_then(|identity| checkpoint.manifest().identity.difference(identity)) {
        return Err(CheckpointError::OtherJob { checkpoint: checkpoint.name(), difference });
    }
    checkpoint.verify(depth).await?;
    Ok(checkpoint)
}
