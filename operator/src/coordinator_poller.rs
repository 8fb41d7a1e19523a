//! Polls coordinators for the state of their jobs. A reconcile waits only a moment for an answer.
//!
//! A coordinator on a hanging node or behind a cut network does not answer in time. Its job is put
//! aside together with the request. The answer triggers a reconcile when it arrives, and so does
//! the deadline when it expires. Later requests to that coordinator are put aside at once, until an
//! answer arrives in time again. So a thousand silent coordinators take no permits from other jobs.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use kube_runtime::reflector::ObjectRef;
use parking_lot::{Mutex, MutexGuard};
use rectrain_crds::RecTrainingJob;
use tokio::sync::mpsc;

use crate::coordinator_client::{CoordinatorClient, CoordinatorEndpoint};
use crate::coordinator_view::CoordinatorView;
use crate::metrics::OperatorMetrics;

/// Time that a reconcile waits for an answer. A coordinator in the same cluster needs milliseconds.
const MOMENT: Duration = Duration::from_millis(100);
/// Bound of the channel of late answers. Beyond it, the tasks that wait for answers block.
const MOST_LATE_ANSWERS: usize = 1024;

/// A reference to a job.
pub type JobRef = ObjectRef<RecTrainingJob>;

/// Jobs whose late answers have arrived. Each triggers a reconcile.
pub type LateAnswers = BoxStream<'static, JobRef>;

/// Polls coordinators. Each job has at most one request under way; it is forgotten with the job.
pub struct CoordinatorPoller {
    client: Arc<dyn CoordinatorClient>,
    metrics: OperatorMetrics,
    /// Requests that were put aside, by job.
    late: LateRequests,
    /// Jobs to reconcile, because their late answer has arrived.
    arrived: mpsc::Sender<JobRef>,
}

type LateRequests = Arc<Mutex<HashMap<JobRef, LateRequest>>>;

/// A request that was put aside.
struct LateRequest {
    coordinator: CoordinatorEndpoint,
    answer: LateAnswer,
}

enum LateAnswer {
    /// No answer yet.
    Awaited,
    /// An answer that no reconcile has read yet.
    Arrived {
        view: Box<CoordinatorView>,
        /// Whether it took no longer than a reconcile waits.
        in_time: bool,
    },
    /// A reconcile has read the answer, which was late. The next request is put aside at once.
    Read,
}

impl CoordinatorPoller {
    /// A poller that sends its requests with `client`.
    #[must_use]
    pub fn new(client: Arc<dyn CoordinatorClient>, metrics: OperatorMetrics) -> (Self, LateAnswers) {
        let (arrived, jobs) = mpsc::channel(MOST_LATE_ANSWERS);
        let jobs = stream::unfold(jobs, |mut jobs| async { Some((jobs.recv().await?, jobs)) }).boxed();
        (Self { client, metrics, late: Arc::default(), arrived }, jobs)
    }

    /// The client, for all other requests. A reconcile waits for them, since they follow an answer.
    #[must_use]
    pub fn client(&self) -> &dyn CoordinatorClient {
        &*self.client
    }

    /// The state of the job, or `None` if the answer is late. A late answer triggers a reconcile,
    /// which reads it here.
    pub async fn poll(&self, job: &JobRef, coordinator: &CoordinatorEndpoint) -> Option<CoordinatorView> {
        let was_late = match self.take(job, coordinator) {
            Some(LateAnswer::Awaited) => return None,
            Some(LateAnswer::Arrived { view, .. }) => return Some(*view),
            Some(LateAnswer::Read) => true,
            None => false,
        };
        let (client, endpoint) = (Arc::clone(&self.client), coordinator.clone());
        let mut request = async move { client.view(&endpoint).await }.boxed();
        if !was_late && let Ok(view) = tokio::time::timeout(MOMENT, &mut request).await {
            return Some(view);
        }
        self.put_aside(job, coordinator, request, was_late);
        None
    }

    /// Waits for the answer in a task of its own.
    fn put_aside(
        &self,
        job: &JobRef,
        coordinator: &CoordinatorEndpoint,
        request: BoxFuture<'static, CoordinatorView>,
        was_late: bool,
    ) {
        self.metrics.answer_is_late();
        let request_aside = LateRequest { coordinator: coordinator.clone(), answer: LateAnswer::Awaited };
        lock(&self.late).insert(job.clone(), request_aside);
        let (late, arrived) = (Arc::clone(&self.late), self.arrived.clone());
        let (job, coordinator) = (job.clone(), coordinator.clone());
        tokio::spawn(async move {
            let begun = Instant::now();
            let view = request.await;
            let in_time = was_late && begun.elapsed() <= MOMENT;
            if let Some(late) = lock(&late).get_mut(&job).filter(|late| late.coordinator == coordinator) {
                late.answer = LateAnswer::Arrived { view: Box::new(view), in_time };
            }
            // It fails only when the operator ends, and then no reconcile needs the answer.
            let _ended = arrived.send(job).await;
        });
    }

