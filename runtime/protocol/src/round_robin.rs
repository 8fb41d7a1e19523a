//! Which embedding worker holds which piece of which batch: they take turns. From some batch on there may be more or fewer of them,
//! which whoever puts, fetches or sends back a piece is told before it comes to that batch.

use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use crate::batch::BatchKey;
use crate::error::RoleError;

/// A piece, and the number of the embedding worker that holds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    pub key: BatchKey,
    pub embedding_worker: usize,
}

/// Ascending batches, and how many embedding workers there are from each on. Never empty; the first counts for all batches before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turns(Vec<(u64, u32)>);

impl Turns {
    /// So many for all batches.
    pub fn of(workers: u32) -> Self {
        Self(vec![(0, workers.max(1))])
    }

    /// So many from batch `from` on, which nobody has been given yet.
    pub fn change(&mut self, from: u64, workers: u32) {
        self.0.retain(|(other, _)| *other < from);
        if self.0.last().is_none_or(|(_, before)| *before != workers) {
            self.0.push((from, workers.max(1)));
        }
    }

    /// How many there are for the batches to come last.
    pub fn last(&self) -> u32 {
        self.0.last().map_or(1, |(_, workers)| *workers)
    }

    /// The most that there are for any batch from this one on. What lies before is forgotten.
    pub fn most_from(&mut self, batch: u64) -> u32 {
        let past = self.0.iter().filter(|(from, _)| *from <= batch).count();
        self.0.drain(..past.saturating_sub(1));
        self.0.iter().map(|(_, workers)| *workers).max().unwrap_or(1)
    }

    /// Where a piece of a global batch that is cut into so many is.
    pub fn place(&self, key: BatchKey, pieces: u32) -> Piece {
        let batch = key.position.number();
        let (_, workers) = self.0.iter().rev().find(|(from, _)| *from <= batch).or(self.0.first()).unwrap_or(&(0, 1));
        let turn = batch * u64::from(pieces) + u64::from(key.piece);
        Piece { key, embedding_worker: (turn % u64::from(*workers)) as usize }
    }

    /// As a message.
    pub fn write(&self) -> Vec<v1::Turns> {
        self.0.iter().map(|(from, workers)| v1::Turns { from: *from, workers: *workers }).collect()
    }

    /// From a `message`.
    pub fn read(message: &'static str, turns: &[v1::Turns]) -> Result<Self, RoleError> {
        let is_right = !turns.is_empty()
            && turns.iter().all(|turns| turns.workers > 0)
            && turns.windows(2).all(|pair| pair[0].from < pair[1].from);
        if !is_right {
            let reason = format!("embedding workers cannot take turns by {turns:?}");
            return Err(RoleError::Inconsistent { message, reason });
        }
        Ok(Self(turns.iter().map(|turns| (turns.from, turns.workers)).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::BatchPosition;

    fn holders(turns: &Turns, batch: u64) -> Vec<usize> {
        let place = |piece| turns.place(BatchKey { position: BatchPosition::Train(batch), piece }, 2).embedding_worker;
        (0..2).map(place).collect()
    }

    #[test]
    fn batches_that_were_given_out_stay_where_they_are() {
        let mut turns = Turns::of(1);
        turns.change(10, 3);
        assert_eq!(
            (holders(&turns, 9), holders(&turns, 10), holders(&turns, 11)),
            (vec![0, 0], vec![2, 0], vec![1, 2])
        );
        turns.change(20, 2);
        assert_eq!((turns.most_from(9), turns.last()), (3, 2));
        assert_eq!(holders(&turns, 19), [2, 0], "the three hold what they were given");
        assert_eq!((turns.most_from(19), turns.most_from(20)), (3, 2));
        assert_eq!(turns, Turns(vec![(20, 2)]));
    }

    #[test]
    fn what_was_changed_before_anything_was_given_out_counts_as_one_change() {
        let mut turns = Turns::of(1);
        turns.change(10, 3);
        turns.change(10, 2);
        assert_eq!(turns, Turns(vec![(0, 1), (10, 2)]));
        turns.change(12, 2);
        turns.change(10, 1);
        assert_eq!(turns, Turns::of(1));
    }

    #[test]
    fn turns_survive_the_way_and_wrong_ones_do_not() {
        let mut turns = Turns::of(2);
        turns.change(7, 5);
        assert_eq!(Turns::read("horizon", &turns.write()).unwrap(), turns);
        let of = |from, workers| v1::Turns { from, workers };
        for wrong in [vec![], vec![of(0, 0)], vec![of(5, 1), of(5, 2)]] {
            assert!(Turns::read("horizon", &wrong).is_err(), "{wrong:?}");
        }
    }
}
