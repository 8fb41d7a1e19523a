//! What the coordinator knows, and how each message changes it. No waiting and no sending happens here.

mod data;
mod evaluation;
mod members;
mod progress;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use rectrain_modes::migration::{MigrationId, SlotMap};
use rectrain_modes::{DataLedger, DataPlan, GlobalStep};
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

pub(super) use self::data::Repeated;
use self::data::{ChunkRead, Labels, data_changed};
use self::evaluation::Pass;
pub(super) use self::evaluation::{EvaluationLease, Part};
pub(super) use self::members::ResizeRefused;
use self::progress::DenseWorkerState;
use super::as_bytes;
use super::crew::Crew;
use super::outstanding::Outstanding;
use super::places::Places;
use super::replies::Replies;
use super::saved::{AppliedGradients, SavedState};
use super::servers::Servers;
use super::speeds::Speeds;
use super::training::Training;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{JobEvent, TestMetrics};
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::round_robin::Turns;

/// Members of a role that can be asked for: far beyond what there is, and no slip of the hand.
const MOST_MEMBERS: u32 = 10_000;
/// Throughput is taken over this long.
const THROUGHPUT_WINDOW: Duration = Duration::from_secs(10);

/// See the module's text.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct State {
    job: JobFacts,
    servers: Servers,
    /// When the newest decision to spread the slots over as many servers was made that was agreed to, in seconds since 1970.
    slots_decided_seconds: u64,
    embedding_workers: Crew,
    dense_workers: Crew,
    loaders: Crew,
    /// The addresses of members of any role that the job goes on without: they are told to end.
    released: BTreeSet<String>,
    /// Dense workers that were told to end, and in whose places nobody has trained yet; whether somebody is in it.
    leaving_dense_workers: BTreeMap<u32, bool>,
    /// All members may end as they like, because the coordinator does.
    all_may_leave: bool,
    /// Whose turn it is among the embedding workers.
    turns: Turns,
    /// Not told yet.
    news: Vec<JobEvent>,
    /// Parameter servers that were restarted and kept their rows.
    server_restarts: u64,
    /// By index: how often a loader took another's place.
    loader_successions: BTreeMap<u32, u32>,
    /// How often any embedding worker did.
    embedding_worker_successions: u64,
    ledger: DataLedger,
    /// How many files the first loader has found to train on, and their digest.
    files: Option<(u64, u64)>,
    outstanding: Outstanding,
    training: Training,
    labels: Labels,
    skipped_rows: u64,
    /// By first batch, from the one on in which a checkpoint may still stand. Empty without checkpoints.
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
    /// When a step, a batch without a barrier, a part of an evaluation, or a part of what servers are waited for was last heard to be done.
    #[serde(skip, default = "Instant::now")]
    progressed: Instant,
    speeds: Speeds,
    /// Name and step of the last one that this run has saved.
    last_checkpoint: Option<(String, u64)>,
    /// Under which servers hold an instant for a checkpoint that is being written.
    #[serde(with = "as_bytes::optional_message")]
    writing: Option<v1::Ticket>,
    /// The slot map in force if it is not the job's first, and how many migrations have begun.
    map: Option<SlotMap>,
    migrations: MigrationId,
    /// Checkpoints that were found damaged, by name.
    passed_over: Vec<String>,
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
            servers: Servers::new(replicas.ps, plan.store.slots),
            slots_decided_seconds: 0,
            embedding_workers: Crew::new(replicas.embedding_workers),
            dense_workers: Crew::new(replicas.dense_workers),
            loaders: Crew::new(replicas.loaders),
            released: BTreeSet::new(),
            leaving_dense_workers: BTreeMap::new(),
            all_may_leave: false,
            turns: Turns::of(replicas.embedding_workers),
            news: Vec::new(),
            server_restarts: 0,
            loader_successions: BTreeMap::new(),
            embedding_worker_successions: 0,
            ledger,
            files: None,
            outstanding: Outstanding::of_chunks(plan.batches_per_chunk),
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
            progressed: Instant::now(),
            speeds: Speeds::default(),
            last_checkpoint: None,
            writing: None,
            map: None,
            migrations: MigrationId::default(),
            passed_over: Vec::new(),
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
        self.servers = old.servers;
        self.embedding_workers = old.embedding_workers;
        self.dense_workers = old.dense_workers;
        self.loaders = old.loaders;
        self.loader_successions = old.loader_successions;
        self.embedding_worker_successions = old.embedding_worker_successions;
        self.leaving_dense_workers = old.leaving_dense_workers;
        self.all_may_leave = old.all_may_leave;
        self.released = old.released;
        self.replies = old.replies;
        self.places = old.places;
        self.left_traffic = old.left_traffic;
        self.files = old.files;
        self.failure = old.failure;
        Ok(())
    }

    /// At rest: what a run that goes on from here has to know. `applied` is what the servers have applied in this run.
    pub(super) fn save(&mut self, plan: &JobPlan, applied: &[v1::Applied]) -> Result<SavedState, RoleError> {
        let mut saved = SavedState::new(plan, self.training.save()?);
        saved.epoch_rows = self.ledger.epoch_rows();
        self.forget_reads_before(saved.position())?;
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

    /// The first failure is the one that is told. What fails behind the last step has not cost the model.
    pub(super) fn fail(&mut self, message: String, user_error: bool) {
        if self.failure.is_none() {
            let saved = self.last_of_all().map(|name| format!(" (the trained model is in checkpoint {name})"));
            self.failure = Some((message + &saved.unwrap_or_default(), user_error));
        }
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
        let is_moving = self.servers.is_moving() || self.training.slots_are_moving();
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

    /// Whoever takes the coordinator's place has to know which checkpoints are damaged.
    pub(super) fn set_passed_over(&mut self, checkpoints: &[String]) {
        self.passed_over = checkpoints.to_vec();
    }

    pub(super) fn passed_over(&self) -> &[String] {
        &self.passed_over
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

    /// How the job ended for this member, if it has. Whoever is about to take the place of one that was told to end may ask before it joins.
    pub(super) fn member_end(&self, caller: &v1::Caller, request: &v1::JobEndRequest) -> Option<v1::JobEnd> {
        let has_place = self.places.has(request.role(), request.index, caller.id);
        let is_released = has_place && self.released.contains(&request.address);
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
}
