//! Questions to coordinators, which a reconcile waits for only a moment. One that does not answer in time, because its node hangs or its
//! network is cut, is put aside with its question: the answer asks for a reconcile when it has come, or has not within its deadline.
//! The next one is put aside at once, until an answer has come in time again. A thousand silent coordinators so hold no place among the
//! reconciles that other jobs need.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::stream::{self, BoxStream};
use futures::{FutureExt, StreamExt};
use kube::runtime::reflector::ObjectRef;
use rectrain_crds::RecTrainingJob;
use tokio::sync::mpsc;

use crate::coordinator::{AskCoordinator, CoordinatorView, Whereabouts};
use crate::metrics::OperatorMetrics;

/// How long a reconcile waits for an answer. A coordinator of the same cluster has some milliseconds of work.
const A_MOMENT: Duration = Duration::from_millis(100);
/// Late answers whose reconciles have not been asked for yet; the next ones wait.
const MOST_CAME: usize = 1024;

/// The job that a question is about.
pub type Job = ObjectRef<RecTrainingJob>;

/// Jobs whose late answers have come.
pub type LateAnswers = BoxStream<'static, Job>;

/// See the module's text. At most one question of a job is under way, and it goes with the job.
pub struct Questions {
    ask: Arc<dyn AskCoordinator>,
    metrics: OperatorMetrics,
    late: Arc<Mutex<HashMap<Job, Late>>>,
    came: mpsc::Sender<Job>,
}

/// A question that no reconcile waits for any more, or an answer that was late.
struct Late {
    asked: Whereabouts,
    answer: Answer,
}

enum Answer {
    Awaited,
    Came {
        view: CoordinatorView,
        /// Within the moment that a reconcile waits.
        at_once: bool,
    },
    /// It was given, and had been late. The next one is not waited for at all: a job whose coordinator is silent holds no place among the
    /// reconciles for that.
    Given,
}

impl Questions {
    /// That are put to coordinators by `ask`.
    #[must_use]
    pub fn new(ask: Arc<dyn AskCoordinator>, metrics: OperatorMetrics) -> (Self, LateAnswers) {
        let (came, jobs) = mpsc::channel(MOST_CAME);
        let jobs = stream::unfold(jobs, |mut jobs| async { Some((jobs.recv().await?, jobs)) }).boxed();
        (Self { ask, metrics, late: Arc::default(), came }, jobs)
    }

    /// Whoever puts the other questions: those follow an answer, and are waited for.
    #[must_use]
    pub fn asking(&self) -> &dyn AskCoordinator {
        &*self.ask
    }

    /// How the job stands, as its coordinator says, which may be silent. `None` while the answer is late: it asks for a reconcile, which
    /// finds it here.
    pub async fn ask(&self, job: &Job, coordinator: &Whereabouts) -> Option<CoordinatorView> {
        let was_late = match self.take(job, coordinator) {
            Some(Answer::Awaited) => return None,
            Some(Answer::Came { view, .. }) => return Some(view),
            Some(Answer::Given) => true,
            None => false,
        };
        let (ask, asked) = (Arc::clone(&self.ask), coordinator.clone());
        let mut question = async move { ask.ask(&asked).await }.boxed();
        if !was_late && let Ok(view) = tokio::time::timeout(A_MOMENT, &mut question).await {
            return Some(view);
        }
        self.metrics.answer_is_late();
        lock(&self.late).insert(job.clone(), Late { asked: coordinator.clone(), answer: Answer::Awaited });
        let (late, came, job, asked) = (Arc::clone(&self.late), self.came.clone(), job.clone(), coordinator.clone());
        tokio::spawn(async move {
            let begun = Instant::now();
            let view = question.await;
            let at_once = was_late && begun.elapsed() <= A_MOMENT;
            if let Some(late) = lock(&late).get_mut(&job).filter(|late| late.asked == asked) {
                late.answer = Answer::Came { view, at_once };
            }
            // That nobody hears of it is no loss: the operator is about to end.
            let _ended = came.send(job).await;
        });
        None
    }

