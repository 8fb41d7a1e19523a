//! The loop around `reconcile`: what is watched, what a change of it triggers, how failures are tried again. Watches select the
//! operator's own label, and what is not asked for is dropped on arrival ([`crate::cache`]), so memory grows with the jobs and not with the
//! cluster.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::stream::{self, BoxStream};
use futures::{FutureExt, Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DynamicObject};
use kube::core::DeserializeGuard;
use kube::runtime::controller::{Action, Config, ReconcileRequest, trigger_with};
use kube::runtime::reflector::{self, ObjectRef, Store};
use kube::runtime::{PredicateConfig, WatchStreamExt, applier, predicates, watcher};
use kube::{Client, Resource, ResourceExt};
use rectrain_crds::RecTrainingJob;

use crate::cache::{self, Caches, Entry, Notes};
use crate::metrics::OperatorMetrics;
use crate::names::MANAGED_BY_SELECTOR;
use crate::places::Places;
use crate::pods::PodFacts;
use crate::questions::LateAnswers;
use crate::reconcile::dereference::Reader;
use crate::reconcile::kinds::{Kind, ObjectText};
use crate::reconcile::{Context, ReconcileError, reconcile};

/// The longest time until a reconcile that failed is tried again.
const MAX_BACK_OFF: Duration = Duration::from_secs(120);
/// Objects that the API server is asked for at a time when a watch begins. They are trees before they are kept.
const PAGE: u32 = 100;
/// Time after which a job that was put aside is looked at if its coordinator's answer has not asked for it.
const LATE: Duration = Duration::from_secs(10);
/// Changes of one job within this time are one.
const DEBOUNCE: Duration = Duration::from_millis(100);

type Requests = BoxStream<'static, Result<ReconcileRequest<RecTrainingJob>, watcher::Error>>;

/// The watches of the operator: what they have seen, and the requests that they give.
pub struct Watches {
    jobs: Store<RecTrainingJob>,
    /// What belongs to jobs.
    pub caches: Caches,
    requests: Requests,
}

impl Watches {
    /// In one namespace, or in all.
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
            let (notes, seen) = cache::empty();
            objects.insert(kind, seen);
            requests.push(watch_belongings(api, notes, move |object| {
                // What only the API server needs.
                object.metadata.managed_fields = None;
                Entry::new(&object.metadata, ObjectText::of(kind, object))
            }));
        }
        let (notes, pods) = cache::empty();
        let api = match namespace {
            Some(namespace) => Api::namespaced(client.clone(), namespace),
            None => Api::all(client.clone()),
        };
        requests.push(watch_belongings(api, notes, |pod: &mut Pod| Entry::new(&pod.metadata, PodFacts::of(pod))));
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
        // The operator's own writing of the status is no news.
        .predicate_filter(predicates::generation, PredicateConfig::default());
    let requests = trigger_with(changes, |job: RecTrainingJob| [ObjectRef::from_obj(&job)]);
    (store, requests.boxed())
}

