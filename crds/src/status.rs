//! `status`: the operator's report. Users read it; only the operator writes it.

// kube's derive repeats each struct, with `pub`, inside a function.
#![allow(unreachable_pub)]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{DecisionStatus, Mode, PerRole, Role, UnseenShares};

/// Phase of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum Phase {
    /// Accepted; nothing has been created for it yet.
    Pending,
    /// Its roles are starting.
    Starting,
    /// Training steps are in progress.
    Training,
    /// The test rows are being evaluated.
    Evaluating,
    /// A crash, or a change of the manifest that needs a new attempt, ended all roles. They start
    /// again, from the last checkpoint if there is one.
    Restarting,
    /// Suspended by `spec.suspend`.
    Suspended,
    /// Trained and tested.
    Complete,
    /// Ended without a model. The condition `Failed` has the reason and the remedy.
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
    /// Pods that should exist.
    pub wanted: u32,
    /// Both numbers as `kubectl get` prints them: `ready/wanted`.
    #[schemars(length(max = 32))]
    pub display: String,
}

impl ReplicaCount {
    /// `ready` of `wanted` pods.
    pub fn new(ready: u32, wanted: u32) -> Self {
        Self { ready, wanted, display: format!("{ready}/{wanted}") }
    }
}

/// The number of pods of each role.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplicaStatuses {
    /// The coordinator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub coordinator: Option<ReplicaCount>,
    /// The members. A status of another version may lack a role.
    #[serde(flatten)]
    pub members: PerRole<Option<ReplicaCount>>,
}

impl ReplicaStatuses {
    /// Counts the pods of each role.
    pub fn from_fn(mut count: impl FnMut(Role) -> ReplicaCount) -> Self {
        Self { coordinator: Some(count(Role::Coordinator)), members: PerRole::from_fn(|role| Some(count(role))) }
    }

    /// The counts of the roles that have one.
    pub fn by_role(&self) -> impl Iterator<Item = (Role, &ReplicaCount)> {
        Role::ALL.into_iter().filter_map(|role| {
            let count = self.members.get(role).unwrap_or(&self.coordinator);
            Some((role, count.as_ref()?))
        })
    }
}

/// Results of a finished job: the same numbers as the last line of `rectrain run --json`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct JobSummary {
    /// Area under the ROC curve of the test rows. 0.5 is chance, 1 is perfect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auc: Option<f64>,
    /// Mean of the groups' AUCs, weighted by their rows, if the manifest names a group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gauc: Option<f64>,
    /// Test rows that GAUC leaves out because their group is missing, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rows_without_group: Option<u64>,
    /// Mean cross entropy of the test rows, in nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub log_loss: Option<f64>,
    /// `logLoss` divided by the log loss of always predicting the mean label. Below 1 is better.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub normalized_entropy: Option<f64>,
    /// Sum of the predictions divided by the sum of the labels. 1 is calibrated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<f64>,
    /// By sparse feature: the share of its test ids that no training row had, from 0 to 1. An id
    /// counts for each row and each of its values. At most 32, the highest shares.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub unseen: UnseenShares,
    /// Completed global steps.
    pub steps: u64,
    /// Rows trained on; each epoch counts again.
    pub samples: u64,
    /// Seconds of training, without start and evaluation.
    pub seconds: f64,
    /// `samples` per second.
    pub samples_per_second: f64,
    /// Embedding rows that exist at the end.
    pub rows: u64,
    /// The history of the tables' rows, if some table does not keep every row.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub table: Option<TableSummary>,
    /// Rows of data that could not be read and were skipped.
    #[serde(default)]
    pub skipped_rows: u64,
    /// SHA-256 over all dense parameters and all rows in the order of their keys, in hexadecimal.
    /// Equal exactly if the trained models are equal.
    #[schemars(length(max = 64))]
    pub parameters_sha256: String,
}

/// The history of rows in tables that do not keep every row. It lacks the counts of earlier
/// attempts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TableSummary {
    /// Rows at the end.
    pub rows: u64,
    /// Bytes of the rows and their index at the end.
    pub bytes: u64,
    /// Rows made for ids that an admission admitted.
    pub admitted: u64,
    /// Gradients dropped because their id was not admitted.
    pub turned_away: u64,
    /// Rows removed because they were not updated for `expireAfter`.
    pub expired: u64,
    /// Rows removed because the tables were beyond their budget.
    pub evicted: u64,
    /// Gradients dropped because their row had been removed.
    pub gradients_dropped: u64,
}

/// A complete checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CheckpointStatus {
    /// Its name under `spec.checkpoint.path`, as `rectrain checkpoint ls` prints it.
    #[schemars(length(max = 253))]
    pub name: String,
    /// The number of completed global steps in it.
    pub step: u64,
}

