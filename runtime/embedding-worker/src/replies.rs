//! The replies that an embedding worker stores: pieces as it delivered them to dense workers, and
//! acknowledgements of their gradients. A dense worker that retries a request gets the same reply.
//! A replacement of a dead dense worker gets the reply of its predecessor.
//!
//! The number of stored deliveries is bounded. In modes with a barrier, the bound follows from how
//! far apart the dense workers can be. In modes without one, it follows from the number of batches
//! that each dense worker may not have reported yet.

use std::collections::{BTreeMap, HashMap, VecDeque};

use rectrain_proto::v1;
use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::plan::JobPlan;
use rectrain_wire::Tensor;

/// The least number of acknowledgements that are stored.
const ACKNOWLEDGEMENTS: usize = 1024;

/// A piece as the embedding worker delivered it to a dense worker.
pub(crate) type Delivery = (v1::Forwarded, Vec<Tensor>);

/// See the module documentation.
pub(crate) struct Replies {
    most_acknowledged: usize,
    acknowledged: HashMap<BatchKey, v1::BackwardReply>,
    /// Keys of `acknowledged`, oldest first.
    oldest: VecDeque<BatchKey>,
    /// In modes with a barrier: deliveries of this many batches, up to the newest, are stored. 0
    /// stores no deliveries in any mode.
    keep: u64,
    /// Deliveries by batch and piece.
    delivered: BTreeMap<(u64, u32), Delivery>,
    /// In modes without a barrier: the most pieces of a dense worker that are stored.
    unreported: usize,
    /// In modes without a barrier: the last pieces of each dense worker.
    last: HashMap<u32, VecDeque<BatchKey>>,
    last_acknowledged: HashMap<BatchKey, v1::BackwardReply>,
}

impl Replies {
    pub(crate) fn of(plan: &JobPlan) -> Self {
        let staleness = plan.modes.iter().map(|mode| mode.staleness()).max().unwrap_or(0);
        // Dense workers fetch staleness + 1 batches ahead of the one that they train, or look as
        // far ahead as `sync`. That batch may be ahead of the one that a replacement trains again.
        // A single dense worker is never replaced, unless it pulls its pieces.
        let ahead = staleness.max(plan.look_ahead()).max(1);
        let keep = if plan.replicas.dense_worker > 1 || plan.pulls_pieces() { ahead + 3 } else { 0 };
        Self::keeping(keep, ((keep + 1) * u64::from(plan.pieces())) as usize, plan.unreported_batches())
    }

    fn keeping(keep: u64, pieces: usize, unreported: usize) -> Self {
        Self {
            most_acknowledged: pieces.max(ACKNOWLEDGEMENTS),
            acknowledged: HashMap::new(),
            oldest: VecDeque::new(),
            keep,
            delivered: BTreeMap::new(),
            unreported,
            last: HashMap::new(),
            last_acknowledged: HashMap::new(),
        }
    }

    /// Whether any deliveries are stored.
    pub(crate) fn keeps_deliveries(&self) -> bool {
        self.keep > 0
    }

    /// Stores the delivery of a piece to a dense worker.
    pub(crate) fn deliver(&mut self, key: BatchKey, has_barrier: bool, delivery: Delivery) {
        let Some(place) = place(key).filter(|_| self.keep > 0) else { return };
        self.delivered.insert(place, delivery);
        if has_barrier && let Some((newest, _)) = self.delivered.keys().next_back() {
            self.delivered = self.delivered.split_off(&((newest + 1).saturating_sub(self.keep), 0));
        }
    }

    /// Stores the acknowledgement of the piece's gradients. In modes without a barrier, `rank` is
    /// the dense worker that sent them.
    pub(crate) fn acknowledge(&mut self, key: BatchKey, rank: Option<u32>, reply: v1::BackwardReply) {
        if let Some(rank) = rank.filter(|_| self.keep > 0) {
            self.acknowledge_last(key, rank, reply.clone());
        }
        if self.acknowledged.insert(key, reply).is_none() {
            self.oldest.push_back(key);
        }
        if self.oldest.len() > self.most_acknowledged
            && let Some(oldest) = self.oldest.pop_front()
        {
            self.acknowledged.remove(&oldest);
        }
    }

