//! Leader election: the instance that holds a Lease reconciles, and the others stand by.

use std::time::{Duration, SystemTime};

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, Client};
use kube_lease_manager::{LeaseManager, LeaseManagerBuilder, LeaseManagerError};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::api_server::is_silent;
use crate::metrics::Loss;

/// The Lease, in the operator's namespace.
pub const LEASE: &str = "rectrain-operator";
/// A lease is renewed after a third of its time.
const TIMES: Times = Times { holds: 12, grace: 8 };
/// Checks of a leader's own lease per lease time.
const LOOKS: u32 = 4;
/// Pause after a failed call. It does not grow, because the lease expires meanwhile.
const RETRY: Duration = Duration::from_millis(500);

/// Times of a lease in seconds.
#[derive(Clone, Copy)]
struct Times {
    /// Time for which a lease holds. After the death of a leader this is the longest time without
    /// one.
    holds: u64,
    /// Time before its expiry at which the leader renews it: the longest outage that a leader
    /// survives.
    grace: u64,
}

/// Whether the API server did not answer, so the same call may succeed later.
#[must_use]
pub fn is_silence(error: &LeaseManagerError) -> bool {
    matches!(error, LeaseManagerError::KubeError(error) if is_silent(error))
}

/// The parameters of the lease, from which its manager is built.
#[derive(Clone)]
struct Membership {
    client: Client,
    namespace: String,
    identity: String,
    times: Times,
}

impl Membership {
    /// Creates the Lease if it does not exist.
    async fn manager(&self) -> Result<LeaseManager, LeaseManagerError> {
        LeaseManagerBuilder::new(self.client.clone(), LEASE)
            .with_namespace(&self.namespace)
            .with_identity(&self.identity)
            .with_field_manager(&self.identity)
            .with_duration(self.times.holds)
            .with_grace(self.times.grace)
            .build()
            .await
    }
}

/// A candidate of the election. Dropping it releases the lease at once.
pub struct Candidate {
    lease: Api<Lease>,
    identity: String,
    holds: Duration,
    leads: watch::Receiver<bool>,
    task: JoinHandle<Result<(), LeaseManagerError>>,
}

impl Candidate {
    /// Joins the election.
    ///
    /// # Errors
    /// If the Lease can neither be read nor created.
    pub async fn new(client: Client, namespace: &str, identity: &str) -> Result<Self, LeaseManagerError> {
        Self::with(client, namespace, identity, TIMES).await
    }

    async fn with(client: Client, namespace: &str, identity: &str, times: Times) -> Result<Self, LeaseManagerError> {
        let lease = Api::namespaced(client.clone(), namespace);
        let (namespace, identity) = (namespace.to_owned(), identity.to_owned());
        let membership = Membership { client, namespace, identity: identity.clone(), times };
        let manager = membership.manager().await?;
        let (tell, leads) = watch::channel(false);
        let task = tokio::spawn(keep(membership, manager, tell));
        Ok(Self { lease, identity, holds: Duration::from_secs(times.holds), leads, task })
    }

    /// Returns once this instance leads. The lease is read to confirm it: after a silence of the
    /// API server, the lease may have expired without a report of its loss.
    pub async fn elected(&mut self) {
        loop {
            self.until(true).await;
            let renewed = tokio::time::timeout(self.holds, renewed(&self.lease, &self.identity)).await;
            let age = renewed.ok().flatten().map(|time| SystemTime::now().duration_since(time).unwrap_or_default());
            if age.is_some_and(|age| age < self.holds) {
                return;
            }
            tokio::time::sleep((self.holds / LOOKS).min(RETRY)).await;
        }
    }

    /// Returns once this instance has stopped to lead: another one leads, or may lead, because the
    /// lease was not renewed in time. An instance that is cut off from the API server may still
    /// reach coordinators, and must not send them requests that no status records.
    ///
    /// The candidate stays in the election: [`Candidate::elected`] waits for the next time.
    pub async fn deposed(&mut self) -> Loss {
        let (lease, identity, holds) = (self.lease.clone(), self.identity.clone(), self.holds);
        let look = || renewed(&lease, &identity);
        tokio::select! {
            () = self.until(false) => Loss::Taken,
            () = expires(look, holds / LOOKS, holds) => Loss::Silent,
        }
    }

