//! The training loop of a dense worker. Runs on a thread of its own, because it computes; everything that waits for others goes
//! through the runtime's handle.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rectrain_dense::metrics::RunningAuc;
use rectrain_dense::{Features, StepOutput, Tower};
use rectrain_modes::{EvaluationSchedule, GlobalStep, Rank};
use rectrain_proto::v1;
use rectrain_wire::{Channel, Tensor};
use sha2::{Digest, Sha256};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::DensePeers;
use super::all_reduce::{RingMailbox, all_reduce};
use super::inbox::{DenseBatch, Inbox};
use crate::batch::{BatchKey, BatchPosition};
use crate::embedding_worker::{decode_pooled, encode_pooled};
use crate::error::RoleError;
use crate::message;
use crate::metrics::DenseWorkerMetrics;
use crate::plan::{CALL_DEADLINE, JobPlan, WHOLE_JOB};
use crate::pooling::Pooled;

/// How often progress is reported.
const REPORT_EVERY: Duration = Duration::from_millis(200);
/// Training predictions over which the running AUC is taken.
const RUNNING_AUC_SAMPLES: usize = 100_000;
/// Evaluation batches whose embeddings are fetched ahead.
const EVALUATION_LOOK_AHEAD: usize = 4;

/// A batch whose embeddings are on their way.
struct Fetched {
    key: BatchKey,
    batch: DenseBatch,
    pooled: JoinHandle<Result<Pooled, RoleError>>,
}

/// See the module's text.
pub(crate) struct Trainer {
    plan: Arc<JobPlan>,
    rank: Rank,
    tower: Tower,
    inbox: Arc<Inbox>,
    ring: Arc<RingMailbox>,
    peers: DensePeers,
    metrics: DenseWorkerMetrics,
    runtime: Handle,
    /// Gradients on their way to the embedding workers, oldest first: at most τ + 1.
    pushes: VecDeque<JoinHandle<Result<(), RoleError>>>,
    progress: v1::Progress,
    running_auc: RunningAuc,
    reported: Instant,
    evaluating: Duration,
}

impl Trainer {
    pub(super) fn new(
        plan: Arc<JobPlan>,
        rank: Rank,
        inbox: Arc<Inbox>,
        ring: Arc<RingMailbox>,
        peers: DensePeers,
        metrics: DenseWorkerMetrics,
    ) -> Result<Self, RoleError> {
        let tower = plan.tower(rank)?;
        Ok(Self {
            plan,
            rank,
            tower,
            inbox,
            ring,
            peers,
            metrics,
            runtime: Handle::current(),
            pushes: VecDeque::new(),
            progress: v1::Progress { rank: rank.0, ..v1::Progress::default() },
            running_auc: RunningAuc::new(RUNNING_AUC_SAMPLES),
            reported: Instant::now(),
            evaluating: Duration::ZERO,
        })
    }

    /// Trains until the coordinator says that the last step is done, evaluating where the schedule says so.
    pub(crate) fn run(mut self) -> Result<(), RoleError> {
        let started = Instant::now();
        let steps = self.train()?;
        self.drain_pushes(0)?;
        self.report_progress()?;
        let training = started.elapsed() - self.evaluating;
        if self.plan.test.is_some() {
            self.evaluate(steps)?;
        }
        let done = v1::TrainingDone {
            rank: self.rank.0,
            steps: steps.0,
            parameters_sha256: digest(self.tower.parameters()).to_vec(),
            training_seconds: training.as_secs_f64(),
        };
        self.tell(done, Vec::new())
    }

