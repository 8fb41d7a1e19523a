//! The ways in which a call to the API server can fail.

/// What happens to one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The API server answers that it cannot, and has done nothing.
    Unavailable,
    /// The API server has done it, and the answer is lost: a timeout, for the operator.
    AnswerLost,
    /// Somebody else has written meanwhile.
    Conflict,
    /// The operator is killed before the call arrives.
    KilledBefore,
    /// The operator is killed when the API server has done it.
    KilledAfter,
}

impl Fault {
    pub const ALL: [Self; 5] =
        [Self::Unavailable, Self::AnswerLost, Self::Conflict, Self::KilledBefore, Self::KilledAfter];

    pub fn kills(self) -> bool {
        matches!(self, Self::KilledBefore | Self::KilledAfter)
    }

    pub fn is_done(self) -> bool {
        matches!(self, Self::AnswerLost | Self::KilledAfter)
    }
}
