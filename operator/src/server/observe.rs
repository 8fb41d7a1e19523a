//! Reads everything about a `RecModelServer` from the API server.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DynamicObject, ListParams};
use kube::{Client, ResourceExt};
use rectrain_crds::{RecModelServer, RecTrainingJob};

use crate::names::{self, CANARY_LABEL, JobName, SERVER_LABEL, SERVER_UID_LABEL, STEP_LABEL};
use crate::objects::{Kind, Owned};
use crate::reconcile::error::ReconcileError;

/// The kinds with one object of a known name. A canary has a Deployment of its own.
const NAMED: [Kind; 3] = [Kind::ServiceAccount, Kind::Deployment, Kind::HorizontalPodAutoscaler];
/// The kinds with an object for each shard. They are found by their label, because an earlier
/// manifest may have had more shards. A shard's StatefulSet is deleted last.
const LISTED: [Kind; 4] = [Kind::Service, Kind::NetworkPolicy, Kind::PodDisruptionBudget, Kind::StatefulSet];

/// A pod of a `RecModelServer`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerPod {
    /// Global step of its model, if it is known.
    pub step: Option<u64>,
    /// Whether it answers requests.
    pub is_ready: bool,
    /// Whether it belongs to the canary.
    pub is_canary: bool,
}

impl ServerPod {
    /// The facts about a pod. `None` if it ends, or belongs to another object of the same name.
    #[must_use]
    pub fn of(pod: &Pod, uid: &str) -> Option<Self> {
        let label = |name: &str| pod.labels().get(name);
        if !is_of_server(pod, uid) || pod.metadata.deletion_timestamp.is_some() {
            return None;
        }
        let conditions = pod.status.iter().filter_map(|status| status.conditions.as_ref()).flatten();
        let mut ready = conditions.filter(|condition| condition.type_ == "Ready" && condition.status == "True");
        Some(Self {
            step: label(STEP_LABEL).and_then(|step| step.parse().ok()),
            is_ready: ready.next().is_some(),
            is_canary: label(CANARY_LABEL).is_some(),
        })
    }
}

fn is_of_server(pod: &Pod, uid: &str) -> bool {
    pod.labels().get(SERVER_UID_LABEL).is_some_and(|of| of == uid)
}

/// The time by which all pods that end have ended. `None` if none ends.
fn end_of_pods(pods: &[Pod], uid: &str) -> Option<Timestamp> {
    let own = pods.iter().filter(|pod| is_of_server(pod, uid));
    own.filter_map(|pod| Some(pod.metadata.deletion_timestamp.as_ref()?.0)).max()
}

/// The lowest global step among the servers that answer, without the canary's.
#[must_use]
pub fn served_step(pods: &[ServerPod]) -> Option<u64> {
    pods.iter().filter(|pod| pod.is_ready && !pod.is_canary).filter_map(|pod| pod.step).min()
}

/// Everything about a `RecModelServer`.
#[derive(Debug)]
pub struct Observed {
    /// The object.
    pub server: RecModelServer,
    /// Its uid.
    pub uid: String,
    /// The job of its model, if the job exists.
    pub job: Option<RecTrainingJob>,
    /// Its existing objects.
    pub objects: Vec<Owned>,
    /// Its pods.
    pub pods: Vec<ServerPod>,
    /// The time by which all pods that end have ended. `None` if none ends.
    pub end_of_pods: Option<Timestamp>,
}

impl Observed {
    /// The object of a kind and a name, if it exists.
    #[must_use]
    pub fn find(&self, kind: Kind, name: &str) -> Option<&Owned> {
        self.objects.iter().find(|object| object.kind == kind && object.name == name)
    }
}

/// Reads everything. `None` if the object is gone, or is being deleted.
///
/// # Errors
/// If the API server refuses a call.
pub async fn observe(client: &Client, name: &JobName) -> Result<Option<Observed>, ReconcileError> {
    let servers: Api<RecModelServer> = Api::namespaced(client.clone(), &name.namespace);
    let server = servers.get_opt(&name.name).await.map_err(ReconcileError::Get)?;
    let Some(server) = server.filter(|server| server.metadata.deletion_timestamp.is_none()) else { return Ok(None) };
    let uid = server.uid().unwrap_or_default();
    let job = Box::pin(job(client, &name.namespace, server.spec.model.job.as_deref())).await?;
    let objects = objects(client, name, &uid).await?;
    let all = pods(client, name).await?;
    let pods = all.iter().filter_map(|pod| ServerPod::of(pod, &uid)).collect();
    let end_of_pods = end_of_pods(&all, &uid);
    Ok(Some(Observed { server, uid, job, objects, pods, end_of_pods }))
}

async fn job(client: &Client, namespace: &str, name: Option<&str>) -> Result<Option<RecTrainingJob>, ReconcileError> {
    let Some(name) = name else { return Ok(None) };
    let jobs: Api<RecTrainingJob> = Api::namespaced(client.clone(), namespace);
    jobs.get_opt(name).await.map_err(ReconcileError::Get)
}

async fn objects(client: &Client, name: &JobName, uid: &str) -> Result<Vec<Owned>, ReconcileError> {
    let mut all = Vec::new();
    let api = |kind: Kind| Api::<DynamicObject>::namespaced_with(client.clone(), &name.namespace, &kind.resource());
    let failed = |kind: Kind| move |source| ReconcileError::List { kind: kind.name(), source };
    let of_server = NAMED.map(|kind| (kind, names::of_server(&name.name)));
    let of_canary = (Kind::Deployment, names::of_canary(&name.name));
    for (kind, object) in of_server.into_iter().chain([of_canary]) {
        let object = api(kind).get_opt(&object).await.map_err(failed(kind))?;
        all.extend(object.and_then(|object| Owned::of(kind, &object, uid)));
    }
    for kind in LISTED {
        let list = api(kind).list(&of(name)).await.map_err(failed(kind))?;
        all.extend(list.items.iter().filter_map(|object| Owned::of(kind, object, uid)));
    }
    Ok(all)
}

/// Selects everything with the label of a `RecModelServer`.
fn of(server: &JobName) -> ListParams {
    ListParams::default().labels(&format!("{SERVER_LABEL}={}", server.name))
}

async fn pods(client: &Client, name: &JobName) -> Result<Vec<Pod>, ReconcileError> {
    let api: Api<Pod> = Api::namespaced(client.clone(), &name.namespace);
    let list = api.list(&of(name)).await.map_err(|source| ReconcileError::List { kind: "Pod", source })?;
    Ok(list.items)
}
