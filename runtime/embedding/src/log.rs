//! The progress of an update, row by row, in memory that outlives the process.
//!
//! A process that is killed in the middle of an update leaves its [`UpdateLog`] behind. The next
//! process repeats the update with the same keys and gradients. The log skips the completed rows
//! and restores the one row that was half-changed. So each gradient is applied exactly once.

#![allow(unsafe_code)]

use crate::region::{HUGE_PAGE_BYTES, Region};
use crate::{GroupId, SharedMemoryError, Slot};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, compiler_fence};

/// The two memories of a table that an update changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// The rows.
    Rows,
    /// The blocks of the [side table](crate::side_table).
    Side,
}

/// Sees every change that an update makes to a row, or to a block of the side table.
pub(crate) trait RowLog {
    /// The keys that follow belong to this group and slot.
    fn at(&mut self, group: GroupId, slot: Slot);
    /// The update has reached its next key. Returns whether the key's gradient must still be
    /// applied.
    fn is_to_do(&mut self) -> bool;
    /// A row of the key is about to change; `words` are its present contents.
    fn changing(&mut self, part: Part, row: u32, words: &[u32]);
    /// The row has changed and need not be undone, but the key is not done.
    fn keep(&mut self);
    /// The row has changed, and the key is done.
    fn changed(&mut self);
}

/// Records nothing.
pub(crate) struct NoLog;

impl RowLog for NoLog {
    #[inline(always)]
    fn at(&mut self, _group: GroupId, _slot: Slot) {}

    #[inline(always)]
    fn is_to_do(&mut self) -> bool {
        true
    }

    #[inline(always)]
    fn changing(&mut self, _part: Part, _row: u32, _words: &[u32]) {}

    #[inline(always)]
    fn keep(&mut self) {}

    #[inline(always)]
    fn changed(&mut self) {}
}

/// The progress of a sequence of numbered updates; see the crate's `Store::update_logged`.
///
/// Each row that changes costs a copy of its words, to a place that stays in the nearest cache, and
/// two stores.
pub struct UpdateLog {
    pub(crate) path: PathBuf,
    region: Region,
    /// Words that fit behind the header.
    capacity: usize,
    /// Keys that the update under way has reached.
    position: u32,
    /// Keys that an earlier process completed of the update under way.
    done: u32,
    place: (GroupId, Slot),
}

// SAFETY: the region belongs to this log alone, and no thread has an affinity to it.
unsafe impl Send for UpdateLog {}

/// The file's beginning. The words of the row that is being changed follow it.
#[repr(C, align(64))]
struct LogHeader {
    /// Upper half: the update's number. Lower half: twice the number of keys that are done, plus 1
    /// while the next key's row is being changed.
    progress: AtomicU64,
    /// Slot of the row that is being changed.
    slot: AtomicU32,
    /// Number of that row in its table.
    row: AtomicU32,
    /// Group of that row; plus [`IN_SIDE_TABLE`] for a block of the group's side table.
    group: AtomicU32,
}

/// Tells a block of a side table from a row. Groups have 16 bits.
const IN_SIDE_TABLE: u32 = 1 << 16;

/// The row that an earlier process left half-changed.
pub(crate) struct UnfinishedRow {
    pub(crate) part: Part,
    pub(crate) group: GroupId,
    pub(crate) slot: Slot,
    pub(crate) row: u32,
}

