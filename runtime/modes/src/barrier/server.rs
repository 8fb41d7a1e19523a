//! A parameter server's half of `sync` and `hybrid` training (Persia §3, algorithms 1 and 2).
//!
//! Every dense worker sends its gradients of global step k to every parameter server, as one
//! contribution that may be empty. Step k is *complete* when the contributions of all ranks have
//! arrived. The gate then returns them in rank order, to be summed and applied as one update. Steps
//! are applied in order. The gate answers a look-up for step k once every step before k − τ is
//! applied.
//!
//! - With τ = 0, that is `sync`. Every look-up sees all earlier gradients. The sum has one order,
//!   so results repeat to the bit.
//! - With τ > 0, it is `hybrid`. A look-up may miss the gradients of up to τ steps.
//!
//! Called by the parameter-server role, which owns one gate behind one lock.

use std::collections::{BTreeMap, VecDeque};

use crate::{GlobalStep, Rank};

/// A message that no correct peer sends.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum GateError {
    /// The job has fewer dense workers.
    #[error("rank {rank} pushed gradients, but the job has only {ranks} dense workers")]
    UnknownRank { rank: Rank, ranks: u32 },
    /// A rank pushed the same step twice.
    #[error("rank {rank} pushed gradients of step {step} twice")]
    Repeated { rank: Rank, step: GlobalStep },
    /// A rank is further ahead than its own look-ups allow.
    #[error(
        "rank {rank} pushed gradients of step {step}, but only step {applied} can be next and {staleness} more may be in flight"
    )]
    TooFarAhead { rank: Rank, step: GlobalStep, applied: GlobalStep, staleness: u64 },
}

/// The gate of one parameter server. `L` identifies a waiting look-up, `P` is one rank's gradients.
#[derive(Debug)]
pub struct StepGate<L, P> {
    ranks: u32,
    staleness: u64,
    /// Steps before this one are applied.
    applied: GlobalStep,
    /// Whether the update of step `applied` was returned and is not finished yet.
    applying: bool,
    /// Contributions to steps `applied`, `applied + 1`, …: at most `staleness + 1` steps.
    pending: VecDeque<Vec<Option<P>>>,
    waiting: BTreeMap<GlobalStep, Vec<L>>,
}

impl<L, P> StepGate<L, P> {
    /// A gate for `ranks` dense workers and τ = `staleness` (in global steps; 0 is `sync`), before
    /// step `first`.
    #[must_use]
    pub fn new(ranks: u32, staleness: u64, first: GlobalStep) -> Self {
        Self {
            ranks: ranks.max(1),
            staleness,
            applied: first,
            applying: false,
            pending: VecDeque::new(),
            waiting: BTreeMap::new(),
        }
    }

    /// The step to be applied next: all steps before it are applied.
    #[must_use]
    pub fn applied(&self) -> GlobalStep {
        self.applied
    }

    /// τ, in global steps.
    #[must_use]
    pub fn staleness(&self) -> u64 {
        self.staleness
    }

