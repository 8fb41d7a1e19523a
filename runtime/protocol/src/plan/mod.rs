//! What every member of a job knows: the manifest, resolved into the runtime's own terms. Every member computes the same plan from
//! the same manifest; nothing in it depends on which member it is.

mod checkpoint;
mod identity;
mod resolve;
mod small;

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use rectrain_crds::DeviceKind;
use rectrain_data::{Schema, SourceConfig};
use rectrain_dense::{
    ComputeDevice, DenseError, DenseOptimizer, GPU_SUPPORT, Model, ModelConfig, Precision, Tower, TowerOptions,
};
use rectrain_embedding::StoreConfig;
use rectrain_kinds::{Compression, KeyDivisor};
use rectrain_modes::migration::SlotMap;
use rectrain_modes::{EvaluationPoints, Rank, TrainingLength, TrainingMode, share_of_batch};
use rectrain_policy::ModePolicy;

pub use self::checkpoint::CheckpointPlan;
pub use self::small::small_plan;
use crate::deadline::CALL_DEADLINE;
use crate::error::RoleError;
use crate::events::JobEvent;
use crate::layout::FeatureLayout;
use rectrain_kinds::Role;

/// Virtual shards of the embedding table.
const SLOTS: u32 = 1024;

/// How many of each role there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replicas {
    /// Parameter servers.
    pub ps: u32,
    /// Embedding workers.
    pub embedding_workers: u32,
    /// Dense workers.
    pub dense_workers: u32,
    /// Loaders.
    pub loaders: u32,
}

impl Replicas {
    /// Of this role.
    #[must_use]
    pub fn of(&self, role: Role) -> u32 {
        match role {
            Role::Coordinator => 1,
            Role::Ps => self.ps,
            Role::EmbeddingWorker => self.embedding_workers,
            Role::DenseWorker => self.dense_workers,
            Role::Loader => self.loaders,
        }
    }

    /// With another number of this role. A job has one coordinator, whatever is asked for.
    #[must_use]
    pub fn with(mut self, role: Role, replicas: u32) -> Self {
        *match role {
            Role::Coordinator => return self,
            Role::Ps => &mut self.ps,
            Role::EmbeddingWorker => &mut self.embedding_workers,
            Role::DenseWorker => &mut self.dense_workers,
            Role::Loader => &mut self.loaders,
        } = replicas;
        self
    }
}

/// See the module's text.
#[derive(Debug, Clone)]
pub struct JobPlan {
    /// The job's name.
    pub name: String,
    /// The first training mode.
    pub mode: TrainingMode,
    /// Every mode by its name in the manifest, with the job's settings.
    pub modes: Vec<TrainingMode>,
    /// Switches by schedule: global batches trained before each, ascending, and the mode from there on.
    pub switches: Vec<(u64, TrainingMode)>,
    /// How readily the mode is switched between `sync` and `gba`, if the coordinator chooses it.
    pub auto: Option<ModePolicy>,
    /// What a key's gradients are divided by in `gba`.
    pub key_divisor: KeyDivisor,
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Samples of a global step.
    pub global_batch_rows: u64,
    /// Rows of a local batch: a global batch is made of them, the last one possibly smaller.
    pub local_batch_rows: u64,
    /// Dense workers, from rank 0, that train where each step has a barrier, if it is not all of them.
    pub some_with_barrier: Option<u32>,
    /// Whether the test is each time the next slice of the training data, a slice being a chunk.
    pub tests_on_the_next_slice: bool,
    /// Global batches in a chunk, the piece of data that is leased to a loader.
    pub batches_per_chunk: u64,
    /// Where training ends.
    pub length: TrainingLength,
    /// Seed of the shuffle within chunks, if data is shuffled.
    pub shuffle: Option<u64>,
    /// When the model is evaluated.
    pub evaluation: EvaluationPoints,
    /// Columns of the data.
    pub schema: Schema,
    /// Training data.
    pub train: SourceConfig,
    /// Test data.
    pub test: Option<SourceConfig>,
    /// Where each sparse feature's rows and pooled embeddings are.
    pub layout: FeatureLayout,
    /// The embedding store of every parameter server.
    pub store: StoreConfig,
    /// The tower.
    pub model: ModelConfig,
    /// Its optimizer.
    pub dense_optimizer: DenseOptimizer,
    /// Threads a dense worker computes with; 0 is one a core.
    pub dense_threads: usize,
    /// What a dense worker computes on.
    pub dense_device: DeviceKind,
    /// What the products of a dense worker's linear layers are computed in.
    pub precision: Precision,
    /// How values travel.
    pub compression: Compression,
    /// Its checkpoints, if there are any.
    pub checkpoint: Option<CheckpointPlan>,
    /// Restarts after crashes until the job has failed.
    pub max_restarts: u32,
    /// The pause before the first restart.
    pub backoff: Duration,
    /// Training that says nothing for so long has stalled.
    pub stall: Duration,
    /// Whether rows of a parameter server outlive its process, where there is more than one process.
    pub shared_memory: bool,
    /// How many of each role.
    pub replicas: Replicas,
    /// Global batches whose ids embedding workers take in ahead of the one that is trained.
    pub batches_ahead: u64,
}

