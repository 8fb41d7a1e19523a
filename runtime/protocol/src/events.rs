//! The events of a job, one JSON object each. The last event is the summary or the failure.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use rectrain_crds::TableSummary;
use rectrain_kinds::Role;
use rectrain_proto::v1;

use crate::failure::{Divergence, JobFailure};

/// An event. It is serialized with `"event"` as its first field.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum JobEvent {
    /// All members have joined and training begins.
    Started {
        /// Name of the job.
        job: String,
        /// Training mode.
        mode: String,
        /// Model kind.
        model: String,
        /// Number of dense parameters.
        dense_parameters: u64,
        /// Replicas by role.
        replicas: BTreeMap<String, u32>,
        /// The checkpoint of another job that this job begins with.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        from: Option<WarmStartOrigin>,
    },
    /// Progress of training. At most a few events a second.
    Progress {
        /// Global batches trained.
        step: u64,
        /// Global batches in all, once known.
        total_steps: Option<u64>,
        /// Samples trained so far.
        samples: u64,
        /// Throughput over the last seconds.
        samples_per_second: f64,
        /// Mean loss of the samples since the last event.
        loss: f64,
        /// AUC of the latest training predictions. Each was made before its sample was learned.
        running_auc: Option<f64>,
        /// L2 norm of the dense gradients before the optimizer, as the mean over the dense workers
        /// of each one's last step. Absent before the first step, and `null` in JSON if it is not
        /// finite.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        gradient_norm: Option<f64>,
        /// How far training is behind its stream: `lagRows`, `lagSeconds`, `eventTime`. `None` for
        /// a job on files.
        #[serde(flatten)]
        stream: Option<StreamLag>,
        /// The quality of the latest predictions, each made before its row was learned.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        window: Option<WindowQuality>,
        /// The quality of the frozen model's predictions on the latest rows that were read.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        baseline: Option<WindowQuality>,
    },
    /// The training mode was switched.
    ModeSwitched {
        /// The global step before which it was switched.
        step: u64,
        /// The mode before the switch.
        from: String,
        /// The mode after the switch.
        to: String,
    },
    /// A mode was requested with a reason, for instance by `spec.training.mode: auto`.
    /// `ModeSwitched` follows at the next boundary.
    ModeChosen {
        /// The requested mode.
        mode: String,
        /// A sentence with the measurements and predictions.
        reason: String,
    },
    /// Another number of members of a role was requested, or a rebalance of the slots over the same
    /// parameter servers. The job waits for new members to join.
    Scaling {
        /// The role.
        role: Role,
        /// Members before.
        from: u32,
        /// Members requested.
        to: u32,
        /// The reason, if the request had one.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        reason: Option<String>,
    },
    /// Members of a role have joined or left while training continued. For parameter servers see
    /// `SlotsMoved`.
    Scaled {
        /// The role.
        role: Role,
        /// Members before.
        from: u32,
        /// Members now.
        to: u32,
    },
    /// A member is slower than its peers, or no longer, and gets another share of the work. For a
    /// parameter server, `SlotsMoved` follows.
    ShareChanged {
        /// The role.
        role: Role,
        /// The member's index.
        index: u32,
        /// The work it gets over the work of a member of usual speed, up to 1.
        share: f64,
        /// Its time for a piece, a row or a batch, over the median of the other members.
        factor: f64,
    },
    /// Slots have moved between parameter servers while training continued.
    SlotsMoved {
        /// Parameter servers before.
        from: u32,
        /// Parameter servers now.
        to: u32,
        /// Slots that moved; 0 if all were on the right servers.
        slots: u64,
        /// Bytes of rows sent, including rows sent again because they changed.
        bytes: u64,
        /// Time from the plan until the new map was in force.
        seconds: f64,
        /// The part of that time for which training was paused.
        rest_seconds: f64,
        /// Look-ups of the busiest parameter server over their mean, measured before the move.
        imbalance: f64,
        /// The epoch of the slot map in force.
        map_epoch: u64,
    },
    /// Training resumes from a checkpoint.
    Resumed {
        /// Its name in the checkpoint path.
        checkpoint: String,
        /// The global step before which it was taken.
        step: u64,
        /// Global batches trained before it.
        batches: u64,
        /// Embedding rows restored.
        rows: u64,
    },
    /// The quality of predictions had fallen, so training goes on with an earlier checkpoint. The
    /// rows that were trained after it are left out.
    RolledBack {
        /// The name of the checkpoint in the checkpoint path.
        checkpoint: String,
        /// The global step before which it was taken.
        step: u64,
        /// The global step at which the quality had fallen.
        from_step: u64,
        /// Rows that were trained between the two. The model does not have them any more.
        lost_rows: u64,
        /// The records of a topic that are left out, by partition. Empty for followed files.
        lost: Vec<LostRecords>,
        /// Times that training went back in this checkpoint path so far.
        rollbacks: u64,
    },
    /// A new job begins with the model of another job's checkpoint.
    WarmStarted {
        /// The checkpoint.
        from: WarmStartOrigin,
        /// Embedding rows taken over.
        rows: u64,
        /// Features that the checkpoint does not have. Their rows and parameters start fresh.
        new_features: Vec<String>,
        /// Features of the checkpoint that the job does not have.
        left_out_features: Vec<String>,
        /// Dense parameters that the checkpoint does not have.
        fresh_parameters: u64,
        /// The optimizer whose dense state the checkpoint holds, if the job has another one. The
        /// state then starts fresh.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        replaced_optimizer: Option<String>,
    },
    /// A checkpoint was saved.
    CheckpointSaved {
        /// The global step before which it was taken.
        step: u64,
        /// Its name in the checkpoint path.
        checkpoint: String,
        /// Embedding rows in it.
        rows: u64,
        /// Bytes of its files.
        bytes: u64,
        /// Time from its boundary until it was complete.
        seconds: f64,
    },
    /// The model was evaluated on the test part.
    Evaluation {
        /// The global step before which it was evaluated.
        step: u64,
        /// The metrics.
        test: TestMetrics,
    },
    /// A problem that does not stop the job.
    Warning {
        /// One sentence.
        message: String,
    },
    /// A crash ended all processes. They restart, from the last checkpoint if there is one.
    Restarting {
        /// The number of this restart of the run, from 1.
        restart: u32,
        /// The cause.
        message: String,
        /// Back-off before the restart.
        seconds: u64,
    },
    /// A member that died was replaced while the others continued.
    Rejoined {
        /// Its role and index.
        member: String,
        /// Chunks of data that loaders replay for it.
        chunks: u64,
    },
    /// A member is about to end, for instance because its node is drained. Its rows move to other
    /// servers first.
    Leaving {
        /// Its role and index.
        member: String,
    },
    /// The coordinator was killed and has been replaced by one with the same state.
    CoordinatorTakenUp {
        /// Global batches trained.
        step: u64,
    },
    /// A parameter server died and was started again with all its rows, while the others continued.
    ServerKeptRows {
        /// Its role and index.
        member: String,
    },
    /// The job is done.
    Summary(Box<Summary>),
    /// The job failed.
    Failed {
        /// One sentence.
        message: String,
        /// Whether the manifest or the data is at fault.
        user_error: bool,
        /// The figures, if training diverged. The job is not restarted then.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        divergence: Option<Divergence>,
    },
}

