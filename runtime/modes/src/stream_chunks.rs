//! Chunks of a stream. A chunk is one global batch: records of one partition, read together. The
//! partitions take turns. A chunk has fewer rows than others if its partition has no more, or if
//! its rows have waited for long enough.
//!
//! A partition has at most one chunk on lease. Once a loader has read it, the beginning of the next
//! one is known: bad records and gaps between offsets are no rows. A chunk
//! is begun only where a loader has seen a good row, so no chunk is empty. So the chunks depend on
//! the records alone, and not on the number of loaders, as long as no record arrives late.
//!
//! The parts of a stream may also be files, whose good rows are counted before they are read
//! ([`StreamParts::Whole`]). They are read one after the other. The end of a chunk is then known
//! when it begins, so loaders read several chunks of a file at once.

use std::collections::{BTreeMap, BTreeSet};

use rectrain_kinds::{LostRecords, PartId, PartitionState, Position, Segment, SegmentRead, StreamEnd};
use serde::{Deserialize, Serialize};

/// Reports of one loader in a row after which a partition counts as shorter than it was. A loader
/// may have looked at the brokers before the last rows arrived, or have asked an earlier leader.
const MOST_SHORT_REPORTS: u32 = 3;

/// The settings of a stream that the order of its chunks depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamPlan {
    /// Rows of a full chunk.
    pub chunk_rows: u64,
    /// Where training ends; `None`: never.
    pub until: Option<StreamEnd>,
    /// What happens if records are gone before they were trained.
    pub lost_records: LostRecords,
    /// The kind of the parts.
    pub parts: StreamParts,
}

/// The kind of a stream's parts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum StreamParts {
    /// Partitions that grow. They take turns.
    #[default]
    Growing,
    /// Files, each with a known number of good rows. A chunk is the next rows of the first file
    /// that has any left. A stream of files ends once it is closed.
    Whole,
}

/// The place in a stream before a chunk: all that a run needs to go on there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StreamPlace {
    /// The partitions.
    pub partitions: Vec<PartitionPlace>,
    /// The partition whose turn was last.
    pub last_turn: Option<PartId>,
    /// The chunks that had been begun, from this place on.
    pub begun: Vec<BegunChunk>,
}

/// The place in a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PartitionPlace {
    /// The partition.
    pub part: PartId,
    /// Records before this offset are in chunks, or were passed over.
    pub next: u64,
}

/// A chunk that has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BegunChunk {
    /// Its records. `until` is the end of the last one if the chunk is read.
    pub segment: Segment,
    /// Whether a loader has read it.
    pub is_read: bool,
}

/// Records that the broker deleted before they were trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// The partition.
    pub part: PartId,
    /// The first offset that is gone.
    pub from: u64,
    /// The first record that the broker still has.
    pub until: u64,
}

/// Why a stream cannot be trained on.
#[derive(Debug, Clone, Copy, thiserror::Error, PartialEq, Eq, Serialize, Deserialize)]
pub enum StreamError {
    /// Records were deleted, and the manifest says to fail then.
    #[error("{} records from offset {} on were deleted before they were trained", .0.until - .0.from, .0.from)]
    Lost(Lost),
    /// The partition is shorter than it was.
    #[error(
        "the partition ends at offset {end}, and rows up to offset {next} were trained: it was truncated or made anew"
    )]
    Shrunk {
        /// The partition.
        part: PartId,
        /// The end of its records now.
        end: u64,
        /// Records before this offset were trained.
        next: u64,
    },
}

impl StreamError {
    /// The partition.
    #[must_use]
    pub const fn part(self) -> PartId {
        match self {
            Self::Lost(lost) => lost.part,
            Self::Shrunk { part, .. } => part,
        }
    }
}

/// A partition, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Partition {
    /// Records before this offset are in chunks, or were passed over.
    next: u64,
    /// The end of the records that may be read.
    end: u64,
    /// Rows before this offset have waited for long enough.
    aged_end: u64,
    /// The chunk on lease.
    on_lease: Option<u64>,
    /// Whether a loader has seen a good row at `next` or behind it.
    has_row: bool,
    /// Training ends here.
    stop: Option<u64>,
}

impl Partition {
    /// The end of the records that are for training.
    fn readable(&self) -> u64 {
        self.stop.unwrap_or(u64::MAX).min(self.end)
    }

    fn waiting(&self) -> u64 {
        self.readable().saturating_sub(self.next)
    }

    /// Whether the rows that wait are enough for a chunk.
    fn is_due(&self, chunk_rows: u64) -> bool {
        let ends = self.stop.is_some_and(|stop| self.end >= stop);
        self.waiting() >= chunk_rows || self.waiting() > 0 && (ends || self.aged_end > self.next)
    }

    fn is_finished(&self) -> bool {
        self.on_lease.is_none() && self.stop.is_some_and(|stop| self.next >= stop)
    }
}

/// Chunks of a stream; see the module's documentation.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct StreamChunks {
    plan: StreamPlan,
    partitions: BTreeMap<PartId, Partition>,
    last_turn: Option<PartId>,
    /// Chunks that an earlier run had begun, by their numbers in this one.
    again: BTreeMap<u64, BegunChunk>,
    /// Chunks from the first one that a later run may read again.
    begun: BTreeMap<u64, BegunChunk>,
    /// Whether a loader has told the state of the partitions.
    is_known: bool,
    /// The number of the next chunk to begin.
    next_chunk: u64,
    /// Records that were deleted before they were trained.
    lost_records: u64,
    /// Whether nothing follows the known files, or the known ends of the partitions.
    #[serde(default)]
    is_closed: bool,
    /// By partition and loader: reports in a row by which the partition ends before its next
    /// offset.
    short_reports: BTreeMap<(PartId, u32), u32>,
}

