//! Discrete-event simulation: the state machines of this crate under a virtual clock, with workers,
//! servers and links of unequal speed. Every result is a function of the settings and a seed, so a
//! run repeats to the bit. The simulation models time only; gradients have no values.
//!
//! The modes without a barrier run the [`crate::gba::Dispatcher`], [`crate::gba::PushPullWorker`]
//! and [`crate::gba::GradientServer`]. `sync` and `hybrid` run the [`crate::barrier::StepGate`],
//! and an all-reduce as a barrier. With pulled pieces, `sync` runs the halves in
//! [`crate::barrier::pulled`]. `shadow` runs as `async` without dense parameters in its batches.
//!
//! `rectrain simulate` and tests call it. A batch takes the worker's [`StepTime`], multiplied by
//! every [`Slowness`] of that moment. A server serves one request after the other. A message takes
//! the link's latency and the time for its bytes. Slots move between servers, and batches between
//! embedding workers, by the coordinator's [`crate::shares`], and chunks between loaders by its
//! [`crate::loader_pace`]. A move itself takes no time.

mod barrier;
mod loaders;
mod pulled;
mod shadow;
mod supply;
mod timeline;
mod tokens;

use std::sync::Arc;

use self::timeline::{Time, nanoseconds};
use crate::Rank;
use crate::TrainingMode;
use crate::barrier::GateError;
use crate::barrier::pulled::PieceError;
use crate::gba::{BufferSizeError, DispatchError, PushError, WorkerError};

/// The time of a batch on a worker without slowness.
#[derive(Clone, Debug, PartialEq)]
pub enum StepTime {
    /// All batches take the same time.
    Constant {
        /// Seconds per batch, in addition to its rows.
        seconds_per_batch: f64,
        /// Seconds per row.
        seconds_per_row: f64,
    },
    /// Measured seconds of consecutive batches, independent of their rows. At the end, the trace
    /// restarts.
    Trace {
        /// The whole trace.
        batch_seconds: Arc<[f64]>,
        /// The index of the first batch in the trace.
        first: usize,
    },
}

/// How a worker deviates from its [`StepTime`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cause {
    /// All batches are `factor` times slower.
    Constant { factor: f64 },
    /// `factor` times slower for the first `slow_seconds` of every `period_seconds`. The periods
    /// start at `offset_seconds`.
    Periodic { factor: f64, period_seconds: f64, slow_seconds: f64, offset_seconds: f64 },
    /// With `probability`, a batch takes a Pareto-distributed multiple of its time, at most
    /// `limit`. `shape` is above 0; the smaller it is, the heavier is the tail.
    HeavyTailed { probability: f64, shape: f64, limit: f64 },
}

/// A time span in which a worker is slow. It affects the batches that begin in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slowness {
    /// The kind of slowness.
    pub cause: Cause,
    /// The span begins at this virtual time.
    pub from_seconds: f64,
    /// The span ends before this time; may be infinite.
    pub until_seconds: f64,
}

impl Slowness {
    /// Slowness for the whole run.
    #[must_use]
    pub fn always(cause: Cause) -> Self {
        Self { cause, from_seconds: 0.0, until_seconds: f64::INFINITY }
    }

    /// The probability that a batch which begins at `seconds` is slow.
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

/// Random failures of a worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Crashes {
    /// The mean of the (exponentially distributed) time between failures.
    pub mean_seconds_between: f64,
    /// The time from a failure until the worker restarts.
    pub recovery_seconds: f64,
}

/// A dense worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerSpec {
    /// The time of its batches.
    pub step: StepTime,
    /// Its slow time spans. Overlapping spans multiply.
    pub slowness: Vec<Slowness>,
    /// The slowness of its link relative to the cluster's links (1: as fast).
    pub link_slowness: f64,
    /// Its failures; `None` if it never fails.
    pub crashes: Option<Crashes>,
}

/// A time span in which a member is slow that is no dense worker. It affects the work that begins
/// in it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemberSlowness {
    /// All its work takes this many times as long.
    pub factor: f64,
    /// The span begins at this virtual time.
    pub from_seconds: f64,
    /// The span ends before this time; may be infinite.
    pub until_seconds: f64,
}

impl MemberSlowness {
    fn contains(&self, seconds: f64) -> bool {
        (self.from_seconds..self.until_seconds).contains(&seconds)
    }
}

/// A parameter server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServerSpec {
    /// Time to serve one pull or push, besides its bytes.
    pub seconds_per_request: f64,
    /// The rate at which it sends or receives its share of the bytes, one request after the other.
    pub bytes_per_second: f64,
    /// When it is slow; `None` if it never is.
    pub slowness: Option<MemberSlowness>,
}

