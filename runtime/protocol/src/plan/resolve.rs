//! Converts the manifest's types to the runtime's. The manifest is resolved already: no default is
//! chosen here.

use std::num::NonZeroU32;
use std::time::Duration;

use rectrain_crds as crds;
use rectrain_crds::ResolvedJob;
use rectrain_data::{Format, SourceConfig, Split, Subset};
use rectrain_dense::{DenseOptimizer, FlatOptimizer, Model, ModelConfig};
use rectrain_embedding::{RowSpec, SparseOptimizer, StoreConfig};
use rectrain_modes::gba::{BufferSize, Decay, LostTokens};
use rectrain_modes::shadow::{Fragments, Shadow};
use rectrain_modes::{EvaluationPoints, ModeSettings, TrainingLength, TrainingMode};
use rectrain_policy::{LoaderPolicy, ModePolicy, Policy, ReplicaBounds, ScalingPolicy};

use super::{CheckpointPlan, JobPlan, PublishPlan, QualityPlan, Replicas, SLOTS, WarmStartPlan, life};
use crate::error::RoleError;
use crate::layout::{FeatureLayout, FeaturePlace};

/// Rows of a chunk if data is not shuffled: large enough that reading it takes far longer than
/// leasing it.
const CHUNK_ROWS: u64 = 16_384;
/// Batches that embedding workers receive ahead, beyond those that the mode allows in flight.
const BATCHES_AHEAD: u64 = 4;

impl JobPlan {
    /// The plan of a job.
    ///
    /// # Errors
    /// [`RoleError::Input`] if the model, an optimizer or a mode cannot be built as the manifest
    /// says.
    pub fn new(job: &ResolvedJob) -> Result<Self, RoleError> {
        let model = model(job);
        let built = model.build().map_err(|error| RoleError::Input(format!("spec.model: {error}")))?;
        let (layout, groups) = layout(job, &*built);
        let training = &job.training;
        let global_batch_rows = training.global_batch_size as u64;
        let local_batch_rows = local_batch_rows(job);
        let pieces = global_batch_rows.div_ceil(local_batch_rows) as u32;
        let settings = mode_settings(training, pieces)?;
        let slice_rows = slice_rows(job);
        let chunk_rows = chunk_rows(job, slice_rows);
        let (train, test) = sources(job);
        let store = StoreConfig { slots: SLOTS, seed: training.seed, groups, budget: life::budget(job) };
        check_optimizers(&store, &training.dense_optimizer)?;
        Ok(Self {
            name: job.name.clone(),
            mode: TrainingMode::of(training.mode, &settings),
            modes: crds::Mode::ALL.map(|mode| TrainingMode::of(mode, &settings)).into(),
            switches: switches(training, &settings),
            auto: training.auto.as_ref().map(mode_policy),
            loader_scaling: job.autoscaling.as_ref().and_then(loader_scaling),
            key_divisor: training.gba_key_divisor,
            seed: training.seed,
            global_batch_rows,
            local_batch_rows,
            barrier_workers: training.barrier_workers.map(|workers| workers as u32),
            tests_on_the_next_slice: slice_rows.is_some(),
            batches_per_chunk: chunk_rows.div_ceil(global_batch_rows.max(1)).max(1),
            length: length(training.length),
            shuffle: job.data.shuffle_window_rows.map(|_| training.seed),
            evaluation: evaluation_points(training, slice_rows),
            schema: job.features.schema.clone(),
            train,
            test,
            layout,
            store,
            tasks: job.tasks(),
            model,
            dense_optimizer: training.dense_optimizer,
            dense_threads: job.roles.members.dense_worker.threads.unwrap_or(0),
            dense_device: job.roles.device,
            precision: training.precision,
            compression: training.compression,
            partial_pooling: training.partial_pooling,
            checkpoint: checkpoint(job),
            publish: publish(job),
            warm_start: warm_start(job),
            quality: QualityPlan::new(&training.quality, &job.data.storage.options),
            divergence_factor: training.divergence_factor,
            max_restarts: job.fault_tolerance.max_restarts,
            backoff: Duration::from_secs(u64::from(job.fault_tolerance.backoff_seconds)),
            stall: Duration::from_secs(u64::from(job.fault_tolerance.stall_seconds)),
            shared_memory: job.fault_tolerance.shared_memory,
            replicas: replicas(job),
            batches_ahead: u64::from(training.staleness.max(training.look_ahead)) + BATCHES_AHEAD,
            look_ahead_steps: u64::from(training.look_ahead),
        })
    }
}

