//! The plan of a job: the manifest, resolved into the types of the runtime.
//! Every member computes the same plan from the same manifest. Nothing in it depends on the member.

mod baseline;
mod checkpoint;
mod identity;
mod life;
mod resolve;
mod small;
mod warm_start;

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::time::Duration;

use rectrain_crds::DeviceKind;
use rectrain_data::{Format, Schema, SourceConfig};
use rectrain_dense::{
    ComputeDevice, DenseError, DenseOptimizer, GPU_SUPPORT, ModelConfig, Precision, Task, Tasks, Tower, TowerOptions,
};
use rectrain_embedding::StoreConfig;
use rectrain_kinds::{Compression, FollowConfig, KafkaConfig, KeyDivisor, PartialPooling, RegressionAction};
use rectrain_modes::des::SubOperators;
use rectrain_modes::migration::SlotMap;
use rectrain_modes::{EvaluationPoints, Rank, StreamParts, StreamPlan, TrainingLength, TrainingMode, share_of_batch};
use rectrain_policy::{ModePolicy, Policy};

pub use self::baseline::{BaselinePlan, QualityPlan};
pub use self::checkpoint::{CheckpointPlan, PublishPlan};
pub use self::small::small_plan;
pub use self::warm_start::{Inheritance, WarmStartPlan};
use crate::deadline::CALL_DEADLINE;
use crate::error::RoleError;
use crate::events::{JobEvent, WarmStartOrigin};
use crate::layout::FeatureLayout;
use crate::limits::{UNREPORTED, UNREPORTED_OF_THREAD};
use rectrain_kinds::{PerRole, Role};

/// Virtual shards of the embedding table.
const SLOTS: u32 = 1024;

/// The number of members of each role.
pub type Replicas = PerRole<u32>;

/// The plan of a job, equal on all members.
#[derive(Debug, Clone)]
pub struct JobPlan {
    /// The job's name.
    pub name: String,
    /// The first training mode.
    pub mode: TrainingMode,
    /// All modes with the job's settings, in the order of [`Mode::ALL`](rectrain_kinds::Mode::ALL).
    pub modes: Vec<TrainingMode>,
    /// Scheduled switches of the mode: the global batches trained before each, ascending, and the
    /// mode from there on.
    pub switches: Vec<(u64, TrainingMode)>,
    /// How the coordinator chooses between `sync` and `gba`; `None` if it does not choose.
    pub auto: Option<ModePolicy>,
    /// How the coordinator decides on the number of loaders; `None` if it does not.
    pub loader_scaling: Option<Policy>,
    /// The divisor of a key's gradients in `gba`.
    pub key_divisor: KeyDivisor,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Samples of a global step.
    pub global_batch_rows: u64,
    /// Rows of a local batch. The last local batch of a global batch may be smaller.
    pub local_batch_rows: u64,
    /// Dense workers, from rank 0, that train with a barrier; `None`: all.
    pub barrier_workers: Option<u32>,
    /// Whether each evaluation uses the next slice of the training data. A slice is then a chunk.
    pub tests_on_the_next_slice: bool,
    /// Global batches in a chunk. A loader leases one chunk at a time.
    pub batches_per_chunk: u64,
    /// Where training ends.
    pub length: TrainingLength,
    /// Seed of the shuffle within chunks; `None` if the data is not shuffled.
    pub shuffle: Option<u64>,
    /// When the model is evaluated.
    pub evaluation: EvaluationPoints,
    /// Columns of the data.
    pub schema: Schema,
    /// Training data.
    pub train: SourceConfig,
    /// Test data.
    pub test: Option<SourceConfig>,
    /// The position of each sparse feature's rows and pooled embeddings.
    pub layout: FeatureLayout,
    /// The embedding store of every parameter server.
    pub store: StoreConfig,
    /// The labels that the model predicts. The manifest names one.
    pub tasks: Vec<Task>,
    /// The dense part of the model.
    pub model: ModelConfig,
    /// The optimizer of the dense parameters.
    pub dense_optimizer: DenseOptimizer,
    /// Threads of a dense worker; 0: one for each core.
    pub dense_threads: usize,
    /// The device that a dense worker computes on.
    pub dense_device: DeviceKind,
    /// The precision of the products in a dense worker's linear layers.
    pub precision: Precision,
    /// How values are compressed in messages.
    pub compression: Compression,
    /// Where the rows of features with several values are pooled.
    pub partial_pooling: PartialPooling,
    /// Checkpoints; `None` if the job saves none.
    pub checkpoint: Option<CheckpointPlan>,
    /// Where the model is published; `None`: nowhere.
    pub publish: Option<PublishPlan>,
    /// The checkpoint of another job that this job begins with; `None`: initial values.
    pub warm_start: Option<WarmStartPlan>,
    /// How the quality of predictions on training rows is watched.
    pub quality: QualityPlan,
    /// How many times a normal loss the mean loss of a batch may be, before training has diverged.
    pub divergence_factor: f64,
    /// Restarts after crashes before the job fails.
    pub max_restarts: u32,
    /// Back-off before the first restart.
    pub backoff: Duration,
    /// Time without progress after which training counts as stalled.
    pub stall: Duration,
    /// Whether the rows of a parameter server outlive its process, in a job of several processes.
    pub shared_memory: bool,
    /// Members of each role.
    pub replicas: Replicas,
    /// Global batches whose ids embedding workers receive ahead of the one that is trained.
    pub batches_ahead: u64,
    /// In `sync`: the steps beyond the present one whose rows are requested early. See
    /// [`Self::look_ahead`].
    pub look_ahead_steps: u64,
}

