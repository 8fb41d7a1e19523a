//! The record of a way back to an earlier checkpoint, for which training goes when the quality of
//! predictions has fallen (`spec.training.quality.onRegression.action: rollback`). [`going_back`]
//! has the effects.
//!
//! [`going_back`]: super::going_back
//!
//! 1. The state notes a [`Fall`] and leases no more data.
//! 2. The coordinator chooses the newest checkpoint without a row in doubt. It writes a [`Record`]
//!    beside the checkpoints, deletes the newer ones, and ends the attempt.
//! 3. The next attempt restores that checkpoint, with the place in the stream of the record. So the
//!    rows between are left out. This holds for each restart until a newer checkpoint exists.
//!
//! After [`MOST_AN_HOUR`] rollbacks within an hour, step 2 ends no attempt, and training waits.

use std::collections::BTreeMap;

use rectrain_checkpoint::{CheckpointError, CheckpointId};
use rectrain_kinds::PartId;
use rectrain_modes::{Lost, StreamPlace};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{JobEvent, LostRecords};
use rectrain_storage::Directory;
use serde::{Deserialize, Serialize};

use super::stream_snapshot::{StreamSnapshot, Topic, untrained};

/// The file in the checkpoint path.
const RECORD: &str = "rollback.json";
/// The version of its format.
const VERSION: u32 = 1;
/// A list of followed files is the largest part of it.
const RECORD_BYTES: u64 = 256 << 20;
/// Rollbacks within an hour after which the next one lets training wait.
const MOST_AN_HOUR: usize = 3;
const HOUR_MILLIS: u64 = 3_600_000;

/// Why a model is not saved.
pub(super) const NOT_SAVED: &str =
    "the model is not saved: its quality has fallen, and the job goes on from an earlier checkpoint";

/// A fall of the quality for which training goes back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Fall {
    /// Checkpoints of at most so many trained rows have no row in doubt.
    pub(super) good_before: u64,
    /// The global step.
    pub(super) step: u64,
    /// Rows before the first batch that is not settled.
    pub(super) rows: u64,
    /// The measure before the fall.
    pub(super) usual: f64,
    /// The place before the first batch that is not settled. Training goes on here.
    pub(super) stream: StreamSnapshot,
    /// Whether training waits now, because it went back too often.
    pub(super) is_held: bool,
}

/// The checkpoint that training goes back to.
#[derive(Debug)]
pub(super) struct Good {
    pub(super) name: String,
    pub(super) step: u64,
    /// The checkpoints that are newer.
    pub(super) newer: Vec<CheckpointId>,
}

/// The last rollback in a checkpoint path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Record {
    version: u32,
    /// Rollbacks in the path so far.
    number: u64,
    /// The attempt that went back.
    attempt: u64,
    /// The checkpoint that training goes back to, and its step.
    checkpoint: String,
    step: u64,
    /// The checkpoints that were newer. They are deleted.
    withdrawn: Vec<CheckpointId>,
    /// The times of the rollbacks within an hour, in milliseconds since 1970 (UTC).
    at_millis: Vec<u64>,
    /// Whether training waits then, because these are too many.
    holds: bool,
    /// The global step of the fall, and the rows before it.
    from_step: u64,
    from_rows: u64,
    /// The measure before the fall.
    usual: f64,
    /// Where training goes on.
    stream: StreamSnapshot,
}

/// How a run differs from its checkpoint, because training went back.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RolledBack {
    /// The measure that new predictions are compared with at first; `None`: with newer ones.
    pub(super) usual: Option<f64>,
    /// Times that training went back in the path.
    pub(super) number: u64,
    /// Trained rows that are left out.
    pub(super) lost_rows: u64,
    from_step: u64,
    /// The records that are left out; empty for files.
    lost: Vec<Lost>,
    topics: BTreeMap<u32, Topic>,
}

impl Record {
    /// The record of a rollback after the one `before`.
    pub(super) fn new(before: Option<&Self>, good: Good, fall: &Fall, attempt: u64, now_millis: u64) -> Self {
        let is_recent = |at: &u64| now_millis.saturating_sub(*at) < HOUR_MILLIS;
        let mut at_millis: Vec<u64> =
            before.map(|before| before.at_millis.iter().copied().filter(is_recent).collect()).unwrap_or_default();
        let holds = at_millis.len() >= MOST_AN_HOUR;
        at_millis.push(now_millis);
        Self {
            version: VERSION,
            number: before.map_or(0, |before| before.number) + 1,
            attempt,
            checkpoint: good.name,
            step: good.step,
            withdrawn: good.newer,
            at_millis,
            holds,
            from_step: fall.step,
            from_rows: fall.rows,
            usual: fall.usual,
            stream: fall.stream.clone(),
        }
    }

