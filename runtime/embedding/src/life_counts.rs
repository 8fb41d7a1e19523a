//! Counts of the rows that a [policy](crate::life) admitted and removed, and of the gradients that
//! it dropped. In shared memory they lie in a file, and outlive the process.

#![allow(unsafe_code, reason = "the counts may lie in a mapped file")]

use crate::region::Region;
use crate::{SharedMemoryError, Store};
use std::fs::OpenOptions;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// A multiple of every page size that Linux has.
const PAGE_BYTES: usize = 64 << 10;

/// The outcomes for the rows and gradients of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LifeCounts {
    /// Rows made, by look-ups and updates.
    pub admitted: u64,
    /// Gradients dropped because the policy had not admitted their key.
    pub turned_away: u64,
    /// Rows removed because they had expired.
    pub expired: u64,
    /// Rows removed for the budget or a share.
    pub evicted: u64,
    /// Gradients dropped because their key's row had been removed.
    pub gradients_dropped: u64,
}

type Numbers = [u64; 5];

impl LifeCounts {
    fn numbers(self) -> Numbers {
        [self.admitted, self.turned_away, self.expired, self.evicted, self.gradients_dropped]
    }

    fn of_numbers([admitted, turned_away, expired, evicted, gradients_dropped]: Numbers) -> Self {
        Self { admitted, turned_away, expired, evicted, gradients_dropped }
    }
}

/// The counts of a group. Zeros in a new file.
#[derive(Default)]
#[repr(C)]
struct GroupCounts {
    counted: [AtomicU64; 5],
    /// The counts at the last [`Store::take_life_counts`].
    taken: [AtomicU64; 5],
}

impl GroupCounts {
    fn read(&self) -> Numbers {
        self.counted.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    fn since_taken(&self) -> Numbers {
        let (mut counts, taken) = (self.read(), self.taken.each_ref().map(|count| count.load(Ordering::Relaxed)));
        counts.iter_mut().zip(taken).for_each(|(count, taken)| *count = count.saturating_sub(taken));
        counts
    }

    fn take(&self) -> Numbers {
        let mut counts = self.read();
        for (count, taken) in counts.iter_mut().zip(&self.taken) {
            let before = taken.swap(*count, Ordering::Relaxed);
            *count = count.saturating_sub(before);
        }
        counts
    }
}

/// The counts of all groups, which many threads add to.
pub(crate) struct SharedLifeCounts {
    /// By group.
    own: Box<[GroupCounts]>,
    /// If there is a file, it has the counts instead.
    kept: Option<Region>,
}

// SAFETY: the region is accessed through atomics only.
unsafe impl Sync for SharedLifeCounts {}

impl SharedLifeCounts {
    /// Counts that end with the process.
    pub(crate) fn new(groups: usize) -> Self {
        Self { own: (0..groups).map(|_| GroupCounts::default()).collect(), kept: None }
    }

    /// Opens or creates the counts in the file at `path`.
    pub(crate) fn open(path: &Path, groups: usize) -> Result<Self, SharedMemoryError> {
        let failed = |attempt| move |source| SharedMemoryError::Io { attempt, path: path.to_owned(), source };
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path).map_err(failed("open"))?;
        let bytes = (groups * size_of::<GroupCounts>()).next_multiple_of(PAGE_BYTES);
        let kept = Region::of_file(&file, 0, bytes).map_err(failed("map"))?;
        Ok(Self { kept: Some(kept), ..Self::new(groups) })
    }

    fn groups(&self) -> &[GroupCounts] {
        match &self.kept {
            None => &self.own,
            // SAFETY: the region has the counts of as many groups, is aligned and zeroed at first,
            // and is accessed as atomics only.
            Some(kept) => unsafe { std::slice::from_raw_parts(kept.start.cast().as_ptr(), self.own.len()) },
        }
    }

    /// Adds to the counts of the group at this position.
    pub(crate) fn add(&self, position: usize, counts: LifeCounts) {
        for (sum, count) in self.groups()[position].counted.iter().zip(counts.numbers()) {
            if count > 0 {
                sum.fetch_add(count, Ordering::Relaxed);
            }
        }
    }

    fn each(&self, read: impl Fn(&GroupCounts) -> Numbers) -> Vec<LifeCounts> {
        self.groups().iter().map(|group| LifeCounts::of_numbers(read(group))).collect()
    }
}

impl Store {
    /// The counts of each group, by [`GroupId`](crate::GroupId), since the store was made. In
    /// shared memory they outlive the process. The update that a killed process had under way may
    /// then be counted twice.
    #[must_use]
    pub fn life_counts(&self) -> Vec<LifeCounts> {
        self.life_counts.each(GroupCounts::read)
    }

    /// The part of [`Self::life_counts`] since the last [`Self::take_life_counts`].
    #[must_use]
    pub fn life_counts_since_taken(&self) -> Vec<LifeCounts> {
        self.life_counts.each(GroupCounts::since_taken)
    }

    /// Returns [`Self::life_counts_since_taken`], and begins from 0.
    #[must_use]
    pub fn take_life_counts(&self) -> Vec<LifeCounts> {
        self.life_counts.each(GroupCounts::take)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(of: u64) -> LifeCounts {
        LifeCounts::of_numbers([of, 0, 2 * of, 0, 3 * of])
    }

    fn check(counters: &SharedLifeCounts) {
        counters.add(1, counts(5));
        assert_eq!(counters.each(GroupCounts::since_taken), [counts(0), counts(5)]);
        assert_eq!(counters.each(GroupCounts::take), [counts(0), counts(5)]);
        counters.add(1, counts(2));
        counters.add(0, counts(1));
        assert_eq!(counters.each(GroupCounts::since_taken), [counts(1), counts(2)]);
        assert_eq!(counters.each(GroupCounts::read), [counts(1), counts(7)]);
    }

    #[test]
    fn counts_are_taken_once() {
        check(&SharedLifeCounts::new(2));
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn counts_in_a_file_outlive_the_process() {
        let path = std::env::temp_dir().join(format!("rectrain-counts-{}", std::process::id()));
        let _absent = std::fs::remove_file(&path);
        check(&SharedLifeCounts::open(&path, 2).unwrap());
        let reopened = SharedLifeCounts::open(&path, 2).unwrap();
        assert_eq!(reopened.each(GroupCounts::read), [counts(1), counts(7)]);
        assert_eq!(reopened.each(GroupCounts::since_taken), [counts(1), counts(2)]);
        std::fs::remove_file(&path).unwrap();
    }
}
