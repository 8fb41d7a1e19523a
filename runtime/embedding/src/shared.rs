//! A store in memory that outlives its process: a directory in a memory file system (tmpfs), with a file of
//! rows for each group and an [`UpdateLog`]. A process that is killed leaves all rows behind, and the next one
//! that [opens](Store::in_shared_memory) the directory goes on with them; indexes are built anew from the rows.
//!
//! What is whole whenever the process is killed: a row that was being made does not exist, and one that was
//! being changed through an [`UpdateLog`] is put back as it was, and the update goes on behind it. A row changed
//! by [`Store::update`] without a log may be half-changed.

#![allow(unsafe_code)]

use crate::arena::Arena;
use crate::block_file::FoundBlock;
use crate::layout::RowLayout;
use crate::region::{HUGE_PAGE_BYTES, Region};
use crate::table::{Group, Table};
use crate::{GroupId, SharedMemoryError, Slot, Store, StoreConfig, StoreError};
use std::fs::{DirBuilder, OpenOptions};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

/// What was found in shared memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reopened {
    /// Rows, of all groups.
    pub rows: u64,
    /// Rows that a death had left half-changed, and that were put back: 0 or 1.
    pub repaired_rows: u64,
}

impl Store {
    /// A store whose rows lie in files of `directory`, with the rows that are there already. Only one process at a time may have a
    /// directory open, and its configuration must be the one that the rows were made with; both are the caller's to know.
    ///
    /// # Errors
    /// [`StoreError::Spec`] as in [`Self::new`]; [`StoreError::SharedMemory`] for a directory that cannot be used, or whose rows cannot.
    pub fn in_shared_memory(config: StoreConfig, directory: &Path) -> Result<(Self, UpdateLog, Reopened), StoreError> {
        config.validate()?;
        make_directory(directory)?;
        let mut groups = Vec::with_capacity(config.groups.len());
        let mut found = Vec::with_capacity(config.groups.len());
        for (number, &spec) in config.groups.iter().enumerate() {
            let path = directory.join(format!("rows-{number}"));
            let (memory, blocks) = Arena::on_file(&path, RowLayout::new(&spec).stride())?;
            found.push((path, by_slot(blocks, config.slots)));
            groups.push(Group::new(spec, config.seed, memory));
        }
        let mut tables = (0..config.slots).map(|slot| {
            let mut tables = Vec::with_capacity(groups.len());
            for (group, (path, blocks)) in groups.iter().zip(&mut found) {
                let blocks = std::mem::take(&mut blocks[slot as usize]);
                let adopted = if blocks.is_empty() {
                    Some(Table::new(group, Slot(slot)))
                } else {
                    Table::adopt(group, Slot(slot), blocks)
                };
                let problem = "a slot's blocks do not fit together";
                tables.push(adopted.ok_or_else(|| SharedMemoryError::Damaged { path: path.clone(), problem })?);
            }
            Ok(tables.into_boxed_slice())
        });
        let tables: Result<Vec<Box<[Table]>>, SharedMemoryError> = tables.by_ref().collect();
        let store = Self::of_tables(config, groups, tables?);
        store.groups.iter().for_each(|group| group.memory.keep_file(false));
        let mut log = UpdateLog::open(&directory.join("update"), &store.layouts)?;
        let repaired_rows = u64::from(store.put_back_unfinished(&mut log)?);
        let reopened = Reopened { rows: store.rows(), repaired_rows };
        Ok((store, log, reopened))
    }

    /// Puts the row back that was being changed. Says whether there was one.
    fn put_back_unfinished(&self, log: &mut UpdateLog) -> Result<bool, StoreError> {
        let Some((group, slot, row)) = log.unfinished() else { return Ok(false) };
        let stride = self.group(group)?.layout.stride();
        let mut state = self.cell(slot)?.lock();
        let table = &mut state.tables[usize::from(group.0)];
        if !table.put_back(row, &log.words()[..stride]) {
            let problem = "the row that was being changed is not there";
            return Err(SharedMemoryError::Damaged { path: log.path.clone(), problem }.into());
        }
        log.forget_unfinished();
        Ok(true)
    }
}

fn make_directory(directory: &Path) -> Result<(), SharedMemoryError> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    let made = builder.create(directory);
    made.map_err(|source| SharedMemoryError::Io { attempt: "make", path: directory.to_owned(), source })
}

/// Blocks of slots that do not exist are left alone.
fn by_slot(blocks: Vec<FoundBlock>, slots: u32) -> Vec<Vec<FoundBlock>> {
    let mut by_slot = vec![Vec::new(); slots as usize];
    for block in blocks {
        if let Some(of_slot) = by_slot.get_mut(block.owner as usize) {
            of_slot.push(block);
        }
    }
    by_slot
}

/// Who is told of the changes that an update makes to rows.
pub(crate) trait RowLog {
    /// The update comes to its next key; whether it is still to be applied.
    fn is_to_do(&mut self) -> bool;
    /// Its row is about to be changed, and is as in `words` until then.
    fn changing(&mut self, row: u32, words: &[u32]);
    /// It has been.
    fn changed(&mut self);
}

