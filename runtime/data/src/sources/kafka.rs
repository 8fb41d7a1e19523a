//! Rows of Kafka topics. A part is a partition, and an offset is one of Kafka's. A cursor reads one
//! segment. While it parses, the next records are on their way. Records that it has read beyond its
//! rows go to the next cursor of the partition.

mod avro;
mod binary;
mod dead_letters;
mod decode;
mod protobuf;
mod registry;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use rectrain_kafka::{
    Client, ErrorCode, FetchFrom, Fetched, FetchedPartition, GroupOffset, KafkaError, NewRecord, OffsetAt, Record,
    Security, TopicMetadata,
};
use rectrain_kinds::{
    KafkaConfig, LostRecords, PartId, PartitionState, Position, RecordFormat, StreamEnd, StreamStart,
};

use self::decode::{BadValue, Decoder, NoCells};
use self::registry::{Language, Registry};
use super::Opening;
use super::csv::{Fault, Row};
use crate::batch::Batch;
use crate::blocking::{self, Pending, Stop};
use crate::clock::unix_millis;
use crate::error::{DataError, Place};
use crate::identity::{Identity, PartIdentity};
use crate::pace;
use crate::schema::{Encoder, Layout};
use crate::source::{Rows, Source, Tally, View};
use crate::stream::{Aging, PartitionFound, Stream};

/// Bytes of one read from a partition, about.
const FETCH_BYTES: u32 = 4 << 20;
/// Partitions whose read-ahead records are kept, at most.
const MOST_KEPT: usize = 64;
/// How long the first connection to the brokers is tried, and records that must exist.
const PATIENCE: Duration = Duration::from_secs(30);
/// How long the brokers may not know a topic that they knew before.
const ABSENCE: Duration = Duration::from_secs(60);
/// The pause before a second attempt, and the longest one.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// The partitions of topics.
#[derive(Debug)]
pub(crate) struct KafkaSource {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: KafkaConfig,
    client: Arc<Client>,
    encoder: Arc<Encoder>,
    layout: Layout,
    /// The schemas of Avro and Protobuf records.
    registry: Option<Arc<Registry>>,
    /// Records that cursors have read and not used.
    kept: Mutex<VecDeque<(PartId, Ahead)>>,
    /// Where a job begins in each partition.
    starts: Mutex<BTreeMap<PartId, u64>>,
    aging: Mutex<Aging>,
    /// The absence of a topic that the brokers knew.
    absence: Mutex<Lack>,
}

impl KafkaSource {
    /// Connects to the cluster, and finds the topics.
    ///
    /// # Errors
    /// A column that the records do not have. A name or a password that is missing or refused. A
    /// topic that does not exist. No broker answers.
    pub(crate) fn open(opening: &Opening<'_>, config: &KafkaConfig) -> Result<Self, DataError> {
        if opening.time.is_some() || opening.config.split.is_some() || !opening.config.paths.is_empty() {
            return Err(DataError::config("split", "a stream has no files and no split"));
        }
        let schema = decode::schema(&config.format, &opening.encoder.schema);
        let encoder = Arc::new(Encoder {
            carried: opening.encoder.carried.clone(),
            needs_label: opening.encoder.needs_label,
            ..Encoder::new(schema, &opening.config.null_values)
        });
        let layout = decode::layout(&config.topics.join(", "), &config.format, &encoder)?;
        let security = Security::new(config.security, |name| std::env::var(name).ok())?;
        let shared = Shared {
            client: Arc::new(Client::new(config.bootstrap_servers.clone(), security)),
            encoder,
            registry: match &config.format {
                RecordFormat::Avro { registry } => Some(Arc::new(Registry::new(registry, Language::Avro)?)),
                RecordFormat::Protobuf { registry } => Some(Arc::new(Registry::new(registry, Language::Protobuf)?)),
                RecordFormat::Json | RecordFormat::Csv(_) => None,
            },
            layout,
            kept: Mutex::default(),
            starts: Mutex::default(),
            absence: Mutex::default(),
            aging: Mutex::new(Aging::new(Duration::from_millis(config.linger_millis))),
            config: config.clone(),
        };
        shared.find_topics()?;
        Ok(Self { shared: Arc::new(shared) })
    }
}

