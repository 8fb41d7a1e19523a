//! Signals about a job's attempt that no status holds: they cover the last minutes, and a new
//! operator collects them again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use jiff::{SignedDuration, Timestamp};
use rectrain_crds::Role;

use crate::coordinator_view::CoordinatorView;
use crate::failure::Problem;
use crate::pods::PodFacts;

/// Time after a displaced pod in which the end of its attempt is attributed to it. Pods have their
/// grace period to end.
const DISPLACEMENT: SignedDuration = SignedDuration::from_mins(10);

/// The signals that decisions read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttemptSignals {
    /// Since when the coordinator has not answered this operator.
    pub silent_since: Option<Timestamp>,
    /// Since when no pod started, ended or restarted its container.
    pub unchanged_since: Option<Timestamp>,
    /// The checkpoint requested because the present manifest ends the attempt.
    pub saving: Saving,
    /// Whether the coordinator's pod was displaced and replaced.
    pub coordinator_displaced: bool,
    /// Whether a pod of the attempt was displaced lately: a drain, a shutdown, a preemption or an
    /// eviction.
    pub displaced: bool,
    /// Why the cluster creates no pods of the job, or does not start their containers.
    pub pods_refused: Option<Problem>,
    /// Why a change of the manifest cannot be carried out.
    pub change_refused: Option<Problem>,
    /// When the pod of a member was last seen blocked.
    pub blocked_at: Option<Timestamp>,
    /// Which number of replicas two programs write in turn.
    pub contested: Option<Problem>,
    /// Why a job that is about to begin has to wait for its checkpoint path.
    pub path_in_use: Option<Problem>,
}

/// The state of the checkpoint to save before an attempt ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Saving {
    /// It was not requested.
    #[default]
    No,
    /// It was requested and does not exist yet.
    UnderWay,
    /// It exists, or could not be saved.
    Over,
}

/// The reason for the end of an attempt: a suspension, or a change of its pods' settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndReason {
    /// The attempt's number.
    pub attempt: u32,
    /// `spec.suspend`.
    pub is_suspended: bool,
    /// Digest of the parts of the spec that pods depend on.
    pub spec_hash: String,
}

/// One look at an attempt.
#[derive(Clone, Copy)]
pub struct AttemptLook<'a> {
    /// The attempt's number.
    pub attempt: u32,
    /// The coordinator's report.
    pub view: &'a CoordinatorView,
    /// The job's pods.
    pub pods: &'a [PodFacts],
    /// The present.
    pub now: Timestamp,
}

/// The state between two looks at a job's attempt.
#[derive(Clone, Debug, Default)]
pub struct AttemptMemory {
    silent: Option<Silence>,
    running: Option<(Running, Timestamp)>,
    coordinator: Option<CoordinatorPod>,
    saving: Option<RequestedCheckpoint>,
    displaced: Option<Displacement>,
}

/// The coordinator of `attempt` does not answer.
#[derive(Clone, Copy, Debug)]
struct Silence {
    attempt: u32,
    since: Timestamp,
}

/// The progress of an attempt's pods while they start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Running {
    attempt: u32,
    /// Pods that run.
    pods: usize,
    /// Restarts of their containers.
    restarts: u32,
}

/// The pod of an attempt's coordinator.
#[derive(Clone, Debug)]
struct CoordinatorPod {
    attempt: u32,
    uid: String,
}

/// A pod of `attempt` was displaced, last seen `at`.
#[derive(Clone, Copy, Debug)]
struct Displacement {
    attempt: u32,
    at: Timestamp,
}

/// A checkpoint that was requested, and whether the request has ended.
#[derive(Clone, Debug)]
struct RequestedCheckpoint {
    reason: EndReason,
    has_ended: Arc<AtomicBool>,
}

impl AttemptMemory {
    /// Adds a look. Returns the signals that pods and the coordinator give.
    pub fn look(&mut self, look: AttemptLook<'_>) -> AttemptSignals {
        let displaced = self.is_displaced(look);
        AttemptSignals {
            silent_since: self.silent_since(look),
            unchanged_since: Some(self.unchanged_since(look)),
            displaced,
            coordinator_displaced: self.is_another_coordinator(look, displaced),
            ..AttemptSignals::default()
        }
    }

    fn silent_since(&mut self, look: AttemptLook<'_>) -> Option<Timestamp> {
        let AttemptLook { attempt, view, now, .. } = look;
        let before = self.silent.filter(|silence| silence.attempt == attempt);
        let since = before.map_or(now, |silence| silence.since);
        let is_silent = matches!(view, CoordinatorView::Silent);
        self.silent = is_silent.then_some(Silence { attempt, since });
        is_silent.then_some(since)
    }

    fn unchanged_since(&mut self, look: AttemptLook<'_>) -> Timestamp {
        let AttemptLook { attempt, pods, now, .. } = look;
        let own = || pods.iter().filter(|pod| pod.attempt == attempt);
        let running = Running {
            attempt,
            pods: own().filter(|pod| pod.is_running).count(),
            restarts: own().map(|pod| pod.restarts).sum(),
        };
        let since = self.running.filter(|(before, _)| *before == running).map_or(now, |(_, since)| since);
        self.running = Some((running, since));
        since
    }

    fn is_displaced(&mut self, look: AttemptLook<'_>) -> bool {
        let AttemptLook { attempt, pods, now, .. } = look;
        if pods.iter().any(|pod| pod.attempt == attempt && pod.is_displaced()) {
            self.displaced = Some(Displacement { attempt, at: now });
        }
        self.displaced.is_some_and(|last| last.attempt == attempt && now.duration_since(last.at) <= DISPLACEMENT)
    }

    /// Whether the coordinator has another pod than at first, because its pod was displaced. It
    /// stays true until the attempt ends.
    fn is_another_coordinator(&mut self, look: AttemptLook<'_>, displaced: bool) -> bool {
        let AttemptLook { attempt, pods, .. } = look;
        let is_its = |pod: &&PodFacts| pod.attempt == attempt && pod.role == Role::Coordinator && !pod.is_terminating;
        let Some(pod) = pods.iter().find(is_its) else { return false };
        let is_another =
            self.coordinator.as_ref().is_some_and(|known| known.attempt == attempt && known.uid != pod.uid);
        if !(is_another && displaced) {
            self.coordinator = Some(CoordinatorPod { attempt, uid: pod.uid.clone() });
        }
        is_another && displaced
    }

    /// A checkpoint was requested. `has_ended` is set when the request has ended.
    pub fn begin_saving(&mut self, reason: EndReason, has_ended: Arc<AtomicBool>) {
        self.saving = Some(RequestedCheckpoint { reason, has_ended });
    }

    /// The attempt continues. A later end needs another checkpoint.
    pub fn stop_saving(&mut self) {
        self.saving = None;
    }

    /// The state of the checkpoint requested for this reason.
    #[must_use]
    pub fn saving(&self, reason: &EndReason) -> Saving {
        match &self.saving {
            Some(requested) if requested.reason == *reason => {
                if requested.has_ended.load(Ordering::Acquire) {
                    Saving::Over
                } else {
                    Saving::UnderWay
                }
            }
            _ => Saving::No,
        }
    }
}
