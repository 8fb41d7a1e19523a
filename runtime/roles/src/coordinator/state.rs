//! What the coordinator knows, and how each message changes it. No waiting and no sending happens here.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::{Duration, Instant};

use rectrain_dense::metrics;
use rectrain_modes::migration::{MigrationId, SlotMap};
use rectrain_modes::{DataLedger, DataPlan, GlobalStep, Lease, LedgerError, Rank, TrainingLength};
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use super::announced::{Announced, Chunk};
use super::as_bytes;
use super::crew::{Crew, Joined};
use super::outstanding::{Given, Outstanding, Repeat};
use super::places::Places;
use super::replies::Replies;
use super::saved::{AppliedGradients, SavedState};
use super::speeds::Speeds;
use super::training::Training;
use crate::error::RoleError;
use crate::events::{JobEvent, Summary, TestMetrics};
use crate::member::Role;
use crate::plan::JobPlan;
use crate::turns::Turns;

/// Members of a role that can be asked for: far beyond what there is, and no slip of the hand.
const MOST_MEMBERS: u32 = 10_000;
/// Throughput is taken over this long.
const THROUGHPUT_WINDOW: Duration = Duration::from_secs(10);

/// One dense worker's share of an evaluation.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Share {
    #[serde(with = "as_bytes::f32s")]
    pub(super) predictions: Vec<f32>,
    #[serde(with = "as_bytes::f32s")]
    pub(super) labels: Vec<f32>,
    #[serde(with = "as_bytes::u64s")]
    pub(super) groups: Vec<u64>,
}

/// An answer to a loader that asks for test data.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum EvaluationLease {
    Chunk { at_step: GlobalStep, chunk: u64, first_batch: u64 },
    Wait,
    Finished,
}

/// An answer to a loader that asks what it has to send again.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Repeated {
    Repeat(Repeat),
    Wait,
    Finished,
}

/// What is known when training has ended.
pub(super) struct Trained {
    pub(super) dense_digest: Vec<u8>,
    pub(super) summary: Summary,
}

#[derive(Debug, Serialize, Deserialize)]
struct Pass {
    source: PassSource,
    /// Its batches go to the embedding workers that there are when it begins.
    turns: Turns,
    data: Announced,
    shares: Vec<Option<Share>>,
}

/// Where the rows of an evaluation are.
#[derive(Debug, Serialize, Deserialize)]
enum PassSource {
    /// The test part, from its first chunk on.
    Test(DataLedger),
    /// One chunk of the training part.
    Slice { chunk: u64, leased: bool },
}

impl PassSource {
    /// The next chunk and its first batch.
    fn lease(&mut self) -> Option<(u64, u64)> {
        match self {
            Self::Test(ledger) => match ledger.lease() {
                Lease::Chunk(lease) => Some((lease.chunk, lease.first_step.0)),
                Lease::Wait | Lease::Finished => None,
            },
            Self::Slice { chunk, leased } => (!std::mem::replace(leased, true)).then_some((*chunk, 0)),
        }
    }
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct DenseWorkerState {
    steps_done: u64,
    running_auc: Option<f64>,
    training_seconds: f64,
    #[serde(with = "as_bytes::optional_message")]
    done: Option<v1::TrainingDone>,
}

/// Whether another number of parameter servers is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Resize {
    No,
    /// So many; not all of them may be there.
    Wanted(u32),
    /// Slots move from so many to so many.
    Moving {
        from: u32,
        to: u32,
    },
}

/// What a command to scale is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ResizeRefused {
    /// There cannot be so many.
    Number(String),
    /// Not now.
    Now(String),
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Labels {
    sum: f64,
    rows: u64,
}

/// What was found in a chunk that a later run may have to read again.
#[derive(Debug, Serialize, Deserialize)]
struct ChunkRead {
    label_sum: f64,
    rows: u64,
    skipped_rows: u64,
}

/// See the module's text.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct State {
    job: JobFacts,
    /// Those in the slot map.
    ps: Vec<Option<String>>,
    /// Those behind them: they hold nothing until slots move to them.
    spare_ps: BTreeMap<u32, String>,
    resize: Resize,
    embedding_workers: Crew,
    dense_workers: Crew,
    loaders: Crew,
    /// The addresses of members of any role that the job goes on without: they are told to end.
    released: BTreeSet<String>,
    /// Whose turn it is among the embedding workers.
    turns: Turns,
    /// Not told yet.
    news: Vec<JobEvent>,
    /// Parameter servers that were restarted and kept their rows.
    server_restarts: u64,
    /// By index: how often a loader took another's place.
    loader_successions: BTreeMap<u32, u32>,
    ledger: DataLedger,
    outstanding: Outstanding,
    training: Training,
    labels: Labels,
    skipped_rows: u64,
    /// By first batch, from the one on that the last checkpoint stood in. Empty without checkpoints.
    reads: BTreeMap<u64, ChunkRead>,
    /// Of the run that this one goes on from.
    applied_before: AppliedGradients,
    seconds_before: f64,
    passes: BTreeMap<GlobalStep, Pass>,
    last_test: Option<(GlobalStep, TestMetrics)>,
    ranks: Vec<DenseWorkerState>,
    samples: u64,
    loss_since_event: (f64, u64),
    last_loss: f64,
    #[serde(skip)]
    throughput: VecDeque<(Instant, u64)>,
    speeds: Speeds,
    /// Name and step of the last one that this run has saved.
    last_checkpoint: Option<(String, u64)>,
    /// Under which servers hold an instant for a checkpoint that is being written.
    #[serde(with = "as_bytes::optional_message")]
    writing: Option<v1::Ticket>,
    /// The slot map in force if it is not the job's first, and how many migrations have begun.
    map: Option<SlotMap>,
    migrations: MigrationId,
    /// What members that have left had sent, by kind of message.
    left_traffic: BTreeMap<String, u64>,
    pub(super) replies: Replies,
    places: Places,
    failure: Option<(String, bool)>,
    ended: bool,
}

