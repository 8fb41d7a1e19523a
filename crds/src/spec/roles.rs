//! `spec.roles`: the number of members of each role, and their pods.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ResourceRequirements;
use rectrain_kinds::{DeviceKind, Role};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::defaults;

/// Changes to a role's pods, merged into the operator's pod template. Entries of lists are merged
/// by name, as `kubectl patch` does. Only a cluster reads it: `rectrain run` ignores it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodTemplate {
    /// Labels added to the pods. The operator's labels take precedence.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub labels: BTreeMap<String, String>,

    /// Annotations added to the pods.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub annotations: BTreeMap<String, String>,

    /// Requests and limits of the role's container, in Kubernetes' form:
    /// `requests: {cpu: "4", memory: 16Gi}`, `limits: {nvidia.com/gpu: 1}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "resources_schema")]
    pub resources: Option<ResourceRequirements>,

    /// Labels that a node must have, such as `cloud.google.com/gke-spot: "true"`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub node_selector: BTreeMap<String, String>,

    /// Taints of nodes that the pods tolerate, in Kubernetes' form (`kubectl explain
    /// pod.spec.tolerations`). At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "open_list")]
    pub tolerations: Vec<Value>,

    /// Where the pods may and should run, in Kubernetes' form (`kubectl explain
    /// pod.spec.affinity`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "open_object")]
    pub affinity: Option<Value>,

    /// How the pods are spread over nodes and zones, in Kubernetes' form (`kubectl explain
    /// pod.spec.topologySpreadConstraints`). A role's pods have the labels `rectrain.dev/job` and
    /// `rectrain.dev/role`. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "open_list")]
    pub topology_spread_constraints: Vec<Value>,

    /// Environment variables of the role's container, in Kubernetes' form
    /// (`kubectl explain pod.spec.containers.env`). At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "open_list")]
    pub env: Vec<Value>,

    /// Volumes added to the pods, for data or checkpoints, in Kubernetes' form (`kubectl explain
    /// pod.spec.volumes`). At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "open_list")]
    pub volumes: Vec<Value>,

    /// Where the volumes are mounted in the role's container, in Kubernetes' form
    /// (`kubectl explain pod.spec.containers.volumeMounts`). At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "open_list")]
    pub volume_mounts: Vec<Value>,

    /// Seconds that a pod has to shut down cleanly, from 10 to 86400. In this time a checkpoint is
    /// saved, and a parameter server's rows move to others. A node that is drained waits for it.
    /// Some warnings of a cloud (spot nodes) allow less.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 86400), extend("x-default" = defaults::TERMINATION_GRACE_SECONDS))]
    pub termination_grace_period_seconds: Option<u32>,

    /// Name of the PriorityClass of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), extend("x-default" = "the cluster's default class"))]
    pub priority_class_name: Option<String>,

    /// Secrets of the job's namespace for pulling the pods' image, in addition to the chart's:
    /// `[{name: registry}]`. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "open_list")]
    pub image_pull_secrets: Vec<Value>,

    /// Name of the ServiceAccount of the pods, for Workload Identity and the like. Its token is not
    /// mounted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), extend("x-default" = "one made by the operator, without rights"))]
    pub service_account_name: Option<String>,
}

/// [`crate::validate`] checks Kubernetes' own types, and so does the API server when it makes the
/// pod. Their whole schemas, five times, would not fit the annotation of `kubectl apply` (256 KiB).
/// So they are stored as written. A manifest that the API server accepted can be read whatever it
/// contains: a wrong template then affects only its own job.
fn open_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object", "x-kubernetes-preserve-unknown-fields": true})
}

fn open_list(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 64,
        "items": {"type": "object", "x-kubernetes-preserve-unknown-fields": true},
    })
}

fn resources_schema(_: &mut SchemaGenerator) -> Schema {
    let quantities = |description: &str| {
        json_schema!({
            "type": "object",
            "description": description,
            "maxProperties": 32,
            "additionalProperties": {"x-kubernetes-int-or-string": true},
        })
    };
    json_schema!({
        "type": "object",
        "properties": {
            "requests": quantities("Amounts reserved on a node, by resource: `cpu: 500m`, `memory: 2Gi`."),
            "limits": quantities("Upper limits, by resource: `memory: 4Gi`, `nvidia.com/gpu: 1`."),
        },
    })
}

/// The coordinator. There is always exactly one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CoordinatorSpec {
    /// Number of coordinators: always 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1), extend("x-default" = defaults::REPLICAS))]
    pub replicas: Option<u32>,

    /// Changes to the coordinator's pod, merged into the operator's pod template. Entries of lists
    /// are merged by name. Only a cluster reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplate>,
}

/// A role: its number of members, and their size.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleSpec {
    /// Number of members.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = defaults::REPLICAS))]
    pub replicas: Option<u32>,

    /// Threads of each member.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "its share of the machine's cores"))]
    pub threads: Option<u32>,

    /// Changes to the pods, merged into the operator's pod template. Entries of lists are merged by
    /// name. Only a cluster reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplate>,
}

