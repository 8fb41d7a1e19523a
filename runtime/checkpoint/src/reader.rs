//! Reads a checkpoint: a full one, or a delta with all its bases. Nothing is trusted: every byte in
//! use has passed a checksum, and every file names its checkpoint.

use std::sync::Arc;

use futures::{StreamExt, TryStreamExt};
use rectrain_embedding::{GroupId, LeastCount, Slot, SlotContent, SlotValues, Store};
use rectrain_storage::Directory;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::dense::{self, DensePart, DenseState};
use crate::error::CheckpointError;
use crate::manifest::{FileContent, FileEntry, Hash64, Manifest, SlotSet};
use crate::name::{CheckpointId, parse_directory_name};
use crate::rows::{self, FOOTER_BYTES, HEADER_BYTES, IndexEntry, Problem, RowsFooter, RowsHeader};
use crate::writer::find_manifest;

/// Bytes read at a time.
const READ_BYTES: u64 = 8 << 20;
/// Concurrent reads.
const READS: usize = 3;
/// The longest chain of checkpoints that build on one another.
const LONGEST_CHAIN: usize = 10_000;

/// How thoroughly a checkpoint is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    /// Manifests, and the presence and size of every file: one request per file.
    Sizes,
    /// Every byte of every file.
    Checksums,
}

/// The amount of data that was verified.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verified {
    /// Checkpoints: this one and its bases.
    pub checkpoints: u64,
    /// Files of these checkpoints.
    pub files: u64,
    /// Bytes of these files.
    pub bytes: u64,
}

/// The amount of data that was restored.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RestoredRows {
    /// Slots that were requested and exist.
    pub slots: u64,
    /// Rows written to the store. A row that a delta replaced counts again.
    pub rows: u64,
    /// Rows that deltas removed.
    pub removed: u64,
    /// Bytes read.
    pub bytes: u64,
}

/// The store that rows are restored into.
struct Target<'t> {
    store: &'t Arc<Store>,
    /// For each row group of the checkpoint, the group of the store that takes its rows. `None`:
    /// both have the same groups.
    groups: Option<&'t Arc<[Option<GroupId>]>>,
}

/// An existing checkpoint, with all its bases.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    directory: Directory,
    /// The full checkpoint first, this one last.
    chain: Vec<Manifest>,
}

impl Checkpoint {
    /// Opens the checkpoint `name` (`step-000000001234`) and its bases.
    ///
    /// # Errors
    /// [`CheckpointError::Unfinished`], [`CheckpointError::Manifest`],
    /// [`CheckpointError::FutureVersion`], [`CheckpointError::Base`], and errors of the storage.
    pub async fn open(directory: &Directory, name: &str) -> Result<Self, CheckpointError> {
        Self::open_upon(directory, name, &[]).await
    }

