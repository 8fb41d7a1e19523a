//! The half of a dense worker that carries out orders. This file has the functions that all orders
//! share. Every wait blocks on the runtime's handle, and ends early when the worker is stopped.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rectrain_dense::metrics::{RunningAuc, WindowPart};
use rectrain_dense::{DenseError, FirstLayer, StepOutput, Tower};
use rectrain_modes::Rank;
use rectrain_modes::des::SubOperators;
use rectrain_modes::shadow::SharedReplica;
use rectrain_proto::v1;
use rectrain_wire::Tensor;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::DensePeers;
use super::all_reduce::RingMailbox;
use super::hogwild::{ThreadSettings, Trained, TrainingThreads};
use super::local_batch::LocalBatch;
use super::loss_watch::LossWatch;
use super::ring_repair::{Offer, RingWatch};
use super::spent::StepTimes;
use rectrain_protocol::Role;
use rectrain_protocol::connect;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message;
use rectrain_protocol::metrics::DenseWorkerMetrics;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::watchdog::Watchdog;
use rectrain_protocol::window_part;

/// How often progress is reported.
const REPORT_EVERY: Duration = Duration::from_millis(200);
/// The number of training predictions in the running AUC.
const RUNNING_AUC_SAMPLES: usize = 100_000;

/// The most batches whose computing times a report contains.
const REPORTED_BATCHES: usize = 32;

/// The training half of a dense worker.
pub struct Trainer {
    pub(crate) plan: Arc<JobPlan>,
    pub(crate) rank: Rank,
    pub(crate) tower: Tower,
    pub(crate) ring: Arc<RingMailbox>,
    pub(crate) peers: DensePeers,
    pub(crate) metrics: DenseWorkerMetrics,
    pub(crate) waits: Waits,
    /// The number of dense workers that train with a barrier, from the last order. They have the
    /// lowest ranks.
    pub(crate) barrier_workers: u32,
    /// The number of the ring of these workers. It grows each time one of them is replaced.
    pub(crate) ring_number: u64,
    pub(crate) ring_watch: Option<RingWatch>,
    /// With a barrier: the next step to apply to the parameters. `None` in a replacement that has
    /// no parameters yet.
    pub(crate) applied: Option<u64>,
    /// In `sync` with several dense workers: the parameters before the last step. Empty in other
    /// modes, and before the first step of an order.
    pub(crate) previous: Vec<f32>,
    /// In `shadow`, between two orders: this worker's replica. An evaluation overwrites the
    /// tower's parameters.
    pub(crate) replica: Option<KeptReplica>,
    /// In `shadow` with several threads: the threads, and the replica that they share.
    pub(crate) threads: Option<TrainingThreads>,
    /// In `des`: the part of the model that parameter servers compute. They then send sums instead
    /// of rows.
    pub(crate) divided: Option<Divided>,
    /// Whether the order that is carried out pulls its pieces.
    pub(crate) pulls: bool,
    pub(crate) offer: Arc<Offer>,
    slow: f64,
    watchdog: Watchdog,
    progress: v1::Progress,
    pub(crate) pace: Pace,
    running_auc: RunningAuc,
    window: WindowPart,
    loss_watch: LossWatch,
    /// Whether the tower has the gradients of the last step: not a partial sum of an all-reduce
    /// that was aborted.
    pub(crate) has_gradients: bool,
    /// The norm of the gradients of the last batch that a training thread computed.
    norm_of_thread: Option<f64>,
    reported: Instant,
    pub(crate) training: Duration,
}

/// The part of the model that parameter servers compute in `des`.
pub(crate) struct Divided {
    pub(crate) operators: SubOperators,
    /// The tower's first layer, in the flat buffers. `None` for a model without a tower.
    pub(crate) first_layer: Option<FirstLayer>,
}

/// A replica between two orders. The tower still has its optimizer state.
pub(crate) struct KeptReplica {
    pub(crate) parameters: Vec<f32>,
    /// Updates of the optimizer's state.
    pub(crate) updates: u64,
}

impl Trainer {
    pub(crate) fn new(
        plan: Arc<JobPlan>,
        rank: Rank,
        (slow, watchdog): (f64, Watchdog),
        (ring, offer): (Arc<RingMailbox>, Arc<Offer>),
        peers: DensePeers,
        stop: CancellationToken,
        metrics: DenseWorkerMetrics,
    ) -> Result<Self, RoleError> {
        let tower = plan.tower(rank)?;
        let loss_watch = LossWatch::new(plan.divergence_factor);
        Ok(Self {
            plan,
            rank,
            tower,
            ring,
            peers,
            metrics,
            barrier_workers: 0,
            ring_number: 0,
            ring_watch: None,
            applied: None,
            previous: Vec::new(),
            replica: None,
            threads: None,
            divided: None,
            pulls: false,
            offer,
            waits: Waits { runtime: Handle::current(), stop },
            slow,
            watchdog,
            progress: v1::Progress { rank: rank.0, ..v1::Progress::default() },
            pace: Pace::default(),
            running_auc: RunningAuc::new(RUNNING_AUC_SAMPLES),
            window: WindowPart::default(),
            loss_watch,
            has_gradients: false,
            norm_of_thread: None,
            reported: Instant::now(),
            training: Duration::ZERO,
        })
    }

