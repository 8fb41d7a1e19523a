//! Which of the operator's instances reconciles: the holder of a Lease. The others stand by with nothing but this question open.

use kube::Client;
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder, LeaseManagerError};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// The Lease, in the operator's namespace.
pub const LEASE: &str = "rectrain-operator";
/// Seconds for which the lease of an instance that is gone still holds: the longest time without a leader.
const DURATION: u64 = 12;
/// Seconds before its end at which a lease is renewed.
const GRACE: u64 = 5;

/// A candidacy; dropped, the lease is given back at once.
pub struct Candidate {
    leads: watch::Receiver<bool>,
    task: JoinHandle<Result<LeaseManager, LeaseManagerError>>,
}

impl Candidate {
    /// Stands for election.
    ///
    /// # Errors
    /// If the Lease can neither be read nor made.
    pub async fn new(client: Client, namespace: &str, identity: &str) -> Result<Self, LeaseManagerError> {
        let manager = LeaseManagerBuilder::new(client, LEASE)
            .with_namespace(namespace)
            .with_identity(identity)
            .with_field_manager(identity)
            .with_duration(DURATION)
            .with_grace(GRACE)
            .build()
            .await?;
        let (leads, task) = manager.watch().await;
        Ok(Self { leads, task })
    }

    /// Returns once this instance leads.
    pub async fn elected(&mut self) {
        self.until(true).await;
    }

    /// Returns once this instance does not lead any more.
    pub async fn deposed(&mut self) {
        self.until(false).await;
    }

    async fn until(&mut self, leads: bool) {
        // The manager ends only after this receiver.
        if self.leads.wait_for(|now| *now == leads).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Gives the lease back, so that another instance takes over at once.
    pub async fn resign(self) {
        drop(self.leads);
        match self.task.await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the lease could not be given back"),
            Err(error) => tracing::warn!(%error, "the lease's keeper ended unexpectedly"),
        }
    }
}
