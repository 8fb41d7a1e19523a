//! Publishes the checkpoints of a job for inference servers: a full model, and then the changes.
//! It reads the files of finished checkpoints, so training does not wait for it.

use std::num::NonZeroUsize;

use rectrain_checkpoint::{Checkpoint, CheckpointError, Manifest, find_manifest, parse_directory_name};
use rectrain_storage::Directory;

use super::changes::Changes;
use super::delta::{Base, Delta};
use super::latest::{LATEST, LATEST_BYTES, Latest};
use super::{names, unix_milliseconds};
use crate::description::Description;
use crate::error::ServingError;
use crate::export::{Files, MODEL_FILE};
use crate::model::Model;
use crate::value::ExportType;

/// Bytes of a part of an upload.
const PART_BYTES: usize = 8 << 20;

/// See the module documentation.
#[derive(Debug)]
pub struct Publisher {
    checkpoints: Directory,
    output: Directory,
    job: String,
    /// Full models that stay, with the deltas on them.
    keep: NonZeroUsize,
    latest: Option<Latest>,
    /// The chain of the last checkpoint that this process has published.
    chain: Vec<Manifest>,
}

/// A model that was published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// Its sequence number.
    pub sequence: u64,
    /// Global steps that it was trained.
    pub step: u64,
    /// The rows of a full model; the changed rows of a delta.
    pub rows: u64,
    /// True for a full model.
    pub is_full: bool,
    /// Checkpoints that are part of it and were not published on their own.
    pub coalesced: u64,
    /// Why old models could not be deleted.
    pub not_deleted: Option<String>,
}

impl Publisher {
    /// Continues in the path `output`. `checkpoints` is the checkpoint path of the job.
    ///
    /// # Errors
    /// [`ServingError::Publication`] if another job publishes there, or `latest.json` cannot be
    /// read; errors of the storage.
    pub async fn open(
        checkpoints: Directory,
        output: Directory,
        job: &str,
        keep: NonZeroUsize,
    ) -> Result<Self, ServingError> {
        let latest = read_latest(&output).await?;
        if let Some(other) = latest.as_ref().map(|latest| &latest.job).filter(|other| *other != job) {
            let problem = format!("the job {other} publishes its models there; give the job {job} another path");
            return Err(ServingError::Publication { file: output.name().to_owned(), problem });
        }
        Ok(Self { checkpoints, output, job: job.to_owned(), keep, latest, chain: Vec::new() })
    }

    /// Publishes the newest checkpoint, if it is not published yet. Earlier ones that were not
    /// published are part of it. After an error, nothing is published.
    ///
    /// # Errors
    /// A checkpoint that cannot be read, also because it was deleted meanwhile; another process has
    /// published since; errors of the storage.
    pub async fn publish(&mut self) -> Result<Option<Published>, ServingError> {
        let Some(checkpoint) = self.newest().await? else { return Ok(None) };
        self.refuse_other().await?;
        let mut published = match self.known(&checkpoint).await? {
            Some(known) if known == checkpoint.chain().len() => return Ok(None),
            Some(known) => self.publish_delta(&checkpoint, known).await?,
            None => self.publish_full(&checkpoint).await?,
        };
        self.chain = checkpoint.chain().to_vec();
        published.not_deleted = self.delete_old().await.err().map(|error| error.to_string());
        Ok(Some(published))
    }

    /// The newest finished checkpoint. `None` if there is none, or if it is the published one.
    async fn newest(&self) -> Result<Option<Checkpoint>, ServingError> {
        let mut found: Vec<_> = self.checkpoints.folders().await?;
        found.retain(|name| parse_directory_name(name).is_some());
        found.sort_by_key(|name| parse_directory_name(name));
        for name in found.into_iter().rev() {
            if let Some(latest) = self.latest.as_ref().filter(|latest| latest.checkpoint == name) {
                // A job that began anew under the same path reaches the same steps.
                let found = find_manifest(&self.checkpoints, &name).await?;
                if found.is_none_or(|manifest| manifest.id == latest.checkpoint_id) {
                    return Ok(None);
                }
            }
            match Checkpoint::open_upon(&self.checkpoints, &name, &self.chain).await {
                // It is being written, or was never finished.
                Err(CheckpointError::Unfinished { .. }) => {}
                opened => return Ok(Some(opened?)),
            }
        }
        Ok(None)
    }

    /// The checkpoints of a chain that the published model has. `None` if it is not in the chain,
    /// or if a server could not build upon it.
    async fn known(&self, checkpoint: &Checkpoint) -> Result<Option<usize>, ServingError> {
        let Some(latest) = &self.latest else { return Ok(None) };
        let place = checkpoint.chain().iter().position(|manifest| manifest.id == latest.checkpoint_id);
        let Some(place) = place else { return Ok(None) };
        let is_same = checkpoint.chain().get(place).map(|base| &base.identity) == Some(&checkpoint.manifest().identity);
        Ok((is_same && self.is_there(latest).await?).then_some(place + 1))
    }

    /// Whether the files of the published model exist.
    async fn is_there(&self, latest: &Latest) -> Result<bool, ServingError> {
        let file = match latest.full == latest.model.sequence {
            true => format!("{}/{MODEL_FILE}", names::full(latest.full)),
            false => names::delta(latest.model.sequence),
        };
        Ok(self.output.size(&file).await?.is_some())
    }

