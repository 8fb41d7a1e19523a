//! Trains with a barrier in each step (`sync`, `hybrid`, `des`). A step fetches embeddings, sends
//! their gradients, sums the dense gradients over all dense workers, and applies one update. The
//! worker requests the embeddings of later steps ahead of time. The parameter servers reply when
//! the mode's staleness allows it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use rectrain_dense::StepOutput;
use rectrain_modes::GlobalStep;
use rectrain_modes::barrier::StepWindow;
use rectrain_proto::v1;
use tokio::task::JoinHandle;

use super::WorkerHalf;
use crate::all_reduce::{RingPart, all_reduce};
use crate::horizon::Horizon;
use crate::local_batch::{Fetching, LocalBatch, Pushes};
use crate::trainer::Trainer;
use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::Pooled;
use rectrain_protocol::long_wait::reporting_wait;

/// Training with a barrier in each step.
pub(super) struct Barrier {
    pub(crate) window: StepWindow,
    /// In `des`: the parameter servers send sums instead of rows.
    pub(crate) substitutes: bool,
}

impl WorkerHalf for Barrier {
    fn train(&self, trainer: &mut Trainer, order: &v1::Order) -> Result<(), RoleError> {
        let steps = if self.substitutes { 0 } else { trainer.plan.look_ahead() };
        trainer.substitute(self.substitutes)?;
        trainer.train_with_barrier(order, self.window.looking_ahead(steps))?;
        trainer.substitute(false)
    }
}

impl Trainer {
    /// Trains from the order's step and batch to its end, if this worker participates. At most τ +
    /// 1 steps' gradients are in flight.
    fn train_with_barrier(&mut self, order: &v1::Order, window: StepWindow) -> Result<(), RoleError> {
        if self.rank.0 >= self.barrier_workers {
            return Ok(());
        }
        let (steps_ahead, pushes_ahead) = (window.steps_ahead(), window.pushes_ahead(self.share().len()));
        let mut horizon = Horizon::new(order.number, order.batch);
        let mut ahead: VecDeque<Fetching> = VecDeque::new();
        let mut pushes = Pushes::new();
        if order.joins {
            self.resend_gradients(order, window, &mut horizon, &mut pushes)?;
        } else {
            self.applied = Some(order.step);
            self.previous.clear();
        }
        let mut batch = order.batch + (self.next_step(order) - order.step);
        let mut fetched = batch;
        self.set_position(batch);
        loop {
            horizon.keep_ahead(self, batch)?;
            while ahead.len() < steps_ahead && fetched < horizon.until() {
                ahead.push_back(self.fetch_share(order, fetched, &horizon));
                fetched += 1;
            }
            let Some(next) = ahead.pop_front() else {
                if horizon.ends_at(fetched) {
                    break;
                }
                let waited = Instant::now();
                // The coordinator grants more batches once this worker reports that it has trained
                // the granted ones.
                self.report_progress()?;
                horizon.take(self)?;
                self.metrics.batch_wait.observe(waited.elapsed().as_secs_f64());
                self.pace.times.waited_for_data(waited.elapsed());
                continue;
            };
            self.step(order, window, batch, next, &mut pushes)?;
            self.drain(&mut pushes, pushes_ahead)?;
            batch += 1;
        }
        self.drain(&mut pushes, 0)
    }

    /// The next step of the order for this worker's parameters.
    pub(crate) fn next_step(&self, order: &v1::Order) -> u64 {
        self.applied.unwrap_or_default().max(order.step)
    }

    /// Fetches this worker's pieces of a batch. An earlier mode may have trained the first pieces
    /// of the order's first batch.
    pub(crate) fn fetch_share(&self, order: &v1::Order, batch: u64, horizon: &Horizon) -> Fetching {
        let first = if batch == order.batch { order.piece } else { 0 };
        let keys = self.share().filter(|piece| *piece >= first);
        let keys = keys.map(|piece| BatchKey { position: BatchPosition::Train(batch), piece });
        let step = order.step + (batch - order.batch);
        self.fetch(horizon.assign(keys, self.plan.pieces()), Some(step))
    }

