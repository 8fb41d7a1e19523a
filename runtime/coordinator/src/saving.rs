//! Checkpoints of the job under way: the instant at which one is taken, the waiting for its parts while training goes on, and its end; and
//! the restoring of rows from one.

use std::time::{Duration, Instant};

use parking_lot::MutexGuard;
use rectrain_checkpoint::FileEntry;
use rectrain_modes::DenseHome;
use rectrain_modes::switch::Boundary;
use rectrain_proto::v1;
use rectrain_wire::Channel;
use tokio::sync::oneshot;
use tokio::task::{JoinError, JoinSet};

use super::checkpoints::{self, Begun, Checkpoints, Resumed, RowsRestored, Written};
use super::{Coordinator, warn_all};
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::ticket;

/// How often the checkpoint of the end is tried to be written, and how long is waited before the second time; doubled each time.
const LAST_SAVE_ATTEMPTS: u32 = 5;
const LAST_SAVE_PAUSE: Duration = Duration::from_secs(1);

/// The name of a checkpoint that exists, or why there is none.
type Saved = Result<String, String>;

/// Checkpoints of this run.
#[derive(Default)]
pub(super) struct Saves {
    begun: u64,
    /// Who has asked for one, and from which on it will do.
    waiting: Vec<(u64, oneshot::Sender<Saved>)>,
    /// Where dense worker 0's file is waited for, and the checkpoint's id.
    dense: Option<(String, oneshot::Sender<Result<FileEntry, String>>)>,
}

impl Saves {
    /// Asks for a checkpoint that begins from now on.
    fn ask(&mut self) -> oneshot::Receiver<Saved> {
        let (saved, asked) = oneshot::channel();
        self.waiting.retain(|(_, saved)| !saved.is_closed());
        self.waiting.push((self.begun + 1, saved));
        asked
    }

    /// Whether somebody waits for one that has not begun.
    fn is_asked_for(&self) -> bool {
        self.waiting.iter().any(|(number, saved)| *number > self.begun && !saved.is_closed())
    }

    /// Tells those who wait for the one that was begun last, or for one before it, what became of it.
    fn tell(&mut self, result: &Saved) {
        for (_, saved) in self.waiting.extract_if(.., |(number, _)| *number <= self.begun) {
            // Whoever does not wait any more need not know.
            let _gone = saved.send(result.clone());
        }
    }
}

/// What [`Coordinator::drive`] knows of checkpoints.
pub(super) struct Saver {
    /// None if the job has none.
    pub(super) checkpoints: Option<Checkpoints>,
    /// The one to be restored.
    pub(super) resumed: Option<Resumed>,
    /// At most one.
    pub(super) writing: JoinSet<SaveEnded>,
    /// To write the one of the end.
    pub(super) failed_attempts: u32,
    /// As many as were known at the last checkpoint.
    pub(super) server_restarts: u64,
}

/// A checkpoint that exists or was given up.
pub(super) struct SaveEnded {
    pub(super) ticket: v1::Ticket,
    pub(super) last: bool,
    pub(super) result: Result<Written, RoleError>,
}

impl Coordinator {
    /// Servers hold an instant for a checkpoint that a coordinator before this one was writing.
    pub(super) async fn give_up_what_was_written(&self) -> Result<(), RoleError> {
        let Some(ticket) = self.lock().writing() else { return Ok(()) };
        let step = ticket.step;
        warn_all(
            &self.events,
            [format!("there is no checkpoint of step {step}: the coordinator that wrote it has died")],
        );
        self.metrics.failed_checkpoints.inc();
        checkpoints::thaw(ticket, false, &self.placement()?.servers).await?;
        self.lock().set_writing(None);
        Ok(())
    }