/// The pods that a job has, or is about to get. All of them belong to one attempt, and an attempt
/// never changes what its pods run. A restart, a resumption, and a change of anything in `specHash`
/// each start a new attempt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttemptStatus {
    /// Counts from 1. The pods carry it as the label `rectrain.dev/attempt`.
    pub number: u32,
    /// Generation of the spec that its pods run.
    pub generation: i64,
    /// Digest of the parts of the spec that its pods depend on. It leaves out settings that may
    /// change while they run: the training mode, `training.auto`, the number in `features.memory`,
    /// and the `replicas` of the roles.
    /// (The `replicas` of dense workers are left out only if `localBatchSize` gives each of them a
    /// part of a batch.) It also leaves out settings that the operator itself carries out:
    /// `autoscaling`, `faultTolerance`, `suspend`, `activeDeadlineSeconds`,
    /// `ttlSecondsAfterFinished`.
    #[schemars(length(max = 64))]
    pub spec_hash: String,
    /// Image that its pods run.
    #[schemars(length(max = 512))]
    pub image: String,
    /// True if its pods accept only connections with the certificate of the Secret
    /// `JOB-certificate`, which only they and the operator have.
    #[serde(default)]
    pub tls: bool,
    /// Restarts counted in `restarts` before this attempt.
    #[serde(default)]
    pub restarts_before: u32,
    /// Its pods are not created before this time: the back-off after a crash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Time>,
    /// Its training mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<AttemptMode>,
    /// Its members. Their numbers change while it trains.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<AttemptReplicas>,
    /// The memory limit of its parameter servers in bytes, if it was raised above the manifest's.
    /// It is raised after a server of an earlier attempt was killed for its memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ps_memory_bytes: Option<u64>,
    /// The memory budget of the tables that its pods start with. The coordinator changes it while
    /// they run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<BudgetStatus>,
}

/// The memory budget of all tables of a job, in rows or in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BudgetStatus {
    /// The most rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_rows: Option<u64>,
    /// The most bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_bytes: Option<u64>,
}

/// The size of all tables of a job, some seconds old.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TablesStatus {
    /// Embedding rows.
    pub rows: u64,
    /// Bytes of the rows and their index.
    pub bytes: u64,
    /// The memory budget of the tables, if they have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<BudgetStatus>,
}

/// The members of an attempt by role. Their numbers change while it trains, without a restart.
pub type AttemptReplicas = PerRole<RoleReplicas>;

/// The members of one role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RoleReplicas {
    /// The number that the coordinator starts with.
    pub started: u32,
    /// The target number: the role's `replicas`, or a later decision if `spec.autoscaling` carries
    /// decisions out.
    pub wanted: u32,
    /// The members that participate.
    pub present: u32,
    /// The pods that are needed. New pods start before they participate, and old ones go when no
    /// member needs anything from them.
    pub needed: u32,
}

/// The training mode of an attempt: the initial one, and later requests to its coordinator.
/// `status.mode` is the mode in use, which a schedule (`spec.training.switchAt`) may have changed
/// meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AttemptMode {
    /// The mode in which its coordinator starts.
    pub started: Mode,
    /// The mode in the spec when this was written.
    pub wanted: Mode,
    /// The last mode that its coordinator accepted, if it was ever asked for one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accepted: Option<Mode>,
    /// The coordinator that accepted it: the uid of its pod, and its number of restarts. A
    /// restarted coordinator is in `started`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 128))]
    pub accepted_by: Option<String>,
    /// Why `wanted` is refused. Training continues in its current mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 2048))]
    pub refused: Option<String>,
}

/// Predicted speed of the modes that `auto` chooses between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ModePrediction {
    /// Rows per second in `sync`.
    pub sync: u64,
    /// Rows per second in `gba`.
    pub gba: u64,
    /// The difference between the measured and the predicted speed of the mode in use, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error_percent: Option<i64>,
}

/// A member that is slow compared to its peers, or to its own earlier pace if it has none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SlowestStatus {
    /// Its role, as in `spec.roles`.
    #[schemars(length(max = 32))]
    pub role: String,
    /// Its index in the role, from 0.
    pub index: u32,
    /// Its pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// The node of its pod, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node: Option<String>,
    /// The share of a step's time that its slowness costs, from 0 to 1, in tenths.
    pub share: f64,
    /// When it became slow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
}

/// A pod that was replaced because it stayed slow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplacedPod {
    /// Its role, as in `spec.roles`.
    #[schemars(length(max = 32))]
    pub role: String,
    /// Its name. The replacement has the same.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// Its uid.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// Its node, which new pods of the role avoid for a day.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node: Option<String>,
    /// The time of the decision.
    pub time: Time,
    /// Why it was replaced.
    #[schemars(length(max = 1024))]
    pub reason: String,
}

/// How far training is behind its stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct StreamStatus {
    /// Records that wait at the brokers. Gaps between offsets count, too.
    pub lag_rows: u64,
    /// The age of the latest record that was read, in seconds; 0 if no record waits.
    pub lag_seconds: u64,
    /// The time of that record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event_time: Option<Time>,
    /// Records that the brokers deleted before they were trained, or that a rollback left out.
    pub lost_records: u64,
    /// Partitions of the topics. No more loaders than these read at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partitions: Option<u32>,
}

