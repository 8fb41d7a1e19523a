use proptest::prelude::*;

use super::*;

fn piece(step: u64, number: u32) -> StepPiece {
    StepPiece { step: GlobalStep(step), piece: Rank(number) }
}

/// A queue before step 4, of two pieces in a step, with three steps granted.
fn queue(now: Instant) -> PieceQueue {
    let mut queue = PieceQueue::new(2, 1, GlobalStep(4), now);
    (0..3).for_each(|_| queue.grant(0).unwrap());
    queue
}

fn pulled(queue: &mut PieceQueue, rank: u32, now: Instant) -> Option<(u64, u32, bool)> {
    let PulledPiece { piece, is_second } = queue.pull(Rank(rank), now)?;
    Some((piece.step.0, piece.piece.0, is_second))
}

fn trained(queue: &mut PieceQueue, rank: u32, piece: StepPiece, now: Instant) -> Vec<CompleteStep> {
    queue.report(Rank(rank), piece, PieceOutcome::Trained, 0.5, now).unwrap().complete
}

#[test]
fn a_worker_gets_the_oldest_free_piece_and_one_ahead() {
    let now = Instant::now();
    let mut queue = queue(now);
    assert_eq!(pulled(&mut queue, 0, now), Some((4, 0, false)));
    assert_eq!(pulled(&mut queue, 1, now), Some((4, 1, false)));
    assert_eq!(pulled(&mut queue, 0, now), Some((5, 0, false)));
    assert_eq!(pulled(&mut queue, 0, now), None, "it has two");
    assert_eq!(pulled(&mut queue, 2, now), Some((5, 1, false)));
    assert_eq!(pulled(&mut queue, 2, now), None, "step 6 is too far ahead");
    assert!(trained(&mut queue, 1, piece(4, 1), now).is_empty());
    assert_eq!(trained(&mut queue, 0, piece(4, 0), now), [CompleteStep { step: GlobalStep(4), loss_sum: Some(1.0) }]);
    assert_eq!(pulled(&mut queue, 1, now), Some((6, 0, false)));
    assert_eq!((queue.open(), queue.granted()), (GlobalStep(5), GlobalStep(7)));
}

#[test]
fn a_late_piece_is_given_to_a_worker_that_has_pieces_ahead() {
    let begin = Instant::now();
    let at = |milliseconds| begin + Duration::from_millis(milliseconds);
    let mut queue = queue(begin);
    assert_eq!(pulled(&mut queue, 0, at(0)), Some((4, 0, false)));
    assert_eq!(pulled(&mut queue, 1, at(0)), Some((4, 1, false)));
    assert_eq!(queue.next_late(at(0)), None, "no time is known");
    trained(&mut queue, 0, piece(4, 0), at(100));
    assert_eq!(pulled(&mut queue, 0, at(100)), Some((5, 0, false)));
    assert_eq!(pulled(&mut queue, 0, at(100)), Some((5, 1, false)));
    assert_eq!(pulled(&mut queue, 0, at(299)), None);
    assert_eq!(queue.next_late(at(100)), Some(at(300)), "three times the usual time");
    assert_eq!(pulled(&mut queue, 0, at(300)), Some((4, 1, true)));
    assert_eq!(queue.next_late(at(300)), Some(at(600)), "the second worker may be late, too");
    assert_eq!(queue.slow(), BTreeSet::from([Rank(1)]));
    assert_eq!(trained(&mut queue, 0, piece(4, 1), at(400)).len(), 1);
    assert_eq!(pulled(&mut queue, 1, at(400)), None, "it has not ended its last piece");
    assert!(trained(&mut queue, 1, piece(4, 1), at(3000)).is_empty(), "the step is complete");
}

#[test]
fn a_slow_worker_gets_pieces_on_trial_until_it_is_well() {
    let begin = Instant::now();
    let at = |milliseconds| begin + Duration::from_millis(milliseconds);
    let mut queue = PieceQueue::new(3, 1, GlobalStep(0), begin);
    (0..2).for_each(|_| queue.grant(0).unwrap());
    assert_eq!(pulled(&mut queue, 1, at(0)), Some((0, 0, false)));
    assert_eq!(pulled(&mut queue, 0, at(0)), Some((0, 1, false)));
    trained(&mut queue, 0, piece(0, 1), at(100));
    assert_eq!(pulled(&mut queue, 0, at(100)), Some((0, 2, false)));
    trained(&mut queue, 0, piece(0, 2), at(200));
    assert_eq!(pulled(&mut queue, 0, at(300)), Some((0, 0, true)));
    assert_eq!(queue.slow(), BTreeSet::from([Rank(1)]));
    trained(&mut queue, 0, piece(0, 0), at(340));
    assert_eq!(pulled(&mut queue, 0, at(340)), Some((1, 0, false)));
    trained(&mut queue, 1, piece(0, 0), at(350));
    assert_eq!(queue.slow(), BTreeSet::from([Rank(1)]), "that was late");
    assert_eq!(pulled(&mut queue, 1, at(350)), Some((1, 0, true)), "worker 0 has it, too");
    assert_eq!(pulled(&mut queue, 1, at(350)), None, "one at a time");
    trained(&mut queue, 1, piece(1, 0), at(450));
    assert_eq!(queue.slow(), BTreeSet::new(), "that was in time");
    assert_eq!(pulled(&mut queue, 1, at(450)), Some((1, 1, false)));
}

