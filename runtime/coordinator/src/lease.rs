//! Keeps the lease on the job's checkpoint path while the coordinator runs.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rectrain_checkpoint::{Acquired, CheckpointError, Claim, Lease};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::EventLog;
use rectrain_storage::Directory;
use tokio::sync::{Mutex, watch};

use super::warn_all;

/// The time between two heartbeats.
const INTERVAL: Duration = Duration::from_secs(5);

/// The lease, shared by the renewals and the writes of checkpoints.
#[derive(Debug)]
pub(super) struct PathLease {
    lease: Mutex<Lease>,
    interval: Duration,
    /// Why this run must not write any more.
    lost: watch::Sender<Option<String>>,
}

impl PathLease {
    pub(super) fn new(directory: &Directory, run: &str, job: &str) -> Arc<Self> {
        Self::with_interval(directory, run, job, INTERVAL)
    }

    fn with_interval(directory: &Directory, run: &str, job: &str, interval: Duration) -> Arc<Self> {
        let claim = Claim { run: run.to_owned(), job: job.to_owned(), interval };
        let lease = Mutex::new(Lease::new(directory.clone(), claim));
        Arc::new(Self { lease, interval, lost: watch::Sender::new(None) })
    }

    /// Gets the lease before anything is trained.
    ///
    /// # Errors
    /// [`RoleError::Input`] if another run has it, and [`RoleError::Checkpoint`] if the storage fails.
    pub(super) async fn acquire(&self, events: &EventLog) -> Result<(), RoleError> {
        match self.lease.lock().await.acquire(SystemTime::now()).await.map_err(refused)? {
            Acquired::Free => {}
            Acquired::Ended(by) => tracing::info!("took over the lease on the checkpoint path from {by}: it has ended"),
            Acquired::Expired(by) => {
                warn_all(
                    events,
                    [format!("the lease on spec.checkpoint.path has expired and was taken over from {by}")],
                );
            }
        }
        Ok(())
    }

    /// Checks that this run still has the lease, and renews it.
    ///
    /// # Errors
    /// [`RoleError::Input`] if another process has it. [`Self::keep`] then ends, too. Otherwise
    /// [`RoleError::Checkpoint`] if the storage fails.
    pub(super) async fn confirm(&self) -> Result<(), RoleError> {
        if let Some(reason) = &*self.lost.borrow() {
            return Err(RoleError::Input(reason.clone()));
        }
        let renewed = self.lease.lock().await.renew(SystemTime::now()).await.map_err(refused);
        if let Err(RoleError::Input(reason)) = &renewed {
            self.lost.send_replace(Some(reason.clone()));
        }
        renewed
    }

    /// Renews the lease until another process has it. Returns the error that ends this run.
    pub(super) async fn keep(&self, events: &EventLog) -> RoleError {
        let mut lost = self.lost.subscribe();
        let mut is_failing = false;
        loop {
            tokio::select! {
                () = tokio::time::sleep(self.interval) => {}
                // The sender lives as long as `self`.
                _ = lost.wait_for(Option::is_some) => {}
            }
            match self.confirm().await {
                Ok(()) => is_failing = false,
                Err(error @ RoleError::Input(_)) => return error,
                Err(error) => {
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
        CheckpointError::Leased { .. } => RoleError::Input(format!("spec.checkpoint.path: {error}")),
        error => RoleError::Checkpoint(Box::new(error)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn lease(folder: &tempfile::TempDir, run: &str) -> Arc<PathLease> {
        let directory = Directory::open(folder.path().to_str().unwrap(), &BTreeMap::new(), true).unwrap();
        PathLease::with_interval(&directory, run, "job", Duration::from_millis(10))
    }

    #[tokio::test]
    async fn a_lease_that_is_kept_does_not_expire() {
        let (folder, events) = (tempfile::tempdir().unwrap(), EventLog::default());
        let (a, b) = (lease(&folder, "a"), lease(&folder, "b"));
        a.acquire(&events).await.unwrap();
        let trying = async {
            let mut refused = 0;
            for _ in 0..20 {
                tokio::time::sleep(Duration::from_millis(10)).await;
                refused += usize::from(b.acquire(&events).await.is_err_and(|error| error.is_user_error()));
            }
            refused
        };
        tokio::select! {
            // A machine that stands still for 60 ms lets the lease expire.
            error = a.keep(&events) => assert!(error.to_string().contains("run b of job"), "{error}"),
            refused = trying => assert_eq!(refused, 20),
        }
    }

    #[tokio::test]
    async fn a_run_whose_lease_is_taken_stops_with_the_reason() {
        let (folder, events) = (tempfile::tempdir().unwrap(), EventLog::default());
        let (a, b) = (lease(&folder, "a"), lease(&folder, "b"));
        a.acquire(&events).await.unwrap();
        // `a` is suspended for longer than the lease lasts.
        tokio::time::sleep(Duration::from_millis(100)).await;
        b.acquire(&events).await.unwrap();
        let told = events.after(0, usize::MAX);
        assert!(format!("{told:?}").contains("has expired and was taken over from run a of job"), "{told:?}");
        let error = a.confirm().await.unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("run b of job `job`"), "{error}");
        let error = tokio::time::timeout(Duration::from_secs(20), a.keep(&events)).await.unwrap();
        assert!(error.to_string().starts_with("spec.checkpoint.path: "), "{error}");
        a.release().await;
        b.confirm().await.unwrap();
    }

    #[tokio::test]
    async fn a_dropped_coordinator_releases_a_local_lease() {
        let (folder, events) = (tempfile::tempdir().unwrap(), EventLog::default());
        let (a, b) = (lease(&folder, "a"), lease(&folder, "b"));
        a.acquire(&events).await.unwrap();
        drop(ReleaseOnDrop(Some(Arc::clone(&a))));
        b.acquire(&events).await.unwrap();
        assert!(a.confirm().await.is_err(), "a writer that still runs does not take it back");
        b.confirm().await.unwrap();
    }
}