    /// The record in a checkpoint path, if training ever went back there.
    pub(super) async fn read(directory: &Directory) -> Result<Option<Self>, RoleError> {
        let Some(bytes) = directory.read(RECORD, RECORD_BYTES).await.map_err(CheckpointError::from)? else {
            return Ok(None);
        };
        let unreadable = |problem: String| {
            RoleError::Input(format!(
                "{} cannot be read by this version ({problem}): expected the record of a rollback; use the program that wrote it, or delete the file to train the rows again that the rollback left out",
                directory.name_of(RECORD)
            ))
        };
        let record: Self = serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
        if record.version != VERSION {
            return Err(unreadable(format!("it has version {}, and not {VERSION}", record.version)));
        }
        Ok(Some(record))
    }

    pub(super) async fn write(&self, directory: &Directory) -> Result<(), RoleError> {
        let bytes = serde_json::to_vec(self)
            .map_err(|error| RoleError::Task { what: "writing of the rollback", reason: error.to_string() })?;
        Ok(directory.put(RECORD, bytes).await.map_err(CheckpointError::from)?)
    }

    /// Whether an attempt has written it.
    pub(super) fn is_of(&self, attempt: u64) -> bool {
        self.attempt == attempt
    }

    /// The checkpoints that nothing may resume from.
    pub(super) fn withdrawn(&self) -> &[CheckpointId] {
        &self.withdrawn
    }

    /// The number of the rollback in its path, from 1.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The step of the checkpoint that training goes back to.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// Where training goes on.
    pub(super) fn stream(&self) -> &StreamSnapshot {
        &self.stream
    }

    /// Whether training waits from now on.
    pub(super) fn holds(&self) -> bool {
        self.holds
    }

    /// What the rollback leaves out, from the place and the rows of the checkpoint on.
    pub(super) fn left_out(&self, before: &StreamPlace, rows: u64) -> RolledBack {
        let lost = match &self.stream.files {
            Some(_) => Vec::new(),
            None => lost_between(before, &self.stream.place),
        };
        RolledBack {
            usual: (!self.holds).then_some(self.usual),
            number: self.number,
            lost_rows: self.from_rows.saturating_sub(rows),
            from_step: self.from_step,
            lost,
            topics: self.stream.topics.clone(),
        }
    }

    /// The sentence about the rollback.
    pub(super) fn message(&self) -> String {
        let Self { checkpoint, step, from_step, .. } = self;
        let back = format!("checkpoint {checkpoint} of step {step}, and leaves out the rows that it has trained since");
        match self.holds {
            false => format!("the quality has fallen at step {from_step}: training goes back to {back}"),
            true => format!(
                "the quality has fallen at step {from_step}, after {MOST_AN_HOUR} rollbacks within an hour, so training waits: a restart of the job goes back to {back}"
            ),
        }
    }
}

impl RolledBack {
    /// The records that are left out; for files the rows.
    pub(super) fn lost_records(&self) -> u64 {
        match self.lost.is_empty() {
            true if self.topics.is_empty() => self.lost_rows,
            _ => self.lost.iter().map(|lost| lost.until - lost.from).sum(),
        }
    }

    /// The records that are left out, by partition.
    pub(super) fn lost(&self) -> Vec<LostRecords> {
        let named = |lost: &Lost| {
            let (place, partition) = lost.part.topic_and_partition();
            let topic = self.topics.get(&place).map(|topic| topic.name.clone()).unwrap_or_default();
            LostRecords { topic, partition, from: lost.from, until: lost.until }
        };
        self.lost.iter().map(named).collect()
    }

    /// The event of an attempt that goes on from `checkpoint`.
    pub(super) fn event(&self, checkpoint: &str, step: u64) -> JobEvent {
        JobEvent::RolledBack {
            checkpoint: checkpoint.to_owned(),
            step,
            from_step: self.from_step,
            lost_rows: self.lost_rows,
            lost: self.lost(),
            rollbacks: self.number,
        }
    }
}

/// The records between two places in a stream, by partition. A partition that the topic has gained
/// since begins at 0.
fn lost_between(before: &StreamPlace, after: &StreamPlace) -> Vec<Lost> {
    let known: BTreeMap<PartId, u64> = untrained(before).into_iter().collect();
    let lost = untrained(after).into_iter().map(|(part, until)| {
        let from = known.get(&part).copied().unwrap_or(0);
        Lost { part, from, until }
    });
    lost.filter(|lost| lost.until > lost.from).collect()
}

