//! Training with pulled pieces (`sync` with `spec.training.sync.pieces: pulled`). Dense workers
//! pull the pieces of global batches, and report each piece. [`PieceQueue`] decides which worker
//! gets which piece. Steps end as in other modes with a barrier.
//!
//! The queue is not in the journal. A replacement of the coordinator begins again with the first
//! step that it does not know to be complete.

use std::time::Instant;

use rectrain_modes::barrier::pulled::{
    CompleteStep, PieceError, PieceOutcome, PieceQueue, PulledPiece, ReportedPiece, StepPiece,
};
use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;
use rectrain_proto::v1::order::Order as Kind;
use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::error::RoleError;
use serde::{Deserialize, Serialize};

use super::driver::Driver;
use super::{Stage, Training, barrier};

/// The driver of pulled pieces.
pub(super) struct Pulled;

/// The pieces of the present order.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct PulledPieces {
    /// All steps before this one are complete and applied.
    open: GlobalStep,
    #[serde(skip)]
    queue: Option<PieceQueue>,
}

/// The reply to a pull of a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PiecePull {
    Piece {
        piece: StepPiece,
        key: BatchKey,
        /// Whether another worker has the piece as well.
        is_second: bool,
    },
    /// The order ends.
    Pause,
    /// There is none yet. Ask again at this time, if nothing changes before.
    Wait(Option<Instant>),
}

/// The effect of a report of a piece.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct TrainedPiece {
    /// Whether its predictions count: no other worker has reported it as trained.
    pub(crate) counts: bool,
    /// The steps that are complete now.
    pub(crate) steps: Vec<TrainedStep>,
}

/// A step that is complete now.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TrainedStep {
    /// The rows that it has trained.
    pub(crate) rows: u64,
    /// The sum of their losses, if it is known.
    pub(crate) loss_sum: Option<f64>,
}

impl Driver for Pulled {
    fn begin(&self, training: &mut Training) -> Kind {
        training.pulled = PulledPieces { open: training.start_of_order().step, queue: None };
        Kind::Pulled(v1::Pulled {})
    }

    fn advance(&self, training: &mut Training) -> Result<bool, RoleError> {
        if !barrier::is_granted(training) || !training.is_order_complete() || !training.all_done() {
            return Ok(false);
        }
        barrier::pause(training, |_| Ok(()))?;
        Ok(true)
    }

    fn next_batch(&self, training: &Training) -> u64 {
        training.feed.granted
    }

    fn reported_batches(&self, training: &Training, _batches: u64) -> Option<u64> {
        Some(training.batch_of(training.pulled.open))
    }

    // A step is complete once all its gradients are applied.
    fn settled_batches(&self, training: &Training, _batches: u64) -> Option<u64> {
        Some(training.batch_of(training.pulled.open))
    }

    fn rejoin(&self, training: &mut Training, rank: Rank) {
        if let Some(queue) = &mut training.pulled.queue {
            queue.lost(rank);
        }
    }
}

impl Training {
    /// The global batch that a step of the present order trains.
    fn batch_of(&self, step: GlobalStep) -> u64 {
        self.order.batch + step.0.saturating_sub(self.order.step)
    }

    /// The first piece that a step of the present order trains.
    fn first_piece_of(&self, step: GlobalStep) -> u32 {
        if step.0 == self.order.step { self.order.piece } else { 0 }
    }

    /// Whether all steps are complete that the present order was granted.
    fn is_order_complete(&self) -> bool {
        self.batch_of(self.pulled.open) >= self.feed.granted
    }

    /// Worker `rank` pulls a piece in an order.
    pub(crate) fn pull_piece(&mut self, rank: Rank, order: u64, now: Instant) -> Result<PiecePull, RoleError> {
        if self.stage != Stage::Training || order != self.order.number {
            return Ok(if order <= self.order.number { PiecePull::Pause } else { PiecePull::Wait(None) });
        }
        self.advance()?;
        if self.feed.stop_at.is_none() {
            let ahead = 1 + self.config.steps_ahead as u64;
            let until = self.batch_of(self.pulled.open) + ahead;
            let until = until.min(self.feed.data.batches()).min(self.next_pause().unwrap_or(u64::MAX));
            barrier::grant(self, until)?;
            self.advance()?;
        }
        if self.feed.stop_at == Some(self.feed.granted) && self.is_order_complete() {
            return Ok(PiecePull::Pause);
        }
        let queue = self.granted_queue(now)?;
        let pulled = queue.pull(rank, now);
        let next_late = queue.next_late(now);
        Ok(match pulled {
            None => PiecePull::Wait(next_late),
            Some(PulledPiece { piece, is_second }) => {
                let position = BatchPosition::Train(self.batch_of(piece.step));
                PiecePull::Piece { piece, key: BatchKey { position, piece: piece.piece.0 }, is_second }
            }
        })
    }