    /// Connects to the next dense worker around the ring, if there is more than one.
    pub(crate) fn connect_to_next(&mut self, dense_workers: &[String]) -> Result<(), RoleError> {
        self.peers.next = None;
        let ring = self.barrier_workers;
        if ring > 1 && self.rank.0 < ring {
            let next = ((self.rank.0 + 1) % ring) as usize;
            let address = dense_workers.get(next).ok_or_else(|| RoleError::Inconsistent {
                message: "map",
                reason: format!("dense worker {next} of {ring} is missing"),
            })?;
            self.peers.next = Some(connect(&*self.peers.directory.transport, address)?);
        }
        Ok(())
    }

    /// With a barrier: sets the position of the next report to `batch`, unless it is later already.
    pub(crate) fn set_position(&mut self, batch: u64) {
        self.progress.steps_done = self.progress.steps_done.max(batch);
    }

    /// With a barrier: this worker's pieces of a global batch.
    pub(crate) fn share(&self) -> Range<u32> {
        self.plan.share(self.rank, self.barrier_workers)
    }

    /// Runs the forward and backward pass. `scale` is the factor of each sample's gradient in the
    /// sum. `number` is the seed of dropout, and `step` is the number of the global batch in
    /// errors.
    ///
    /// # Errors
    /// [`RoleError::Exploded`] if a value is not finite, or if the loss has grown too large.
    pub(crate) fn compute(
        &mut self,
        batch: &LocalBatch,
        scale: f32,
        number: u64,
        step: u64,
    ) -> Result<StepOutput, RoleError> {
        let started = Instant::now();
        let output = self.watchdog.watch_batch(|| {
            let output = self.tower.forward_backward(batch.features(), &batch.labels, scale, number);
            std::thread::sleep(started.elapsed().mul_f64(self.slow - 1.0));
            output
        });
        let output = self.check_output(batch, output, step)?;
        self.has_gradients = true;
        self.metrics.compute.observe(started.elapsed().as_secs_f64());
        self.pace.computed(batch.samples, started.elapsed());
        Ok(output)
    }

    /// Checks the output of a batch for divergence.
    ///
    /// # Errors
    /// As [`Self::compute`].
    fn check_output(
        &mut self,
        batch: &LocalBatch,
        output: Result<StepOutput, DenseError>,
        step: u64,
    ) -> Result<StepOutput, RoleError> {
        let output = match output {
            Err(error @ DenseError::NonFinite { .. }) => return Err(self.loss_watch.not_finite(step, &error)),
            output => output?,
        };
        if batch.samples > 0 {
            let loss = output.loss_sum() / batch.samples as f64;
            self.loss_watch.check(step, loss, || unlearned_loss(&self.tower, &batch.labels))?;
        }
        Ok(output)
    }

    /// Checks a batch that one of several threads has trained, and counts its times.
    ///
    /// # Errors
    /// As [`Self::compute`].
    pub(crate) fn check_trained(&mut self, trained: Trained, step: u64) -> Result<(LocalBatch, StepOutput), RoleError> {
        let Trained { batch, output, gradient_norm, waited, computed, .. } = trained;
        let output = self.check_output(&batch, output, step)?;
        self.norm_of_thread = Some(gradient_norm);
        self.metrics.embedding_wait.observe(waited.as_secs_f64());
        self.metrics.compute.observe(computed.as_secs_f64());
        self.pace.times.waited(waited, &batch.reply_time);
        // The threads compute at the same time. So the worker needs this share of it for a batch.
        let threads = self.threads.as_ref().map_or(1, TrainingThreads::count);
        self.pace.computed(batch.samples, computed.div_f64(threads as f64));
        Ok((batch, output))
    }

