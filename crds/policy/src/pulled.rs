//! The time of a step in `sync` whose pieces free workers pull: a model of the queue of
//! `runtime/modes/src/barrier/pulled/`, which `tests/policy/throughput.rs` compares with it.
//!
//! - A worker has at most two pieces of a step: the one that it computes, and the next. So it pulls
//!   whenever it begins a piece.
//! - A worker whose pieces are late as a rule is slow. It has no piece that no other worker has, so
//!   it adds nothing.
//! - A single late piece is computed by a second worker. It then ends a usual piece later.

use crate::Worker;

/// A piece is late after this many times the median time of a piece.
const LATE_FACTOR: f64 = 3.0;
/// The most pieces for each worker that are modelled one by one. A step with more of them is longer
/// in proportion, within 2 %.
const MOST_ROUNDS: usize = 64;

/// A worker that is not slow, while a step is modelled.
struct Puller<'a> {
    worker: &'a Worker,
    /// The index of its next measured batch.
    next: usize,
    /// When it pulls its next piece, and when it can begin to compute it.
    pulls_at: f64,
    free_at: f64,
}

/// Mean seconds of a step with `pieces` pieces of `rows` rows. A piece takes `wait` seconds besides
/// its computation. Each worker has a measured batch. `pieces` is at least 1.
pub(crate) fn step_seconds(workers: &[Worker], rows: f64, pieces: usize, wait: f64) -> f64 {
    let mean = |worker: &Worker| worker.mean_seconds(rows) + wait;
    let mut means: Vec<f64> = workers.iter().map(mean).collect();
    means.sort_by(f64::total_cmp);
    // The lower median: at most half of the workers are slow.
    let usual = means[(means.len() - 1) / 2];
    let fast = workers.iter().filter(|worker| mean(worker) < LATE_FACTOR * usual);
    let mut fast: Vec<Puller<'_>> =
        fast.map(|worker| Puller { worker, next: 0, pulls_at: 0.0, free_at: 0.0 }).collect();
    // A time that no number holds: the caller refuses it.
    if fast.is_empty() {
        return usual;
    }
    let modelled = pieces.min(MOST_ROUNDS * fast.len());
    // Each measured batch counts about once.
    let batches: usize = fast.iter().map(|puller| puller.worker.compute_seconds.len()).sum();
    let steps = batches.div_ceil(modelled);
    let total: f64 = (0..steps).map(|_| step(&mut fast, rows, modelled, (wait, usual))).sum();
    total / steps as f64 * pieces as f64 / modelled as f64
}

/// Seconds of a step. `usual` is the time of a usual piece.
fn step(fast: &mut [Puller<'_>], rows: f64, pieces: usize, (wait, usual): (f64, f64)) -> f64 {
    let late_after = LATE_FACTOR * usual;
    let mut end = 0.0_f64;
    for _ in 0..pieces {
        let first = |a: &&mut Puller<'_>, b: &&mut Puller<'_>| {
            a.pulls_at.total_cmp(&b.pulls_at).then(a.free_at.total_cmp(&b.free_at))
        };
        let Some(puller) = fast.iter_mut().min_by(first) else { break };
        let (pulled, begins) = (puller.pulls_at, puller.free_at);
        let own_end = begins + puller.next_seconds(rows) + wait;
        // Its time begins once the piece before has ended. If that one is late, so is this one.
        let late = if begins > pulled + late_after { pulled } else { begins } + late_after;
        let done = own_end.min(late + usual);
        end = end.max(done);
        puller.pulls_at = begins;
        if begins < done {
            puller.free_at = own_end;
        }
    }
    // A worker that still computes a late piece pulls no other one meanwhile.
    for puller in fast {
        puller.free_at = (puller.free_at - end).max(0.0);
        puller.pulls_at = puller.free_at;
    }
    end
}

impl Puller<'_> {
    fn next_seconds(&mut self, rows: f64) -> f64 {
        let batches = &self.worker.compute_seconds;
        let seconds = batches[self.next % batches.len()];
        self.next = (self.next + 1) % batches.len();
        seconds * rows / f64::from(self.worker.batch_rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workers(seconds: &[f64]) -> Vec<Worker> {
        seconds.iter().map(|seconds| Worker { batch_rows: 10, compute_seconds: vec![*seconds] }).collect()
    }

    /// Seconds of a step with pieces of ten rows.
    fn step_of(seconds: &[f64], pieces: usize) -> f64 {
        step_seconds(&workers(seconds), 10.0, pieces, 0.0)
    }

    #[test]
    fn equal_workers_take_their_pieces_rounded_up() {
        for (count, pieces) in [(4_usize, 12_usize), (4, 13), (1, 5), (3, 2), (16, 40)] {
            let expected = pieces.div_ceil(count) as f64;
            assert_eq!(step_of(&vec![1.0; count], pieces), expected, "{count} workers, {pieces} pieces");
        }
    }

    #[test]
    fn a_worker_whose_pieces_are_late_adds_nothing() {
        assert_eq!(step_of(&[1.0, 1.0, 33.0, 1.0], 12), 4.0);
        assert_eq!(step_of(&[1.0, 1.0, 33.0, 1.0], 4), 2.0);
        assert_eq!(step_of(&[1.0, 33.0], 6), 6.0);
        // One at half its speed still helps: 2 + 2 + 2 + 1 pieces in two rounds.
        assert_eq!(step_of(&[1.0, 1.0, 2.0, 1.0], 7), 2.0);
    }

    #[test]
    fn a_piece_takes_its_rows_and_its_wait() {
        assert_eq!(step_seconds(&workers(&[1.0, 1.0]), 5.0, 4, 0.25), 1.5);
    }

    #[test]
    fn a_late_piece_and_the_one_behind_it_are_computed_by_others() {
        let slow_once = Worker { batch_rows: 10, compute_seconds: [&[20.0][..], &[1.0; 31]].concat() };
        let all = [vec![slow_once], workers(&[1.0; 3])].concat();
        // Three workers compute 12 pieces in 4 s. Until then the late two are ready, 3 + 1 s after
        // their pulls. In the next steps the slow worker still computes its piece.
        assert_eq!(step_seconds(&all, 10.0, 12, 0.0), 4.0);
    }

    #[test]
    fn many_pieces_are_extrapolated() {
        let (some, many) = (step_of(&[1.0, 1.3, 2.0], 192), step_of(&[1.0, 1.3, 2.0], 192_000));
        assert!((many / some - 1000.0).abs() < 1e-6 * many, "{some} {many}");
    }
}
