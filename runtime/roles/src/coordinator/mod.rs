//! The coordinator: who is in the job and where, which data is leased to whom, where training and evaluation stand, and how the
//! job ended. A single small service; members call it little and seldom, and it holds their questions until it can answer.

mod announced;
mod as_bytes;
mod auto;
mod checkpoints;
mod control;
mod crew;
mod digest;
mod journal;
mod migrations;
mod outstanding;
mod page;
mod places;
mod replies;
mod ring;
mod saved;
mod speeds;
mod state;
mod training;

use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::try_join_all;
use rectrain_checkpoint::FileEntry;
use rectrain_modes::gba::Boundary;
use rectrain_modes::{ChunkLease, GlobalStep, Lease, Rank};
use rectrain_proto::v1;
use rectrain_wire::{BoxFuture, Channel, Frame, Peer, Refusal, RefusalCode, Service, Tensor, Transport};
use tokio::sync::{Notify, oneshot};
use tokio::task::{JoinError, JoinSet};

use self::checkpoints::{Begun, Checkpoints, Resumed, RowsRestored, Written};
pub use self::control::{ControlService, Guard, serve_control};
use self::journal::Journal;
use self::migrations::Migrations;
use self::outstanding::{Given, Repeat};
pub use self::page::LivePage;
use self::state::{Repeated, ResizeRefused, Share, State};
pub(crate) use self::training::TokenCounts;
use self::training::{Mended, Pulled, ServerCall, SwitchRefused};
use crate::error::RoleError;
use crate::events::{EventFollower, EventLog, JobEvent, Summary};
use crate::member::{Role, connect};
use crate::message::{self, Done, Request};
use crate::metrics::CoordinatorMetrics;
use crate::placement::Placement;
use crate::plan::{CALL_DEADLINE, JobPlan, WHOLE_JOB};
use crate::ticket;
use crate::turns::Turns;

/// How long a question for a lease is held before its asker is told to ask again.
const LEASE_HOLD: Duration = Duration::from_secs(20);

/// How long members that were released shortly before the end have to tell what they have sent.
const FAREWELL: Duration = Duration::from_secs(2);

/// How often the checkpoint of the end is tried to be written, and how long is waited before the second time; doubled each time.
const LAST_SAVE_ATTEMPTS: u32 = 5;
const LAST_SAVE_PAUSE: Duration = Duration::from_secs(1);

/// See the module's text.
pub struct Coordinator {
    plan: Arc<JobPlan>,
    /// Names this attempt: who holds rows of another holds nothing.
    attempt: u64,
    state: Mutex<State>,
    saves: Mutex<Saves>,
    changed: Notify,
    events: EventLog,
    metrics: CoordinatorMetrics,
    /// Where the slots are; none before everybody has joined.
    placement: Mutex<Option<Placement>>,
    /// What is known outlives this process; none: it dies with it.
    journal: Option<Arc<Journal>>,
    /// Whether this goes on where a coordinator was that has died.
    is_taken_up: bool,
    /// Taken by [`Coordinator::run`].
    checkpoints: Mutex<Option<(Checkpoints, Option<Resumed>)>>,
}

/// Checkpoints of this run.
#[derive(Default)]
struct Saves {
    begun: u64,
    ended: u64,
    /// The name of the last one that was to be written, or why there is none.
    last: Option<Result<String, String>>,
    /// Where dense worker 0's file is waited for, and the checkpoint's id.
    dense: Option<(String, oneshot::Sender<Result<FileEntry, String>>)>,
}

impl Coordinator {
    /// For a job that nobody has joined yet; finds the checkpoint that it goes on from. `run` names this run of the job, in all its
    /// attempts: without `spec.checkpoint.resume: latest` only its own checkpoints are gone on from. Where a coordinator of this run has
    /// left all that it knew in the directory `journal`, this one goes on in its place, and `events` with what was told.
    ///
    /// # Errors
    /// The user's, for a path that cannot be used or holds another run's or another job's checkpoints; those of the storage; a journal
    /// that cannot be written.
    pub async fn start(
        plan: Arc<JobPlan>,
        run: &str,
        journal: Option<&Path>,
        events: EventLog,
        metrics: CoordinatorMetrics,
    ) -> Result<Self, RoleError> {
        let journal = journal.map(|directory| keep_journal_in(directory, &plan, run, &events)).transpose()?;
        let (journal, left) = journal.unzip();
        let mut checkpoints = Checkpoints::open(&plan, run)?;
        if let Some(left) = left.flatten() {
            let step = left.state.step();
            events.push(JobEvent::CoordinatorTakenUp { step });
            return Ok(Self {
                attempt: left.attempt,
                state: Mutex::new(left.state),
                is_taken_up: true,
                checkpoints: Mutex::new(checkpoints.map(|checkpoints| (checkpoints, None))),
                ..Self::new(plan, journal, events, metrics)?
            });
        }
        let mut resumed = None;
        if let Some(checkpoints) = &mut checkpoints {
            let (found, warnings) = checkpoints.find().await?;
            warn_all(&events, warnings);
            resumed = found;
        }
        let state = State::new(&plan, resumed.as_ref().map(|resumed| &resumed.state))?;
        let coordinator = Self {
            state: Mutex::new(state),
            checkpoints: Mutex::new(checkpoints.map(|checkpoints| (checkpoints, resumed))),
            ..Self::new(plan, journal, events, metrics)?
        };
        // Members may be told where it is: from now on it can be killed.
        if let Some(journal) = &coordinator.journal {
            coordinator.write_journal(journal, 0).await;
        }
        Ok(coordinator)
    }