    /// Lets `threads` threads train the replica that the tower has, after `updates` updates of the
    /// optimizer's state. With one thread, the tower stays the replica.
    ///
    /// # Errors
    /// The threads cannot be made, or the tower's device fails.
    pub(crate) fn share_replica(&mut self, threads: u32, updates: u64) -> Result<(), RoleError> {
        let (parameters, state) = self.tower.state()?;
        match &self.threads {
            _ if threads <= 1 => self.threads = None,
            Some(running) if running.count() == threads as usize => running.replica.replace(parameters, state, updates),
            _ => {
                let replica = SharedReplica::new(parameters, state, updates);
                let Self { plan, waits, watchdog, rank, slow, .. } = &*self;
                let settings = ThreadSettings { plan, rank: *rank, waits, watchdog, slow: *slow };
                self.threads = Some(TrainingThreads::start(threads as usize, replica, &settings)?);
            }
        }
        Ok(())
    }

    /// Copies the replica that several threads train to the tower, with the optimizer's state.
    ///
    /// # Errors
    /// The tower's device fails.
    pub(crate) fn take_shared_replica(&mut self) -> Result<(), RoleError> {
        let Some(threads) = &self.threads else { return Ok(()) };
        let (parameters, state) = self.tower.state()?;
        let (mut parameters, mut state) = (parameters.to_vec(), state.to_vec());
        threads.replica.read(&mut parameters);
        threads.replica.read_state(&mut state);
        let kind = self.tower.optimizer().kind().name();
        Ok(self.tower.restore(&parameters, kind, &state)?)
    }

    /// Refuses a gradient of the first layer that is not finite.
    pub(crate) fn check_first_layer(&self, step: u64, gradient: &[f32]) -> Result<(), RoleError> {
        if gradient.iter().all(|value| value.is_finite()) {
            return Ok(());
        }
        let what = "the gradient of the first layer's weight".to_owned();
        let error = DenseError::NonFinite { what, during: format!("training step {step}") };
        Err(self.loss_watch.not_finite(step, &error))
    }

    /// Trains over the sums of partial results from now on (`des`), or over rows again.
    pub(crate) fn substitute(&mut self, is_on: bool) -> Result<(), RoleError> {
        self.divided = None;
        let substitute = if is_on { self.plan.model.build_substitute()? } else { None };
        if is_on && substitute.is_none() {
            let reason = "the model has no substitution".to_owned();
            return Err(RoleError::Inconsistent { message: "order", reason });
        }
        self.tower.train_substitute(substitute)?;
        let first_layer = self.plan.model.first_layer(self.tower.layout());
        let operators = self.plan.sub_operators().filter(|_| is_on);
        self.divided = operators.map(|operators| Divided { operators, first_layer });
        Ok(())
    }

    /// Counts a step of this worker, and reports progress every [`REPORT_EVERY`]. `at_batch` is the
    /// worker's position in a mode with a barrier, and 0 in other modes.
    pub(crate) fn count(
        &mut self,
        batch: &LocalBatch,
        loss_sum: f64,
        predictions: &[f32],
        at_batch: u64,
        started: Instant,
    ) -> Result<(), RoleError> {
        self.count_predictions(predictions, &batch.labels);
        self.count_step(batch.samples, loss_sum, at_batch, started)
    }

    /// Counts predictions in the measures of quality. Each prediction of a job counts once.
    pub(crate) fn count_predictions(&mut self, predictions: &[f32], labels: &[f32]) {
        self.running_auc.push(predictions, labels);
        self.window.push(predictions, labels);
    }

    /// As [`Self::count`], for a step whose predictions are not counted yet.
    pub(crate) fn count_step(
        &mut self,
        samples: usize,
        loss_sum: f64,
        at_batch: u64,
        started: Instant,
    ) -> Result<(), RoleError> {
        self.progress.steps_done = at_batch;
        self.progress.samples += samples as u64;
        self.progress.loss_sum += loss_sum;
        self.metrics.steps.inc();
        self.metrics.samples.inc_by(samples as u64);
        self.metrics.step.observe(started.elapsed().as_secs_f64());
        self.pace.times.passed(started.elapsed());
        if self.reported.elapsed() >= REPORT_EVERY {
            self.report_progress()?;
        }
        Ok(())
    }

    /// Reports the batches trained since the last report, if there are any.
    fn report_trained(&mut self) -> Result<(), RoleError> {
        if self.progress.samples == 0 { Ok(()) } else { self.report_progress() }
    }

