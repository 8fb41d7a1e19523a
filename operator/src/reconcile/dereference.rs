//! The first step of a reconcile: everything that has to be read, read. The objects and pods of a job come from watches that select
//! the operator's label, so that a reconcile costs the API server next to nothing; a test lists them instead.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DynamicObject, ListParams};
use kube::{Client, ResourceExt};
use rectrain_crds::RecTrainingJob;

use crate::cache::Caches;
use crate::names::{CONTROL_PORT, JOB_LABEL, Role, of_role};
use crate::pods::PodFacts;
use crate::reconcile::ReconcileError;
use crate::reconcile::kinds::{Kind, Owned};

/// Where objects and pods are read from.
#[derive(Clone)]
pub enum Reader {
    /// From the API server, one list a kind.
    Listed,
    /// From the operator's watches.
    Watched(Arc<Caches>),
}

/// What belongs to a job.
#[derive(Clone, Debug, Default)]
pub struct Belongings {
    /// Its objects.
    pub objects: Vec<Owned>,
    /// Its pods.
    pub pods: Vec<PodFacts>,
}

impl Belongings {
    /// Ready pods of each role, as the StatefulSets count them.
    #[must_use]
    pub fn ready(&self, job: &str) -> BTreeMap<Role, u32> {
        let ready_of = |role: Role| {
            let name = of_role(job, role);
            let set = self.objects.iter().find(|o| o.kind == Kind::StatefulSet && o.name == name)?;
            u32::try_from(set.body["status"]["readyReplicas"].as_u64().unwrap_or(0)).ok()
        };
        Role::ALL.into_iter().filter_map(|role| Some((role, ready_of(role)?))).collect()
    }

    /// The object of this kind and name, if there is one.
    #[must_use]
    pub fn find(&self, kind: Kind, name: &str) -> Option<&Owned> {
        self.objects.iter().find(|object| object.kind == kind && object.name == name)
    }
}

impl Reader {
    /// Waits until everything that is there has been seen once.
    ///
    /// # Errors
    /// If the watches have ended.
    pub async fn ready(&self) -> Result<(), ReconcileError> {
        let Self::Watched(caches) = self else { return Ok(()) };
        let mut are_whole = caches.pods.is_whole().await;
        for objects in caches.objects.values() {
            are_whole &= objects.is_whole().await;
        }
        if are_whole { Ok(()) } else { Err(ReconcileError::Stopped) }
    }

    /// Reads what belongs to `job`.
    ///
    /// # Errors
    /// If the API server does not answer a list.
    pub async fn belongings(&self, client: &Client, job: &RecTrainingJob) -> Result<Belongings, ReconcileError> {
        let (namespace, name) = (job.namespace().unwrap_or_default(), job.name_any());
        let uid = job.uid().unwrap_or_default();
        match self {
            Self::Listed => listed(client, &namespace, &name, &uid).await,
            Self::Watched(caches) => Ok(watched(caches, &namespace, &name, &uid)),
        }
    }
}

async fn listed(client: &Client, namespace: &str, job: &str, uid: &str) -> Result<Belongings, ReconcileError> {
    let of_job = ListParams::default().labels(&format!("{JOB_LABEL}={job}"));
    let mut all = Belongings::default();
    for kind in Kind::ALL {
        let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &kind.resource());
        let list = api.list(&of_job).await.map_err(|source| ReconcileError::List { kind: kind.name(), source })?;
        all.objects.extend(list.items.iter().filter_map(|object| Owned::of(kind, object, uid)));
    }
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let list = pods.list(&of_job).await.map_err(|source| ReconcileError::List { kind: "Pod", source })?;
    all.pods.extend(list.items.iter().filter_map(PodFacts::of).map(|pod| pod.of_job(uid)));
    Ok(all)
}

fn watched(caches: &Caches, namespace: &str, job: &str, uid: &str) -> Belongings {
    let mut all = Belongings::default();
    for (kind, seen) in &caches.objects {
        all.objects.extend(seen.of_job(namespace, job).iter().filter_map(|text| text.owned(*kind, uid)));
    }
    all.pods.extend(caches.pods.of_job(namespace, job).iter().map(|pod| PodFacts::clone(pod).of_job(uid)));
    all
}

/// Where the coordinator of the present attempt is asked, if it runs.
#[must_use]
pub fn coordinator(pods: &[PodFacts], attempt: u32) -> Option<SocketAddr> {
    let pod = pods.iter().find(|pod| pod.role == Role::Coordinator && pod.attempt == attempt && !pod.is_leaving)?;
    let ip: IpAddr = pod.ip.as_ref().filter(|_| pod.is_running)?.parse().ok()?;
    Some(SocketAddr::new(ip, CONTROL_PORT))
}