impl Source for KafkaSource {
    fn open(&self, view: View) -> Result<Box<dyn Rows>, DataError> {
        Ok(Box::new(KafkaRows::new(&self.shared, view)))
    }

    /// The topics. Their partitions may become more.
    fn identity(&self) -> Identity {
        let part = |topic: &String| PartIdentity { name: topic.clone(), size: None, version: None };
        Identity { parts: self.shared.config.topics.iter().map(part).collect() }
    }

    fn is_finite(&self) -> bool {
        false
    }

    fn known_rows(&self) -> Vec<u64> {
        Vec::new()
    }

    fn count_rows(&self, _stop: &Stop) -> Result<u64, DataError> {
        Err(DataError::config("format", "the rows of a stream do not end and cannot be counted"))
    }

    fn estimated_rows(&self) -> u64 {
        0
    }

    fn stream(&self) -> Option<&dyn Stream> {
        Some(self)
    }
}

impl Stream for KafkaSource {
    fn partitions(&self) -> Result<Vec<PartitionFound>, DataError> {
        let found = self.find_partitions();
        self.shared.allow_absence(found, Instant::now())
    }

    fn commit(&self, offsets: &[(PartId, u64)]) -> Result<(), DataError> {
        let Some(group) = self.shared.config.group.clone() else { return Ok(()) };
        let of = |(part, offset): &(PartId, u64)| {
            let (topic, partition) = part.topic_and_partition();
            let topic = self.shared.config.topics.get(topic as usize)?.clone();
            Some(GroupOffset { topic, partition: i32::try_from(partition).ok()?, offset: i64::try_from(*offset).ok()? })
        };
        let (client, offsets) = (Arc::clone(&self.shared.client), offsets.iter().filter_map(of).collect::<Vec<_>>());
        let committing = blocking::spawn(async move { client.commit(&group, &offsets).await });
        Ok(self.shared.wait(committing, &Stop::default())?)
    }
}

impl KafkaSource {
    fn find_partitions(&self) -> Result<Vec<PartitionFound>, DataError> {
        let topics = self.shared.topics()?;
        let mut found = Vec::new();
        for (place, name) in (0..).zip(&self.shared.config.topics) {
            let topic = topics.iter().find(|topic| topic.name == *name);
            let topic = topic.ok_or_else(|| no_topic(name, ErrorCode::UNKNOWN_TOPIC_OR_PARTITION))?;
            found.extend(self.shared.partitions_of(place, topic)?);
        }
        Ok(found)
    }
}

fn no_topic(name: &str, code: ErrorCode) -> DataError {
    let problem = match code {
        ErrorCode::UNKNOWN_TOPIC_OR_PARTITION => format!("there is no topic `{name}`"),
        code => format!("topic `{name}` cannot be read: the broker answered {code}"),
    };
    DataError::Topic { problem }
}

