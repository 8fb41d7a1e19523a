//! A parameter server's gradient buffer (§4.1, algorithm 2 lines 14–24). The server puts pairs
//! (gradient, token) into the buffer as they arrive. Once the buffer holds M pairs, it returns all
//! of them, each with its weight, as the update of one global step. The buffer is then empty.
//!
//! The baselines use the same buffer with other sizes and rules. `async` and `hopBs` hold one
//! gradient. `bsp` holds b2 gradients, each with weight 1. `hopBw` holds N − b3 gradients, and
//! drops gradients that arrive after their step.
//!
//! A server never takes the same rows twice. So a dispatcher may issue the batch of a dead worker
//! again, even if it is unknown which servers have its gradients already.
//!
//! The parameter-server role owns its buffers behind locks. It aggregates and applies an update
//! before it accepts the next push.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::gba::{BufferSize, Decay, TokenMode, staleness};
use crate::{Batch, Inserted, RowSet, Token};
use crate::{GlobalStep, Rank};

/// How a server treats a gradient whose token is below the step that it is filling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LateGradients {
    /// The gradient is buffered, with the weight that the decay gives it.
    Keep,
    /// The gradient is dropped (`hopBw`).
    Drop,
}

/// One worker's gradient of one batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Push<G> {
    /// The worker that computed the gradient.
    pub rank: Rank,
    /// The rows of the batch.
    pub batch: Batch,
    /// The token that came with the batch.
    pub token: Token,
    /// The step that this server was filling when the worker pulled its parameters.
    pub pulled_at: GlobalStep,
    /// This server's partition of the gradient.
    pub gradient: G,
}

/// One entry of the buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct Pair<G> {
    /// The gradient as pushed.
    pub push: Push<G>,
    /// f(τ, k), the weight of the dense gradient.
    pub weight: f32,
}

/// A full buffer: apply it as one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Update<G> {
    /// The global step, k.
    pub step: GlobalStep,
    /// Ordered by batch, so that the order of arrival within a step changes no bit of the sum.
    pub pairs: Vec<Pair<G>>,
    /// The divisor of the dense sum: M, or the number of pairs in an update that was flushed.
    pub divisor: u32,
}

/// The result of a push.
#[derive(Clone, Debug, PartialEq)]
pub enum Pushed<G> {
    /// The gradient is in the buffer.
    Buffered,
    /// The gradient has filled the buffer: apply this update now.
    Full(Update<G>),
    /// Dropped, because its step is already applied (`hopBw`).
    Late,
    /// Ignored, because this server already has these rows.
    Repeated,
}

/// A push that no correct worker sends.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PushError {
    /// The batch overlaps another one. The coordinator never hands out such a batch.
    #[error("rank {rank} pushed {batch}, but this server has already taken some of its rows: batches must not overlap")]
    Torn { rank: Rank, batch: Batch },
    /// The worker claims parameters of a step that this server has not reached.
    #[error("rank {rank} pushed {batch} with parameters of step {pulled_at}, but this server is at step {step}")]
    FromTheFuture { rank: Rank, batch: Batch, pulled_at: GlobalStep, step: GlobalStep },
    /// A batch without rows.
    #[error("rank {rank} pushed a batch without rows at row {first_row}: a batch has at least one row")]
    Empty { rank: Rank, first_row: u64 },
}

/// The staleness of applied gradients, in global steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StalenessRecord {
    /// The number of gradients.
    pub count: u64,
    /// The sum of their staleness.
    pub sum: u64,
    /// The largest staleness.
    pub max: u64,
    /// The number of gradients that were 0, 1, …, 30 and more than 30 steps stale.
    pub histogram: [u64; 32],
}

impl StalenessRecord {
    /// The mean; 0 without gradients.
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

/// A server's counters since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerCounts {
    /// Gradients put in the buffer.
    pub buffered: u64,
    /// Buffered gradients that were applied, with any weight.
    pub applied: u64,
    /// Applied gradients of weight 0: too stale to change the dense parameters.
    pub excluded: u64,
    /// Gradients dropped because they arrived after their step.
    pub late: u64,
    /// Gradients ignored because the server already had their rows.
    pub repeated: u64,
    /// Data staleness: k − τ, or 0 where the token is ahead of the step.
    pub data_staleness: StalenessRecord,
    /// Gradient staleness of the dense parameters: k − the step at which the worker pulled them.
    pub gradient_staleness: StalenessRecord,
}

/// A server's state between two steps, from which its replacement resumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerStanding {
    step: GlobalStep,
    taken: RowSet,
}

/// The gradient buffer; see the module's documentation.
///
/// `G` is the part of a gradient that the buffer stores: all of it, or nothing if the server sums
/// gradients on arrival. A server can do that because [`Self::weight`] is known on arrival: the
/// server applies a buffered gradient in the step that it is filling.
#[derive(Clone, Debug)]
pub struct GradientServer<G> {
    capacity: BufferSize,
    decay: Decay,
    late: LateGradients,
    /// The step being filled: all steps before it are applied.
    step: GlobalStep,
    buffer: VecDeque<Pair<G>>,
    /// Rows that are in the buffer, applied, or dropped as late.
    taken: RowSet,
    counts: ServerCounts,
}

impl<G> GradientServer<G> {
    /// A buffer for `mode` with `workers` configured workers, before step `step`. The rows before
    /// `first_row` are trained.
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

    /// Resumes from the state of another server. The counters restart at 0.
    #[must_use]
    pub fn resume(mode: TokenMode, workers: u32, standing: ServerStanding) -> Self {
        let ServerStanding { step, taken } = standing;
        Self { taken, ..Self::new(mode, workers, step, 0) }
    }

    /// The state from which a replacement resumes; `None` while gradients are in the buffer.
    #[must_use]
    pub fn standing(&self) -> Option<ServerStanding> {
        self.buffer.is_empty().then(|| ServerStanding { step: self.step, taken: self.taken.clone() })
    }

    /// The step being filled. The server returns it with a pull, and the worker sends it back as
    /// `pulled_at`.
    #[must_use]
    pub fn step(&self) -> GlobalStep {
        self.step
    }

    /// f(τ, k) of a gradient that is pushed at the present step.
    #[must_use]
    pub fn weight(&self, token: Token) -> f32 {
        self.decay.weight(token, self.step)
    }

    /// The number of pairs in the buffer. Between calls it is below M.
    #[must_use]
    pub fn fill(&self) -> usize {
        self.buffer.len()
    }

    /// M, the number of gradients in a full buffer.
    #[must_use]
    pub fn capacity(&self) -> BufferSize {
        self.capacity
    }

    /// The counters.
    #[must_use]
    pub fn counts(&self) -> &ServerCounts {
        &self.counts
    }

    /// The rows that the server has taken.
    #[must_use]
    pub fn taken(&self) -> &RowSet {
        &self.taken
    }

    /// Puts a gradient into the buffer, unless its rows were taken before or it is late.
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

    /// Empties the buffer, as the last, smaller step of the data (K = ⌈Q/M⌉). The divisor of the
    /// update is the number of its pairs. `None` if the buffer is empty. Call this only at the end
    /// of the data: every other step is a full buffer.
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
