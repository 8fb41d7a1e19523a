//! A dense worker's half of pulled pieces: what it asks for, computes and sends next.
//!
//! The worker has one open pull at any time. It computes the oldest piece that it has, with the
//! parameters before the step of the piece. While it computes, the embeddings of the others travel.
//! A piece ends when the embedding worker and all parameter servers have acknowledged its
//! gradients. It also ends when a server no longer has the parameters before the step.

use std::collections::{BTreeMap, BTreeSet};

use super::{PieceError, StepPiece};
use crate::GlobalStep;

/// The most pieces whose gradients are on their way.
const MOST_SENDING: usize = 2;

/// How a piece ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PieceOutcome {
    /// All parameter servers have its gradients from this worker, or had equal ones.
    Trained,
    /// All parameter servers have applied its step.
    Passed,
}

/// An action of the worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PieceAction {
    /// Ask the coordinator for a piece, and call [`PieceWorker::pulled`] with the answer.
    Pull,
    /// Ask the embedding worker for a piece, and call [`PieceWorker::fetched`].
    Fetch(StepPiece),
    /// Read the dense parameters before a step from all servers, and call
    /// [`PieceWorker::parameters_read`]. They replace the present parameters if all servers had
    /// them. Reads of several steps may be under way.
    Read(GlobalStep),
    /// Compute the gradients of a piece with the present parameters, and call
    /// [`PieceWorker::computed`]. The parameters of no other step may replace them before that.
    Compute(StepPiece),
    /// Send the gradients to the embedding worker and to all servers, and call
    /// [`PieceWorker::acknowledged`] once all of them have replied.
    Send(StepPiece),
    /// Report a piece to the coordinator. The worker needs nothing of it any more.
    Report(StepPiece, PieceOutcome),
    /// All pieces have ended: the order is carried out.
    Stop,
}

/// A piece between its pull and its report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Fetching,
    /// The embeddings are here.
    Fetched,
    /// The parameter servers have applied the rows' update, and no copy of the rows is left.
    WithoutRows,
    /// As `WithoutRows`. A read that was sent since then finds out whether the step is applied.
    Checking,
    Computing,
    Sending,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub struct PieceWorker {
    pieces: BTreeMap<StepPiece, Stage>,
    /// The step that the worker's parameters are before.
    parameters: Option<GlobalStep>,
    /// The steps whose parameters are being read.
    reading: BTreeSet<GlobalStep>,
    has_pulled: bool,
    has_ended: bool,
    has_stopped: bool,
}

impl PieceWorker {
    /// A worker at the start of an order, without parameters.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of pieces that the worker has.
    #[must_use]
    pub fn held(&self) -> usize {
        self.pieces.len()
    }

    /// The first actions.
    pub fn start(&mut self) -> Vec<PieceAction> {
        self.next_actions()
    }

    /// The answer to a pull. `None`: the order ends, and all its steps are applied.
    pub fn pulled(&mut self, piece: Option<StepPiece>) -> Vec<PieceAction> {
        self.has_pulled = false;
        let mut actions = Vec::new();
        match piece {
            // A coordinator that was replaced may hand it out again.
            Some(piece) if self.pieces.contains_key(&piece) => {}
            Some(piece) => {
                self.pieces.insert(piece, Stage::Fetching);
                actions.push(PieceAction::Fetch(piece));
            }
            None => {
                self.has_ended = true;
                self.pieces.retain(|_, stage| matches!(stage, Stage::Computing | Stage::Sending));
            }
        }
        actions.extend(self.next_actions());
        actions
    }

    /// The answer to a fetch. `has_rows`: it has the embeddings. Otherwise all parameter servers
    /// have applied the update of the rows. A piece that has ended meanwhile is ignored.
    pub fn fetched(&mut self, piece: StepPiece, has_rows: bool) -> Vec<PieceAction> {
        if let Some(stage) = self.pieces.get_mut(&piece).filter(|stage| **stage == Stage::Fetching) {
            *stage = if has_rows { Stage::Fetched } else { Stage::WithoutRows };
        }
        self.next_actions()
    }

