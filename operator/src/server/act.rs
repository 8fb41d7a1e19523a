//! One reconcile of a `RecModelServer`.

use std::collections::HashMap;
use std::time::Duration;

use jiff::Timestamp;
use kube::api::{Api, PostParams};
use kube::{Client, Resource};
use kube_runtime::controller::Action;
use parking_lot::Mutex;
use rectrain_crds::{RecModelServer, RecModelServerStatus, ServerPhase};

use super::decide::{Decision, Facts, Obstacle, decide};
use super::observe::{Observed, observe, served_step};
use super::shards::is_of_shards;
use crate::config::OperatorConfig;
use crate::events::{Announcement, Announcer};
use crate::metrics::OperatorMetrics;
use crate::names::{self, FIELD_MANAGER, JobName};
use crate::objects::{Kind, Owned, Wanted};
use crate::reconcile::apply::{self, Application, Target};
use crate::reconcile::error::ReconcileError;
use crate::reconcile::prune;
use crate::reconcile::stored_forms::StoredForms;

/// Time after which the operator applies a refused object again.
const REFUSED: Duration = Duration::from_secs(15);
/// The most objects whose stored form is remembered.
const MOST_STORED_FORMS: usize = 10_000;
/// Delay before a reconcile that writes a new obstacle into the status.
const AGAIN: Duration = Duration::from_millis(100);

/// The context that all reconciles of `RecModelServer`s share.
pub struct ServerContext {
    /// The API server.
    pub client: Client,
    /// The installation.
    pub config: OperatorConfig,
    /// The clock.
    pub now: fn() -> Timestamp,
    /// Events.
    pub announcer: Announcer,
    /// The operator's own metrics.
    pub metrics: OperatorMetrics,
    /// Objects that the API server stores in another form.
    pub stored_forms: StoredForms,
    /// The obstacle of the last reconcile. An object without one has no entry.
    pub obstacles: Mutex<HashMap<JobName, Obstacle>>,
}

impl ServerContext {
    /// Forgets an object that is gone.
    pub fn forget(&self, name: &JobName) {
        self.obstacles.lock().remove(name);
        self.metrics.forget_server(name);
    }
}

/// Reconciles one `RecModelServer`.
///
/// # Errors
/// The first failed call. The next reconcile finishes the work that is half done.
pub async fn reconcile(name: &JobName, context: &ServerContext) -> Result<Action, ReconcileError> {
    let Some(observed) = Box::pin(observe(&context.client, name)).await? else {
        context.forget(name);
        return Ok(Action::await_change());
    };
    let obstacle = context.obstacles.lock().get(name).cloned();
    let deployment = |name: String| observed.find(Kind::Deployment, &name).map(|deployment| &deployment.body);
    let decision = decide(Facts {
        now: whole_seconds((context.now)()),
        server: &observed.server,
        job: observed.job.as_ref(),
        deployment: deployment(names::of_server(&name.name)),
        canary: deployment(names::of_canary(&name.name)),
        objects: &observed.objects,
        pods: &observed.pods,
        end_of_pods: observed.end_of_pods,
        obstacle: obstacle.as_ref(),
        config: &context.config,
    })?;
    Box::pin(write_status(context, name, &observed.server, &decision.status)).await?;
    let follows = observed.server.spec.pinned().is_none();
    context.metrics.saw_server(name, &decision.status, served_step(&observed.pods), follows);
    let done = Box::pin(act(context, name, &observed, &decision)).await;
    next(context, name, obstacle, done, decision.look_again)
}