/// The quality of predictions on the latest training rows, each made before its row was learned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WindowStatus {
    /// Area under the ROC curve, rounded to four decimals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auc: Option<f64>,
    /// Log loss over the entropy of the base rate, rounded to four decimals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub normalized_entropy: Option<f64>,
    /// Mean prediction over mean label, rounded to four decimals.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<f64>,
    /// Rows of the window.
    pub rows: u64,
}

/// The quality of the latest predictions on training rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QualityStatus {
    /// Of the model that trains.
    pub window: WindowStatus,
    /// Of the frozen model in `spec.training.quality.baseline`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baseline: Option<WindowStatus>,
    /// True if the quality has fallen, as `spec.training.quality.onRegression` says.
    pub has_fallen: bool,
    /// True if training waits for that reason.
    pub is_held: bool,
}

impl QualityStatus {
    /// Both AUCs and the state, such as `AUC 0.7000, frozen 0.6500; it has fallen`. `None` without
    /// a prediction, unless training waits.
    #[must_use]
    pub fn text(&self) -> Option<String> {
        let Some(auc) = self.window.auc else {
            return self.is_held.then(|| "the quality has fallen, and training waits".to_owned());
        };
        let frozen = self.baseline.and_then(|baseline| baseline.auc);
        let frozen = frozen.map_or_else(String::new, |frozen| format!(", frozen {frozen:.4}"));
        let state = match (self.is_held, self.has_fallen) {
            (true, _) => "; it has fallen, and training waits",
            (false, true) => "; it has fallen",
            (false, false) => "",
        };
        Some(format!("AUC {auc:.4}{frozen}{state}"))
    }
}

/// The state of a job, written by the operator.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RecTrainingJobStatus {
    /// Phase of the job.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,

    /// Conditions in Kubernetes' form. `Ready`, `Reconciling` and `Stalled` follow kstatus.
    /// `Complete`, `Failed` and `Suspended` report the end. `Checkpointed` tells whether the
    /// training outlives a suspension. A condition's message contains the remedy. At most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".to_string()]))]
    pub conditions: Vec<Condition>,

    /// Generation of the spec that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,

    /// Training mode in use. The manifest's mode may be refused (condition `Stalled`, reason
    /// `ModeRefused`), or changed by the schedule `spec.training.switchAt`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<Mode>,

    /// When the mode came into use, as far as the operator saw it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode_since: Option<Time>,

    /// Why the mode is in use: the manifest, the schedule, or a decision of `auto` with its time.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub mode_reason: Option<String>,

    /// Predictions of the automatic mode.
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

    /// Total number of global steps, once known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_steps: Option<u64>,

    /// When the operator last saw a step complete.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_progress_time: Option<Time>,

    /// Rows trained per second in the last report, all dense workers together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples_per_second: Option<u64>,

    /// The member that slows training the most. Otherwise a slow one whose work has moved to other
    /// members, with a share of 0. Absent if none is slow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slowest: Option<SlowestStatus>,

    /// The pods that were replaced within a day because they stayed slow
    /// (`spec.faultTolerance.replaceSlow`), oldest first. At most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub replaced_pods: Vec<ReplacedPod>,

    /// How far training is behind its stream. Absent for a job on files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stream: Option<StreamStatus>,

    /// The quality of the latest predictions on training rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quality: Option<QualityStatus>,

    /// Mean loss (cross entropy, in nats) of the rows in the last report.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,

    /// AUC of the latest evaluation, rounded to five decimals. Before the first evaluation, AUC of
    /// the training rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auc: Option<f64>,

    /// By sparse feature: the share of its test ids that no training row had, from 0 to 1, in the
    /// latest evaluation. At most 32, the highest shares.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub unseen: UnseenShares,

    /// The rows and bytes of the tables while the job trains, and their budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tables: Option<TablesStatus>,

    /// The last checkpoint that this job's attempts have written or restored. The next attempt
    /// continues from it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_checkpoint: Option<CheckpointStatus>,

    /// Pods of each role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replica_statuses: Option<ReplicaStatuses>,

    /// Labels of the dense workers' pods, for the scale subresource.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub selector: Option<String>,

    /// Restarts after crashes, all roles together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u32>,

    /// Restarts in `restarts` that no longer count against `spec.faultTolerance.maxRestarts`,
    /// because the job has since trained for a day without another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restarts_forgiven: Option<u32>,

    /// Time of the last of `restarts`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_restart_time: Option<Time>,

    /// The pods that the job has, or is about to get.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt: Option<AttemptStatus>,

    /// When the job first got pods, or was last resumed. `activeDeadlineSeconds` counts from here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_time: Option<Time>,

    /// When the job completed or failed. `ttlSecondsAfterFinished` counts from here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_time: Option<Time>,

    /// The results of the finished job.
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