    /// The late answer of an earlier request to the same coordinator. `None` if its answers are in
    /// time. An arrived answer is returned once.
    fn take(&self, job: &JobRef, coordinator: &CoordinatorEndpoint) -> Option<LateAnswer> {
        let mut all = lock(&self.late);
        let late = all.get_mut(job).filter(|late| late.coordinator == *coordinator)?;
        match &mut late.answer {
            LateAnswer::Awaited => Some(LateAnswer::Awaited),
            LateAnswer::Read => Some(LateAnswer::Read),
            LateAnswer::Arrived { in_time: true, .. } => all.remove(job).map(|late| late.answer),
            arrived => Some(std::mem::replace(arrived, LateAnswer::Read)),
        }
    }

    /// Asks a coordinator for a checkpoint and waits for it at most `patience`, while reconciles
    /// continue. The returned flag is set when the wait has ended; then a reconcile is triggered.
    pub fn save(&self, job: &JobRef, coordinator: &CoordinatorEndpoint, patience: Duration) -> Arc<AtomicBool> {
        let has_ended = Arc::new(AtomicBool::new(false));
        let (client, endpoint, ended) = (Arc::clone(&self.client), coordinator.clone(), Arc::clone(&has_ended));
        let (arrived, job) = (self.arrived.clone(), job.clone());
        tokio::spawn(async move {
            match tokio::time::timeout(patience, client.save(&endpoint)).await {
                Ok(Ok(checkpoint)) => tracing::info!(%job, checkpoint, "the coordinator has saved a checkpoint"),
                Ok(Err(error)) => tracing::warn!(%job, %error, "the coordinator has saved no checkpoint"),
                Err(_) => tracing::warn!(%job, "the coordinator has saved no checkpoint within {patience:?}"),
            }
            ended.store(true, Ordering::Release);
            // It fails only when the operator ends.
            let _ended = arrived.send(job).await;
        });
        has_ended
    }

    /// Forgets the request of a job without a coordinator. Its answer is dropped.
    pub fn forget(&self, job: &JobRef) {
        lock(&self.late).remove(job);
    }
}

fn lock(late: &Mutex<HashMap<JobRef, LateRequest>>) -> MutexGuard<'_, HashMap<JobRef, LateRequest>> {
    late.lock()
}

#[cfg(test)]
mod tests {
    use futures::future::BoxFuture;
    use rectrain_crds::{BudgetStatus, Mode, Role};
    use tokio::sync::Semaphore;

    use super::*;
    use crate::coordinator_client::RequestError;
    use crate::coordinator_view::{Rebalance, SwitchAnswer};

    /// Each answer takes a permit.
    struct Slow(Arc<Semaphore>);

    impl CoordinatorClient for Slow {
        fn view<'a>(&'a self, _: &'a CoordinatorEndpoint) -> BoxFuture<'a, CoordinatorView> {
            Box::pin(async {
                self.0.acquire().await.expect("open").forget();
                CoordinatorView::Failed { message: "no such data".to_owned(), user_error: true }
            })
        }

