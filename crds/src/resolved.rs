//! A job with nothing left to look up: every default filled in, every range of names written out, every choice between
//! alternatives made into an enum that holds just what belongs to it. [`crate::validate`] makes it; the runtime and the
//! operator read it and know no default of their own.
//!
//! An `Option` here means that the thing itself may be absent (no test, no dropout of rows to skip), never "defaulted".

use std::collections::BTreeMap;

use rectrain_kinds::{
    Compression, CrossStructure, DenseOptimizer, DeviceKind, Initializer, KeyDivisor, MissingValue, Mode, ModelKind,
    Pooling, Precision, SparseOptimizer, Transform, ValueType,
};
use serde::Serialize;

use crate::{AutoscalingMode, Resume, SwitchSpec};

/// A whole job.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedJob {
    /// `metadata.name`.
    pub name: String,
    /// The model.
    pub model: ResolvedModel,
    /// What the columns mean.
    pub features: ResolvedFeatures,
    /// Where the rows come from.
    pub data: ResolvedData,
    /// How the model is trained.
    pub training: ResolvedTraining,
    /// How many of each role there are.
    pub roles: ResolvedRoles,
    /// How roles are scaled, if they are.
    pub autoscaling: Option<ResolvedAutoscaling>,
    /// Checkpoints, if any are written or read.
    pub checkpoint: Option<ResolvedCheckpoint>,
    /// What happens after a crash.
    pub fault_tolerance: ResolvedFaultTolerance,
    /// Whether the job holds.
    pub suspend: bool,
}

/// The model, with the sizes its kind has. Sizes of layers are those of hidden layers; the output layer comes on top.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedModel {
    /// What is trained.
    pub kind: ModelKind,
    /// Width of an embedding where the feature gives none; 0 for `lr`, which has no embeddings.
    pub embedding_dim: usize,
    /// Widths of the hidden layers of the (top) MLP; empty for `fm` and `lr`.
    pub hidden: Vec<usize>,
    /// Widths of `dlrm`'s bottom MLP, the embedding dimension last; empty for other kinds and without dense features.
    pub bottom: Vec<usize>,
    /// Cross layers; 0 for kinds other than `dcnV2`.
    pub cross_layers: usize,
    /// How `dcnV2` combines crosses and MLP.
    pub cross_structure: CrossStructure,
    /// Rank of `dcnV2`'s cross matrices; `None` means full matrices.
    pub low_rank: Option<usize>,
    /// Share of hidden activations set to 0, in [0, 1).
    pub dropout: f64,
}

/// What the columns mean.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedFeatures {
    /// The column to predict.
    pub label: ResolvedLabel,
    /// Sparse features, ranges written out, in the order of the model's inputs. At least one.
    pub sparse: Vec<ResolvedSparse>,
    /// Dense features, ranges written out, in the order of the model's inputs.
    pub dense: Vec<ResolvedDense>,
    /// The column that groups the rows for GAUC.
    pub group: Option<String>,
    /// The tables of the sparse features, in the order of their first feature.
    pub tables: Vec<ResolvedTable>,
}

/// The column to predict.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedLabel {
    /// Its name.
    pub column: String,
    /// A row is positive from this value on; `None` means the value lies in [0, 1] already.
    pub positive_from: Option<f64>,
}

/// A sparse feature.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedSparse {
    /// The column.
    pub name: String,
    /// Width of its embedding, in values; 0 for `lr`.
    pub dim: usize,
    /// How several rows become one vector.
    pub pooling: Pooling,
    /// Character between two values of a cell; `None` means one value per cell.
    pub separator: Option<char>,
    /// Position of its table in [`ResolvedFeatures::tables`].
    pub table: usize,
    /// What an empty cell becomes.
    pub missing: MissingValue,
}

/// A table of embedding rows, shared by the features that name it.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedTable {
    /// Its name, part of what is hashed to a key.
    pub name: String,
    /// Width of its rows, in values; 0 for `lr`.
    pub dim: usize,
    /// Where its rows start.
    pub initializer: Initializer,
}

/// A dense feature.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedDense {
    /// The column.
    pub name: String,
    /// What is done to the number.
    pub transform: Transform,
    /// What the model sees for an empty cell, after the transform.
    pub missing: f32,
}

/// Where the rows come from.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedData {
    /// The rows.
    pub source: DataSource,
    /// Rows of a window within which the training rows are permuted; `None` keeps the order of the files.
    pub shuffle_window_rows: Option<u64>,
    /// How object stores are reached.
    pub storage: ResolvedStorage,
}

