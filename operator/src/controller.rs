//! The loop around `reconcile`: watches, the reconciles that changes trigger, and retries.
//!
//! Watches select the operator's own label and cache only the needed fields ([`crate::cache`]), so
//! memory grows with the jobs and not with the cluster.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::stream::{self, BoxStream};
use futures::{FutureExt, Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DynamicObject};
use kube::core::DeserializeGuard;
use kube::{Client, Resource};
use kube_runtime::controller::{Action, Config, ReconcileRequest, trigger_with};
use kube_runtime::reflector::{self, ObjectRef, Store};
use kube_runtime::{PredicateConfig, WatchStreamExt, applier, predicates, watcher};
use parking_lot::Mutex;
use rectrain_crds::RecTrainingJob;

use crate::cache::{self, CacheWriter, Caches, Entry};
use crate::coordinator_poller::LateAnswers;
use crate::metrics::OperatorMetrics;
use crate::names::{JobName, MANAGED_BY_SELECTOR};
use crate::objects::{Kind, ObjectText};
use crate::permits::Permits;
use crate::pods::PodFacts;
use crate::reconcile::context::Context;
use crate::reconcile::dereference::Reader;
use crate::reconcile::error::ReconcileError;
use crate::reconcile::reconcile;

/// Longest back-off before a failed reconcile is retried.
const MAX_BACK_OFF: Duration = Duration::from_secs(120);
/// Objects per page of a list. Their parsed form is large until it is reduced for the cache.
const PAGE: u32 = 100;
/// Time after which a job that was put aside is reconciled, if no answer has triggered it.
const LATE: Duration = Duration::from_secs(10);
/// Changes of a job within this time trigger one reconcile.
const DEBOUNCE: Duration = Duration::from_millis(100);

type Requests = BoxStream<'static, Result<ReconcileRequest<RecTrainingJob>, watcher::Error>>;

/// The watches of the operator: their caches, and the reconciles that they trigger.
pub struct Watches {
    jobs: Store<RecTrainingJob>,
    /// The objects of jobs.
    pub caches: Caches,
    requests: Requests,
}

impl Watches {
    /// Watches one namespace, or all.
    #[must_use]
    pub fn new(client: &Client, namespace: Option<&str>, metrics: &OperatorMetrics) -> Self {
        let (jobs, job_requests) = watch_jobs(client, namespace, metrics.clone());
        let mut requests = vec![job_requests];
        let mut objects = BTreeMap::new();
        for kind in Kind::ALL {
            let resource = kind.resource();
            let api: Api<DynamicObject> = match namespace {
                Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource),
                None => Api::all_with(client.clone(), &resource),
            };
            let (writer, cache) = cache::empty();
            objects.insert(kind, cache);
            requests.push(watch_belongings(api, writer, move |object| {
                // Only the API server needs them.
                object.metadata.managed_fields = None;
                Entry::new(&object.metadata, ObjectText::of(kind, object))
            }));
        }
        let (writer, pods) = cache::empty();
        let api = match namespace {
            Some(namespace) => Api::namespaced(client.clone(), namespace),
            None => Api::all(client.clone()),
        };
        requests.push(watch_belongings(api, writer, |pod: &mut Pod| Entry::new(&pod.metadata, PodFacts::of(pod))));
        Self { jobs, caches: Caches { objects, pods }, requests: stream::select_all(requests).boxed() }
    }
}

fn watch_jobs(client: &Client, namespace: Option<&str>, metrics: OperatorMetrics) -> (Store<RecTrainingJob>, Requests) {
    let api: Api<DeserializeGuard<RecTrainingJob>> = match namespace {
        Some(namespace) => Api::namespaced(client.clone(), namespace),
        None => Api::all(client.clone()),
    };
    let (store, writer) = reflector::store();
    let changes = watcher(api, watcher::Config::default())
        .default_backoff()
        .try_filter_map(move |event| futures::future::ready(Ok(readable(event, &metrics))))
        .modify(|job| job.metadata.managed_fields = None)
        .reflect(writer)
        .touched_objects()
        // The operator's own writes of the status trigger nothing.
        .predicate_filter(predicates::generation, PredicateConfig::default());
    let requests = trigger_with(changes, |job: RecTrainingJob| [ObjectRef::from_obj(&job)]);
    (store, requests.boxed())
}

