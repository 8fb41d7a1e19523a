//! Takes checkpoints while the job trains: freezes the model at a boundary, waits for the parts to
//! be written while training continues, and finishes or aborts the checkpoint. Also restores rows
//! from one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use rectrain_checkpoint::FileEntry;
use rectrain_modes::DenseHome;
use rectrain_modes::switch::Boundary;
use rectrain_proto::v1;
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::ticket;
use rectrain_wire::Channel;
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};

use super::checkpoints::{self, Checkpoints, PendingCheckpoint, ResumePoint, RowsRestored, WrittenCheckpoint};
use super::free_space::FreeSpace;
use super::refused::SaveRefused;
use super::rollback::NOT_SAVED;
use super::warm_start::{self, WarmStart};
use super::{Coordinator, warn_all};

/// Attempts to write the last checkpoint of the job.
const LAST_SAVE_ATTEMPTS: u32 = 5;
/// Back-off before the second attempt. It doubles with each attempt.
const LAST_SAVE_BACKOFF: Duration = Duration::from_secs(1);

/// The name of a checkpoint, or the reason why there is none.
type SaveResult = Result<String, SaveRefused>;

/// Requests for checkpoints, and the file of dense worker 0.
#[derive(Default)]
pub(super) struct CheckpointRequests {
    /// Checkpoints begun so far.
    begun: u64,
    /// Whether the time for a checkpoint has come, and it has not begun.
    is_due: bool,
    /// Callers that wait for a checkpoint, each with the number of the first one that serves it.
    waiting: Vec<(u64, oneshot::Sender<SaveResult>)>,
    /// Where the file of dense worker 0 is awaited, with the ID of its checkpoint.
    dense: Option<(String, oneshot::Sender<Result<FileEntry, RoleError>>)>,
}

impl CheckpointRequests {
    /// Requests a checkpoint that begins after this call.
    fn request(&mut self) -> oneshot::Receiver<SaveResult> {
        let (saved, asked) = oneshot::channel();
        self.waiting.retain(|(_, saved)| !saved.is_closed());
        self.waiting.push((self.begun + 1, saved));
        asked
    }

    /// Whether a checkpoint that has not begun is due by time, or a caller waits for one.
    fn has_pending(&self) -> bool {
        self.is_due || self.waiting.iter().any(|(number, saved)| *number > self.begun && !saved.is_closed())
    }

    /// The time for a checkpoint has come. False if one was due already, which serves for both.
    #[must_use]
    fn is_newly_due(&mut self) -> bool {
        !std::mem::replace(&mut self.is_due, true)
    }

    fn begin(&mut self) {
        self.begun += 1;
        self.is_due = false;
    }

    /// Answers all callers that wait for the checkpoint begun last, or for an earlier one.
    fn resolve(&mut self, result: &SaveResult) {
        for (_, saved) in self.waiting.extract_if(.., |(number, _)| *number <= self.begun) {
            // A caller that stopped waiting has dropped its receiver.
            let _gone = saved.send(result.clone());
        }
    }
}

/// The checkpoints as [`Coordinator::drive`] handles them.
pub(super) struct Checkpointer {
    /// `None` if the job has no checkpoints.
    pub(super) checkpoints: Option<Checkpoints>,
    /// The checkpoint to restore.
    pub(super) resumed: Option<ResumePoint>,
    /// The model to begin with.
    pub(super) warm_start: Option<Box<WarmStart>>,
    /// The checkpoint that is being written; at most one.
    pub(super) writing: JoinSet<FinishedSave>,
    /// Failed attempts to write the last checkpoint.
    pub(super) failed_attempts: u32,
    /// Restarts of parameter servers known at the last checkpoint.
    pub(super) server_restarts: u64,
    /// Warns when the checkpoint path has little room.
    pub(super) free_space: Arc<FreeSpace>,
}

impl Checkpointer {
    /// A checkpoint that was written or aborted. With `wait`, waits for the one that is being
    /// written.
    pub(super) async fn ended(&mut self, wait: bool) -> Option<Result<FinishedSave, JoinError>> {
        if wait { self.writing.join_next().await } else { self.writing.try_join_next() }
    }
}

/// A checkpoint that was written or aborted.
pub(super) struct FinishedSave {
    pub(super) ticket: v1::Ticket,
    pub(super) last: bool,
    pub(super) result: Result<WrittenCheckpoint, RoleError>,
}