    /// Of a job that begins at its beginning and saves no checkpoints.
    fn new(
        plan: Arc<JobPlan>,
        journal: Option<Arc<Journal>>,
        events: EventLog,
        metrics: CoordinatorMetrics,
    ) -> Result<Self, RoleError> {
        Ok(Self {
            state: Mutex::new(State::new(&plan, None)?),
            plan,
            attempt: RandomState::new().hash_one("attempt").max(1),
            saves: Mutex::default(),
            changed: Notify::new(),
            events,
            metrics,
            placement: Mutex::default(),
            journal,
            is_taken_up: false,
            checkpoints: Mutex::default(),
        })
    }

    /// Whether this goes on where a coordinator was that has died, and its members with it.
    #[must_use]
    pub fn is_taken_up(&self) -> bool {
        self.is_taken_up
    }

    /// Follows the job to its end: waits for training, collects the digest, and pushes the last event.
    pub async fn run(&self, transport: &dyn Transport) -> Result<Summary, RoleError> {
        // Once a member has failed, the others end, and calls to them fail: the first failure is what happened.
        let summarizing = async {
            match self.events.last() {
                // The one before had told that, and died.
                Some(JobEvent::Summary(summary)) => Ok(*summary),
                _ => self.summarize(transport).await,
            }
        };
        let result = tokio::select! {
            result = summarizing => result.map_err(|error| self.lock().check_failure().err().unwrap_or(error)),
            never = self.keep_journal() => never,
        };
        match &result {
            Ok(summary) => {
                if !self.lock().has_ended() {
                    self.events.push(JobEvent::Summary(Box::new(summary.clone())));
                }
                self.lock().end();
            }
            Err(error) => {
                self.lock().fail(error.to_string(), error.is_user_error());
                self.events.push(JobEvent::Failed { message: error.to_string(), user_error: error.is_user_error() });
            }
        }
        if let Some(journal) = &self.journal {
            // The last image is of the job's end.
            if self.write_journal(journal, 0).await {
                journal.end(true);
            }
        }
        self.changed.notify_waiters();
        result
    }

    /// Writes the journal whenever somebody waits for that. Where it cannot be written, the job goes on without.
    async fn keep_journal<T>(&self) -> T {
        if let Some(journal) = &self.journal {
            while self.write_journal(journal, journal.wanted().await).await {}
        }
        std::future::pending().await
    }