/// The few facts of a plan that the state needs.
#[derive(Debug, Serialize, Deserialize)]
struct JobFacts {
    label: String,
    tests_on_the_next_slice: bool,
    data: DataPlan,
    slots: u32,
    has_checkpoints: bool,
    /// Whether it goes on from an earlier run.
    resumes: bool,
}

impl State {
    /// Of a job that nobody has joined yet; it goes on where `saved` stood.
    pub(super) fn new(plan: &JobPlan, saved: Option<&SavedState>) -> Result<Self, RoleError> {
        let replicas = &plan.replicas;
        let data = DataPlan {
            global_batch_rows: plan.global_batch_rows,
            batches_per_chunk: plan.batches_per_chunk,
            length: plan.length,
        };
        let job = JobFacts {
            label: plan.schema.label.name.clone(),
            tests_on_the_next_slice: plan.tests_on_the_next_slice,
            data,
            slots: plan.store.slots,
            has_checkpoints: plan.checkpoint.is_some(),
            resumes: saved.is_some(),
        };
        let ledger = match saved {
            Some(saved) => DataLedger::resume(data, saved.position()).map_err(data_changed)?,
            None => DataLedger::new(data),
        };
        let (label_sum, label_rows) = saved.map_or((0.0, 0), |saved| saved.labels);
        Ok(Self {
            job,
            training: Training::new(plan, saved.map(|saved| (saved, ledger.total_steps())))?,
            ps: vec![None; replicas.ps as usize],
            spare_ps: BTreeMap::new(),
            resize: Resize::No,
            embedding_workers: Crew::new(replicas.embedding_workers),
            dense_workers: Crew::new(replicas.dense_workers),
            loaders: Crew::new(replicas.loaders),
            released: BTreeSet::new(),
            turns: Turns::of(replicas.embedding_workers),
            news: Vec::new(),
            server_restarts: 0,
            loader_successions: BTreeMap::new(),
            ledger,
            outstanding: Outstanding::default(),
            labels: Labels { sum: label_sum, rows: label_rows },
            skipped_rows: saved.map_or(0, |saved| saved.skipped_rows),
            reads: BTreeMap::new(),
            applied_before: saved.map(|saved| saved.applied).unwrap_or_default(),
            seconds_before: saved.map_or(0.0, |saved| saved.training_seconds),
            passes: BTreeMap::new(),
            last_test: saved.and_then(|saved| saved.last_test.clone()).map(|(step, test)| (GlobalStep(step), test)),
            ranks: vec![DenseWorkerState::default(); replicas.dense_workers as usize],
            samples: saved.map_or(0, |saved| saved.samples),
            loss_since_event: (0.0, 0),
            last_loss: 0.0,
            throughput: VecDeque::new(),
            speeds: Speeds::default(),
            last_checkpoint: None,
            writing: None,
            map: None,
            migrations: MigrationId::default(),
            left_traffic: BTreeMap::new(),
            replies: Replies::default(),
            places: Places::default(),
            failure: None,
            ended: false,
        })
    }

    /// Goes on where `saved` stood, nothing having been trained yet. Members and a failure stay.
    pub(super) fn go_on_from(&mut self, plan: &JobPlan, saved: Option<&SavedState>) -> Result<(), RoleError> {
        let fresh = Self::new(plan, saved)?;
        let old = std::mem::replace(self, fresh);
        // Until training has begun nobody takes part who did not from the first.
        self.ps = old.ps;
        self.spare_ps = old.spare_ps;
        self.resize = old.resize;
        self.embedding_workers = old.embedding_workers;
        self.dense_workers = old.dense_workers;
        self.loaders = old.loaders;
        self.loader_successions = old.loader_successions;
        self.released = old.released;
        self.replies = old.replies;
        self.places = old.places;
        self.left_traffic = old.left_traffic;
        self.failure = old.failure;
        Ok(())
    }

    /// At rest: what a run that goes on from here has to know. `applied` is what the servers have applied in this run.
    pub(super) fn save(&mut self, plan: &JobPlan, applied: &[v1::Applied]) -> Result<SavedState, RoleError> {
        let mut saved = SavedState::new(plan, self.training.save()?);
        saved.epoch_rows = self.ledger.epoch_rows();
        let read_again = DataLedger::resume(self.job.data, saved.position())?.next_batch();
        self.reads = self.reads.split_off(&read_again);
        let again = self.reads.values();
        saved.labels = again
            .clone()
            .fold((self.labels.sum, self.labels.rows), |(sum, rows), read| (sum - read.label_sum, rows - read.rows));
        saved.skipped_rows = self.skipped_rows - again.map(|read| read.skipped_rows).sum::<u64>();
        saved.samples = self.samples;
        saved.training_seconds = self.training_seconds();
        saved.last_test = self.last_test.as_ref().map(|(step, test)| (step.0, test.clone()));
        saved.applied = AppliedGradients::of_servers(applied).after(self.applied_before);
        Ok(saved)
    }

    /// What servers of the run that this one goes on from have applied.
    pub(super) fn applied_before(&self) -> AppliedGradients {
        self.applied_before
    }

    /// Wall-clock time in training, that of earlier runs included.
    fn training_seconds(&self) -> f64 {
        self.seconds_before + self.ranks.iter().map(|rank| rank.training_seconds).fold(0.0, f64::max)
    }

    /// Where training stands.
    pub(super) fn training(&mut self) -> &mut Training {
        &mut self.training
    }

    /// How far a worker may fetch that has fetched up to `from`, and was at batch `at` when it asked; `None`: no further yet. It goes on while
    /// it waits for the answer, and tells how far it is.
    pub(super) fn horizon(&mut self, order: u64, from: u64, at: u64) -> Result<Option<v1::Horizon>, RoleError> {
        let at = at.max(self.batches_of_the_slowest());
        let horizon = self.training.horizon(order, from, at)?;
        Ok(horizon.map(|(until, last)| v1::Horizon { until, last, turns: self.turns.write() }))
    }

    /// The first failure is the one that is told.
    pub(super) fn fail(&mut self, message: String, user_error: bool) {
        self.failure.get_or_insert((message, user_error));
    }

