//! Discrete-event simulation: the state machines of this crate under a virtual clock, with workers, servers and links of unequal
//! speed. Everything is a function of the settings and a seed: a run repeats to the bit. What is simulated is time; gradients
//! have no values. The modes without a barrier run the [`crate::gba::Dispatcher`], [`crate::gba::PushPullWorker`] and
//! [`crate::gba::GradientServer`]; `sync` and `hybrid` run the [`crate::barrier::StepGate`] and an all-reduce as a barrier.
//!
//! Called by `rectrain simulate` and by tests. A batch takes its worker its [`StepTime`], times all [`Slowness`] of that moment; a
//! server serves one request after the other; a message takes a latency and its bytes' time.

mod barrier;
mod timeline;
mod tokens;

use std::sync::Arc;

use self::timeline::{Time, nanoseconds};
use crate::Rank;
use crate::TrainingMode;
use crate::barrier::GateError;
use crate::gba::{BufferSizeError, DispatchError, PushError, WorkerError};

/// What a batch takes a worker that nothing slows down.
#[derive(Clone, Debug, PartialEq)]
pub enum StepTime {
    /// The same for all.
    Constant {
        /// Time a batch takes besides its rows.
        seconds_per_batch: f64,
        /// Time a row takes.
        seconds_per_row: f64,
    },
    /// Measured seconds of batch after batch, whatever their rows, repeated from the start at their end.
    Trace {
        /// All of them.
        batch_seconds: Arc<[f64]>,
        /// The place of the first batch's.
        first: usize,
    },
}

/// How a worker is slower than that.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cause {
    /// `factor` times slower.
    Constant { factor: f64 },
    /// `factor` times slower for the first `slow_seconds` of every `period_seconds`, which begin at `offset_seconds`.
    Periodic { factor: f64, period_seconds: f64, slow_seconds: f64, offset_seconds: f64 },
    /// With `probability`, a batch takes a Pareto-distributed multiple of its time, of `shape` (> 0; the smaller the heavier),
    /// at most `limit`.
    HeavyTailed { probability: f64, shape: f64, limit: f64 },
}

/// A time in which a worker is slow: batches that begin in it are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slowness {
    /// How.
    pub cause: Cause,
    /// From this virtual time on.
    pub from_seconds: f64,
    /// Before this one; may be infinite.
    pub until_seconds: f64,
}

impl Slowness {
    /// From beginning to end.
    #[must_use]
    pub fn always(cause: Cause) -> Self {
        Self { cause, from_seconds: 0.0, until_seconds: f64::INFINITY }
    }

    /// How likely a batch is slow that begins at `seconds`.
    fn probability_at(&self, seconds: f64) -> f64 {
        if !(self.from_seconds..self.until_seconds).contains(&seconds) {
            return 0.0;
        }
        match self.cause {
            Cause::Constant { factor } => f64::from(u8::from(factor > 1.0)),
            Cause::Periodic { period_seconds, slow_seconds, offset_seconds, .. } => {
                f64::from(u8::from((seconds - offset_seconds).rem_euclid(period_seconds) < slow_seconds))
            }
            Cause::HeavyTailed { probability, .. } => probability.min(1.0),
        }
    }
}

/// A worker that dies now and then.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Crashes {
    /// Mean of the (exponentially distributed) time between failures.
    pub mean_seconds_between: f64,
    /// Until it is back.
    pub recovery_seconds: f64,
}

/// A dense worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerSpec {
    /// What a batch takes it.
    pub step: StepTime,
    /// When it is slower than that; what falls into one moment multiplies.
    pub slowness: Vec<Slowness>,
    /// How much slower than the cluster's its link is (1: as fast).
    pub link_slowness: f64,
    /// Whether it dies.
    pub crashes: Option<Crashes>,
}

/// A parameter server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServerSpec {
    /// Time to serve one pull or push, besides its bytes.
    pub seconds_per_request: f64,
    /// At which its share of the bytes goes in or out, one request after the other.
    pub bytes_per_second: f64,
}

/// All links, and what goes over them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSpec {
    /// One way.
    pub latency_seconds: f64,
    /// Of one worker's link, which what it sends to all servers at once shares.
    pub bytes_per_second: f64,
    /// Flat dense parameters, and as many of their gradient.
    pub dense_bytes: f64,
    /// Embeddings of one row, and as many of their gradients.
    pub embedding_bytes_per_row: f64,
}

/// Who trains where.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterSpec {
    /// Dense workers.
    pub workers: Vec<WorkerSpec>,
    /// Parameter servers.
    pub servers: Vec<ServerSpec>,
    /// Between them.
    pub link: LinkSpec,
    /// Until the coordinator knows that a worker is dead.
    pub detection_seconds: f64,
}