impl Shared {
    /// Finds all topics, the one for bad records too. Tries for a while if no broker answers, or if
    /// a topic was made just now.
    fn find_topics(&self) -> Result<(), DataError> {
        let (mut brokers, mut topics, mut pause) = (Lack::default(), Lack::default(), PAUSES.0);
        loop {
            let error = match self.topics().and_then(|topics| topics.iter().try_for_each(check_topic)) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let is_over = match &error {
                error if error.is_transient() => {
                    topics.end();
                    brokers.lasts(PATIENCE, Instant::now())
                }
                DataError::Topic { .. } => topics.lasts(PATIENCE / 10, Instant::now()),
                _ => true,
            };
            if is_over {
                return Err(error);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// A broker that has just started may not know its topics for a while.
    fn allow_absence<T>(&self, found: Result<T, DataError>, now: Instant) -> Result<T, DataError> {
        let mut absence = self.absence.lock();
        match found {
            Err(DataError::Topic { problem }) if absence.lasts(ABSENCE, now) => Err(DataError::Topic { problem }),
            Err(DataError::Topic { problem }) => {
                Err(KafkaError::Broker { subject: problem, code: ErrorCode::UNKNOWN_TOPIC_OR_PARTITION }.into())
            }
            found => {
                absence.end();
                found
            }
        }
    }

    fn topics(&self) -> Result<Vec<TopicMetadata>, DataError> {
        let (client, mut topics) = (Arc::clone(&self.client), self.config.topics.clone());
        topics.extend(self.config.dead_letter_topic.clone());
        Ok(self.wait(blocking::spawn(async move { client.topics(&topics).await }), &Stop::default())?)
    }

    fn offsets(&self, topic: &str, partitions: &[i32], at: OffsetAt) -> Result<Vec<Option<u64>>, DataError> {
        let (client, topic, partitions) = (Arc::clone(&self.client), topic.to_owned(), partitions.to_vec());
        let asking = blocking::spawn(async move { client.offsets(&topic, &partitions, at).await });
        let offsets = self.wait(asking, &Stop::default())?;
        Ok(offsets.into_iter().map(|offset| offset.and_then(|offset| u64::try_from(offset).ok())).collect())
    }

    /// The offsets that the group of the stream has committed.
    fn committed(&self, topic: &str, partitions: &[i32]) -> Result<Vec<Option<u64>>, DataError> {
        let group = self.config.group.clone().unwrap_or_default();
        let (client, topic, partitions) = (Arc::clone(&self.client), topic.to_owned(), partitions.to_vec());
        let asking = blocking::spawn(async move { client.committed(&group, &topic, &partitions).await });
        let offsets = self.wait(asking, &Stop::default())?;
        Ok(offsets.into_iter().map(|offset| offset.and_then(|offset| u64::try_from(offset).ok())).collect())
    }

    /// Waits for a task on the crate's runtime.
    fn wait<T>(&self, task: std::io::Result<Pending<Result<T, KafkaError>>>, stop: &Stop) -> Result<T, KafkaError> {
        let failed = |error: std::io::Error| KafkaError::Unreachable {
            broker: self.config.bootstrap_servers.join(", "),
            problem: error.to_string(),
        };
        task.and_then(|task| task.wait(stop)).map_err(failed)?
    }

    fn partitions_of(&self, place: u32, topic: &TopicMetadata) -> Result<Vec<PartitionFound>, DataError> {
        check_topic(topic)?;
        let numbers: Vec<i32> = topic.partitions.iter().map(|partition| partition.number).collect();
        let is_past_end = self.is_past_end();
        // The first offset comes first: a partition never ends before it.
        let begins = self.offsets(&topic.name, &numbers, OffsetAt::Earliest)?;
        let ends = self.offsets(&topic.name, &numbers, OffsetAt::Latest)?;
        let parts: Vec<PartId> = numbers.iter().map(|number| PartId::of_partition(place, *number as u32)).collect();
        let starts = self.starts(topic, &numbers, &parts, &begins, &ends)?;
        let stops = self.stops(&topic.name, &numbers)?;
        let (mut aging, now) = (self.aging.lock(), Instant::now());
        let mut found = Vec::with_capacity(parts.len());
        for (index, &part) in parts.iter().enumerate() {
            let begin = begins[index].unwrap_or(0);
            let end = ends[index].unwrap_or(begin).max(begin);
            // The records from a committed offset on are for training, also if they are gone.
            let is_due = self.config.start == StreamStart::Committed;
            let start = if is_due { starts[index] } else { starts[index].max(begin) };
            let stop = stops[index].or(is_past_end.then_some(end));
            let state = PartitionState { part, begin, end, aged_end: aging.note(part, end, now), start, stop };
            found.push(PartitionFound { topic: topic.name.clone(), topic_id: topic.id, state });
        }
        Ok(found)
    }

    /// Where a job begins in each partition. This does not change while the source is open.
    fn starts(
        &self,
        topic: &TopicMetadata,
        numbers: &[i32],
        parts: &[PartId],
        begins: &[Option<u64>],
        ends: &[Option<u64>],
    ) -> Result<Vec<u64>, DataError> {
        let mut known = self.starts.lock();
        if parts.iter().any(|part| !known.contains_key(part)) {
            let starts = match self.config.start {
                StreamStart::Earliest => begins.to_vec(),
                StreamStart::Latest => ends.to_vec(),
                StreamStart::Timestamp(millis) => self.offsets(&topic.name, numbers, OffsetAt::Timestamp(millis))?,
                StreamStart::Committed => {
                    let committed = self.committed(&topic.name, numbers)?;
                    committed.into_iter().zip(begins).map(|(committed, begin)| committed.or(*begin)).collect()
                }
            };
            for ((part, start), end) in parts.iter().zip(starts).zip(ends) {
                // No record has such a time yet: the next one will.
                known.entry(*part).or_insert(start.or(*end).unwrap_or(0));
            }
        }
        Ok(parts.iter().map(|part| known.get(part).copied().unwrap_or(0)).collect())
    }

    /// Whether the time has come at which training ends. A partition without a later record then
    /// ends with the records that are found from now on.
    fn is_past_end(&self) -> bool {
        matches!(self.config.until, Some(StreamEnd::Timestamp(millis)) if unix_millis(SystemTime::now()) >= millis)
    }

    /// By partition: the first record that is too late for training. To be asked for after the ends
    /// of the partitions, so that no such record is before an end unseen.
    fn stops(&self, topic: &str, numbers: &[i32]) -> Result<Vec<Option<u64>>, DataError> {
        match self.config.until {
            Some(StreamEnd::Timestamp(millis)) => self.offsets(topic, numbers, OffsetAt::Timestamp(millis)),
            Some(StreamEnd::Latest | StreamEnd::IdleSeconds(_)) | None => Ok(vec![None; numbers.len()]),
        }
    }

    /// The topic and the number of a partition.
    fn name(&self, part: PartId) -> String {
        let (topic, partition) = part.topic_and_partition();
        let topic = self.config.topics.get(topic as usize).map_or("", String::as_str);
        format!("topic {topic}, partition {partition}")
    }

    /// Takes the records that an earlier cursor has read from this place on. Another loader may
    /// have read the ones before it.
    fn take_kept(&self, part: PartId, at: u64) -> Ahead {
        let mut kept = self.kept.lock();
        let found = kept.iter().position(|(of, ahead)| *of == part && ahead.reaches(at));
        match found.and_then(|found| kept.remove(found)) {
            Some((_, ahead)) => ahead.starting_at(at),
            None => Ahead::new(at),
        }
    }

    fn keep(&self, part: PartId, ahead: Ahead) {
        let mut kept = self.kept.lock();
        kept.retain(|(of, _)| *of != part);
        if kept.len() >= MOST_KEPT {
            kept.pop_front();
        }
        kept.push_back((part, ahead));
    }

    /// Begins to read from `at` on.
    fn fetch(&self, part: PartId, at: u64) -> std::io::Result<Pending<Result<Fetched, KafkaError>>> {
        let (topic, partition) = part.topic_and_partition();
        let topic = self.config.topics.get(topic as usize).cloned().unwrap_or_default();
        let from = FetchFrom { topic, partition: partition as i32, offset: at as i64 };
        let client = Arc::clone(&self.client);
        blocking::spawn(async move {
            let mut fetched = client.fetch(&[from], Duration::ZERO, FETCH_BYTES).await;
            fetched.pop().map_or_else(no_answer, |FetchedPartition { fetched, .. }| fetched)
        })
    }
}

/// The broker had no room for the partition in its answer.
fn no_answer() -> Result<Fetched, KafkaError> {
    Err(KafkaError::Unreachable { broker: String::new(), problem: "the answer lacks the partition".to_owned() })
}

fn check_topic(topic: &TopicMetadata) -> Result<(), DataError> {
    match topic.error {
        ErrorCode::NONE => Ok(()),
        // The partitions have no leaders yet.
        code if code.is_transient() && code != ErrorCode::UNKNOWN_TOPIC_OR_PARTITION => {
            Err(KafkaError::Broker { subject: format!("topic {}", topic.name), code }.into())
        }
        code => Err(no_topic(&topic.name, code)),
    }
}

/// Records of a partition that were read ahead.
struct Ahead {
    /// The offset of the next record, or of the place where the next read begins.
    at: u64,
    records: VecDeque<Record>,
    /// The place behind the records.
    next: u64,
    /// The read from `next` on.
    pending: Option<Pending<Result<Fetched, KafkaError>>>,
}

impl std::fmt::Debug for Ahead {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ahead").field("at", &self.at).field("records", &self.records.len()).finish_non_exhaustive()
    }
}

impl Ahead {
    fn new(at: u64) -> Self {
        Self { at, records: VecDeque::new(), next: at, pending: None }
    }

    /// Whether all records from `at` on are here, or will be read.
    fn reaches(&self, at: u64) -> bool {
        (self.at..=self.next).contains(&at)
    }

    /// Without the records before `at`, which it reaches.
    fn starting_at(mut self, at: u64) -> Self {
        let before = self.records.partition_point(|record| (record.offset as u64) < at);
        self.records.drain(..before);
        Self { at, ..self }
    }
}

/// Since when something is missing.
#[derive(Debug, Default)]
struct Lack(Option<Instant>);

impl Lack {
    /// It is missing now. Returns whether this has lasted for as long as `patience`.
    fn lasts(&mut self, patience: Duration, now: Instant) -> bool {
        now.duration_since(*self.0.get_or_insert(now)) >= patience
    }

    /// Nothing is known of it now: no broker answers. The next answer may come too early, because a
    /// broker that starts may not have everything yet.
    fn end(&mut self) {
        self.0 = None;
    }
}

/// Cursor over the records of a segment.
struct KafkaRows {
    shared: Arc<Shared>,
    part: PartId,
    /// The end of the segment.
    until: u64,
    ahead: Ahead,
    decoder: Decoder,
    tally: Tally,
    stop: Stop,
    scratch: Batch,
    has_more: bool,
    event_millis: Option<i64>,
    /// Bad records for the dead-letter topic.
    letters: Vec<NewRecord>,
}

impl KafkaRows {
    fn new(shared: &Arc<Shared>, view: View) -> Self {
        let Position { part, offset } = view.from;
        let schema = &shared.encoder.schema;
        Self {
            part,
            until: offset.0.saturating_add(view.limit.unwrap_or(u64::MAX)),
            ahead: shared.take_kept(part, offset.0),
            decoder: Decoder::new(&shared.config.format, schema, &shared.layout, shared.registry.as_ref()),
            tally: Tally::new(view.bad_rows),
            stop: view.stop,
            scratch: shared.encoder.empty_batch(),
            has_more: false,
            event_millis: None,
            letters: Vec::new(),
            shared: Arc::clone(shared),
        }
    }

    /// Reads until a record of the segment is there. `false` at the end of the segment. The records
    /// of a segment exist, so the broker is asked again if it has none. It may be a new leader. If
    /// it has none for long, the partition was truncated, and the segment ends.
    fn fill(&mut self) -> Result<bool, DataError> {
        let (mut lack, mut pause) = (Lack::default(), PAUSES.0);
        loop {
            if let Some(record) = self.ahead.records.front() {
                self.ahead.at = record.offset as u64;
            } else {
                self.ahead.at = self.ahead.next;
            }
            if self.ahead.at >= self.until {
                return Ok(false);
            }
            if !self.ahead.records.is_empty() {
                return Ok(true);
            }
            if self.stop.is_set() {
                return Err(DataError::Stopped);
            }
            match self.receive() {
                Ok(true) => continue,
                Ok(false) if lack.lasts(PATIENCE, Instant::now()) => return Ok(false),
                Ok(false) => {}
                Err(error) if error.is_transient() => {
                    lack.end();
                    tracing::warn!(%error, "reading is tried again");
                }
                Err(error) => return Err(error),
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSES.1);
        }
    }

    /// Receives the next records. `false` if the partition has no more.
    fn receive(&mut self) -> Result<bool, DataError> {
        let at = self.ahead.next;
        let pending = match self.ahead.pending.take() {
            Some(pending) => Ok(pending),
            None => self.shared.fetch(self.part, at),
        };
        match self.shared.wait(pending, &self.stop) {
            Ok(fetched) => Ok(self.received(fetched)),
            Err(KafkaError::Broker { code: ErrorCode::OFFSET_OUT_OF_RANGE, .. }) => self.pass_over_deleted(at),
            Err(error) => Err(error.into()),
        }
    }

    fn received(&mut self, fetched: Fetched) -> bool {
        let Fetched { records, next, end, .. } = fetched;
        let next = u64::try_from(next).unwrap_or(0);
        let has_moved = next > self.ahead.next || !records.is_empty();
        self.ahead.records = records.into();
        self.ahead.next = next.max(self.ahead.next);
        if has_moved && self.ahead.next < u64::try_from(end).unwrap_or(0) {
            // An error comes when the records are needed.
            self.ahead.pending = self.shared.fetch(self.part, self.ahead.next).ok();
        }
        has_moved
    }

    /// The broker has deleted the record at `at`, by its retention.
    fn pass_over_deleted(&mut self, at: u64) -> Result<bool, DataError> {
        let (topic, partition) = self.part.topic_and_partition();
        let topic = self.shared.config.topics.get(topic as usize).cloned().unwrap_or_default();
        let begins = self.shared.offsets(&topic, &[partition as i32], OffsetAt::Earliest)?;
        let begin = begins.first().copied().flatten().unwrap_or(0);
        if begin <= at {
            // It lies behind the end: the partition was truncated.
            return Ok(false);
        }
        match self.shared.config.lost_records {
            LostRecords::Fail => Err(DataError::Deleted { partition: self.shared.name(self.part), from: at, begin }),
            LostRecords::Skip => {
                self.ahead.next = begin;
                Ok(true)
            }
        }
    }

    /// Parses the next record into `into`.
    fn take(&mut self, into: &mut Batch) -> Result<(), DataError> {
        let Some(record) = self.ahead.records.front() else { return Err(DataError::Stopped) };
        let samples = into.samples;
        let offset = record.offset as u64;
        let value = record.value.as_deref().unwrap_or(b"");
        let layout = &self.shared.layout;
        let (bytes, ends) = match self.decoder.cut(value, &self.stop) {
            Ok(cells) => cells,
            Err(NoCells::Failed(error)) => return Err(error),
            Err(NoCells::Bad(BadValue { problem, found })) => {
                let partition = self.shared.name(self.part);
                return Err(DataError::BadRecord { partition, offset, problem, found });
            }
        };
        let row = Row { bytes, ends, layout };
        let appended = row.is_selected(None).and_then(|_| row.append(&self.shared.encoder, into));
        match appended {
            Ok(()) => Ok(()),
            Err(Fault::TooManyKeys(error)) => Err(error),
            Err(fault) => {
                into.truncate(samples);
                Err(row.describe(
                    &self.shared.name(self.part),
                    Place::Offset(offset),
                    &self.shared.encoder.schema.label,
                    fault,
                ))
            }
        }
    }

    /// Moves behind the next record.
    fn consume(&mut self) -> Option<Record> {
        let record = self.ahead.records.pop_front()?;
        self.ahead.at = record.offset as u64 + 1;
        Some(record)
    }

    /// Counts a bad record. Fails if it is not tolerated.
    fn note(&mut self, error: DataError, record: Option<&Record>) -> Result<(), DataError> {
        if !matches!(error, DataError::BadRow { .. } | DataError::BadRecord { .. }) {
            return Err(error);
        }
        if let (Some(_), Some(record)) = (&self.shared.config.dead_letter_topic, record) {
            let (topic, _) = self.part.topic_and_partition();
            let topic = self.shared.config.topics.get(topic as usize).map_or("", String::as_str);
            self.letters.push(dead_letters::letter(topic, self.part, record, &error.to_string()));
        }
        self.tally.note(error)
    }
}

impl Rows for KafkaRows {
    fn advance(&mut self, rows: u64, mut into: Option<&mut Batch>) -> Result<u64, DataError> {
        let mut passed = 0;
        let mut scratch = std::mem::take(&mut self.scratch);
        while passed < rows && self.fill()? {
            let taken = match into.as_deref_mut() {
                Some(batch) => self.take(batch),
                None => {
                    scratch.truncate(0);
                    self.take(&mut scratch)
                }
            };
            let record = self.consume();
            match taken {
                Ok(()) => {
                    passed += 1;
                    self.event_millis = self.event_millis.max(record.map(|record| record.timestamp));
                }
                Err(error) => self.note(error, record.as_ref())?,
            }
        }
        self.scratch = scratch;
        pace::pass(passed);
        Ok(passed)
    }

    /// Also moves behind the offsets that have no record. Without skipping, the record at the end
    /// may be a bad one: it fails when it is read.
    fn pass_over_bad(&mut self) -> Result<(), DataError> {
        self.has_more = false;
        while self.fill()? {
            let mut scratch = std::mem::take(&mut self.scratch);
            scratch.truncate(0);
            let taken = if self.tally.skips() { self.take(&mut scratch) } else { Ok(()) };
            self.scratch = scratch;
            let Err(error) = taken else {
                self.has_more = true;
                return Ok(());
            };
            let record = self.consume();
            self.note(error, record.as_ref())?;
        }
        Ok(())
    }

    fn skipped(&self) -> u64 {
        self.tally.skipped
    }

    fn has_more(&self) -> bool {
        self.has_more
    }

    fn keep_bad(&mut self) -> Result<(), DataError> {
        let letters = std::mem::take(&mut self.letters);
        let Some(topic) = self.shared.config.dead_letter_topic.clone().filter(|_| !letters.is_empty()) else {
            return Ok(());
        };
        let client = Arc::clone(&self.shared.client);
        let writing = blocking::spawn(async move {
            for letters in dead_letters::writes(letters) {
                dead_letters::write(&client, &topic, &letters).await?;
            }
            Ok(())
        });
        Ok(self.shared.wait(writing, &self.stop)?)
    }

    fn event_millis(&self) -> Option<i64> {
        self.event_millis
    }

    fn position(&self) -> Position {
        Position::new(self.part.0, self.ahead.at.min(self.until))
    }
}

impl Drop for KafkaRows {
    fn drop(&mut self) {
        let mut ahead = std::mem::replace(&mut self.ahead, Ahead::new(0));
        if let Some(record) = ahead.records.front() {
            ahead.at = record.offset as u64;
        }
        self.shared.keep(self.part, ahead);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Records with gaps between their offsets.
    fn ahead() -> Ahead {
        let record = |offset| Record { offset, timestamp: 0, key: None, value: None };
        Ahead { records: [5, 7, 9].map(record).into(), next: 12, ..Ahead::new(5) }
    }

    #[test]
    fn the_time_without_brokers_is_no_lack_of_records() {
        let (mut lack, start) = (Lack::default(), Instant::now());
        assert!(!lack.lasts(PATIENCE, start) && !lack.lasts(PATIENCE, start + PATIENCE / 2));
        lack.end();
        assert!(!lack.lasts(PATIENCE, start + 2 * PATIENCE));
        assert!(lack.lasts(PATIENCE, start + 3 * PATIENCE));
    }

    #[test]
    fn records_read_ahead_serve_every_place_that_they_reach() {
        assert_eq!([4, 5, 8, 12, 13].map(|at| ahead().reaches(at)), [false, true, true, true, false]);
        for (at, expected) in [(5, vec![5, 7, 9]), (6, vec![7, 9]), (9, vec![9]), (12, vec![])] {
            let found = ahead().starting_at(at);
            assert_eq!((found.at, found.next), (at, 12));
            assert_eq!(found.records.iter().map(|record| record.offset).collect::<Vec<_>>(), expected, "{at}");
        }
    }
}