/// Records of a partition that are left out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LostRecords {
    /// The topic.
    pub topic: String,
    /// The number of the partition in the topic.
    pub partition: u32,
    /// The offset of the first of them.
    pub from: u64,
    /// The offset behind the last of them. Training goes on here.
    pub until: u64,
}

/// The checkpoint of another job that a job begins with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WarmStartOrigin {
    /// The path in `spec.checkpoint.from`.
    pub path: String,
    /// The global step before which the checkpoint was taken. The job counts on from it.
    pub step: u64,
    /// Its name in the path.
    pub checkpoint: String,
    /// XXH3-64 of its manifest, which holds the checksums of all its files. 16 hexadecimal digits.
    pub digest: String,
}

/// The quality of the latest predictions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WindowQuality {
    /// Area under the ROC curve; `None` if all labels are equal. Predictions are counted in 1,024
    /// buckets, and the ones of a bucket are ties.
    pub auc: Option<f64>,
    /// Log loss over the entropy of the base rate.
    pub normalized_entropy: Option<f64>,
    /// Mean prediction over mean label.
    pub calibration: Option<f64>,
    /// Rows.
    pub rows: u64,
}

/// How far training is behind the stream that it reads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StreamLag {
    /// Records that wait at the brokers, or rows of followed files. Gaps between offsets count,
    /// too.
    #[serde(rename = "lagRows")]
    pub rows: u64,
    /// Followed files that were noticed and have unread rows; `None` if the job follows no paths.
    #[serde(rename = "lagFiles", skip_serializing_if = "Option::is_none", default)]
    pub files: Option<u64>,
    /// The age of the latest record that was read, in seconds; 0 if no record waits.
    #[serde(rename = "lagSeconds")]
    pub seconds: f64,
    /// The time of that record, in seconds since 1970 (UTC).
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub event_time: Option<f64>,
    /// Records that the brokers deleted before they were trained, or rows of lost files.
    #[serde(default)]
    pub lost_records: u64,
}

