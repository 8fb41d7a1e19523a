//! A job without open questions: every default filled in, and every range of names expanded. Every
//! choice between alternatives is an enum whose variants hold exactly their own settings.
//! [`crate::validate`] makes it. The runtime and the operator read it and know no defaults of their
//! own.
//!
//! An `Option` here means that the thing itself may be absent (no test, no limit), never
//! "defaulted".

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use rectrain_kinds::{
    BadRows, Compression, DenseOptimizer, DeviceKind, EvictionKind, FileFormat, FollowConfig, Initializer, KafkaConfig,
    KeyDivisor, LossKind, Mode, ModelSettings, OutputModel, PartialPooling, PerRole, Pooling, Precision,
    RegressionRule, RowPriority, Schema, ShadowAlgorithm, SparseOptimizer, Split, SyncPieces, SyntheticConfig, Task,
    ValueType, WirePrecision,
};
use serde::Serialize;

use crate::{AutoscalingMode, Resume, SwitchSpec, WarmStart};

/// A whole job.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedJob {
    /// `metadata.name`.
    pub name: String,
    /// The model.
    pub model: ResolvedModel,
    /// The meaning of the columns.
    pub features: ResolvedFeatures,
    /// The source of the rows.
    pub data: ResolvedData,
    /// How the model is trained.
    pub training: ResolvedTraining,
    /// The number of members of each role.
    pub roles: ResolvedRoles,
    /// How roles are scaled automatically, if they are.
    pub autoscaling: Option<ResolvedAutoscaling>,
    /// Checkpoints, if any are written or read.
    pub checkpoint: Option<ResolvedCheckpoint>,
    /// Where the model is published, if it is.
    pub publish: Option<ResolvedPublish>,
    /// The checkpoint that the job begins with, if it is not initial values.
    pub warm_start: Option<WarmStart>,
    /// The handling of crashes.
    pub fault_tolerance: ResolvedFaultTolerance,
    /// True if the job is suspended.
    pub suspend: bool,
}

impl ResolvedJob {
    /// The labels that the model predicts. The manifest names one.
    #[must_use]
    pub fn tasks(&self) -> Vec<Task> {
        vec![Task { loss: self.training.loss, ..Task::only(&self.features.schema.label.name) }]
    }
}

/// The model.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedModel {
    /// The kind, with its sizes.
    #[serde(flatten)]
    pub settings: ModelSettings,
    /// Width of an embedding where the feature gives none; 0 for `lr`, which has no embeddings.
    pub embedding_dim: usize,
    /// Share of hidden activations set to 0, in [0, 1).
    pub dropout: f64,
}

/// The columns, and the embeddings of the sparse ones.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedFeatures {
    /// The columns that are read, at least one of them sparse.
    #[serde(flatten)]
    pub schema: Schema,
    /// The embedding of each sparse column, in the order of `schema.sparse`.
    pub embeddings: Vec<ResolvedEmbedding>,
    /// The tables of the embeddings, in the order of their first column.
    pub tables: Vec<ResolvedTable>,
    /// The budget of all tables together, and the order of evictions. `None`: nothing is evicted.
    pub memory: Option<ResolvedMemory>,
}

/// The budget of all tables together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedMemory {
    /// The limit.
    pub budget: ResolvedBudget,
    /// The order in which rows are evicted.
    pub eviction: ResolvedEviction,
}

/// A limit of the rows of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum ResolvedBudget {
    /// In rows.
    Rows(u64),
    /// In bytes.
    Bytes(u64),
}

/// The order in which rows are evicted. Numbers are integers, so that every process computes the
/// same scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedEviction {
    /// The policy.
    pub policy: EvictionKind,
    /// β for a day, in millionths: below 1,000,000.
    pub decay_per_day_millionths: u32,
    /// r, in thousandths.
    pub positive_weight_thousandths: u32,
}

/// The embedding of a sparse column.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedEmbedding {
    /// Width in values; 0 for `lr`.
    pub dim: usize,
    /// How several rows become one vector.
    pub pooling: Pooling,
    /// Position of its table in [`ResolvedFeatures::tables`].
    pub table: usize,
}

/// A table of embedding rows, shared by the features that name it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedTable {
    /// Its name, a part of the input of a key's hash.
    pub name: String,
    /// Width of its rows, in values; 0 for `lr`.
    pub dim: usize,
    /// The initial values of its rows.
    pub initializer: Initializer,
    /// Which ids get a row, and which rows are removed. `None`: every trained id keeps its row.
    pub life: Option<ResolvedLife>,
    /// The rows of a hashed table of fixed size. `None`: each id has a row of its own.
    pub hash_buckets: Option<u64>,
}

