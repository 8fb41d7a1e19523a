//! The loop around the reconciles of `RecModelServer`s: watches and retries.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use k8s_openapi::api::apps::v1::Deployment;
use kube::api::Api;
use kube::{Client, Resource, ResourceExt};
use kube_runtime::controller::{Action, Config};
use kube_runtime::{Controller, watcher};
use parking_lot::Mutex;
use rectrain_crds::RecModelServer;

use super::act::{ServerContext, reconcile};
use crate::controller::back_off;
use crate::names::{JobName, SERVER_LABEL};
use crate::reconcile::error::ReconcileError;

/// Changes of an object within this time trigger one reconcile.
const DEBOUNCE: Duration = Duration::from_millis(500);

/// The state of the loop.
struct Loop {
    context: ServerContext,
    /// Consecutive failures of each object's reconciles.
    failures: Mutex<HashMap<JobName, u32>>,
}

/// Reconciles until `stop`, and then until all reconciles under way have ended.
pub async fn run(
    watches: Client,
    namespace: Option<String>,
    context: ServerContext,
    stop: impl Future<Output = ()> + Send + Sync + 'static,
) {
    let metrics = context.metrics.clone();
    let concurrency = context.config.concurrency;
    let state = Arc::new(Loop { context, failures: Mutex::default() });
    Controller::new(api::<RecModelServer>(&watches, namespace.as_deref()), watcher::Config::default())
        .owns(api::<Deployment>(&watches, namespace.as_deref()), watcher::Config::default().labels(SERVER_LABEL))
        .with_config(Config::default().debounce(DEBOUNCE).concurrency(concurrency))
        .graceful_shutdown_on(stop)
        .run(in_turn, retry, state)
        .for_each(|outcome| {
            if let Err(kube_runtime::controller::Error::QueueError(error)) = outcome {
                metrics.watch_broke();
                tracing::warn!(%error, "a watch of RecModelServers broke off and is restarted");
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

fn name_of(server: &RecModelServer) -> JobName {
    JobName::new(&server.namespace().unwrap_or_default(), &server.name_any())
}

/// One reconcile, measured and logged.
async fn in_turn(server: Arc<RecModelServer>, state: Arc<Loop>) -> Result<Action, ReconcileError> {
    let name = name_of(&server);
    let begun = Instant::now();
    let result = Box::pin(reconcile(&name, &state.context)).await;
    let failed = result.as_ref().err();
    state.context.metrics.reconciled(begun.elapsed(), failed.map(ReconcileError::step));
    match failed {
        Some(error) => tracing::warn!(server = %name, %error, "a reconcile failed and is retried"),
        None => {
            state.failures.lock().remove(&name);
        }
    }
    result
}

fn retry(server: Arc<RecModelServer>, _: &ReconcileError, state: Arc<Loop>) -> Action {
    let mut failures = state.failures.lock();
    let count = failures.entry(name_of(&server)).or_default();
    *count += 1;
    Action::requeue(back_off(*count))
}
