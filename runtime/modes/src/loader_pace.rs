//! How many chunks a slow loader gets, and which chunks a second loader reads as well. Pure: every
//! time is an argument.
//!
//! A loader's time for a batch is the time from the lease of a chunk to its report, over the
//! batches of the chunk. [`Shares`] compares the loaders by it. A slow loader gets chunks in
//! proportion to its speed, and at least one of sixteen, so that its recovery shows.
//!
//! Training needs the batches in order, so a single late chunk stops it. A second loader reads a
//! late chunk, too (backup executions, MapReduce §3.6). So it does with each chunk of a slow
//! loader. A chunk is late if training stands still while its loader reads for much longer than the
//! others do. Both loaders read the same rows for the same batches. So the result does not depend
//! on which of them is first.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::shares::{CHUNKS, EVEN, ShareChange, Shares};

/// Time without a trained row after which a chunk may be late.
const STANDS_STILL: Duration = Duration::from_secs(2);
/// A chunk is late if it is read for this many times the median of the other loaders' last reads.
const LATE_FACTOR: u32 = 3;
/// Training waits for a loader that reads a chunk for this many times that median.
const SLOW_FACTOR: u32 = 2;
/// Time for which such a wait counts. Dense workers report their waits about once a second.
const AWAITED_COUNTS: Duration = Duration::from_secs(3);
/// Time without any lease after which a slow loader gets a chunk out of turn. The others may be
/// dead.
const OUT_OF_TURN: Duration = Duration::from_secs(5);
/// The most chunks with a reader, and with two readers, that are remembered.
const REMEMBERED: usize = 256;

/// The epoch and the number of a chunk.
pub type ChunkNumber = (u32, u64);

/// See the module documentation.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct LoaderPace {
    shares: Shares,
    /// Chunks leased to each loader since the last change of a share.
    taken: BTreeMap<u32, u64>,
    /// Chunks that two loaders read. The second report of such a chunk is no error.
    read_twice: BTreeSet<ChunkNumber>,
    #[serde(skip)]
    reading: BTreeMap<ChunkNumber, Reading>,
    /// How long each loader read its last chunk.
    #[serde(skip)]
    last_reads: BTreeMap<u32, Duration>,
    /// The loader of the last chunk that arrived late, and the time.
    #[serde(skip)]
    awaited: Option<(u32, Instant)>,
    #[serde(skip)]
    leased: Option<Instant>,
    /// The rows trained so far, and since when that number stands.
    #[serde(skip)]
    trained: Option<(u64, Instant)>,
}

/// A chunk that its loader reads.
#[derive(Debug, Clone, Copy)]
struct Reading {
    loader: u32,
    batches: u64,
    since: Instant,
}

impl LoaderPace {
    /// Whether `loader` may have the next chunk now. `loaders` of them are at work.
    pub fn may_lease(&self, loader: u32, loaders: u32, now: Instant) -> bool {
        if !self.is_slow(loader) {
            return true;
        }
        let usual = (0..loaders).filter(|other| *other != loader && !self.is_slow(*other));
        let Some(most) = usual.map(|other| self.taken_by(other)).max() else { return true };
        let is_its_turn = (self.taken_by(loader) + 1) * u64::from(EVEN) <= u64::from(self.weight(loader)) * most;
        is_its_turn || self.leased.is_none_or(|leased| now.saturating_duration_since(leased) >= OUT_OF_TURN)
    }

    /// The loaders' shares of the chunks.
    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Whether the loader gets fewer chunks than the others.
    pub fn is_slow(&self, loader: u32) -> bool {
        self.weight(loader) < EVEN
    }

    fn weight(&self, loader: u32) -> u32 {
        self.shares.weight(loader).max(CHUNKS.least)
    }

    fn taken_by(&self, loader: u32) -> u64 {
        self.taken.get(&loader).copied().unwrap_or(0)
    }

    /// A loader has leased a chunk of so many batches.
    pub fn leased(&mut self, chunk: ChunkNumber, loader: u32, batches: u64, now: Instant) {
        *self.taken.entry(loader).or_default() += 1;
        self.leased = Some(now);
        self.reading.insert(chunk, Reading { loader, batches, since: now });
        // The chunk of a loader that died stays otherwise.
        if self.reading.len() > REMEMBERED {
            self.reading.pop_first();
        }
    }

    /// The first chunk that was not read arrives. Training has waited for its loader if that took
    /// much longer for it than the others do.
    pub fn arrives(&mut self, chunk: ChunkNumber, now: Instant) {
        let Some(Reading { loader, since, .. }) = self.reading.get(&chunk).copied() else { return };
        let time = now.saturating_duration_since(since);
        if self.usual_read(loader).is_some_and(|usual| time >= usual * SLOW_FACTOR) {
            self.awaited = Some((loader, now));
        }
    }

