//! What a job tells whoever follows it: one JSON object an event, the last being the summary or the failure.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use rectrain_kinds::Role;

/// One thing that happened. Serialized with `"event"` as its first field.
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
    },
    /// How far training is. At most a few a second.
    Progress {
        /// Global batches trained.
        step: u64,
        /// Global batches in all, once known.
        total_steps: Option<u64>,
        /// Samples trained so far.
        samples: u64,
        /// Over the last seconds.
        samples_per_second: f64,
        /// Mean loss of the samples since the last event.
        loss: f64,
        /// Over the latest training predictions, each made before its sample was learned.
        running_auc: Option<f64>,
    },
    /// The training mode was switched.
    ModeSwitched {
        /// Before this global step.
        step: u64,
        /// The mode until then.
        from: String,
        /// The mode since.
        to: String,
    },
    /// The training mode was chosen for a reason, as with `spec.training.mode: auto`; `ModeSwitched` follows at a boundary.
    ModeChosen {
        /// The mode to go on in.
        mode: String,
        /// A sentence with what was measured and predicted.
        reason: String,
    },
    /// Another number of a role's members is asked for, or that the slots are spread anew over the same parameter servers; those that
    /// join are waited for.
    Scaling {
        /// Whose.
        role: Role,
        /// Members until then.
        from: u32,
        /// Members to be.
        to: u32,
        /// Why, if that was said.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        reason: Option<String>,
    },
    /// Members of a role have joined or left while training went on; parameter servers: see `SlotsMoved`.
    Scaled {
        /// Whose.
        role: Role,
        /// Members until then.
        from: u32,
        /// Members since.
        to: u32,
    },
    /// Slots have moved between parameter servers while training went on.
    SlotsMoved {
        /// Parameter servers until then.
        from: u32,
        /// Parameter servers since.
        to: u32,
        /// Slots that moved; 0 if all were where they should be.
        slots: u64,
        /// Bytes of rows sent, those that were sent again because they changed included.
        bytes: u64,
        /// Time from the plan until the new map was in force.
        seconds: f64,
        /// Of that, time in which training rested.
        rest_seconds: f64,
        /// Look-ups of the busiest parameter server over their mean, as measured before.
        imbalance: f64,
        /// The slot map in force.
        map_epoch: u64,
    },
    /// Training goes on from a checkpoint.
    Resumed {
        /// Its name in the checkpoint path.
        checkpoint: String,
        /// Before this global step.
        step: u64,
        /// Global batches that were trained until then.
        batches: u64,
        /// Embedding rows that were restored.
        rows: u64,
    },
    /// A checkpoint exists.
    CheckpointSaved {
        /// Before this global step.
        step: u64,
        /// Its name in the checkpoint path.
        checkpoint: String,
        /// Embedding rows in it.
        rows: u64,
        /// Bytes of its files.
        bytes: u64,
        /// Time from the instant it is of until it existed.
        seconds: f64,
    },
    /// The test part was predicted.
    Evaluation {
        /// Before this global step.
        step: u64,
        /// What was found.
        test: TestMetrics,
    },
    /// Something that the user should know and that does not stop the job.
    Warning {
        /// One sentence.
        message: String,
    },
    /// A crash ended all processes; they begin again, from the last checkpoint if there is one.
    Restarting {
        /// Which restart of the run this is, from 1.
        restart: u32,
        /// What happened.
        message: String,
        /// Time until then.
        seconds: u64,
    },
    /// A member that had died was replaced while the others went on.
    Rejoined {
        /// Its role and index.
        member: String,
        /// Chunks of data that are read and sent again for it.
        chunks: u64,
    },
    /// A member was told to end, as on a node that is drained: what it holds goes to others first.
    Leaving {
        /// Its role and index.
        member: String,
    },
    /// A coordinator that was killed is back, with all that it knew.
    CoordinatorTakenUp {
        /// Global batches that are trained.
        step: u64,
    },
    /// A parameter server that had died was started again, with the rows that it had held, and the others went on.
    ServerKeptRows {
        /// Its role and index.
        member: String,
    },
    /// The job is done.
    Summary(Box<Summary>),
    /// The job ended without being done.
    Failed {
        /// One sentence.
        message: String,
        /// Whether the manifest or the data is at fault.
        user_error: bool,
    },
}

