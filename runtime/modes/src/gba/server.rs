//! A parameter server's gradient buffer (§4.1, algorithm 2 lines 14–24): pairs (gradient, token) are put in as they come, and
//! when M are in it they are handed out at once, each with its weight, as the update of one global step, and the buffer is
//! empty. The baselines are the same buffer with another size and rule: `async` and `hopBs` hold one gradient, `bsp` holds b2
//! and does not decay, `hopBw` holds N − b3 and drops what comes after its step. Rows that a server has taken it does not take
//! again, so that a batch may be trained anew when nobody knows how far its dead worker came.
//!
//! Called by the parameter-server role, which owns one behind one lock: it aggregates and applies an update before the next push.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::gba::{BufferSize, Decay, TokenMode, staleness};
use crate::{Batch, Inserted, RowSet, Token};
use crate::{GlobalStep, Rank};

/// What is done with a gradient whose token is below the step that is being filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LateGradients {
    /// It is buffered, with the weight that the decay gives it.
    Keep,
    /// It is dropped (`hopBw`).
    Drop,
}

/// One worker's gradient of one batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Push<G> {
    /// Whose.
    pub rank: Rank,
    /// Of which rows.
    pub batch: Batch,
    /// The token that came with the batch.
    pub token: Token,
    /// The step that this server was filling when the worker pulled its parameters.
    pub pulled_at: GlobalStep,
    /// This server's partition of the gradient.
    pub gradient: G,
}

/// One place of the buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair<G> {
    /// As pushed.
    pub push: Push<G>,
    /// f(τ, k) of the dense parameters.
    pub weight: f32,
}

/// A full buffer: apply it as one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Update<G> {
    /// k.
    pub step: GlobalStep,
    /// Ordered by batch, so that the order of arrival within a step changes no bit of the sum.
    pub pairs: Vec<Pair<G>>,
    /// What the dense sum is divided by: M, or the number of pairs in an update that was flushed.
    pub divisor: u32,
}

/// What became of a push.
#[derive(Clone, Debug, PartialEq)]
pub enum Pushed<G> {
    /// In the buffer.
    Buffered,
    /// In the buffer, which is full: apply this now.
    Full(Update<G>),
    /// Dropped: its step is applied (`hopBw`).
    Late,
    /// Ignored: this server has these rows already.
    Repeated,
}

/// A push that no correct worker sends.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PushError {
    /// A batch of other bounds than were handed out.
    #[error("rank {rank} pushed {batch}, of which this server has some rows and not others: batches overlap")]
    Torn { rank: Rank, batch: Batch },
    /// Parameters from the future.
    #[error("rank {rank} pushed {batch} with parameters of step {pulled_at}, but this server is at step {step}")]
    FromTheFuture { rank: Rank, batch: Batch, pulled_at: GlobalStep, step: GlobalStep },
    /// A batch of no rows.
    #[error("rank {rank} pushed a batch of no rows at row {first_row}")]
    Empty { rank: Rank, first_row: u64 },
}

/// Staleness as it was applied, in global steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StalenessRecord {
    /// How many gradients.
    pub count: u64,
    /// Σ of their staleness.
    pub sum: u64,
    /// The largest.
    pub max: u64,
    /// How many were 0, 1, …, 30 and more than 30 steps stale.
    pub histogram: [u64; 32],
}

impl StalenessRecord {
    /// The mean; 0 of nothing.
    #[must_use]
    pub fn mean(&self) -> f64 {
        if self.count == 0 { 0.0 } else { self.sum as f64 / self.count as f64 }
    }

    fn add(&mut self, stale: u64) {
        self.count += 1;
        self.sum += stale;
        self.max = self.max.max(stale);
        self.histogram[(stale as usize).min(31)] += 1;
    }
}

/// What a server has seen since it began.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerCounts {
    /// Gradients put in the buffer.
    pub buffered: u64,
    /// Of those, applied (with whatever weight).
    pub applied: u64,
    /// Of those, with weight 0: left out of the dense parameters for their staleness.
    pub excluded: u64,
    /// Dropped for coming after their step.
    pub late: u64,
    /// Ignored because their rows were there.
    pub repeated: u64,
    /// Data staleness: k − τ, 0 where the token is ahead.
    pub data_staleness: StalenessRecord,
    /// Gradient staleness of the dense parameters: k − the step they were pulled at.
    pub gradient_staleness: StalenessRecord,
}

/// A server between two steps, for one that takes its place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStanding {
    step: GlobalStep,
    taken: RowSet,
}