    /// The loader that training has waited for lately.
    pub fn awaited(&self, now: Instant) -> Option<u32> {
        let is_recent = |at: &Instant| now.saturating_duration_since(*at) < AWAITED_COUNTS;
        self.awaited.filter(|(_, at)| is_recent(at)).map(|(loader, _)| loader)
    }

    /// The loader that leased a chunk and still reads it.
    pub fn reader_of(&self, chunk: ChunkNumber) -> Option<u32> {
        self.reading.get(&chunk).map(|reading| reading.loader)
    }

    /// A loader has read a chunk. Only the loader that leased it is measured: a second one reads
    /// it beside its own chunks.
    pub fn read(&mut self, chunk: ChunkNumber, loader: u32, now: Instant) {
        let Some(reading) = self.reading.get(&chunk).copied().filter(|reading| reading.loader == loader) else {
            return;
        };
        self.reading.remove(&chunk);
        let time = now.saturating_duration_since(reading.since);
        self.last_reads.insert(loader, time);
        self.shares.record(loader, reading.batches as f64, time.as_secs_f64(), now);
    }

    /// Whether training stands still because a chunk that is being read is late. `trained` are the
    /// rows trained so far. Call it at least every few seconds.
    pub fn is_late(&mut self, chunk: ChunkNumber, trained: u64, now: Instant) -> bool {
        let since = self.trained.filter(|(before, _)| *before == trained).map_or(now, |(_, since)| since);
        self.trained = Some((trained, since));
        if now.saturating_duration_since(since) < STANDS_STILL {
            return false;
        }
        let Some(reading) = self.reading.get(&chunk) else { return false };
        let usual = self.usual_read(reading.loader);
        usual.is_some_and(|usual| {
            now.saturating_duration_since(reading.since) >= (usual * LATE_FACTOR).max(STANDS_STILL)
        })
    }

    /// The median of the last reads of the other loaders.
    fn usual_read(&self, loader: u32) -> Option<Duration> {
        let others = self.last_reads.iter().filter(|(other, _)| **other != loader);
        let mut others: Vec<Duration> = others.map(|(_, time)| *time).collect();
        others.sort_unstable();
        others.get(others.len().checked_sub(1)? / 2).copied()
    }

    /// A second loader is to read a chunk.
    pub fn reads_twice(&mut self, chunk: ChunkNumber) {
        self.read_twice.insert(chunk);
        if self.read_twice.len() > REMEMBERED {
            self.read_twice.pop_first();
        }
    }

    /// Whether two loaders read a chunk.
    pub fn is_read_twice(&self, chunk: ChunkNumber) -> bool {
        self.read_twice.contains(&chunk)
    }

    /// Records that training has gone on for `seconds`.
    pub fn passed(&mut self, seconds: f64, now: Instant) {
        self.shares.passed(seconds, now);
    }

    /// Forgets the measurements: the loaders are about to change.
    pub fn forget(&mut self) {
        self.shares.forget();
        self.last_reads.clear();
        self.awaited = None;
        self.trained = None;
    }

    /// Decides at `now` about the share of one of so many loaders. Call it at least every few
    /// seconds.
    pub fn decide(&mut self, loaders: u32, now: Instant) -> Option<ShareChange> {
        let numbers: Vec<u32> = (0..loaders).collect();
        let change = self.shares.decide(&numbers, CHUNKS, now)?;
        self.taken.clear();
        Some(change)
    }

