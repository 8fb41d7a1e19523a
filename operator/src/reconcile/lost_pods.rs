//! Pods on lost nodes, as after a power cut.
//!
//! Kubernetes marks such pods for deletion, and waits for the node to confirm their end. The
//! StatefulSet creates no replacement before. A cloud removes the node after some minutes;
//! elsewhere an administrator has to. So the operator deletes a pod whose grace period is over on a
//! node that is not ready.
//!
//! A pod that still runs behind a cut network does no harm: members address incarnations, and an
//! old incarnation gets no answer.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DeleteParams, Preconditions};

use super::error::ReconcileError;
use crate::nodes::ReadNodes;
use crate::pods::PodFacts;

/// Time that a healthy node may need after a pod's grace period to confirm its end.
const MARGIN: Duration = Duration::from_secs(10);

/// Pods whose grace period is over. Pure.
fn overdue(pods: &[PodFacts], now: Timestamp) -> impl Iterator<Item = &PodFacts> {
    pods.iter().filter(move |pod| pod.terminates_by.is_some_and(|by| by + MARGIN <= now))
}

/// Overdue pods on lost nodes.
async fn lost<'a>(nodes: &dyn ReadNodes, pods: &'a [PodFacts], now: Timestamp) -> Vec<&'a PodFacts> {
    let mut all = Vec::new();
    for pod in overdue(pods, now) {
        let Some(node) = &pod.node else { continue };
        if nodes.node(node).await.is_some_and(|node| node.is_lost) {
            all.push(pod);
        }
    }
    all
}

/// Deletes overdue pods on lost nodes without a grace period. Returns their number.
///
/// # Errors
/// If the API server refuses. A missing pod is no error.
pub async fn delete(
    client: &Client,
    nodes: &dyn ReadNodes,
    namespace: &str,
    pods: &[PodFacts],
    now: Timestamp,
) -> Result<u64, ReconcileError> {
    let mut deleted = 0;
    for pod in lost(nodes, pods, now).await {
        let parameters = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions { uid: Some(pod.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
        match api.delete(&pod.name, &parameters).await {
            Ok(_) => {
                tracing::warn!(namespace, pod = pod.name, node = pod.node, "deleted: its node is lost");
                deleted += 1;
            }
            Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => {}
            Err(source) => return Err(ReconcileError::Delete { kind: "Pod", name: pod.name.clone(), source }),
        }
    }
    Ok(deleted)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use futures::future::BoxFuture;
    use serde_json::json;

    use super::*;
    use crate::names::{ATTEMPT_LABEL, ROLE_LABEL};
    use crate::nodes::NodeLoad;

    /// Nodes; the one named `lost` is lost.
    struct Nodes;

    impl ReadNodes for Nodes {
        fn node<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Option<NodeLoad>> {
            Box::pin(
                async move { (name != "unknown").then(|| NodeLoad { is_lost: name == "lost", ..NodeLoad::default() }) },
            )
        }

        fn used_by_pods<'a>(&'a self, _namespace: &'a str, _job: &'a str) -> BoxFuture<'a, BTreeMap<String, f64>> {
            Box::pin(async { BTreeMap::new() })
        }
    }

    fn pod(node: &str, terminates_by: Option<&str>) -> PodFacts {
        let labels = json!({ROLE_LABEL: "ps", ATTEMPT_LABEL: "1"});
        let mut pod =
            json!({"metadata": {"name": "j-ps-0", "labels": labels}, "spec": {"nodeName": node, "containers": []}});
        if let Some(time) = terminates_by {
            pod["metadata"]["deletionTimestamp"] = json!(time);
        }
        PodFacts::of(&serde_json::from_value(pod).expect("a pod")).expect("one of the operator's")
    }

    #[tokio::test]
    async fn a_pod_is_lost_after_its_grace_period_on_a_lost_node() {
        let ends = Some("2026-01-01T00:00:30Z");
        let pods = [pod("lost", None), pod("lost", ends), pod("there", ends), pod("unknown", ends)];
        for (now, expected) in [("2026-01-01T00:00:39Z", vec![]), ("2026-01-01T00:00:40Z", vec![&pods[1]])] {
            let now: Timestamp = now.parse().expect("a time");
            assert_eq!(lost(&Nodes, &pods, now).await, expected);
        }
    }
}
