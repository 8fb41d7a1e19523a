//! Measures how long a dense worker has been computing a batch or opening its device.
//! A computation that hangs, for instance on a GPU that does not answer, would hold its batch for
//! ever. In a mode without a barrier no other member waits for that batch, so none notices. The
//! owner of the process therefore watches it and ends the process, and the job replaces the worker.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// The computations that are under way: one for each thread that trains. Clones watch the same
/// worker.
#[derive(Debug, Clone, Default)]
pub struct Watchdog(Arc<Mutex<UnderWay>>);

#[derive(Debug, Default)]
struct UnderWay {
    /// Computations so far.
    begun: u64,
    /// By number.
    computations: BTreeMap<u64, Computation>,
}

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
        let number = {
            let mut under_way = self.0.lock();
            under_way.begun += 1;
            let number = under_way.begun;
            under_way.computations.insert(number, Computation { what, begun: Instant::now(), least });
            number
        };
        let done = work();
        self.0.lock().computations.remove(&number);
        done
    }

    /// Returns once one computation has taken longer than `limit`. The result is the activity and
    /// the limit that applied to it.
    pub async fn expired(&self, limit: Duration) -> (&'static str, Duration) {
        loop {
            let first = self.first_to_expire(limit);
            // A computation that starts now cannot expire before `left` has passed.
            let (left, limit) = first.map_or((limit, limit), |(_, left, limit)| (left, limit));
            match first {
                Some((work, ..)) if left.is_zero() => return (work.what, limit),
                _ => tokio::time::sleep(left).await,
            }
        }
    }

    /// The computation that expires next, the time that it has left, and its limit.
    fn first_to_expire(&self, limit: Duration) -> Option<(Computation, Duration, Duration)> {
        let under_way = self.0.lock();
        let all = under_way.computations.values().map(|work| {
            let limit = limit.max(work.least);
            (*work, limit.saturating_sub(work.begun.elapsed()), limit)
        });
        all.min_by_key(|(_, left, _)| *left)
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
    async fn a_long_computation_expires_beside_short_ones_of_another_thread() {
        const LIMIT: Duration = Duration::from_millis(300);
        let watchdog = Watchdog::default();
        let (short, long) = (watchdog.clone(), watchdog.clone());
        let sleep = |watchdog: Watchdog, each, times| {
            std::thread::spawn(move || (0..times).for_each(|_| watchdog.watch_batch(|| std::thread::sleep(each))))
        };
        let long = sleep(long, 3 * LIMIT, 1);
        let short = sleep(short, LIMIT / 30, 60);
        let begun = Instant::now();
        assert_eq!(watchdog.expired(LIMIT).await, ("computed one batch", LIMIT));
        assert!(begun.elapsed() < 2 * LIMIT, "{:?}", begun.elapsed());
        long.join().unwrap();
        short.join().unwrap();
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