impl Coordinator {
    /// Aborts the checkpoint that an earlier coordinator was writing when it died: the servers
    /// still hold its frozen rows.
    pub(super) async fn abort_inherited_checkpoint(&self) -> Result<(), RoleError> {
        let Some(ticket) = self.lock().pending_checkpoint() else { return Ok(()) };
        let step = ticket.step;
        warn_all(
            &self.events,
            [format!("there is no checkpoint of step {step}: the coordinator died while it was being written")],
        );
        self.metrics.failed_checkpoints.inc();
        checkpoints::thaw(ticket, false, &self.placement()?.servers).await?;
        self.lock().set_pending_checkpoint(None);
        Ok(())
    }

    /// Tells the servers to restore their rows. If a checkpoint turns out to be damaged, they
    /// restore an older one.
    ///
    /// # Errors
    /// [`RoleError::Input`] if all checkpoints are damaged.
    pub(super) async fn restore(&self, servers: &[Channel], checkpointer: &mut Checkpointer) -> Result<(), RoleError> {
        let Checkpointer { checkpoints: Some(checkpoints), resumed, .. } = checkpointer else {
            return Err(RoleError::Stopped);
        };
        while let Some(mut from) = resumed.take() {
            self.check_files(&mut from, checkpoints).await?;
            let request = v1::Restore { checkpoint: from.name.clone(), from: false };
            match checkpoints::restore_rows(&request, servers).await? {
                RowsRestored::All { rows } => {
                    checkpoints.restored(&from);
                    return self.rows_restored(from, rows);
                }
                RowsRestored::Damaged(reason) => {
                    warn_all(&self.events, [checkpoints.exclude(&from.name, reason)]);
                    let (older, warnings) = checkpoints.find_older().await?;
                    warn_all(&self.events, warnings);
                    self.change(|state| {
                        state.reset_to(&self.plan, Some(&older.state))?;
                        state.set_damaged_checkpoints(checkpoints.damaged());
                        Ok(())
                    })?;
                    *resumed = Some(older);
                    // The new state asks for a restore, which the next round of this loop is.
                    self.lock().training().take_calls();
                }
            }
        }
        Ok(())
    }

    /// Tells the servers to take over the rows of another job's checkpoint, and then the dense
    /// workers to take over its dense parameters.
    ///
    /// # Errors
    /// [`RoleError::Input`] if the checkpoint is damaged.
    pub(super) async fn begin_with_model(&self, servers: &[Channel], model: Box<WarmStart>) -> Result<(), RoleError> {
        let restore = v1::Restore { checkpoint: model.origin.checkpoint.clone(), from: true };
        match (checkpoints::restore_rows(&restore, servers).await?, &self.plan.warm_start) {
            (RowsRestored::All { rows }, _) => {
                self.events.push(model.event(rows));
                self.change(|state| {
                    state.training().rows_restored(restore);
                    Ok(())
                })
            }
            (RowsRestored::Damaged(reason), Some(from)) => Err(warm_start::unusable(from, &reason)),
            (RowsRestored::Damaged(reason), None) => Err(RoleError::Input(reason)),
        }
    }

    /// Waits until a loader has reported the training files, and compares them with the files of
    /// the checkpoint. If other files follow at the end of an epoch, the state restarts at that
    /// epoch. If nothing is left to train, the files may differ, and the state keeps the list of
    /// the checkpoint.
    ///
    /// # Errors
    /// [`RoleError::Input`] if the files differ within an epoch, or if another run has trained all
    /// of its data and the files differ.
    async fn check_files(&self, from: &mut ResumePoint, checkpoints: &Checkpoints) -> Result<(), RoleError> {
        let found = self.wait_until(WHOLE_JOB, |state| Ok(state.training_files())).await?;
        if !from.is_of_this_run
            && let Some(difference) = from.state.change_after_the_end(&self.plan, &found)
        {
            return Err(RoleError::Input(format!(
                "spec.data: {difference} since checkpoint {}, which has trained all of its data, so this run would train none of the files found now: raise spec.training.epochs or spec.training.steps to train them as further epochs, or {}",
                from.name,
                from.state.as_new_job(&self.plan)
            )));
        }
        let Some((next, difference)) = from.state.with_files(&self.plan, &found)? else {
            let is_all_trained = from.state.is_all_trained(&self.plan);
            let trained_on = from.state.files.clone().filter(|_| is_all_trained);
            return self.change(|state| {
                state.keep_files(trained_on);
                Ok(())
            });
        };
        let epoch = next.training.epoch;
        warn_all(
            &self.events,
            [format!(
                "epoch {epoch} begins on other files than the checkpoint {} was trained on: {difference}",
                from.name
            )],
        );
        self.change(|state| {
            state.reset_to(&self.plan, Some(&next))?;
            state.set_damaged_checkpoints(checkpoints.damaged());
            Ok(())
        })?;
        // The new state asks for a restore, which is under way.
        self.lock().training().take_calls();
        from.state = next;
        Ok(())
    }

