//! What training has to know of the job.

use rectrain_kinds::Family;
use rectrain_modes::EvaluationPoints;
use rectrain_modes::gba::TokenMode;
use rectrain_modes::switch::RunMode;
use serde::{Deserialize, Serialize};

use rectrain_modes::TrainingMode;
use rectrain_protocol::plan::JobPlan;

/// See the module's text.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Facts {
    pub(super) first_mode: TrainingMode,
    /// Whether there are checkpoints, and the global batches between two.
    pub(super) saves: bool,
    pub(super) save_every: Option<u64>,
    pub(super) global_rows: u64,
    pub(super) local_rows: u64,
    pub(super) pieces: u32,
    pub(super) workers: u32,
    /// When this attempt began.
    pub(super) started_workers: u32,
    /// Of those, so many train where each step has a barrier; none: all.
    pub(super) some_with_barrier: Option<u32>,
    pub(super) servers: u32,
    pub(super) evaluation: EvaluationPoints,
    pub(super) evaluates: bool,
    pub(super) tests_on_the_next_slice: bool,
}

impl Facts {
    pub(super) fn of(plan: &JobPlan) -> Self {
        Self {
            first_mode: plan.mode,
            saves: plan.checkpoint.is_some(),
            save_every: plan.checkpoint.as_ref().and_then(|checkpoint| checkpoint.every_steps),
            global_rows: plan.global_batch_rows,
            local_rows: plan.local_batch_rows,
            pieces: plan.pieces(),
            workers: plan.replicas.dense_workers,
            started_workers: plan.replicas.dense_workers,
            some_with_barrier: plan.some_with_barrier,
            servers: plan.replicas.ps,
            evaluation: plan.evaluation,
            evaluates: plan.test.is_some(),
            tests_on_the_next_slice: plan.tests_on_the_next_slice,
        }
    }

    pub(super) fn barrier_workers(&self) -> u32 {
        self.some_with_barrier.map_or(self.workers, |some| some.min(self.workers))
    }

    pub(super) fn run_mode(&self, mode: TrainingMode, workers: u32) -> RunMode {
        RunMode { mode, workers, local_rows: self.local_rows as u32 }
    }

    pub(super) fn check_workers(&self, mode: TrainingMode, workers: u32) -> Result<(), String> {
        if mode.family() == Family::Barrier && workers > self.pieces {
            return Err(format!(
                "with a barrier each of {workers} dense workers needs a local batch of its own, and a global batch has {}: set spec.training.localBatchSize to {} or less",
                self.pieces,
                self.global_rows / u64::from(workers),
            ));
        }
        if let Some(some) = self.some_with_barrier.filter(|some| workers < *some) {
            return Err(format!(
                "{some} dense workers train with a barrier (spec.training.barrierWorkers): expected no fewer, found {workers}"
            ));
        }
        self.check(mode, workers)
    }

    pub(super) fn check(&self, mode: TrainingMode, workers: u32) -> Result<(), String> {
        let TrainingMode::Tokens(tokens) = mode else { return Ok(()) };
        if matches!(tokens, TokenMode::HopBw { .. }) && workers != self.started_workers {
            return Err(format!(
                "in mode hopBw a global step has as many gradients as there were dense workers at first, which is {}",
                self.started_workers
            ));
        }
        tokens.validate(workers).map_err(|error| error.to_string())?;
        if u64::from(self.pieces) * self.local_rows != self.global_rows {
            return Err(format!(
                "a global batch of {} rows cannot be cut into local batches of {} rows: set spec.training.localBatchSize",
                self.global_rows, self.local_rows
            ));
        }
        Ok(())
    }
}
