//! The rounds in which a parameter server forms the mean of the replicas (§3.3, algorithms 3 and
//! 4).

use std::collections::BTreeSet;

use super::{Fragments, Part};

/// The rounds of one parameter server, one after another. In each, a rank joins with its replica
/// at most once. A round moves one fragment, and the fragments take turns. If all ranks of a round
/// have ended the order, it moves all fragments.
///
/// The paper's AllReduce waits for all trainers. Here a round waits only for the ranks that took
/// part in the round before, and in the first round of an order for all. The server closes a round
/// that waits too long ([`Self::is_overdue`]). So a rank that is late, or that died, delays one
/// round at most. It is waited for again after it has joined a later one, or was told its fragment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rounds {
    fragments: Fragments,
    order: u64,
    /// The fragment of the open round.
    turn: u32,
    /// Whether a rank has joined a round of the order.
    has_begun: bool,
    /// The number of the open round.
    open: u64,
    /// The ranks that the open round waits for.
    awaited: BTreeSet<u32>,
    /// The ranks in the open round.
    joined: BTreeSet<u32>,
    /// The ranks that have ended the order. Their replicas no longer change.
    rested: BTreeSet<u32>,
}

/// The place of a rank's replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Joined {
    /// In this round, which waits for other ranks.
    Open(u64),
    /// In the open round, which is now complete.
    Complete,
    /// In none: the open round moves this other fragment. It now waits for the rank.
    OtherFragment(u32),
    /// In none: the order has ended.
    Late,
}

impl Rounds {
    /// The rounds of a server, before its first order.
    #[must_use]
    pub fn new(fragments: Fragments) -> Self {
        Self { fragments, ..Self::default() }
    }

    /// The rounds of a server that replaces another one in this order. `turn`: the fragment of the
    /// round that was open. `rested`: the ranks that have ended the order. The first round waits
    /// for all others.
    #[must_use]
    pub fn resume(fragments: Fragments, order: u64, turn: u32, rested: impl IntoIterator<Item = u32>) -> Self {
        Self { order, turn, rested: rested.into_iter().collect(), ..Self::new(fragments) }
    }

    /// The fragment of the open round.
    #[must_use]
    pub fn turn(&self) -> u32 {
        self.turn
    }

    /// Rank `rank` joins the open round of an order with `workers` dense workers. A new order ends
    /// the rounds of the one before, and begins with fragment 0.
    pub fn join(&mut self, order: u64, workers: u32, rank: u32, part: Part) -> Joined {
        if order < self.order {
            return Joined::Late;
        }
        if order > self.order {
            *self = Self { order, open: self.open + 1, ..Self::new(self.fragments) };
        }
        if !std::mem::replace(&mut self.has_begun, true) {
            self.awaited = (0..workers).collect();
        }
        match part {
            Part::Fragment(fragment) if fragment != self.turn => {
                // The rank trains, and comes back with the right fragment.
                self.rested.remove(&rank);
                self.joined.remove(&rank);
                self.awaited.insert(rank);
                return Joined::OtherFragment(self.turn);
            }
            // A replacement of this rank trains again.
            Part::Fragment(_) => self.rested.remove(&rank),
            Part::Last => self.rested.insert(rank),
        };
        self.joined.insert(rank);
        if self.is_complete() { Joined::Complete } else { Joined::Open(self.open) }
    }

    /// Whether the open round has all ranks that it waits for.
    fn is_complete(&self) -> bool {
        self.awaited.iter().all(|rank| self.joined.contains(rank) || self.rested.contains(rank))
    }

    /// Whether round `round` is still open, because some rank is late.
    #[must_use]
    pub fn is_overdue(&self, round: u64) -> bool {
        self.open == round
    }

