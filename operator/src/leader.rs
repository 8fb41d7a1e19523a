//! Which of the operator's instances reconciles: the holder of a Lease. The others stand by with nothing but this question open.

use std::time::{Duration, SystemTime};

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder, LeaseManagerError};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

/// The Lease, in the operator's namespace.
pub const LEASE: &str = "rectrain-operator";
/// Seconds for which the lease of an instance that is gone still holds: the longest time without a leader.
const DURATION: u64 = 12;
/// Seconds before its end at which a lease is renewed.
const GRACE: u64 = 5;
/// Between two looks of a leader at its own lease.
const LOOK: Duration = Duration::from_secs(3);

/// A candidacy; dropped, the lease is given back at once.
pub struct Candidate {
    lease: Api<Lease>,
    identity: String,
    leads: watch::Receiver<bool>,
    task: JoinHandle<Result<LeaseManager, LeaseManagerError>>,
}

impl Candidate {
    /// Stands for election.
    ///
    /// # Errors
    /// If the Lease can neither be read nor made.
    pub async fn new(client: Client, namespace: &str, identity: &str) -> Result<Self, LeaseManagerError> {
        let lease = Api::namespaced(client.clone(), namespace);
        let manager = LeaseManagerBuilder::new(client, LEASE)
            .with_namespace(namespace)
            .with_identity(identity)
            .with_field_manager(identity)
            .with_duration(DURATION)
            .with_grace(GRACE)
            .build()
            .await?;
        let (leads, task) = manager.watch().await;
        Ok(Self { lease, identity: identity.to_owned(), leads, task })
    }

    /// Returns once this instance leads.
    pub async fn elected(&mut self) {
        self.until(true).await;
    }

    /// Returns once this instance does not lead any more: another one does, or may, because the lease could not be renewed for as long as
    /// it holds. Who is cut off from the API server may still reach coordinators, and must not tell them what nobody else knows of.
    pub async fn deposed(&mut self) {
        let (lease, identity) = (self.lease.clone(), self.identity.clone());
        let look = || renewed(&lease, &identity);
        tokio::select! {
            () = self.until(false) => {}
            () = runs_out(look, LOOK, Duration::from_secs(DURATION)) => {}
        }
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

/// When this instance last renewed the lease; none if that cannot be known, or somebody else has it.
async fn renewed(lease: &Api<Lease>, identity: &str) -> Option<SystemTime> {
    let spec = lease.get(LEASE).await.ok()?.spec?;
    let is_own = spec.holder_identity.as_deref() == Some(identity);
    spec.renew_time.filter(|_| is_own).map(|time| time.0.into())
}

/// Returns once the lease has run out as far as this instance knows: no look has found a renewal that still holds.
async fn runs_out<Look: Future<Output = Option<SystemTime>>>(
    look: impl Fn() -> Look,
    every: Duration,
    holds: Duration,
) {
    let mut end = Instant::now() + holds;
    loop {
        tokio::time::sleep_until(end.min(Instant::now() + every)).await;
        match tokio::time::timeout_at(end, look()).await {
            // Its age is by the clock that it was written by.
            Ok(Some(renewed)) => {
                let age = SystemTime::now().duration_since(renewed).unwrap_or_default();
                end = end.max(Instant::now() + holds.saturating_sub(age));
            }
            Ok(None) => {}
            Err(_) => return,
        }
        if Instant::now() >= end {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const HOLDS: Duration = Duration::from_secs(2);

    async fn looks_until_it_runs_out(looks: impl Fn(u32) -> Option<SystemTime>) -> u32 {
        let count = AtomicU32::new(0);
        let look = || {
            let answer = looks(count.fetch_add(1, Ordering::Relaxed));
            async move { answer }
        };
        let runs_out = runs_out(look, HOLDS / 10, HOLDS);
        tokio::time::timeout(Duration::from_secs(20), runs_out).await.expect("it runs out");
        count.into_inner()
    }

    #[tokio::test]
    async fn a_lease_that_nobody_finds_renewed_runs_out() {
        assert!(looks_until_it_runs_out(|_| None).await <= 11);
        let begun = SystemTime::now();
        assert!(looks_until_it_runs_out(|_| Some(begun)).await <= 11, "it is always the same renewal");
    }

    #[tokio::test]
    async fn a_lease_that_is_renewed_holds() {
        let begun = Instant::now();
        let looks = looks_until_it_runs_out(|look| (look < 8).then(SystemTime::now)).await;
        assert!(looks > 8 && begun.elapsed() >= HOLDS / 10 * 8 + HOLDS / 2, "{looks} looks, {:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn a_look_that_gets_no_answer_keeps_nobody_in_the_lead() {
        let begun = Instant::now();
        runs_out(std::future::pending, HOLDS / 10, HOLDS).await;
        assert!(begun.elapsed() >= HOLDS);
    }
}
