//! The threads of a dense worker that train one replica without locks (`shadow` with `threads`;
//! ShadowSync §3.2). Each has a tower of its own, whose parameters are a copy of the shared ones.
//! For each batch, a thread waits for its embeddings, copies the parameters, computes, and updates
//! the shared parameters ([`SharedReplica`]). Meanwhile the worker's own thread hands out batches,
//! sends gradients of rows, and exchanges the replica.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use rectrain_dense::{DenseError, FlatOptimizer, StepOutput, Tower};
use rectrain_modes::Rank;
use rectrain_modes::shadow::{Block, SharedReplica};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::watchdog::Watchdog;
use tokio::task::JoinHandle;

use crate::local_batch::LocalBatch;
use crate::trainer::Waits;

/// A batch for a thread.
pub(crate) struct Job {
    pub(crate) fetching: JoinHandle<Result<LocalBatch, RoleError>>,
    /// The seed of dropout.
    pub(crate) number: u64,
    /// Gets the result, on the thread.
    pub(crate) reply: Box<dyn FnOnce(Result<Trained, RoleError>) + Send>,
}

/// A batch that a thread has trained.
pub(crate) struct Trained {
    pub(crate) batch: LocalBatch,
    /// An error if a value was not finite. The replica is then untouched.
    pub(crate) output: Result<StepOutput, DenseError>,
    /// The L2 norm of the gradients of the dense parameters.
    pub(crate) gradient_norm: f64,
    pub(crate) started: Instant,
    /// How long the thread waited for the embeddings.
    pub(crate) waited: Duration,
    /// How long it computed.
    pub(crate) computed: Duration,
}

/// See the module documentation.
pub(crate) struct TrainingThreads {
    pub(crate) replica: Arc<SharedReplica>,
    /// By thread. A thread has at most one batch.
    jobs: Vec<SyncSender<Job>>,
}

/// The settings of the threads.
pub(crate) struct ThreadSettings<'t> {
    pub(crate) plan: &'t Arc<JobPlan>,
    pub(crate) rank: Rank,
    pub(crate) waits: &'t Waits,
    pub(crate) watchdog: &'t Watchdog,
    /// The factor of the computing time, at least 1.
    pub(crate) slow: f64,
}

impl TrainingThreads {
    /// Starts this many threads. They end when this value is dropped.
    ///
    /// # Errors
    /// A tower or a thread cannot be made.
    pub(crate) fn start(threads: usize, replica: SharedReplica, of: &ThreadSettings<'_>) -> Result<Self, RoleError> {
        let replica = Arc::new(replica);
        let mut jobs = Vec::with_capacity(threads);
        for number in 0..threads {
            let tower = of.plan.tower_of_thread(of.rank, threads)?;
            let (sender, receiver) = sync_channel(1);
            let thread = TrainingThread {
                tower,
                replica: Arc::clone(&replica),
                plan: Arc::clone(of.plan),
                waits: of.waits.clone(),
                watchdog: of.watchdog.clone(),
                slow: of.slow,
            };
            let name = format!("hogwild-{number}");
            let spawned = std::thread::Builder::new().name(name).spawn(move || thread.run(&receiver));
            spawned.map_err(|error| RoleError::Task { what: "a training thread", reason: error.to_string() })?;
            jobs.push(sender);
        }
        Ok(Self { replica, jobs })
    }

    pub(crate) fn count(&self) -> usize {
        self.jobs.len()
    }

    /// Gives a thread its next batch.
    ///
    /// # Errors
    /// The thread has ended.
    pub(crate) fn train(&self, thread: usize, job: Job) -> Result<(), RoleError> {
        let ended = || RoleError::Task { what: "a training thread", reason: format!("thread {thread} has ended") };
        self.jobs.get(thread).and_then(|jobs| jobs.send(job).ok()).ok_or_else(ended)
    }
}

