//! `rectrain checkpoint`: lists, verifies, inspects and compares checkpoints, and exports the
//! trained model for other programs. No command changes a checkpoint.

mod diff;
mod export;
mod serving;
mod show;
mod uses;
mod vectors;

use std::collections::BTreeMap;

use rectrain_checkpoint::{Checkpoint, CheckpointError, Depth, ListedState, list, parse_directory_name};
use rectrain_embedding::{Slot, Store};
use rectrain_storage::{Directory, StorageError};

use crate::args::{CheckpointCommand, CheckpointPlace, ExportPurpose};
use crate::failure::Failure;
use crate::human::bytes;
use crate::output;

use self::uses::LeastScore;
use self::vectors::Ids;

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        match &error {
            CheckpointError::Name { .. } | CheckpointError::NotHeld { .. } => Self::User(error.to_string()),
            CheckpointError::Storage(storage) if is_users(storage) => Self::User(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
}

fn is_users(error: &StorageError) -> bool {
    match error {
        StorageError::Unreachable { .. } => true,
        StorageError::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
        StorageError::Store { .. } => false,
        _ => error.is_users_input(),
    }
}

/// Opens the checkpoint that a path names, or the newest one in it.
pub(crate) async fn open(place: &CheckpointPlace) -> Result<Checkpoint, Failure> {
    Place::of(place)?.one().await
}

/// The options of an object store.
pub(crate) fn store_options(options: &[String]) -> Result<BTreeMap<String, String>, Failure> {
    let pair = |option: &String| {
        let pair = option.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
        pair.ok_or_else(|| Failure::User(format!("--option {option}: write it as NAME=VALUE")))
    };
    options.iter().map(pair).collect()
}

/// Runs one of the subcommands.
pub(crate) fn run(command: &CheckpointCommand) -> Result<(), Failure> {
    crate::failure::runtime()?.block_on(async {
        match command {
            CheckpointCommand::Ls { place, json } => ls(&Place::of(place)?, *json).await,
            CheckpointCommand::Verify { place, sizes } => {
                let depth = if *sizes { Depth::Sizes } else { Depth::Checksums };
                verify(&Place::of(place)?, depth).await
            }
            CheckpointCommand::Inspect { place, json, verbose } => {
                let checkpoint = Place::of(place)?.one().await?;
                if *json {
                    output::print(String::from_utf8_lossy(&checkpoint.manifest().encode()))?;
                } else {
                    show::inspect(&checkpoint, *verbose)?;
                    uses::inspect(&checkpoint).await?;
                }
                Ok(())
            }
            CheckpointCommand::Diff { place, other } => {
                let other = CheckpointPlace { path: other.clone(), options: place.options.clone() };
                let (one, other) = (Place::of(place)?.one().await?, Place::of(&other)?.one().await?);
                diff::run(&one, &other).await
            }
            CheckpointCommand::Export { place, output, embeddings: Some(feature), ids, .. } => {
                let options = store_options(&place.options)?;
                let ids = Ids { feature: feature.clone(), files: ids.clone(), options };
                vectors::run(&Place::of(place)?.one().await?, ids, output).await
            }
            CheckpointCommand::Export {
                place,
                output,
                format,
                optimizer_state,
                min_score,
                min_count,
                purpose,
                values,
                ..
            } => {
                let checkpoint = Place::of(place)?.one().await?;
                let least = match min_score {
                    Some(least) => Some(LeastScore::of(&checkpoint, *least).await?),
                    None => None,
                };
                match purpose {
                    Some(ExportPurpose::Serving) => serving::run(&checkpoint, output, *values, least, *min_count).await,
                    None => export::run(&checkpoint, output, format, *optimizer_state, least).await,
                }
            }
        }
    })
}

/// A path with checkpoints, or one checkpoint in it.
struct Place {
    directory: Directory,
    /// The name of the one checkpoint, if the user gave it.
    one: Option<String>,
}

impl Place {
    fn of(place: &CheckpointPlace) -> Result<Self, Failure> {
        let options = store_options(&place.options)?;
        let path = place.path.trim_end_matches('/');
        let (before, last) = path.rsplit_once('/').unwrap_or((".", path));
        let (path, one) =
            if parse_directory_name(last).is_some() { (before, Some(last.to_owned())) } else { (path, None) };
        let path = if path.is_empty() { "/" } else { path };
        let directory = Directory::open(path, &options, false).map_err(CheckpointError::from)?;
        Ok(Self { directory, one })
    }

    /// Opens the named checkpoint, or the newest one with a manifest.
    async fn one(&self) -> Result<Checkpoint, Failure> {
        if let Some(name) = &self.one {
            return Ok(Checkpoint::open(&self.directory, name).await?);
        }
        let newest = list(&self.directory)
            .await?
            .into_iter()
            .rev()
            .find(|listed| matches!(listed.state, ListedState::Complete(_)));
        match newest {
            Some(listed) => Ok(Checkpoint::open(&self.directory, &listed.name).await?),
            None => Err(Failure::User(format!("there is no checkpoint in {}", self.directory.name()))),
        }
    }
}

async fn ls(place: &Place, json: bool) -> Result<(), Failure> {
    let mut listed = list(&place.directory).await?;
    listed.retain(|listed| place.one.as_ref().is_none_or(|one| *one == listed.name));
    if json {
        for listed in &listed {
            output::line(show::json(listed))?;
        }
    } else {
        output::line(show::table(&listed))?;
    }
    Ok(())
}

/// Prints whether each checkpoint is good. Fails if one is bad. A directory without a manifest is
/// unfinished and does not count.
async fn verify(place: &Place, depth: Depth) -> Result<(), Failure> {
    let listed = list(&place.directory).await?;
    let wanted = listed.iter().filter(|listed| place.one.as_ref().is_none_or(|one| *one == listed.name));
    let (mut good, mut bad) = (0, 0);
    for listed in wanted {
        if matches!(listed.state, ListedState::Unfinished) {
            output::line(format_args!("{}: unfinished", listed.name))?;
            continue;
        }
        let result = match Checkpoint::open(&place.directory, &listed.name).await {
            Ok(checkpoint) => checkpoint.verify(depth).await,
            Err(error) => Err(error),
        };
        match result {
            Ok(verified) => {
                good += 1;
                let (files, size) = (verified.files, bytes(verified.bytes));
                output::line(format_args!("{}: good ({files} files, {size})", listed.name))?;
            }
            Err(error) if error.is_checkpoints_fault() => {
                bad += 1;
                output::line(format_args!("{}: bad: {error}", listed.name))?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    match (good, bad) {
        (0, 0) => Err(Failure::User(format!("there is no checkpoint in {}", place.directory.name()))),
        (_, 0) => Ok(()),
        _ => Err(Failure::Failed(format!("{bad} of {} checkpoints cannot be used", good + bad))),
    }
}

/// Restores the checkpoint's rows into `store`, a range of slots at a time, and calls `visit` with
/// each range. Only a sixteenth of the slots is in memory at a time.
async fn by_slots(
    checkpoint: &Checkpoint,
    store: &std::sync::Arc<Store>,
    mut visit: impl AsyncFnMut(std::ops::Range<u32>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let slots = store.config().slots;
    let range_len = slots.div_ceil(16);
    for start in (0..slots).step_by(range_len as usize) {
        let range = start..(start + range_len).min(slots);
        let wanted = rectrain_checkpoint::SlotSet::new(range.clone().map(Slot));
        checkpoint.restore_rows(store, &wanted).await?;
        visit(range.clone()).await?;
        for slot in range {
            store.clear_slot(Slot(slot)).map_err(store_failure)?;
        }
    }
    Ok(())
}

/// An empty store for the checkpoint's rows.
async fn scratch(checkpoint: &Checkpoint) -> Result<std::sync::Arc<Store>, Failure> {
    let config = checkpoint.store_config().await?;
    Ok(std::sync::Arc::new(Store::new(config).map_err(store_failure)?))
}

fn store_failure(error: rectrain_embedding::StoreError) -> Failure {
    Failure::Failed(error.to_string())
}