    /// The answer to a read of the parameters before `step`. `are_found`: all servers had them.
    /// Otherwise the step is applied everywhere, and its pieces end.
    ///
    /// # Errors
    /// [`PieceError::RowsLost`].
    pub fn parameters_read(&mut self, step: GlobalStep, are_found: bool) -> Result<Vec<PieceAction>, PieceError> {
        self.reading.remove(&step);
        let mut actions = Vec::new();
        if are_found {
            self.parameters = Some(step);
            self.check_rows(step)?;
        } else {
            let passed = self.pieces.extract_if(.., |piece, stage| piece.step <= step && stage.waits());
            actions.extend(passed.map(|(piece, _)| PieceAction::Report(piece, PieceOutcome::Passed)));
        }
        actions.extend(self.next_actions());
        Ok(actions)
    }

    /// The gradients of a piece are computed.
    ///
    /// # Errors
    /// [`PieceError::NotHeld`].
    pub fn computed(&mut self, piece: StepPiece) -> Result<Vec<PieceAction>, PieceError> {
        let held = self.pieces.get_mut(&piece).filter(|stage| **stage == Stage::Computing);
        *held.ok_or(PieceError::NotHeld { piece, event: "computed" })? = Stage::Sending;
        let mut actions = vec![PieceAction::Send(piece)];
        actions.extend(self.next_actions());
        Ok(actions)
    }

    /// The embedding worker and all servers have acknowledged the gradients of a piece.
    ///
    /// # Errors
    /// [`PieceError::NotHeld`].
    pub fn acknowledged(&mut self, piece: StepPiece) -> Result<Vec<PieceAction>, PieceError> {
        if self.pieces.get(&piece) != Some(&Stage::Sending) {
            return Err(PieceError::NotHeld { piece, event: "acknowledged" });
        }
        self.pieces.remove(&piece);
        let mut actions = vec![PieceAction::Report(piece, PieceOutcome::Trained)];
        actions.extend(self.next_actions());
        Ok(actions)
    }

    fn next_actions(&mut self) -> Vec<PieceAction> {
        let mut actions = Vec::new();
        if !self.has_ended && !std::mem::replace(&mut self.has_pulled, true) {
            actions.push(PieceAction::Pull);
        }
        actions.extend(self.next_work());
        if self.has_ended && self.pieces.is_empty() && self.reading.is_empty() && !self.has_stopped {
            self.has_stopped = true;
            actions.push(PieceAction::Stop);
        }
        actions
    }

    /// The next read or computation, for the oldest step with a piece to compute.
    fn next_work(&mut self) -> Option<PieceAction> {
        let count = |wanted: Stage| self.pieces.values().filter(|stage| **stage == wanted).count();
        let is_busy = count(Stage::Computing) > 0 || count(Stage::Sending) >= MOST_SENDING;
        if is_busy {
            return None;
        }
        let step = self.pieces.iter().find(|(_, stage)| stage.waits()).map(|(piece, _)| piece.step)?;
        if !self.reading.contains(&step) && self.check(step) {
            self.reading.insert(step);
            return Some(PieceAction::Read(step));
        }
        // A read for a later step waits until this step is applied, perhaps with this very piece.
        if self.parameters != Some(step) {
            return self.reading.insert(step).then_some(PieceAction::Read(step));
        }
        let mut of_step = self.pieces.iter_mut().filter(|(piece, _)| piece.step == step);
        let (piece, stage) = of_step.find(|(_, stage)| **stage == Stage::Fetched)?;
        *stage = Stage::Computing;
        Some(PieceAction::Compute(*piece))
    }

    /// Marks the pieces of a step that came without rows. Returns whether there are any.
    fn check(&mut self, step: GlobalStep) -> bool {
        let mut checks = false;
        let pieces = self.pieces.iter_mut().filter(|(piece, _)| piece.step == step);
        for (_, stage) in pieces.filter(|(_, stage)| **stage == Stage::WithoutRows) {
            *stage = Stage::Checking;
            checks = true;
        }
        checks
    }