impl ClusterSpec {
    /// The share of workers that are slow at `seconds`: the load that the modes are under.
    #[must_use]
    pub fn slowed_share(&self, seconds: f64) -> f64 {
        let slow = |worker: &WorkerSpec| {
            1.0 - worker.slowness.iter().map(|slowness| 1.0 - slowness.probability_at(seconds)).product::<f64>()
        };
        self.workers.iter().map(slow).sum::<f64>() / self.workers.len().max(1) as f64
    }
}

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// Where.
    pub cluster: ClusterSpec,
    /// How.
    pub mode: TrainingMode,
    /// Rows of a local batch.
    pub local_rows: u32,
    /// Virtual seconds to run.
    pub seconds: f64,
    /// Equal parts of that time to report throughput of; 0 if that is not wanted.
    pub intervals: usize,
    /// Of everything random. Workers draw from streams of their own, so that all modes meet the same stragglers.
    pub seed: u64,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Which mode.
    pub mode: &'static str,
    /// How many workers.
    pub workers: usize,
    /// Rows of all workers' finished batches a second, left out ones included (QPS in the paper).
    pub global_samples_per_second: f64,
    /// The same without batches that were dropped, or left out of the dense parameters.
    pub trained_samples_per_second: f64,
    /// Mean of the workers' own rates.
    pub local_samples_per_second: f64,
    /// Standard deviation of the workers' own rates.
    pub local_samples_per_second_deviation: f64,
    /// Global steps applied.
    pub steps: u64,
    /// Steps between the pull of dense parameters and the application of their gradient, mean over gradients and servers.
    pub mean_staleness: f64,
    /// The same, the largest.
    pub max_staleness: u64,
    /// Mean staleness in rows that were applied meanwhile: comparable between modes whose steps differ in size.
    pub mean_staleness_rows: f64,
    /// Batches dropped (`hopBw`) or left out of the dense parameters (`gba`), on the first server.
    pub dropped_batches: u64,
    /// Tokens lost with their workers.
    pub lost_tokens: u64,
    /// Share of the workers' time in which they did not compute.
    pub idle: f64,
    /// Rows of all workers' finished batches a second in each interval, in order.
    pub interval_samples_per_second: Vec<f64>,
}

