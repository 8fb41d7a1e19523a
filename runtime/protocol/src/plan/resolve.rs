//! Converts the manifest's types to the runtime's. The manifest is resolved already: no default is
//! chosen here.

use std::time::Duration;

use rectrain_crds as crds;
use rectrain_crds::ResolvedJob;
use rectrain_data::{
    BadRows, CsvFormat, DenseField, Format, LabelField, Part, Schema, SourceConfig, SparseField, Split,
    SyntheticConfig, TimeBound,
};
use rectrain_dense::{DenseOptimizer, FlatOptimizer, Model, ModelConfig, ModelKind};
use rectrain_embedding::{RowSpec, StoreConfig};
use rectrain_modes::gba::{BufferSize, Decay, LostTokens, TokenMode};
use rectrain_modes::{EvaluationPoints, TrainingLength, TrainingMode};
use rectrain_policy::ModePolicy;

use super::{CheckpointPlan, JobPlan, Replicas, SLOTS};
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
        let built = Model::new(model.clone()).map_err(|error| RoleError::Input(format!("spec.model: {error}")))?;
        let (layout, groups) = layout(job, &built);
        let training = &job.training;
        let global_batch_rows = training.global_batch_size as u64;
        let local_batch_rows = local_batch_rows(job);
        let pieces = global_batch_rows.div_ceil(local_batch_rows) as u32;
        let mode = |mode| training_mode(training, mode, pieces);
        let slice_rows = slice_rows(job);
        let chunk_rows = slice_rows.or(job.data.shuffle_window_rows).unwrap_or(CHUNK_ROWS);
        let (train, test) = sources(job);
        let store = StoreConfig { slots: SLOTS, seed: training.seed, groups };
        check_optimizers(&store, &training.dense_optimizer)?;
        Ok(Self {
            name: job.name.clone(),
            mode: mode(training.mode)?,
            modes: crds::Mode::ALL.into_iter().map(mode).collect::<Result<_, _>>()?,
            switches: switches(training, pieces)?,
            auto: training.auto.as_ref().map(mode_policy),
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
            schema: schema(job),
            train,
            test,
            layout,
            store,
            model,
            dense_optimizer: training.dense_optimizer,
            dense_threads: job.roles.dense_worker.threads.unwrap_or(0),
            dense_device: job.roles.device,
            precision: training.precision,
            compression: training.compression,
            checkpoint: checkpoint(job),
            max_restarts: job.fault_tolerance.max_restarts,
            backoff: Duration::from_secs(u64::from(job.fault_tolerance.backoff_seconds)),
            stall: Duration::from_secs(u64::from(job.fault_tolerance.stall_seconds)),
            shared_memory: job.fault_tolerance.shared_memory,
            replicas: replicas(job),
            batches_ahead: u64::from(training.staleness) + BATCHES_AHEAD,
        })
    }
}

/// Rows of a local batch. By default each dense worker has one local batch of every global batch.
fn local_batch_rows(job: &ResolvedJob) -> u64 {
    let workers = job.roles.dense_worker.replicas.max(1) as u64;
    let rows = job.training.local_batch_size.map(|rows| rows as u64);
    rows.unwrap_or_else(|| (job.training.global_batch_size as u64).div_ceil(workers))
}

fn check_optimizers(store: &StoreConfig, dense: &DenseOptimizer) -> Result<(), RoleError> {
    store
        .validate()
        .map_err(|error| RoleError::Input(format!("spec.model, spec.training.optimizer.sparse: {error}")))?;
    dense.validate().map_err(|error| RoleError::Input(format!("spec.training.optimizer.dense: {error}")))
}

