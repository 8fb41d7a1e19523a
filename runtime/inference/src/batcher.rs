//! The thread that predicts. It merges waiting requests into batches, and splits the predictions.
//! The rules of the queue are in [`crate::queue`]. While the rows of a batch are on their way, the
//! thread begins to read the next one's, and predicts batches whose rows have come. A newer
//! model makes it read the rows of waiting batches anew. So a batch sees one model.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rectrain_data::Batch;
use rectrain_serving::{Predictions, Predictor, ServingError};
use tokio::sync::oneshot;

use crate::error::InferenceError;
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::queue::{Due, Queue, Waiting};
use crate::refusal::{Refusal, Shed};
use crate::version::{NextModel, Replacement, Version, freshness};

/// Ids that count as one row, for the bounds of the queue and of a batch.
const IDS_A_ROW: usize = 256;

/// The most batches whose rows are on their way. While they wait, the thread predicts others.
const MOST_READING: usize = 4;
/// The time between two looks at the rows of a request that the thread waits for. Their arrival
/// ends the wait earlier.
const LOOK: Duration = Duration::from_millis(50);

/// Told once rows have come, from any thread.
pub type Arrived = Arc<dyn Fn() + Send + Sync>;

/// How long a batch waits for a shard that has no replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// For a short time: a replica may just have ended.
    Short,
    /// Not at all: another batch has waited.
    None,
}

/// The rows of a batch, which may be on their way.
pub trait BatchRows: Send + 'static {
    /// Whether the batch can be predicted: its rows have come, or will not.
    fn have_come(&self) -> bool;
}

/// All rows are in the model.
impl BatchRows for () {
    fn have_come(&self) -> bool {
        true
    }
}

/// A model that predicts batches. A server has one thread that calls it.
pub trait Predict: Send + 'static {
    /// The rows of a batch.
    type Rows: BatchRows;

    /// Begins to read the rows of a batch. If they have not come at once, `arrived` is told later.
    ///
    /// # Errors
    /// Ids that contradict each other.
    fn read(&mut self, batch: &Batch, patience: Patience, arrived: &Arrived) -> Result<Self::Rows, ServingError>;

    /// Predicts the rows of a batch, in their order. Its rows have come, and the model is the same
    /// as when they were read.
    ///
    /// # Errors
    /// A batch of another schema; rows that did not come; a prediction that is not finite.
    fn predict(&mut self, batch: &Batch, rows: Self::Rows) -> Result<Predictions, ServingError>;

    /// Predicts with this model from now on. Rows that were read before are of no use any more.
    ///
    /// # Errors
    /// A model with other features. The one before stays.
    fn set_model(&mut self, next: NextModel) -> Result<(), ServingError>;
}

impl Predict for Predictor {
    type Rows = ();

    fn read(&mut self, _batch: &Batch, _patience: Patience, _arrived: &Arrived) -> Result<(), ServingError> {
        Ok(())
    }

    fn predict(&mut self, batch: &Batch, (): ()) -> Result<Predictions, ServingError> {
        Self::predict(self, batch)
    }

    fn set_model(&mut self, next: NextModel) -> Result<(), ServingError> {
        Self::set_model(self, next.model)
    }
}

/// Reads the rows of a batch, waits for them, and predicts it.
///
/// # Errors
/// As [`Predict::read`] and [`Predict::predict`].
pub fn predict_now(model: &mut impl Predict, batch: &Batch, patience: Patience) -> Result<Predictions, ServingError> {
    let (told, arrival) = std::sync::mpsc::sync_channel(1);
    let arrived: Arrived = Arc::new(move || {
        // A second word, or one that comes too late, means nothing.
        let _told = told.try_send(());
    });
    let rows = model.read(batch, patience, &arrived)?;
    while !rows.have_come() {
        // The rows themselves tell whether they have come.
        let _arrived = arrival.recv_timeout(LOOK);
    }
    model.predict(batch, rows)
}

/// The probabilities of a request, all by one model.
#[derive(Debug)]
pub(crate) struct Predicted {
    pub(crate) probabilities: Vec<f32>,
    pub(crate) version: Arc<Version>,
}

/// The prediction of a request, or the reason why there is none.
pub(crate) type Answer = Result<Predicted, Refusal>;

/// A request that waits, and its client.
struct Job {
    batch: Batch,
    deadline: Instant,
    reply: oneshot::Sender<Answer>,
}

impl Job {
    /// Whether a client still waits for the answer.
    fn is_wanted(&self, now: Instant) -> bool {
        !self.reply.is_closed() && now < self.deadline
    }
}

struct State {
    queue: Queue<Box<Job>>,
    closed: bool,
    /// A model that the thread takes before its next batch.
    replacement: Option<Replacement>,
    /// The version of the model that the thread has.
    version: Arc<Version>,
}

/// A batch of requests whose rows are read.
struct Reading<R> {
    batch: Batch,
    /// Rows of each request, and its client.
    replies: Vec<(usize, oneshot::Sender<Answer>)>,
    rows: Result<R, ServingError>,
}

