//! The positions of the dense workers. They bound the pieces that an embedding worker holds: a
//! loader waits while its batch is more than a window ahead.

use std::collections::HashMap;

use rectrain_modes::GlobalStep;
use rectrain_protocol::batch::{BatchKey, BatchPosition};

/// See the module documentation.
#[derive(Default)]
pub(crate) struct Positions {
    train: u64,
    evaluation: Option<GlobalStep>,
    /// The last batch of the evaluation that was fetched, by piece. Each piece belongs to one dense
    /// worker, and dense workers differ in speed.
    evaluated: HashMap<u32, u64>,
}

impl Positions {
    /// Whether a piece may enter, with room for `window` batches ahead.
    ///
    /// A training piece without rows always may. Without a barrier no dense worker fetches it, so
    /// an embedding worker that gets no others would never move. The other pieces of its batch
    /// bound the loader.
    pub(crate) fn admits(&self, key: BatchKey, has_rows: bool, window: u64) -> bool {
        match key.position {
            BatchPosition::Train(_) if !has_rows => true,
            BatchPosition::Train(number) => number < self.train + window,
            // This evaluation is over. The piece may enter, and is then dropped.
            BatchPosition::Evaluation { at_step, .. } if self.evaluation > Some(at_step) => true,
            BatchPosition::Evaluation { at_step, number } => {
                // A late joiner receives no requests for the pieces of a finished dense worker. The
                // furthest position then counts.
                let evaluated = self.evaluated.get(&key.piece).or_else(|| self.evaluated.values().max());
                number < window + evaluated.copied().filter(|_| self.evaluation == Some(at_step)).unwrap_or(0)
            }
        }
    }

    /// The newest batch of training that a dense worker has fetched.
    pub(crate) fn newest(&self) -> u64 {
        self.train
    }

    /// Records that a dense worker fetches this piece.
    pub(crate) fn move_to(&mut self, key: BatchKey, window: u64) {
        match key.position {
            BatchPosition::Train(number) => self.train = self.train.max(number),
            BatchPosition::Evaluation { at_step, number } => {
                if self.evaluation != Some(at_step) {
                    self.evaluated.clear();
                }
                self.evaluation = Some(at_step);
                let evaluated = self.evaluated.entry(key.piece).or_insert(number);
                // A replacement of the dense worker restarts from the first batch.
                let restarts = number + 2 * window < *evaluated;
                *evaluated = if restarts { number } else { number.max(*evaluated) };
            }
        }
    }

    /// Whether a later evaluation has begun since this piece's evaluation.
    pub(crate) fn is_over(&self, key: BatchKey) -> bool {
        matches!(key.position, BatchPosition::Evaluation { at_step, .. } if self.evaluation > Some(at_step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn training_pieces_without_rows_enter_at_any_distance() {
        let positions = Positions::default();
        let key = |number| BatchKey { position: BatchPosition::Train(number), piece: 1 };
        assert_eq!([7, 8].map(|number| positions.admits(key(number), true, 8)), [true, false]);
        assert!(positions.admits(key(5000), false, 8), "no dense worker may ever fetch from this worker");
    }

    #[test]
    fn evaluation_pieces_enter_up_to_a_window_ahead() {
        let key = |at_step: u64, number: u64, piece: u32| BatchKey {
            position: BatchPosition::Evaluation { at_step: GlobalStep(at_step), number },
            piece,
        };
        let mut positions = Positions::default();
        (0..1000).for_each(|number| positions.move_to(key(7, number, 0), 8));
        positions.move_to(key(7, 5, 1), 8);
        let admits = |positions: &Positions, number, piece| positions.admits(key(7, number, piece), true, 8);
        // No dense worker fetches piece 2.
        for (piece, most) in [(0, 1006), (1, 12), (2, 1006)] {
            assert!(admits(&positions, most, piece) && !admits(&positions, most + 1, piece), "piece {piece}");
        }
        // A replacement restarts from the first batch. A late request of its predecessor does no
        // harm.
        for number in [0, 999, 1, 2] {
            positions.move_to(key(7, number, 0), 8);
        }
        assert_eq!([9, 10].map(|number| admits(&positions, number, 0)), [true, false]);
        // In the next evaluation, pieces of the previous one may enter, and are then dropped.
        positions.move_to(key(9, 0, 0), 8);
        assert!(positions.admits(key(7, 5000, 0), true, 8) && positions.is_over(key(7, 5000, 0)));
        assert!(!positions.admits(key(9, 8, 0), true, 8) && !positions.is_over(key(9, 8, 0)));
    }
}