/// The embedding workers. Each takes one batch after the other. A batch waits for one of them, and
/// then for the servers.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingSpec {
    /// When each of them is slow; `None` if it never is.
    pub workers: Vec<Option<MemberSlowness>>,
    /// Time for a row of a batch, its gradients included.
    pub seconds_per_row: f64,
    /// Whether a slow one gets fewer batches, and as many again when it is well
    /// ([`crate::shares`]). Otherwise they take turns.
    pub pieces_move: bool,
}

/// The loaders. Each reads one chunk after the other. A batch waits for its chunk, and then for an
/// embedding worker.
#[derive(Clone, Debug, PartialEq)]
pub struct LoaderSpec {
    /// When each of them is slow; `None` if it never is.
    pub loaders: Vec<Option<MemberSlowness>>,
    /// Time to read a row.
    pub seconds_per_row: f64,
    /// Rows of a chunk.
    pub chunk_rows: u64,
    /// Global batches of a chunk.
    pub chunk_batches: u64,
    /// Whether a slow one gets fewer chunks, which a second one reads as well
    /// ([`crate::loader_pace`]). Otherwise each that is free gets the next chunk.
    pub chunks_move: bool,
}

/// The links, and the sizes of the messages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkSpec {
    /// The latency one way.
    pub latency_seconds: f64,
    /// The rate of one worker's link. Messages that it sends to all servers at once share it.
    pub bytes_per_second: f64,
    /// Bytes of the flat dense parameters. Their gradient has as many.
    pub dense_bytes: f64,
    /// Bytes of the embeddings of one row. Their gradients have as many.
    pub embedding_bytes_per_row: f64,
}

/// The machines of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterSpec {
    /// Dense workers.
    pub workers: Vec<WorkerSpec>,
    /// Parameter servers.
    pub servers: Vec<ServerSpec>,
    /// Whether slots move away from slow servers, and back ([`crate::shares`]). Otherwise all have
    /// equal parts of the rows.
    pub slots_move: bool,
    /// The embedding workers; `None` if they take no time.
    pub embedding: Option<EmbeddingSpec>,
    /// The loaders; `None` if they take no time.
    pub loaders: Option<LoaderSpec>,
    /// The links between workers, servers and the coordinator.
    pub link: LinkSpec,
    /// The time from a failure until the coordinator detects it.
    pub detection_seconds: f64,
}

impl ClusterSpec {
    /// The share of members that are slow at `seconds`, in the role in which it is largest.
    #[must_use]
    pub fn slowed_share(&self, seconds: f64) -> f64 {
        let slow = |worker: &WorkerSpec| {
            1.0 - worker.slowness.iter().map(|slowness| 1.0 - slowness.probability_at(seconds)).product::<f64>()
        };
        let workers = self.workers.iter().map(slow).sum::<f64>() / self.workers.len().max(1) as f64;
        let servers: Vec<Option<MemberSlowness>> = self.servers.iter().map(|server| server.slowness).collect();
        let embedding = self.embedding.as_ref().map_or(&[][..], |embedding| embedding.workers.as_slice());
        let loaders = self.loaders.as_ref().map_or(&[][..], |loaders| loaders.loaders.as_slice());
        [servers.as_slice(), embedding, loaders]
            .into_iter()
            .map(|role| slow_share(role, seconds))
            .fold(workers, f64::max)
    }
}

/// The share of a role's members that are slow at `seconds`.
fn slow_share(members: &[Option<MemberSlowness>], seconds: f64) -> f64 {
    let is_slow = |slow: &&MemberSlowness| slow.factor > 1.0 && slow.contains(seconds);
    members.iter().flatten().filter(is_slow).count() as f64 / members.len().max(1) as f64
}

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    /// The machines.
    pub cluster: ClusterSpec,
    /// The training mode.
    pub mode: TrainingMode,
    /// Rows of a local batch.
    pub local_rows: u32,
    /// The local batches of a global batch, for pulled pieces. At least 1. Other modes ignore it.
    pub pieces: u32,
    /// Virtual seconds to run.
    pub seconds: f64,
    /// The number of equal intervals for which the report has a throughput; 0 for none.
    pub intervals: usize,
    /// The seed of all random numbers. Each worker draws from separate streams, so all modes meet
    /// the same stragglers.
    pub seed: u64,
}