    /// As [`Self::open`], for a reader that follows a chain while it grows. Manifests in `known`,
    /// the chain of an earlier checkpoint of the directory, are not read again.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub async fn open_upon(directory: &Directory, name: &str, mut known: &[Manifest]) -> Result<Self, CheckpointError> {
        if parse_directory_name(name).is_none() {
            return Err(CheckpointError::Name { name: name.to_owned() });
        }
        let unfinished = || CheckpointError::Unfinished { checkpoint: directory.name_of(name) };
        let mut chain = vec![find_manifest(directory, name).await?.ok_or_else(unfinished)?];
        while let Some(base) = chain.last().and_then(|manifest| manifest.base.clone()) {
            let unusable = |problem: String| CheckpointError::Base {
                checkpoint: directory.name_of(name),
                base: base.directory.clone(),
                problem,
            };
            let found = match known.iter().rposition(|manifest| manifest.id == base.id) {
                Some(place) => {
                    let manifest = known[place].clone();
                    known = &known[..place];
                    Ok(Some(manifest))
                }
                None => find_manifest(directory, &base.directory).await,
            };
            let manifest = match found {
                Ok(Some(manifest)) => manifest,
                Ok(None) => return Err(unusable("it does not exist".into())),
                Err(error) if error.is_checkpoints_fault() => return Err(unusable(error.to_string())),
                Err(error) => return Err(error),
            };
            if manifest.id != base.id {
                return Err(unusable(format!("checkpoint {} is there instead", manifest.id)));
            }
            if chain.len() == LONGEST_CHAIN || chain.iter().any(|later| later.id == manifest.id) {
                return Err(unusable(format!("its bases form a cycle or a chain of more than {LONGEST_CHAIN}")));
            }
            let slots = chain.last().map_or(0, |later| later.slots);
            if manifest.slots != slots {
                return Err(unusable(format!("it has {} slots, and the delta has {slots}", manifest.slots)));
            }
            chain.push(manifest);
        }
        chain.reverse();
        Ok(Self { directory: directory.clone(), chain })
    }

    /// The manifest of this checkpoint.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.chain[self.chain.len() - 1]
    }

    /// The manifests of the chain, the full checkpoint's first, this one's last.
    #[must_use]
    pub fn chain(&self) -> &[Manifest] {
        &self.chain
    }

    /// The name of the checkpoint, with the path of its directory.
    #[must_use]
    pub fn name(&self) -> String {
        self.directory.name_of(&self.manifest().directory())
    }

    fn path(manifest: &Manifest, file: &FileEntry) -> String {
        format!("{}/{}", manifest.directory(), file.name)
    }

    /// Checks the checkpoint and all its bases.
    ///
    /// # Errors
    /// The first file that is missing, of the wrong size, damaged or of another checkpoint; or an
    /// error of the storage.
    pub async fn verify(&self, depth: Depth) -> Result<Verified, CheckpointError> {
        let mut verified = Verified::default();
        for manifest in &self.chain {
            for file in &manifest.files {
                self.check_size(manifest, file).await?;
                if depth == Depth::Checksums {
                    self.check_content(manifest, file).await?;
                }
                verified.files += 1;
                verified.bytes += file.size;
            }
            verified.checkpoints += 1;
        }
        Ok(verified)
    }

    async fn check_size(&self, manifest: &Manifest, file: &FileEntry) -> Result<(), CheckpointError> {
        let path = Self::path(manifest, file);
        let expected = file.size;
        match self.directory.size(&path).await? {
            Some(found) if found == expected => Ok(()),
            Some(found) => Err(CheckpointError::Size { file: self.directory.name_of(&path), found, expected }),
            None => Err(CheckpointError::Missing { file: self.directory.name_of(&path), expected }),
        }
    }

    async fn check_content(&self, manifest: &Manifest, file: &FileEntry) -> Result<(), CheckpointError> {
        let path = Self::path(manifest, file);
        match &file.content {
            FileContent::Rows { .. } => drop(self.index(manifest, file).await?),
            FileContent::Dense { .. } => return self.dense_part(manifest, file).await.map(drop),
            FileContent::State { .. } => return self.whole(manifest, file).await.map(drop),
        }
        let starts = (0..file.size).step_by(READ_BYTES as usize);
        let reads = starts.map(|start| self.directory.read_range(&path, start..(start + READ_BYTES).min(file.size)));
        let mut reads = futures::stream::iter(reads).buffered(READS);
        let mut hash = Xxh3Default::new();
        while let Some(bytes) = reads.try_next().await? {
            hash.update(&bytes);
        }
        self.compare(&path, hash.digest(), file.xxh3)
    }

    fn compare(&self, path: &str, found: u64, expected: Hash64) -> Result<(), CheckpointError> {
        if found == expected.0 {
            return Ok(());
        }
        Err(CheckpointError::Checksum { file: self.directory.name_of(path), found, expected: expected.0 })
    }

    /// All bytes of a small file.
    async fn whole(&self, manifest: &Manifest, file: &FileEntry) -> Result<Vec<u8>, CheckpointError> {
        let path = Self::path(manifest, file);
        self.check_size(manifest, file).await?;
        let missing = || CheckpointError::Missing { file: self.directory.name_of(&path), expected: file.size };
        let bytes = self.directory.read(&path, file.size).await?.ok_or_else(missing)?;
        self.compare(&path, xxh3_64(&bytes), file.xxh3)?;
        Ok(bytes)
    }

    async fn dense_part(&self, manifest: &Manifest, file: &FileEntry) -> Result<DensePart, CheckpointError> {
        let name = self.directory.name_of(&Self::path(manifest, file));
        let bytes = self.whole(manifest, file).await?;
        let (part, id) =
            DensePart::decode(&bytes).map_err(|problem| CheckpointError::Damaged { file: name.clone(), problem })?;
        if id != manifest.id {
            return Err(CheckpointError::mixed_up(&name, id, manifest.id));
        }
        if let FileContent::Dense { offset, parameters, .. } = &file.content
            && (part.offset, part.parameters.len() as u64) != (*offset, *parameters)
        {
            return Err(CheckpointError::MixedUp {
                file: name,
                what: "range of parameters",
                found: format!("{} from {}", part.parameters.len(), part.offset),
                expected: format!("{parameters} from {offset}"),
            });
        }
        Ok(part)
    }

    /// The dense parameters and their optimizer state.
    ///
    /// # Errors
    /// [`CheckpointError::NotHeld`] if there are none, errors of a file that cannot be used, and
    /// errors of the storage.
    pub async fn dense(&self) -> Result<DenseState, CheckpointError> {
        let manifest = self.manifest();
        let mut parts = Vec::new();
        for file in &manifest.files {
            if matches!(file.content, FileContent::Dense { .. }) {
                parts.push(self.dense_part(manifest, file).await?);
            }
        }
        if parts.is_empty() {
            return Err(CheckpointError::NotHeld { checkpoint: self.name(), what: "dense parameters".into() });
        }
        dense::assemble(parts).map_err(|problem| CheckpointError::Damaged { file: self.name(), problem })
    }

    /// The state of a role.
    ///
    /// # Errors
    /// [`CheckpointError::NotHeld`], errors of a file that cannot be used, and errors of the
    /// storage.
    pub async fn state(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let manifest = self.manifest();
        let is_it = |file: &&FileEntry| matches!(&file.content, FileContent::State { name: found } if found == name);
        match manifest.files.iter().find(is_it) {
            Some(file) => self.whole(manifest, file).await,
            None => Err(CheckpointError::NotHeld { checkpoint: self.name(), what: format!("state `{name}`") }),
        }
    }

    /// The index of a rows file.
    async fn index(&self, manifest: &Manifest, file: &FileEntry) -> Result<Vec<IndexEntry>, CheckpointError> {
        let path = Self::path(manifest, file);
        let name = self.directory.name_of(&path);
        let FileContent::Rows { part, index, slots, rows, removed } = &file.content else { return Ok(Vec::new()) };
        self.check_size(manifest, file).await?;
        let problem = |problem| match problem {
            Problem::FutureVersion(found) => CheckpointError::FutureVersion {
                file: name.clone(),
                found: u64::from(found),
                supported: u64::from(rows::VERSION),
            },
            Problem::Damaged(problem) => CheckpointError::Damaged { file: name.clone(), problem },
        };
        let short = || problem(Problem::Damaged("it is too short to be a rows file".into()));
        let footer_start = file.size.checked_sub(FOOTER_BYTES as u64).ok_or_else(short)?;
        let head = self.directory.read_range(&path, 0..(HEADER_BYTES as u64).min(file.size)).await?;
        let head: &[u8; HEADER_BYTES] = head[..].try_into().map_err(|_| short())?;
        // Decode the header first: a file of a newer version may have another footer.
        let header = RowsHeader::decode(head).map_err(problem)?;
        let foot = self.directory.read_range(&path, footer_start..file.size).await?;
        let footer = RowsFooter::decode(foot[..].try_into().map_err(|_| short())?, file.size).map_err(problem)?;
        let entries = self.directory.read_range(&path, footer.index_offset..footer_start).await?;
        let (_, entries) = rows::read_index(head, &footer, &entries).map_err(problem)?;
        check_header(&name, &header, manifest, *part)?;
        if footer.checksum != index.0 {
            let file = format!("the index of {name}");
            return Err(CheckpointError::Checksum { file, found: footer.checksum, expected: index.0 });
        }
        let found_slots = SlotSet::new(entries.iter().map(|entry| entry.slot));
        let sum = |of: fn(&IndexEntry) -> u64| entries.iter().fold(0_u64, |sum, entry| sum.saturating_add(of(entry)));
        if found_slots != *slots || sum(|entry| entry.rows) != *rows || sum(|entry| entry.removed) != *removed {
            return Err(problem(Problem::Damaged("its index contradicts the manifest".into())));
        }
        if manifest.base.is_none() && entries.iter().any(|entry| entry.content == SlotContent::Changes) {
            return Err(problem(Problem::Damaged(
                "it holds changes, and a full checkpoint must hold whole slots".into(),
            )));
        }
        Ok(entries)
    }

    /// Restores slots into a store: from the full checkpoint first, then from each delta. Other
    /// slots stay unchanged. Once all slots of the store are restored, [`Store::mark_saved`] with
    /// [`CheckpointId::save_id`] makes this checkpoint the base of later deltas.
    ///
    /// # Errors
    /// [`CheckpointError::Rows`], other errors of a file that cannot be used, and errors of the
    /// storage. The slots are then restored in part: clear them.
    pub async fn restore_rows(&self, store: &Arc<Store>, slots: &SlotSet) -> Result<RestoredRows, CheckpointError> {
        self.put_rows(&Target { store, groups: None }, slots).await
    }

    /// Restores slots into a store with other row groups. `groups` has for each group of the
    /// checkpoint the store's group that takes its rows; see [`Store::adopt_slot`].
    ///
    /// # Errors
    /// As [`Self::restore_rows`].
    pub async fn adopt_rows(
        &self,
        store: &Arc<Store>,
        slots: &SlotSet,
        groups: &Arc<[Option<GroupId>]>,
    ) -> Result<RestoredRows, CheckpointError> {
        self.put_rows(&Target { store, groups: Some(groups) }, slots).await
    }

    async fn put_rows(&self, target: &Target<'_>, slots: &SlotSet) -> Result<RestoredRows, CheckpointError> {
        let mut restored = RestoredRows { slots: slots.len(), ..RestoredRows::default() };
        for manifest in &self.chain {
            for file in &manifest.files {
                let FileContent::Rows { slots: held, .. } = &file.content else { continue };
                if !held.iter().any(|slot| slots.contains(slot)) {
                    continue;
                }
                let mut entries = self.index(manifest, file).await?;
                entries.retain(|entry| slots.contains(entry.slot));
                self.restore_entries(manifest, file, entries, target, &mut restored).await?;
            }
        }
        Ok(restored)
    }

    /// Restores the slots of one file. Reads runs of adjacent slots, a few runs concurrently; a
    /// blocking task restores each run.
    async fn restore_entries(
        &self,
        manifest: &Manifest,
        file: &FileEntry,
        entries: Vec<IndexEntry>,
        target: &Target<'_>,
        restored: &mut RestoredRows,
    ) -> Result<(), CheckpointError> {
        let path = Self::path(manifest, file);
        let name = self.directory.name_of(&path);
        let runs = runs(entries).into_iter().map(|run| {
            let (path, name) = (&path, name.clone());
            let (store, groups) = (Arc::clone(target.store), target.groups.cloned());
            async move {
                let start = run[0].offset;
                let end = run.last().map_or(start, |last| last.offset + last.length);
                let bytes = self.directory.read_range(path, start..end).await?;
                let task =
                    tokio::task::spawn_blocking(move || restore_run(&store, groups.as_deref(), &name, (&run, &bytes)));
                let ended = |error: tokio::task::JoinError| CheckpointError::Task {
                    what: "restore rows",
                    reason: error.to_string(),
                };
                let (rows, removed) = task.await.map_err(ended)??;
                Ok::<_, CheckpointError>((rows, removed, end - start))
            }
        });
        let mut done = futures::stream::iter(runs).buffer_unordered(READS);
        while let Some((rows, removed, bytes)) = done.try_next().await? {
            restored.rows += rows;
            restored.removed += removed;
            restored.bytes += bytes;
        }
        Ok(())
    }

    /// Visits the values of the slots that the checkpoints of the chain after the first `known`
    /// hold, in the order of the chain. A delta's slots are its changes: see [`SlotContent`]. Rows
    /// with fewer examples than `least` are left out:
    /// see [`Store::thin_values_of_snapshot`].
    ///
    /// # Errors
    /// Errors of a file that cannot be used, and errors of the storage. Slots before the error have
    /// been visited.
    pub async fn for_each_change(
        &self,
        known: usize,
        least: Option<LeastCount>,
        mut visit: impl FnMut(SlotValues) + Send,
    ) -> Result<(), CheckpointError> {
        for manifest in self.chain.iter().skip(known) {
            for file in &manifest.files {
                let path = Self::path(manifest, file);
                let name = self.directory.name_of(&path);
                let reads = runs(self.index(manifest, file).await?).into_iter().map(|run| {
                    let path = &path;
                    async move {
                        let start = run[0].offset;
                        let end = run.last().map_or(start, |last| last.offset + last.length);
                        let bytes = self.directory.read_range(path, start..end).await?;
                        Ok::<_, CheckpointError>((run, bytes))
                    }
                });
                // The next runs are read while one is visited.
                let mut reads = futures::stream::iter(reads).buffered(READS);
                while let Some((run, bytes)) = reads.try_next().await? {
                    visit_run(&name, &run, &bytes, least, &mut visit)?;
                }
            }
        }
        Ok(())
    }

    /// The configuration of the store that wrote the rows, for a reader that does not know the job.
    ///
    /// # Errors
    /// [`CheckpointError::NotHeld`] if there are no rows files, and errors of a file that cannot be
    /// used.
    pub async fn store_config(&self) -> Result<rectrain_embedding::StoreConfig, CheckpointError> {
        let manifest = self.manifest();
        let is_rows = |file: &&FileEntry| matches!(&file.content, FileContent::Rows { slots, .. } if !slots.is_empty());
        let Some(file) = manifest.files.iter().find(is_rows) else {
            return Err(CheckpointError::NotHeld { checkpoint: self.name(), what: "embedding rows".into() });
        };
        let path = Self::path(manifest, file);
        let entries = self.index(manifest, file).await?;
        let entry = entries[0];
        let bytes = self.directory.read_range(&path, entry.offset..entry.offset + entry.length).await?;
        Store::config_of_snapshot(&bytes).map_err(|source| CheckpointError::Rows {
            file: self.directory.name_of(&path),
            slot: entry.slot,
            source: source.into(),
        })
    }

    /// The checkpoint's id.
    #[must_use]
    pub fn id(&self) -> CheckpointId {
        self.manifest().id
    }
}