impl<R: BatchRows> Reading<R> {
    fn is_due(&self) -> bool {
        self.rows.as_ref().map_or(true, BatchRows::have_come)
    }
}

/// The next task of the thread.
enum Work {
    /// Read the rows of these requests.
    Read(Vec<Waiting<Box<Job>>>),
    /// Predict the batch at this place of those that are read.
    Predict(usize),
    Replace(Replacement),
}

/// The queue between the requests and the thread. Its bound is the queue's: beyond it requests are
/// shed.
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    metrics: Metrics,
}

/// The requests' side of the queue.
#[derive(Clone)]
pub(crate) struct Batcher(Arc<Shared>);

/// The thread. `ended` resolves when it ends.
pub(crate) struct Running {
    pub(crate) thread: JoinHandle<()>,
    pub(crate) ended: oneshot::Receiver<()>,
}

impl Batcher {
    /// Starts the thread.
    pub(crate) fn start(
        mut model: impl Predict,
        version: Arc<Version>,
        limits: &Limits,
        metrics: Metrics,
    ) -> Result<(Self, Running), InferenceError> {
        let queue = Queue::new(limits.max_queued_rows, limits.max_batch_rows, limits.max_wait);
        let state = Mutex::new(State { queue, closed: false, replacement: None, version });
        let batcher = Self(Arc::new(Shared { state, changed: Condvar::new(), metrics }));
        let (ending, ended) = oneshot::channel();
        let closing = CloseOnDrop(batcher.clone());
        let thread = std::thread::Builder::new()
            .name("rectrain-predict".into())
            .spawn(move || {
                // Both are dropped when the thread ends, also by a panic.
                let (_ending, closing) = (ending, closing);
                closing.0.0.run(&mut model);
            })
            .map_err(|source| InferenceError::Io { action: "start the thread that predicts", source })?;
        Ok((batcher, Running { thread, ended }))
    }

    /// Adds a request to the queue. Its answer comes by the receiver, which is closed if there will
    /// be none. Dropping the receiver takes the request back.
    pub(crate) fn submit(
        &self,
        batch: Batch,
        arrived: Instant,
        deadline: Instant,
    ) -> Result<oneshot::Receiver<Answer>, Refusal> {
        let (reply, answer) = oneshot::channel();
        let rows = batch.samples.max(batch.ids().div_ceil(IDS_A_ROW)).max(1);
        self.0.admit(Waiting { rows, arrived, job: Box::new(Job { batch, deadline, reply }) })?;
        self.0.changed.notify_one();
        Ok(answer)
    }

    /// The version of the model that answers.
    pub(crate) fn version(&self) -> Arc<Version> {
        Arc::clone(&self.0.state.lock().version)
    }

    pub(crate) fn metrics(&self) -> &Metrics {
        &self.0.metrics
    }

    /// Replaces the model before the next batch.
    pub(crate) fn replace(&self, replacement: Replacement) {
        let mut state = self.0.state.lock();
        let skipped = state.replacement.take();
        let Replacement { next, version } = replacement;
        // A model that is left out is on the way to the next one.
        let (changes, skipped) = match skipped {
            Some(Replacement { next: NextModel { model, changes, .. }, .. }) => {
                (changes.then(next.changes), Some(model))
            }
            None => (next.changes, None),
        };
        state.replacement = Some(Replacement { next: NextModel { changes, ..next }, version });
        drop(state);
        self.0.changed.notify_one();
        // Its memory is freed without the lock.
        drop(skipped);
    }

    /// Admits no further request. The thread ends when it has answered the waiting ones.
    pub(crate) fn close(&self) {
        self.0.state.lock().closed = true;
        self.0.changed.notify_one();
    }
}

/// Closes the queue when the thread ends, and drops the requests that still wait.
struct CloseOnDrop(Batcher);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        let mut state = self.0.0.state.lock();
        state.closed = true;
        state.queue.retain(|_| false);
    }
}

