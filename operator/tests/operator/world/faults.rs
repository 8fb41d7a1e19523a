//! Faults of a call to the API server.

/// The fault of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The API server answers with an error and has done nothing.
    Unavailable,
    /// The API server carries it out and its answer is lost: the operator sees a timeout.
    AnswerLost,
    /// Another client has written meanwhile.
    Conflict,
    /// The operator is killed before the call arrives.
    KilledBefore,
    /// The operator is killed after the API server has carried it out.
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