    fn train(&mut self) -> Result<GlobalStep, RoleError> {
        let end = self.watch_for_the_end();
        let mut schedule = EvaluationSchedule::new(self.plan.evaluation);
        let mut ahead: VecDeque<Fetched> = VecDeque::new();
        let mut fetched = GlobalStep(0);
        let mut step = GlobalStep(0);
        loop {
            if ahead.is_empty() {
                let waited = Instant::now();
                let Some(batch) = self.runtime.block_on(self.inbox.take_step())? else { break };
                self.metrics.batch_wait.observe(waited.elapsed().as_secs_f64());
                ahead.push_back(self.fetch(BatchPosition::Step(fetched), batch));
                fetched = fetched.next();
            }
            while ahead.len() < self.plan.steps_ahead() {
                let Some(batch) = self.inbox.try_take_step() else { break };
                ahead.push_back(self.fetch(BatchPosition::Step(fetched), batch));
                fetched = fetched.next();
            }
            let Some(next) = ahead.pop_front() else { break };
            if self.plan.test.is_some() && schedule.due_before(step, next.batch.epoch) {
                self.evaluate(step)?;
            }
            self.step(step, next)?;
            step = step.next();
        }
        end.abort();
        Ok(step)
    }

    /// One step: embeddings in, gradients out, dense parameters updated.
    fn step(&mut self, step: GlobalStep, fetched: Fetched) -> Result<(), RoleError> {
        let started = Instant::now();
        let Fetched { key, batch, pooled } = fetched;
        let pooled = self.join("forward", pooled)?;
        self.metrics.embedding_wait.observe(started.elapsed().as_secs_f64());

        let computing = Instant::now();
        let scale = 1.0 / batch.global_samples.max(1) as f32;
        let output = self.tower.forward_backward(features(&batch, &pooled), &batch.labels, scale, step.0)?;
        self.metrics.compute.observe(computing.elapsed().as_secs_f64());
        let StepOutput { loss_sum, predictions, embedding_gradients, linear_gradients } = output;
        self.push(key, Pooled { embeddings: embedding_gradients, linear: linear_gradients })?;

        if let Some(next) = &self.peers.next {
            let reducing = Instant::now();
            let ranks = self.plan.replicas.dense_workers;
            let buffer = self.tower.gradients_mut();
            self.runtime.block_on(all_reduce(step, self.rank, ranks, buffer, next, &self.ring))?;
            self.metrics.all_reduce.observe(reducing.elapsed().as_secs_f64());
        }
        self.tower.apply(step.0 + 1)?;

        self.running_auc.push(&predictions, &batch.labels);
        self.progress.steps_done = step.0 + 1;
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

    /// Predicts this worker's share of the test part before `step` and sends it to the coordinator.
    fn evaluate(&mut self, step: GlobalStep) -> Result<(), RoleError> {
        let started = Instant::now();
        self.drain_pushes(0)?;
        self.report_progress()?;
        self.inbox.begin_evaluation(step);
        self.tell(v1::EvaluationBegin { rank: self.rank.0, at_step: step.0 }, Vec::new())?;
        self.watch_for_the_evaluations_size(step);
        let (mut predictions, mut labels, mut groups) = (Vec::new(), Vec::new(), Vec::new());
        let mut ahead: VecDeque<Fetched> = VecDeque::new();
        let (mut number, mut more) = (0, true);
        loop {
            while more && ahead.len() < EVALUATION_LOOK_AHEAD {
                match self.runtime.block_on(self.inbox.take_evaluation())? {
                    Some(batch) => {
                        ahead.push_back(self.fetch(BatchPosition::Evaluation { at_step: step, number }, batch));
                        number += 1;
                    }
                    None => more = false,
                }
            }
            let Some(Fetched { batch, pooled, .. }) = ahead.pop_front() else { break };
            let pooled = self.join("forward", pooled)?;
            predictions.extend(self.tower.predict(features(&batch, &pooled))?);
            labels.extend(batch.labels);
            groups.extend(batch.groups.unwrap_or_default());
        }
        let share = v1::EvaluationShare { rank: self.rank.0, at_step: step.0 };
        self.tell(share, vec![Tensor::from(predictions), Tensor::from(labels), Tensor::from(groups)])?;
        self.evaluating += started.elapsed();
        Ok(())
    }

    /// Asks the batch's embedding worker for pooled embeddings, without waiting.
    fn fetch(&self, position: BatchPosition, batch: DenseBatch) -> Fetched {
        let key = BatchKey { position, rank: self.rank };
        let channel = self.embedding_worker(key);
        let (plan, samples) = (Arc::clone(&self.plan), batch.samples);
        let pooled = self.runtime.spawn(async move {
            let (_done, tensors) =
                message::call(&channel, v1::Forward { batch: Some(key.write()) }, Vec::new(), CALL_DEADLINE).await?;
            decode_pooled("forward", tensors, samples, &plan.layout, plan.compression)
        });
        Fetched { key, batch, pooled }
    }

    /// Sends gradients to the batch's embedding worker; waits only while more than τ + 1 are on their way.
    fn push(&mut self, key: BatchKey, gradients: Pooled) -> Result<(), RoleError> {
        let channel = self.embedding_worker(key);
        let plan = Arc::clone(&self.plan);
        self.pushes.push_back(self.runtime.spawn(async move {
            let tensors = encode_pooled(gradients, &plan.layout, plan.compression)?;
            message::call(&channel, v1::Backward { batch: Some(key.write()) }, tensors, CALL_DEADLINE).await?;
            Ok(())
        }));
        self.drain_pushes(self.plan.mode.staleness() as usize + 1)
    }

    fn drain_pushes(&mut self, leave: usize) -> Result<(), RoleError> {
        while self.pushes.len() > leave || self.pushes.front().is_some_and(JoinHandle::is_finished) {
            let Some(push) = self.pushes.pop_front() else { break };
            self.join("backward", push)?;
        }
        Ok(())
    }

    fn report_progress(&mut self) -> Result<(), RoleError> {
        self.reported = Instant::now();
        self.progress.running_auc = self.running_auc.value();
        let next = v1::Progress { rank: self.rank.0, steps_done: self.progress.steps_done, ..v1::Progress::default() };
        let report = std::mem::replace(&mut self.progress, next);
        self.tell(report, Vec::new())
    }

    /// Learns from the coordinator where training ends and tells the inbox.
    fn watch_for_the_end(&self) -> JoinHandle<()> {
        let (coordinator, inbox, rank) = (self.peers.coordinator.clone(), Arc::clone(&self.inbox), self.rank.0);
        self.runtime.spawn(async move {
            match message::call(&coordinator, v1::EndRequest { rank }, Vec::new(), WHOLE_JOB).await {
                Ok((end, _)) => inbox.end_training(GlobalStep(end.total_steps)),
                Err(error) => inbox.close(&error),
            }
        })
    }

    fn watch_for_the_evaluations_size(&self, at_step: GlobalStep) {
        let (coordinator, inbox) = (self.peers.coordinator.clone(), Arc::clone(&self.inbox));
        self.runtime.spawn(async move {
            let request = v1::EvaluationSizeRequest { at_step: at_step.0 };
            match message::call(&coordinator, request, Vec::new(), CALL_DEADLINE).await {
                Ok((size, _)) => inbox.end_evaluation(size.batches),
                Err(error) => inbox.close(&error),
            }
        });
    }

    fn tell<R: message::Request>(&self, request: R, tensors: Vec<Tensor>) -> Result<(), RoleError> {
        self.runtime.block_on(message::call(&self.peers.coordinator, request, tensors, CALL_DEADLINE)).map(drop)
    }

    fn embedding_worker(&self, key: BatchKey) -> Channel {
        let workers = &self.peers.embedding_workers;
        workers[key.embedding_worker(workers.len(), self.plan.replicas.dense_workers)].clone()
    }

    fn join<T>(&self, what: &'static str, task: JoinHandle<Result<T, RoleError>>) -> Result<T, RoleError> {
        self.runtime.block_on(task).map_err(|error| RoleError::Task { what, reason: error.to_string() })?
    }
}

fn features<'a>(batch: &'a DenseBatch, pooled: &'a Pooled) -> Features<'a> {
    Features { samples: batch.samples, dense: &batch.dense, embeddings: &pooled.embeddings, linear: &pooled.linear }
}

/// SHA-256 of the parameters' little-endian bytes.
fn digest(parameters: &[f32]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for value in parameters {
        hash.update(value.to_le_bytes());
    }
    hash.finalize().into()
}
