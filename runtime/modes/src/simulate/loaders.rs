//! Loaders under the virtual clock. Each reads one chunk after the other, and the coordinator's
//! [`LoaderPace`] decides which one gets a chunk. A batch waits until its chunk and all chunks
//! before it are read.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::timeline::{Time, nanoseconds, slower_at};
use super::{LoaderSpec, MemberSlowness};
use crate::loader_pace::{ChunkNumber, LoaderPace};

/// Chunks for each loader that may be read before training needs them.
const AHEAD: u64 = 2;

/// A chunk that a loader begins to read.
pub(super) struct BegunRead {
    pub(super) loader: usize,
    pub(super) chunk: u64,
    /// The time of its end.
    pub(super) until: Time,
}

/// The loaders, and the batches `B` that wait for them.
pub(super) struct Loaders<B> {
    loaders: Vec<Option<MemberSlowness>>,
    seconds_per_chunk: f64,
    /// Batches of dense workers in a chunk.
    chunk_batches: u64,
    /// Global batches in a chunk.
    global_batches: u64,
    /// `None` if loaders take chunks in turns.
    pace: Option<LoaderPace>,
    /// The virtual time 0.
    origin: Instant,
    decided: Time,
    is_reading: Vec<bool>,
    /// Chunks that a second loader is to read, each with its first one.
    again: VecDeque<(u64, usize)>,
    /// Chunks before this one are leased.
    next: u64,
    /// Chunks before this one are read, and so are these.
    first_unread: u64,
    read: BTreeSet<u64>,
    /// Batches requested so far.
    requested: u64,
    /// By chunk. At most the batches that dense workers look up at a time.
    waiting: BTreeMap<u64, Vec<B>>,
}

impl<B> Loaders<B> {
    /// `rows` are the rows of a dense worker's batch.
    pub(super) fn new(spec: &LoaderSpec, rows: u32) -> Self {
        let count = spec.loaders.len();
        Self {
            loaders: spec.loaders.clone(),
            seconds_per_chunk: spec.seconds_per_row * spec.chunk_rows as f64,
            chunk_batches: (spec.chunk_rows / u64::from(rows)).max(1),
            global_batches: spec.chunk_batches,
            pace: (spec.chunks_move && count > 1).then(LoaderPace::default),
            origin: Instant::now(),
            decided: 0,
            is_reading: vec![false; count],
            again: VecDeque::new(),
            next: 0,
            first_unread: 0,
            read: BTreeSet::new(),
            requested: 0,
            waiting: BTreeMap::new(),
        }
    }

    /// A dense worker needs a batch, which is number `position` of all. Returns it if it is read.
    pub(super) fn request(&mut self, position: u64, batch: B) -> Option<B> {
        self.requested = self.requested.max(position + 1);
        let chunk = position / self.chunk_batches;
        if chunk < self.first_unread {
            return Some(batch);
        }
        self.waiting.entry(chunk).or_default().push(batch);
        None
    }

    /// Has each free loader begin a chunk if it may.
    pub(super) fn begin(&mut self, now: Time) -> Vec<BegunRead> {
        let mut begun = Vec::new();
        for loader in 0..self.loaders.len() {
            if self.is_reading[loader] {
                continue;
            }
            let Some(chunk) = self.lease(loader, now) else { continue };
            self.is_reading[loader] = true;
            let seconds = self.seconds_per_chunk * slower_at(self.loaders[loader], now);
            begun.push(BegunRead { loader, chunk, until: now + nanoseconds(seconds) });
        }
        begun
    }

    /// The chunk that a loader reads next.
    fn lease(&mut self, loader: usize, now: Time) -> Option<u64> {
        if let Some(place) = self.again.iter().position(|(_, first)| *first != loader) {
            return self.again.remove(place).map(|(chunk, _)| chunk);
        }
        let count = self.loaders.len();
        let at = self.at(now);
        let may_lease = self.pace.as_ref().is_none_or(|pace| pace.may_lease(loader as u32, count as u32, at));
        if !may_lease || self.next >= self.requested / self.chunk_batches + AHEAD * count as u64 {
            return None;
        }
        let chunk = self.next;
        self.next += 1;
        if let Some(pace) = &mut self.pace {
            pace.leased(number(chunk), loader as u32, self.global_batches, at);
            if pace.is_slow(loader as u32) {
                pace.reads_twice(number(chunk));
                self.again.push_back((chunk, loader));
            }
        }
        Some(chunk)
    }

    /// A loader has read a chunk. Returns the batches that waited for it.
    pub(super) fn has_read(&mut self, loader: usize, chunk: u64, now: Time) -> Vec<B> {
        self.is_reading[loader] = false;
        let at = self.at(now);
        if let Some(pace) = &mut self.pace {
            pace.read(number(chunk), loader as u32, at);
        }
        if chunk >= self.first_unread {
            self.read.insert(chunk);
        }
        while self.read.remove(&self.first_unread) {
            self.first_unread += 1;
        }
        let (first_unread, read) = (self.first_unread, &self.read);
        self.again.retain(|(chunk, _)| *chunk >= first_unread && !read.contains(chunk));
        let later = self.waiting.split_off(&first_unread);
        std::mem::replace(&mut self.waiting, later).into_values().flatten().collect()
    }

    /// Decides about the shares, and whether a second loader reads the chunk that training waits
    /// for. Call it once a second.
    pub(super) fn look(&mut self, now: Time) {
        let at = self.at(now);
        let Some(pace) = &mut self.pace else { return };
        pace.passed((now - self.decided) as f64 * 1e-9, at);
        self.decided = now;
        // The new shares hold from the next chunk on.
        let _change = pace.decide(self.loaders.len() as u32, at);
        let late = number(self.first_unread);
        if pace.is_late(late, self.requested, at)
            && !pace.is_read_twice(late)
            && let Some(reader) = pace.reader_of(late)
        {
            pace.reads_twice(late);
            self.again.push_back((self.first_unread, reader as usize));
        }
    }

    fn at(&self, now: Time) -> Instant {
        self.origin + Duration::from_nanos(now)
    }
}

/// All chunks are of one pass.
fn number(chunk: u64) -> ChunkNumber {
    (0, chunk)
}