impl UpdateLog {
    /// Opens or creates the log in the file at `path`, for rows of at most `capacity` words.
    pub(crate) fn open(path: &Path, capacity: usize) -> Result<Self, SharedMemoryError> {
        let failed = |attempt| move |source| SharedMemoryError::Io { attempt, path: path.to_owned(), source };
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path).map_err(failed("open"))?;
        let bytes = (size_of::<LogHeader>() + capacity * size_of::<u32>()).next_multiple_of(HUGE_PAGE_BYTES);
        let region = Region::of_file(&file, 0, bytes).map_err(failed("map"))?;
        let place = (GroupId(0), Slot(0));
        Ok(Self { path: path.to_owned(), region, capacity, position: 0, done: 0, place })
    }

    /// The number of the update under way, or of the next one.
    #[must_use]
    pub fn update(&self) -> u32 {
        (self.header().progress.load(Ordering::Acquire) >> 32) as u32
    }

    /// Forgets all progress. The next update has the number `update`.
    pub fn restart(&mut self, update: u32) {
        self.header().progress.store(u64::from(update) << 32, Ordering::Release);
        (self.position, self.done) = (0, 0);
    }

    /// Begins the update under way. If an earlier process began it, its completed keys are skipped.
    pub fn begin(&mut self) {
        self.position = 0;
        self.done = self.header().progress.load(Ordering::Acquire) as u32 / 2;
    }

    /// Completes the update under way. The next update has the next number.
    pub fn finish(&mut self) {
        self.restart(self.update().wrapping_add(1));
    }

    /// The row that was being changed when the earlier process died.
    pub(crate) fn unfinished(&self) -> Option<UnfinishedRow> {
        let header = self.header();
        if header.progress.load(Ordering::Acquire) & 1 == 0 {
            return None;
        }
        let group = header.group.load(Ordering::Relaxed);
        Some(UnfinishedRow {
            part: if group & IN_SIDE_TABLE == 0 { Part::Rows } else { Part::Side },
            group: GroupId(group as u16),
            slot: Slot(header.slot.load(Ordering::Relaxed)),
            row: header.row.load(Ordering::Relaxed),
        })
    }

    /// The unfinished row has been restored from [`Self::words`].
    pub(crate) fn forget_unfinished(&mut self) {
        let progress = self.header().progress.load(Ordering::Acquire);
        self.header().progress.store(progress & !1, Ordering::Release);
    }

    fn set_position(&self, halves: u32) {
        let progress = self.header().progress.load(Ordering::Relaxed);
        self.header().progress.store(progress >> 32 << 32 | u64::from(halves), Ordering::Release);
    }

    fn header(&self) -> &LogHeader {
        // SAFETY: the region is mapped, aligned and long enough. This part is accessed as atomics
        // only.
        unsafe { self.region.start.cast().as_ref() }
    }

    fn first_word(&self) -> NonNull<u32> {
        // SAFETY: within the region.
        unsafe { self.region.start.add(size_of::<LogHeader>()).cast() }
    }

    /// The words that the row had before it began to change.
    pub(crate) fn words(&self) -> &[u32] {
        // SAFETY: `capacity` words follow the header. The file's zeros initialized them, and they
        // are written through `&mut self` only.
        unsafe { std::slice::from_raw_parts(self.first_word().as_ptr(), self.capacity) }
    }

    fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as in `words`, and the log is borrowed for writing.
        unsafe { std::slice::from_raw_parts_mut(self.first_word().as_ptr(), self.capacity) }
    }
}

impl RowLog for UpdateLog {
    fn at(&mut self, group: GroupId, slot: Slot) {
        self.place = (group, slot);
    }

    #[inline]
    fn is_to_do(&mut self) -> bool {
        self.position += 1;
        self.position > self.done
    }

    #[inline]
    fn changing(&mut self, part: Part, row: u32, words: &[u32]) {
        // The row before is recorded as done before its saved words are overwritten.
        compiler_fence(Ordering::SeqCst);
        self.words_mut()[..words.len()].copy_from_slice(words);
        let (group, slot) = self.place;
        let header = self.header();
        let flag = if part == Part::Side { IN_SIDE_TABLE } else { 0 };
        header.group.store(u32::from(group.0) | flag, Ordering::Relaxed);
        header.slot.store(slot.0, Ordering::Relaxed);
        header.row.store(row, Ordering::Relaxed);
        self.set_position(2 * (self.position - 1) + 1);
        // The row changes only after this. A killed process leaves the writes before one point of
        // its program, provided that the compiler keeps them in their order.
        compiler_fence(Ordering::SeqCst);
    }

    #[inline]
    fn keep(&mut self) {
        compiler_fence(Ordering::SeqCst);
        self.set_position(2 * (self.position - 1));
    }

    #[inline]
    fn changed(&mut self) {
        compiler_fence(Ordering::SeqCst);
        self.set_position(2 * self.position);
    }
}
