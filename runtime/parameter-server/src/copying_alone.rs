//! A slow server copies its slots without any other work: look-ups of training wait meanwhile.
//!
//! Copies and steps share the processor of such a server. Beside the few steps that it allows, the
//! copies take about twice as long. Once they are done, training is as fast as the other servers.
//! So training gains from the wait.

use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rectrain_modes::migration::MigrationId;
use tokio::sync::Notify;

/// The longest wait.
const MOST: Duration = Duration::from_secs(60);

/// See the module documentation.
pub(crate) struct CopyingAlone {
    /// The migration whose slots are being copied, and when its first copy began. `None` once all
    /// its slots are copied.
    begun: Mutex<Option<(MigrationId, Instant)>>,
    ended: Notify,
    most: Duration,
}

impl CopyingAlone {
    /// A wait must end well before `stall`, after which the job counts as stalled.
    pub(crate) fn new(stall: Duration) -> Self {
        Self { begun: Mutex::default(), ended: Notify::new(), most: MOST.min(stall / 2) }
    }

    /// A copy of this migration begins.
    pub(crate) fn begin(&self, migration: MigrationId) {
        let mut begun = self.begun.lock();
        if begun.is_none_or(|(other, _)| other != migration) {
            *begun = Some((migration, Instant::now()));
        }
    }

    /// All slots are copied, or the migration is over.
    pub(crate) fn end(&self) {
        *self.begun.lock() = None;
        self.ended.notify_waiters();
    }

    /// Waits until the copies end, or until they have had enough time.
    pub(crate) async fn ended(&self) {
        loop {
            let ended = self.ended.notified();
            let Some((_, begun)) = *self.begun.lock() else { return };
            let Some(left) = self.most.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) else { return };
            // The loop looks again in either case.
            let _is_over = tokio::time::timeout(left, ended).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: MigrationId = MigrationId(1);

    #[tokio::test]
    async fn look_ups_wait_until_the_copies_end() {
        let alone = CopyingAlone::new(Duration::from_secs(600));
        alone.ended().await;
        alone.begin(FIRST);
        let (before, after) = tokio::join!(tokio::time::timeout(Duration::from_millis(50), alone.ended()), async {
            tokio::time::sleep(Duration::from_millis(80)).await;
            tokio::join!(alone.ended(), async { alone.end() }).0
        });
        assert!(before.is_err(), "a copy was under way");
        assert_eq!(after, ());
    }

    #[tokio::test]
    async fn look_ups_wait_once_for_a_migration_and_no_longer_than_allowed() {
        let alone = CopyingAlone::new(Duration::from_millis(100));
        alone.begin(FIRST);
        let begun = Instant::now();
        alone.ended().await;
        assert!(begun.elapsed() >= Duration::from_millis(40), "{:?}", begun.elapsed());
        alone.begin(FIRST);
        tokio::time::timeout(Duration::from_millis(20), alone.ended()).await.expect("the same migration goes on");
        alone.begin(MigrationId(2));
        assert!(tokio::time::timeout(Duration::from_millis(20), alone.ended()).await.is_err(), "another one begins");
    }
}
