//! The state machine of training: stages, orders and pauses over the run's modes ([`TrainingRun`]).
//! Training pauses at a global-step boundary whenever something is due: an evaluation, a
//! checkpoint, a switch of the mode, or the end of the data. The coordinator directs the dense
//! workers by orders. Every worker gets the same order, and no worker gets the next one before all
//! have carried it out.
//!
//! The state machine neither waits nor sends. The coordinator passes it the requests of workers and
//! delivers its replies. The coordinator also makes the calls to the parameter servers that the
//! state machine queues ([`ServerCall`]).

mod barrier;
mod config;
mod driver;
mod pause;
mod pulled;
mod replacement;
mod tokens;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rectrain_modes::switch::{Boundary, RunPlan, SwitchPhase, TrainingRun};
use rectrain_modes::{Answers, Assignment, Batch, Outcome, Reply, Server};
use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;
use rectrain_proto::v1::order::Order as Kind;
use serde::{Deserialize, Serialize};

use self::config::{TrainingConfig, WorkersError};
use self::driver::driver;
use self::pulled::PulledPieces;
pub(super) use self::pulled::{PiecePull, TrainedPiece, TrainedStep};
pub(super) use self::replacement::RepairReply;
use super::as_bytes;
use super::batch_index::BatchIndex;
use super::refused::SwitchRefused;
use super::ring::Ring;
use super::snapshot::{Snapshot, TrainingSnapshot};
use rectrain_modes::TrainingMode;
use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::outcome;
use rectrain_protocol::plan::{JobPlan, share};
use rectrain_protocol::token_counts::TokenCounts;

/// With a barrier: how far dense workers may fetch ahead of the batch that they train, in seconds
/// at their present pace. A switch by command, a flip of the slot map or a requested checkpoint
/// waits until all granted batches are trained.
const GRANTED_SECONDS: f64 = 1.0;
/// The bounds of [`GRANTED_SECONDS`] in global batches.
const LEAST_GRANTED: u64 = 2;
const MOST_GRANTED: u64 = 64;

/// A call to every parameter server.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ServerCall {
    /// Train in this mode from this boundary on.
    Begin { mode: TrainingMode, at: Boundary, first_piece: u32 },
    /// Apply the gradients that are left in the buffers.
    Flush,
    /// Restore the rows from the checkpoint that training resumes from, or take them over from the
    /// one that it begins with.
    Restore,
    /// Save a checkpoint at this boundary. `last`: it is the one at the end of training.
    Save { at: Boundary, last: bool },
    /// All slots are copied: put the next slot map into force.
    Flip,
    /// Training has ended: stop moving slots.
    SettleSlots,
}

/// The reply to a worker's pull.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Pulled {
    Work { assignment: Assignment, oldest_token: u64, key: BatchKey },
    Pause,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Stage {
    /// Servers restore rows, and workers restore dense parameters, from a checkpoint.
    Restoring,
    /// Dense workers carry out a training order.
    Training,
    /// Training is paused at a boundary, and the next stage is chosen.
    Paused,
    /// Dense workers predict the test part.
    Evaluating,
    /// The servers freeze their rows for a checkpoint, and dense worker 0 writes its parameters. At
    /// the end, this lasts until the checkpoint is written.
    Saving,
    /// Rank 0 publishes the dense parameters, because new workers have none.
    Sharing,
    /// All workers, including new ones, read the dense parameters.
    Joining,
    /// All workers read the dense parameters back, because servers join or leave.
    Gathering,
    /// The servers adopt the next slot map.
    Flipping,
    /// All data is trained. Training waits for the migration of slots to settle.
    Settling,
    /// The dense parameters move to the servers or back to the workers.
    Moving,
    /// The servers begin the next mode.
    Beginning,
    /// Training has ended.
    Ended,
}

