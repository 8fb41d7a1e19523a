//! The training half of a dense worker: carries out orders, and what all of them need. Everything that waits for others goes
//! through the runtime's handle and ends when the worker is told to stop.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rectrain_dense::metrics::RunningAuc;
use rectrain_dense::{StepOutput, Tower};
use rectrain_modes::Rank;
use rectrain_proto::v1;
use rectrain_proto::v1::order::Order as Kind;
use rectrain_wire::Tensor;
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::DensePeers;
use super::all_reduce::RingMailbox;
use super::half::half_of;
use super::local_batch::LocalBatch;
use super::ring_repair::{Offer, RingWatch};
use rectrain_protocol::connect;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message;
use rectrain_protocol::metrics::DenseWorkerMetrics;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::watchdog::Watchdog;

/// How often progress is reported.
const REPORT_EVERY: Duration = Duration::from_millis(200);
/// Training predictions over which the running AUC is taken.
const RUNNING_AUC_SAMPLES: usize = 100_000;

/// Batches whose time of computation a report tells.
const TOLD_BATCHES: usize = 32;

/// See the module's text.
pub struct Trainer {
    pub(crate) plan: Arc<JobPlan>,
    pub(crate) rank: Rank,
    pub(crate) tower: Tower,
    pub(crate) ring: Arc<RingMailbox>,
    pub(crate) peers: DensePeers,
    pub(crate) metrics: DenseWorkerMetrics,
    pub(crate) waits: Waits,
    /// Dense workers, from rank 0, that train where each step has a barrier, as the last order says.
    pub(crate) barrier_workers: u32,
    /// Which ring they make: another each time that one of them is replaced.
    pub(crate) ring_number: u64,
    pub(crate) ring_watch: Option<RingWatch>,
    /// The step before which the parameters stand, where each worker has them; none, if this one has taken another's place and has none.
    pub(crate) applied: Option<u64>,
    /// In `sync` with several dense workers: the parameters one step before. Empty otherwise, and before the first step of an order.
    pub(crate) previous: Vec<f32>,
    pub(crate) offer: Arc<Offer>,
    slow: f64,
    computing: Watchdog,
    progress: v1::Progress,
    pub(crate) pace: Pace,
    running_auc: RunningAuc,
    reported: Instant,
    training: Duration,
}

