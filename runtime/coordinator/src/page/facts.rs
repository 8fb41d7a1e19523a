//! The facts about a job that its page shows and that do not change while it trains.

use rectrain_kinds::{DenseOptimizer, SparseOptimizer};
use rectrain_modes::TrainingLength;
use rectrain_protocol::plan::JobPlan;
use serde::Serialize;

/// The facts of a plan.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanFacts {
    model: String,
    global_batch_rows: u64,
    /// `None` if the job ends at a number of steps.
    epochs: Option<u32>,
    dense_optimizer: DenseOptimizer,
    /// The optimizer of the first group of rows. All groups have the same.
    row_optimizer: Option<SparseOptimizer>,
    /// The optimizer of first-order weights, if they have one of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    first_order_optimizer: Option<SparseOptimizer>,
    has_checkpoints: bool,
}

impl PlanFacts {
    /// The facts of this plan.
    #[must_use]
    pub fn of(plan: &JobPlan) -> Self {
        let epochs = match plan.length {
            TrainingLength::Epochs(epochs) => Some(epochs),
            TrainingLength::Steps(_) => None,
        };
        Self {
            model: plan.model.name().to_owned(),
            global_batch_rows: plan.global_batch_rows,
            epochs,
            dense_optimizer: plan.dense_optimizer,
            row_optimizer: plan.store.groups.first().map(|group| group.optimizer),
            first_order_optimizer: plan.store.groups.first().and_then(|group| group.first_order),
            has_checkpoints: plan.checkpoint.is_some(),
        }
    }
}

/// How a run was started. The command line knows it, and the coordinator does not.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RunFacts {
    /// The manifest with its overrides, as YAML.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// The command line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    /// The folder that keeps the run's history.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<String>,
}