/// Counts of the files of followed paths, over the job's whole life.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FollowedFiles {
    /// Files that were taken for training, in order.
    pub taken: u64,
    /// Files that were noticed and have untrained rows.
    pub waiting: u64,
    /// Files that came late: they sort before a file that was taken already.
    pub late: u64,
    /// Files that changed after they were read.
    pub changed: u64,
    /// Files that disappeared or changed before all their rows were trained.
    pub lost: u64,
}

/// Quality on the test part.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TestMetrics {
    /// Area under the ROC curve; `None` if all labels are equal.
    pub auc: Option<f64>,
    /// Impression-weighted mean of the groups' AUCs, if the manifest names a group column.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gauc: Option<f64>,
    /// Test rows that GAUC leaves out because their group is missing. All other metrics count them.
    /// `None` if there are none.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub rows_without_group: Option<u64>,
    /// Mean binary cross-entropy.
    pub log_loss: Option<f64>,
    /// Log loss over the entropy of the base rate.
    pub normalized_entropy: Option<f64>,
    /// Mean prediction over mean label.
    pub calibration: Option<f64>,
    /// Test rows.
    pub samples: u64,
    /// By sparse feature: the share of its test look-ups without a row. No training row ever had
    /// these ids, or their rows have expired. An id counts for each row and each of its values.
    /// Features without test ids are left out.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub unseen: BTreeMap<String, f64>,
}

