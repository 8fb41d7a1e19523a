//! Assigns each piece of a batch to an embedding worker: in equal turns, or by shares.
//! The number of workers and their shares may change from some batch on. The coordinator announces
//! the change before a member sends, fetches or returns a piece of that batch.

use rectrain_modes::turns::{member_at, of_weights};
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

/// The embedding workers from a batch on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Turns {
    from: u64,
    workers: u32,
    /// By worker; their sum is a power of two. Empty: equal turns.
    shares: Vec<u32>,
}

impl Turns {
    fn equal(from: u64, workers: u32) -> Self {
        Self { from, workers: workers.max(1), shares: Vec::new() }
    }

    fn serves_as(&self, other: &Self) -> bool {
        self.workers == other.workers && self.shares == other.shares
    }

    /// The worker at a position of the sequence of all pieces.
    fn worker(&self, position: u64) -> usize {
        member_at(&self.shares, self.workers, position)
    }

    fn is_valid(&self) -> bool {
        let parts: u64 = self.shares.iter().map(|share| u64::from(*share)).sum();
        let has_shares = self.shares.len() == self.workers as usize && parts.is_power_of_two();
        self.workers > 0 && (self.shares.is_empty() || has_shares)
    }
}

/// The embedding workers of each batch, by ascending batch. Never empty. The first entry also
/// counts for all batches before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoundRobin(Vec<Turns>);

impl RoundRobin {
    /// The same number of workers for all batches, in equal turns.
    pub fn new(workers: u32) -> Self {
        Self(vec![Turns::equal(0, workers)])
    }

    /// Changes the number of workers from batch `from` on. No loader may have been given that batch
    /// yet.
    pub fn set_workers_from(&mut self, from: u64, workers: u32) {
        self.set_from(Turns::equal(from, workers));
    }

    /// Changes the workers and their shares from batch `from` on. No loader may have been given
    /// that batch yet. Shares are in proportion to `weights`, which has an entry for each worker.
    /// A worker with at least a 4,096th of the largest weight gets some pieces.
    pub fn set_weights_from(&mut self, from: u64, weights: &[u32]) {
        self.set_from(Turns { from, workers: (weights.len() as u32).max(1), shares: of_weights(weights) });
    }

    fn set_from(&mut self, turns: Turns) {
        self.0.retain(|other| other.from < turns.from);
        if self.0.last().is_none_or(|before| !before.serves_as(&turns)) {
            self.0.push(turns);
        }
    }

    /// The number of workers for the latest batches.
    pub fn latest_workers(&self) -> u32 {
        self.0.last().map_or(1, |turns| turns.workers)
    }

    /// The first batch of the latest change.
    pub fn latest_from(&self) -> u64 {
        self.0.last().map_or(0, |turns| turns.from)
    }

    /// The workers and shares of the latest batches, for all batches.
    #[must_use]
    pub fn latest(&self) -> Self {
        let latest = self.0.last().cloned().unwrap_or_else(|| Turns::equal(0, 1));
        Self(vec![Turns { from: 0, ..latest }])
    }

    /// Forgets the changes that count only for batches before `batch`.
    pub fn forget_before(&mut self, batch: u64) {
        let past = self.0.iter().filter(|turns| turns.from <= batch).count();
        self.0.drain(..past.saturating_sub(1));
    }

    /// The largest number of workers for any batch from `batch` on.
    pub fn max_workers_from(&self, batch: u64) -> u32 {
        let past = self.0.iter().filter(|turns| turns.from <= batch).count();
        self.0.iter().skip(past.saturating_sub(1)).map(|turns| turns.workers).max().unwrap_or(1)
    }

    /// The worker that holds a piece of a global batch of `pieces` pieces.
    pub fn assign(&self, key: BatchKey, pieces: u32) -> Piece {
        let batch = key.position.number();
        let turns = self.0.iter().rev().find(|turns| turns.from <= batch).or(self.0.first());
        let position = batch * u64::from(pieces) + u64::from(key.piece);
        Piece { key, embedding_worker: turns.map_or(0, |turns| turns.worker(position)) }
    }

    /// The assignment for a message.
    pub fn write(&self) -> Vec<v1::Turns> {
        let write =
            |turns: &Turns| v1::Turns { from: turns.from, workers: turns.workers, shares: turns.shares.clone() };
        self.0.iter().map(write).collect()
    }

