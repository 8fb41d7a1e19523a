//! The counts that look-ups and updates return. Keys that repeat in a batch count each time.

use crate::life::Refusal;
use std::ops::AddAssign;

/// Whether a look-up trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Training: a key without a row gets one from its initial values.
    Insert,
    /// Evaluation and serving: a key without a row reads as its initial values and gets no row.
    ReadInitial,
}

/// The keys of a look-up by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookupCounts {
    /// Keys that had a row.
    pub found: u64,
    /// Keys that got a row.
    pub inserted: u64,
    /// Keys that read as their initial values and still have no row.
    pub missing: u64,
}

/// The gradients of an update by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UpdateCounts {
    /// Gradients applied.
    pub applied: u64,
    /// Rows that the update made, because the group's [policy](crate::LifePolicy) admitted their
    /// keys.
    pub admitted: u64,
    /// Gradients dropped because the policy has not admitted their key yet.
    pub turned_away: u64,
    /// Earlier sightings of keys that are not admitted yet, lost because the policy's memory was
    /// full.
    pub forgotten: u64,
    /// Gradients dropped because their key has no row, and the policy does not admit keys by
    /// updates.
    pub missing: u64,
    /// Gradients dropped because they hold a NaN or an infinity.
    pub non_finite: u64,
}

impl UpdateCounts {
    /// Counts a gradient that was dropped because its key got no row.
    pub(crate) fn refuse(&mut self, refusal: Refusal) {
        match refusal {
            Refusal::Missing => self.missing += 1,
            Refusal::TurnedAway { forgotten } => {
                self.turned_away += 1;
                self.forgotten += u64::from(forgotten);
            }
        }
    }
}

impl AddAssign for LookupCounts {
    fn add_assign(&mut self, other: Self) {
        self.found += other.found;
        self.inserted += other.inserted;
        self.missing += other.missing;
    }
}

impl AddAssign for UpdateCounts {
    fn add_assign(&mut self, other: Self) {
        self.applied += other.applied;
        self.admitted += other.admitted;
        self.turned_away += other.turned_away;
        self.forgotten += other.forgotten;
        self.missing += other.missing;
        self.non_finite += other.non_finite;
    }
}