/// The result of a job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// The last evaluation; `None` without test data.
    pub test: Option<TestMetrics>,
    /// Global steps trained.
    pub steps: u64,
    /// Samples trained.
    pub samples: u64,
    /// Wall-clock time from the first step to the last, without evaluations.
    pub seconds: f64,
    /// `samples` / `seconds`.
    pub samples_per_second: f64,
    /// Mean training loss of the samples since the last event of progress.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loss: Option<f64>,
    /// The smallest such mean.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub best_loss: Option<f64>,
    /// The quality of the latest predictions of all dense workers on training rows, each made
    /// before its row was learned. `spec.training.quality.windowRows` bounds their number. Absent
    /// without a prediction.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub window: Option<WindowQuality>,
    /// Rows in the embedding store.
    pub rows: u64,
    /// Bytes of the embedding store.
    pub store_bytes: u64,
    /// The history of the tables' rows, if some table does not keep every row.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub table: Option<TableSummary>,
    /// Bad rows of data that were skipped.
    pub skipped_rows: u64,
    /// The training mode at the end.
    pub mode: String,
    /// Switches of the training mode.
    pub mode_switches: u64,
    /// Rows trained according to the coordinator's ledger, over all epochs.
    pub trained_rows: u64,
    /// Batches handed out with a token in modes without a barrier, including lost ones.
    pub tokens_issued: u64,
    /// Tokens lost with the dense worker that held them.
    pub tokens_lost: u64,
    /// Local batches that `hopBw` dropped.
    pub dropped_batches: u64,
    /// Local batches of replicas that died with their dense worker before the parameter servers had
    /// seen them (`shadow`). The servers have their updates of rows.
    #[serde(default)]
    pub lost_replica_batches: u64,
    /// The average sync gap of `shadow` (ShadowSync §4.1.1): the mean number of local batches of a
    /// worker between two exchanges. Exchanges that a pause requires do not count. Absent without
    /// an exchange.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub average_sync_gap: Option<f64>,
    /// Dense gradients applied without a barrier by the parameter server that applied the fewest.
    /// Gradients excluded for their staleness count as applied. Without losses, every server
    /// applies `tokensIssued` less `tokensLost`.
    #[serde(default)]
    pub fewest_applied_gradients: u64,
    /// The same for the parameter server that applied the most.
    #[serde(default)]
    pub most_applied_gradients: u64,
    /// Dense gradients excluded for their staleness.
    pub excluded_gradients: u64,
    /// Mean staleness of the dense gradients applied without a barrier, in global steps.
    pub mean_staleness: f64,
    /// Largest staleness of those gradients, in global steps.
    pub max_staleness: u64,
    /// Restarts after crashes.
    #[serde(default)]
    pub restarts: u32,
    /// Global batches known to be trained again after restarts, from the last checkpoint on.
    #[serde(default)]
    pub repeated_batches: u64,
    /// Bytes sent between processes, by kind of message.
    pub bytes_on_wire: BTreeMap<String, u64>,
    /// Digest of all dense parameters and of all rows in key order. Two trained models are equal if
    /// and only if their digests are.
    pub parameters_sha256: String,
}

/// Adds the counts of a parameter server to the history of the tables' rows.
#[must_use]
pub fn with_counts(table: TableSummary, counts: v1::TableCounts) -> TableSummary {
    TableSummary {
        admitted: table.admitted + counts.admitted,
        turned_away: table.turned_away + counts.turned_away,
        expired: table.expired + counts.expired,
        evicted: table.evicted + counts.evicted,
        gradients_dropped: table.gradients_dropped + counts.gradients_dropped,
        ..table
    }
}

impl From<JobFailure> for JobEvent {
    fn from(failure: JobFailure) -> Self {
        let JobFailure { message, user_error, divergence } = failure;
        Self::Failed { message, user_error, divergence }
    }
}

impl JobEvent {
    /// Whether this is the last event of a job.
    #[must_use]
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Summary(_) | Self::Failed { .. })
    }
}

/// An event in the log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Logged {
    /// The number of the event, from 1. Superseded progress leaves gaps.
    pub number: u64,
    /// When it was pushed, in seconds since 1970 (UTC).
    pub at: f64,
    /// The event.
    pub event: JobEvent,
}

/// The gap in the numbers when another process continues the log. It exceeds the number of progress
/// events of the process before, which are in no file.
const NUMBER_GAP: u64 = 1 << 32;