impl JobPlan {
    /// The slot map at the start of the job.
    #[must_use]
    pub fn slot_map(&self) -> SlotMap {
        SlotMap::even(self.store.slots, self.replicas.ps.min(u32::from(u16::MAX)) as u16)
    }

    /// The settings of the stream that the job trains on; `None` if it trains on files that are
    /// known at its start. Files that keep coming are a stream, too.
    #[must_use]
    pub fn stream(&self) -> Option<StreamPlan> {
        let (until, lost_records, parts) = match &self.train.format {
            Format::Kafka(KafkaConfig { until, lost_records, .. }) => (*until, *lost_records, StreamParts::Growing),
            Format::Follow(_, follow) => (None, follow.lost_files, StreamParts::Whole),
            _ => return None,
        };
        Some(StreamPlan { chunk_rows: self.global_batch_rows, until, lost_records, parts })
    }

    /// Whether training goes back when the quality of its predictions falls. Then the job's members
    /// restart, so they cannot be threads of one process.
    #[must_use]
    pub fn rolls_back(&self) -> bool {
        self.quality.on_regression.is_some_and(|rule| rule.action == RegressionAction::Rollback)
    }

    /// The consumer group for which offsets are committed; `None` if there is none.
    #[must_use]
    pub fn group(&self) -> Option<&str> {
        match &self.train.format {
            Format::Kafka(KafkaConfig { group, .. }) => group.as_deref(),
            _ => None,
        }
    }

    /// The paths that the job follows; `None` if it follows none.
    #[must_use]
    pub fn follow(&self) -> Option<&FollowConfig> {
        match &self.train.format {
            Format::Follow(_, follow) => Some(follow),
            _ => None,
        }
    }

    /// Deadline of a call that waits for another member to do its part. It is at least the time
    /// after which the job counts as stalled.
    #[must_use]
    pub fn patience(&self) -> Duration {
        CALL_DEADLINE.max(self.stall)
    }

    /// In `sync`: the steps beyond the present one whose look-ups may be answered early. 0 if every
    /// look-up waits for the update before.
    ///
    /// It is 0 if a table does not keep all its rows. The rows of such a table depend on more than
    /// the updates of their keys.
    #[must_use]
    pub fn look_ahead(&self) -> u64 {
        let keeps_rows = !self.has_managed_rows() && self.store.budget.is_none();
        if keeps_rows { self.look_ahead_steps } else { 0 }
    }

