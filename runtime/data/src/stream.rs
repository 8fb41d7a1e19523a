//! Streams: what a reader of one must know besides its rows.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use rectrain_kinds::{PartId, PartitionState, SegmentRead};

use crate::error::DataError;

/// A partition as the brokers have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionFound {
    /// The topic.
    pub topic: String,
    /// The ID of the topic. A topic that is made anew has another one.
    pub topic_id: [u8; 16],
    /// Its offsets.
    pub state: PartitionState,
}

/// The result of a search for a good row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Probe {
    /// The place behind the bad rows, and whether a good one follows.
    pub read: SegmentRead,
    /// Bad rows passed over.
    pub skipped: u64,
}

/// A source that is a stream.
pub(crate) trait Stream {
    /// The present state of all partitions. Blocks.
    fn partitions(&self) -> Result<Vec<PartitionFound>, DataError>;

    /// Commits offsets for the consumer group of the stream, if it has one. Blocks.
    fn commit(&self, offsets: &[(PartId, u64)]) -> Result<(), DataError>;
}

/// The ends of partitions that were found long enough ago.
#[derive(Debug)]
pub(crate) struct Aging {
    linger: Duration,
    /// By partition: the ends in the order in which they were found, and the last one that is old.
    found: BTreeMap<PartId, (u64, VecDeque<(Instant, u64)>)>,
}

impl Aging {
    pub(crate) fn new(linger: Duration) -> Self {
        Self { linger, found: BTreeMap::new() }
    }

    /// Notes the present end of a partition. Returns the largest one that was found at least
    /// `linger` ago, or 0.
    pub(crate) fn note(&mut self, part: PartId, end: u64, now: Instant) -> u64 {
        let (aged, recent) = self.found.entry(part).or_default();
        if recent.back().map_or(*aged, |(_, last)| *last) < end {
            recent.push_back((now, end));
        }
        while let Some((since, end)) = recent.front().copied()
            && now.duration_since(since) >= self.linger
        {
            *aged = end;
            recent.pop_front();
        }
        *aged
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_old_once_it_was_known_for_as_long_as_rows_linger() {
        let mut aging = Aging::new(Duration::from_secs(2));
        let start = Instant::now();
        let mut note = |part, end, seconds| aging.note(PartId(part), end, start + Duration::from_secs(seconds));
        assert_eq!([note(0, 5, 0), note(0, 5, 1), note(0, 9, 1), note(1, 3, 1)], [0; 4]);
        assert_eq!([note(0, 9, 2), note(0, 12, 3), note(1, 3, 3)], [5, 9, 3]);
        assert_eq!([note(0, 12, 4), note(0, 12, 5), note(0, 12, 60)], [9, 12, 12]);
    }
}