impl StreamChunks {
    /// The chunks from the start of a job on.
    #[must_use]
    pub fn new(plan: StreamPlan) -> Self {
        Self::resume(plan, &StreamPlace::default())
    }

    /// The chunks from a place on that an earlier run has saved. The first one has number 0.
    #[must_use]
    pub fn resume(plan: StreamPlan, place: &StreamPlace) -> Self {
        let partition = |of: &PartitionPlace| {
            let on_lease = (0..).zip(&place.begun).find(|(_, begun)| !begun.is_read && begun.segment.part == of.part);
            let on_lease = on_lease.map(|(chunk, _)| chunk).filter(|_| plan.parts == StreamParts::Growing);
            (of.part, Partition { next: of.next, end: of.next, aged_end: 0, on_lease, has_row: false, stop: None })
        };
        Self {
            plan,
            partitions: place.partitions.iter().map(partition).collect(),
            last_turn: place.last_turn,
            again: (0..).zip(place.begun.iter().copied()).collect(),
            begun: BTreeMap::new(),
            is_known: false,
            next_chunk: 0,
            lost_records: 0,
            is_closed: false,
            short_reports: BTreeMap::new(),
        }
    }

    /// Whether the parts are files.
    #[must_use]
    pub fn is_of_files(&self) -> bool {
        self.plan.parts == StreamParts::Whole
    }

    /// Nothing follows: no file comes after the known ones, and no record after the known ends of
    /// the partitions. Training ends there.
    pub fn close(&mut self) {
        (self.is_closed, self.is_known) = (true, true);
        if !self.is_of_files() {
            self.partitions.values_mut().for_each(|of| of.stop = of.stop.or(Some(of.end.max(of.next))));
        }
    }

    /// Whether nothing follows the known files, or the known ends of the partitions.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Whether a part is known, and is not forgotten: it has rows that are not in a chunk, or a
    /// chunk that a later run may read again.
    #[must_use]
    pub fn has(&self, part: PartId) -> bool {
        self.partitions.contains_key(&part)
    }

    /// Files with rows that are not in a chunk yet.
    #[must_use]
    pub fn waiting_parts(&self) -> usize {
        self.partitions.values().filter(|of| of.waiting() > 0).count()
    }

    /// Whether loaders have read all rows of a file.
    #[must_use]
    pub fn is_read(&self, part: PartId) -> bool {
        let mut begun = self.begun.values().chain(self.again.values());
        let is_waiting = self.partitions.get(&part).is_some_and(|of| of.waiting() > 0);
        !is_waiting && begun.all(|begun| begun.segment.part != part || begun.is_read)
    }

    /// The rows that a chunk of a file must have.
    #[must_use]
    pub fn expected_rows(&self, chunk: u64) -> Option<u64> {
        let begun = self.begun.get(&chunk).filter(|_| self.is_of_files())?;
        Some(begun.segment.until - begun.segment.from)
    }

    /// Loader `loader` has found the partitions in this state. Returns the records that are lost.
    ///
    /// # Errors
    /// Records are lost and the plan says to fail. A partition is shorter than it was at the start
    /// of the run, or by several reports of a loader.
    pub fn found(&mut self, loader: u32, states: &[PartitionState]) -> Result<Vec<Lost>, StreamError> {
        let is_first = !self.is_known;
        let mut lost = if is_first { self.drop_deleted(states) } else { Vec::new() };
        let known: BTreeSet<u32> = self.partitions.keys().map(|part| topic_of(*part)).collect();
        let has_start = is_first && !self.is_of_files();
        for state in states {
            let starts = has_start && !known.contains(&topic_of(state.part));
            let part = self.partitions.entry(state.part).or_insert_with(|| Partition::new(state, starts));
            if state.end < part.next {
                let reports = self.short_reports.entry((state.part, loader)).or_default();
                *reports += 1;
                if is_first || *reports >= MOST_SHORT_REPORTS {
                    return Err(StreamError::Shrunk { part: state.part, end: state.end, next: part.next });
                }
                continue;
            }
            self.short_reports.retain(|(of, _), _| *of != state.part);
            // A chunk on lease begins at `next`. Its loader finds that records are gone.
            if state.begin > part.next {
                lost.push(Lost { part: state.part, from: part.next, until: state.begin });
                (part.next, part.has_row) = (state.begin, false);
            }
            part.end = part.end.max(state.end);
            part.aged_end = part.aged_end.max(state.aged_end);
            if self.plan.parts == StreamParts::Whole {
                part.stop = Some(part.end);
            } else if is_first && self.plan.until == Some(StreamEnd::Latest) {
                part.stop = Some(state.end.max(part.next));
            } else {
                part.stop = part.stop.or(state.stop.map(|stop| stop.max(part.next)));
            }
        }
        if !states.is_empty() {
            self.is_known = true;
            self.end_others();
        }
        self.lost_records += lost.iter().map(|lost| lost.until - lost.from).sum::<u64>();
        match (self.plan.lost_records, lost.first()) {
            (LostRecords::Fail, Some(first)) => Err(StreamError::Lost(*first)),
            _ => Ok(lost),
        }
    }

