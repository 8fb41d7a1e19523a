//! Keeps the lease on the job's checkpoint path while the coordinator runs.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rectrain_checkpoint::{Acquired, CheckpointError, Claim, Lease};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::EventLog;
use rectrain_protocol::metrics::CoordinatorMetrics;
use rectrain_storage::Directory;
use tokio::sync::{Mutex, watch};

use super::warn_all;

/// The time between two heartbeats.
const INTERVAL: Duration = Duration::from_secs(5);

/// The source of the time of heartbeats.
pub(super) trait Clock: Debug + Send + Sync {
    fn now(&self) -> SystemTime;
}

#[derive(Debug)]
struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// The lease, shared by the renewals and the writes of checkpoints.
#[derive(Debug)]
pub(super) struct PathLease {
    lease: Mutex<Lease>,
    clock: Arc<dyn Clock>,
    /// Why this process must not write any more.
    lost: watch::Sender<Option<Lost>>,
}

/// The process that has the lease now.
#[derive(Debug, Clone)]
enum Lost {
    /// A process of another run, described by this error.
    Run(String),
    /// A replacement of this coordinator.
    Replacement,
}

impl Lost {
    /// `None` if the error does not mean that the lease is lost.
    fn by(error: &RoleError) -> Option<Self> {
        match error {
            RoleError::Leased(reason) => Some(Self::Run(reason.clone())),
            RoleError::Superseded => Some(Self::Replacement),
            _ => None,
        }
    }

    fn error(&self) -> RoleError {
        match self {
            Self::Run(reason) => RoleError::Leased(reason.clone()),
            Self::Replacement => RoleError::Superseded,
        }
    }
}

impl PathLease {
    pub(super) fn new(directory: &Directory, run: &str, job: &str) -> Arc<Self> {
        Self::with_clock(directory, run, job, Arc::new(SystemClock))
    }

    fn with_clock(directory: &Directory, run: &str, job: &str, clock: Arc<dyn Clock>) -> Arc<Self> {
        let claim = Claim { run: run.to_owned(), job: job.to_owned(), interval: INTERVAL };
        let lease = Mutex::new(Lease::new(directory.clone(), claim));
        Arc::new(Self { lease, clock, lost: watch::Sender::new(None) })
    }

    /// Gets the lease before anything is trained.
    ///
    /// # Errors
    /// [`RoleError::Leased`] if another run has it, and [`RoleError::Checkpoint`] if the storage
    /// fails.
    pub(super) async fn acquire(&self, events: &EventLog) -> Result<(), RoleError> {
        match self.lease.lock().await.acquire(self.clock.now()).await.map_err(refused)? {
            Acquired::Free => {}
            Acquired::Ended(by) => tracing::info!("took over the lease on the checkpoint path from {by}: it has ended"),
            Acquired::Expired(by) => {
                let warning = format!("the lease on spec.checkpoint.path has expired and was taken over from {by}");
                warn_all(events, [warning]);
            }
        }
        Ok(())
    }

    /// Checks that this process still has the lease, and renews it.
    ///
    /// # Errors
    /// [`RoleError::Leased`] if another run has it, and [`RoleError::Superseded`] if another
    /// process of this run has it. [`Self::keep`] then ends, too. Otherwise
    /// [`RoleError::Checkpoint`] if the storage fails.
    pub(super) async fn confirm(&self) -> Result<(), RoleError> {
        if let Some(lost) = &*self.lost.borrow() {
            return Err(lost.error());
        }
        let renewed = self.lease.lock().await.renew(self.clock.now()).await.map_err(refused);
        if let Some(lost) = renewed.as_ref().err().and_then(Lost::by) {
            self.lost.send_replace(Some(lost));
        }
        renewed
    }

    /// Renews the lease until another process has it. Returns the error that ends this run.
    pub(super) async fn keep(&self, events: &EventLog, metrics: &CoordinatorMetrics) -> RoleError {
        let mut lost = self.lost.subscribe();
        let mut is_failing = false;
        loop {
            tokio::select! {
                () = tokio::time::sleep(INTERVAL) => {}
                // The sender lives as long as `self`.
                _ = lost.wait_for(Option::is_some) => {}
            }
            match self.confirm().await {
                Ok(()) => {
                    is_failing = false;
                    metrics.lease_heartbeats.inc();
                }
                Err(error @ (RoleError::Leased(_) | RoleError::Superseded)) => {
                    metrics.lost_leases.inc();
                    return error;
                }
                Err(error) => {
                    metrics.failed_heartbeats.inc();
                    if !std::mem::replace(&mut is_failing, true) {
                        let warning = format!("the lease on spec.checkpoint.path cannot be renewed: {error}");
                        warn_all(events, [warning]);
                    }
                }
            }
        }
    }

