//! Marks of the slots that are being [trimmed](crate::budget), in memory that outlives the process:
//! a word for each slot. A store in the process's own memory has none.

#![allow(unsafe_code, reason = "the words lie in a mapped file")]

use crate::region::Region;
use crate::{GroupId, Moment, SharedMemoryError, Slot};
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

/// A multiple of every page size that Linux has.
const PAGE_BYTES: usize = 64 << 10;
/// Bits of a word that hold the moment.
const MOMENT_BITS: u32 = 44;

/// The part of a slot that is being trimmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trimmed {
    /// The rows of a group, to its share.
    Group(GroupId),
    /// All rows.
    Slot,
}

impl Trimmed {
    /// Whether the rows of the group at this position belong to the part.
    pub(crate) fn covers(self, position: usize) -> bool {
        match self {
            Self::Group(group) => usize::from(group.0) == position,
            Self::Slot => true,
        }
    }
}

/// See the module's text.
#[derive(Default)]
pub(crate) struct Trimming {
    marks: Option<Region>,
    slots: u32,
}

// SAFETY: the region is accessed through atomics only.
unsafe impl Sync for Trimming {}

impl Trimming {
    /// Opens or creates the marks in the file at `path`.
    pub(crate) fn open(path: &Path, slots: u32) -> Result<Self, SharedMemoryError> {
        let failed = |attempt| move |source| SharedMemoryError::Io { attempt, path: path.to_owned(), source };
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path).map_err(failed("open"))?;
        let bytes = (slots as usize * size_of::<u64>()).next_multiple_of(PAGE_BYTES);
        let marks = Region::of_file(&file, 0, bytes).map_err(failed("map"))?;
        Ok(Self { marks: Some(marks), slots })
    }

    fn mark(&self, slot: Slot) -> Option<&AtomicU64> {
        let marks = self.marks.as_ref().filter(|_| slot.0 < self.slots)?;
        // SAFETY: the region has a word for each slot, is aligned and zeroed at first, and is
        // accessed as atomics only.
        Some(unsafe { marks.start.cast::<AtomicU64>().add(slot.0 as usize).as_ref() })
    }

    /// The rows of a part are about to be removed.
    pub(crate) fn start(&self, slot: Slot, part: Trimmed, now: Moment) {
        let code = match part {
            Trimmed::Slot => 1,
            Trimmed::Group(group) => 2 + u64::from(group.0),
        };
        let moment = now.0.min((1 << MOMENT_BITS) - 1);
        self.set(slot, (code << MOMENT_BITS) | moment);
    }

    /// The part has been trimmed.
    pub(crate) fn finish(&self, slot: Slot) {
        self.set(slot, 0);
    }

    /// Sets a mark between the changes of rows before and after it.
    fn set(&self, slot: Slot, word: u64) {
        let Some(mark) = self.mark(slot) else { return };
        compiler_fence(Ordering::SeqCst);
        mark.store(word, Ordering::Release);
        compiler_fence(Ordering::SeqCst);
    }

    /// The part that an earlier process was trimming, and its moment.
    pub(crate) fn unfinished(&self, slot: Slot) -> Option<(Trimmed, Moment)> {
        let word = self.mark(slot)?.load(Ordering::Acquire);
        let part = match word >> MOMENT_BITS {
            0 => return None,
            1 => Trimmed::Slot,
            group => Trimmed::Group(GroupId((group - 2) as u16)),
        };
        Some((part, Moment(word & ((1 << MOMENT_BITS) - 1))))
    }
}
