//! `RecModelServer`: servers that answer requests with the predictions of a trained model. Each of
//! them holds the whole model, or reads its rows from shards. Only a cluster reads this kind.

// kube's derive repeats each struct, `pub` and all, inside a function.
#![allow(unreachable_pub)]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::{CheckpointStatus, PodTemplate, StorageSpec, defaults};

/// The model, its version, and the servers that answer for it.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "rectrain.dev",
    version = "v1alpha1",
    kind = "RecModelServer",
    plural = "recmodelservers",
    singular = "recmodelserver",
    shortname = "rms",
    category = "all",
    namespaced,
    status = "RecModelServerStatus",
    derive = "PartialEq",
    cel,
    doc = "RecModelServer runs servers that answer requests with the predictions of a trained model. Each server holds the whole model, or reads its rows from shards.",
    validation = Rule::new("!has(self.metadata.name) || self.metadata.name.matches('^[a-z]([-a-z0-9]{0,33}[a-z0-9])?$')").message("the name is part of pod names: expected at most 35 characters, a-z, 0-9 and -, starting with a letter and not ending with -"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase", description = "Phase of the servers."),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.replicas.display", description = "Servers, ready/wanted."),
    printcolumn(name = "Step", type_ = "integer", json_path = ".status.checkpoint.step", description = "Global step of the model that the servers should have."),
    printcolumn(name = "Latest", type_ = "integer", json_path = ".status.latest.step", description = "Global step of the newest known checkpoint of the job."),
    printcolumn(name = "Canary", type_ = "integer", json_path = ".status.canary.step", priority = 1, description = "Global step of the model that a part of the servers should have."),
    printcolumn(name = "Shards", type_ = "string", json_path = ".status.shards.display", priority = 1, description = "Shards of the rows with a replica that answers, ready/wanted."),
    printcolumn(name = "Gate", type_ = "number", json_path = ".spec.gate.minAuc", priority = 1, description = "Least AUC of a model on held-out rows."),
    printcolumn(name = "Since", type_ = "date", json_path = ".status.since", description = "Time since the servers were given this model."),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp", description = "Time since the object was created.")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.version) || self.version == 'latest' || string(self.version).matches('^[1-9][0-9]{0,14}$')").message("expected `latest`, or the global step of a checkpoint such as 8000").field_path(".version"),
    validation = Rule::new("!has(self.model.path) || !has(self.version) || self.version != 'latest'").message("version: latest needs model.job, because the operator does not read stores: give a step, or leave version out to serve model.path as it is"),
    validation = Rule::new("!has(self.replicas) || !has(self.autoscaling)").message("replicas and autoscaling contradict each other: remove one of them"),
    validation = Rule::new("!has(self.autoscaling) || (has(self.autoscaling.requestsInProgress) && !has(self.autoscaling.cpuPercent)) || (has(self.template) && has(self.template.resources) && has(self.template.resources.requests) && 'cpu' in self.template.resources.requests)").message("autoscaling measures the use of the requested CPU: set template.resources.requests.cpu"),
    validation = Rule::new("!has(self.canary) || !has(self.autoscaling)").message("canary and autoscaling contradict each other: remove one of them"),
    validation = Rule::new("!has(self.canary) || (has(self.replicas) ? self.replicas : 2) >= 2").message("a canary is one of several servers: set replicas to at least 2"),
    validation = Rule::new("!has(self.canary) || has(self.model.job) || has(self.version)").message("a canary and the other servers have checkpoints: set model.job, or a version of model.path"),
    validation = Rule::new("!has(self.shards) || (has(self.model.path) && !has(self.version))").message("shards follow published models: set model.path to a path with publications, and remove version").field_path(".shards"),
    validation = Rule::new("!has(self.shards) || !has(oldSelf.shards) || (self.shards.count == oldSelf.shards.count && self.model == oldSelf.model)").message("shards.count and model cannot be changed while there are shards, because they decide which rows a shard has: make another RecModelServer, or remove shards, wait until it is Ready, and set them again").field_path(".shards")
)]
pub struct RecModelServerSpec {
    /// The source of the model. Exactly one of two: `job` or `path`. Required.
    pub model: ServedModelSpec,

    /// The checkpoint to serve: `latest`, or its global step. `latest` needs `model.job`, and
    /// follows its newest checkpoint. A step stays. Another step rolls forward or back to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "version_schema", extend("x-default" = "latest with `model.job`, and `model.path` as it is"))]
    pub version: Option<ModelVersion>,