/// Which ids of a table get a row, and which rows are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedLife {
    /// Which ids get a row.
    pub admission: ResolvedAdmission,
    /// Seconds of event time without an update after which a row is removed.
    pub expire_after_seconds: Option<NonZeroU64>,
    /// When rows are evicted.
    pub priority: RowPriority,
    /// The most of the budget that the table may use, in millionths. `None`: all of it.
    pub share_millionths: Option<u32>,
}

/// Which ids get a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ResolvedAdmission {
    /// Every trained id.
    Always,
    /// An id at its update of this number.
    Count {
        /// At least 2.
        count: u32,
        /// Ids without a row that are counted at a time.
        counters: u64,
    },
    /// Each update admits an id with this probability.
    Probability {
        /// In units of 2⁻³², at least 1.
        per_2_32: u32,
    },
}

/// Where the rows come from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedData {
    /// The rows.
    pub source: DataSource,
    /// Rows of the window within which the training rows are shuffled; `None` keeps the files'
    /// order.
    pub shuffle_window_rows: Option<u64>,
    /// Access to object stores.
    pub storage: ResolvedStorage,
}

/// The rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum DataSource {
    /// From files.
    Files(FilePlan),
    /// Synthetic rows.
    Synthetic(SyntheticConfig),
    /// From a stream.
    Stream(StreamSource),
    /// From files that keep coming.
    Follow(FollowSource),
}

/// A stream to train on, and the files to test on.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StreamSource {
    /// The topics.
    pub kafka: KafkaConfig,
    /// The test files, in `test.parts`, with the treatment of bad rows and missing values of both.
    pub test: FilePlan,
    /// Secret whose entries become environment variables of the loaders, in a cluster.
    pub secret_name: Option<String>,
}

/// Files that keep coming, and the files to test on.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FollowSource {
    /// The paths, and how they are followed.
    pub follow: FollowConfig,
    /// The form of the files. `files.parts` has the paths to train on, and the test files.
    pub files: FilePlan,
}

/// The files, and which of their rows are the test.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FilePlan {
    /// The roles of the files.
    pub parts: TrainTest,
    /// The format of the files.
    pub format: FileFormat,
    /// The treatment of rows that cannot be read.
    pub bad_rows: BadRows,
    /// Texts that stand for a missing value, without blanks around them.
    pub null_values: Vec<String>,
}

/// The rows to train on and the rows to test on.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum TrainTest {
    /// Separate files.
    Separate {
        /// Training files; at least one.
        train: Vec<String>,
        /// Test files; if empty, there is no test.
        test: Vec<String>,
    },
    /// The same files, divided by row.
    Divided {
        /// The files; at least one.
        paths: Vec<String>,
        /// Which rows are the test.
        split: Split,
    },
    /// The same files, cut into slices. Each slice is the test of the model trained on the slices
    /// before it.
    Slices {
        /// The files; at least one.
        paths: Vec<String>,
        /// Rows of a slice, a multiple of the global batch.
        rows: u64,
    },
}

/// Access to object stores.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedStorage {
    /// Options of the client. They take precedence over the environment.
    pub options: BTreeMap<String, String>,
    /// Secret whose entries become environment variables, in a cluster.
    pub secret_name: Option<String>,
}

