//! When a dense worker exchanges its replica (§3.2 and §3.3), and the sync gap (§4.1.1).

use std::num::NonZeroU32;

/// The exchanges of one replica. At most one is under way.
///
/// The dense worker calls [`Self::trained`] after each batch. It begins an exchange if
/// [`Self::is_due`] says so. In the background form, one exchange follows the other, as the shadow
/// thread of the paper loops. It makes no exchange of a replica that has not moved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplicaSync {
    every_steps: Option<NonZeroU32>,
    /// Batches since the last snapshot.
    since: u64,
    /// Batches in the snapshot under way that no snapshot before had.
    under_way: Option<u64>,
}

impl ReplicaSync {
    /// A replica that is equal to the copy. With `every_steps`, training waits for an exchange
    /// after this many batches.
    #[must_use]
    pub fn new(every_steps: Option<NonZeroU32>) -> Self {
        Self { every_steps, since: 0, under_way: None }
    }

    /// The replica has trained a batch.
    pub fn trained(&mut self) {
        self.since += 1;
    }

    /// Whether an exchange has to begin now.
    #[must_use]
    pub fn is_due(&self) -> bool {
        let least = self.every_steps.map_or(1, |every| u64::from(every.get()));
        self.under_way.is_none() && self.since >= least
    }

    /// Whether training waits for each exchange (the foreground form).
    #[must_use]
    pub fn is_foreground(&self) -> bool {
        self.every_steps.is_some()
    }

    /// An exchange begins with a snapshot of the present replica.
    pub fn begin(&mut self) {
        self.under_way = Some(self.under_way.unwrap_or(0) + std::mem::take(&mut self.since));
    }

    /// The copy has the snapshot, and the replica has the answer. Returns the gap: the batches of
    /// the replica between this snapshot and the one before. Their mean is the average sync gap.
    /// `None` if no exchange was under way.
    pub fn end(&mut self) -> Option<u64> {
        self.under_way.take()
    }

    /// Whether an exchange is under way.
    #[must_use]
    pub fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Batches that the copy may not have seen. They are lost if the worker dies now.
    #[must_use]
    pub fn unseen(&self) -> u64 {
        self.since + self.under_way.unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_background_one_exchange_follows_another() {
        let mut sync = ReplicaSync::new(None);
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
        let mut sync = ReplicaSync::new(NonZeroU32::new(3));
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
}
