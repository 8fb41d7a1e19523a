//! How fast either mode would be, from measured batch times. The models are those of the simulator that runs the modes' own state
//! machines (`rectrain simulate`); `tests/throughput.rs` compares them.
//!
//! With c_i(b) the seconds that worker i computes b rows, G the global and B the local batch, N workers with a barrier, r an
//! all-reduce, e the wait for token and parameters and w that for data and embeddings:
//!
//! - `sync`: a step takes T = E[max_i c_i(G/N)] + r + w, so G/T samples a second: as fast as its slowest worker. The mean of the
//!   largest is not the largest of the means: it is taken over the measured batches, the j-th of every worker together.
//! - `gba`: worker i takes t_i = c_i(B) + e + w for a batch and waits for nobody, so Σ B/t_i. While it works on one, t_i·Σ 1/t_j
//!   batches come in, of which M = G/B make a step; a gradient staler than ι steps is left out (GBA, §4.1, equation 1), and what is
//!   left out is not counted as trained.

use crate::{Observations, TrainingMode, Worker};

/// Rows trained a second, all workers together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// In `sync`.
    pub sync: f64,
    /// In `gba`, gradients that would be left out not counted.
    pub gba: f64,
    /// Seconds of a step in `sync`.
    pub sync_step_seconds: f64,
    /// Rank of the worker that is slowest on average, among those that train in `sync`.
    pub slowest: usize,
}

impl Prediction {
    /// In `mode`.
    #[must_use]
    pub fn of(&self, mode: TrainingMode) -> f64 {
        match mode {
            TrainingMode::Sync => self.sync,
            TrainingMode::Gba => self.gba,
        }
    }
}

/// Between the gradient's arrival and the application of the step that it is in, half a step passes on average.
const IN_BUFFER_STEPS: f64 = 0.5;

/// What of a step is not computing, in seconds, as last known. Where only one of all-reduce and exchange is, it stands for the other: a
/// ring all-reduce moves the gradient and the sums over a worker's link, a push and a pull the gradient and the parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Overheads {
    pub(crate) all_reduce: Option<f64>,
    pub(crate) exchange: Option<f64>,
    /// For data and embeddings, with a barrier and without one: they are measured apart, and what is not known is as it is now.
    pub(crate) sync_wait: Option<f64>,
    pub(crate) gba_wait: Option<f64>,
}

/// Predicts both modes; `None` where no batch was measured or the measurements cannot be ([`Observations::check`]).
/// `all_reduce_seconds` and `exchange_seconds` are those last known; where only one is, it stands for the other.
#[must_use]
pub fn predict(
    observations: &Observations,
    all_reduce_seconds: Option<f64>,
    exchange_seconds: Option<f64>,
) -> Option<Prediction> {
    let overheads = Overheads { all_reduce: all_reduce_seconds, exchange: exchange_seconds, ..Overheads::default() };
    with_overheads(observations, overheads)
}

pub(crate) fn with_overheads(observations: &Observations, overheads: Overheads) -> Option<Prediction> {
    observations.check().ok()?;
    let workers = &observations.workers;
    if !is_measured(workers) || observations.global_batch_rows == 0 || observations.local_batch_rows == 0 {
        return None;
    }
    let with_barrier = with_barrier(observations);
    let all_reduce = overheads.all_reduce.or(overheads.exchange).unwrap_or(0.0);
    let rows = f64::from(observations.local_batch_rows);
    let slowest_seconds = workers.iter().map(|worker| worker.mean_seconds(rows)).fold(f64::MIN_POSITIVE, f64::max);
    // An all-reduce takes as long as its slowest worker; an exchange is a worker's own.
    let exchange = |worker: &Worker| match overheads.exchange {
        Some(exchange) => exchange,
        None => all_reduce * worker.mean_seconds(rows) / slowest_seconds,
    };
    let sync_wait = overheads.sync_wait.unwrap_or(observations.wait_seconds);
    let gba_wait = overheads.gba_wait.unwrap_or(observations.wait_seconds);
    let global_rows = f64::from(observations.global_batch_rows);
    let sync_step_seconds = computing_seconds(observations)? + all_reduce + sync_wait;
    let slowest = (0..with_barrier.len())
        .max_by(|a, b| with_barrier[*a].mean_seconds(1.0).total_cmp(&with_barrier[*b].mean_seconds(1.0)))?;
    let prediction = Prediction {
        sync: global_rows / sync_step_seconds,
        gba: without_barrier(observations, |worker| exchange(worker) + gba_wait),
        sync_step_seconds,
        slowest,
    };
    let is_speed = prediction.sync.is_normal() && prediction.gba.is_finite();
    is_speed.then_some(prediction)
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

/// Seconds that the slowest worker of a step in `sync` computes a row; none if no batch of every worker was measured, or nothing can be.
pub(crate) fn seconds_a_row(observations: &Observations) -> Option<f64> {
    let workers = with_barrier(observations);
    is_measured(workers).then(|| mean_of_the_slowest(workers, 1.0)).filter(|seconds| seconds.is_normal())
}

/// Seconds of a step in `sync` that its slowest worker computes.
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
