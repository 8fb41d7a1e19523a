//! A parameter server's half of pulled pieces, for its partition of the dense parameters.
//!
//! The gate sums the gradients of the open step, and returns the sum once it has all pieces. It
//! takes the first gradients of a piece. Other workers' gradients of the same piece are equal, so
//! it ignores them.
//!
//! The parameters before a step belong to that step. A server keeps the parameters before the open
//! step and those before the last one. So a piece of the last step can be computed again as long as
//! another server needs it: two servers are at most one step apart.

use std::collections::BTreeMap;

use super::{PieceError, PieceSum, StepPiece, Summand};
use crate::GlobalStep;

/// The result of a push of gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PiecePushed {
    /// The sum has them now. Call [`PieceGate::next_update`].
    Taken,
    /// The server has gradients of this piece already, or has applied the step.
    Known,
    /// As `Known`, but the step is about to be applied. The acknowledgement waits until it is, as a
    /// reader of the parameters before the next step does. The worker that completes a step relies
    /// on this: once acknowledged, the step is applied.
    Applying,
}

/// The answer to a reader of the parameters before a step. `L` identifies the reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading<L> {
    /// The present parameters.
    Present(L),
    /// The copy of the parameters before the last update, or before the one under way.
    Previous(L),
    /// The parameters are gone: every server has applied the step.
    Passed(L),
    /// The gate has kept the reader for [`PieceGate::finish_update`].
    Waits,
}

/// See the module documentation. `L` identifies a waiting reader, `G` is the gradients of a piece.
#[derive(Debug)]
pub struct PieceGate<L, G> {
    pieces: u32,
    /// Steps before this one are applied.
    open: GlobalStep,
    sum: PieceSum<G>,
    /// Whether the update of step `open` was returned and is not finished yet.
    is_applying: bool,
    /// Whether the server has the parameters before the last step.
    has_previous: bool,
    waiting: BTreeMap<GlobalStep, Vec<L>>,
}

impl<L, G: Summand> PieceGate<L, G> {
    /// A gate before step `first`, of steps with `pieces` pieces. `has_previous`: the server has a
    /// copy of the parameters before the step before, from the process that it replaces.
    #[must_use]
    pub fn new(pieces: u32, first: GlobalStep, has_previous: bool) -> Self {
        let sum = PieceSum::new(pieces);
        Self { pieces, open: first, sum, is_applying: false, has_previous, waiting: BTreeMap::new() }
    }

    /// The step to be applied next. All steps before it are applied.
    #[must_use]
    pub fn open(&self) -> GlobalStep {
        self.open
    }

    /// The number of partial sums in memory, at most half of the pieces, rounded up.
    #[must_use]
    pub fn sums(&self) -> usize {
        self.sum.sums()
    }

    /// Gradients of a piece came. `None`: the mode before has trained the piece.
    ///
    /// # Errors
    /// [`PieceError::UnknownPiece`], and [`PieceError::TooEarly`]: no worker has the parameters
    /// before that step.
    pub fn push(&mut self, piece: StepPiece, gradients: Option<G>) -> Result<PiecePushed, PieceError> {
        if piece.piece.0 >= self.pieces {
            return Err(PieceError::UnknownPiece { piece: piece.piece, pieces: self.pieces });
        }
        if piece.step > self.open {
            return Err(PieceError::TooEarly { piece, open: self.open });
        }
        if piece.step < self.open {
            return Ok(PiecePushed::Known);
        }
        if self.is_applying || self.sum.is_complete() {
            return Ok(PiecePushed::Applying);
        }
        let is_new = self.sum.add(piece.piece, gradients)?;
        Ok(if is_new { PiecePushed::Taken } else { PiecePushed::Known })
    }

    /// The step to apply, with the sum of its gradients. `None` until all pieces have come and the
    /// update before is finished. The sum is `None` if the mode before has trained all pieces.
    ///
    /// Copy the present parameters in place of the copy, apply the sum, and then call
    /// [`Self::finish_update`].
    pub fn next_update(&mut self) -> Option<(GlobalStep, Option<G>)> {
        if self.is_applying || !self.sum.is_complete() {
            return None;
        }
        self.is_applying = true;
        self.has_previous = true;
        let sum = std::mem::replace(&mut self.sum, PieceSum::new(self.pieces));
        Some((self.open, sum.into_total()))
    }

    /// The returned update is in the parameters. Returns the readers that may now read the present
    /// parameters.
    pub fn finish_update(&mut self) -> Vec<L> {
        if !std::mem::take(&mut self.is_applying) {
            return Vec::new();
        }
        self.open = self.open.next();
        let still_waiting = self.waiting.split_off(&self.open.next());
        std::mem::replace(&mut self.waiting, still_waiting).into_values().flatten().collect()
    }