/// Settings that cannot be simulated, or a machine that broke its protocol.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// Nobody to train, or nowhere to train.
    #[error("a simulation needs at least one {what}")]
    Missing { what: &'static str },
    /// A number out of its range.
    #[error("{what} is {value}; it must be a finite number of at least {least}")]
    Range { what: &'static str, value: f64, least: f64 },
    /// A trace of nothing.
    #[error("the trace of worker {rank} holds no batch times")]
    EmptyTrace { rank: Rank },
    /// No buffer.
    #[error("the simulated mode has no gradient buffer: {0}")]
    Buffer(#[from] BufferSizeError),
    /// The dispatcher refused.
    #[error("the simulated coordinator refused a message: {0}")]
    Dispatch(#[from] DispatchError),
    /// A worker refused.
    #[error("a simulated worker refused a message: {0}")]
    Worker(#[from] WorkerError),
    /// A server refused.
    #[error("a simulated server refused a gradient: {0}")]
    Push(#[from] PushError),
    /// A gate refused.
    #[error("a simulated server refused a step: {0}")]
    Gate(#[from] GateError),
}

/// Runs `simulation`.
pub fn simulate(simulation: &Simulation) -> Result<Report, SimulationError> {
    validate(simulation)?;
    match simulation.mode {
        TrainingMode::Sync => barrier::run(simulation, 0),
        TrainingMode::Hybrid { staleness } => barrier::run(simulation, staleness),
        TrainingMode::Tokens(mode) => tokens::run(simulation, mode),
    }
}

fn validate(simulation: &Simulation) -> Result<(), SimulationError> {
    let cluster = &simulation.cluster;
    for (missing, what) in [
        (cluster.workers.is_empty(), "worker"),
        (cluster.servers.is_empty(), "parameter server"),
        (simulation.local_rows == 0, "row in a batch"),
    ] {
        if missing {
            return Err(SimulationError::Missing { what });
        }
    }
    let link = cluster.link;
    let mut numbers = vec![
        ("the simulated time in seconds", simulation.seconds, 0.0),
        ("the time in seconds to detect a failure", cluster.detection_seconds, 0.0),
        ("the latency in seconds", link.latency_seconds, 0.0),
        ("the bandwidth in bytes a second", link.bytes_per_second, 1.0),
        ("the dense bytes", link.dense_bytes, 0.0),
        ("the embedding bytes of a row", link.embedding_bytes_per_row, 0.0),
    ];
    for server in &cluster.servers {
        numbers.push(("a server's seconds per request", server.seconds_per_request, 0.0));
        numbers.push(("a server's bandwidth in bytes a second", server.bytes_per_second, 1.0));
    }
    for (rank, worker) in cluster.workers.iter().enumerate() {
        step_numbers(Rank(rank as u32), &worker.step, simulation.local_rows, &mut numbers)?;
        worker.slowness.iter().for_each(|slowness| slowness_numbers(slowness, &mut numbers));
        numbers.push(("the slowness of a worker's link", worker.link_slowness, 0.0));
        if let Some(crashes) = worker.crashes {
            numbers.push(("the mean seconds between a worker's failures", crashes.mean_seconds_between, 1e-3));
            numbers.push(("a worker's seconds of recovery", crashes.recovery_seconds, 0.0));
        }
    }
    match numbers.into_iter().find(|(_, value, least)| !value.is_finite() || value < least) {
        Some((what, value, least)) => Err(SimulationError::Range { what, value, least }),
        None => Ok(()),
    }
}

/// A number with what it is and the least it may be.
type Number = (&'static str, f64, f64);

fn step_numbers(rank: Rank, step: &StepTime, rows: u32, numbers: &mut Vec<Number>) -> Result<(), SimulationError> {
    match step {
        StepTime::Constant { seconds_per_batch, seconds_per_row } => {
            numbers.push((
                "a worker's seconds for a batch",
                seconds_per_batch + seconds_per_row * f64::from(rows),
                1e-6,
            ));
        }
        StepTime::Trace { batch_seconds, .. } if batch_seconds.is_empty() => {
            return Err(SimulationError::EmptyTrace { rank });
        }
        StepTime::Trace { batch_seconds, .. } => {
            let wrong = batch_seconds.iter().copied().find(|seconds| !seconds.is_finite());
            let least = batch_seconds.iter().copied().fold(f64::INFINITY, f64::min);
            numbers.push(("a traced batch's seconds", wrong.unwrap_or(least), 1e-6));
        }
    }
    Ok(())
}

fn slowness_numbers(slowness: &Slowness, numbers: &mut Vec<Number>) {
    match slowness.cause {
        Cause::Constant { factor } => numbers.push(("a worker's slowness", factor, 1e-6)),
        Cause::Periodic { factor, period_seconds, slow_seconds, offset_seconds } => {
            numbers.push(("a worker's slowness", factor, 1e-6));
            numbers.push(("a worker's period of slowness in seconds", period_seconds, 1e-6));
            numbers.push(("the slow seconds of a worker's period", slow_seconds, 0.0));
            numbers.push(("the seconds until a worker's first period", offset_seconds, 0.0));
        }
        Cause::HeavyTailed { probability, shape, limit } => {
            numbers.push(("the probability of a slow batch", probability, 0.0));
            numbers.push(("the shape of a worker's slowness", shape, 1e-3));
            numbers.push(("the limit of a worker's slowness", limit, 1.0));
        }
    }
}

/// The figures of a run, collected as it goes.
struct Tally {
    rows: Vec<u64>,
    interval_rows: Vec<u64>,
    interval: Time,
    busy: Time,
}

impl Tally {
    fn new(simulation: &Simulation) -> Self {
        let intervals = simulation.intervals;
        let interval = nanoseconds(simulation.seconds / intervals.max(1) as f64).max(1);
        Self { rows: vec![0; simulation.cluster.workers.len()], interval_rows: vec![0; intervals], interval, busy: 0 }
    }

    /// A worker's batch is finished.
    fn finished(&mut self, rank: u32, rows: u32, now: Time) {
        self.rows[rank as usize] += u64::from(rows);
        let last = self.interval_rows.len().saturating_sub(1);
        if let Some(counted) = self.interval_rows.get_mut(((now / self.interval) as usize).min(last)) {
            *counted += u64::from(rows);
        }
    }

    /// All rates of `simulation`; the caller adds what only its mode has.
    fn report(&self, simulation: &Simulation) -> Report {
        let (n, seconds) = (self.rows.len() as f64, simulation.seconds.max(1e-9));
        let rates: Vec<f64> = self.rows.iter().map(|rows| *rows as f64 / seconds).collect();
        let mean = rates.iter().sum::<f64>() / n;
        let variance = rates.iter().map(|rate| (rate - mean).powi(2)).sum::<f64>() / n;
        let interval_seconds = seconds / self.interval_rows.len().max(1) as f64;
        Report {
            mode: simulation.mode.name(),
            workers: self.rows.len(),
            global_samples_per_second: mean * n,
            trained_samples_per_second: mean * n,
            local_samples_per_second: mean,
            local_samples_per_second_deviation: variance.sqrt(),
            steps: 0,
            mean_staleness: 0.0,
            max_staleness: 0,
            mean_staleness_rows: 0.0,
            dropped_batches: 0,
            lost_tokens: 0,
            idle: (1.0 - self.busy as f64 * 1e-9 / (n * seconds)).clamp(0.0, 1.0),
            interval_samples_per_second: self
                .interval_rows
                .iter()
                .map(|rows| *rows as f64 / interval_seconds)
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests;