/// How the model is trained.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedTraining {
    /// The mode, or the first one where it is chosen automatically.
    pub mode: Mode,
    /// The sensitivity of automatic mode switches, if there are any.
    pub auto: Option<ResolvedAutoMode>,
    /// Rows of a step, over all dense workers together.
    pub global_batch_size: usize,
    /// When training ends.
    pub length: TrainingLength,
    /// Seed of everything random except synthetic rows.
    pub seed: u64,
    /// Rows of a local batch; `None` means an equal share of the global batch per dense worker.
    pub local_batch_size: Option<usize>,
    /// Dense workers that train in modes with a barrier; `None` means all.
    pub barrier_workers: Option<usize>,
    /// The steps that the mode `sync` looks ahead.
    pub look_ahead: u32,
    /// Which dense worker computes a piece in the mode `sync`.
    pub sync_pieces: SyncPieces,
    /// τ of the mode `hybrid`, in global steps.
    pub staleness: u32,
    /// ι of the mode `gba`, in global steps.
    pub gba_staleness: u32,
    /// The divisor of the sum of a key's gradients in the mode `gba`.
    pub gba_key_divisor: KeyDivisor,
    /// b1 of the mode `hopBs`, in local batches.
    pub hop_bs_bound: u32,
    /// b3 of the mode `hopBw`, in dense workers.
    pub hop_bw_backups: u32,
    /// b2 of the mode `bsp`, in local batches; `None` means the local batches of a global batch.
    pub bsp_aggregate: Option<u32>,
    /// How the mode `shadow` synchronises.
    pub shadow: ResolvedShadow,
    /// Switches of the mode, steps ascending.
    pub switch_at: Vec<SwitchSpec>,
    /// Optimizer of the dense parameters.
    pub dense_optimizer: DenseOptimizer,
    /// Optimizer of the embedding rows.
    pub sparse_optimizer: SparseOptimizer,
    /// Optimizer of the first-order weights; `None` means the one of the rows.
    pub first_order_optimizer: Option<SparseOptimizer>,
    /// How a value of a row is stored.
    pub embedding_value_type: ValueType,
    /// The number format of the products in linear layers.
    pub precision: Precision,
    /// How values travel.
    pub compression: Compression,
    /// Where the rows of features with several values are pooled.
    pub partial_pooling: PartialPooling,
    /// The loss of the label.
    pub loss: LossKind,
    /// When the test rows are evaluated.
    pub evaluation: ResolvedEvaluation,
    /// How the quality of predictions on training rows is watched.
    pub quality: ResolvedQuality,
    /// How many times a normal loss the loss of a batch may be.
    pub divergence_factor: f64,
}

/// How the quality of predictions on training rows is watched.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedQuality {
    /// The number of the latest predictions that count.
    pub window_rows: u64,
    /// The checkpoint of the frozen model, if there is one. It has a step.
    pub baseline: Option<WarmStart>,
    /// When the quality has fallen, if that matters.
    pub on_regression: Option<RegressionRule>,
}

/// How the mode `shadow` synchronises the replicas of the dense workers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedShadow {
    /// The algorithm.
    pub algorithm: ShadowAlgorithm,
    /// α, from 0.001 to 1.
    pub alpha: f64,
    /// Local batches between two exchanges that training waits for; `None` means that exchanges
    /// take place in the background.
    pub every_steps: Option<u32>,
    /// η of `bmuf`, from 0.001 to 2.
    pub eta: f64,
    /// The block momentum of `bmuf`, from 0 to 0.99.
    pub momentum: f64,
    /// Whether the momentum of `bmuf` is Nesterov's.
    pub nesterov: bool,
    /// The fragments of each parameter server's part of the dense parameters, from 1 to 256.
    pub fragments: u32,
    /// How values travel in an exchange.
    pub wire_precision: WirePrecision,
    /// The threads of a dense worker that train its replica, from 1 to 64.
    pub threads: u32,
    /// The model that training results in.
    pub output_model: OutputModel,
}

/// The sensitivity of the mode `auto`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedAutoMode {
    /// How much faster the other mode must be, as a share.
    pub margin: f64,
    /// Seconds over which predictions are averaged.
    pub window_seconds: u32,
    /// The shortest time in a mode, in seconds; at least the window.
    pub dwell_seconds: u32,
    /// The most switches per hour.
    pub switches_per_hour: u32,
    /// From this CPU share on, the cluster counts as crowded if others use it. The share is of the
    /// nodes' CPU, minus the job's requests.
    pub crowded_cpu: f64,
}

/// How roles are scaled.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedAutoscaling {
    /// The use of decisions.
    pub mode: AutoscalingMode,
    /// Parameter servers; `None` if an external scaler scales them.
    pub ps: Option<ResolvedPsScaling>,
    /// Embedding workers; `None` if an external scaler scales them.
    pub embedding_worker: Option<ResolvedEmbeddingWorkerScaling>,
    /// Dense workers; `None` if an external scaler scales them.
    pub dense_worker: Option<ResolvedDenseWorkerScaling>,
    /// Loaders; `None` if an external scaler scales them.
    pub loader: Option<ResolvedLoaderScaling>,
    /// Seconds between two decisions about a role.
    pub cool_down_seconds: u32,
    /// How long more replicas must have been needed, in seconds.
    pub up_window_seconds: u32,
    /// How long fewer replicas must have been enough, in seconds.
    pub down_window_seconds: u32,
}

