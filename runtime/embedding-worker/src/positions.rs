//! How far the dense workers are. It bounds the pieces that an embedding worker holds: a loader waits
//! while its batch is more than a window ahead.

use std::collections::HashMap;

use rectrain_modes::GlobalStep;
use rectrain_protocol::batch::{BatchKey, BatchPosition};

/// See the module's text.
#[derive(Default)]
pub(crate) struct Positions {
    train: u64,
    evaluation: Option<GlobalStep>,
    /// The last batch that was fetched, by piece. Each piece belongs to one dense worker, and dense workers
    /// are not equally fast.
    evaluated: HashMap<u32, u64>,
}

impl Positions {
    /// Whether a piece may come in, with room for `window` batches ahead.
    pub(crate) fn admits(&self, key: BatchKey, window: u64) -> bool {
        match key.position {
            BatchPosition::Train(number) => number < self.train + window,
            // Its evaluation is over: the piece is dropped.
            BatchPosition::Evaluation { at_step, .. } if self.evaluation > Some(at_step) => true,
            BatchPosition::Evaluation { at_step, number } => {
                // An embedding worker that joined late is never asked for the pieces of a dense worker that
                // is done, so the furthest position counts.
                let evaluated = self.evaluated.get(&key.piece).or_else(|| self.evaluated.values().max());
                number < window + evaluated.copied().filter(|_| self.evaluation == Some(at_step)).unwrap_or(0)
            }
        }
    }

    /// A dense worker fetches this piece.
    pub(crate) fn move_to(&mut self, key: BatchKey, window: u64) {
        match key.position {
            BatchPosition::Train(number) => self.train = self.train.max(number),
            BatchPosition::Evaluation { at_step, number } => {
                if self.evaluation != Some(at_step) {
                    self.evaluated.clear();
                }
                self.evaluation = Some(at_step);
                let evaluated = self.evaluated.entry(key.piece).or_insert(number);
                // A replacement of the dense worker starts from the first batch.
                let restarts = number + 2 * window < *evaluated;
                *evaluated = if restarts { number } else { number.max(*evaluated) };
            }
        }
    }

    /// Whether a later evaluation has followed the one of this piece.
    pub(crate) fn is_over(&self, key: BatchKey) -> bool {
        matches!(key.position, BatchPosition::Evaluation { at_step, .. } if self.evaluation > Some(at_step))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evaluation_pieces_come_in_as_far_as_their_dense_worker_is() {
        let key = |at_step: u64, number: u64, piece: u32| BatchKey {
            position: BatchPosition::Evaluation { at_step: GlobalStep(at_step), number },
            piece,
        };
        let mut positions = Positions::default();
        (0..1000).for_each(|number| positions.move_to(key(7, number, 0), 8));
        positions.move_to(key(7, 5, 1), 8);
        let admits = |positions: &Positions, number, piece| positions.admits(key(7, number, piece), 8);
        // No dense worker fetches the last one.
        for (piece, most) in [(0, 1006), (1, 12), (2, 1006)] {
            assert!(admits(&positions, most, piece) && !admits(&positions, most + 1, piece), "piece {piece}");
        }
        // A replacement starts from the first batch, and a late request of its predecessor does no harm.
        for number in [0, 999, 1, 2] {
            positions.move_to(key(7, number, 0), 8);
        }
        assert_eq!([9, 10].map(|number| admits(&positions, number, 0)), [true, false]);
        // Another evaluation: pieces of the one before are let in, to be dropped.
        positions.move_to(key(9, 0, 0), 8);
        assert!(positions.admits(key(7, 5000, 0), 8) && positions.is_over(key(7, 5000, 0)));
        assert!(!positions.admits(key(9, 8, 0), 8) && !positions.is_over(key(9, 8, 0)));
    }
}