    fn step(
        &mut self,
        order: &v1::Order,
        window: StepWindow,
        batch: u64,
        next: Fetching,
        pushes: &mut Pushes,
    ) -> Result<(), RoleError> {
        let started = Instant::now();
        let step = order.step + (batch - order.batch);
        self.put_first_layer(step)?;
        let own = self.fetched(next)?;
        own.expect_all("forward")?;
        self.metrics.embedding_wait.observe(started.elapsed().as_secs_f64());

        let scale = 1.0 / self.samples_to_train(order, batch, &own).max(1) as f32;
        let output = self.compute(&own, scale, step, step)?;
        let loss_sum = output.loss_sum();
        let StepOutput { predictions, embedding_gradients, linear_gradients, .. } = output;
        for (piece, gradients) in own.by_piece(Pooled { embeddings: embedding_gradients, linear: linear_gradients }) {
            pushes.push_back(self.send_gradients(piece, gradients, Some(step), None));
        }
        let of_first_layer = self.first_layer_gradient(step)?;
        self.add_first_layer_gradient(of_first_layer.as_deref())?;
        while !self.sum_over_workers(GlobalStep(step))? {
            self.has_gradients = false;
            self.repair_ring()?;
            if self.applied == Some(step + 1) {
                return self.count(&own, loss_sum, &predictions, batch + 1, started);
            }
            // The buffer of gradients contains a partial sum, so compute them again.
            self.compute(&own, scale, step, step)?;
            self.add_first_layer_gradient(of_first_layer.as_deref())?;
        }
        self.offer.withdraw();
        if window.is_exact() && self.peers.next.is_some() {
            self.previous.clear();
            self.previous.extend_from_slice(self.tower.parameters()?);
        }
        self.tower.apply((step + 1).saturating_sub(order.dense_since))?;
        self.applied = Some(step + 1);
        self.count(&own, loss_sum, &predictions, batch + 1, started)
    }

    /// The number of samples of a global batch that this order trains. An earlier mode may have
    /// trained the first pieces of the order's first batch.
    pub(crate) fn samples_to_train(&self, order: &v1::Order, batch: u64, own: &LocalBatch) -> usize {
        let trained_before = if batch == order.batch { u64::from(order.piece) * self.plan.local_batch_rows } else { 0 };
        own.global_samples.saturating_sub(trained_before as usize)
    }

    /// Sums the gradients over the ring. Returns false if a dense worker was replaced meanwhile.
    fn sum_over_workers(&mut self, step: GlobalStep) -> Result<bool, RoleError> {
        let Some(next) = self.peers.next.clone() else { return Ok(true) };
        let started = Instant::now();
        let newer_ring = self.newer_ring();
        let part = RingPart {
            number: self.ring_number,
            rank: self.rank,
            ranks: self.barrier_workers,
            patience: self.plan.patience(),
        };
        let ring = Arc::clone(&self.ring);
        let before = (self.rank.0 + self.barrier_workers - 1) % self.barrier_workers.max(1);
        let waiting = self.waiting_for(v1::Role::DenseWorker, before);
        let (waits, tower, coordinator) = (&self.waits, &mut self.tower, &self.peers.coordinator);
        let gradients = tower.gradients_mut()?;
        let summed = waits.wait(async {
            tokio::select! {
                biased;
                reduced = reporting_wait(all_reduce(step, part, gradients, &next, &ring), coordinator, waiting) => {
                    reduced.map(|()| true)
                }
                () = newer_ring => Ok(false),
            }
        })?;
        self.metrics.all_reduce.observe(started.elapsed().as_secs_f64());
        self.pace.reduced(started.elapsed());
        Ok(summed)
    }

    /// Waits until at most `leave` of `pushes` are in flight, and removes those that have ended.
    fn drain(&mut self, pushes: &mut Pushes, leave: usize) -> Result<(), RoleError> {
        while pushes.len() > leave || pushes.front().is_some_and(JoinHandle::is_finished) {
            let Some(push) = pushes.pop_front() else { break };
            self.join("backward", push)?;
        }
        Ok(())
    }
}
