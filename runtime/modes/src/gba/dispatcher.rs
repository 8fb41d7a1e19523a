//! The coordinator's half of the modes without a barrier (§4.1, appendix B; §5.1 for the
//! baselines). It hands each worker that requests work the next batch with its token, and decides
//! when.
//!
//! | mode | the next batch is handed out | a global step is |
//! |---|---|---|
//! | `async` | at once | one gradient |
//! | `gba` | at once | M gradients, decayed by f(τ, k) |
//! | `bsp` | at once | b2 gradients of any version |
//! | `hopBs` | while the worker is at most b1 batches ahead of the slowest | one gradient |
//! | `hopBw` | once the worker's last step is applied | the first N − b3 gradients of N workers; later ones are dropped |
//!
//! Tokens of `gba` come from the token list. In the other modes, the token is the global step as
//! the coordinator knows it. A worker that dies loses its tokens, and no worker waits for it. The
//! dispatcher hands its batches out again with new tokens. With fewer than N − b3 workers left,
//! `hopBw` cannot finish a step until a worker returns.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use rectrain_kinds::Mode;
use serde::{Deserialize, Serialize};

use crate::gba::{BufferSize, Decay, LostTokens, TokenList};
use crate::{Answers, Assignment, CoordinatorHalf, GlobalStep, Rank, Reply};
use crate::{Batch, DataList, Next, Outcome, RowLedger, RowLedgerError, Server, Settled, Token};

/// A mode without a barrier, with its settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum TokenMode {
    /// Each gradient is applied on arrival.
    Async,
    /// Global-batch gradient aggregation.
    Gba {
        /// M.
        buffer: BufferSize,
        /// f.
        decay: Decay,
        /// How lost tokens are treated.
        lost_tokens: LostTokens,
    },
    /// Bounded staleness.
    HopBs {
        /// b1: the largest difference between the versions (batches begun) of the fastest and the
        /// slowest worker.
        bound: u64,
    },
    /// Backup workers.
    HopBw {
        /// b3: the number of gradients ignored in each step, from the slowest workers.
        backups: u32,
    },
    /// Asynchronous bulk synchronous parallel.
    Bsp {
        /// b2: gradients in a step.
        aggregate: BufferSize,
    },
}

impl TokenMode {
    /// Gradients in a global step with `workers` configured workers.
    #[must_use]
    pub fn capacity(self, workers: u32) -> BufferSize {
        match self {
            Self::Async | Self::HopBs { .. } => BufferSize::ONE,
            Self::Gba { buffer, .. } => buffer,
            Self::Bsp { aggregate } => aggregate,
            Self::HopBw { backups } => BufferSize::new(workers.saturating_sub(backups)).unwrap_or(BufferSize::ONE),
        }
    }

    /// The weight of stale gradients.
    #[must_use]
    pub fn decay(self) -> Decay {
        if let Self::Gba { decay, .. } = self { decay } else { Decay::None }
    }

    /// The mode without its settings.
    #[must_use]
    pub const fn kind(self) -> Mode {
        match self {
            Self::Async => Mode::Async,
            Self::Gba { .. } => Mode::Gba,
            Self::HopBs { .. } => Mode::HopBs,
            Self::HopBw { .. } => Mode::HopBw,
            Self::Bsp { .. } => Mode::Bsp,
        }
    }

    /// Checks whether `workers` workers can train in this mode.
    pub fn validate(self, workers: u32) -> Result<(), DispatchError> {
        match self {
            Self::HopBw { backups } if backups >= workers => Err(DispatchError::NoQuorum { backups, workers }),
            _ if workers == 0 => Err(DispatchError::NoWorkers),
            _ => Ok(()),
        }
    }
}

/// Invalid settings or messages.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DispatchError {
    /// Every gradient would be ignored.
    #[error("hopBw ignores {backups} gradients a step, but there are only {workers} workers: b3 must be smaller")]
    NoQuorum { backups: u32, workers: u32 },
    /// There is no worker to train.
    #[error("training without a barrier needs at least one dense worker")]
    NoWorkers,
    /// A worker that did not join, or that was lost.
    #[error("rank {rank} is not among the workers: it must join (again) first")]
    UnknownRank { rank: Rank },
    /// A worker that sends a second request before the first is answered.
    #[error("rank {rank} asked for a batch while its last request is unanswered")]
    AskedTwice { rank: Rank },
    /// A server number outside the job's servers.
    #[error("server {server} reported, but the job has {servers} parameter servers")]
    UnknownServer { server: Server, servers: u32 },
    /// A report that contradicts the row ledger.
    #[error("a batch could not be accounted for: {0}")]
    Ledger(#[from] RowLedgerError),
}

