//! How many jobs are reconciled at a time, and which is next: the one that has waited longest. The limit of kube's runner takes any of those
//! that wait, always the same ones first, so while more is asked for than gets done some job would never have its turn.

use std::time::Instant;

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::metrics::OperatorMetrics;

/// See the module's text.
#[derive(Debug)]
pub struct Places(Semaphore);

impl Places {
    /// So many at a time.
    #[must_use]
    pub fn new(concurrency: u16) -> Self {
        Self(Semaphore::new(usize::from(concurrency.max(1))))
    }

    /// A place, which is free again when it is dropped; none if no more are given.
    pub async fn take(&self, metrics: &OperatorMetrics) -> Option<SemaphorePermit<'_>> {
        let begun = Instant::now();
        // It fails only once it is closed.
        let place = self.0.acquire().await.ok()?;
        metrics.waited(begun.elapsed());
        Some(place)
    }

    /// Whoever waits for a place gets none any more; whoever has one keeps it.
    pub fn close(&self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use futures::future::join_all;
    use futures::{FutureExt, poll};

    use super::*;

    fn metrics() -> OperatorMetrics {
        OperatorMetrics::new().expect("they register")
    }

    #[tokio::test]
    async fn who_has_waited_longest_is_next() {
        let (places, metrics) = (Places::new(1), metrics());
        let first = places.take(&metrics).await.expect("a place");
        let mut waiting: Vec<_> = (0..50).map(|_| Box::pin(places.take(&metrics))).collect();
        for wait in &mut waiting {
            assert!(poll!(wait).is_pending());
        }
        drop(first);
        // Whoever polls them in another order does not change whose turn it is.
        for turn in 0..waiting.len() {
            for later in (turn + 1..waiting.len()).rev() {
                assert!(poll!(&mut waiting[later]).is_pending(), "{later} before {turn}");
            }
            assert!(poll!(&mut waiting[turn]).map(|place| place.is_some()).is_ready());
        }
    }

    #[tokio::test]
    async fn whoever_waits_when_the_end_comes_gets_no_place_and_waits_no_more() {
        let (places, metrics) = (Places::new(2), metrics());
        let kept = join_all([places.take(&metrics), places.take(&metrics)]).await;
        let mut waits = Box::pin(places.take(&metrics));
        assert!(poll!(&mut waits).is_pending());
        places.close();
        assert!(waits.now_or_never().expect("an answer").is_none());
        assert!(kept.iter().all(Option::is_some));
        let text = metrics.encode().expect("they are served");
        assert!(text.contains("rectrain_operator_reconcile_wait_seconds_count 2"), "{text}");
    }
}
