//! The dense worker: trains the tower on pooled embeddings (Persia §3, algorithm 2; GBA appendix B, algorithm 1). Its service
//! half takes ring chunks from its neighbour; its training half ([`Trainer`]) is a loop on a thread of its own that carries out
//! the coordinator's orders, one after the other:
//!
//! - [`barrier`]: train with a barrier in each step (`sync`, `hybrid`), and [`mend`] their ring when one of them was replaced,
//! - [`tokens`]: train without one (`gba`, `async`, …),
//! - [`partitions`]: publish the dense parameters to the parameter servers, or read them back,
//! - [`evaluate`]: predict the test part,
//! - [`checkpoint`]: save the dense parameters, or take them from a checkpoint.

mod all_reduce;
mod checkpoint;
mod evaluate;
mod half;
mod horizon;
mod local_batch;
mod partitions;
mod ring_repair;
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

/// Whom a dense worker calls.
pub struct DensePeers {
    pub coordinator: CoordinatorChannel,
    pub placement: Placement,
    pub directory: Directory,
    pub embedding_workers: Arc<EmbeddingWorkers>,
    /// The next dense worker around the ring; none if there is only one.
    pub next: Option<Channel>,
    /// Told when this worker takes part.
    pub readiness: Readiness,
}

/// The service half; see the module's text.
pub struct DenseWorker {
    rank: Rank,
    slow: f64,
    computing: Watchdog,
    ring: Arc<RingMailbox>,
    offer: Arc<Offer>,
    stop: CancellationToken,
    metrics: DenseWorkerMetrics,
}

impl DenseWorker {
    /// Dense worker number `rank`, before the first order. It takes `slow` (at least 1) times as long to compute as it does, and notes in
    /// `computing` while it does.
    #[must_use]
    pub fn new(rank: Rank, slow: f64, computing: Watchdog, metrics: DenseWorkerMetrics) -> Self {
        let (ring, offer) = (Arc::default(), Arc::default());
        Self { rank, slow: slow.max(1.0), computing, ring, offer, stop: CancellationToken::new(), metrics }
    }

    /// The training half.
    pub fn trainer(&self, plan: &Arc<JobPlan>, peers: DensePeers) -> Result<Trainer, RoleError> {
        let (shared, stop) = ((Arc::clone(&self.ring), Arc::clone(&self.offer)), self.stop.clone());
        let speed = (self.slow, self.computing.clone());
        Trainer::new(Arc::clone(plan), self.rank, speed, shared, peers, stop, self.metrics.clone())
    }

    /// Ends the training half's waits.
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