/// The rows.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum DataSource {
    /// From files.
    Files(FilePlan),
    /// Made up.
    Synthetic(ResolvedSynthetic),
}

/// Files, and which of their rows are the test.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FilePlan {
    /// Which of them are for what.
    pub parts: TrainTest,
    /// How they are read.
    pub format: FileFormat,
    /// What is done with rows that cannot be read.
    pub bad_rows: ResolvedBadRows,
}

/// Which rows train and which test.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum TrainTest {
    /// Files of their own.
    Separate {
        /// To train on; at least one.
        train: Vec<String>,
        /// To test on; empty means that nothing is tested.
        test: Vec<String>,
    },
    /// The same files, divided by row.
    Divided {
        /// At least one.
        paths: Vec<String>,
        /// Which rows are the test.
        split: ResolvedSplit,
    },
}

/// Which rows of the files are the test.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ResolvedSplit {
    /// All but the first so many.
    Position {
        /// Rows that train.
        train_rows: u64,
    },
    /// All but the first share.
    Fraction {
        /// Share that trains, in (0, 1).
        train: f64,
    },
    /// Those from a moment on.
    Time {
        /// The column of the time.
        column: String,
        /// The first moment of the test.
        test_from: ResolvedTime,
    },
    /// Each slice is the test of the model trained on those before it.
    Slices {
        /// Rows of a slice, a multiple of the global batch.
        rows: u64,
    },
}

/// A moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ResolvedTime {
    /// Compared as a number.
    Number(f64),
    /// Compared byte by byte.
    Text(String),
}

/// The format of files.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum FileFormat {
    /// Text, one row a line.
    Csv(ResolvedCsv),
    /// Apache Parquet.
    Parquet,
}

/// How text is cut into cells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedCsv {
    /// ASCII byte between two cells.
    pub delimiter: u8,
    /// Whether each file's first line is a header.
    pub header: bool,
    /// Names of the columns, ranges written out; `None` means those of the header.
    pub columns: Option<Vec<String>>,
    /// Whether cells may stand in double quotes.
    pub quoting: bool,
}

/// What is done with rows that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ResolvedBadRows {
    /// The first one ends training.
    Fail,
    /// They are counted and left out.
    Skip {
        /// As many are tolerated.
        limit: u64,
    },
}

/// Made-up rows with Criteo's columns `label`, `I1` … and `C1` ….
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedSynthetic {
    /// Rows of an epoch.
    pub rows: u64,
    /// Rows of the test.
    pub test_rows: u64,
    /// Different ids of `C1`, `C2` …, up to the last one that a feature names.
    pub vocabularies: Vec<u64>,
    /// Columns `I1`, `I2` …, up to the last one that a feature names.
    pub dense: usize,
    /// Exponent of the ids' Zipf distribution.
    pub zipf_exponent: f64,
    /// Seed of the rows and of the teacher.
    pub seed: u64,
}

/// How object stores are reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedStorage {
    /// Options of the client, which win over the environment's.
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
    /// How readily the mode is switched automatically, if it is.
    pub auto: Option<ResolvedAutoMode>,
    /// Rows of a step, over all dense workers together.
    pub global_batch_size: usize,
    /// When training ends.
    pub length: TrainingLength,
    /// Seed of everything random but synthetic rows.
    pub seed: u64,
    /// Rows of a local batch; `None` means an equal share of the global batch for each dense worker.
    pub local_batch_size: Option<usize>,
    /// Dense workers that train where each step has a barrier; `None` means all.
    pub barrier_workers: Option<usize>,
    /// τ of the mode `hybrid`, in global steps.
    pub staleness: u32,
    /// ι of the mode `gba`, in global steps.
    pub gba_staleness: u32,
    /// What the sum of a key's gradients is divided by in the mode `gba`.
    pub gba_key_divisor: KeyDivisor,
    /// b1 of the mode `hopBs`, in local batches.
    pub hop_bs_bound: u32,
    /// b3 of the mode `hopBw`, in dense workers.
    pub hop_bw_backups: u32,
    /// b2 of the mode `bsp`, in local batches; `None` means those of a global batch.
    pub bsp_aggregate: Option<u32>,
    /// Switches of the mode, steps ascending.
    pub switch_at: Vec<SwitchSpec>,
    /// Optimizer of the dense parameters.
    pub dense_optimizer: DenseOptimizer,
    /// Optimizer of the embedding rows.
    pub sparse_optimizer: SparseOptimizer,
    /// How a value of a row is stored.
    pub embedding_value_type: ValueType,
    /// What the products of linear layers are computed in.
    pub precision: Precision,
    /// How values travel.
    pub compression: Compression,
    /// When the test rows are evaluated.
    pub evaluation: ResolvedEvaluation,
}

