//! The pieces of batches that an embedding worker has received from loaders and holds for dense
//! workers. Also its replies to requests about these pieces.
//!
//! The worker holds a piece until the parameter servers have its gradients, because the replacement
//! of a dense worker may fetch the piece again. It holds the piece even longer if the reply to the
//! dead worker is not stored.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use prost::Message;
use rectrain_modes::GlobalStep;
use rectrain_pooling::PreparedIds;
use rectrain_proto::v1;
use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message::{self, Request};
use rectrain_protocol::metrics::EmbeddingWorkerMetrics;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::remember::Memory;
use rectrain_wire::{BoxFuture, Frame, Refusal, Tensor, TensorData};
use tokio::sync::Notify;

use crate::positions::Positions;
use crate::replies::Replies;
use crate::sums::KeptCells;

/// A piece of a batch, with its ids prepared.
pub(crate) struct Piece {
    pub(crate) prepared: PreparedIds,
    pub(crate) global_samples: u32,
    /// The latest event time of the rows, in seconds since 1970. 0 without a clock.
    pub(crate) moment: u64,
    /// Dense features and labels, and group ids if the data has groups.
    pub(crate) rest: Vec<Tensor>,
    /// The loader that sent it.
    pub(crate) loader: u32,
    /// How long this worker prepared its ids, with the wait for a processor.
    pub(crate) preparation: Duration,
    /// In `des`: the cells that several servers hold.
    pub(crate) cells: KeptCells,
    /// In an evaluation: whether a dense worker has fetched the piece. If the connection broke
    /// before the reply arrived, the dense worker fetches the piece again.
    is_evaluated: AtomicBool,
}

impl Piece {
    /// A piece that `request` brought.
    pub(crate) fn new(prepared: PreparedIds, preparation: Duration, request: &v1::PutBatch, rest: Vec<Tensor>) -> Self {
        let &v1::PutBatch { global_samples, moment, loader, .. } = request;
        let (cells, is_evaluated) = (KeptCells::default(), AtomicBool::new(false));
        Self { prepared, global_samples, moment, rest, loader, preparation, cells, is_evaluated }
    }

    /// The labels of the rows.
    ///
    /// # Errors
    /// [`RoleError::Inconsistent`] if the piece came without a label for each of its rows.
    pub(crate) fn labels(&self) -> Result<&[f32], RoleError> {
        match self.rest.get(1).map(Tensor::data) {
            Some(TensorData::F32(labels)) if labels.len() == self.prepared.samples() => Ok(labels),
            _ => Err(RoleError::Inconsistent { message: "put_batch", reason: "the labels are missing".to_owned() }),
        }
    }
}

/// See the module documentation.
pub(crate) struct Pieces {
    window: u64,
    /// How long a request waits for its piece.
    patience: Duration,
    /// With pulled pieces: a batch is applied once one is requested that is more than this after
    /// it.
    applied_behind: u64,
    held: Mutex<HashMap<BatchKey, Arc<Piece>>>,
    replies: Mutex<Replies>,
    positions: Mutex<Positions>,
    /// Notified when a piece arrives, a position moves, or gradients are acknowledged.
    changed: Notify,
    metrics: EmbeddingWorkerMetrics,
}

impl Pieces {
    pub(crate) fn new(plan: &JobPlan, metrics: EmbeddingWorkerMetrics) -> Self {
        Self {
            window: plan.batches_ahead.max(1),
            patience: plan.patience(),
            // The coordinator hands out pieces of `look_ahead` steps after the oldest open one, at
            // least one. One step more is for the time between its reply and the request.
            applied_behind: plan.look_ahead().max(1) + 1,
            held: Mutex::default(),
            replies: Mutex::new(Replies::of(plan)),
            positions: Mutex::default(),
            changed: Notify::new(),
            metrics,
        }
    }

    /// Waits until the window admits the piece. The wait has no deadline, because training may
    /// pause for hours: for an evaluation, or for a worker without a node. The coordinator watches
    /// the job's progress.
    pub(crate) async fn admitted(&self, key: BatchKey, has_rows: bool) {
        self.wait(|| self.lock_positions().admits(key, has_rows, self.window).then_some(())).await;
    }

    /// Adds a piece. A loader may send a piece again, after a loader died or a connection was lost.
    /// A repeated piece changes nothing.
    pub(crate) fn put(&self, key: BatchKey, piece: Piece) {
        if self.lock_replies().acknowledgement(key).is_some() || self.lock_positions().is_over(key) {
            return;
        }
        if let Entry::Vacant(place) = self.lock_held().entry(key) {
            place.insert(Arc::new(piece));
            self.metrics.batches_in_flight.inc();
            self.changed.notify_waiters();
        }
    }