    /// How the question stands that was put to the same coordinator before; none if its answers are waited for. An answer that has come
    /// is given once.
    fn take(&self, job: &Job, coordinator: &Whereabouts) -> Option<Answer> {
        let mut all = lock(&self.late);
        let late = all.get_mut(job).filter(|late| late.asked == *coordinator)?;
        match &mut late.answer {
            Answer::Awaited => Some(Answer::Awaited),
            Answer::Given => Some(Answer::Given),
            Answer::Came { at_once: true, .. } => all.remove(job).map(|late| late.answer),
            came => Some(std::mem::replace(came, Answer::Given)),
        }
    }

    /// Asks a coordinator for a checkpoint and waits for it for so long at most, while reconciles go on. Whether it has ended is in what this
    /// gives; then a reconcile is asked for.
    pub fn save(&self, job: &Job, coordinator: &Whereabouts, patience: Duration) -> Arc<AtomicBool> {
        let has_ended = Arc::new(AtomicBool::new(false));
        let (ask, asked, ended) = (Arc::clone(&self.ask), coordinator.clone(), Arc::clone(&has_ended));
        let (came, job) = (self.came.clone(), job.clone());
        tokio::spawn(async move {
            match tokio::time::timeout(patience, ask.save(&asked)).await {
                Ok(Ok(checkpoint)) => tracing::info!(%job, checkpoint, "the coordinator has saved a checkpoint"),
                Ok(Err(reason)) => tracing::warn!(%job, reason, "the coordinator has saved no checkpoint"),
                Err(_) => tracing::warn!(%job, "the coordinator has saved no checkpoint within {patience:?}"),
            }
            ended.store(true, Ordering::Release);
            // As above.
            let _ended = came.send(job).await;
        });
        has_ended
    }

    /// Forgets the question of a job that has no coordinator to ask; its answer does not count.
    pub fn forget(&self, job: &Job) {
        lock(&self.late).remove(job);
    }
}