    pub(super) fn end(&mut self) {
        self.ended = true;
    }

    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Whether a coordinator that is started again can go on from what this one knew. What it knew of rows that are restored, and of slots
    /// that move, is not all here.
    pub(super) fn may_be_taken_up(&self) -> bool {
        let is_moving = matches!(self.resize, Resize::Moving { .. }) || self.training.slots_are_moving();
        self.failure.is_none() && !self.training.restoring() && !is_moving
    }

    /// A coordinator that was started again goes on from here. Calls to the servers that the one before has made, or has not, are made again.
    pub(super) fn take_up(&mut self) -> Result<(), RoleError> {
        self.training.call_again()
    }

    /// Servers hold an instant for a checkpoint that is being written (its ticket), or hold none any more.
    pub(super) fn set_writing(&mut self, ticket: Option<v1::Ticket>) {
        self.writing = ticket;
    }

    pub(super) fn writing(&self) -> Option<v1::Ticket> {
        self.writing.clone()
    }

    /// The slot map in force, if it is not the job's first.
    pub(super) fn map(&self) -> Option<SlotMap> {
        self.map.clone()
    }

    /// The migration begun last.
    pub(super) fn migrations(&self) -> MigrationId {
        self.migrations
    }

    pub(super) fn migration_begins(&mut self, migration: MigrationId) {
        self.migrations = migration;
    }

    /// A member that was released has left, after it had sent so much.
    pub(super) fn farewell(&mut self, farewell: v1::Farewell) {
        self.released.remove(&farewell.address);
        for (kind, bytes) in farewell.traffic.unwrap_or_default().bytes_sent {
            *self.left_traffic.entry(kind).or_default() += bytes;
        }
    }

    /// What members that have left had sent.
    pub(super) fn left_traffic(&self) -> BTreeMap<String, u64> {
        self.left_traffic.clone()
    }

    pub(super) fn check_failure(&self) -> Result<(), RoleError> {
        match &self.failure {
            Some((message, user_error)) => {
                Err(RoleError::JobFailed { message: message.clone(), user_error: *user_error })
            }
            None => Ok(()),
        }
    }

    /// How the job ended for this member, if it has.
    pub(super) fn member_end(&self, request: &v1::JobEndRequest) -> Option<v1::JobEnd> {
        let is_released = self.released.contains(&request.address);
        self.job_end().or_else(|| is_released.then(|| v1::JobEnd { released: true, ..v1::JobEnd::default() }))
    }

    pub(super) fn job_end(&self) -> Option<v1::JobEnd> {
        match &self.failure {
            Some((message, user_error)) => {
                let (message, user_error) = (message.clone(), *user_error);
                Some(v1::JobEnd { failed: true, message, user_error, released: false })
            }
            None => self.ended.then(v1::JobEnd::default),
        }
    }

    /// Whether another has taken this caller's place: whatever it asks or tells counts for nothing, should it still live.
    pub(super) fn is_superseded(&self, caller: &v1::Caller) -> bool {
        self.places.is_superseded(caller.id)
    }

    /// Gives an event if somebody takes the place of a member that had joined before.
    pub(super) fn join(&mut self, caller: &v1::Caller, request: &v1::Join) -> Result<Option<JobEvent>, RoleError> {
        let all_had_joined = self.roster()?.is_some();
        let role = request.role();
        if let Some(before) = self.places.take(role, request.index, caller.id) {
            self.replies.forget(before);
        }
        if role == v1::Role::Ps && request.index as usize >= self.ps.len() {
            return self.spare_joins(request).map(|()| None);
        }
        // In a cluster a successor has the address of the one before, which is gone.
        self.released.remove(&request.address);
        let joined = match role {
            v1::Role::Ps => match &mut self.ps[request.index as usize] {
                Some(before) => {
                    let same_address = *before == request.address;
                    if !all_had_joined {
                        before.clone_from(&request.address);
                    }
                    Joined::Again { same_address }
                }
                place => {
                    *place = Some(request.address.clone());
                    Joined::Expected
                }
            },
            v1::Role::EmbeddingWorker => self.embedding_workers.join(request.index, &request.address),
            v1::Role::DenseWorker => self.dense_workers.join(request.index, &request.address),
            v1::Role::Loader => self.loaders.join(request.index, &request.address),
            v1::Role::Unspecified | v1::Role::Coordinator => return Err(unexpected_member(request, 0)),
        };
        match joined {
            Joined::Expected => Ok(None),
            Joined::Again { .. } if Role::of(role).is_some_and(Role::has_successors) => {
                Ok(Some(self.rejoined(role, request.index)))
            }
            Joined::Again { .. }
                if role == v1::Role::DenseWorker && all_had_joined && self.replace_dense_worker(request.index) =>
            {
                Ok(Some(self.rejoined(role, request.index)))
            }
            Joined::Again { same_address: true } if request.attempt != 0 && self.server_may_go_on() => {
                self.server_restarts += 1;
                Ok(Some(JobEvent::ServerKeptRows { member: format!("{} {}", role_name(role), request.index) }))
            }
            Joined::Again { .. } if all_had_joined => {
                Err(RoleError::Restarted { member: format!("{} {}", role_name(role), request.index) })
            }
            // Nobody has been given anything.
            Joined::Again { .. } => Ok(None),
            Joined::Instead { of } => {
                self.released.insert(of);
                Ok(None)
            }
            Joined::Unexpected => {
                // It was asked for, and given up before it came.
                self.released.insert(request.address.clone());
                Ok(None)
            }
        }
    }

    /// How many members of a role take part.
    fn present(&self, role: v1::Role) -> u32 {
        match role {
            v1::Role::Ps => self.ps.len() as u32,
            v1::Role::EmbeddingWorker => self.embedding_workers.present(),
            v1::Role::DenseWorker => self.dense_workers.present(),
            v1::Role::Loader => self.loaders.present(),
            v1::Role::Unspecified | v1::Role::Coordinator => 0,
        }
    }

    /// A dense worker has died, and its successor is there; says whether the job goes on with it.
    fn replace_dense_worker(&mut self, index: u32) -> bool {
        let has_done = match self.training.evaluating() {
            Some((_, at_step)) => self.has_predicted(at_step, index),
            None => self.ranks.get(index as usize).is_some_and(|rank| rank.done.is_some()),
        };
        self.training.replace_worker(Rank(index), has_done)
    }

