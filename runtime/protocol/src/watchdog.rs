//! Measures how long a dense worker has been computing one batch or opening its device.
//! A computation that hangs, for instance on a GPU that does not answer, would hold its batch for
//! ever. In a mode without a barrier no other member waits for that batch, so none notices. The
//! owner of the process therefore watches it and ends the process, and the job replaces the worker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The computation that is under way, if any. Clones watch the same worker.
#[derive(Debug, Clone, Default)]
pub struct Watchdog(Arc<Mutex<Option<Computation>>>);

/// The least time allowed to open a device: its driver starts and its kernels are compiled.
const LEAST_TO_OPEN: Duration = Duration::from_secs(120);

#[derive(Debug, Clone, Copy)]
struct Computation {
    /// The activity, as the end of the sentence "the worker has …".
    what: &'static str,
    begun: Instant,
    /// The computation may take at least this long, however short steps are.
    least: Duration,
}

impl Watchdog {
    /// Runs `work`, the computation of one batch, under the watch of [`Self::expired`].
    pub fn watch_batch<T>(&self, work: impl FnOnce() -> T) -> T {
        self.watch("computed one batch", Duration::ZERO, work)
    }

    /// Runs `work`, which opens the device, under the watch of [`Self::expired`].
    pub fn watch_opening<T>(&self, work: impl FnOnce() -> T) -> T {
        self.watch("been opening its device", LEAST_TO_OPEN, work)
    }

    fn watch<T>(&self, what: &'static str, least: Duration, work: impl FnOnce() -> T) -> T {
        self.set(Some(Computation { what, begun: Instant::now(), least }));
        let done = work();
        self.set(None);
        done
    }

    /// Returns once one computation has taken longer than `limit`. The result is the activity and
    /// the limit that applied to it.
    pub async fn expired(&self, limit: Duration) -> (&'static str, Duration) {
        loop {
            let current = *self.0.lock();
            let limit = current.map_or(limit, |work| limit.max(work.least));
            // A computation that starts now cannot expire before `left` has passed.
            let left = current.map_or(limit, |work| limit.saturating_sub(work.begun.elapsed()));
            match current {
                Some(work) if left.is_zero() => return (work.what, limit),
                _ => tokio::time::sleep(left).await,
            }
        }
    }

    fn set(&self, current: Option<Computation>) {
        *self.0.lock() = current;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_long_computation_expires_and_many_short_ones_do_not() {
        const LIMIT: Duration = Duration::from_millis(300);
        let watchdog = Watchdog::default();
        let compute = |each: Duration, times: usize| {
            let watchdog = watchdog.clone();
            std::thread::spawn(move || (0..times).for_each(|_| watchdog.watch_batch(|| std::thread::sleep(each))))
        };
        let short = compute(LIMIT / 30, 60);
        let seen = tokio::time::timeout(3 * LIMIT, watchdog.expired(LIMIT)).await;
        assert!(seen.is_err(), "each of them was shorter");
        short.join().unwrap();
        let (long, begun) = (compute(4 * LIMIT, 1), Instant::now());
        assert_eq!(watchdog.expired(LIMIT).await, ("computed one batch", LIMIT));
        let seen = begun.elapsed();
        assert!((LIMIT..4 * LIMIT).contains(&seen), "{seen:?}");
        long.join().unwrap();
        assert!(tokio::time::timeout(2 * LIMIT, watchdog.expired(LIMIT)).await.is_err(), "it has ended");
    }

    #[tokio::test]
    async fn opening_a_device_never_expires_within_two_minutes() {
        const LIMIT: Duration = Duration::from_millis(50);
        let watchdog = Watchdog::default();
        let own = watchdog.clone();
        let opening = std::thread::spawn(move || own.watch_opening(|| std::thread::sleep(6 * LIMIT)));
        assert!(tokio::time::timeout(4 * LIMIT, watchdog.expired(LIMIT)).await.is_err());
        opening.join().unwrap();
    }
}
