//! Saves and restores the dense parameters. In modes with a barrier, dense worker 0 saves them.
//! When training resumes from a checkpoint, every dense worker restores them.

use std::sync::Arc;

use rectrain_checkpoint::{Checkpoint, DensePart, FileEntry, Ticket, save_dense};
use rectrain_proto::v1;

use super::Trainer;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::dense_part::{dense_part, no_checkpoints};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::plan::CheckpointPlan;
use rectrain_protocol::ticket;

impl Trainer {
    /// Copies the present parameters. A task writes them and reports to the coordinator while
    /// training continues.
    pub(crate) fn save(&mut self, order: &v1::Order, ticket: Option<v1::Ticket>) -> Result<(), RoleError> {
        if self.rank.0 != 0 {
            return Ok(());
        }
        let ticket = ticket::read("save", ticket)?;
        let settings = self.plan.checkpoint.clone().ok_or_else(no_checkpoints)?;
        self.tower.check_parameters(order.step)?;
        let (parameters, state) = self.tower.state()?;
        let part = dense_part(&self.plan, 0, parameters, state, order.step.saturating_sub(order.dense_since));
        let coordinator = self.peers.coordinator.clone();
        let task = async move {
            let written = write(&settings, &ticket, &part).await.and_then(|file| ticket::write_file(&file));
            let (file, error) = match written {
                Ok(file) => (Some(file), String::new()),
                Err(error) => (None, error.to_string()),
            };
            let saved = v1::DenseSaved { id: ticket.id.to_string(), file, error };
            if let Err(error) = coordinator.call(saved, Vec::new(), CALL_DEADLINE).await {
                tracing::warn!(%error, "the report of the saved dense parameters did not reach the coordinator");
            }
        };
        // The task ends by itself and reports its result.
        drop(self.spawn(task));
        Ok(())
    }

    /// Takes the parameters that both models have from the checkpoint of another job. The others
    /// keep their initial values. The optimizer's state comes along if the optimizer is the same,
    /// and starts fresh otherwise.
    fn take_over(&mut self, checkpoint: &str) -> Result<(), RoleError> {
        let (plan, name) = (Arc::clone(&self.plan), checkpoint.to_owned());
        let (dense, inheritance) = self.wait(async move {
            let (checkpoint, inheritance) = plan.open_warm_start(&name).await?;
            Ok((checkpoint.dense().await?, inheritance))
        })?;
        let transfer = &inheritance.dense;
        let continues = self.plan.continues_dense_optimizer(&dense);
        let (parameters, state) = self.tower.state()?;
        let (mut parameters, mut state) = (parameters.to_vec(), state.to_vec());
        let saved_total = dense.parameters.len().max(1);
        transfer.copy(&dense.parameters, &mut parameters)?;
        if continues {
            let vectors = state.chunks_exact_mut(parameters.len().max(1));
            for (saved, own) in dense.state.chunks_exact(saved_total).zip(vectors) {
                transfer.copy(saved, own)?;
            }
        }
        let kind = self.tower.optimizer().kind().name();
        Ok(self.tower.restore(&parameters, kind, &state)?)
    }

    /// Restores parameters and optimizer state from a checkpoint of this job, or of another one.
    pub(crate) fn restore(&mut self, restore: &v1::Restore) -> Result<(), RoleError> {
        let checkpoint = &*restore.checkpoint;
        if restore.from {
            return self.take_over(checkpoint);
        }
        let settings = self.plan.checkpoint.clone().ok_or_else(no_checkpoints)?;
        let name = checkpoint.to_owned();
        let dense = self.wait(async move {
            let checkpoint = Checkpoint::open(&settings.directory()?, &name).await?;
            Ok(checkpoint.dense().await?)
        })?;
        if dense.state_names != self.tower.optimizer().slots() {
            let (found, expected) = (dense.state_names, self.tower.optimizer().slots());
            let reason =
                format!("checkpoint {checkpoint} has the optimizer state {found:?}, but this job needs {expected:?}");
            return Err(RoleError::Inconsistent { message: "restore", reason });
        }
        Ok(self.tower.restore(&dense.parameters, &dense.optimizer, &dense.state)?)
    }
}

async fn write(settings: &CheckpointPlan, ticket: &Ticket, part: &DensePart) -> Result<FileEntry, RoleError> {
    Ok(save_dense(&settings.directory()?, ticket, 0, part).await?)
}
