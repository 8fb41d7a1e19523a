//! The coordinator of a job: one small service that leads all members through the run.
//!
//! It keeps the membership, leases chunks of data to loaders, moves training from stage to stage,
//! takes checkpoints and reports how the job ended. Members call it seldom. A request that it
//! cannot answer yet waits until it can.
//!
//! Start reading at `state`, which says how each message changes the state. `handlers` answers the
//! members, `training` chooses the next stage, and `server_calls` calls the parameter servers.

mod as_bytes;
mod auto_mode;
mod batch_index;
mod budget;
mod checkpointing;
mod checkpoints;
mod commands;
mod control;
mod copies;
mod digest;
mod drain;
mod files;
mod followed;
mod free_space;
mod going_back;
mod handlers;
mod hexadecimal;
mod in_flight;
mod incarnations;
mod journal;
mod lease;
mod loader_scaling;
mod loader_use;
mod membership;
mod migrations;
mod page;
mod quality_watch;
mod recovery;
mod refused;
mod reply_cache;
#[cfg(test)]
mod resumed_data;
mod ring;
mod rollback;
mod server_calls;
mod server_progress;
mod server_speeds;
mod server_work;
mod servers;
mod slot_targets;
mod slowest;
mod snapshot;
mod speeds;
mod state;
mod stream_snapshot;
mod summary;
mod throughput;
mod training;
mod unseen;
mod warm_start;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use rectrain_proto::v1;
use rectrain_protocol::Role;
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{EventFollower, EventLog, JobEvent, Summary};
use rectrain_protocol::failure::JobFailure;
use rectrain_protocol::metrics::CoordinatorMetrics;
use rectrain_protocol::placement::Placement;
use rectrain_protocol::plan::{CheckpointPlan, JobPlan};
use rectrain_protocol::token_counts::TokenCounts;
use rectrain_wire::{BoxFuture, Transport};
use tokio::sync::Notify;

use self::checkpointing::CheckpointRequests;
use self::checkpoints::{Checkpoints, ResumePoint};
pub use self::control::{ControlService, Guard, serve_control};
use self::copies::Copies;
use self::journal::Journal;
pub use self::journal::JournalPlace;
use self::lease::{PathLease, ReleaseOnDrop};
pub use self::page::{
    Columns, INTERRUPTED, LivePage, MAX_PAGE_RECORD_BYTES, PAGE_RECORD, PlanFacts, Point, RunFacts, forwarded_page,
    page_of_runs,
};
pub use self::recovery::recover_copy;
pub use self::refused::{ResizeRefused, SaveRefused};
use self::server_progress::TableSizes;
use self::state::State;
use self::warm_start::{Search, WarmStart};

/// How long a coordinator that ends, or whose job has failed, waits until parameter servers have
/// the last image.
const LAST_COPY: Duration = Duration::from_secs(10);
/// How long a coordinator that ends waits until the last offsets are committed.
const LAST_COMMIT: Duration = Duration::from_secs(15);

/// The coordinator of one attempt of a job.
pub struct Coordinator {
    plan: Arc<JobPlan>,
    /// Identifies this attempt of the job. Rows that a server keeps from another attempt are
    /// worthless.
    attempt: u64,
    state: Mutex<State>,
    checkpoint_requests: Mutex<CheckpointRequests>,
    changed: Notify,
    events: EventLog,
    metrics: CoordinatorMetrics,
    /// Where the slots are; `None` until all members have joined.
    placement: Mutex<Option<Placement>>,
    /// Where the state is persisted; `None` if the state ends with this process.
    journal: Option<Arc<Journal>>,
    /// Copies of the journal on parameter servers; `None` without a journal.
    copies: Option<Copies>,
    /// Whether replies must wait until servers can get copies. False while members have yet to
    /// join: they need replies before there is a placement.
    is_copied_first: bool,
    /// Whether this coordinator continues from the journal of one that died.
    is_recovered: bool,
    /// Whether the events of the one before are lost with its machine. They said that the job had
    /// started.
    is_log_lost: bool,
    /// The counts that the metrics include already. After a recovery or a resume they start above
    /// zero.
    counted: Mutex<TokenCounts>,
    /// Taken by [`Coordinator::run`].
    checkpoints: Mutex<Option<(Checkpoints, Option<ResumePoint>)>>,
    /// The model of another job to begin with. Taken by [`Coordinator::run`].
    warm_start: Mutex<Option<Box<WarmStart>>>,
    /// The lease on the checkpoint path; `None` if the job has no checkpoints.
    lease: Option<Arc<PathLease>>,
    table_sizes: Mutex<TableSizes>,
}