    /// All servers have restored their `rows`.
    fn rows_restored(&self, from: ResumePoint, rows: u64) -> Result<(), RoleError> {
        let (step, batches) = (from.state.training.step, from.state.training.batch);
        self.events.push(JobEvent::Resumed { checkpoint: from.name.clone(), step, batches, rows });
        if let Some(rolled_back) = &from.state.rolled_back {
            self.events.push(rolled_back.event(&from.name, step));
            self.metrics.set_rollback(rolled_back.number, rolled_back.lost_rows, &rolled_back.lost());
        }
        if from.state.is_all_trained(&self.plan) {
            let name = &from.name;
            let message = format!(
                "checkpoint {name} has trained all of its data, so nothing is left to train: raise spec.training.epochs or spec.training.steps to train more of it; {}",
                from.state.as_new_job(&self.plan)
            );
            // All members have joined, so the event has its readers and needs no line in the log.
            self.events.push(JobEvent::Warning { message });
        }
        self.metrics.checkpoint_step.set(step as i64);
        self.change(|state| {
            state.set_last_checkpoint(&from.name, step);
            state.training().rows_restored(v1::Restore { checkpoint: from.name, from: false });
            Ok(())
        })
    }

    /// Begins a checkpoint at the boundary `at`. If one is still being written, waits for it only
    /// at the end of training. Otherwise skips this one, because training is paused here and the
    /// store may hang. If a caller requested it, or if it is due by time,
    /// [`Self::renew_save_request`] requests it again.
    pub(super) async fn save(
        &self,
        servers: &[Channel],
        at: Boundary,
        last: bool,
        checkpointer: &mut Checkpointer,
    ) -> Result<(), RoleError> {
        while let Some(ended) = checkpointer.ended(last).await {
            self.finish_save(servers, ended, checkpointer).await?;
        }
        if !self.may_save(last, checkpointer).await? {
            self.lock_requests().begin();
            self.lock_requests().resolve(&Err(SaveRefused::Failed(NOT_SAVED.to_owned())));
            return self.change(|state| state.training().frozen(None));
        }
        let Some(checkpoints) = &mut checkpointer.checkpoints else { return Err(RoleError::Stopped) };
        let server_restarts = self.lock().server_restarts();
        if std::mem::replace(&mut checkpointer.server_restarts, server_restarts) != server_restarts {
            checkpoints.force_full();
        }
        if !checkpointer.writing.is_empty() {
            self.metrics.skipped_checkpoints.inc_by(u64::from(!self.lock_requests().has_pending()));
            return self.change(|state| state.training().frozen(None));
        }
        self.lock_requests().begin();
        let mode = self.lock().training().mode().name();
        if !last && let Some(exists) = checkpoints.existing_at(at, mode) {
            // The request came while the checkpoint of this very boundary was being written.
            self.lock_requests().resolve(&Ok(exists));
            return self.change(|state| state.training().frozen(None));
        }
        let paused = Instant::now();
        let frozen = self.freeze(servers, at, checkpoints).await;
        self.metrics.checkpoint_freeze.observe(paused.elapsed().as_secs_f64());
        match frozen {
            Ok((pending, state, dense)) => {
                let ticket = ticket::write(&pending.ticket);
                let writing = checkpoints.write(pending, self.lock().good_before(), state, dense, servers);
                let own = ticket.clone();
                let (directory, full_checkpoint) = (checkpoints.directory().clone(), checkpoints.full_bytes());
                let free_space = Arc::clone(&checkpointer.free_space);
                checkpointer.writing.spawn(async move {
                    free_space.check(&directory, full_checkpoint).await;
                    FinishedSave { ticket: own, last, result: writing.await }
                });
                self.change(|state| {
                    state.set_pending_checkpoint(Some(ticket.clone()));
                    state.training().frozen(Some(ticket))
                })
            }
            Err((ticket, error)) => {
                let ended = FinishedSave { ticket, last, result: Err(error) };
                self.change(|state| state.training().frozen(None))?;
                self.finish_save(servers, Ok(ended), checkpointer).await
            }
        }
    }