fn check_header(name: &str, header: &RowsHeader, manifest: &Manifest, part: u32) -> Result<(), CheckpointError> {
    if header.id != manifest.id {
        return Err(CheckpointError::mixed_up(name, header.id, manifest.id));
    }
    let checks = [
        ("step", header.step, manifest.step),
        ("part", u64::from(header.part), u64::from(part)),
        ("slot count", u64::from(header.slots), u64::from(manifest.slots)),
    ];
    for (what, found, expected) in checks {
        if found != expected {
            let (found, expected) = (found.to_string(), expected.to_string());
            return Err(CheckpointError::MixedUp { file: name.to_owned(), what, found, expected });
        }
    }
    Ok(())
}

/// Groups entries into runs of adjacent slots, of at most about [`READ_BYTES`] each.
fn runs(entries: Vec<IndexEntry>) -> Vec<Vec<IndexEntry>> {
    let mut runs: Vec<Vec<IndexEntry>> = Vec::new();
    for entry in entries {
        match runs.last_mut() {
            Some(run)
                if run.last().is_some_and(|last| last.offset + last.length == entry.offset)
                    && entry.offset + entry.length - run[0].offset <= READ_BYTES =>
            {
                run.push(entry);
            }
            _ => runs.push(vec![entry]),
        }
    }
    runs
}

