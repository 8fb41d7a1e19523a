//! What the operator notices of a job and no status has: it is about the last minutes, and an operator that takes over notices it anew.

use jiff::{SignedDuration, Timestamp};

use crate::coordinator::CoordinatorView;
use crate::failure::Problem;
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
    /// Whether a pod of the attempt had to make way lately: its node was drained or shut down, or another pod was more important.
    pub made_way: bool,
    /// What keeps the cluster from making pods of the job, or from beginning their containers.
    pub pods_refused: Option<Problem>,
    /// What keeps a changed manifest from being carried out.
    pub change_refused: Option<Problem>,
}

/// What is remembered of a job from look to look. It goes with the job.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// The attempt whose coordinator is silent, and since when.
    silent: Option<(u32, Timestamp)>,
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
        if pods.iter().any(|pod| pod.attempt == attempt && pod.makes_way()) {
            self.made_way = Some((attempt, now));
        }
        let made_way = self.made_way.is_some_and(|(of, at)| of == attempt && now.duration_since(at) <= MADE_WAY);
        Noticed { silent_since: is_silent.then_some(since), made_way, ..Noticed::default() }
    }
}
