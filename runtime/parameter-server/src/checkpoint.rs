//! A parameter server's part in checkpoints. It freezes its rows, writes them during training, and
//! restores the rows of its slots. In modes without a barrier it also freezes and writes its
//! partition of the dense parameters.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rectrain_checkpoint::{Checkpoint, DensePart, FileEntry, SlotSet, Ticket, save_dense, save_rows};
use rectrain_embedding::{FrozenStore, SaveScope, Store};
use rectrain_proto::v1;
use tokio_util::sync::CancellationToken;

use super::slots::Slots;
use crate::partition::Partition;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::dense_part::{dense_part, no_checkpoints};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::plan::{CheckpointPlan, JobPlan, dense_partition};
use rectrain_protocol::ticket;

/// See the module documentation.
pub(super) struct Saving {
    index: u32,
    plan: Arc<JobPlan>,
    slots: Arc<Slots>,
    frozen: Mutex<Option<Frozen>>,
}

/// A frozen state that is being saved.
#[derive(Clone)]
struct Frozen {
    ticket: Ticket,
    rows: Arc<FrozenStore>,
    /// The server's slots at the time of the freeze.
    slots: SlotSet,
    partition: Option<Arc<DensePart>>,
    /// Cancelled when the checkpoint is aborted. The writer then stops, because no other state can
    /// be frozen before it has ended.
    given_up: CancellationToken,
}

impl Saving {
    pub(super) fn new(plan: &Arc<JobPlan>, index: u32, slots: &Arc<Slots>) -> Self {
        Self { index, slots: Arc::clone(slots), plan: Arc::clone(plan), frozen: Mutex::default() }
    }

    /// Freezes the present state. Aborts a checkpoint that was frozen before.
    pub(super) fn freeze(
        &self,
        request: v1::Freeze,
        store: &Arc<Store>,
        partition: &Partition,
    ) -> Result<v1::Frozen, RoleError> {
        let ticket = ticket::read("freeze", request.ticket)?;
        let mut frozen = self.lock();
        if let Some(before) = frozen.take() {
            before.given_up.cancel();
        }
        let scope = match &ticket.base {
            Some(base) => SaveScope::ChangesSince(base.id.save_id()),
            None => SaveScope::Everything,
        };
        let rows = Arc::new(store.freeze(ticket.id.save_id(), scope)?);
        let updates = ticket.step.saturating_sub(request.dense_since);
        let partition_now = if request.partition { Some(Arc::new(self.part(partition, updates)?)) } else { None };
        let (slots, given_up) = (self.slots.own(), CancellationToken::new());
        *frozen = Some(Frozen { ticket, rows, slots, partition: partition_now, given_up });
        Ok(v1::Frozen { applied: Some(partition.applied()) })
    }

    /// Writes the frozen state, unless the checkpoint is aborted meanwhile.
    pub(super) async fn write(&self, request: v1::WriteFrozen) -> Result<v1::WrittenFiles, RoleError> {
        let ticket = ticket::read("write_frozen", request.ticket)?;
        let frozen = self.lock().clone().filter(|frozen| frozen.ticket == ticket).ok_or_else(|| {
            let reason = format!("nothing is fixed for checkpoint {}", ticket.id);
            RoleError::Inconsistent { message: "write_frozen", reason }
        })?;
        let files = tokio::select! {
            biased;
            () = frozen.given_up.cancelled() => {
                let reason = format!("checkpoint {} was given up", ticket.id);
                return Err(RoleError::Inconsistent { message: "write_frozen", reason });
            }
            files = self.write_files(&frozen) => files?,
        };
        Ok(v1::WrittenFiles { files: files.iter().map(ticket::write_file).collect::<Result<_, _>>()? })
    }

    async fn write_files(&self, frozen: &Frozen) -> Result<Vec<FileEntry>, RoleError> {
        let (directory, ticket) = (self.settings()?.directory()?, &frozen.ticket);
        let mut files = vec![save_rows(&directory, ticket, self.index, &frozen.rows, &frozen.slots).await?];
        if let Some(partition) = &frozen.partition {
            files.push(save_dense(&directory, ticket, self.index, partition).await?);
        }
        Ok(files)
    }

    /// Releases the frozen state, after the checkpoint was saved or aborted.
    pub(super) fn thaw(&self, request: v1::Thaw) -> Result<(), RoleError> {
        let ticket = ticket::read("thaw", request.ticket)?;
        let Some(frozen) = self.lock().take_if(|frozen| frozen.ticket == ticket) else { return Ok(()) };
        if !request.saved {
            frozen.given_up.cancel();
        }
        match Arc::try_unwrap(frozen.rows) {
            Ok(rows) if request.saved => rows.complete(),
            // Aborted. If a writer still uses the rows, it releases them when it stops.
            Ok(rows) => drop(rows),
            Err(rows) => drop(rows),
        }
        Ok(())
    }

