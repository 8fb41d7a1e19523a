//! The stream that a job trains on: what loaders found at the brokers, and how far training is
//! behind it. [`rectrain_modes::StreamChunks`] decides which records are in which chunk.

use std::collections::BTreeMap;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rectrain_kinds::{PartId, PartitionState, Segment, SegmentRead, StreamEnd};
use rectrain_modes::{DataLedger, FirstPass, JobChunks, Lost, StreamChunks, StreamError};
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{JobEvent, StreamLag};
use rectrain_protocol::plan::JobPlan;
use serde::{Deserialize, Serialize};

use super::State;
use crate::followed::Followed;
use crate::hexadecimal::hexadecimal;
use crate::rollback::Fall;
use crate::snapshot::Snapshot;
use crate::stream_snapshot::{StreamSnapshot, Topic, untrained};

/// Batches before the first unsettled one whose rows are still known one by one.
const REMEMBERED_BATCHES: u64 = 1_024;

/// The stream, besides its chunks.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Stream {
    topics: BTreeMap<u32, Topic>,
    event_millis: Option<i64>,
    /// Whether the loaders cannot look at the brokers now.
    is_unreachable: bool,
    /// The time of the last new record, or of the last look that failed, in milliseconds since 1970
    /// (UTC). For [`StreamEnd::IdleSeconds`].
    #[serde(default)]
    news_millis: Option<i64>,
    /// The offsets for the consumer group, if the stream has one.
    #[serde(default)]
    commits: Option<Commits>,
    /// The followed files, if the parts of the stream are files.
    #[serde(default)]
    pub(super) followed: Option<Box<Followed>>,
}

/// The offsets that a loader commits for a consumer group.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Commits {
    /// Checkpoints so far.
    number: u64,
    /// The number of the last commit that the loader has made.
    made: u64,
    /// The offsets of the newest checkpoint.
    offsets: Vec<(PartId, u64)>,
    /// The offsets of the checkpoint that is being written.
    writing: Vec<(PartId, u64)>,
}

impl Commits {
    /// The commit for a loader that has made the one with the number `committed` last.
    fn after(&self, committed: u64) -> Option<v1::Commit> {
        let offset = |(part, offset): &(PartId, u64)| v1::PartitionOffset { part: part.0, offset: *offset };
        let offsets = self.offsets.iter().map(offset).collect();
        (self.number > committed).then_some(v1::Commit { number: self.number, offsets })
    }
}

impl Stream {
    /// The stream of a job, from the place in `saved` on. `ledger` begins there.
    pub(super) fn new(plan: &JobPlan, ledger: &DataLedger<JobChunks>, saved: Option<&Snapshot>) -> Self {
        let saved = saved.and_then(|saved| saved.stream.as_ref());
        let is_needed = |part| ledger.chunks().stream().is_some_and(|chunks| chunks.has(part));
        let files = saved.and_then(|saved| saved.files.as_ref());
        let followed = plan.follow().map(|config| Box::new(Followed::new(config, files, is_needed)));
        let commits = plan.group().map(|_| Commits::default());
        let Some(saved) = saved else { return Self { followed, commits, ..Self::default() } };
        let (topics, event_millis) = (saved.topics.clone(), saved.event_millis);
        Self { topics, event_millis, followed, commits, ..Self::default() }
    }

    /// The topic and the number of a partition.
    fn name(&self, part: PartId) -> String {
        let (topic, partition) = part.topic_and_partition();
        let topic = self.topics.get(&topic).map_or_else(String::new, |topic| topic.name.clone());
        format!("topic {topic}, partition {partition}")
    }

