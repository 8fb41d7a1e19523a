//! What an embedding worker keeps of pieces that it has pooled, and whose gradients it has taken in: a dense worker that asks again because an
//! answer was lost gets the same, and one that takes a dead one's place gets what that one got. Bounded by the batches that dense workers may be
//! at, and without a barrier by what each of them may not have reported.

use std::collections::{BTreeMap, HashMap, VecDeque};

use rectrain_proto::v1;
use rectrain_wire::Tensor;

use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::limits::UNREPORTED;
use rectrain_protocol::plan::JobPlan;

/// Answers to gradients that are kept at least.
const ANSWERS: usize = 1024;

/// A piece as it was given to a dense worker.
type Given = (v1::Forwarded, Vec<Tensor>);

/// See the module's text.
pub(crate) struct Finished {
    most_answers: usize,
    answers: HashMap<BatchKey, v1::BackwardReply>,
    /// Oldest first.
    answered: VecDeque<BatchKey>,
    /// With a barrier: batches behind the last one that was asked for, of which pieces are kept. 0: nothing is, in any mode.
    keep: u64,
    given: BTreeMap<(u64, u32), Given>,
    /// Without a barrier: of each dense worker the last pieces, and their answers.
    last: HashMap<u32, VecDeque<BatchKey>>,
    last_answers: HashMap<BatchKey, v1::BackwardReply>,
}

impl Finished {
    pub(crate) fn of(plan: &JobPlan) -> Self {
        let staleness = plan.modes.iter().map(|mode| mode.staleness()).max().unwrap_or(0);
        // Dense workers fetch so many batches ahead of the one that they train, which may be one ahead of the one that is trained again.
        // A single one has nobody who could take its place.
        let keep = if plan.replicas.dense_workers > 1 { staleness.max(1) + 3 } else { 0 };
        Self::keeping(keep, ((keep + 1) * u64::from(plan.pieces())) as usize)
    }

    fn keeping(keep: u64, pieces: usize) -> Self {
        Self {
            most_answers: pieces.max(ANSWERS),
            answers: HashMap::new(),
            answered: VecDeque::new(),
            keep,
            given: BTreeMap::new(),
            last: HashMap::new(),
            last_answers: HashMap::new(),
        }
    }

    /// A dense worker gets this piece.
    pub(crate) fn give(&mut self, key: BatchKey, has_barrier: bool, reply: &v1::Forwarded, tensors: &[Tensor]) {
        let Some(place) = place(key).filter(|_| self.keep > 0) else { return };
        self.given.insert(place, (reply.clone(), tensors.to_vec()));
        if has_barrier && let Some((newest, _)) = self.given.keys().next_back() {
            self.given = self.given.split_off(&((newest + 1).saturating_sub(self.keep), 0));
        }
    }

    /// The piece's gradients are taken in; without a barrier from dense worker `rank`.
    pub(crate) fn answer(&mut self, key: BatchKey, rank: Option<u32>, reply: v1::BackwardReply) {
        if let Some(rank) = rank.filter(|_| self.keep > 0) {
            self.last_answers.insert(key, reply.clone());
            let last = self.last.entry(rank).or_default();
            last.push_back(key);
            if last.len() > UNREPORTED
                && let Some(reported) = last.pop_front()
            {
                self.last_answers.remove(&reported);
                place(reported).and_then(|place| self.given.remove(&place));
            }
        }
        if self.answers.insert(key, reply).is_none() {
            self.answered.push_back(key);
        }
        if self.answered.len() > self.most_answers
            && let Some(oldest) = self.answered.pop_front()
        {
            self.answers.remove(&oldest);
        }
    }

    /// What was answered to the piece's gradients, if they are here.
    pub(crate) fn answer_to(&self, key: BatchKey) -> Option<&v1::BackwardReply> {
        self.answers.get(&key).or_else(|| self.last_answers.get(&key))
    }

    /// Whether a dense worker got this piece here, and what it got is kept.
    pub(crate) fn was_given(&self, key: BatchKey) -> bool {
        place(key).is_some_and(|place| self.given.contains_key(&place))
    }

    /// Whether a dense worker that takes another's place may ask for this piece, whose gradients are here, and what the other one got is not.
    pub(crate) fn is_needed_again(&self, key: BatchKey) -> bool {
        self.keep > 0 && !self.was_given(key)
    }

    /// What a dense worker got that may have died since; without tensors, if its gradients are here and what it got is not any more.
    pub(crate) fn given(&self, key: BatchKey) -> Option<Given> {
        let answered = self.answer_to(key).is_some();
        match place(key).and_then(|place| self.given.get(&place)) {
            Some((reply, tensors)) => Some((v1::Forwarded { answered, ..reply.clone() }, tensors.clone())),
            None => answered.then(|| (v1::Forwarded { answered, ..v1::Forwarded::default() }, Vec::new())),
        }
    }
}

/// The batch and the piece, if it is of training.
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

    fn forwarded(samples: u32) -> v1::Forwarded {
        v1::Forwarded { samples, ..v1::Forwarded::default() }
    }

    fn tensor() -> [Tensor; 1] {
        [Tensor::from(vec![1.0f32])]
    }

    #[test]
    fn with_a_barrier_the_last_batches_are_kept() {
        let mut finished = Finished::keeping(2, 0);
        for number in 0..4 {
            finished.give(key(number), true, &forwarded(number as u32), &tensor());
            finished.answer(key(number), None, v1::BackwardReply::default());
        }
        let (kept, tensors) = finished.given(key(2)).unwrap();
        assert_eq!((kept.samples, kept.answered, tensors.len()), (2, true, 1));
        let (gone, tensors) = finished.given(key(1)).unwrap();
        assert_eq!((gone.answered, tensors.len()), (true, 0), "its gradients are here");
        assert_eq!([1, 2].map(|number| finished.is_needed_again(key(number))), [true, false]);
        assert!(finished.given(key(4)).is_none());
    }

    #[test]
    fn without_one_the_last_pieces_of_every_dense_worker_are_kept_however_far_the_others_are() {
        let mut finished = Finished::keeping(2, 0);
        finished.give(key(0), false, &forwarded(1), &tensor());
        finished.answer(key(0), Some(0), v1::BackwardReply { steps: vec![7], ..v1::BackwardReply::default() });
        for number in 1..=2 * ANSWERS as u64 {
            finished.give(key(number), false, &forwarded(1), &tensor());
            finished.answer(key(number), Some(1), v1::BackwardReply::default());
        }
        let (reply, tensors) = finished.given(key(0)).unwrap();
        assert_eq!((reply.answered, tensors.len()), (true, 1));
        assert_eq!(finished.answer_to(key(0)).unwrap().steps, [7]);
        assert!(finished.given(key(1)).is_none(), "it has been reported long ago");
        assert_eq!(finished.given.len(), 1 + UNREPORTED);
        assert!(finished.answers.len() <= ANSWERS && finished.last_answers.len() <= 1 + UNREPORTED);
    }

    #[test]
    fn a_single_dense_worker_costs_nothing_but_answers() {
        let mut finished = Finished::keeping(0, 0);
        finished.give(key(0), true, &forwarded(1), &tensor());
        assert!(finished.given(key(0)).is_none());
        finished.answer(key(0), Some(0), v1::BackwardReply::default());
        assert!(finished.answer_to(key(0)).is_some() && finished.last_answers.is_empty());
        assert!(!finished.is_needed_again(key(0)), "nobody takes its place");
    }
}
