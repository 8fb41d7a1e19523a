//! A parameter server's part in checkpoints: fixes an instant of its rows (and of its dense partition, where there is no barrier),
//! writes it while training goes on, and restores the rows of its slots.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rectrain_checkpoint::{Checkpoint, CheckpointError, DensePart, SlotSet, Ticket, save_dense, save_rows};
use rectrain_embedding::{FrozenStore, SaveScope, Store};
use rectrain_proto::v1;

use super::slots::Slots;
use super::tokens::Partition;
use crate::error::RoleError;
use crate::parameter_server::blocking;
use crate::plan::{CheckpointPlan, JobPlan, dense_partition};
use crate::ticket;

/// See the module's text.
pub(super) struct Saving {
    index: u32,
    plan: Arc<JobPlan>,
    slots: Arc<Slots>,
    frozen: Mutex<Option<Frozen>>,
}

/// An instant that is being saved.
#[derive(Clone)]
struct Frozen {
    ticket: Ticket,
    rows: Arc<FrozenStore>,
    /// This server's at that instant.
    slots: SlotSet,
    partition: Option<Arc<DensePart>>,
}

impl Saving {
    pub(super) fn new(plan: &Arc<JobPlan>, index: u32, slots: &Arc<Slots>) -> Self {
        Self { index, slots: Arc::clone(slots), plan: Arc::clone(plan), frozen: Mutex::default() }
    }

    /// Fixes this instant. One that was fixed before is given up.
    pub(super) fn freeze(
        &self,
        request: v1::Freeze,
        store: &Arc<Store>,
        partition: &Partition,
    ) -> Result<v1::Frozen, RoleError> {
        let ticket = ticket::read("freeze", request.ticket)?;
        let mut frozen = self.lock();
        *frozen = None;
        let scope = match &ticket.base {
            Some(base) => SaveScope::ChangesSince(base.id.save_id()),
            None => SaveScope::Everything,
        };
        let rows = Arc::new(store.freeze(ticket.id.save_id(), scope)?);
        let partition_now = if request.partition { Some(Arc::new(self.part(partition, ticket.step)?)) } else { None };
        *frozen = Some(Frozen { ticket, rows, slots: self.slots.own(), partition: partition_now });
        Ok(v1::Frozen { applied: Some(partition.applied()) })
    }

    /// Writes what was fixed.
    pub(super) async fn write(&self, request: v1::WriteFrozen) -> Result<v1::WrittenFiles, RoleError> {
        let ticket = ticket::read("write_frozen", request.ticket)?;
        let frozen = self.lock().clone().filter(|frozen| frozen.ticket == ticket).ok_or_else(|| {
            let reason = format!("nothing is fixed for checkpoint {}", ticket.id);
            RoleError::Inconsistent { message: "write_frozen", reason }
        })?;
        let directory = self.settings()?.directory()?;
        let mut files = vec![save_rows(&directory, &ticket, self.index, &frozen.rows, &frozen.slots).await?];
        if let Some(partition) = &frozen.partition {
            files.push(save_dense(&directory, &ticket, self.index, partition).await?);
        }
        Ok(v1::WrittenFiles { files: files.iter().map(ticket::write_file).collect::<Result<_, _>>()? })
    }

    /// The checkpoint exists or was given up.
    pub(super) fn thaw(&self, request: v1::Thaw) -> Result<(), RoleError> {
        let ticket = ticket::read("thaw", request.ticket)?;
        let Some(frozen) = self.lock().take_if(|frozen| frozen.ticket == ticket) else { return Ok(()) };
        match Arc::try_unwrap(frozen.rows) {
            Ok(rows) if request.saved => rows.complete(),
            // Given up; if it is still being written, then when that ends.
            Ok(rows) => drop(rows),
            Err(rows) => drop(rows),
        }
        Ok(())
    }

    /// Takes the rows of this server's slots from a checkpoint.
    pub(super) async fn restore(
        &self,
        request: v1::RestoreRows,
        store: &Arc<Store>,
    ) -> Result<v1::RestoredRows, RoleError> {
        let (all, slots) = (Arc::clone(store), self.slots.own());
        blocking("clearing of slots", move || slots.iter().try_for_each(|slot| all.clear_slot(slot).map(drop)))
            .await??;
        store.track_changes(true);
        if request.checkpoint.is_empty() {
            return Ok(v1::RestoredRows::default());
        }
        match self.restore_from(&request.checkpoint, store).await {
            Ok(restored) => Ok(restored),
            Err(RoleError::Checkpoint(error)) if error.is_checkpoints_fault() => {
                Ok(v1::RestoredRows { damaged: error.to_string(), ..v1::RestoredRows::default() })
            }
            Err(error) => Err(error),
        }
    }

    async fn restore_from(&self, name: &str, store: &Arc<Store>) -> Result<v1::RestoredRows, RoleError> {
        let checkpoint = Checkpoint::open(&self.settings()?.directory()?, name).await?;
        let restored = checkpoint.restore_rows(store, &self.slots.own()).await?;
        store.mark_saved(checkpoint.manifest().id.save_id())?;
        Ok(v1::RestoredRows { rows: store.rows(), bytes: restored.bytes, damaged: String::new() })
    }

    fn part(&self, partition: &Partition, step: u64) -> Result<DensePart, RoleError> {
        let parameters = partition.parameters().values;
        let in_no_map = || {
            let reason = "a parameter server that is in no slot map holds no dense parameters".to_owned();
            RoleError::Inconsistent { message: "freeze", reason }
        };
        let (place, servers) = self.slots.place().ok_or_else(in_no_map)?;
        let own = dense_partition(self.plan.dense_parameters()?, place, servers);
        Ok(dense_part(&self.plan, own.start as u64, &parameters, partition.state(), step))
    }

    fn settings(&self) -> Result<&CheckpointPlan, RoleError> {
        self.plan.checkpoint.as_ref().ok_or_else(no_checkpoints)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Frozen>> {
        self.frozen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Some of the dense parameters, from `offset` on, and the state of their optimizer, its vectors one after another.
pub(crate) fn dense_part(plan: &JobPlan, offset: u64, parameters: &[f32], state: &[f32], step: u64) -> DensePart {
    let names = plan.dense_optimizer.slots();
    let vectors = state.chunks_exact(parameters.len().max(1)).map(<[f32]>::to_vec);
    DensePart {
        offset,
        parameters: parameters.to_vec(),
        optimizer: plan.dense_optimizer.kind().to_owned(),
        state: names.iter().map(|name| (*name).to_owned()).zip(vectors).collect(),
        update_count: step,
    }
}

/// A message about checkpoints in a job that has none.
pub(crate) fn no_checkpoints() -> RoleError {
    RoleError::Checkpoint(Box::new(CheckpointError::Incomplete {
        checkpoint: "-".to_owned(),
        problem: "the job has no spec.checkpoint.path".to_owned(),
    }))
}