impl Coordinator {
    /// Starts the coordinator of a job that no member has joined yet, and finds the checkpoint to
    /// resume from.
    ///
    /// - `run` names this run of the job across all its attempts. Without `spec.checkpoint.resume:
    ///   latest`, only checkpoints of the same run are resumed from.
    /// - `journal` is the place of the journal. If an earlier coordinator of this run left its
    ///   state there, this one continues from that state, and `events` from the events of the
    ///   earlier one. See [`recover_copy`] for a place that is empty.
    ///
    /// # Errors
    /// - [`RoleError::Input`] if files in the checkpoint path cannot be written, read or deleted,
    ///   if it holds checkpoints of another run or another job, or if all its checkpoints are
    ///   damaged.
    /// - [`RoleError::Leased`] if another run uses the checkpoint path now. A coordinator that
    ///   continues learns that in [`Self::run`].
    /// - [`RoleError::Checkpoint`] if the storage fails.
    /// - [`RoleError::System`] if the journal cannot be written.
    pub fn start<'a>(
        plan: Arc<JobPlan>,
        run: &'a str,
        journal: Option<JournalPlace<'a>>,
        events: EventLog,
        metrics: CoordinatorMetrics,
    ) -> BoxFuture<'a, Result<Self, RoleError>> {
        // Boxed here, so that no other crate compiles its code again.
        Box::pin(Self::begin(plan, run, journal, events, metrics))
    }

    async fn begin(
        plan: Arc<JobPlan>,
        run: &str,
        journal: Option<JournalPlace<'_>>,
        events: EventLog,
        metrics: CoordinatorMetrics,
    ) -> Result<Self, RoleError> {
        let journal = journal.map(|place| open_journal(place, &plan, run, &events)).transpose()?;
        let (journal, recovered) = journal.unzip();
        let checkpoints = Checkpoints::open(&plan, run)?;
        let recovered = recovered.flatten();
        let lease = checkpoints.as_ref().map(Checkpoints::lease);
        // Boxed: a future that holds it would be too large for the stack.
        let coordinator = Box::new(Self { lease: lease.clone(), ..Self::new(plan, journal, events, metrics)? });
        if let (Some(checkpoints), None) = (&checkpoints, &recovered) {
            checkpoints.probe().await?;
            checkpoints.lease().acquire(&coordinator.events).await?;
        }
        let started = match recovered {
            Some(recovered) => Ok(coordinator.recover(recovered, checkpoints)),
            None => Box::pin(coordinator.resume(checkpoints, run)).await,
        };
        if let (Err(_), Some(lease)) = (&started, lease) {
            lease.release().await;
        }
        started
    }

    /// A coordinator of a job that starts from step 0 and saves no checkpoints.
    fn new(
        plan: Arc<JobPlan>,
        journal: Option<Arc<Journal>>,
        events: EventLog,
        metrics: CoordinatorMetrics,
    ) -> Result<Self, RoleError> {
        let copies = journal
            .as_ref()
            .map(|journal: &Arc<Journal>| Copies::new(journal.copies().to_owned(), journal.owner(), metrics.clone()));
        Ok(Self {
            copies,
            is_copied_first: false,
            state: Mutex::new(State::new(&plan, None)?),
            plan,
            attempt: RandomState::new().hash_one("attempt").max(1),
            checkpoint_requests: Mutex::default(),
            changed: Notify::new(),
            events,
            metrics,
            placement: Mutex::default(),
            journal,
            is_recovered: false,
            is_log_lost: false,
            counted: Mutex::default(),
            checkpoints: Mutex::default(),
            warm_start: Mutex::default(),
            lease: None,
            table_sizes: Mutex::default(),
        })
    }

    /// Continues from the state that a coordinator that died left in the journal.
    fn recover(self, mut recovered: journal::Recovered, checkpoints: Option<Checkpoints>) -> Self {
        let mut checkpoints = checkpoints;
        if let Some(checkpoints) = &mut checkpoints {
            recovered.state.damaged_checkpoints().iter().for_each(|name| checkpoints.mark_damaged(name));
        }
        let is_log_lost = recovered.events > 0 && self.events.after(0, 1).is_empty();
        let is_copied_first = matches!(recovered.state.roster(), Ok(Some(_)));
        self.events.push(JobEvent::CoordinatorTakenUp { step: recovered.state.step() });
        if let Some(step) = recovered.state.last_checkpoint_step() {
            self.metrics.checkpoint_step.set(step as i64);
        }
        self.metrics.unseen_share.set(&recovered.state.unseen_shares());
        self.metrics.training_held.set(i64::from(recovered.state.is_held()));
        Self {
            attempt: recovered.attempt,
            counted: Mutex::new(recovered.state.training().counts()),
            state: Mutex::new(recovered.state),
            is_recovered: true,
            is_log_lost,
            is_copied_first,
            checkpoints: Mutex::new(checkpoints.map(|checkpoints| (checkpoints, None))),
            ..self
        }
    }

    /// Resumes from the latest usable checkpoint. If the path holds none, begins with the model of
    /// `spec.checkpoint.from`, or with initial values.
    async fn resume(self, mut checkpoints: Option<Checkpoints>, run: &str) -> Result<Self, RoleError> {
        let mut resumed = None;
        if let Some(checkpoints) = &mut checkpoints {
            let (found, warnings) = checkpoints.find().await.map_err(CheckpointPlan::at_start)?;
            warn_all(&self.events, warnings);
            resumed = found;
        }
        Box::pin(self.check_baseline(resumed.as_ref())).await?;
        let warm_start = self.find_warm_start(checkpoints.as_ref(), resumed.as_ref(), run).await?;
        let begun = warm_start.as_ref().map(|warm_start| warm_start.snapshot(&self.plan));
        let saved = resumed.as_ref().map(|resumed| &resumed.state).or(begun.as_ref());
        let mut state = State::new(&self.plan, saved)?;
        if let Some(warm_start) = &warm_start {
            state.set_origin(warm_start.origin.clone());
        }
        if let Some(checkpoints) = &checkpoints {
            state.set_damaged_checkpoints(checkpoints.damaged());
        }
        self.metrics.unseen_share.set(&state.unseen_shares());
        let coordinator = Self {
            counted: Mutex::new(state.training().counts()),
            state: Mutex::new(state),
            checkpoints: Mutex::new(checkpoints.map(|checkpoints| (checkpoints, resumed))),
            warm_start: Mutex::new(warm_start),
            ..self
        };
        // Members may learn this coordinator's address as soon as `start` returns. From then on a
        // replacement must find a journal.
        if let Some(journal) = &coordinator.journal
            && coordinator.write_journal(journal).await.is_none()
        {
            journal.close();
        }
        Ok(coordinator)
    }

    /// Checks that the checkpoint of the frozen model is there. A later attempt of the run goes on
    /// without it: the job's own retention may have deleted it meanwhile.
    async fn check_baseline(&self, resumed: Option<&ResumePoint>) -> Result<(), RoleError> {
        let Some(baseline) = &self.plan.quality.baseline else { return Ok(()) };
        match baseline.open(&self.plan.identity()).await {
            Err(error) if resumed.is_some_and(|resumed| resumed.is_of_this_run) => {
                warn_all(&self.events, [format!("training goes on without the frozen model: {error}")]);
                Ok(())
            }
            checked => checked.map(drop),
        }
    }

    /// Finds the model to begin with; `None` if the manifest names none. The job's own checkpoints
    /// come first.
    async fn find_warm_start(
        &self,
        checkpoints: Option<&Checkpoints>,
        resumed: Option<&ResumePoint>,
        run: &str,
    ) -> Result<Option<Box<WarmStart>>, RoleError> {
        let Some(from) = &self.plan.warm_start else { return Ok(None) };
        if let Some(resumed) = resumed {
            let message = format!(
                "spec.checkpoint.from {} is not used: this job's own checkpoint {} comes first, and training resumes from it",
                from.from, resumed.name
            );
            warn_all(&self.events, [message]);
            return Ok(None);
        }
        let own = checkpoints.map(Checkpoints::directory);
        let (found, warnings) = Box::pin(Search { plan: &self.plan, from, run, own }.find()).await?;
        warn_all(&self.events, warnings);
        Ok(Some(Box::new(found)))
    }

    /// Whether this coordinator, and the members with it, continues where one that died was.
    #[must_use]
    pub fn is_recovered(&self) -> bool {
        self.is_recovered
    }

    /// Leads the job to its end: waits for training, collects the digest of the model, and pushes
    /// the last event.
    ///
    /// # Errors
    /// The failure of the job. [`RoleError::Superseded`] if another coordinator leads it: this one
    /// then neither answers members nor pushes a last event.
    pub async fn run(&self, transport: &dyn Transport) -> Result<Summary, RoleError> {
        let _release = ReleaseOnDrop(self.lease.clone());
        let summarizing = async {
            let summary = match self.events.last() {
                // The coordinator before this one pushed the summary and then died.
                Some(JobEvent::Summary(summary)) => *summary,
                _ => self.summarize(transport).await?,
            };
            self.offsets_committed().await;
            Ok::<Summary, RoleError>(summary)
        };
        let result = tokio::select! {
            // Once a member has failed, the others end, and calls to them fail. The first failure
            // is the cause.
            result = summarizing => result.map_err(|error| self.cause_of(error)),
            // Boxed, because the futures of a job's roles are together in one.
            superseded = Box::pin(self.run_journal()) => Err(superseded),
            never = Box::pin(self.poll_servers()) => never,
            never = Box::pin(self.follow_server_speeds()) => never,
            never = Box::pin(self.spread_budget()) => never,
            error = Box::pin(self.keep_lease()) => Err(error),
            error = Box::pin(self.save_by_time()) => Err(error),
        };
        if let Err(RoleError::Superseded) = &result {
            return Err(self.step_down());
        }
        match &result {
            Ok(summary) => {
                if !self.lock().has_ended() {
                    self.events.push(JobEvent::Summary(Box::new(summary.clone())));
                }
                self.lock().end();
                // The last image says how the job ended.
                if let Some(journal) = &self.journal {
                    self.write_journal(journal).await;
                }
            }
            Err(error) => {
                self.lock().fail(error.into());
                if self.copy_failure().await.is_err() {
                    return Err(self.step_down());
                }
                self.events.push(JobFailure::from(error).into());
            }
        }
        // Replies that say how the job ended leave from now on.
        if let Some(journal) = &self.journal {
            journal.close();
        }
        self.changed.notify_waiters();
        self.release_path().await;
        result
    }

    /// Waits until a loader has committed the offsets of the last checkpoint. Not for long: the job
    /// is complete without this.
    async fn offsets_committed(&self) {
        let committed = |state: &mut State| Ok(state.offsets_are_committed().then_some(()));
        if self.wait_until(LAST_COMMIT, committed).await.is_err() {
            let message = "the offsets of the last checkpoint were not committed for the consumer group";
            warn_all(&self.events, [message.to_owned()]);
        }
    }

    /// The first failure of a member, if there is one. It is the cause of `error`.
    fn cause_of(&self, error: RoleError) -> RoleError {
        match error {
            RoleError::Superseded => error,
            error => self.lock().check_failure().err().unwrap_or(error),
        }
    }

    /// Writes and copies the last image of a failed job, before members learn of the failure. The
    /// job has not failed if another coordinator leads it. Does not wait for long, because the job
    /// may have failed with its parameter servers.
    ///
    /// # Errors
    /// [`RoleError::Superseded`] if another coordinator leads the job.
    async fn copy_failure(&self) -> Result<(), RoleError> {
        let (Some(journal), Some(copies)) = (&self.journal, &self.copies) else { return Ok(()) };
        let written = if journal.is_closed() { None } else { self.write_journal(journal).await };
        let copying = async {
            match written {
                Some((sequence, image)) => copies.put(sequence, image).await,
                None => copies.void(u64::MAX).await,
            }
        };
        match tokio::time::timeout(LAST_COPY, copying).await {
            Ok(copied) => copied,
            Err(_late) => {
                tracing::warn!("no parameter server has acknowledged the failure of the job within {LAST_COPY:?}");
                Ok(())
            }
        }
    }

    /// Removes the journal, because another coordinator leads the job. A restart of this process
    /// must not continue from it.
    fn step_down(&self) -> RoleError {
        if let Some(journal) = &self.journal {
            journal.discard();
        }
        RoleError::Superseded
    }

    /// Renews the lease on the checkpoint path. Returns an error when another process has it.
    async fn keep_lease(&self) -> RoleError {
        let Some(lease) = &self.lease else { return std::future::pending().await };
        if self.is_recovered
            && let Err(error) = self.take_lease_back(lease).await
        {
            return error;
        }
        lease.keep(&self.events, &self.metrics).await
    }

    /// Gets the lease that the coordinator before had. Another process of this run may have it,
    /// and lead the job. So this one waits until it is [`Self::confirmed`]. While the storage
    /// fails it continues without the lease, and gets it at a later renewal.
    async fn take_lease_back(&self, lease: &PathLease) -> Result<(), RoleError> {
        if self.wait_until(WHOLE_JOB, |_| Ok(self.placement().ok())).await.is_err() || self.confirmed().await.is_err() {
            // The job has failed, and ends without the lease.
            return std::future::pending().await;
        }
        match lease.acquire(&self.events).await {
            Err(error) if !error.is_user_error() => {
                warn_all(&self.events, [format!("the lease on spec.checkpoint.path cannot be renewed yet: {error}")]);
                Ok(())
            }
            acquired => acquired,
        }
    }

    /// Waits until a parameter server has a copy of the present state. It would have refused the
    /// copy if another coordinator led the job. Needs a placement.
    ///
    /// # Errors
    /// The job has failed.
    async fn confirmed(&self) -> Result<(), RoleError> {
        tokio::select! {
            () = self.journaled() => Ok(()),
            // Only a failure ends this wait.
            failed = self.wait_until(WHOLE_JOB, |_| Ok(None::<()>)) => failed,
        }
    }

    /// Releases the checkpoint path for the next run. For a process that ends without the end of
    /// the job.
    pub async fn release_path(&self) {
        if let Some(lease) = &self.lease {
            lease.release().await;
        }
    }

    /// Writes the journal, and copies it to parameter servers, whenever a handler waits for that.
    /// If a write fails, the job continues without a journal. Returns only if another coordinator
    /// leads the job. This one must then answer nothing and change nothing, not even the failure
    /// of the job.
    async fn run_journal(&self) -> RoleError {
        if self.is_copied_first {
            // A failure of the job ends this wait, and then no copy is needed.
            let _failed = self.wait_until(WHOLE_JOB, |_| Ok(self.placement().ok())).await;
        }
        match self.serve_journal().await {
            Some(superseded) => superseded,
            None => std::future::pending().await,
        }
    }

    /// Serves requests for writes of the journal until a write fails (`None`), or another
    /// coordinator leads the job.
    async fn serve_journal(&self) -> Option<RoleError> {
        let (journal, copies) = (self.journal.as_ref()?, self.copies.as_ref()?);
        loop {
            let number = journal.requested().await;
            if journal.is_closed() {
                return None;
            }
            let Some((sequence, image)) = self.write_journal(journal).await else {
                let voided = copies.void(u64::MAX).await;
                journal.close();
                return voided.err();
            };
            if let Err(superseded) = copies.put(sequence, image).await {
                return Some(superseded);
            }
            if self.lock().check_failure().is_err() {
                // Members that learn of a failure end. So [`Self::run`] first copies the last image
                // to them and pushes the last event.
                return None;
            }
            journal.serve(number);
        }
    }

    /// Writes the present state. Returns the image and its sequence. After a failure there is no
    /// journal.
    async fn write_journal(&self, journal: &Arc<Journal>) -> Option<(u64, Bytes)> {
        let image = journal.image(self.attempt, self.events.number(), &self.lock());
        let written = match image {
            Ok(image) => {
                let sequence = journal.write(image.clone()).await;
                sequence.map(|sequence| (sequence, image)).map_err(|error| error.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        self.metrics.journal_writes.inc_by(u64::from(written.is_ok()));
        written.map_err(|reason| self.lose_journal(journal, &reason)).ok()
    }

    fn lose_journal(&self, journal: &Journal, reason: &str) {
        let lost = "if the coordinator dies from now on, the job restarts from its last checkpoint";
        warn_all(&self.events, [format!("the coordinator's journal cannot be written ({reason}): {lost}")]);
        journal.discard();
    }

    /// Waits until the journal has the present state, so that a replacement of this coordinator
    /// knows it.
    async fn journaled(&self) {
        if let Some(journal) = &self.journal {
            journal.flushed().await;
        }
    }

    /// Ends the job with an error, as if a member had failed.
    pub fn fail(&self, message: String, user_error: bool) {
        self.lock().fail(JobFailure::new(message, user_error));
        self.changed.notify_waiters();
    }

    /// The present status of the job.
    pub fn status(&self) -> v1::JobStatus {
        let status = self.lock().status();
        v1::JobStatus { recovered: self.is_recovered, budget: self.budget(), tables: self.table_size(), ..status }
    }

    /// Follows all events from the first one. The caller that started the job follows them to start
    /// the members that [`JobEvent::Scaling`] asks for.
    #[must_use]
    pub fn follow(&self) -> EventFollower {
        self.events.follow()
    }

    /// Pushes events, logs warnings, and updates the metrics that depend on the events.
    fn publish(&self, events: Vec<JobEvent>) {
        for event in events {
            match &event {
                JobEvent::Scaled { role, to, .. } => self.metrics.set_members(*role, *to),
                JobEvent::ShareChanged { .. } => self.metrics.share_changes.inc(),
                JobEvent::Evaluation { test, .. } => self.metrics.unseen_share.set(&test.unseen),
                JobEvent::Warning { message } => tracing::warn!("{message}"),
                _ => {}
            }
            self.events.push(event);
        }
    }

    /// Addresses of the parameter servers, embedding workers and dense workers, once all have
    /// joined.
    async fn directory(&self) -> Result<v1::Placement, RoleError> {
        let placement = self.wait_until(WHOLE_JOB, |_| Ok(self.placement().ok())).await?;
        let (embedding_workers, dense_workers) = self.lock().workers();
        Ok(v1::Placement { embedding_workers, dense_workers, ..placement.write() })
    }

    fn placement(&self) -> Result<Placement, RoleError> {
        self.placement.lock().clone().ok_or(RoleError::Stopped)
    }

    fn set_placement(&self, placement: Placement) {
        self.metrics.map_epoch.set(placement.epoch().0 as i64);
        self.metrics.set_members(Role::Ps, placement.servers.len() as u32);
        if let Some(copies) = &self.copies {
            copies.follow(&placement);
        }
        *self.placement.lock() = Some(placement);
        self.changed.notify_waiters();
    }

    /// Waits until `ready` returns a value. Fails as soon as the job has failed.
    async fn wait_until<T>(
        &self,
        deadline: Duration,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                let (value, events) = {
                    let mut state = self.lock();
                    state.check_failure()?;
                    (ready(&mut state)?, state.sync_with_training())
                };
                self.publish(events);
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

    /// As [`Self::wait_until`], for a `ready` that may change the state. Other waiters are notified
    /// of the first call.
    async fn try_then_wait<T>(
        &self,
        deadline: Duration,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let first = self.change(|state| ready(state))?;
        match first {
            Some(value) => Ok(value),
            None => self.wait_until(deadline, ready).await,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Changes the state and notifies all waiters. An error of `change` fails the job.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T, RoleError>) -> Result<T, RoleError> {
        let events;
        let result = {
            let mut state = self.lock();
            state.check_failure()?;
            let result = change(&mut state);
            events = state.sync_with_training();
            let counts = state.training().counts();
            let before = std::mem::replace(&mut *self.counted.lock(), counts);
            self.metrics.count(&counts, &before);
            if let Err(error) = &result {
                state.fail(error.into());
            }
            result
        };
        self.publish(events);
        self.changed.notify_waiters();
        result
    }
}

/// Opens the journal. Also returns the state that an earlier coordinator left in it, if this one
/// can continue from it.
fn open_journal(
    place: JournalPlace<'_>,
    plan: &JobPlan,
    run: &str,
    events: &EventLog,
) -> Result<(Arc<Journal>, Option<journal::Recovered>), RoleError> {
    let (journal, recovered) = Journal::open(place, plan, run)?;
    let recovered = recovered.filter(|recovered| recovered.state.is_recoverable());
    let path = place.directory.join(journal::EVENTS);
    let attempt = || format!("keep events in {}", path.display());
    events.persist(&path, recovered.is_none()).map_err(|source| RoleError::System { attempt: attempt(), source })?;
    if let Some(recovered) = &recovered {
        events.continue_after(recovered.events);
    }
    Ok((Arc::new(journal), recovered))
}

/// Shows warnings as events of the job, and in the log. Before the job has started, events may have
/// no reader yet.
fn warn_all(events: &EventLog, warnings: impl IntoIterator<Item = String>) {
    for message in warnings {
        tracing::warn!("{message}");
        events.push(JobEvent::Warning { message });
    }
}