#[test]
fn a_slow_worker_alone_gets_free_pieces() {
    let begin = Instant::now();
    let at = |milliseconds| begin + Duration::from_millis(milliseconds);
    let mut queue = queue(begin);
    assert_eq!(pulled(&mut queue, 0, at(0)), Some((4, 0, false)));
    assert_eq!(pulled(&mut queue, 1, at(0)), Some((4, 1, false)));
    trained(&mut queue, 0, piece(4, 0), at(100));
    assert_eq!(pulled(&mut queue, 0, at(300)), Some((4, 1, true)));
    queue.lost(Rank(0));
    trained(&mut queue, 1, piece(4, 1), at(900));
    assert_eq!(queue.slow(), BTreeSet::from([Rank(1)]));
    assert_eq!(pulled(&mut queue, 1, at(900)), Some((5, 0, false)));
    assert_eq!(pulled(&mut queue, 2, at(900)), Some((5, 1, false)));
    assert_eq!(pulled(&mut queue, 1, at(900)), None);
}

#[test]
fn the_pieces_of_a_lost_worker_are_free() {
    let now = Instant::now();
    let mut queue = queue(now);
    for expected in [(4, 0, false), (4, 1, false)] {
        assert_eq!(pulled(&mut queue, 0, now), Some(expected));
    }
    queue.lost(Rank(0));
    for expected in [(4, 0, false), (4, 1, false)] {
        assert_eq!(pulled(&mut queue, 1, now), Some(expected));
    }
}

#[test]
fn a_passed_piece_is_done_unless_another_worker_reports_it() {
    let begin = Instant::now();
    let mut queue = queue(begin);
    assert_eq!(pulled(&mut queue, 0, begin), Some((4, 0, false)));
    assert_eq!(pulled(&mut queue, 1, begin), Some((4, 1, false)));
    trained(&mut queue, 0, piece(4, 0), begin);
    let late = begin + Duration::from_secs(1);
    assert_eq!(pulled(&mut queue, 0, late), Some((4, 1, true)));
    let passed =
        |queue: &mut PieceQueue, rank| queue.report(Rank(rank), piece(4, 1), PieceOutcome::Passed, 0.0, late).unwrap();
    assert_eq!(passed(&mut queue, 0), ReportedPiece::default(), "worker 1 has trained it");
    let complete = vec![CompleteStep { step: GlobalStep(4), loss_sum: None }];
    assert_eq!(passed(&mut queue, 1), ReportedPiece { counts: false, complete });
}

#[test]
fn a_piece_that_is_passed_twice_is_done() {
    let begin = Instant::now();
    let mut queue = queue(begin);
    assert_eq!(pulled(&mut queue, 0, begin), Some((4, 0, false)));
    assert_eq!(pulled(&mut queue, 1, begin), Some((4, 1, false)));
    trained(&mut queue, 0, piece(4, 0), begin);
    let mut complete = Vec::new();
    for seconds in 1..3 {
        let late = begin + Duration::from_secs(seconds);
        assert!(complete.is_empty(), "worker 1 may be about to report it");
        assert_eq!(pulled(&mut queue, 0, late), Some((4, 1, true)));
        complete = queue.report(Rank(0), piece(4, 1), PieceOutcome::Passed, 0.0, late).unwrap().complete;
    }
    assert_eq!(complete, [CompleteStep { step: GlobalStep(4), loss_sum: None }]);
}

#[test]
fn pieces_of_the_mode_before_are_not_handed_out() {
    let now = Instant::now();
    let mut queue = PieceQueue::new(3, 1, GlobalStep(0), now);
    queue.grant(2).unwrap();
    assert_eq!(pulled(&mut queue, 0, now), Some((0, 2, false)));
    assert_eq!(trained(&mut queue, 0, piece(0, 2), now), [CompleteStep { step: GlobalStep(0), loss_sum: Some(0.5) }]);
    assert_eq!(queue.grant(3), Err(PieceError::UnknownPiece { piece: Rank(3), pieces: 3 }));
}

#[test]
fn wrong_reports_are_refused() {
    let now = Instant::now();
    let mut queue = queue(now);
    let mut report = |piece| queue.report(Rank(0), piece, PieceOutcome::Trained, 0.0, now);
    let early = PieceError::NotHandedOut { piece: piece(7, 0), granted: GlobalStep(7) };
    assert_eq!(report(piece(7, 0)), Err(early));
    assert_eq!(report(piece(4, 2)), Err(PieceError::UnknownPiece { piece: Rank(2), pieces: 2 }));
    assert_eq!(report(piece(3, 1)), Ok(ReportedPiece::default()), "a repetition");
}