/// The scheduled switches of the mode: the step of each, and the mode from there on.
fn switches(training: &crds::ResolvedTraining, pieces: u32) -> Result<Vec<(u64, TrainingMode)>, RoleError> {
    let switch = |switch: &crds::SwitchSpec| Ok((switch.step, training_mode(training, switch.mode, pieces)?));
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

fn checkpoint(job: &ResolvedJob) -> Option<CheckpointPlan> {
    let checkpoint = job.checkpoint.as_ref()?;
    Some(CheckpointPlan::new(checkpoint, &job.data.storage.options))
}

fn replicas(job: &ResolvedJob) -> Replicas {
    Replicas {
        ps: job.roles.ps.replicas as u32,
        embedding_workers: job.roles.embedding_worker.replicas as u32,
        dense_workers: job.roles.dense_worker.replicas as u32,
        loaders: job.roles.loader.replicas as u32,
    }
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

/// A mode with the job's settings; a global batch has `pieces` local batches.
fn training_mode(training: &crds::ResolvedTraining, mode: crds::Mode, pieces: u32) -> Result<TrainingMode, RoleError> {
    let gradients = |count| BufferSize::new(count).map_err(|error| RoleError::Input(format!("spec.training: {error}")));
    Ok(match mode {
        crds::Mode::Sync => TrainingMode::Sync,
        crds::Mode::Hybrid => TrainingMode::Hybrid { staleness: u64::from(training.staleness) },
        crds::Mode::Async => TrainingMode::Tokens(TokenMode::Async),
        crds::Mode::Gba => TrainingMode::Tokens(TokenMode::Gba {
            buffer: gradients(pieces)?,
            decay: Decay::Threshold { tolerance: u64::from(training.gba_staleness) },
            lost_tokens: LostTokens::Replace,
        }),
        crds::Mode::HopBs => TrainingMode::Tokens(TokenMode::HopBs { bound: u64::from(training.hop_bs_bound) }),
        crds::Mode::HopBw => TrainingMode::Tokens(TokenMode::HopBw { backups: training.hop_bw_backups }),
        crds::Mode::Bsp => {
            TrainingMode::Tokens(TokenMode::Bsp { aggregate: gradients(training.bsp_aggregate.unwrap_or(pieces))? })
        }
    })
}

/// Rows of a slice if the job evaluates on each slice before it trains on it.
fn slice_rows(job: &ResolvedJob) -> Option<u64> {
    match &job.data.source {
        crds::DataSource::Files(crds::FilePlan {
            parts: crds::TrainTest::Divided { split: crds::ResolvedSplit::Slices { rows }, .. },
            ..
        }) => Some(*rows),
        _ => None,
    }
}

fn model(job: &ResolvedJob) -> ModelConfig {
    let spec = &job.model;
    let hidden = spec.hidden.clone();
    let kind = match spec.kind {
        crds::ModelKind::Dlrm => ModelKind::Dlrm { bottom: spec.bottom.clone(), top: hidden },
        crds::ModelKind::DeepFm => ModelKind::DeepFm { hidden },
        crds::ModelKind::Dnn => ModelKind::Dnn { hidden },
        crds::ModelKind::WideDeep => ModelKind::WideDeep { hidden },
        crds::ModelKind::DcnV2 => ModelKind::DcnV2 {
            structure: spec.cross_structure,
            cross_layers: spec.cross_layers,
            low_rank: spec.low_rank,
            hidden,
        },
        crds::ModelKind::Fm => ModelKind::Fm,
        crds::ModelKind::Lr => ModelKind::Lr,
    };
    ModelConfig {
        kind,
        dense_features: job.features.dense.len(),
        embedding_dims: job.features.sparse.iter().map(|feature| feature.dim).collect(),
        dropout: spec.dropout as f32,
    }
}

/// Tables with equal row specs share a row group.
fn layout(job: &ResolvedJob, model: &Model) -> (FeatureLayout, Vec<RowSpec>) {
    let linear = model.needs_linear();
    let embeddings = model.needs_embeddings();
    let mut groups: Vec<RowSpec> = Vec::new();
    let mut features = Vec::with_capacity(job.features.sparse.len());
    let mut offset = 0;
    for feature in &job.features.sparse {
        let table = &job.features.tables[feature.table];
        let dim = if embeddings { table.dim } else { 0 };
        let spec = RowSpec {
            dim: dim + usize::from(linear),
            value_type: job.training.embedding_value_type,
            optimizer: job.training.sparse_optimizer,
            initializer: table.initializer,
            zero_columns: usize::from(linear),
        };
        let group = groups.iter().position(|group| *group == spec).unwrap_or_else(|| {
            groups.push(spec);
            groups.len() - 1
        });
        features.push(FeaturePlace { group, dim, offset, pooling: feature.pooling });
        offset += dim;
    }
    let group_dims = groups.iter().map(|group| group.dim).collect();
    (FeatureLayout { features, group_dims, linear, embedding_width: offset }, groups)
}

fn schema(job: &ResolvedJob) -> Schema {
    let features = &job.features;
    let sparse = features.sparse.iter().map(|feature| SparseField {
        name: feature.name.clone(),
        table: features.tables[feature.table].name.clone(),
        multi_value: feature.separator,
        missing: feature.missing,
    });
    let dense = features.dense.iter().map(|feature| DenseField {
        name: feature.name.clone(),
        transform: feature.transform,
        missing: feature.missing,
    });
    Schema {
        sparse: sparse.collect(),
        dense: dense.collect(),
        label: LabelField {
            name: features.label.column.clone(),
            positive_from: features.label.positive_from.map(|threshold| threshold as f32),
        },
        group: features.group.clone(),
    }
}

/// Training data, and test data if the job has any.
fn sources(job: &ResolvedJob) -> (SourceConfig, Option<SourceConfig>) {
    match &job.data.source {
        crds::DataSource::Files(files) => file_sources(job, files),
        crds::DataSource::Synthetic(synthetic) => synthetic_sources(synthetic),
    }
}

fn file_sources(job: &ResolvedJob, files: &crds::FilePlan) -> (SourceConfig, Option<SourceConfig>) {
    let base = SourceConfig {
        format: match &files.format {
            crds::FileFormat::Csv(csv) => Format::Csv(CsvFormat {
                delimiter: csv.delimiter,
                header: csv.header,
                columns: csv.columns.clone(),
                quoting: csv.quoting,
            }),
            crds::FileFormat::Parquet => Format::Parquet,
        },
        bad_rows: match files.bad_rows {
            crds::ResolvedBadRows::Fail => BadRows::Fail,
            crds::ResolvedBadRows::Skip { limit } => BadRows::Skip { limit },
        },
        storage_options: job.data.storage.options.clone(),
        ..SourceConfig::default()
    };
    match &files.parts {
        crds::TrainTest::Separate { train, test } => {
            let part = |paths: &Vec<String>| SourceConfig { paths: paths.clone(), ..base.clone() };
            (part(train), (!test.is_empty()).then(|| part(test)))
        }
        crds::TrainTest::Divided { paths, split } => {
            let split = match split {
                crds::ResolvedSplit::Slices { .. } => {
                    let all = SourceConfig { paths: paths.clone(), ..base };
                    return (all.clone(), Some(all));
                }
                crds::ResolvedSplit::Position { train_rows } => Split::Position { train_rows: *train_rows },
                crds::ResolvedSplit::Fraction { train } => Split::Fraction { train: *train },
                crds::ResolvedSplit::Time { column, test_from } => Split::Time {
                    column: column.clone(),
                    test_from: match test_from {
                        crds::ResolvedTime::Number(number) => TimeBound::Number(*number),
                        crds::ResolvedTime::Text(text) => TimeBound::Text(text.clone()),
                    },
                },
            };
            divided(SourceConfig { paths: paths.clone(), split: Some(split), ..base })
        }
    }
}

fn synthetic_sources(synthetic: &crds::ResolvedSynthetic) -> (SourceConfig, Option<SourceConfig>) {
    let config = SyntheticConfig {
        rows: synthetic.rows + synthetic.test_rows,
        seed: synthetic.seed,
        cardinalities: synthetic.vocabularies.clone(),
        dense: synthetic.dense,
        zipf_exponent: synthetic.zipf_exponent,
        ..SyntheticConfig::default()
    };
    let source = SourceConfig {
        format: Format::Synthetic(config),
        split: Some(Split::Position { train_rows: synthetic.rows }),
        ..SourceConfig::default()
    };
    let (train, test) = divided(source);
    (train, test.filter(|_| synthetic.test_rows > 0))
}

fn divided(source: SourceConfig) -> (SourceConfig, Option<SourceConfig>) {
    let train = SourceConfig { part: Part::Train, ..source.clone() };
    (train, Some(SourceConfig { part: Part::Test, ..source }))
}
