//! Where training stands and what comes next: one state machine over the run's modes ([`TrainingRun`]), its rests and its end.
//! Training rests at a global-step boundary wherever something is due: an evaluation, a switch of the mode by schedule or by
//! command, the end of the data. What the dense workers do between two such points is an order; all of them get the same
//! orders, and the next one only when all have carried out the one before. No waiting and no sending happens here: the
//! coordinator carries questions and answers to and fro, and makes the calls to the parameter servers that are asked for.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rectrain_modes::gba::{
    Answers, Assignment, Batch, Boundary, Outcome, Reply, RunMode, RunPlan, Server, SwitchPhase, TokenMode, TrainingRun,
};
use rectrain_modes::{EvaluationPoints, GlobalStep, Rank};
use rectrain_proto::v1;
use rectrain_proto::v1::order::Order as Kind;
use serde::{Deserialize, Serialize};

use super::announced::Announced;
use super::as_bytes;
use super::ring::{Mending, Ring};
use super::saved::{SavedState, SavedTraining};
use crate::batch::{BatchKey, BatchPosition};
use crate::error::RoleError;
use crate::finished::UNREPORTED;
use crate::outcome;
use crate::plan::{JobPlan, TrainingMode, share};

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

/// Counts for metrics and the summary.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct TokenCounts {
    pub(crate) issued: u64,
    pub(crate) lost: u64,
    pub(crate) dropped_batches: u64,
    pub(crate) repeated_batches: u64,
    pub(crate) switches: u64,
}

/// See the module's text.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Training {
    plan: Facts,
    run: TrainingRun,
    mode: TrainingMode,
    next_mode: TrainingMode,
    data: Announced,
    /// Batches given to the run.
    fed: u64,
    fed_all: bool,
    /// With a barrier: batches that dense workers may fetch.
    granted: u64,
    /// How many of them beyond the one that is trained.
    granted_ahead: u64,
    /// With a barrier: where the order ends, once that is known.
    stop_at: Option<u64>,
    switches: VecDeque<(u64, TrainingMode)>,
    requested: Option<TrainingMode>,
    /// Dense workers that there are to be, once all of them are there.
    wanted_workers: Option<u32>,
    /// With how many training goes on after this rest.
    next_workers: u32,
    evaluated_through: u64,
    saved_through: u64,
    save_wanted: bool,
    save: SaveStep,
    slots: SlotsMove,
    /// The slot map in force.
    map_epoch: u64,
    stage: Stage,
    #[serde(with = "as_bytes::message")]
    order: v1::Order,
    /// Where training began: the batch, and the first piece of it.
    restored_at: (u64, u32),
    /// By rank: the last order carried out.
    done: Vec<u64>,
    /// By rank: how often a dense worker took another's place.
    successions: BTreeMap<Rank, u32>,
    ring: Ring,
    asked: BTreeSet<Rank>,
    answers: BTreeMap<Rank, Reply>,
    /// A coordinator that is started again finds out anew which there are to make.
    #[serde(skip)]
    calls: Vec<ServerCall>,
    flushing: bool,
    evaluation_to_begin: Option<GlobalStep>,
    /// Of modes that have ended.
    counts: TokenCounts,
}

/// How far the checkpoint that training rests for is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum SaveStep {
    /// The servers have not all fixed the instant.
    Freezing,
    /// They have, or the checkpoint is given up.
    Frozen,
    /// It exists.
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

#[derive(Debug, Serialize, Deserialize)]
struct Facts {
    first_mode: TrainingMode,
    /// Whether there are checkpoints, and the global batches between two.
    saves: bool,
    save_every: Option<u64>,
    global_rows: u64,
    local_rows: u64,
    pieces: u32,
    workers: u32,
    /// When this attempt began.
    started_workers: u32,
    /// Of those, so many train where each step has a barrier; none: all.
    some_with_barrier: Option<u32>,
    servers: u32,
    evaluation: EvaluationPoints,
    evaluates: bool,
    tests_on_the_next_slice: bool,
}

/// A ring of dense workers after one of them was replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mended {
    /// Another ring is in force.
    Superseded { by: u64 },
    /// All go on before `step`, which trains `batch`, with the donor's parameters.
    GoesOn { step: GlobalStep, donor: Rank, batch: u64 },
}

