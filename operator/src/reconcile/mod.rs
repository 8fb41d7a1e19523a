//! One reconcile of a job. Each step has its own files:
//!
//! 1. gather ([`gather`]): reads the job, its objects and pods ([`dereference`]) and its
//!    coordinator's report. Judges the manifest ([`validate`]), and runs the policy
//!    ([`policy_run`]).
//! 2. decide ([`ask`]): [`crate::phase::decide`] computes the new status. For a switch of the
//!    training mode it first asks the coordinator. For a changed manifest it first makes a dry run
//!    ([`dry_run`]).
//! 3. write ([`write`]): writes the status before any other change. If the operator is killed
//!    afterwards, its replacement continues from the status.
//! 4. report: commits the policy run and updates the metrics.
//! 5. ask ([`ask`]): asks the coordinator for members, a rebalance or a checkpoint.
//! 6. act ([`act`]): builds the objects ([`build`]), and applies the objects that differ
//!    ([`apply`]). Deletes the objects that the job no longer needs ([`prune`]).

mod act;
pub mod apply;
mod ask;
pub mod build;
pub mod context;
pub mod dereference;
mod dry_run;
pub mod error;
mod gather;
pub mod lost_pods;
pub mod memory;
pub mod merge;
mod policy_run;
mod policy_state;
pub mod prune;
mod refused_pods;
pub mod replaced_pods;
pub mod stored_forms;
pub mod validate;
mod write;

use std::sync::Arc;
use std::time::Duration;

use kube_runtime::controller::Action;
use rectrain_crds::RecTrainingJob;

use self::context::Context;
use self::error::ReconcileError;
use self::gather::Gathered;
use self::write::Written;
use crate::metrics::JobSnapshot;
use crate::names::JobName;
use crate::phase::{Decision, max_restarts};

/// Delay before the next reconcile if it must act on a finding of this one.
const AGAIN: Duration = Duration::from_millis(100);

/// Reconciles one job. Call this once the context's reader is ready. `seen` is the job from the
/// watch's cache.
///
/// Changes nothing until the API server has confirmed that the job is still the one that the
/// decision was made for. Returns `None` if the coordinator's answer is late. The job is then put
/// aside with nothing done, and the answer triggers another reconcile.
///
/// # Errors
/// The first failed call. The next reconcile finishes the work that is half done.
pub async fn reconcile(seen: Arc<RecTrainingJob>, context: Arc<Context>) -> Result<Option<Action>, ReconcileError> {
    let Some(current) = Box::pin(gather::current(&context, &seen)).await? else {
        context.forget(&JobName::of(&*seen));
        return Ok(Some(Action::await_change()));
    };
    context.memories.note(current.job());
    let Some(mut gathered) = Box::pin(gather::gather(&context, current)).await? else { return Ok(None) };
    let decision = Box::pin(ask::decide(&context, &gathered)).await?;
    let job = match Box::pin(write::write_status(&context, &gathered, &decision)).await? {
        Written::Job(job) => job,
        Written::Outdated => {
            context.memories.doubt(&gathered.name);
            return Ok(Some(Action::requeue(AGAIN)));
        }
    };
    report(&context, &mut gathered, &decision, &job);
    Box::pin(ask::ask_coordinator(&context, &gathered, &decision, &job)).await;
    if decision.delete {
        return write::delete_job(&context, &gathered, &job).await.map(Some);
    }
    Box::pin(act::act(&context, &gathered, &decision, &job)).await.map(Some)
}

/// Notes the written status. Only decisions that are in the status count.
fn report(context: &Context, gathered: &mut Gathered, decision: &Decision, job: &RecTrainingJob) {
    context.memories.note(job);
    if let Some(run) = gathered.policy_run.take() {
        policy_run::commit(context, job, run);
    }
    context.metrics.saw_job(&gathered.name, JobSnapshot::new(&decision.status, max_restarts(job)));
}
