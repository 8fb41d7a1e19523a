//! The data list (§4.1): the batches of the run in order. One worker takes each batch. A batch is a
//! range of the run's row sequence. The list therefore holds neither data nor addresses, only the
//! first row of the next batch. Batches of dead workers are taken first. Its owner is the current
//! coordinator half, or the [`crate::switch::TrainingRun`] while training is paused.

use std::collections::{BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::Batch;

/// The answer to a request for a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// No worker has taken it before.
    Fresh(Batch),
    /// A worker that died had taken it before.
    Again(Batch),
    /// No batch now, but more rows may be announced.
    Empty,
    /// No batch, and no more rows will be announced.
    Finished,
}

/// The data list; see the module's documentation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DataList {
    batch_rows: u32,
    next_row: u64,
    /// Ends of the announced segments (epochs) with rows left, ascending. A batch ends with its
    /// segment.
    segments: VecDeque<u64>,
    closed: bool,
    returned: BTreeSet<Batch>,
}

impl DataList {
    /// An empty list. Its batches will have `batch_rows` rows (at least 1), from row `first_row`
    /// on.
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

    /// Announces the next segment, of `rows` rows. Its last batch may be smaller. No batch crosses
    /// into the next segment.
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

    /// From now on, batches have `batch_rows` rows (at least 1).
    pub fn set_batch_rows(&mut self, batch_rows: u32) {
        self.batch_rows = batch_rows.max(1);
    }

    /// Takes the next batch. It takes a fresh one only if `fresh` is true.
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

    /// Puts back a batch that a dead worker had taken.
    pub fn give_back(&mut self, batch: Batch) {
        self.returned.insert(batch);
    }

    /// A returned batch turned out to be trained: removes it.
    pub fn forget(&mut self, batch: Batch) {
        self.returned.remove(&batch);
    }

    /// Whether no batch is left and no row will be announced. A returned batch can still make this
    /// false.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.closed && self.segments.is_empty() && self.returned.is_empty()
    }

    /// Whether announced rows are left that no worker has taken.
    #[must_use]
    pub fn fresh_left(&self) -> bool {
        !self.segments.is_empty()
    }

    /// The first row that no worker has taken.
    #[must_use]
    pub fn next_row(&self) -> u64 {
        self.next_row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returned_batches_come_first_and_no_batch_crosses_a_segment() {
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
