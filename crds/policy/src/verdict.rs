//! The outcome of a decision, before it has a subject and a time.

use crate::{Action, Decision, Subject};

/// The outcome of a decision: an action, or a reason against one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Carry out `action`.
    Act {
        /// The action.
        action: Action,
        /// Why, in a sentence.
        reason: String,
    },
    /// Change nothing.
    Keep {
        /// Why not, in a sentence.
        reason: String,
    },
}

impl Verdict {
    pub(crate) fn act(action: Action, reason: impl Into<String>) -> Self {
        Self::Act { action, reason: reason.into() }
    }

    pub(crate) fn keep(reason: impl Into<String>) -> Self {
        Self::Keep { reason: reason.into() }
    }

    pub(crate) fn into_decision(self, at_seconds: u64, subject: Subject) -> Decision {
        match self {
            Self::Act { action, reason } => Decision::new(at_seconds, subject, action, reason),
            Self::Keep { reason } => Decision::new(at_seconds, subject, Action::Keep, reason),
        }
    }
}