/// The state of training.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Training {
    config: TrainingConfig,
    run: TrainingRun,
    modes: Modes,
    feed: Feed,
    workers: Workers,
    /// The present order, if its pieces are pulled.
    #[serde(default)]
    pulled: PulledPieces,
    due: Due,
    slots: SlotMoves,
    stage: Stage,
    #[serde(with = "as_bytes::message")]
    order: v1::Order,
    /// Calls to the parameter servers that have not been made. Not in the journal: a recovered
    /// coordinator derives them again.
    #[serde(skip)]
    calls: Vec<ServerCall>,
    flushing: bool,
    /// Counts of the modes that have ended.
    counts: TokenCounts,
    /// The global step before which the state of the dense optimizer began.
    #[serde(default)]
    dense_since: u64,
}

/// The present mode and the next ones.
#[derive(Debug, Serialize, Deserialize)]
struct Modes {
    current: TrainingMode,
    /// The mode after the present or next pause.
    next: TrainingMode,
    /// Scheduled switches: the batch before each, and the mode from there on.
    scheduled: VecDeque<(u64, TrainingMode)>,
    /// A switch by command.
    requested: Option<TrainingMode>,
}

/// The data given to the run, and the batches that dense workers may fetch.
#[derive(Debug, Serialize, Deserialize)]
struct Feed {
    data: BatchIndex,
    /// Batches given to the run.
    fed: u64,
    fed_all: bool,
    /// With a barrier: batches that dense workers may fetch.
    granted: u64,
    /// With a barrier: how many of them may be ahead of the batch being trained.
    granted_ahead: u64,
    /// With a barrier: the batch at which the order ends, once known.
    stop_at: Option<u64>,
    /// The position at which training starts: the batch, and the first piece of it.
    restored_at: (u64, u32),
}

/// The dense workers: how many, and the state of each.
#[derive(Debug, Serialize, Deserialize)]
struct Workers {
    /// The requested number of dense workers. `None` until all of them have joined.
    wanted: Option<u32>,
    /// Dense workers after the present or next pause.
    next: u32,
    /// By rank: the last order carried out.
    done: Vec<u64>,
    /// By rank: how often the worker was replaced.
    replacements: BTreeMap<Rank, u32>,
    ring: Ring,
    /// In `shadow`, by rank: the batches of the worker's replica that the servers may not have
    /// seen, from its last report.
    #[serde(default)]
    unseen: BTreeMap<Rank, u64>,
    /// Ranks whose pull waits for a reply.
    asked: BTreeSet<Rank>,
    answers: BTreeMap<Rank, Reply>,
}

/// Evaluations and checkpoints that are due at pauses.
#[derive(Debug, Serialize, Deserialize)]
struct Due {
    /// All evaluations that were due up to this batch have been ordered.
    evaluated_through: u64,
    /// The batch before the last evaluation of this attempt.
    tested_at: Option<u64>,
    /// All checkpoints that were due up to this batch have begun.
    saved_through: u64,
    save_wanted: bool,
    save: SaveStep,
    /// Whether the checkpoint under way is the last one of the job.
    saves_last: bool,
    /// The step of an evaluation that was just ordered.
    evaluation_to_begin: Option<GlobalStep>,
}

/// Slots that move between parameter servers.
#[derive(Debug, Serialize, Deserialize)]
struct SlotMoves {
    moving: SlotsMove,
    /// The epoch of the slot map in force.
    map_epoch: u64,
}

/// The state of the checkpoint that training waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum SaveStep {
    /// The servers are freezing their rows.
    Freezing,
    /// All servers have frozen their rows, or the checkpoint is aborted.
    Frozen,
    /// The last checkpoint of the job exists.
    Written,
}

/// The state of a migration of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum SlotsMove {
    No,
    /// Slots are being copied. `servers` servers will hold them afterwards.
    Copying {
        servers: u32,
    },
    /// All slots are copied. The map flips at the next pause.
    Copied {
        servers: u32,
    },
    /// Training uses the new map, and servers drop the slots that moved away.
    Flipped,
}