/// The allowed numbers of replicas of a role: 1 ≤ `min` ≤ `max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedBounds {
    /// The lower bound.
    pub min: u32,
    /// The upper bound.
    pub max: u32,
}

/// How parameter servers are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedPsScaling {
    /// The allowed numbers of servers.
    pub bounds: ResolvedBounds,
    /// Target share of the memory limit for the fullest server.
    pub memory_target: f64,
    /// Target share of busy time for the busiest server.
    pub busy_target: f64,
    /// The most memory of one server; `None` means that the limit is never raised.
    pub max_memory_bytes: Option<u64>,
}

/// How embedding workers are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedEmbeddingWorkerScaling {
    /// The allowed numbers of workers.
    pub bounds: ResolvedBounds,
    /// Target mean wait of a batch in seconds; `None` means as long as a worker takes for it.
    pub queue_wait_seconds: Option<f64>,
}

/// How dense workers are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedDenseWorkerScaling {
    /// The allowed numbers of workers.
    pub bounds: ResolvedBounds,
    /// The least throughput that one more worker must add, as a share of the average worker's.
    pub marginal_throughput: f64,
    /// Price of one worker per hour.
    pub price_per_hour: Option<f64>,
    /// The highest cost of a million samples, in the same currency.
    pub max_cost_per_million_samples: Option<f64>,
}

/// How loaders are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedLoaderScaling {
    /// The allowed numbers of loaders.
    pub bounds: ResolvedBounds,
    /// Seconds in which the rows that wait should be read.
    pub catch_up_seconds: u32,
    /// Target share of the time that a loader reads.
    pub busy_target: f64,
    /// Target share of the time that dense workers wait for data that ends, from 0 to 1.
    pub wait_target: f64,
}

/// When training ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum TrainingLength {
    /// After this many passes over the training rows.
    Epochs(u32),
    /// After this many steps.
    Steps(u64),
}

/// When the test rows are evaluated, in addition to the end of training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ResolvedEvaluation {
    /// Only at the end.
    End,
    /// After each epoch.
    Epoch,
    /// After every this many steps.
    Steps(u64),
}

/// The number of members of each role.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedRoles {
    /// The members of each role.
    #[serde(flatten)]
    pub members: PerRole<ResolvedRole>,
    /// The device of the dense workers.
    pub device: DeviceKind,
    /// GPUs of each dense worker.
    pub gpus: u32,
}

/// A role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedRole {
    /// The number of members, at least 1.
    pub replicas: usize,
    /// Threads of each member; `None` means its share of the machine's cores.
    pub threads: Option<usize>,
}

/// Publications of the model. The checkpoints of the job are taken as often.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedPublish {
    /// Directory or URL.
    pub path: String,
    /// Seconds between two publications, at least 0.1; `None` means one for each checkpoint.
    pub every_seconds: Option<f64>,
    /// Full models to keep, at least 1.
    pub keep: usize,
    /// The least number of examples of a published row; `None` means that all rows are published.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_count: Option<u32>,
}

/// Checkpoints.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedCheckpoint {
    /// Directory or URL.
    pub path: String,
    /// Global batches between two checkpoints; `None` means one at the end.
    pub every_steps: Option<u64>,
    /// Seconds between two checkpoints, at least 0.1; `None` means none by time.
    pub every_seconds: Option<f64>,
    /// Every n-th checkpoint is a full one; at least 1.
    pub full_every: u32,
    /// Full checkpoints to keep, at least 1.
    pub keep: usize,
    /// The start of training.
    pub resume: Resume,
}

/// The handling of crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedFaultTolerance {
    /// The most restarts before the job fails.
    pub max_restarts: u32,
    /// Seconds before the first restart, at least 1.
    pub backoff_seconds: u32,
    /// Seconds without progress after which training counts as stalled. Progress is a trained
    /// batch, restored or saved data, an evaluated batch, or a file that was read. A dense worker
    /// that spends this long on one batch exits, and its replacement continues.
    pub stall_seconds: u32,
    /// Whether the rows of a parameter server outlive its process.
    pub shared_memory: bool,
    /// When slow pods are replaced; `None` if they are not.
    pub replace_slow: Option<ResolvedReplaceSlow>,
}

/// When slow pods are replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedReplaceSlow {
    /// Seconds for which the same pod must be slow.
    pub after_seconds: u32,
    /// The most replacements in an hour.
    pub per_hour: u32,
}
