//! The facts about a key that an update brings beside its gradient: when it was seen, and in which
//! training examples.

/// Event time in seconds; 0 stands for "no clock". The store compares moments and never reads a
/// clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(pub u64);

/// The training examples of one key in one update.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Examples {
    /// Examples with a positive label: clicks, likes.
    pub positive: u32,
    /// The other examples.
    pub negative: u32,
}

impl Examples {
    /// The examples of a key whose caller counts none.
    pub(crate) const ONE: Self = Self { positive: 0, negative: 1 };
}

/// The time and the examples of an update. The default has no clock and no counts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen<'a> {
    /// The event time of the update. A [`Moment`] of 0 means that there is no clock.
    pub now: Moment,
    /// The examples of each key. Empty if the caller counts none; each key then counts as one
    /// negative example.
    pub examples: &'a [Examples],
}

impl<'a> Seen<'a> {
    /// The part for these keys of the update.
    pub(crate) fn of_keys(&self, keys: std::ops::Range<usize>) -> Self {
        Self { examples: self.examples.get(keys).unwrap_or_default(), ..*self }
    }

    /// The examples of the key at this position.
    #[inline(always)]
    pub(crate) fn examples_of(&self, position: usize) -> Examples {
        self.examples.get(position).copied().unwrap_or(Examples::ONE)
    }
}

/// An update that is about to change a row.
#[derive(Clone, Copy)]
pub(crate) struct Touch {
    pub(crate) key: crate::FeatureKey,
    /// The number of the update in the whole job.
    pub(crate) update: u64,
    pub(crate) now: Moment,
    pub(crate) examples: Examples,
}