    /// Whether the model may be saved. One whose quality has fallen is not, if training goes back.
    ///
    /// # Errors
    /// [`RoleError::RolledBack`] if the data ends with such a model: the next attempt ends with an
    /// earlier one.
    async fn may_save(&self, last: bool, checkpointer: &mut Checkpointer) -> Result<bool, RoleError> {
        let fall = self.lock().fall_to_undo();
        if let Some(fall) = fall.filter(|_| last) {
            Box::pin(self.go_back(&fall, checkpointer)).await?;
        }
        match self.lock().is_going_back() {
            true if last => Err(RoleError::RolledBack(NOT_SAVED.to_owned())),
            is_going_back => Ok(!is_going_back),
        }
    }

    /// Waits until no checkpoint is being written.
    pub(super) async fn finish_saves(&self, checkpointer: &mut Checkpointer) -> Result<(), RoleError> {
        while let Some(ended) = checkpointer.ended(true).await {
            self.finish_save(&self.placement()?.servers, ended, checkpointer).await?;
        }
        Ok(())
    }

    /// Requests a checkpoint again whose request came while another one was being written. So a
    /// checkpoint that takes longer than the interval delays the next one by its excess only.
    pub(super) fn renew_save_request(&self) -> Result<(), RoleError> {
        if !self.lock_requests().has_pending() {
            return Ok(());
        }
        self.change(|state| {
            state.training().request_save();
            state.training().advance()
        })
    }

    /// Requests a checkpoint regularly, if the job wants them by time and has trained since the
    /// last one. Returns an error of training.
    pub(super) async fn save_by_time(&self) -> RoleError {
        let every = self.plan.checkpoint.as_ref().and_then(|checkpoint| checkpoint.every);
        let Some(every) = every else { return std::future::pending().await };
        let mut last_step = self.lock().step();
        loop {
            tokio::time::sleep(every).await;
            let step = self.lock().step();
            if step == std::mem::replace(&mut last_step, step) {
                continue;
            }
            if !self.lock_requests().is_newly_due() {
                self.metrics.skipped_checkpoints.inc();
            }
            let requested = self.change(|state| {
                state.training().request_save();
                state.training().advance()
            });
            if let Err(error) = requested {
                return error;
            }
        }
    }

    /// Freezes the rows on all servers. Returns the checkpoint, the coordinator's state in it, and
    /// where the file of dense worker 0 arrives if the workers hold the dense parameters.
    async fn freeze(
        &self,
        servers: &[Channel],
        at: Boundary,
        checkpoints: &Checkpoints,
    ) -> Result<(PendingCheckpoint, Vec<u8>, Option<checkpoints::DenseFile>), (v1::Ticket, RoleError)> {
        let mode = self.lock().training().mode();
        let mut pending = checkpoints.begin(at, mode.name());
        let ticket = ticket::write(&pending.ticket);
        let failed = |error| (ticket.clone(), error);
        let partition = mode.dense_home() == DenseHome::Servers;
        let dense_since = self.lock().training().dense_since();
        let applied = checkpoints::freeze(&pending.ticket, partition, dense_since, servers).await.map_err(failed)?;
        let saved = self.lock().save(&self.plan, &applied).map_err(failed)?;
        pending.samples = saved.samples;
        let state = saved.encode().map_err(failed)?;
        let dense = (!partition).then(|| {
            let (written, file) = oneshot::channel();
            self.lock_requests().dense = Some((pending.ticket.id.to_string(), written));
            file
        });
        Ok((pending, state, dense))
    }

    /// Handles a checkpoint that was written or aborted. The last one is retried. Training
    /// continues without any other.
    pub(super) async fn finish_save(
        &self,
        servers: &[Channel],
        ended: Result<FinishedSave, JoinError>,
        checkpointer: &mut Checkpointer,
    ) -> Result<(), RoleError> {
        let Some(checkpoints) = &mut checkpointer.checkpoints else { return Err(RoleError::Stopped) };
        let FinishedSave { ticket, last, result } =
            ended.map_err(|error| RoleError::Task { what: "writing of a checkpoint", reason: error.to_string() })?;
        let step = ticket.step;
        checkpoints::thaw(ticket, result.is_ok(), servers).await?;
        self.lock().set_pending_checkpoint(None);
        match result {
            Ok(written) => {
                checkpointer.failed_attempts = 0;
                self.record_save(&written);
                checkpoints.written(&written);
                if let Some(error) = &written.not_deleted {
                    warn_all(&self.events, [format!("old checkpoints cannot be deleted: {error}")]);
                }
                self.lock().set_damaged_checkpoints(checkpoints.damaged());
                self.lock_requests().resolve(&Ok(written.name));
            }
            Err(error) => {
                self.metrics.failed_checkpoints.inc();
                checkpoints.aborted();
                let reason = format!("the checkpoint of step {step} could not be written: {error}");
                warn_all(&self.events, [reason.clone()]);
                self.lock_requests().resolve(&Err(SaveRefused::Failed(reason)));
                if last {
                    checkpointer.failed_attempts += 1;
                    if checkpointer.failed_attempts >= LAST_SAVE_ATTEMPTS {
                        return Err(error);
                    }
                    tokio::time::sleep(LAST_SAVE_BACKOFF * (1 << (checkpointer.failed_attempts - 1))).await;
                }
            }
        }
        if !last {
            return Ok(());
        }
        let exists = checkpointer.failed_attempts == 0;
        self.change(|state| state.training().last_saved(exists))
    }