/// A status has whole seconds, and so has everything that is compared with it.
fn whole_seconds(now: Timestamp) -> Timestamp {
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

/// Writes the status if it has changed. A status that another client wrote since the object was
/// read is not overwritten.
async fn write_status(
    context: &ServerContext,
    name: &JobName,
    server: &RecModelServer,
    status: &RecModelServerStatus,
) -> Result<(), ReconcileError> {
    if server.status.as_ref() == Some(status) {
        return Ok(());
    }
    let api: Api<RecModelServer> = Api::namespaced(context.client.clone(), &name.namespace);
    let parameters = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
    let changed = RecModelServer { status: Some(status.clone()), ..server.clone() };
    let written = api.replace_status(&name.name, &parameters, &changed).await.map_err(ReconcileError::Status)?;
    for announcement in transitions(server.status.as_ref(), status) {
        context.announcer.publish(announcement, &written.object_ref(&())).await;
    }
    Ok(())
}

/// The events of a change of status. Pure.
#[must_use]
pub fn transitions(before: Option<&RecModelServerStatus>, after: &RecModelServerStatus) -> Vec<Announcement> {
    let mut all = Vec::new();
    let ready = after.conditions.iter().find(|condition| condition.type_ == "Ready");
    let known = before.and_then(|before| before.conditions.iter().find(|condition| condition.type_ == "Ready"));
    if let Some(ready) = ready
        && known.map(|known| &known.reason) != Some(&ready.reason)
        && let Some(phase) = after.phase
    {
        all.push(Announcement {
            is_warning: phase == ServerPhase::Degraded,
            reason: phase.name(),
            action: format!("Report/{}", ready.reason),
            note: crate::text::shorten(&ready.message, 1000),
        });
    }
    let step = |status: &RecModelServerStatus| status.checkpoint.as_ref().map(|checkpoint| checkpoint.step);
    if let (Some(from), Some(to)) = (before.and_then(step), step(after))
        && from != to
    {
        all.push(Announcement {
            is_warning: false,
            reason: "ModelChanged",
            action: format!("Serve/{to}"),
            note: format!("the servers change from the model of step {from} to the model of step {to}"),
        });
    }
    all
}

/// Applies the objects that differ, and deletes objects that are not wanted, such as an autoscaler.
/// Shards that servers may read from stay.
async fn act(
    context: &ServerContext,
    name: &JobName,
    observed: &Observed,
    decision: &Decision,
) -> Result<(), ReconcileError> {
    let Some(wanted) = &decision.objects else { return Ok(()) };
    context.stored_forms.trim(MOST_STORED_FORMS);
    let target = Target { client: &context.client, namespace: &name.namespace, job_uid: &observed.uid };
    for wanted in wanted {
        apply_one(context, target, observed, wanted).await?;
    }
    let stays = |object: &Owned| decision.keeps_shards && is_of_shards(&name.name, object);
    for object in prune::superfluous(&observed.objects, wanted).into_iter().filter(|object| !stays(object)) {
        prune::delete(&context.client, &name.namespace, object).await?;
    }
    Ok(())
}

async fn apply_one(
    context: &ServerContext,
    target: Target<'_>,
    observed: &Observed,
    wanted: &Wanted,
) -> Result<(), ReconcileError> {
    let owned = observed.find(wanted.kind, &wanted.name);
    // A later reconcile creates a terminating object again.
    let is_in_order =
        owned.is_some_and(|owned| owned.is_terminating || apply::is_in_order(wanted, owned, &context.stored_forms));
    if is_in_order {
        return Ok(());
    }
    apply::apply(target, Application { wanted, owned }, &context.stored_forms).await
}

/// Remembers the obstacle of this reconcile, and returns when to reconcile again.
fn next(
    context: &ServerContext,
    name: &JobName,
    before: Option<Obstacle>,
    done: Result<(), ReconcileError>,
    look_again: Duration,
) -> Result<Action, ReconcileError> {
    let obstacle = done.as_ref().err().and_then(obstacle);
    let is_news = obstacle != before;
    let is_refused = obstacle.is_some();
    match obstacle {
        Some(obstacle) => context.obstacles.lock().insert(name.clone(), obstacle),
        None if done.is_ok() => context.obstacles.lock().remove(name),
        None => None,
    };
    match done {
        Err(error) if !is_refused => Err(error),
        // The next reconcile writes the obstacle into the status, or removes it.
        _ if is_news => Ok(Action::requeue(AGAIN)),
        Err(_) => Ok(Action::requeue(REFUSED)),
        Ok(()) => Ok(Action::requeue(look_again)),
    }
}

/// The obstacle that the user can remove.
fn obstacle(error: &ReconcileError) -> Option<Obstacle> {
    // Only an error with a problem to report is one.
    error.obstacle()?;
    match error {
        ReconcileError::Taken { kind, name } => Some(Obstacle {
            reason: "NameConflict",
            message: format!(
                "there is a {kind} `{name}` that does not belong to this RecModelServer, and the operator does not touch it: delete it, or choose another name"
            ),
        }),
        ReconcileError::Apply { kind, name, source: kube::Error::Api(status) } => Some(Obstacle {
            reason: "ObjectRefused",
            message: format!(
                "the API server refuses {kind} `{name}`: {}. Check spec.template, the namespace's quota and its admission policies",
                status.message
            ),
        }),
        _ => None,
    }
}