fn lock(late: &Mutex<HashMap<Job, Late>>) -> MutexGuard<'_, HashMap<Job, Late>> {
    late.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures::future::BoxFuture;
    use rectrain_crds::Mode;
    use tokio::sync::Semaphore;

    use super::*;
    use crate::coordinator::Rebalance;
    use crate::names::Role;
    use crate::switch::SwitchAnswer;

    /// Of which each answer takes a permit.
    struct Slow(Arc<Semaphore>);

    impl AskCoordinator for Slow {
        fn ask<'a>(&'a self, _: &'a Whereabouts) -> BoxFuture<'a, CoordinatorView> {
            Box::pin(async {
                self.0.acquire().await.expect("open").forget();
                CoordinatorView::Failed { message: "no such data".to_owned(), user_error: true }
            })
        }

        fn set_mode<'a>(&'a self, _: &'a Whereabouts, _: Mode, _: &'a str) -> BoxFuture<'a, SwitchAnswer> {
            unreachable!("nobody switches")
        }

        fn scale<'a>(&'a self, _: &'a Whereabouts, _: Role, _: u32, _: &'a str) -> BoxFuture<'a, Result<(), String>> {
            unreachable!("nobody scales")
        }

        fn save<'a>(&'a self, _: &'a Whereabouts) -> BoxFuture<'a, Result<String, String>> {
            Box::pin(async {
                self.0.acquire().await.expect("open").forget();
                Ok("full-7".to_owned())
            })
        }

        fn rebalance<'a>(&'a self, _: &'a Whereabouts, _: Rebalance, _: &'a str) -> BoxFuture<'a, Result<(), String>> {
            unreachable!("nobody moves slots")
        }
    }

    fn slow(answers: usize) -> (Arc<Semaphore>, Questions, LateAnswers) {
        let permits = Arc::new(Semaphore::new(answers));
        let metrics = OperatorMetrics::new().expect("metrics");
        let (questions, late) = Questions::new(Arc::new(Slow(Arc::clone(&permits))), metrics);
        (permits, questions, late)
    }

    fn job() -> Job {
        ObjectRef::new("clicks").within("ads")
    }

    fn at(port: u16) -> Whereabouts {
        Whereabouts { address: ([10, 0, 0, 1], port).into(), certificate: None }
    }

    #[tokio::test]
    async fn an_answer_that_comes_at_once_is_given_at_once() {
        let (_, questions, _late) = slow(1);
        assert!(matches!(questions.ask(&job(), &at(1)).await, Some(CoordinatorView::Failed { .. })));
        assert!(lock(&questions.late).is_empty());
    }

    #[tokio::test]
    async fn a_late_answer_asks_for_a_reconcile_that_finds_it_once() {
        let (permits, questions, mut late) = slow(0);
        assert_eq!(questions.ask(&job(), &at(1)).await, None, "it is put aside");
        assert_eq!(questions.ask(&job(), &at(1)).await, None, "and not put again");
        permits.add_permits(1);
        assert_eq!(late.next().await, Some(job()));
        assert!(questions.ask(&job(), &at(1)).await.is_some());
        assert_eq!(permits.available_permits(), 0, "one question was put");
        assert_eq!(questions.ask(&job(), &at(1)).await, None, "the next one is another question");
    }

    #[tokio::test]
    async fn who_was_late_is_not_waited_for_until_an_answer_comes_in_time() {
        let (permits, questions, mut late) = slow(0);
        assert_eq!(questions.ask(&job(), &at(1)).await, None);
        permits.add_permits(1);
        assert_eq!(late.next().await, Some(job()));
        assert!(questions.ask(&job(), &at(1)).await.is_some());
        permits.add_permits(2);
        assert_eq!(questions.ask(&job(), &at(1)).now_or_never(), Some(None), "it is put aside at once");
        assert_eq!(late.next().await, Some(job()));
        assert!(questions.ask(&job(), &at(1)).await.is_some());
        assert!(lock(&questions.late).is_empty(), "it came in time");
        assert!(questions.ask(&job(), &at(1)).await.is_some(), "so this one is waited for");
    }

    #[tokio::test]
    async fn a_late_answer_of_another_coordinator_does_not_count() {
        let (permits, questions, mut late) = slow(0);
        assert_eq!(questions.ask(&job(), &at(1)).await, None);
        assert_eq!(questions.ask(&job(), &at(2)).await, None, "a later attempt's");
        permits.add_permits(1);
        late.next().await;
        assert_eq!(questions.ask(&job(), &at(2)).await, None, "the first one's answer has come");
        permits.add_permits(1);
        late.next().await;
        assert!(questions.ask(&job(), &at(2)).await.is_some());
    }

    #[tokio::test]
    async fn a_checkpoint_is_waited_for_while_reconciles_go_on_and_not_for_ever() {
        let (permits, questions, mut late) = slow(0);
        let has_ended = questions.save(&job(), &at(1), Duration::from_secs(600));
        tokio::task::yield_now().await;
        assert!(!has_ended.load(Ordering::Acquire));
        permits.add_permits(1);
        assert_eq!((late.next().await, has_ended.load(Ordering::Acquire)), (Some(job()), true));
        let has_ended = questions.save(&job(), &at(1), Duration::from_millis(20));
        assert_eq!((late.next().await, has_ended.load(Ordering::Acquire)), (Some(job()), true), "there is none");
    }

    #[tokio::test]
    async fn what_was_asked_of_a_job_that_is_gone_is_forgotten() {
        let (permits, questions, mut late) = slow(0);
        assert_eq!(questions.ask(&job(), &at(1)).await, None);
        questions.forget(&job());
        permits.add_permits(1);
        late.next().await;
        assert!(lock(&questions.late).is_empty());
    }
}
