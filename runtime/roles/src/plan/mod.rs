//! What every member of a job knows: the manifest, resolved into the runtime's own terms. Every member computes the same plan from
//! the same manifest; nothing in it depends on which member it is.

mod identity;
mod resolve;

use std::collections::BTreeMap;
use std::time::Duration;

use rectrain_data::{Schema, SourceConfig};
use rectrain_dense::{DenseOptimizer, Model, ModelConfig, Tower, TowerOptions};
use rectrain_embedding::StoreConfig;
use rectrain_modes::{EvaluationPoints, Rank, TrainingLength};

use crate::compression::Compression;
use crate::error::RoleError;
use crate::events::JobEvent;
use crate::pooling::FeatureLayout;
use crate::slot_map::SlotMap;

/// The longest that a call may take which waits for training to advance.
pub(crate) const CALL_DEADLINE: Duration = Duration::from_secs(600);
/// The deadline of a call that is answered when something in the job's whole life happens.
pub(crate) const WHOLE_JOB: Duration = Duration::from_secs(365 * 24 * 3600);
/// Virtual shards of the embedding table.
const SLOTS: u32 = 1024;

/// How embeddings and dense parameters are kept in step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrainingMode {
    /// Every gradient is applied before the next look-up; repeatable to the bit.
    Sync,
    /// Embeddings are at most `staleness` global steps behind; dense parameters are in step.
    Hybrid {
        /// τ, in global steps.
        staleness: u64,
    },
}

impl TrainingMode {
    /// As in the manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Hybrid { .. } => "hybrid",
        }
    }

    /// τ: how many steps may be looked up and not yet applied.
    #[must_use]
    pub fn staleness(self) -> u64 {
        match self {
            Self::Sync => 0,
            Self::Hybrid { staleness } => staleness,
        }
    }
}

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

/// See the module's text.
#[derive(Debug, Clone)]
pub struct JobPlan {
    /// The job's name.
    pub name: String,
    /// Training mode.
    pub mode: TrainingMode,
    /// Seed of everything that is drawn.
    pub seed: u64,
    /// Samples of a global step.
    pub global_batch_rows: u64,
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
    /// How values travel.
    pub compression: Compression,
    /// How many of each role.
    pub replicas: Replicas,
    /// How many steps' batches a dense worker takes in ahead of the one that it trains.
    pub batches_ahead: u64,
}

impl JobPlan {
    /// Which parameter server holds which slot.
    #[must_use]
    pub(crate) fn slot_map(&self) -> SlotMap {
        SlotMap::even(self.store.slots, self.replicas.ps.min(u32::from(u16::MAX)) as u16)
    }

    /// The tower as it stands before step 0, on the dense worker of this rank.
    pub(crate) fn tower(&self, rank: Rank) -> Result<Tower, RoleError> {
        let options = TowerOptions { seed: self.seed, rank: rank.0, threads: self.dense_threads };
        Ok(Tower::new(Model::new(self.model.clone())?, self.dense_optimizer, options)?)
    }

    /// Steps whose embeddings a dense worker asks for before it trains the first of them: the one it trains, those that may be in
    /// flight beside it, and in `sync` the next one, which is prepared and waits at the parameter servers.
    pub(crate) fn steps_ahead(&self) -> usize {
        self.mode.staleness().max(1) as usize + 1
    }

    /// The first event of the job.
    pub(crate) fn started(&self) -> Result<JobEvent, RoleError> {
        let model = Model::new(self.model.clone())?;
        let replicas = BTreeMap::from([
            ("ps".to_owned(), self.replicas.ps),
            ("embeddingWorker".to_owned(), self.replicas.embedding_workers),
            ("denseWorker".to_owned(), self.replicas.dense_workers),
            ("loader".to_owned(), self.replicas.loaders),
        ]);
        Ok(JobEvent::Started {
            job: self.name.clone(),
            mode: self.mode.name().to_owned(),
            model: self.model.kind.name().to_owned(),
            dense_parameters: model.layout().total() as u64,
            replicas,
        })
    }
}