    /// Has the servers restore their rows; from an older checkpoint, or none, where this one turns out to be damaged.
    pub(super) async fn restore(&self, servers: &[Channel], saver: &mut Saver) -> Result<(), RoleError> {
        let Saver { checkpoints: Some(checkpoints), resumed, .. } = saver else { return Err(RoleError::Stopped) };
        while let Some(from) = resumed.take() {
            match checkpoints::restore_rows(&from.name, servers).await? {
                RowsRestored::All { rows } => {
                    checkpoints.restored(&from);
                    let (step, batches) = (from.state.training.step, from.state.training.batch);
                    self.events.push(JobEvent::Resumed { checkpoint: from.name.clone(), step, batches, rows });
                    if from.state.leaves_nothing(&self.plan) {
                        let name = &from.name;
                        let nothing = format!(
                            "checkpoint {name} has trained all of its data: nothing is left to train (for more of it raise spec.training.epochs or steps; for other data give another spec.checkpoint.path)"
                        );
                        warn_all(&self.events, [nothing]);
                    }
                    self.metrics.checkpoint_step.set(step as i64);
                    return self.change(|state| {
                        state.has_checkpoint(&from.name, step);
                        state.training().rows_restored(from.name);
                        Ok(())
                    });
                }
                RowsRestored::Damaged(reason) => {
                    warn_all(&self.events, [format!("checkpoint {} is passed over: {reason}", from.name)]);
                    checkpoints.pass_over(&from.name);
                    let (older, warnings) = checkpoints.find().await?;
                    warn_all(&self.events, warnings);
                    self.change(|state| {
                        state.go_on_from(&self.plan, older.as_ref().map(|older| &older.state))?;
                        state.set_passed_over(checkpoints.passed_over());
                        Ok(())
                    })?;
                    *resumed = older;
                    if resumed.is_some() {
                        // What the state asks for is done here.
                        self.lock().training().take_calls();
                    } else {
                        checkpoints::clear_rows(servers).await?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Begins a checkpoint of this boundary. One that is still being written is waited for only at the end of training and if somebody has
    /// asked for this one, who may be about to end; any other time there is none of this boundary.
    pub(super) async fn save(
        &self,
        servers: &[Channel],
        at: Boundary,
        last: bool,
        saver: &mut Saver,
    ) -> Result<(), RoleError> {
        let is_needed = last || self.lock_saves().is_asked_for();
        while is_needed && let Some(ended) = saver.writing.join_next().await {
            self.save_ended(servers, ended, saver).await?;
        }
        let Some(checkpoints) = &mut saver.checkpoints else { return Err(RoleError::Stopped) };
        let server_restarts = self.lock().server_restarts();
        if std::mem::replace(&mut saver.server_restarts, server_restarts) != server_restarts {
            checkpoints.changes_unknown();
        }
        if !saver.writing.is_empty() {
            self.metrics.skipped_checkpoints.inc();
            return self.change(|state| state.training().frozen(None));
        }
        self.lock_saves().begun += 1;
        let mode = self.lock().training().mode().name();
        if !last && let Some(exists) = checkpoints.of(at, mode) {
            // Somebody has asked for one when that was being written.
            self.lock_saves().tell(&Ok(exists));
            return self.change(|state| state.training().frozen(None));
        }
        let rests = Instant::now();
        let frozen = self.freeze(servers, at, checkpoints).await;
        self.metrics.checkpoint_freeze.observe(rests.elapsed().as_secs_f64());
        match frozen {
            Ok((begun, state, dense)) => {
                let ticket = ticket::write(&begun.ticket);
                let writing = checkpoints.write(begun, state, dense, servers);
                let kept = ticket.clone();
                saver.writing.spawn(async move { SaveEnded { ticket: kept, last, result: writing.await } });
                self.change(|state| {
                    state.set_writing(Some(ticket.clone()));
                    state.training().frozen(Some(ticket))
                })
            }
            Err((ticket, error)) => {
                let ended = SaveEnded { ticket, last, result: Err(error) };
                self.change(|state| state.training().frozen(None))?;
                self.save_ended(servers, Ok(ended), saver).await
            }
        }
    }

    async fn freeze(
        &self,
        servers: &[Channel],
        at: Boundary,
        checkpoints: &Checkpoints,
    ) -> Result<(Begun, Vec<u8>, Option<checkpoints::DenseFile>), (v1::Ticket, RoleError)> {
        let mode = self.lock().training().mode();
        let begun = checkpoints.begin(at, mode.name());
        let failed = |error| (ticket::write(&begun.ticket), error);
        let partition = mode.dense_home() == DenseHome::Servers;
        let applied = checkpoints::freeze(&begun.ticket, partition, servers).await.map_err(failed)?;
        let state = self.lock().save(&self.plan, &applied).and_then(|saved| saved.encode()).map_err(failed)?;
        let dense = (!partition).then(|| {
            let (written, file) = oneshot::channel();
            self.lock_saves().dense = Some((begun.ticket.id.to_string(), written));
            file
        });
        Ok((begun, state, dense))
    }

    /// A checkpoint exists or has been given up. The one of the end is tried again; training goes on without any other.
    pub(super) async fn save_ended(
        &self,
        servers: &[Channel],
        ended: Result<SaveEnded, JoinError>,
        saver: &mut Saver,
    ) -> Result<(), RoleError> {
        let Some(checkpoints) = &mut saver.checkpoints else { return Err(RoleError::Stopped) };
        let SaveEnded { ticket, last, result } =
            ended.map_err(|error| RoleError::Task { what: "writing of a checkpoint", reason: error.to_string() })?;
        let step = ticket.step;
        checkpoints::thaw(ticket, result.is_ok(), servers).await?;
        self.lock().set_writing(None);
        match result {
            Ok(written) => {
                saver.failed_attempts = 0;
                self.count_save(&written);
                checkpoints.written(&written);
                if let Some(error) = &written.not_deleted {
                    warn_all(&self.events, [format!("checkpoints that are too old cannot be deleted: {error}")]);
                }
                self.lock().set_passed_over(checkpoints.passed_over());
                self.lock_saves().tell(&Ok(written.name));
            }
            Err(error) => {
                self.metrics.failed_checkpoints.inc();
                checkpoints.given_up();
                let reason = format!("the checkpoint of step {step} could not be written: {error}");
                warn_all(&self.events, [reason.clone()]);
                self.lock_saves().tell(&Err(reason));
                if last {
                    saver.failed_attempts += 1;
                    if saver.failed_attempts >= LAST_SAVE_ATTEMPTS {
                        return Err(error);
                    }
                    tokio::time::sleep(LAST_SAVE_PAUSE * (1 << (saver.failed_attempts - 1))).await;
                }
            }
        }
        if last { self.change(|state| state.training().last_saved(saver.failed_attempts == 0)) } else { Ok(()) }
    }

    fn count_save(&self, written: &Written) {
        let manifest = &written.manifest;
        self.lock().has_checkpoint(&written.name, manifest.step);
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

    /// Saves a checkpoint at the next boundary and waits until it exists; gives its name.
    ///
    /// # Errors
    /// A sentence, if there is none: no checkpoint path, a job that has ended, a storage that refuses.
    pub async fn save_now(&self) -> Result<String, String> {
        if self.plan.checkpoint.is_none() {
            return Err("the job saves no checkpoints: spec.checkpoint.path is not set".to_owned());
        }
        let saved = self.lock_saves().ask();
        if let Some(last) = self.lock().last_of_all() {
            return Ok(last);
        }
        let asked = self.change(|state| {
            state.training().request_save();
            state.training().advance()
        });
        asked.map_err(|error| error.to_string())?;
        let ended = self.until(WHOLE_JOB, |state| {
            let training = state.training();
            Ok((training.ended() || training.end_is_saved()).then_some(()))
        });
        tokio::select! {
            biased;
            Ok(saved) = saved => saved,
            ended = ended => match ended {
                // The checkpoint of the end was written before it.
                Ok(()) => self.lock().last_of_all().ok_or_else(|| "training has ended".to_owned()),
                Err(error) => Err(error.to_string()),
            },
        }
    }

    /// Dense worker 0 has written its file, or could not.
    pub(super) fn dense_saved(&self, saved: v1::DenseSaved) -> Result<(), RoleError> {
        let file = match (&saved.file, saved.error) {
            (Some(file), error) if error.is_empty() => Ok(ticket::read_file("dense_saved", file)?),
            (_, error) => Err(error),
        };
        let mut saves = self.lock_saves();
        // That of a checkpoint that was given up is waited for by nobody.
        if let Some((_, written)) = saves.dense.take_if(|(id, _)| *id == saved.id) {
            let _given_up = written.send(file);
        }
        Ok(())
    }

    /// Dense worker 0 has died, who may have been writing its file.
    pub(super) fn dense_parameters_lost(&self) {
        if let Some((_, written)) = self.lock_saves().dense.take() {
            let _given_up = written.send(Err("dense worker 0 died while it wrote the dense parameters".to_owned()));
        }
    }

    fn lock_saves(&self) -> MutexGuard<'_, Saves> {
        self.saves.lock()
    }
}