    pub(crate) fn report_progress(&mut self) -> Result<(), RoleError> {
        self.reported = Instant::now();
        self.progress.running_auc = self.running_auc.value();
        self.progress.window = Some(window_part::write(std::mem::take(&mut self.window)));
        self.progress.training_seconds = self.training.as_secs_f64();
        let norm = match self.norm_of_thread.take() {
            None if self.has_gradients && self.progress.samples > 0 => Some(self.tower.gradient_norm()?),
            norm => norm,
        };
        if let Some(norm) = norm {
            self.metrics.gradient_norm.set(norm);
            self.progress.gradient_norm = Some(norm);
        }
        if let Some(memory) = self.tower.device_memory() {
            self.metrics.gpu_memory_used.set(memory.used_bytes as i64);
            self.metrics.gpu_memory_reserved.set(memory.reserved_bytes as i64);
        }
        std::mem::take(&mut self.pace).write_to(self.rank, &mut self.progress);
        let next = v1::Progress { rank: self.rank.0, steps_done: self.progress.steps_done, ..v1::Progress::default() };
        let report = std::mem::replace(&mut self.progress, next);
        self.call_coordinator(report, Vec::new()).map(drop)
    }

    /// The report of a wait for a member.
    pub(crate) fn waiting_for(&self, role: v1::Role, index: u32) -> v1::Waiting {
        v1::Waiting { role: v1::Role::DenseWorker.into(), index: self.rank.0, for_role: role.into(), for_index: index }
    }

    /// Calls the coordinator and waits for its reply.
    pub(crate) fn call_coordinator<R: message::Request>(
        &self,
        request: R,
        tensors: Vec<Tensor>,
    ) -> Result<R::Reply, RoleError> {
        let call = self.peers.coordinator.call(request, tensors, CALL_DEADLINE);
        self.wait(call).map(|(reply, _tensors)| reply)
    }

    /// Waits for the next event of an order. A wait for records of a stream may be long. So the
    /// worker first reports the batches that it has trained.
    pub(crate) fn receive<E>(&mut self, happened: &mut mpsc::Receiver<E>) -> Result<E, RoleError> {
        let soon = self.wait(async {
            match tokio::time::timeout(REPORT_EVERY, happened.recv()).await {
                Ok(event) => event.map(Some).ok_or(RoleError::Stopped),
                Err(_) => Ok(None),
            }
        })?;
        if let Some(event) = soon {
            return Ok(event);
        }
        self.report_trained()?;
        self.wait(async { happened.recv().await.ok_or(RoleError::Stopped) })
    }

    /// Waits for `work`, or fails with [`RoleError::Stopped`].
    pub(crate) fn wait<T>(&self, work: impl Future<Output = Result<T, RoleError>>) -> Result<T, RoleError> {
        self.waits.wait(work)
    }

    /// Spawns `work` on the runtime.
    pub(crate) fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.waits.runtime.spawn(work)
    }
}

/// The mean loss of the first task for a model that has learned nothing, whose logits are all 0.
fn unlearned_loss(tower: &Tower, labels: &[f32]) -> f64 {
    let tasks = tower.tasks().list();
    let Some(first) = tasks.first() else { return 0.0 };
    let rows = (labels.len() / tasks.len()).max(1);
    let of_first = labels.iter().step_by(tasks.len());
    of_first.map(|&label| first.loss.evaluate(0.0, f64::from(label)).loss).sum::<f64>() / rows as f64
}

/// The times of this worker's computations and all-reduces since its last report.
#[derive(Default)]
pub(crate) struct Pace {
    compute_seconds: VecDeque<f32>,
    rows: usize,
    batches: usize,
    all_reduce: Duration,
    all_reduces: u32,
    compute: Duration,
    /// The steps, and the members that they were spent on.
    pub(crate) times: StepTimes,
}

impl Pace {
    fn computed(&mut self, rows: usize, took: Duration) {
        if self.compute_seconds.len() == REPORTED_BATCHES {
            self.compute_seconds.pop_front();
        }
        self.compute_seconds.push_back(took.as_secs_f32());
        self.rows += rows;
        self.batches += 1;
        self.compute += took;
    }

    pub(crate) fn reduced(&mut self, took: Duration) {
        self.all_reduce += took;
        self.all_reduces += 1;
    }

    fn write_to(mut self, rank: Rank, progress: &mut v1::Progress) {
        self.times.spend(Role::DenseWorker, rank.0, self.compute.as_secs_f64());
        self.times.write_to(progress);
        progress.compute_seconds = self.compute_seconds.into();
        progress.batch_rows = self.rows as f64 / self.batches.max(1) as f64;
        progress.all_reduce_seconds = self.all_reduce.as_secs_f64() / f64::from(self.all_reduces.max(1));
    }
}

/// Waits of a thread for futures on the runtime.
#[derive(Clone)]
pub(crate) struct Waits {
    pub(crate) runtime: Handle,
    stop: CancellationToken,
}

impl Waits {
    pub(crate) fn wait<T>(&self, work: impl Future<Output = Result<T, RoleError>>) -> Result<T, RoleError> {
        self.runtime.block_on(async {
            tokio::select! {
                result = work => result,
                () = self.stop.cancelled() => Err(RoleError::Stopped),
            }
        })
    }
}
