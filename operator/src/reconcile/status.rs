//! The conditions of a job, from its phase and what keeps it from training. Pure.
//!
//! | type | true while |
//! |---|---|
//! | `Ready` | the job trains with all its pods and as its manifest says, or is complete |
//! | `Reconciling` | it is on its way there: pods start, or a crash is being recovered from |
//! | `Stalled` | it gets there only if somebody does what the message says |
//! | `Complete`, `Failed` | it has ended |
//! | `Suspended` | `spec.suspend` holds it |
//!
//! `Ready`, `Reconciling` and `Stalled` are read by kstatus (and so by Argo CD, Flux and `kubectl wait`).

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use rectrain_crds::Phase;

use crate::failure::Problem;

/// See the module's text. A condition keeps its time as long as it keeps its status.
#[must_use]
pub fn conditions(
    before: &[Condition],
    phase: Phase,
    problem: Option<&Problem>,
    all_ready: bool,
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<Condition> {
    // The phase is the reason of a condition that no problem explains.
    let reason = problem.map_or(phase.name(), |problem| problem.cause.reason());
    let message = problem.map_or_else(|| phase_message(phase).to_owned(), |problem| problem.message.clone());
    let is_live = matches!(phase, Phase::Training | Phase::Evaluating);
    let has_ended = matches!(phase, Phase::Complete | Phase::Failed);
    // A crash is being recovered from; whatever else is wrong waits for somebody, unless it may pass.
    let waits = |problem: &Problem| !problem.cause.is_crash() && !problem.may_pass;
    let stalled = phase == Phase::Failed || problem.is_some_and(waits);
    let ready = phase == Phase::Complete || (is_live && all_ready && problem.is_none());
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
    .map(|(kind, holds)| {
        let status = if holds { "True" } else { "False" };
        let since = before.iter().find(|c| c.type_ == kind && c.status == status).map(|c| c.last_transition_time.0);
        // `Ready` says why it is not; the others have nothing to say while they do not hold.
        let (reason, message) =
            if holds || kind == "Ready" { (reason, message.clone()) } else { (phase.name(), String::new()) };
        Condition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message,
            last_transition_time: Time(since.unwrap_or(now)),
            observed_generation: generation,
        }
    })
    .collect()
}

fn phase_message(phase: Phase) -> &'static str {
    match phase {
        Phase::Pending => "its pods are about to be made",
        Phase::Starting => "its pods are starting",
        Phase::Training => "steps are being made",
        Phase::Evaluating => "the test rows are being predicted",
        Phase::Restarting => "its roles start again",
        Phase::Suspended => "spec.suspend holds it: set it to false to go on",
        Phase::Complete => "trained; the results are in status.summary",
        Phase::Failed => "it has failed",
    }
}
