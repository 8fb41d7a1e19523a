//! The life of a job as one pure function. [`decide`] takes the known facts, among them the last
//! status. It returns the new status and whether the job's pods should run. No clock, no network:
//! `reconcile` gathers the facts and carries out the decision.
//!
//! ```text
//!  Pending ──> Starting ──> Training <──> Evaluating ──> Complete
//!     │            ^ │          │              │
//!     │            │ └──────────┴──────┬───────┘  a crash: all pods go, back-off, a new attempt
//!     │            └──── Restarting <──┘
//!     └── any of them: Suspended (spec.suspend) and back, or Failed
//! ```
//!
//! A *crash* is the coordinator's report that the job has failed, or no progress for
//! `stallSeconds`. The node restarts a container that ended; the coordinator decides whether that
//! disturbs the job. Every restart of either kind counts.
//!
//! A decision is drafted in [`draft::Draft`]. Each file of this folder has the part of the draft
//! that its name says.

mod attempts;
mod changes;
mod conditions;
mod decision;
mod draft;
mod ending;
mod facts;
mod mode;
mod progress;
mod restarts;
mod running;
mod scaling;
mod settings;
mod slowest;
mod suspension;
mod time;

use rectrain_crds::Phase;

pub use self::conditions::{CHECKPOINTED, NO_CHECKPOINT_PATH};
pub use self::decision::{Decision, Run};
pub use self::facts::Facts;
pub use self::settings::{max_restarts, stall_seconds, wanted_mode};

use self::draft::Draft;

/// Decides about a job. See the module's documentation.
#[must_use]
pub fn decide(facts: &Facts<'_>) -> Decision {
    let draft = Draft::new(facts);
    match draft.before.phase {
        Some(Phase::Complete | Phase::Failed) if !draft.is_corrected() => draft.stay_ended(),
        _ => draft.live(),
    }
}
