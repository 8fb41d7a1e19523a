//! In `sync` and `des`: the replies to the look-ups of the last applied step, and of the steps
//! after it.
//!
//! Once a step is applied, the store no longer has the rows that the step began with. A replacement
//! of a dense worker may still have to compute the step. This happens if its predecessor died
//! before the workers had summed the dense gradients. The embedding worker that knew the piece must
//! have died too. The replacement then gets the same rows as its predecessor, to the bit.
//!
//! In `des`, the replacement of an embedding worker may need a reply, too, even with a single dense
//! worker. Gradients need the whole embeddings of cells that several servers hold. The replacement
//! looks them up again, although one of these servers may have applied the step.
//!
//! No worker computes a step before the last applied one. The gradients of the next step come from
//! workers that have already summed the dense gradients of the last one.
//!
//! A look-up ahead gets its rows in two replies. The first one leaves keys out, and the second one
//! has them. The first one is repeated only if the second one is stored, too.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use prost::Message;
use rectrain_modes::GlobalStep;
use rectrain_proto::v1;
use rectrain_protocol::key_set::KeySet;
use rectrain_protocol::message::{self, Request};
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::remember::Memory;
use rectrain_wire::{BoxFuture, Frame, Refusal, Tensor, TensorData};

use crate::half::CurrentHalf;

/// The most replies to one piece that are stored, if look-ups are answered in two parts. A repeated
/// look-up may leave fewer keys out than the first.
const REPLIES_OF_A_PIECE: usize = 4;

/// A reply to a look-up.
#[derive(Debug, Clone, PartialEq)]
struct Reply {
    /// The keys of the look-up, by row group.
    keys: Vec<Tensor>,
    /// Whether the reply may leave keys out. The caller then requests these keys again.
    is_early: bool,
    /// The keys that an early reply leaves out, as in the message.
    deferred: Vec<u8>,
    rows: Vec<Tensor>,
}

impl Reply {
    /// The keys that the reply leaves out, by row group. `None` if the reply is malformed.
    fn deferred_keys(&self) -> Option<Vec<Tensor>> {
        let groups = self.keys.iter().map(|tensor| match tensor.data() {
            TensorData::U64(keys) => Some(keys.as_slice()),
            _ => None,
        });
        let groups: Vec<&[u64]> = groups.collect::<Option<_>>()?;
        let deferred = KeySet::read(groups.iter().map(|keys| keys.len()).sum(), self.deferred.clone()).ok()?;
        let mut is_deferred = deferred.iter();
        let left_out = |keys: &&[u64]| -> Vec<u64> {
            keys.iter().zip(is_deferred.by_ref()).filter(|(_, is)| *is).map(|(key, _)| *key).collect()
        };
        Some(groups.iter().map(left_out).map(Tensor::from).collect())
    }
}

/// Replies by step.
#[derive(Debug)]
struct LastSteps {
    /// The most replies of a step that are stored.
    most: usize,
    steps: BTreeMap<GlobalStep, Vec<Reply>>,
}

impl LastSteps {
    const fn new(most: usize) -> Self {
        Self { most, steps: BTreeMap::new() }
    }

    /// Stores the reply to a look-up for `step`. Drops the replies of the steps before `first`, and
    /// returns them, so that the caller frees them without the lock.
    fn keep(&mut self, first: GlobalStep, step: GlobalStep, reply: Reply) -> BTreeMap<GlobalStep, Vec<Reply>> {
        let kept = self.steps.split_off(&first);
        let old = std::mem::replace(&mut self.steps, kept);
        let replies = self.steps.entry(step).or_default();
        let is_known = |known: &Reply| {
            known.keys == reply.keys && known.is_early == reply.is_early && known.deferred == reply.deferred
        };
        if replies.len() < self.most && !replies.iter().any(is_known) {
            replies.push(reply);
        }
        old
    }

    /// The reply to an earlier look-up of these keys. If `in_parts`, the reply may be early.
    fn recall(&self, step: GlobalStep, keys: &[Tensor], in_parts: bool) -> Option<&Reply> {
        let replies = self.steps.get(&step)?;
        let of_keys = |reply: &&Reply| reply.keys == keys;
        let whole = replies.iter().filter(of_keys).find(|reply| !reply.is_early);
        let has_rest = |reply: &&Reply| {
            let rest = reply.deferred_keys();
            replies.iter().any(|other| !other.is_early && rest.as_ref() == Some(&other.keys))
        };
        whole.or_else(|| replies.iter().filter(of_keys).find(has_rest).filter(|_| in_parts))
    }
}

/// See the module documentation.
pub(crate) struct LookUpReplies {
    half: Arc<CurrentHalf>,
    /// Whether a dense worker can be replaced, or another one gets its pieces. A single one has
    /// replacements only if it pulls its pieces.
    has_replacements: bool,
    last: Mutex<LastSteps>,
}

impl LookUpReplies {
    pub(crate) fn new(plan: &JobPlan, half: Arc<CurrentHalf>) -> Self {
        let has_replacements = plan.replicas.dense_worker > 1 || plan.pulls_pieces();
        let of_piece = if plan.look_ahead() > 0 { REPLIES_OF_A_PIECE } else { 1 };
        let most = of_piece * plan.pieces() as usize;
        Self { half, has_replacements, last: Mutex::new(LastSteps::new(most)) }
    }

    /// Drops all replies, because another mode begins.
    pub(crate) fn clear(&self) {
        self.lock().steps.clear();
    }

    /// The first step whose replies are stored. `None` if no replies are. `partial` says whether
    /// they are partial results.
    fn keeps_replies_from(&self, partial: bool) -> Option<GlobalStep> {
        self.half.get().filter(|_| self.has_replacements || partial)?.keeps_look_ups_from()
    }