/// Quality on the test part.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TestMetrics {
    /// Area under the ROC curve; none if all labels are equal.
    pub auc: Option<f64>,
    /// Impression-weighted mean of the groups' AUCs, if the manifest names a group column.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gauc: Option<f64>,
    /// Mean binary cross-entropy.
    pub log_loss: Option<f64>,
    /// Log loss over the entropy of the base rate.
    pub normalized_entropy: Option<f64>,
    /// Mean prediction over mean label.
    pub calibration: Option<f64>,
    /// Test rows.
    pub samples: u64,
}

/// The result of a job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// The last evaluation; none without test data.
    pub test: Option<TestMetrics>,
    /// Global steps trained.
    pub steps: u64,
    /// Samples trained.
    pub samples: u64,
    /// Wall-clock time from the first step to the last, evaluations left out.
    pub seconds: f64,
    /// `samples` / `seconds`.
    pub samples_per_second: f64,
    /// Rows in the embedding store.
    pub rows: u64,
    /// Bytes of the embedding store.
    pub store_bytes: u64,
    /// Bad rows of data that were skipped.
    pub skipped_rows: u64,
    /// The training mode at the end.
    pub mode: String,
    /// Switches of the training mode.
    pub mode_switches: u64,
    /// Rows that the coordinator's ledger has as trained, each once, over all epochs.
    pub trained_rows: u64,
    /// Batches with a token, handed out without a barrier; lost ones included.
    pub tokens_issued: u64,
    /// Of those, lost with the dense worker that held them.
    pub tokens_lost: u64,
    /// Local batches that `hopBw` dropped.
    pub dropped_batches: u64,
    /// Gradients of dense parameters that the parameter servers have taken into a step without a barrier, those left out for their
    /// staleness included: by the server with the fewest and the one with the most. All are `tokensIssued` less `tokensLost`.
    #[serde(default)]
    pub fewest_applied_gradients: u64,
    /// See `fewest_applied_gradients`.
    #[serde(default)]
    pub most_applied_gradients: u64,
    /// Gradients of dense parameters that were left out for their staleness.
    pub excluded_gradients: u64,
    /// Mean staleness of the dense gradients applied without a barrier, in global steps.
    pub mean_staleness: f64,
    /// The largest.
    pub max_staleness: u64,
    /// Restarts after crashes.
    #[serde(default)]
    pub restarts: u32,
    /// Global batches known to have been trained again after them, from the last checkpoint on.
    #[serde(default)]
    pub repeated_batches: u64,
    /// Bytes sent between processes, by kind of message.
    pub bytes_on_wire: BTreeMap<String, u64>,
    /// Digest of all dense parameters and all rows in key order: equal if and only if the trained model is.
    pub parameters_sha256: String,
}

impl JobEvent {
    /// Whether nothing follows.
    #[must_use]
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Summary(_) | Self::Failed { .. })
    }
}

/// An event of a log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Logged {
    /// Counted from 1; superseded ones leave gaps.
    pub number: u64,
    /// When, in seconds since 1970 (UTC).
    pub at: f64,
    /// It.
    pub event: JobEvent,
}

/// A log that goes on in another process leaves so many numbers out: more than the one before can have given to progress, which is in no
/// file.
const NUMBERS_LEFT_OUT: u64 = 1 << 32;

/// Events so far, for followers who may come late or be slow: all but superseded progress is kept.
#[derive(Debug, Clone)]
pub struct EventLog {
    events: Arc<Mutex<Events>>,
    latest: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct Events {
    kept: Vec<Logged>,
    /// Of the last one.
    number: u64,
    /// Where all but progress is written too.
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
            // What is read again must not be whole where it is not.
            self.file = None;
            tracing::warn!(%error, "events are not kept any more");
        }
    }
}

impl EventLog {
    /// Adds an event; a progress event replaces the one before it.
    pub fn push(&self, event: JobEvent) {
        let number = {
            let mut events = self.lock();
            events.number += 1;
            let is_progress = matches!(event, JobEvent::Progress { .. });
            let supersedes = |last: &Logged| is_progress && matches!(last.event, JobEvent::Progress { .. });
            if events.kept.last().is_some_and(supersedes) {
                events.kept.pop();
            }
            let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            let logged = Logged { number: events.number, at, event };
            if !is_progress {
                events.write(&logged);
            }
            events.kept.push(logged);
            events.number
        };
        self.latest.send_replace(number);
    }

