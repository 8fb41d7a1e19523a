//! Publishes the checkpoints of a job for inference servers: a full model, and then the changes.
//! It reads the files of finished checkpoints, so training does not wait for it. A later full
//! checkpoint gives a delta at once, and a [`FullModel`] that the caller writes meanwhile.

use std::num::{NonZeroU32, NonZeroUsize};

use rectrain_checkpoint::{Checkpoint, CheckpointError, Manifest, find_manifest, parse_directory_name};
use rectrain_embedding::LeastCount;
use rectrain_storage::Directory;

use super::changes::Changes;
use super::delta::{Base, Delta, GroupChanges};
use super::full::{FullModel, WrittenFull, write, write_full};
use super::known_rows::KnownRows;
use super::latest::{LATEST, LATEST_BYTES, Latest};
use super::{names, unix_milliseconds};
use crate::description::Description;
use crate::error::ServingError;
use crate::export::MODEL_FILE;
use crate::model::Model;

/// See the module documentation.
#[derive(Debug)]
pub struct Publisher {
    checkpoints: Directory,
    output: Directory,
    job: String,
    /// Full models that stay, with the deltas on them.
    keep: NonZeroUsize,
    /// Rows with fewer examples are not published.
    least: Option<LeastCount>,
    latest: Option<Latest>,
    /// The chain of the last checkpoint that this process has published.
    chain: Vec<Manifest>,
    /// The rows of the newest model, if this process has published it and all models since a full
    /// one.
    rows: Option<KnownRows>,
    /// The sequence number of the full model that is being written.
    writing: Option<u64>,
}