    /// Notes a topic. Positions count in the topic of the same place and ID only.
    fn note_topic(&mut self, found: &v1::PartitionFound) -> Result<(), RoleError> {
        let (place, _) = PartId(found.part).topic_and_partition();
        let now = Topic { name: found.topic.clone(), id: hexadecimal(&found.topic_id) };
        match self.topics.get(&place) {
            None => {
                self.topics.insert(place, now);
                Ok(())
            }
            Some(before) if *before == now => Ok(()),
            Some(before) if before.name == now.name => Err(RoleError::Input(format!(
                "topic {} was deleted and made again, so its offsets count other records: to train on the new ones, begin a new job with spec.checkpoint.from and another spec.checkpoint.path",
                now.name
            ))),
            Some(before) => Err(RoleError::Input(format!(
                "spec.data.train.kafka.topics[{place}] is {}, and the checkpoint has {} in its place: add topics at the end of the list",
                now.name, before.name
            ))),
        }
    }

    /// Whether no record has come for so long that training ends. `has_news` says whether one has
    /// come now.
    fn is_idle(&mut self, until: Option<StreamEnd>, has_news: bool, now: i64) -> bool {
        let Some(StreamEnd::IdleSeconds(seconds)) = until else { return false };
        if has_news {
            self.news_millis = None;
        }
        now - *self.news_millis.get_or_insert(now) >= i64::from(seconds) * 1_000
    }

    fn error(&self, error: StreamError) -> RoleError {
        let remedy = match error {
            StreamError::Lost(_) => {
                "let Kafka keep records for longer, or set spec.data.train.kafka.lostRecords: skip to go on without them"
            }
            StreamError::Shrunk { .. } => "begin a new job with spec.checkpoint.from and another spec.checkpoint.path",
        };
        RoleError::Input(format!("{}: {error}; {remedy}", self.name(error.part())))
    }

    fn warning(&self, lost: &Lost) -> JobEvent {
        let Lost { from, until, .. } = *lost;
        JobEvent::Warning {
            message: format!(
                "{}: {} records from offset {from} on were deleted before they were trained; training goes on at offset {until}",
                self.name(lost.part),
                until - from
            ),
        }
    }
}

impl State {
    /// A loader has looked at the brokers. Returns the segments in which it should look for a row.
    pub(crate) fn stream_found(&mut self, found: &v1::StreamFound) -> Result<v1::StreamKnown, RoleError> {
        self.stream_found_at(found, now_millis())
    }

    fn stream_found_at(&mut self, found: &v1::StreamFound, now: i64) -> Result<v1::StreamKnown, RoleError> {
        self.note_source(&found.unreachable, "the brokers of the stream answer again");
        if !found.unreachable.is_empty() {
            self.data.stream.news_millis = Some(now);
            return Ok(v1::StreamKnown::default());
        }
        found.partitions.iter().try_for_each(|partition| self.data.stream.note_topic(partition))?;
        let states: Vec<PartitionState> = found.partitions.iter().map(state).collect();
        let Some(chunks) = self.data.ledger.chunks_mut().stream_mut() else {
            let reason = "the job trains on files".to_owned();
            return Err(RoleError::Inconsistent { message: "stream_found", reason });
        };
        let ends = chunks.ends();
        let lost = chunks.found(found.loader, &states).map_err(|error| self.data.stream.error(error))?;
        self.pending_events.extend(lost.iter().map(|lost| self.data.stream.warning(lost)));
        for probed in &found.probed {
            let Some((segment, read)) = probed.segment.map(segment).zip(probed.read.map(segment_read)) else {
                continue;
            };
            if chunks.probed(segment, read) && !read.more {
                self.data.skipped_rows += probed.skipped_rows;
            }
        }
        let has_news = chunks.ends() != ends;
        if self.data.stream.is_idle(chunks.until(), has_news, now) {
            chunks.close();
        }
        let probes = chunks.to_probe().into_iter().map(write_segment).collect();
        if chunks.is_at_rest() || self.is_held {
            // A stream without new rows is no stall, and neither is a pause.
            self.progress.progressed = Instant::now();
        }
        self.note_end_of_stream()?;
        // One loader commits, so that no commit overtakes a later one.
        let mut commit = None;
        if let Some(commits) = self.data.stream.commits.as_mut().filter(|_| found.loader == 0) {
            commits.made = commits.made.max(found.committed);
            commit = commits.after(found.committed);
        }
        Ok(v1::StreamKnown { probes, commit })
    }