/// The event of a readable job. A job whose status a later version has written may be unreadable:
/// it stays cached as it was, and other jobs are not affected.
fn readable(
    event: watcher::Event<DeserializeGuard<RecTrainingJob>>,
    metrics: &OperatorMetrics,
) -> Option<watcher::Event<RecTrainingJob>> {
    use watcher::Event;
    let read = |job: DeserializeGuard<RecTrainingJob>| match job.0 {
        Ok(job) => Some(job),
        Err(unreadable) => {
            let (namespace, job) = (unreadable.metadata.namespace.as_deref(), unreadable.metadata.name.as_deref());
            tracing::error!(
                namespace,
                job,
                error = unreadable.error,
                "a job cannot be read; the operator does not touch it"
            );
            metrics.job_was_unreadable();
            None
        }
    };
    match event {
        Event::Apply(job) => read(job).map(Event::Apply),
        Event::InitApply(job) => read(job).map(Event::InitApply),
        Event::Delete(job) => read(job).map(Event::Delete),
        Event::Init => Some(Event::Init),
        Event::InitDone => Some(Event::InitDone),
    }
}

/// Watches objects of jobs. Each change of an object triggers a reconcile of its jobs.
fn watch_belongings<K, T>(
    api: Api<K>,
    writer: CacheWriter<T>,
    entry: impl Fn(&mut K) -> Entry<T> + Copy + Send + 'static,
) -> Requests
where
    K: Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
    T: Send + Sync + 'static,
{
    let config = watcher::Config::default().labels(MANAGED_BY_SELECTOR).page_size(PAGE);
    let entries = watcher(api, config).default_backoff().map_ok(move |event| cache::reduce(event, entry));
    let changes = entries.inspect_ok(move |event| writer.apply(event)).touched_objects();
    trigger_with(changes, |entry: Entry<T>| {
        let reference = |job: &String| ObjectRef::new(job).within(entry.namespace());
        entry.jobs().iter().map(reference).collect::<Vec<_>>()
    })
    .boxed()
}

/// Consecutive failures of each object's reconciles. An entry is dropped when a reconcile succeeds.
#[derive(Debug, Default)]
pub(crate) struct Failures(Mutex<HashMap<JobName, u32>>);

impl Failures {
    pub(crate) fn count(&self, job: &JobName) -> u32 {
        let mut failures = self.0.lock();
        let count = failures.entry(job.clone()).or_default();
        *count += 1;
        *count
    }

    pub(crate) fn clear(&self, job: &JobName) {
        self.0.lock().remove(job);
    }
}

/// The back-off after the `failure`-th failure in a row: 200 ms, doubled with each, up to two
/// minutes.
pub(crate) fn back_off(failure: u32) -> Duration {
    Duration::from_millis(200).saturating_mul(1 << failure.saturating_sub(1).min(16)).min(MAX_BACK_OFF)
}

/// Reconciles until `stop`, and then until all reconciles under way have ended.
pub async fn run(
    watches: Watches,
    late: LateAnswers,
    context: Arc<Context>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    outcomes(watches, late, Arc::clone(&context), stop)
        .for_each(|outcome| {
            if let Err(error) = outcome {
                note_error(&context, error);
            }
            futures::future::ready(())
        })
        .await;
}

type Error = kube_runtime::controller::Error<ReconcileError, watcher::Error>;
type Outcome = Result<(ObjectRef<RecTrainingJob>, Action), Error>;

fn note_error(context: &Context, error: Error) {
    match error {
        Error::QueueError(error) => {
            context.metrics.watch_broke();
            tracing::warn!(%error, "a watch broke off and is restarted");
        }
        // An object of a deleted job changed, or the job was deleted while its reconcile waited.
        Error::ObjectNotFound(job) => {
            context.forget(&JobName::new(job.namespace.as_deref().unwrap_or_default(), &job.name));
            tracing::debug!(%job, "gone");
        }
        // It was logged with the job's name.
        Error::ReconcilerFailed(..) => {}
        Error::RunnerError(error) => tracing::error!(%error, "the job store ended"),
    }
}

