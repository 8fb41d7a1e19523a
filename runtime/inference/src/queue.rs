//! The requests that wait for the model, oldest first, and the moment of the next batch. No thread,
//! no clock: callers pass the time.
//!
//! - The queue holds a bounded number of rows. A request that does not fit is not admitted, unless
//!   the queue is empty.
//! - A batch is due when its rows are complete, or when its oldest request has waited long enough.
//! - A batch is whole requests, in order. Its first request may exceed the rows of a batch.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A request that waits.
#[derive(Debug)]
pub(crate) struct Waiting<T> {
    /// Its share of the bounds, at least 1.
    pub(crate) rows: usize,
    /// When it came.
    pub(crate) arrived: Instant,
    /// The request.
    pub(crate) job: T,
}

/// When the next batch is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// Now.
    Now,
    /// At this moment, or earlier if more requests come.
    At(Instant),
    /// When a request comes.
    Idle,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Queue<T> {
    waiting: VecDeque<Waiting<T>>,
    /// Rows of all waiting requests.
    rows: usize,
    max_rows: usize,
    batch_rows: usize,
    max_wait: Duration,
}

impl<T> Queue<T> {
    pub(crate) fn new(max_rows: usize, batch_rows: usize, max_wait: Duration) -> Self {
        Self { waiting: VecDeque::new(), rows: 0, max_rows, batch_rows, max_wait }
    }

    /// Rows of all waiting requests.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Adds a request. Returns it if it does not fit.
    pub(crate) fn admit(&mut self, request: Waiting<T>) -> Result<(), Waiting<T>> {
        if self.rows > 0 && self.rows + request.rows > self.max_rows {
            return Err(request);
        }
        self.rows += request.rows;
        self.waiting.push_back(request);
        Ok(())
    }

    /// Removes the requests that nothing waits for any more.
    pub(crate) fn retain(&mut self, mut is_wanted: impl FnMut(&T) -> bool) {
        self.waiting.retain(|request| is_wanted(&request.job));
        self.rows = self.waiting.iter().map(|request| request.rows).sum();
    }

    /// When the next batch is due.
    pub(crate) fn due(&self, now: Instant) -> Due {
        let Some(oldest) = self.waiting.front() else { return Due::Idle };
        let at = oldest.arrived + self.max_wait;
        if self.rows >= self.batch_rows || at <= now { Due::Now } else { Due::At(at) }
    }

    /// The requests of the next batch. Empty only if none wait.
    pub(crate) fn take(&mut self) -> Vec<Waiting<T>> {
        let mut rows = 0;
        let fits = |request: &&Waiting<T>| {
            let is_first = rows == 0;
            rows += request.rows;
            is_first || rows <= self.batch_rows
        };
        let count = self.waiting.iter().take_while(fits).count();
        let batch: Vec<Waiting<T>> = self.waiting.drain(..count).collect();
        self.rows -= batch.iter().map(|request| request.rows).sum::<usize>();
        batch
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_millis(10);

    fn queue(start: Instant, rows: &[usize]) -> Queue<usize> {
        let mut queue = Queue::new(100, 10, WAIT);
        for (job, rows) in rows.iter().enumerate() {
            queue.admit(Waiting { rows: *rows, arrived: start, job }).unwrap();
        }
        queue
    }

    fn jobs(batch: Vec<Waiting<usize>>) -> Vec<usize> {
        batch.into_iter().map(|request| request.job).collect()
    }

    #[test]
    fn a_batch_is_whole_requests_in_their_order() {
        let start = Instant::now();
        let mut queue = queue(start, &[4, 5, 3, 20, 1, 9, 1]);
        let batches: Vec<Vec<usize>> =
            std::iter::from_fn(|| Some(jobs(queue.take())).filter(|batch| !batch.is_empty())).collect();
        assert_eq!(batches, [vec![0, 1], vec![2], vec![3], vec![4, 5], vec![6]]);
        assert_eq!((queue.rows(), queue.due(start)), (0, Due::Idle));
    }

    #[test]
    fn a_batch_is_due_when_full_or_when_its_oldest_request_has_waited() {
        let start = Instant::now();
        assert_eq!(queue(start, &[]).due(start), Due::Idle);
        assert_eq!(queue(start, &[3, 6]).due(start), Due::At(start + WAIT));
        assert_eq!(queue(start, &[3, 6]).due(start + WAIT), Due::Now);
        assert_eq!(queue(start, &[3, 6, 1]).due(start), Due::Now);
    }

    #[test]
    fn rows_beyond_the_bound_are_not_admitted() {
        let start = Instant::now();
        let mut queue = queue(start, &[60, 40]);
        let refused = queue.admit(Waiting { rows: 1, arrived: start, job: 9 }).unwrap_err();
        assert_eq!((refused.job, queue.rows()), (9, 100));
        assert_eq!(jobs(queue.take()), [0]);
        queue.admit(refused).unwrap();
        assert_eq!(queue.rows(), 41);
        queue.retain(|job| *job == 9);
        assert_eq!((queue.rows(), jobs(queue.take())), (1, vec![9]));
        // Alone, a request of any size fits.
        queue.admit(Waiting { rows: 1000, arrived: start, job: 1 }).unwrap();
        assert_eq!(queue.due(start), Due::Now);
    }
}