    /// The queue, with all granted steps.
    fn granted_queue(&mut self, now: Instant) -> Result<&mut PieceQueue, RoleError> {
        let (pieces, ahead, open) = (self.config.pieces, self.config.steps_ahead, self.pulled.open);
        let mut queue = self.pulled.queue.take().unwrap_or_else(|| PieceQueue::new(pieces, ahead as usize, open, now));
        while queue.granted() < self.run.next_step() {
            queue.grant(self.first_piece_of(queue.granted())).map_err(inconsistent)?;
        }
        Ok(self.pulled.queue.insert(queue))
    }

    /// A worker has nothing more to do with a piece. A report of an earlier order changes nothing.
    pub(crate) fn piece_report(&mut self, report: &v1::PieceReport, now: Instant) -> Result<TrainedPiece, RoleError> {
        if self.stage != Stage::Training || report.order != self.order.number {
            return Ok(TrainedPiece::default());
        }
        let v1::StepPiece { step, piece } = report.piece.unwrap_or_default();
        let piece = StepPiece { step: GlobalStep(step), piece: Rank(piece) };
        let outcome = if report.trained { PieceOutcome::Trained } else { PieceOutcome::Passed };
        let queue = self.granted_queue(now)?;
        let ReportedPiece { counts, complete } =
            queue.report(Rank(report.rank), piece, outcome, report.loss_sum, now).map_err(inconsistent)?;
        let mut steps = Vec::with_capacity(complete.len());
        for CompleteStep { step, loss_sum } in complete {
            self.run.sync_step_applied(step)?;
            self.pulled.open = step.next();
            let pieces = self.first_piece_of(step)..self.config.pieces;
            steps.push(TrainedStep { rows: self.rows_of_share(self.batch_of(step), pieces), loss_sum });
        }
        self.advance()?;
        Ok(TrainedPiece { counts, steps })
    }
}