    /// A worker reads the parameters before `step`.
    pub fn read(&mut self, step: GlobalStep, reader: L) -> Reading<L> {
        if step > self.open {
            self.waiting.entry(step).or_default().push(reader);
            return Reading::Waits;
        }
        // During an update, the copy has the parameters before the open step.
        let copied = if self.is_applying { Some(self.open.0) } else { self.open.0.checked_sub(1) };
        if step == self.open && !self.is_applying {
            Reading::Present(reader)
        } else if self.has_previous && copied == Some(step.0) {
            Reading::Previous(reader)
        } else {
            Reading::Passed(reader)
        }
    }

    /// The number of readers that wait.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.values().map(Vec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rank;

    type Gate = PieceGate<char, f64>;

    fn step(number: u64) -> GlobalStep {
        GlobalStep(number)
    }

    fn piece(at: u64, number: u32) -> StepPiece {
        StepPiece { step: step(at), piece: Rank(number) }
    }

    /// A gate with all pieces of step 4, of two.
    fn complete() -> Gate {
        let mut gate = Gate::new(2, step(4), false);
        assert_eq!(gate.push(piece(4, 1), Some(2.0)), Ok(PiecePushed::Taken));
        assert_eq!(gate.next_update(), None, "piece 0 is missing");
        assert_eq!(gate.push(piece(4, 1), Some(2.0)), Ok(PiecePushed::Known));
        assert_eq!(gate.push(piece(4, 0), Some(1.0)), Ok(PiecePushed::Taken));
        gate
    }

    #[test]
    fn a_step_is_applied_once_with_each_piece_once() {
        let mut gate = complete();
        assert_eq!(gate.push(piece(4, 0), Some(1.0)), Ok(PiecePushed::Applying), "it is acknowledged once applied");
        assert_eq!(gate.next_update(), Some((step(4), Some(3.0))));
        assert_eq!(gate.next_update(), None);
        assert_eq!(gate.push(piece(4, 0), Some(1.0)), Ok(PiecePushed::Applying));
        assert_eq!((gate.finish_update(), gate.open()), (Vec::new(), step(5)));
        assert_eq!(gate.push(piece(4, 0), Some(1.0)), Ok(PiecePushed::Known));
        assert_eq!((gate.finish_update(), gate.open()), (Vec::new(), step(5)), "nothing was under way");
        assert_eq!((gate.next_update(), gate.sums()), (None, 0));
    }

    #[test]
    fn readers_get_the_parameters_before_their_step() {
        let mut gate = complete();
        assert_eq!(gate.read(step(4), 'a'), Reading::Present('a'));
        assert_eq!(gate.read(step(3), 'b'), Reading::Passed('b'), "the mode before has trained it");
        assert_eq!([gate.read(step(5), 'c'), gate.read(step(6), 'd')], [Reading::Waits, Reading::Waits]);
        assert!(gate.next_update().is_some());
        assert_eq!(gate.read(step(4), 'e'), Reading::Previous('e'), "the present ones are being changed");
        assert_eq!(gate.read(step(5), 'f'), Reading::Waits);
        assert_eq!((gate.finish_update(), gate.waiting()), (vec!['c', 'f'], 1));
        assert_eq!(gate.read(step(5), 'g'), Reading::Present('g'));
        assert_eq!(gate.read(step(4), 'h'), Reading::Previous('h'));
        assert_eq!(gate.read(step(3), 'i'), Reading::Passed('i'));
    }

    #[test]
    fn a_replacement_has_the_copy_of_its_predecessor() {
        for (has_previous, expected) in [(true, Reading::Previous('a')), (false, Reading::Passed('a'))] {
            assert_eq!(Gate::new(2, step(4), has_previous).read(step(3), 'a'), expected);
        }
        assert_eq!(Gate::new(2, step(0), true).read(step(0), 'a'), Reading::Present('a'));
    }

    #[test]
    fn pieces_of_the_mode_before_have_no_gradients() {
        let mut gate = Gate::new(3, step(4), false);
        for (number, gradients) in [(0, None), (2, Some(4.0)), (1, Some(2.0))] {
            assert_eq!(gate.push(piece(4, number), gradients), Ok(PiecePushed::Taken));
        }
        assert_eq!(gate.next_update(), Some((step(4), Some(6.0))));
    }

    #[test]
    fn wrong_pushes_are_refused_and_change_nothing() {
        let mut gate = Gate::new(2, step(4), false);
        let early = PieceError::TooEarly { piece: piece(5, 0), open: step(4) };
        assert_eq!(gate.push(piece(5, 0), Some(1.0)), Err(early));
        let unknown = PieceError::UnknownPiece { piece: Rank(2), pieces: 2 };
        assert_eq!(gate.push(piece(4, 2), Some(1.0)), Err(unknown));
        assert_eq!(early.to_string(), "piece 0 of step 5 came while step 4 is open: expected no piece of a later step");
        assert_eq!((gate.sums(), gate.next_update()), (0, None));
    }
}
