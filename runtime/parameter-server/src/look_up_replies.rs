//! In `sync`: the replies to the look-ups of the last steps.
//!
//! A step's rows are gone once it is applied. A replacement of a dense worker may still have to compute the
//! step: its predecessor died before the dense gradients of the step were summed, and the embedding worker
//! that knew the piece died with it. It then gets the rows that its predecessor got, to the bit.
//!
//! No worker computes a step before the last applied one: the gradients of the next step come from workers
//! that have summed it.

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

/// The look-ups of a step, by the keys of each row group, and their replies.
type Replies = Vec<(Vec<Tensor>, Vec<Tensor>)>;

/// Replies by step.
#[derive(Debug)]
struct LastSteps {
    /// Look-ups of a step that are kept at most: one a piece.
    most: usize,
    steps: BTreeMap<GlobalStep, Replies>,
}

impl LastSteps {
    fn new(pieces: u32) -> Self {
        Self { most: pieces as usize, steps: BTreeMap::new() }
    }

    /// Keeps the reply to a look-up for `step`; all steps before it are applied. Gives the replies that are
    /// no longer kept, to be freed without the lock.
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

/// See the module's text.
pub(crate) struct LookUpReplies {
    half: Arc<CurrentHalf>,
    /// Whether a dense worker can be replaced at all: a single one cannot.
    has_replacements: bool,
    last: Mutex<LastSteps>,
}

impl LookUpReplies {
    pub(crate) fn new(plan: &JobPlan, half: Arc<CurrentHalf>) -> Self {
        let has_replacements = plan.replicas.dense_worker > 1;
        Self { half, has_replacements, last: Mutex::new(LastSteps::new(plan.pieces())) }
    }

    /// Another mode begins.
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

/// A look-up of training with a barrier.
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

    /// The reply to a look-up for a step that is applied, or is being applied: the earlier reply, or no rows
    /// if that is not kept.
    fn recall(&self, look_up: &LookUp) -> Option<Frame> {
        if !self.half.get()?.has_passed(look_up.step) {
            return None;
        }
        let rows = self.lock().recall(look_up.step, &look_up.keys).unwrap_or_default();
        let reply = v1::LookupReply { is_applied: true, ..v1::LookupReply::default() };
        Some(message::reply::<v1::Lookup>(&reply, rows))
    }

    /// The gate answers a look-up that waits; no other look-up brings it to an end.
    fn recalled<'a>(&'a self, _look_up: &'a LookUp) -> BoxFuture<'a, Frame> {
        Box::pin(std::future::pending())
    }

    /// The step may have been applied while the rows were read: the caller replaces a dead worker whose
    /// gradients were in, and other gradients of the step came since. The rows just read may include it.
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