        fn set_mode<'a>(&'a self, _: &'a CoordinatorEndpoint, _: Mode, _: &'a str) -> BoxFuture<'a, SwitchAnswer> {
            unreachable!("no test switches")
        }

        fn scale<'a>(
            &'a self,
            _: &'a CoordinatorEndpoint,
            _: Role,
            _: u32,
            _: &'a str,
        ) -> BoxFuture<'a, Result<(), RequestError>> {
            unreachable!("no test scales")
        }

        fn set_budget<'a>(
            &'a self,
            _: &'a CoordinatorEndpoint,
            _: BudgetStatus,
        ) -> BoxFuture<'a, Result<(), RequestError>> {
            unreachable!("no test changes a budget")
        }

        fn save<'a>(&'a self, _: &'a CoordinatorEndpoint) -> BoxFuture<'a, Result<String, RequestError>> {
            Box::pin(async {
                self.0.acquire().await.expect("open").forget();
                Ok("full-7".to_owned())
            })
        }

        fn rebalance<'a>(
            &'a self,
            _: &'a CoordinatorEndpoint,
            _: Rebalance,
            _: &'a str,
        ) -> BoxFuture<'a, Result<(), RequestError>> {
            unreachable!("no test rebalances")
        }
    }

    fn slow(answers: usize) -> (Arc<Semaphore>, CoordinatorPoller, LateAnswers) {
        let permits = Arc::new(Semaphore::new(answers));
        let metrics = OperatorMetrics::new().expect("metrics");
        let (poller, late) = CoordinatorPoller::new(Arc::new(Slow(Arc::clone(&permits))), metrics);
        (permits, poller, late)
    }

    fn job() -> JobRef {
        ObjectRef::new("clicks").within("ads")
    }

    fn at(port: u16) -> CoordinatorEndpoint {
        CoordinatorEndpoint { address: ([10, 0, 0, 1], port).into(), certificate: None }
    }

    #[tokio::test]
    async fn an_answer_in_time_is_returned_at_once() {
        let (_, poller, _late) = slow(1);
        assert!(matches!(poller.poll(&job(), &at(1)).await, Some(CoordinatorView::Failed { .. })));
        assert!(lock(&poller.late).is_empty());
    }

    #[tokio::test]
    async fn a_late_answer_triggers_a_reconcile_that_reads_it_once() {
        let (permits, poller, mut late) = slow(0);
        assert_eq!(poller.poll(&job(), &at(1)).await, None, "it is put aside");
        assert_eq!(poller.poll(&job(), &at(1)).await, None, "no second request");
        permits.add_permits(1);
        assert_eq!(late.next().await, Some(job()));
        assert!(poller.poll(&job(), &at(1)).await.is_some());
        assert_eq!(permits.available_permits(), 0, "one request was sent");
        assert_eq!(poller.poll(&job(), &at(1)).await, None, "the next one is another request");
    }

    #[tokio::test]
    async fn a_late_coordinator_is_not_waited_for_until_it_answers_in_time() {
        let (permits, poller, mut late) = slow(0);
        assert_eq!(poller.poll(&job(), &at(1)).await, None);
        permits.add_permits(1);
        assert_eq!(late.next().await, Some(job()));
        assert!(poller.poll(&job(), &at(1)).await.is_some());
        permits.add_permits(2);
        assert_eq!(poller.poll(&job(), &at(1)).now_or_never(), Some(None), "it is put aside at once");
        assert_eq!(late.next().await, Some(job()));
        assert!(poller.poll(&job(), &at(1)).await.is_some());
        assert!(lock(&poller.late).is_empty(), "it came in time");
        assert!(poller.poll(&job(), &at(1)).await.is_some(), "so the poller waits for this one");
    }

    #[tokio::test]
    async fn a_late_answer_of_another_coordinator_is_ignored() {
        let (permits, poller, mut late) = slow(0);
        assert_eq!(poller.poll(&job(), &at(1)).await, None);
        assert_eq!(poller.poll(&job(), &at(2)).await, None, "the coordinator of a later attempt");
        permits.add_permits(1);
        late.next().await;
        assert_eq!(poller.poll(&job(), &at(2)).await, None, "the first one's answer has come");
        permits.add_permits(1);
        late.next().await;
        assert!(poller.poll(&job(), &at(2)).await.is_some());
    }

    #[tokio::test]
    async fn a_checkpoint_is_awaited_in_the_background_up_to_a_deadline() {
        let (permits, poller, mut late) = slow(0);
        let has_ended = poller.save(&job(), &at(1), Duration::from_secs(600));
        tokio::task::yield_now().await;
        assert!(!has_ended.load(Ordering::Acquire));
        permits.add_permits(1);
        assert_eq!((late.next().await, has_ended.load(Ordering::Acquire)), (Some(job()), true));
        let has_ended = poller.save(&job(), &at(1), Duration::from_millis(20));
        assert_eq!((late.next().await, has_ended.load(Ordering::Acquire)), (Some(job()), true), "there is none");
    }

    #[tokio::test]
    async fn the_request_of_a_job_that_is_gone_is_forgotten() {
        let (permits, poller, mut late) = slow(0);
        assert_eq!(poller.poll(&job(), &at(1)).await, None);
        poller.forget(&job());
        permits.add_permits(1);
        late.next().await;
        assert!(lock(&poller.late).is_empty());
    }
}