    /// A server still has the parameters before `step`, and so may need gradients of it.
    fn check_rows(&self, step: GlobalStep) -> Result<(), PieceError> {
        let mut pieces = self.pieces.iter().filter(|(piece, _)| piece.step == step);
        match pieces.find(|(_, stage)| **stage == Stage::Checking) {
            Some((piece, _)) => Err(PieceError::RowsLost { piece: *piece }),
            None => Ok(()),
        }
    }
}

impl Stage {
    /// Whether the piece is still to be computed.
    fn waits(self) -> bool {
        matches!(self, Self::Fetching | Self::Fetched | Self::WithoutRows | Self::Checking)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rank;

    fn piece(step: u64, number: u32) -> StepPiece {
        StepPiece { step: GlobalStep(step), piece: Rank(number) }
    }

    /// A worker with these pieces, which have come with their embeddings. It reads the parameters
    /// before the step of the first one.
    fn with(pieces: &[StepPiece]) -> PieceWorker {
        let mut worker = PieceWorker::new();
        assert_eq!(worker.start(), [PieceAction::Pull]);
        let mut first = worker.pulled(Some(pieces[0])).into_iter();
        assert_eq!(first.next(), Some(PieceAction::Fetch(pieces[0])));
        assert_eq!(first.collect::<Vec<_>>(), [PieceAction::Pull, PieceAction::Read(pieces[0].step)]);
        for piece in &pieces[1..] {
            assert_eq!(worker.pulled(Some(*piece)), [PieceAction::Fetch(*piece), PieceAction::Pull]);
        }
        for piece in pieces {
            assert!(worker.fetched(*piece, true).is_empty());
        }
        worker
    }

    #[test]
    fn a_piece_is_computed_with_the_parameters_before_its_step() {
        let (first, second, later) = (piece(1, 0), piece(1, 3), piece(2, 1));
        let mut worker = with(&[first, later, second]);
        assert_eq!(worker.parameters_read(GlobalStep(1), true), Ok(vec![PieceAction::Compute(first)]));
        assert_eq!(worker.computed(first), Ok(vec![PieceAction::Send(first), PieceAction::Compute(second)]));
        let trained = PieceAction::Report(first, PieceOutcome::Trained);
        assert_eq!(worker.acknowledged(first), Ok(vec![trained]), "it computes the other one");
        let sent = vec![PieceAction::Send(second), PieceAction::Read(GlobalStep(2))];
        assert_eq!(worker.computed(second), Ok(sent));
        assert_eq!(worker.parameters_read(GlobalStep(2), true), Ok(vec![PieceAction::Compute(later)]));
    }

    #[test]
    fn a_second_copy_of_an_earlier_step_is_computed_first() {
        let (mine, late) = (piece(2, 0), piece(1, 3));
        let mut worker = with(&[mine]);
        let read = PieceAction::Read(GlobalStep(1));
        assert_eq!(worker.pulled(Some(late)), [PieceAction::Fetch(late), PieceAction::Pull, read]);
        assert!(worker.fetched(late, true).is_empty());
        assert_eq!(worker.parameters_read(GlobalStep(1), true), Ok(vec![PieceAction::Compute(late)]));
        assert_eq!(worker.computed(late), Ok(vec![PieceAction::Send(late)]), "step 2 is being read");
        assert_eq!(worker.parameters_read(GlobalStep(2), true), Ok(vec![PieceAction::Compute(mine)]));
    }

    #[test]
    fn a_late_piece_does_not_wait_for_the_parameters_of_a_later_step() {
        let (first, later, late) = (piece(1, 0), piece(2, 1), piece(1, 3));
        let mut worker = with(&[first]);
        assert!(worker.parameters_read(GlobalStep(1), true).is_ok());
        let read = PieceAction::Read(GlobalStep(2));
        assert_eq!(worker.pulled(Some(later)), [PieceAction::Fetch(later), PieceAction::Pull]);
        assert_eq!(worker.computed(first), Ok(vec![PieceAction::Send(first), read]));
        assert_eq!(worker.pulled(Some(late)), [PieceAction::Fetch(late), PieceAction::Pull]);
        assert_eq!(worker.fetched(late, true), [PieceAction::Compute(late)]);
    }

    #[test]
    fn a_piece_of_a_passed_step_ends() {
        let (mine, late) = (piece(2, 0), piece(1, 3));
        let mut worker = with(&[mine]);
        worker.pulled(Some(late));
        assert_eq!(worker.parameters_read(GlobalStep(2), true), Ok(vec![]), "step 1 is being read");
        let passed = PieceAction::Report(late, PieceOutcome::Passed);
        let computes = PieceAction::Compute(mine);
        assert_eq!(worker.parameters_read(GlobalStep(1), false), Ok(vec![passed, computes]));
        assert!(worker.fetched(late, true).is_empty(), "it has ended");
    }

    #[test]
    fn gradients_on_their_way_are_bounded() {
        let pieces: Vec<StepPiece> = (0..4).map(|number| piece(1, number)).collect();
        let mut worker = with(&pieces);
        assert!(worker.parameters_read(GlobalStep(1), true).is_ok());
        assert!(worker.computed(pieces[0]).is_ok());
        assert_eq!(worker.computed(pieces[1]), Ok(vec![PieceAction::Send(pieces[1])]));
        let trained = PieceAction::Report(pieces[0], PieceOutcome::Trained);
        assert_eq!(worker.acknowledged(pieces[0]), Ok(vec![trained, PieceAction::Compute(pieces[2])]));
        assert_eq!(worker.held(), 3);
    }

    #[test]
    fn the_order_ends_when_all_gradients_are_acknowledged() {
        let pieces = [piece(1, 0), piece(1, 1), piece(2, 0)];
        let mut worker = with(&pieces);
        assert_eq!(worker.parameters_read(GlobalStep(1), true), Ok(vec![PieceAction::Compute(pieces[0])]));
        assert!(worker.pulled(None).is_empty(), "the others ended elsewhere");
        assert_eq!(worker.computed(pieces[0]), Ok(vec![PieceAction::Send(pieces[0])]));
        let trained = PieceAction::Report(pieces[0], PieceOutcome::Trained);
        assert_eq!(worker.acknowledged(pieces[0]), Ok(vec![trained, PieceAction::Stop]));
        let mut idle = PieceWorker::new();
        assert_eq!((idle.start(), idle.pulled(None)), (vec![PieceAction::Pull], vec![PieceAction::Stop]));
    }

    #[test]
    fn a_piece_without_rows_is_passed_or_lost() {
        let (mine, read) = (piece(1, 0), PieceAction::Read(GlobalStep(1)));
        for are_found in [true, false] {
            let mut worker = PieceWorker::new();
            worker.start();
            assert_eq!(worker.pulled(Some(mine)), [PieceAction::Fetch(mine), PieceAction::Pull, read]);
            assert!(worker.fetched(mine, false).is_empty());
            // The servers may have answered this read before they applied the step.
            assert_eq!(worker.parameters_read(GlobalStep(1), true), Ok(vec![read]));
            let passed = PieceAction::Report(mine, PieceOutcome::Passed);
            let lost = PieceError::RowsLost { piece: mine };
            let expected = if are_found { Err(lost) } else { Ok(vec![passed]) };
            assert_eq!(worker.parameters_read(GlobalStep(1), are_found), expected);
        }
    }

    #[test]
    fn unknown_pieces_are_refused() {
        let mut worker = with(&[piece(1, 0)]);
        let computed = PieceError::NotHeld { piece: piece(1, 0), event: "computed" };
        assert_eq!(worker.computed(piece(1, 0)), Err(computed), "it is not being computed");
        assert!(worker.acknowledged(piece(1, 0)).is_err());
        assert_eq!(worker.pulled(Some(piece(1, 0))), [PieceAction::Pull], "handed out again");
    }
}
