//! Writes a checkpoint. Each process writes its own files under the coordinator's ticket and
//! reports them to the coordinator, which finishes the checkpoint with the manifest. File names
//! contain a part of the checkpoint's id. So an attempt never overwrites the files of another, and
//! a late process does no harm.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use rectrain_embedding::{FrozenStore, Slot, SlotSnapshot, StoreError};
use rectrain_storage::{Directory, FileWriter, StorageError};
use serde_json::Value;
use tokio::sync::mpsc;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::dense::DensePart;
use crate::error::CheckpointError;
use crate::identity::Identity;
use crate::manifest::{Draft, FileContent, FileEntry, Hash64, MANIFEST, MOST_BYTES, Manifest, SlotSet};
use crate::name::{Base, CheckpointId, Ticket, directory_name};
use crate::rows::{self, IndexEntry, RowsHeader};

/// Bytes of an upload part: enough for object stores, and small beside the memory of a role.
const PART_BYTES: u64 = 8 << 20;
/// Object stores accept 10,000 parts. The margin is for estimates of the size that were too low.
const MOST_PARTS: u64 = 8_000;
/// Slots that are copied ahead of the one being written.
const SLOTS_AHEAD: usize = 4;

/// The contents of a new checkpoint.
#[derive(Debug, Clone)]
pub struct Begin {
    /// The global step at whose end it is taken.
    pub step: u64,
    /// The base of a delta; `None` for a full checkpoint.
    pub base: Option<Base>,
    /// Virtual shards of the embedding table.
    pub slots: u32,
    /// The settings that a job must share to use it.
    pub identity: Identity,
    /// Information only: job name, training mode.
    pub info: BTreeMap<String, Value>,
}

/// The coordinator's side of a checkpoint that is being written.
#[derive(Debug)]
pub struct CheckpointWriter {
    directory: Directory,
    ticket: Ticket,
    begin: Begin,
}

impl CheckpointWriter {
    /// Starts a checkpoint. Nothing is written yet. An existing checkpoint of the same step and
    /// kind stays until `commit` replaces it.
    ///
    /// # Errors
    /// The errors of [`Self::check`].
    pub async fn begin(directory: &Directory, begin: Begin) -> Result<Self, CheckpointError> {
        let writer = Self::unchecked(directory, begin);
        writer.check().await?;
        Ok(writer)
    }

    /// Like [`Self::begin`], but makes no request: for a caller that pauses training until it has a
    /// ticket. Call [`Self::check`] before anything is written.
    #[must_use]
    pub fn unchecked(directory: &Directory, begin: Begin) -> Self {
        let ticket = Ticket {
            directory: directory_name(
                begin.step,
                if begin.base.is_some() { crate::Kind::Delta } else { crate::Kind::Full },
            ),
            id: CheckpointId::random(),
            step: begin.step,
            base: begin.base.clone(),
        };
        Self { directory: directory.clone(), ticket, begin }
    }

    /// Checks the checkpoint's directory and the base.
    ///
    /// # Errors
    /// [`CheckpointError::OtherJob`] if another job's checkpoint has this name.
    /// [`CheckpointError::FutureVersion`] if one of a newer format has it.
    /// [`CheckpointError::Base`] if the base cannot be used. Also errors of the storage.
    pub async fn check(&self) -> Result<(), CheckpointError> {
        let Self { directory, ticket, begin } = self;
        let present = match find_manifest(directory, &ticket.directory).await {
            // It may be a good checkpoint, and this program cannot read which job it belongs to.
            Err(error @ CheckpointError::FutureVersion { .. }) => return Err(error),
            Err(error) if error.is_checkpoints_fault() => None,
            found => found?,
        };
        if let Some(difference) = present.and_then(|present| present.identity.difference(&begin.identity)) {
            return Err(CheckpointError::OtherJob { checkpoint: directory.name_of(&ticket.directory), difference });
        }
        match &begin.base {
            Some(base) => check_base(directory, ticket, base, begin).await,
            None => Ok(()),
        }
    }

