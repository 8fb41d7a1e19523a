//! In `sync`: the replies to the look-ups of the last two steps.
//!
//! Once a step is applied, the store no longer has the rows that the step began with. A replacement
//! of a dense worker may still have to compute the step. This happens if its predecessor died
//! before the workers had summed the dense gradients. The embedding worker that knew the piece must
//! have died too. The replacement then gets the same rows as its predecessor, to the bit.
//!
//! No worker computes a step before the last applied one. The gradients of the next step come from
//! workers that have already summed the dense gradients of the last one.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use prost::Message;
use rectrain_modes::GlobalStep;
use rectrain_proto::v1;
use rectrain_protocol::message::{self, Request};
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::remember::Memory;
use rectrain_wire::{BoxFuture, Frame, Refusal, Tensor};

use crate::half::CurrentHalf;

/// The look-ups of a step, each as the keys by row group, with their replies.
type Replies = Vec<(Vec<Tensor>, Vec<Tensor>)>;

/// Replies by step.
#[derive(Debug)]
struct LastSteps {
    /// The most look-ups of a step whose replies are stored: one a piece.
    most: usize,
    steps: BTreeMap<GlobalStep, Replies>,
}

impl LastSteps {
    fn new(pieces: u32) -> Self {
        Self { most: pieces as usize, steps: BTreeMap::new() }
    }

    /// Stores the reply to a look-up for `step`. All steps before it are applied. Returns the
    /// replies that it evicts, so that the caller frees them without the lock.
    fn keep(&mut self, step: GlobalStep, keys: Vec<Tensor>, rows: Vec<Tensor>) -> BTreeMap<GlobalStep, Replies> {
        let kept = self.steps.split_off(&GlobalStep(step.0.saturating_sub(1)));
        let old = std::mem::replace(&mut self.steps, kept);
        let replies = self.steps.entry(step).or_default();
        if replies.len() < self.most && !replies.iter().any(|(known, _)| *known == keys) {
            replies.push((keys, rows));
        }
        old
    }

    fn recall(&self, step: GlobalStep, keys: &[Tensor]) -> Option<Vec<Tensor>> {
        let (_, rows) = self.steps.get(&step)?.iter().find(|(known, _)| known == keys)?;
        Some(rows.clone())
    }
}

/// See the module documentation.
pub(crate) struct LookUpReplies {
    half: Arc<CurrentHalf>,
    /// Whether a dense worker can be replaced. A single one cannot.
    has_replacements: bool,
    last: Mutex<LastSteps>,
}

impl LookUpReplies {
    pub(crate) fn new(plan: &JobPlan, half: Arc<CurrentHalf>) -> Self {
        let has_replacements = plan.replicas.dense_worker > 1;
        Self { half, has_replacements, last: Mutex::new(LastSteps::new(plan.pieces())) }
    }

    /// Drops all replies, because another mode begins.
    pub(crate) fn clear(&self) {
        self.lock().steps.clear();
    }

    fn keeps_replies(&self) -> bool {
        self.has_replacements && self.half.get().is_some_and(|half| half.keeps_look_ups())
    }

    fn lock(&self) -> MutexGuard<'_, LastSteps> {
        self.last.lock()
    }
}

/// A training look-up in a mode with a barrier.
pub(crate) struct LookUp {
    step: GlobalStep,
    train: bool,
    keys: Vec<Tensor>,
}

impl Memory for LookUpReplies {
    type Key = LookUp;

    fn key(&self, request: &Frame) -> Result<Option<LookUp>, Refusal> {
        if request.kind != v1::Lookup::KIND {
            return Ok(None);
        }
        let refuse = |error| message::refuse_malformed(format!("lookup: {error}"));
        let v1::Lookup { step, train, .. } = v1::Lookup::decode(request.meta.clone()).map_err(refuse)?;
        let Some(step) = step else { return Ok(None) };
        let keys = if self.keeps_replies() { request.tensors.clone() } else { Vec::new() };
        Ok(Some(LookUp { step: GlobalStep(step), train, keys }))
    }

    /// The reply to a look-up for a step that is applied or being applied. This is the earlier
    /// reply, or one without rows if the earlier reply was evicted.
    fn recall(&self, look_up: &LookUp) -> Option<Frame> {
        if !self.half.get()?.has_passed(look_up.step) {
            return None;
        }
        let rows = self.lock().recall(look_up.step, &look_up.keys).unwrap_or_default();
        let reply = v1::LookupReply { is_applied: true, ..v1::LookupReply::default() };
        Some(message::reply::<v1::Lookup>(&reply, rows))
    }

    /// Never resolves: the gate answers a waiting look-up, and no other look-up can answer it.
    fn recalled<'a>(&'a self, _look_up: &'a LookUp) -> BoxFuture<'a, Frame> {
        Box::pin(std::future::pending())
    }

    /// Stores a reply, or replaces it by the earlier one if the step was applied while the rows
    /// were read. The caller may replace a dead worker whose gradients were already in. Gradients
    /// of other workers can then have completed the step, and the rows just read may include it.
    fn settle(&self, look_up: LookUp, reply: Frame) -> Frame {
        if let Some(earlier) = self.recall(&look_up) {
            return earlier;
        }
        if look_up.train && self.keeps_replies() {
            let old = self.lock().keep(look_up.step, look_up.keys, reply.tensors.clone());
            drop(old);
        }
        reply
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(first: u64) -> Vec<Tensor> {
        vec![Tensor::from(vec![first, first + 1]), Tensor::from(vec![7u64])]
    }

    fn rows(value: f32) -> Vec<Tensor> {
        vec![Tensor::from(vec![value]), Tensor::from(vec![value; 2])]
    }

    #[test]
    fn replies_of_the_last_applied_step_and_the_present_one_are_kept() {
        let mut last = LastSteps::new(2);
        for step in 3..6 {
            let old = last.keep(GlobalStep(step), keys(step), rows(step as f32));
            assert_eq!(old.len(), usize::from(step == 5));
            last.keep(GlobalStep(step), keys(100 + step), rows(100.0));
        }
        assert_eq!(last.recall(GlobalStep(3), &keys(3)), None, "no worker computes it any more");
        assert_eq!(last.recall(GlobalStep(4), &keys(4)), Some(rows(4.0)));
        assert_eq!(last.recall(GlobalStep(5), &keys(105)), Some(rows(100.0)));
        assert_eq!(last.recall(GlobalStep(5), &keys(4)), None, "other keys");
        last.steps.clear();
        assert_eq!(last.recall(GlobalStep(5), &keys(5)), None);
    }

    #[test]
    fn a_repeated_look_up_is_kept_once_and_at_most_one_a_piece() {
        let mut last = LastSteps::new(1);
        last.keep(GlobalStep(0), keys(1), rows(1.0));
        last.keep(GlobalStep(0), keys(1), rows(2.0));
        last.keep(GlobalStep(0), keys(2), rows(3.0));
        assert_eq!(last.recall(GlobalStep(0), &keys(1)), Some(rows(1.0)), "the first reply");
        assert_eq!(last.recall(GlobalStep(0), &keys(2)), None);
    }
}