/// The settings with which a dispatcher starts.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct DispatcherSetup {
    /// The mode.
    pub mode: TokenMode,
    /// N: configured workers.
    pub workers: u32,
    /// Parameter servers.
    pub servers: u32,
    /// The first global step.
    pub first_step: GlobalStep,
    /// The most batches that one worker may hold without having reported them (at least 1).
    pub in_flight_limit: usize,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Member {
    in_flight: Vec<Assignment>,
    /// Batches reported, which is the version of the oldest batch that it holds (`hopBs`).
    version: u64,
    /// The last step for which it took a batch (`hopBw`).
    last_step: Option<GlobalStep>,
}

/// The dispatcher as a state machine; see the module's documentation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Dispatcher {
    setup: DispatcherSetup,
    capacity: u64,
    tokens: TokenList,
    data: DataList,
    ledger: RowLedger,
    members: BTreeMap<Rank, Member>,
    /// The number of members at each version (`hopBs`).
    versions: BTreeMap<u64, u32>,
    waiting: VecDeque<Rank>,
    in_flight: usize,
    /// The step that each server is filling.
    server_steps: Vec<GlobalStep>,
    /// Fresh batches handed out.
    fresh: u64,
    /// Batches handed out.
    handed_out: u64,
    /// The last step for which a batch was handed out.
    begun: Option<GlobalStep>,
    drain: Option<Drain>,
    /// Servers that flushed their buffers at the end of the data.
    flushed: BTreeSet<Server>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Drain {
    /// The limit for the number of fresh batches handed out in all.
    Fresh(u64),
    /// `hopBw`: no batch is handed out for this step or a later one.
    Step(GlobalStep),
}

impl Dispatcher {
    /// A dispatcher that hands out the rows of `data` and accounts for them in `ledger`. The ledger
    /// must prove a boundary at the first row of `data`. No worker has joined.
    pub fn new(setup: DispatcherSetup, data: DataList, ledger: RowLedger) -> Result<Self, DispatchError> {
        setup.mode.validate(setup.workers)?;
        ledger.prove_boundary(data.next_row())?;
        let capacity = setup.mode.capacity(setup.workers);
        let lost_tokens = match setup.mode {
            TokenMode::Gba { lost_tokens, .. } => lost_tokens,
            _ => LostTokens::Vanish,
        };
        Ok(Self {
            setup: DispatcherSetup { in_flight_limit: setup.in_flight_limit.max(1), ..setup },
            capacity: u64::from(capacity.get()),
            tokens: TokenList::new(capacity, lost_tokens, setup.first_step),
            data,
            ledger,
            members: BTreeMap::new(),
            versions: BTreeMap::new(),
            waiting: VecDeque::new(),
            in_flight: 0,
            server_steps: vec![setup.first_step; setup.servers.max(1) as usize],
            fresh: 0,
            handed_out: 0,
            begun: None,
            drain: None,
            flushed: BTreeSet::new(),
        })
    }

    /// A worker joins. If it held batches from before a failure, it loses them first.
    pub fn join(&mut self, rank: Rank) -> Answers {
        let answers = self.lose(rank);
        let version = self.slowest_version().unwrap_or(0);
        self.members.insert(rank, Member { version, ..Member::default() });
        *self.versions.entry(version).or_default() += 1;
        answers
    }

    /// A worker is dead: its tokens are lost, and other workers get its batches. Its unanswered
    /// request is dropped. If the worker is alive after all, it must join and pull again.
    pub fn lose(&mut self, rank: Rank) -> Answers {
        let Some(member) = self.members.remove(&rank) else { return Vec::new() };
        self.forget_version(member.version);
        self.waiting.retain(|waiting| *waiting != rank);
        self.in_flight -= member.in_flight.len();
        for assignment in member.in_flight {
            self.tokens.lose();
            self.data.give_back(assignment.batch);
        }
        self.serve()
    }

    /// A worker requests a batch and a token. The answer is in this call's result, or in the result
    /// of a later call.
    pub fn pull(&mut self, rank: Rank) -> Result<Answers, DispatchError> {
        if !self.members.contains_key(&rank) {
            return Err(DispatchError::UnknownRank { rank });
        }
        if self.waiting.contains(&rank) {
            return Err(DispatchError::AskedTwice { rank });
        }
        if let Some(reply) = self.answer(rank) {
            return Ok(vec![(rank, reply)]);
        }
        self.waiting.push_back(rank);
        Ok(Vec::new())
    }

