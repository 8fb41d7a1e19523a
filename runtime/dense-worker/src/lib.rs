//! The dense worker: trains the tower on pooled embeddings (Persia §3, algorithm 2; GBA appendix B,
//! algorithm 1). Its service half, [`DenseWorker`], receives ring chunks from the previous worker.
//! Its training half, [`Trainer`], is a loop on its own thread (`orders.rs`) that carries out the
//! coordinator's orders in sequence:
//!
//! - `half/barrier.rs`: trains with a barrier in each step (`sync`, `hybrid`, `des`);
//! - `half/pulled.rs`: trains the pieces that it pulls (`sync` with `pieces: pulled`);
//! - `first_layer.rs`: exchanges the first layer with the parameter servers (`des`);
//! - `ring_repair.rs`: repairs the ring when one of its workers was replaced;
//! - `half/tokens.rs`: trains without a barrier (`gba`, `async`, …);
//! - `half/shadow.rs`: trains a replica (`shadow`);
//! - `hogwild.rs`: trains a replica with several threads;
//! - `replica.rs`: exchanges the replica with the parameter servers;
//! - `partitions.rs`: publishes the dense parameters to the parameter servers, or reads them back;
//! - `evaluate.rs`: predicts the test part;
//! - `checkpoint.rs`: saves the dense parameters, or restores them from a checkpoint.

mod all_reduce;
mod checkpoint;
mod evaluate;
mod first_layer;
mod half;
mod hogwild;
mod horizon;
mod local_batch;
mod loss_watch;
mod orders;
mod partitions;
mod replica;
mod ring_repair;
mod spent;
mod trainer;

use std::sync::Arc;

use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;
use rectrain_wire::{BoxFuture, Channel, Frame, Peer, Refusal, Service, Tensor};
use tokio_util::sync::CancellationToken;

use self::all_reduce::RingMailbox;
use self::ring_repair::Offer;
pub use self::trainer::Trainer;
use rectrain_protocol::coordinator_channel::CoordinatorChannel;
use rectrain_protocol::embedding_workers::EmbeddingWorkers;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message::{self, Request};
use rectrain_protocol::metrics::DenseWorkerMetrics;
use rectrain_protocol::placement::{Directory, Placement};
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::readiness::Readiness;
use rectrain_protocol::watchdog::Watchdog;

/// The peers of a dense worker.
pub struct DensePeers {
    pub coordinator: CoordinatorChannel,
    pub placement: Placement,
    pub directory: Directory,
    pub embedding_workers: Arc<EmbeddingWorkers>,
    /// The next dense worker around the ring. `None` if there is only one.
    pub next: Option<Channel>,
    /// Set to ready when this worker participates.
    pub readiness: Readiness,
}

/// The service half of a dense worker. It shares the ring's mailbox with the training half.
pub struct DenseWorker {
    rank: Rank,
    slow: f64,
    watchdog: Watchdog,
    ring: Arc<RingMailbox>,
    offer: Arc<Offer>,
    stop: CancellationToken,
    metrics: DenseWorkerMetrics,
}

impl DenseWorker {
    /// Dense worker number `rank`, before its first order. `slow` (at least 1) multiplies its
    /// computing time. `watchdog` watches each computation.
    #[must_use]
    pub fn new(rank: Rank, slow: f64, watchdog: Watchdog, metrics: DenseWorkerMetrics) -> Self {
        let (ring, offer) = (Arc::default(), Arc::default());
        Self { rank, slow: slow.max(1.0), watchdog, ring, offer, stop: CancellationToken::new(), metrics }
    }

    /// Makes the training half.
    ///
    /// # Errors
    /// The plan's tower cannot be made.
    pub fn trainer(&self, plan: &Arc<JobPlan>, peers: DensePeers) -> Result<Trainer, RoleError> {
        let (shared, stop) = ((Arc::clone(&self.ring), Arc::clone(&self.offer)), self.stop.clone());
        let speed = (self.slow, self.watchdog.clone());
        Trainer::new(Arc::clone(plan), self.rank, speed, shared, peers, stop, self.metrics.clone())
    }

    /// Stops the training half: its waits end with [`RoleError::Stopped`].
    pub fn close(&self) {
        self.stop.cancel();
    }

    fn ring_chunk(&self, request: v1::RingChunk, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let [chunk] = message::take("ring_chunk", tensors)?;
        self.ring.put(request.ring, GlobalStep(request.step), request.round, chunk.expect_f32("chunk")?)?;
        Ok(message::done::<v1::RingChunk>())
    }
}

impl Service for DenseWorker {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            match frame.kind {
                v1::RingChunk::KIND => {
                    let (request, tensors) = message::read::<v1::RingChunk>(frame)?;
                    Ok(self.ring_chunk(request, tensors)?)
                }
                v1::DenseStateRequest::KIND => {
                    let (request, _) = message::read::<v1::DenseStateRequest>(frame)?;
                    let (state, tensors) = self.offer.of_ring(request.ring).await?;
                    Ok(message::reply::<v1::DenseStateRequest>(&state, tensors))
                }
                kind => Err(message::refuse_kind("dense worker", kind)),
            }
        })
    }
}