    fn has_predicted(&self, at_step: GlobalStep, rank: u32) -> bool {
        let shares = self.passes.get(&at_step).map(|pass| &pass.shares);
        shares.and_then(|shares| shares.get(rank as usize)).is_none_or(Option::is_some)
    }

    /// A member has died, and its successor is there: what it held is read and sent again.
    fn rejoined(&mut self, role: v1::Role, index: u32) -> JobEvent {
        self.outstanding.trained_before(self.settled_batches());
        let chunks = match role {
            v1::Role::EmbeddingWorker => self.outstanding.embedding_worker_lost(index),
            v1::Role::DenseWorker => match self.training.evaluating() {
                Some((_, at_step)) if !self.has_predicted(at_step, index) => {
                    self.outstanding.predictions_lost(at_step, &self.training.share(Rank(index)))
                }
                _ => 0,
            },
            _ => {
                *self.loader_successions.entry(index).or_default() += 1;
                self.outstanding.loader_lost(index)
            }
        };
        JobEvent::Rejoined { member: format!("{} {index}", role_name(role)), chunks: chunks as u64 }
    }

    /// Whether a parameter server that was restarted and kept its rows lacks nothing: what it knew of slots that move is gone.
    fn server_may_go_on(&self) -> bool {
        let is_moving = matches!(self.resize, Resize::Moving { .. });
        !is_moving && !self.training.restoring()
    }

    pub(super) fn server_restarts(&self) -> u64 {
        self.server_restarts
    }

    /// How often this loader took another's place: who asked before it did is dead.
    pub(super) fn loader_successions(&self, index: u32) -> u32 {
        self.loader_successions.get(&index).copied().unwrap_or(0)
    }

    /// Dense worker `rank`, which has taken another's place, goes on before `batch`: what the one before had trained and not told is counted
    /// (its loss is not known), what it had told and is trained again is not counted twice.
    pub(super) fn goes_on_from(&mut self, rank: Rank, batch: u64, share: &Range<u32>) {
        let first = self.training.current_batch();
        let Some(worker) = self.ranks.get_mut(rank.0 as usize) else { return };
        let told = std::mem::replace(&mut worker.steps_done, batch).max(first);
        let rows = |batches: Range<u64>| -> u64 {
            batches.map(|batch| self.training.rows_of_share(batch, share.clone())).sum()
        };
        self.samples = (self.samples + rows(told..batch)).saturating_sub(rows(batch..told));
    }

    /// What `loader` has to read and send again.
    pub(super) fn repeat(&mut self, loader: u32) -> Repeated {
        if self.leaves(loader) {
            return Repeated::Finished;
        }
        let repeat = if self.outstanding.has_repeats() && self.takes_part(loader) {
            let trained = self.settled_batches();
            self.outstanding.repeat(loader, trained)
        } else {
            None
        };
        match repeat {
            Some(repeat) => Repeated::Repeat(repeat),
            None if self.all_trained() => Repeated::Finished,
            None => Repeated::Wait,
        }
    }

    fn all_trained(&self) -> bool {
        self.ranks.iter().all(|rank| rank.done.is_some())
    }

    /// Whether this loader is given nothing any more: it ends when everything it was given is trained.
    fn leaves(&self, loader: u32) -> bool {
        loader >= self.loaders.wanted()
    }

    /// One that is still to take part may be given up, and is given nothing until then.
    fn takes_part(&self, loader: u32) -> bool {
        loader < self.loaders.present()
    }

    /// Where the embedding workers and the dense workers are, once all have joined.
    pub(super) fn workers(&self) -> (Vec<String>, Vec<String>) {
        (self.embedding_workers.all().unwrap_or_default(), self.dense_workers.all().unwrap_or_default())
    }

    /// A parameter server that is in no map yet.
    fn spare_joins(&mut self, request: &v1::Join) -> Result<(), RoleError> {
        if request.index >= u32::from(u16::MAX) {
            return Err(unexpected_member(request, self.ps.len() as u32));
        }
        let before = self.spare_ps.insert(request.index, request.address.clone());
        if before.is_some() && matches!(self.resize, Resize::Moving { .. }) {
            return Err(RoleError::Restarted { member: format!("ps {}", request.index) });
        }
        self.released.remove(&request.address);
        Ok(())
    }

    /// There are to be so many members of a role; gives how many there are, and whether that was not asked for before.
    pub(super) fn request_members(&mut self, role: Role, members: u32) -> Result<(u32, bool), ResizeRefused> {
        if role == Role::Ps {
            return self.request_servers(members);
        }
        if members == 0 || members > MOST_MEMBERS {
            return Err(ResizeRefused::Number(format!(
                "a job has 1 to {MOST_MEMBERS} members of a role, not {members}"
            )));
        }
        self.check_scalable()?;
        if role == Role::DenseWorker {
            self.training.check_workers(members).map_err(ResizeRefused::Number)?;
            if self.training.is_regrouping() {
                return Err(ResizeRefused::Now("training is about to go on with other dense workers".to_owned()));
            }
        }
        let name = role.plural();
        let crew = self.crew_mut(role);
        let present = crew.present();
        if crew.wanted() == members {
            return Ok((present, false));
        }
        if crew.wanted() > present && members > present {
            return Err(ResizeRefused::Now(format!(
                "{} of {} {name} have not joined yet: ask again when they have, or for {present} to give that up",
                crew.missing(),
                crew.wanted(),
            )));
        }
        if crew.wanted() < present && members > crew.wanted() {
            return Err(ResizeRefused::Now(format!(
                "{} {name} are leaving: ask again when they have left",
                present - crew.wanted()
            )));
        }
        let given_up = crew.want(members);
        self.released.extend(given_up);
        if role == Role::DenseWorker {
            self.training.want_workers(None);
        }
        Ok((present, true))
    }

    fn crew_mut(&mut self, role: Role) -> &mut Crew {
        match role {
            Role::DenseWorker => &mut self.dense_workers,
            Role::Loader => &mut self.loaders,
            Role::EmbeddingWorker | Role::Ps => &mut self.embedding_workers,
        }
    }