    /// A run up to the latest records reads no partition that the first report lacks. All its
    /// records are later ones. The same holds behind the end of a closed stream.
    fn end_others(&mut self) {
        let is_ended = self.is_closed && !self.is_of_files();
        if is_ended || self.plan.until == Some(StreamEnd::Latest) {
            self.partitions.values_mut().for_each(|part| part.stop = part.stop.or(Some(part.next)));
        }
    }

    /// Drops the chunks of an earlier run whose records are gone, before the first chunk begins.
    fn drop_deleted(&mut self, states: &[PartitionState]) -> Vec<Lost> {
        let begin_of = |part: PartId| states.iter().find(|state| state.part == part).map_or(0, |state| state.begin);
        let is_whole = |begun: &BegunChunk| begun.segment.from >= begin_of(begun.segment.part);
        let begun = std::mem::take(&mut self.again).into_values();
        let (whole, deleted): (Vec<BegunChunk>, Vec<BegunChunk>) = begun.partition(is_whole);
        // An unread chunk begins at the next offset of its partition, whose loss is noted there. A
        // chunk of a file never does.
        let is_of_files = self.is_of_files();
        let read = deleted.iter().filter(|begun| begun.is_read || is_of_files).map(|begun| begun.segment);
        let lost = read.map(|Segment { part, from, until }| Lost { part, from, until }).collect();
        self.again = (0..).zip(whole).collect();
        if is_of_files {
            return lost;
        }
        for (part, of) in &mut self.partitions {
            let is_on_lease = |begun: &BegunChunk| !begun.is_read && begun.segment.part == *part;
            of.on_lease = self.again.iter().find(|(_, begun)| is_on_lease(begun)).map(|(chunk, _)| *chunk);
        }
        lost
    }

    /// The segments in which loaders should look for a good row, before a chunk begins there.
    #[must_use]
    pub fn to_probe(&self) -> Vec<Segment> {
        if self.is_of_files() {
            return Vec::new();
        }
        let wants = |of: &Partition| of.on_lease.is_none() && !of.has_row && of.is_due(self.plan.chunk_rows);
        let wanted = self.partitions.iter().filter(|(_, of)| wants(of));
        wanted.map(|(part, of)| Segment { part: *part, from: of.next, until: of.readable() }).collect()
    }

    /// A loader has looked for a good row in a segment. Returns whether it counts: another loader
    /// may have looked before. If it counts and there is no row, its bad rows count as skipped.
    pub fn probed(&mut self, segment: Segment, read: SegmentRead) -> bool {
        let Some(of) = self.partitions.get_mut(&segment.part) else { return false };
        if of.on_lease.is_some() || of.has_row || of.next != segment.from {
            return false;
        }
        of.has_row = read.more;
        if !read.more {
            of.next = read.next.clamp(of.next, segment.until);
        }
        true
    }

    /// Begins a chunk. `None`: no partition has rows enough, or the one whose turn it is waits for
    /// a loader. No chunk begins before the state of the partitions is known: records of a chunk
    /// that an earlier run had begun may be gone.
    pub fn begin(&mut self, chunk: u64) -> Option<Segment> {
        if !self.is_known {
            return None;
        }
        let begun = match self.again.remove(&chunk) {
            Some(again) => again,
            None => BegunChunk { segment: self.next_segment(chunk)?, is_read: false },
        };
        self.next_chunk = self.next_chunk.max(chunk + 1);
        self.begun.insert(chunk, begun);
        Some(begun.segment)
    }

    fn next_segment(&mut self, chunk: u64) -> Option<Segment> {
        if self.is_of_files() {
            return self.next_rows_of_a_file();
        }
        let part = self.next_turn()?;
        let of = self.partitions.get_mut(&part)?;
        if of.on_lease.is_some() || !of.has_row {
            return None;
        }
        of.on_lease = Some(chunk);
        self.last_turn = Some(part);
        Some(Segment { part, from: of.next, until: of.readable() })
    }

    /// The next rows of the first file that has any left.
    fn next_rows_of_a_file(&mut self) -> Option<Segment> {
        let chunk_rows = self.plan.chunk_rows;
        let (part, of) = self.partitions.iter_mut().find(|(_, of)| of.waiting() > 0)?;
        let until = of.readable().min(of.next.saturating_add(chunk_rows));
        let segment = Segment { part: *part, from: of.next, until };
        of.next = until;
        Some(segment)
    }

    /// The first partition after the last turn that has rows enough, or has a chunk on lease.
    fn next_turn(&self) -> Option<PartId> {
        let has_turn = |(_, of): &(&PartId, &Partition)| of.on_lease.is_some() || of.is_due(self.plan.chunk_rows);
        let later = |(part, _): &(&PartId, &Partition)| self.last_turn.is_none_or(|last| **part > last);
        let (mut after, mut before) = (self.partitions.iter().filter(later), self.partitions.iter());
        after.find(has_turn).or_else(|| before.find(has_turn)).map(|(part, _)| *part)
    }

    /// A loader has read chunk `chunk`. Returns its records.
    pub fn read(&mut self, chunk: u64, read: SegmentRead) -> Option<Segment> {
        let is_of_files = self.is_of_files();
        let begun = self.begun.get_mut(&chunk)?;
        if is_of_files {
            begun.is_read = true;
        } else if !begun.is_read {
            begun.segment.until = read.next.clamp(begun.segment.from, begun.segment.until);
            begun.is_read = true;
            if let Some(of) = self.partitions.get_mut(&begun.segment.part) {
                of.next = of.next.max(begun.segment.until);
                (of.has_row, of.on_lease) = (read.more, None);
            }
        }
        Some(begun.segment)
    }