/// How a dense worker takes a dead one's place.
struct Succession {
    /// It carries out the order under way.
    repeats: bool,
    /// Its ring has what it needs for that, or for the next one.
    lacks_parameters: bool,
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
            mode,
            next_mode: mode,
            data,
            fed: saved.batch,
            fed_all: false,
            granted: saved.batch,
            granted_ahead: MOST_GRANTED,
            stop_at: None,
            switches: plan.switches.iter().copied().filter(|(batch, _)| *batch > saved.batch).collect(),
            requested: None,
            wanted_workers: None,
            next_workers: facts.workers,
            evaluated_through: saved.evaluated_through,
            saved_through: saved.batch,
            save_wanted: false,
            save: SaveStep::Freezing,
            slots: SlotsMove::No,
            map_epoch: 0,
            stage: Stage::Restoring,
            order: v1::Order::default(),
            restored_at: (saved.batch, 0),
            done: vec![0; facts.workers as usize],
            successions: BTreeMap::new(),
            ring: Ring::default(),
            asked: BTreeSet::new(),
            answers: BTreeMap::new(),
            calls: Vec::new(),
            flushing: false,
            evaluation_to_begin: None,
            counts: saved.counts,
            plan: facts,
        };
        if resume.is_some() {
            training.restored_at.1 = training.first_piece()?;
            training.calls.push(ServerCall::Restore);
        } else {
            training.begin_first_mode();
        }
        Ok(training)
    }

    /// Dense parameters are where the mode has them: the first mode begins.
    fn begin_first_mode(&mut self) {
        let at = self.start_of_order();
        if self.mode.has_barrier() {
            self.begin_mode(at);
        } else {
            self.give(at, Kind::Publish(v1::Publish {}));
            self.stage = Stage::Moving;
        }
    }

    /// The piece of the global batch at hand that is the first to be trained.
    fn first_piece(&self) -> Result<u32, RoleError> {
        let place = self.run.next_row().saturating_sub(self.data.row_of(self.fed));
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
        let (batch, piece) = self.restored_at;
        match batch.checked_sub(first) {
            Some(batches) => (batches, piece),
            None => (0, 0),
        }
    }

    /// Every parameter server has restored its rows; dense workers take their parameters from `checkpoint`.
    pub(super) fn rows_restored(&mut self, checkpoint: String) {
        let at = self.start_of_order();
        self.give(at, Kind::Restore(v1::Restore { checkpoint }));
    }

    /// Whether it is not known yet where training goes on.
    pub(super) fn restoring(&self) -> bool {
        self.stage == Stage::Restoring
    }

    /// Saves a checkpoint at the next boundary.
    pub(super) fn request_save(&mut self) {
        self.save_wanted = true;
    }

    /// The servers have fixed the instant. Dense worker 0 writes its parameters under the `ticket`; without one there is no
    /// checkpoint of this boundary.
    pub(super) fn frozen(&mut self, ticket: Option<v1::Ticket>) -> Result<(), RoleError> {
        let at = self.boundary()?;
        self.save = SaveStep::Frozen;
        if self.mode.has_barrier()
            && let Some(ticket) = ticket
        {
            self.give(at, Kind::Save(v1::Save { ticket: Some(ticket) }));
        }
        self.advance()
    }

    /// The checkpoint of the end exists, or has to be written again.
    pub(super) fn last_saved(&mut self, exists: bool) -> Result<(), RoleError> {
        if exists {
            self.save = SaveStep::Written;
            return self.advance();
        }
        self.save = SaveStep::Freezing;
        self.calls.push(ServerCall::Save { at: self.boundary()?, last: true });
        Ok(())
    }

    /// At rest: what a run that goes on from here has to know.
    pub(super) fn save(&self) -> Result<SavedTraining, RoleError> {
        let at = self.boundary()?;
        let rows = self.run.ledger().counts();
        let (batch, _) = self.data.locate(at.next_row);
        Ok(SavedTraining {
            step: at.step.0,
            trained_rows: rows.trained_rows,
            dropped_rows: rows.dropped_rows,
            dropped_batches: rows.dropped_batches,
            batch,
            epoch: self.data.epoch_of(batch),
            mode: self.next_mode.name().to_owned(),
            first_mode: self.plan.first_mode.name().to_owned(),
            evaluated_through: self.evaluated_through,
            counts: self.counts,
        })
    }

    /// Slots begin to move, so that so many parameter servers hold them.
    pub(super) fn slots_move(&mut self, servers: u32) {
        self.slots = SlotsMove::Copying { servers };
    }

    /// They are copied: the map is flipped at the next boundary.
    pub(super) fn request_flip(&mut self) {
        if let SlotsMove::Copying { servers } = self.slots {
            self.slots = SlotsMove::Copied { servers };
        }
    }

    /// The servers are at another map.
    pub(super) fn flipped(&mut self, map_epoch: u64, servers: u32) -> Result<(), RoleError> {
        let at = self.boundary()?;
        let gathered = self.gathers(servers);
        self.map_epoch = map_epoch;
        self.plan.servers = servers;
        self.run.set_servers(2 * servers);
        self.slots = SlotsMove::Flipped;
        self.move_dense(at, self.mode.has_barrier() || gathered)?;
        self.advance()
    }

    /// No slot moves any more.
    pub(super) fn slots_settled(&mut self) -> Result<(), RoleError> {
        self.slots = SlotsMove::No;
        if self.stage == Stage::Settling {
            self.leave_rest()?;
        }
        Ok(())
    }

    /// Whether the dense parameters, which are on the servers, have to be cut anew for so many servers.
    fn gathers(&self, servers: u32) -> bool {
        !self.mode.has_barrier() && servers != self.plan.servers
    }

    /// Whether so many dense workers can train; a sentence, if not.
    pub(super) fn check_workers(&self, workers: u32) -> Result<(), String> {
        let later = self.switches.iter().map(|(_, mode)| *mode).chain(self.requested);
        let modes = [self.mode, self.next_mode].into_iter().chain(later);
        modes.into_iter().try_for_each(|mode| self.plan.check_workers(mode, workers))
    }

    /// There are to be so many dense workers from the next boundary on, all of which are there; `None`: as many as there are. What has
    /// become impossible since it was asked for, by a switch of the mode, waits until it is possible again.
    pub(super) fn want_workers(&mut self, workers: Option<u32>) {
        let possible = workers.filter(|workers| *workers != self.plan.workers && self.check_workers(*workers).is_ok());
        self.wanted_workers = possible;
    }

    /// Whether it is decided with how many dense workers training goes on, and not yet done.
    pub(super) fn is_regrouping(&self) -> bool {
        self.next_workers != self.plan.workers
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
        &mut self.data
    }

    /// What worker `rank` does after order `done`; `None`: nothing yet.
    pub(super) fn next_order(&mut self, rank: Rank, done: u64) -> Result<Option<v1::Order>, RoleError> {
        let Some(place) = self.done.get_mut(rank.0 as usize) else { return Ok(None) };
        *place = (*place).max(done);
        if done >= self.order.number {
            self.ring.has_joined(rank);
        }
        self.advance()?;
        // One that has joined carries out no order from before, one that leaves none any more.
        let done = self.done.get(rank.0 as usize).copied().unwrap_or(u64::MAX);
        let joins = self.ring.joins(rank);
        if self.order.number > done {
            return Ok(Some(v1::Order { joins, ..self.order.clone() }));
        }
        // Others wait for what it has to tell, and may not have carried out their order.
        let tells = joins && !self.ring.has_told(rank);
        Ok(tells.then(|| v1::Order { joins, order: Some(Kind::Wait(v1::Wait {})), ..self.order.clone() }))
    }

    /// Worker `rank` has died, and another is in its place; `has_done`: it has told what the order under way was for. Says whether the job goes
    /// on with the other: where the parameters are on the servers it needs nothing, and where each worker has them it gets them from one of
    /// its ring. While it trains, embedding workers keep what it has to be given where there were several from the first.
    pub(super) fn replace_worker(&mut self, rank: Rank, has_done: bool) -> bool {
        let in_ring = rank.0 < self.barrier_workers();
        let Some(Succession { repeats, lacks_parameters }) = self.succession(has_done) else { return false };
        let lacks_parameters = lacks_parameters && in_ring;
        let Some(done) = self.done.get_mut(rank.0 as usize) else { return false };
        if lacks_parameters && self.plan.barrier_workers() < 2 {
            return false;
        }
        // Training comes to no rest, and leaves none, before the order was carried out by this one.
        *done = if repeats { self.order.number.saturating_sub(1).min(*done) } else { self.order.number };
        *self.successions.entry(rank).or_default() += 1;
        if lacks_parameters {
            self.ring.replaced(rank);
        }
        if self.stage == Stage::Training && !self.mode.has_barrier() {
            self.asked.remove(&rank);
            self.answers.remove(&rank);
            let answers = self.run.dispatcher().map(|dispatcher| dispatcher.join(rank));
            self.take(answers.unwrap_or_default());
        }
        true
    }

    /// What is to be done by a dense worker that takes a dead one's place now; none: the job begins anew.
    fn succession(&self, has_done: bool) -> Option<Succession> {
        let order = self.order.order.as_ref();
        let reads = matches!(order, Some(Kind::ReadBack(_)));
        let publishes = matches!(order, Some(Kind::Publish(_)));
        // Everybody has the same before the first order, and a first publication is of just that.
        let is_pristine = self.order.number == 0 || (self.order.number == 1 && publishes);
        let (repeats, on_workers) = match self.stage {
            // Another dense worker's batches are asked for again of embedding workers, which keep none where there was a single one.
            Stage::Training if self.plan.started_workers < 2 => return None,
            Stage::Training => (true, self.mode.has_barrier()),
            Stage::Restoring => (self.order.number > 0, false),
            Stage::Evaluating => (!has_done, self.mode.has_barrier()),
            Stage::Saving => (matches!(order, Some(Kind::Save(_))), self.mode.has_barrier()),
            Stage::Sharing => (true, true),
            Stage::Joining | Stage::Gathering => (true, false),
            Stage::Moving => (true, publishes),
            Stage::Resting | Stage::Settling => (false, self.mode.has_barrier()),
            Stage::Flipping => (false, self.mode.has_barrier() || reads),
            Stage::Beginning => (false, self.next_mode.has_barrier()),
            Stage::Ended if has_done => (false, false),
            // The others may have told their parameters' digest, and be past giving them.
            Stage::Ended if self.mode.has_barrier() => return None,
            Stage::Ended => (true, false),
        };
        Some(Succession { repeats, lacks_parameters: on_workers && !is_pristine })
    }

    /// Whether dense worker 0 is to save its parameters, and may not have.
    pub(super) fn saves_dense(&self) -> bool {
        self.stage == Stage::Saving && matches!(self.order.order, Some(Kind::Save(_)))
    }

    /// How often this worker took another's place: who asked before it did is dead.
    pub(super) fn successions(&self, rank: Rank) -> u32 {
        self.successions.get(&rank).copied().unwrap_or(0)
    }

    /// The number of the ring, if it is another than `known`.
    pub(super) fn ring_after(&self, known: u64) -> Option<u64> {
        (self.ring.number() > known).then_some(self.ring.number())
    }

    /// Worker `rank` tells before which step its parameters stand, if it has any; `None`: not all have told yet. The batch is the one that is
    /// trained by this step.
    pub(super) fn mend(
        &mut self,
        rank: Rank,
        ring: u64,
        step: Option<GlobalStep>,
    ) -> Result<Option<Mended>, RoleError> {
        let number = self.ring.number();
        let last = GlobalStep(self.order.step + self.granted.saturating_sub(self.order.batch));
        if let Some(step) = step.filter(|step| ring == number && *step > last) {
            let reason = format!("dense worker {rank} says it is before step {step}, and no one may be beyond {last}");
            return Err(RoleError::Inconsistent { message: "mend", reason });
        }
        match self.ring.tell(rank, ring, step, self.barrier_workers()) {
            Mending::Waits => Ok(None),
            Mending::Superseded => Ok(Some(Mended::Superseded { by: number })),
            Mending::Mended { step, donor } => {
                let batch = self.order.batch + step.0.saturating_sub(self.order.step);
                Ok(Some(Mended::GoesOn { step, donor, batch }))
            }
            Mending::Lost => Err(RoleError::Restarted { member: "every dense worker".to_owned() }),
        }
    }

    /// The pieces of a global batch that are worker `rank`'s where each step has a barrier, and in evaluations.
    pub(super) fn share(&self, rank: Rank) -> std::ops::Range<u32> {
        share(self.plan.pieces, rank, self.barrier_workers())
    }

    /// The rows that worker `rank` trains of a batch where each step has a barrier.
    pub(super) fn rows_of_share(&self, batch: u64, share: std::ops::Range<u32>) -> u64 {
        let (rows, local) = (self.data.rows_of(batch), self.plan.local_rows);
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
        if self.stop_at.is_none() {
            let ahead = self.granted_ahead.max(self.mode.staleness() + LEAST_GRANTED);
            let until = self.data.batches().min(at + ahead).min(self.next_rest().unwrap_or(u64::MAX));
            self.grant(until)?;
            self.advance()?;
        }
        let last = self.stop_at == Some(self.granted);
        Ok((self.granted > from || last).then_some((self.granted, last)))
    }

    /// So many global batches are trained a second.
    pub(super) fn keep_pace(&mut self, batches_per_second: f64) {
        self.granted_ahead = ((GRANTED_SECONDS * batches_per_second) as u64).clamp(LEAST_GRANTED, MOST_GRANTED);
    }

    /// Worker `rank` asks for a batch; `None`: none yet.
    pub(super) fn pull(&mut self, rank: Rank, order: u64) -> Result<Option<Pulled>, RoleError> {
        if self.stage != Stage::Training || order != self.order.number {
            return Ok((order <= self.order.number).then_some(Pulled::Rest));
        }
        if !self.answers.contains_key(&rank)
            && self.asked.insert(rank)
            && let Some(dispatcher) = self.run.dispatcher()
        {
            let answers = dispatcher.pull(rank)?;
            self.take(answers);
        }
        self.advance()?;
        if matches!(self.run.phase(), SwitchPhase::Moving { .. }) {
            self.asked.remove(&rank);
            return Ok(Some(Pulled::Rest));
        }
        let Some(answer) = self.answers.remove(&rank) else { return Ok(None) };
        self.asked.remove(&rank);
        Ok(Some(match answer {
            Reply::Finished => Pulled::Rest,
            Reply::Work(assignment) => {
                let (batch, place) = self.data.locate(assignment.batch.first_row);
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
            let reason = format!("training is in mode {}", self.mode.name());
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
        if self.requested.is_some() || self.next_mode != self.mode {
            return Err(SwitchRefused::Now("another switch of the training mode is under way".to_owned()));
        }
        if mode == self.mode {
            return Ok(mode);
        }
        let workers = self.wanted_workers.unwrap_or(self.plan.workers);
        self.plan.check(mode, workers).map_err(SwitchRefused::Mode)?;
        self.requested = Some(mode);
        Ok(self.mode)
    }

    /// Calls that every parameter server must be made; each is given once.
    pub(super) fn take_calls(&mut self) -> Vec<ServerCall> {
        std::mem::take(&mut self.calls)
    }

    /// Every parameter server has begun the mode.
    pub(super) fn begun(&mut self) -> Result<(), RoleError> {
        for server in 0..2 * self.plan.servers {
            self.run.moved(Server(server))?;
        }
        self.start();
        self.advance()
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
        self.slots != SlotsMove::No
    }

    /// The calls to the servers that were asked for, in the coordinator's life before: whether they were made is not known, and made twice
    /// they do what they do once.
    pub(super) fn call_again(&mut self) -> Result<(), RoleError> {
        self.calls.clear();
        match self.stage {
            Stage::Beginning => {
                let at = self.boundary().unwrap_or_else(|_| self.start_of_order());
                self.begin_mode(at);
            }
            Stage::Training if self.flushing => self.calls.push(ServerCall::Flush),
            Stage::Saving => {
                let at = self.boundary()?;
                let last = self.is_at_end(at);
                // The one of the end has to exist, and who was writing it is dead.
                if self.save == SaveStep::Freezing || (last && self.save == SaveStep::Frozen) {
                    self.save = SaveStep::Freezing;
                    self.calls.push(ServerCall::Save { at, last });
                }
            }
            _ => {}
        }
        self.advance()
    }

    /// The step before which an evaluation has just been ordered.
    pub(super) fn evaluation_to_begin(&mut self) -> Option<GlobalStep> {
        self.evaluation_to_begin.take()
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
        self.map_epoch
    }

    /// Whether training has ended.
    pub(super) fn ended(&self) -> bool {
        self.stage == Stage::Ended
    }

    /// The mode it is in, or was in until it came to rest.
    pub(super) fn mode(&self) -> TrainingMode {
        self.mode
    }

    /// Global batches whose rows are trained or dropped, workers with a barrier having done `batches`.
    pub(super) fn batches_done(&self, batches: u64) -> u64 {
        if self.mode.has_barrier() && self.stage == Stage::Training {
            return batches.max(self.order.batch);
        }
        let ledger = self.run.ledger();
        self.data.locate(ledger.trained_rows() + ledger.dropped_rows()).0
    }

    /// All global batches before this one are trained and their gradients applied, workers with a barrier having computed `batches`:
    /// the gradients of the last τ + 2 steps of those may still be on their way.
    pub(super) fn settled_batches(&self, batches: u64) -> u64 {
        if self.mode.has_barrier() && self.stage == Stage::Training {
            return batches.saturating_sub(self.mode.staleness() + 2).max(self.order.batch);
        }
        self.data.locate(self.run.ledger().first_unsettled()).0
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
        self.answers.extend(answers);
    }

    /// Goes through the stages as far as possible.
    pub(super) fn advance(&mut self) -> Result<(), RoleError> {
        loop {
            let moved = match self.stage {
                Stage::Training if self.mode.has_barrier() => self.advance_barrier()?,
                Stage::Training => self.advance_tokens()?,
                Stage::Resting => self.decide_at_rest()?,
                Stage::Restoring => self.order.number > 0 && self.all_done() && self.after_restore(),
                Stage::Evaluating => self.all_done() && self.after_evaluation()?,
                Stage::Saving => self.is_saved()? && self.all_done() && self.leave_rest()?,
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

    fn advance_barrier(&mut self) -> Result<bool, RoleError> {
        self.feed();
        let rest = self.next_rest();
        let ends = self.fed_all && self.granted == self.data.batches();
        if self.stop_at.is_none() && (ends || rest == Some(self.granted) || self.is_asked_to_rest()) {
            self.stop_at = Some(self.granted);
        }
        if self.stop_at != Some(self.granted) || !self.all_done() {
            return Ok(false);
        }
        self.choose_what_is_next();
        self.run.rest(self.plan.run_mode(self.next_mode, self.next_workers))?;
        let steps = self.order.step..self.order.step + (self.granted - self.order.batch);
        for step in steps {
            self.run.sync_step_applied(GlobalStep(step))?;
        }
        self.run.advance()?;
        self.enter_rest()?;
        Ok(true)
    }

    fn advance_tokens(&mut self) -> Result<bool, RoleError> {
        self.feed();
        if *self.run.phase() == SwitchPhase::Training && (self.is_asked_to_rest() || self.is_exhausted()) {
            self.choose_what_is_next();
            self.run.rest(self.plan.run_mode(self.next_mode, self.next_workers))?;
            self.feed();
        }
        if matches!(self.run.phase(), SwitchPhase::Draining { .. }) {
            let counts = self.counts();
            let flush = !self.run.advance()?.is_empty() && matches!(self.run.phase(), SwitchPhase::Draining { .. });
            if flush && !std::mem::replace(&mut self.flushing, true) {
                self.calls.push(ServerCall::Flush);
            }
            if matches!(self.run.phase(), SwitchPhase::Moving { .. }) {
                self.counts = TokenCounts { dropped_batches: 0, ..counts };
            }
        }
        if !matches!(self.run.phase(), SwitchPhase::Moving { .. }) || !self.all_done() {
            return Ok(false);
        }
        self.enter_rest()?;
        Ok(true)
    }

    fn enter_rest(&mut self) -> Result<(), RoleError> {
        let at = self.boundary()?;
        self.flushing = false;
        self.asked.clear();
        self.answers.clear();
        self.granted = self.data.locate(at.next_row).0;
        self.stage = Stage::Resting;
        Ok(())
    }

    /// At rest: predict if that is due.
    fn decide_at_rest(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        let due = self.evaluation_due().is_some_and(|due| due <= self.granted);
        if due && self.plan.tests_on_the_next_slice && !self.data.complete() && self.data.batches() == self.granted {
            // Whether there is a next slice is not known yet.
            return Ok(false);
        }
        let evaluate = if self.is_at_end(at) { !self.plan.tests_on_the_next_slice } else { due };
        if !(self.plan.evaluates && evaluate) {
            return self.after_evaluation();
        }
        self.evaluated_through = self.granted;
        self.evaluation_to_begin = Some(at.step);
        self.give(at, Kind::Evaluate(v1::Evaluate { read: !self.mode.has_barrier() }));
        self.stage = Stage::Evaluating;
        Ok(true)
    }

    fn after_restore(&mut self) -> bool {
        self.begin_first_mode();
        true
    }

    /// At rest: save a checkpoint if that is due.
    fn after_evaluation(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        let last = self.is_at_end(at);
        let due = self.save_due().is_some_and(|due| due <= self.granted) && self.saved_through < self.granted;
        if !self.plan.saves || !(last || due || self.save_wanted) {
            return self.leave_rest();
        }
        self.saved_through = self.granted;
        self.save_wanted = false;
        self.save = SaveStep::Freezing;
        self.calls.push(ServerCall::Save { at, last });
        self.stage = Stage::Saving;
        Ok(true)
    }

    fn is_saved(&self) -> Result<bool, RoleError> {
        let last = self.is_at_end(self.boundary()?);
        Ok(self.save == SaveStep::Written || (self.save == SaveStep::Frozen && !last))
    }

    fn leave_rest(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        if self.is_at_end(at) {
            if self.slots != SlotsMove::No {
                self.calls.push(ServerCall::SettleSlots);
                self.stage = Stage::Settling;
                return Ok(false);
            }
            self.give(at, Kind::End(v1::End { read: !self.mode.has_barrier() }));
            self.stage = Stage::Ended;
            return Ok(false);
        }
        if self.is_regrouping() {
            if self.next_workers > self.plan.workers && self.mode.has_barrier() && self.next_mode.has_barrier() {
                self.give(at, Kind::Publish(v1::Publish {}));
                self.stage = Stage::Sharing;
                return Ok(true);
            }
            self.regroup();
        }
        self.flip_or_move(at)
    }

    /// From here on there are so many dense workers. Those that join have carried out what was ordered so far.
    fn regroup(&mut self) {
        self.plan.workers = self.next_workers;
        self.wanted_workers = None;
        self.done.resize(self.next_workers as usize, self.order.number);
    }

    /// The dense parameters are on the servers: all workers, those that join among them, read them from there.
    fn take_in_workers(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        self.regroup();
        self.give(at, Kind::ReadBack(v1::ReadBack {}));
        self.stage = Stage::Joining;
        Ok(true)
    }

    fn flip_or_move(&mut self, at: Boundary) -> Result<bool, RoleError> {
        if let SlotsMove::Copied { servers } = self.slots {
            if !self.gathers(servers) {
                return Ok(self.flip());
            }
            self.give(at, Kind::ReadBack(v1::ReadBack {}));
            self.stage = Stage::Gathering;
            return Ok(true);
        }
        self.move_dense(at, self.mode.has_barrier())
    }

    fn flip(&mut self) -> bool {
        self.calls.push(ServerCall::Flip);
        self.stage = Stage::Flipping;
        true
    }

    /// Brings the dense parameters, which the workers hold or the servers, to where the next mode has them.
    fn move_dense(&mut self, at: Boundary, on_workers: bool) -> Result<bool, RoleError> {
        match (on_workers, self.next_mode.has_barrier()) {
            (true, false) => self.give(at, Kind::Publish(v1::Publish {})),
            (false, true) => self.give(at, Kind::ReadBack(v1::ReadBack {})),
            _ => return self.begin_after_move(),
        }
        self.stage = Stage::Moving;
        Ok(true)
    }

    fn begin_after_move(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        self.begin_mode(at);
        Ok(false)
    }

    fn begin_mode(&mut self, at: Boundary) {
        let (_, place) = self.data.locate(at.next_row);
        let first_piece = (place / self.plan.local_rows) as u32;
        self.calls.push(ServerCall::Begin { mode: self.next_mode, at, first_piece });
        self.stage = Stage::Beginning;
    }

    /// All servers are in the mode: dense workers train.
    fn start(&mut self) {
        self.counts.switches += u64::from(self.mode != self.next_mode);
        self.mode = self.next_mode;
        self.stop_at = None;
        let at = self.start_of_order();
        if self.mode.has_barrier() {
            self.give(at, Kind::Barrier(v1::Barrier { staleness: self.mode.staleness() }));
        } else {
            let workers = self.plan.workers;
            let answers: Answers = self
                .run
                .dispatcher()
                .map_or_else(Vec::new, |d| (0..workers).flat_map(|rank| d.join(Rank(rank))).collect());
            self.take(answers);
            self.give(at, Kind::Tokens(v1::Tokens {}));
        }
        self.stage = Stage::Training;
    }

    fn start_of_order(&self) -> Boundary {
        let (step, next_row) = (self.run.next_step(), self.run.next_row());
        Boundary { step, next_row }
    }

    fn give(&mut self, at: Boundary, order: Kind) {
        let (batch, place) = self.data.locate(at.next_row);
        self.order = v1::Order {
            number: self.order.number + 1,
            step: at.step.0,
            batch,
            piece: (place / self.plan.local_rows) as u32,
            map_epoch: self.map_epoch,
            barrier_workers: self.barrier_workers(),
            ring: self.ring.number(),
            joins: false,
            mends: self.ring.is_incomplete(),
            order: Some(order),
        };
    }

    fn boundary(&self) -> Result<Boundary, RoleError> {
        match self.run.phase() {
            SwitchPhase::Moving { at, .. } => Ok(*at),
            _ => Err(RoleError::Inconsistent { message: "order", reason: "training is not at rest".to_owned() }),
        }
    }

    fn is_at_end(&self, at: Boundary) -> bool {
        self.data.complete() && at.next_row == self.data.row_of(self.data.batches())
    }

    fn all_done(&self) -> bool {
        self.done.iter().all(|done| *done >= self.order.number)
    }

    /// The mode after this rest: a command's, else the schedule's. And the dense workers that there are to be.
    fn choose_what_is_next(&mut self) {
        self.next_workers = self.wanted_workers.take().unwrap_or(self.plan.workers);
        let here = if self.mode.has_barrier() { self.granted } else { self.data.locate(self.run.next_row()).0 };
        self.next_mode = self.mode;
        while let Some((_, mode)) = self.switches.front().copied().filter(|(batch, _)| *batch <= here) {
            self.switches.pop_front();
            self.next_mode = mode;
        }
        if let Some(mode) = self.requested.take() {
            self.next_mode = mode;
        }
    }

    fn is_asked_to_rest(&self) -> bool {
        let flips = matches!(self.slots, SlotsMove::Copied { .. });
        flips || self.requested.is_some() || self.wanted_workers.is_some() || (self.save_wanted && self.plan.saves)
    }

    /// The next batch before which training rests, as far as that is known.
    fn next_rest(&self) -> Option<u64> {
        let switch = self.switches.front().map(|(batch, _)| *batch);
        let evaluation = if self.plan.evaluates { self.evaluation_due() } else { None };
        switch.into_iter().chain(evaluation).chain(self.save_due()).min()
    }

    fn save_due(&self) -> Option<u64> {
        self.plan.save_every.map(|every| (self.saved_through / every + 1) * every)
    }

    fn evaluation_due(&self) -> Option<u64> {
        self.plan.evaluation.next_after(self.evaluated_through, self.data.epoch_starts())
    }

    /// Gives the run what is known of the data, up to the next rest; while it drains also what lies behind it, of which it takes
    /// what completes its buffers.
    fn feed(&mut self) {
        let draining = matches!(self.run.phase(), SwitchPhase::Draining { .. });
        let until = if draining { u64::MAX } else { self.next_rest().unwrap_or(u64::MAX) };
        while self.fed < self.data.batches().min(until) {
            // The first batch may have been trained in part by the run that this one goes on from.
            let trained = self.run.next_row().saturating_sub(self.data.row_of(self.fed));
            let trained = if self.fed == self.restored_at.0 { trained } else { 0 };
            let answers = self.run.extend_data(self.data.rows_of(self.fed) - trained);
            self.take(answers);
            self.fed += 1;
        }
        if self.data.complete() && self.fed == self.data.batches() && !self.fed_all {
            self.fed_all = true;
            let answers = self.run.close_data();
            self.take(answers);
        }
    }

    /// Without a barrier: all rows before the next rest, or all there are, have been handed out.
    fn is_exhausted(&self) -> bool {
        let row = self.run.next_row();
        let rest = self.next_rest().filter(|rest| *rest <= self.data.batches());
        rest.is_some_and(|rest| row >= self.data.row_of(rest))
            || (self.fed_all && row == self.data.row_of(self.data.batches()))
    }

    fn grant(&mut self, until: u64) -> Result<(), RoleError> {
        self.feed();
        while self.granted < until {
            if self.run.next_sync_step()?.is_none() {
                break;
            }
            self.granted += 1;
        }
        Ok(())
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

impl Facts {
    fn of(plan: &JobPlan) -> Self {
        Self {
            first_mode: plan.mode,
            saves: plan.checkpoint.is_some(),
            save_every: plan.checkpoint.as_ref().and_then(|checkpoint| checkpoint.every_steps),
            global_rows: plan.global_batch_rows,
            local_rows: plan.local_batch_rows,
            pieces: plan.pieces(),
            workers: plan.replicas.dense_workers,
            started_workers: plan.replicas.dense_workers,
            some_with_barrier: plan.some_with_barrier,
            servers: plan.replicas.ps,
            evaluation: plan.evaluation,
            evaluates: plan.test.is_some(),
            tests_on_the_next_slice: plan.tests_on_the_next_slice,
        }
    }

    fn barrier_workers(&self) -> u32 {
        self.some_with_barrier.map_or(self.workers, |some| some.min(self.workers))
    }

    fn run_mode(&self, mode: TrainingMode, workers: u32) -> RunMode {
        match mode {
            TrainingMode::Sync | TrainingMode::Hybrid { .. } => RunMode::Sync,
            TrainingMode::Tokens(mode) => RunMode::Tokens { mode, workers, local_rows: self.local_rows as u32 },
        }
    }

    fn check_workers(&self, mode: TrainingMode, workers: u32) -> Result<(), String> {
        if mode.has_barrier() && workers > self.pieces {
            return Err(format!(
                "with a barrier each of {workers} dense workers needs a local batch of its own, and a global batch has {}: set spec.training.localBatchSize to {} or less",
                self.pieces,
                self.global_rows / u64::from(workers),
            ));
        }
        if let Some(some) = self.some_with_barrier.filter(|some| workers < *some) {
            return Err(format!(
                "{some} dense workers train with a barrier (spec.training.barrierWorkers): expected no fewer, found {workers}"
            ));
        }
        self.check(mode, workers)
    }

    fn check(&self, mode: TrainingMode, workers: u32) -> Result<(), String> {
        let TrainingMode::Tokens(tokens) = mode else { return Ok(()) };
        if matches!(tokens, TokenMode::HopBw { .. }) && workers != self.started_workers {
            return Err(format!(
                "in mode hopBw a global step has as many gradients as there were dense workers at first, which is {}",
                self.started_workers
            ));
        }
        tokens.validate(workers).map_err(|error| error.to_string())?;
        if u64::from(self.pieces) * self.local_rows != self.global_rows {
            return Err(format!(
                "a global batch of {} rows cannot be cut into local batches of {} rows: set spec.training.localBatchSize",
                self.global_rows, self.local_rows
            ));
        }
        Ok(())
    }
}
