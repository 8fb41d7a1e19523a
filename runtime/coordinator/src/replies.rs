//! What members were answered, until they say that they know: one that asks again, because the coordinator's process has died since, is
//! answered the same, and what it has told counts once.

use std::collections::BTreeMap;

use rectrain_proto::v1;
use rectrain_wire::Frame;
use serde::{Deserialize, Serialize};

/// Answers of one caller that are kept: far more than it has questions under way.
const MOST_KEPT: usize = 1_024;

/// See the module's text. By caller, by the question's number.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Replies(BTreeMap<u64, BTreeMap<u64, Reply>>);

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Reply {
    /// What was told has been taken in, and is not answered yet.
    Heard,
    Answered {
        kind: u16,
        #[serde(with = "super::as_bytes::u8s")]
        meta: Vec<u8>,
    },
}

impl Replies {
    /// What this question was answered, if it was.
    pub(super) fn answered(&self, caller: &v1::Caller) -> Option<Frame> {
        match self.0.get(&caller.id)?.get(&caller.number)? {
            Reply::Heard => None,
            Reply::Answered { kind, meta } => {
                Some(Frame { kind: *kind, meta: meta.clone().into(), tensors: Vec::new() })
            }
        }
    }

    /// What is told with this question is taken in, unless it has been before: then false.
    pub(super) fn hears(&mut self, caller: &v1::Caller) -> bool {
        let is_heard = self.0.get(&caller.id).is_some_and(|asked| asked.contains_key(&caller.number));
        if !is_heard {
            self.keep(caller, Reply::Heard);
        }
        !is_heard
    }

    /// This is the answer, which has no tensors.
    pub(super) fn answer(&mut self, caller: &v1::Caller, reply: &Frame) {
        self.keep(caller, Reply::Answered { kind: reply.kind, meta: reply.meta.to_vec() });
    }

    /// This caller asks nothing any more.
    pub(super) fn forget(&mut self, caller: u64) {
        self.0.remove(&caller);
    }

    fn keep(&mut self, caller: &v1::Caller, reply: Reply) {
        if caller.id == 0 {
            return;
        }
        let asked = self.0.entry(caller.id).or_default();
        // Questions may overtake one another: nothing is known here of those that came after this one.
        asked.retain(|number, _| *number > caller.number || caller.unanswered.contains(number));
        asked.insert(caller.number, reply);
        if asked.len() > MOST_KEPT {
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
    fn a_question_is_answered_once_and_then_the_same() {
        let mut replies = Replies::default();
        let first = caller(1, 1, &[1]);
        assert_eq!(replies.answered(&first), None);
        assert!(replies.hears(&first) && !replies.hears(&first));
        assert_eq!(replies.answered(&first), None, "it was heard, and not answered");
        replies.answer(&first, &frame(4));
        assert_eq!(replies.answered(&first), Some(frame(4)));
        assert_eq!(replies.answered(&caller(2, 1, &[1])), None, "another's question");
    }

    #[test]
    fn what_a_member_knows_is_forgotten_and_who_gives_no_name_is_not_remembered() {
        let mut replies = Replies::default();
        (1..=3).for_each(|number| replies.answer(&caller(1, number, &[1, 2, 3]), &frame(4)));
        replies.answer(&caller(1, 5, &[1, 3, 5]), &frame(4));
        let is_kept = |replies: &Replies, number| replies.answered(&caller(1, number, &[])).is_some();
        assert_eq!([1, 2, 3, 5].map(|number| is_kept(&replies, number)), [true, false, true, true]);
        replies.answer(&caller(1, 4, &[4]), &frame(4));
        assert_eq!(
            [1, 3, 4, 5].map(|number| is_kept(&replies, number)),
            [false, false, true, true],
            "5 has overtaken 4"
        );
        let nobody = caller(0, 1, &[1]);
        assert!(replies.hears(&nobody) && replies.hears(&nobody));
        replies.answer(&nobody, &frame(4));
        assert_eq!(replies.answered(&nobody), None);
    }

    #[test]
    fn the_answers_kept_are_bounded() {
        let mut replies = Replies::default();
        let all: Vec<u64> = (1..=MOST_KEPT as u64 + 1).collect();
        all.iter().for_each(|number| replies.answer(&caller(1, *number, &all), &frame(4)));
        assert_eq!(replies.answered(&caller(1, 1, &all)), None);
        assert_eq!(replies.0[&1].len(), MOST_KEPT);
    }
}