    fn acknowledge_last(&mut self, key: BatchKey, rank: u32, reply: v1::BackwardReply) {
        self.last_acknowledged.insert(key, reply);
        let last = self.last.entry(rank).or_default();
        last.push_back(key);
        if last.len() > self.unreported
            && let Some(reported) = last.pop_front()
        {
            self.last_acknowledged.remove(&reported);
            place(reported).and_then(|place| self.delivered.remove(&place));
        }
    }

    /// The acknowledgement of the piece's gradients, if it is stored.
    pub(crate) fn acknowledgement(&self, key: BatchKey) -> Option<&v1::BackwardReply> {
        self.acknowledged.get(&key).or_else(|| self.last_acknowledged.get(&key))
    }

    /// The piece as it was delivered, if that is stored.
    pub(crate) fn delivery(&self, key: BatchKey) -> Option<&Delivery> {
        self.delivered.get(&place(key)?)
    }

    /// Whether a replacement may fetch this piece although its gradients are acknowledged. This is
    /// so if no delivery of the piece is stored.
    pub(crate) fn is_needed_again(&self, key: BatchKey) -> bool {
        self.keep > 0 && self.delivery(key).is_none()
    }
}

/// The batch and piece of a training piece. `None` for a piece of an evaluation.
fn place(key: BatchKey) -> Option<(u64, u32)> {
    match key.position {
        BatchPosition::Train(number) => Some((number, key.piece)),
        BatchPosition::Evaluation { .. } => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u64) -> BatchKey {
        BatchKey { position: BatchPosition::Train(number), piece: 0 }
    }

    fn delivery(samples: u32) -> Delivery {
        (v1::Forwarded { samples, ..v1::Forwarded::default() }, vec![Tensor::from(vec![1.0f32])])
    }

    #[test]
    fn with_a_barrier_the_last_deliveries_are_stored() {
        let mut replies = Replies::keeping(2, 0, 8);
        for number in 0..4 {
            replies.deliver(key(number), true, delivery(number as u32));
            replies.acknowledge(key(number), None, v1::BackwardReply::default());
        }
        let (kept, tensors) = replies.delivery(key(2)).unwrap();
        assert_eq!((kept.samples, tensors.len()), (2, 1));
        assert!(replies.delivery(key(1)).is_none() && replies.acknowledgement(key(1)).is_some());
        assert_eq!([1, 2].map(|number| replies.is_needed_again(key(number))), [true, false]);
        assert!(replies.delivery(key(4)).is_none() && replies.acknowledgement(key(4)).is_none());
    }

    #[test]
    fn without_a_barrier_each_dense_worker_has_its_last_deliveries() {
        let mut replies = Replies::keeping(2, 0, 8);
        replies.deliver(key(0), false, delivery(1));
        replies.acknowledge(key(0), Some(0), v1::BackwardReply { steps: vec![7], ..v1::BackwardReply::default() });
        for number in 1..=2 * ACKNOWLEDGEMENTS as u64 {
            replies.deliver(key(number), false, delivery(1));
            replies.acknowledge(key(number), Some(1), v1::BackwardReply::default());
        }
        assert!(replies.delivery(key(0)).is_some(), "however far the other one is");
        assert_eq!(replies.acknowledgement(key(0)).unwrap().steps, [7]);
        assert!(replies.delivery(key(1)).is_none(), "it has been reported long ago");
        assert!(replies.acknowledgement(key(1)).is_none());
        assert_eq!(replies.delivered.len(), 1 + 8);
        let (all, last) = (replies.acknowledged.len(), replies.last_acknowledged.len());
        assert!(all <= ACKNOWLEDGEMENTS && last <= 1 + 8);
    }

    #[test]
    fn for_a_single_dense_worker_no_deliveries_are_stored() {
        let mut replies = Replies::keeping(0, 0, 8);
        replies.deliver(key(0), true, delivery(1));
        assert!(replies.delivery(key(0)).is_none());
        replies.acknowledge(key(0), Some(0), v1::BackwardReply::default());
        assert!(replies.acknowledgement(key(0)).is_some() && replies.last_acknowledged.is_empty());
        assert!(!replies.is_needed_again(key(0)), "a single dense worker is never replaced");
    }
}
