//! Where training stands and what comes next: one state machine over the run's modes ([`TrainingRun`]), its rests and its end.
//! Training rests at a global-step boundary wherever something is due: an evaluation, a switch of the mode by schedule or by
//! command, the end of the data. What the dense workers do between two such points is an order; all of them get the same
//! orders, and the next one only when all have carried out the one before. No waiting and no sending happens here: the
//! coordinator carries questions and answers to and fro, and makes the calls to the parameter servers that are asked for.

mod driver;
mod facts;
mod replacement;
mod rest;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rectrain_modes::switch::{Boundary, RunPlan, SwitchPhase, TrainingRun};
use rectrain_modes::{Answers, Assignment, Batch, Outcome, Reply, Server};
use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;
use rectrain_proto::v1::order::Order as Kind;
use serde::{Deserialize, Serialize};

use self::driver::driver;
use self::facts::Facts;
pub(super) use self::replacement::Mended;
use super::announced::Announced;
use super::as_bytes;
use super::ring::Ring;
use super::saved::{SavedState, SavedTraining};
use rectrain_modes::TrainingMode;
use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::limits::UNREPORTED;
use rectrain_protocol::outcome;
use rectrain_protocol::plan::{JobPlan, share};
use rectrain_protocol::token_counts::TokenCounts;

/// For so long dense workers may fetch, at their present pace, beyond the global batch that they train. A switch by command, a flip of the
/// slot map and a checkpoint before a member leaves take place behind what has been granted.
const GRANTED_SECONDS: f64 = 1.0;
/// Global batches that are, at least and at most.
const LEAST_GRANTED: u64 = 2;
const MOST_GRANTED: u64 = 64;

/// A call to every parameter server.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ServerCall {
    /// Train in this mode from this boundary on.
    Begin { mode: TrainingMode, at: Boundary, first_piece: u32 },
    /// Apply what is left in the buffers.
    Flush,
    /// Restore your rows from the checkpoint that training goes on from.
    Restore,
    /// Save a checkpoint of this boundary; it is the last one (`last`) at the end of training.
    Save { at: Boundary, last: bool },
    /// Slots are copied: make the next slot map the one in force.
    Flip,
    /// Training is at its end: slots stop moving.
    SettleSlots,
}

/// The answer to a worker's pull.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Pulled {
    Work { assignment: Assignment, oldest_token: u64, key: BatchKey },
    Rest,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Stage {
    /// Rows and dense parameters are restored from a checkpoint.
    Restoring,
    /// Dense workers carry out a training order.
    Training,
    /// At rest at a boundary: what is due there is decided.
    Resting,
    /// They predict the test part.
    Evaluating,
    /// The servers fix this instant for a checkpoint, and dense worker 0 its parameters; at the end, until it is written.
    Saving,
    /// Rank 0 publishes the dense parameters, because workers join that have none.
    Sharing,
    /// All of them read the dense parameters, those that join among them.
    Joining,
    /// They read the dense parameters back, because servers join or leave.
    Gathering,
    /// The servers adopt another slot map.
    Flipping,
    /// At the end: slots that are moving are waited for.
    Settling,
    /// They publish dense parameters to the servers or read them back.
    Moving,
    /// The servers begin the next mode.
    Beginning,
    /// Training has ended.
    Ended,
}

/// See the module's text.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Training {
    plan: Facts,
    run: TrainingRun,
    modes: Modes,
    feed: Feed,
    workers: Workers,
    due: Due,
    slots: SlotMoves,
    stage: Stage,
    #[serde(with = "as_bytes::message")]
    order: v1::Order,
    /// Calls to the parameter servers that are to be made. A coordinator that is started again finds them
    /// out anew.
    #[serde(skip)]
    calls: Vec<ServerCall>,
    flushing: bool,
    /// Counts of the modes that have ended.
    counts: TokenCounts,
}

/// The mode in force and those to come.
#[derive(Debug, Serialize, Deserialize)]
struct Modes {
    current: TrainingMode,
    /// The mode after the pause that training is in or heads for.
    next: TrainingMode,
    /// Switches by schedule: the batch before which each takes place.
    scheduled: VecDeque<(u64, TrainingMode)>,
    /// A switch by command.
    requested: Option<TrainingMode>,
}