    /// Whether the offsets of the newest checkpoint are committed, if they should be.
    pub(crate) fn offsets_are_committed(&self) -> bool {
        self.data.stream.commits.as_ref().is_none_or(|commits| commits.made >= commits.number)
    }

    /// A checkpoint is written: its offsets may be committed.
    pub(crate) fn offsets_are_saved(&mut self) {
        if let Some(commits) = &mut self.data.stream.commits {
            commits.number += 1;
            commits.offsets = std::mem::take(&mut commits.writing);
        }
    }

    /// Whether the job trains on a stream.
    pub(super) fn is_on_stream(&self) -> bool {
        self.data.ledger.chunks().stream().is_some()
    }

    /// Whether training waits for records of a stream, or is held. Then no member is slow.
    pub(super) fn waits_for_records(&self) -> bool {
        self.is_held
            || self.data.stream.is_unreachable
            || self.data.ledger.chunks().stream().is_some_and(StreamChunks::is_at_rest)
    }

    /// Tells when the source of the stream goes, and when it is back. A job waits for it, which is
    /// no stall: a restart could not help.
    pub(super) fn note_source(&mut self, problem: &str, back: &str) {
        let is_unreachable = !problem.is_empty();
        if is_unreachable {
            self.progress.progressed = Instant::now();
        }
        if std::mem::replace(&mut self.data.stream.is_unreachable, is_unreachable) != is_unreachable {
            let message = match is_unreachable {
                true => format!("{problem}; training goes on when it answers"),
                false => back.to_owned(),
            };
            self.pending_events.push(JobEvent::Warning { message });
        }
    }

    /// The stream may end without another chunk.
    pub(super) fn note_end_of_stream(&mut self) -> Result<(), RoleError> {
        let Some(total) = self.total_steps() else { return Ok(()) };
        if total.0 == 0 {
            let problem = match &self.data.stream.followed {
                Some(_) => {
                    "no file with rows came before spec.data.train.follow.until: check spec.data.train.follow.paths"
                }
                None => "the topics have no rows: check topics, start and until of spec.data.train.kafka",
            };
            return Err(RoleError::Input(problem.to_owned()));
        }
        if self.training.restoring() {
            return Ok(());
        }
        self.training.data_mut().end(total.0);
        self.training.advance()
    }

    /// A loader has read a chunk of the stream. Returns the end of the chunk's records.
    pub(super) fn stream_read(&mut self, report: &v1::ChunkReport) -> Option<u64> {
        let chunks = self.data.ledger.chunks_mut().stream_mut()?;
        let read = chunks.read(report.chunk, report.read.map(segment_read)?)?;
        self.data.stream.event_millis = self.data.stream.event_millis.max(report.event_millis);
        Some(read.until)
    }

    /// Forgets the chunks that no run reads again, so that the state of a job without an end stays
    /// small.
    pub(super) fn forget_settled_chunks(&mut self) {
        let settled = self.settled_batches();
        let first = self.data.ledger.first_pass().batch;
        let Some(chunks) = self.data.ledger.chunks_mut().stream_mut() else { return };
        chunks.forget_before(settled.saturating_sub(first));
        self.training.data_mut().forget_before(settled.saturating_sub(REMEMBERED_BATCHES));
    }

    /// The stream, with the place before `chunk`; `None` for a job on files.
    fn stream_at(&self, chunk: u64) -> Option<StreamSnapshot> {
        let place = self.data.ledger.chunks().stream()?.place(chunk);
        let Stream { topics, event_millis, followed, .. } = &self.data.stream;
        let files = followed.as_ref().map(|followed| followed.ledger().clone());
        Some(StreamSnapshot { place, topics: topics.clone(), event_millis: *event_millis, files })
    }

    /// Leases no more data, because training goes back. `good_before` as in [`Fall`].
    pub(super) fn note_fall(&mut self, good_before: u64, usual: f64) {
        let settled = self.settled_batches();
        let first = self.data.ledger.first_pass().batch;
        let Some(stream) = self.stream_at(settled.saturating_sub(first)) else { return };
        let (step, rows) = (self.step(), self.training.data_mut().row_of(settled));
        self.is_held = true;
        self.fall = Some(Box::new(Fall { good_before, step, rows, usual, stream, is_held: false }));
    }

