//! A bounded window of samples over time.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Samples that a window holds at most; further samples displace the oldest.
const SAMPLES: usize = 1024;

/// A value at a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample<T> {
    pub(crate) at_seconds: u64,
    pub(crate) value: T,
}

/// The samples of the last seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Window<T>(VecDeque<Sample<T>>);

impl<T> Default for Window<T> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<T: Copy> Window<T> {
    /// Adds a sample and drops samples older than `seconds`.
    pub(crate) fn push(&mut self, at_seconds: u64, value: T, seconds: u64) {
        self.0.push_back(Sample { at_seconds, value });
        let oldest = at_seconds.saturating_sub(seconds);
        while self.0.len() > SAMPLES || self.0.front().is_some_and(|sample| sample.at_seconds < oldest) {
            self.0.pop_front();
        }
    }

    /// The values of the last `seconds`. `None` if there are fewer than three, or if they do not
    /// cover that time.
    pub(crate) fn over(&self, seconds: u64) -> Option<Vec<T>> {
        let last = self.0.back()?.at_seconds;
        let within: Vec<_> = self.0.iter().filter(|sample| sample.at_seconds + seconds >= last).collect();
        let span = last - within.first()?.at_seconds;
        let count = within.len() as u64;
        // Each sample stands for the time since the sample before it.
        let covers = count >= 3 && span * count >= seconds * (count - 1);
        covers.then(|| within.into_iter().map(|sample| sample.value).collect())
    }

    /// All samples, oldest first.
    pub(crate) fn samples(&self) -> impl ExactSizeIterator<Item = &Sample<T>> {
        self.0.iter()
    }

    /// The newest value.
    pub(crate) fn newest(&self) -> Option<T> {
        self.0.back().map(|sample| sample.value)
    }
}
