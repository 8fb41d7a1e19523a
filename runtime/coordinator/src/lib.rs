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
mod leaving;
mod migrations;
mod outstanding;
mod page;
mod places;
mod questions;
mod replies;
mod ring;
mod saved;
mod saving;
mod servers;
mod speeds;
mod state;
mod training;
mod watching;

use rectrain_protocol::role::role_of;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{join_all, try_join_all};
use parking_lot::{Mutex, MutexGuard};
use rectrain_proto::v1;
use rectrain_wire::Transport;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use self::checkpoints::{Checkpoints, Resumed};
pub use self::control::{ControlService, Guard, serve_control};
use self::journal::Journal;
use self::migrations::Migrations;
pub use self::page::LivePage;
use self::saving::{Saver, Saves};
use self::state::{ResizeRefused, State};
use self::training::{ServerCall, SwitchRefused};
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{EventFollower, EventLog, JobEvent, Summary};
use rectrain_protocol::message;
use rectrain_protocol::metrics::CoordinatorMetrics;
use rectrain_protocol::placement::Placement;
use rectrain_protocol::plan::{CheckpointPlan, JobPlan};
use rectrain_protocol::token_counts::TokenCounts;
use rectrain_protocol::{Role, connect};

/// How long members that were released shortly before the end have to tell what they have sent.
const FAREWELL: Duration = Duration::from_secs(2);
/// How long members have to say what they have sent.
const TRAFFIC: Duration = Duration::from_secs(10);

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
    /// What the metrics have counted, and in the job's life others before this process.
    counted: Mutex<TokenCounts>,
    /// Taken by [`Coordinator::run`].
    checkpoints: Mutex<Option<(Checkpoints, Option<Resumed>)>>,
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
        if let Some(mut left) = left.flatten() {
            if let Some(checkpoints) = &mut checkpoints {
                left.state.passed_over().iter().for_each(|name| checkpoints.pass_over(name));
            }
            let step = left.state.step();
            events.push(JobEvent::CoordinatorTakenUp { step });
            if let Some(saved) = left.state.last_checkpoint_step() {
                metrics.checkpoint_step.set(saved as i64);
            }
            return Ok(Self {
                attempt: left.attempt,
                counted: Mutex::new(left.state.training().counts()),
                state: Mutex::new(left.state),
                is_taken_up: true,
                checkpoints: Mutex::new(checkpoints.map(|checkpoints| (checkpoints, None))),
                ..Self::new(plan, journal, events, metrics)?
            });
        }
        let mut resumed = None;
        if let Some(checkpoints) = &mut checkpoints {
            let (found, warnings) = checkpoints.find().await.map_err(CheckpointPlan::at_start)?;
            warn_all(&events, warnings);
            resumed = found;
        }
        let mut state = State::new(&plan, resumed.as_ref().map(|resumed| &resumed.state))?;
        if let Some(checkpoints) = &checkpoints {
            state.set_passed_over(checkpoints.passed_over());
        }
        let coordinator = Self {
            counted: Mutex::new(state.training().counts()),
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
            counted: Mutex::default(),
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
            never = self.watch_servers() => never,
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
            if let Some(role) = role_of(replicas.role()) {
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
        // Nobody waits for those of them who have died since: the model is there.
        let roster = self.until(TRAFFIC, State::roster).await.unwrap_or_default();
        let members = placement.addresses.iter().chain(&roster.embedding_workers);
        let members = members.chain(&roster.dense_workers).chain(&roster.loaders);
        for told in join_all(members.map(|address| traffic_of(address, transport))).await {
            match told {
                Ok(traffic) => add(&mut summary, traffic),
                Err(error) => tracing::warn!(%error, "what one member has sent is not in the summary"),
            }
        }
        self.lock().check_failure()?;
        Ok(summary)
    }

    /// Makes the calls to the parameter servers that restoring, switches, checkpoints, moving slots and the end of the data need, until
    /// one fails.
    async fn drive(&self, transport: &dyn Transport) -> RoleError {
        let taken = self.checkpoints.lock().take();
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
                        self.begin_migration(resize?, transport, &mut migrations).await?;
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

    /// How the job stands.
    pub fn status(&self) -> v1::JobStatus {
        self.lock().status()
    }

    /// Asks for another number of a role's members, or for the slots to be spread anew over as many parameter servers; gives how many there
    /// are.
    fn scale(
        &self,
        role: Role,
        members: u32,
        reason: String,
        decided_seconds: Option<u64>,
    ) -> Result<u32, ResizeRefused> {
        let (from, is_new) = match decided_seconds {
            Some(decided) if role == Role::Ps => self.lock().request_rebalance(members, decided)?,
            _ => self.lock().request_members(role, members)?,
        };
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
        self.scale(role, members, String::new(), None).map_err(|refused| match refused {
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
        self.placement.lock().clone().ok_or(RoleError::Stopped)
    }

    fn set_placement(&self, placement: Placement) {
        self.metrics.map_epoch.set(placement.epoch().0 as i64);
        self.metrics.set_members(Role::Ps, placement.servers.len() as u32);
        *self.placement.lock() = Some(placement);
        self.changed.notify_waiters();
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
        self.state.lock()
    }

    /// Changes the state; an error in it ends the job.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T, RoleError>) -> Result<T, RoleError> {
        let news;
        let result = {
            let mut state = self.lock();
            state.check_failure()?;
            let result = change(&mut state);
            news = state.follow_training();
            let counts = state.training().counts();
            let before = std::mem::replace(&mut *self.counted.lock(), counts);
            self.metrics.count(&counts, &before);
            if let Err(error) = &result {
                state.fail(error.to_string(), error.is_user_error());
            }
            result
        };
        self.tell(news);
        self.changed.notify_waiters();
        result
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

fn warn_all(events: &EventLog, warnings: impl IntoIterator<Item = String>) {
    for message in warnings {
        tracing::warn!("{message}");
        events.push(JobEvent::Warning { message });
    }
}

async fn traffic_of(address: &str, transport: &dyn Transport) -> Result<v1::Traffic, RoleError> {
    let (traffic, _) = message::call(&connect(transport, address)?, v1::TrafficRequest {}, Vec::new(), TRAFFIC).await?;
    Ok(traffic)
}

fn add(summary: &mut Summary, traffic: v1::Traffic) {
    for (kind, bytes) in traffic.bytes_sent {
        *summary.bytes_on_wire.entry(kind).or_default() += bytes;
    }
}
