//! The last step of a reconcile: brings the job's objects to the decided state.

use std::time::Duration;

use futures::{FutureExt, StreamExt, stream};
use kube::ResourceExt;
use kube_runtime::controller::Action;
use rectrain_crds::{RecTrainingJob, ResolvedJob};

use super::apply::{self, Application, Target};
use super::build::{self, Plan};
use super::context::Context;
use super::dereference::Belongings;
use super::error::ReconcileError;
use super::gather::Gathered;
use super::stored_forms::StoredForms;
use super::write::is_still;
use super::{AGAIN, lost_pods, prune, replaced_pods};
use crate::failure::Problem;
use crate::objects::{Kind, Owned, Wanted};
use crate::phase::{Decision, Run};

/// Longest time between two reconciles of a job that does not change.
const AT_LEAST: Duration = Duration::from_secs(600);
/// Time after which the operator applies a refused object again.
const REFUSED: Duration = Duration::from_secs(15);
/// The most objects of a job that are applied at the same time.
const SIDE_BY_SIDE: usize = 16;
/// The most objects of all jobs whose stored form is remembered.
const MOST_STORED_FORMS: usize = 100_000;

/// Brings the job's objects to the decided state. `job` has the decision in its status.
pub(super) async fn act(
    context: &Context,
    gathered: &Gathered,
    decision: &Decision,
    job: &RecTrainingJob,
) -> Result<Action, ReconcileError> {
    let wanted = wanted(context, gathered, decision, job)?;
    let (namespace, pods) = (&gathered.name.namespace, &gathered.belongings.pods);
    let nodes = &*context.measurements.nodes;
    let lost = lost_pods::delete(&context.client, nodes, namespace, pods, gathered.now);
    context.metrics.lost_pods(Box::pin(lost).await?);
    let work = match decision.run {
        Run::AsIs => Work::default(),
        _ => Work::new(&wanted, &gathered.belongings, &context.stored_forms),
    };
    let is_confirmed = !gathered.is_from_watch || job.resource_version() != gathered.job.resource_version();
    if !work.is_none() && !is_confirmed && !Box::pin(is_still(context, gathered, job)).await? {
        context.memories.doubt(&gathered.name);
        return Ok(Action::requeue(AGAIN));
    }
    let target = Target { client: &context.client, namespace, job_uid: &gathered.uid };
    let mut result = Box::pin(carry_out(context, target, &work)).await;
    // The StatefulSets say now which nodes new pods avoid.
    if result.is_ok() && decision.run == Run::Go {
        result = Box::pin(replace_slow_pods(context, gathered, decision)).await;
    }
    let look_again = decision.look_again.unwrap_or(AT_LEAST).min(AT_LEAST);
    next(context, gathered, result, look_again)
}

/// Deletes the slow pods that the decision replaces.
async fn replace_slow_pods(context: &Context, gathered: &Gathered, decision: &Decision) -> Result<(), ReconcileError> {
    let (pods, replaced) = (&gathered.belongings.pods, &decision.status.replaced_pods);
    let deleted = replaced_pods::delete(&context.client, &gathered.name.namespace, pods, replaced).await?;
    context.metrics.replaced_pods(deleted);
    Ok(())
}

/// The objects that the job should have.
fn wanted(
    context: &Context,
    gathered: &Gathered,
    decision: &Decision,
    job: &RecTrainingJob,
) -> Result<Vec<Wanted>, ReconcileError> {
    let (Ok(resolved), Run::Hold | Run::Go) = (&gathered.verdict.manifest, decision.run) else { return Ok(Vec::new()) };
    let mut wanted = objects(context, job, resolved, decision)?;
    for object in &mut wanted {
        if let Some(owned) = gathered.belongings.find(object.kind, &object.name) {
            apply::keep_immutable_data(object, owned);
        }
    }
    Ok(wanted)
}

/// Builds all objects of a decision.
pub(super) fn objects(
    context: &Context,
    job: &RecTrainingJob,
    resolved: &ResolvedJob,
    decision: &Decision,
) -> Result<Vec<Wanted>, ReconcileError> {
    let certificate = context.certificate(decision.status.attempt.as_ref(), &job.uid().unwrap_or_default())?;
    Ok(build::objects(&Plan::new(job, resolved, decision, certificate, &context.config))?)
}

