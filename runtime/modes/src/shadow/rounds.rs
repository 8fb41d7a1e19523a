//! The rounds in which a parameter server forms the mean of the replicas (§3.3, algorithms 3 and
//! 4).

use std::collections::BTreeSet;

/// The rounds of one parameter server, one after another. In each, a rank joins with its replica
/// at most once.
///
/// The paper's AllReduce waits for all trainers. Here a round waits only for the ranks that took
/// part in the round before, and in the first round of an order for all. The server closes a round
/// that waits too long ([`Self::close_overdue`]). So a rank that is late, or that died, delays one
/// round at most. It is waited for again after it has joined a later one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rounds {
    order: u64,
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
    /// In none: the order has ended.
    Late,
}

impl Rounds {
    /// The rounds of a server that replaces another one in this order. `rested`: the ranks that
    /// have ended the order. The first round waits for all others.
    #[must_use]
    pub fn resume(order: u64, rested: impl IntoIterator<Item = u32>) -> Self {
        Self { order, rested: rested.into_iter().collect(), ..Self::default() }
    }

    /// Rank `rank` joins the open round of an order with `workers` dense workers. `last`: it has
    /// ended the order. A new order ends the rounds of the one before.
    pub fn join(&mut self, order: u64, workers: u32, rank: u32, last: bool) -> Joined {
        if order < self.order {
            return Joined::Late;
        }
        if order > self.order {
            *self = Self { order, open: self.open + 1, ..Self::default() };
        }
        if !std::mem::replace(&mut self.has_begun, true) {
            self.awaited = (0..workers).collect();
        }
        self.joined.insert(rank);
        if last {
            self.rested.insert(rank);
        } else {
            // A replacement of this rank trains again.
            self.rested.remove(&rank);
        }
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A round of these ranks. The last one completes it.
    fn complete(rounds: &mut Rounds, ranks: &[u32]) {
        for (place, rank) in ranks.iter().enumerate() {
            let joined = rounds.join(1, 3, *rank, false);
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
        rounds.join(1, 3, 0, false);
        let Joined::Open(round) = rounds.join(1, 3, 1, false) else { panic!("rank 2 is awaited") };
        assert!(rounds.is_overdue(round));
        rounds.close();
        assert!(!rounds.is_overdue(round), "only one of the waiting calls closes it");
        complete(&mut rounds, &[1, 0]);
        complete(&mut rounds, &[0, 1]);
        // Its replacement joins a round, and is waited for from then on.
        assert!(matches!(rounds.join(1, 3, 2, false), Joined::Open(_)));
        rounds.join(1, 3, 0, false);
        assert_eq!(rounds.join(1, 3, 1, false), Joined::Complete);
        rounds.close();
        complete(&mut rounds, &[0, 1, 2]);
    }

    #[test]
    fn a_rank_that_has_ended_the_order_is_not_awaited() {
        let mut rounds = Rounds::default();
        complete(&mut rounds, &[0, 1, 2]);
        // Ranks 0 and 1 have begun an exchange when rank 2 ends the order.
        rounds.join(1, 3, 0, false);
        rounds.join(1, 3, 1, false);
        assert_eq!(rounds.join(1, 3, 2, true), Joined::Complete);
        rounds.close();
        complete(&mut rounds, &[0, 1]);
        assert!(matches!(rounds.join(1, 3, 1, true), Joined::Open(_)));
        assert_eq!(rounds.join(1, 3, 0, true), Joined::Complete);
        rounds.close();
        // A replacement of rank 1 trains again, alone.
        assert_eq!(rounds.join(1, 3, 1, false), Joined::Complete);
    }

    #[test]
    fn a_replacement_of_the_server_awaits_all_but_the_rested() {
        let mut rounds = Rounds::resume(1, [2]);
        complete(&mut rounds, &[1, 0]);
        let mut rounds = Rounds::resume(1, []);
        complete(&mut rounds, &[1, 0, 2]);
    }

    #[test]
    fn a_new_order_awaits_all_of_its_workers() {
        let mut rounds = Rounds::default();
        complete(&mut rounds, &[0, 1, 2]);
        rounds.join(1, 3, 0, true);
        let Joined::Open(old) = rounds.join(2, 2, 1, false) else { panic!("rank 0 is awaited") };
        assert_eq!(rounds.join(1, 3, 2, false), Joined::Late);
        assert!(rounds.is_overdue(old));
        assert_eq!(rounds.join(2, 2, 0, false), Joined::Complete);
    }
}