    /// The ticket with which the processes write their parts.
    #[must_use]
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    /// Finishes the checkpoint: checks that the files exist and form a whole, then writes the
    /// manifest, atomically. From then on the checkpoint exists.
    ///
    /// # Errors
    /// [`CheckpointError::Incomplete`], [`CheckpointError::Missing`], [`CheckpointError::Size`],
    /// and errors of the storage. The checkpoint then does not exist, with one exception: a
    /// manifest whose write failed may be there all the same.
    pub async fn commit(self, files: Vec<FileEntry>) -> Result<Manifest, CheckpointError> {
        let checkpoint = self.directory.name_of(&self.ticket.directory);
        for file in &files {
            let path = self.ticket.file(&file.name);
            let name = || self.directory.name_of(&path);
            match self.directory.size(&path).await? {
                None => return Err(CheckpointError::Missing { file: name(), expected: file.size }),
                Some(found) if found != file.size => {
                    return Err(CheckpointError::Size { file: name(), found, expected: file.size });
                }
                Some(_) => {}
            }
        }
        let manifest = Manifest::new(Draft {
            id: self.ticket.id,
            step: self.ticket.step,
            base: self.ticket.base.clone(),
            written_by: format!("rectrain {}", env!("CARGO_PKG_VERSION")),
            slots: self.begin.slots,
            identity: self.begin.identity,
            info: self.begin.info,
            files,
        })
        .map_err(|problem| CheckpointError::Incomplete { checkpoint: checkpoint.clone(), problem })?;
        let bytes = manifest.encode();
        if bytes.len() as u64 > MOST_BYTES {
            let problem = format!("its manifest has {} bytes, and at most {MOST_BYTES} are allowed", bytes.len());
            return Err(CheckpointError::Incomplete { checkpoint, problem });
        }
        self.directory.put(&self.ticket.file(MANIFEST), bytes).await?;
        Ok(manifest)
    }

    /// Aborts the checkpoint and deletes its files as far as possible. [`retain`](crate::retain)
    /// deletes the rest later.
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn abort(self) -> Result<(), CheckpointError> {
        let own = format!("-{}.", self.ticket.id.short());
        let files = self.directory.files(&self.ticket.directory).await?;
        let files: Vec<String> = files.into_iter().map(|entry| entry.name).filter(|name| name.contains(&own)).collect();
        Ok(self.directory.delete(&files).await?)
    }
}

/// The manifest of a checkpoint; `None` if it has none.
///
/// # Errors
/// [`CheckpointError::Manifest`], [`CheckpointError::FutureVersion`], [`CheckpointError::MixedUp`],
/// and errors of the storage.
pub async fn find_manifest(directory: &Directory, checkpoint: &str) -> Result<Option<Manifest>, CheckpointError> {
    let path = format!("{checkpoint}/{MANIFEST}");
    let name = directory.name_of(&path);
    let bytes = match directory.read(&path, MOST_BYTES).await {
        Ok(Some(bytes)) => bytes,
        Ok(None) => return Ok(None),
        Err(StorageError::TooLarge { found, .. }) => {
            let problem = format!("it has {found} bytes, and a manifest may have at most {MOST_BYTES}");
            return Err(CheckpointError::Manifest { file: name, problem });
        }
        Err(error) => return Err(error.into()),
    };
    let manifest = Manifest::decode(&name, &bytes)?;
    if manifest.directory() != checkpoint {
        return Err(CheckpointError::MixedUp {
            file: name,
            what: "step",
            found: manifest.directory(),
            expected: checkpoint.to_owned(),
        });
    }
    Ok(Some(manifest))
}

