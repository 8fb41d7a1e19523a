//! Publishes the model of a job while it trains, on a thread of its own beside the coordinator.
//! Training does not wait for it. A publication that fails is counted and tried again, and one that
//! comes late has the changes of several checkpoints. Another thread writes the full models that
//! follow the first one, so changes do not wait for them.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rectrain_protocol::events::{EventFollower, JobEvent};
use rectrain_protocol::metrics::CoordinatorMetrics;
use rectrain_protocol::plan::{CheckpointPlan, JobPlan, PublishPlan};
use rectrain_serving::ServingError;
use rectrain_serving::publication::{FullModel, Published, Publisher, WrittenFull};
use rectrain_storage::Directory;
use tokio::sync::oneshot;

use crate::failure::Failure;

/// The time between two looks for a newer checkpoint, in a folder and in an object store. A look at
/// a store is a request that costs money. The events of the job tell of most checkpoints earlier.
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
    schedule: Schedule,
    metrics: CoordinatorMetrics,
    /// The last warning. One that repeats is not logged again.
    warned: Option<String>,
    paths: Paths,
    /// The full model that another thread writes; at most one.
    full: Option<Writing>,
}

/// The paths of a publisher.
#[derive(Clone)]
struct Paths {
    publish: PublishPlan,
    checkpoint: CheckpointPlan,
}

/// A full model on its way. Closed without a value if its thread ended unexpectedly.
type Writing = oneshot::Receiver<Result<WrittenFull, ServingError>>;

/// The times of publications: one for each interval, on average.
#[derive(Debug)]
struct Schedule {
    every: Duration,
    /// The earliest time of the next publication; `None`: at once.
    due: Option<Instant>,
}

impl Schedule {
    /// The time until a publication may begin.
    fn wait(&self, now: Instant) -> Duration {
        self.due.map_or(Duration::ZERO, |due| due.saturating_duration_since(now))
    }

    /// A publication began. The next one is due an interval after this one was due, so a late one
    /// does not delay it. It is never due in the past.
    fn began(&mut self, now: Instant) {
        let next = self.due.unwrap_or(now).checked_add(self.every);
        self.due = next.map(|next| next.max(now));
    }
}