    /// The assignment in a `message`.
    pub fn read(message: &'static str, turns: &[v1::Turns]) -> Result<Self, RoleError> {
        let read = |turns: &v1::Turns| Turns { from: turns.from, workers: turns.workers, shares: turns.shares.clone() };
        let all: Vec<Turns> = turns.iter().map(read).collect();
        let ascends = all.windows(2).all(|pair| pair[0].from < pair[1].from);
        if all.is_empty() || !ascends || !all.iter().all(Turns::is_valid) {
            let reason = format!(
                "embedding workers cannot be assigned by {turns:?}: expected ascending batches, each with at least one worker, and no shares or one for each worker with a power of two as their sum"
            );
            return Err(RoleError::Inconsistent { message, reason });
        }
        Ok(Self(all))
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
        turns.forget_before(20);
        assert_eq!(turns, RoundRobin(vec![Turns::equal(20, 2)]));
    }

    #[test]
    fn a_later_change_replaces_one_of_the_same_batch() {
        let mut turns = RoundRobin::new(1);
        turns.set_workers_from(10, 3);
        turns.set_workers_from(10, 2);
        assert_eq!(turns, RoundRobin(vec![Turns::equal(0, 1), Turns::equal(10, 2)]));
        turns.set_workers_from(12, 2);
        turns.set_workers_from(10, 1);
        assert_eq!(turns, RoundRobin::new(1));
    }

    #[test]
    fn an_assignment_survives_its_message_and_a_wrong_one_is_refused() {
        let mut turns = RoundRobin::new(2);
        turns.set_workers_from(7, 5);
        turns.set_weights_from(9, &[4096, 128, 4096]);
        assert_eq!(RoundRobin::read("horizon", &turns.write()).unwrap(), turns);
        let of = |from, workers| v1::Turns { from, workers, shares: Vec::new() };
        let with = |shares: &[u32]| vec![v1::Turns { from: 0, workers: 2, shares: shares.to_vec() }];
        for wrong in [vec![], vec![of(0, 0)], vec![of(5, 1), of(5, 2)], with(&[8]), with(&[3, 4]), with(&[0, 0])] {
            assert!(RoundRobin::read("horizon", &wrong).is_err(), "{wrong:?}");
        }
    }

    /// Pieces of each worker in a run of positions.
    fn counts(turns: &Turns, positions: std::ops::Range<u64>) -> Vec<u64> {
        let mut counts = vec![0; turns.workers as usize];
        positions.for_each(|position| counts[turns.worker(position)] += 1);
        counts
    }

    #[test]
    fn any_run_of_pieces_has_about_the_share_of_each_worker() {
        for weights in [&[64, 2][..], &[64, 64, 5], &[1, 2, 3, 4, 5], &[64, 0], &[64; 9]] {
            let mut assignment = RoundRobin::new(1);
            assignment.set_weights_from(0, weights);
            let turns = &assignment.0[0];
            let total: u32 = weights.iter().sum();
            for (from, length) in [(0, 1024), (7, 100), (1000, 333), (12_345, 2048)] {
                let found = counts(turns, from..from + length);
                for (weight, found) in weights.iter().zip(found) {
                    let expected = length as f64 * f64::from(*weight) / f64::from(total);
                    let off = (found as f64 - expected).abs();
                    // A share is rounded to a part, and a run begins and ends within a cycle.
                    assert!(off <= 12.0 + length as f64 / 64.0, "{weights:?} {from} {length}: {found} of {expected}");
                    assert_eq!(*weight == 0, found == 0, "{weights:?} {from} {length}");
                }
            }
        }
    }

    #[test]
    fn a_cycle_has_each_share_exactly() {
        let turns = Turns { from: 0, workers: 3, shares: vec![120, 7, 129] };
        assert!(turns.is_valid());
        for from in [0, 1, 255, 98_765] {
            assert_eq!(counts(&turns, from..from + 256), [120, 7, 129]);
        }
        let rare: Vec<u64> = (0..256).filter(|position| turns.worker(*position) == 1).collect();
        let gaps = rare.windows(2).map(|pair| pair[1] - pair[0]);
        assert!(gaps.max() <= Some(2 * 256 / 7), "{rare:?} are not spread");
    }

    #[test]
    fn the_latest_shares_count_for_all_batches_and_old_ones_are_forgotten() {
        let mut turns = RoundRobin::new(2);
        turns.set_weights_from(10, &[64, 2]);
        turns.set_weights_from(20, &[64, 32]);
        assert_eq!((turns.latest_from(), turns.latest_workers()), (20, 2));
        let latest = turns.latest();
        assert_eq!((latest.latest_from(), latest.0.len()), (0, 1));
        assert_eq!(latest.0[0].shares, turns.0[2].shares);
        turns.forget_before(15);
        assert_eq!(turns.0.iter().map(|turns| turns.from).collect::<Vec<_>>(), [10, 20]);
        turns.set_workers_from(20, 2);
        assert_eq!((turns.0.len(), holders(&turns, 20)), (2, vec![0, 1]), "equal turns again");
    }
}