struct TrainingThread {
    tower: Tower,
    replica: Arc<SharedReplica>,
    plan: Arc<JobPlan>,
    waits: Waits,
    watchdog: Watchdog,
    slow: f64,
}

impl TrainingThread {
    fn run(mut self, jobs: &Receiver<Job>) {
        while let Ok(Job { fetching, number, reply }) = jobs.recv() {
            // Without an answer, the worker's own thread would wait for ever.
            let trained = catch_unwind(AssertUnwindSafe(|| self.train(fetching, number)));
            let panicked = |_panic| RoleError::Task { what: "a training thread", reason: "it panicked".to_owned() };
            reply(trained.map_err(panicked).flatten());
        }
    }

    fn train(
        &mut self,
        fetching: JoinHandle<Result<LocalBatch, RoleError>>,
        number: u64,
    ) -> Result<Trained, RoleError> {
        let started = Instant::now();
        let lost = |error: tokio::task::JoinError| RoleError::Task { what: "forward", reason: error.to_string() };
        let batch = self.waits.wait(async { fetching.await.map_err(lost)? })?;
        batch.expect_all("forward")?;
        let (waited, computing) = (started.elapsed(), Instant::now());
        let watchdog = self.watchdog.clone();
        let output = watchdog.watch_batch(|| {
            let output = self.compute(&batch, number);
            std::thread::sleep(computing.elapsed().mul_f64(self.slow - 1.0));
            output
        });
        let (output, gradient_norm) = match output {
            Ok((output, norm)) => (Ok(output), norm),
            Err(error @ DenseError::NonFinite { .. }) => (Err(error), f64::NAN),
            Err(error) => return Err(error.into()),
        };
        Ok(Trained { batch, output, gradient_norm, started, waited, computed: computing.elapsed() })
    }

    /// Computes at a copy of the shared parameters, and updates the shared ones. Also returns the
    /// norm of the gradients.
    fn compute(&mut self, batch: &LocalBatch, number: u64) -> Result<(StepOutput, f64), DenseError> {
        self.replica.read(self.tower.parameters_mut()?);
        let scale = batch.scale_without_barrier(&self.plan);
        let output = self.tower.forward_backward(batch.features(), &batch.labels, scale, number)?;
        let (optimizer, norm) = (*self.tower.optimizer(), self.tower.gradient_norm()?);
        self.replica.update(self.tower.gradients()?, |Block { parameters, state, gradients, updates }| {
            optimizer.update(parameters, state, gradients, updates)
        })?;
        Ok((output, norm))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use rectrain_dense::DenseOptimizer;

    use super::*;

    /// 1,000 parameters are several blocks, and the last one is shorter.
    #[test]
    fn alone_a_thread_updates_as_the_optimizer_does_to_the_bit() {
        let numbers = |from: u16| -> Vec<f32> { (from..from + 1000).map(|value| f32::from(value).sin()).collect() };
        for optimizer in [
            DenseOptimizer::Sgd { learning_rate: 0.1, momentum: 0.0 },
            DenseOptimizer::Sgd { learning_rate: 0.1, momentum: 0.9 },
            DenseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-8 },
            DenseOptimizer::adam(0.01),
        ] {
            let (mut parameters, mut state) = (numbers(1), optimizer.initial_state(1000));
            let replica: SharedReplica = SharedReplica::new(&parameters, &state, 0);
            for step in 1..=5 {
                let gradients = numbers(1000 * step);
                optimizer.update(&mut parameters, &mut state, &gradients, u64::from(step)).unwrap();
                let apply = |Block { parameters, state, gradients, updates }: Block<'_>| {
                    optimizer.update(parameters, state, gradients, updates)
                };
                replica.update(&gradients, apply).unwrap();
            }
            let (mut shared, mut shared_state) = (vec![0.0; 1000], vec![0.0; state.len()]);
            replica.read(&mut shared);
            replica.read_state(&mut shared_state);
            assert_eq!((shared, shared_state, replica.updates()), (parameters, state, 5), "{optimizer:?}");
        }
    }
}