/// Visits the values of a run of slots.
fn visit_run(
    name: &str,
    run: &[IndexEntry],
    bytes: &[u8],
    least: Option<LeastCount>,
    visit: &mut impl FnMut(SlotValues),
) -> Result<(), CheckpointError> {
    let mut rest = bytes;
    for entry in run {
        let (own, others) = rest.split_at(entry.length as usize);
        rest = others;
        let failed = |source: rectrain_embedding::SnapshotError| CheckpointError::Rows {
            file: name.to_owned(),
            slot: entry.slot,
            source: source.into(),
        };
        let found = Store::thin_values_of_snapshot(own, least).map_err(failed)?;
        if (found.slot, found.content) != (entry.slot, entry.content) {
            let problem = format!("the snapshot of slot {} contradicts the index", entry.slot);
            return Err(CheckpointError::Damaged { file: name.to_owned(), problem });
        }
        visit(found);
    }
    Ok(())
}

/// Puts a run of slots into the store. Returns its rows and removed rows.
fn restore_run(
    store: &Store,
    groups: Option<&[Option<GroupId>]>,
    name: &str,
    (run, bytes): (&[IndexEntry], &[u8]),
) -> Result<(u64, u64), CheckpointError> {
    let (mut rows, mut removed, mut rest) = (0, 0, bytes);
    for entry in run {
        let (own, others) = rest.split_at(entry.length as usize);
        rest = others;
        let failed = |source| CheckpointError::Rows { file: name.to_owned(), slot: entry.slot, source };
        // Check the slot's number before the slot goes into the store.
        let found = Slot(own.get(12..16).map_or(u32::MAX, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])));
        if found != entry.slot {
            return Err(CheckpointError::MixedUp {
                file: name.to_owned(),
                what: "slot",
                found: found.to_string(),
                expected: entry.slot.to_string(),
            });
        }
        let restored = match groups {
            None => store.restore_slot(own),
            Some(groups) => store.adopt_slot(own, groups),
        };
        let restored = restored.map_err(failed)?;
        if (restored.content, restored.rows, restored.removed) != (entry.content, entry.rows, entry.removed) {
            let problem = format!("the snapshot of slot {} contradicts the index", entry.slot);
            return Err(CheckpointError::Damaged { file: name.to_owned(), problem });
        }
        rows += restored.rows;
        removed += restored.removed;
    }
    Ok((rows, removed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_that_contradicts_the_index_is_refused() {
        use rectrain_embedding::{
            FeatureKey, Initializer, LifePolicy, Missing, RowSpec, SparseOptimizer, StoreConfig, ValueType,
        };
        let spec = RowSpec {
            dim: 1,
            value_type: ValueType::F32,
            optimizer: SparseOptimizer::Sgd { learning_rate: 1.0 },
            life: LifePolicy::KeepAll,
            initializer: Initializer::Constant(0.5),
            zero_columns: 0,
            first_order: None,
            share: None,
        };
        let store = Store::new(StoreConfig { slots: 1, seed: 1, groups: vec![spec], budget: None }).unwrap();
        store.lookup(GroupId(0), &[FeatureKey(7)], Missing::Insert, &mut [0.0]).unwrap();
        let bytes = store.snapshot_slot(Slot(0)).unwrap().into_bytes();
        let length = bytes.len() as u64;
        let entry = IndexEntry { slot: Slot(0), content: SlotContent::Whole, offset: 64, length, rows: 1, removed: 0 };
        assert_eq!(restore_run(&store, None, "rows.bin", (&[entry], &bytes)).unwrap(), (1, 0));
        for other in [IndexEntry { rows: 2, ..entry }, IndexEntry { content: SlotContent::Changes, ..entry }] {
            let error = restore_run(&store, None, "rows.bin", (&[other], &bytes)).unwrap_err();
            assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
            assert!(error.to_string().starts_with("rows.bin is damaged"), "{error}");
        }
    }

    #[test]
    fn runs_are_adjacent_and_of_limited_size() {
        let entry = |slot, offset, length| IndexEntry {
            slot: Slot(slot),
            content: SlotContent::Whole,
            offset,
            length,
            rows: 0,
            removed: 0,
        };
        let big = READ_BYTES;
        let entries = vec![entry(0, 0, 10), entry(1, 10, 5), entry(4, 20, 5), entry(5, 25, big), entry(6, 25 + big, 1)];
        let found: Vec<Vec<u32>> =
            runs(entries).into_iter().map(|run| run.iter().map(|entry| entry.slot.0).collect()).collect();
        assert_eq!(found, [vec![0, 1], vec![4], vec![5], vec![6]]);
    }
}