/// Nobody.
pub(crate) struct NoLog;

impl RowLog for NoLog {
    #[inline(always)]
    fn is_to_do(&mut self) -> bool {
        true
    }

    #[inline(always)]
    fn changing(&mut self, _row: u32, _words: &[u32]) {}

    #[inline(always)]
    fn changed(&mut self) {}
}

/// How far a sequence of updates has come, to the row, in memory that outlives the process. Updates are numbered; one that a death
/// has cut short is begun again under its number with the same keys and gradients, and what it had done already is not done twice.
///
/// What it costs: the words of a row copied to a place that stays in the nearest cache, and two stores, for each row that changes.
pub struct UpdateLog {
    path: std::path::PathBuf,
    region: Region,
    /// Words that fit.
    capacity: usize,
    /// Of the update under way: keys come to, and keys done before it was begun again.
    position: u32,
    done: u32,
    place: (GroupId, Slot),
}

// SAFETY: the region is this log's alone, and no thread has an affinity to it.
unsafe impl Send for UpdateLog {}

/// What lies in the file, before the words of the row that is being changed.
#[repr(C, align(64))]
struct LogHeader {
    /// The update's number in the upper half; in the lower half twice the keys done, plus 1 while the next one's row is being changed.
    progress: AtomicU64,
    /// Of that row.
    slot: AtomicU32,
    row: AtomicU32,
    group: AtomicU32,
}

impl UpdateLog {
    fn open(path: &Path, layouts: &[RowLayout]) -> Result<Self, SharedMemoryError> {
        let failed = |attempt| move |source| SharedMemoryError::Io { attempt, path: path.to_owned(), source };
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path).map_err(failed("open"))?;
        let capacity = layouts.iter().map(RowLayout::stride).max().unwrap_or(0);
        let bytes = (size_of::<LogHeader>() + capacity * size_of::<u32>()).next_multiple_of(HUGE_PAGE_BYTES);
        let region = Region::of_file(&file, 0, bytes).map_err(failed("map"))?;
        let place = (GroupId(0), Slot(0));
        Ok(Self { path: path.to_owned(), region, capacity, position: 0, done: 0, place })
    }

    /// The number of the update under way, or of the next.
    #[must_use]
    pub fn update(&self) -> u32 {
        (self.header().progress.load(Ordering::Acquire) >> 32) as u32
    }

    /// From here on updates are numbered from `update`.
    pub fn restart(&mut self, update: u32) {
        self.header().progress.store(u64::from(update) << 32, Ordering::Release);
        (self.position, self.done) = (0, 0);
    }

    /// The update under way is begun, perhaps again.
    pub fn begin(&mut self) {
        self.position = 0;
        self.done = self.header().progress.load(Ordering::Acquire) as u32 / 2;
    }

    /// The update under way is done; the next has the next number.
    pub fn finish(&mut self) {
        self.restart(self.update().wrapping_add(1));
    }

    pub(crate) fn at(&mut self, group: GroupId, slot: Slot) {
        self.place = (group, slot);
    }

    /// The row that was being changed.
    fn unfinished(&self) -> Option<(GroupId, Slot, u32)> {
        let header = self.header();
        (header.progress.load(Ordering::Acquire) & 1 == 1).then(|| {
            let group = GroupId(header.group.load(Ordering::Relaxed) as u16);
            (group, Slot(header.slot.load(Ordering::Relaxed)), header.row.load(Ordering::Relaxed))
        })
    }

    fn forget_unfinished(&mut self) {
        let progress = self.header().progress.load(Ordering::Acquire);
        self.header().progress.store(progress & !1, Ordering::Release);
    }

    fn set_position(&self, halves: u32) {
        let progress = self.header().progress.load(Ordering::Relaxed);
        self.header().progress.store(progress >> 32 << 32 | u64::from(halves), Ordering::Release);
    }

    fn header(&self) -> &LogHeader {
        // SAFETY: the region is mapped, aligned and long enough, and this part of it is reached as atomics only.
        unsafe { self.region.start.cast().as_ref() }
    }

    fn first_word(&self) -> NonNull<u32> {
        // SAFETY: within the region.
        unsafe { self.region.start.add(size_of::<LogHeader>()).cast() }
    }

    fn words(&self) -> &[u32] {
        // SAFETY: `capacity` words follow the header, initialized as the file's zeros, and written through `&mut self` only.
        unsafe { std::slice::from_raw_parts(self.first_word().as_ptr(), self.capacity) }
    }

    fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as in `words`, and the log is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.first_word().as_ptr(), self.capacity) }
    }
}

impl RowLog for UpdateLog {
    #[inline]
    fn is_to_do(&mut self) -> bool {
        self.position += 1;
        self.position > self.done
    }