    /// The records of a chunk that has begun and is not forgotten.
    #[must_use]
    pub fn segment(&self, chunk: u64) -> Option<Segment> {
        self.begun.get(&chunk).map(|begun| begun.segment)
    }

    /// Forgets the chunks before `chunk`. No later run reads them again.
    pub fn forget_before(&mut self, chunk: u64) {
        self.begun = self.begun.split_off(&chunk);
        if self.is_of_files() {
            let needed = self.needed_parts(chunk);
            self.partitions.retain(|part, of| !of.is_finished() || needed.contains(part));
        }
    }

    /// The parts of the chunks from `chunk` on.
    fn needed_parts(&self, chunk: u64) -> BTreeSet<PartId> {
        let begun = self.begun.range(chunk..).chain(self.again.range(chunk..));
        begun.map(|(_, begun)| begun.segment.part).collect()
    }

    /// The place before `chunk`, the first one that is not trained as a whole.
    #[must_use]
    pub fn place(&self, chunk: u64) -> StreamPlace {
        let place = |(part, of): (&PartId, &Partition)| PartitionPlace { part: *part, next: of.next };
        let begun = self.begun.range(chunk..).chain(self.again.range(chunk..));
        let needed = self.needed_parts(chunk);
        let is_needed =
            |(part, of): &(&PartId, &Partition)| !self.is_of_files() || !of.is_finished() || needed.contains(*part);
        StreamPlace {
            partitions: self.partitions.iter().filter(is_needed).map(place).collect(),
            last_turn: self.last_turn,
            begun: begun.map(|(_, begun)| *begun).collect(),
        }
    }

    /// Whether no chunk follows the ones that have begun.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        if self.is_of_files() {
            return self.is_closed && self.is_at_rest();
        }
        self.is_known && self.again.is_empty() && self.partitions.values().all(Partition::is_finished)
    }

    /// Chunks that have begun.
    #[must_use]
    pub fn chunks_begun(&self) -> u64 {
        self.next_chunk
    }

    /// Where training ends; `None`: never.
    #[must_use]
    pub const fn until(&self) -> Option<StreamEnd> {
        self.plan.until
    }

    /// The sum of the ends of the partitions. It grows with each new record.
    #[must_use]
    pub fn ends(&self) -> u64 {
        self.partitions.values().map(|of| of.end).sum()
    }

    /// Records that wait to be read. Gaps between offsets count, too.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.partitions.values().map(Partition::waiting).sum()
    }

    /// The partitions. One loader reads each at a time. `None` for files, whose rows several
    /// loaders read at once.
    #[must_use]
    pub fn partitions(&self) -> Option<usize> {
        (!self.is_of_files()).then_some(self.partitions.len())
    }

    /// Whether every row that may be read is in a chunk that loaders have read.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        let rests = |of: &Partition| of.on_lease.is_none() && !of.is_due(self.plan.chunk_rows);
        if self.is_of_files() && self.begun.values().any(|begun| !begun.is_read) {
            return false;
        }
        // Before the first file comes, nothing is known of any.
        (self.is_known || self.is_of_files()) && self.again.is_empty() && self.partitions.values().all(rests)
    }

    /// Records that were deleted before they were trained.
    #[must_use]
    pub const fn lost_records(&self) -> u64 {
        self.lost_records
    }

    /// Counts records as lost that no chunk has and no broker has deleted: training went back, and
    /// leaves them out.
    pub const fn count_lost(&mut self, records: u64) {
        self.lost_records += records;
    }

    /// The state of the partitions: the next offset to read, and the end.
    pub fn positions(&self) -> impl Iterator<Item = (Position, u64)> {
        self.partitions.iter().map(|(part, of)| (Position::new(part.0, of.next), of.end))
    }
}

/// The number of a partition's topic.
fn topic_of(part: PartId) -> u32 {
    part.topic_and_partition().0
}

