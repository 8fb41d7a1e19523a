//! The ways in which a managed table gives a key its row.

use super::{AdmitAfter, Refusal, SightedKey};
use crate::SpecError;
use rectrain_random::SplitMix64;

/// Which keys get a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Each key, at its first training look-up. A gradient whose row was removed since that look-up
    /// is dropped and counted.
    Always,
    /// A key gets its row at its `count`-th update; see [`AdmitAfter`].
    Count {
        /// Updates until a key gets its row, at least 1.
        count: u32,
        /// Keys counted at a time in all slots together.
        counters: u64,
    },
    /// Each update of a key without a row gives it one with probability `per_2_32 / 2³²`. The draw
    /// is a function of the seed, the key and the number of the update. It needs no memory.
    Probability {
        /// At least 1.
        per_2_32: u32,
    },
}

impl Admission {
    pub(super) fn validate(self) -> Result<(), SpecError> {
        match self {
            Self::Probability { per_2_32: 0 } => {
                Err(SpecError::Life { name: "probability", found: 0, expected: "at least 1 (of 2^32)" })
            }
            Self::Count { count, counters } => super::RowLife::validate(AdmitAfter { count, counters }),
            _ => Ok(()),
        }
    }

    /// The counters of keys, if there are any.
    pub(super) fn counters(self) -> Option<AdmitAfter> {
        match self {
            Self::Count { count, counters } => Some(AdmitAfter { count, counters }),
            _ => None,
        }
    }

    /// The outcome for a key that gets no row.
    pub(super) fn refusal(self) -> Refusal {
        match self {
            Self::Always => Refusal::Missing,
            _ => Refusal::TurnedAway { forgotten: 0 },
        }
    }

    /// Kind, and the two settings, for a snapshot.
    pub(super) fn numbers(self) -> (u8, u32, u64) {
        match self {
            Self::Always => (0, 0, 0),
            Self::Count { count, counters } => (1, count, counters),
            Self::Probability { per_2_32 } => (2, per_2_32, 0),
        }
    }

    pub(super) fn from_numbers(kind: u8, number: u32, counters: u64) -> Option<Self> {
        match kind {
            0 => Some(Self::Always),
            1 => Some(Self::Count { count: number, counters }),
            2 => Some(Self::Probability { per_2_32: number }),
            _ => None,
        }
    }
}

/// Whether a draw with this probability admits the key.
pub(super) fn is_drawn(per_2_32: u32, sighted: SightedKey) -> bool {
    let draws = SplitMix64::of_words(&[sighted.seed, sighted.key.0, sighted.update]);
    draws.nth(0) >> 32 < u64::from(per_2_32)
}
