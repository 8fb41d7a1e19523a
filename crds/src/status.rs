//! `status`: what the operator reports. Users read it; nobody but the operator writes it.

// kube's derive repeats each struct, `pub` and all, inside a function.
#![allow(unreachable_pub)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{DecisionStatus, Mode};

/// Where a job is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// Accepted; nothing was made for it yet.
    Pending,
    /// Its roles are being started.
    Starting,
    /// Steps are being made.
    Training,
    /// The test rows are being predicted.
    Evaluating,
    /// A crash, or a change of the manifest that needs a new attempt, ended all its roles; they start again, from the last checkpoint if
    /// there is one.
    Restarting,
    /// Held by `spec.suspend`.
    Suspended,
    /// Trained and tested.
    Complete,
    /// Ended without a model; the condition `Failed` says why and what to do.
    Failed,
}

impl Phase {
    /// The name in a status.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Pending => "Pending",
            Phase::Starting => "Starting",
            Phase::Training => "Training",
            Phase::Evaluating => "Evaluating",
            Phase::Restarting => "Restarting",
            Phase::Suspended => "Suspended",
            Phase::Complete => "Complete",
            Phase::Failed => "Failed",
        }
    }

    /// Whether the job has neither ended nor is suspended.
    #[must_use]
    pub fn is_under_way(self) -> bool {
        !matches!(self, Phase::Complete | Phase::Failed | Phase::Suspended)
    }
}

/// How many pods of a role there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaCount {
    /// Pods that are ready.
    pub ready: u32,
    /// Pods that should be.
    pub wanted: u32,
    /// Both as `kubectl get` prints them: `ready/wanted`.
    #[schemars(length(max = 32))]
    pub display: String,
}

impl ReplicaCount {
    /// `ready` of `wanted` pods.
    pub fn new(ready: u32, wanted: u32) -> Self {
        Self { ready, wanted, display: format!("{ready}/{wanted}") }
    }
}

/// How many pods of each role there are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaStatuses {
    /// The coordinator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<ReplicaCount>,
    /// Parameter servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ps: Option<ReplicaCount>,
    /// Embedding workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_worker: Option<ReplicaCount>,
    /// Dense workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_worker: Option<ReplicaCount>,
    /// Loaders.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loader: Option<ReplicaCount>,
}

impl ReplicaStatuses {
    /// The roles that have pods, by the names that commands, labels and metrics have for them.
    pub fn by_role(&self) -> impl Iterator<Item = (&'static str, &ReplicaCount)> {
        let roles = [
            ("coordinator", &self.coordinator),
            ("ps", &self.ps),
            ("embedding-worker", &self.embedding_worker),
            ("dense-worker", &self.dense_worker),
            ("loader", &self.loader),
        ];
        roles.into_iter().filter_map(|(role, count)| Some((role, count.as_ref()?)))
    }
}

/// What a finished job has to show: the same numbers as the last line of `rectrain run --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobSummary {
    /// Area under the ROC curve of the test rows: 0.5 is chance, 1 perfect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auc: Option<f64>,
    /// Mean of the groups' AUCs, weighted by their rows, where the manifest names a group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gauc: Option<f64>,
    /// Mean cross entropy of the test rows, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_loss: Option<f64>,
    /// `logLoss` divided by that of always predicting the mean label: below 1 is better than that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub normalized_entropy: Option<f64>,
    /// Sum of the predictions divided by the sum of the labels: 1 is calibrated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<f64>,
    /// Global steps made.
    pub steps: u64,
    /// Rows trained on, epochs counted again.
    pub samples: u64,
    /// Seconds of training, without start and evaluation.
    pub seconds: f64,
    /// `samples` per second.
    pub samples_per_second: f64,
    /// Embedding rows that exist at the end.
    pub rows: u64,
    /// Rows of data that could not be read and were left out.
    #[serde(default)]
    pub skipped_rows: u64,
    /// SHA-256 over all dense parameters and all rows in the order of their keys, in hexadecimal: equal exactly when the
    /// trained model is equal.
    #[schemars(length(max = 64))]
    pub parameters_sha256: String,
}

/// A checkpoint that exists as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CheckpointStatus {
    /// Its name under `spec.checkpoint.path`, as `rectrain checkpoint ls` prints it.
    #[schemars(length(max = 253))]
    pub name: String,
    /// The completed global steps that it holds.
    pub step: u64,
}

/// The pods that a job has, or is about to get: all of them are of one attempt, and an attempt never changes what its pods run.
/// A restart, a resumption and a change of what `specHash` is a digest of each begin a new one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttemptStatus {
    /// Counted from 1; the pods carry it as the label `rectrain.dev/attempt`.
    pub number: u32,
    /// Generation of the spec that its pods run.
    pub generation: i64,
    /// Digest of the parts of the spec that its pods depend on. Not among them is what changes while they run (the training mode,
    /// `training.auto`, and the `replicas` of the roles; those of dense workers only if `localBatchSize` gives each of them a part of a
    /// batch), and what the operator itself carries out (`autoscaling`, `faultTolerance`, `suspend`, `activeDeadlineSeconds`,
    /// `ttlSecondsAfterFinished`).
    #[schemars(length(max = 64))]
    pub spec_hash: String,
    /// Image that its pods run.
    #[schemars(length(max = 512))]
    pub image: String,
    /// Whether its pods speak with each other and with the operator only, by the certificate of the Secret `JOB-certificate`.
    #[serde(default)]
    pub tls: bool,
    /// Restarts that are counted in `restarts` and happened before this attempt.
    #[serde(default)]
    pub restarts_before: u32,
    /// Its pods are not made before this moment: the back-off after a crash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Time>,
    /// Its training mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<AttemptMode>,
    /// Its members, whose numbers change while it trains.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<AttemptReplicas>,
    /// The memory limit of its parameter servers in bytes, where that was raised above the manifest's after one of an earlier attempt was
    /// killed for its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ps_memory_bytes: Option<u64>,
}