    /// The fall of the quality for which training has to go back.
    pub(crate) fn fall_to_undo(&self) -> Option<Fall> {
        self.fall.as_deref().filter(|fall| !fall.is_held).cloned()
    }

    /// Whether the model is one that the job goes on without.
    pub(crate) fn is_going_back(&self) -> bool {
        self.fall.is_some()
    }

    /// Training went back too often, and waits. A restart of the job goes back.
    pub(crate) fn hold_after_fall(&mut self) {
        if let Some(fall) = &mut self.fall {
            fall.is_held = true;
        }
    }

    /// There is no checkpoint to go back to. Training waits, and a restart of the job goes on from
    /// the last one.
    pub(crate) fn forget_fall(&mut self) {
        self.fall = None;
    }

    /// Adds the stream's place to the snapshot at a pause.
    pub(super) fn save_stream(&mut self, saved: &mut Snapshot) {
        let (batch, first) = (saved.training.batch, self.data.ledger.first_pass().batch);
        let Some(stream) = self.stream_at(batch.saturating_sub(first)) else { return };
        if let Some(commits) = &mut self.data.stream.commits {
            commits.writing = untrained(&stream.place);
        }
        saved.stream = Some(stream);
        // A later run counts its chunks from here.
        saved.first_pass = FirstPass { epoch: 0, batch, rows: self.training.data_mut().row_of(batch) };
    }

    /// The partitions of the stream. One loader reads each at a time. 0 if there are none.
    pub(super) fn stream_partitions(&self) -> u32 {
        let partitions = self.data.ledger.chunks().stream().and_then(StreamChunks::partitions);
        partitions.map_or(0, |partitions| u32::try_from(partitions).unwrap_or(u32::MAX))
    }

    /// How far training is behind the stream; `None` for a job on files.
    pub(crate) fn stream_lag(&self) -> Option<StreamLag> {
        let chunks = self.data.ledger.chunks().stream()?;
        let event_time = self.data.stream.event_millis.map(|millis| millis as f64 / 1e3);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
        let is_behind = !chunks.is_at_rest();
        Some(StreamLag {
            rows: chunks.waiting(),
            files: self.followed_files().map(|files| files.waiting),
            seconds: event_time.filter(|_| is_behind).map_or(0.0, |time| (now - time).max(0.0)),
            event_time,
            lost_records: chunks.lost_records(),
        })
    }
}

/// The time, in milliseconds since 1970 (UTC).
pub(super) fn now_millis() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as i64)
}

/// The chunks of a job on a stream, and the batches trained before them.
pub(super) fn chunks(plan: rectrain_modes::StreamPlan, saved: Option<&Snapshot>) -> StreamChunks {
    let Some(stream) = saved.and_then(|saved| saved.stream.as_ref()) else { return StreamChunks::new(plan) };
    let mut chunks = StreamChunks::resume(plan, &stream.place);
    if let Some(rolled_back) = saved.and_then(|saved| saved.rolled_back.as_ref()) {
        chunks.count_lost(rolled_back.lost_records());
    }
    chunks
}

fn state(found: &v1::PartitionFound) -> PartitionState {
    let v1::PartitionFound { part, begin, end, aged_end, start, stop, .. } = *found;
    PartitionState { part: PartId(part), begin, end, aged_end, start, stop }
}

fn segment(segment: v1::Segment) -> Segment {
    let v1::Segment { part, from, until } = segment;
    Segment { part: PartId(part), from, until }
}

fn segment_read(read: v1::SegmentRead) -> SegmentRead {
    SegmentRead { next: read.next, more: read.more }
}

fn write_segment(segment: Segment) -> v1::Segment {
    v1::Segment { part: segment.part.0, from: segment.from, until: segment.until }
}

#[cfg(test)]
mod tests {
    use rectrain_dense::metrics::WindowPart;
    use rectrain_modes::{BegunChunk, Lease, PartitionPlace, StreamPlace};
    use rectrain_protocol::plan::small_plan;
    use rectrain_protocol::window_part;