async fn check_base(directory: &Directory, ticket: &Ticket, base: &Base, begin: &Begin) -> Result<(), CheckpointError> {
    let unusable = |problem: String| CheckpointError::Base {
        checkpoint: directory.name_of(&ticket.directory),
        base: base.directory.clone(),
        problem,
    };
    let Some(manifest) = find_manifest(directory, &base.directory).await? else {
        return Err(unusable("it does not exist".into()));
    };
    if manifest.id != base.id {
        return Err(unusable(format!("checkpoint {} is there instead", manifest.id)));
    }
    if manifest.slots != begin.slots || manifest.step > begin.step || manifest.directory() == ticket.directory {
        return Err(unusable(format!(
            "it has step {} and {} slots, and the delta has step {} and {} slots",
            manifest.step, manifest.slots, begin.step, begin.slots
        )));
    }
    match manifest.identity.difference(&begin.identity) {
        Some(difference) => {
            Err(CheckpointError::OtherJob { checkpoint: directory.name_of(&base.directory), difference })
        }
        None => Ok(()),
    }
}

/// A file that is being written, with its checksum.
struct Sum {
    file: FileWriter,
    hash: Xxh3Default,
    size: u64,
}

impl Sum {
    async fn write(&mut self, bytes: Bytes) -> Result<(), CheckpointError> {
        self.hash.update(&bytes);
        self.size += bytes.len() as u64;
        Ok(self.file.write(bytes).await?)
    }
}

/// A rows file that is being written: the slots of one parameter server.
pub struct RowsWriter {
    name: String,
    sum: Sum,
    header: RowsHeader,
    entries: Vec<IndexEntry>,
}

impl RowsWriter {
    /// Starts rows file number `part` of a job with `slots` slots. `expected_bytes` is a rough
    /// estimate of its size: very large files are uploaded in larger parts.
    #[must_use]
    pub fn create(directory: &Directory, ticket: &Ticket, part: u32, slots: u32, expected_bytes: u64) -> Self {
        let name = format!("rows-{part:05}-{}.bin", ticket.id.short());
        let part_bytes = PART_BYTES.max(expected_bytes.div_ceil(MOST_PARTS));
        let file = directory.create(&ticket.file(&name), usize::try_from(part_bytes).unwrap_or(usize::MAX));
        let header = RowsHeader { kind: ticket.kind(), id: ticket.id, step: ticket.step, part, slots };
        Self { name, sum: Sum { file, hash: Xxh3Default::new(), size: 0 }, header, entries: Vec::new() }
    }

    /// Appends a slot. Slots must rise. Waits while too many parts are in flight.
    ///
    /// # Errors
    /// [`CheckpointError::Incomplete`] for a slot out of order, and errors of the storage. The file
    /// is then abandoned.
    pub async fn write(&mut self, snapshot: SlotSnapshot) -> Result<(), CheckpointError> {
        if self.sum.size == 0 {
            self.sum.write(Bytes::copy_from_slice(&self.header.encode())).await?;
        }
        let slot = snapshot.slot();
        if slot.0 >= self.header.slots || self.entries.last().is_some_and(|last| last.slot >= slot) {
            let problem = format!("slot {slot} was written out of order");
            return Err(CheckpointError::Incomplete { checkpoint: self.name.clone(), problem });
        }
        self.entries.push(IndexEntry {
            slot,
            content: snapshot.content(),
            offset: self.sum.size,
            length: snapshot.as_bytes().len() as u64,
            rows: snapshot.rows(),
            removed: snapshot.removed(),
        });
        self.sum.write(snapshot.into_bytes().into()).await
    }

    /// Writes the index and makes the file appear, durably.
    ///
    /// # Errors
    /// Errors of the storage; the file then does not appear.
    pub async fn finish(mut self) -> Result<FileEntry, CheckpointError> {
        if self.sum.size == 0 {
            self.sum.write(Bytes::copy_from_slice(&self.header.encode())).await?;
        }
        let (index, footer) = rows::encode_index(&self.header, &self.entries);
        self.sum.write(index.into()).await?;
        self.sum.file.finish().await?;
        Ok(FileEntry {
            name: self.name,
            size: self.sum.size,
            xxh3: Hash64(self.sum.hash.digest()),
            content: FileContent::Rows {
                part: self.header.part,
                slots: SlotSet::new(self.entries.iter().map(|entry| entry.slot)),
                rows: self.entries.iter().map(|entry| entry.rows).sum(),
                removed: self.entries.iter().map(|entry| entry.removed).sum(),
                index: Hash64(footer.checksum),
            },
        })
    }
}