    /// The worker that pushed a batch reports its outcome. Reports of workers presumed dead count
    /// as well.
    pub fn report(&mut self, rank: Rank, batch: Batch, outcome: Outcome) -> Result<Answers, DispatchError> {
        if self.ledger.settle(batch, outcome)? == Settled::Now {
            self.data.forget(batch);
        }
        let slowest = self.slowest_version();
        let Some(member) = self.members.get_mut(&rank) else { return Ok(self.serve_if_ended()) };
        if outcome == Outcome::Repeated {
            // Its batch added nothing to the step (`hopBw`), so it may add another batch to that
            // step.
            member.last_step = None;
        }
        let Some(place) = member.in_flight.iter().position(|a| a.batch == batch) else {
            return Ok(if self.finished() { self.serve() } else { self.serve_one(rank) });
        };
        member.in_flight.swap_remove(place);
        let version = member.version;
        member.version += 1;
        self.in_flight -= 1;
        *self.versions.entry(version + 1).or_default() += 1;
        self.forget_version(version);
        if self.slowest_version() != slowest || self.in_flight == 0 {
            return Ok(self.serve());
        }
        Ok(self.serve_one(rank))
    }

    /// A server is now filling step `step`.
    pub fn server_at(&mut self, server: Server, step: GlobalStep) -> Result<Answers, DispatchError> {
        let servers = self.server_steps.len() as u32;
        let before = self.step();
        let place = self.server_steps.get_mut(server.0 as usize);
        let place = place.ok_or(DispatchError::UnknownServer { server, servers })?;
        *place = (*place).max(step);
        Ok(if self.hop_bw() && self.step() > before { self.serve() } else { Vec::new() })
    }

    /// A server has flushed its buffer, because [`Self::needs_flush`], and is now before step
    /// `step`.
    pub fn flushed(&mut self, server: Server, step: GlobalStep) -> Result<Answers, DispatchError> {
        let answers = self.server_at(server, step)?;
        self.flushed.insert(server);
        Ok(answers)
    }

    /// The step that the slowest server is filling.
    #[must_use]
    pub fn step(&self) -> GlobalStep {
        self.server_steps.iter().min().copied().unwrap_or(self.setup.first_step)
    }

    /// Whether all data is trained.
    #[must_use]
    pub fn finished(&self) -> bool {
        self.data.finished() && self.in_flight == 0
    }

    /// A lower bound for the tokens of gradients that have not arrived yet.
    #[must_use]
    pub fn oldest_token(&self) -> Token {
        let held = self.members.values().flat_map(|member| &member.in_flight).map(|assignment| assignment.token).min();
        held.unwrap_or(Token(self.step().0))
    }

    /// Batches handed out with a token so far, lost ones included.
    #[must_use]
    pub fn tokens_issued(&self) -> u64 {
        self.handed_out
    }

    /// The token list.
    #[must_use]
    pub fn tokens(&self) -> &TokenList {
        &self.tokens
    }

    /// Batches that workers hold.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Workers whose request is unanswered.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The largest difference between the versions of two batches in flight (`hopBs` keeps it ≤
    /// b1).
    #[must_use]
    pub fn version_spread(&self) -> u64 {
        let begun = self.members.values().filter(|m| !m.in_flight.is_empty());
        let newest = begun.map(|m| m.version + m.in_flight.len() as u64 - 1).max();
        newest.zip(self.slowest_version()).map_or(0, |(newest, slowest)| newest.saturating_sub(slowest))
    }

    fn hop_bw(&self) -> bool {
        matches!(self.setup.mode, TokenMode::HopBw { .. })
    }

    fn slowest_version(&self) -> Option<u64> {
        self.versions.keys().next().copied()
    }

    fn forget_version(&mut self, version: u64) {
        if let Some(count) = self.versions.get_mut(&version) {
            *count -= 1;
            if *count == 0 {
                self.versions.remove(&version);
            }
        }
    }

    /// Answers all waiting workers that can be answered now.
    fn serve(&mut self) -> Answers {
        self.postpone_rest();
        let waiting = std::mem::take(&mut self.waiting);
        let mut answers = Vec::new();
        for rank in waiting {
            match self.answer(rank) {
                Some(reply) => answers.push((rank, reply)),
                None => self.waiting.push_back(rank),
            }
        }
        answers
    }