/// The results of a simulation.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// The name of the mode.
    pub mode: &'static str,
    /// The number of workers.
    pub workers: usize,
    /// Rows per second of all workers' finished batches, excluded batches included (QPS in the
    /// paper).
    pub global_samples_per_second: f64,
    /// The same without batches that were dropped or excluded from the dense parameters.
    pub trained_samples_per_second: f64,
    /// The mean of the workers' rates.
    pub local_samples_per_second: f64,
    /// The standard deviation of the workers' rates.
    pub local_samples_per_second_deviation: f64,
    /// Global steps applied.
    pub steps: u64,
    /// Steps between the pull of dense parameters and the application of their gradient. The mean
    /// over gradients and servers. In `shadow`: the same of rows.
    pub mean_staleness: f64,
    /// The largest such staleness.
    pub max_staleness: u64,
    /// The mean staleness in rows applied meanwhile. It is comparable between modes whose steps
    /// differ in size.
    pub mean_staleness_rows: f64,
    /// Batches dropped (`hopBw`) or excluded from the dense parameters (`gba`), on the first
    /// server.
    pub dropped_batches: u64,
    /// Tokens lost with dead workers.
    pub lost_tokens: u64,
    /// The share of the workers' time in which they did not compute.
    pub idle: f64,
    /// Rows per second of all workers' finished batches, for each interval in order.
    pub interval_samples_per_second: Vec<f64>,
}

/// Invalid settings, or a state machine that violated its protocol.
#[derive(Debug, thiserror::Error)]
pub enum SimulationError {
    /// There is no worker, no server or no row.
    #[error("a simulation needs at least one {what}")]
    Missing { what: &'static str },
    /// A number outside its range.
    #[error("{what} is {value}; it must be a finite number of at least {least}")]
    Range { what: &'static str, value: f64, least: f64 },
    /// A trace without batches.
    #[error("the trace of worker {rank} holds no batch times")]
    EmptyTrace { rank: Rank },
    /// The buffer has no valid size.
    #[error("the simulated mode has no gradient buffer: {0}")]
    Buffer(#[from] BufferSizeError),
    /// The dispatcher refused a message.
    #[error("the simulated coordinator refused a message: {0}")]
    Dispatch(#[from] DispatchError),
    /// A worker refused a message.
    #[error("a simulated worker refused a message: {0}")]
    Worker(#[from] WorkerError),
    /// A server refused a gradient.
    #[error("a simulated server refused a gradient: {0}")]
    Push(#[from] PushError),
    /// A gate refused a step.
    #[error("a simulated server refused a step: {0}")]
    Gate(#[from] GateError),
    /// A half of pulled pieces refused a message.
    #[error("a simulated member refused a pulled piece: {0}")]
    Piece(#[from] PieceError),
}

/// Runs `simulation`.
pub fn simulate(simulation: &Simulation) -> Result<Report, SimulationError> {
    validate(simulation)?;
    match simulation.mode {
        // The time of a step includes its messages, which the simulation does not count.
        TrainingMode::Sync | TrainingMode::Des => barrier::run(simulation, 0),
        TrainingMode::Pulled => pulled::run(simulation),
        TrainingMode::Hybrid { staleness } => barrier::run(simulation, staleness),
        TrainingMode::Tokens(mode) => tokens::run(simulation, mode),
        TrainingMode::Shadow(_) => shadow::run(simulation),
    }
}

fn validate(simulation: &Simulation) -> Result<(), SimulationError> {
    let cluster = &simulation.cluster;
    for (missing, what) in [
        (cluster.workers.is_empty(), "worker"),
        (cluster.servers.is_empty(), "parameter server"),
        (cluster.embedding.as_ref().is_some_and(|embedding| embedding.workers.is_empty()), "embedding worker"),
        (cluster.loaders.as_ref().is_some_and(|loaders| loaders.loaders.is_empty()), "loader"),
        (cluster.loaders.as_ref().is_some_and(|loaders| loaders.chunk_rows == 0), "row in a chunk"),
        (simulation.local_rows == 0, "row in a batch"),
        (simulation.pieces == 0, "piece in a global batch"),
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
        numbers.extend(server.slowness.map(|slow| ("a server's slowness", slow.factor, 1e-6)));
    }
    if let Some(embedding) = &cluster.embedding {
        numbers.push(("an embedding worker's seconds for a row", embedding.seconds_per_row, 0.0));
        let slow = embedding.workers.iter().flatten();
        numbers.extend(slow.map(|slow| ("an embedding worker's slowness", slow.factor, 1e-6)));
    }
    if let Some(loaders) = &cluster.loaders {
        numbers.push(("a loader's seconds for a row", loaders.seconds_per_row, 0.0));
        numbers.extend(loaders.loaders.iter().flatten().map(|slow| ("a loader's slowness", slow.factor, 1e-6)));
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

/// The description of a number, its value, and its minimum.
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

/// The counters of a run, updated with every event.
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

    /// The report with the rates of `simulation`. The caller adds the figures of its mode.
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
