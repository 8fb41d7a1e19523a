//! Replies to members, kept until the member confirms that it received them.
//! A member repeats a request when the coordinator's process died before the reply arrived. It gets
//! the same reply, and its report counts once. Each request confirms all earlier ones that it does
//! not list as unanswered.

use std::collections::BTreeMap;

use rectrain_proto::v1;
use rectrain_wire::Frame;
use serde::{Deserialize, Serialize};

/// Replies to keep for one caller. A caller has far fewer requests under way.
const MAX_REPLIES: usize = 1_024;

/// Replies by caller, and by the number of the request.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct ReplyCache(BTreeMap<u64, BTreeMap<u64, Reply>>);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Reply {
    /// The report was applied, and there is no reply yet.
    Applied,
    Answered {
        kind: u16,
        #[serde(with = "super::as_bytes::u8s")]
        meta: Vec<u8>,
    },
}

impl ReplyCache {
    /// The reply to this request, if there was one.
    pub(super) fn get(&self, caller: &v1::Caller) -> Option<Frame> {
        match self.0.get(&caller.id)?.get(&caller.number)? {
            Reply::Applied => None,
            Reply::Answered { kind, meta } => {
                Some(Frame { kind: *kind, meta: meta.clone().into(), tensors: Vec::new() })
            }
        }
    }

    /// Marks the report in this request as applied. Returns false if it was applied before.
    pub(super) fn mark_applied(&mut self, caller: &v1::Caller) -> bool {
        let is_known = self.0.get(&caller.id).is_some_and(|asked| asked.contains_key(&caller.number));
        if !is_known {
            self.keep(caller, Reply::Applied);
        }
        !is_known
    }

    /// Keeps the reply to this request. It has no tensors.
    pub(super) fn insert(&mut self, caller: &v1::Caller, reply: &Frame) {
        self.keep(caller, Reply::Answered { kind: reply.kind, meta: reply.meta.to_vec() });
    }

    /// Forgets the replies to a caller that sends no more requests.
    pub(super) fn forget(&mut self, caller: u64) {
        self.0.remove(&caller);
    }

    fn keep(&mut self, caller: &v1::Caller, reply: Reply) {
        if caller.id == 0 {
            return;
        }
        let asked = self.0.entry(caller.id).or_default();
        // Requests may overtake one another, so this one says nothing about those after it.
        asked.retain(|number, _| *number > caller.number || caller.unanswered.contains(number));
        asked.insert(caller.number, reply);
        if asked.len() > MAX_REPLIES {
            asked.pop_first();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(id: u64, number: u64, unanswered: &[u64]) -> v1::Caller {
        v1::Caller { id, number, unanswered: unanswered.to_vec(), attempt: 1 }
    }

    fn frame(kind: u16) -> Frame {
        Frame { kind, meta: vec![kind as u8].into(), tensors: Vec::new() }
    }

    #[test]
    fn a_repeated_request_gets_the_same_reply() {
        let mut replies = ReplyCache::default();
        let first = caller(1, 1, &[1]);
        assert_eq!(replies.get(&first), None);
        assert!(replies.mark_applied(&first) && !replies.mark_applied(&first));
        assert_eq!(replies.get(&first), None, "it is applied and has no reply yet");
        replies.insert(&first, &frame(4));
        assert_eq!(replies.get(&first), Some(frame(4)));
        assert_eq!(replies.get(&caller(2, 1, &[1])), None, "the request of another caller");
    }

    #[test]
    fn confirmed_replies_are_forgotten_and_callers_need_an_id() {
        let mut replies = ReplyCache::default();
        (1..=3).for_each(|number| replies.insert(&caller(1, number, &[1, 2, 3]), &frame(4)));
        replies.insert(&caller(1, 5, &[1, 3, 5]), &frame(4));
        let is_kept = |replies: &ReplyCache, number| replies.get(&caller(1, number, &[])).is_some();
        assert_eq!([1, 2, 3, 5].map(|number| is_kept(&replies, number)), [true, false, true, true]);
        replies.insert(&caller(1, 4, &[4]), &frame(4));
        assert_eq!(
            [1, 3, 4, 5].map(|number| is_kept(&replies, number)),
            [false, false, true, true],
            "5 has overtaken 4"
        );
        let anonymous = caller(0, 1, &[1]);
        assert!(replies.mark_applied(&anonymous) && replies.mark_applied(&anonymous));
        replies.insert(&anonymous, &frame(4));
        assert_eq!(replies.get(&anonymous), None);
    }

    #[test]
    fn the_replies_of_a_caller_are_bounded() {
        let mut replies = ReplyCache::default();
        let all: Vec<u64> = (1..=MAX_REPLIES as u64 + 1).collect();
        all.iter().for_each(|number| replies.insert(&caller(1, *number, &all), &frame(4)));
        assert_eq!(replies.get(&caller(1, 1, &all)), None);
        assert_eq!(replies.0[&1].len(), MAX_REPLIES);
    }
}
