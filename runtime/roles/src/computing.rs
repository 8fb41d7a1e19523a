//! How long a dense worker has been at one batch. A computation that never ends (a GPU that does not answer) holds its batch for ever, and in a mode
//! without a barrier nobody else is held up by it or sees it: so whoever owns the process asks, and ends it. Others then do as when it is killed.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Since when something is computed, if anything is. Clones are about the same worker.
#[derive(Debug, Clone, Default)]
pub struct Computing(Arc<Mutex<Option<Instant>>>);

impl Computing {
    /// Does `work`, seen by [`Self::lasts`].
    pub(crate) fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        self.set(Some(Instant::now()));
        let done = work();
        self.set(None);
        done
    }

    /// Returns when one computation has been under way for `limit`.
    pub async fn lasts(&self, limit: Duration) {
        loop {
            // What begins meanwhile cannot be overdue before this has passed.
            let left = self.begun().map_or(limit, |begun| limit.saturating_sub(begun.elapsed()));
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left).await;
        }
    }

    fn begun(&self) -> Option<Instant> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, begun: Option<Instant>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = begun;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_long_computation_is_seen_and_many_short_ones_are_not() {
        const LIMIT: Duration = Duration::from_millis(300);
        let computing = Computing::default();
        let compute = |each: Duration, times: usize| {
            let computing = computing.clone();
            std::thread::spawn(move || (0..times).for_each(|_| computing.during(|| std::thread::sleep(each))))
        };
        let short = compute(LIMIT / 30, 60);
        let seen = tokio::time::timeout(3 * LIMIT, computing.lasts(LIMIT)).await;
        assert!(seen.is_err(), "each of them was shorter");
        short.join().unwrap();
        let (long, begun) = (compute(4 * LIMIT, 1), Instant::now());
        computing.lasts(LIMIT).await;
        let seen = begun.elapsed();
        assert!((LIMIT..4 * LIMIT).contains(&seen), "{seen:?}");
        long.join().unwrap();
        assert!(tokio::time::timeout(2 * LIMIT, computing.lasts(LIMIT)).await.is_err(), "it has ended");
    }
}