fn outcomes(
    watches: Watches,
    late: LateAnswers,
    context: Arc<Context>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> impl Stream<Item = Outcome> {
    let failures = Arc::new(Failures::default());
    let turns = Arc::new(Turns {
        failures: Arc::clone(&failures),
        permits: Permits::new(context.config.concurrency),
        jobs: watches.jobs.clone(),
    });
    let to_close = Arc::clone(&turns);
    let stop = stop.map(move |()| to_close.permits.close());
    // The permits limit the concurrency.
    let config = Config::default().debounce(DEBOUNCE).concurrency(0);
    let requests = stream::select(watches.requests, late.map(|job| Ok(ReconcileRequest::from(job))));
    applier(
        move |job, context| in_turn(job, context, Arc::clone(&turns)).boxed(),
        move |job: Arc<RecTrainingJob>, _: &ReconcileError, _| {
            Action::requeue(back_off(failures.count(&JobName::of(&*job))))
        },
        context,
        watches.jobs,
        requests.take_until(stop.boxed()),
        config,
    )
}

/// The state that all turns share.
struct Turns {
    failures: Arc<Failures>,
    permits: Permits,
    jobs: Store<RecTrainingJob>,
}

/// Reconciles the present version of a job, once every watch has its first complete list and there
/// is a permit.
async fn in_turn(job: Arc<RecTrainingJob>, context: Arc<Context>, turns: Arc<Turns>) -> Result<Action, ReconcileError> {
    // The first reconciles of a leader wait for its watches, which does not count as their own
    // time.
    let ready = context.reader.ready().await;
    // There are no permits once the operator is about to end.
    let Some(_permit) = turns.permits.acquire(&context.metrics).await else { return Ok(Action::await_change()) };
    match turns.jobs.get(&ObjectRef::from_obj(&*job)) {
        Some(job) => timed(job, context, &turns.failures, ready).await,
        None => {
            context.forget(&JobName::of(&*job));
            Ok(Action::await_change())
        }
    }
}

/// One reconcile, logged with the job's name. It is measured unless the job is put aside.
async fn timed(
    job: Arc<RecTrainingJob>,
    context: Arc<Context>,
    failures: &Failures,
    ready: Result<(), ReconcileError>,
) -> Result<Action, ReconcileError> {
    let name = JobName::of(&*job);
    let begun = Instant::now();
    let result = match ready {
        Ok(()) => Box::pin(reconcile(job, Arc::clone(&context))).await,
        Err(stopped) => Err(stopped),
    };
    // If the job is put aside, the reconcile with the answer is counted.
    let Some(result) = result.transpose() else { return Ok(Action::requeue(LATE)) };
    let failed = result.as_ref().err();
    context.metrics.reconciled(begun.elapsed(), failed.map(ReconcileError::step));
    match failed {
        Some(error) => tracing::warn!(job = %name, %error, "a reconcile failed and is retried"),
        None => {
            failures.clear(&name);
            tracing::debug!(job = %name, took = ?begun.elapsed(), "reconciled");
        }
    }
    result
}

/// A reader of these watches' caches.
#[must_use]
pub fn reader(watches: &Watches) -> Reader {
    Reader::Watched { caches: Arc::new(watches.caches.clone()), jobs: watches.jobs.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_cannot_be_read_hides_no_other() {
        let metrics = OperatorMetrics::new().expect("they register");
        let job = |phase: &str| -> DeserializeGuard<RecTrainingJob> {
            let manifest = serde_json::json!({
                "apiVersion": "rectrain.dev/v1alpha1", "kind": "RecTrainingJob", "metadata": {"name": "a"},
                "spec": {"model": {"kind": "dnn"}, "features": {"sparse": [{"name": "user"}]}, "data": {}},
                "status": {"phase": phase},
            });
            serde_json::from_value(manifest).expect("its metadata can be read")
        };
        assert!(readable(watcher::Event::InitApply(job("Dreaming")), &metrics).is_none());
        assert!(matches!(readable(watcher::Event::Init, &metrics), Some(watcher::Event::Init)));
        let read = readable(watcher::Event::InitApply(job("Training")), &metrics);
        assert!(matches!(read, Some(watcher::Event::InitApply(job)) if job.metadata.name.as_deref() == Some("a")));
        assert!(metrics.encode().expect("they are served").contains("rectrain_operator_unreadable_jobs_total 1"));
    }

    #[test]
    fn back_off_doubles_up_to_two_minutes() {
        assert_eq!(back_off(1), Duration::from_millis(200));
        assert_eq!(back_off(2), Duration::from_millis(400));
        assert_eq!(back_off(40), MAX_BACK_OFF);
    }
}
