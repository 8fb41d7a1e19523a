//! The coordinator's half of pulled pieces: which worker gets which piece. Pure: every time is an
//! argument.
//!
//! A worker that pulls gets a free piece of the oldest open step. If there is none, it gets a late
//! piece of that step, or else a free piece of a later one.
//!
//! **Late.** A piece is late if the worker that got it last has had it for [`LATE_FACTOR`] times
//! the median time of recent pieces. Its time begins when the worker has the piece and has ended
//! its last one, and the step is the oldest open one.
//!
//! **Slow.** A worker is slow once another one got its late piece, until it ends a piece in less
//! than that time. A slow worker gets one piece at a time, on trial: another worker has the piece
//! as well. So no step waits for a slow worker, and its recovery is seen. It gets a free piece only
//! while no other worker has a piece of the step.
//!
//! The state need not outlive the process. A queue that begins again hands out pieces that are
//! trained already. Workers then report them as [passed](PieceOutcome::Passed).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use super::{PieceError, PieceOutcome, PieceSum, StepPiece};
use crate::{GlobalStep, Rank};

/// A piece is late after this many times the median time of recent pieces.
const LATE_FACTOR: u32 = 3;
/// No piece is late before this time. Below it, delays of messages and of threads look like slow
/// workers.
const LEAST_LATE: Duration = Duration::from_millis(5);
/// The pieces whose times are remembered.
const RECENT: usize = 32;
/// The most pieces of the oldest open step that a worker has: the one that it computes, and the
/// next.
const MOST_OPEN: usize = 2;
/// A worker with fewer pieces than this gets pieces of later steps.
const MOST_HELD: usize = 2;

/// The answer to a pull.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PulledPiece {
    /// The piece to compute.
    pub piece: StepPiece,
    /// Whether another worker has the piece as well.
    pub is_second: bool,
}

/// A step with all its pieces.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CompleteStep {
    /// The step.
    pub step: GlobalStep,
    /// The sum of the losses of its pieces, in the tree of [`PieceSum`]. `None` if a loss is not
    /// known, because its worker or the coordinator was replaced.
    pub loss_sum: Option<f64>,
}

/// The effect of a report.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ReportedPiece {
    /// Whether it is the first report of the piece as trained. Then its predictions and its rows
    /// count.
    pub counts: bool,
    /// The steps that are complete now, in order.
    pub complete: Vec<CompleteStep>,
}

/// A worker that has a piece.
#[derive(Debug, Clone, Copy)]
struct Holder {
    rank: Rank,
    since: Instant,
    /// Whether the worker is slow, and another one had the piece before.
    is_on_trial: bool,
}

/// A piece of an open step.
#[derive(Debug, Clone, Default)]
struct Place {
    is_done: bool,
    /// Whether a worker has reported it as passed, while another one has it.
    is_passed: bool,
    /// In the order in which they got it.
    holders: Vec<Holder>,
}

impl Place {
    fn is_free(&self) -> bool {
        !self.is_done && self.holders.is_empty()
    }

    fn has(&self, rank: Rank) -> bool {
        self.holders.iter().any(|holder| holder.rank == rank)
    }

    /// The worker whose time decides whether the piece is late.
    fn newest(&self) -> Option<Holder> {
        let newest = self.holders.iter().rev().find(|holder| !holder.is_on_trial);
        newest.or(self.holders.last()).copied()
    }
}

/// A step that is granted and not complete.
#[derive(Debug)]
struct OpenStep {
    places: Vec<Place>,
    losses: PieceSum<f64>,
    /// Whether the loss of a piece is not known.
    lacks_loss: bool,
}

impl OpenStep {
    fn new(pieces: u32) -> Self {
        Self { places: vec![Place::default(); pieces as usize], losses: PieceSum::new(pieces), lacks_loss: false }
    }