/// The members of an attempt by role. Their numbers change while it trains, and nothing restarts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttemptReplicas {
    /// Parameter servers: slots move between them.
    pub ps: RoleReplicas,
    /// Embedding workers: batches to come go to as many as there are.
    pub embedding_worker: RoleReplicas,
    /// Dense workers: they join and leave at a step boundary, where `spec.training.localBatchSize` is set.
    pub dense_worker: RoleReplicas,
    /// Loaders.
    pub loader: RoleReplicas,
}

/// The members of one role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleReplicas {
    /// How many the coordinator starts with.
    pub started: u32,
    /// How many there are to be: `replicas` of the role, or what was decided since where `spec.autoscaling` carries decisions out.
    pub wanted: u32,
    /// Those that take part.
    pub present: u32,
    /// Pods that are needed: new ones come before they take part, and old ones go when they hold nothing that others need.
    pub needed: u32,
}

/// The training mode of an attempt: what it started in, and what was asked of its coordinator since. `status.mode` is the mode in
/// use, which a schedule (`spec.training.switchAt`) may have changed meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttemptMode {
    /// Mode that its coordinator starts in.
    pub started: Mode,
    /// Mode of the spec when this was written.
    pub wanted: Mode,
    /// Mode that its coordinator last agreed to go on in, if it was ever asked for one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted: Option<Mode>,
    /// The coordinator that agreed: uid of its pod and how often it had been restarted. One that starts again is in `started`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub accepted_by: Option<String>,
    /// Why `wanted` cannot be; training goes on in the mode that it is in.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub refused: Option<String>,
}

/// How fast the modes that `auto` chooses between would be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModePrediction {
    /// Rows a second in `sync`.
    pub sync: u64,
    /// Rows a second in `gba`.
    pub gba: u64,
    /// By how many percent the measured speed is off what is predicted for the mode in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_percent: Option<i64>,
}

/// The state of a job, written by the operator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RecTrainingJobStatus {
    /// Where the job is in its life.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,

    /// Conditions in Kubernetes' form. `Ready`, `Reconciling` and `Stalled` follow kstatus; `Complete`, `Failed` and
    /// `Suspended` tell the end. A condition's message says what to do. At most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,

    /// Generation of the spec that this status is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// Training mode in use. What the manifest asks for may be refused (condition `Stalled`, reason `ModeRefused`) or changed by the
    /// schedule `spec.training.switchAt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,

    /// Since when it is in use, as far as the operator saw.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode_since: Option<Time>,

    /// Why it is in use: the manifest, the schedule, or what `auto` decided on.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub mode_reason: Option<String>,

    /// What the automatic mode predicts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode_prediction: Option<ModePrediction>,

    /// The last decisions of the automatic mode and of autoscaling, oldest first: the newest eight
    /// about each subject, and older ones that still apply. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub decisions: Vec<DecisionStatus>,

    /// Completed global steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,

    /// Global steps in all, once known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,

    /// When the last step was seen to complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_progress_time: Option<Time>,

    /// Rows trained per second, all dense workers together, over the last report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples_per_second: Option<u64>,

    /// Mean loss (cross entropy, in nats) of the rows of the last report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,

    /// AUC of the latest evaluation, or of the training rows before the first, rounded to five decimals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auc: Option<f64>,

    /// The last checkpoint that this job's attempts have written or restored: where the next attempt goes on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_checkpoint: Option<CheckpointStatus>,

    /// Pods of each role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replica_statuses: Option<ReplicaStatuses>,

    /// Labels of the dense workers' pods, as the scale subresource wants them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub selector: Option<String>,

    /// Restarts after crashes, all roles together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u32>,

    /// Those of `restarts` that count against `spec.faultTolerance.maxRestarts` no more, because the job has trained for a day without another since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restarts_forgiven: Option<u32>,

    /// When the last of `restarts` was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_restart_time: Option<Time>,

    /// The pods that the job has now, or is about to get.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<AttemptStatus>,

    /// When the job was first given pods, or last resumed. `activeDeadlineSeconds` counts from here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,

    /// When the job was complete or had failed. `ttlSecondsAfterFinished` counts from here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,

    /// What the finished job has to show.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<JobSummary>,
}

impl RecTrainingJobStatus {
    /// The restarts that count against `spec.faultTolerance.maxRestarts`.
    #[must_use]
    pub fn counted_restarts(&self) -> u32 {
        self.restarts.unwrap_or(0).saturating_sub(self.restarts_forgiven.unwrap_or(0))
    }
}
