//! The measured speeds of the dense workers, on which the choice between training modes depends.

use std::collections::VecDeque;

use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

/// Batches to remember for each worker.
const BATCHES: usize = 32;

/// Speeds by rank.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Speeds(Vec<Speed>);

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Speed {
    compute_seconds: VecDeque<f32>,
    batch_rows: f64,
    all_reduce_seconds: Option<f64>,
}

impl Speeds {
    /// Records a report. Its rank must be below the number of dense workers.
    pub(super) fn record(&mut self, report: &v1::Progress) {
        let rank = report.rank as usize;
        if self.0.len() <= rank {
            self.0.resize_with(rank + 1, Speed::default);
        }
        self.0[rank].record(report);
    }

    /// Keeps only the first `workers` workers.
    pub(super) fn truncate(&mut self, workers: usize) {
        self.0.truncate(workers);
    }

    /// Speeds of the workers that have reported.
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

    /// Mean seconds of an all-reduce without the wait for other workers. The worker that arrives
    /// last waits least, so its time counts.
    pub(super) fn all_reduce_seconds(&self) -> Option<f64> {
        self.0.iter().filter_map(|speed| speed.all_reduce_seconds).min_by(f64::total_cmp)
    }
}

impl Speed {
    fn record(&mut self, report: &v1::Progress) {
        // Modes may differ in the size of a local batch. Times of different sizes are not mixed.
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
    fn only_the_latest_batches_of_each_worker_count() {
        let mut speeds = Speeds::default();
        for batch in 0..50_u8 {
            speeds.record(&report(2, &[f32::from(batch)], 128.0, 0.0));
        }
        let workers = speeds.workers();
        assert_eq!((workers.len(), workers[0].rank, workers[0].compute_seconds.len()), (1, 2, BATCHES));
        assert_eq!(workers[0].compute_seconds.last(), Some(&49.0));
        speeds.record(&report(2, &[1.0], 64.0, 0.0));
        assert_eq!(speeds.workers()[0].compute_seconds, [1.0], "times of another batch size are forgotten");
    }

    #[test]
    fn the_time_of_an_all_reduce_is_the_last_workers() {
        let mut speeds = Speeds::default();
        assert_eq!(speeds.all_reduce_seconds(), None);
        speeds.record(&report(0, &[0.1], 128.0, 0.31));
        speeds.record(&report(1, &[0.4], 128.0, 0.01));
        speeds.record(&report(1, &[0.4], 128.0, 0.0));
        assert_eq!(speeds.all_reduce_seconds(), Some(0.01));
    }
}