impl Training {
    /// Training before step 0, or at the position of the checkpoint in `resume`. `resume` also has
    /// the number of batches in the data, if it is known.
    ///
    /// # Errors
    /// [`RoleError::Switch`] or [`RoleError::Input`] if the job cannot train in its mode from
    /// there.
    pub(super) fn new(plan: &JobPlan, resume: Option<(&Snapshot, Option<GlobalStep>)>) -> Result<Self, RoleError> {
        let config = TrainingConfig::of(plan);
        let run_plan = RunPlan {
            global_rows: config.global_rows as u32,
            // The dense partition and the rows of a server each have a gradient buffer and a step.
            servers: 2 * config.servers,
            in_flight_limit: plan.unreported_batches(),
        };
        let initial = TrainingSnapshot::initial(plan.mode);
        let saved = resume.map_or(&initial, |(saved, _)| &saved.training);
        let mode = mode_at(plan, saved);
        let run_mode = config.run_mode(mode, config.workers);
        let mut training = Self {
            run: TrainingRun::resume(run_plan, run_mode, GlobalStep(saved.step), saved.rows())?,
            modes: Modes::new(plan, mode, saved.batch),
            feed: Feed::new(data_at(config.global_rows, resume), saved.batch),
            workers: Workers::new(config.workers),
            pulled: PulledPieces::default(),
            due: Due::new(saved),
            slots: SlotMoves { moving: SlotsMove::No, map_epoch: 0 },
            stage: Stage::Restoring,
            order: v1::Order::default(),
            calls: Vec::new(),
            flushing: false,
            counts: saved.counts,
            dense_since: saved.dense_since,
            config,
        };
        if resume.is_some() {
            training.feed.restored_at.1 = training.first_piece()?;
            training.calls.push(ServerCall::Restore);
        } else {
            training.begin_first_mode();
        }
        Ok(training)
    }

    /// The first piece to train of the present global batch.
    fn first_piece(&self) -> Result<u32, RoleError> {
        let place = self.run.next_row().saturating_sub(self.feed.data.row_of(self.feed.fed));
        if place.is_multiple_of(self.config.local_rows) {
            return Ok((place / self.config.local_rows) as u32);
        }
        Err(RoleError::Input(format!(
            "the checkpoint is at row {place} of a global batch, which is within a local batch of {} rows: set spec.training.localBatchSize to its value at the time of the checkpoint",
            self.config.local_rows
        )))
    }

    /// The batches to skip in the chunk that begins with batch `first`, and the pieces to skip of
    /// the batch after them. Both are zero unless an earlier run stopped within the chunk.
    pub(super) fn skip_in_chunk(&self, first: u64) -> (u64, u32) {
        let (batch, piece) = self.feed.restored_at;
        match batch.checked_sub(first) {
            Some(batches) => (batches, piece),
            None => (0, 0),
        }
    }

    /// Whether the rows are still being restored. Until then, the position of training may change.
    pub(super) fn restoring(&self) -> bool {
        self.stage == Stage::Restoring
    }

    /// The global step before which the state of the dense optimizer began.
    pub(super) fn dense_since(&self) -> u64 {
        self.dense_since
    }

    /// Whether training waits for a checkpoint to be frozen or, at the end, written.
    pub(super) fn is_saving(&self) -> bool {
        self.stage == Stage::Saving
    }

    /// Requests a checkpoint at the next boundary.
    pub(super) fn request_save(&mut self) {
        self.due.save_wanted = true;
    }

    /// The snapshot at the present pause.
    pub(super) fn save(&self) -> Result<TrainingSnapshot, RoleError> {
        let at = self.boundary()?;
        let rows = self.run.ledger().counts();
        let (batch, _) = self.feed.data.locate(at.next_row);
        Ok(TrainingSnapshot {
            step: at.step.0,
            trained_rows: rows.trained_rows,
            dropped_rows: rows.dropped_rows,
            dropped_batches: rows.dropped_batches,
            batch,
            epoch: self.feed.data.epoch_of(batch),
            mode: self.modes.next.name().to_owned(),
            first_mode: self.config.first_mode.name().to_owned(),
            evaluated_through: self.due.evaluated_through,
            counts: self.counts,
            dense_since: self.dense_since,
        })
    }

    /// Begins a migration. After it, `servers` parameter servers hold the slots.
    pub(super) fn slots_move(&mut self, servers: u32) {
        self.slots.moving = SlotsMove::Copying { servers };
    }