impl Trainer {
    pub(crate) fn new(
        plan: Arc<JobPlan>,
        rank: Rank,
        (slow, computing): (f64, Watchdog),
        (ring, offer): (Arc<RingMailbox>, Arc<Offer>),
        peers: DensePeers,
        stop: CancellationToken,
        metrics: DenseWorkerMetrics,
    ) -> Result<Self, RoleError> {
        let tower = plan.tower(rank)?;
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
            offer,
            waits: Waits { runtime: Handle::current(), stop },
            slow,
            computing,
            progress: v1::Progress { rank: rank.0, ..v1::Progress::default() },
            pace: Pace::default(),
            running_auc: RunningAuc::new(RUNNING_AUC_SAMPLES),
            reported: Instant::now(),
            training: Duration::ZERO,
        })
    }

    /// Carries out orders until training has ended.
    pub fn run(mut self) -> Result<(), RoleError> {
        let mut done = 0;
        loop {
            let order = self.next_order(done)?;
            let Some(kind) = &order.order else { continue };
            self.follow_the_map(&order)?;
            self.join_the_ring(&order)?;
            if order.joins || order.mends {
                self.mend()?;
            }
            if !matches!(kind, Kind::Wait(_)) {
                // It has the parameters, or is about to be told where they are.
                self.peers.readiness.set_ready();
            }
            if let Some(half) = half_of(kind) {
                let started = Instant::now();
                half.train(&mut self, &order)?;
                self.training += started.elapsed();
                self.report_progress()?;
                done = order.number;
                continue;
            }
            match kind {
                Kind::Wait(_) | Kind::Barrier(_) | Kind::Tokens(_) => continue,
                Kind::Restore(restore) => {
                    self.restore(&restore.checkpoint)?;
                    self.applied = Some(order.step);
                }
                Kind::Save(save) => self.save(&order, save.ticket.clone())?,
                Kind::Publish(_) => self.publish()?,
                Kind::ReadBack(_) => {
                    self.read_back()?;
                    self.applied = Some(order.step);
                }
                Kind::Evaluate(evaluate) => self.evaluate(&order, evaluate.read)?,
                Kind::End(end) => return self.end(&order, end.read),
            }
            done = order.number;
        }
    }

    fn next_order(&mut self, done: u64) -> Result<v1::Order, RoleError> {
        let (coordinator, request) = (self.peers.coordinator.clone(), v1::OrderRequest { rank: self.rank.0, done });
        let asking = async move { Ok(coordinator.call(request, Vec::new(), CALL_DEADLINE).await?.0) };
        let asking = self.spawn(asking);
        self.join("order", asking)
    }

    /// Orders that concern parameter servers say under which slot map.
    fn follow_the_map(&mut self, order: &v1::Order) -> Result<(), RoleError> {
        if order.map_epoch > self.peers.placement.epoch().0 {
            let directory = self.peers.directory.clone();
            self.peers.placement = self.wait(async move { directory.fetch().await })?;
        }
        Ok(())
    }

    /// Orders say with how many dense workers a step's gradients are summed. Who they are may have changed in a mode without a barrier.
    fn join_the_ring(&mut self, order: &v1::Order) -> Result<(), RoleError> {
        let sums = matches!(order.order, Some(Kind::Barrier(_)));
        let is_same = order.barrier_workers == self.barrier_workers;
        let waits = matches!(order.order, Some(Kind::Wait(_))) && !order.joins;
        if waits || (is_same && !sums) {
            return Ok(());
        }
        self.barrier_workers = order.barrier_workers;
        // Who was replaced before, all know who are in it.
        self.ring_number = self.ring_number.max(order.ring);
        self.ring.begin(self.ring_number);
        let directory = self.peers.directory.clone();
        let workers = self.wait(async { directory.fetch_addresses().await })?.dense_workers;
        self.connect_to_next(&workers)?;
        self.ring_watch = self.peers.next.as_ref().map(|_| {
            let (runtime, coordinator) = (&self.waits.runtime, self.peers.coordinator.clone());
            RingWatch::start(runtime, coordinator, self.rank.0, self.ring_number)
        });
        Ok(())
    }

    /// The next dense worker around the ring, if there is more than one.
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

    /// With a barrier: the next report tells this batch, or a later one.
    pub(crate) fn stands_at(&mut self, batch: u64) {
        self.progress.steps_done = self.progress.steps_done.max(batch);
    }

    /// The pieces of a global batch that are this worker's where each step has a barrier.
    pub(crate) fn share(&self) -> Range<u32> {
        self.plan.share(self.rank, self.barrier_workers)
    }

    fn end(&mut self, order: &v1::Order, read: bool) -> Result<(), RoleError> {
        if read {
            self.pull_parameters()?;
        }
        let parameters_sha256 = digest(self.tower.parameters()?).to_vec();
        let done = v1::TrainingDone { rank: self.rank.0, steps: order.step, parameters_sha256 };
        self.tell(done, Vec::new()).map(drop)
    }

    /// Forward and backward pass. `scale` times a sample's gradient is its part of the step's; `number` is what dropout depends on.
    pub(crate) fn compute(&mut self, batch: &LocalBatch, scale: f32, number: u64) -> Result<StepOutput, RoleError> {
        let begun = Instant::now();
        let output = self.computing.watch_batch(|| {
            let output = self.tower.forward_backward(batch.features(), &batch.labels, scale, number);
            std::thread::sleep(begun.elapsed().mul_f64(self.slow - 1.0));
            output
        })?;
        self.metrics.compute.observe(begun.elapsed().as_secs_f64());
        self.pace.computed(batch.samples, begun.elapsed());
        Ok(output)
    }

    /// Counts a step of this worker, and tells the coordinator now and then. `at_batch` is where a job with a barrier is.
    pub(crate) fn count(
        &mut self,
        batch: &LocalBatch,
        loss_sum: f64,
        predictions: &[f32],
        at_batch: u64,
        started: Instant,
    ) -> Result<(), RoleError> {
        self.running_auc.push(predictions, &batch.labels);
        self.progress.steps_done = at_batch;
        self.progress.samples += batch.samples as u64;
        self.progress.loss_sum += loss_sum;
        self.metrics.steps.inc();
        self.metrics.samples.inc_by(batch.samples as u64);
        self.metrics.step.observe(started.elapsed().as_secs_f64());
        if self.reported.elapsed() >= REPORT_EVERY {
            self.report_progress()?;
        }
        Ok(())
    }

    pub(crate) fn report_progress(&mut self) -> Result<(), RoleError> {
        self.reported = Instant::now();
        self.progress.running_auc = self.running_auc.value();
        self.progress.training_seconds = self.training.as_secs_f64();
        if let Some(memory) = self.tower.device_memory() {
            self.metrics.gpu_memory_used.set(memory.used_bytes as i64);
            self.metrics.gpu_memory_reserved.set(memory.reserved_bytes as i64);
        }
        std::mem::take(&mut self.pace).tell(&mut self.progress);
        let next = v1::Progress { rank: self.rank.0, steps_done: self.progress.steps_done, ..v1::Progress::default() };
        let report = std::mem::replace(&mut self.progress, next);
        self.tell(report, Vec::new()).map(drop)
    }

    /// Asks the coordinator and waits for its answer.
    pub(crate) fn tell<R: message::Request>(&self, request: R, tensors: Vec<Tensor>) -> Result<R::Reply, RoleError> {
        let call = self.peers.coordinator.call(request, tensors, CALL_DEADLINE);
        self.wait(call).map(|(reply, _tensors)| reply)
    }

    /// Waits for others, unless told to stop.
    pub(crate) fn wait<T>(&self, work: impl Future<Output = Result<T, RoleError>>) -> Result<T, RoleError> {
        self.waits.wait(work)
    }

    /// Begins something whose result is waited for later.
    pub(crate) fn spawn<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> JoinHandle<T> {
        self.waits.runtime.spawn(work)
    }
}