    async fn publish_delta(&mut self, checkpoint: &Checkpoint, known: usize) -> Result<Published, ServingError> {
        let manifest = checkpoint.manifest();
        let fault = |problem: &str| {
            let (model, problem) = (checkpoint.name(), problem.to_owned());
            ServingError::Description { model, problem }
        };
        let Some(latest) = &self.latest else { return Err(fault("there is no model that it changes")) };
        let description = Description::of(&manifest.identity, &checkpoint.name())?;
        let mut changes = Changes::new(&description.layout.group_dims);
        let mut has_our_rows = true;
        checkpoint.for_each_change(known, |slot| has_our_rows &= changes.add(slot)).await?;
        if !has_our_rows {
            return Err(fault("its rows have other widths than its description gives"));
        }
        let delta = Delta {
            sequence: latest.model.sequence + 1,
            step: manifest.step,
            base: latest.model.clone(),
            checkpoint: manifest.directory(),
            published_at: unix_milliseconds(),
            groups: changes.finish(),
            parameters: checkpoint.dense().await?.parameters,
        };
        let (bytes, digest) = delta.encode();
        self.write(&names::delta(delta.sequence), bytes).await?;
        let next = Latest {
            model: Base { sequence: delta.sequence, digest },
            full: latest.full,
            full_published_at: latest.full_published_at,
            published_at: delta.published_at,
            ..self.latest_of(checkpoint, delta.sequence)
        };
        self.announce(next).await?;
        Ok(Published {
            sequence: delta.sequence,
            step: delta.step,
            rows: delta.rows(),
            is_full: false,
            coalesced: (checkpoint.chain().len() - known).saturating_sub(1) as u64,
            not_deleted: None,
        })
    }

    async fn publish_full(&mut self, checkpoint: &Checkpoint) -> Result<Published, ServingError> {
        let model = Model::of_checkpoint(checkpoint).await?;
        let sequence = self.latest.as_ref().map_or(1, |latest| latest.model.sequence + 1);
        let folder = names::full(sequence);
        // A publisher that ended before it announced its model may have left one.
        self.output.delete_folder(&folder, MODEL_FILE).await?;
        let mut files = Files::new(&model, ExportType::F32);
        while let Some((name, bytes)) = files.next_file()? {
            self.write(&format!("{folder}/{name}"), bytes).await?;
        }
        let next = Latest { model: Base { sequence, digest: files.digest() }, ..self.latest_of(checkpoint, sequence) };
        self.announce(next).await?;
        let (step, rows) = (model.step, model.rows());
        Ok(Published { sequence, step, rows, is_full: true, coalesced: 0, not_deleted: None })
    }

    /// The entry of a full model, still without its digest.
    fn latest_of(&self, checkpoint: &Checkpoint, sequence: u64) -> Latest {
        let (manifest, now) = (checkpoint.manifest(), unix_milliseconds());
        Latest {
            job: self.job.clone(),
            model: Base { sequence, digest: String::new() },
            step: manifest.step,
            full: sequence,
            full_published_at: now,
            checkpoint: manifest.directory(),
            checkpoint_id: manifest.id,
            published_at: now,
        }
    }

    async fn write(&self, file: &str, bytes: Vec<u8>) -> Result<(), ServingError> {
        let mut writer = self.output.create(file, PART_BYTES);
        writer.write(bytes).await?;
        Ok(writer.finish().await?)
    }

    /// Checks that this process has published the newest model. A coordinator that was replaced may
    /// live for a while beside its replacement.
    ///
    /// # Errors
    /// [`ServingError::Publication`] if another process has published since. The next call goes on
    /// from its model, if it is of the same job.
    async fn refuse_other(&mut self) -> Result<(), ServingError> {
        let found = read_latest(&self.output).await?;
        if found == self.latest {
            return Ok(());
        }
        if found.as_ref().is_none_or(|found| found.job == self.job) {
            self.latest = found;
        }
        let problem = "another process has published there meanwhile; give each job a path of its own".to_owned();
        Err(ServingError::Publication { file: self.output.name_of(LATEST), problem })
    }

    /// Makes a written model the newest one.
    async fn announce(&mut self, next: Latest) -> Result<(), ServingError> {
        self.refuse_other().await?;
        self.output.put(LATEST, next.encode()).await?;
        self.latest = Some(next);
        Ok(())
    }

    /// Deletes full models beyond the number that stays, and deltas that no other full model needs.
    /// Also deletes full models that were never announced, because their publisher ended before.
    async fn delete_old(&self) -> Result<(), ServingError> {
        let Some(latest) = &self.latest else { return Ok(()) };
        let folders = self.output.folders().await?;
        let found = folders.iter().filter_map(|name| names::sequence_of_full(name));
        let (mut fulls, left): (Vec<u64>, Vec<u64>) = found.partition(|sequence| *sequence <= latest.full);
        for sequence in left.into_iter().filter(|sequence| *sequence <= latest.model.sequence) {
            self.output.delete_folder(&names::full(sequence), MODEL_FILE).await?;
        }
        fulls.sort_unstable();
        let old = fulls.len().saturating_sub(self.keep.get());
        let Some(oldest) = fulls.get(old).copied().filter(|_| old > 0) else { return Ok(()) };
        for sequence in fulls.into_iter().take(old) {
            self.output.delete_folder(&names::full(sequence), MODEL_FILE).await?;
        }
        let files = self.output.files("").await?.into_iter().map(|entry| entry.name);
        let is_old = |name: &String| names::sequence_of_delta(name).is_some_and(|sequence| sequence < oldest);
        Ok(self.output.delete(&files.filter(is_old).collect::<Vec<_>>()).await?)
    }
}

/// The newest model of a path. `None` if none was published.
pub(super) async fn read_latest(directory: &Directory) -> Result<Option<Latest>, ServingError> {
    let Some(bytes) = directory.read(LATEST, LATEST_BYTES).await? else { return Ok(None) };
    Latest::decode(&bytes).map(Some).map_err(ServingError::publication(directory.name_of(LATEST)))
}