    /// The piece is done. `None`: it adds nothing to the loss of the step.
    fn finish(&mut self, piece: Rank, loss: Option<f64>) -> Result<(), PieceError> {
        self.losses.add(piece, loss)?;
        if let Some(place) = self.places.get_mut(piece.0 as usize) {
            *place = Place { is_done: true, ..Place::default() };
        }
        Ok(())
    }

    fn first_free(&self) -> Option<Rank> {
        self.places.iter().position(Place::is_free).map(|piece| Rank(piece as u32))
    }

    /// Whether no worker has a piece.
    fn is_idle(&self) -> bool {
        self.places.iter().all(|place| place.holders.is_empty())
    }

    /// The pieces that others have and `rank` does not, each with its newest holder.
    fn of_others(&self, rank: Rank) -> impl Iterator<Item = (Rank, &Place, Holder)> {
        let places = (0..).map(Rank).zip(&self.places).filter(move |(_, place)| !place.has(rank));
        places.filter_map(|(piece, place)| Some((piece, place, place.newest()?)))
    }
}

/// See the module documentation.
#[derive(Debug)]
pub struct PieceQueue {
    pieces: u32,
    steps_ahead: usize,
    /// The oldest step that is not complete. Its time began at `opened`.
    open: GlobalStep,
    opened: Instant,
    /// Steps from `open` on, without a gap.
    steps: VecDeque<OpenStep>,
    workers: BTreeMap<Rank, Worker>,
    /// Times of recent pieces.
    recent: VecDeque<Duration>,
}

/// A worker that has pulled.
#[derive(Debug, Default)]
struct Worker {
    /// The pieces that it has not reported, each with the time from which it has it. Their steps
    /// may be complete.
    pieces: BTreeMap<StepPiece, Instant>,
    /// When it reported its last piece.
    ended: Option<Instant>,
    is_slow: bool,
}

impl PieceQueue {
    /// A queue before step `first`, of steps with `pieces` pieces. Pieces of at most `steps_ahead`
    /// steps after the oldest open one are handed out.
    #[must_use]
    pub fn new(pieces: u32, steps_ahead: usize, first: GlobalStep, now: Instant) -> Self {
        let (steps, recent) = (VecDeque::new(), VecDeque::new());
        Self { pieces, steps_ahead, open: first, opened: now, steps, workers: BTreeMap::new(), recent }
    }

    /// The oldest step that is not complete. All steps before it are applied.
    #[must_use]
    pub fn open(&self) -> GlobalStep {
        self.open
    }

    /// The steps before this one are granted.
    #[must_use]
    pub fn granted(&self) -> GlobalStep {
        GlobalStep(self.open.0 + self.steps.len() as u64)
    }

    /// The slow workers.
    #[must_use]
    pub fn slow(&self) -> BTreeSet<Rank> {
        self.workers.iter().filter(|(_, worker)| worker.is_slow).map(|(rank, _)| *rank).collect()
    }

    /// Grants the next step: its pieces may be handed out. The mode before has trained the pieces
    /// before `first_piece`.
    ///
    /// # Errors
    /// [`PieceError::UnknownPiece`] unless `first_piece` is a piece.
    pub fn grant(&mut self, first_piece: u32) -> Result<(), PieceError> {
        if first_piece >= self.pieces {
            return Err(PieceError::UnknownPiece { piece: Rank(first_piece), pieces: self.pieces });
        }
        let mut step = OpenStep::new(self.pieces);
        for piece in 0..first_piece {
            step.finish(Rank(piece), None)?;
        }
        self.steps.push_back(step);
        Ok(())
    }

    /// Worker `rank` asks for a piece. `None` while there is none for it: ask again after the next
    /// event, and at [`Self::next_late`].
    pub fn pull(&mut self, rank: Rank, now: Instant) -> Option<PulledPiece> {
        self.workers.entry(rank).or_default();
        let piece = self.choose(rank, now)?;
        let worker = self.workers.get_mut(&rank)?;
        worker.pieces.insert(piece, now);
        let is_slow = worker.is_slow;
        let place = self.place_mut(piece)?;
        let earlier = place.newest();
        place.holders.push(Holder { rank, since: now, is_on_trial: is_slow && earlier.is_some() });
        if let Some(earlier) = earlier.filter(|earlier| !is_slow && self.is_late(*earlier, now)) {
            self.slow_down(earlier.rank);
        }
        Some(PulledPiece { piece, is_second: earlier.is_some() })
    }