impl Shared {
    fn admit(&self, request: Waiting<Box<Job>>) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Refusal::Ending);
        }
        let admitted = match state.queue.admit(request) {
            Ok(()) => Ok(()),
            Err(request) => {
                let now = Instant::now();
                state.queue.retain(|job| self.keep(job, now));
                state.queue.admit(request)
            }
        };
        self.metrics.queued_rows.set(state.queue.rows() as i64);
        admitted.map_err(|_full| Refusal::Shed(Shed::Rows(state.queue.rows())))
    }

    /// Whether a client still waits. A request without one is counted.
    fn keep(&self, job: &Job, now: Instant) -> bool {
        let is_wanted = job.is_wanted(now);
        if !is_wanted {
            self.metrics.abandoned.inc();
        }
        is_wanted
    }

    fn run<P: Predict>(self: &Arc<Self>, model: &mut P) {
        let shared = Arc::clone(self);
        let arrived: Arrived = Arc::new(move || shared.wake());
        let mut reading: Vec<Reading<P::Rows>> = Vec::new();
        while let Some(work) = self.next_work(&reading) {
            match work {
                Work::Read(mut requests) => {
                    let now = Instant::now();
                    requests.retain(|request| self.keep(&request.job, now));
                    for request in &requests {
                        self.metrics.queue.observe(now.duration_since(request.arrived).as_secs_f64());
                    }
                    if !requests.is_empty() {
                        let (batch, replies) = merge(requests);
                        let rows = model.read(&batch, Patience::Short, &arrived);
                        reading.push(Reading { batch, replies, rows });
                    }
                }
                Work::Predict(place) => self.answer(model, reading.remove(place)),
                Work::Replace(replacement) => {
                    self.replace(model, replacement);
                    for batch in &mut reading {
                        batch.rows = model.read(&batch.batch, Patience::Short, &arrived);
                    }
                }
            }
        }
    }

    /// Rows have come.
    fn wake(&self) {
        // The thread looks at the rows while it holds the lock, so it misses none.
        drop(self.state.lock());
        self.changed.notify_one();
    }

    /// Takes another model. One with other features is not taken.
    fn replace(&self, model: &mut impl Predict, Replacement { next, version }: Replacement) {
        if let Err(error) = model.set_model(next) {
            self.metrics.update_failures.inc();
            tracing::warn!(%error, "a newer model is not taken");
            return;
        }
        version.show(&self.metrics);
        if let Some(publication) = &version.publication {
            self.metrics.freshness.observe(freshness(publication));
        }
        self.state.lock().version = version;
    }

    /// Waits for the next task. `None` once the queue is closed and all requests are answered.
    fn next_work<R: BatchRows>(&self, reading: &[Reading<R>]) -> Option<Work> {
        let mut state = self.state.lock();
        loop {
            if let Some(place) = reading.iter().position(Reading::is_due) {
                return Some(Work::Predict(place));
            }
            if let Some(replacement) = state.replacement.take() {
                return Some(Work::Replace(replacement));
            }
            if reading.len() >= MOST_READING {
                self.changed.wait(&mut state);
                continue;
            }
            match (state.queue.due(Instant::now()), state.closed) {
                (Due::Idle, true) if reading.is_empty() => return None,
                (Due::Idle, _) => self.changed.wait(&mut state),
                (Due::At(moment), false) => {
                    let _timed_out = self.changed.wait_until(&mut state, moment);
                }
                (Due::Now, _) | (Due::At(_), true) => {
                    let batch = state.queue.take();
                    self.metrics.queued_rows.set(state.queue.rows() as i64);
                    return Some(Work::Read(batch));
                }
            }
        }
    }

    /// Predicts requests as one batch. If that fails, each of them is predicted alone, so that one
    /// request does not spoil the others.
    fn answer<P: Predict>(&self, model: &mut P, reading: Reading<P::Rows>) {
        let Reading { batch: all, replies, rows } = reading;
        let started = Instant::now();
        let predicted = rows.and_then(|rows| model.predict(&all, rows));
        let predicted = self.predicted(&all, started, predicted);
        let is_shared = replies.len() > 1;
        let mut start = 0;
        for (rows, reply) in replies {
            let range = start..start + rows;
            start += rows;
            let answer = match &predicted {
                Ok(Predicted { probabilities, version }) => {
                    let (probabilities, version) = (probabilities[range].to_vec(), Arc::clone(version));
                    Ok(Predicted { probabilities, version })
                }
                Err(_) if is_shared => self.predict_alone(model, &all.slice(range)),
                Err(refusal) => Err(refusal.clone()),
            };
            // The client may have gone meanwhile. Its request is counted there.
            let _gone = reply.send(answer);
        }
    }

    fn predict_alone(&self, model: &mut impl Predict, batch: &Batch) -> Answer {
        let started = Instant::now();
        let predicted = predict_now(model, batch, Patience::None);
        self.predicted(batch, started, predicted)
    }

    /// The answer of a prediction.
    fn predicted(&self, batch: &Batch, started: Instant, predicted: Result<Predictions, ServingError>) -> Answer {
        self.metrics.batch_rows.observe(batch.samples as f64);
        self.metrics.predict.observe(started.elapsed().as_secs_f64());
        let predictions = predicted.map_err(|error| match error {
            ServingError::RowsUnavailable { .. } => Refusal::Unavailable(error.to_string()),
            error => Refusal::Failed(error.to_string()),
        })?;
        self.metrics.count(batch.samples, &predictions.look_ups);
        let version = Arc::clone(&self.state.lock().version);
        Ok(Predicted { probabilities: predictions.probabilities, version })
    }
}

/// One batch of all requests, and the rows and the client of each.
fn merge(requests: Vec<Waiting<Box<Job>>>) -> (Batch, Vec<(usize, oneshot::Sender<Answer>)>) {
    let mut all = Batch::default();
    let mut replies = Vec::with_capacity(requests.len());
    for request in requests {
        let Job { batch, reply, .. } = *request.job;
        replies.push((batch.samples, reply));
        if replies.len() == 1 {
            all = batch;
        } else {
            all.append(&batch, 0..batch.samples);
        }
    }
    (all, replies)
}
