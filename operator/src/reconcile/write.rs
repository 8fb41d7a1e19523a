//! Writes the status of a job, and deletes an ended job after its time to live.

use kube::ResourceExt;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube_runtime::controller::Action;
use rectrain_crds::RecTrainingJob;

use super::context::Context;
use super::error::ReconcileError;
use super::gather::{Gathered, read};
use crate::names::FIELD_MANAGER;
use crate::phase::Decision;

/// The result of a write.
pub(super) enum Written {
    /// The job with its new status.
    Job(Box<RecTrainingJob>),
    /// The job has changed since the watch has seen it, or is gone. Nothing was written.
    Outdated,
}

/// Writes the status if it has changed, and publishes the events of the transition. A status that
/// another client wrote since the job was read is not overwritten.
pub(super) async fn write_status(
    context: &Context,
    gathered: &Gathered,
    decision: &Decision,
) -> Result<Written, ReconcileError> {
    let job = &gathered.job;
    if job.status.as_ref() == Some(&decision.status) {
        return Ok(Written::Job(Box::new(job.clone())));
    }
    let changed = RecTrainingJob { status: Some(decision.status.clone()), ..job.clone() };
    let parameters = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
    match jobs(context, gathered).replace_status(&gathered.name.name, &parameters, &changed).await {
        Ok(written) => {
            context.announcer.announce(&written, job.status.as_ref(), decision).await;
            Ok(Written::Job(Box::new(written)))
        }
        Err(kube::Error::Api(refusal)) if gathered.is_from_watch && matches!(refusal.code, 404 | 409) => {
            Ok(Written::Outdated)
        }
        Err(source) => Err(ReconcileError::Status(source)),
    }
}

/// Deletes the job with everything that belongs to it.
pub(super) async fn delete_job(
    context: &Context,
    gathered: &Gathered,
    job: &RecTrainingJob,
) -> Result<Action, ReconcileError> {
    let parameters = DeleteParams {
        preconditions: Some(Preconditions { uid: job.uid(), resource_version: job.resource_version() }),
        ..DeleteParams::background()
    };
    match jobs(context, gathered).delete(&gathered.name.name, &parameters).await {
        Ok(_) => Ok(Action::await_change()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Action::await_change()),
        Err(source) => Err(ReconcileError::Delete { kind: "RecTrainingJob", name: job.name_any(), source }),
    }
}

/// Whether the API server still has this version of the job.
pub(super) async fn is_still(
    context: &Context,
    gathered: &Gathered,
    job: &RecTrainingJob,
) -> Result<bool, ReconcileError> {
    let now = read(context, &gathered.name).await?;
    Ok(now.is_some_and(|now| now.uid() == job.uid() && now.resource_version() == job.resource_version()))
}

fn jobs(context: &Context, gathered: &Gathered) -> Api<RecTrainingJob> {
    Api::namespaced(context.client.clone(), &gathered.name.namespace)
}