fn inconsistent(error: PieceError) -> RoleError {
    RoleError::Inconsistent { message: "piece_report", reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use rectrain_protocol::plan::small_plan;

    use super::*;
    use crate::batch_index::Chunk;

    const STEPS: u64 = 4;

    /// A job of four steps with three pieces each, whose dense workers have begun to train. Also
    /// the number of the order.
    fn started(workers: u32) -> (Training, u64) {
        let plan = small_plan(&[
            "spec.training.sync.pieces=pulled",
            "spec.training.localBatchSize=8",
            &format!("spec.roles.denseWorker.replicas={workers}"),
        ]);
        let mut training = Training::new(&plan, None).unwrap();
        training.data_mut().add(Chunk { epoch: 0, first_batch: 0, rows: 24 * STEPS });
        training.data_mut().end(STEPS);
        let mut done = vec![0; workers as usize];
        loop {
            for (rank, done) in (0..).map(Rank).zip(&mut done) {
                let Some(order) = training.next_order(rank, *done).unwrap() else { continue };
                if let Some(Kind::Pulled(_)) = order.order {
                    return (training, order.number);
                }
                *done = order.number;
            }
            for _call in training.take_calls() {
                training.begun().unwrap();
            }
        }
    }

    fn piece(step: u64, piece: u32) -> StepPiece {
        StepPiece { step: GlobalStep(step), piece: Rank(piece) }
    }

    fn pull(training: &mut Training, rank: u32, order: u64) -> StepPiece {
        match training.pull_piece(Rank(rank), order, Instant::now()).unwrap() {
            PiecePull::Piece { piece, key, is_second } => {
                let position = BatchPosition::Train(piece.step.0);
                assert_eq!((key, is_second), (BatchKey { position, piece: piece.piece.0 }, false));
                piece
            }
            other => panic!("{other:?}"),
        }
    }

    fn report(training: &mut Training, rank: u32, order: u64, of: StepPiece, trained: bool) -> Vec<TrainedStep> {
        report_of(training, rank, order, of, trained).steps
    }

    fn report_of(training: &mut Training, rank: u32, order: u64, of: StepPiece, trained: bool) -> TrainedPiece {
        let piece = Some(v1::StepPiece { step: of.step.0, piece: of.piece.0 });
        let report = v1::PieceReport { rank, order, piece, trained, loss_sum: 0.5 };
        training.piece_report(&report, Instant::now()).unwrap()
    }

    #[test]
    fn one_worker_may_train_all_pieces() {
        let (mut training, order) = started(4);
        for step in 0..STEPS {
            assert_eq!((training.batches_done(0), training.settled_batches(0)), (step, step));
            for number in 0..3 {
                let pulled = pull(&mut training, 2, order);
                assert_eq!(pulled, piece(step, number));
                let complete = [TrainedStep { rows: 24, loss_sum: Some(1.5) }];
                let expected = if number == 2 { &complete[..] } else { &[] };
                assert_eq!(report(&mut training, 2, order, pulled, true), expected);
                assert!(report(&mut training, 2, order, pulled, true).is_empty(), "a repeated report");
            }
        }
        for rank in (0..4).map(Rank) {
            assert_eq!(training.pull_piece(rank, order, Instant::now()).unwrap(), PiecePull::Pause);
            assert_eq!(training.stage, Stage::Training, "not all workers have answered");
            training.next_order(rank, order).unwrap();
        }
        assert_ne!(training.stage, Stage::Training);
        assert_eq!((training.trained_rows(), training.batches_done(0)), (24 * STEPS, STEPS));
        assert!(report(&mut training, 2, order, piece(3, 2), true).is_empty(), "of an order that has ended");
    }

    #[test]
    fn pieces_of_one_step_ahead_are_handed_out() {
        let (mut training, order) = started(4);
        let pulled: Vec<StepPiece> = [0, 0, 1, 1, 2, 2].map(|rank| pull(&mut training, rank, order)).into();
        assert_eq!(pulled, [0, 1].map(|step| [0, 1, 2].map(|number| piece(step, number))).concat());
        assert_eq!(training.pull_piece(Rank(3), order, Instant::now()).unwrap(), PiecePull::Wait(None));
        for piece in &pulled[..3] {
            report(&mut training, 0, order, *piece, true);
        }
        assert_eq!(pull(&mut training, 3, order), piece(2, 0));
    }

    #[test]
    fn the_predictions_of_a_piece_count_once() {
        let (mut training, order) = started(2);
        let (first, second) = (pull(&mut training, 0, order), pull(&mut training, 1, order));
        assert!(!report_of(&mut training, 0, order, first, false).counts, "it was passed");
        assert!(report_of(&mut training, 0, order, second, true).counts);
        assert!(!report_of(&mut training, 1, order, second, true).counts, "worker 0 was first");
        assert!(!report_of(&mut training, 0, order + 1, second, true).counts, "of another order");
    }

    #[test]
    fn others_get_the_pieces_of_a_worker_that_died() {
        for workers in [1, 2] {
            let (mut training, order) = started(workers);
            assert_eq!([pull(&mut training, 0, order), pull(&mut training, 0, order)], [piece(0, 0), piece(0, 1)]);
            assert!(training.replace_worker(Rank(0), false), "{workers} workers");
            let again = training.next_order(Rank(0), 0).unwrap().unwrap();
            assert_eq!((again.number, again.joins, again.mends), (order, false, false));
            assert_eq!(pull(&mut training, workers - 1, order), piece(0, 0));
        }
    }

    #[test]
    fn a_replacement_of_the_coordinator_begins_with_the_open_step() {
        let (mut training, order) = started(2);
        for number in 0..3 {
            let pulled = pull(&mut training, 0, order);
            assert_eq!(
                (pulled, report(&mut training, 0, order, pulled, true).len()),
                (piece(0, number), number as usize / 2)
            );
        }
        let trained = pull(&mut training, 0, order);
        assert!(report(&mut training, 0, order, trained, true).is_empty());
        let image = rmp_serde::to_vec_named(&training).unwrap();
        let mut recovered: Training = rmp_serde::from_slice(&image).unwrap();
        assert_eq!(recovered.batches_done(0), 1);
        // The worker finds that it has trained the first piece already, or that its step is
        // applied.
        assert_eq!([0, 0, 1].map(|rank| pull(&mut recovered, rank, order)), [0, 1, 2].map(|number| piece(1, number)));
        assert!(report(&mut recovered, 0, order, piece(1, 0), false).is_empty());
        assert!(report(&mut recovered, 0, order, piece(1, 1), true).is_empty());
        let complete = [TrainedStep { rows: 24, loss_sum: None }];
        assert_eq!(report(&mut recovered, 1, order, piece(1, 2), true), complete, "a loss is not known again");
    }
}
