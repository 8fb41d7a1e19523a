//! Pods of nodes that were lost, as in a power cut. Kubernetes marks them for deletion and then waits for the node's word that they have
//! ended, which does not come, and their StatefulSet makes no other until then; in a cloud they go with the node, some minutes later, and
//! elsewhere when somebody removes it. A pod whose time to end is over on a node that is not ready is taken for dead here.
//!
//! One that lives on, behind a network that is cut, does no harm: members name the process that they are connected to, and who has taken
//! another's place is the only one that is answered.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DeleteParams, Preconditions};

use crate::nodes::ReadNodes;
use crate::pods::PodFacts;
use crate::reconcile::ReconcileError;

/// A node that is there may take so much longer than a pod's grace period to say that it has ended.
const MARGIN: Duration = Duration::from_secs(10);

/// Pods that should be gone by now. Pure.
fn overdue(pods: &[PodFacts], now: Timestamp) -> impl Iterator<Item = &PodFacts> {
    pods.iter().filter(move |pod| pod.gone_by.is_some_and(|by| by + MARGIN <= now))
}

/// Those of them whose node is lost.
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

/// Deletes the pods that are overdue and whose node is lost, at once; gives how many.
///
/// # Errors
/// If the API server refuses; that a pod is gone already is no error.
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
                tracing::warn!(namespace, pod = pod.name, node = pod.node, "taken for dead: its node is lost");
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

    /// Of which the one named `lost` is.
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

    fn pod(node: &str, gone_by: Option<&str>) -> PodFacts {
        let labels = json!({ROLE_LABEL: "ps", ATTEMPT_LABEL: "1"});
        let mut pod =
            json!({"metadata": {"name": "j-ps-0", "labels": labels}, "spec": {"nodeName": node, "containers": []}});
        if let Some(time) = gone_by {
            pod["metadata"]["deletionTimestamp"] = json!(time);
        }
        PodFacts::of(&serde_json::from_value(pod).expect("a pod")).expect("one of the operator's")
    }

    #[tokio::test]
    async fn a_pod_is_lost_when_its_time_to_end_is_over_on_a_node_that_is_and_not_before() {
        let ends = Some("2026-01-01T00:00:30Z");
        let pods = [pod("lost", None), pod("lost", ends), pod("there", ends), pod("unknown", ends)];
        for (now, expected) in [("2026-01-01T00:00:39Z", vec![]), ("2026-01-01T00:00:40Z", vec![&pods[1]])] {
            let now: Timestamp = now.parse().expect("a time");
            assert_eq!(lost(&Nodes, &pods, now).await, expected);
        }
    }
}