/// The way to publish a checkpoint.
enum Way {
    /// It is the published model.
    Published,
    /// The changes of its chain after this many checkpoints.
    Chain(usize),
    /// Its differences from the rows of the published model.
    Differences,
    /// All of it.
    Full,
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
    /// A full model of the same sequence number that is to be written. The caller writes it, and
    /// calls [`Publisher::announce_full`] or [`Publisher::give_up_full`].
    pub full: Option<FullModel>,
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
        Ok(Self {
            checkpoints,
            output,
            job: job.to_owned(),
            keep,
            least: None,
            latest,
            chain: Vec::new(),
            rows: None,
            writing: None,
        })
    }

    /// Leaves out the rows with fewer examples. A full model follows if the models before left out
    /// others.
    #[must_use]
    pub fn with_least_count(self, least: Option<LeastCount>) -> Self {
        Self { least, ..self }
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
        let way = self.way(&checkpoint).await?;
        let mut published = match &way {
            Way::Published => return Ok(None),
            Way::Chain(known) => self.publish_delta(&checkpoint, *known).await?,
            Way::Differences => self.publish_delta(&checkpoint, 0).await?,
            Way::Full => self.publish_full(&checkpoint).await?,
        };
        if let (Way::Differences, None, Some(latest)) = (way, self.writing, &self.latest) {
            self.writing = Some(published.sequence);
            let (model, checkpoint_id) = (latest.model.clone(), latest.checkpoint_id);
            published.full =
                Some(FullModel { model, checkpoint: latest.checkpoint.clone(), checkpoint_id, least: self.least });
        }
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

    /// The way to publish a checkpoint. Changes need the files of the published model, and a server
    /// that can build upon it.
    async fn way(&self, checkpoint: &Checkpoint) -> Result<Way, ServingError> {
        let Some(latest) = &self.latest else { return Ok(Way::Full) };
        let place = checkpoint.chain().iter().position(|manifest| manifest.id == latest.checkpoint_id);
        let before = match place {
            Some(place) => checkpoint.chain().get(place),
            // A checkpoint without rows may be one of a job without parameter servers.
            None => self.chain.last().filter(|_| self.rows.is_some() && checkpoint.chain()[0].rows > 0),
        };
        let is_same = before.map(|base| &base.identity) == Some(&checkpoint.manifest().identity)
            && latest.min_count == self.min_count();
        Ok(match place.map(|place| place + 1) {
            _ if !is_same || !self.is_there(latest).await? => Way::Full,
            Some(known) if known == checkpoint.chain().len() => Way::Published,
            Some(known) => Way::Chain(known),
            None => Way::Differences,
        })
    }

    /// Whether the files of the published model exist.
    async fn is_there(&self, latest: &Latest) -> Result<bool, ServingError> {
        let file = match latest.full == latest.model.sequence {
            true => format!("{}/{MODEL_FILE}", names::full(latest.full)),
            false => names::delta(latest.model.sequence),
        };
        Ok(self.output.size(&file).await?.is_some())
    }

    /// The changes of a chain after its first `known` checkpoints. If `known` is 0, the first one
    /// is compared with the rows of the published model.
    async fn changes(&self, checkpoint: &Checkpoint, known: usize) -> Result<Vec<GroupChanges>, ServingError> {
        let description = Description::of(&checkpoint.manifest().identity, &checkpoint.name())?;
        let mut changes = Changes::new(&description.layout.group_dims);
        let mut has_our_rows = true;
        let mut differences = self.rows.as_ref().filter(|_| known == 0).map(KnownRows::differences);
        let visit = |slot| {
            let slot = match &mut differences {
                Some(differences) => differences.of(slot),
                None => slot,
            };
            has_our_rows &= changes.add(slot);
        };
        checkpoint.for_each_change(known, self.least, visit).await?;
        match has_our_rows {
            true => Ok(self.without_unknown(changes.finish())),
            false => Err(fault(checkpoint, "its rows have other widths than its description gives")),
        }
    }

    /// The changes without the removed keys that were never published: most rows that are left out
    /// are none of the published model.
    fn without_unknown(&self, mut changes: Vec<GroupChanges>) -> Vec<GroupChanges> {
        if let Some(rows) = self.rows.as_ref().filter(|_| self.least.is_some()) {
            rows.forget_unknown(&mut changes);
        }
        changes
    }

    fn min_count(&self) -> Option<NonZeroU32> {
        self.least.map(|LeastCount(count)| count)
    }

    async fn publish_delta(&mut self, checkpoint: &Checkpoint, known: usize) -> Result<Published, ServingError> {
        let manifest = checkpoint.manifest();
        let groups = self.changes(checkpoint, known).await?;
        let Some(latest) = &self.latest else { return Err(fault(checkpoint, "there is no model that it changes")) };
        let delta = Delta {
            sequence: latest.model.sequence + 1,
            step: manifest.step,
            base: latest.model.clone(),
            checkpoint: manifest.directory(),
            published_at: unix_milliseconds(),
            groups,
            parameters: checkpoint.dense().await?.parameters,
        };
        let (bytes, digest) = delta.encode();
        write(&self.output, &names::delta(delta.sequence), bytes).await?;
        let next = Latest {
            model: Base { sequence: delta.sequence, digest },
            full: latest.full,
            full_digest: latest.full_digest.clone(),
            full_base: latest.full_base.clone(),
            full_published_at: latest.full_published_at,
            published_at: delta.published_at,
            ..self.latest_of(checkpoint, delta.sequence)
        };
        self.announce(next).await?;
        if let Some(rows) = &mut self.rows {
            rows.apply(&delta.groups);
        }
        Ok(Published {
            sequence: delta.sequence,
            step: delta.step,
            rows: delta.rows(),
            is_full: false,
            coalesced: (checkpoint.chain().len() - known).saturating_sub(1) as u64,
            not_deleted: None,
            full: None,
        })
    }

    async fn publish_full(&mut self, checkpoint: &Checkpoint) -> Result<Published, ServingError> {
        let model = Model::thin_of_checkpoint(checkpoint, self.least).await?;
        let sequence = self.latest.as_ref().map_or(1, |latest| latest.model.sequence + 1);
        let digest = write_full(&self.output, sequence, &model).await?;
        let next = Latest {
            model: Base { sequence, digest: digest.clone() },
            full_digest: Some(digest.clone()),
            full_base: Some(digest),
            ..self.latest_of(checkpoint, sequence)
        };
        self.announce(next).await?;
        self.rows = Some(KnownRows::of(&model));
        let (step, rows) = (model.step, model.rows());
        Ok(Published { sequence, step, rows, is_full: true, coalesced: 0, not_deleted: None, full: None })
    }

    /// Announces a full model that was written. Servers that start load it from now on.
    ///
    /// # Errors
    /// Another process has published since; errors of the storage, also where old models cannot be
    /// deleted. Servers that start load an earlier full model then.
    pub async fn announce_full(&mut self, written: WrittenFull) -> Result<(), ServingError> {
        self.writing = None;
        let WrittenFull { model, digest, published_at } = written;
        let Some(latest) = self.latest.clone().filter(|latest| latest.full < model.sequence) else { return Ok(()) };
        let next = Latest {
            full: model.sequence,
            full_digest: Some(digest),
            full_base: Some(model.digest),
            full_published_at: published_at,
            ..latest
        };
        self.announce(next).await?;
        self.delete_old().await
    }

    /// A full model could not be written. Its files are deleted with the next publication.
    pub fn give_up_full(&mut self) {
        self.writing = None;
    }

    /// The entry of a full model, still without its digest.
    fn latest_of(&self, checkpoint: &Checkpoint, sequence: u64) -> Latest {
        let (manifest, now) = (checkpoint.manifest(), unix_milliseconds());
        Latest {
            job: self.job.clone(),
            model: Base { sequence, digest: String::new() },
            step: manifest.step,
            full: sequence,
            full_digest: None,
            full_base: None,
            full_published_at: now,
            checkpoint: manifest.directory(),
            checkpoint_id: manifest.id,
            published_at: now,
            min_count: self.min_count(),
        }
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
            self.rows = None;
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
        let is_written = |sequence: &u64| *sequence > latest.model.sequence || self.writing == Some(*sequence);
        for sequence in left.into_iter().filter(|sequence| !is_written(sequence)) {
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

fn fault(checkpoint: &Checkpoint, problem: &str) -> ServingError {
    ServingError::Description { model: checkpoint.name(), problem: problem.to_owned() }
}

/// The newest model of a path. `None` if none was published.
pub(super) async fn read_latest(directory: &Directory) -> Result<Option<Latest>, ServingError> {
    let Some(bytes) = directory.read(LATEST, LATEST_BYTES).await? else { return Ok(None) };
    Latest::decode(&bytes).map(Some).map_err(ServingError::publication(directory.name_of(LATEST)))
}
