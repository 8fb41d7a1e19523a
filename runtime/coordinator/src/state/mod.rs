//! The state of the coordinator, and how each message changes it.
//! It neither waits nor sends: the coordinator does that.

mod data;
mod evaluation;
mod follow;
mod members;
mod progress;
mod stream;

use std::collections::BTreeMap;

use rectrain_kinds::RegressionRule;
use rectrain_modes::migration::{MigrationId, SlotMap};
use rectrain_modes::{DataLedger, DataPlan, JobChunks};
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

pub(super) use self::data::ReplayLease;
use self::data::{Data, data_changed};
use self::evaluation::Evaluations;
pub(super) use self::evaluation::{EvaluationLease, Part};
use self::members::Members;
use self::progress::Progress;
use super::as_bytes;
use super::reply_cache::ReplyCache;
use super::rollback::Fall;
use super::snapshot::{AppliedGradients, Before, Snapshot};
use super::training::Training;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{JobEvent, WarmStartOrigin};
use rectrain_protocol::failure::{Divergence, JobFailure};
use rectrain_protocol::plan::JobPlan;

/// Members of a role, at most. More are surely a typing error.
const MOST_MEMBERS: u32 = 10_000;

/// The state of the coordinator. The file of each part says how messages change it.
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
    pub(super) replies: ReplyCache,
    end: End,
    /// The memory budget of the tables, if it was changed since the start of the attempt.
    #[serde(default, with = "as_bytes::optional_message")]
    pub(super) budget: Option<v1::TableBudget>,
    /// Whether training waits because the quality of its predictions has fallen.
    #[serde(default)]
    is_held: bool,
    /// The fall of the quality for which training goes back.
    #[serde(default)]
    fall: Option<Box<Fall>>,
    /// Rollbacks in the checkpoint path so far.
    #[serde(default)]
    rollbacks: u64,
    /// Events that have not been pushed yet.
    pending_events: Vec<JobEvent>,
}

/// The checkpoints of this run.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Checkpoints {
    /// Name and step of the newest checkpoint that this run has saved or restored.
    last: Option<(String, u64)>,
    /// The ticket of the checkpoint that is being written. The servers hold frozen rows under it.
    #[serde(with = "as_bytes::optional_message")]
    writing: Option<v1::Ticket>,
    /// Names of checkpoints found damaged.
    damaged_checkpoints: Vec<String>,
    /// The checkpoint of another job that this attempt began with.
    #[serde(default)]
    origin: Option<Box<WarmStartOrigin>>,
}

/// The placement of the slots.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Slots {
    /// The slot map in force; `None` for the job's first map.
    map: Option<SlotMap>,
    /// The last migration that has begun.
    migrations: MigrationId,
}

/// The end of the job.
#[derive(Debug, Default, Serialize, Deserialize)]
struct End {
    /// The first failure.
    failure: Option<JobFailure>,
    has_ended: bool,
    /// Bytes sent by members that have left, by kind of message.
    traffic: BTreeMap<String, u64>,
}

/// The parts of a plan that the state needs.
#[derive(Debug, Serialize, Deserialize)]
struct JobFacts {
    label: String,
    /// The names of the sparse features, in the manifest's order.
    features: Vec<String>,
    tests_on_the_next_slice: bool,
    data: DataPlan,
    slots: u32,
    has_checkpoints: bool,
    /// Whether the job resumed from a checkpoint.
    resumes: bool,
    /// The number of the latest predictions whose quality counts.
    window_rows: u64,
    /// When the quality has fallen, if that matters.
    on_regression: Option<RegressionRule>,
}

/// The ledger of a job's data, from the position in `saved` on.
fn ledger(plan: &JobPlan, data: DataPlan, saved: Option<&Snapshot>) -> Result<DataLedger<JobChunks>, RoleError> {
    if let Some(stream) = plan.stream() {
        let trained = saved.map(|saved| saved.first_pass).unwrap_or_default();
        return Ok(DataLedger::of_stream(data, stream::chunks(stream, saved), trained));
    }
    let ledger = match saved {
        Some(saved) => DataLedger::resume_after(data, saved.position(), saved.first_pass).map_err(data_changed)?,
        None => DataLedger::new(data),
    };
    Ok(DataLedger::of_finite(ledger))
}