    /// The least seconds between two changes of the model by `version: latest`. A change of the
    /// manifest does not wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 2_592_000), extend("x-default" = defaults::SERVER_UPDATE_SECONDS))]
    pub update_every_seconds: Option<u32>,

    /// Seconds between two looks for a newer published model, such as 0.2. Only servers that follow
    /// the publications of `model.path` look. In a bucket each look is a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.01, max = 3600.0), extend("x-default" = "0.02 in a folder, and 1 in a bucket"))]
    pub poll_seconds: Option<f64>,

    /// The number of servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1000), extend("x-default" = defaults::SERVERS))]
    pub replicas: Option<u32>,

    /// A number of servers that follows their load, by a HorizontalPodAutoscaler.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "a fixed number, as in `replicas`"))]
    pub autoscaling: Option<ServerAutoscalingSpec>,

    /// Access to the object store of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "the storage of `model.job`"))]
    pub storage: Option<StorageSpec>,

    /// Image of the servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512), extend("x-default" = "the installation's runtime image"))]
    pub image: Option<String>,

    /// Requests in progress in each server. Beyond them a request gets status 429.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576), extend("x-default" = defaults::SERVER_MAX_IN_FLIGHT))]
    pub max_in_flight: Option<u32>,

    /// Tries another checkpoint in a part of the servers. Requests reach all servers alike, so the
    /// part of the servers is the part of the requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "all servers have one model"))]
    pub canary: Option<CanarySpec>,

    /// Refuses models that predict held-out rows badly. A server does not answer with such a model.
    /// An earlier one goes on.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "every model is taken"))]
    pub gate: Option<GateSpec>,

    /// Encrypts the connections of clients, at both ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "connections are not encrypted"))]
    pub tls: Option<ServerTlsSpec>,

    /// Predicts recorded requests before a server answers, so that its first clients do not wait
    /// for memory that is not mapped yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "none"))]
    pub warm_up: Option<WarmUpSpec>,

    /// Keeps the rows of the model in shards: pods of their own, each with a part of the rows. The
    /// servers then hold the dense part of the model, and a bounded cache of rows. Needs a
    /// `model.path` with publications, and no `version`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "each server holds all rows"))]
    pub shards: Option<ShardsSpec>,

    /// Changes to the servers' pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplate>,
}

impl RecModelServerSpec {
    /// The step that the manifest pins, if it pins one.
    #[must_use]
    pub fn pinned(&self) -> Option<u64> {
        match &self.version {
            Some(ModelVersion::Step(step)) => Some(*step),
            Some(ModelVersion::Word(word)) => word.parse().ok(),
            None => None,
        }
    }
}

/// The source of a model. Exactly one of two.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.job) != has(self.path)").message("expected exactly one of `job` (a RecTrainingJob with checkpoints) and `path` (an export, a checkpoint, or a path with checkpoints)")
)]
pub struct ServedModelSpec {
    /// Name of a RecTrainingJob in the same namespace, with `spec.checkpoint.path`. The servers
    /// stay when the job is deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), extend("x-default" = "none"))]
    pub job: Option<String>,

    /// A path with checkpoints, for a `version`, or one checkpoint in it: a gs:// or s3:// URL, or a
    /// folder of a volume in `template`. A folder may also hold an export for serving.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-default" = "none"))]
    pub path: Option<String>,
}

/// Another checkpoint in a part of the servers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct CanarySpec {
    /// The global step of the other checkpoint. To take it for all servers, set `version` to it and
    /// remove `canary`. Required.
    #[schemars(range(min = 1, max = 999_999_999_999_999u64))]
    pub step: u64,

    /// The part of `replicas` that have it, in percent. It is rounded up, and one server at least
    /// has the other model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 99), extend("x-default" = defaults::CANARY_PERCENT))]
    pub percent: Option<u32>,
}

/// Held-out rows, and a bound for a model's AUC on them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct GateSpec {
    /// Files with labels and the features of the model, as in `spec.data` of a job: gs:// or s3://
    /// URLs of the model's store, or files of a volume in `template`. Each server holds the rows in
    /// memory, at most 1,048,576. At least one, at most 64. Required.
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 1024)))]
    pub rows: Vec<String>,

    /// The least AUC of a model on these rows. Required.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub min_auc: f64,
}