    /// All slots are copied: requests a flip of the map at the next boundary.
    pub(super) fn request_flip(&mut self) {
        if let SlotsMove::Copying { servers } = self.slots.moving {
            self.slots.moving = SlotsMove::Copied { servers };
        }
    }

    /// Whether `workers` dense workers can train in the present mode and in all next ones.
    pub(super) fn check_workers(&self, workers: u32) -> Result<(), WorkersError> {
        let later = self.modes.scheduled.iter().map(|(_, mode)| *mode).chain(self.modes.requested);
        let modes = [self.modes.current, self.modes.next].into_iter().chain(later);
        modes.into_iter().try_for_each(|mode| self.config.check_workers(mode, workers))
    }

    /// Requests `workers` dense workers from the next boundary on. All of them have joined. `None`
    /// keeps the present number. A number that a present or next mode does not allow is ignored:
    /// the caller repeats the request.
    pub(super) fn want_workers(&mut self, workers: Option<u32>) {
        let possible =
            workers.filter(|workers| *workers != self.config.workers && self.check_workers(*workers).is_ok());
        self.workers.wanted = possible;
    }

    /// Whether the number of dense workers changes at the present or next pause.
    pub(super) fn is_regrouping(&self) -> bool {
        self.workers.next != self.config.workers
    }

    /// The number of dense workers.
    pub(super) fn workers(&self) -> u32 {
        self.config.workers
    }

    /// The number of dense workers that train with a barrier.
    pub(super) fn barrier_workers(&self) -> u32 {
        self.config.barrier_workers()
    }

    /// The batches known so far.
    pub(super) fn data_mut(&mut self) -> &mut BatchIndex {
        &mut self.feed.data
    }

    /// The order of worker `rank` after order `done`; `None` if there is none yet.
    pub(super) fn next_order(&mut self, rank: Rank, done: u64) -> Result<Option<v1::Order>, RoleError> {
        let Some(place) = self.workers.done.get_mut(rank.0 as usize) else { return Ok(None) };
        *place = (*place).max(done);
        if done >= self.order.number {
            self.workers.ring.joined(rank);
            // The last exchange of an order has the whole replica.
            self.workers.unseen.remove(&rank);
        }
        self.advance()?;
        // The number of workers may have changed. A new worker carries out no earlier order, and
        // one that leaves carries out no later one.
        let done = self.workers.done.get(rank.0 as usize).copied().unwrap_or(u64::MAX);
        let joins = self.workers.ring.is_joining(rank);
        if self.order.number > done {
            return Ok(Some(v1::Order { joins, ..self.order.clone() }));
        }
        // Other workers wait in the ring repair for this worker's report and may not have carried
        // out their order.
        let tells = joins && !self.workers.ring.has_reported(rank);
        Ok(tells.then(|| v1::Order { joins, order: Some(Kind::Wait(v1::Wait {})), ..self.order.clone() }))
    }

    /// The pieces of each global batch for worker `rank`. It trains them in modes with a barrier,
    /// and predicts them in evaluations.
    pub(super) fn share(&self, rank: Rank) -> std::ops::Range<u32> {
        share(self.config.pieces, rank, self.barrier_workers())
    }

    /// The rows of a batch in the pieces of `share`.
    pub(super) fn rows_of_share(&self, batch: u64, share: std::ops::Range<u32>) -> u64 {
        let (rows, local) = (self.feed.data.rows_of(batch), self.config.local_rows);
        (u64::from(share.end) * local).min(rows) - (u64::from(share.start) * local).min(rows)
    }