impl State {
    /// The state of a job that no member has joined yet. It resumes at `saved` if that is given.
    pub(super) fn new(plan: &JobPlan, saved: Option<&Snapshot>) -> Result<Self, RoleError> {
        let replicas = &plan.replicas;
        let data = DataPlan {
            global_batch_rows: plan.global_batch_rows,
            batches_per_chunk: plan.batches_per_chunk,
            length: plan.length,
        };
        let job = JobFacts {
            label: plan.schema.label.name.clone(),
            features: plan.schema.sparse.iter().map(|field| field.name.clone()).collect(),
            tests_on_the_next_slice: plan.tests_on_the_next_slice,
            data,
            slots: plan.store.slots,
            has_checkpoints: plan.checkpoint.is_some(),
            resumes: saved.is_some(),
            window_rows: plan.quality.window_rows,
            on_regression: plan.quality.on_regression,
        };
        let ledger = ledger(plan, data, saved)?;
        Ok(Self {
            job,
            training: Training::new(plan, saved.map(|saved| (saved, ledger.total_steps())))?,
            members: Members::new(replicas, plan.store.slots),
            data: Data::new(plan, ledger, saved),
            evaluation: Evaluations::new(saved),
            progress: Progress::new(replicas.dense_worker, saved),
            checkpoints: Checkpoints::default(),
            slots: Slots::default(),
            replies: ReplyCache::default(),
            end: End::default(),
            budget: None,
            is_held: false,
            fall: None,
            rollbacks: saved.map_or(0, |saved| saved.rollbacks),
            pending_events: Vec::new(),
        })
    }

    /// Restarts from `saved` before any batch was trained. Members and a failure stay.
    pub(super) fn reset_to(&mut self, plan: &JobPlan, saved: Option<&Snapshot>) -> Result<(), RoleError> {
        let fresh = Self::new(plan, saved)?;
        let old = std::mem::replace(self, fresh);
        // Training has not begun, so the membership is the first one.
        self.members = old.members;
        self.replies = old.replies;
        self.data.files = old.data.files;
        self.data.listed = old.data.listed;
        self.end.traffic = old.end.traffic;
        self.end.failure = old.end.failure;
        self.budget = old.budget;
        Ok(())
    }

    /// The snapshot at the present pause. `applied` has the gradients that the servers have applied
    /// in this run.
    pub(super) fn save(&mut self, plan: &JobPlan, applied: &[v1::Applied]) -> Result<Snapshot, RoleError> {
        let mut saved = Snapshot::new(plan, self.training.save()?);
        saved.epoch_rows = self.data.ledger.epoch_rows();
        saved.first_pass = self.data.ledger.first_pass();
        saved.files = self.files_to_save();
        self.save_stream(&mut saved);
        self.forget_reads_before(saved.position())?;
        let again = self.data.reads.values();
        saved.labels = again.clone().fold((self.data.labels.sum, self.data.labels.rows), |(sum, rows), read| {
            (sum - read.label_sum, rows - read.rows)
        });
        saved.skipped_rows = self.data.skipped_rows - again.map(|read| read.skipped_rows).sum::<u64>();
        saved.samples = self.progress.samples;
        saved.rollbacks = self.rollbacks;
        saved.training_seconds = self.training_seconds();
        saved.last_test = self.evaluation.last_test.as_ref().map(|(step, test)| (step.0, test.clone()));
        saved.applied = AppliedGradients::mean_of(applied).plus(self.progress.applied_before);
        Ok(saved)
    }

    /// The counts of servers in the run that this one resumed, and of servers that have left.
    pub(super) fn counted_before(&self) -> Before {
        Before { applied: self.progress.applied_before, table: self.progress.table_before }
    }

    /// The state machine of training.
    pub(super) fn training(&mut self) -> &mut Training {
        &mut self.training
    }

    /// The batch up to which a worker may fetch that has fetched up to `from`; `None`: no further
    /// yet. The worker was at batch `at` when it sent the request. It continues while it waits, and
    /// reports its progress.
    pub(super) fn horizon(&mut self, order: u64, from: u64, at: u64) -> Result<Option<v1::Horizon>, RoleError> {
        let at = at.max(self.batches_of_the_slowest());
        let horizon = self.training.horizon(order, from, at)?;
        Ok(horizon.map(|(until, last)| v1::Horizon { until, last, turns: self.data.round_robin.write() }))
    }