    /// Closes the open round. The next one waits for the ranks of this one that still train.
    pub fn close(&mut self) {
        self.awaited = self.joined.difference(&self.rested).copied().collect();
        self.joined.clear();
        self.open += 1;
        self.turn = self.fragments.after(self.turn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The only fragment.
    const FIRST: Part = Part::Fragment(0);

    /// A round of these ranks. The last one completes it.
    fn complete(rounds: &mut Rounds, ranks: &[u32]) {
        for (place, rank) in ranks.iter().enumerate() {
            let joined = rounds.join(1, 3, *rank, FIRST);
            assert_eq!(joined == Joined::Complete, place + 1 == ranks.len(), "{ranks:?}: {rank} {joined:?}");
        }
        rounds.close();
    }

    #[test]
    fn a_round_has_every_rank_in_any_order() {
        let mut rounds = Rounds::default();
        for ranks in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            complete(&mut rounds, &ranks);
        }
    }

    /// Rank 2 is dead: it delays one round, and no later one.
    #[test]
    fn a_dead_rank_delays_one_round() {
        let mut rounds = Rounds::default();
        complete(&mut rounds, &[0, 1, 2]);
        rounds.join(1, 3, 0, FIRST);
        let Joined::Open(round) = rounds.join(1, 3, 1, FIRST) else { panic!("rank 2 is awaited") };
        assert!(rounds.is_overdue(round));
        rounds.close();
        assert!(!rounds.is_overdue(round), "only one of the waiting calls closes it");
        complete(&mut rounds, &[1, 0]);
        complete(&mut rounds, &[0, 1]);
        // Its replacement joins a round, and is waited for from then on.
        assert!(matches!(rounds.join(1, 3, 2, FIRST), Joined::Open(_)));
        rounds.join(1, 3, 0, FIRST);
        assert_eq!(rounds.join(1, 3, 1, FIRST), Joined::Complete);
        rounds.close();
        complete(&mut rounds, &[0, 1, 2]);
    }

    #[test]
    fn a_rank_that_has_ended_the_order_is_not_awaited() {
        let mut rounds = Rounds::default();
        complete(&mut rounds, &[0, 1, 2]);
        // Ranks 0 and 1 have begun an exchange when rank 2 ends the order.
        rounds.join(1, 3, 0, FIRST);
        rounds.join(1, 3, 1, FIRST);
        assert_eq!(rounds.join(1, 3, 2, Part::Last), Joined::Complete);
        rounds.close();
        complete(&mut rounds, &[0, 1]);
        assert!(matches!(rounds.join(1, 3, 1, Part::Last), Joined::Open(_)));
        assert_eq!(rounds.join(1, 3, 0, Part::Last), Joined::Complete);
        rounds.close();
        // A replacement of rank 1 trains again, alone.
        assert_eq!(rounds.join(1, 3, 1, FIRST), Joined::Complete);
    }

    #[test]
    fn a_replacement_of_the_server_awaits_all_but_the_rested() {
        let mut rounds = Rounds::resume(Fragments::default(), 1, 0, [2]);
        complete(&mut rounds, &[1, 0]);
        let mut rounds = Rounds::resume(Fragments::default(), 1, 0, []);
        complete(&mut rounds, &[1, 0, 2]);
    }

    #[test]
    fn a_new_order_awaits_all_of_its_workers() {
        let mut rounds = Rounds::default();
        complete(&mut rounds, &[0, 1, 2]);
        rounds.join(1, 3, 0, Part::Last);
        let Joined::Open(old) = rounds.join(2, 2, 1, FIRST) else { panic!("rank 0 is awaited") };
        assert_eq!(rounds.join(1, 3, 2, FIRST), Joined::Late);
        assert!(rounds.is_overdue(old));
        assert_eq!(rounds.join(2, 2, 0, FIRST), Joined::Complete);
    }

    /// Rank 1 is late for a round, and would send the fragment of that round.
    #[test]
    fn a_late_rank_is_told_the_fragment_and_awaited() {
        let mut rounds = Rounds::new(Fragments::new(3));
        let join = |rounds: &mut Rounds, rank, fragment| rounds.join(1, 2, rank, Part::Fragment(fragment));
        assert_eq!(join(&mut rounds, 0, 0), Joined::Open(1));
        rounds.close();
        assert_eq!(rounds.turn(), 1);
        assert_eq!(join(&mut rounds, 1, 0), Joined::OtherFragment(1));
        // Without the answer to rank 1, this would complete the round.
        assert_eq!(join(&mut rounds, 0, 1), Joined::Open(2));
        assert_eq!(join(&mut rounds, 1, 1), Joined::Complete);
        for fragment in [2, 0, 1, 2, 0] {
            rounds.close();
            assert_eq!(rounds.turn(), fragment);
            assert_eq!(join(&mut rounds, 1, fragment), Joined::Open(rounds.open));
            assert_eq!(join(&mut rounds, 0, fragment), Joined::Complete);
        }
        // A last exchange has all fragments, so it fits every round.
        rounds.close();
        assert_eq!((rounds.turn(), rounds.join(1, 2, 1, Part::Last)), (1, Joined::Open(rounds.open)));
        // The replacement of rank 1 begins with the first fragment.
        assert_eq!(join(&mut rounds, 1, 0), Joined::OtherFragment(1));
        assert_eq!(join(&mut rounds, 0, 1), Joined::Open(rounds.open), "its replica trains again");
        assert_eq!(join(&mut rounds, 1, 1), Joined::Complete);
        rounds.close();
        assert_eq!((rounds.join(2, 1, 0, FIRST), rounds.turn()), (Joined::Complete, 0), "a new order");
    }

    #[test]
    fn a_replacement_of_the_server_goes_on_with_the_fragment() {
        let mut rounds = Rounds::resume(Fragments::new(4), 1, 3, []);
        assert_eq!(rounds.join(1, 1, 0, FIRST), Joined::OtherFragment(3));
        assert_eq!(rounds.join(1, 1, 0, Part::Fragment(3)), Joined::Complete);
        rounds.close();
        assert_eq!(rounds.turn(), 0);
    }
}
