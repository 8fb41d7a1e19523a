//! What the operator notices of a job and no status has: it is about the last minutes, and an operator that takes over notices it anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use jiff::{SignedDuration, Timestamp};

use crate::coordinator::CoordinatorView;
use crate::failure::Problem;
use crate::names::Role;
use crate::pods::PodFacts;
use crate::reconcile::refused_pods::Lacking;
use crate::reconcile::rehearse::Rehearsal;

/// How long after a pod had to make way the end of its attempt is laid to that: pods have their grace period to end in.
const MADE_WAY: SignedDuration = SignedDuration::from_mins(10);

/// What decisions read of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Noticed {
    /// Since when the coordinator of the attempt has not answered this operator.
    pub silent_since: Option<Timestamp>,
    /// Since when as many of the attempt's pods run as do, and no container of theirs was started again.
    pub unchanged_since: Option<Timestamp>,
    /// The checkpoint that its coordinator was asked for because the manifest as it is now ends the attempt.
    pub saving: Saving,
    /// Whether another pod has just taken the place of the attempt's coordinator, which had to make way.
    pub coordinator_made_way: bool,
    /// Whether a pod of the attempt had to make way lately: its node was drained or shut down, or another pod was more important.
    pub made_way: bool,
    /// What keeps the cluster from making pods of the job, or from beginning their containers.
    pub pods_refused: Option<Problem>,
    /// What keeps a changed manifest from being carried out.
    pub change_refused: Option<Problem>,
}

/// How a checkpoint stands that an attempt is to leave.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Saving {
    /// It was not asked for.
    #[default]
    No,
    /// It was, and does not exist yet.
    UnderWay,
    /// It exists, or there is none to be had.
    Over,
}

/// How a job's manifest ends an attempt: that it is suspended, or what its pods depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ending {
    /// The attempt's number.
    pub attempt: u32,
    /// `spec.suspend`.
    pub is_suspended: bool,
    /// Digest of the parts of the spec that pods depend on.
    pub spec_hash: String,
}

/// What is remembered of a job from look to look. It goes with the job.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// The attempt whose coordinator is silent, and since when.
    silent: Option<(u32, Timestamp)>,
    /// The attempt of which so many pods run, how often their containers were started again, and since when that is so.
    running: Option<((u32, usize, u32), Timestamp)>,
    /// The attempt and the pod of its coordinator.
    coordinator: Option<(u32, String)>,
    /// What a checkpoint was asked for, and whether that has ended.
    saving: Option<(Ending, Arc<AtomicBool>)>,
    /// The attempt of which a pod had to make way, and when that was last seen.
    made_way: Option<(u32, Timestamp)>,
    /// Pods that are not made, or whose containers are not begun.
    pub(crate) lacking: Option<Lacking>,
    /// The last change of the manifest that was tried out.
    pub(crate) rehearsal: Option<Rehearsal>,
}

impl Memory {
    /// Takes in what is seen of the attempt now.
    pub fn look(&mut self, attempt: u32, view: &CoordinatorView, pods: &[PodFacts], now: Timestamp) -> Noticed {
        let is_silent = matches!(view, CoordinatorView::Silent);
        let since = self.silent.filter(|(of, _)| *of == attempt).map_or(now, |(_, since)| since);
        self.silent = is_silent.then_some((attempt, since));
        let own = || pods.iter().filter(|pod| pod.attempt == attempt);
        let running = (attempt, own().filter(|pod| pod.is_running).count(), own().map(|pod| pod.restarts).sum());
        let unchanged_since = self.running.filter(|(before, _)| *before == running).map_or(now, |(_, since)| since);
        self.running = Some((running, unchanged_since));
        if pods.iter().any(|pod| pod.attempt == attempt && pod.makes_way()) {
            self.made_way = Some((attempt, now));
        }
        let made_way = self.made_way.is_some_and(|(of, at)| of == attempt && now.duration_since(at) <= MADE_WAY);
        Noticed {
            silent_since: is_silent.then_some(since),
            unchanged_since: Some(unchanged_since),
            made_way,
            coordinator_made_way: self.is_another_coordinator(attempt, pods, made_way),
            ..Noticed::default()
        }
    }

    /// Whether the attempt's coordinator has another pod than when it was looked at first, because that had to make way: until the attempt is over.
    fn is_another_coordinator(&mut self, attempt: u32, pods: &[PodFacts], made_way: bool) -> bool {
        let is_its = |pod: &&PodFacts| pod.attempt == attempt && pod.role == Role::Coordinator && !pod.is_leaving;
        let Some(pod) = pods.iter().find(is_its) else { return false };
        let is_another = self.coordinator.as_ref().is_some_and(|(of, uid)| *of == attempt && *uid != pod.uid);
        if !(is_another && made_way) {
            self.coordinator = Some((attempt, pod.uid.clone()));
        }
        is_another && made_way
    }

    /// A checkpoint was asked for, because of this.
    pub fn saves(&mut self, ending: Ending, has_ended: Arc<AtomicBool>) {
        self.saving = Some((ending, has_ended));
    }

    /// No checkpoint is waited for: training goes on, and the next that is asked for is another.
    pub fn saves_nothing(&mut self) {
        self.saving = None;
    }

    /// How the checkpoint stands that was asked for because of this.
    #[must_use]
    pub fn saving(&self, ending: &Ending) -> Saving {
        match &self.saving {
            Some((of, has_ended)) if of == ending => {
                if has_ended.load(Ordering::Acquire) {
                    Saving::Over
                } else {
                    Saving::UnderWay
                }
            }
            _ => Saving::No,
        }
    }
}
