//! A part of the dense parameters in a checkpoint.

use rectrain_checkpoint::{CheckpointError, DensePart};

use crate::error::RoleError;
use crate::plan::JobPlan;

/// The dense `parameters` from `offset` on. `state` is the optimizer's state: its vectors one after
/// another, each as long as `parameters`. `update_count` counts the updates of that state.
pub fn dense_part(plan: &JobPlan, offset: u64, parameters: &[f32], state: &[f32], update_count: u64) -> DensePart {
    let names = plan.dense_optimizer.slots();
    // A server without parameters has empty vectors, which are named all the same.
    let vector = |place: usize| state.get(place * parameters.len()..(place + 1) * parameters.len());
    let named = names.iter().enumerate().map_while(|(place, name)| Some(((*name).to_owned(), vector(place)?.to_vec())));
    DensePart {
        offset,
        parameters: parameters.to_vec(),
        optimizer: plan.dense_optimizer.kind().name().to_owned(),
        state: named.collect(),
        update_count,
    }
}

/// The error for a message about checkpoints in a job that has none.
pub fn no_checkpoints() -> RoleError {
    RoleError::Checkpoint(Box::new(CheckpointError::Incomplete {
        checkpoint: "-".to_owned(),
        problem: "the job has no spec.checkpoint.path".to_owned(),
    }))
}