    /// Releases the lease at the end of the job.
    pub(super) async fn release(&self) {
        if let Err(error) = self.lease.lock().await.release().await {
            tracing::warn!(%error, "the lease on the checkpoint path cannot be released: it expires");
        }
    }
}

/// Releases a local lease when the coordinator stops without an end of the job.
pub(super) struct ReleaseOnDrop(pub(super) Option<Arc<PathLease>>);

impl Drop for ReleaseOnDrop {
    fn drop(&mut self) {
        if let Some(lease) = &self.0
            && let Ok(mut lease) = lease.lease.try_lock()
        {
            lease.release_now();
        }
    }
}

fn refused(error: CheckpointError) -> RoleError {
    match error {
        CheckpointError::Leased { .. } => RoleError::Leased(format!("spec.checkpoint.path: {error}")),
        CheckpointError::Replaced { .. } => RoleError::Superseded,
        error => RoleError::Checkpoint(Box::new(error)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::UNIX_EPOCH;

    use rectrain_protocol::metrics::RoleMetrics;

    use super::*;

    /// A clock that only the test moves, in seconds.
    #[derive(Debug, Default)]
    struct SetClock(AtomicU64);

    impl Clock for SetClock {
        fn now(&self) -> SystemTime {
            UNIX_EPOCH + Duration::from_secs(1_000_000 + self.0.load(Ordering::Relaxed))
        }
    }

    impl SetClock {
        fn advance(&self, seconds: u64) {
            self.0.fetch_add(seconds, Ordering::Relaxed);
        }
    }

    struct Two {
        _folder: tempfile::TempDir,
        directory: Directory,
        clock: Arc<SetClock>,
        events: EventLog,
        metrics: CoordinatorMetrics,
        a: Arc<PathLease>,
        b: Arc<PathLease>,
    }

    /// Two runs, `a` and `b`, with one path and one clock.
    fn two() -> Two {
        let folder = tempfile::tempdir().unwrap();
        let directory = Directory::open(folder.path().to_str().unwrap(), &BTreeMap::new(), true).unwrap();
        let clock = Arc::new(SetClock::default());
        let lease = |run: &str| PathLease::with_clock(&directory, run, "job", Arc::clone(&clock) as Arc<dyn Clock>);
        let metrics = CoordinatorMetrics::of(&RoleMetrics::new(prometheus::Registry::new()).unwrap(), 0);
        let (a, b) = (lease("a"), lease("b"));
        Two { _folder: folder, directory, clock, events: EventLog::default(), metrics, a, b }
    }

    #[tokio::test]
    async fn a_lease_that_is_renewed_does_not_expire() {
        let two = two();
        two.a.acquire(&two.events).await.unwrap();
        for _ in 0..20 {
            two.clock.advance(5);
            assert!(two.b.acquire(&two.events).await.unwrap_err().is_user_error());
            two.a.confirm().await.unwrap();
        }
        assert!(two.events.after(0, usize::MAX).is_empty());
    }

    #[tokio::test]
    async fn a_run_whose_lease_is_taken_stops_with_the_reason() {
        let two = two();
        two.a.acquire(&two.events).await.unwrap();
        // `a` is suspended for as long as the lease lasts.
        two.clock.advance(30);
        two.b.acquire(&two.events).await.unwrap();
        let told = format!("{:?}", two.events.after(0, usize::MAX));
        assert!(told.contains("has expired and was taken over from run a of job"), "{told}");
        let error = two.a.confirm().await.unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("run b of job `job`"), "{error}");
        let error = two.a.keep(&two.events, &two.metrics).await;
        assert!(error.to_string().starts_with("spec.checkpoint.path: "), "{error}");
        assert_eq!((two.metrics.lost_leases.get(), two.metrics.lease_heartbeats.get()), (1, 0));
        two.a.release().await;
        two.b.confirm().await.unwrap();
    }

    #[tokio::test]
    async fn a_lease_lost_to_the_same_run_supersedes_the_coordinator() {
        let two = two();
        two.a.acquire(&two.events).await.unwrap();
        let replacement = PathLease::with_clock(&two.directory, "a", "job", Arc::clone(&two.clock) as Arc<dyn Clock>);
        replacement.acquire(&two.events).await.unwrap();
        assert!(matches!(two.a.confirm().await, Err(RoleError::Superseded)));
        assert!(matches!(two.a.keep(&two.events, &two.metrics).await, RoleError::Superseded));
        assert_eq!(two.metrics.lost_leases.get(), 1);
        replacement.confirm().await.unwrap();
    }

    #[tokio::test]
    async fn a_dropped_coordinator_releases_a_local_lease() {
        let two = two();
        two.a.acquire(&two.events).await.unwrap();
        drop(ReleaseOnDrop(Some(Arc::clone(&two.a))));
        two.b.acquire(&two.events).await.unwrap();
        assert!(two.a.confirm().await.is_err(), "a writer that still runs does not take it back");
        two.b.confirm().await.unwrap();
    }
}
