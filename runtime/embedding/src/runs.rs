//! Free memory as runs. Adjacent runs are joined, and a longer run is cut when less is needed. The
//! indexes of a store are replaced by larger ones one after another. The memory of several small
//! indexes thus makes room for a larger one.

use crate::region::HUGE_PAGE_BYTES;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr::NonNull;

/// Runs of free memory. No run crosses the border of two regions.
#[derive(Default)]
pub(crate) struct FreeRuns {
    by_start: BTreeMap<NonNull<u8>, usize>,
    by_bytes: BTreeSet<(usize, NonNull<u8>)>,
    bytes: usize,
}

impl FreeRuns {
    /// Bytes of all runs.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Takes `bytes` from the start of the smallest run that is long enough. The rest of that run
    /// stays free.
    pub(crate) fn take(&mut self, bytes: usize) -> Option<NonNull<u8>> {
        let &(run, start) = self.by_bytes.range((bytes, NonNull::<u8>::dangling())..).next()?;
        self.remove(start, run);
        if let Some(rest) = after(start, bytes).filter(|_| run > bytes) {
            self.insert(rest, run - bytes);
        }
        Some(start)
    }

    /// Adds a run that is no longer in use.
    pub(crate) fn give_back(&mut self, mut start: NonNull<u8>, mut bytes: usize) {
        if let Some(next) = after(start, bytes).filter(|next| !may_begin_region(*next))
            && let Some(&run) = self.by_start.get(&next)
        {
            self.remove(next, run);
            bytes += run;
        }
        if !may_begin_region(start)
            && let Some((&before, &run)) = self.by_start.range(..start).next_back()
            && after(before, run) == Some(start)
        {
            self.remove(before, run);
            (start, bytes) = (before, bytes + run);
        }
        self.insert(start, bytes);
    }

    fn insert(&mut self, start: NonNull<u8>, bytes: usize) {
        self.by_start.insert(start, bytes);
        self.by_bytes.insert((bytes, start));
        self.bytes += bytes;
    }

    fn remove(&mut self, start: NonNull<u8>, bytes: usize) {
        self.by_start.remove(&start);
        self.by_bytes.remove(&(bytes, start));
        self.bytes -= bytes;
    }
}

/// The end of a run.
fn after(start: NonNull<u8>, bytes: usize) -> Option<NonNull<u8>> {
    NonNull::new(start.as_ptr().wrapping_add(bytes))
}

/// Whether a region may begin here: regions begin at multiples of this, and few runs do.
fn may_begin_region(start: NonNull<u8>) -> bool {
    start.as_ptr().addr().is_multiple_of(HUGE_PAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An address without memory behind it, since runs are never read. Units are 64 bytes, counted
    /// from the middle of one region to the middle of the next.
    fn at(unit: usize) -> NonNull<u8> {
        NonNull::new(std::ptr::without_provenance_mut(7 * HUGE_PAGE_BYTES / 2 + unit * 64)).unwrap()
    }

    #[test]
    fn adjacent_runs_are_joined_but_not_across_regions() {
        let border = HUGE_PAGE_BYTES / 2 / 64;
        let mut runs = FreeRuns::default();
        for unit in [border - 1, border + 1, border, border - 2] {
            runs.give_back(at(unit), 64);
        }
        assert_eq!(runs.by_start, BTreeMap::from([(at(border - 2), 128), (at(border), 128)]));
        assert_eq!((runs.take(256), runs.bytes()), (None, 256));
    }

    #[test]
    fn the_smallest_run_that_is_enough_is_cut() {
        let mut runs = FreeRuns::default();
        for (unit, units) in [(0, 10), (20, 4), (30, 3)] {
            runs.give_back(at(unit), units * 64);
        }
        assert_eq!((runs.take(192), runs.take(192)), (Some(at(30)), Some(at(20))));
        assert_eq!((runs.take(64), runs.take(640), runs.bytes()), (Some(at(23)), Some(at(0)), 0));
        assert_eq!(runs.take(64), None);
    }

    proptest! {
        /// After any sequence of calls, no byte belongs to two runs and none is lost.
        #[test]
        fn every_byte_is_free_or_taken_exactly_once(sizes in prop::collection::vec((1_usize..20, any::<prop::sample::Index>()), 1..200)) {
            let units = 400;
            let mut runs = FreeRuns::default();
            runs.give_back(at(0), units * 64);
            let mut taken: Vec<(NonNull<u8>, usize)> = Vec::new();
            for (size, other) in sizes {
                match runs.take(size * 64) {
                    Some(start) => taken.push((start, size * 64)),
                    None => {
                        let (start, bytes) = taken.swap_remove(other.index(taken.len()));
                        runs.give_back(start, bytes);
                    }
                }
                let mut all: Vec<(NonNull<u8>, usize)> = taken.clone();
                all.extend(runs.by_start.iter().map(|(&start, &bytes)| (start, bytes)));
                all.sort_unstable();
                prop_assert!(all.windows(2).all(|pair| after(pair[0].0, pair[0].1) == Some(pair[1].0)));
                prop_assert_eq!(all.iter().map(|run| run.1).sum::<usize>(), units * 64);
                prop_assert_eq!(runs.by_start.values().sum::<usize>(), runs.bytes());
                prop_assert_eq!(runs.by_start.len(), runs.by_bytes.len());
            }
        }
    }
}