    /// Sets the weight of a loader.
    pub fn set(&mut self, loader: u32, weight: u32) {
        self.shares.set(loader, weight);
        self.taken.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCHES: u64 = 4;

    /// Loaders that each read a chunk at a time, on a clock of milliseconds.
    struct Loaders {
        pace: LoaderPace,
        begun: Instant,
        milliseconds: u64,
        /// By loader: the chunk that it reads, and the time of its end.
        busy: Vec<Option<(ChunkNumber, u64)>>,
        /// Chunks read by each loader.
        read: Vec<u64>,
        next: u64,
    }

    impl Loaders {
        fn new(count: usize) -> Self {
            let (busy, read) = (vec![None; count], vec![0; count]);
            Self { pace: LoaderPace::default(), begun: Instant::now(), milliseconds: 0, busy, read, next: 0 }
        }

        fn now(&self) -> Instant {
            self.begun + Duration::from_millis(self.milliseconds)
        }

        /// A tenth of a second, in which loader i takes `times[i]` milliseconds for a chunk.
        fn tenth(&mut self, times: &[u64]) -> Option<ShareChange> {
            self.milliseconds += 100;
            let now = self.now();
            for (loader, time) in times.iter().enumerate() {
                if let Some((chunk, _)) = self.busy[loader].filter(|(_, until)| *until <= self.milliseconds) {
                    self.pace.read(chunk, loader as u32, now);
                    self.busy[loader] = None;
                    self.read[loader] += 1;
                }
                if self.busy[loader].is_none() && self.pace.may_lease(loader as u32, self.busy.len() as u32, now) {
                    let chunk = (0, self.next);
                    self.next += 1;
                    self.pace.leased(chunk, loader as u32, BATCHES, now);
                    self.busy[loader] = Some((chunk, self.milliseconds + time));
                }
            }
            self.pace.passed(0.1, now);
            self.pace.decide(self.busy.len() as u32, now)
        }

        /// The changes within so many seconds.
        fn run(&mut self, seconds: u64, times: &[u64]) -> Vec<ShareChange> {
            (0..10 * seconds).filter_map(|_| self.tenth(times)).collect()
        }
    }

    #[test]
    fn a_slow_loader_gets_fewer_chunks_and_as_many_again_when_it_is_well() {
        let mut loaders = Loaders::new(3);
        assert_eq!(loaders.run(60, &[300, 300, 300]), []);
        let slow = loaders.run(120, &[300, 3000, 300]);
        assert!(matches!(slow[..], [ShareChange { member: 1, weight: 256..=512, .. }]), "{slow:?}");
        let before = loaders.read.clone();
        loaders.run(60, &[300, 3000, 300]);
        let read: Vec<u64> = loaders.read.iter().zip(&before).map(|(now, before)| now - before).collect();
        assert!(read[1] * 6 < read[0] && read[1] >= 5, "{read:?}");
        let well = loaders.run(120, &[300, 300, 300]);
        assert!(well.iter().all(|change| change.member == 1) && !loaders.pace.is_slow(1), "{well:?}");
    }

    #[test]
    fn a_slow_loader_gets_a_chunk_if_the_others_take_none() {
        let mut pace = LoaderPace::default();
        let now = Instant::now();
        pace.set(1, 128);
        pace.leased((0, 0), 0, BATCHES, now);
        assert!(!pace.may_lease(1, 2, now) && pace.may_lease(0, 2, now));
        assert!(pace.may_lease(1, 2, now + OUT_OF_TURN));
        pace.set(0, 128);
        assert!(pace.may_lease(1, 2, now), "none is faster");
        pace.set(0, EVEN);
        (1..17).for_each(|chunk| pace.leased((0, chunk), 0, BATCHES, now));
        assert!(pace.may_lease(1, 2, now), "one for sixteen");
        pace.leased((0, 17), 1, BATCHES, now);
        assert!(!pace.may_lease(1, 2, now));
    }

    #[test]
    fn a_chunk_is_late_if_training_stands_still_and_others_read_faster() {
        let begun = Instant::now();
        let at = |milliseconds| begun + Duration::from_millis(milliseconds);
        let mut pace = LoaderPace::default();
        pace.leased((0, 0), 0, BATCHES, at(0));
        pace.leased((0, 1), 1, BATCHES, at(0));
        assert!(!pace.is_late((0, 1), 7, at(0)));
        assert!(!pace.is_late((0, 1), 7, at(9000)), "all may be as slow");
        pace.read((0, 0), 1, at(9000));
        assert_eq!(pace.usual_read(1), None, "another loader's chunk");
        pace.read((0, 0), 0, at(900));
        assert!(!pace.is_late((0, 1), 8, at(9000)), "a row was trained");
        assert!(!pace.is_late((0, 1), 8, at(10_900)));
        assert!(pace.is_late((0, 1), 8, at(11_000)));
        pace.leased((0, 2), 0, BATCHES, at(11_000));
        assert!(!pace.is_late((0, 2), 8, at(13_000)), "its peer still reads");
        pace.read((0, 1), 1, at(13_000));
        assert!(!pace.is_late((0, 1), 8, at(99_000)), "it is read");
        assert_eq!((pace.reader_of((0, 2)), pace.reader_of((0, 1))), (Some(0), None));
    }

    #[test]
    fn training_waits_for_the_loader_of_a_chunk_that_takes_longer_than_others() {
        let begun = Instant::now();
        let at = |milliseconds| begun + Duration::from_millis(milliseconds);
        let mut pace = LoaderPace::default();
        let mut arrive = |chunk, loader, since, now| {
            pace.leased((0, chunk), loader, BATCHES, at(since));
            pace.arrives((0, chunk), at(now));
            pace.read((0, chunk), loader, at(now));
            [now, now + 2999, now + 3000].map(|now| pace.awaited(at(now)))
        };
        assert_eq!(arrive(0, 0, 0, 500), [None; 3], "nothing is known of the others");
        assert_eq!(arrive(1, 1, 0, 900), [None; 3], "about as long");
        assert_eq!(arrive(2, 1, 5_000, 6_000), [Some(1), Some(1), None]);
        assert_eq!(arrive(3, 0, 6_000, 6_500), [Some(1), None, None], "its peer came after it");
    }

    #[test]
    fn chunks_with_two_readers_are_remembered_for_a_while() {
        let mut pace = LoaderPace::default();
        (0..300).for_each(|chunk| pace.reads_twice((1, chunk)));
        let known = |chunk| pace.is_read_twice((1, chunk));
        assert_eq!([0, 43, 44, 299].map(known), [false, false, true, true]);
    }
}
