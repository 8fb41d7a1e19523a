//! What the coordinator knows, and how each message changes it. No waiting and no sending happens here.

mod data;
mod evaluation;
mod members;
mod progress;

use std::collections::BTreeMap;
use std::time::Duration;

use rectrain_modes::migration::{MigrationId, SlotMap};
use rectrain_modes::{DataLedger, DataPlan};
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

pub(super) use self::data::Repeated;
use self::data::{Data, data_changed};
use self::evaluation::Evaluations;
pub(super) use self::evaluation::{EvaluationLease, Part};
use self::members::Members;
pub(super) use self::members::ResizeRefused;
use self::progress::Progress;
use super::as_bytes;
use super::replies::Replies;
use super::saved::{AppliedGradients, SavedState};
use super::training::Training;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::plan::JobPlan;

/// Members of a role that can be asked for: far beyond what there is, and no slip of the hand.
const MOST_MEMBERS: u32 = 10_000;
/// Throughput is taken over this long.
const THROUGHPUT_WINDOW: Duration = Duration::from_secs(10);

/// See the module's text. Each part has a file of its own that says how messages change it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct State {
    job: JobFacts,
    members: Members,
    data: Data,
    training: Training,
    evaluation: Evaluations,
    progress: Progress,
    checkpoints: Checkpoints,
    slots: Slots,
    pub(super) replies: Replies,
    end: End,
    /// Events that are not reported yet.
    news: Vec<JobEvent>,
}

/// The checkpoints of this run.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Checkpoints {
    /// Name and step of the newest one that this run has saved or restored.
    last: Option<(String, u64)>,
    /// The ticket under which servers hold an instant for a checkpoint that is being written.
    #[serde(with = "as_bytes::optional_message")]
    writing: Option<v1::Ticket>,
    /// Names of the checkpoints that were found damaged.
    passed_over: Vec<String>,
}

/// Where the slots are.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Slots {
    /// The slot map in force, unless it is the job's first.
    map: Option<SlotMap>,
    /// The migration that began last.
    migrations: MigrationId,
}

