//! `spec.roles`: how many of each role there are, and what their pods look like.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use rectrain_kinds::DeviceKind;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::defaults;

/// What a role's pods look like, laid over what the operator makes of them; entries of lists are merged by name, as
/// `kubectl patch` does. Only a cluster reads it: `rectrain run` ignores it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodTemplate {
    /// Labels added to the pods. Those of the operator win.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub labels: BTreeMap<String, String>,

    /// Annotations added to the pods.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub annotations: BTreeMap<String, String>,

    /// Requests and limits of the role's container, in Kubernetes' form: `requests: {cpu: "4", memory: 16Gi}`,
    /// `limits: {nvidia.com/gpu: 1}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "resources_schema")]
    pub resources: Option<ResourceRequirements>,

    /// Labels a node must have, such as `cloud.google.com/gke-spot: "true"`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub node_selector: BTreeMap<String, String>,

    /// Taints of nodes that the pods tolerate, in Kubernetes' form (`kubectl explain pod.spec.tolerations`). At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "list_as_kubernetes_has_it")]
    pub tolerations: Vec<Value>,

    /// Where the pods may and should run, in Kubernetes' form (`kubectl explain pod.spec.affinity`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "as_kubernetes_has_it")]
    pub affinity: Option<Value>,

    /// How the pods are spread over nodes and zones, in Kubernetes' form (`kubectl explain pod.spec.topologySpreadConstraints`); a role's pods
    /// have the labels `rectrain.dev/job` and `rectrain.dev/role`. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "list_as_kubernetes_has_it")]
    pub topology_spread_constraints: Vec<Value>,

    /// Environment variables of the role's container, in Kubernetes' form
    /// (`kubectl explain pod.spec.containers.env`). At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "list_as_kubernetes_has_it")]
    pub env: Vec<Value>,

    /// Volumes added to the pods, in Kubernetes' form (`kubectl explain pod.spec.volumes`): data, checkpoints. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "list_as_kubernetes_has_it")]
    pub volumes: Vec<Value>,

    /// Where the volumes are mounted in the role's container, in Kubernetes' form
    /// (`kubectl explain pod.spec.containers.volumeMounts`). At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "list_as_kubernetes_has_it")]
    pub volume_mounts: Vec<Value>,

    /// Seconds that a pod has to end in order: in which a checkpoint is saved, and a parameter server's rows go to others. 10 to 86400. A node
    /// that is drained waits for it; some warnings of a cloud (spot nodes) give less.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 86400), extend("x-default" = defaults::TERMINATION_GRACE_SECONDS))]
    pub termination_grace_period_seconds: Option<u32>,

    /// Name of the PriorityClass of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), extend("x-default" = "the cluster's default class"))]
    pub priority_class_name: Option<String>,

    /// Secrets of the job's namespace with which the pods' image is pulled, besides the chart's: `[{name: registry}]`. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "list_as_kubernetes_has_it")]
    pub image_pull_secrets: Vec<Value>,

    /// Name of the ServiceAccount of the pods, for Workload Identity and the like. Its token is not mounted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), extend("x-default" = "one made by the operator, without rights"))]
    pub service_account_name: Option<String>,
}

/// Kubernetes' own types are checked by [`crate::validate`] and by the API server when it makes the pod. Their whole schemas, five
/// times, would be larger than what `kubectl apply` can carry in its annotation (256 KiB). They are kept as they were written: a
/// manifest that the API server has taken in can be read whatever stands there, so that one that is wrong is its own job's
/// trouble and no other's.
fn as_kubernetes_has_it(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

fn list_as_kubernetes_has_it(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 64,
        "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
    })
}

fn resources_schema(_: &mut SchemaGenerator) -> Schema {
    let quantities = |what: &str| {
        json_schema!({
            "type": "object",
            "description": what,
            "maxProperties": 32,
            "additionalProperties": {"x-kubernetes-int-or-string": true},
        })
    };
    json_schema!({
        "type": "object",
        "properties": {
            "requests": quantities("What is reserved on a node, by resource: `cpu: 500m`, `memory: 2Gi`."),
            "limits": quantities("What may be used at most, by resource: `memory: 4Gi`, `nvidia.com/gpu: 1`."),
        },
    })
}