/// The log of all events except superseded progress. Followers may start late or be slow.
#[derive(Debug, Clone)]
pub struct EventLog {
    events: Arc<Mutex<Events>>,
    latest: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Events {
    retained: Vec<Logged>,
    /// The number of the last event.
    number: u64,
    /// The file of all events except progress.
    file: Option<File>,
}

impl Default for EventLog {
    fn default() -> Self {
        Self { events: Arc::default(), latest: watch::Sender::new(0) }
    }
}

impl Events {
    fn write(&mut self, logged: &Logged) {
        let Some(file) = &mut self.file else { return };
        let written = serde_json::to_vec(logged).map_err(std::io::Error::other).and_then(|mut line| {
            line.push(b'\n');
            file.write_all(&line)
        });
        if let Err(error) = written {
            // A gap in the file must not look like a complete log later, so nothing more is
            // written.
            self.file = None;
            tracing::warn!(%error, "events are no longer persisted");
        }
    }
}

impl EventLog {
    /// Adds an event. A progress event supersedes the progress event before it.
    pub fn push(&self, event: JobEvent) {
        let number = {
            let mut events = self.lock();
            events.number += 1;
            let is_progress = matches!(event, JobEvent::Progress { .. });
            let supersedes = |last: &Logged| is_progress && matches!(last.event, JobEvent::Progress { .. });
            if events.retained.last().is_some_and(supersedes) {
                events.retained.pop();
            }
            let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            let logged = Logged { number: events.number, at, event };
            if !is_progress {
                events.write(&logged);
            }
            events.retained.push(logged);
            events.number
        };
        self.latest.send_replace(number);
    }

    /// Continues the log in this file, and persists all later events there. With `anew`, the file
    /// starts empty.
    ///
    /// # Errors
    /// The file cannot be read or written.
    pub fn persist(&self, path: &Path, anew: bool) -> std::io::Result<()> {
        let mut file = OpenOptions::new().create(true).truncate(anew).read(true).write(true).open(path)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        // The process that wrote the file may have died within the last line.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64)?;
        file.seek(SeekFrom::End(0))?;
        let retained: Vec<Logged> =
            text[..whole].lines().map(serde_json::from_str).collect::<Result<_, _>>().map_err(std::io::Error::other)?;
        let mut events = self.lock();
        let number = retained.last().map_or(0, |last| last.number + NUMBER_GAP);
        *events = Events { retained, number, file: Some(file) };
        drop(events);
        self.latest.send_replace(number);
        Ok(())
    }

    /// Continues the numbers of a log that had reached `number` in another process, and whose file
    /// may be lost.
    pub fn continue_after(&self, number: u64) {
        let mut events = self.lock();
        events.number = events.number.max(number + NUMBER_GAP);
    }

    /// The number of the last event.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.lock().number
    }

    /// The last event of the job, if it has ended.
    #[must_use]
    pub fn last(&self) -> Option<JobEvent> {
        self.lock().retained.last().map(|last| last.event.clone()).filter(JobEvent::is_last)
    }

    /// A follower that gets every retained event from the first.
    #[must_use]
    pub fn follow(&self) -> EventFollower {
        self.follow_after(0)
    }

    /// A follower that gets the events after number `seen`.
    #[must_use]
    pub fn follow_after(&self, seen: u64) -> EventFollower {
        EventFollower { log: self.clone(), latest: self.latest.subscribe(), seen, ended: false }
    }

    /// A follower that gets the events after number `seen`, and of those only the newest `most`.
    #[must_use]
    pub fn follow_newest(&self, seen: u64, most: usize) -> EventFollower {
        let first = self.after(seen, most).first().map(|first| first.number);
        self.follow_after(first.map_or(seen, |first| first - 1))
    }

    /// The newest `most` retained events after `number`.
    #[must_use]
    pub fn after(&self, number: u64, most: usize) -> Vec<Logged> {
        let events = &self.lock().retained;
        let next = events.partition_point(|event| event.number <= number);
        events[next.max(events.len().saturating_sub(most))..].to_vec()
    }

    fn next_after(&self, number: u64) -> Option<Logged> {
        let events = &self.lock().retained;
        let next = events.partition_point(|event| event.number <= number);
        events.get(next).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Events> {
        self.events.lock()
    }
}

/// A reader of the log. It waits for events that are not there yet.
#[derive(Debug)]
pub struct EventFollower {
    log: EventLog,
    latest: watch::Receiver<u64>,
    seen: u64,
    ended: bool,
}

impl EventFollower {
    /// The next event; `None` after the last.
    pub async fn next(&mut self) -> Option<JobEvent> {
        self.next_logged().await.map(|logged| logged.event)
    }

