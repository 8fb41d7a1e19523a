//! Predicted speed of either mode, from measured batch times. The models are the ones of the
//! simulator that runs the modes' own state machines (`rectrain simulate`); `tests/throughput.rs`
//! compares them.
//!
//! c_i(b) is the time in which worker i computes b rows. G is the global batch, B the local batch,
//! and N the number of workers with a barrier. r is an all-reduce, e the wait for token and
//! parameters, and w the wait for data and embeddings. All times are in seconds.
//!
//! - `sync`: a step takes T = E[max_i c_i(G/N)] + r + w, so the speed is G/T: the slowest worker
//!   sets it. The mean of the maximum is not the maximum of the means. So the maximum is taken over
//!   the j-th measured batches of all workers, and then averaged over j.
//! - `sync` with pulled pieces: a step takes T = P(c, w) + e. P is the time in which the workers
//!   compute the G/B pieces of a step, as the queue hands them out ([`crate::pulled`]). For n equal
//!   workers that is ⌈G/B / n⌉ · (c(B) + w). The workers read the parameters once a step.
//! - `gba`: worker i takes t_i = c_i(B) + e + w for a batch and waits for no other worker, so the
//!   speed is Σ B/t_i. During its batch t_i·Σ 1/t_j batches arrive, and M = G/B batches make a
//!   step. A gradient staler than ι steps is excluded (GBA, §4.1, equation 1) and does not count as
//!   trained.

use crate::{AutoMode, Observations, Worker, pulled};

/// Predicted rows per second of all workers together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// In `sync`.
    pub sync: f64,
    /// In `gba`, without gradients that would be excluded.
    pub gba: f64,
    /// Seconds of a step in `sync`.
    pub sync_step_seconds: f64,
    /// Rank of the slowest worker on average, among the workers that train in `sync`.
    pub slowest: usize,
}

impl Prediction {
    /// The speed in `mode`.
    #[must_use]
    pub fn of(&self, mode: AutoMode) -> f64 {
        match mode {
            AutoMode::Sync => self.sync,
            AutoMode::Gba => self.gba,
        }
    }
}

/// Steps that pass on average between a gradient's arrival and the application of its step.
const IN_BUFFER_STEPS: f64 = 0.5;

/// The parts of a step besides computation, in seconds, as last known.
///
/// If only one of all-reduce and exchange is known, it stands for the other. A ring all-reduce
/// moves the gradient and the sums over a worker's link; a push and a pull move the gradient and
/// the parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Overheads {
    pub(crate) all_reduce: Option<f64>,
    pub(crate) exchange: Option<f64>,
    /// Wait for data and embeddings in `sync`. Absent: as measured now.
    pub(crate) sync_wait: Option<f64>,
    /// Wait for data and embeddings in `gba`. Absent: as measured now.
    pub(crate) gba_wait: Option<f64>,
}

/// Predicts both modes.
///
/// `all_reduce_seconds` and `exchange_seconds` are the last known values; if only one is known, it
/// stands for the other. Returns `None` if no batch was measured, or if a measurement is outside
/// its range ([`Observations::check`]).
#[must_use]
pub fn predict(
    observations: &Observations,
    all_reduce_seconds: Option<f64>,
    exchange_seconds: Option<f64>,
) -> Option<Prediction> {
    let overheads = Overheads { all_reduce: all_reduce_seconds, exchange: exchange_seconds, ..Overheads::default() };
    with_overheads(observations, overheads)
}

