//! Ring all-reduce over a flat buffer: n − 1 rounds of reduce-scatter, then n − 1 rounds of
//! all-gather. Each of the n ranks sends 2·(n − 1)/n of the buffer in all. Every chunk is summed in
//! one fixed order around the ring. All ranks therefore end with the same bits, and runs repeat.
//!
//! The dense-worker role calls this state machine. It sends the chunks of [`RingAllReduce::send`]
//! to the next rank, and passes the previous rank's chunks to [`RingAllReduce::receive`].

use std::ops::Range;

use crate::Rank;

/// The message of one round: send this range of the buffer to the next rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RingSend {
    /// Round number, 0 to 2·(n − 1) − 1.
    pub round: u32,
    /// The range of the chunk in the buffer (elements).
    pub range: Range<usize>,
}

/// A chunk that does not fit this all-reduce.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RingError {
    /// The messages of a buffer arrive in order over one connection. A wrong round thus belongs to
    /// another buffer.
    #[error("rank {rank} expected round {expected} of the all-reduce and received round {received}")]
    WrongRound { rank: Rank, expected: u32, received: u32 },
    /// Peers disagree about the size of the buffer.
    #[error(
        "rank {rank} expected {expected} elements in round {round} of the all-reduce and received {received}: do all workers train the same model?"
    )]
    WrongLength { rank: Rank, round: u32, expected: usize, received: usize },
}

/// One all-reduce of one buffer, seen from one rank.
#[derive(Debug)]
pub struct RingAllReduce {
    rank: Rank,
    ranks: u32,
    length: usize,
    sent: u32,
    received: u32,
}

impl RingAllReduce {
    /// The state of rank `rank` of `ranks`, for a buffer of `length` elements.
    #[must_use]
    pub fn new(rank: Rank, ranks: u32, length: usize) -> Self {
        Self { rank, ranks: ranks.max(1), length, sent: 0, received: 0 }
    }

    /// The number of rounds.
    #[must_use]
    pub fn rounds(&self) -> u32 {
        2 * (self.ranks - 1)
    }

    /// The next chunk to send, once the previous round was received. `None` if there is nothing to
    /// send now.
    pub fn send(&mut self) -> Option<RingSend> {
        if self.sent >= self.rounds() || self.sent > self.received {
            return None;
        }
        let round = self.sent;
        self.sent += 1;
        Some(RingSend { round, range: self.chunk_range(self.chunk_at(round, 0)) })
    }

    /// Merges the previous rank's chunk of `round` into `buffer`. The first half of the rounds
    /// adds, the second half replaces.
    pub fn receive(&mut self, round: u32, chunk: &[f32], buffer: &mut [f32]) -> Result<(), RingError> {
        if round != self.received || round >= self.rounds() {
            return Err(RingError::WrongRound { rank: self.rank, expected: self.received, received: round });
        }
        let range = self.chunk_range(self.chunk_at(round, 1));
        if chunk.len() != range.len() || buffer.len() != self.length {
            return Err(RingError::WrongLength {
                rank: self.rank,
                round,
                expected: range.len(),
                received: chunk.len(),
            });
        }
        let target = &mut buffer[range];
        if round < self.ranks - 1 {
            // The order of the sum is fixed: the partial sum from the ring first, then this rank's
            // values.
            target.iter_mut().zip(chunk).for_each(|(own, partial)| *own += partial);
        } else {
            target.copy_from_slice(chunk);
        }
        self.received += 1;
        Ok(())
    }

    /// Whether every round has been sent and received.
    #[must_use]
    pub fn done(&self) -> bool {
        self.sent == self.rounds() && self.received == self.rounds()
    }

    /// The chunk that the rank `behind` places before this one sends in `round`.
    fn chunk_at(&self, round: u32, behind: u32) -> u32 {
        let n = self.ranks;
        let rank = (self.rank.0 + n - behind) % n;
        let (phase_round, start) = if round < n - 1 { (round, rank) } else { (round - (n - 1), rank + 1) };
        (start + n - phase_round % n) % n
    }

    fn chunk_range(&self, chunk: u32) -> Range<usize> {
        crate::share_of_batch(self.length, Rank(chunk), self.ranks)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Drives all ranks with messages delivered in an order drawn from `choices`.
    fn all_reduce(mut buffers: Vec<Vec<f32>>, choices: &[usize]) -> Vec<Vec<f32>> {
        let n = buffers.len();
        let length = buffers[0].len();
        let mut rings: Vec<_> = (0..n).map(|r| RingAllReduce::new(Rank(r as u32), n as u32, length)).collect();
        let mut mail: Vec<std::collections::VecDeque<(u32, Vec<f32>)>> = vec![Default::default(); n];
        let mut turn = choices.iter().cycle();
        while !rings.iter().all(RingAllReduce::done) {
            let rank = turn.next().unwrap() % n;
            for rank in [rank, (rank + 1) % n] {
                if let Some(send) = rings[rank].send() {
                    mail[(rank + 1) % n].push_back((send.round, buffers[rank][send.range].to_vec()));
                }
                if let Some((round, chunk)) = mail[rank].pop_front() {
                    rings[rank].receive(round, &chunk, &mut buffers[rank]).unwrap();
                }
            }
        }
        buffers
    }

    proptest! {
        #[test]
        fn every_rank_ends_with_the_same_sum(
            ranks in 1usize..7, length in 0usize..40, seed in any::<u32>(),
            choices in proptest::collection::vec(any::<usize>(), 1..50),
        ) {
            // Integers, so that the sum is exact in any order.
            let value = |rank: usize, i: usize| f32::from((seed.wrapping_mul(31).wrapping_add((rank * 97 + i * 13) as u32) % 1000) as u16);
            let buffers: Vec<Vec<f32>> = (0..ranks).map(|r| (0..length).map(|i| value(r, i)).collect()).collect();
            let expected: Vec<f32> = (0..length).map(|i| (0..ranks).map(|r| value(r, i)).sum()).collect();
            let mut order = choices;
            order.extend(0..ranks);
            for buffer in all_reduce(buffers, &order) {
                prop_assert_eq!(&buffer, &expected);
            }
        }
    }

    #[test]
    fn the_order_of_delivery_does_not_change_a_bit() {
        let buffers: Vec<Vec<f32>> =
            (0..4).map(|r| (0..37).map(|i| ((r * 37 + i) as f32 * 0.37).sin() * 10f32.powi(r)).collect()).collect();
        let first = all_reduce(buffers.clone(), &[0, 1, 2, 3]);
        let second = all_reduce(buffers, &[3, 1, 0, 2, 2, 1, 0, 3, 3]);
        assert_eq!(first, second);
        assert!(first.windows(2).all(|pair| pair[0] == pair[1]), "all ranks hold the same bits");
    }

    #[test]
    fn a_chunk_of_another_round_or_length_is_refused() {
        let mut ring = RingAllReduce::new(Rank(0), 2, 4);
        let mut buffer = vec![0.0; 4];
        assert!(matches!(ring.receive(1, &[0.0; 2], &mut buffer), Err(RingError::WrongRound { .. })));
        assert!(matches!(ring.receive(0, &[0.0; 3], &mut buffer), Err(RingError::WrongLength { .. })));
    }
}