    fn choose(&self, rank: Rank, now: Instant) -> Option<StepPiece> {
        let (worker, open) = (self.workers.get(&rank)?, self.steps.front()?);
        let (held, is_slow) = (worker.pieces.len(), worker.is_slow);
        let held_open = worker.pieces.range(..StepPiece { step: self.open.next(), piece: Rank(0) }).count();
        let of_open = |piece| StepPiece { step: self.open, piece };
        if is_slow {
            let free = open.first_free().filter(|_| open.is_idle());
            return free.or_else(|| trial(open, rank)).filter(|_| held == 0).map(of_open);
        }
        if held_open < MOST_OPEN
            && let Some(piece) = open.first_free().or_else(|| self.late(open, rank, now))
        {
            return Some(of_open(piece));
        }
        if held >= MOST_HELD {
            return None;
        }
        let mut later = (self.open.0..).map(GlobalStep).zip(&self.steps).skip(1).take(self.steps_ahead);
        later.find_map(|(step, pieces)| Some(StepPiece { step, piece: pieces.first_free()? }))
    }

    /// A late piece that `rank` does not have. Pieces with fewer workers are first.
    fn late(&self, open: &OpenStep, rank: Rank, now: Instant) -> Option<Rank> {
        let after = self.late_after()?;
        let late = open.of_others(rank).filter(|(_, _, newest)| self.begun(*newest) + after <= now);
        late.min_by_key(|(_, place, _)| place.holders.len()).map(|(piece, ..)| piece)
    }

    fn is_late(&self, holder: Holder, now: Instant) -> bool {
        self.late_after().is_some_and(|after| self.begun(holder) + after <= now)
    }

    /// When the time of a piece of the oldest open step begins.
    fn begun(&self, holder: Holder) -> Instant {
        let ended = self.workers.get(&holder.rank).and_then(|worker| worker.ended);
        holder.since.max(self.opened).max(ended.unwrap_or(self.opened))
    }

    /// The time after which a piece is late. `None` before the first piece.
    fn late_after(&self) -> Option<Duration> {
        let mut times: Vec<Duration> = self.recent.iter().copied().collect();
        times.sort_unstable();
        let median = times.get(times.len() / 2)?;
        Some((*median * LATE_FACTOR).max(LEAST_LATE))
    }

    /// A late piece of this worker was given to another one. At most half of the workers are slow.
    fn slow_down(&mut self, rank: Rank) {
        if 2 * (self.slow().len() + 1) <= self.workers.len()
            && let Some(worker) = self.workers.get_mut(&rank)
        {
            worker.is_slow = true;
        }
    }

    /// When the next piece becomes late, after `now`. Ask again then for the workers whose pulls
    /// have no answer.
    #[must_use]
    pub fn next_late(&self, now: Instant) -> Option<Instant> {
        let (open, after) = (self.steps.front()?, self.late_after()?);
        let newest = open.places.iter().filter_map(Place::newest);
        newest.map(|holder| self.begun(holder) + after).filter(|late| *late > now).min()
    }