    fn check_scalable(&self) -> Result<(), ResizeRefused> {
        self.check_failure().map_err(|failure| ResizeRefused::Now(failure.to_string()))?;
        if self.training.ended() {
            return Err(ResizeRefused::Now("training has ended".to_owned()));
        }
        Ok(())
    }

    fn request_servers(&mut self, servers: u32) -> Result<(u32, bool), ResizeRefused> {
        let slots = self.job.slots;
        if servers == 0 || servers > slots {
            return Err(ResizeRefused::Number(format!(
                "a job has 1 to {slots} parameter servers, because that is how many slots its rows are divided into, not {servers}"
            )));
        }
        self.check_scalable()?;
        let from = self.ps.len() as u32;
        match self.resize {
            Resize::Moving { .. } => {
                return Err(ResizeRefused::Now(
                    "slots are moving already: ask again when they have settled".to_owned(),
                ));
            }
            Resize::Wanted(before) if before == servers => return Ok((from, false)),
            Resize::Wanted(before) if before > from && servers > from => {
                return Err(ResizeRefused::Now(format!(
                    "{} of {before} parameter servers have not joined yet: ask again when they have, or for {from} to give that up",
                    (from..before).filter(|index| !self.spare_ps.contains_key(index)).count()
                )));
            }
            Resize::No | Resize::Wanted(_) => self.resize = Resize::Wanted(servers),
        }
        Ok((from, true))
    }

    /// How many servers there are to be and where all of them are, as soon as they are there.
    pub(super) fn resize_to_begin(&mut self) -> Result<Option<(u32, Vec<String>)>, RoleError> {
        let Resize::Wanted(servers) = self.resize else { return Ok(None) };
        if self.training.restoring() || self.training.ended() {
            return Ok(None);
        }
        let joining = (self.ps.len() as u32..servers).map(|index| self.spare_ps.get(&index).cloned());
        let addresses: Option<Vec<String>> = self.ps.iter().cloned().chain(joining).collect();
        if addresses.is_some() {
            self.resize = Resize::Moving { from: self.ps.len() as u32, to: servers };
        }
        Ok(addresses.map(|addresses| (servers, addresses)))
    }

    /// Slots are on just these servers; `applied` is what the servers before have applied since they were last asked.
    pub(super) fn servers_changed(&mut self, map: SlotMap, addresses: &[String], applied: &[v1::Applied]) {
        self.map = Some(map);
        self.applied_before = AppliedGradients::of_servers(applied).after(self.applied_before);
        self.ps = addresses.iter().cloned().map(Some).collect();
        self.spare_ps.retain(|index, _| *index as usize >= addresses.len());
    }

    pub(super) fn resize_ended(&mut self) {
        self.resize = Resize::No;
    }

    /// How many members of a role there are, there are to be, and there have to be until then.
    fn replicas(&self, role: Role) -> v1::RoleReplicas {
        let present = self.present(role.proto());
        let crew = match role {
            Role::Ps => {
                let (wanted, needed) = match self.resize {
                    Resize::No => (present, present),
                    Resize::Wanted(wanted) => (wanted, present.max(wanted)),
                    Resize::Moving { from, to } => (to, from.max(to)),
                };
                return v1::RoleReplicas { role: role.proto().into(), present, wanted, needed };
            }
            Role::EmbeddingWorker => &self.embedding_workers,
            Role::DenseWorker => &self.dense_workers,
            Role::Loader => &self.loaders,
        };
        v1::RoleReplicas { role: role.proto().into(), present, wanted: crew.wanted(), needed: crew.needed() }
    }

    /// A server ends that no slot was given to yet; gives whether that is what it was.
    pub(super) fn spare_leaves(&mut self, index: u32) -> bool {
        let holds_nothing = index as usize >= self.ps.len() && !matches!(self.resize, Resize::Moving { .. });
        if holds_nothing {
            self.spare_ps.remove(&index);
        }
        holds_nothing
    }

    /// A member that holds nothing any more may end.
    pub(super) fn release(&mut self, address: &str) {
        self.released.insert(address.to_owned());
    }

    /// Whether all have that may.
    pub(super) fn all_have_left(&self) -> bool {
        self.released.is_empty()
    }

    /// Everybody's address, once all have joined.
    pub(super) fn roster(&mut self) -> Result<Option<v1::Roster>, RoleError> {
        let roster = (|| {
            Some(v1::Roster {
                ps: self.ps.iter().cloned().collect::<Option<_>>()?,
                embedding_workers: self.embedding_workers.all()?,
                dense_workers: self.dense_workers.all()?,
                loaders: self.loaders.all()?,
                ..v1::Roster::default()
            })
        })();
        Ok(roster)
    }

    /// After every change: what follows from where training stands. Gives what there is to tell.
    pub(super) fn follow_training(&mut self) -> Vec<JobEvent> {
        self.regroup_dense_workers();
        self.begin_ordered_evaluation();
        if self.embedding_workers.is_settled() && self.loaders.is_settled() && self.dense_workers.is_settled() {
            return std::mem::take(&mut self.news);
        }
        if !self.training.restoring() && matches!(self.roster(), Ok(Some(_))) {
            self.change_embedding_workers();
            self.change_loaders();
            if self.dense_workers.can_grow() || self.dense_workers.wanted() < self.dense_workers.present() {
                self.training.want_workers(Some(self.dense_workers.wanted()));
                if let Err(error) = self.training.advance() {
                    self.fail(error.to_string(), error.is_user_error());
                }
            }
        }
        std::mem::take(&mut self.news)
    }

    /// Batches that no loader has been given yet go to as many embedding workers as there are to be. Those that leave hold what they
    /// were given until it is trained.
    fn change_embedding_workers(&mut self) {
        let from = self.embedding_workers.present();
        if self.embedding_workers.can_grow() {
            self.embedding_workers.grow();
        }
        let to = self.embedding_workers.wanted();
        if to <= self.embedding_workers.present() && to != self.turns.last() {
            self.turns.change(self.ledger.next_batch(), to);
        }
        let settled = self.settled_batches();
        let evaluated = self.passes.values().map(|pass| pass.turns.last()).max().unwrap_or(0);
        let held = self.turns.most_from(settled).max(evaluated);
        if held < self.embedding_workers.present() && to < self.embedding_workers.present() {
            let left = self.embedding_workers.shrink(held.max(to));
            self.released.extend(left);
        }
        self.tell_scaled(Role::EmbeddingWorker, from);
    }