/// Rows of a local batch. By default each dense worker has one local batch of every global batch.
fn local_batch_rows(job: &ResolvedJob) -> u64 {
    let workers = job.roles.members.dense_worker.replicas.max(1) as u64;
    let rows = job.training.local_batch_size.map(|rows| rows as u64);
    rows.unwrap_or_else(|| (job.training.global_batch_size as u64).div_ceil(workers))
}

fn check_optimizers(store: &StoreConfig, dense: &DenseOptimizer) -> Result<(), RoleError> {
    store.validate().map_err(|error| RoleError::Input(format!("spec.model, spec.training.optimizer: {error}")))?;
    dense.validate().map_err(|error| RoleError::Input(format!("spec.training.optimizer.dense: {error}")))
}

/// The scheduled switches of the mode: the step of each, and the mode from there on.
fn switches(training: &crds::ResolvedTraining, settings: &ModeSettings) -> Vec<(u64, TrainingMode)> {
    let switch = |switch: &crds::SwitchSpec| (switch.step, TrainingMode::of(switch.mode, settings));
    training.switch_at.iter().map(switch).collect()
}

fn length(length: crds::TrainingLength) -> TrainingLength {
    match length {
        crds::TrainingLength::Epochs(epochs) => TrainingLength::Epochs(epochs),
        crds::TrainingLength::Steps(steps) => TrainingLength::Steps(steps),
    }
}

/// When the model is evaluated: before each slice if the data is divided into slices, otherwise as
/// the manifest says.
fn evaluation_points(training: &crds::ResolvedTraining, slice_rows: Option<u64>) -> EvaluationPoints {
    if let Some(rows) = slice_rows {
        return EvaluationPoints::Steps(rows / training.global_batch_size as u64);
    }
    match training.evaluation {
        crds::ResolvedEvaluation::End => EvaluationPoints::End,
        crds::ResolvedEvaluation::Epoch => EvaluationPoints::Epoch,
        crds::ResolvedEvaluation::Steps(steps) => EvaluationPoints::Steps(steps),
    }
}

fn publish(job: &ResolvedJob) -> Option<PublishPlan> {
    job.publish.as_ref().map(PublishPlan::new)
}

fn checkpoint(job: &ResolvedJob) -> Option<CheckpointPlan> {
    let checkpoint = job.checkpoint.as_ref()?;
    Some(CheckpointPlan::new(checkpoint, &job.data.storage.options))
}

fn warm_start(job: &ResolvedJob) -> Option<WarmStartPlan> {
    let from = job.warm_start.as_ref()?;
    Some(WarmStartPlan { from: from.clone(), storage_options: job.data.storage.options.clone() })
}

fn replicas(job: &ResolvedJob) -> Replicas {
    Replicas::from_fn(|role| job.roles.members.get(role).map_or(1, |of_role| of_role.replicas as u32))
}

