//! Permits for reconciles: they bound how many jobs are reconciled at a time, first come, first
//! served.
//!
//! The limit of kube's runner always picks the same ones of the waiting jobs first. If more is
//! requested than gets done, some job would never have its turn.

use std::time::Instant;

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::metrics::OperatorMetrics;

/// A fair semaphore.
#[derive(Debug)]
pub struct Permits(Semaphore);

impl Permits {
    /// `concurrency` permits, at least one.
    #[must_use]
    pub fn new(concurrency: u16) -> Self {
        Self(Semaphore::new(usize::from(concurrency.max(1))))
    }

    /// Waits for a permit, which is returned when it is dropped. `None` once the permits are
    /// closed.
    pub async fn acquire(&self, metrics: &OperatorMetrics) -> Option<SemaphorePermit<'_>> {
        let begun = Instant::now();
        // It fails only once it is closed.
        let permit = self.0.acquire().await.ok()?;
        metrics.waited(begun.elapsed());
        Some(permit)
    }

    /// Ends all waits for a permit. Permits that are in use stay valid.
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
    async fn the_longest_wait_gets_the_next_permit() {
        let (permits, metrics) = (Permits::new(1), metrics());
        let first = permits.acquire(&metrics).await.expect("a permit");
        let mut waiting: Vec<_> = (0..50).map(|_| Box::pin(permits.acquire(&metrics))).collect();
        for wait in &mut waiting {
            assert!(poll!(wait).is_pending());
        }
        drop(first);
        // The order of polls does not change the order of permits.
        for turn in 0..waiting.len() {
            for later in (turn + 1..waiting.len()).rev() {
                assert!(poll!(&mut waiting[later]).is_pending(), "{later} before {turn}");
            }
            assert!(poll!(&mut waiting[turn]).map(|permit| permit.is_some()).is_ready());
        }
    }

    #[tokio::test]
    async fn closing_ends_the_waits_and_keeps_the_permits_in_use() {
        let (permits, metrics) = (Permits::new(2), metrics());
        let kept = join_all([permits.acquire(&metrics), permits.acquire(&metrics)]).await;
        let mut waits = Box::pin(permits.acquire(&metrics));
        assert!(poll!(&mut waits).is_pending());
        permits.close();
        assert!(waits.now_or_never().expect("an answer").is_none());
        assert!(kept.iter().all(Option::is_some));
        let text = metrics.encode().expect("they are served");
        assert!(text.contains("rectrain_operator_reconcile_wait_seconds_count 2"), "{text}");
    }
}
