//! Decides about a job, and asks its coordinator and the API server as far as the decision depends
//! on their answers. Afterwards it asks the coordinator for members and for a checkpoint.

use std::time::Duration;

use kube_runtime::reflector::ObjectRef;
use rectrain_crds::{RecTrainingJob, Role};

use super::act::objects;
use super::context::Context;
use super::dry_run::{dry_run, is_needed};
use super::error::ReconcileError;
use super::gather::{Gathered, end_reason};
use crate::attempt_signals::AttemptSignals;
use crate::coordinator_client::CoordinatorEndpoint;
use crate::decisions;
use crate::failure::Problem;
use crate::phase::{self, Decision, Facts, Run, stall_seconds};

/// Decides about the job.
///
/// A decision that ends an attempt for a changed manifest is made again if the API server refuses
/// the change.
pub(super) async fn decide(context: &Context, gathered: &Gathered) -> Result<Decision, ReconcileError> {
    let decision = decide_mode(context, gathered, &gathered.signals).await;
    match Box::pin(refused_change(context, gathered, &decision)).await? {
        None => Ok(decision),
        Some(refused) => {
            let signals = AttemptSignals { change_refused: Some(refused), ..gathered.signals.clone() };
            Ok(decide_mode(context, gathered, &signals).await)
        }
    }
}

/// Decides. If the coordinator has to switch the training mode, asks it and decides again with its
/// answer.
async fn decide_mode(context: &Context, gathered: &Gathered, signals: &AttemptSignals) -> Decision {
    let facts = gathered.facts(context, signals);
    let decision = phase::decide(&facts);
    let (Some(mode), Some(coordinator)) = (decision.ask_mode, &gathered.coordinator) else { return decision };
    let reason = decisions::switch_reason(gathered.job.status.as_ref(), mode);
    let answer = context.coordinators.client().set_mode(coordinator, mode, reason).await;
    tracing::info!(job = gathered.name.name, %mode, ?answer, "asked the coordinator for another training mode");
    phase::decide(&Facts { answer: Some(&answer), ..facts })
}

/// Why the API server refuses the changed manifest, if the decision ends an attempt for it.
async fn refused_change(
    context: &Context,
    gathered: &Gathered,
    decision: &Decision,
) -> Result<Option<Problem>, ReconcileError> {
    let Gathered { job, uid, now, .. } = gathered;
    let Ok(resolved) = &gathered.verdict.manifest else { return Ok(None) };
    if !is_needed(job, decision, &gathered.spec_hash) {
        return Ok(None);
    }
    let known = context.memories.with(uid, |memory| memory.dry_run.clone());
    if let Some(known) = known.filter(|known| known.is_of(job, *now)) {
        return Ok(known.refused().cloned());
    }
    let next = objects(context, job, resolved, &Decision { run: Run::Go, ..decision.clone() })?;
    let run = dry_run(&context.client, job, &next, *now).await;
    let refused = run.refused().cloned();
    context.memories.with(uid, |memory| memory.dry_run = Some(run));
    Ok(refused)
}

/// Asks the coordinator for members, a rebalance, a budget and a checkpoint, if the decision needs
/// them. `job` has the decision in its status.
pub(super) async fn ask_coordinator(context: &Context, gathered: &Gathered, decision: &Decision, job: &RecTrainingJob) {
    if let Some(coordinator) = &gathered.coordinator {
        ask_for_members(context, coordinator, decision, &gathered.name.name).await;
        ask_for_rebalance(context, coordinator, decision, &gathered.name.name).await;
        ask_for_budget(context, coordinator, decision, &gathered.name.name).await;
        if decision.ask_save {
            ask_for_checkpoint(context, gathered, coordinator, job);
        }
    }
    if !decision.ask_save && !decision.is_saving {
        context.memories.with(&gathered.uid, |memory| memory.attempt.stop_saving());
    }
}

/// Asks for other numbers of members. A coordinator that refuses now, as during a migration of
/// slots, is asked again at the next look.
async fn ask_for_members(context: &Context, coordinator: &CoordinatorEndpoint, decision: &Decision, job: &str) {
    for &(role, replicas) in &decision.ask_members {
        let reason = decisions::scale_reason(&decision.status, role, replicas);
        let answer = context.coordinators.client().scale(coordinator, role, replicas, reason).await;
        let role = role.name();
        tracing::info!(job, role, replicas, ?answer, "asked the coordinator for another number of members");
    }
}

async fn ask_for_rebalance(context: &Context, coordinator: &CoordinatorEndpoint, decision: &Decision, job: &str) {
    if let Some(rebalance) = decision.ask_rebalance {
        let servers = rebalance.servers;
        let reason = decisions::scale_reason(&decision.status, Role::Ps, servers);
        let answer = context.coordinators.client().rebalance(coordinator, rebalance, reason).await;
        tracing::info!(job, servers, ?answer, "asked the coordinator for a rebalance");
    }
}

async fn ask_for_budget(context: &Context, coordinator: &CoordinatorEndpoint, decision: &Decision, job: &str) {
    if let Some(budget) = decision.ask_budget {
        let answer = context.coordinators.client().set_budget(coordinator, budget).await;
        tracing::info!(job, ?budget, ?answer, "asked the coordinator for another memory budget");
    }
}

/// Asks for a checkpoint before the attempt ends. The reconcile does not wait for it.
fn ask_for_checkpoint(context: &Context, gathered: &Gathered, coordinator: &CoordinatorEndpoint, job: &RecTrainingJob) {
    let Some(attempt) = job.status.as_ref().and_then(|status| status.attempt.as_ref()) else { return };
    let patience = Duration::from_secs(u64::from(stall_seconds(job)));
    let has_ended = context.coordinators.save(&ObjectRef::from_obj(job), coordinator, patience);
    let reason = end_reason(attempt, job, &gathered.spec_hash);
    context.memories.with(&gathered.uid, |memory| memory.attempt.begin_saving(reason, has_ended));
}