    /// Writes what is known now, which includes what was asked for with this number; says whether that could be done. If not, there is no
    /// journal from here on.
    async fn write_journal(&self, journal: &Arc<Journal>, number: u64) -> bool {
        let image = journal.image(self.attempt, &self.lock());
        let written = match image {
            Ok(image) => journal.write(number, image).await.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        if let Err(reason) = &written {
            let lost = "a coordinator that dies from now on has the job begin anew from its last checkpoint";
            warn_all(&self.events, [format!("the coordinator's journal cannot be written, and {lost}: {reason}")]);
            journal.end(false);
        }
        self.metrics.journal_writes.inc_by(u64::from(written.is_ok()));
        written.is_ok()
    }

    /// Waits until whoever takes this one's place would know what it knows now.
    async fn remembered(&self) {
        if let Some(journal) = &self.journal {
            journal.written().await;
        }
    }

    /// Ends the job with an error, as if a member had failed.
    pub fn fail(&self, message: String, user_error: bool) {
        self.lock().fail(message, user_error);
        self.changed.notify_waiters();
    }

    async fn summarize(&self, transport: &dyn Transport) -> Result<Summary, RoleError> {
        let roster = self.until(WHOLE_JOB, State::roster).await?;
        let map = if self.is_taken_up { self.lock().map() } else { None };
        if !self.events.after(0, usize::MAX).iter().any(|told| matches!(told.event, JobEvent::Started { .. })) {
            self.events.push(self.plan.started()?);
        }
        for replicas in self.status().replicas {
            if let Some(role) = Role::of(replicas.role()) {
                self.metrics.set_members(role, replicas.present);
            }
        }
        self.set_placement(Placement::new(map.unwrap_or_else(|| self.plan.slot_map()), &roster.ps, transport)?);
        if self.is_taken_up {
            self.change(State::take_up)?;
        }
        let result = tokio::select! {
            result = self.until(WHOLE_JOB, State::trained) => result?,
            error = self.drive(transport) => return Err(error),
            () = self.choose_modes() => return Err(RoleError::Stopped),
        };
        let mut summary = result.summary;
        let applied_before = self.lock().applied_before();
        let placement = self.placement()?;
        tokio::select! {
            digest = digest::of_model(&self.plan, &result.dense_digest, &placement, applied_before, &mut summary) => digest?,
            // A server that is waited for, and comes back with nothing.
            failed = self.until(WHOLE_JOB, |_| Ok(None::<()>)) => failed?,
        }
        // One that has died meanwhile is missed by nobody.
        let _late = self.until(FAREWELL, |state| Ok(state.all_have_left().then_some(()))).await;
        summary.bytes_on_wire = self.lock().left_traffic();
        let roster = self.until(WHOLE_JOB, State::roster).await?;
        let members = placement.addresses.iter().chain(&roster.embedding_workers);
        let members: Vec<&String> = members.chain(&roster.dense_workers).chain(&roster.loaders).collect();
        tokio::select! {
            added = add_all_traffic(&mut summary, &members, transport) => added?,
            failed = self.until(WHOLE_JOB, |_| Ok(None::<()>)) => failed?,
        }
        Ok(summary)
    }

    /// Makes the calls to the parameter servers that restoring, switches, checkpoints, moving slots and the end of the data need, until
    /// one fails.
    async fn drive(&self, transport: &dyn Transport) -> RoleError {
        let taken = self.checkpoints.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut saver =
            Saver { resumed: None, checkpoints: None, writing: JoinSet::new(), failed_attempts: 0, server_restarts: 0 };
        if let Some((checkpoints, resumed)) = taken {
            saver.checkpoints = Some(checkpoints);
            saver.resumed = resumed;
        }
        if let Err(error) = self.give_up_what_was_written().await {
            return error;
        }
        let (map, begun) = match self.placement() {
            Ok(placement) => (placement.map, self.lock().migrations()),
            Err(error) => return error,
        };
        let mut migrations = Migrations::new(map, begun);
        loop {
            let calls = self.until(WHOLE_JOB, |state| {
                let calls = state.training().take_calls();
                Ok((!calls.is_empty()).then_some(calls))
            });
            let done = async {
                let resize = self.until(WHOLE_JOB, State::resize_to_begin);
                tokio::select! {
                    calls = calls => for call in calls? {
                        self.call_servers(call, &mut saver, &mut migrations).await?;
                    },
                    Some(ended) = saver.writing.join_next() => {
                        self.save_ended(&self.placement()?.servers, ended, &mut saver).await?;
                    }
                    resize = resize => {
                        let (to, addresses) = resize?;
                        self.begin_migration(to, &addresses, transport, &mut migrations).await?;
                    }
                    Some(answer) = migrations.answer() => self.migration_answered(answer, &mut migrations)?,
                }
                // What a checkpoint is being written of stays.
                if saver.writing.is_empty() {
                    self.end_migration(&mut migrations).await?;
                }
                Ok(())
            };
            if let Err(error) = done.await {
                return error;
            }
        }
    }

    /// Servers hold an instant for a checkpoint that a coordinator before this one was writing.
    async fn give_up_what_was_written(&self) -> Result<(), RoleError> {
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

    async fn call_servers(
        &self,
        call: ServerCall,
        saver: &mut Saver,
        migrations: &mut Migrations,
    ) -> Result<(), RoleError> {
        let placement = self.placement()?;
        let servers = &*placement.servers;
        match call {
            ServerCall::Flip => {
                self.flip(migrations).await?;
                if let Some(checkpoints) = &mut saver.checkpoints {
                    checkpoints.changes_unknown();
                }
                Ok(())
            }
            ServerCall::SettleSlots => self.settle_slots(migrations).await,
            ServerCall::Begin { mode, at, first_piece } => {
                let begin = v1::BeginMode {
                    mode: mode.name().to_owned(),
                    step: at.step.0,
                    first_row: at.next_row,
                    first_piece,
                    attempt: self.attempt,
                };
                let nothing = || Ok(Vec::new());
                try_join_all(servers.iter().map(|server| message::call_server(server, begin.clone(), nothing))).await?;
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
            ServerCall::Flush => {
                let calls =
                    servers.iter().map(|server| message::call_server(server, v1::FlushRequest {}, || Ok(Vec::new())));
                for (index, (reply, _)) in try_join_all(calls).await?.into_iter().enumerate() {
                    self.change(|state| state.training().flushed(index as u32, &reply))?;
                }
                Ok(())
            }
            ServerCall::Restore => self.restore(servers, saver).await,
            ServerCall::Save { at, last } => self.save(servers, at, last, saver).await,
        }
    }

    /// Has the servers restore their rows; from an older checkpoint, or none, where this one turns out to be damaged.
    async fn restore(&self, servers: &[Channel], saver: &mut Saver) -> Result<(), RoleError> {
        let Saver { checkpoints: Some(checkpoints), resumed, .. } = saver else { return Err(RoleError::Stopped) };
        while let Some(from) = resumed.take() {
            match checkpoints::restore_rows(&from.name, servers).await? {
                RowsRestored::All { rows } => {
                    checkpoints.restored(&from);
                    let (step, batches) = (from.state.training.step, from.state.training.batch);
                    self.events.push(JobEvent::Resumed { checkpoint: from.name.clone(), step, batches, rows });
                    return self.change(|state| {
                        state.training().rows_restored(from.name);
                        Ok(())
                    });
                }
                RowsRestored::Damaged(reason) => {
                    warn_all(&self.events, [format!("checkpoint {} is passed over: {reason}", from.name)]);
                    checkpoints.pass_over(&from.name);
                    let (older, warnings) = checkpoints.find().await?;
                    warn_all(&self.events, warnings);
                    self.change(|state| state.go_on_from(&self.plan, older.as_ref().map(|older| &older.state)))?;
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

    /// Begins a checkpoint of this boundary. One that is still being written is waited for only at the end of training; any other
    /// time there is none of this boundary.
    async fn save(&self, servers: &[Channel], at: Boundary, last: bool, saver: &mut Saver) -> Result<(), RoleError> {
        while last && let Some(ended) = saver.writing.join_next().await {
            self.save_ended(servers, ended, saver).await?;
        }
        let Some(checkpoints) = &mut saver.checkpoints else { return Err(RoleError::Stopped) };
        let server_restarts = self.lock().server_restarts();
        if std::mem::replace(&mut saver.server_restarts, server_restarts) != server_restarts {
            checkpoints.changes_unknown();
        }
        self.lock_saves().begun += 1;
        if !saver.writing.is_empty() {
            self.metrics.skipped_checkpoints.inc();
            let step = at.step;
            let reason = format!("there is no checkpoint of step {step}: the one before is still being written");
            self.end_save(Err(reason));
            return self.change(|state| state.training().frozen(None));
        }
        match self.freeze(servers, at, checkpoints).await {
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
                let ended = SaveEnded { ticket: ticket.unwrap_or_default(), last, result: Err(error) };
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
    ) -> Result<(Begun, Vec<u8>, Option<checkpoints::DenseFile>), (Option<v1::Ticket>, RoleError)> {
        let mode = self.lock().training().mode();
        let begun = checkpoints.begin(at, mode.name()).await.map_err(|error| (None, error.into()))?;
        let failed = |error| (Some(ticket::write(&begun.ticket)), error);
        let partition = !mode.has_barrier();
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
    async fn save_ended(
        &self,
        servers: &[Channel],
        ended: Result<SaveEnded, JoinError>,
        saver: &mut Saver,
    ) -> Result<(), RoleError> {
        let Some(checkpoints) = &mut saver.checkpoints else { return Err(RoleError::Stopped) };
        let SaveEnded { ticket, last, result } =
            ended.map_err(|error| RoleError::Task { what: "writing of a checkpoint", reason: error.to_string() })?;
        let step = ticket.step;
        if !ticket.id.is_empty() {
            checkpoints::thaw(ticket, result.is_ok(), servers).await?;
            self.lock().set_writing(None);
        }
        match result {
            Ok(written) => {
                saver.failed_attempts = 0;
                self.count_save(&written);
                if let Err(error) = checkpoints.written(&written).await {
                    warn_all(&self.events, [format!("checkpoints that are too old cannot be deleted: {error}")]);
                }
                self.end_save(Ok(written.name));
            }
            Err(error) => {
                self.metrics.failed_checkpoints.inc();
                checkpoints.given_up();
                let reason = format!("the checkpoint of step {step} could not be written: {error}");
                warn_all(&self.events, [reason.clone()]);
                self.end_save(Err(reason));
                saver.failed_attempts += 1;
                if last && saver.failed_attempts >= LAST_SAVE_ATTEMPTS {
                    return Err(error);
                }
                if last {
                    tokio::time::sleep(LAST_SAVE_PAUSE * (1 << (saver.failed_attempts - 1))).await;
                }
            }
        }
        if last { self.change(|state| state.training().last_saved(saver.failed_attempts == 0)) } else { Ok(()) }
    }

    /// How the job stands.
    pub fn status(&self) -> v1::JobStatus {
        self.lock().status()
    }

    fn count_save(&self, written: &Written) {
        let manifest = &written.manifest;
        self.lock().saved(&written.name, manifest.step);
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

    fn end_save(&self, result: Result<String, String>) {
        let mut saves = self.lock_saves();
        saves.ended = saves.begun;
        saves.last = Some(result);
        drop(saves);
        self.changed.notify_waiters();
    }

    /// Saves a checkpoint at the next boundary and waits until it exists; gives its name.
    ///
    /// # Errors
    /// A sentence, if there is none: no checkpoint path, a job that has ended, a storage that refuses.
    pub async fn save_now(&self) -> Result<String, String> {
        if self.plan.checkpoint.is_none() {
            return Err("the job saves no checkpoints: spec.checkpoint.path is not set".to_owned());
        }
        let number = self.lock_saves().begun + 1;
        let asked = self.change(|state| {
            state.training().request_save();
            state.training().advance()
        });
        asked.map_err(|error| error.to_string())?;
        let saved = self.until(WHOLE_JOB, |state| {
            let saves = self.lock_saves();
            let ended = (saves.ended >= number).then(|| saves.last.clone()).flatten();
            Ok(ended.or_else(|| state.training().ended().then(|| Err("training has ended".to_owned()))))
        });
        saved.await.map_err(|error| error.to_string())?
    }

    /// For a member that is about to leave. Nothing is saved for a server that holds nothing; it is not counted on any more.
    async fn save_now_for_member(&self, request: &v1::SaveNow) -> Frame {
        let leaves = request.role() == v1::Role::Ps && self.lock().spare_leaves(request.index);
        let saved = if leaves { Err("it holds no rows".to_owned()) } else { self.save_now().await };
        let (checkpoint, reason) = match saved {
            Ok(checkpoint) => (checkpoint, String::new()),
            Err(reason) => (String::new(), reason),
        };
        message::reply::<v1::SaveNow>(&v1::SavedNow { checkpoint, reason }, Vec::new())
    }

    /// Dense worker 0 has written its file, or could not.
    fn dense_saved(&self, saved: v1::DenseSaved) -> Result<(), RoleError> {
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
    fn dense_parameters_lost(&self) {
        if let Some((_, written)) = self.lock_saves().dense.take() {
            let _given_up = written.send(Err("dense worker 0 died while it wrote the dense parameters".to_owned()));
        }
    }

    /// Asks for another number of a role's members, or for the slots to be spread anew over as many parameter servers; gives how many there
    /// are.
    fn scale(&self, role: Role, members: u32, reason: String) -> Result<u32, ResizeRefused> {
        let (from, is_new) = self.lock().request_members(role, members)?;
        if is_new {
            let reason = Some(reason).filter(|reason| !reason.is_empty());
            self.events.push(JobEvent::Scaling { role, from, to: members, reason });
            let news = self.lock().follow_training();
            self.tell(news);
            self.changed.notify_waiters();
        }
        Ok(from)
    }

    /// As [`v1::ScaleRequest`], for whoever has the coordinator in hand.
    ///
    /// # Errors
    /// A sentence, if it cannot be.
    pub fn request_scale(&self, role: Role, members: u32) -> Result<u32, String> {
        self.scale(role, members, String::new()).map_err(|refused| match refused {
            ResizeRefused::Number(reason) | ResizeRefused::Now(reason) => reason,
        })
    }

    /// Every event from the first one on: whoever has started the job starts the members that [`JobEvent::Scaling`] asks for.
    #[must_use]
    pub fn follow(&self) -> EventFollower {
        self.events.follow()
    }

    /// Tells what has happened; metrics follow.
    fn tell(&self, events: Vec<JobEvent>) {
        for event in events {
            if let JobEvent::Scaled { role, to, .. } = event {
                self.metrics.set_members(role, to);
            }
            self.events.push(event);
        }
    }

    /// Where everybody is that moves; once everybody has joined.
    async fn directory(&self) -> Result<v1::Placement, RoleError> {
        let placement = self.until(WHOLE_JOB, |_| Ok(self.placement().ok())).await?;
        let (embedding_workers, dense_workers) = self.lock().workers();
        Ok(v1::Placement { embedding_workers, dense_workers, ..placement.write() })
    }

    fn placement(&self) -> Result<Placement, RoleError> {
        self.placement.lock().unwrap_or_else(PoisonError::into_inner).clone().ok_or(RoleError::Stopped)
    }

    fn set_placement(&self, placement: Placement) {
        self.metrics.map_epoch.set(placement.epoch().0 as i64);
        self.metrics.set_members(Role::Ps, placement.servers.len() as u32);
        *self.placement.lock().unwrap_or_else(PoisonError::into_inner) = Some(placement);
        self.changed.notify_waiters();
    }

    fn lock_saves(&self) -> MutexGuard<'_, Saves> {
        self.saves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` gives something; fails as soon as the job has failed.
    async fn until<T>(
        &self,
        deadline: Duration,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                let (value, news) = {
                    let mut state = self.lock();
                    state.check_failure()?;
                    (ready(&mut state)?, state.follow_training())
                };
                self.tell(news);
                if let Some(value) = value {
                    return Ok(value);
                }
                changed.await;
            }
        };
        tokio::time::timeout(deadline, waiting).await.map_err(|_| RoleError::Task {
            what: "a wait for the coordinator",
            reason: format!("nothing changed within {deadline:?}"),
        })?
    }

    /// What `ready` has for `loader`; `nothing`, as soon as another has taken its place: what is given to a dead loader nobody reads.
    async fn until_succeeded<T: Clone>(
        &self,
        loader: u32,
        nothing: T,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let successions = self.lock().loader_successions(loader);
        let waiting = self.until(LEASE_HOLD, |state| {
            if state.loader_successions(loader) == successions { ready(state) } else { Ok(Some(nothing.clone())) }
        });
        waiting.await
    }

    /// As [`Self::until`], where asking may itself change the state for others.
    async fn until_changed<T>(
        &self,
        deadline: Duration,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let first = self.change(|state| ready(state))?;
        match first {
            Some(value) => Ok(value),
            None => self.until(deadline, ready).await,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state; an error in it ends the job.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T, RoleError>) -> Result<T, RoleError> {
        let news;
        let result = {
            let mut state = self.lock();
            state.check_failure()?;
            let result = change(&mut state);
            news = state.follow_training();
            self.metrics.set(&state.training().counts());
            if let Err(error) = &result {
                state.fail(error.to_string(), error.is_user_error());
            }
            result
        };
        self.tell(news);
        self.changed.notify_waiters();
        result
    }

    /// Takes in what a member tells, once, and answers that it is done.
    fn hear<R: Request<Reply = Done>>(
        &self,
        caller: &v1::Caller,
        change: impl FnOnce(&mut State) -> Result<(), RoleError>,
    ) -> Result<Frame, RoleError> {
        self.hear_news::<R>(caller, |state| change(state).map(|()| None))
    }

    /// As [`Self::hear`]; what is told may be an event.
    fn hear_news<R: Request<Reply = Done>>(
        &self,
        caller: &v1::Caller,
        change: impl FnOnce(&mut State) -> Result<Option<JobEvent>, RoleError>,
    ) -> Result<Frame, RoleError> {
        let done = message::done::<R>();
        let news = self.change(|state| {
            if state.replies.answered(caller).is_some() {
                return Ok(None);
            }
            let news = change(state)?;
            state.replies.answer(caller, &done);
            Ok(news)
        })?;
        news.into_iter().for_each(|event| self.events.push(event));
        Ok(done)
    }

    async fn join(&self, caller: &v1::Caller, request: v1::Join) -> Result<Frame, RoleError> {
        if self.lock().job_end().is_none() {
            let roster = async {
                if request.attempt != 0 && request.attempt != self.attempt {
                    let reason = "the rows that it holds are of another attempt".to_owned();
                    return Err(RoleError::Inconsistent { message: "join", reason });
                }
                let joined =
                    self.change(
                        |state| if state.replies.hears(caller) { state.join(caller, &request) } else { Ok(None) },
                    )?;
                if let Some(rejoined) = joined {
                    self.metrics.rejoins.inc();
                    self.events.push(rejoined);
                    let is_writer = request.role() == v1::Role::DenseWorker && request.index == 0;
                    if is_writer && !self.lock().training().saves_dense() {
                        self.dense_parameters_lost();
                    }
                }
                self.until(WHOLE_JOB, State::roster).await
            };
            match roster.await {
                Err(RoleError::JobFailed { .. }) => {}
                roster => {
                    let roster = v1::Roster { attempt: self.attempt, ..roster? };
                    return Ok(message::reply::<v1::Join>(&roster, Vec::new()));
                }
            }
        }
        // Nobody joins a job that has ended; the answer to `job_end` tells how it did.
        std::future::pending().await
    }

    async fn lease(&self, caller: &v1::Caller, loader: u32) -> Result<Frame, RoleError> {
        use v1::lease_reply::Lease as Reply;
        let reply = |lease| v1::LeaseReply { lease: Some(lease) };
        let lease = answered::<v1::LeaseRequest>(caller, |state| match state.lease(loader) {
            (Lease::Chunk(lease), skip) => Ok(Some(reply(Reply::Chunk(write_lease(lease, skip, state.turns(None)))))),
            (Lease::Finished, _) => Ok(Some(reply(Reply::Finished(v1::Finished {})))),
            (Lease::Wait, _) => Ok(None),
        });
        let [nothing, wait] = [Reply::Finished(v1::Finished {}), Reply::Wait(v1::Wait {})]
            .map(|lease| message::reply::<v1::LeaseRequest>(&reply(lease), Vec::new()));
        let lease = or_ask_again(self.until_succeeded(loader, nothing, lease).await, wait)?;
        self.changed.notify_waiters();
        Ok(lease)
    }

    async fn evaluation_lease(&self, caller: &v1::Caller, loader: u32) -> Result<Frame, RoleError> {
        use v1::evaluation_lease_reply::Lease as Reply;
        let reply = |lease| v1::EvaluationLeaseReply { lease: Some(lease) };
        let lease = answered::<v1::EvaluationLeaseRequest>(caller, |state| {
            let lease = match state.evaluation_lease(loader) {
                state::EvaluationLease::Chunk { at_step, chunk, first_batch } => {
                    let turns = state.turns(Some(at_step)).write();
                    Some(Reply::Chunk(v1::EvaluationChunk { at_step: at_step.0, chunk, first_batch, turns }))
                }
                state::EvaluationLease::Finished => Some(Reply::Finished(v1::Finished {})),
                state::EvaluationLease::Wait => None,
            };
            Ok(lease.map(reply))
        });
        let [nothing, wait] = [Reply::Finished(v1::Finished {}), Reply::Wait(v1::Wait {})]
            .map(|lease| message::reply::<v1::EvaluationLeaseRequest>(&reply(lease), Vec::new()));
        or_ask_again(self.until_succeeded(loader, nothing, lease).await, wait)
    }

    async fn repeat(&self, caller: &v1::Caller, loader: u32) -> Result<Frame, RoleError> {
        use v1::repeat_reply::Repeat as Reply;
        let finished =
            || v1::RepeatReply { repeat: Some(Reply::Finished(v1::Finished {})), ..v1::RepeatReply::default() };
        let repeat = answered::<v1::RepeatRequest>(caller, |state| {
            Ok(match state.repeat(loader) {
                Repeated::Repeat(Repeat { given, embedding_worker, pieces, report }) => {
                    let pieces = pieces.map(|Range { start, end }| v1::PieceRange { start, end });
                    let repeat = Some(match given {
                        Given::Train { lease, skip } => Reply::Chunk(write_lease(lease, skip, state.turns(None))),
                        Given::Evaluation { at_step, chunk, first_batch } => {
                            let turns = state.turns(Some(at_step)).write();
                            Reply::Evaluation(v1::EvaluationChunk { at_step: at_step.0, chunk, first_batch, turns })
                        }
                    });
                    Some(v1::RepeatReply { repeat, embedding_worker, pieces, report })
                }
                Repeated::Finished => Some(finished()),
                Repeated::Wait => None,
            })
        });
        let wait = v1::RepeatReply { repeat: Some(Reply::Wait(v1::Wait {})), ..v1::RepeatReply::default() };
        let [nothing, wait] = [finished(), wait].map(|reply| message::reply::<v1::RepeatRequest>(&reply, Vec::new()));
        or_ask_again(self.until_succeeded(loader, nothing, repeat).await, wait)
    }

    async fn order(&self, caller: &v1::Caller, request: v1::OrderRequest) -> Result<Frame, RoleError> {
        let (rank, done) = (Rank(request.rank), request.done);
        let order = answered::<v1::OrderRequest>(caller, |state| state.training().next_order(rank, done));
        let wait = v1::Order { order: Some(v1::order::Order::Wait(v1::Wait {})), ..v1::Order::default() };
        let wait = message::reply::<v1::OrderRequest>(&wait, Vec::new());
        or_ask_again(self.until_replaced(rank, wait.clone(), order).await, wait)
    }

    /// What `ready` has for dense worker `rank`; `nothing`, as soon as another has taken its place: what a dead one has done counts for
    /// nothing, and what it is given nobody trains.
    async fn until_replaced<T: Clone>(
        &self,
        rank: Rank,
        nothing: T,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let successions = self.lock().training().successions(rank);
        self.until_changed(LEASE_HOLD, |state| {
            let is_there = state.training().successions(rank) == successions;
            if is_there { ready(state) } else { Ok(Some(nothing.clone())) }
        })
        .await
    }

    async fn ring(&self, request: v1::RingRequest) -> Result<Frame, RoleError> {
        let ring = self.until(LEASE_HOLD, |state| Ok(state.training().ring_after(request.ring)));
        let ring = or_ask_again(ring.await, request.ring)?;
        Ok(message::reply::<v1::RingRequest>(&v1::Ring { ring }, Vec::new()))
    }

    async fn mend(&self, caller: &v1::Caller, request: v1::MendRequest) -> Result<Frame, RoleError> {
        let v1::MendRequest { rank, ring, step } = request;
        let mended = answered::<v1::MendRequest>(caller, |state| {
            let mended = state.training().mend(Rank(rank), ring, step.map(GlobalStep))?;
            if let (Some(Mended::GoesOn { batch, .. }), None) = (mended, step) {
                let share = self.plan.share(Rank(rank), state.training().barrier_workers());
                state.goes_on_from(Rank(rank), batch, &share);
            }
            Ok(mended.map(|mended| match mended {
                Mended::Superseded { by } => v1::Mended { ring: by, ..v1::Mended::default() },
                Mended::GoesOn { step, donor, .. } => {
                    let (_, dense_workers) = state.workers();
                    v1::Mended { ring, waits: false, step: step.0, donor: donor.0, dense_workers }
                }
            }))
        });
        let wait = v1::Mended { ring, waits: true, ..v1::Mended::default() };
        let wait = message::reply::<v1::MendRequest>(&wait, Vec::new());
        or_ask_again(self.until_changed(LEASE_HOLD, mended).await, wait)
    }

    async fn horizon(&self, caller: &v1::Caller, request: v1::HorizonRequest) -> Result<Frame, RoleError> {
        let v1::HorizonRequest { order, from, at, .. } = request;
        let horizon = answered::<v1::HorizonRequest>(caller, |state| match state.training().evaluating() {
            Some((number, at_step)) if number == order => state.evaluation_horizon(at_step, from),
            _ => state.horizon(order, from, at),
        });
        let wait = v1::Horizon { until: from, last: false, turns: Vec::new() };
        let wait = message::reply::<v1::HorizonRequest>(&wait, Vec::new());
        or_ask_again(self.until_changed(LEASE_HOLD, horizon).await, wait)
    }

    async fn pull(&self, caller: &v1::Caller, request: v1::PullRequest) -> Result<Frame, RoleError> {
        use v1::pull_reply::Reply;
        let (rank, order) = (Rank(request.rank), request.order);
        let reply = |reply| v1::PullReply { reply: Some(reply) };
        let pulled = answered::<v1::PullRequest>(caller, |state| {
            let pulled = state.training().pull(rank, order)?;
            let turns = state.turns(None);
            Ok(pulled.map(|pulled| {
                reply(match pulled {
                    Pulled::Work { assignment, oldest_token, key } => Reply::Assignment(v1::Assignment {
                        embedding_worker: turns.place(key, self.plan.pieces()).embedding_worker as u32,
                        first_row: assignment.batch.first_row,
                        rows: assignment.batch.rows,
                        token: assignment.token.0,
                        oldest_token,
                        batch: Some(key.write()),
                    }),
                    Pulled::Rest => Reply::Rest(v1::Finished {}),
                })
            }))
        });
        let wait = message::reply::<v1::PullRequest>(&reply(Reply::Wait(v1::Wait {})), Vec::new());
        or_ask_again(self.until_replaced(rank, wait.clone(), pulled).await, wait)
    }

    /// Switches the training mode by command, which may have a reason; gives the mode until then.
    fn set_mode(&self, name: &str, reason: String) -> Result<&'static str, SwitchRefused> {
        let mode = self.plan.mode_named(name).ok_or_else(|| {
            let names: Vec<&str> = self.plan.modes.iter().map(|mode| mode.name()).collect();
            SwitchRefused::Mode(format!("there is no training mode `{name}`: expected one of {}", names.join(", ")))
        })?;
        let from = {
            let mut state = self.lock();
            let from = state.training().request(mode)?;
            if let Err(error) = state.training().advance() {
                state.fail(error.to_string(), error.is_user_error());
            }
            from
        };
        if !reason.is_empty() {
            self.events.push(JobEvent::ModeChosen { mode: mode.name().to_owned(), reason });
        }
        self.changed.notify_waiters();
        Ok(from.name())
    }

    fn evaluation_share(
        &self,
        caller: &v1::Caller,
        request: v1::EvaluationShare,
        tensors: Vec<Tensor>,
    ) -> Result<Frame, RoleError> {
        let [predictions, labels, groups] = message::take("evaluation_share", tensors)?;
        let share = Share {
            predictions: predictions.expect_f32("predictions")?,
            labels: labels.expect_f32("labels")?,
            groups: groups.expect_u64("groups")?,
        };
        let mut finished = Vec::new();
        let done = self.hear::<v1::EvaluationShare>(caller, |state| {
            finished = state.evaluation_share(GlobalStep(request.at_step), Rank(request.rank), share)?;
            Ok(())
        })?;
        finished.into_iter().for_each(|event| self.events.push(event));
        Ok(done)
    }

    async fn job_end(&self, request: v1::JobEndRequest) -> Result<Frame, RoleError> {
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                if let Some(end) = self.lock().member_end(&request) {
                    return end;
                }
                changed.await;
            }
        };
        Ok(message::reply::<v1::JobEndRequest>(&waiting.await, Vec::new()))
    }
}

impl Service for Coordinator {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            let caller = message::caller(&frame)?;
            if caller.attempt != 0 && caller.attempt != self.attempt {
                return Err(refuse("the coordinator has begun another attempt of the job"));
            }
            let (is_superseded, asked_before) = {
                let state = self.lock();
                (state.is_superseded(&caller), state.replies.answered(&caller))
            };
            if is_superseded {
                return Err(refuse("another has taken this member's place"));
            }
            let ends = frame.kind == v1::JobEndRequest::KIND;
            let reply = match asked_before {
                Some(reply) => reply,
                None => self.answer(&caller, frame).await?,
            };
            // How the job has ended is known when it has.
            if !ends {
                self.remembered().await;
            }
            Ok(reply)
        })
    }
}

impl Coordinator {
    async fn answer(&self, caller: &v1::Caller, frame: Frame) -> Result<Frame, Refusal> {
        match frame.kind {
            v1::Join::KIND => Ok(self.join(caller, message::read::<v1::Join>(frame)?.0).await?),
            v1::LeaseRequest::KIND => {
                Ok(self.lease(caller, message::read::<v1::LeaseRequest>(frame)?.0.loader).await?)
            }
            v1::ChunkReport::KIND => {
                let (report, _) = message::read::<v1::ChunkReport>(frame)?;
                Ok(self.hear::<v1::ChunkReport>(caller, |state| state.chunk_report(&report))?)
            }
            v1::OrderRequest::KIND => Ok(self.order(caller, message::read::<v1::OrderRequest>(frame)?.0).await?),
            v1::HorizonRequest::KIND => Ok(self.horizon(caller, message::read::<v1::HorizonRequest>(frame)?.0).await?),
            v1::RingRequest::KIND => Ok(self.ring(message::read::<v1::RingRequest>(frame)?.0).await?),
            v1::MendRequest::KIND => Ok(self.mend(caller, message::read::<v1::MendRequest>(frame)?.0).await?),
            v1::PullRequest::KIND => Ok(self.pull(caller, message::read::<v1::PullRequest>(frame)?.0).await?),
            v1::BatchReport::KIND => {
                let (report, _) = message::read::<v1::BatchReport>(frame)?;
                Ok(self.hear::<v1::BatchReport>(caller, |state| state.batch_report(&report))?)
            }
            v1::EvaluationLeaseRequest::KIND => {
                let (request, _) = message::read::<v1::EvaluationLeaseRequest>(frame)?;
                Ok(self.evaluation_lease(caller, request.loader).await?)
            }
            v1::RepeatRequest::KIND => {
                Ok(self.repeat(caller, message::read::<v1::RepeatRequest>(frame)?.0.loader).await?)
            }
            v1::EvaluationChunkReport::KIND => {
                let (report, _) = message::read::<v1::EvaluationChunkReport>(frame)?;
                Ok(self.hear::<v1::EvaluationChunkReport>(caller, |state| state.evaluation_chunk_report(&report))?)
            }
            v1::EvaluationShare::KIND => {
                let (share, tensors) = message::read::<v1::EvaluationShare>(frame)?;
                Ok(self.evaluation_share(caller, share, tensors)?)
            }
            v1::Progress::KIND => {
                let (report, _) = message::read::<v1::Progress>(frame)?;
                Ok(self.hear_news::<v1::Progress>(caller, |state| state.progress(&report))?)
            }
            v1::TrainingDone::KIND => {
                let (done, _) = message::read::<v1::TrainingDone>(frame)?;
                Ok(self.hear::<v1::TrainingDone>(caller, |state| state.training_done(done))?)
            }
            v1::DenseSaved::KIND => {
                self.dense_saved(message::read::<v1::DenseSaved>(frame)?.0)?;
                Ok(message::done::<v1::DenseSaved>())
            }
            v1::SaveNow::KIND => Ok(self.save_now_for_member(&message::read::<v1::SaveNow>(frame)?.0).await),
            v1::Farewell::KIND => {
                let (farewell, _) = message::read::<v1::Farewell>(frame)?;
                Ok(self.hear::<v1::Farewell>(caller, |state| {
                    state.farewell(farewell);
                    Ok(())
                })?)
            }
            v1::JobEndRequest::KIND => Ok(self.job_end(message::read::<v1::JobEndRequest>(frame)?.0).await?),
            v1::AttemptRequest::KIND => {
                message::read::<v1::AttemptRequest>(frame)?;
                Ok(message::reply::<v1::AttemptRequest>(&v1::Attempt { attempt: self.attempt }, Vec::new()))
            }
            v1::MapRequest::KIND => {
                message::read::<v1::MapRequest>(frame)?;
                Ok(message::reply::<v1::MapRequest>(&self.directory().await?, Vec::new()))
            }
            v1::Failure::KIND => {
                let (failure, _) = message::read::<v1::Failure>(frame)?;
                self.fail(failure.message, failure.user_error);
                Ok(message::done::<v1::Failure>())
            }
            kind => Err(message::refuse_kind("coordinator", kind)),
        }
    }
}

/// Whoever asks takes no part in the job any more.
fn refuse(why: &str) -> Refusal {
    Refusal { code: RefusalCode::NotFound, message: why.to_owned(), retryable: false }
}

/// The journal, and what a coordinator before has left in it, if that can be gone on from.
fn keep_journal_in(
    directory: &Path,
    plan: &JobPlan,
    run: &str,
    events: &EventLog,
) -> Result<(Arc<Journal>, Option<journal::Left>), RoleError> {
    let (journal, left) = Journal::open(directory, plan, run)?;
    let left = left.filter(|left| left.state.may_be_taken_up());
    let path = directory.join(journal::EVENTS);
    let attempt = || format!("keep events in {}", path.display());
    events.keep_in(&path, left.is_none()).map_err(|source| RoleError::System { attempt: attempt(), source })?;
    Ok((Arc::new(journal), left))
}

/// What `ready` answers to a question of `caller`, as a frame; the answer that was given before, if this was asked before.
fn answered<R: Request>(
    caller: &v1::Caller,
    mut ready: impl FnMut(&mut State) -> Result<Option<R::Reply>, RoleError>,
) -> impl FnMut(&mut State) -> Result<Option<Frame>, RoleError> {
    move |state| {
        if let Some(reply) = state.replies.answered(caller) {
            return Ok(Some(reply));
        }
        let reply = ready(state)?.map(|reply| message::reply::<R>(&reply, Vec::new()));
        if let Some(reply) = &reply {
            state.replies.answer(caller, reply);
        }
        Ok(reply)
    }
}

/// What [`Coordinator::drive`] knows of checkpoints.
struct Saver {
    /// None if the job has none.
    checkpoints: Option<Checkpoints>,
    /// The one to be restored.
    resumed: Option<Resumed>,
    /// At most one.
    writing: JoinSet<SaveEnded>,
    /// In a row.
    failed_attempts: u32,
    /// As many as were known at the last checkpoint.
    server_restarts: u64,
}

/// A checkpoint that exists or was given up.
struct SaveEnded {
    ticket: v1::Ticket,
    last: bool,
    result: Result<Written, RoleError>,
}

fn warn_all(events: &EventLog, warnings: impl IntoIterator<Item = String>) {
    for message in warnings {
        tracing::warn!("{message}");
        events.push(JobEvent::Warning { message });
    }
}

fn write_lease(lease: ChunkLease, (skip_batches, skip_pieces): (u64, u32), turns: &Turns) -> v1::ChunkLease {
    let ChunkLease { epoch, chunk, first_step, max_batches } = lease;
    v1::ChunkLease {
        epoch,
        chunk,
        first_step: first_step.0,
        max_batches,
        skip_batches,
        skip_pieces,
        turns: turns.write(),
    }
}

/// A question held too long is answered with `wait`; it is no failure.
fn or_ask_again<T>(lease: Result<T, RoleError>, wait: T) -> Result<T, RoleError> {
    match lease {
        Err(RoleError::Task { .. }) => Ok(wait),
        other => other,
    }
}

async fn add_all_traffic(
    summary: &mut Summary,
    members: &[&String],
    transport: &dyn Transport,
) -> Result<(), RoleError> {
    for address in members {
        add_traffic(summary, &connect(transport, address)?).await?;
    }
    Ok(())
}

async fn add_traffic(summary: &mut Summary, member: &Channel) -> Result<(), RoleError> {
    let (traffic, _) = message::call(member, v1::TrafficRequest {}, Vec::new(), CALL_DEADLINE).await?;
    add(summary, traffic);
    Ok(())
}

fn add(summary: &mut Summary, traffic: v1::Traffic) {
    for (kind, bytes) in traffic.bytes_sent {
        *summary.bytes_on_wire.entry(kind).or_default() += bytes;
    }
}