/// The certificate of the servers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServerTlsSpec {
    /// Secret of the servers' namespace with `tls.crt` and `tls.key`, such as cert-manager writes.
    /// Clients find the servers at the host `NAME-server.NAMESPACE.svc`. Servers take a renewed
    /// certificate without a restart. Required.
    #[schemars(length(min = 1, max = 253))]
    pub secret_name: String,

    /// True if clients need a certificate that an authority in the Secret's `ca.crt` has signed.
    /// Clients without one get no more than the health of a server, which the probes ask for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = false))]
    pub client_certificates: Option<bool>,
}

/// Recorded requests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct WarmUpSpec {
    /// ConfigMap of the servers' namespace with the requests. Required.
    #[schemars(length(min = 1, max = 253))]
    pub config_map_name: String,

    /// Its entry with the requests, as `rectrain serve --record` writes them: in each line the body
    /// of a REST request.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), regex(pattern = r"^[-._a-zA-Z0-9]+$"), extend("x-default" = defaults::WARM_UP_KEY))]
    pub key: Option<String>,
}

/// Pods that hold the rows of a model, each a part of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShardsSpec {
    /// The number of shards. Each row is in one of them, by its key. It cannot be changed while
    /// there are shards. Required.
    #[schemars(range(min = 1, max = 100))]
    pub count: u32,

    /// The pods of each shard. All of them have all rows of the shard. With one pod, the shard does
    /// not answer while that pod restarts.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10), extend("x-default" = defaults::SHARD_REPLICAS))]
    pub replicas: Option<u32>,

    /// The most rows in the cache of each server.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000), extend("x-default" = defaults::SERVER_CACHE_ROWS))]
    pub cache_rows: Option<u32>,

    /// Changes to the shards' pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<PodTemplate>,
}

/// A version of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ModelVersion {
    /// The checkpoint of this global step.
    Step(u64),
    /// `latest` for the newest checkpoint, or a step in quotes. The API server refuses other words.
    Word(String),
}

fn version_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "x-expected": "`latest`, or the global step of a checkpoint such as 8000",
    })
}

/// A number of servers that follows their load. With both measures, the larger number counts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("(has(self.minReplicas) ? self.minReplicas : 1) <= self.maxReplicas").message("minReplicas is above maxReplicas: lower it, or raise maxReplicas")
)]
pub struct ServerAutoscalingSpec {
    /// The least servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000), extend("x-default" = defaults::REPLICAS))]
    pub min_replicas: Option<u32>,

    /// The most servers. Required.
    #[schemars(range(min = 1, max = 1000))]
    pub max_replicas: u32,

    /// The mean use of the requested CPU that the number of servers aims at, in percent. It needs
    /// the cluster's metrics-server.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000), extend("x-default" = "70, and none with `requestsInProgress`"))]
    pub cpu_percent: Option<u32>,

    /// The mean number of requests in progress in a server that the number of servers aims at. It
    /// needs an adapter for the pods' metric `rectrain_inference_requests_in_progress`, such as
    /// prometheus-adapter.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_048_576), extend("x-default" = "none"))]
    pub requests_in_progress: Option<u32>,
}

/// Phase of the servers of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ServerPhase {
    /// There is no model to serve yet.
    Pending,
    /// Servers start, or change to another model.
    Progressing,
    /// All servers answer with the wanted model.
    Ready,
    /// Servers are missing, and a rollout makes no progress, or the manifest cannot be carried out.
    Degraded,
}

impl ServerPhase {
    /// The name in a status.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Progressing => "Progressing",
            Self::Ready => "Ready",
            Self::Degraded => "Degraded",
        }
    }
}

/// Servers, as numbers of pods.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServerCount {
    /// Servers that answer.
    pub ready: u32,
    /// Servers that should exist.
    pub wanted: u32,
    /// Both numbers as `kubectl get` prints them: `ready/wanted`.
    #[schemars(length(max = 32))]
    pub display: String,
}

impl ServerCount {
    /// `ready` of `wanted` servers.
    #[must_use]
    pub fn new(ready: u32, wanted: u32) -> Self {
        Self { ready, wanted, display: format!("{ready}/{wanted}") }
    }
}

/// Shards of the rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShardCount {
    /// Shards with at least one replica that answers.
    pub ready: u32,
    /// Shards that should exist.
    pub wanted: u32,
    /// Both numbers as `kubectl get` prints them: `ready/wanted`.
    #[schemars(length(max = 32))]
    pub display: String,
}

