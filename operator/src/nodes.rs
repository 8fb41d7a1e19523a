//! The load of the nodes with a job's pods, as an early warning of slow workers (GBA, §3.2, figure
//! 1). It is the pressure, and the CPU that other pods use of the part that the job has not
//! requested. The job's own use is no warning, since dense workers use all CPU that they get.
//!
//! CPU in use comes from the resource metrics API (metrics-server; GKE has it), and pressure from
//! the nodes' conditions. Without the API, or without the right to read nodes, less is known and
//! nothing fails.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::time::{Duration, Instant};

use futures::future::{BoxFuture, join_all};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::ListParams;
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, Client};
use parking_lot::Mutex;
use rectrain_policy::ClusterLoad;
use serde_json::Value;

use crate::names::JOB_LABEL;
use crate::pods::PodFacts;
use crate::quantity::value_of;

/// Time for which a measurement is used: metrics-server measures every 15 s.
const FRESH: Duration = Duration::from_secs(20);
/// Time after which a missing resource metrics API is tried again.
const ABSENT: Duration = Duration::from_secs(60);
/// Deadline of a request. Decisions do without a late answer.
const DEADLINE: Duration = Duration::from_secs(3);
/// Conditions of a node that report pressure while they are true.
const PRESSURES: [&str; 3] = ["MemoryPressure", "DiskPressure", "PIDPressure"];

/// The state of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct NodeLoad {
    /// Whether it is not ready: its heartbeats are missing, or it reports that it cannot run pods.
    pub is_lost: bool,
    /// Whether it is short of memory, disk or process numbers.
    pub is_under_pressure: bool,
    /// Allocatable cores.
    pub cores: Option<f64>,
    /// Cores in use.
    pub used_cores: Option<f64>,
}

/// A source of the state of nodes.
pub trait ReadNodes: Send + Sync {
    /// A node. `None` if it cannot be read.
    fn node<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Option<NodeLoad>>;
    /// Cores in use by each pod of a job.
    fn used_by_pods<'a>(&'a self, namespace: &'a str, job: &'a str) -> BoxFuture<'a, BTreeMap<String, f64>>;
}

/// No nodes, for an operator with rights in a single namespace.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoNodes;

impl ReadNodes for NoNodes {
    fn node<'a>(&'a self, _name: &'a str) -> BoxFuture<'a, Option<NodeLoad>> {
        Box::pin(async { None })
    }

    fn used_by_pods<'a>(&'a self, _namespace: &'a str, _job: &'a str) -> BoxFuture<'a, BTreeMap<String, f64>> {
        Box::pin(async { BTreeMap::new() })
    }
}

/// The load of the nodes with these pods of a job.
pub async fn cluster_load(nodes: &dyn ReadNodes, namespace: &str, job: &str, pods: &[PodFacts]) -> ClusterLoad {
    let mut on_node: BTreeMap<&str, Vec<&PodFacts>> = BTreeMap::new();
    for pod in pods {
        if let Some(node) = &pod.node {
            on_node.entry(node).or_default().push(pod);
        }
    }
    let (used, loads) = futures::join!(
        nodes.used_by_pods(namespace, job),
        join_all(on_node.keys().map(|name| async move { nodes.node(name).await }))
    );
    let known: Vec<_> = on_node.values().zip(loads).filter_map(|(pods, load)| Some((pods, load?))).collect();
    let by_others: Vec<f64> = known.iter().filter_map(|(pods, load)| use_by_others(load, pods, &used)).collect();
    ClusterLoad {
        node_cpu: (!by_others.is_empty()).then(|| by_others.iter().sum::<f64>() / by_others.len() as f64),
        nodes_under_pressure: known.iter().filter(|(_, load)| load.is_under_pressure).count() as u32,
        ..ClusterLoad::default()
    }
}

/// Cores in use by other pods over the cores that `pods` have not requested: 0 to 1. `None` if
/// either is unknown, or if `pods` have requested all cores.
fn use_by_others(load: &NodeLoad, pods: &[&PodFacts], used: &BTreeMap<String, f64>) -> Option<f64> {
    // The use of a new pod is not measured yet, and would count as use by others.
    let own = pods.iter().map(|pod| used.get(&pod.name).copied()).sum::<Option<f64>>()?;
    let left = load.cores? - pods.iter().map(|pod| pod.requested_millicores).sum::<u64>() as f64 / 1e3;
    (left > 0.0).then_some(((load.used_cores? - own).max(0.0) / left).min(1.0))
}