    /// Loaders that leave are given nothing, and end when everything they have sent is trained.
    fn change_loaders(&mut self) {
        let from = self.loaders.present();
        if self.loaders.can_grow() {
            self.loaders.grow();
        }
        if self.loaders.wanted() < self.loaders.present() {
            self.outstanding.trained_before(self.settled_batches());
            let needed = self.outstanding.loaders_needed().max(self.loaders.wanted());
            let left = self.loaders.shrink(needed);
            self.released.extend(left);
        }
        self.tell_scaled(Role::Loader, from);
    }

    /// Training has taken dense workers in, or goes on without some.
    fn regroup_dense_workers(&mut self) {
        let (from, to) = (self.dense_workers.present(), self.training.workers());
        if from == to {
            return;
        }
        if to > from {
            self.dense_workers.grow();
        } else {
            let left = self.dense_workers.shrink(to);
            self.released.extend(left);
        }
        self.ranks.resize_with(to as usize, DenseWorkerState::default);
        self.speeds.keep(to as usize);
        self.tell_scaled(Role::DenseWorker, from);
    }

    fn tell_scaled(&mut self, role: Role, from: u32) {
        let to = self.present(role.proto());
        if from != to {
            self.news.push(JobEvent::Scaled { role, from, to });
        }
    }

    /// The next chunk, and what loaders leave out at its beginning: batches, and pieces of the batch after those.
    pub(super) fn lease(&mut self, loader: u32) -> (Lease, (u64, u32)) {
        if self.leaves(loader) {
            return (Lease::Finished, (0, 0));
        }
        if self.training.restoring() || !self.takes_part(loader) {
            return (Lease::Wait, (0, 0));
        }
        let lease = self.ledger.lease();
        let Lease::Chunk(chunk) = lease else { return (lease, (0, 0)) };
        let skip = self.training.trained_before(chunk.first_step.0);
        self.outstanding.trained_before(self.settled_batches());
        self.outstanding.give(Given::Train { lease: chunk, skip }, loader);
        (lease, skip)
    }

    /// Whose turn it is among the embedding workers, in training and in the evaluation at a step.
    pub(super) fn turns(&self, evaluation: Option<GlobalStep>) -> &Turns {
        let pass = evaluation.and_then(|at_step| self.passes.get(&at_step));
        pass.map_or(&self.turns, |pass| &pass.turns)
    }

    pub(super) fn total_steps(&self) -> Option<GlobalStep> {
        self.ledger.total_steps()
    }

    pub(super) fn chunk_report(&mut self, report: &v1::ChunkReport) -> Result<(), RoleError> {
        if self.outstanding.was_read(report.epoch, report.chunk) {
            // By a loader that has died since, or by its successor.
            return Ok(());
        }
        let resumes = self.job.resumes;
        let lease = self.ledger.report(report.epoch, report.chunk, report.rows).map_err(|error| match error {
            LedgerError::DataChanged { .. } if resumes => data_changed(error),
            error => no_rows("train")(error),
        })?;
        self.outstanding.read(report.epoch, report.chunk);
        let rows = report.rows.min(lease.max_batches * self.job.data.global_batch_rows);
        if rows > 0 {
            self.training.data_mut().add(Chunk { epoch: lease.epoch, first_batch: lease.first_step.0, rows });
        }
        if let Some(total) = self.ledger.total_steps() {
            self.training.data_mut().end(total.0);
        }
        self.training.advance()?;
        if self.job.has_checkpoints {
            let v1::ChunkReport { label_sum, rows, skipped_rows, .. } = *report;
            self.reads.insert(lease.first_step.0, ChunkRead { label_sum, rows, skipped_rows });
        }
        self.skipped_rows += report.skipped_rows;
        self.labels.sum += report.label_sum;
        self.labels.rows += report.rows;
        let first_epoch_read = self.ledger.epoch_rows().is_some() && self.ledger.on_lease() == 0;
        if first_epoch_read { self.check_labels() } else { Ok(()) }
    }

    /// A label that never varies cannot be learned: most likely the wrong column.
    fn check_labels(&self) -> Result<(), RoleError> {
        let Labels { sum, rows } = self.labels;
        let value = match rows {
            0 => return Ok(()),
            _ if sum <= 0.0 => 0,
            rows if sum >= rows as f64 => 1,
            _ => return Ok(()),
        };
        Err(RoleError::Input(format!(
            "the label `{}` is {value} in all {rows} rows of training data that were read, so there is nothing to learn: is spec.features.label the right column?",
            self.job.label
        )))
    }

    /// Opens the data of an evaluation that has just been ordered, if one has.
    fn begin_ordered_evaluation(&mut self) {
        let Some(at_step) = self.training.evaluation_to_begin() else { return };
        let plan = DataPlan { length: TrainingLength::Epochs(1), ..self.job.data };
        let source = if self.job.tests_on_the_next_slice {
            let chunk = self.training.current_batch() / plan.batches_per_chunk;
            PassSource::Slice { chunk, leased: false }
        } else {
            PassSource::Test(DataLedger::new(plan))
        };
        let shares = (0..self.ranks.len()).map(|_| None).collect();
        let turns = Turns::of(self.turns.last());
        self.passes.insert(at_step, Pass { source, turns, data: Announced::new(plan.global_batch_rows), shares });
    }

    pub(super) fn evaluation_lease(&mut self, loader: u32) -> EvaluationLease {
        if self.leaves(loader) {
            return EvaluationLease::Finished;
        }
        if !self.takes_part(loader) {
            return EvaluationLease::Wait;
        }
        for (at_step, pass) in &mut self.passes {
            let Some((chunk, first_batch)) = pass.source.lease() else { continue };
            let at_step = *at_step;
            self.outstanding.give(Given::Evaluation { at_step, chunk, first_batch }, loader);
            return EvaluationLease::Chunk { at_step, chunk, first_batch };
        }
        if self.all_trained() { EvaluationLease::Finished } else { EvaluationLease::Wait }
    }