    use super::*;
    use crate::rollback::{Good, Record};

    /// Global batches of 24 rows.
    fn plan(settings: &[&str]) -> JobPlan {
        let stream = [
            "spec.data.synthetic=null",
            "spec.data.train.kafka.bootstrapServers={kafka:9092}",
            "spec.data.train.kafka.topics={clicks}",
            "spec.data.train.kafka.format=json",
        ];
        small_plan(&[&stream[..], settings].concat())
    }

    fn partition(part: u32, end: u64) -> v1::PartitionFound {
        v1::PartitionFound {
            part,
            topic: "clicks".to_owned(),
            topic_id: vec![7; 16],
            end,
            ..v1::PartitionFound::default()
        }
    }

    fn found(partitions: Vec<v1::PartitionFound>) -> v1::StreamFound {
        v1::StreamFound { partitions, ..v1::StreamFound::default() }
    }

    /// Tells the state of partition 0, and that every segment has a row.
    fn tell(state: &mut State, end: u64) {
        let known = state.stream_found(&found(vec![partition(0, end)])).unwrap();
        let probed = |segment: &v1::Segment| v1::SegmentProbed {
            segment: Some(*segment),
            read: Some(v1::SegmentRead { next: segment.from, more: true }),
            skipped_rows: 0,
        };
        let probed = known.probes.iter().map(probed).collect();
        state.stream_found(&v1::StreamFound { probed, ..v1::StreamFound::default() }).unwrap();
    }

    fn read(state: &mut State, lease: &rectrain_modes::ChunkLease, next: u64, more: bool) {
        let rectrain_kinds::Start::At(from) = lease.start else { panic!("a stream has no row numbers") };
        let report = v1::ChunkReport {
            chunk: lease.chunk,
            rows: next - from.offset.0,
            label_sum: 1.0,
            read: Some(v1::SegmentRead { next, more }),
            event_millis: Some(1_000),
            ..v1::ChunkReport::default()
        };
        state.chunk_report(&report).unwrap();
    }

    fn running(plan: &JobPlan) -> State {
        let mut state = State::new(plan, None).unwrap();
        state.training.take_calls();
        state.training.begun().unwrap();
        state
    }

    #[test]
    fn a_chunk_is_leased_where_the_one_before_ended_and_replayed_with_its_end() {
        let mut state = running(&plan(&["spec.data.train.kafka.until=latest"]));
        tell(&mut state, 50);
        let Lease::Chunk(first) = state.data.ledger.lease() else { panic!("there are rows") };
        assert_eq!((first.until, state.data.ledger.lease()), (Some(50), Lease::Wait));
        read(&mut state, &first, 24, true);
        let Lease::Chunk(second) = state.data.ledger.lease() else { panic!("there are rows") };
        read(&mut state, &second, 48, true);
        let Lease::Chunk(last) = state.data.ledger.lease() else { panic!("there are rows") };
        read(&mut state, &last, 50, false);
        assert_eq!((state.total_steps().map(|total| total.0), state.data.ledger.lease()), (Some(3), Lease::Finished));
        assert_eq!(state.stream_partitions(), 1);
        assert_eq!(state.stream_lag().map(|lag| (lag.rows, lag.event_time)), Some((0, Some(1.0))));
    }

    #[test]
    fn offsets_are_committed_up_to_the_first_untrained_record() {
        let segment = |part, from| Segment { part: PartId(part), from, until: from + 24 };
        let begun = |part, from| BegunChunk { segment: segment(part, from), is_read: true };
        let place = |part, next| PartitionPlace { part: PartId(part), next };
        let place = StreamPlace {
            partitions: vec![place(0, 72), place(1, 24)],
            last_turn: None,
            begun: vec![begun(0, 48), begun(0, 24)],
        };
        assert_eq!(untrained(&place), [(PartId(0), 24), (PartId(1), 24)]);
    }

