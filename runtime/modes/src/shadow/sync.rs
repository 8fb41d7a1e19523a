//! When a dense worker exchanges its replica (§3.2 and §3.3), and the sync gap (§4.1.1).

use std::collections::VecDeque;
use std::num::NonZeroU32;

use super::Fragments;

/// The exchanges of one replica. At most one is under way.
///
/// The dense worker calls [`Self::trained`] after each batch. It begins an exchange if
/// [`Self::is_due`] says so. In the background form, one exchange follows the other, as the shadow
/// thread of the paper loops. It makes no exchange of a replica that has not moved. An exchange
/// moves one fragment, and the fragments take turns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaSync {
    every_steps: Option<NonZeroU32>,
    /// Batches trained.
    trained: u64,
    /// Batches in the last snapshot.
    snapshot: u64,
    /// Batches in the snapshot under way.
    under_way: Option<u64>,
    /// For each fragment: the batches in its last exchange. The fragment whose turn it is comes
    /// first.
    exchanged: VecDeque<u64>,
}

impl ReplicaSync {
    /// A replica that is equal to the copy. With `every_steps`, training waits for an exchange
    /// after this many batches.
    #[must_use]
    pub fn new(every_steps: Option<NonZeroU32>, fragments: Fragments) -> Self {
        let exchanged = std::iter::repeat_n(0, fragments.count() as usize).collect();
        Self { every_steps, trained: 0, snapshot: 0, under_way: None, exchanged }
    }

    /// The replica has trained a batch.
    pub fn trained(&mut self) {
        self.trained += 1;
    }

    /// Whether an exchange has to begin now.
    #[must_use]
    pub fn is_due(&self) -> bool {
        let least = self.every_steps.map_or(1, |every| u64::from(every.get()));
        self.under_way.is_none() && self.trained - self.snapshot >= least
    }

    /// Whether training waits for each exchange (the foreground form).
    #[must_use]
    pub fn is_foreground(&self) -> bool {
        self.every_steps.is_some()
    }

    /// An exchange begins with a snapshot of the present replica.
    pub fn begin(&mut self) {
        self.snapshot = self.trained;
        self.under_way = Some(self.trained);
    }

    /// The copy has the snapshot, and the replica has the answer. Returns the gap: the batches of
    /// the replica between this snapshot and the one before of the same fragment. Their mean is the
    /// average sync gap. `None` if no exchange was under way.
    pub fn end(&mut self) -> Option<u64> {
        let snapshot = self.under_way.take()?;
        self.exchanged.push_back(snapshot);
        let before = self.exchanged.pop_front();
        before.map(|before| snapshot - before)
    }

    /// As [`Self::end`], for an exchange of all fragments. Returns the gap of the fragment that was
    /// exchanged longest ago.
    pub fn end_all(&mut self) -> Option<u64> {
        let snapshot = self.under_way.take()?;
        let gap = snapshot - self.seen();
        self.exchanged.iter_mut().for_each(|exchanged| *exchanged = snapshot);
        Some(gap)
    }

    /// A server has not taken the snapshot, because it waits for another fragment, for example. So
    /// the next exchange is due at once. The fragments count as exchanged after a whole further
    /// turn only.
    pub fn miss(&mut self) {
        self.under_way = None;
        let seen = self.seen();
        self.exchanged.iter_mut().for_each(|exchanged| *exchanged = seen);
        self.snapshot = seen;
    }

    /// Whether an exchange is under way.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Batches that the copy may lack in some fragment. They are lost if the worker dies now.
    #[must_use]
    pub fn unseen(&self) -> u64 {
        self.trained - self.seen()
    }

    /// The batches that the copy has seen in all fragments.
    fn seen(&self) -> u64 {
        self.exchanged.front().copied().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_background_one_exchange_follows_another() {
        let mut sync = ReplicaSync::new(None, Fragments::default());
        assert!(!sync.is_due() && !sync.is_foreground(), "the replica has not moved");
        sync.trained();
        assert!(sync.is_due());
        sync.begin();
        for _ in 0..4 {
            sync.trained();
            assert!(!sync.is_due(), "one exchange at a time");
        }
        assert_eq!((sync.unseen(), sync.end(), sync.unseen()), (5, Some(1), 4));
        assert!(sync.is_due());
        sync.begin();
        assert_eq!((sync.end(), sync.end(), sync.unseen()), (Some(4), None, 0));
    }

    #[test]
    fn in_the_foreground_each_exchange_has_every_steps_batches() {
        let mut sync = ReplicaSync::new(NonZeroU32::new(3), Fragments::default());
        let mut gaps = Vec::new();
        for _ in 0..10 {
            sync.trained();
            if sync.is_due() {
                sync.begin();
                gaps.extend(sync.end());
            }
        }
        assert!(sync.is_foreground());
        assert_eq!((gaps, sync.unseen()), (vec![3, 3, 3], 1));
    }

    /// A batch between two exchanges, and three fragments in turn.
    #[test]
    fn a_batch_is_seen_once_all_fragments_have_it() {
        let mut sync = ReplicaSync::new(None, Fragments::new(3));
        let mut after = |batches: u64| {
            (0..batches).for_each(|_| sync.trained());
            sync.begin();
            (sync.end(), sync.unseen())
        };
        assert_eq!((after(1), after(1)), ((Some(1), 1), (Some(2), 2)));
        assert_eq!(after(1), (Some(3), 2), "the first of three batches has been in all fragments");
        assert_eq!(after(4), (Some(6), 5), "the first fragment had batch 1 the last time");
        sync.trained();
        sync.begin();
        assert_eq!((sync.end_all(), sync.unseen()), (Some(6), 0), "the second fragment had batch 2");
    }

    #[test]
    fn a_missed_exchange_is_due_again_and_has_shown_nothing() {
        for every in [None, NonZeroU32::new(2)] {
            let mut sync = ReplicaSync::new(every, Fragments::new(2));
            for _ in 0..2 {
                (0..2).for_each(|_| sync.trained());
                sync.begin();
                sync.end();
            }
            assert_eq!(sync.unseen(), 2);
            (0..2).for_each(|_| sync.trained());
            sync.begin();
            sync.miss();
            assert!(sync.is_due() && !sync.is_under_way());
            assert_eq!(sync.unseen(), 4);
            sync.begin();
            sync.end();
            assert_eq!(sync.unseen(), 4, "one fragment of two");
            sync.trained();
            sync.begin();
            sync.end();
            assert_eq!(sync.unseen(), 1);
        }
    }
}
