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
/// The first third of a lease is at rest.
const TIMES: Times = Times { holds: 12, grace: 8 };
/// Looks of a leader at its own lease while that holds.
const LOOKS: u32 = 4;
/// After a call for the lease that has failed. Not longer with each: a lease runs out meanwhile.
const RETRY: Duration = Duration::from_millis(500);

/// In seconds.
#[derive(Clone, Copy)]
struct Times {
    /// For which the lease of an instance that is gone still holds: the longest time without a leader.
    holds: u64,
    /// Before its end at which a lease is renewed: what a leader has to get through with it.
    grace: u64,
}

/// A candidacy; dropped, the lease is given back at once.
pub struct Candidate {
    lease: Api<Lease>,
    identity: String,
    holds: Duration,
    leads: watch::Receiver<bool>,
    task: JoinHandle<Result<(), LeaseManagerError>>,
}

impl Candidate {
    /// Stands for election.
    ///
    /// # Errors
    /// If the Lease can neither be read nor made.
    pub async fn new(client: Client, namespace: &str, identity: &str) -> Result<Self, LeaseManagerError> {
        Self::with(client, namespace, identity, TIMES).await
    }

    async fn with(
        client: Client,
        namespace: &str,
        identity: &str,
        Times { holds, grace }: Times,
    ) -> Result<Self, LeaseManagerError> {
        let lease = Api::namespaced(client.clone(), namespace);
        let manager = LeaseManagerBuilder::new(client, LEASE)
            .with_namespace(namespace)
            .with_identity(identity)
            .with_field_manager(identity)
            .with_duration(holds)
            .with_grace(grace)
            .build()
            .await?;
        let (tell, leads) = watch::channel(false);
        let task = tokio::spawn(keep(manager, tell));
        Ok(Self { lease, identity: identity.to_owned(), holds: Duration::from_secs(holds), leads, task })
    }

    /// Returns once this instance leads.
    pub async fn elected(&mut self) {
        self.until(true).await;
    }

    /// Returns once this instance does not lead any more: another one does, or may, because the lease could not be renewed for as long as
    /// it holds. Who is cut off from the API server may still reach coordinators, and must not tell them what nobody else knows of.
    pub async fn deposed(&mut self) {
        let (lease, identity, holds) = (self.lease.clone(), self.identity.clone(), self.holds);
        let look = || renewed(&lease, &identity);
        tokio::select! {
            () = self.until(false) => {}
            () = runs_out(look, holds / LOOKS, holds) => {}
        }
    }

    async fn until(&mut self, leads: bool) {
        // The keeper ends only after this receiver.
        if self.leads.wait_for(|now| *now == leads).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Gives the lease back, so that another instance takes over at once.
    pub async fn resign(self) {
        drop(self.leads);
        match self.task.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "the lease could not be given back"),
            Err(error) => tracing::warn!(%error, "the lease's keeper ended unexpectedly"),
        }
    }
}

/// Takes the lease whenever it can be had, renews it, and tells of both until nobody listens; then it gives the lease back. (The manager's
/// own loop waits longer after each failed call, up to half a minute, and begins anew only with another leader: after a few in the months
/// of a leader's life the next one would cost the lease.)
async fn keep(manager: LeaseManager, tell: watch::Sender<bool>) -> Result<(), LeaseManagerError> {
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
            Err(error) => {
                tracing::warn!(%error, "a call for the lease failed");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
    manager.release().await
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
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Mutex};

    use http::{Method, Request, Response};
    use kube::client::Body;
    use serde_json::{Value, json};

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

    /// An API server that has one lease. Of its changes, each second one fails.
    fn server_with_hiccups() -> (Client, Arc<AtomicU32>) {
        let lease = Arc::new(Mutex::new(json!({"metadata": {"name": LEASE}, "spec": {}})));
        let changes = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&changes);
        let service = tower::service_fn(move |request: Request<Body>| {
            let (lease, changes) = (Arc::clone(&lease), Arc::clone(&counted));
            async move {
                let is_change = request.method() == Method::PATCH;
                let body = request.into_body().collect_bytes().await.expect("a body");
                if is_change && changes.fetch_add(1, Ordering::Relaxed) % 2 == 1 {
                    let failed = json!({"kind": "Status", "status": "Failure", "code": 500, "reason": "InternalError", "message": "hiccup"});
                    return Ok::<_, Infallible>(answer(500, &failed));
                }
                let mut lease = lease.lock().expect("nobody panics");
                if is_change {
                    let patch: Value = serde_json::from_slice(&body).expect("JSON");
                    let changed = patch["spec"].as_object().expect("a spec").clone();
                    lease["spec"].as_object_mut().expect("a spec").extend(changed);
                }
                Ok(answer(200, &lease))
            }
        });
        (Client::new(service, "default"), changes)
    }

    fn answer(code: u16, value: &Value) -> Response<Body> {
        let body = Body::from(value.to_string().into_bytes());
        Response::builder().status(code).body(body).expect("a response")
    }

    #[tokio::test]
    async fn a_leader_whose_calls_fail_now_and_then_leads_for_ever() {
        let (client, changes) = server_with_hiccups();
        let times = Times { holds: 3, grace: 2 };
        let mut candidate = Candidate::with(client, "default", "it", times).await.expect("a candidate");
        tokio::time::timeout(Duration::from_secs(5), candidate.elected()).await.expect("it is elected");
        let before = changes.load(Ordering::Relaxed);
        let deposed = tokio::time::timeout(Duration::from_secs(9), candidate.deposed()).await;
        assert!(deposed.is_err(), "it leads no more after {} changes", changes.load(Ordering::Relaxed) - before);
        // Of which each second one failed.
        assert!(changes.load(Ordering::Relaxed) - before >= 8);
        candidate.resign().await;
    }
}