/// How long this worker took for what it did since its last report.
#[derive(Default)]
pub(crate) struct Pace {
    compute_seconds: VecDeque<f32>,
    rows: usize,
    batches: usize,
    all_reduce: Duration,
    all_reduces: u32,
}

impl Pace {
    fn computed(&mut self, rows: usize, took: Duration) {
        if self.compute_seconds.len() == TOLD_BATCHES {
            self.compute_seconds.pop_front();
        }
        self.compute_seconds.push_back(took.as_secs_f32());
        self.rows += rows;
        self.batches += 1;
    }

    pub(crate) fn reduced(&mut self, took: Duration) {
        self.all_reduce += took;
        self.all_reduces += 1;
    }

    fn tell(self, progress: &mut v1::Progress) {
        progress.compute_seconds = self.compute_seconds.into();
        progress.batch_rows = self.rows as f64 / self.batches.max(1) as f64;
        progress.all_reduce_seconds = self.all_reduce.as_secs_f64() / f64::from(self.all_reduces.max(1));
    }
}

/// Where the loop's thread waits for others.
pub(crate) struct Waits {
    runtime: Handle,
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

/// SHA-256 of the parameters' little-endian bytes.
fn digest(parameters: &[f32]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for value in parameters {
        hash.update(value.to_le_bytes());
    }
    hash.finalize().into()
}
