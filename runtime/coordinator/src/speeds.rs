//! How fast the dense workers are, as they report it: what a choice between training modes rests on.

use std::collections::VecDeque;

use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

/// Batches of a worker that are remembered.
const BATCHES: usize = 32;

/// By rank.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Speeds(Vec<Speed>);

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Speed {
    compute_seconds: VecDeque<f32>,
    batch_rows: f64,
    all_reduce_seconds: Option<f64>,
}

impl Speeds {
    /// Takes a report of a rank below the number of dense workers.
    pub(super) fn take(&mut self, report: &v1::Progress) {
        let rank = report.rank as usize;
        if self.0.len() <= rank {
            self.0.resize_with(rank + 1, Speed::default);
        }
        self.0[rank].take(report);
    }

    /// There are only so many workers any more.
    pub(super) fn keep(&mut self, workers: usize) {
        self.0.truncate(workers);
    }

    /// Of the workers that have reported.
    pub(super) fn workers(&self) -> Vec<v1::WorkerSpeed> {
        let known = (0..).zip(&self.0).filter(|(_, speed)| !speed.compute_seconds.is_empty());
        known
            .map(|(rank, speed)| v1::WorkerSpeed {
                rank,
                compute_seconds: speed.compute_seconds.iter().copied().collect(),
                batch_rows: speed.batch_rows,
            })
            .collect()
    }

    /// Mean seconds of an all-reduce without the wait for others: that of the worker which comes last and waits least.
    pub(super) fn all_reduce_seconds(&self) -> Option<f64> {
        self.0.iter().filter_map(|speed| speed.all_reduce_seconds).min_by(f64::total_cmp)
    }
}

impl Speed {
    fn take(&mut self, report: &v1::Progress) {
        // Another mode may have another local batch: times of both are not mixed.
        if report.batch_rows > 0.0 && (self.batch_rows - report.batch_rows).abs() > 0.5 * report.batch_rows {
            self.compute_seconds.clear();
        }
        self.compute_seconds.extend(&report.compute_seconds);
        let surplus = self.compute_seconds.len().saturating_sub(BATCHES);
        self.compute_seconds.drain(..surplus);
        if report.batch_rows > 0.0 {
            self.batch_rows = report.batch_rows;
        }
        if report.all_reduce_seconds > 0.0 {
            self.all_reduce_seconds = Some(report.all_reduce_seconds);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(rank: u32, compute_seconds: &[f32], batch_rows: f64, all_reduce_seconds: f64) -> v1::Progress {
        let compute_seconds = compute_seconds.to_vec();
        v1::Progress { rank, compute_seconds, batch_rows, all_reduce_seconds, ..v1::Progress::default() }
    }

    #[test]
    fn the_latest_batches_of_each_worker_are_known_and_no_more() {
        let mut speeds = Speeds::default();
        for batch in 0..50_u8 {
            speeds.take(&report(2, &[f32::from(batch)], 128.0, 0.0));
        }
        let workers = speeds.workers();
        assert_eq!((workers.len(), workers[0].rank, workers[0].compute_seconds.len()), (1, 2, BATCHES));
        assert_eq!(workers[0].compute_seconds.last(), Some(&49.0));
        speeds.take(&report(2, &[1.0], 64.0, 0.0));
        assert_eq!(speeds.workers()[0].compute_seconds, [1.0], "times of another batch size are forgotten");
    }

    #[test]
    fn an_all_reduce_takes_as_long_as_it_takes_the_last_to_come() {
        let mut speeds = Speeds::default();
        assert_eq!(speeds.all_reduce_seconds(), None);
        speeds.take(&report(0, &[0.1], 128.0, 0.31));
        speeds.take(&report(1, &[0.4], 128.0, 0.01));
        speeds.take(&report(1, &[0.4], 128.0, 0.0));
        assert_eq!(speeds.all_reduce_seconds(), Some(0.01));
    }
}
