//! Publishes the model of a job while it trains, on a thread of its own beside the coordinator.
//! Training does not wait for it. A publication that fails is counted and tried again, and one that
//! comes late has the changes of several checkpoints.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rectrain_protocol::metrics::CoordinatorMetrics;
use rectrain_protocol::plan::{CheckpointPlan, JobPlan, PublishPlan};
use rectrain_serving::ServingError;
use rectrain_serving::publication::{Published, Publisher};
use rectrain_storage::Directory;
use tokio::sync::oneshot;

use crate::failure::Failure;

/// The time between two looks for a newer checkpoint, in a folder and in an object store. A look at
/// a store is a request that costs money.
const LOOK_AT_FOLDER: Duration = Duration::from_millis(100);
const LOOK_AT_STORE: Duration = Duration::from_secs(1);
/// The longest time that the end of a job waits for its last publication.
const LAST: Duration = Duration::from_secs(60);

/// The thread that publishes. If it is dropped before [`Publishing::finish`], the thread ends after
/// the publication in progress.
pub(crate) struct Publishing {
    end: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

/// The publisher of a job, its settings and its metrics.
struct Work {
    publisher: Publisher,
    /// The time between two looks for a newer checkpoint.
    look: Duration,
    every: Duration,
    metrics: CoordinatorMetrics,
    /// The last publication.
    last: Option<Instant>,
    /// The last warning. One that repeats is not logged again.
    warned: Option<String>,
}

impl Publishing {
    /// Starts the thread; `None` if the job publishes nothing.
    ///
    /// # Errors
    /// A path that cannot be used, or that belongs to another job.
    pub(crate) async fn start(plan: &JobPlan, metrics: &CoordinatorMetrics) -> Result<Option<Self>, Failure> {
        let (Some(publish), Some(checkpoint)) = (plan.publish.clone(), plan.checkpoint.clone()) else {
            return Ok(None);
        };
        let (job, metrics) = (plan.name.clone(), metrics.clone());
        let (opened, opening) = oneshot::channel();
        let (end, ending) = oneshot::channel();
        // The clients of a store belong to the runtime that they were made in.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| cannot_start(&error))?;
        let work = move || {
            runtime.block_on(async {
                let publisher = match open(&publish, &checkpoint, &job).await {
                    Ok(publisher) => publisher,
                    Err(error) => {
                        // The starter has ended only if the process ends.
                        let _gone = opened.send(Err(refused(&error)));
                        return;
                    }
                };
                let _gone = opened.send(Ok(()));
                let every = publish.every.unwrap_or_default();
                let look = look_at(&checkpoint.path);
                Work { publisher, look, every, metrics, last: None, warned: None }.run(ending).await;
            });
        };
        let thread = std::thread::Builder::new().name("rectrain-publish".into()).spawn(work);
        let thread = thread.map_err(|error| cannot_start(&error))?;
        match opening.await {
            Ok(Ok(())) => Ok(Some(Self { end, thread })),
            Ok(Err(failure)) => Err(failure),
            Err(_ended) => Err(Failure::Failed("the thread that publishes ended unexpectedly".to_owned())),
        }
    }

    /// Publishes the last checkpoint, and ends the thread.
    pub(crate) async fn finish(self) {
        let Self { end, thread } = self;
        // The thread has ended only after a defect, which the join shows.
        let _ended = end.send(());
        let joined = tokio::time::timeout(LAST, tokio::task::spawn_blocking(move || thread.join())).await;
        if !matches!(joined, Ok(Ok(Ok(())))) {
            tracing::warn!("the last checkpoint is not published yet: the next run of the job does so");
        }
    }
}

/// The failure to open the paths. Only a store that was not reached may be reached later.
fn refused(error: &ServingError) -> Failure {
    let message = format!("spec.serving.publish.path: {error}");
    match error {
        ServingError::Publication { .. } => Failure::User(message),
        error if error.is_users_input() => Failure::User(message),
        _ => Failure::Failed(message),
    }
}

/// The time between two looks for a newer checkpoint in a path.
fn look_at(path: &str) -> Duration {
    if path.contains("://") { LOOK_AT_STORE } else { LOOK_AT_FOLDER }
}

fn cannot_start(error: &std::io::Error) -> Failure {
    Failure::Failed(format!("cannot start the thread that publishes: {error}"))
}

async fn open(publish: &PublishPlan, checkpoint: &CheckpointPlan, job: &str) -> Result<Publisher, ServingError> {
    let open = |path: &str| Directory::open(path, &checkpoint.storage_options, true);
    Publisher::open(open(&checkpoint.path)?, open(&publish.path)?, job, publish.keep).await
}

impl Work {
    /// Publishes until `end` is sent, and then once more. Ends at once if its sender is dropped.
    async fn run(mut self, mut end: oneshot::Receiver<()>) {
        loop {
            // In trouble it looks at a folder as rarely as at a store.
            let look = if self.warned.is_some() { LOOK_AT_STORE } else { self.look };
            tokio::select! {
                ended = &mut end => {
                    if ended.is_ok() {
                        self.publish().await;
                    }
                    return;
                }
                () = tokio::time::sleep(look) => {}
            }
            // Half a look earlier, so that a publication does not wait for the look after the next.
            if self.last.is_none_or(|last| last.elapsed() + self.look / 2 >= self.every) {
                self.publish().await;
            }
        }
    }

    async fn publish(&mut self) {
        let started = Instant::now();
        match self.publisher.publish().await {
            Ok(None) => {}
            Ok(Some(published)) => {
                self.last = Some(started);
                self.count(&published, started.elapsed());
                match published.not_deleted {
                    Some(error) => self.warn(format!("old published models cannot be deleted: {error}")),
                    None => self.warned = None,
                }
            }
            Err(error) => {
                self.metrics.failed_publications.inc();
                self.warn(format!("the newest checkpoint cannot be published yet: {error}"));
            }
        }
    }

    fn count(&self, published: &Published, time: Duration) {
        let Published { sequence, step, rows, is_full, coalesced, .. } = *published;
        self.metrics.publications.inc();
        self.metrics.late_publications.inc_by(coalesced);
        self.metrics.publication_step.set(i64::try_from(step).unwrap_or(i64::MAX));
        self.metrics.publication_time.observe(time.as_secs_f64());
        tracing::info!(sequence, step, rows, is_full, "published the model");
    }

    fn warn(&mut self, warning: String) {
        if self.warned.as_ref() != Some(&warning) {
            tracing::warn!("{warning}");
            self.warned = Some(warning);
        }
    }
}
