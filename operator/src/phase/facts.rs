//! The facts that a decision is made on.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use rectrain_crds::{FieldError, RecTrainingJob, ResolvedJob, Role};

use crate::attempt_signals::AttemptSignals;
use crate::automatic::Findings;
use crate::coordinator_view::{CoordinatorView, SwitchAnswer};
use crate::failure::Problem;
use crate::pods::PodFacts;

/// Everything that is known about a job.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// The present, in whole seconds.
    pub now: Timestamp,
    /// The job in the API server.
    pub job: &'a RecTrainingJob,
    /// Its manifest, resolved, or the errors in it.
    pub verdict: Result<&'a ResolvedJob, &'a [FieldError]>,
    /// The errors in its training mode, if there are no others. `verdict` then has the present
    /// mode.
    pub impossible_mode: Option<&'a [FieldError]>,
    /// Digest of the parts of the spec that pods depend on.
    pub spec_hash: &'a str,
    /// The image of new pods.
    pub image: &'a str,
    /// Whether new pods accept only members of their job.
    pub tls: bool,
    /// The job's pods.
    pub pods: &'a [PodFacts],
    /// Ready pods of each role's StatefulSet.
    pub ready: &'a BTreeMap<Role, u32>,
    /// The report of the present attempt's coordinator.
    pub coordinator: &'a CoordinatorView,
    /// Its answer to the request of an earlier decision on these facts
    /// ([`Decision::ask_mode`](super::Decision::ask_mode)).
    pub answer: Option<&'a SwitchAnswer>,
    /// The results of a look for automatic decisions, if this reconcile took one.
    pub automatic: Option<&'a Findings>,
    /// Why the operator cannot create an object of the job.
    pub obstacle: Option<&'a Problem>,
    /// Signals that this operator has collected lately.
    pub signals: &'a AttemptSignals,
    /// Time between two requests to a coordinator.
    pub poll: Duration,
}