impl ShardCount {
    /// `ready` of `wanted` shards.
    #[must_use]
    pub fn new(ready: u32, wanted: u32) -> Self {
        Self { ready, wanted, display: format!("{ready}/{wanted}") }
    }
}

/// The servers with one version of the model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VersionStatus {
    /// Global step of the model. Absent for a model at a path without a `version`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// Servers with it.
    pub replicas: u32,
    /// Servers with it that answer.
    pub ready: u32,
}

/// The place of a model's checkpoints. It is remembered, so that servers outlive their job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModelPlace {
    /// Name of the job that it was read from, if `spec.model` names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub job: Option<String>,
    /// The path.
    #[schemars(length(max = 1024))]
    pub path: String,
    /// Options of the object store's client.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub options: BTreeMap<String, String>,
    /// Secret with the credentials of the object store.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub secret_name: Option<String>,
}

/// The state of the servers of a model, written by the operator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RecModelServerStatus {
    /// Phase of the servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<ServerPhase>,

    /// Conditions in Kubernetes' form: `Ready`, `Progressing` and `Degraded`. A message says the
    /// remedy. At most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,

    /// Generation of the spec that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// The place of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelPlace>,

    /// The checkpoint that the servers should have. Absent for a path without a `version`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointStatus>,

    /// The checkpoint that a part of the servers should have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub canary: Option<CheckpointStatus>,

    /// When the servers were given this model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,

    /// The newest known checkpoint of the job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latest: Option<CheckpointStatus>,

    /// Checkpoints that the servers had, newest last. A rollback finds its checkpoint here. At most
    /// 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub history: Vec<CheckpointStatus>,

    /// The servers by version of their model. At most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub versions: Vec<VersionStatus>,

    /// The number of servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<ServerCount>,

    /// The number of shards. Absent if each server holds all rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<ShardCount>,
}

#[cfg(test)]
mod tests {
    use kube::core::cel::{Validator, compile_schema};
    use serde_json::json;

    use super::*;
    use crate::schema::annotated_server;

    /// The sentences of the rules that a spec breaks.
    fn refusals(spec: &serde_json::Value) -> Vec<String> {
        refusals_of_change(None, spec)
    }

    /// The sentences of the rules that a change from one spec to another breaks.
    fn refusals_of_change(before: Option<&serde_json::Value>, spec: &serde_json::Value) -> Vec<String> {
        let object = |spec: &serde_json::Value| json!({"metadata": {"name": "clicks"}, "spec": spec});
        let (object, before) = (object(spec), before.map(object));
        let schema = compile_schema(annotated_server());
        let broken = Validator::new().validate_compiled(&schema, &object, before.as_ref());
        let errors = broken.err().map(|errors| errors.into_vec()).unwrap_or_default();
        errors.into_iter().map(|error| error.message.to_string()).collect()
    }

    #[test]
    fn good_specs_break_no_rule() {
        let cpu = json!({"resources": {"requests": {"cpu": "1"}}});
        for spec in [
            json!({"model": {"job": "clicks"}}),
            json!({"model": {"job": "clicks"}, "version": "latest", "replicas": 3}),
            json!({"model": {"job": "clicks"}, "version": 800}),
            json!({"model": {"path": "gs://ads/clicks"}, "version": "800"}),
            json!({"model": {"path": "/models/clicks"}, "autoscaling": {"maxReplicas": 4}, "template": cpu}),
            json!({"model": {"job": "clicks"}, "canary": {"step": 900}}),
            json!({"model": {"path": "/models/clicks"}, "version": 800, "canary": {"step": 900, "percent": 50}}),
            json!({"model": {"job": "clicks"}, "gate": {"rows": ["gs://ads/held-out.csv"], "minAuc": 0.7}}),
            json!({"model": {"job": "clicks"}, "tls": {"secretName": "clicks-tls", "clientCertificates": true}}),
            json!({"model": {"path": "gs://ads/published"}, "shards": {"count": 1}}),
            json!({
                "model": {"path": "gs://ads/published"}, "autoscaling": {"maxReplicas": 4}, "template": cpu,
                "shards": {"count": 4, "replicas": 3, "cacheRows": 1000, "template": cpu},
            }),
        ] {
            assert_eq!(refusals(&spec), Vec::<String>::new(), "{spec}");
        }
    }