    /// Goes on with the log that is kept in this file, and keeps this one there; `anew`: with none of it.
    ///
    /// # Errors
    /// A file that cannot be read or written.
    pub fn keep_in(&self, path: &Path, anew: bool) -> std::io::Result<()> {
        let mut file = OpenOptions::new().create(true).truncate(anew).read(true).write(true).open(path)?;
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        // The last line may have been cut off with the process that wrote it.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        file.set_len(whole as u64)?;
        file.seek(SeekFrom::End(0))?;
        let kept: Vec<Logged> =
            text[..whole].lines().map(serde_json::from_str).collect::<Result<_, _>>().map_err(std::io::Error::other)?;
        let mut events = self.lock();
        let number = kept.last().map_or(0, |last| last.number + NUMBERS_LEFT_OUT);
        *events = Events { kept, number, file: Some(file) };
        drop(events);
        self.latest.send_replace(number);
        Ok(())
    }

    /// How the job has ended, if it has.
    #[must_use]
    pub fn last(&self) -> Option<JobEvent> {
        self.lock().kept.last().map(|last| last.event.clone()).filter(JobEvent::is_last)
    }

    /// A follower that sees every event that is kept, from the first.
    #[must_use]
    pub fn follow(&self) -> EventFollower {
        self.follow_after(0)
    }

    /// A follower that has seen the event with this number, and all before it.
    #[must_use]
    pub fn follow_after(&self, seen: u64) -> EventFollower {
        EventFollower { log: self.clone(), latest: self.latest.subscribe(), seen, ended: false }
    }

    /// A follower that has seen the event with this number, all before it, and of those that are kept after it all but the newest `most`.
    #[must_use]
    pub fn follow_newest(&self, seen: u64, most: usize) -> EventFollower {
        let first = self.after(seen, most).first().map(|first| first.number);
        self.follow_after(first.map_or(seen, |first| first - 1))
    }

    /// The latest `most` events that are kept after the one with this number.
    #[must_use]
    pub fn after(&self, number: u64, most: usize) -> Vec<Logged> {
        let events = &self.lock().kept;
        let next = events.partition_point(|event| event.number <= number);
        events[next.max(events.len().saturating_sub(most))..].to_vec()
    }

    fn next_after(&self, number: u64) -> Option<Logged> {
        let events = &self.lock().kept;
        let next = events.partition_point(|event| event.number <= number);
        events.get(next).cloned()
    }

    fn lock(&self) -> MutexGuard<'_, Events> {
        self.events.lock()
    }
}

/// See [`EventLog::follow`].
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

    /// As [`Self::next`], with its number.
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
        }
    }

    #[tokio::test]
    async fn a_late_follower_sees_the_last_progress_and_everything_else() {
        let log = EventLog::default();
        log.push(progress(1));
        log.push(progress(2));
        log.push(JobEvent::Warning { message: "w".to_owned() });
        log.push(progress(3));
        log.push(JobEvent::Failed { message: "f".to_owned(), user_error: false });
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
    async fn a_log_that_is_kept_goes_on_where_it_was_cut_off() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("events.jsonl");
        let warning = |text: &str| JobEvent::Warning { message: text.to_owned() };
        let log = EventLog::default();
        log.keep_in(&path, false).unwrap();
        log.push(warning("first"));
        log.push(progress(1));
        let mut follower = log.follow();
        let seen = [follower.next_logged().await.unwrap(), follower.next_logged().await.unwrap()];
        std::fs::write(&path, [&*std::fs::read(&path).unwrap(), br#"{"number": 3, "at"#].concat()).unwrap();

        let log = EventLog::default();
        log.keep_in(&path, false).unwrap();
        log.push(warning("second"));
        let mut late = log.follow_after(seen[1].number);
        assert_eq!(late.next().await, Some(warning("second")), "and not the first again");
        let mut from_the_first = log.follow();
        assert_eq!((from_the_first.next().await, log.last()), (Some(warning("first")), None));

        let log = EventLog::default();
        log.keep_in(&path, true).unwrap();
        log.push(JobEvent::Failed { message: "f".to_owned(), user_error: false });
        assert_eq!((log.after(0, 9).len(), log.last().is_some()), (1, true));
        std::fs::write(&path, "no JSON\n").unwrap();
        assert!(EventLog::default().keep_in(&path, false).is_err());
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