    #[test]
    fn one_loader_gets_the_offsets_of_each_checkpoint_once() {
        let mut state = running(&plan(&["spec.data.train.kafka.group=trainers", "spec.checkpoint.path=/nowhere"]));
        let known = |state: &mut State, loader, committed| {
            let found = v1::StreamFound { loader, committed, ..found(vec![partition(0, 50)]) };
            state.stream_found(&found).unwrap().commit
        };
        assert_eq!(known(&mut state, 0, 0), None);
        for (number, offset) in [(1, 24), (2, 48)] {
            let commits = state.data.stream.commits.as_mut().unwrap();
            commits.writing = vec![(PartId(0), offset)];
            assert_eq!(known(&mut state, 0, number - 1), None, "the checkpoint is being written");
            state.offsets_are_saved();
            let commit = v1::Commit { number, offsets: vec![v1::PartitionOffset { part: 0, offset }] };
            assert_eq!(known(&mut state, 1, 0), None, "another loader commits");
            assert_eq!(known(&mut state, 0, number - 1), Some(commit));
            assert!(!state.offsets_are_committed());
            assert_eq!(known(&mut state, 0, number), None);
            assert!(state.offsets_are_committed());
        }
        let mut ungrouped = running(&plan(&[]));
        ungrouped.offsets_are_saved();
        assert_eq!((known(&mut ungrouped, 0, 0), ungrouped.offsets_are_committed()), (None, true));
    }

    #[test]
    fn another_topic_in_its_place_is_refused() {
        let mut state = running(&plan(&[]));
        state.stream_found(&found(vec![partition(0, 5)])).unwrap();
        let anew = v1::PartitionFound { topic_id: vec![8; 16], ..partition(0, 5) };
        let other = v1::PartitionFound { topic: "views".to_owned(), ..partition(0, 5) };
        for (found_now, expected) in
            [(anew, "deleted and made again"), (other, "the checkpoint has clicks in its place")]
        {
            let error = state.stream_found(&found(vec![found_now])).unwrap_err();
            assert!(error.is_user_error() && error.to_string().contains(expected), "{error}");
        }
    }

    #[test]
    fn deleted_records_fail_the_job_or_are_counted() {
        let deleted = || found(vec![v1::PartitionFound { begin: 30, ..partition(0, 50) }]);
        let failing = plan(&[]);
        let mut state = running(&failing);
        tell(&mut state, 50);
        let error = state.stream_found(&deleted()).unwrap_err().to_string();
        assert!(error.starts_with("topic clicks, partition 0: 30 records from offset 0 on were deleted"), "{error}");
        let mut state = running(&plan(&["spec.data.train.kafka.lostRecords=skip"]));
        tell(&mut state, 50);
        state.stream_found(&deleted()).unwrap();
        assert_eq!(state.stream_lag().map(|lag| (lag.rows, lag.lost_records)), Some((20, 30)));
        let told = format!("{:?}", state.pending_events);
        assert!(told.contains("training goes on at offset 30"), "{told}");
    }

    #[test]
    fn a_chunk_whose_records_are_gone_is_left_to_the_next_attempt() {
        let mut state = running(&plan(&[]));
        state.job.resumes = true;
        tell(&mut state, 50);
        let Lease::Chunk(first) = state.data.ledger.lease() else { panic!("there are rows") };
        let read = Some(v1::SegmentRead { next: 50, more: false });
        let report = v1::ChunkReport { chunk: first.chunk, read, ..v1::ChunkReport::default() };
        let error = state.chunk_report(&report).unwrap_err();
        assert!(!error.is_user_error(), "{error}");
    }

    #[test]
    fn brokers_that_go_and_come_back_are_told_once() {
        let mut state = running(&plan(&[]));
        let gone = v1::StreamFound { unreachable: "no answer".to_owned(), ..v1::StreamFound::default() };
        for report in [&found(vec![partition(0, 5)]), &gone, &gone, &found(vec![partition(0, 5)])] {
            state.stream_found(report).unwrap();
        }
        let warning =
            |event: &JobEvent| if let JobEvent::Warning { message } = event { Some(message.clone()) } else { None };
        let told: Vec<String> = state.pending_events.iter().filter_map(warning).collect();
        assert_eq!(told, ["no answer; training goes on when it answers", "the brokers of the stream answer again"]);
    }