    /// The number of look-ups that wait for a step to be applied.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.values().map(Vec::len).sum()
    }

    /// A look-up for `step`. The gate returns it if it may be answered now, and otherwise keeps it
    /// for [`Self::finish_update`].
    pub fn look_up(&mut self, step: GlobalStep, look_up: L) -> Option<L> {
        if self.may_read(step) {
            return Some(look_up);
        }
        self.waiting.entry(step).or_default().push(look_up);
        None
    }

    /// Stores the gradients of `rank` for `step`. Call [`Self::next_update`] afterwards.
    pub fn push(&mut self, step: GlobalStep, rank: Rank, contribution: P) -> Result<(), GateError> {
        if rank.0 >= self.ranks {
            return Err(GateError::UnknownRank { rank, ranks: self.ranks });
        }
        let next = GlobalStep(self.applied.0 + u64::from(self.applying));
        let Some(ahead) = step.0.checked_sub(next.0) else {
            return Err(GateError::Repeated { rank, step });
        };
        if step.0 - self.applied.0 > self.staleness {
            return Err(GateError::TooFarAhead { rank, step, applied: self.applied, staleness: self.staleness });
        }
        let ahead = ahead as usize;
        while self.pending.len() <= ahead {
            self.pending.push_back((0..self.ranks).map(|_| None).collect());
        }
        let place = &mut self.pending[ahead][rank.0 as usize];
        if place.is_some() {
            return Err(GateError::Repeated { rank, step });
        }
        *place = Some(contribution);
        Ok(())
    }

    /// The next step to apply, with its contributions in rank order. `None` until all ranks have
    /// pushed it and the previous update is finished. Sum and apply the contributions, then call
    /// [`Self::finish_update`], and this again.
    pub fn next_update(&mut self) -> Option<(GlobalStep, Vec<P>)> {
        if self.applying || !self.pending.front()?.iter().all(Option::is_some) {
            return None;
        }
        self.applying = true;
        let contributions = self.pending.pop_front()?.into_iter().flatten().collect();
        Some((self.applied, contributions))
    }

    /// The last returned update is in the rows. Returns the look-ups that may be answered now.
    pub fn finish_update(&mut self) -> Vec<L> {
        if !std::mem::take(&mut self.applying) {
            return Vec::new();
        }
        self.applied = self.applied.next();
        let still_waiting = self.waiting.split_off(&GlobalStep(self.applied.0 + self.staleness + 1));
        std::mem::replace(&mut self.waiting, still_waiting).into_values().flatten().collect()
    }

    /// A worker pushed gradients of `step` a second time, and `waiting` is its acknowledgement. The
    /// gate returns it to be sent at once, unless `step` is complete and not applied. In that case
    /// it keeps it for [`Self::finish_update`]. The rank that completes a step relies on this: once
    /// acknowledged, the step is applied.
    pub fn pushed_again(&mut self, step: GlobalStep, waiting: L) -> Option<L> {
        let next = self.applied.0 + u64::from(self.applying);
        let is_complete = match step.0.checked_sub(next) {
            None => step == self.applied,
            Some(ahead) => self.pending.get(ahead as usize).is_some_and(|pieces| pieces.iter().all(Option::is_some)),
        };
        if is_complete { self.look_up(GlobalStep(step.0 + 1 + self.staleness), waiting) } else { Some(waiting) }
    }

    /// In `sync`: whether the rows are too new for a look-up for `step`, because its gradients are
    /// applied or being applied. Only the replacement of a dense worker asks for such a step. It
    /// does so if the embedding worker that remembered the dead worker's rows has died as well.
    #[must_use]
    pub fn has_passed(&self, step: GlobalStep) -> bool {
        self.staleness == 0 && step.0 < self.applied.0 + u64::from(self.applying)
    }

    fn may_read(&self, step: GlobalStep) -> bool {
        step.0 <= self.applied.0 + self.staleness
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Gate = StepGate<u64, (u32, u64)>;

    fn gate(ranks: u32, staleness: u64) -> Gate {
        StepGate::new(ranks, staleness, GlobalStep(0))
    }

    #[test]
    fn sync_look_ups_wait_for_every_rank_of_every_earlier_step() {
        let mut gate = gate(2, 0);
        assert_eq!(gate.look_up(GlobalStep(0), 0), Some(0));
        assert_eq!(gate.look_up(GlobalStep(1), 1), None);
        gate.push(GlobalStep(0), Rank(1), (1, 0)).unwrap();
        assert_eq!(gate.next_update(), None, "rank 0 has not pushed");
        gate.push(GlobalStep(0), Rank(0), (0, 0)).unwrap();
        assert_eq!(gate.next_update(), Some((GlobalStep(0), vec![(0, 0), (1, 0)])));
        assert_eq!(gate.look_up(GlobalStep(1), 2), None, "the update is under way, not in the rows");
        assert_eq!(gate.finish_update(), [1, 2]);
    }

    #[test]
    fn sync_reports_that_the_rows_of_a_step_are_gone() {
        let mut sync = gate(1, 0);
        let mut hybrid = gate(1, 1);
        for gate in [&mut sync, &mut hybrid] {
            assert!(!gate.has_passed(GlobalStep(0)));
            gate.push(GlobalStep(0), Rank(0), (0, 0)).unwrap();
            assert!(gate.next_update().is_some());
            gate.finish_update();
        }
        assert!(sync.has_passed(GlobalStep(0)) && !sync.has_passed(GlobalStep(1)));
        assert!(!hybrid.has_passed(GlobalStep(0)), "rows may be newer");
    }

    #[test]
    fn a_repeated_push_of_a_complete_step_is_answered_once_applied() {
        let mut gate = gate(2, 1);
        gate.push(GlobalStep(0), Rank(0), (0, 0)).unwrap();
        assert_eq!(gate.pushed_again(GlobalStep(0), 1), Some(1), "other ranks may wait for its next push");
        gate.push(GlobalStep(0), Rank(1), (1, 0)).unwrap();
        assert_eq!(gate.pushed_again(GlobalStep(0), 2), None, "about to be applied");
        assert!(gate.next_update().is_some());
        assert_eq!(gate.pushed_again(GlobalStep(0), 3), None, "being applied");
        gate.push(GlobalStep(1), Rank(0), (0, 1)).unwrap();
        gate.push(GlobalStep(1), Rank(1), (1, 1)).unwrap();
        assert_eq!(gate.pushed_again(GlobalStep(1), 4), None);
        assert_eq!(gate.finish_update(), [2, 3]);
        assert_eq!(gate.pushed_again(GlobalStep(0), 5), Some(5), "it is applied");
        assert!(gate.next_update().is_some());
        assert_eq!(gate.finish_update(), [4]);
    }

    #[test]
    fn hybrid_lets_at_most_tau_steps_be_in_flight() {
        let mut gate = gate(1, 2);
        for step in 0..=2 {
            assert_eq!(gate.look_up(GlobalStep(step), step), Some(step), "{step} of at most 2 in flight beside step 0");
        }
        assert_eq!(gate.look_up(GlobalStep(3), 3), None);
        gate.push(GlobalStep(0), Rank(0), (0, 0)).unwrap();
        assert!(gate.next_update().is_some());
        assert_eq!(gate.finish_update(), [3]);
    }

    #[test]
    fn one_update_at_a_time_is_handed_out() {
        let mut gate = gate(1, 3);
        gate.push(GlobalStep(0), Rank(0), (0, 0)).unwrap();
        gate.push(GlobalStep(1), Rank(0), (0, 1)).unwrap();
        assert_eq!(gate.next_update().map(|u| u.0), Some(GlobalStep(0)));
        assert_eq!(gate.next_update(), None);
        gate.push(GlobalStep(2), Rank(0), (0, 2)).unwrap();
        gate.finish_update();
        assert_eq!(gate.next_update(), Some((GlobalStep(1), vec![(0, 1)])));
    }

    #[test]
    fn wrong_pushes_are_refused_and_change_nothing() {
        let mut gate = gate(2, 1);
        assert!(matches!(gate.push(GlobalStep(0), Rank(2), (2, 0)), Err(GateError::UnknownRank { .. })));
        assert!(matches!(gate.push(GlobalStep(2), Rank(0), (0, 2)), Err(GateError::TooFarAhead { .. })));
        gate.push(GlobalStep(0), Rank(0), (0, 0)).unwrap();
        assert!(matches!(gate.push(GlobalStep(0), Rank(0), (0, 0)), Err(GateError::Repeated { .. })));
        gate.push(GlobalStep(0), Rank(1), (1, 0)).unwrap();
        assert!(gate.next_update().is_some());
        assert!(matches!(gate.push(GlobalStep(0), Rank(1), (1, 0)), Err(GateError::Repeated { .. })));
        gate.finish_update();
        assert!(matches!(gate.push(GlobalStep(0), Rank(1), (1, 0)), Err(GateError::Repeated { .. })));
        assert_eq!(gate.applied(), GlobalStep(1));
    }

    proptest! {
        /// For any interleaving of messages and updates, steps are applied once and in order, with
        /// the ranks in order. No look-up is answered while more than τ steps before it are
        /// unapplied.
        #[test]
        fn any_interleaving_keeps_order_and_staleness(
            ranks in 1u32..5, staleness in 0u64..4, choices in proptest::collection::vec(any::<u32>(), 600),
        ) {
            let steps = 12u64;
            let mut gate: Gate = gate(ranks, staleness);
            let mut asked = vec![0u64; ranks as usize];
            let mut answered = vec![0u64; ranks as usize];
            let mut pushed = vec![0u64; ranks as usize];
            let (mut applied, mut under_way) = (0u64, false);
            for choice in choices {
                let rank = (choice % ranks) as usize;
                let mut answers = Vec::new();
                match (choice / ranks) % 3 {
                    0 if asked[rank] < steps && asked[rank] <= pushed[rank] + staleness => {
                        let step = asked[rank];
                        asked[rank] += 1;
                        answers.extend(gate.look_up(GlobalStep(step), step * u64::from(ranks) + rank as u64));
                    }
                    1 if pushed[rank] < answered[rank] => {
                        let step = pushed[rank];
                        pushed[rank] += 1;
                        gate.push(GlobalStep(step), Rank(rank as u32), (rank as u32, step)).unwrap();
                    }
                    2 if under_way => {
                        under_way = false;
                        applied += 1;
                        answers = gate.finish_update();
                    }
                    2 => {
                        if let Some((step, contributions)) = gate.next_update() {
                            prop_assert_eq!(step.0, applied);
                            prop_assert_eq!(contributions, (0..ranks).map(|r| (r, applied)).collect::<Vec<_>>());
                            under_way = true;
                        }
                    }
                    _ => {}
                }
                for answer in answers {
                    let (step, rank) = (answer / u64::from(ranks), (answer % u64::from(ranks)) as usize);
                    prop_assert!(applied + staleness >= step);
                    answered[rank] = answered[rank].max(step + 1);
                }
            }
            prop_assert_eq!(gate.applied().0, applied);
        }
    }
}