    /// Waits for the piece that a dense worker requests, and returns it. The request also moves the
    /// window, so that more pieces are admitted.
    ///
    /// A very slow worker may request a piece that it has `pulled`, and that other workers have
    /// trained long ago. `None` if the parameter servers have surely applied its step, and the
    /// piece is not here.
    ///
    /// # Errors
    /// The piece does not arrive in time. A training piece must arrive within the patience of a
    /// call. For a piece of an evaluation, the wait continues while other pieces arrive or are
    /// fetched. Loaders send the pieces of all dense workers, and a replacement may be far behind.
    pub(crate) async fn fetch(
        &self,
        message: &'static str,
        key: BatchKey,
        pulled: bool,
    ) -> Result<Option<Arc<Piece>>, RoleError> {
        self.lock_positions().move_to(key, self.window);
        self.changed.notify_waiters();
        let held = || self.lock_held().get(&key).cloned();
        let held_or_applied = || held().map(Some).or_else(|| (pulled && self.is_long_applied(key)).then_some(None));
        let piece = match key.position {
            BatchPosition::Train(_) => tokio::time::timeout(self.patience, self.wait(held_or_applied)).await.ok(),
            BatchPosition::Evaluation { .. } => self.wait_while_others_progress(held).await.map(Some),
        };
        piece.ok_or_else(|| {
            let reason = format!("{key} did not arrive within {:?}", self.patience);
            RoleError::Inconsistent { message, reason }
        })
    }

    /// With pulled pieces: whether the requests of later pieces show that the step of this one is
    /// applied.
    fn is_long_applied(&self, key: BatchKey) -> bool {
        matches!(key.position, BatchPosition::Train(batch) if batch + self.applied_behind < self.lock_positions().newest())
    }

    /// Whether the parameter servers have the gradients of a piece.
    pub(crate) fn is_acknowledged(&self, key: BatchKey) -> bool {
        self.lock_replies().acknowledgement(key).is_some()
    }

    /// Records that a dense worker fetched this piece. Drops the pieces that no dense worker can
    /// fetch any longer.
    pub(crate) fn fetched(&self, key: BatchKey, piece: &Piece, has_barrier: bool) {
        match key.position {
            BatchPosition::Evaluation { at_step, number } => {
                piece.is_evaluated.store(true, Ordering::Relaxed);
                self.drop_evaluated(at_step, number, key.piece);
            }
            BatchPosition::Train(number) => {
                let has_rows = |piece: &Piece| piece.prepared.samples() > 0;
                self.retain(|key, piece| {
                    may_be_fetched(key.position, number, self.window, has_rows(piece), has_barrier)
                });
            }
        }
    }

    /// Drops pieces after a dense worker has fetched piece `piece` of batch `number` of an
    /// evaluation. It drops all pieces of other evaluations. Of this evaluation, it drops the
    /// pieces with the same number that were fetched long before. The others stay, because another
    /// dense worker may be far behind.
    fn drop_evaluated(&self, at_step: GlobalStep, number: u64, piece: u32) {
        self.retain(|key, held| match key.position {
            BatchPosition::Train(_) => true,
            BatchPosition::Evaluation { at_step: other, number: fetched } => {
                let is_past = held.is_evaluated.load(Ordering::Relaxed) && fetched + 2 * self.window < number;
                other == at_step && !(is_past && key.piece == piece)
            }
        });
    }

    fn retain(&self, stays: impl Fn(BatchKey, &Piece) -> bool) {
        let mut held = self.lock_held();
        let before = held.len();
        held.retain(|key, piece| stays(*key, piece));
        self.metrics.batches_in_flight.sub((before - held.len()) as i64);
    }

    /// Records that the parameter servers have the piece's gradients. Stores the reply first and
    /// then removes the piece. In the other order, [`Self::put`] could add a repeated piece in
    /// between.
    fn acknowledge(&self, key: BatchKey, request: &v1::Backward, reply: v1::BackwardReply) {
        let rank = request.push.as_ref().map(|push| push.rank);
        let stays = {
            let mut replies = self.lock_replies();
            replies.acknowledge(key, rank, reply);
            request.step.is_some() && replies.is_needed_again(key)
        };
        self.changed.notify_waiters();
        if !stays && self.lock_held().remove(&key).is_some() {
            self.metrics.batches_in_flight.dec();
        }
    }

    /// The reply to a repeated fetch: the stored delivery, if there is one. Without one, the reply
    /// for a piece with acknowledged gradients has no tensors. `None` if the embedding worker must
    /// look the rows up.
    fn recall_delivery(&self, key: BatchKey, has_barrier: bool) -> Option<Frame> {
        let replies = self.lock_replies();
        let answered = replies.acknowledgement(key).is_some();
        let delivery = replies.delivery(key).cloned();
        drop(replies);
        let (forwarded, tensors) = match delivery {
            Some((forwarded, tensors)) => (v1::Forwarded { answered, ..forwarded }, tensors),
            None if !answered || (has_barrier && self.lock_held().contains_key(&key)) => return None,
            None => (v1::Forwarded { answered, ..v1::Forwarded::default() }, Vec::new()),
        };
        Some(message::reply::<v1::Forward>(&forwarded, tensors))
    }