    /// Concurrent calls allowed on one connection. In `sync`, all pieces of the batches that are
    /// looked up ahead may wait at a parameter server, of two batches at least. The calls that
    /// unblock them need room too.
    #[must_use]
    pub fn max_concurrent_calls(&self) -> usize {
        1024 + (1 + self.look_ahead().max(1) as usize) * self.pieces() as usize
    }

    /// Whether free dense workers pull the pieces of a step in `sync`. Any dense worker may then be
    /// replaced while the others go on, also if it is the only one.
    #[must_use]
    pub fn pulls_pieces(&self) -> bool {
        self.modes.contains(&TrainingMode::Pulled)
    }

    /// Local batches in a global batch.
    #[must_use]
    pub fn pieces(&self) -> u32 {
        self.global_batch_rows.div_ceil(self.local_batch_rows) as u32
    }

    /// The pieces of a global batch that dense worker `rank` trains if `workers` of them train with
    /// a barrier.
    pub fn share(&self, rank: Rank, workers: u32) -> Range<u32> {
        share(self.pieces(), rank, workers)
    }

    /// The rows of piece `piece` of a global batch of `samples` rows.
    pub fn rows_of_piece(&self, samples: usize, piece: u32) -> Range<usize> {
        let rows = self.local_batch_rows as usize;
        (piece as usize * rows).min(samples)..((piece as usize + 1) * rows).min(samples)
    }

    /// Checks that a local batch fits into a message of `bytes` bytes, and in `des` the first layer
    /// of a tower. In a job of several processes they must.
    ///
    /// # Errors
    /// [`RoleError::Input`] with the largest local batch that fits.
    pub fn check_message_size(&self, bytes: u64) -> Result<(), RoleError> {
        let linear = if self.layout.linear { self.layout.features.len() } else { 0 };
        let pooled = self.layout.embedding_width + linear;
        // Of a mode that begins later by command, nothing is known yet.
        let mut modes = self.switches.iter().map(|(_, mode)| *mode).chain([self.mode]);
        let is_des = modes.any(|mode| mode == TrainingMode::Des);
        let operators = self.sub_operators().filter(|_| is_des);
        let sums = operators.map_or(0, |operators| operators.columns() + 1);
        // Pooled embeddings and first-order weights or their sums, dense features, label and group
        // of a row. 1 KiB is reserved for everything else in the message.
        let row = 4 * (pooled.max(sums) + self.model.dense_features + 3) as u64;
        let room = bytes.saturating_sub(1 << 10);
        let units = operators.map_or(0, |operators| operators.units);
        let first_layer = 4 * (units * (self.layout.embedding_width + 1)) as u64;
        if first_layer > room {
            return Err(RoleError::Input(format!(
                "spec.model.hidden: in the mode des the first layer has {first_layer} bytes, which do not fit into one message between processes of {bytes} bytes: set fewer units, or use another mode"
            )));
        }
        let most = room / row;
        if self.local_batch_rows <= most {
            return Ok(());
        }
        Err(RoleError::Input(format!(
            "spec.training.localBatchSize: {} rows of {row} bytes do not fit into one message between processes, which holds {bytes} bytes: set at most {most} rows, or use more dense workers",
            self.local_batch_rows
        )))
    }

    /// Number of dense parameters of the model.
    pub fn dense_parameters(&self) -> Result<usize, RoleError> {
        Ok(self.model.build()?.layout().total())
    }

    /// The mode with this name in the manifest.
    #[must_use]
    pub fn mode_named(&self, name: &str) -> Option<TrainingMode> {
        self.modes.iter().copied().find(|mode| mode.name() == name)
    }

    /// What parameter servers compute of the model in the mode `des`. `None` if it has no
    /// substitution.
    #[must_use]
    pub fn sub_operators(&self) -> Option<SubOperators> {
        // Models with second-order sums have one width.
        let dim = self.layout.features.first().map_or(0, |place| place.dim);
        SubOperators::of(self.model.settings.kind(), self.layout.features.len(), dim, self.model.first_units())
    }