    #[test]
    fn each_contradiction_has_a_sentence() {
        let job = json!({"job": "clicks"});
        let cpu = json!({"resources": {"requests": {"cpu": "1"}}});
        for (spec, sentence) in [
            (json!({"model": {}}), "expected exactly one of `job`"),
            (json!({"model": {"job": "a", "path": "b"}}), "expected exactly one of `job`"),
            (json!({"model": job, "version": "newest"}), "expected `latest`"),
            (json!({"model": job, "version": 0}), "expected `latest`"),
            (json!({"model": {"path": "gs://a/b"}, "version": "latest"}), "version: latest needs model.job"),
            (
                json!({"model": job, "replicas": 1, "autoscaling": {"maxReplicas": 2}, "template": cpu}),
                "replicas and autoscaling contradict",
            ),
            (json!({"model": job, "autoscaling": {"maxReplicas": 2}}), "set template.resources.requests.cpu"),
            (
                json!({"model": job, "autoscaling": {"maxReplicas": 2}, "template": cpu, "canary": {"step": 9}}),
                "canary and autoscaling contradict",
            ),
            (json!({"model": job, "replicas": 1, "canary": {"step": 9}}), "set replicas to at least 2"),
            (json!({"model": {"path": "gs://a/b"}, "canary": {"step": 9}}), "or a version of model.path"),
            (
                json!({"model": job, "autoscaling": {"minReplicas": 3, "maxReplicas": 2}, "template": cpu}),
                "minReplicas is above maxReplicas",
            ),
            (json!({"model": job, "shards": {"count": 2}}), "set model.path to a path with publications"),
            (
                json!({"model": {"path": "gs://a/b"}, "version": 8, "shards": {"count": 2}}),
                "set model.path to a path with publications, and remove version",
            ),
        ] {
            let refusals = refusals(&spec);
            assert!(refusals.len() == 1 && refusals[0].contains(sentence), "{spec}: {refusals:?}");
        }
    }

    #[test]
    fn shards_keep_their_number_and_their_model() {
        let of = |path: &str, shards: serde_json::Value| json!({"model": {"path": path}, "shards": shards});
        let before = of("gs://a/b", json!({"count": 2}));
        for refused in [of("gs://a/b", json!({"count": 3})), of("gs://a/c", json!({"count": 2}))] {
            let refusals = refusals_of_change(Some(&before), &refused);
            let is_refused = refusals.len() == 1 && refusals[0].starts_with("shards.count and model cannot be changed");
            assert!(is_refused, "{refused}: {refusals:?}");
        }
        let whole = json!({"model": {"path": "gs://a/b"}});
        let more = of("gs://a/b", json!({"count": 2, "replicas": 3, "cacheRows": 10}));
        let other = of("gs://a/c", json!({"count": 5}));
        for (from, to) in [(&before, &more), (&before, &whole), (&whole, &before), (&whole, &other)] {
            assert_eq!(refusals_of_change(Some(from), to), Vec::<String>::new(), "{from} to {to}");
        }
    }

    #[test]
    fn a_shard_out_of_range_is_no_number_of_shards() {
        let shards = &annotated_server()["properties"]["spec"]["properties"]["shards"];
        assert_eq!(shards["required"], json!(["count"]));
        let range = |field: &str| {
            let field = &shards["properties"][field];
            (field["minimum"].as_f64(), field["maximum"].as_f64(), field["x-default"].as_u64())
        };
        assert_eq!(range("count"), (Some(1.0), Some(100.0), None));
        assert_eq!(range("replicas"), (Some(1.0), Some(10.0), Some(2)));
        assert_eq!(range("cacheRows"), (Some(1.0), Some(1e9), Some(100_000)));
    }

    fn spec(value: serde_json::Value) -> RecModelServerSpec {
        serde_json::from_value(value).expect("a spec")
    }

    #[test]
    fn a_version_is_a_word_or_a_step() {
        let version = |version: serde_json::Value| spec(json!({"model": {"job": "clicks"}, "version": version}));
        assert_eq!(version(json!(800)).pinned(), Some(800));
        assert_eq!(version(json!("latest")).pinned(), None);
        assert_eq!(version(json!("latest")).version, Some(ModelVersion::Word("latest".to_owned())));
        assert_eq!(serde_json::to_value(version(json!(800))).expect("JSON")["version"], json!(800));
        assert!(spec(json!({"model": {"job": "clicks"}})).version.is_none());
    }
}