    #[test]
    fn training_waits_at_the_end_of_the_topics_and_without_brokers() {
        let mut state = running(&plan(&[]));
        assert!(state.is_on_stream());
        tell(&mut state, 24);
        assert!(!state.waits_for_records());
        let Lease::Chunk(first) = state.data.ledger.lease() else { panic!("there are rows") };
        assert!(!state.waits_for_records());
        read(&mut state, &first, 24, false);
        assert!(state.waits_for_records());
        tell(&mut state, 48);
        assert!(!state.waits_for_records());
        let gone = v1::StreamFound { unreachable: "no answer".to_owned(), ..v1::StreamFound::default() };
        state.stream_found(&gone).unwrap();
        assert!(state.waits_for_records());
    }

    /// A thousand predictions, all of them right or all of them wrong.
    fn predictions(are_right: bool) -> v1::WindowPart {
        let mut part = WindowPart::default();
        let (of_high, of_low) = if are_right { (1.0, 0.0) } else { (0.0, 1.0) };
        part.push(&[0.9; 500], &[of_high; 500]);
        part.push(&[0.1; 500], &[of_low; 500]);
        window_part::write(part)
    }

    fn progress(are_right: bool) -> v1::Progress {
        let window = Some(predictions(are_right));
        v1::Progress { samples: 1_000, loss_sum: 500.0, window, ..v1::Progress::default() }
    }

    /// A job that compares windows of a thousand predictions.
    fn watched(action: &str) -> State {
        let rule = "spec.training.quality.onRegression";
        let rule = format!("{rule}.tolerance=0.1,{rule}.action={action}");
        let saved = "spec.checkpoint.path=/nowhere,spec.checkpoint.everySteps=5";
        let mut state = running(&plan(&["spec.training.quality.windowRows=1000", &rule, saved]));
        tell(&mut state, 100);
        for _ in 0..3 {
            state.apply_progress(&progress(true)).unwrap();
        }
        state
    }

    #[test]
    fn training_waits_when_the_quality_falls_and_is_not_stalled() {
        let mut state = watched("pause");
        let (Lease::Chunk(first), _) = state.lease(0) else { panic!("there are rows") };
        read(&mut state, &first, 24, true);
        state.apply_progress(&progress(false)).unwrap();
        assert!(state.is_held() && state.has_quality_fallen() && state.waits_for_records());
        assert_eq!(state.lease(0).0, Lease::Wait);
        let told = format!("{:?}", state.pending_events);
        let expected = "the quality has fallen, so training waits: the AUC of the latest predictions is 0.0000";
        assert!(told.contains(expected) && told.contains("restart the job"), "{told}");
        // The loaders' looks at the brokers count as progress.
        let before = state.progress.progressed;
        (0..100).for_each(|_| tell(&mut state, 100));
        assert!(state.progress.progressed > before);
    }

    #[test]
    fn training_goes_back_behind_the_rows_that_are_trained() {
        let mut state = watched("rollback");
        let (Lease::Chunk(first), _) = state.lease(0) else { panic!("there are rows") };
        read(&mut state, &first, 24, true);
        assert_eq!(state.fall_to_undo(), None);
        state.apply_progress(&progress(false)).unwrap();
        let fall = state.fall_to_undo().unwrap();
        assert!(state.is_held() && state.is_going_back() && state.has_quality_fallen());
        assert_eq!(state.lease(0).0, Lease::Wait);
        // No step is settled: training goes on at the first row.
        assert_eq!(untrained(&fall.stream.place), [(PartId(0), 0)]);
        assert_eq!((fall.rows, fall.stream.topics[&0].name.as_str()), (0, "clicks"));
        // The first look that was good came after 2,000 predictions, and the last one after 3,000.
        assert_eq!(fall.good_before, 2_000);
        let told = format!("{:?}", state.pending_events);
        assert!(told.contains("so training goes back: the AUC of the latest predictions is 0.0000"), "{told}");
        // A second report of the same fall changes nothing.
        state.apply_progress(&progress(false)).unwrap();
        assert_eq!(state.fall_to_undo(), Some(fall));
        state.hold_after_fall();
        assert!(state.fall_to_undo().is_none() && state.is_going_back() && state.is_held());
        state.forget_fall();
        assert!(!state.is_going_back() && state.is_held());
    }

