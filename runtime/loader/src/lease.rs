//! Leases of chunks, both for training and for evaluation.

use rectrain_data::Batch;
use rectrain_modes::GlobalStep;
use rectrain_proto::v1;
use rectrain_protocol::batch::BatchPosition;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::round_robin::RoundRobin;

use crate::Loader;
use crate::reader::Content;

/// A kind of pass over data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    /// A pass over the training data, epoch by epoch.
    Training,
    /// A pass over the test data, one for each evaluation.
    Evaluation,
}

/// A chunk to read and send.
#[derive(Debug, Clone)]
pub(crate) enum Lease {
    Training(v1::ChunkLease),
    Evaluation(v1::EvaluationChunk),
}

impl Lease {
    pub(crate) fn pass(&self) -> Pass {
        match self {
            Self::Training(_) => Pass::Training,
            Self::Evaluation(_) => Pass::Evaluation,
        }
    }

    pub(crate) fn chunk(&self) -> u64 {
        match self {
            Self::Training(lease) => lease.chunk,
            Self::Evaluation(lease) => lease.chunk,
        }
    }

    /// The epoch, from 0. Evaluations always use epoch 0, so each reads the same rows in the same
    /// order.
    pub(crate) fn epoch(&self) -> u32 {
        match self {
            Self::Training(lease) => lease.epoch,
            Self::Evaluation(_) => 0,
        }
    }

    /// The position of the chunk's first batch.
    pub(crate) fn first(&self) -> BatchPosition {
        match self {
            Self::Training(lease) => BatchPosition::Train(lease.first_step),
            Self::Evaluation(lease) => {
                BatchPosition::Evaluation { at_step: GlobalStep(lease.at_step), number: lease.first_batch }
            }
        }
    }

    /// The most batches of the chunk to send. Training may end within a chunk.
    pub(crate) fn max_batches(&self) -> u64 {
        match self {
            Self::Training(lease) => lease.max_batches,
            Self::Evaluation(_) => u64::MAX,
        }
    }

    /// How many batches at the start of the chunk are already trained, and how many pieces of the
    /// batch after them. They are not sent.
    pub(crate) fn skip(&self) -> (u64, u32) {
        match self {
            Self::Training(lease) => (lease.skip_batches, lease.skip_pieces),
            Self::Evaluation(_) => (0, 0),
        }
    }

    /// The round-robin assignment of pieces to embedding workers.
    pub(crate) fn turns(&self) -> Result<RoundRobin, RoleError> {
        match self {
            Self::Training(lease) => RoundRobin::read("lease", &lease.turns),
            Self::Evaluation(lease) => RoundRobin::read("evaluation_lease", &lease.turns),
        }
    }
}

impl Loader {
    /// Leases the next chunk of a pass. `None` at its end. If the coordinator has no chunk yet, it
    /// delays its reply for a while, and then the loader asks again.
    pub(crate) async fn lease(&self, pass: Pass) -> Result<Option<Lease>, RoleError> {
        loop {
            let leased = match pass {
                Pass::Training => self.training_lease().await?,
                Pass::Evaluation => self.evaluation_lease().await?,
            };
            match leased {
                Leased::Chunk(lease) => return Ok(Some(lease)),
                Leased::Finished => return Ok(None),
                Leased::Wait => {}
            }
        }
    }

    async fn training_lease(&self) -> Result<Leased, RoleError> {
        use v1::lease_reply::Lease as Reply;
        let request = v1::LeaseRequest { loader: self.index };
        let (reply, _) = self.peers.coordinator.call(request, Vec::new(), CALL_DEADLINE).await?;
        Ok(match reply.lease {
            Some(Reply::Chunk(lease)) => Leased::Chunk(Lease::Training(lease)),
            Some(Reply::Finished(_)) => Leased::Finished,
            Some(Reply::Wait(_)) | None => Leased::Wait,
        })
    }

    async fn evaluation_lease(&self) -> Result<Leased, RoleError> {
        use v1::evaluation_lease_reply::Lease as Reply;
        let request = v1::EvaluationLeaseRequest { loader: self.index };
        let (reply, _) = self.peers.coordinator.call(request, Vec::new(), CALL_DEADLINE).await?;
        Ok(match reply.lease {
            Some(Reply::Chunk(lease)) => Leased::Chunk(Lease::Evaluation(lease)),
            Some(Reply::Finished(_)) => Leased::Finished,
            Some(Reply::Wait(_)) | None => Leased::Wait,
        })
    }

    /// Reports the rows of a chunk to the coordinator. Returns whether another loader has read the
    /// chunk before and sends it. The reply has the number of replaced embedding workers. The
    /// loader reconnects if that has grown.
    pub(crate) async fn report(&self, lease: &Lease, content: &Content) -> Result<bool, RoleError> {
        let loader = self.index;
        let Content { rows, skipped: skipped_rows, read, event_millis, baseline } = content;
        let (rows, skipped_rows) = (rows.as_ref(), *skipped_rows);
        let samples = rows.map_or(0, |rows| rows.samples as u64);
        let reported = match lease {
            Lease::Training(lease) => {
                let label_sum = rows.map_or(0.0, Batch::label_sum);
                let v1::ChunkLease { epoch, chunk, .. } = *lease;
                let report = v1::ChunkReport {
                    loader,
                    epoch,
                    chunk,
                    rows: samples,
                    label_sum,
                    skipped_rows,
                    read: read.map(|read| v1::SegmentRead { next: read.next, more: read.more }),
                    event_millis: *event_millis,
                    baseline: baseline.clone(),
                };
                self.peers.coordinator.call(report, Vec::new(), CALL_DEADLINE).await?.0
            }
            Lease::Evaluation(lease) => {
                let v1::EvaluationChunk { at_step, chunk, .. } = *lease;
                let report = v1::EvaluationChunkReport { loader, at_step, chunk, rows: samples, skipped_rows };
                self.peers.coordinator.call(report, Vec::new(), CALL_DEADLINE).await?.0
            }
        };
        self.peers.embedding_workers.follow_replacements(reported.embedding_worker_successions).await?;
        Ok(reported.sent_by_another)
    }
}

/// The coordinator's reply to a request for a lease.
enum Leased {
    Chunk(Lease),
    Finished,
    Wait,
}