/// The dense workers: their number, their size and their device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DenseWorkerSpec {
    /// Number of members. Each takes an equal share of every global batch. `kubectl scale` sets
    /// this number.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = defaults::REPLICAS))]
    pub replicas: Option<u32>,

    /// The device of each member, if `gpus` does not decide it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = DeviceKind::Cpu))]
    pub device: Option<DeviceKind>,

    /// GPUs of each member. 1 is enough to run the dense workers on GPUs: it sets `device` to
    /// `cuda`. In a cluster each pod then requests one `nvidia.com/gpu`, and the chart's values
    /// (`gpu`) select its nodes. To use more GPUs, set more replicas.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1), extend("x-default" = "1 with `device: cuda`, otherwise 0"))]
    pub gpus: Option<u32>,

    /// Threads of each member for computing on the CPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "its share of the machine's cores"))]
    pub threads: Option<u32>,

    /// Changes to the pods, merged into the operator's pod template. Entries of lists are merged by
    /// name. Only a cluster reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplate>,
}

impl DenseWorkerSpec {
    /// The device, from `device` and `gpus` together.
    #[must_use]
    pub fn device(&self) -> DeviceKind {
        let by_gpus = if self.gpus.is_some_and(|gpus| gpus > 0) { DeviceKind::Cuda } else { DeviceKind::default() };
        self.device.unwrap_or(by_gpus)
    }

    /// GPUs of each member.
    #[must_use]
    pub fn gpus(&self) -> u32 {
        self.gpus.unwrap_or_else(|| u32::from(self.device() == DeviceKind::Cuda))
    }
}

/// The roles of a job. `rectrain run` runs all of them in one process; with `--processes` each
/// member has its own. In a cluster each member has its own pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolesSpec {
    /// Tracks members, data, steps and checkpoints.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<CoordinatorSpec>,

    /// Parameter servers: hold the embedding rows and apply their gradients. More of them hold more
    /// rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ps: Option<RoleSpec>,

    /// Embedding workers: remove duplicate ids, look rows up, pool them, and turn pooled gradients
    /// into gradients of rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_worker: Option<RoleSpec>,

    /// Dense workers: compute the model and average its gradients among themselves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_worker: Option<DenseWorkerSpec>,

    /// Loaders: read the data and make batches of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loader: Option<RoleSpec>,
}

/// The fields that every role has.
struct RoleFields<'a> {
    replicas: Option<u32>,
    threads: Option<u32>,
    template: Option<&'a PodTemplate>,
}

/// The fields that every role has, to be changed.
struct RoleFieldsMut<'a> {
    replicas: &'a mut Option<u32>,
    template: &'a mut Option<PodTemplate>,
}

impl RoleSpec {
    fn fields(&self) -> RoleFields<'_> {
        RoleFields { replicas: self.replicas, threads: self.threads, template: self.template.as_ref() }
    }

    fn fields_mut(&mut self) -> RoleFieldsMut<'_> {
        RoleFieldsMut { replicas: &mut self.replicas, template: &mut self.template }
    }
}

impl RolesSpec {
    /// The fields of a role, if the manifest has its section.
    fn fields(&self, role: Role) -> Option<RoleFields<'_>> {
        match role {
            Role::Coordinator => self.coordinator.as_ref().map(|coordinator| RoleFields {
                replicas: coordinator.replicas,
                threads: None,
                template: coordinator.template.as_ref(),
            }),
            Role::Ps => self.ps.as_ref().map(RoleSpec::fields),
            Role::EmbeddingWorker => self.embedding_worker.as_ref().map(RoleSpec::fields),
            Role::DenseWorker => self.dense_worker.as_ref().map(|worker| RoleFields {
                replicas: worker.replicas,
                threads: worker.threads,
                template: worker.template.as_ref(),
            }),
            Role::Loader => self.loader.as_ref().map(RoleSpec::fields),
        }
    }

    /// The fields of a role, to be changed. Adds the role's section if it is missing.
    fn fields_mut(&mut self, role: Role) -> RoleFieldsMut<'_> {
        match role {
            Role::Coordinator => {
                let coordinator = self.coordinator.get_or_insert_default();
                RoleFieldsMut { replicas: &mut coordinator.replicas, template: &mut coordinator.template }
            }
            Role::Ps => self.ps.get_or_insert_default().fields_mut(),
            Role::EmbeddingWorker => self.embedding_worker.get_or_insert_default().fields_mut(),
            Role::DenseWorker => {
                let worker = self.dense_worker.get_or_insert_default();
                RoleFieldsMut { replicas: &mut worker.replicas, template: &mut worker.template }
            }
            Role::Loader => self.loader.get_or_insert_default().fields_mut(),
        }
    }

    /// `replicas` of a role.
    #[must_use]
    pub fn replicas(&self, role: Role) -> Option<u32> {
        self.fields(role)?.replicas
    }

    /// `threads` of a role.
    #[must_use]
    pub fn threads(&self, role: Role) -> Option<u32> {
        self.fields(role)?.threads
    }

    /// The user's changes to the pods of a role.
    #[must_use]
    pub fn template(&self, role: Role) -> Option<&PodTemplate> {
        self.fields(role)?.template
    }

    /// Sets `replicas` of a role.
    pub fn set_replicas(&mut self, role: Role, replicas: u32) {
        *self.fields_mut(role).replicas = Some(replicas);
    }

    /// Removes the user's changes to the pods of all roles.
    pub fn remove_templates(&mut self) {
        for role in Role::ALL {
            if self.template(role).is_some() {
                *self.fields_mut(role).template = None;
            }
        }
    }
}
