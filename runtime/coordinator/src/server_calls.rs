//! Makes the calls to the parameter servers that restoring, mode switches, checkpoints, slot
//! migrations and the end of the data need.

use std::sync::Arc;

use futures::future::try_join_all;
use rectrain_modes::TrainingMode;
use rectrain_modes::switch::Boundary;
use rectrain_proto::v1;
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::message;
use rectrain_wire::{Channel, Transport};
use tokio::task::JoinSet;

use super::Coordinator;
use super::checkpointing::Checkpointer;
use super::free_space::FreeSpace;
use super::migrations::Migrations;
use super::state::State;
use super::training::ServerCall;

impl Coordinator {
    /// Makes all calls that training asks for, until one fails. Returns its error.
    pub(crate) async fn drive(&self, transport: &dyn Transport) -> RoleError {
        let mut checkpointer = self.checkpointer();
        if let Err(error) = self.abort_inherited_checkpoint().await {
            return error;
        }
        let mut migrations = match self.placement() {
            Ok(placement) => Migrations::new(placement.map, self.lock().migrations()),
            Err(error) => return error,
        };
        loop {
            if let Err(error) = self.drive_once(transport, &mut checkpointer, &mut migrations).await {
                return error;
            }
        }
    }

    fn checkpointer(&self) -> Checkpointer {
        let (checkpoints, resumed) = self.checkpoints.lock().take().unzip();
        Checkpointer {
            resumed: resumed.flatten(),
            warm_start: self.warm_start.lock().take(),
            checkpoints,
            writing: JoinSet::new(),
            failed_attempts: 0,
            server_restarts: 0,
            free_space: Arc::new(FreeSpace::new(self.events.clone(), self.metrics.clone())),
        }
    }

    /// Waits for one thing to do, and does it.
    async fn drive_once(
        &self,
        transport: &dyn Transport,
        checkpointer: &mut Checkpointer,
        migrations: &mut Migrations,
    ) -> Result<(), RoleError> {
        let calls = self.wait_until(WHOLE_JOB, |state| {
            let calls = state.training().take_calls();
            Ok((!calls.is_empty()).then_some(calls))
        });
        let resize = self.wait_until(WHOLE_JOB, State::resize_to_begin);
        let fall = self.wait_until(WHOLE_JOB, |state| Ok(state.fall_to_undo()));
        tokio::select! {
            calls = calls => for call in calls? {
                self.call_servers(call, checkpointer, migrations).await?;
            },
            Some(ended) = checkpointer.writing.join_next() => {
                self.finish_save(&self.placement()?.servers, ended, checkpointer).await?;
                self.renew_save_request()?;
            }
            resize = resize => {
                self.begin_migration(resize?, transport, migrations).await?;
            }
            fall = fall => Box::pin(self.go_back(&fall?, checkpointer)).await?,
            Some(answer) = migrations.answer() => self.migration_answered(answer, migrations)?,
        }
        // A server must stay until the checkpoint of its rows is written.
        if checkpointer.writing.is_empty() {
            self.end_migration(migrations).await?;
        }
        Ok(())
    }

    async fn call_servers(
        &self,
        call: ServerCall,
        checkpointer: &mut Checkpointer,
        migrations: &mut Migrations,
    ) -> Result<(), RoleError> {
        let placement = self.placement()?;
        let servers = &*placement.servers;
        match call {
            ServerCall::Flip => {
                self.flip(migrations).await?;
                if let Some(checkpoints) = &mut checkpointer.checkpoints {
                    checkpoints.force_full();
                }
                Ok(())
            }
            ServerCall::SettleSlots => self.settle_slots(migrations).await,
            ServerCall::Begin { mode, at, first_piece } => self.begin_mode(servers, mode, at, first_piece).await,
            ServerCall::Flush => self.flush(servers).await,
            ServerCall::Restore => match checkpointer.warm_start.take() {
                Some(warm_start) => self.begin_with_model(servers, warm_start).await,
                None => self.restore(servers, checkpointer).await,
            },
            ServerCall::Save { at, last } => self.save(servers, at, last, checkpointer).await,
        }
    }

    /// Tells all servers to train in `mode` from the boundary `at` on.
    async fn begin_mode(
        &self,
        servers: &[Channel],
        mode: TrainingMode,
        at: Boundary,
        first_piece: u32,
    ) -> Result<(), RoleError> {
        let begin = v1::BeginMode {
            mode: mode.name().to_owned(),
            step: at.step.0,
            first_row: at.next_row,
            first_piece,
            attempt: self.attempt,
            dense_since: self.lock().training().dense_since(),
        };
        let no_tensors = || Ok(Vec::new());
        try_join_all(servers.iter().map(|server| message::call_server(server, begin.clone(), no_tensors))).await?;
        let before = self.change(|state| {
            let before = state.training().mode();
            state.training().begun()?;
            Ok(before)
        })?;
        if before != mode {
            let (from, to) = (before.name().to_owned(), mode.name().to_owned());
            self.events.push(JobEvent::ModeSwitched { step: at.step.0, from, to });
        }
        Ok(())
    }

    /// Tells all servers to apply the gradients that are left in their buffers.
    async fn flush(&self, servers: &[Channel]) -> Result<(), RoleError> {
        let calls = servers.iter().map(|server| message::call_server(server, v1::FlushRequest {}, || Ok(Vec::new())));
        for (index, (reply, _)) in try_join_all(calls).await?.into_iter().enumerate() {
            self.change(|state| state.training().flushed(index as u32, &reply))?;
        }
        Ok(())
    }
}