    /// Extends the drain of `hopBw` by one step if the last step before the boundary had no room
    /// for the batches of dead workers.
    fn postpone_rest(&mut self) {
        if let Some(Drain::Step(limit)) = self.drain
            && self.step() >= limit
            && self.in_flight == 0
            && self.ledger.open() > 0
        {
            self.drain = Some(Drain::Step(limit.next()));
        }
    }

    fn serve_one(&mut self, rank: Rank) -> Answers {
        let Some(place) = self.waiting.iter().position(|waiting| *waiting == rank) else { return Vec::new() };
        let Some(reply) = self.answer(rank) else { return Vec::new() };
        self.waiting.remove(place);
        vec![(rank, reply)]
    }

    fn serve_if_ended(&mut self) -> Answers {
        if self.finished() { self.serve() } else { Vec::new() }
    }

    fn answer(&mut self, rank: Rank) -> Option<Reply> {
        if self.finished() {
            return Some(Reply::Finished);
        }
        if !self.may_begin(rank) {
            return None;
        }
        let fresh_allowed = !matches!(self.drain, Some(Drain::Fresh(limit)) if self.fresh >= limit);
        let batch = match self.data.take(fresh_allowed) {
            Next::Again(batch) => batch,
            Next::Fresh(batch) => {
                // Cannot fail: the ledger proved the boundary where the data begins, and fresh
                // batches are consecutive.
                self.ledger.hand_out(batch).ok()?;
                self.fresh += 1;
                batch
            }
            Next::Empty | Next::Finished => return None,
        };
        let step = self.step();
        let token = match self.setup.mode {
            TokenMode::Gba { .. } => self.tokens.take(self.setup.workers as usize),
            _ => Token(step.0),
        };
        let assignment = Assignment { batch, token };
        let member = self.members.get_mut(&rank)?;
        member.in_flight.push(assignment);
        member.last_step = Some(step);
        self.begun = Some(step);
        self.handed_out += 1;
        self.in_flight += 1;
        Some(Reply::Work(assignment))
    }

    fn may_begin(&self, rank: Rank) -> bool {
        let Some(member) = self.members.get(&rank) else { return false };
        if member.in_flight.len() >= self.setup.in_flight_limit {
            return false;
        }
        match self.setup.mode {
            TokenMode::Async | TokenMode::Gba { .. } | TokenMode::Bsp { .. } => true,
            TokenMode::HopBs { bound } => {
                let begins = member.version + member.in_flight.len() as u64;
                begins - self.slowest_version().unwrap_or(begins) <= bound
            }
            TokenMode::HopBw { .. } => {
                let step = self.step();
                !matches!(self.drain, Some(Drain::Step(limit)) if step >= limit)
                    && member.last_step.is_none_or(|last| last < step)
            }
        }
    }
}

impl CoordinatorHalf for Dispatcher {
    fn extend_data(&mut self, rows: u64) -> Answers {
        self.data.extend(rows);
        self.serve()
    }

    fn close_data(&mut self) -> Answers {
        self.data.close();
        self.serve()
    }

    // Hands out only the batches that complete the buffers.
    fn start_draining(&mut self) {
        self.drain = Some(if self.hop_bw() {
            let step = self.step();
            Drain::Step(if self.begun == Some(step) { step.next() } else { step })
        } else {
            Drain::Fresh(self.fresh.div_ceil(self.capacity) * self.capacity)
        });
    }

    // No batch is in flight and every buffer is empty. Only if the data ends within a step is that
    // step short. The servers flush it first.
    fn paused_at(&self) -> Option<GlobalStep> {
        let drain = self.drain?;
        if self.in_flight > 0 || self.ledger.open() > 0 {
            return None;
        }
        let target = match drain {
            Drain::Fresh(limit) => {
                (self.fresh == limit).then(|| GlobalStep(self.setup.first_step.0 + limit / self.capacity))
            }
            Drain::Step(limit) => Some(limit),
        };
        if let Some(target) = target.filter(|target| self.step() >= *target) {
            return Some(target);
        }
        let flushed = self.data.finished() && self.flushed.len() == self.server_steps.len();
        if flushed { self.server_steps.iter().max().copied() } else { None }
    }

    fn needs_flush(&self) -> bool {
        self.finished() && self.flushed.len() < self.server_steps.len()
    }

    fn next_step(&self) -> GlobalStep {
        self.step()
    }

    fn data(&self) -> &DataList {
        &self.data
    }

    fn ledger(&self) -> &RowLedger {
        &self.ledger
    }

    fn into_parts(self: Box<Self>) -> (DataList, RowLedger) {
        (self.data, self.ledger)
    }
}