    /// Grants batches to a worker that has fetched up to batch `from` and trains batch `at`.
    /// Returns the batch up to which it may fetch, and whether the order ends there. `None` if it
    /// may not fetch beyond `from` yet.
    pub(super) fn horizon(&mut self, order: u64, from: u64, at: u64) -> Result<Option<(u64, bool)>, RoleError> {
        if order != self.order.number || self.stage != Stage::Training {
            let reason = format!("order {order} is not the present one");
            return Err(RoleError::Inconsistent { message: "horizon", reason });
        }
        self.advance()?;
        if self.feed.stop_at.is_none() {
            let ahead = self.feed.granted_ahead.max(self.modes.current.staleness() + LEAST_GRANTED);
            let until = self.feed.data.batches().min(at + ahead).min(self.next_pause().unwrap_or(u64::MAX));
            barrier::grant(self, until)?;
            self.advance()?;
        }
        let last = self.feed.stop_at == Some(self.feed.granted);
        Ok((self.feed.granted > from || last).then_some((self.feed.granted, last)))
    }

    /// Sets the pace of training, in global batches a second.
    pub(super) fn set_pace(&mut self, batches_per_second: f64) {
        self.feed.granted_ahead = ((GRANTED_SECONDS * batches_per_second) as u64).clamp(LEAST_GRANTED, MOST_GRANTED);
    }

    /// Worker `rank` pulls a batch; `None` if there is none yet.
    pub(super) fn pull(&mut self, rank: Rank, order: u64) -> Result<Option<Pulled>, RoleError> {
        if self.stage != Stage::Training || order != self.order.number {
            return Ok((order <= self.order.number).then_some(Pulled::Pause));
        }
        if !self.workers.answers.contains_key(&rank)
            && self.workers.asked.insert(rank)
            && let Some(dispatcher) = self.run.dispatcher()
        {
            let answers = dispatcher.pull(rank)?;
            self.queue_answers(answers);
        }
        self.advance()?;
        if matches!(self.run.phase(), SwitchPhase::Moving { .. }) {
            self.workers.asked.remove(&rank);
            return Ok(Some(Pulled::Pause));
        }
        let Some(answer) = self.workers.answers.remove(&rank) else { return Ok(None) };
        self.workers.asked.remove(&rank);
        Ok(Some(match answer {
            Reply::Finished => Pulled::Pause,
            Reply::Work(assignment) => {
                let (batch, place) = self.feed.data.locate(assignment.batch.first_row);
                let piece = (place / self.config.local_rows) as u32;
                let key = BatchKey { position: BatchPosition::Train(batch), piece };
                let oldest_token = self.run.dispatcher().map_or(0, |dispatcher| dispatcher.oldest_token().0);
                Pulled::Work { assignment, oldest_token, key }
            }
        }))
    }

    /// A worker reports the outcome of a batch.
    pub(super) fn batch_report(&mut self, report: &v1::BatchReport) -> Result<(), RoleError> {
        let outcome = outcome::read("batch_report", report.outcome())?;
        let Some(dispatcher) = self.run.dispatcher() else {
            let reason = format!("training is in mode {}", self.modes.current.name());
            return Err(RoleError::Inconsistent { message: "batch_report", reason });
        };
        let batch = Batch { first_row: report.first_row, rows: report.rows };
        let mut answers = dispatcher.report(Rank(report.rank), batch, outcome)?;
        for (half, steps) in [&report.dense_steps, &report.embedding_steps].into_iter().enumerate() {
            for (server, step) in steps.iter().enumerate() {
                let server = Server(half as u32 * self.config.servers + server as u32);
                answers.extend(dispatcher.server_at(server, GlobalStep(*step))?);
            }
        }
        self.queue_answers(answers);
        self.workers.unseen.insert(Rank(report.rank), report.unseen);
        self.counts.exchanges += report.exchanges;
        self.counts.exchanged_batches += report.exchanged_batches;
        self.counts.repeated_batches += u64::from(outcome == Outcome::Repeated);
        self.advance()
    }

    /// Requests `mode` from the next boundary on. Returns the present mode.
    pub(super) fn request_mode(&mut self, mode: TrainingMode) -> Result<TrainingMode, SwitchRefused> {
        if self.stage == Stage::Ended {
            return Err(SwitchRefused::Now("training has ended".to_owned()));
        }
        if self.modes.requested.is_some() || self.modes.next != self.modes.current {
            return Err(SwitchRefused::Now("another switch of the training mode is under way".to_owned()));
        }
        if mode == self.modes.current {
            return Ok(mode);
        }
        let workers = self.workers.wanted.unwrap_or(self.config.workers);
        self.config.check_workers(mode, workers).map_err(|error| SwitchRefused::Mode(error.to_string()))?;
        self.modes.requested = Some(mode);
        Ok(self.modes.current)
    }