/// The data that the run has been given, and the batches that dense workers may fetch of it.
#[derive(Debug, Serialize, Deserialize)]
struct Feed {
    data: Announced,
    /// Batches given to the run.
    fed: u64,
    fed_all: bool,
    /// With a barrier: batches that dense workers may fetch.
    granted: u64,
    /// With a barrier: how many of them may be ahead of the one that is trained.
    granted_ahead: u64,
    /// With a barrier: where the order ends, once that is known.
    stop_at: Option<u64>,
    /// Where training began: the batch, and the first piece of it.
    restored_at: (u64, u32),
}

/// The dense workers: how many, and what each is doing.
#[derive(Debug, Serialize, Deserialize)]
struct Workers {
    /// Dense workers asked for, once all of them have joined.
    wanted: Option<u32>,
    /// Dense workers after the pause that training is in or heads for.
    next: u32,
    /// By rank: the last order carried out.
    done: Vec<u64>,
    /// By rank: how often a dense worker was replaced.
    successions: BTreeMap<Rank, u32>,
    ring: Ring,
    /// Ranks whose pull waits for an answer.
    asked: BTreeSet<Rank>,
    answers: BTreeMap<Rank, Reply>,
}

/// What is due at pauses: evaluations and checkpoints.
#[derive(Debug, Serialize, Deserialize)]
struct Due {
    /// Batches before which no further evaluation is due.
    evaluated_through: u64,
    /// The batch before which this attempt has evaluated last.
    tested_at: Option<u64>,
    /// Batches before which no further checkpoint is due.
    saved_through: u64,
    save_wanted: bool,
    save: SaveStep,
    /// Whether the checkpoint under way is the one of the end.
    saves_last: bool,
    /// An evaluation that was just ordered.
    evaluation_to_begin: Option<GlobalStep>,
}

/// Slots on their way between parameter servers.
#[derive(Debug, Serialize, Deserialize)]
struct SlotMoves {
    moving: SlotsMove,
    /// The epoch of the slot map in force.
    map_epoch: u64,
}

/// How far the checkpoint that training rests for is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum SaveStep {
    /// The servers have not all fixed the instant.
    Freezing,
    /// They have, or the checkpoint is given up.
    Frozen,
    /// The one of the end exists.
    Written,
}

/// Whether slots move between parameter servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum SlotsMove {
    No,
    /// So many servers are there to be.
    Copying {
        servers: u32,
    },
    /// All are copied: the next rest is for the flip of the map.
    Copied {
        servers: u32,
    },
    /// Training goes by the new map, and what was handed over is being dropped.
    Flipped,
}

/// What a command to switch is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum SwitchRefused {
    /// The mode cannot be.
    Mode(String),
    /// Not now.
    Now(String),
}

impl Training {
    /// Before step 0, or where an earlier run stood, of data that has so many batches in all if that is known. Fails where the job's first mode or a later one cannot be.
    pub(super) fn new(plan: &JobPlan, resume: Option<(&SavedState, Option<GlobalStep>)>) -> Result<Self, RoleError> {
        let facts = Facts::of(plan);
        let run_plan = RunPlan {
            global_rows: facts.global_rows as u32,
            // A server's dense partition and its rows each have a gradient buffer and a step of their own.
            servers: 2 * facts.servers,
            in_flight_limit: UNREPORTED,
        };
        let nothing = SavedTraining::nothing(plan.mode);
        let saved = resume.map_or(&nothing, |(saved, _)| &saved.training);
        let mode = mode_at(plan, saved);
        let data = match resume {
            Some((saved, total)) => {
                let mut data = Announced::resume(facts.global_rows, saved.position());
                if let Some(total) = total {
                    data.end(total.0);
                }
                data
            }
            None => Announced::new(facts.global_rows),
        };
        let mut training = Self {
            run: TrainingRun::resume(
                run_plan,
                facts.run_mode(mode, facts.workers),
                GlobalStep(saved.step),
                saved.rows(),
            )?,
            modes: Modes {
                current: mode,
                next: mode,
                scheduled: plan.switches.iter().copied().filter(|(batch, _)| *batch > saved.batch).collect(),
                requested: None,
            },
            feed: Feed {
                data,
                fed: saved.batch,
                fed_all: false,
                granted: saved.batch,
                granted_ahead: MOST_GRANTED,
                stop_at: None,
                restored_at: (saved.batch, 0),
            },
            workers: Workers {
                wanted: None,
                next: facts.workers,
                done: vec![0; facts.workers as usize],
                successions: BTreeMap::new(),
                ring: Ring::default(),
                asked: BTreeSet::new(),
                answers: BTreeMap::new(),
            },
            due: Due {
                evaluated_through: saved.evaluated_through,
                tested_at: None,
                saved_through: saved.batch,
                save_wanted: false,
                save: SaveStep::Freezing,
                saves_last: false,
                evaluation_to_begin: None,
            },
            slots: SlotMoves { moving: SlotsMove::No, map_epoch: 0 },
            stage: Stage::Restoring,
            order: v1::Order::default(),
            calls: Vec::new(),
            flushing: false,
            counts: saved.counts,
            plan: facts,
        };
        if resume.is_some() {
            training.feed.restored_at.1 = training.first_piece()?;
            training.calls.push(ServerCall::Restore);
        } else {
            training.begin_first_mode();
        }
        Ok(training)
    }