/// The coordinator. There is always exactly one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatorSpec {
    /// Number of coordinators: 1, no other number.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1), extend("x-default" = defaults::REPLICAS))]
    pub replicas: Option<u32>,

    /// What the coordinator's pod looks like, laid over what the operator makes of it; entries of lists are merged by name.
    /// Only a cluster reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplate>,
}

/// A role: how many of it, and how large each is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleSpec {
    /// How many of it there are.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = defaults::REPLICAS))]
    pub replicas: Option<u32>,

    /// Threads that each of them computes with.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "its share of the machine's cores"))]
    pub threads: Option<u32>,

    /// What the pods look like, laid over what the operator makes of them; entries of lists are merged by name. Only a
    /// cluster reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplate>,
}

/// The dense workers: how many, how large, and what they compute on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DenseWorkerSpec {
    /// How many of them there are. Each takes an equal share of every global batch. This is the number that
    /// `kubectl scale` sets.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = defaults::REPLICAS))]
    pub replicas: Option<u32>,

    /// What each of them computes on, if `gpus` does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = DeviceKind::Cpu))]
    pub device: Option<DeviceKind>,

    /// GPUs of each of them: 1 is all that is needed for dense workers on GPUs. It sets `device` to `cuda`, and in a cluster
    /// the pods ask for one `nvidia.com/gpu` and go where the chart's values (`gpu`) send such pods. More GPUs are used by more
    /// replicas.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1), extend("x-default" = "1 with `device: cuda`, otherwise 0"))]
    pub gpus: Option<u32>,

    /// Threads that each of them computes with on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "its share of the machine's cores"))]
    pub threads: Option<u32>,

    /// What the pods look like, laid over what the operator makes of them; entries of lists are merged by name. Only a
    /// cluster reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplate>,
}

impl DenseWorkerSpec {
    /// What they compute on, as `device` and `gpus` say together.
    #[must_use]
    pub fn device(&self) -> DeviceKind {
        let by_gpus = if self.gpus.is_some_and(|gpus| gpus > 0) { DeviceKind::Cuda } else { DeviceKind::default() };
        self.device.unwrap_or(by_gpus)
    }

    /// GPUs of each of them.
    #[must_use]
    pub fn gpus(&self) -> u32 {
        self.gpus.unwrap_or_else(|| u32::from(self.device() == DeviceKind::Cuda))
    }
}

/// The roles of a job. All of them run in one process with `rectrain run`, each in its own with `--processes`, and each in
/// pods of its own in a cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolesSpec {
    /// Keeps track of members, data, steps and checkpoints.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<CoordinatorSpec>,

    /// Parameter servers: hold the embedding rows and apply their gradients. More of them hold more rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ps: Option<RoleSpec>,

    /// Embedding workers: remove duplicate ids, look rows up, pool them, and turn the gradients back into those of rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_worker: Option<RoleSpec>,

    /// Dense workers: compute the model and average its gradients among themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_worker: Option<DenseWorkerSpec>,

    /// Loaders: read the data and make batches of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loader: Option<RoleSpec>,
}

impl RolesSpec {
    /// What the user wants the pods of each role to look like, by the role's name below `spec.roles`.
    #[must_use]
    pub fn templates(&self) -> [(&'static str, Option<&PodTemplate>); 5] {
        fn of(role: &Option<RoleSpec>) -> Option<&PodTemplate> {
            role.as_ref()?.template.as_ref()
        }
        [
            ("coordinator", self.coordinator.as_ref().and_then(|role| role.template.as_ref())),
            ("ps", of(&self.ps)),
            ("embeddingWorker", of(&self.embedding_worker)),
            ("denseWorker", self.dense_worker.as_ref().and_then(|role| role.template.as_ref())),
            ("loader", of(&self.loader)),
        ]
    }
}