/// How the job ended.
#[derive(Debug, Default, Serialize, Deserialize)]
struct End {
    /// The first failure, and whether the user's input is at fault.
    failure: Option<(String, bool)>,
    has_ended: bool,
    /// Bytes sent by members that have left, by kind of message.
    traffic: BTreeMap<String, u64>,
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
        Ok(Self {
            job,
            training: Training::new(plan, saved.map(|saved| (saved, ledger.total_steps())))?,
            members: Members::new(replicas, plan.store.slots),
            data: Data::new(plan, ledger, saved),
            evaluation: Evaluations::new(saved),
            progress: Progress::new(replicas.dense_workers, saved),
            checkpoints: Checkpoints::default(),
            slots: Slots::default(),
            replies: Replies::default(),
            end: End::default(),
            news: Vec::new(),
        })
    }

    /// Goes on where `saved` stood, nothing having been trained yet. Members and a failure stay.
    pub(super) fn go_on_from(&mut self, plan: &JobPlan, saved: Option<&SavedState>) -> Result<(), RoleError> {
        let fresh = Self::new(plan, saved)?;
        let old = std::mem::replace(self, fresh);
        // Before training has begun, only the first members are in the job.
        self.members = old.members;
        self.replies = old.replies;
        self.data.files = old.data.files;
        self.end.traffic = old.end.traffic;
        self.end.failure = old.end.failure;
        Ok(())
    }

    /// At rest: what a run that goes on from here has to know. `applied` is what the servers have applied in this run.
    pub(super) fn save(&mut self, plan: &JobPlan, applied: &[v1::Applied]) -> Result<SavedState, RoleError> {
        let mut saved = SavedState::new(plan, self.training.save()?);
        saved.epoch_rows = self.data.ledger.epoch_rows();
        self.forget_reads_before(saved.position())?;
        let again = self.data.reads.values();
        saved.labels = again.clone().fold((self.data.labels.sum, self.data.labels.rows), |(sum, rows), read| {
            (sum - read.label_sum, rows - read.rows)
        });
        saved.skipped_rows = self.data.skipped_rows - again.map(|read| read.skipped_rows).sum::<u64>();
        saved.samples = self.progress.samples;
        saved.training_seconds = self.training_seconds();
        saved.last_test = self.evaluation.last_test.as_ref().map(|(step, test)| (step.0, test.clone()));
        saved.applied = AppliedGradients::of_servers(applied).after(self.progress.applied_before);
        Ok(saved)
    }

    /// What servers of the run that this one goes on from have applied.
    pub(super) fn applied_before(&self) -> AppliedGradients {
        self.progress.applied_before
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
        Ok(horizon.map(|(until, last)| v1::Horizon { until, last, turns: self.data.turns.write() }))
    }

    /// The first failure is the one that is told. What fails behind the last step has not cost the model.
    pub(super) fn fail(&mut self, message: String, user_error: bool) {
        if self.end.failure.is_none() {
            let saved = self.last_of_all().map(|name| format!(" (the trained model is in checkpoint {name})"));
            self.end.failure = Some((message + &saved.unwrap_or_default(), user_error));
        }
    }

    pub(super) fn end(&mut self) {
        self.end.has_ended = true;
    }

    pub(super) fn has_ended(&self) -> bool {
        self.end.has_ended
    }

    /// Whether a coordinator that is started again can go on from what this one knew. What it knew of rows that are restored, and of slots
    /// that move, is not all here.
    pub(super) fn may_be_taken_up(&self) -> bool {
        let is_moving = self.members.servers.is_moving() || self.training.slots_are_moving();
        self.end.failure.is_none() && !self.training.restoring() && !is_moving
    }

    /// A coordinator that was started again goes on from here. Calls to the servers that the one before has made, or has not, are made again.
    pub(super) fn take_up(&mut self) -> Result<(), RoleError> {
        self.training.call_again()
    }

    /// Servers hold an instant for a checkpoint that is being written (its ticket), or hold none any more.
    pub(super) fn set_writing(&mut self, ticket: Option<v1::Ticket>) {
        self.checkpoints.writing = ticket;
    }

    pub(super) fn writing(&self) -> Option<v1::Ticket> {
        self.checkpoints.writing.clone()
    }

    /// Whoever takes the coordinator's place has to know which checkpoints are damaged.
    pub(super) fn set_passed_over(&mut self, checkpoints: &[String]) {
        self.checkpoints.passed_over = checkpoints.to_vec();
    }

    pub(super) fn passed_over(&self) -> &[String] {
        &self.checkpoints.passed_over
    }

    /// The slot map in force, if it is not the job's first.
    pub(super) fn map(&self) -> Option<SlotMap> {
        self.slots.map.clone()
    }

    /// The migration begun last.
    pub(super) fn migrations(&self) -> MigrationId {
        self.slots.migrations
    }

    pub(super) fn migration_begins(&mut self, migration: MigrationId) {
        self.slots.migrations = migration;
    }

    /// A member that was released has left, after it had sent so much.
    pub(super) fn farewell(&mut self, farewell: v1::Farewell) {
        self.members.released.remove(&farewell.address);
        for (kind, bytes) in farewell.traffic.unwrap_or_default().bytes_sent {
            *self.end.traffic.entry(kind).or_default() += bytes;
        }
    }

    /// What members that have left had sent.
    pub(super) fn left_traffic(&self) -> BTreeMap<String, u64> {
        self.end.traffic.clone()
    }

    pub(super) fn check_failure(&self) -> Result<(), RoleError> {
        match &self.end.failure {
            Some((message, user_error)) => {
                Err(RoleError::JobFailed { message: message.clone(), user_error: *user_error })
            }
            None => Ok(()),
        }
    }

    /// How the job ended for this member, if it has. Whoever is about to take the place of one that was told to end may ask before it joins.
    pub(super) fn member_end(&self, caller: &v1::Caller, request: &v1::JobEndRequest) -> Option<v1::JobEnd> {
        let has_place = self.members.incarnations.has(request.role(), request.index, caller.id);
        let is_released = has_place && self.members.released.contains(&request.address);
        self.job_end().or_else(|| is_released.then(|| v1::JobEnd { released: true, ..v1::JobEnd::default() }))
    }

    pub(super) fn job_end(&self) -> Option<v1::JobEnd> {
        match &self.end.failure {
            Some((message, user_error)) => {
                let (message, user_error) = (message.clone(), *user_error);
                Some(v1::JobEnd { failed: true, message, user_error, released: false })
            }
            None => self.end.has_ended.then(v1::JobEnd::default),
        }
    }
}
