//! Reads the objects and pods of a job. They come from watches that select the operator's label, so
//! that a reconcile costs the API server next to nothing. Tests list them instead.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DynamicObject, ListParams};
use kube::{Client, ResourceExt};
use kube_runtime::reflector::Store;
use rectrain_crds::{RecTrainingJob, Role};

use super::error::ReconcileError;
use crate::cache::Caches;
use crate::names::{CONTROL_PORT, JOB_LABEL, JobName, of_role};
use crate::objects::{Kind, Owned};
use crate::pods::PodFacts;

/// A source of objects and pods.
#[derive(Clone)]
pub enum Reader {
    /// The API server, with one list per kind.
    Listed,
    /// The operator's watches.
    Watched {
        /// The objects of jobs.
        caches: Arc<Caches>,
        /// The jobs.
        jobs: Store<RecTrainingJob>,
    },
}

/// The objects and pods of a job.
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
    /// Waits until every watch has its first complete list.
    ///
    /// # Errors
    /// If the watches have ended.
    pub async fn ready(&self) -> Result<(), ReconcileError> {
        let Self::Watched { caches, .. } = self else { return Ok(()) };
        let mut are_complete = caches.pods.is_complete().await;
        for objects in caches.objects.values() {
            are_complete &= objects.is_complete().await;
        }
        if are_complete { Ok(()) } else { Err(ReconcileError::Stopped) }
    }

    /// Reads the objects and pods of `job`.
    ///
    /// # Errors
    /// If the API server refuses a list.
    pub async fn belongings(&self, client: &Client, job: &RecTrainingJob) -> Result<Belongings, ReconcileError> {
        let (name, uid) = (JobName::of(job), job.uid().unwrap_or_default());
        match self {
            Self::Listed => listed(client, &name, &uid).await,
            Self::Watched { caches, .. } => Ok(watched(caches, &name, &uid)),
        }
    }

    /// All jobs of a namespace.
    ///
    /// # Errors
    /// If the API server refuses the list.
    pub async fn jobs(&self, client: &Client, namespace: &str) -> Result<Vec<Arc<RecTrainingJob>>, ReconcileError> {
        match self {
            Self::Listed => {
                let jobs: Api<RecTrainingJob> = Api::namespaced(client.clone(), namespace);
                let list = jobs.list(&ListParams::default()).await;
                let list = list.map_err(|source| ReconcileError::List { kind: "RecTrainingJob", source })?;
                Ok(list.items.into_iter().map(Arc::new).collect())
            }
            Self::Watched { jobs, .. } => {
                let is_here = |job: &Arc<RecTrainingJob>| job.metadata.namespace.as_deref() == Some(namespace);
                Ok(jobs.state().into_iter().filter(is_here).collect())
            }
        }
    }
}

async fn listed(client: &Client, job: &JobName, uid: &str) -> Result<Belongings, ReconcileError> {
    let JobName { namespace, name } = job;
    let of_job = ListParams::default().labels(&format!("{JOB_LABEL}={name}"));
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

fn watched(caches: &Caches, job: &JobName, uid: &str) -> Belongings {
    let JobName { namespace, name } = job;
    let mut all = Belongings::default();
    for (kind, cache) in &caches.objects {
        all.objects.extend(cache.of_job(namespace, name).iter().filter_map(|text| text.owned(*kind, uid)));
    }
    all.pods.extend(caches.pods.of_job(namespace, name).iter().map(|pod| PodFacts::clone(pod).of_job(uid)));
    all
}

/// The control port of the attempt's coordinator, if it runs.
#[must_use]
pub fn coordinator(pods: &[PodFacts], attempt: u32) -> Option<SocketAddr> {
    let pod = pods.iter().find(|pod| pod.role == Role::Coordinator && pod.attempt == attempt && !pod.is_terminating)?;
    let ip: IpAddr = pod.ip.as_ref().filter(|_| pod.is_running)?.parse().ok()?;
    Some(SocketAddr::new(ip, CONTROL_PORT))
}