/// See the module's text. `G` is what the server keeps of a gradient: all of it, or nothing if it is summed as it comes
/// ([`Self::weight`] is known on arrival, because what is buffered is applied in the step being filled).
#[derive(Clone, Debug)]
pub struct GradientServer<G> {
    capacity: BufferSize,
    decay: Decay,
    late: LateGradients,
    /// The step being filled: all before it are applied.
    step: GlobalStep,
    buffer: VecDeque<Pair<G>>,
    /// Rows in the buffer, applied, or dropped as late.
    taken: RowSet,
    counts: ServerCounts,
}

impl<G> GradientServer<G> {
    /// For `mode` with `workers` configured workers, before step `step`, the rows before `first_row` being trained.
    #[must_use]
    pub fn new(mode: TokenMode, workers: u32, step: GlobalStep, first_row: u64) -> Self {
        let late = if matches!(mode, TokenMode::HopBw { .. }) { LateGradients::Drop } else { LateGradients::Keep };
        Self {
            capacity: mode.capacity(workers),
            decay: mode.decay(),
            late,
            step,
            buffer: VecDeque::new(),
            taken: RowSet::up_to(first_row),
            counts: ServerCounts::default(),
        }
    }

    /// Goes on where another stood, its counts beginning anew.
    #[must_use]
    pub fn resume(mode: TokenMode, workers: u32, standing: ServerStanding) -> Self {
        let ServerStanding { step, taken } = standing;
        Self { taken, ..Self::new(mode, workers, step, 0) }
    }

    /// Where it stands; `None` while gradients are in the buffer.
    #[must_use]
    pub fn standing(&self) -> Option<ServerStanding> {
        self.buffer.is_empty().then(|| ServerStanding { step: self.step, taken: self.taken.clone() })
    }

    /// The step being filled: what a pull is answered with, and what a worker returns as `pulled_at`.
    #[must_use]
    pub fn step(&self) -> GlobalStep {
        self.step
    }

    /// f(τ, k) of a gradient that is pushed now.
    #[must_use]
    pub fn weight(&self, token: Token) -> f32 {
        self.decay.weight(token, self.step)
    }

    /// Pairs in the buffer: fewer than M between calls.
    #[must_use]
    pub fn fill(&self) -> usize {
        self.buffer.len()
    }

    /// M.
    #[must_use]
    pub fn capacity(&self) -> BufferSize {
        self.capacity
    }

    /// What it has seen.
    #[must_use]
    pub fn counts(&self) -> &ServerCounts {
        &self.counts
    }

    /// Which rows it has taken.
    #[must_use]
    pub fn taken(&self) -> &RowSet {
        &self.taken
    }

    /// Takes a gradient.
    pub fn push(&mut self, push: Push<G>) -> Result<Pushed<G>, PushError> {
        let (rank, batch, token, pulled_at) = (push.rank, push.batch, push.token, push.pulled_at);
        if batch.rows == 0 {
            return Err(PushError::Empty { rank, first_row: batch.first_row });
        }
        if pulled_at > self.step {
            return Err(PushError::FromTheFuture { rank, batch, pulled_at, step: self.step });
        }
        match self.taken.insert(batch) {
            Inserted::Torn => return Err(PushError::Torn { rank, batch }),
            Inserted::Present => {
                self.counts.repeated += 1;
                return Ok(Pushed::Repeated);
            }
            Inserted::New => {}
        }
        if self.late == LateGradients::Drop && token.0 < self.step.0 {
            self.counts.late += 1;
            return Ok(Pushed::Late);
        }
        self.counts.buffered += 1;
        self.buffer.push_back(Pair { weight: self.weight(token), push });
        if self.buffer.len() < self.capacity.get() as usize {
            return Ok(Pushed::Buffered);
        }
        Ok(Pushed::Full(self.finish_step(self.capacity.get())))
    }

    /// The last, smaller step of the data (K = ⌈Q/M⌉): what is left in the buffer, to be divided by its number. `None` if
    /// nothing is. Only at the end of the data is a step not a full buffer.
    pub fn flush(&mut self) -> Option<Update<G>> {
        let left = self.buffer.len() as u32;
        (left > 0).then(|| self.finish_step(left))
    }

    fn finish_step(&mut self, divisor: u32) -> Update<G> {
        let step = self.step;
        let mut pairs: Vec<Pair<G>> = self.buffer.drain(..).collect();
        pairs.sort_by_key(|pair| pair.push.batch);
        for pair in &pairs {
            self.counts.applied += 1;
            self.counts.excluded += u64::from(pair.weight == 0.0);
            self.counts.data_staleness.add(staleness(pair.push.token, step).max(0) as u64);
            self.counts.gradient_staleness.add(step.0 - pair.push.pulled_at.0);
        }
        self.step = step.next();
        Update { step, pairs, divisor }
    }
}