    /// Fails the job. Only the first failure counts. After the last step, the message names the
    /// checkpoint that has the trained model. The message of a divergence names the last
    /// checkpoint, and its figures are completed.
    pub(super) fn fail(&mut self, mut failure: JobFailure) {
        if self.end.failure.is_some() {
            return;
        }
        if let Some(divergence) = &mut failure.divergence {
            self.progress.complete(divergence);
            divergence.step.get_or_insert(self.step());
            failure.message += &match &self.checkpoints.last {
                Some((name, step)) => format!(". The last checkpoint is {name}, of step {step}"),
                None => ". No checkpoint was saved".to_owned(),
            };
        } else if let Some(name) = self.final_checkpoint() {
            failure.message += &format!(" (the trained model is in checkpoint {name})");
        }
        self.end.failure = Some(failure);
    }

    pub(super) fn end(&mut self) {
        self.end.has_ended = true;
    }

    pub(super) fn has_ended(&self) -> bool {
        self.end.has_ended
    }

    /// Whether a replacement of the coordinator can continue from this state. The state has neither
    /// the progress of a restore nor the positions of moving slots.
    pub(super) fn is_recoverable(&self) -> bool {
        let is_moving = self.members.servers.is_moving() || self.training.slots_are_moving();
        self.end.failure.is_none() && !self.training.restoring() && !is_moving
    }

    /// Continues in a replacement of the coordinator. Repeats calls to the servers that the one
    /// before may have made.
    pub(super) fn recover(&mut self) -> Result<(), RoleError> {
        // The one before may have been about to end. This one is not.
        self.members.all_may_leave = false;
        self.training.repeat_calls()
    }

    /// Sets the ticket of the checkpoint that is being written; `None` when it is done.
    pub(super) fn set_pending_checkpoint(&mut self, ticket: Option<v1::Ticket>) {
        self.checkpoints.writing = ticket;
    }

    pub(super) fn pending_checkpoint(&self) -> Option<v1::Ticket> {
        self.checkpoints.writing.clone()
    }

    /// Sets the names of damaged checkpoints. A replacement of the coordinator needs them.
    pub(super) fn set_damaged_checkpoints(&mut self, checkpoints: &[String]) {
        self.checkpoints.damaged_checkpoints = checkpoints.to_vec();
    }

    pub(super) fn damaged_checkpoints(&self) -> &[String] {
        &self.checkpoints.damaged_checkpoints
    }

    /// Sets the checkpoint of another job that this attempt begins with.
    pub(super) fn set_origin(&mut self, origin: WarmStartOrigin) {
        self.checkpoints.origin = Some(Box::new(origin));
    }

    /// The checkpoint of another job that this attempt began with.
    pub(super) fn origin(&self) -> Option<WarmStartOrigin> {
        self.checkpoints.origin.as_deref().cloned()
    }

    /// The slot map in force; `None` for the job's first map.
    pub(super) fn map(&self) -> Option<SlotMap> {
        self.slots.map.clone()
    }

    /// The last migration that has begun.
    pub(super) fn migrations(&self) -> MigrationId {
        self.slots.migrations
    }

    pub(super) fn migration_begins(&mut self, migration: MigrationId) {
        self.slots.migrations = migration;
    }

    /// A released member leaves and reports its traffic.
    pub(super) fn farewell(&mut self, farewell: v1::Farewell) {
        self.members.released.remove(&farewell.address);
        for (kind, bytes) in farewell.traffic.unwrap_or_default().bytes_sent {
            *self.end.traffic.entry(kind).or_default() += bytes;
        }
    }

    /// The traffic of members that have left.
    pub(super) fn left_traffic(&self) -> BTreeMap<String, u64> {
        self.end.traffic.clone()
    }

    pub(super) fn check_failure(&self) -> Result<(), RoleError> {
        match &self.end.failure {
            Some(failure) => Err(RoleError::JobFailed(Box::new(failure.clone()))),
            None => Ok(()),
        }
    }

    /// How the job ended for this member; `None` if it has not. A replacement may ask before it
    /// joins, while the released member still has its index.
    pub(super) fn member_end(&self, caller: &v1::Caller, request: &v1::JobEndRequest) -> Option<v1::JobEnd> {
        let has_place = self.members.incarnations.is_current(request.role(), request.index, caller.id);
        let is_released = has_place && self.members.released.contains(&request.address);
        self.job_end().or_else(|| is_released.then(|| v1::JobEnd { released: true, ..v1::JobEnd::default() }))
    }

    pub(super) fn job_end(&self) -> Option<v1::JobEnd> {
        match &self.end.failure {
            Some(JobFailure { message, user_error, divergence }) => Some(v1::JobEnd {
                failed: true,
                message: message.clone(),
                user_error: *user_error,
                released: false,
                divergence: divergence.map(Divergence::write),
            }),
            None => self.end.has_ended.then(v1::JobEnd::default),
        }
    }
}