/// How the coordinator of a run decides on the number of loaders. In a cluster the operator
/// decides.
fn loader_scaling(given: &crds::ResolvedAutoscaling) -> Option<Policy> {
    let crds::ResolvedLoaderScaling { bounds, catch_up_seconds, busy_target, wait_target } = given.loader?;
    let bounds = ReplicaBounds { min: bounds.min, max: bounds.max };
    Some(Policy {
        loader: Some(LoaderPolicy { bounds, catch_up_seconds: f64::from(catch_up_seconds), busy_target, wait_target }),
        scaling: ScalingPolicy {
            recommends_only: given.mode == crds::AutoscalingMode::Recommend,
            cool_down_seconds: u64::from(given.cool_down_seconds),
            up_window_seconds: u64::from(given.up_window_seconds),
            down_window_seconds: u64::from(given.down_window_seconds),
            ..ScalingPolicy::default()
        },
        ..Policy::default()
    })
}

fn mode_policy(auto: &crds::ResolvedAutoMode) -> ModePolicy {
    ModePolicy {
        margin: auto.margin,
        window_seconds: u64::from(auto.window_seconds),
        dwell_seconds: u64::from(auto.dwell_seconds),
        switches_per_hour: auto.switches_per_hour,
        crowded_cpu: auto.crowded_cpu,
        ..ModePolicy::default()
    }
}

/// The job's settings for all modes; a global batch has `pieces` local batches.
fn mode_settings(training: &crds::ResolvedTraining, pieces: u32) -> Result<ModeSettings, RoleError> {
    let gradients = |count| BufferSize::new(count).map_err(|error| RoleError::Input(format!("spec.training: {error}")));
    Ok(ModeSettings {
        sync_pieces: training.sync_pieces,
        hybrid_staleness: u64::from(training.staleness),
        gba_buffer: gradients(pieces)?,
        gba_decay: Decay::Threshold { tolerance: u64::from(training.gba_staleness) },
        gba_lost_tokens: LostTokens::Replace,
        hop_bs_bound: u64::from(training.hop_bs_bound),
        hop_bw_backups: training.hop_bw_backups,
        bsp_aggregate: gradients(training.bsp_aggregate.unwrap_or(pieces))?,
        shadow: shadow(training.shadow),
    })
}

/// How `shadow` synchronises.
fn shadow(training: crds::ResolvedShadow) -> Shadow {
    Shadow {
        algorithm: training.algorithm,
        alpha: training.alpha as f32,
        every_steps: training.every_steps.and_then(NonZeroU32::new),
        eta: training.eta as f32,
        momentum: training.momentum as f32,
        nesterov: training.nesterov,
        fragments: Fragments::new(training.fragments),
        wire_precision: training.wire_precision,
        threads: NonZeroU32::new(training.threads).unwrap_or(NonZeroU32::MIN),
        output_model: training.output_model,
    }
}

/// Rows of a slice if the job evaluates on each slice before it trains on it.
fn slice_rows(job: &ResolvedJob) -> Option<u64> {
    match &job.data.source {
        crds::DataSource::Files(crds::FilePlan { parts: crds::TrainTest::Slices { rows, .. }, .. }) => Some(*rows),
        _ => None,
    }
}

/// Rows of a chunk. A chunk of a stream is one global batch, which is trained without waiting for
/// more rows.
fn chunk_rows(job: &ResolvedJob, slice_rows: Option<u64>) -> u64 {
    match &job.data.source {
        crds::DataSource::Stream(_) | crds::DataSource::Follow(_) => job.training.global_batch_size as u64,
        _ => slice_rows.or(job.data.shuffle_window_rows).unwrap_or(CHUNK_ROWS),
    }
}

fn model(job: &ResolvedJob) -> ModelConfig {
    ModelConfig {
        tasks: job.tasks().len(),
        settings: job.model.settings.clone(),
        dense_features: job.features.schema.dense.len(),
        embedding_dims: job.features.embeddings.iter().map(|embedding| embedding.dim).collect(),
        dropout: job.model.dropout as f32,
    }
}