/// The checkpoints to keep for a rollback: the last good one, and all newer ones. `known` has names
/// and trained rows, the oldest first. `good_before`: as in [`Fall`].
pub(super) fn from_the_last_good(known: &[(String, u64)], good_before: u64) -> &[(String, u64)] {
    let last_good = known.iter().rposition(|(_, samples)| *samples <= good_before);
    &known[last_good.unwrap_or(0)..]
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use rectrain_kinds::Segment;
    use rectrain_modes::{BegunChunk, PartitionPlace};
    use rectrain_protocol::plan::small_plan;

    use super::*;
    use crate::snapshot::Snapshot;

    fn place(partitions: &[(u32, u64)], begun: &[(u32, u64)]) -> StreamPlace {
        let partition = |&(part, next): &(u32, u64)| PartitionPlace { part: PartId(part), next };
        let chunk = |&(part, from): &(u32, u64)| {
            let segment = Segment { part: PartId(part), from, until: from + 24 };
            BegunChunk { segment, is_read: true }
        };
        StreamPlace {
            partitions: partitions.iter().map(partition).collect(),
            last_turn: None,
            begun: begun.iter().map(chunk).collect(),
        }
    }

    fn stream(place: StreamPlace) -> StreamSnapshot {
        let topics = [(0, Topic { name: "clicks".to_owned(), id: "07".to_owned() })].into();
        StreamSnapshot { place, topics, event_millis: None, files: None }
    }

    fn fall(place: StreamPlace) -> Fall {
        Fall { good_before: 500, step: 40, rows: 960, usual: 0.75, stream: stream(place), is_held: false }
    }

    fn good() -> Good {
        Good { name: "step-20".to_owned(), step: 20, newer: vec![CheckpointId(7)] }
    }

    /// The snapshot of the good checkpoint, after 480 rows.
    fn saved() -> Snapshot {
        let mut saved = Snapshot::before_first_row(&small_plan(&[]), 20, 0);
        saved.first_pass.rows = 480;
        saved.stream = Some(stream(place(&[(0, 300), (1, 240)], &[(0, 276)])));
        saved
    }

    #[test]
    fn the_rows_between_are_left_out_and_counted_by_partition() {
        let later = place(&[(0, 600), (1, 240), (2, 50)], &[(0, 552), (0, 576)]);
        let record = Record::new(None, good(), &fall(later.clone()), 1, 1_000);
        let back = saved().behind(&record);
        assert_eq!(back.stream.as_ref().map(|stream| &stream.place), Some(&later), "training goes on here");
        let rolled_back = back.rolled_back.as_ref().unwrap();
        let lost = |partition, from, until| LostRecords { topic: "clicks".to_owned(), partition, from, until };
        assert_eq!(rolled_back.lost(), [lost(0, 276, 552), lost(2, 0, 50)]);
        assert_eq!((rolled_back.lost_records(), rolled_back.lost_rows, rolled_back.usual), (326, 480, Some(0.75)));
        // Checkpoints that were saved since have their own places.
        let (mut newer, mut again) = (saved(), saved());
        newer.training.step = 21;
        again.rollbacks = back.rollbacks;
        for since in [newer, again] {
            assert_eq!(since.clone().behind(&record), since);
        }
    }

    #[test]
    fn rows_of_files_are_counted_without_partitions() {
        let rolled_back = RolledBack {
            usual: None,
            number: 1,
            lost_rows: 480,
            from_step: 40,
            lost: Vec::new(),
            topics: BTreeMap::new(),
        };
        assert_eq!((rolled_back.lost_records(), rolled_back.lost()), (480, vec![]));
        let nothing = RolledBack { topics: stream(place(&[], &[])).topics, ..rolled_back };
        assert_eq!(nothing.lost_records(), 0, "no record of the topic lies between");
    }

    #[test]
    fn the_fourth_rollback_within_an_hour_lets_training_wait() {
        let minute = 60_000;
        let mut last: Option<Record> = None;
        let mut back = |at: u64| {
            let record = Record::new(last.as_ref(), good(), &fall(place(&[], &[])), at, at * minute);
            let found = (record.number, record.holds, saved().behind(&record).rolled_back.unwrap().usual.is_some());
            last = Some(record);
            found
        };
        assert_eq!([0, 10, 20].map(&mut back), [(1, false, true), (2, false, true), (3, false, true)]);
        assert_eq!(back(59), (4, true, false), "a restart then compares new windows");
        assert_eq!(back(81), (5, false, true), "the ones at 59 and at 81 count");
    }

    #[tokio::test]
    async fn a_record_outlives_the_attempt_and_a_strange_one_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::open(folder.path().to_str().unwrap(), &BTreeMap::new(), true).unwrap();
        assert_eq!(Record::read(&directory).await.unwrap(), None);
        let record = Record::new(None, good(), &fall(place(&[(0, 5)], &[])), u64::MAX, 1_000);
        record.write(&directory).await.unwrap();
        assert_eq!(Record::read(&directory).await.unwrap(), Some(record.clone()));
        assert!(record.is_of(u64::MAX) && !record.is_of(1));
        Record { version: 2, ..record }.write(&directory).await.unwrap();
        let error = Record::read(&directory).await.unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("it has version 2, and not 1"), "{error}");
        std::fs::write(folder.path().join(RECORD), "{}").unwrap();
        let error = Record::read(&directory).await.unwrap_err().to_string();
        assert!(error.contains("rollback.json") && error.contains("missing field"), "{error}");
    }

    #[test]
    fn checkpoints_from_the_last_good_one_on_are_kept() {
        let known: Vec<(String, u64)> =
            [("a", 100), ("b", 200), ("c", 300)].map(|(name, rows)| (name.to_owned(), rows)).into();
        let kept =
            |before| from_the_last_good(&known, before).iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>();
        assert_eq!(kept(250), ["b", "c"]);
        assert_eq!(kept(200), ["b", "c"], "a checkpoint has the rows before it only");
        assert_eq!(kept(999), ["c"]);
        assert_eq!(kept(50), ["a", "b", "c"], "none is good, so each may be the last good one of a later fall");
    }
}
