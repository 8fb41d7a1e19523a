//! The loop around the reconciles of `RecModelServer`s: watches and retries.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use kube::api::Api;
use kube::{Client, Resource};
use kube_runtime::controller::{Action, Config, Error};
use kube_runtime::{Controller, watcher};
use rectrain_crds::RecModelServer;

use super::act::{ServerContext, reconcile};
use crate::controller::{Failures, back_off};
use crate::names::{JobName, SERVER_LABEL};
use crate::reconcile::error::ReconcileError;

/// Changes of an object within this time trigger one reconcile.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// The state of the loop.
struct Loop {
    context: ServerContext,
    failures: Failures,
}

/// Reconciles until `stop`, and then until all reconciles under way have ended.
pub async fn run(
    watches: Client,
    namespace: Option<String>,
    context: ServerContext,
    stop: impl Future<Output = ()> + Send + Sync + 'static,
) {
    let concurrency = context.config.concurrency;
    let state = Arc::new(Loop { context, failures: Failures::default() });
    let noted = Arc::clone(&state);
    Controller::new(api::<RecModelServer>(&watches, namespace.as_deref()), watcher::Config::default())
        .owns(api::<Deployment>(&watches, namespace.as_deref()), watcher::Config::default().labels(SERVER_LABEL))
        .owns(api::<StatefulSet>(&watches, namespace.as_deref()), watcher::Config::default().labels(SERVER_LABEL))
        .with_config(Config::default().debounce(DEBOUNCE).concurrency(concurrency))
        .graceful_shutdown_on(stop)
        .run(in_turn, retry, state)
        .for_each(|outcome| {
            match outcome {
                Err(Error::QueueError(error)) => {
                    noted.context.metrics.watch_broke();
                    tracing::warn!(%error, "a watch of RecModelServers broke off and is restarted");
                }
                // The server was deleted while its reconcile waited.
                Err(Error::ObjectNotFound(server)) => {
                    let name = JobName::new(server.namespace.as_deref().unwrap_or_default(), &server.name);
                    noted.failures.clear(&name);
                    noted.context.forget(&name);
                }
                // A failed reconcile was logged with the server's name.
                _ => {}
            }
            futures::future::ready(())
        })
        .await;
}

fn api<K>(client: &Client, namespace: Option<&str>) -> Api<K>
where
    K: Resource<Scope = kube::core::NamespaceResourceScope, DynamicType = ()>,
{
    match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    }
}

/// One reconcile, measured and logged.
async fn in_turn(server: Arc<RecModelServer>, state: Arc<Loop>) -> Result<Action, ReconcileError> {
    let name = JobName::of(&*server);
    let begun = Instant::now();
    let result = Box::pin(reconcile(&name, &state.context)).await;
    let failed = result.as_ref().err();
    state.context.metrics.reconciled(begun.elapsed(), failed.map(ReconcileError::step));
    match failed {
        Some(error) => tracing::warn!(server = %name, %error, "a reconcile failed and is retried"),
        None => state.failures.clear(&name),
    }
    result
}

fn retry(server: Arc<RecModelServer>, _: &ReconcileError, state: Arc<Loop>) -> Action {
    Action::requeue(back_off(state.failures.count(&JobName::of(&*server))))
}
