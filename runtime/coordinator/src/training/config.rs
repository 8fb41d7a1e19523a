//! The settings of a job that training depends on.

use rectrain_kinds::Family;
use rectrain_modes::gba::{DispatchError, TokenMode};
use rectrain_modes::switch::RunMode;
use rectrain_modes::{EvaluationPoints, TrainingMode};
use rectrain_protocol::plan::JobPlan;
use serde::{Deserialize, Serialize};

/// See the module's text. `workers` and `servers` follow the membership while the job trains.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TrainingConfig {
    pub(super) first_mode: TrainingMode,
    /// Whether the job has checkpoints.
    pub(super) saves: bool,
    /// Global batches between two checkpoints; `None`: one checkpoint at the end.
    pub(super) save_every: Option<u64>,
    pub(super) global_rows: u64,
    pub(super) local_rows: u64,
    /// Local batches in a global batch.
    pub(super) pieces: u32,
    /// Dense workers that train.
    pub(super) workers: u32,
    /// Dense workers when this attempt began.
    pub(super) started_workers: u32,
    /// Dense workers that train with a barrier; `None`: all.
    pub(super) barrier_limit: Option<u32>,
    /// With pulled pieces: the steps after the oldest open one whose pieces workers may pull.
    #[serde(default)]
    pub(super) steps_ahead: u32,
    /// Parameter servers in the slot map.
    pub(super) servers: u32,
    pub(super) evaluation: EvaluationPoints,
    pub(super) evaluates: bool,
    pub(super) tests_on_the_next_slice: bool,
}

/// Why a number of dense workers cannot train in a mode.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WorkersError {
    /// A global batch has fewer local batches than there are workers.
    #[error(
        "with a barrier each of {workers} dense workers needs a local batch of its own, and a global batch has {pieces}: set spec.training.localBatchSize to {most_rows} or less"
    )]
    TooFewPieces { workers: u32, pieces: u32, most_rows: u64 },
    /// The manifest asks for more workers with a barrier than there are workers.
    #[error(
        "{expected} dense workers train with a barrier (spec.training.barrierWorkers): expected no fewer, found {workers}"
    )]
    TooFewWorkers { expected: u32, workers: u32 },
    /// `hopBw` fixes the number of workers.
    #[error(
        "in mode hopBw a global step has as many gradients as the job started with dense workers, and these were {started}"
    )]
    FixedWorkers { started: u32 },
    /// The settings of the mode do not fit the number of workers.
    #[error(transparent)]
    Mode(#[from] DispatchError),
    /// Local batches of equal size do not make up a global batch.
    #[error(
        "a global batch of {global_rows} rows cannot be cut into local batches of {local_rows} rows: set spec.training.localBatchSize"
    )]
    UnevenPieces { global_rows: u64, local_rows: u64 },
}

impl TrainingConfig {
    pub(super) fn of(plan: &JobPlan) -> Self {
        Self {
            first_mode: plan.mode,
            saves: plan.checkpoint.is_some(),
            save_every: plan.checkpoint.as_ref().and_then(|checkpoint| checkpoint.every_steps),
            global_rows: plan.global_batch_rows,
            local_rows: plan.local_batch_rows,
            pieces: plan.pieces(),
            workers: plan.replicas.dense_worker,
            started_workers: plan.replicas.dense_worker,
            barrier_limit: plan.barrier_workers,
            steps_ahead: plan.look_ahead().clamp(1, u64::from(u32::MAX)) as u32,
            servers: plan.replicas.ps,
            evaluation: plan.evaluation,
            evaluates: plan.test.is_some(),
            tests_on_the_next_slice: plan.tests_on_the_next_slice,
        }
    }

    /// Dense workers that train with a barrier.
    pub(super) fn barrier_workers(&self) -> u32 {
        self.barrier_limit.map_or(self.workers, |limit| limit.min(self.workers))
    }

    pub(super) fn run_mode(&self, mode: TrainingMode, workers: u32) -> RunMode {
        RunMode { mode, workers, local_rows: self.local_rows as u32 }
    }

    /// Whether `workers` dense workers can train in `mode`.
    pub(super) fn check_workers(&self, mode: TrainingMode, workers: u32) -> Result<(), WorkersError> {
        let has_shares = mode.family() == Family::Barrier && mode != TrainingMode::Pulled;
        if has_shares && workers > self.pieces {
            let most_rows = self.global_rows / u64::from(workers);
            return Err(WorkersError::TooFewPieces { workers, pieces: self.pieces, most_rows });
        }
        if let Some(expected) = self.barrier_limit.filter(|limit| workers < *limit) {
            return Err(WorkersError::TooFewWorkers { expected, workers });
        }
        self.check_tokens(mode, workers)
    }

    /// The part of [`Self::check_workers`] for modes without a barrier.
    fn check_tokens(&self, mode: TrainingMode, workers: u32) -> Result<(), WorkersError> {
        let Some(tokens) = mode.tokens() else { return Ok(()) };
        if matches!(tokens, TokenMode::HopBw { .. }) && workers != self.started_workers {
            return Err(WorkersError::FixedWorkers { started: self.started_workers });
        }
        tokens.validate(workers)?;
        if u64::from(self.pieces) * self.local_rows != self.global_rows {
            return Err(WorkersError::UnevenPieces { global_rows: self.global_rows, local_rows: self.local_rows });
        }
        Ok(())
    }
}