/// Writes slots of a frozen store as rows file number `part`. A blocking task copies and sorts the
/// rows, a few slots ahead of the writer. The store stays frozen until the caller completes or
/// drops it.
///
/// # Errors
/// [`CheckpointError::Save`] for a slot that the store does not have or has already saved, and
/// errors of the storage.
pub async fn save_rows(
    directory: &Directory,
    ticket: &Ticket,
    part: u32,
    frozen: &Arc<FrozenStore>,
    slots: &SlotSet,
) -> Result<FileEntry, CheckpointError> {
    let store = frozen.store();
    let expected = store.bytes();
    let expected = expected.payload + expected.overhead;
    let mut writer = RowsWriter::create(directory, ticket, part, store.config().slots, expected);
    // The channel holds `SLOTS_AHEAD` slots; the task waits when it is full.
    let (ready, mut snapshots) = mpsc::channel::<Result<SlotSnapshot, StoreError>>(SLOTS_AHEAD);
    let (frozen, wanted): (_, Vec<Slot>) = (Arc::clone(frozen), slots.iter().collect());
    let task = tokio::task::spawn_blocking(move || {
        for slot in wanted {
            let snapshot = frozen.save_slot(slot);
            let failed = snapshot.is_err();
            // The receiver is dropped when the write fails.
            if ready.blocking_send(snapshot).is_err() || failed {
                return;
            }
        }
    });
    while let Some(snapshot) = snapshots.recv().await {
        writer.write(snapshot.map_err(CheckpointError::Save)?).await?;
    }
    task.await.map_err(|error| CheckpointError::Task { what: "copy the rows", reason: error.to_string() })?;
    writer.finish().await
}

/// Writes a part of the dense parameters as dense file number `part`.
///
/// # Errors
/// [`CheckpointError::Incomplete`] if the state does not match the parameters, and errors of the
/// storage.
pub async fn save_dense(
    directory: &Directory,
    ticket: &Ticket,
    part: u32,
    dense: &DensePart,
) -> Result<FileEntry, CheckpointError> {
    let name = format!("dense-{part:05}-{}.safetensors", ticket.id.short());
    let bytes = dense
        .encode(ticket.id)
        .map_err(|problem| CheckpointError::Incomplete { checkpoint: directory.name_of(&ticket.directory), problem })?;
    let content = FileContent::Dense {
        offset: dense.offset,
        parameters: dense.parameters.len() as u64,
        optimizer: dense.optimizer.clone(),
        update_count: dense.update_count,
    };
    save(directory, ticket, name, bytes, content).await
}

/// Writes the state of a role under a name of lower-case letters, digits and dashes.
///
/// # Errors
/// Errors of the storage.
pub async fn save_state(
    directory: &Directory,
    ticket: &Ticket,
    name: &str,
    state: Vec<u8>,
) -> Result<FileEntry, CheckpointError> {
    let file = format!("state-{name}-{}.bin", ticket.id.short());
    save(directory, ticket, file, state, FileContent::State { name: name.to_owned() }).await
}

async fn save(
    directory: &Directory,
    ticket: &Ticket,
    name: String,
    bytes: Vec<u8>,
    content: FileContent,
) -> Result<FileEntry, CheckpointError> {
    let (size, xxh3) = (bytes.len() as u64, Hash64(xxh3_64(&bytes)));
    let part_bytes = PART_BYTES.max(size.div_ceil(MOST_PARTS));
    let mut file = directory.create(&ticket.file(&name), usize::try_from(part_bytes).unwrap_or(usize::MAX));
    file.write(bytes).await?;
    file.finish().await?;
    Ok(FileEntry { name, size, xxh3, content })
}