/// Tables with equal row specs share a row group.
fn layout(job: &ResolvedJob, model: &dyn Model) -> (FeatureLayout, Vec<RowSpec>) {
    let linear = model.needs_linear();
    let embeddings = model.needs_embeddings();
    let mut groups: Vec<RowSpec> = Vec::new();
    let mut features = Vec::with_capacity(job.features.embeddings.len());
    let mut offset = 0;
    for embedding in &job.features.embeddings {
        let table = &job.features.tables[embedding.table];
        let dim = if embeddings { table.dim } else { 0 };
        let (optimizer, first_order) = row_optimizers(&job.training, linear, dim);
        let spec = RowSpec {
            dim: dim + usize::from(linear),
            value_type: job.training.embedding_value_type,
            optimizer,
            life: life::life(job, table),
            share: table.life.and_then(|life| life.share_millionths),
            initializer: table.initializer,
            zero_columns: usize::from(linear),
            first_order,
        };
        let group = groups.iter().position(|group| *group == spec).unwrap_or_else(|| {
            groups.push(spec);
            groups.len() - 1
        });
        features.push(FeaturePlace { group, dim, offset, pooling: embedding.pooling });
        offset += dim;
    }
    let group_dims = groups.iter().map(|group| group.dim).collect();
    (FeatureLayout { features, group_dims, linear, embedding_width: offset }, groups)
}

/// The optimizer of a row, and the one of its first-order weight if that differs. A row that is a
/// first-order weight alone has one optimizer.
fn row_optimizers(
    training: &crds::ResolvedTraining,
    linear: bool,
    dim: usize,
) -> (SparseOptimizer, Option<SparseOptimizer>) {
    match training.first_order_optimizer.filter(|_| linear) {
        Some(first_order) if dim == 0 => (first_order, None),
        first_order => (training.sparse_optimizer, first_order),
    }
}

/// Training data, and test data if the job has any.
fn sources(job: &ResolvedJob) -> (SourceConfig, Option<SourceConfig>) {
    match &job.data.source {
        crds::DataSource::Files(files) => file_sources(job, files),
        crds::DataSource::Synthetic(synthetic) => {
            let split = Some(Split::Position { train_rows: synthetic.rows });
            let format = Format::Synthetic(synthetic.clone());
            let (train, test) = divided(SourceConfig { format, split, ..SourceConfig::default() });
            (train, (synthetic.test_rows > 0).then_some(test))
        }
        crds::DataSource::Stream(stream) => {
            let (files, test) = file_sources(job, &stream.test);
            (SourceConfig { paths: Vec::new(), format: Format::Kafka(stream.kafka.clone()), ..files }, test)
        }
        crds::DataSource::Follow(source) => {
            let (train, test) = file_sources(job, &source.files);
            let format = Format::Follow(source.files.format.clone(), source.follow.clone());
            (SourceConfig { format, ..train }, test)
        }
    }
}

fn file_sources(job: &ResolvedJob, files: &crds::FilePlan) -> (SourceConfig, Option<SourceConfig>) {
    let source = |paths: &[String]| SourceConfig {
        paths: paths.to_vec(),
        format: Format::Files(files.format.clone()),
        bad_rows: files.bad_rows,
        null_values: files.null_values.clone(),
        storage_options: job.data.storage.options.clone(),
        ..SourceConfig::default()
    };
    match &files.parts {
        crds::TrainTest::Separate { train, test } => (source(train), (!test.is_empty()).then(|| source(test))),
        crds::TrainTest::Divided { paths, split } => {
            let (train, test) = divided(SourceConfig { split: Some(split.clone()), ..source(paths) });
            (train, Some(test))
        }
        crds::TrainTest::Slices { paths, .. } => (source(paths), Some(source(paths))),
    }
}

/// The training rows and the test rows of a source with a split.
fn divided(source: SourceConfig) -> (SourceConfig, SourceConfig) {
    let train = SourceConfig { subset: Subset::Train, ..source.clone() };
    (train, SourceConfig { subset: Subset::Test, ..source })
}