    /// Worker `rank` reports a piece. `loss_sum` is the sum of its losses. A repeated report
    /// changes nothing.
    ///
    /// # Errors
    /// [`PieceError::UnknownPiece`], and [`PieceError::NotHandedOut`] for a step that was not
    /// granted.
    pub fn report(
        &mut self,
        rank: Rank,
        piece: StepPiece,
        outcome: PieceOutcome,
        loss_sum: f64,
        now: Instant,
    ) -> Result<ReportedPiece, PieceError> {
        self.check(piece)?;
        self.end_piece(rank, piece, outcome, now);
        let nothing = ReportedPiece::default();
        let Some(ahead) = piece.step.0.checked_sub(self.open.0) else { return Ok(nothing) };
        let Some(step) = self.steps.get_mut(ahead as usize) else { return Ok(nothing) };
        let Some(place) = step.places.get_mut(piece.piece.0 as usize).filter(|place| !place.is_done) else {
            return Ok(nothing);
        };
        place.holders.retain(|holder| holder.rank != rank);
        match outcome {
            PieceOutcome::Trained => step.finish(piece.piece, Some(loss_sum))?,
            // Another worker has it, and may be about to report the loss. If it does not, the piece
            // is late, and passed once more.
            PieceOutcome::Passed if !place.holders.is_empty() && !place.is_passed => place.is_passed = true,
            PieceOutcome::Passed => {
                step.lacks_loss = true;
                step.finish(piece.piece, None)?;
            }
        }
        Ok(ReportedPiece { counts: outcome == PieceOutcome::Trained, complete: self.complete(now) })
    }

    /// Measures the time of a piece, and whether its worker is still slow.
    fn end_piece(&mut self, rank: Rank, piece: StepPiece, outcome: PieceOutcome, now: Instant) {
        let (opened, late_after) = (self.opened, self.late_after());
        let Some(worker) = self.workers.get_mut(&rank) else { return };
        let begun = worker.pieces.remove(&piece).map(|since| since.max(worker.ended.unwrap_or(since)));
        worker.ended = Some(now);
        let Some(begun) = begun.filter(|_| outcome == PieceOutcome::Trained) else { return };
        let time = |begun| now.saturating_duration_since(begun);
        // A slow worker has pieces of the step that was open when it got them.
        if worker.is_slow {
            worker.is_slow = late_after.is_none_or(|after| time(begun) >= after);
        }
        if piece.step == self.open && !worker.is_slow {
            self.recent.push_back(time(begun.max(opened)));
            if self.recent.len() > RECENT {
                self.recent.pop_front();
            }
        }
    }

    /// Worker `rank` was replaced or has left. Other workers get its pieces.
    pub fn lost(&mut self, rank: Rank) {
        self.workers.remove(&rank);
        for place in self.steps.iter_mut().flat_map(|step| &mut step.places) {
            place.holders.retain(|holder| holder.rank != rank);
        }
    }

    /// Removes the steps at the front that have all pieces.
    fn complete(&mut self, now: Instant) -> Vec<CompleteStep> {
        let mut complete = Vec::new();
        while let Some(front) = self.steps.pop_front_if(|step| step.losses.is_complete()) {
            let loss_sum = if front.lacks_loss { None } else { front.losses.into_total() };
            complete.push(CompleteStep { step: self.open, loss_sum });
            self.open = self.open.next();
            self.opened = now;
        }
        complete
    }

    fn check(&self, piece: StepPiece) -> Result<(), PieceError> {
        if piece.piece.0 >= self.pieces {
            return Err(PieceError::UnknownPiece { piece: piece.piece, pieces: self.pieces });
        }
        if piece.step >= self.granted() {
            return Err(PieceError::NotHandedOut { piece, granted: self.granted() });
        }
        Ok(())
    }

    fn place_mut(&mut self, piece: StepPiece) -> Option<&mut Place> {
        let ahead = piece.step.0.checked_sub(self.open.0)?;
        self.steps.get_mut(ahead as usize)?.places.get_mut(piece.piece.0 as usize)
    }
}

/// A piece on trial for a slow worker: the one that another worker got last.
fn trial(open: &OpenStep, rank: Rank) -> Option<Rank> {
    let others = open.of_others(rank).filter(|(_, place, _)| !place.is_passed);
    others.max_by_key(|(_, _, newest)| newest.since).map(|(piece, ..)| piece)
}

#[cfg(test)]
mod tests;