    /// Batches that each dense worker may have pushed and not yet reported in a mode without a
    /// barrier. Embedding workers keep as many pieces of each dense worker for its replacement.
    #[must_use]
    pub fn unreported_batches(&self) -> usize {
        let threads = self.modes.iter().map(|mode| mode.training_threads().get() as usize).max().unwrap_or(1);
        UNREPORTED.max(threads * UNREPORTED_OF_THREAD)
    }

    /// The dense part of the model before step 0, on the dense worker of this rank.
    pub fn tower(&self, rank: Rank) -> Result<Tower, RoleError> {
        self.tower_on(rank, self.dense_threads)
    }

    /// As [`Self::tower`], for one of `towers` threads of the worker that train at the same time.
    /// They share its processors.
    pub fn tower_of_thread(&self, rank: Rank, towers: usize) -> Result<Tower, RoleError> {
        let threads = match self.dense_threads {
            0 => std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
            threads => threads,
        };
        self.tower_on(rank, (threads / towers.max(1)).max(1))
    }

    fn tower_on(&self, rank: Rank, threads: usize) -> Result<Tower, RoleError> {
        let on = |device| {
            let (seed, precision) = (self.seed, self.precision);
            let options = TowerOptions { seed, rank: rank.0, threads, device, precision };
            Tower::new(self.model.build()?, Tasks::declared(&self.tasks)?, self.dense_optimizer, options)
        };
        match on(compute_device(self.dense_device, rank)?) {
            Err(error @ DenseError::NoBf16 { .. }) if self.dense_device == DeviceKind::Auto => {
                tracing::warn!(%error, "falling back to the CPU");
                Ok(on(ComputeDevice::Cpu)?)
            }
            tower => Ok(tower?),
        }
    }

    /// The first event of a job that begins with the checkpoint `from`, if that is given.
    pub fn started(&self, from: Option<WarmStartOrigin>) -> Result<JobEvent, RoleError> {
        let replicas = BTreeMap::from(Role::MEMBERS.map(|role| (role.section().to_owned(), self.replicas.count(role))));
        Ok(JobEvent::Started {
            job: self.name.clone(),
            mode: self.mode.name().to_owned(),
            model: self.model.name().to_owned(),
            dense_parameters: self.dense_parameters()? as u64,
            replicas,
            from,
        })
    }
}

/// The device of the dense worker of this rank. Workers on one machine are assigned its GPUs
/// round-robin. In a cluster each pod sees its own GPUs.
fn compute_device(wanted: DeviceKind, rank: Rank) -> Result<ComputeDevice, RoleError> {
    if wanted == DeviceKind::Cpu || (wanted == DeviceKind::Auto && !GPU_SUPPORT) {
        return Ok(ComputeDevice::Cpu);
    }
    Ok(match rectrain_dense::gpu_count()? {
        0 if wanted == DeviceKind::Auto => ComputeDevice::Cpu,
        // Opening this device returns an error that says why there is no GPU.
        0 => ComputeDevice::Cuda(0),
        gpus => ComputeDevice::Cuda(rank.0 as usize % gpus),
    })
}

/// The pieces of a global batch of `pieces` pieces that dense worker `rank` trains if `workers` of
/// them train with a barrier.
pub fn share(pieces: u32, rank: Rank, workers: u32) -> Range<u32> {
    if rank.0 >= workers {
        return 0..0;
    }
    let share = share_of_batch(pieces as usize, rank, workers);
    share.start as u32..share.end as u32
}

/// The dense parameters that parameter server `server` of `servers` holds in a mode without a
/// barrier, out of `parameters`.
pub fn dense_partition(parameters: usize, server: usize, servers: usize) -> Range<usize> {
    share_of_batch(parameters, Rank(server as u32), servers as u32)
}
