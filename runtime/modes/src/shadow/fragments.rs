//! The fragments of a partition, which exchanges move in turn (Douillard et al., *Streaming DiLoCo
//! with overlapping communication*, 2025, arXiv 2501.18512).

use std::num::NonZeroU32;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// The number of fragments. Each is a contiguous range of a partition, and their sizes differ by at
/// most one. A partition with fewer parameters than fragments has empty ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fragments(NonZeroU32);

impl Default for Fragments {
    /// One: an exchange moves all parameters.
    fn default() -> Self {
        Self(NonZeroU32::MIN)
    }
}

impl Fragments {
    /// This many fragments. 0 counts as 1.
    #[must_use]
    pub fn new(count: u32) -> Self {
        Self(NonZeroU32::new(count).unwrap_or(NonZeroU32::MIN))
    }

    /// The number of fragments.
    #[must_use]
    pub const fn count(self) -> u32 {
        self.0.get()
    }

    /// The parameters of a fragment, in a partition of `parameters`. Fragments count from 0. They
    /// cover the partition once and in order.
    #[must_use]
    pub fn range(self, fragment: u32, parameters: usize) -> Range<usize> {
        let (fragment, count) = (self.clamp(fragment) as usize, self.count() as usize);
        parameters * fragment / count..parameters * (fragment + 1) / count
    }

    /// The fragment, or the last one if there are fewer.
    #[must_use]
    pub fn clamp(self, fragment: u32) -> u32 {
        fragment.min(self.count() - 1)
    }

    /// The fragment that is exchanged after this one.
    #[must_use]
    pub const fn after(self, fragment: u32) -> u32 {
        if fragment + 1 < self.count() { fragment + 1 } else { 0 }
    }
}

/// The part of a replica in an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// One fragment.
    Fragment(u32),
    /// All fragments, at the end of an order. The replica no longer changes in it.
    Last,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_cover_a_partition_once_and_in_order() {
        for parameters in [0, 1, 2, 7, 40, 4097] {
            for count in [1, 2, 3, 8, 64] {
                let (fragments, mut next, mut fragment) = (Fragments::new(count), 0, 0);
                for _ in 0..count {
                    let range = fragments.range(fragment, parameters);
                    assert_eq!(range.start, next, "{fragment} of {count}");
                    assert!(range.len().abs_diff(parameters / count as usize) <= 1);
                    (next, fragment) = (range.end, fragments.after(fragment));
                }
                assert_eq!((next, fragment), (parameters, 0), "{count} fragments");
            }
        }
        assert_eq!(Fragments::new(0), Fragments::default());
    }
}
