//! The thread that predicts. It merges waiting requests into batches, and splits the predictions.
//! The rules of the queue are in [`crate::queue`].

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use rectrain_data::Batch;
use rectrain_serving::{Model, Predictions, Predictor, ServingError};
use tokio::sync::oneshot;

use crate::error::InferenceError;
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::queue::{Due, Queue, Waiting};
use crate::refusal::{Refusal, Shed};
use crate::version::{Replacement, Version, freshness};

/// Ids that count as one row, for the bounds of the queue and of a batch.
const IDS_A_ROW: usize = 256;

/// A model that predicts batches. A server has one thread that calls it.
pub trait Predict: Send + 'static {
    /// Predicts the rows of a batch, in their order.
    ///
    /// # Errors
    /// A batch of another schema; a prediction that is not finite.
    fn predict(&mut self, batch: &Batch) -> Result<Predictions, ServingError>;

    /// Predicts with this model from now on.
    ///
    /// # Errors
    /// A model with other features. The one before stays.
    fn set_model(&mut self, model: Arc<Model>) -> Result<(), ServingError>;
}

impl Predict for Predictor {
    fn predict(&mut self, batch: &Batch) -> Result<Predictions, ServingError> {
        Self::predict(self, batch)
    }

    fn set_model(&mut self, model: Arc<Model>) -> Result<(), ServingError> {
        Self::set_model(self, model)
    }
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

/// The next task of the thread.
enum Work {
    Predict(Vec<Waiting<Box<Job>>>),
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
        let skipped = self.0.state.lock().replacement.replace(replacement);
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

    fn run(&self, model: &mut impl Predict) {
        while let Some(work) = self.next_work() {
            let mut requests = match work {
                Work::Predict(requests) => requests,
                Work::Replace(replacement) => {
                    self.replace(model, replacement);
                    continue;
                }
            };
            let now = Instant::now();
            requests.retain(|request| self.keep(&request.job, now));
            for request in &requests {
                self.metrics.queue.observe(now.duration_since(request.arrived).as_secs_f64());
            }
            if !requests.is_empty() {
                self.answer(model, requests);
            }
        }
    }

    /// Takes another model. One with other features is not taken.
    fn replace(&self, model: &mut impl Predict, Replacement { model: next, version }: Replacement) {
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

    /// Waits for the next task. `None` once the queue is closed and empty.
    fn next_work(&self) -> Option<Work> {
        let mut state = self.state.lock();
        loop {
            if let Some(replacement) = state.replacement.take() {
                return Some(Work::Replace(replacement));
            }
            match (state.queue.due(Instant::now()), state.closed) {
                (Due::Idle, true) => return None,
                (Due::Idle, false) => self.changed.wait(&mut state),
                (Due::At(moment), false) => {
                    let _timed_out = self.changed.wait_until(&mut state, moment);
                }
                (Due::Now, _) | (Due::At(_), true) => {
                    let batch = state.queue.take();
                    self.metrics.queued_rows.set(state.queue.rows() as i64);
                    return Some(Work::Predict(batch));
                }
            }
        }
    }

    /// Predicts requests as one batch. If that fails, each of them is predicted alone, so that one
    /// request does not spoil the others.
    fn answer(&self, model: &mut impl Predict, requests: Vec<Waiting<Box<Job>>>) {
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
        let predicted = self.predict(model, &all);
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
                Err(_) if is_shared => self.predict(model, &all.slice(range)),
                Err(refusal) => Err(refusal.clone()),
            };
            // The client may have gone meanwhile. Its request is counted there.
            let _gone = reply.send(answer);
        }
    }

    fn predict(&self, model: &mut impl Predict, batch: &Batch) -> Answer {
        self.metrics.batch_rows.observe(batch.samples as f64);
        let started = Instant::now();
        let predicted = model.predict(batch);
        self.metrics.predict.observe(started.elapsed().as_secs_f64());
        let predictions = predicted.map_err(|error| Refusal::Failed(error.to_string()))?;
        self.metrics.count(batch.samples, &predictions.look_ups);
        let version = Arc::clone(&self.state.lock().version);
        Ok(Predicted { probabilities: predictions.probabilities, version })
    }
}
