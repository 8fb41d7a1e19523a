//! The replica of the dense parameters that a dense worker trains in `shadow` (ShadowSync §3.2 and
//! §3.3). [`ReplicaSync`] decides when the worker exchanges it with the parameter servers.
//!
//! Between two batches, the training thread takes a snapshot. A task sends it and receives the
//! copies of all servers. The training thread applies them between two later batches, to the
//! replica of that moment. So the thread never waits for an exchange, except in the foreground
//! form.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use rectrain_modes::shadow::{ReplicaSync, interpolate};
use rectrain_proto::v1;
use rectrain_wire::{BoxFuture, Tensor};

use crate::partitions::wrong_size;
use crate::trainer::{KeptReplica, Trainer};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message;
use rectrain_protocol::plan::dense_partition;

/// The state of the replica in one order. Its parameters are in the tower.
pub(crate) struct Replica {
    order: u64,
    /// The number of dense workers that train in the order.
    workers: u32,
    /// Whether the copy follows the mean of the replicas.
    averages: bool,
    /// α, above 0 and at most 1.
    alpha: f32,
    sync: ReplicaSync,
    /// Exchanges begun in this order.
    exchanges: u64,
    /// Updates of the optimizer's state.
    updates: u64,
    /// The exchanges that have ended since the last report, and the batches between them.
    unreported: (u64, u64),
    /// Whether the replica has trained a batch of this order.
    has_trained: bool,
}

impl Replica {
    /// The replica of an order. It is the one of the last order, or begins with the servers' copy.
    pub(crate) fn begin(trainer: &mut Trainer, order: &v1::Order, shadow: &v1::Shadow) -> Result<Self, RoleError> {
        let updates = trainer.begin_replica(order)?;
        Ok(Self {
            order: order.number,
            workers: shadow.workers,
            averages: shadow.averages,
            alpha: shadow.alpha,
            sync: ReplicaSync::new(NonZeroU32::new(shadow.every_steps)),
            exchanges: 0,
            updates,
            unreported: (0, 0),
            has_trained: false,
        })
    }

    /// Applies the gradients of a batch.
    pub(crate) fn train(&mut self, trainer: &mut Trainer) -> Result<(), RoleError> {
        self.updates += 1;
        self.has_trained = true;
        self.sync.trained();
        Ok(trainer.tower.apply(self.updates)?)
    }

    /// The exchanges of this replica.
    pub(crate) fn sync(&self) -> &ReplicaSync {
        &self.sync
    }

    /// The exchanges that have ended since the last call, and the batches between them.
    pub(crate) fn take_gaps(&mut self) -> (u64, u64) {
        std::mem::take(&mut self.unreported)
    }

    /// Takes a snapshot, and returns the call that sends it to all servers. The call's result is
    /// the copy. `last`: the snapshot includes the optimizer's state.
    pub(crate) fn begin_exchange(&mut self, trainer: &mut Trainer, last: bool) -> Result<Exchanging, RoleError> {
        self.sync.begin();
        self.exchanges += 1;
        let (rank, caller) = (trainer.rank.0, trainer.peers.coordinator.caller_id());
        let Self { order, exchanges: number, workers, .. } = *self;
        trainer.snapshot(v1::Exchange { rank, order, number, last, caller, workers })
    }

    /// Moves the replica towards the copy: w⁽ⁱ⁾ ← (1 − α) w⁽ⁱ⁾ + α w̃ (algorithm 2, second line).
    pub(crate) fn end_exchange(
        &mut self,
        trainer: &mut Trainer,
        copy: &[f32],
        took: Duration,
    ) -> Result<(), RoleError> {
        interpolate(trainer.tower.parameters_mut()?, copy, self.alpha);
        trainer.metrics.exchange.observe(took.as_secs_f64());
        if let Some(gap) = self.sync.end().filter(|gap| *gap > 0) {
            trainer.metrics.sync_gap.observe(gap as f64);
            self.unreported = (self.unreported.0 + 1, self.unreported.1 + gap);
        }
        Ok(())
    }

    /// Makes the last exchange of the order. If the replica trained nothing in it, only a mean of
    /// all replicas needs this exchange. Then keeps the replica for the next order.
    pub(crate) fn finish(mut self, trainer: &mut Trainer) -> Result<(), RoleError> {
        if self.has_trained || self.averages {
            let started = Instant::now();
            let call = self.begin_exchange(trainer, true)?;
            let copy = trainer.wait(call)?;
            self.end_exchange(trainer, &copy, started.elapsed())?;
        }
        let parameters = trainer.tower.parameters()?.to_vec();
        trainer.replica = Some(KeptReplica { parameters, updates: self.updates });
        Ok(())
    }
}

/// An exchange on its way. Its result is the copy of all servers, one partition after another.
pub(crate) type Exchanging = BoxFuture<'static, Result<Vec<f32>, RoleError>>;

impl Trainer {
    /// Puts the replica of the last order back, or begins one that is equal to the servers' copy.
    /// Returns the number of updates of its optimizer's state.
    fn begin_replica(&mut self, order: &v1::Order) -> Result<u64, RoleError> {
        if let Some(kept) = self.replica.take() {
            self.tower.parameters_mut()?.copy_from_slice(&kept.parameters);
            return Ok(kept.updates);
        }
        self.read_back()?;
        // An earlier order in `shadow` counted the batches of all workers. The count is then too
        // high. It only matters to Adam's bias correction, in the first updates.
        Ok(order.step.saturating_sub(order.dense_since))
    }

    /// The calls that send each server its partition of the present parameters.
    fn snapshot(&mut self, exchange: v1::Exchange) -> Result<Exchanging, RoleError> {
        let (parameters, state) = if exchange.last { self.tower.state()? } else { (self.tower.parameters()?, &[][..]) };
        let (total, servers) = (parameters.len(), &self.peers.placement.servers);
        let mut calls = Vec::with_capacity(servers.len());
        for (server, channel) in servers.iter().enumerate() {
            let own = dense_partition(total, server, servers.len());
            let mut tensors = vec![Tensor::from(parameters[own.clone()].to_vec())];
            if exchange.last {
                let slots = state.chunks_exact(total.max(1));
                let state: Vec<f32> = slots.flat_map(|slot| slot[own.clone()].iter().copied()).collect();
                tensors.push(Tensor::from(state));
            }
            let channel = channel.clone();
            calls.push(async move {
                let sent = message::call_server(&channel, exchange, move || Ok(tensors.clone()));
                let [copy] = message::take("exchange", sent.await?.1)?;
                let copy = copy.expect_f32("parameters")?;
                if copy.len() == own.len() { Ok(copy) } else { Err(wrong_size(server, own.len(), copy.len())) }
            });
        }
        Ok(Box::pin(async move { try_join_all(calls).await.map(|copies| copies.concat()) }))
    }
}