    /// As [`Self::next`], with the number of the event.
    pub async fn next_logged(&mut self) -> Option<Logged> {
        loop {
            if self.ended {
                return None;
            }
            if let Some(logged) = self.log.next_after(self.seen) {
                self.seen = logged.number;
                self.ended = logged.event.is_last();
                return Some(logged);
            }
            self.latest.changed().await.ok()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(step: u64) -> JobEvent {
        JobEvent::Progress {
            step,
            total_steps: None,
            samples: 0,
            samples_per_second: 0.0,
            loss: 0.0,
            running_auc: None,
            gradient_norm: None,
            stream: None,
            window: None,
            baseline: None,
        }
    }

    #[tokio::test]
    async fn a_late_follower_sees_all_but_superseded_progress() {
        let log = EventLog::default();
        log.push(progress(1));
        log.push(progress(2));
        log.push(JobEvent::Warning { message: "w".to_owned() });
        log.push(progress(3));
        log.push(JobFailure::new("f", false).into());
        let mut follower = log.follow();
        let mut seen = Vec::new();
        while let Some(event) = follower.next().await {
            seen.push(event);
        }
        assert_eq!(seen.len(), 4);
        assert_eq!(seen[0], progress(2));
        let numbers = |after, most| log.after(after, most).iter().map(|logged| logged.number).collect::<Vec<_>>();
        assert_eq!((numbers(0, 9), numbers(3, 9), numbers(0, 2)), (vec![2, 3, 4, 5], vec![4, 5], vec![4, 5]));
        assert!(numbers(5, 9).is_empty());
        let first = |seen, most| {
            let mut follower = log.follow_newest(seen, most);
            async move { follower.next_logged().await.map(|logged| logged.number) }
        };
        assert_eq!((first(0, 9).await, first(0, 2).await, first(4, 2).await), (Some(2), Some(4), Some(5)));
    }

    #[tokio::test]
    async fn a_persisted_log_continues_after_a_torn_line() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("events.jsonl");
        let warning = |text: &str| JobEvent::Warning { message: text.to_owned() };
        let log = EventLog::default();
        log.persist(&path, false).unwrap();
        log.push(warning("first"));
        log.push(progress(1));
        let mut follower = log.follow();
        let seen = [follower.next_logged().await.unwrap(), follower.next_logged().await.unwrap()];
        std::fs::write(&path, [&*std::fs::read(&path).unwrap(), br#"{"number": 3, "at"#].concat()).unwrap();

        let log = EventLog::default();
        log.persist(&path, false).unwrap();
        log.push(warning("second"));
        let mut late = log.follow_after(seen[1].number);
        assert_eq!(late.next().await, Some(warning("second")), "the first event is not repeated");
        let mut from_the_first = log.follow();
        assert_eq!((from_the_first.next().await, log.last()), (Some(warning("first")), None));

        let log = EventLog::default();
        log.persist(&path, true).unwrap();
        log.push(JobFailure::new("f", false).into());
        assert_eq!((log.after(0, 9).len(), log.last().is_some()), (1, true));
        std::fs::write(&path, "no JSON\n").unwrap();
        assert!(EventLog::default().persist(&path, false).is_err());
    }

    #[test]
    fn the_summary_is_one_line_of_json_with_the_documented_fields() {
        let event = JobEvent::Summary(Box::new(Summary { test: Some(TestMetrics::default()), ..Summary::default() }));
        let json = serde_json::to_value(&event).unwrap();
        assert_eq!(json["event"], "summary");
        for field in
            ["test", "steps", "samples", "seconds", "samplesPerSecond", "rows", "bytesOnWire", "parametersSha256"]
        {
            assert!(json.get(field).is_some(), "{field}");
        }
        for field in ["auc", "logLoss", "normalizedEntropy", "calibration"] {
            assert!(json["test"].get(field).is_some(), "{field}");
        }
    }
}