    /// Clears this server's slots, and restores their rows from a checkpoint.
    pub(super) async fn restore(
        &self,
        request: v1::RestoreRows,
        store: &Arc<Store>,
    ) -> Result<v1::RestoredRows, RoleError> {
        let (all, slots) = (Arc::clone(store), self.slots.own());
        blocking("clearing of slots", move || slots.iter().try_for_each(|slot| all.clear_slot(slot).map(drop)))
            .await??;
        store.track_changes(self.plan.checkpoint.is_some());
        let restored = match request.from {
            true => self.take_over(&request.checkpoint, store).await,
            false => self.restore_from(&request.checkpoint, store).await,
        };
        match restored {
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

    /// Takes over the rows of another job's checkpoint. No checkpoint of this job has them, so the
    /// first one will be full.
    async fn take_over(&self, name: &str, store: &Arc<Store>) -> Result<v1::RestoredRows, RoleError> {
        let (checkpoint, inheritance) = self.plan.open_warm_start(name).await?;
        let restored = checkpoint.adopt_rows(store, &self.slots.own(), &inheritance.groups).await?;
        Ok(v1::RestoredRows { rows: store.rows(), bytes: restored.bytes, damaged: String::new() })
    }

    fn part(&self, partition: &Partition, updates: u64) -> Result<DensePart, RoleError> {
        let parameters = partition.parameters().values;
        let in_no_map = || {
            let reason = "a parameter server that is in no slot map holds no dense parameters".to_owned();
            RoleError::Inconsistent { message: "freeze", reason }
        };
        let (place, servers) = self.slots.place().ok_or_else(in_no_map)?;
        let own = dense_partition(self.plan.dense_parameters()?, place, servers);
        Ok(dense_part(&self.plan, own.start as u64, &parameters, partition.state(), updates))
    }

    fn settings(&self) -> Result<&CheckpointPlan, RoleError> {
        self.plan.checkpoint.as_ref().ok_or_else(no_checkpoints)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Frozen>> {
        self.frozen.lock()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::path::Path;
    use std::pin::pin;
    use std::time::Duration;

    use prometheus::Registry;
    use rectrain_checkpoint::{CheckpointId, Kind, directory_name};
    use rectrain_wire::{InProcess, InProcessConfig, WireCounters};

    use super::*;
    use crate::{ParameterServer, Rows};
    use rectrain_protocol::metrics::{PsMetrics, RoleMetrics};
    use rectrain_protocol::plan::small_plan;

    fn plan(checkpoints: &Path) -> Arc<JobPlan> {
        Arc::new(small_plan(&[&format!("spec.checkpoint.path={}", checkpoints.display())]))
    }

    #[test]
    fn a_part_without_parameters_still_names_the_optimizer_state() {
        let directory = tempfile::tempdir().unwrap();
        let plan = plan(directory.path());
        let names = plan.dense_optimizer.slots();
        assert!(!names.is_empty(), "the default optimizer has a state");
        let values = [1.0_f32, 2.0, 3.0];
        let state: Vec<f32> = (0..names.len()).flat_map(|place| values.map(|value| value + place as f32)).collect();
        let part = dense_part(&plan, 5, &values, &state, 7);
        let empty = dense_part(&plan, 5, &[], &[], 7);
        for (place, name) in names.iter().enumerate() {
            assert_eq!(part.state[place], ((*name).to_owned(), values.map(|value| value + place as f32).to_vec()));
            assert_eq!(empty.state[place], ((*name).to_owned(), Vec::new()));
        }
        assert_eq!((part.state.len(), empty.state.len()), (names.len(), names.len()));
    }

    /// A writer that went on would block later checkpoints, up to the final one, until a hanging
    /// storage answers.
    #[tokio::test]
    async fn an_aborted_checkpoint_stops_its_writer() {
        let directory = tempfile::tempdir().unwrap();
        let plan = plan(directory.path());
        let transport = InProcess::new(InProcessConfig::default(), WireCounters::unregistered(|_| "test").unwrap());
        let metrics = PsMetrics::of(&RoleMetrics::new(Registry::new()).unwrap(), 0);
        let rows = Rows::none(&plan).unwrap();
        let server = ParameterServer::new(&plan, 0, rows, Arc::new(transport), metrics).unwrap();
        let ticket = |step: u64| {
            let directory = directory_name(step, Kind::Full);
            Some(ticket::write(&Ticket { directory, id: CheckpointId(u128::from(step)), step, base: None }))
        };
        let saving = &server.saving;
        let freeze = |step: u64| {
            let request = v1::Freeze { ticket: ticket(step), partition: false, dense_since: 0 };
            saving.freeze(request, &server.shared.store, &Partition::default())
        };
        for given_up_by_thaw in [true, false] {
            let step = 2 * u64::from(given_up_by_thaw);
            freeze(step).unwrap();
            let mut writing = pin!(saving.write(v1::WriteFrozen { ticket: ticket(step) }));
            tokio::select! {
                biased;
                written = &mut writing => panic!("it has ended already: {written:?}"),
                () = std::future::ready(()) => {}
            }
            if given_up_by_thaw {
                saving.thaw(v1::Thaw { ticket: ticket(step), saved: false }).unwrap();
            }
            assert!(freeze(step + 1).is_err(), "the writer has not heard of it");
            assert!(writing.await.unwrap_err().to_string().contains("given up"));
            // The copying thread stops only after its current slot.
            while freeze(step + 1).is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let files = saving.write(v1::WriteFrozen { ticket: ticket(step + 1) }).await.unwrap().files;
            assert_eq!(files.len(), 1);
            saving.thaw(v1::Thaw { ticket: ticket(step + 1), saved: true }).unwrap();
        }
    }
}