    /// The piece of the global batch at hand that is the first to be trained.
    fn first_piece(&self) -> Result<u32, RoleError> {
        let place = self.run.next_row().saturating_sub(self.feed.data.row_of(self.feed.fed));
        if place.is_multiple_of(self.plan.local_rows) {
            return Ok((place / self.plan.local_rows) as u32);
        }
        Err(RoleError::Input(format!(
            "the checkpoint stands at row {place} of a global batch, which is within a local batch of {} rows: set spec.training.localBatchSize as it was when it was written",
            self.plan.local_rows
        )))
    }

    /// What loaders leave out of the chunk that begins with batch `first`: whole batches, and pieces of the batch after those. Only
    /// where an earlier run stood within the chunk.
    pub(super) fn trained_before(&self, first: u64) -> (u64, u32) {
        let (batch, piece) = self.feed.restored_at;
        match batch.checked_sub(first) {
            Some(batches) => (batches, piece),
            None => (0, 0),
        }
    }

    /// Whether it is not known yet where training goes on.
    pub(super) fn restoring(&self) -> bool {
        self.stage == Stage::Restoring
    }

    /// Whether training goes on, or ends, only when a checkpoint is fixed, or written.
    pub(super) fn rests_for_a_checkpoint(&self) -> bool {
        self.stage == Stage::Saving
    }

    /// Saves a checkpoint at the next boundary.
    pub(super) fn request_save(&mut self) {
        self.due.save_wanted = true;
    }

    /// At rest: what a run that goes on from here has to know.
    pub(super) fn save(&self) -> Result<SavedTraining, RoleError> {
        let at = self.boundary()?;
        let rows = self.run.ledger().counts();
        let (batch, _) = self.feed.data.locate(at.next_row);
        Ok(SavedTraining {
            step: at.step.0,
            trained_rows: rows.trained_rows,
            dropped_rows: rows.dropped_rows,
            dropped_batches: rows.dropped_batches,
            batch,
            epoch: self.feed.data.epoch_of(batch),
            mode: self.modes.next.name().to_owned(),
            first_mode: self.plan.first_mode.name().to_owned(),
            evaluated_through: self.due.evaluated_through,
            counts: self.counts,
        })
    }

    /// Slots begin to move, so that so many parameter servers hold them.
    pub(super) fn slots_move(&mut self, servers: u32) {
        self.slots.moving = SlotsMove::Copying { servers };
    }

    /// They are copied: the map is flipped at the next boundary.
    pub(super) fn request_flip(&mut self) {
        if let SlotsMove::Copying { servers } = self.slots.moving {
            self.slots.moving = SlotsMove::Copied { servers };
        }
    }

    /// Whether so many dense workers can train; a sentence, if not.
    pub(super) fn check_workers(&self, workers: u32) -> Result<(), String> {
        let later = self.modes.scheduled.iter().map(|(_, mode)| *mode).chain(self.modes.requested);
        let modes = [self.modes.current, self.modes.next].into_iter().chain(later);
        modes.into_iter().try_for_each(|mode| self.plan.check_workers(mode, workers))
    }

    /// There are to be so many dense workers from the next boundary on, all of which are there; `None`: as many as there are. What has
    /// become impossible since it was asked for, by a switch of the mode, waits until it is possible again.
    pub(super) fn want_workers(&mut self, workers: Option<u32>) {
        let possible = workers.filter(|workers| *workers != self.plan.workers && self.check_workers(*workers).is_ok());
        self.workers.wanted = possible;
    }