impl Publishing {
    /// Starts the thread; `None` if the job publishes nothing. `events` gets the job's events.
    ///
    /// # Errors
    /// A path that cannot be used, or that belongs to another job.
    pub(crate) async fn start(
        plan: &JobPlan,
        metrics: &CoordinatorMetrics,
        events: EventFollower,
    ) -> Result<Option<Self>, Failure> {
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
                let paths = Paths { publish, checkpoint };
                let publisher = match paths.publisher(&job).await {
                    Ok(publisher) => publisher,
                    Err(error) => {
                        // The starter has ended only if the process ends.
                        let _gone = opened.send(Err(refused(&error)));
                        return;
                    }
                };
                let _gone = opened.send(Ok(()));
                let schedule = Schedule { every: paths.publish.every.unwrap_or_default(), due: None };
                let look = look_at(&paths.checkpoint.path);
                Work { publisher, look, schedule, metrics, warned: None, paths, full: None }.run(ending, events).await;
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

/// Waits until the job has saved a checkpoint. After the last event of the job it waits for ever.
async fn a_checkpoint(events: &mut EventFollower) {
    while let Some(event) = events.next().await {
        if matches!(event, JobEvent::CheckpointSaved { .. }) {
            return;
        }
    }
    std::future::pending().await
}

/// Passes over the events until now. A publication has the changes of all their checkpoints.
async fn pass(events: &mut EventFollower) {
    loop {
        tokio::select! {
            biased;
            () = a_checkpoint(events) => {}
            () = std::future::ready(()) => return,
        }
    }
}

impl Paths {
    /// The paths of checkpoints and of published models.
    fn open(&self) -> Result<(Directory, Directory), ServingError> {
        let open = |path: &str| Directory::open(path, &self.checkpoint.storage_options, true);
        Ok((open(&self.checkpoint.path)?, open(&self.publish.path)?))
    }

    async fn publisher(&self, job: &str) -> Result<Publisher, ServingError> {
        let (checkpoints, output) = self.open()?;
        let publisher = Publisher::open(checkpoints, output, job, self.publish.keep).await?;
        Ok(publisher.with_least_count(self.publish.least_count))
    }

    /// Writes a full model on a thread of its own. It ends by itself.
    fn write(&self, full: FullModel) -> std::io::Result<Writing> {
        let (written, writing) = oneshot::channel();
        // The clients of a store belong to the runtime that they were made in.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let paths = self.clone();
        let work = move || {
            let result = runtime.block_on(async {
                let (checkpoints, output) = paths.open()?;
                full.write(&checkpoints, &output).await
            });
            // The publisher has ended before.
            let _gone = written.send(result);
        };
        std::thread::Builder::new().name("rectrain-full".into()).spawn(work)?;
        Ok(writing)
    }
}

/// Waits for a full model that is being written; for ever if there is none.
async fn written(full: &mut Option<Writing>) -> Result<WrittenFull, String> {
    let Some(writing) = full else { return std::future::pending().await };
    let ended = writing.await;
    *full = None;
    match ended {
        Ok(written) => written.map_err(|error| error.to_string()),
        Err(_closed) => Err("its thread ended unexpectedly".to_owned()),
    }
}

impl Work {
    /// Publishes until `end` is sent, and then once more. Ends at once if its sender is dropped.
    async fn run(mut self, mut end: oneshot::Receiver<()>, mut events: EventFollower) {
        loop {
            // In trouble it looks at a folder as rarely as at a store, and after no event.
            let (look, is_told) = match &self.warned {
                Some(_) => (LOOK_AT_STORE, false),
                None => (self.look, true),
            };
            tokio::select! {
                ended = &mut end => {
                    if ended.is_ok() {
                        self.finish().await;
                    }
                    return;
                }
                full = written(&mut self.full) => {
                    self.announce(full).await;
                    continue;
                }
                () = a_checkpoint(&mut events), if is_told => {}
                () = tokio::time::sleep(look) => {}
            }
            let wait = self.schedule.wait(Instant::now());
            if wait < look {
                // The end of the job does not come much later for it.
                tokio::time::sleep(wait).await;
                pass(&mut events).await;
                self.publish().await;
            }
        }
    }

    /// Publishes the last checkpoint, and waits for its full model.
    async fn finish(&mut self) {
        self.publish().await;
        if self.full.is_some() {
            let full = written(&mut self.full).await;
            self.announce(full).await;
        }
    }

    /// Announces a full model that was written.
    async fn announce(&mut self, full: Result<WrittenFull, String>) {
        let announced = match full {
            Ok(full) => {
                tracing::info!(sequence = full.sequence(), "wrote the full model");
                self.publisher.announce_full(full).await.map_err(|error| error.to_string())
            }
            Err(error) => {
                self.publisher.give_up_full();
                Err(error)
            }
        };
        if let Err(error) = announced {
            self.metrics.failed_publications.inc();
            self.warn(format!("a full model cannot be published; the next full checkpoint has another one: {error}"));
        }
    }

    /// Begins to write a full model. The one before has ended.
    fn write(&mut self, full: FullModel) {
        match self.paths.write(full) {
            Ok(writing) => self.full = Some(writing),
            Err(error) => {
                self.publisher.give_up_full();
                self.metrics.failed_publications.inc();
                self.warn(format!("a full model cannot be written: {error}"));
            }
        }
    }

    async fn publish(&mut self) {
        let started = Instant::now();
        match self.publisher.publish().await {
            Ok(None) => {}
            Ok(Some(published)) => {
                self.schedule.began(started);
                self.count(&published, started.elapsed());
                match published.not_deleted {
                    Some(error) => self.warn(format!("old published models cannot be deleted: {error}")),
                    None => self.warned = None,
                }
                if let Some(full) = published.full {
                    self.write(full);
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

#[cfg(test)]
mod tests {
    use rectrain_protocol::events::EventLog;

    use super::*;

    #[test]
    fn a_late_publication_does_not_delay_the_next_one() {
        let begin = Instant::now();
        let at = |milliseconds| begin + Duration::from_millis(milliseconds);
        let mut schedule = Schedule { every: Duration::from_millis(200), due: None };
        let wait = |schedule: &Schedule, now| schedule.wait(at(now)).as_millis();
        assert_eq!(wait(&schedule, 0), 0);
        schedule.began(at(0));
        assert_eq!((wait(&schedule, 0), wait(&schedule, 150), wait(&schedule, 250)), (200, 50, 0));
        schedule.began(at(250));
        assert_eq!(wait(&schedule, 250), 150, "due at 400 ms");
        schedule.began(at(1000));
        assert_eq!(wait(&schedule, 1000), 0, "due at 600 ms, so at once");
        schedule.began(at(1000));
        assert_eq!(wait(&schedule, 1000), 200, "one of the missed ones is made up for, and no more");
    }

    #[test]
    fn without_an_interval_each_checkpoint_is_published() {
        let now = Instant::now();
        let mut schedule = Schedule { every: Duration::ZERO, due: None };
        schedule.began(now);
        assert_eq!(schedule.wait(now), Duration::ZERO);
    }

    /// Whether an event has told of a checkpoint by now.
    async fn is_told(events: &mut EventFollower) -> bool {
        tokio::select! {
            biased;
            () = a_checkpoint(events) => true,
            () = std::future::ready(()) => false,
        }
    }

    fn saved(step: u64) -> JobEvent {
        let checkpoint = format!("step-{step:012}");
        JobEvent::CheckpointSaved { step, checkpoint, rows: 1, bytes: 1, seconds: 0.1 }
    }

    #[tokio::test]
    async fn only_a_saved_checkpoint_is_told_of() {
        let log = EventLog::default();
        let mut events = log.follow();
        log.push(JobEvent::Warning { message: "slow".to_owned() });
        assert!(!is_told(&mut events).await, "a warning is no checkpoint");
        log.push(saved(10));
        assert!(is_told(&mut events).await);
        assert!(!is_told(&mut events).await, "once for each checkpoint");
        for step in [20, 30] {
            log.push(saved(step));
        }
        pass(&mut events).await;
        assert!(!is_told(&mut events).await, "one publication has both");
        log.push(JobEvent::Failed { message: "a defect".to_owned(), user_error: false, divergence: None });
        assert!(!is_told(&mut events).await, "the job has ended");
    }
}