/// Predicts both modes with these overheads; see [`predict`].
pub(crate) fn with_overheads(observations: &Observations, overheads: Overheads) -> Option<Prediction> {
    observations.check().ok()?;
    let workers = &observations.workers;
    if !is_measured(workers) || observations.global_batch_rows == 0 || observations.local_batch_rows == 0 {
        return None;
    }
    let all_reduce = overheads.all_reduce.or(overheads.exchange).unwrap_or(0.0);
    let rows = f64::from(observations.local_batch_rows);
    let slowest_seconds = workers.iter().map(|worker| worker.mean_seconds(rows)).fold(f64::MIN_POSITIVE, f64::max);
    // The slowest worker sets the time of an all-reduce; every worker exchanges at its own speed.
    let exchange = |worker: &Worker| match overheads.exchange {
        Some(exchange) => exchange,
        None => all_reduce * worker.mean_seconds(rows) / slowest_seconds,
    };
    let sync_wait = overheads.sync_wait.unwrap_or(observations.wait_seconds);
    let gba_wait = overheads.gba_wait.unwrap_or(observations.wait_seconds);
    let global_rows = f64::from(observations.global_batch_rows);
    let sync_step_seconds = match pieces(observations) {
        Some(pieces) => pulled::step_seconds(workers, rows, pieces, sync_wait) + overheads.exchange.unwrap_or(0.0),
        None => computing_seconds(observations)? + all_reduce + sync_wait,
    };
    let prediction = Prediction {
        sync: global_rows / sync_step_seconds,
        gba: without_barrier(observations, |worker| exchange(worker) + gba_wait),
        sync_step_seconds,
        slowest: slowest(with_barrier(observations))?,
    };
    let is_speed = prediction.sync.is_normal() && prediction.gba.is_finite();
    is_speed.then_some(prediction)
}

/// The pieces of a step, if free workers pull them in `sync`.
pub(crate) fn pieces(observations: &Observations) -> Option<usize> {
    let pieces = observations.global_batch_rows.div_ceil(observations.local_batch_rows.max(1));
    observations.pulls_pieces.then_some(pieces.max(1) as usize)
}

fn is_measured(workers: &[Worker]) -> bool {
    !workers.is_empty() && workers.iter().all(|worker| !worker.compute_seconds.is_empty())
}

/// The workers that train in `sync`.
fn with_barrier(observations: &Observations) -> &[Worker] {
    let workers = &observations.workers;
    let count = observations.barrier_workers.map_or(workers.len(), |count| count as usize);
    &workers[..count.max(1).min(workers.len())]
}

/// Rank of the slowest worker on average.
fn slowest(workers: &[Worker]) -> Option<usize> {
    let seconds = |rank: &usize| workers[*rank].mean_seconds(1.0);
    (0..workers.len()).max_by(|a, b| seconds(a).total_cmp(&seconds(b)))
}

/// Seconds per row of the slowest worker of a step in `sync`. `None` if a worker has no measured
/// batch, or if the result is no usable number.
pub(crate) fn seconds_a_row(observations: &Observations) -> Option<f64> {
    let workers = with_barrier(observations);
    is_measured(workers).then(|| mean_of_the_slowest(workers, 1.0)).filter(|seconds| seconds.is_normal())
}

/// Seconds of computation of the slowest worker of a step in `sync`.
fn computing_seconds(observations: &Observations) -> Option<f64> {
    let workers = with_barrier(observations);
    let rows = f64::from(observations.global_batch_rows) / workers.len().max(1) as f64;
    Some(rows * seconds_a_row(observations)?)
}

/// E[max_i c_i(rows)], over the measured batches.
pub(crate) fn mean_of_the_slowest(workers: &[Worker], rows: f64) -> f64 {
    let batches = workers.iter().map(|worker| worker.compute_seconds.len()).max().unwrap_or(0);
    let slowest = |batch: usize| {
        let seconds = |worker: &Worker| {
            worker.compute_seconds[batch % worker.compute_seconds.len()] * rows / f64::from(worker.batch_rows)
        };
        workers.iter().map(seconds).fold(0.0, f64::max)
    };
    (0..batches).map(slowest).sum::<f64>() / batches.max(1) as f64
}

fn without_barrier(observations: &Observations, overhead: impl Fn(&Worker) -> f64) -> f64 {
    let rows = f64::from(observations.local_batch_rows);
    let mean = |worker: &Worker| worker.mean_seconds(rows) + overhead(worker);
    let batches_a_second: f64 = observations.workers.iter().map(|worker| mean(worker).recip()).sum();
    let steps_a_second = batches_a_second * rows / f64::from(observations.global_batch_rows);
    let counted = |worker: &Worker| {
        let is_counted = |seconds: &&f64| {
            let batch = **seconds * rows / f64::from(worker.batch_rows) + overhead(worker);
            batch * steps_a_second <= f64::from(observations.staleness_tolerance) + IN_BUFFER_STEPS
        };
        worker.compute_seconds.iter().filter(is_counted).count() as f64 / worker.compute_seconds.len() as f64
    };
    observations.workers.iter().map(|worker| rows * counted(worker) / mean(worker)).sum()
}