    /// Takes the queued calls. The caller makes each of them to every parameter server.
    pub(super) fn take_calls(&mut self) -> Vec<ServerCall> {
        std::mem::take(&mut self.calls)
    }

    /// Server `index` has applied the gradients in its buffers.
    pub(super) fn flushed(&mut self, index: u32, reply: &v1::Flushed) -> Result<(), RoleError> {
        if let Some(dispatcher) = self.run.dispatcher() {
            let dense = dispatcher.flushed(Server(index), GlobalStep(reply.dense_step))?;
            let embeddings =
                dispatcher.flushed(Server(self.config.servers + index), GlobalStep(reply.embedding_step))?;
            self.queue_answers(dense);
            self.queue_answers(embeddings);
        }
        self.advance()
    }

    /// Whether a migration of slots is under way.
    pub(super) fn slots_are_moving(&self) -> bool {
        self.slots.moving != SlotsMove::No
    }

    /// Takes the step of an evaluation that has just been ordered.
    pub(super) fn evaluation_to_begin(&mut self) -> Option<GlobalStep> {
        self.due.evaluation_to_begin.take()
    }

    /// The order number and the step of the evaluation under way.
    pub(super) fn evaluating(&self) -> Option<(u64, GlobalStep)> {
        (self.stage == Stage::Evaluating).then_some((self.order.number, GlobalStep(self.order.step)))
    }

    /// The batch before which the present order begins.
    pub(super) fn current_batch(&self) -> u64 {
        self.order.batch
    }

    /// The epoch of the slot map in force.
    pub(super) fn map_epoch(&self) -> u64 {
        self.slots.map_epoch
    }

    /// Whether training has ended.
    pub(super) fn ended(&self) -> bool {
        self.stage == Stage::Ended
    }

    /// The present mode, or the mode before the present pause.
    pub(super) fn mode(&self) -> TrainingMode {
        self.modes.current
    }

    /// The number of global batches whose rows are trained or dropped. `batches` is the number that
    /// all dense workers have reported, in modes in which they report batches.
    pub(super) fn batches_done(&self, batches: u64) -> u64 {
        let reported =
            driver(self.modes.current).reported_batches(self, batches).filter(|_| self.stage == Stage::Training);
        reported.unwrap_or_else(|| {
            let ledger = self.run.ledger();
            self.feed.data.locate(ledger.trained_rows() + ledger.dropped_rows()).0
        })
    }

    /// The number of global batches before the first one that a dense worker may still need from a
    /// loader. `batches` is the number that all dense workers have reported, in modes in which they
    /// report batches. On a stream at rest the last ones do not settle, but they are trained.
    pub(super) fn fetched_batches(&self, batches: u64) -> u64 {
        let reported =
            driver(self.modes.current).reported_batches(self, batches).filter(|_| self.stage == Stage::Training);
        reported.unwrap_or_else(|| self.settled_batches(batches))
    }

    /// The number of global batches whose gradients are applied. `batches` is the number that all
    /// dense workers have reported, in modes in which they report batches.
    pub(super) fn settled_batches(&self, batches: u64) -> u64 {
        let settled =
            driver(self.modes.current).settled_batches(self, batches).filter(|_| self.stage == Stage::Training);
        settled.unwrap_or_else(|| self.feed.data.locate(self.run.ledger().first_unsettled()).0)
    }

    /// Counts over all modes so far.
    pub(super) fn counts(&self) -> TokenCounts {
        let ledger = self.run.ledger();
        let mut counts = TokenCounts { dropped_batches: ledger.dropped_batches(), ..self.counts };
        if let Some(dispatcher) = self.run.current_dispatcher() {
            counts.issued += dispatcher.tokens_issued();
            counts.lost += dispatcher.tokens().lost();
        }
        counts
    }