/// The pieces as a plain list.
#[derive(Default)]
struct Model {
    pieces: u32,
    open: u64,
    granted: u64,
    /// By piece: the loss; `None` if it is not known.
    done: BTreeMap<StepPiece, Option<f64>>,
    /// Workers by piece.
    held: BTreeMap<StepPiece, BTreeSet<u32>>,
    /// Pieces that were passed while another worker had them.
    passed: BTreeSet<StepPiece>,
    /// By worker: the pieces that it has not reported.
    unreported: BTreeMap<u32, BTreeSet<StepPiece>>,
}

impl Model {
    fn holders(&self, piece: StepPiece) -> usize {
        self.held.get(&piece).map_or(0, BTreeSet::len)
    }

    /// The first piece of the oldest open step that is neither done nor held.
    fn first_free(&self) -> Option<StepPiece> {
        let pieces = (0..self.pieces).map(|number| piece(self.open, number));
        pieces
            .filter(|_| self.open < self.granted)
            .find(|piece| !self.done.contains_key(piece) && self.holders(*piece) == 0)
    }

    /// Removes the complete steps. Returns each with its loss.
    fn complete(&mut self) -> Vec<(u64, Option<f64>)> {
        let mut complete = Vec::new();
        loop {
            let losses: Vec<_> =
                (0..self.pieces).filter_map(|number| self.done.get(&piece(self.open, number)).copied()).collect();
            if losses.len() < self.pieces as usize {
                return complete;
            }
            // The losses are multiples of a power of two, so each order of the sum is exact.
            complete.push((self.open, losses.into_iter().sum()));
            self.held.retain(|held, _| held.step.0 > self.open);
            self.open += 1;
        }
    }
}

proptest! {
    #[test]
    fn the_queue_agrees_with_a_list_of_pieces(
        pieces in 1u32..6,
        ahead in 0usize..3,
        choices in proptest::collection::vec(any::<u32>(), 300),
    ) {
        const WORKERS: u32 = 4;
        let mut now = Instant::now();
        let mut queue = PieceQueue::new(pieces, ahead, GlobalStep(0), now);
        let mut model = Model { pieces, ..Model::default() };
        for choice in choices {
            now += Duration::from_millis(u64::from(choice >> 24));
            let rank = (choice >> 8) % WORKERS;
            let mine: Vec<StepPiece> =
                model.unreported.get(&rank).into_iter().flatten().copied().collect();
            match choice % 8 {
                0 => {
                    queue.lost(Rank(rank));
                    model.unreported.remove(&rank);
                    model.held.values_mut().for_each(|holders| { holders.remove(&rank); });
                }
                1 => {
                    queue.grant(0).unwrap();
                    model.granted += 1;
                }
                2..5 => {
                    let is_slow = queue.slow().contains(&Rank(rank));
                    let open = mine.iter().filter(|piece| piece.step.0 <= model.open).count();
                    let must_get = model.first_free().filter(|_| !is_slow && open < 2);
                    let got = queue.pull(Rank(rank), now);
                    if must_get.is_some() {
                        prop_assert_eq!(got.map(|got| (got.piece, got.is_second)), must_get.map(|piece| (piece, false)));
                    }
                    let Some(PulledPiece { piece, is_second }) = got else { continue };
                    prop_assert!(!model.done.contains_key(&piece) && !mine.contains(&piece), "{piece}");
                    prop_assert!((model.open..model.granted).contains(&piece.step.0));
                    prop_assert!(piece.step.0 <= model.open + ahead as u64);
                    prop_assert_eq!(is_second, model.holders(piece) > 0);
                    let most = if is_slow { 0 } else { 3 };
                    prop_assert!(mine.len() <= most);
                    model.held.entry(piece).or_default().insert(rank);
                    model.unreported.entry(rank).or_default().insert(piece);
                }
                kind if !mine.is_empty() => {
                    let piece = mine[(choice >> 4) as usize % mine.len()];
                    let outcome = if kind == 5 { PieceOutcome::Passed } else { PieceOutcome::Trained };
                    let loss = f64::from(choice >> 20) / 8.0;
                    let reported = queue.report(Rank(rank), piece, outcome, loss, now).unwrap();
                    model.unreported.entry(rank).or_default().remove(&piece);
                    model.held.entry(piece).or_default().remove(&rank);
                    let is_trained = outcome == PieceOutcome::Trained;
                    let is_open = piece.step.0 >= model.open && !model.done.contains_key(&piece);
                    prop_assert_eq!(reported.counts, is_trained && is_open, "a piece counts once");
                    let is_done = is_trained || model.holders(piece) == 0 || !model.passed.insert(piece);
                    if piece.step.0 >= model.open && is_done {
                        let loss = is_trained.then_some(loss);
                        model.done.entry(piece).or_insert(loss);
                    }
                    let complete = reported.complete.into_iter().map(|step| (step.step.0, step.loss_sum));
                    let complete: Vec<_> = complete.collect();
                    prop_assert_eq!(complete, model.complete());
                }
                _ => {}
            }
            prop_assert_eq!((queue.open().0, queue.granted().0), (model.open, model.granted));
        }
    }
}