    pub(super) fn evaluation_chunk_report(&mut self, report: &v1::EvaluationChunkReport) -> Result<(), RoleError> {
        let at_step = GlobalStep(report.at_step);
        let is_over = self.last_test.as_ref().is_some_and(|(last, _)| *last >= at_step);
        let pass = match self.passes.get_mut(&at_step) {
            Some(pass) => pass,
            // A chunk behind the end of the data, which has none of the rows that everybody has predicted meanwhile.
            None if is_over => return Ok(()),
            None => return Err(unknown_evaluation("evaluation_chunk_report", at_step)),
        };
        let (first_batch, total) = match &mut pass.source {
            PassSource::Test(ledger) => {
                let lease = ledger.report(0, report.chunk, report.rows).map_err(no_rows("test"))?;
                (lease.first_step.0, ledger.total_steps().map(|steps| steps.0))
            }
            PassSource::Slice { .. } => (0, Some(report.rows.div_ceil(self.job.data.global_batch_rows))),
        };
        self.outstanding.read_for_evaluation(at_step, report.chunk);
        if report.rows > 0 {
            pass.data.add(Chunk { epoch: 0, first_batch, rows: report.rows });
        }
        if let Some(total) = total {
            pass.data.end(total);
        }
        if self.last_test.is_none() {
            self.skipped_rows += report.skipped_rows;
        }
        Ok(())
    }

    /// How many batches of the evaluation under way may be fetched, where `from` are known already; `None`: no more yet.
    pub(super) fn evaluation_horizon(&self, at_step: GlobalStep, from: u64) -> Result<Option<v1::Horizon>, RoleError> {
        let pass = self.passes.get(&at_step).ok_or_else(|| unknown_evaluation("horizon", at_step))?;
        let Pass { data, turns, .. } = pass;
        let horizon = v1::Horizon { until: data.batches(), last: data.complete(), turns: turns.write() };
        Ok((horizon.until > from || horizon.last).then_some(horizon))
    }

    /// Takes one worker's predictions; the last share gives the evaluation's event.
    pub(super) fn evaluation_share(
        &mut self,
        at_step: GlobalStep,
        rank: Rank,
        share: Share,
    ) -> Result<Vec<JobEvent>, RoleError> {
        let pass = self.passes.get_mut(&at_step).ok_or_else(|| unknown_evaluation("evaluation_share", at_step))?;
        match pass.shares.get_mut(rank.0 as usize) {
            Some(place) if place.is_none() => *place = Some(share),
            _ => {
                let reason = format!("dense worker {rank} is unknown or has sent its share of step {at_step} before");
                return Err(RoleError::Inconsistent { message: "evaluation_share", reason });
            }
        }
        if pass.shares.iter().any(Option::is_none) {
            return Ok(Vec::new());
        }
        let shares = self.passes.remove(&at_step).into_iter().flat_map(|pass| pass.shares).flatten().collect();
        self.outstanding.evaluated(at_step);
        let test = test_metrics(shares);
        let mut events = Vec::new();
        if test.auc.is_none() {
            events.push(JobEvent::Warning {
                message: format!("the test AUC is undefined: all {} test rows have the same label", test.samples),
            });
        }
        events.push(JobEvent::Evaluation { step: at_step.0, test: test.clone() });
        self.last_test = Some((at_step, test));
        Ok(events)
    }

    /// Takes one worker's progress; gives an event for whoever follows the job.
    pub(super) fn progress(&mut self, report: &v1::Progress) -> Result<Option<JobEvent>, RoleError> {
        let rank = self.rank_mut("progress", report.rank)?;
        rank.steps_done = rank.steps_done.max(report.steps_done);
        rank.running_auc = report.running_auc;
        rank.training_seconds = report.training_seconds;
        self.speeds.take(report);
        // Without a barrier each batch is reported by itself.
        if self.training.mode().has_barrier() {
            self.samples += report.samples;
        }
        self.loss_since_event.0 += report.loss_sum;
        self.loss_since_event.1 += report.samples;
        self.note_throughput(Instant::now());
        self.training.keep_pace(self.samples_per_second() / self.job.data.global_batch_rows.max(1) as f64);
        if report.rank != 0 || self.loss_since_event.1 == 0 {
            return Ok(None);
        }
        let (loss, samples) = std::mem::take(&mut self.loss_since_event);
        self.last_loss = loss / samples as f64;
        Ok(Some(JobEvent::Progress {
            step: self.step(),
            total_steps: self.total_steps().map(|steps| steps.0),
            samples: self.samples,
            samples_per_second: self.samples_per_second(),
            loss: self.last_loss,
            running_auc: self.running_auc(),
        }))
    }

    /// What became of a batch without a barrier.
    pub(super) fn batch_report(&mut self, report: &v1::BatchReport) -> Result<(), RoleError> {
        self.samples += u64::from(report.rows);
        self.training.batch_report(report)
    }

    pub(super) fn training_done(&mut self, done: v1::TrainingDone) -> Result<(), RoleError> {
        if !self.training.ended() {
            let reason = format!("dense worker {} has ended before training has", done.rank);
            return Err(RoleError::Inconsistent { message: "training_done", reason });
        }
        let rank = self.rank_mut("training_done", done.rank)?;
        rank.done = Some(done);
        Ok(())
    }

