//! The dense parameters in checkpoints: dense worker 0 saves them where each step has a barrier, and every dense worker takes them
//! from the checkpoint that training goes on from.

use rectrain_checkpoint::{Checkpoint, DensePart, FileEntry, Ticket, save_dense};
use rectrain_proto::v1;

use super::Trainer;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::dense_part::{dense_part, no_checkpoints};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::plan::CheckpointPlan;
use rectrain_protocol::ticket;

impl Trainer {
    /// Copies the parameters as they are now; they are written, and the coordinator is told, while training goes on.
    pub(crate) fn save(&mut self, order: &v1::Order, ticket: Option<v1::Ticket>) -> Result<(), RoleError> {
        if self.rank.0 != 0 {
            return Ok(());
        }
        let ticket = ticket::read("save", ticket)?;
        let settings = self.plan.checkpoint.clone().ok_or_else(no_checkpoints)?;
        let (parameters, state) = self.tower.state()?;
        let part = dense_part(&self.plan, 0, parameters, state, order.step);
        let coordinator = self.peers.coordinator.clone();
        let task = async move {
            let written = write(&settings, &ticket, &part).await.and_then(|file| ticket::write_file(&file));
            let (file, error) = match written {
                Ok(file) => (Some(file), String::new()),
                Err(error) => (None, error.to_string()),
            };
            let saved = v1::DenseSaved { id: ticket.id.to_string(), file, error };
            if let Err(error) = coordinator.call(saved, Vec::new(), CALL_DEADLINE).await {
                tracing::warn!(%error, "the coordinator could not be told of the saved dense parameters");
            }
        };
        // It ends by itself, and tells how.
        drop(self.spawn(task));
        Ok(())
    }

    /// Takes parameters and optimizer state from a checkpoint.
    pub(crate) fn restore(&mut self, checkpoint: &str) -> Result<(), RoleError> {
        let settings = self.plan.checkpoint.clone().ok_or_else(no_checkpoints)?;
        let name = checkpoint.to_owned();
        let dense = self.wait(async move {
            let checkpoint = Checkpoint::open(&settings.directory()?, &name).await?;
            Ok(checkpoint.dense().await?)
        })?;
        if dense.state_names != self.tower.optimizer().slots() {
            let (found, expected) = (dense.state_names, self.tower.optimizer().slots());
            let reason =
                format!("checkpoint {checkpoint} holds the optimizer's {found:?} where {expected:?} were expected");
            return Err(RoleError::Inconsistent { message: "restore", reason });
        }
        Ok(self.tower.restore(&dense.parameters, &dense.optimizer, &dense.state)?)
    }
}

async fn write(settings: &CheckpointPlan, ticket: &Ticket, part: &DensePart) -> Result<FileEntry, RoleError> {
    Ok(save_dense(&settings.directory()?, ticket, 0, part).await?)
}
