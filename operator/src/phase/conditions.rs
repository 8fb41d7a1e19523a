//! The conditions of a job, from its phase and its problem. Pure.
//!
//! | type | true while |
//! |---|---|
//! | `Ready` | the job trains with all its pods and by its manifest, or is complete |
//! | `Reconciling` | it is on its way there: pods start, or it recovers from a crash |
//! | `Stalled` | it needs the user to do as the message says |
//! | `Complete`, `Failed` | it has ended |
//! | `Suspended` | `spec.suspend` suspends it |
//! | `Checkpointed` | it saves checkpoints, so a suspension or a crash keeps its training |
//!
//! kstatus reads `Ready`, `Reconciling` and `Stalled` (for Argo CD, Flux and `kubectl wait`).

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use rectrain_crds::Phase;

use crate::failure::Problem;

/// The facts that conditions are made from.
pub(super) struct ConditionFacts<'a> {
    /// The conditions before. A condition keeps its time as long as it keeps its status.
    pub(super) before: &'a [Condition],
    pub(super) phase: Phase,
    pub(super) problem: Option<&'a Problem>,
    /// The message of a job that makes no step for longer than usual.
    pub(super) no_step: Option<&'a str>,
    /// Whether the manifest has a path for checkpoints.
    pub(super) has_checkpoint_path: bool,
    /// Whether each role has all its pods, by the manifest.
    pub(super) all_ready: bool,
    pub(super) generation: Option<i64>,
    pub(super) now: Timestamp,
}

/// The condition of a job whose training outlives its pods.
pub const CHECKPOINTED: &str = "Checkpointed";
/// The reason for which a job is not [`CHECKPOINTED`].
pub const NO_CHECKPOINT_PATH: &str = "NoCheckpointPath";
const LOSES_TRAINING: &str = "spec.checkpoint.path is not set: a suspension, a crash of the job, or a change of the manifest that needs new pods loses all training. Set it before the job has trained for long, because this change needs new pods too";

/// All conditions, in a fixed order.
pub(super) fn conditions(facts: &ConditionFacts<'_>) -> Vec<Condition> {
    let phase = facts.phase;
    let is_live = matches!(phase, Phase::Training | Phase::Evaluating);
    let has_ended = matches!(phase, Phase::Complete | Phase::Failed);
    // The operator recovers from a crash; other problems wait for the user, unless they may pass.
    let waits = |problem: &Problem| !problem.cause.is_crash() && !problem.may_pass;
    let stalled = phase == Phase::Failed || facts.problem.is_some_and(waits);
    let ready = phase == Phase::Complete || (is_live && facts.all_ready && facts.problem.is_none());
    let reconciling = !has_ended && phase != Phase::Suspended && !ready && !stalled;
    [
        ("Ready", ready),
        ("Reconciling", reconciling),
        ("Stalled", stalled),
        ("Complete", phase == Phase::Complete),
        ("Failed", phase == Phase::Failed),
        ("Suspended", phase == Phase::Suspended),
    ]
    .into_iter()
    .map(|(kind, holds)| condition(facts, kind, holds))
    .chain([checkpointed(facts)])
    .collect()
}

/// Whether the job's training outlives its pods.
fn checkpointed(facts: &ConditionFacts<'_>) -> Condition {
    let (reason, message) = if facts.has_checkpoint_path {
        ("CheckpointPath", String::new())
    } else {
        (NO_CHECKPOINT_PATH, LOSES_TRAINING.to_owned())
    };
    Condition { reason: reason.to_owned(), message, ..condition(facts, CHECKPOINTED, facts.has_checkpoint_path) }
}

fn condition(facts: &ConditionFacts<'_>, kind: &str, holds: bool) -> Condition {
    let status = if holds { "True" } else { "False" };
    let before = facts.before.iter().find(|c| c.type_ == kind && c.status == status);
    // `Ready` explains why it is false; the other conditions have a message only while they are
    // true.
    let (reason, message) =
        if holds || kind == "Ready" { explanation(facts) } else { (facts.phase.name(), String::new()) };
    Condition {
        type_: kind.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(before.map_or(facts.now, |before| before.last_transition_time.0)),
        observed_generation: facts.generation,
    }
}

/// Reason and message: of the problem, or of the phase if there is none.
fn explanation(facts: &ConditionFacts<'_>) -> (&'static str, String) {
    match facts.problem {
        Some(problem) => (problem.cause.reason(), problem.message.clone()),
        None => (facts.phase.name(), facts.no_step.unwrap_or_else(|| phase_message(facts)).to_owned()),
    }
}

fn phase_message<'a>(facts: &ConditionFacts<'a>) -> &'a str {
    match facts.phase {
        Phase::Pending => "its pods are about to be created",
        Phase::Starting => "its pods are starting",
        Phase::Training => "the job trains",
        Phase::Evaluating => "the job predicts the test rows",
        Phase::Restarting => "its roles restart",
        Phase::Suspended if !facts.has_checkpoint_path => {
            "spec.suspend suspends it: set it to false to start it again from step 0. Its training is lost, because spec.checkpoint.path is not set"
        }
        Phase::Suspended => "spec.suspend suspends it: set it to false to continue",
        Phase::Complete => "the job is trained; the results are in status.summary",
        Phase::Failed => "the job has failed",
    }
}