    /// Rows trained so far.
    pub(super) fn trained_rows(&self) -> u64 {
        self.run.ledger().trained_rows()
    }

    fn queue_answers(&mut self, answers: Answers) {
        self.workers.answers.extend(answers);
    }

    /// Advances through the stages as far as possible.
    pub(super) fn advance(&mut self) -> Result<(), RoleError> {
        loop {
            let moved = match self.stage {
                Stage::Training => driver(self.modes.current).advance(self)?,
                Stage::Paused => self.decide_at_pause()?,
                Stage::Restoring => self.order.number > 0 && self.all_done() && self.after_restore(),
                Stage::Evaluating => self.all_done() && self.after_evaluation()?,
                Stage::Saving => self.is_saved() && self.all_done() && self.after_save()?,
                Stage::Joining => self.all_done() && self.flip_or_move(self.boundary()?)?,
                Stage::Sharing => self.all_done() && self.admit_workers()?,
                Stage::Gathering => self.all_done() && self.flip(),
                Stage::Moving => self.all_done() && self.begin_after_move()?,
                Stage::Flipping | Stage::Settling | Stage::Beginning | Stage::Ended => false,
            };
            if !moved {
                return Ok(());
            }
        }
    }

    fn start_of_order(&self) -> Boundary {
        let (step, next_row) = (self.run.next_step(), self.run.next_row());
        Boundary { step, next_row }
    }

    fn issue_order(&mut self, at: Boundary, order: Kind) {
        let (batch, place) = self.feed.data.locate(at.next_row);
        self.order = v1::Order {
            number: self.order.number + 1,
            step: at.step.0,
            batch,
            piece: (place / self.config.local_rows) as u32,
            map_epoch: self.slots.map_epoch,
            barrier_workers: self.barrier_workers(),
            ring: self.workers.ring.number(),
            joins: false,
            mends: self.workers.ring.is_incomplete(),
            dense_since: self.dense_since,
            order: Some(order),
        };
    }

    fn all_done(&self) -> bool {
        self.workers.done.iter().all(|done| *done >= self.order.number)
    }

    /// Gives the run the known data up to the next pause. While the run drains, also gives it the
    /// data after the pause, because incomplete buffers need more gradients.
    fn feed(&mut self) {
        let draining = matches!(self.run.phase(), SwitchPhase::Draining { .. });
        let until = if draining { u64::MAX } else { self.next_pause().unwrap_or(u64::MAX) };
        while self.feed.fed < self.feed.data.batches().min(until) {
            // The earlier run may have trained a part of the first batch.
            let trained = self.run.next_row().saturating_sub(self.feed.data.row_of(self.feed.fed));
            let trained = if self.feed.fed == self.feed.restored_at.0 { trained } else { 0 };
            let answers = self.run.extend_data(self.feed.data.rows_of(self.feed.fed) - trained);
            self.queue_answers(answers);
            self.feed.fed += 1;
        }
        if self.feed.data.complete() && self.feed.fed == self.feed.data.batches() && !self.feed.fed_all {
            self.feed.fed_all = true;
            let answers = self.run.close_data();
            self.queue_answers(answers);
        }
    }
}

impl Modes {
    /// The modes of a job that trains in `current` from `batch` on.
    fn new(plan: &JobPlan, current: TrainingMode, batch: u64) -> Self {
        let scheduled = plan.switches.iter().copied().filter(|(at, _)| *at > batch).collect();
        Self { current, next: current, scheduled, requested: None }
    }
}

impl Feed {
    /// The feed of a run that starts at `batch`.
    fn new(data: BatchIndex, batch: u64) -> Self {
        Self {
            data,
            fed: batch,
            fed_all: false,
            granted: batch,
            granted_ahead: MOST_GRANTED,
            stop_at: None,
            restored_at: (batch, 0),
        }
    }
}

impl Workers {
    fn new(workers: u32) -> Self {
        Self {
            wanted: None,
            next: workers,
            done: vec![0; workers as usize],
            replacements: BTreeMap::new(),
            ring: Ring::default(),
            unseen: BTreeMap::new(),
            asked: BTreeSet::new(),
            answers: BTreeMap::new(),
        }
    }
}

