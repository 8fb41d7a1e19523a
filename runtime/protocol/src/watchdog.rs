//! How long a dense worker has been at one batch, or at opening what it computes on. A computation that never ends (a GPU that does not
//! answer) holds its batch for ever, and in a mode without a barrier nobody else is held up by it or sees it: so whoever owns the process
//! asks, and ends it. Others then do as when it is killed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
/// Since when something is computed, if anything is. Clones are about the same worker.
#[derive(Debug, Clone, Default)]
pub struct Watchdog(Arc<Mutex<Option<UnderWay>>>);

/// The least that a device has to be opened in: its driver begins and its kernels are compiled.
const LEAST_TO_OPEN: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy)]
struct UnderWay {
    /// What it "has" done for too long.
    what: &'static str,
    begun: Instant,
    /// It may take as long, however short steps are.
    least: Duration,
}

impl Watchdog {
    /// Does `work`, the computation of one batch, seen by [`Self::lasts`].
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        self.see("computed one batch", Duration::ZERO, work)
    }

    /// Opens what is computed on, seen by [`Self::lasts`].
    pub fn opening<T>(&self, work: impl FnOnce() -> T) -> T {
        self.see("been opening its device", LEAST_TO_OPEN, work)
    }

    fn see<T>(&self, what: &'static str, least: Duration, work: impl FnOnce() -> T) -> T {
        self.set(Some(UnderWay { what, begun: Instant::now(), least }));
        let done = work();
        self.set(None);
        done
    }

    /// Returns when one computation has been under way for `limit`, with what it "has" done all the time, and for how long at least.
    pub async fn lasts(&self, limit: Duration) -> (&'static str, Duration) {
        loop {
            let under_way = *self.0.lock();
            let limit = under_way.map_or(limit, |work| limit.max(work.least));
            // What begins meanwhile cannot be overdue before this has passed.
            let left = under_way.map_or(limit, |work| limit.saturating_sub(work.begun.elapsed()));
            match under_way {
                Some(work) if left.is_zero() => return (work.what, limit),
                _ => tokio::time::sleep(left).await,
            }
        }
    }

    fn set(&self, under_way: Option<UnderWay>) {
        *self.0.lock() = under_way;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_long_computation_is_seen_and_many_short_ones_are_not() {
        const LIMIT: Duration = Duration::from_millis(300);
        let computing = Watchdog::default();
        let compute = |each: Duration, times: usize| {
            let computing = computing.clone();
            std::thread::spawn(move || (0..times).for_each(|_| computing.during(|| std::thread::sleep(each))))
        };
        let short = compute(LIMIT / 30, 60);
        let seen = tokio::time::timeout(3 * LIMIT, computing.lasts(LIMIT)).await;
        assert!(seen.is_err(), "each of them was shorter");
        short.join().unwrap();
        let (long, begun) = (compute(4 * LIMIT, 1), Instant::now());
        assert_eq!(computing.lasts(LIMIT).await, ("computed one batch", LIMIT));
        let seen = begun.elapsed();
        assert!((LIMIT..4 * LIMIT).contains(&seen), "{seen:?}");
        long.join().unwrap();
        assert!(tokio::time::timeout(2 * LIMIT, computing.lasts(LIMIT)).await.is_err(), "it has ended");
    }

    #[tokio::test]
    async fn a_device_is_opened_for_two_minutes_at_least_before_that_is_too_long() {
        const LIMIT: Duration = Duration::from_millis(50);
        let computing = Watchdog::default();
        let own = computing.clone();
        let opening = std::thread::spawn(move || own.opening(|| std::thread::sleep(6 * LIMIT)));
        assert!(tokio::time::timeout(4 * LIMIT, computing.lasts(LIMIT)).await.is_err());
        opening.join().unwrap();
    }
}