    #[test]
    fn a_run_that_went_back_counts_the_lost_records_and_the_old_quality() {
        let rule = "spec.training.quality.onRegression";
        let plan = plan(&[
            "spec.training.quality.windowRows=1000",
            &format!("{rule}.tolerance=0.1,{rule}.action=rollback"),
            "spec.checkpoint.path=/nowhere,spec.checkpoint.everySteps=5",
        ]);
        let mut before = watched("rollback");
        before.apply_progress(&progress(false)).unwrap();
        let mut fall = before.fall_to_undo().unwrap();
        fall.stream.place.partitions[0].next = 72;
        let good = Good { name: "step-0".to_owned(), step: 0, newer: Vec::new() };
        let record = Record::new(None, good, &fall, 1, 1_000);
        let saved = Snapshot::before_first_row(&plan, 0, 0).behind(&record);
        let mut state = State::new(&plan, Some(&saved)).unwrap();
        state.training.take_calls();
        assert_eq!(state.stream_lag().map(|lag| lag.lost_records), Some(72));
        // The first window after the rollback is compared with the quality before it.
        state.apply_progress(&progress(false)).unwrap();
        assert!(state.has_quality_fallen() && state.is_going_back());
    }

    #[test]
    fn a_fall_of_the_quality_may_only_be_told() {
        let mut state = watched("alert");
        state.note_baseline(&predictions(true));
        let event = state.apply_progress(&progress(false)).unwrap();
        assert!(!state.is_held() && state.has_quality_fallen());
        assert!(matches!(state.lease(0).0, Lease::Chunk(_)));
        let told = format!("{:?}", state.pending_events);
        assert!(told.contains("is 0.0000, and it was 0.7") && told.contains("the frozen model has 1.0000"), "{told}");
        let Some(JobEvent::Progress { window, baseline, .. }) = event else { panic!("{event:?}") };
        let auc = |quality: Option<rectrain_protocol::events::WindowQuality>| quality.unwrap().auc;
        assert_eq!((auc(window), auc(baseline)), (Some(0.0), Some(1.0)));
    }

    #[test]
    fn a_stream_ends_once_no_record_has_come_for_long_enough() {
        let mut state = running(&plan(&["spec.data.train.kafka.until=idle,spec.data.train.kafka.untilIdleSeconds=60"]));
        let look = |state: &mut State, end, seconds: i64| {
            state.stream_found_at(&found(vec![partition(0, end)]), seconds * 1_000).unwrap();
            state.data.ledger.chunks().stream().unwrap().is_closed()
        };
        assert!(!look(&mut state, 50, 10) && !look(&mut state, 50, 69), "a minute is not over");
        assert!(!look(&mut state, 60, 70) && !look(&mut state, 60, 129), "a record came");
        let gone = v1::StreamFound { unreachable: "no answer".to_owned(), ..v1::StreamFound::default() };
        state.stream_found_at(&gone, 200_000).unwrap();
        assert!(!look(&mut state, 60, 259), "the brokers did not answer");
        assert!(look(&mut state, 60, 260));
        let mut endless = running(&plan(&[]));
        assert!(!look(&mut endless, 50, 10) && !look(&mut endless, 50, 100_000));
    }

    #[test]
    fn empty_topics_are_an_error_if_training_ends_with_them() {
        let mut state = running(&plan(&["spec.data.train.kafka.until=latest"]));
        let error = state.stream_found(&found(vec![partition(0, 0)])).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("no rows"), "{error}");
        let mut endless = running(&plan(&[]));
        endless.stream_found(&found(vec![partition(0, 0)])).unwrap();
    }
}
