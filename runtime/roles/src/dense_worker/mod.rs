//! The dense worker: trains the tower on pooled embeddings (Persia §3, algorithm 2). Its service half takes batches from loaders
//! and ring chunks from the neighbour; its training half is a loop on a thread of its own ([`train`]).

mod all_reduce;
mod inbox;
mod train;

use std::sync::Arc;

use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;
use rectrain_wire::{BoxFuture, Channel, Frame, Peer, Refusal, Service, Tensor};

use self::all_reduce::RingMailbox;
use self::inbox::{DenseBatch, Inbox};
pub(crate) use self::train::Trainer;
use crate::batch::{BatchKey, BatchPosition};
use crate::error::RoleError;
use crate::message::{self, Request};
use crate::metrics::DenseWorkerMetrics;
use crate::plan::JobPlan;

/// Whom a dense worker calls.
pub(crate) struct DensePeers {
    pub(crate) coordinator: Channel,
    pub(crate) embedding_workers: Vec<Channel>,
    /// The next dense worker around the ring; none if there is only one.
    pub(crate) next: Option<Channel>,
}

/// The service half; see the module's text.
pub struct DenseWorker {
    rank: Rank,
    dense_width: usize,
    inbox: Arc<Inbox>,
    ring: Arc<RingMailbox>,
    metrics: DenseWorkerMetrics,
}

impl DenseWorker {
    /// Dense worker number `rank`, before step 0.
    #[must_use]
    pub fn new(plan: &JobPlan, rank: Rank, metrics: DenseWorkerMetrics) -> Self {
        Self {
            rank,
            dense_width: plan.schema.dense.len(),
            inbox: Arc::new(Inbox::new(plan.batches_ahead)),
            ring: Arc::new(RingMailbox::default()),
            metrics,
        }
    }

    /// The training half.
    pub(crate) fn trainer(&self, plan: &Arc<JobPlan>, peers: DensePeers) -> Result<Trainer, RoleError> {
        Trainer::new(
            Arc::clone(plan),
            self.rank,
            Arc::clone(&self.inbox),
            Arc::clone(&self.ring),
            peers,
            self.metrics.clone(),
        )
    }

    /// Ends the training half's waits with this reason.
    pub(crate) fn close(&self, reason: &RoleError) {
        self.inbox.close(reason);
    }

    async fn put_dense(&self, request: v1::PutDense, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let key = BatchKey::read("put_dense", request.batch)?;
        let samples = request.samples as usize;
        let mut tensors = tensors.into_iter();
        let dense = message::next("put_dense", &mut tensors)?.expect_f32("dense")?;
        let labels = message::next("put_dense", &mut tensors)?.expect_f32("labels")?;
        let groups = tensors.next().map(|tensor| tensor.expect_u64("groups")).transpose()?;
        let sizes_agree = dense.len() == samples * self.dense_width
            && labels.len() == samples
            && groups.as_ref().is_none_or(|groups| groups.len() == samples)
            && key.rank == self.rank;
        if !sizes_agree {
            let reason = format!(
                "{key} came to dense worker {} with {samples} samples, {} dense values and {} labels",
                self.rank,
                dense.len(),
                labels.len()
            );
            return Err(RoleError::Inconsistent { message: "put_dense", reason });
        }
        let batch = DenseBatch {
            samples,
            global_samples: request.global_samples as usize,
            epoch: request.epoch,
            dense,
            labels,
            groups,
        };
        match key.position {
            BatchPosition::Step(step) => self.inbox.put_step(step, batch).await?,
            BatchPosition::Evaluation { at_step, number } => self.inbox.put_evaluation(at_step, number, batch).await?,
        }
        Ok(message::done::<v1::PutDense>())
    }

    fn ring_chunk(&self, request: v1::RingChunk, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let [chunk] = message::take("ring_chunk", tensors)?;
        self.ring.put(GlobalStep(request.step), request.round, chunk.expect_f32("chunk")?)?;
        Ok(message::done::<v1::RingChunk>())
    }
}

impl Service for DenseWorker {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            match frame.kind {
                v1::PutDense::KIND => {
                    let (request, tensors) = message::read::<v1::PutDense>(frame)?;
                    Ok(self.put_dense(request, tensors).await?)
                }
                v1::RingChunk::KIND => {
                    let (request, tensors) = message::read::<v1::RingChunk>(frame)?;
                    Ok(self.ring_chunk(request, tensors)?)
                }
                kind => Err(message::refuse_kind("dense worker", kind)),
            }
        })
    }
}
