//! What a job tells whoever follows it: one JSON object an event, the last being the summary or the failure.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::member::Role;

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
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Logged {
    /// Counted from 1; superseded ones leave gaps.
    pub number: u64,
    /// When, in seconds since 1970 (UTC).
    pub at: f64,
    /// It.
    pub event: JobEvent,
}

/// Events so far, for followers who may come late or be slow: all but superseded progress is kept.
#[derive(Debug, Clone)]
pub struct EventLog {
    events: Arc<Mutex<Vec<Logged>>>,
    latest: watch::Sender<u64>,
}

impl Default for EventLog {
    fn default() -> Self {
        Self { events: Arc::default(), latest: watch::Sender::new(0) }
    }
}

impl EventLog {
    /// Adds an event; a progress event replaces the one before it.
    pub fn push(&self, event: JobEvent) {
        let number = {
            let mut events = self.lock();
            let number = events.last().map_or(1, |last| last.number + 1);
            let supersedes = |last: &Logged| {
                matches!(last.event, JobEvent::Progress { .. }) && matches!(event, JobEvent::Progress { .. })
            };
            if events.last().is_some_and(supersedes) {
                events.pop();
            }
            let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
            events.push(Logged { number, at, event });
            number
        };
        self.latest.send_replace(number);
    }

    /// A follower that sees every event that is kept, from the first.
    #[must_use]
    pub fn follow(&self) -> EventFollower {
        EventFollower { log: self.clone(), latest: self.latest.subscribe(), seen: 0, ended: false }
    }

    /// The latest `most` events that are kept after the one with this number.
    #[must_use]
    pub fn after(&self, number: u64, most: usize) -> Vec<Logged> {
        let events = self.lock();
        let next = events.partition_point(|event| event.number <= number);
        events[next.max(events.len().saturating_sub(most))..].to_vec()
    }

    fn next_after(&self, number: u64) -> Option<Logged> {
        let events = self.lock();
        let next = events.partition_point(|event| event.number <= number);
        events.get(next).cloned()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Logged>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
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
        loop {
            if self.ended {
                return None;
            }
            if let Some(Logged { number, event, .. }) = self.log.next_after(self.seen) {
                self.seen = number;
                self.ended = event.is_last();
                return Some(event);
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