impl Partition {
    /// A partition that no checkpoint has. It begins at its start if its topic is new to the job.
    /// A partition that a known topic has gained is read from its first record.
    fn new(state: &PartitionState, starts: bool) -> Self {
        let next = if starts { state.start } else { state.begin };
        Self { next, end: state.end.max(next), aged_end: 0, on_lease: None, has_row: false, stop: None }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PLAN: StreamPlan = StreamPlan {
        chunk_rows: 4,
        until: Some(StreamEnd::Latest),
        lost_records: LostRecords::Fail,
        parts: StreamParts::Growing,
    };

    fn state(part: u32, end: u64) -> PartitionState {
        PartitionState { part: PartId(part), begin: 0, end, aged_end: 0, start: 0, stop: None }
    }

    /// Takes all chunks that may begin. Each record is a row. Returns their segments as text.
    fn drain(chunks: &mut StreamChunks, from: u64) -> Vec<String> {
        let mut taken = Vec::new();
        loop {
            for segment in chunks.to_probe() {
                chunks.probed(segment, SegmentRead { next: segment.from, more: true });
            }
            let chunk = from + taken.len() as u64;
            let Some(Segment { part, from, until }) = chunks.begin(chunk) else { return taken };
            let next = until.min(from + chunks.plan.chunk_rows);
            chunks.read(chunk, SegmentRead { next, more: next < until });
            taken.push(format!("{}: {from} to {next}", part.0));
        }
    }

    #[test]
    fn a_partition_ends_before_the_first_record_that_is_too_late() {
        let mut chunks = StreamChunks::new(StreamPlan { until: Some(StreamEnd::Timestamp(9)), ..PLAN });
        let with_stop = |part, end, stop| PartitionState { stop, ..state(part, end) };
        chunks.found(0, &[with_stop(0, 10, Some(6)), with_stop(1, 5, None)]).unwrap();
        assert_eq!(drain(&mut chunks, 0), ["0: 0 to 4", "1: 0 to 4", "0: 4 to 6"]);
        assert!(!chunks.is_finished(), "partition 1 has no end yet");
        chunks.found(0, &[with_stop(0, 12, Some(6)), with_stop(1, 9, Some(7))]).unwrap();
        assert_eq!(drain(&mut chunks, 3), ["1: 4 to 7"]);
        assert!(chunks.is_finished());
    }

    #[test]
    fn a_closed_stream_ends_behind_the_records_that_are_known() {
        let mut chunks = StreamChunks::new(StreamPlan { until: Some(StreamEnd::IdleSeconds(5)), ..PLAN });
        chunks.found(0, &[state(0, 6)]).unwrap();
        assert_eq!((drain(&mut chunks, 0), chunks.ends()), (vec!["0: 0 to 4".to_owned()], 6));
        assert!(chunks.is_at_rest() && !chunks.is_finished());
        chunks.close();
        // Records and partitions that come now are for the next run.
        chunks.found(0, &[state(0, 9), state(1, 9)]).unwrap();
        assert_eq!(drain(&mut chunks, 1), ["0: 4 to 6"]);
        assert!(chunks.is_finished());
    }

    /// The topic: by partition, whether each offset has a good row.
    type Topic = Vec<Vec<bool>>;

    /// Reads up to `rows` good rows of a segment, and looks for another one behind them.
    fn read(topic: &Topic, segment: Segment, rows: usize) -> (Vec<u64>, SegmentRead) {
        let good = |at: &u64| topic[segment.part.0 as usize][*at as usize];
        let offsets: Vec<u64> = (segment.from..segment.until).filter(good).collect();
        let (taken, left) = offsets.split_at(rows.min(offsets.len()));
        (taken.to_vec(), SegmentRead { next: left.first().copied().unwrap_or(segment.until), more: !left.is_empty() })
    }

    fn probe(chunks: &mut StreamChunks, topic: &Topic) {
        for segment in chunks.to_probe() {
            let (_, found) = read(topic, segment, 0);
            chunks.probed(segment, found);
        }
    }

    fn states(topic: &Topic) -> Vec<PartitionState> {
        (0..).zip(topic).map(|(part, records)| state(part, records.len() as u64)).collect()
    }

    /// The rows of each chunk: its partition and offsets.
    type Rows = BTreeMap<u64, (u32, Vec<u64>)>;

    /// Trains with `loaders` loaders until the end, or until `chunks` chunks have begun. Returns
    /// the rows of the chunks that were read.
    fn run(chunks: &mut StreamChunks, topic: &Topic, loaders: usize, choices: &[usize], limit: u64) -> Rows {
        chunks.found(0, &states(topic)).unwrap();
        let mut held: Vec<Option<(u64, Segment)>> = vec![None; loaders];
        let (mut rows, mut next) = (Rows::new(), 0);
        for turn in choices.iter().chain(&[0, 1, 2, 3, 4]).cycle().take(4_000) {
            probe(chunks, topic);
            match held[turn % loaders].take() {
                Some((chunk, segment)) => {
                    let (offsets, found) = read(topic, segment, PLAN.chunk_rows as usize);
                    chunks.read(chunk, found).unwrap();
                    rows.insert(chunk, (segment.part.0, offsets));
                }
                None if next < limit => {
                    if let Some(segment) = chunks.begin(next) {
                        held[turn % loaders] = Some((next, segment));
                        next += 1;
                    }
                }
                None => {}
            }
        }
        rows
    }

    fn topics() -> impl Strategy<Value = Topic> {
        prop::collection::vec(prop::collection::vec(prop::bool::weighted(0.8), 0..40), 1..5)
    }

    proptest! {
        #[test]
        fn loaders_in_any_order_read_each_good_row_once_in_the_same_chunks(
            topic in topics(), loaders in 1usize..5, choices in prop::collection::vec(any::<usize>(), 1..60),
        ) {
            let mut one = StreamChunks::new(PLAN);
            let expected = run(&mut one, &topic, 1, &[0], u64::MAX);
            prop_assert!(one.is_finished());
            let mut several = StreamChunks::new(PLAN);
            prop_assert_eq!(&run(&mut several, &topic, loaders, &choices, u64::MAX), &expected);
            let mut seen = BTreeSet::new();
            for (part, offsets) in expected.values() {
                prop_assert!((1..=4).contains(&offsets.len()), "{offsets:?}");
                for offset in offsets {
                    prop_assert!(seen.insert((*part, *offset)), "{part} {offset} twice");
                }
            }
            let good = |(part, records): (u32, &Vec<bool>)| -> Vec<(u32, u64)> {
                (0..).zip(records).filter(|(_, good)| **good).map(|(at, _)| (part, at)).collect()
            };
            prop_assert_eq!(seen.into_iter().collect::<Vec<_>>(), (0..).zip(&topic).flat_map(good).collect::<Vec<_>>());
            prop_assert_eq!(one.chunks_begun(), expected.len() as u64);
        }

        #[test]
        fn a_run_resumes_before_any_chunk_with_the_same_chunks(
            topic in topics(), loaders in 1usize..5, at in any::<prop::sample::Index>(), ahead in 0u64..6,
            choices in prop::collection::vec(any::<usize>(), 1..60),
        ) {
            let expected = run(&mut StreamChunks::new(PLAN), &topic, 1, &[0], u64::MAX);
            let at = at.index(expected.len() + 1) as u64;
            let mut first = StreamChunks::new(PLAN);
            run(&mut first, &topic, loaders, &choices, at + ahead);
            first.forget_before(at);
            let place = first.place(at);
            let json = serde_json::to_string(&place).unwrap();
            let place: StreamPlace = serde_json::from_str(&json).unwrap();
            let rest = run(&mut StreamChunks::resume(PLAN, &place), &topic, loaders, &choices, u64::MAX);
            let rest: Rows = rest.into_iter().map(|(chunk, rows)| (chunk + at, rows)).collect();
            prop_assert_eq!(rest, expected.into_iter().filter(|(chunk, _)| *chunk >= at).collect::<Rows>());
        }
    }

    #[test]
    fn a_partition_without_an_end_waits_for_a_chunk_or_old_rows() {
        let mut chunks = StreamChunks::new(StreamPlan { until: None, ..PLAN });
        let mut topic: Topic = vec![vec![true; 3], vec![true; 9]];
        assert_eq!(chunks.begin(0), None, "nothing is known");
        chunks.found(0, &states(&topic)).unwrap();
        probe(&mut chunks, &topic);
        let segment = Segment { part: PartId(1), from: 0, until: 9 };
        assert_eq!((chunks.begin(0), chunks.begin(1), chunks.waiting()), (Some(segment), None, 12));
        chunks.read(0, SegmentRead { next: 4, more: true });
        chunks.found(0, &[PartitionState { aged_end: 2, ..state(0, 3) }]).unwrap();
        assert_eq!(chunks.begin(1), None, "no loader has seen a row");
        probe(&mut chunks, &topic);
        assert_eq!(chunks.begin(1), Some(Segment { part: PartId(0), from: 0, until: 3 }));
        chunks.read(1, SegmentRead { next: 3, more: false });
        assert_eq!(chunks.begin(2), Some(Segment { part: PartId(1), from: 4, until: 9 }));
        chunks.read(2, SegmentRead { next: 8, more: true });
        assert!(chunks.is_at_rest() && !chunks.is_finished());
        topic.push(vec![true; 5]);
        chunks.found(0, &[PartitionState { start: 5, ..state(2, 5) }]).unwrap();
        probe(&mut chunks, &topic);
        let added = Segment { part: PartId(2), from: 0, until: 5 };
        assert_eq!(chunks.begin(3), Some(added), "an added partition is read from its first record");
    }

    #[test]
    fn a_partition_without_a_good_row_gives_no_chunk() {
        let topic: Topic = vec![vec![false; 9], vec![true; 2]];
        let mut chunks = StreamChunks::new(PLAN);
        let rows = run(&mut chunks, &topic, 2, &[0, 1], u64::MAX);
        assert_eq!((rows, chunks.is_finished()), (Rows::from([(0, (1, vec![0, 1]))]), true));
    }

    #[test]
    fn records_that_are_gone_are_told_and_counted() {
        let place =
            StreamPlace { partitions: vec![PartitionPlace { part: PartId(0), next: 5 }], ..StreamPlace::default() };
        let gone = PartitionState { begin: 8, ..state(0, 20) };
        let lost = Lost { part: PartId(0), from: 5, until: 8 };
        assert_eq!(StreamChunks::resume(PLAN, &place).found(0, &[gone]), Err(StreamError::Lost(lost)));
        let mut chunks = StreamChunks::resume(StreamPlan { lost_records: LostRecords::Skip, ..PLAN }, &place);
        assert_eq!(chunks.found(0, &[gone]), Ok(vec![lost]));
        assert_eq!((chunks.lost_records(), chunks.found(0, &[gone])), (3, Ok(vec![])));
        let shrunk = StreamError::Shrunk { part: PartId(0), end: 4, next: 5 };
        assert_eq!(StreamChunks::resume(PLAN, &place).found(0, &[state(0, 4)]), Err(shrunk));
    }

    #[test]
    fn records_between_the_start_and_the_first_one_are_lost() {
        let committed = PartitionState { begin: 8, start: 5, ..state(0, 20) };
        let lost = Lost { part: PartId(0), from: 5, until: 8 };
        assert_eq!(StreamChunks::new(PLAN).found(0, &[committed]), Err(StreamError::Lost(lost)));
        let mut chunks = StreamChunks::new(StreamPlan { lost_records: LostRecords::Skip, ..PLAN });
        assert_eq!(chunks.found(0, &[committed, PartitionState { start: 7, ..state(1, 9) }]), Ok(vec![lost]));
        assert_eq!((chunks.lost_records(), chunks.waiting()), (3, 14));
    }

    #[test]
    fn a_gained_partition_is_read_from_its_first_record_in_a_resumed_run() {
        let place =
            StreamPlace { partitions: vec![PartitionPlace { part: PartId(0), next: 5 }], ..StreamPlace::default() };
        let mut chunks = StreamChunks::resume(PLAN, &place);
        let part = PartId::of_partition(1, 0);
        let latest = |part| PartitionState { part, start: 9, ..state(0, 9) };
        chunks.found(0, &[latest(PartId(0)), latest(PartId(1)), latest(part)]).unwrap();
        let positions: Vec<_> = chunks.positions().collect();
        let expected = [(0, 5), (1, 0), (part.0, 9)].map(|(part, next)| (Position::new(part, next), 9));
        assert_eq!(positions, expected);
    }

    #[test]
    fn a_partition_is_shorter_only_if_a_loader_finds_it_so_again_and_again() {
        let topic: Topic = vec![vec![true; 9]];
        let mut chunks = StreamChunks::new(PLAN);
        chunks.found(0, &states(&topic)).unwrap();
        probe(&mut chunks, &topic);
        chunks.begin(0).unwrap();
        chunks.read(0, SegmentRead { next: 4, more: true });
        // Several loaders looked before the records came.
        for loader in 0..9 {
            assert_eq!(chunks.found(loader, &[state(0, 2)]), Ok(vec![]));
        }
        assert_eq!(chunks.found(0, &[state(0, 3)]), Ok(vec![]));
        // One of them sees the records now.
        assert_eq!(chunks.found(1, &[state(0, 9)]), Ok(vec![]));
        let reports = [(); 3].map(|()| chunks.found(0, &[state(0, 3)]));
        let shrunk = StreamError::Shrunk { part: PartId(0), end: 3, next: 4 };
        assert_eq!(reports, [Ok(vec![]), Ok(vec![]), Err(shrunk)]);
    }

    #[test]
    fn a_run_up_to_the_latest_records_ends_before_partitions_that_come_later() {
        let topic: Topic = vec![vec![true; 3], vec![true; 5]];
        let mut chunks = StreamChunks::new(PLAN);
        chunks.found(0, &states(&topic)[..1]).unwrap();
        let rows = run(&mut chunks, &topic, 1, &[0], u64::MAX);
        assert_eq!((rows, chunks.is_finished()), (Rows::from([(0, (0, vec![0, 1, 2]))]), true));
        // A later run reads them from their first record.
        let place = chunks.place(1);
        let rows = run(&mut StreamChunks::resume(PLAN, &place), &topic, 1, &[0], u64::MAX);
        assert_eq!(rows, Rows::from([(0, (1, vec![0, 1, 2, 3])), (1, (1, vec![4]))]));
    }

    #[test]
    fn a_run_up_to_the_latest_records_ends_without_a_topic_that_is_gone() {
        let partitions = [0, 1].map(|part| PartitionPlace { part: PartId(part), next: 3 });
        let place = StreamPlace { partitions: partitions.into(), ..StreamPlace::default() };
        let mut chunks = StreamChunks::resume(PLAN, &place);
        assert!(!chunks.is_finished());
        chunks.found(0, &[state(0, 3)]).unwrap();
        assert!(chunks.is_finished());
    }

    #[test]
    fn no_chunk_of_an_earlier_run_begins_before_the_partitions_are_known() {
        let segments = [(0, 4), (4, 8)].map(|(from, until)| Segment { part: PartId(0), from, until });
        let place = StreamPlace {
            partitions: vec![PartitionPlace { part: PartId(0), next: 8 }],
            last_turn: Some(PartId(0)),
            begun: segments.map(|segment| BegunChunk { segment, is_read: true }).into(),
        };
        let mut chunks = StreamChunks::resume(PLAN, &place);
        assert_eq!(chunks.begin(0), None);
        chunks.found(0, &[state(0, 20)]).unwrap();
        assert_eq!([chunks.begin(0), chunks.begin(1)], segments.map(Some));
    }

    #[test]
    fn chunks_of_an_earlier_run_whose_records_are_gone_are_dropped() {
        let begun = |from, until, is_read| BegunChunk { segment: Segment { part: PartId(0), from, until }, is_read };
        let place = StreamPlace {
            partitions: vec![PartitionPlace { part: PartId(0), next: 8 }],
            last_turn: Some(PartId(0)),
            begun: vec![begun(0, 4, true), begun(4, 8, true), begun(8, 20, false)],
        };
        let plan = StreamPlan { lost_records: LostRecords::Skip, ..PLAN };
        let mut chunks = StreamChunks::resume(plan, &place);
        let lost = chunks.found(0, &[PartitionState { begin: 3, ..state(0, 20) }]).unwrap();
        assert_eq!(lost, [Lost { part: PartId(0), from: 0, until: 4 }]);
        assert_eq!(chunks.begin(0), Some(Segment { part: PartId(0), from: 4, until: 8 }));
        assert_eq!(chunks.begin(1), Some(Segment { part: PartId(0), from: 8, until: 20 }));
        assert_eq!((chunks.begin(2), chunks.lost_records()), (None, 4));
        let mut chunks = StreamChunks::resume(plan, &place);
        let lost = chunks.found(0, &[PartitionState { begin: 10, ..state(0, 20) }]).unwrap();
        assert_eq!(lost.iter().map(|lost| (lost.from, lost.until)).collect::<Vec<_>>(), [(0, 4), (4, 8), (8, 10)]);
        assert_eq!(chunks.to_probe(), [Segment { part: PartId(0), from: 10, until: 20 }]);
    }

    const FILES: StreamPlan = StreamPlan { until: None, parts: StreamParts::Whole, ..PLAN };

    /// The chunks that begin now, from number `next` on.
    fn begin_all(chunks: &mut StreamChunks, next: u64) -> Vec<(u32, u64, u64)> {
        (next..).map_while(|chunk| chunks.begin(chunk)).map(|at| (at.part.0, at.from, at.until)).collect()
    }

    #[test]
    fn files_are_read_one_after_the_other_and_end_once_closed() {
        let mut chunks = StreamChunks::new(FILES);
        assert!(chunks.is_at_rest() && !chunks.is_finished());
        chunks.found(0, &[state(0, 9), state(1, 0)]).unwrap();
        assert_eq!((chunks.waiting(), chunks.waiting_parts(), chunks.is_at_rest()), (9, 1, false));
        assert_eq!(begin_all(&mut chunks, 0), [(0, 0, 4), (0, 4, 8), (0, 8, 9)]);
        chunks.found(0, &[state(2, 5)]).unwrap();
        assert_eq!(begin_all(&mut chunks, 3), [(2, 0, 4), (2, 4, 5)]);
        assert_eq!((chunks.expected_rows(2), chunks.expected_rows(3), chunks.to_probe()), (Some(1), Some(4), vec![]));
        for chunk in [4, 0, 2, 1, 3] {
            assert!(!chunks.is_at_rest());
            // The end of a chunk does not depend on what a loader says of it.
            let read = chunks.read(chunk, SegmentRead { next: 0, more: false }).unwrap();
            assert_eq!(Some(read.until - read.from), chunks.expected_rows(chunk));
        }
        assert!(chunks.is_at_rest() && !chunks.is_finished());
        chunks.close();
        assert_eq!((chunks.is_finished(), chunks.chunks_begun()), (true, 5));
        chunks.forget_before(4);
        assert_eq!([0, 1, 2].map(|part| chunks.has(PartId(part))), [false, false, true]);
        chunks.forget_before(5);
        assert!(!chunks.has(PartId(2)) && chunks.is_finished());
    }

    #[test]
    fn a_closed_stream_without_files_is_finished() {
        let mut chunks = StreamChunks::new(FILES);
        chunks.close();
        assert_eq!((chunks.is_finished(), chunks.chunks_begun()), (true, 0));
    }

    proptest! {
        #[test]
        fn a_resumed_run_reads_the_same_chunks_of_files(
            files in prop::collection::vec(0u64..14, 1..6), read in prop::collection::vec(any::<bool>(), 30), at in 0u64..30,
        ) {
            let states: Vec<PartitionState> = (0..).zip(&files).map(|(part, rows)| state(part, *rows)).collect();
            let mut whole = StreamChunks::new(FILES);
            whole.found(0, &states).unwrap();
            let expected = begin_all(&mut whole, 0);
            let mut rows: BTreeMap<u32, u64> = BTreeMap::new();
            for (part, from, until) in &expected {
                // Each row once, in order, and no chunk is empty or too long.
                prop_assert_eq!(rows.insert(*part, *until).unwrap_or(0), *from);
                prop_assert!((1..=4).contains(&(until - from)));
            }
            prop_assert_eq!(rows.values().sum::<u64>(), files.iter().sum::<u64>());
            let mut first = StreamChunks::new(FILES);
            first.found(0, &states).unwrap();
            let at = at.min(expected.len() as u64);
            for chunk in 0..(at + 3).min(expected.len() as u64) {
                first.begin(chunk).unwrap();
                if chunk < at || read[chunk as usize] {
                    first.read(chunk, SegmentRead { next: 0, more: true }).unwrap();
                }
            }
            let json = serde_json::to_string(&first.place(at)).unwrap();
            let place: StreamPlace = serde_json::from_str(&json).unwrap();
            let mut rest = StreamChunks::resume(FILES, &place);
            prop_assert_eq!(rest.begin(0), None);
            let again: Vec<PartitionState> = states.iter().filter(|state| rest.has(state.part)).copied().collect();
            rest.found(0, &again).unwrap();
            let begun = begin_all(&mut rest, 0);
            prop_assert_eq!(&begun[..], &expected[at as usize..]);
        }
    }

    #[test]
    fn a_file_that_is_gone_loses_its_rows_in_a_resumed_run() {
        let mut chunks = StreamChunks::new(FILES);
        chunks.found(0, &[state(0, 9), state(1, 3)]).unwrap();
        (0..2).for_each(|chunk| assert!(chunks.begin(chunk).is_some()));
        chunks.read(0, SegmentRead { next: 4, more: true });
        let place = chunks.place(0);
        let gone = PartitionState { begin: 9, ..state(0, 9) };
        let lost = |from, until| Lost { part: PartId(0), from, until };
        let found = StreamChunks::resume(FILES, &place).found(0, &[gone, state(1, 3)]);
        assert_eq!(found, Err(StreamError::Lost(lost(0, 4))));
        let mut chunks = StreamChunks::resume(StreamPlan { lost_records: LostRecords::Skip, ..FILES }, &place);
        assert_eq!(chunks.found(0, &[gone, state(1, 3)]), Ok(vec![lost(0, 4), lost(4, 8), lost(8, 9)]));
        assert_eq!(chunks.lost_records(), 9);
        assert_eq!(begin_all(&mut chunks, 0), [(1, 0, 3)]);
    }
}
