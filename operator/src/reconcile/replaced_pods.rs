//! Deletes the slow pods that the status says are replaced ([`crate::replace_slow`]). A pod has its
//! grace period, in which its rows move to other parameter servers.

use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, DeleteParams, Preconditions};
use rectrain_crds::ReplacedPod;

use super::error::ReconcileError;
use crate::pods::PodFacts;
use crate::replace_slow;

/// Deletes the pods in `replaced` that still run. Returns their number.
///
/// # Errors
/// If the API server refuses. A missing pod is no error.
pub async fn delete(
    client: &Client,
    namespace: &str,
    pods: &[PodFacts],
    replaced: &[ReplacedPod],
) -> Result<u64, ReconcileError> {
    let mut deleted = 0;
    for (pod, replaced) in replace_slow::to_delete(pods, replaced) {
        let parameters = DeleteParams {
            preconditions: Some(Preconditions { uid: Some(pod.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
        match api.delete(&pod.name, &parameters).await {
            Ok(_) => {
                tracing::warn!(namespace, pod = pod.name, node = pod.node, "deleted: {}", replaced.reason);
                deleted += 1;
            }
            Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => {}
            Err(source) => return Err(ReconcileError::Delete { kind: "Pod", name: pod.name.clone(), source }),
        }
    }
    Ok(deleted)
}