/// Reads the nodes of the operator's cluster.
pub struct ClusterNodes {
    client: Client,
    nodes: Fresh<String, Option<NodeLoad>>,
    pods: Fresh<(String, String), BTreeMap<String, f64>>,
    /// When the resource metrics API was last found missing.
    absent: Mutex<Option<Instant>>,
}

impl ClusterNodes {
    /// A reader of the cluster of `client`.
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client, nodes: Fresh::default(), pods: Fresh::default(), absent: Mutex::default() }
    }

    async fn read_node(&self, name: &str) -> Option<NodeLoad> {
        let nodes: Api<Node> = Api::all(self.client.clone());
        let node = answered(name, nodes.get(name)).await.ok()?;
        let used = match self.has_metrics() {
            true => {
                let metrics: Api<DynamicObject> =
                    Api::all_with(self.client.clone(), &metrics_of("NodeMetrics", "nodes"));
                self.found(answered(name, metrics.get(name)).await)
                    .and_then(|metrics| cores(&metrics.data["usage"]["cpu"]))
            }
            false => None,
        };
        Some(node_load(&node, used))
    }

    async fn read_pods(&self, namespace: &str, job: &str) -> BTreeMap<String, f64> {
        if !self.has_metrics() {
            return BTreeMap::new();
        }
        let metrics: Api<DynamicObject> =
            Api::namespaced_with(self.client.clone(), namespace, &metrics_of("PodMetrics", "pods"));
        let of_job = ListParams::default().labels(&format!("{JOB_LABEL}={job}"));
        let found = self.found(answered(job, metrics.list(&of_job)).await);
        let pods = found.into_iter().flatten();
        pods.filter_map(|pod| Some((pod.metadata.name.clone()?, used_by_pod(&pod.data)?))).collect()
    }

    fn has_metrics(&self) -> bool {
        let absent = *self.absent.lock();
        absent.is_none_or(|since| since.elapsed() > ABSENT)
    }

    /// The answer of the resource metrics API. A missing API is remembered. An object that is too
    /// new to be measured gives 404 as well, but with the reason `NotFound`.
    fn found<T>(&self, found: Result<T, kube::Error>) -> Option<T> {
        if let Err(kube::Error::Api(status)) = &found
            && status.code == 404
            && status.reason != "NotFound"
        {
            *self.absent.lock() = Some(Instant::now());
        }
        found.ok()
    }
}

impl ReadNodes for ClusterNodes {
    fn node<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Option<NodeLoad>> {
        Box::pin(self.nodes.get(name.to_owned(), self.read_node(name)))
    }

    fn used_by_pods<'a>(&'a self, namespace: &'a str, job: &'a str) -> BoxFuture<'a, BTreeMap<String, f64>> {
        Box::pin(self.pods.get((namespace.to_owned(), job.to_owned()), self.read_pods(namespace, job)))
    }
}

/// A cache of recent measurements, for all jobs. Older ones are dropped.
struct Fresh<K, V>(Mutex<HashMap<K, (Instant, V)>>);

impl<K, V> Default for Fresh<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Hash + Eq, V: Clone> Fresh<K, V> {
    async fn get(&self, key: K, read: impl Future<Output = V>) -> V {
        let known = self.0.lock().get(&key).cloned();
        if let Some((_, value)) = known.filter(|(at, _)| at.elapsed() < FRESH) {
            return value;
        }
        let value = read.await;
        let mut known = self.0.lock();
        known.retain(|_, (at, _)| at.elapsed() < FRESH);
        known.insert(key, (Instant::now(), value.clone()));
        value
    }
}

async fn answered<T>(name: &str, asked: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    let answer = match tokio::time::timeout(DEADLINE, asked).await {
        Ok(answer) => answer,
        Err(late) => Err(kube::Error::Service(late.into())),
    };
    if let Err(error) = &answer {
        tracing::debug!(name, %error, "the load of nodes could not be read");
    }
    answer
}

fn metrics_of(kind: &str, plural: &str) -> ApiResource {
    ApiResource {
        group: "metrics.k8s.io".to_owned(),
        version: "v1beta1".to_owned(),
        api_version: "metrics.k8s.io/v1beta1".to_owned(),
        kind: kind.to_owned(),
        plural: plural.to_owned(),
    }
}

fn node_load(node: &Node, used_cores: Option<f64>) -> NodeLoad {
    let status = node.status.as_ref();
    let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let presses = |of: &str| PRESSURES.contains(&of);
    let allocatable = status.and_then(|status| status.allocatable.as_ref()?.get("cpu"));
    NodeLoad {
        is_lost: conditions.iter().any(|one| one.type_ == "Ready" && one.status != "True"),
        is_under_pressure: conditions.iter().any(|one| presses(&one.type_) && one.status == "True"),
        cores: allocatable.and_then(value_of),
        used_cores,
    }
}