impl Due {
    fn new(saved: &TrainingSnapshot) -> Self {
        Self {
            evaluated_through: saved.evaluated_through,
            tested_at: None,
            saved_through: saved.batch,
            save_wanted: false,
            save: SaveStep::Freezing,
            saves_last: false,
            evaluation_to_begin: None,
        }
    }
}

/// The batches known before training starts: all batches before the checkpoint.
fn data_at(global_rows: u64, resume: Option<(&Snapshot, Option<GlobalStep>)>) -> BatchIndex {
    let Some((saved, total)) = resume else { return BatchIndex::new(global_rows) };
    let mut data = BatchIndex::resume(global_rows, saved.position(), saved.first_pass);
    if let Some(total) = total {
        data.end(total.0);
    }
    data
}

/// The mode to resume in. If the manifest still has the same first mode, this is the checkpoint's
/// mode. Otherwise it is the mode that the manifest sets for the checkpoint's batch.
fn mode_at(plan: &JobPlan, saved: &TrainingSnapshot) -> TrainingMode {
    if plan.mode.name() == saved.first_mode {
        return plan.mode_named(&saved.mode).unwrap_or(plan.mode);
    }
    let scheduled = plan.switches.iter().rev().find(|(batch, _)| *batch <= saved.batch);
    scheduled.map_or(plan.mode, |(_, mode)| *mode)
}

impl TrainingSnapshot {
    /// The snapshot before step 0.
    pub(super) fn initial(mode: TrainingMode) -> Self {
        Self {
            step: 0,
            trained_rows: 0,
            dropped_rows: 0,
            dropped_batches: 0,
            batch: 0,
            epoch: 0,
            mode: mode.name().to_owned(),
            first_mode: mode.name().to_owned(),
            evaluated_through: 0,
            counts: TokenCounts::default(),
            dense_since: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rectrain_protocol::plan::small_plan;

    /// Three dense workers, and global batches of three local batches of 8 rows.
    fn plan(mode: &str) -> JobPlan {
        small_plan(&[
            &format!("spec.training.mode={mode}"),
            "spec.training.localBatchSize=8",
            "spec.roles.denseWorker.replicas=3",
        ])
    }

    /// Whether a resumed run ends without training. The earlier run has trained `trained_rows`: 8
    /// global batches and maybe a piece of the next. The data has `total` batches.
    fn ends_at_once(mode: &str, trained_rows: u64, total: u64) -> bool {
        let plan = plan(mode);
        let trained = TrainingSnapshot { step: 8, trained_rows, batch: 8, ..TrainingSnapshot::initial(plan.mode) };
        let saved = Snapshot::new(&plan, trained);
        let mut training = Training::new(&plan, Some((&saved, Some(GlobalStep(total))))).unwrap();
        assert_eq!(training.take_calls(), [ServerCall::Restore]);
        training.rows_restored(v1::Restore { checkpoint: "step-000000000008".to_owned(), from: false });
        let mut done = [0; 3];
        // More rounds than there are orders until the end.
        for _ in 0..20 {
            for (rank, done) in (0..).map(Rank).zip(&mut done) {
                if let Some(order) = training.next_order(rank, *done).unwrap() {
                    *done = order.number;
                }
            }
            for call in training.take_calls() {
                assert!(matches!(call, ServerCall::Begin { .. }), "{call:?}");
                training.begun().unwrap();
            }
        }
        training.ended()
    }

    #[test]
    fn a_resumed_run_with_less_to_train_ends_at_once() {
        for mode in ["sync", "hybrid", "async", "gba", "hopBs", "hopBw", "bsp", "shadow"] {
            for (pieces, total) in [(24, 8), (24, 5), (24, 1), (25, 8), (25, 5)] {
                assert!(ends_at_once(mode, pieces * 8, total), "{mode}: {pieces} pieces, and {total} batches in all");
            }
            assert!(!ends_at_once(mode, 24 * 8, 9), "{mode}: there is more to train");
        }
    }
}