    fn record_save(&self, written: &WrittenCheckpoint) {
        let manifest = &written.manifest;
        {
            let mut state = self.lock();
            state.set_last_checkpoint(&written.name, manifest.step);
            state.offsets_are_saved();
        }
        self.metrics.checkpoints.inc();
        self.metrics.checkpoint_step.set(manifest.step as i64);
        self.metrics.checkpoint_time.observe(written.seconds);
        self.metrics.checkpoint_bytes.inc_by(manifest.bytes());
        self.events.push(JobEvent::CheckpointSaved {
            step: manifest.step,
            checkpoint: written.name.clone(),
            rows: manifest.rows,
            bytes: manifest.bytes(),
            seconds: written.seconds,
        });
    }

    /// Saves a checkpoint at the next boundary and waits until it exists. Returns its name.
    ///
    /// # Errors
    /// - [`SaveRefused::NoPath`] if the job saves no checkpoints.
    /// - [`SaveRefused::Ended`] if training has ended.
    /// - [`SaveRefused::Failed`] if the checkpoint cannot be written or the job fails.
    pub async fn save_now(&self) -> Result<String, SaveRefused> {
        if self.plan.checkpoint.is_none() {
            return Err(SaveRefused::NoPath);
        }
        if self.lock().is_going_back() {
            return Err(SaveRefused::Failed(NOT_SAVED.to_owned()));
        }
        let saved = self.lock_requests().request();
        if let Some(last) = self.lock().final_checkpoint() {
            return Ok(last);
        }
        let requested = self.change(|state| {
            state.training().request_save();
            state.training().advance()
        });
        requested.map_err(|error| SaveRefused::Failed(error.to_string()))?;
        let ended = self.wait_until(WHOLE_JOB, |state| {
            let training = state.training();
            Ok((training.ended() || training.end_is_saved()).then_some(()))
        });
        tokio::select! {
            biased;
            Ok(saved) = saved => saved,
            ended = ended => match ended {
                // The last checkpoint was written before training ended.
                Ok(()) => self.lock().final_checkpoint().ok_or(SaveRefused::Ended),
                Err(error) => Err(SaveRefused::Failed(error.to_string())),
            },
        }
    }

    /// Dense worker 0 has written its file, or failed to.
    pub(super) fn dense_saved(&self, saved: v1::DenseSaved) -> Result<(), RoleError> {
        let file = match (&saved.file, saved.error) {
            (Some(file), error) if error.is_empty() => Ok(ticket::read_file("dense_saved", file)?),
            (_, error) => Err(dense_not_saved(error)),
        };
        let mut requests = self.lock_requests();
        // The file may belong to a checkpoint that was aborted. Then it is ignored.
        if let Some((_, written)) = requests.dense.take_if(|(id, _)| *id == saved.id) {
            let _aborted = written.send(file);
        }
        Ok(())
    }

    /// Dense worker 0 has died and may have been writing its file.
    pub(super) fn fail_dense_file(&self) {
        if let Some((_, written)) = self.lock_requests().dense.take() {
            let reason = "dense worker 0 died while it wrote the dense parameters".to_owned();
            let _aborted = written.send(Err(dense_not_saved(reason)));
        }
    }

    fn lock_requests(&self) -> MutexGuard<'_, CheckpointRequests> {
        self.checkpoint_requests.lock()
    }
}

fn dense_not_saved(reason: String) -> RoleError {
    RoleError::Task { what: "saving of the dense parameters", reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_that_is_due_by_time_stays_due_until_one_begins() {
        let mut requests = CheckpointRequests::default();
        assert!(!requests.has_pending());
        assert!(requests.is_newly_due() && requests.has_pending());
        assert!(!requests.is_newly_due(), "one checkpoint serves for both times");
        requests.begin();
        assert!(!requests.has_pending());
        let asked = requests.request();
        assert!(requests.has_pending());
        drop(asked);
        assert!(!requests.has_pending(), "the caller has gone");
    }
}