/// The cores of all containers of a pod. `None` if one was not measured.
fn used_by_pod(metrics: &Value) -> Option<f64> {
    metrics["containers"].as_array()?.iter().map(|container| cores(&container["usage"]["cpu"])).sum()
}

fn cores(quantity: &Value) -> Option<f64> {
    value_of(&Quantity(quantity.as_str()?.to_owned()))
}

#[cfg(test)]
mod tests {
    use rectrain_crds::Role;

    use super::*;
    use crate::names::{ATTEMPT_LABEL, ROLE_LABEL};

    struct Scripted(BTreeMap<&'static str, NodeLoad>, BTreeMap<String, f64>);

    impl ReadNodes for Scripted {
        fn node<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Option<NodeLoad>> {
            let load = self.0.get(name).copied();
            Box::pin(async move { load })
        }

        fn used_by_pods<'a>(&'a self, _namespace: &'a str, _job: &'a str) -> BoxFuture<'a, BTreeMap<String, f64>> {
            let used = self.1.clone();
            Box::pin(async move { used })
        }
    }

    fn pod(name: &str, node: &str, requested_millicores: u64) -> PodFacts {
        let pod = serde_json::json!({
            "metadata": {"name": name, "labels": {ROLE_LABEL: Role::DenseWorker.name(), ATTEMPT_LABEL: "1"}},
            "spec": {"nodeName": node, "containers": [{"name": "rectrain", "resources": {"requests": {"cpu": format!("{requested_millicores}m")}}}]},
        });
        PodFacts::of(&serde_json::from_value(pod).unwrap()).unwrap()
    }

    fn node(cores: f64, used_cores: f64) -> NodeLoad {
        NodeLoad { cores: Some(cores), used_cores: Some(used_cores), ..NodeLoad::default() }
    }

    fn load(nodes: Scripted, pods: &[PodFacts]) -> ClusterLoad {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(cluster_load(&nodes, "default", "job", pods))
    }

    fn used(pods: &[(&str, f64)]) -> BTreeMap<String, f64> {
        pods.iter().map(|(name, used)| ((*name).to_owned(), *used)).collect()
    }

    #[test]
    fn only_the_use_by_others_of_unrequested_cores_counts() {
        let pods = [pod("a", "x", 2000), pod("b", "x", 2000), pod("c", "y", 4000)];
        let nodes = BTreeMap::from([("x", node(8.0, 7.0)), ("y", node(8.0, 7.5))]);
        let own = used(&[("a", 4.0), ("b", 3.0), ("c", 3.5)]);
        let busy = load(Scripted(nodes.clone(), own), &pods);
        // Others use none of the four cores left on x, and all four on y.
        assert_eq!((busy.node_cpu, busy.nodes_under_pressure), (Some(0.5), 0));
        let unknown = load(Scripted(nodes, used(&[("a", 4.0), ("b", 3.0)])), &pods);
        assert_eq!(unknown.node_cpu, Some(0.0), "the unmeasured use of c does not count as use by others");
    }

    #[test]
    fn an_unknown_load_is_none() {
        let full = load(Scripted(BTreeMap::from([("x", node(4.0, 4.0))]), used(&[("a", 4.0)])), &[pod("a", "x", 4000)]);
        assert_eq!(full.node_cpu, None, "no core is left for others");
        let nothing = load(Scripted(BTreeMap::new(), BTreeMap::new()), &[pod("a", "x", 1000)]);
        assert_eq!(nothing, ClusterLoad::default());
    }

    #[test]
    fn a_node_is_read_from_its_status() {
        let node: Node = serde_json::from_value(serde_json::json!({"status": {
            "allocatable": {"cpu": "3920m"},
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "DiskPressure", "status": "True"}],
        }}))
        .unwrap();
        let expected = NodeLoad { is_lost: false, is_under_pressure: true, cores: Some(3.92), used_cores: Some(1.0) };
        assert_eq!(node_load(&node, Some(1.0)), expected);
        assert_eq!(node_load(&Node::default(), None), NodeLoad::default());
    }

    #[test]
    fn a_pod_uses_the_cores_of_all_its_containers() {
        let pod = serde_json::json!({"containers": [{"usage": {"cpu": "100m"}}, {"usage": {"cpu": "1"}}]});
        assert_eq!(used_by_pod(&pod), Some(1.1));
        assert_eq!(used_by_pod(&serde_json::json!({"containers": [{}]})), None);
    }
}