    async fn until(&mut self, leads: bool) {
        // The sender lives longer than this receiver.
        if self.leads.wait_for(|now| *now == leads).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Releases the lease, so that another instance takes over at once.
    pub async fn resign(self) {
        drop(self.leads);
        match self.task.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the lease could not be released"),
            Err(error) => tracing::warn!(%error, "the task that keeps the lease ended unexpectedly"),
        }
    }
}

/// Acquires and renews the lease, and reports whether this instance leads, until the candidate is
/// dropped. Then it releases the lease.
///
/// The manager has a loop of its own, but its back-off grows after each failed call and is reset
/// only by another leader. After a few failures in months the next one would cost the lease.
///
/// A manager whose Lease was deleted never creates it again, so another manager replaces it.
async fn keep(
    membership: Membership,
    mut manager: LeaseManager,
    tell: watch::Sender<bool>,
) -> Result<(), LeaseManagerError> {
    loop {
        let changed = tokio::select! {
            biased;
            () = tell.closed() => break,
            changed = manager.changed() => changed,
        };
        match changed {
            Ok(leads) => {
                tell.send_replace(leads);
            }
            Err(LeaseManagerError::NonexistentLease(_)) => {
                tracing::warn!("the Lease {LEASE} was deleted and is created again");
                tell.send_replace(false);
                match membership.manager().await {
                    Ok(new) => manager = new,
                    Err(error) => tracing::warn!(%error, "the Lease {LEASE} cannot be created"),
                }
                tokio::time::sleep(RETRY).await;
            }
            Err(error) => {
                tracing::warn!(%error, "a call for the lease failed");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
    manager.release().await
}

/// When this instance last renewed the lease. `None` if that is unknown, or if another instance
/// holds it.
async fn renewed(lease: &Api<Lease>, identity: &str) -> Option<SystemTime> {
    let spec = lease.get(LEASE).await.ok()?.spec?;
    let is_own = spec.holder_identity.as_deref() == Some(identity);
    spec.renew_time.filter(|_| is_own).map(|time| time.0.into())
}

/// Returns once the lease has expired to the knowledge of this instance: no look has found a
/// renewal that still holds.
async fn expires<Look: Future<Output = Option<SystemTime>>>(look: impl Fn() -> Look, every: Duration, holds: Duration) {
    let mut end = Instant::now() + holds;
    loop {
        tokio::time::sleep_until(end.min(Instant::now() + every)).await;
        match tokio::time::timeout_at(end, look()).await {
            // This instance's own clock wrote the time.
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
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use http::{Method, Request, Response};
    use kube::client::Body;
    use parking_lot::Mutex;
    use serde_json::{Value, json};

    use super::*;

    const HOLDS: Duration = Duration::from_secs(2);

    async fn looks_until_it_expires(looks: impl Fn(u32) -> Option<SystemTime>) -> u32 {
        let count = AtomicU32::new(0);
        let look = || {
            let answer = looks(count.fetch_add(1, Ordering::Relaxed));
            async move { answer }
        };
        let expires = expires(look, HOLDS / 10, HOLDS);
        tokio::time::timeout(Duration::from_secs(20), expires).await.expect("it expires");
        count.into_inner()
    }

    #[tokio::test]
    async fn a_lease_without_a_renewal_expires() {
        assert!(looks_until_it_expires(|_| None).await <= 11);
        let begun = SystemTime::now();
        assert!(looks_until_it_expires(|_| Some(begun)).await <= 11, "it is always the same renewal");
    }

    #[tokio::test]
    async fn a_lease_that_is_renewed_holds() {
        let begun = Instant::now();
        let looks = looks_until_it_expires(|look| (look < 8).then(SystemTime::now)).await;
        assert!(looks > 8 && begun.elapsed() >= HOLDS / 10 * 8 + HOLDS / 2, "{looks} looks, {:?}", begun.elapsed());
    }

    #[tokio::test]
    async fn a_look_without_an_answer_keeps_no_leader() {
        let begun = Instant::now();
        expires(std::future::pending, HOLDS / 10, HOLDS).await;
        assert!(begun.elapsed() >= HOLDS);
    }

    /// An API server with one lease. Every second change of it fails.
    fn server_with_hiccups() -> (Client, Arc<AtomicU32>) {
        let lease = Arc::new(Mutex::new(json!({"metadata": {"name": LEASE}, "spec": {}})));
        let changes = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&changes);
        let service = tower::service_fn(move |request: Request<Body>| {
            let (lease, changes) = (Arc::clone(&lease), Arc::clone(&counted));
            async move {
                if request.method() == Method::PATCH && changes.fetch_add(1, Ordering::Relaxed) % 2 == 1 {
                    let failed = json!({"kind": "Status", "status": "Failure", "code": 500, "reason": "InternalError", "message": "hiccup"});
                    return Ok::<_, Infallible>(answer(500, &failed));
                }
                Ok(answer_about(&lease, request).await)
            }
        });
        (Client::new(service, "default"), changes)
    }

    /// Applies a request to the lease if it is a patch, and answers with the lease.
    async fn answer_about(lease: &Mutex<Value>, request: Request<Body>) -> Response<Body> {
        let is_change = request.method() == Method::PATCH;
        let body = request.into_body().collect_bytes().await.expect("a body");
        let mut lease = lease.lock();
        if is_change {
            let patch: Value = serde_json::from_slice(&body).expect("JSON");
            let changed = patch["spec"].as_object().expect("a spec").clone();
            lease["spec"].as_object_mut().expect("a spec").extend(changed);
        }
        answer(200, &lease)
    }

    fn answer(code: u16, value: &Value) -> Response<Body> {
        let body = Body::from(value.to_string().into_bytes());
        Response::builder().status(code).body(body).expect("a response")
    }

    #[tokio::test]
    async fn a_leader_survives_single_failed_calls() {
        let (client, changes) = server_with_hiccups();
        let times = Times { holds: 3, grace: 2 };
        let mut candidate = Candidate::with(client, "default", "it", times).await.expect("a candidate");
        tokio::time::timeout(Duration::from_secs(5), candidate.elected()).await.expect("it is elected");
        let before = changes.load(Ordering::Relaxed);
        let deposed = tokio::time::timeout(Duration::from_secs(9), candidate.deposed()).await;
        assert!(deposed.is_err(), "it stopped to lead after {} changes", changes.load(Ordering::Relaxed) - before);
        // Every second one failed.
        assert!(changes.load(Ordering::Relaxed) - before >= 8);
        candidate.resign().await;
    }

    /// An API server with one lease. While the switch is on, it answers no call, and each fails
    /// after a moment as by a timeout.
    fn server_with_a_switch() -> (Client, Arc<AtomicBool>) {
        let lease = Arc::new(Mutex::new(json!({"metadata": {"name": LEASE}, "spec": {}})));
        let switch = Arc::new(AtomicBool::new(false));
        let is_silent = Arc::clone(&switch);
        let service = tower::service_fn(move |request: Request<Body>| {
            let (lease, is_silent) = (Arc::clone(&lease), is_silent.load(Ordering::Relaxed));
            async move {
                if is_silent {
                    tokio::time::sleep(Duration::from_millis(300)).await;
                    return Err(std::io::Error::from(std::io::ErrorKind::TimedOut));
                }
                Ok(answer_about(&lease, request).await)
            }
        });
        (Client::new(service, "default"), switch)
    }

    #[tokio::test]
    async fn a_leader_waits_out_a_silence_and_leads_again() {
        let (client, is_silent) = server_with_a_switch();
        let times = Times { holds: 2, grace: 1 };
        let mut candidate = Candidate::with(client, "default", "it", times).await.expect("a candidate");
        tokio::time::timeout(Duration::from_secs(5), candidate.elected()).await.expect("it is elected");
        is_silent.store(true, Ordering::Relaxed);
        let deposed = tokio::time::timeout(Duration::from_secs(6), candidate.deposed()).await;
        assert_eq!(deposed, Ok(Loss::Silent), "no other instance has the lease");
        let elected = tokio::time::timeout(Duration::from_secs(2), candidate.elected()).await;
        assert!(elected.is_err(), "it does not lead while the API server is silent");
        is_silent.store(false, Ordering::Relaxed);
        tokio::time::timeout(Duration::from_secs(5), candidate.elected()).await.expect("it is elected again");
        candidate.resign().await;
    }
}