/// Remembers the obstacle of this reconcile, and returns when to reconcile again.
fn next(
    context: &Context,
    gathered: &Gathered,
    result: Result<(), ReconcileError>,
    look_again: Duration,
) -> Result<Action, ReconcileError> {
    let obstacle = result.as_ref().err().and_then(ReconcileError::obstacle);
    let is_news = note_obstacle(context, &gathered.uid, obstacle.clone());
    match (result, obstacle) {
        (Err(error), None) => Err(error),
        // The next reconcile writes the obstacle into the status.
        (_, _) if is_news => Ok(Action::requeue(AGAIN)),
        (_, Some(_)) => Ok(Action::requeue(REFUSED)),
        (Ok(()), None) => Ok(Action::requeue(look_again)),
    }
}

/// Remembers the obstacle. Returns whether it differs from the remembered one.
fn note_obstacle(context: &Context, uid: &str, obstacle: Option<Problem>) -> bool {
    context.memories.with(uid, |memory| {
        let is_news = memory.obstacle != obstacle;
        memory.obstacle = obstacle;
        is_news
    })
}

/// The difference between the wanted and the existing objects.
#[derive(Default)]
struct Work<'a> {
    apply: Vec<Application<'a>>,
    delete: Vec<&'a Owned>,
}

impl<'a> Work<'a> {
    fn new(wanted: &'a [Wanted], belongings: &'a Belongings, stored_forms: &StoredForms) -> Self {
        let applications =
            wanted.iter().map(|wanted| Application { wanted, owned: belongings.find(wanted.kind, &wanted.name) });
        // Leave a terminating object alone. A later reconcile creates it again.
        let is_in_order = |application: &Application<'_>| {
            application.owned.is_some_and(|owned| {
                owned.is_terminating || apply::is_in_order(application.wanted, owned, stored_forms)
            })
        };
        Self {
            apply: applications.filter(|application| !is_in_order(application)).collect(),
            delete: prune::superfluous(&belongings.objects, wanted),
        }
    }

    fn is_none(&self) -> bool {
        self.apply.is_empty() && self.delete.is_empty()
    }
}

/// Applies and deletes objects. Applies the objects that pods need before the pods' StatefulSets. A
/// refused object does not stop the others.
async fn carry_out(context: &Context, target: Target<'_>, work: &Work<'_>) -> Result<(), ReconcileError> {
    context.stored_forms.trim(MOST_STORED_FORMS);
    let is_of_pods = |application: &&Application<'_>| application.wanted.kind == Kind::StatefulSet;
    let (of_pods, needed) = work.apply.iter().partition::<Vec<_>, _>(is_of_pods);
    let mut refused = None;
    for applications in [needed, of_pods] {
        refused = refused.or(apply_side_by_side(context, target, applications).await?);
    }
    for object in &work.delete {
        prune::delete(target.client, target.namespace, object).await?;
        context.stored_forms.forget(&object.uid);
    }
    refused.map_or(Ok(()), Err)
}

/// Applies objects that do not depend on each other. Returns the first refusal.
async fn apply_side_by_side<'a>(
    context: &'a Context,
    target: Target<'a>,
    applications: Vec<&'a Application<'a>>,
) -> Result<Option<ReconcileError>, ReconcileError> {
    // Boxed, because the compiler cannot prove that a stream of borrowing futures is `Send`.
    let applying: Vec<_> =
        applications.into_iter().map(|application| apply_one(context, target, *application).boxed()).collect();
    let results: Vec<_> = stream::iter(applying).buffered(SIDE_BY_SIDE).collect().await;
    let mut refused = None;
    for error in results.into_iter().filter_map(Result::err) {
        if error.obstacle().is_none() {
            return Err(error);
        }
        refused = refused.or(Some(error));
    }
    Ok(refused)
}

/// Applies an object. If the API server refuses a StatefulSet that should have no pods, deletes the
/// existing StatefulSet, so that its pods end anyway.
async fn apply_one(context: &Context, target: Target<'_>, application: Application<'_>) -> Result<(), ReconcileError> {
    let applied = apply::apply(target, application, &context.stored_forms).await;
    match (applied, application.owned) {
        (Err(error), Some(owned)) if error.obstacle().is_some() && application.wanted.has_no_pods() => {
            prune::delete(target.client, target.namespace, owned).await?;
            Err(error)
        }
        (applied, _) => applied,
    }
}