    /// Whether it is decided with how many dense workers training goes on, and not yet done.
    pub(super) fn is_regrouping(&self) -> bool {
        self.workers.next != self.plan.workers
    }

    /// Dense workers.
    pub(super) fn workers(&self) -> u32 {
        self.plan.workers
    }

    /// Of them, those that train where each step has a barrier.
    pub(super) fn barrier_workers(&self) -> u32 {
        self.plan.barrier_workers()
    }

    /// The data that is known.
    pub(super) fn data_mut(&mut self) -> &mut Announced {
        &mut self.feed.data
    }

    /// What worker `rank` does after order `done`; `None`: nothing yet.
    pub(super) fn next_order(&mut self, rank: Rank, done: u64) -> Result<Option<v1::Order>, RoleError> {
        let Some(place) = self.workers.done.get_mut(rank.0 as usize) else { return Ok(None) };
        *place = (*place).max(done);
        if done >= self.order.number {
            self.workers.ring.has_joined(rank);
        }
        self.advance()?;
        // One that has joined carries out no order from before, one that leaves none any more.
        let done = self.workers.done.get(rank.0 as usize).copied().unwrap_or(u64::MAX);
        let joins = self.workers.ring.joins(rank);
        if self.order.number > done {
            return Ok(Some(v1::Order { joins, ..self.order.clone() }));
        }
        // Others wait for what it has to tell, and may not have carried out their order.
        let tells = joins && !self.workers.ring.has_told(rank);
        Ok(tells.then(|| v1::Order { joins, order: Some(Kind::Wait(v1::Wait {})), ..self.order.clone() }))
    }

    /// The pieces of a global batch that are worker `rank`'s where each step has a barrier, and in evaluations.
    pub(super) fn share(&self, rank: Rank) -> std::ops::Range<u32> {
        share(self.plan.pieces, rank, self.barrier_workers())
    }

    /// The rows that worker `rank` trains of a batch where each step has a barrier.
    pub(super) fn rows_of_share(&self, batch: u64, share: std::ops::Range<u32>) -> u64 {
        let (rows, local) = (self.feed.data.rows_of(batch), self.plan.local_rows);
        (u64::from(share.end) * local).min(rows) - (u64::from(share.start) * local).min(rows)
    }

    /// Before which batch a worker stops that has fetched up to `from` and trains `at`, and whether the order ends there; `None`: it may
    /// fetch no further yet.
    pub(super) fn horizon(&mut self, order: u64, from: u64, at: u64) -> Result<Option<(u64, bool)>, RoleError> {
        if order != self.order.number || self.stage != Stage::Training {
            let reason = format!("order {order} is not under way");
            return Err(RoleError::Inconsistent { message: "horizon", reason });
        }
        self.advance()?;
        if self.feed.stop_at.is_none() {
            let ahead = self.feed.granted_ahead.max(self.modes.current.staleness() + LEAST_GRANTED);
            let until = self.feed.data.batches().min(at + ahead).min(self.next_rest().unwrap_or(u64::MAX));
            driver::grant(self, until)?;
            self.advance()?;
        }
        let last = self.feed.stop_at == Some(self.feed.granted);
        Ok((self.feed.granted > from || last).then_some((self.feed.granted, last)))
    }

    /// So many global batches are trained a second.
    pub(super) fn keep_pace(&mut self, batches_per_second: f64) {
        self.feed.granted_ahead = ((GRANTED_SECONDS * batches_per_second) as u64).clamp(LEAST_GRANTED, MOST_GRANTED);
    }

    /// Worker `rank` asks for a batch; `None`: none yet.
    pub(super) fn pull(&mut self, rank: Rank, order: u64) -> Result<Option<Pulled>, RoleError> {
        if self.stage != Stage::Training || order != self.order.number {
            return Ok((order <= self.order.number).then_some(Pulled::Rest));
        }
        if !self.workers.answers.contains_key(&rank)
            && self.workers.asked.insert(rank)
            && let Some(dispatcher) = self.run.dispatcher()
        {
            let answers = dispatcher.pull(rank)?;
            self.take(answers);
        }
        self.advance()?;
        if matches!(self.run.phase(), SwitchPhase::Moving { .. }) {
            self.workers.asked.remove(&rank);
            return Ok(Some(Pulled::Rest));
        }
        let Some(answer) = self.workers.answers.remove(&rank) else { return Ok(None) };
        self.workers.asked.remove(&rank);
        Ok(Some(match answer {
            Reply::Finished => Pulled::Rest,
            Reply::Work(assignment) => {
                let (batch, place) = self.feed.data.locate(assignment.batch.first_row);
                let piece = (place / self.plan.local_rows) as u32;
                let key = BatchKey { position: BatchPosition::Train(batch), piece };
                let oldest_token = self.run.dispatcher().map_or(0, |dispatcher| dispatcher.oldest_token().0);
                Pulled::Work { assignment, oldest_token, key }
            }
        }))
    }

