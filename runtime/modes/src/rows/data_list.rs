//! The data list (§4.1): the batches of the run in order, each to be taken by one worker. It holds no data and no addresses, only
//! where the next batch begins: a batch is a range of the run's row sequence. Batches of workers that died are taken first.
//! Owned by the [`crate::gba::Dispatcher`], or by the [`crate::switch::TrainingRun`] while training is synchronous.

use std::collections::{BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::Batch;

/// The answer to a request for a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Never taken before.
    Fresh(Batch),
    /// Taken before by a worker that died.
    Again(Batch),
    /// None now: more rows will be announced.
    Empty,
    /// None, and no more rows will come.
    Finished,
}

/// See the module's text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DataList {
    batch_rows: u32,
    next_row: u64,
    /// Ends of the announced segments (epochs) that are not used up, ascending; a batch ends with its segment.
    segments: VecDeque<u64>,
    closed: bool,
    returned: BTreeSet<Batch>,
}

impl DataList {
    /// Nothing announced yet; batches of `batch_rows` (at least 1) rows from row `first_row` on.
    #[must_use]
    pub fn new(batch_rows: u32, first_row: u64) -> Self {
        Self {
            batch_rows: batch_rows.max(1),
            next_row: first_row,
            segments: VecDeque::new(),
            closed: false,
            returned: BTreeSet::new(),
        }
    }

    /// Announces the next segment of `rows` rows. Its last batch may be smaller; no batch reaches into the next segment.
    pub fn extend(&mut self, rows: u64) {
        let start = self.segments.back().copied().unwrap_or(self.next_row);
        if rows > 0 {
            self.segments.push_back(start + rows);
        }
    }

    /// No more segments will be announced.
    pub fn close(&mut self) {
        self.closed = true;
    }

    /// Batches have `batch_rows` (at least 1) rows from now on.
    pub fn set_batch_rows(&mut self, batch_rows: u32) {
        self.batch_rows = batch_rows.max(1);
    }

    /// Takes the next batch; a fresh one only if `fresh` allows it.
    pub fn take(&mut self, fresh: bool) -> Next {
        if let Some(batch) = self.returned.pop_first() {
            return Next::Again(batch);
        }
        let Some(end) = self.segments.front().copied() else {
            return if self.closed { Next::Finished } else { Next::Empty };
        };
        if !fresh {
            return Next::Empty;
        }
        let rows = u64::from(self.batch_rows).min(end - self.next_row);
        let batch = Batch { first_row: self.next_row, rows: rows as u32 };
        self.next_row += rows;
        if self.next_row == end {
            self.segments.pop_front();
        }
        Next::Fresh(batch)
    }

    /// A batch that a dead worker had taken.
    pub fn give_back(&mut self, batch: Batch) {
        self.returned.insert(batch);
    }

    /// A batch that was given back turned out to be trained.
    pub fn forget(&mut self, batch: Batch) {
        self.returned.remove(&batch);
    }

    /// Whether nothing is left and nothing will come, unless a batch is given back.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.closed && self.segments.is_empty() && self.returned.is_empty()
    }

    /// Whether announced rows are left that were never taken.
    #[must_use]
    pub fn fresh_left(&self) -> bool {
        !self.segments.is_empty()
    }

    /// The first row never taken.
    #[must_use]
    pub fn next_row(&self) -> u64 {
        self.next_row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_consecutive_end_with_their_segment_and_come_again_first() {
        let mut list = DataList::new(4, 10);
        assert_eq!(list.take(true), Next::Empty);
        list.extend(6);
        list.extend(0);
        list.extend(4);
        let first = Batch { first_row: 10, rows: 4 };
        assert_eq!(list.take(true), Next::Fresh(first));
        assert_eq!(list.take(false), Next::Empty);
        assert_eq!(list.take(true), Next::Fresh(Batch { first_row: 14, rows: 2 }));
        list.give_back(first);
        assert_eq!(list.take(false), Next::Again(first));
        list.close();
        assert_eq!(list.take(true), Next::Fresh(Batch { first_row: 16, rows: 4 }));
        list.give_back(first);
        assert!(!list.finished());
        list.forget(first);
        assert!(list.finished());
        assert_eq!(list.take(true), Next::Finished);
    }
}