    /// Waits until `ready` returns a value. Checks again at every change.
    async fn wait<T>(&self, ready: impl Fn() -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            if let Some(value) = ready() {
                return value;
            }
            changed.await;
        }
    }

    /// Like [`Self::wait`], but returns `None` once nothing has changed for the patience of a call.
    async fn wait_while_others_progress<T>(&self, ready: impl Fn() -> Option<T>) -> Option<T> {
        loop {
            let changed = self.changed.notified();
            if let Some(value) = ready() {
                return Some(value);
            }
            tokio::time::timeout(self.patience, changed).await.ok()?;
        }
    }

    fn lock_held(&self) -> MutexGuard<'_, HashMap<BatchKey, Arc<Piece>>> {
        self.held.lock()
    }

    fn lock_replies(&self) -> MutexGuard<'_, Replies> {
        self.replies.lock()
    }

    fn lock_positions(&self) -> MutexGuard<'_, Positions> {
        self.positions.lock()
    }
}

/// A request about a piece whose reply is stored.
pub(crate) enum PieceRequest {
    Forward { key: BatchKey, has_barrier: bool },
    Backward { key: BatchKey, request: v1::Backward },
}

impl Memory for Pieces {
    type Key = PieceRequest;

    fn key(&self, request: &Frame) -> Result<Option<PieceRequest>, Refusal> {
        match request.kind {
            v1::Forward::KIND => {
                let request = decode::<v1::Forward>(request)?;
                let key = BatchKey::read("forward", request.batch)?;
                Ok(Some(PieceRequest::Forward { key, has_barrier: request.step.is_some() }))
            }
            v1::Backward::KIND => {
                let request = decode::<v1::Backward>(request)?;
                let key = BatchKey::read("backward", request.batch)?;
                Ok(Some(PieceRequest::Backward { key, request }))
            }
            _ => Ok(None),
        }
    }

    fn recall(&self, key: &PieceRequest) -> Option<Frame> {
        match key {
            PieceRequest::Forward { key, has_barrier } => self.recall_delivery(*key, *has_barrier),
            PieceRequest::Backward { key, .. } => {
                let replies = self.lock_replies();
                replies.acknowledgement(*key).map(|reply| message::reply::<v1::Backward>(reply, Vec::new()))
            }
        }
    }

    fn recalled<'a>(&'a self, key: &'a PieceRequest) -> BoxFuture<'a, Frame> {
        Box::pin(self.wait(move || self.recall(key)))
    }

    fn settle(&self, key: PieceRequest, reply: Frame) -> Frame {
        match key {
            PieceRequest::Forward { key, has_barrier } => {
                let mut replies = self.lock_replies();
                // A reply without tensors is not a delivery.
                if replies.keeps_deliveries()
                    && !reply.tensors.is_empty()
                    && let Ok(forwarded) = v1::Forwarded::decode(reply.meta.clone())
                {
                    replies.deliver(key, has_barrier, (forwarded, reply.tensors.clone()));
                }
            }
            PieceRequest::Backward { key, request } => {
                if let Ok(acknowledgement) = v1::BackwardReply::decode(reply.meta.clone()) {
                    self.acknowledge(key, &request, acknowledgement);
                }
            }
        }
        reply
    }
}

fn decode<R: Request>(frame: &Frame) -> Result<R, Refusal> {
    let name = || message::kind_name(frame.kind);
    R::decode(frame.meta.clone()).map_err(|error| message::refuse_malformed(format!("{}: {error}", name())))
}

/// Whether a dense worker may still fetch a piece after batch `number` of training was fetched.
///
/// Short batches have pieces without rows. Dense workers fetch these pieces only in modes with a
/// barrier. In these modes no dense worker is far behind the others. So an older piece is a
/// repetition that loaders sent because an embedding worker died after it had the gradients.
///
/// No dense worker fetches a piece of an evaluation after that evaluation.
fn may_be_fetched(position: BatchPosition, number: u64, window: u64, has_rows: bool, has_barrier: bool) -> bool {
    match position {
        // A replacement fetches the last staleness + 2 batches again. Another dense worker is
        // staleness + 1 ahead. Together that is less than two windows.
        BatchPosition::Train(batch) if has_barrier => batch + 2 * window >= number,
        BatchPosition::Train(batch) => has_rows || batch + window >= number,
        BatchPosition::Evaluation { .. } => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_repeated_too_late_are_dropped() {
        let kept =
            |batch, has_rows, has_barrier| may_be_fetched(BatchPosition::Train(batch), 100, 8, has_rows, has_barrier);
        assert_eq!([83, 84, 99, 120].map(|batch| kept(batch, true, true)), [false, true, true, true]);
        assert_eq!([0, 99].map(|batch| kept(batch, true, false)), [true, true], "batches may be handed out again late");
        assert_eq!([91, 92, 120].map(|batch| kept(batch, false, false)), [false, true, true]);
        let evaluation = BatchPosition::Evaluation { at_step: GlobalStep(7), number: 1 };
        assert!(!may_be_fetched(evaluation, 100, 8, true, true));
    }
}