/// The event of a job that this version can read. One that it cannot, because a later version has written its status, stays as it was last
/// seen, and keeps no other job from being looked after.
fn readable(
    event: watcher::Event<DeserializeGuard<RecTrainingJob>>,
    metrics: &OperatorMetrics,
) -> Option<watcher::Event<RecTrainingJob>> {
    use watcher::Event;
    let read = |job: DeserializeGuard<RecTrainingJob>| match job.0 {
        Ok(job) => Some(job),
        Err(unreadable) => {
            let (namespace, job) = (unreadable.metadata.namespace.as_deref(), unreadable.metadata.name.as_deref());
            tracing::error!(namespace, job, error = unreadable.error, "a job cannot be read and is left alone");
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

/// Whatever changes about an object of a job asks for a reconcile of the job.
fn watch_belongings<K, T>(
    api: Api<K>,
    notes: Notes<T>,
    entry: impl Fn(&mut K) -> Entry<T> + Copy + Send + 'static,
) -> Requests
where
    K: Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
    T: Send + Sync + 'static,
{
    let config = watcher::Config::default().labels(MANAGED_BY_SELECTOR).page_size(PAGE);
    let kept = watcher(api, config).default_backoff().map_ok(move |event| cache::keep(event, entry));
    let changes = kept.inspect_ok(move |event| notes.take(event)).touched_objects();
    trigger_with(changes, |entry: Entry<T>| {
        let reference = |job: &String| ObjectRef::new(job).within(entry.namespace());
        entry.jobs().iter().map(reference).collect::<Vec<_>>()
    })
    .boxed()
}

/// How often in a row each job's reconcile has failed. One entry a job that fails; it goes when one gets through.
#[derive(Debug, Default)]
struct Failures(Mutex<HashMap<String, u32>>);

impl Failures {
    fn count(&self, job: &str) -> u32 {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = failures.entry(job.to_owned()).or_default();
        *count += 1;
        *count
    }

    fn clear(&self, job: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(job);
    }
}

/// Before the `failure`-th try in a row: 200 ms, doubled with each, up to two minutes.
fn back_off(failure: u32) -> Duration {
    Duration::from_millis(200).saturating_mul(1 << failure.saturating_sub(1).min(16)).min(MAX_BACK_OFF)
}

/// Reconciles until `stop`, and then until what is under way has got through.
pub async fn run(
    watches: Watches,
    late: LateAnswers,
    context: Arc<Context>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    results(watches, late, Arc::clone(&context), stop)
        .for_each(|result| {
            if let Err(applier_error) = result {
                use kube::runtime::controller::Error;
                match applier_error {
                    Error::QueueError(error) => {
                        context.metrics.watch_broke();
                        tracing::warn!(%error, "a watch broke off and is begun again");
                    }
                    // What belonged to a job that was deleted goes, or its reconcile still waited.
                    Error::ObjectNotFound(job) => {
                        context.forget(job.namespace.as_deref().unwrap_or_default(), &job.name);
                        tracing::debug!(%job, "gone");
                    }
                    // Logged with the job's name where it happened.
                    Error::ReconcilerFailed(..) => {}
                    Error::RunnerError(error) => tracing::error!(%error, "the job store ended"),
                }
            }
            futures::future::ready(())
        })
        .await;
}

type Outcome =
    Result<(ObjectRef<RecTrainingJob>, Action), kube::runtime::controller::Error<ReconcileError, watcher::Error>>;

fn results(
    watches: Watches,
    late: LateAnswers,
    context: Arc<Context>,
    stop: impl Future<Output = ()> + Send + 'static,
) -> impl Stream<Item = Outcome> {
    let failures = Arc::new(Failures::default());
    let places = Arc::new(Places::new(context.config.concurrency));
    let to_close = Arc::clone(&places);
    let stop = stop.map(move |()| to_close.close());
    // How many are reconciled at a time is for the places to say.
    let config = Config::default().debounce(DEBOUNCE).concurrency(0);
    let policy_failures = Arc::clone(&failures);
    let requests = stream::select(watches.requests, late.map(|job| Ok(ReconcileRequest::from(job))));
    let jobs = watches.jobs.clone();
    applier(
        move |job, context| in_turn(job, context, Arc::clone(&failures), Arc::clone(&places), jobs.clone()).boxed(),
        move |job: Arc<RecTrainingJob>, _: &ReconcileError, _| {
            Action::requeue(back_off(policy_failures.count(&key(&job))))
        },
        context,
        watches.jobs,
        requests.take_until(stop.boxed()),
        config,
    )
}

fn key(job: &RecTrainingJob) -> String {
    format!("{}/{}", job.namespace().unwrap_or_default(), job.name_any())
}

/// One reconcile, as soon as everything that is there has been seen once and there is a place for it, of the job as it is then.
async fn in_turn(
    job: Arc<RecTrainingJob>,
    context: Arc<Context>,
    failures: Arc<Failures>,
    places: Arc<Places>,
    jobs: Store<RecTrainingJob>,
) -> Result<Action, ReconcileError> {
    // The first reconciles of a leader wait for its watches, which is none of their own time.
    let ready = context.reader.ready().await;
    // None is given any more when the operator is about to end.
    let Some(_place) = places.take(&context.metrics).await else { return Ok(Action::await_change()) };
    match jobs.get(&ObjectRef::from_obj(&*job)) {
        Some(job) => timed(job, context, failures, ready).await,
        None => {
            context.forget(&job.namespace().unwrap_or_default(), &job.name_any());
            Ok(Action::await_change())
        }
    }
}

/// One reconcile: measured unless it is put aside, and logged with the job's name.
async fn timed(
    job: Arc<RecTrainingJob>,
    context: Arc<Context>,
    failures: Arc<Failures>,
    ready: Result<(), ReconcileError>,
) -> Result<Action, ReconcileError> {
    let key = key(&job);
    let begun = Instant::now();
    let result = match ready {
        Ok(()) => Box::pin(reconcile(job, Arc::clone(&context))).await,
        Err(stopped) => Err(stopped),
    };
    // Of a job that is put aside the reconcile that has the answer is counted.
    let Some(result) = result.transpose() else { return Ok(Action::requeue(LATE)) };
    let failed = result.as_ref().err();
    context.metrics.reconciled(begun.elapsed(), failed.map(ReconcileError::step));
    match failed {
        Some(error) => tracing::warn!(job = key, %error, "a reconcile failed and is tried again"),
        None => {
            failures.clear(&key);
            tracing::debug!(job = key, took = ?begun.elapsed(), "reconciled");
        }
    }
    result
}

/// A context's reader for these watches.
#[must_use]
pub fn reader(watches: &Watches) -> Reader {
    Reader::Watched(Arc::new(watches.caches.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that cannot be read is left out, and the others come.
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