/// How readily the mode `auto` switches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedAutoMode {
    /// How much faster the other mode must be, as a share.
    pub margin: f64,
    /// Seconds that predictions are averaged over.
    pub window_seconds: u32,
    /// Seconds that a mode stays at least, no less than the window.
    pub dwell_seconds: u32,
    /// Switches an hour at most.
    pub switches_per_hour: u32,
    /// Share of the nodes' CPU, less what the job requests, from which on the cluster counts as crowded if others use it.
    pub crowded_cpu: f64,
}

/// How roles are scaled.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedAutoscaling {
    /// What becomes of decisions.
    pub mode: AutoscalingMode,
    /// Parameter servers, unless somebody else scales them.
    pub ps: Option<ResolvedPsScaling>,
    /// Embedding workers, unless somebody else scales them.
    pub embedding_worker: Option<ResolvedEmbeddingWorkerScaling>,
    /// Dense workers, unless somebody else scales them.
    pub dense_worker: Option<ResolvedDenseWorkerScaling>,
    /// Seconds between two decisions about a role.
    pub cool_down_seconds: u32,
    /// Seconds for which more replicas must have been needed.
    pub up_window_seconds: u32,
    /// Seconds for which fewer must have been enough.
    pub down_window_seconds: u32,
}

/// How many replicas a role may have: 1 ≤ `min` ≤ `max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedBounds {
    /// At least.
    pub min: u32,
    /// At most.
    pub max: u32,
}

/// How parameter servers are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedPsScaling {
    /// How many there may be.
    pub bounds: ResolvedBounds,
    /// Share of the memory limit that the fullest should use.
    pub memory_target: f64,
    /// Share of the time that the busiest should work.
    pub busy_target: f64,
    /// Memory that one may be given at most; `None` means that it is not raised.
    pub max_memory_bytes: Option<u64>,
}

/// How embedding workers are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedEmbeddingWorkerScaling {
    /// How many there may be.
    pub bounds: ResolvedBounds,
    /// Mean seconds that a batch should wait; `None` means as long as it is worked on.
    pub queue_wait_seconds: Option<f64>,
}

/// How dense workers are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedDenseWorkerScaling {
    /// How many there may be.
    pub bounds: ResolvedBounds,
    /// What one more should add, as a share of what each adds on average.
    pub marginal_throughput: f64,
    /// Price of one for an hour.
    pub price_per_hour: Option<f64>,
    /// What a million samples may cost at most, in the same currency.
    pub max_cost_per_million_samples: Option<f64>,
}

/// When training ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum TrainingLength {
    /// After so many passes over the training rows.
    Epochs(u32),
    /// After so many steps.
    Steps(u64),
}

/// When the test rows are evaluated; the end of training always counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ResolvedEvaluation {
    /// Only at the end.
    End,
    /// After each epoch.
    Epoch,
    /// After every so many steps.
    Steps(u64),
}

/// How many of each role there are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedRoles {
    /// Parameter servers.
    pub ps: ResolvedRole,
    /// Embedding workers.
    pub embedding_worker: ResolvedRole,
    /// Dense workers.
    pub dense_worker: ResolvedRole,
    /// What the dense workers compute on.
    pub device: DeviceKind,
    /// GPUs of each dense worker.
    pub gpus: u32,
    /// Loaders.
    pub loader: ResolvedRole,
}

/// A role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedRole {
    /// How many there are, at least 1.
    pub replicas: usize,
    /// Threads of each; `None` means its share of the machine's cores.
    pub threads: Option<usize>,
}

/// Checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedCheckpoint {
    /// Directory or URL.
    pub path: String,
    /// Global batches between two; `None` means one at the end.
    pub every_steps: Option<u64>,
    /// Every how many a full one is written, at least 1.
    pub full_every: u32,
    /// As many full ones are kept, at least 1.
    pub keep: usize,
    /// Where training starts.
    pub resume: Resume,
}

/// What happens after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ResolvedFaultTolerance {
    /// Restarts after which the job has failed.
    pub max_restarts: u32,
    /// Seconds before the first restart, at least 1.
    pub backoff_seconds: u32,
    /// Seconds without progress after which training counts as stalled: in which no batch was
    /// trained, nothing was restored or saved, no evaluation got on and no file was read. A dense worker
    /// that has been at one batch for as long ends, and another takes its place.
    pub stall_seconds: u32,
    /// Whether rows of a parameter server outlive its process.
    pub shared_memory: bool,
}
