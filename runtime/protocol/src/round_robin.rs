//! Assigns each piece of a batch to an embedding worker, round-robin.
//! The number of workers may change from some batch on. The coordinator announces the change before
//! a member sends, fetches or returns a piece of that batch.

use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use crate::batch::BatchKey;
use crate::error::RoleError;

/// A piece, and the index of the embedding worker that holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub key: BatchKey,
    pub embedding_worker: usize,
}

/// The number of embedding workers from each batch on, by ascending batch. Never empty. The first
/// entry also counts for all batches before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundRobin(Vec<(u64, u32)>);

impl RoundRobin {
    /// The same number of workers for all batches.
    pub fn new(workers: u32) -> Self {
        Self(vec![(0, workers.max(1))])
    }

    /// Changes the number of workers from batch `from` on. No loader may have been given that batch
    /// yet.
    pub fn set_workers_from(&mut self, from: u64, workers: u32) {
        self.0.retain(|(other, _)| *other < from);
        if self.0.last().is_none_or(|(_, before)| *before != workers) {
            self.0.push((from, workers.max(1)));
        }
    }

    /// The number of workers for the latest batches.
    pub fn latest_workers(&self) -> u32 {
        self.0.last().map_or(1, |(_, workers)| *workers)
    }

    /// The largest number of workers for any batch from `batch` on. Forgets all earlier batches.
    pub fn max_workers_from(&mut self, batch: u64) -> u32 {
        let past = self.0.iter().filter(|(from, _)| *from <= batch).count();
        self.0.drain(..past.saturating_sub(1));
        self.0.iter().map(|(_, workers)| *workers).max().unwrap_or(1)
    }

    /// The worker that holds a piece of a global batch of `pieces` pieces.
    pub fn assign(&self, key: BatchKey, pieces: u32) -> Piece {
        let batch = key.position.number();
        let (_, workers) = self.0.iter().rev().find(|(from, _)| *from <= batch).or(self.0.first()).unwrap_or(&(0, 1));
        let position = batch * u64::from(pieces) + u64::from(key.piece);
        Piece { key, embedding_worker: (position % u64::from(*workers)) as usize }
    }

    /// The assignment for a message.
    pub fn write(&self) -> Vec<v1::Turns> {
        self.0.iter().map(|(from, workers)| v1::Turns { from: *from, workers: *workers }).collect()
    }

    /// The assignment in a `message`.
    pub fn read(message: &'static str, turns: &[v1::Turns]) -> Result<Self, RoleError> {
        let is_valid = !turns.is_empty()
            && turns.iter().all(|turns| turns.workers > 0)
            && turns.windows(2).all(|pair| pair[0].from < pair[1].from);
        if !is_valid {
            let reason = format!(
                "embedding workers cannot be assigned by {turns:?}: expected ascending batches, each with at least one worker"
            );
            return Err(RoleError::Inconsistent { message, reason });
        }
        Ok(Self(turns.iter().map(|turns| (turns.from, turns.workers)).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::BatchPosition;

    fn holders(assignment: &RoundRobin, batch: u64) -> Vec<usize> {
        let holder =
            |piece| assignment.assign(BatchKey { position: BatchPosition::Train(batch), piece }, 2).embedding_worker;
        (0..2).map(holder).collect()
    }

    #[test]
    fn batches_before_a_change_keep_their_workers() {
        let mut turns = RoundRobin::new(1);
        turns.set_workers_from(10, 3);
        assert_eq!(
            (holders(&turns, 9), holders(&turns, 10), holders(&turns, 11)),
            (vec![0, 0], vec![2, 0], vec![1, 2])
        );
        turns.set_workers_from(20, 2);
        assert_eq!((turns.max_workers_from(9), turns.latest_workers()), (3, 2));
        assert_eq!(holders(&turns, 19), [2, 0], "the three workers keep their batches");
        assert_eq!((turns.max_workers_from(19), turns.max_workers_from(20)), (3, 2));
        assert_eq!(turns, RoundRobin(vec![(20, 2)]));
    }

    #[test]
    fn a_later_change_replaces_one_of_the_same_batch() {
        let mut turns = RoundRobin::new(1);
        turns.set_workers_from(10, 3);
        turns.set_workers_from(10, 2);
        assert_eq!(turns, RoundRobin(vec![(0, 1), (10, 2)]));
        turns.set_workers_from(12, 2);
        turns.set_workers_from(10, 1);
        assert_eq!(turns, RoundRobin::new(1));
    }

    #[test]
    fn an_assignment_survives_its_message_and_a_wrong_one_is_refused() {
        let mut turns = RoundRobin::new(2);
        turns.set_workers_from(7, 5);
        assert_eq!(RoundRobin::read("horizon", &turns.write()).unwrap(), turns);
        let of = |from, workers| v1::Turns { from, workers };
        for wrong in [vec![], vec![of(0, 0)], vec![of(5, 1), of(5, 2)]] {
            assert!(RoundRobin::read("horizon", &wrong).is_err(), "{wrong:?}");
        }
    }
}