    fn lock(&self) -> MutexGuard<'_, LastSteps> {
        self.last.lock()
    }
}

/// A training look-up in a mode with a barrier.
pub(crate) struct LookUp {
    step: GlobalStep,
    train: bool,
    /// Whether the reply may leave keys out.
    in_parts: bool,
    /// Whether it asks for partial results.
    partial: bool,
    keys: Vec<Tensor>,
}

impl Memory for LookUpReplies {
    type Key = LookUp;

    fn key(&self, request: &Frame) -> Result<Option<LookUp>, Refusal> {
        if request.kind != v1::Lookup::KIND {
            return Ok(None);
        }
        let refuse = |error| message::refuse_malformed(format!("lookup: {error}"));
        let v1::Lookup { step, train, piece, partial_samples, .. } =
            v1::Lookup::decode(request.meta.clone()).map_err(refuse)?;
        let Some(step) = step else { return Ok(None) };
        let partial = partial_samples.is_some();
        let keys = if self.keeps_replies_from(partial).is_some() { request.tensors.clone() } else { Vec::new() };
        Ok(Some(LookUp { step: GlobalStep(step), train, in_parts: piece.is_some(), partial, keys }))
    }

    /// The reply to a look-up for a step that is applied or being applied. This is the earlier
    /// reply, or one without rows if the earlier reply was evicted.
    fn recall(&self, look_up: &LookUp) -> Option<Frame> {
        if !self.half.get()?.has_passed(look_up.step) {
            return None;
        }
        let last = self.lock();
        let earlier = last.recall(look_up.step, &look_up.keys, look_up.in_parts);
        let is_early = earlier.is_some_and(|reply| reply.is_early);
        let (deferred, rows) = earlier.map(|reply| (reply.deferred.clone(), reply.rows.clone())).unwrap_or_default();
        drop(last);
        let reply = v1::LookupReply { is_applied: true, deferred, is_early, ..v1::LookupReply::default() };
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
        if look_up.train
            && let Some(first) = self.keeps_replies_from(look_up.partial)
            && let Ok(v1::LookupReply { deferred, is_early, .. }) = v1::LookupReply::decode(reply.meta.clone())
        {
            let kept = Reply { keys: look_up.keys, is_early, deferred, rows: reply.tensors.clone() };
            let old = self.lock().keep(first, look_up.step, kept);
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

    /// A reply with all rows.
    fn whole(keys: Vec<Tensor>, rows: Vec<Tensor>) -> Reply {
        Reply { keys, is_early: false, deferred: Vec::new(), rows }
    }

    fn recalled(last: &LastSteps, step: u64, keys: &[Tensor]) -> Option<Vec<Tensor>> {
        last.recall(GlobalStep(step), keys, false).map(|reply| reply.rows.clone())
    }

    #[test]
    fn replies_of_the_last_applied_step_and_later_ones_are_kept() {
        let mut last = LastSteps::new(2);
        for step in 3..6 {
            let first = GlobalStep(step - 1);
            let old = last.keep(first, GlobalStep(step), whole(keys(step), rows(step as f32)));
            assert_eq!(old.len(), usize::from(step == 5));
            last.keep(first, GlobalStep(step), whole(keys(100 + step), rows(100.0)));
        }
        assert_eq!(recalled(&last, 3, &keys(3)), None, "no worker computes it any more");
        assert_eq!(recalled(&last, 4, &keys(4)), Some(rows(4.0)));
        assert_eq!(recalled(&last, 5, &keys(105)), Some(rows(100.0)));
        assert_eq!(recalled(&last, 5, &keys(4)), None, "other keys");
        last.keep(GlobalStep(4), GlobalStep(8), whole(keys(8), rows(8.0)));
        assert_eq!(recalled(&last, 4, &keys(4)), Some(rows(4.0)), "a look-up ahead drops nothing");
        last.steps.clear();
        assert_eq!(recalled(&last, 5, &keys(5)), None);
    }

    #[test]
    fn a_repeated_look_up_is_kept_once_and_the_bound_holds() {
        let mut last = LastSteps::new(1);
        for (first, value) in [(1, 1.0), (1, 2.0), (2, 3.0)] {
            last.keep(GlobalStep(0), GlobalStep(0), whole(keys(first), rows(value)));
        }
        assert_eq!(recalled(&last, 0, &keys(1)), Some(rows(1.0)), "the first reply");
        assert_eq!(recalled(&last, 0, &keys(2)), None);
    }

    #[test]
    fn a_reply_in_parts_is_repeated_only_with_its_rest() {
        let mut last = LastSteps::new(4);
        let (step, keys) = (GlobalStep(0), vec![Tensor::from(vec![1u64, 2, 3]), Tensor::from(vec![5u64])]);
        // The keys 2 and 5 are left out. Then key 2 alone, by another caller.
        let both = Reply { keys: keys.clone(), is_early: true, deferred: vec![0b1010], rows: rows(1.0) };
        let one = Reply { deferred: vec![0b0010], ..both.clone() };
        last.keep(step, step, both.clone());
        last.keep(step, step, one);
        assert_eq!(last.recall(step, &keys, true), None);
        let rest = vec![Tensor::from(vec![2u64]), Tensor::from(vec![5u64])];
        assert_eq!(both.deferred_keys(), Some(rest.clone()));
        last.keep(step, step, whole(rest.clone(), rows(2.0)));
        assert_eq!(last.recall(step, &keys, true), Some(&both));
        assert_eq!(last.recall(step, &keys, false), None, "the caller expects all rows");
        assert_eq!(recalled(&last, 0, &rest), Some(rows(2.0)));
        last.keep(step, step, whole(keys.clone(), rows(3.0)));
        assert_eq!(recalled(&last, 0, &keys), Some(rows(3.0)));
    }
}