    /// The result, once every dense worker is done.
    pub(super) fn trained(&mut self) -> Result<Option<Trained>, RoleError> {
        let Some(done) = self.ranks.iter().map(|rank| rank.done.as_ref()).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        self.check_labels()?;
        let first = done.first().ok_or(RoleError::Stopped)?;
        // The others have waited for a mode without a barrier.
        let mut in_step = done.iter().take(self.training.barrier_workers() as usize);
        if let Some(other) = in_step.find(|other| other.parameters_sha256 != first.parameters_sha256) {
            return Err(RoleError::Diverged { rank: other.rank });
        }
        let seconds = self.training_seconds();
        let summary = Summary {
            test: self.last_test.as_ref().map(|(_, test)| test.clone()),
            steps: first.steps,
            samples: self.samples,
            seconds,
            samples_per_second: if seconds > 0.0 { self.samples as f64 / seconds } else { 0.0 },
            mode: self.training.mode().name().to_owned(),
            mode_switches: self.training.counts().switches,
            trained_rows: self.training.trained_rows(),
            dropped_batches: self.training.counts().dropped_batches,
            tokens_issued: self.training.counts().issued,
            tokens_lost: self.training.counts().lost,
            skipped_rows: self.skipped_rows,
            ..Summary::default()
        };
        Ok(Some(Trained { dense_digest: first.parameters_sha256.clone(), summary }))
    }

    pub(super) fn status(&mut self) -> v1::JobStatus {
        let joined = matches!(self.roster(), Ok(Some(_)));
        let phase = match (&self.failure, self.ended, joined) {
            (Some(_), _, _) => v1::Phase::Failed,
            (None, true, _) => v1::Phase::Complete,
            (None, false, false) => v1::Phase::Starting,
            (None, false, true) if !self.passes.is_empty() => v1::Phase::Evaluating,
            (None, false, true) => v1::Phase::Training,
        };
        let replicas = Role::ALL.map(|role| self.replicas(role)).to_vec();
        v1::JobStatus {
            phase: phase.into(),
            mode: self.training.mode().name().to_owned(),
            step: self.step(),
            total_steps: self.total_steps().map_or(0, |steps| steps.0),
            samples: self.samples,
            samples_per_second: self.samples_per_second(),
            loss: self.last_loss,
            auc: match &self.last_test {
                Some((_, test)) => test.auc,
                None => self.running_auc(),
            },
            message: self.failure.as_ref().map(|(message, _)| message.clone()).unwrap_or_default(),
            ps: self.ps.len() as u32,
            map_epoch: self.training.map_epoch(),
            replicas,
            workers: self.speeds.workers(),
            all_reduce_seconds: self.speeds.all_reduce_seconds().unwrap_or(0.0),
            last_checkpoint: self.last_checkpoint.as_ref().map(|(name, _)| name.clone()).unwrap_or_default(),
            last_checkpoint_step: self.last_checkpoint.as_ref().map_or(0, |(_, step)| *step),
        }
    }

    /// A checkpoint exists.
    pub(super) fn saved(&mut self, checkpoint: &str, step: u64) {
        self.last_checkpoint = Some((checkpoint.to_owned(), step));
    }

    /// Global batches that are trained.
    pub(super) fn step(&self) -> u64 {
        self.training.batches_done(self.batches_of_the_slowest())
    }

    /// All global batches before this one are trained, and their gradients applied.
    fn settled_batches(&self) -> u64 {
        self.training.settled_batches(self.batches_of_the_slowest())
    }

    /// Of the workers with a barrier.
    fn batches_of_the_slowest(&self) -> u64 {
        self.ranks.iter().take(self.training.barrier_workers() as usize).map(|rank| rank.steps_done).min().unwrap_or(0)
    }

    /// Mean over the dense workers that have one.
    fn running_auc(&self) -> Option<f64> {
        let known: Vec<f64> = self.ranks.iter().filter_map(|rank| rank.running_auc).collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
    }

    fn note_throughput(&mut self, now: Instant) {
        self.throughput.push_back((now, self.samples));
        while self.throughput.len() > 2
            && self.throughput.front().is_some_and(|(then, _)| now.duration_since(*then) > THROUGHPUT_WINDOW)
        {
            self.throughput.pop_front();
        }
    }

    fn samples_per_second(&self) -> f64 {
        match (self.throughput.front(), self.throughput.back()) {
            (Some((from, before)), Some((to, after))) if to > from => {
                (after - before) as f64 / to.duration_since(*from).as_secs_f64()
            }
            _ => 0.0,
        }
    }

    fn rank_mut(&mut self, what: &'static str, rank: u32) -> Result<&mut DenseWorkerState, RoleError> {
        let ranks = self.ranks.len();
        self.ranks.get_mut(rank as usize).ok_or_else(|| RoleError::Inconsistent {
            message: what,
            reason: format!("dense worker {rank} is not one of {ranks}"),
        })
    }
}

fn test_metrics(shares: Vec<Share>) -> TestMetrics {
    let mut all = metrics::Evaluation::default();
    let (mut predictions, mut labels, mut groups) = (Vec::new(), Vec::new(), Vec::new());
    for share in shares {
        all.push(&share.predictions, &share.labels);
        if !share.groups.is_empty() {
            predictions.extend(share.predictions);
            labels.extend(share.labels);
            groups.extend(share.groups);
        }
    }
    let summary = all.finish();
    TestMetrics {
        auc: summary.auc,
        gauc: if groups.is_empty() { None } else { metrics::gauc(&predictions, &labels, &groups) },
        log_loss: summary.log_loss,
        normalized_entropy: summary.normalized_entropy,
        calibration: summary.calibration,
        samples: summary.samples,
    }
}

fn no_rows(part: &'static str) -> impl Fn(LedgerError) -> RoleError {
    move |error| match error {
        LedgerError::NoRows => RoleError::Input(format!("the {part} data has no rows: check spec.data")),
        other => RoleError::Ledger(other),
    }
}

/// The data is not what it was when the checkpoint was written.
fn data_changed(error: LedgerError) -> RoleError {
    RoleError::Input(format!("spec.data: {error}: is it the data that the checkpoint was trained on?"))
}

fn unexpected_member(request: &v1::Join, replicas: u32) -> RoleError {
    let reason = format!(
        "{:?} {} at {} is not expected: the job has {replicas} of them, each at one address",
        request.role(),
        request.index,
        request.address
    );
    RoleError::Inconsistent { message: "join", reason }
}

/// As commands, metrics and pods call it.
fn role_name(role: v1::Role) -> &'static str {
    Role::of(role).map_or("coordinator", Role::name)
}

fn unknown_evaluation(what: &'static str, at_step: GlobalStep) -> RoleError {
    RoleError::Inconsistent { message: what, reason: format!("no evaluation stands at step {at_step}") }
}