impl JobPlan {
    /// Which parameter server holds which slot when the job begins.
    #[must_use]
    pub fn slot_map(&self) -> SlotMap {
        SlotMap::even(self.store.slots, self.replicas.ps.min(u32::from(u16::MAX)) as u16)
    }

    /// The longest that a call may take which waits for another member to do its part: as long as nobody says that training stands still.
    #[must_use]
    pub fn patience(&self) -> Duration {
        CALL_DEADLINE.max(self.stall)
    }

    /// Calls that may be under way on one connection: all pieces of two batches wait at a parameter server in `sync`, and what lets them
    /// through has to find a place beside them.
    #[must_use]
    pub fn calls_at_a_time(&self) -> usize {
        1024 + 2 * self.pieces() as usize
    }

    /// Local batches in a global batch.
    #[must_use]
    pub fn pieces(&self) -> u32 {
        self.global_batch_rows.div_ceil(self.local_batch_rows) as u32
    }

    /// The pieces of a global batch that are this dense worker's where each step has a barrier, with so many workers taking part.
    pub fn share(&self, rank: Rank, workers: u32) -> Range<u32> {
        share(self.pieces(), rank, workers)
    }

    /// The rows of piece `piece` of a global batch of `samples` rows.
    pub fn rows_of_piece(&self, samples: usize, piece: u32) -> Range<usize> {
        let rows = self.local_batch_rows as usize;
        (piece as usize * rows).min(samples)..((piece as usize + 1) * rows).min(samples)
    }

    /// Checks that a local batch fits into a message of so many bytes, as it has to where members are processes of their own.
    ///
    /// # Errors
    /// [`RoleError::Input`] if it does not, with the largest one that does.
    pub fn fits_messages(&self, bytes: u64) -> Result<(), RoleError> {
        let linear = if self.layout.linear { self.layout.features.len() } else { 0 };
        // Pooled embeddings, first-order weights, dense features, label and group of a row, and a few bytes beside them all.
        let row = 4 * (self.layout.embedding_width + linear + self.model.dense_features + 3) as u64;
        let most = bytes.saturating_sub(1 << 10) / row;
        if self.local_batch_rows <= most {
            return Ok(());
        }
        Err(RoleError::Input(format!(
            "spec.training.localBatchSize: {} rows of {row} bytes do not fit into one message between processes, which holds {bytes} bytes: expected at most {most} rows, or more dense workers",
            self.local_batch_rows
        )))
    }

    /// Dense parameters of the model.
    pub fn dense_parameters(&self) -> Result<usize, RoleError> {
        Ok(Model::new(self.model.clone())?.layout().total())
    }

    /// The mode of this name, as in the manifest.
    #[must_use]
    pub fn mode_named(&self, name: &str) -> Option<TrainingMode> {
        self.modes.iter().copied().find(|mode| mode.name() == name)
    }

    /// The tower as it stands before step 0, on the dense worker of this rank.
    pub fn tower(&self, rank: Rank) -> Result<Tower, RoleError> {
        let on = |device| {
            let (seed, threads, precision) = (self.seed, self.dense_threads, self.precision);
            let options = TowerOptions { seed, rank: rank.0, threads, device, precision };
            Tower::new(Model::new(self.model.clone())?, self.dense_optimizer, options)
        };
        match on(compute_device(self.dense_device, rank)?) {
            Err(error @ DenseError::NoBf16 { .. }) if self.dense_device == DeviceKind::Auto => {
                tracing::warn!(%error, "going on on the CPU");
                Ok(on(ComputeDevice::Cpu)?)
            }
            tower => Ok(tower?),
        }
    }

    /// The first event of the job.
    pub fn started(&self) -> Result<JobEvent, RoleError> {
        let replicas = BTreeMap::from(Role::MEMBERS.map(|role| (role.section().to_owned(), self.replicas.of(role))));
        Ok(JobEvent::Started {
            job: self.name.clone(),
            mode: self.mode.name().to_owned(),
            model: self.model.kind.name().to_owned(),
            dense_parameters: self.dense_parameters()? as u64,
            replicas,
        })
    }
}

/// What the dense worker of this rank computes on. Workers on one machine take its GPUs in turn; in a cluster each pod sees its own.
fn compute_device(wanted: DeviceKind, rank: Rank) -> Result<ComputeDevice, RoleError> {
    if wanted == DeviceKind::Cpu || (wanted == DeviceKind::Auto && !GPU_SUPPORT) {
        return Ok(ComputeDevice::Cpu);
    }
    Ok(match rectrain_dense::gpu_count()? {
        0 if wanted == DeviceKind::Auto => ComputeDevice::Cpu,
        // Opening it says what is missing.
        0 => ComputeDevice::Cuda(0),
        gpus => ComputeDevice::Cuda(rank.0 as usize % gpus),
    })
}

/// Of `pieces` of a global batch, those that are dense worker `rank`'s where each step has a barrier, with so many workers taking part.
pub fn share(pieces: u32, rank: Rank, workers: u32) -> Range<u32> {
    if rank.0 >= workers {
        return 0..0;
    }
    let share = share_of_batch(pieces as usize, rank, workers);
    share.start as u32..share.end as u32
}

/// Of `parameters` dense parameters, those that parameter server `server` of `servers` holds where there is no barrier.
pub fn dense_partition(parameters: usize, server: usize, servers: usize) -> Range<usize> {
    share_of_batch(parameters, Rank(server as u32), servers as u32)
}