    /// What became of a batch.
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
                let server = Server(half as u32 * self.plan.servers + server as u32);
                answers.extend(dispatcher.server_at(server, GlobalStep(*step))?);
            }
        }
        self.take(answers);
        self.counts.repeated_batches += u64::from(outcome == Outcome::Repeated);
        self.advance()
    }

    /// Goes on in `mode` from the next boundary on; gives the mode until then.
    pub(super) fn request(&mut self, mode: TrainingMode) -> Result<TrainingMode, SwitchRefused> {
        if self.stage == Stage::Ended {
            return Err(SwitchRefused::Now("training has ended".to_owned()));
        }
        if self.modes.requested.is_some() || self.modes.next != self.modes.current {
            return Err(SwitchRefused::Now("another switch of the training mode is under way".to_owned()));
        }
        if mode == self.modes.current {
            return Ok(mode);
        }
        let workers = self.workers.wanted.unwrap_or(self.plan.workers);
        self.plan.check_workers(mode, workers).map_err(SwitchRefused::Mode)?;
        self.modes.requested = Some(mode);
        Ok(self.modes.current)
    }

    /// Calls that every parameter server must be made; each is given once.
    pub(super) fn take_calls(&mut self) -> Vec<ServerCall> {
        std::mem::take(&mut self.calls)
    }

    /// Server `index` has applied what was left.
    pub(super) fn flushed(&mut self, index: u32, reply: &v1::Flushed) -> Result<(), RoleError> {
        if let Some(dispatcher) = self.run.dispatcher() {
            let dense = dispatcher.flushed(Server(index), GlobalStep(reply.dense_step))?;
            let embeddings = dispatcher.flushed(Server(self.plan.servers + index), GlobalStep(reply.embedding_step))?;
            self.take(dense);
            self.take(embeddings);
        }
        self.advance()
    }

    /// Whether slots move between parameter servers, or are about to be given up.
    pub(super) fn slots_are_moving(&self) -> bool {
        self.slots.moving != SlotsMove::No
    }

    /// The step before which an evaluation has just been ordered.
    pub(super) fn evaluation_to_begin(&mut self) -> Option<GlobalStep> {
        self.due.evaluation_to_begin.take()
    }

    /// The number and the step of the evaluation under way.
    pub(super) fn evaluating(&self) -> Option<(u64, GlobalStep)> {
        (self.stage == Stage::Evaluating).then_some((self.order.number, GlobalStep(self.order.step)))
    }

    /// The batch before which the order under way begins.
    pub(super) fn current_batch(&self) -> u64 {
        self.order.batch
    }

    /// The slot map in force.
    pub(super) fn map_epoch(&self) -> u64 {
        self.slots.map_epoch
    }

    /// Whether training has ended.
    pub(super) fn ended(&self) -> bool {
        self.stage == Stage::Ended
    }

    /// The mode it is in, or was in until it came to rest.
    pub(super) fn mode(&self) -> TrainingMode {
        self.modes.current
    }

    /// Global batches whose rows are trained or dropped. Dense workers have reported `batches` as done,
    /// where their mode has them report batches.
    pub(super) fn batches_done(&self, batches: u64) -> u64 {
        let reported =
            driver(self.modes.current).reported_batches(self, batches).filter(|_| self.stage == Stage::Training);
        reported.unwrap_or_else(|| {
            let ledger = self.run.ledger();
            self.feed.data.locate(ledger.trained_rows() + ledger.dropped_rows()).0
        })
    }

    /// All global batches before this one are trained and their gradients applied. Dense workers have
    /// reported `batches` as done, where their mode has them report batches.
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

    fn take(&mut self, answers: Answers) {
        self.workers.answers.extend(answers);
    }

    /// Goes through the stages as far as possible.
    pub(super) fn advance(&mut self) -> Result<(), RoleError> {
        loop {
            let moved = match self.stage {
                Stage::Training => driver(self.modes.current).advance(self)?,
                Stage::Resting => self.decide_at_rest()?,
                Stage::Restoring => self.order.number > 0 && self.all_done() && self.after_restore(),
                Stage::Evaluating => self.all_done() && self.after_evaluation()?,
                Stage::Saving => self.is_saved() && self.all_done() && self.after_save()?,
                Stage::Joining => self.all_done() && self.flip_or_move(self.boundary()?)?,
                Stage::Sharing => self.all_done() && self.take_in_workers()?,
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

    fn give(&mut self, at: Boundary, order: Kind) {
        let (batch, place) = self.feed.data.locate(at.next_row);
        self.order = v1::Order {
            number: self.order.number + 1,
            step: at.step.0,
            batch,
            piece: (place / self.plan.local_rows) as u32,
            map_epoch: self.slots.map_epoch,
            barrier_workers: self.barrier_workers(),
            ring: self.workers.ring.number(),
            joins: false,
            mends: self.workers.ring.is_incomplete(),
            order: Some(order),
        };
    }

    fn all_done(&self) -> bool {
        self.workers.done.iter().all(|done| *done >= self.order.number)
    }

    /// Gives the run what is known of the data, up to the next rest; while it drains also what lies behind it, of which it takes
    /// what completes its buffers.
    fn feed(&mut self) {
        let draining = matches!(self.run.phase(), SwitchPhase::Draining { .. });
        let until = if draining { u64::MAX } else { self.next_rest().unwrap_or(u64::MAX) };
        while self.feed.fed < self.feed.data.batches().min(until) {
            // The first batch may have been trained in part by the run that this one goes on from.
            let trained = self.run.next_row().saturating_sub(self.feed.data.row_of(self.feed.fed));
            let trained = if self.feed.fed == self.feed.restored_at.0 { trained } else { 0 };
            let answers = self.run.extend_data(self.feed.data.rows_of(self.feed.fed) - trained);
            self.take(answers);
            self.feed.fed += 1;
        }
        if self.feed.data.complete() && self.feed.fed == self.feed.data.batches() && !self.feed.fed_all {
            self.feed.fed_all = true;
            let answers = self.run.close_data();
            self.take(answers);
        }
    }
}

/// The mode in which training goes on: the one it was in if the manifest still asks for the same first mode, else the manifest's.
fn mode_at(plan: &JobPlan, saved: &SavedTraining) -> TrainingMode {
    if plan.mode.name() == saved.first_mode {
        return plan.mode_named(&saved.mode).unwrap_or(plan.mode);
    }
    let scheduled = plan.switches.iter().rev().find(|(batch, _)| *batch <= saved.batch);
    scheduled.map_or(plan.mode, |(_, mode)| *mode)
}

impl SavedTraining {
    /// Before step 0.
    fn nothing(mode: TrainingMode) -> Self {
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

    /// Whether training ends that goes on where a run has trained so many rows, 8 global batches and maybe a piece of the next, with data of
    /// `total` batches in all. Nobody brings more data.
    fn ends_at_once(mode: &str, trained_rows: u64, total: u64) -> bool {
        let plan = plan(mode);
        let trained = SavedTraining { step: 8, trained_rows, batch: 8, ..SavedTraining::nothing(plan.mode) };
        let saved = SavedState::new(&plan, trained);
        let mut training = Training::new(&plan, Some((&saved, Some(GlobalStep(total))))).unwrap();
        assert_eq!(training.take_calls(), [ServerCall::Restore]);
        training.rows_restored("step-000000000008".to_owned());
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
    fn a_run_that_is_to_train_less_than_an_earlier_one_has_ends_where_that_stood() {
        for mode in ["sync", "hybrid", "async", "gba", "hopBs", "hopBw", "bsp"] {
            for (pieces, total) in [(24, 8), (24, 5), (24, 1), (25, 8), (25, 5)] {
                assert!(ends_at_once(mode, pieces * 8, total), "{mode}: {pieces} pieces, and {total} batches in all");
            }
            assert!(!ends_at_once(mode, 24 * 8, 9), "{mode}: there is more to train");
        }
    }
}