    #[inline]
    fn changing(&mut self, row: u32, words: &[u32]) {
        // The row before is noted as done before its words are written over.
        compiler_fence(Ordering::SeqCst);
        self.words_mut()[..words.len()].copy_from_slice(words);
        let (group, slot) = self.place;
        let header = self.header();
        header.group.store(u32::from(group.0), Ordering::Relaxed);
        header.slot.store(slot.0, Ordering::Relaxed);
        header.row.store(row, Ordering::Relaxed);
        self.set_position(2 * (self.position - 1) + 1);
        // The row changes after this only: a process that is killed leaves the writes before one point of its program, if the compiler
        // leaves them in their order.
        compiler_fence(Ordering::SeqCst);
    }

    #[inline]
    fn changed(&mut self) {
        compiler_fence(Ordering::SeqCst);
        self.set_position(2 * self.position);
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use super::*;
    use crate::{FeatureKey, Initializer, Missing, RowSpec, SparseOptimizer, ValueType};

    const GROUP: GroupId = GroupId(0);

    fn config() -> StoreConfig {
        let group = RowSpec {
            dim: 4,
            value_type: ValueType::F32,
            optimizer: SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-8 },
            initializer: Initializer::Constant(0.5),
            zero_columns: 0,
        };
        StoreConfig { slots: 2, seed: 1, groups: vec![group] }
    }

    fn directory(name: &str) -> std::path::PathBuf {
        let directory = std::env::temp_dir().join(format!("rectrain-{name}-{}", std::process::id()));
        let _absent = std::fs::remove_dir_all(&directory);
        directory
    }

    /// A death in the middle of a row, by hand: the row is back as it was, and the update is completed and not repeated.
    #[test]
    fn a_row_that_was_half_changed_is_put_back_and_the_update_goes_on_with_it() {
        let directory = directory("half");
        let keys: Vec<FeatureKey> = (1..=9).map(|key| FeatureKey(key << 59)).collect();
        let gradients: Vec<f32> = (0..36).map(|value| value as f32 - 17.5).collect();
        let mut values = vec![0.0; 36];
        let own = Store::new(config()).unwrap();
        own.lookup(GROUP, &keys, Missing::Insert, &mut values).unwrap();
        own.update(GROUP, &keys, &gradients, 1).unwrap();
        {
            let (store, mut log, _) = Store::in_shared_memory(config(), &directory).unwrap();
            store.lookup(GROUP, &keys, Missing::Insert, &mut values).unwrap();
            log.begin();
            // The first five are done.
            store.update_logged(GROUP, &keys[..5], &gradients[..20], 1, &mut log).unwrap();
            let slot = store.slot_of(keys[5]);
            let mut state = store.cell(slot).unwrap().lock();
            let row = state.tables[0].row_number(keys[5]).unwrap();
            let words = state.tables[0].row_of(keys[5]).unwrap().to_vec();
            assert!(log.is_to_do());
            log.at(GROUP, slot);
            log.changing(row, &words);
            let half: Vec<u32> = words.iter().enumerate().map(|(at, &word)| if at > 4 { 7 } else { word }).collect();
            assert!(state.tables[0].put_back(row, &half));
        }
        let (store, mut log, reopened) = Store::in_shared_memory(config(), &directory).unwrap();
        assert_eq!(reopened, Reopened { rows: 9, repaired_rows: 1 });
        log.begin();
        let counts = store.update_logged(GROUP, &keys, &gradients, 1, &mut log).unwrap();
        log.finish();
        assert_eq!((counts.applied, log.update()), (9, 1));
        assert_eq!(store.digests(0..2).unwrap(), own.digests(0..2).unwrap());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    /// Nothing of what a process finds is given up before it has found everything.
    #[test]
    fn a_refusal_leaves_the_rows_as_they_are() {
        let directory = directory("refusal");
        let keys: Vec<FeatureKey> = (0..2_000).map(|key| FeatureKey(key << 53)).collect();
        let mut values = vec![0.0; 8_000];
        {
            let (store, _log, _) = Store::in_shared_memory(config(), &directory).unwrap();
            store.lookup(GROUP, &keys, Missing::Insert, &mut values).unwrap();
        }
        let path = directory.join("rows-0");
        let whole = std::fs::read(&path).unwrap();
        // The number of the last slot's last block: now one is missing.
        let mut at = 64;
        let number = loop {
            let bytes = u64::from_le_bytes(whole[at..at + 8].try_into().unwrap()) as usize;
            if whole[at + bytes..at + bytes + 8] == [0; 8] {
                break at + 24;
            }
            at += bytes;
        };
        let mut damaged = whole.clone();
        damaged[number..number + 4].copy_from_slice(&1_000_u32.to_le_bytes());
        std::fs::write(&path, &damaged).unwrap();
        assert!(Store::in_shared_memory(config(), &directory).is_err());
        assert!(std::fs::read(&path).unwrap() == damaged);
        std::fs::write(&path, &whole).unwrap();
        assert_eq!(Store::in_shared_memory(config(), &directory).unwrap().2.rows, 2_000);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
