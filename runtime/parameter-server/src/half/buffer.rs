//! A gradient buffer whose pushes are idempotent. It wraps a [`GradientServer`] and remembers the
//! last reply to each worker. A worker that did not receive the reply retries its push: it then
//! gets the same reply, and the gradient counts once.

use std::collections::BTreeMap;

use rectrain_modes::gba::{GradientServer, Push, PushError, Pushed, ServerStanding, TokenMode, Update};
use rectrain_modes::switch::Boundary;
use rectrain_modes::{Batch, Outcome, Token};
use rectrain_modes::{GlobalStep, Rank};
use serde::{Deserialize, Serialize};

/// See the module documentation.
pub(crate) struct Buffer<G> {
    server: GradientServer<G>,
    /// The number of pushes that were accepted, or dropped as late.
    pushes: u64,
    answered: BTreeMap<Rank, Answered>,
}

/// The last push of a worker, with its outcome. A worker waits for the reply before it sends the
/// next push.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Answered {
    batch: Batch,
    token: Token,
    outcome: Outcome,
}

/// The position of a buffer between two steps, from which a replacement of this server resumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BufferStanding {
    server: ServerStanding,
    /// The number of the next push.
    pub(crate) pushes: u64,
    answered: BTreeMap<Rank, Answered>,
}

/// The result of a push.
pub(crate) struct Taken<G> {
    pub(crate) outcome: Outcome,
    /// The number of the push, from 0. `None` if the buffer already has its rows.
    pub(crate) number: Option<u64>,
    /// The content of the buffer if this push filled it. The caller applies it at once.
    pub(crate) update: Option<Update<G>>,
}

impl<G> Buffer<G> {
    pub(crate) fn new(mode: TokenMode, workers: u32, at: Boundary) -> Self {
        let server = GradientServer::new(mode, workers, at.step, at.next_row);
        Self { server, pushes: 0, answered: BTreeMap::new() }
    }

    pub(crate) fn resume(mode: TokenMode, workers: u32, standing: BufferStanding) -> Self {
        let BufferStanding { server, pushes, answered } = standing;
        Self { server: GradientServer::resume(mode, workers, server), pushes, answered }
    }

    /// The position of the buffer. `None` while it has gradients.
    pub(crate) fn standing(&self) -> Option<BufferStanding> {
        let server = self.server.standing()?;
        Some(BufferStanding { server, pushes: self.pushes, answered: self.answered.clone() })
    }

    /// The step that the buffer is filling.
    pub(crate) fn step(&self) -> GlobalStep {
        self.server.step()
    }

    pub(crate) fn fill(&self) -> usize {
        self.server.fill()
    }

    pub(crate) fn take(&mut self, push: Push<G>) -> Result<Taken<G>, PushError> {
        let (rank, batch, token) = (push.rank, push.batch, push.token);
        let (outcome, update) = match self.server.push(push)? {
            Pushed::Buffered => (Outcome::Trained, None),
            Pushed::Full(update) => (Outcome::Trained, Some(update)),
            Pushed::Late => (Outcome::Dropped, None),
            Pushed::Repeated => {
                let again = self.answered.get(&rank).filter(|last| (last.batch, last.token) == (batch, token));
                let outcome = again.map_or(Outcome::Repeated, |again| again.outcome);
                return Ok(Taken { outcome, number: None, update: None });
            }
        };
        self.answered.insert(rank, Answered { batch, token, outcome });
        self.pushes += 1;
        Ok(Taken { outcome, number: Some(self.pushes - 1), update })
    }

    /// Empties the buffer: the remaining gradients are the last step.
    pub(crate) fn flush(&mut self) -> Option<Update<G>> {
        self.server.flush()
    }
}

#[cfg(test)]
mod tests {
    use rectrain_modes::gba::BufferSize;

    use super::*;

    fn push(rank: u32, first_row: u64, token: u64) -> Push<u64> {
        let batch = Batch { first_row, rows: 4 };
        Push { rank: Rank(rank), batch, token: Token(token), pulled_at: GlobalStep(0), gradient: first_row }
    }

    fn buffer(mode: TokenMode, workers: u32) -> Buffer<u64> {
        Buffer::new(mode, workers, Boundary { step: GlobalStep(0), next_row: 0 })
    }

    fn outcome(buffer: &mut Buffer<u64>, push: Push<u64>) -> (Outcome, Option<u64>) {
        let taken = buffer.take(push).unwrap();
        (taken.outcome, taken.number)
    }

    #[test]
    fn a_retried_push_gets_the_same_reply() {
        // Two of three workers complete a step. The gradient of the third is dropped.
        let mut buffer = buffer(TokenMode::HopBw { backups: 1 }, 3);
        assert_eq!(outcome(&mut buffer, push(0, 0, 0)), (Outcome::Trained, Some(0)));
        assert_eq!(outcome(&mut buffer, push(0, 0, 0)), (Outcome::Trained, None));
        assert_eq!(outcome(&mut buffer, push(1, 0, 0)), (Outcome::Repeated, None));
        assert_eq!(outcome(&mut buffer, push(0, 0, 1)), (Outcome::Repeated, None), "handed out again");
        assert!(buffer.standing().is_none());
        assert_eq!(outcome(&mut buffer, push(1, 4, 0)), (Outcome::Trained, Some(1)));
        assert_eq!(outcome(&mut buffer, push(2, 8, 0)), (Outcome::Dropped, Some(2)));
        let standing = buffer.standing().unwrap();
        assert_eq!(standing.pushes, 3);
        let bytes = rmp_serde::to_vec(&standing).unwrap();
        let mut resumed: Buffer<u64> =
            Buffer::resume(TokenMode::HopBw { backups: 1 }, 3, rmp_serde::from_slice(&bytes).unwrap());
        assert_eq!(resumed.standing(), Some(standing));
        for buffer in [&mut buffer, &mut resumed] {
            assert_eq!(outcome(buffer, push(2, 8, 0)), (Outcome::Dropped, None), "and not trained");
            assert_eq!(outcome(buffer, push(1, 4, 0)), (Outcome::Trained, None));
            assert_eq!(outcome(buffer, push(0, 12, 1)), (Outcome::Trained, Some(3)));
        }
    }

    #[test]
    fn a_resumed_buffer_emits_the_same_steps() {
        let mode = TokenMode::Bsp { aggregate: BufferSize::new(3).unwrap() };
        let (mut one, mut other) = (buffer(mode, 4), buffer(mode, 4));
        for number in 0..20 {
            let push = push(number as u32 % 4, 4 * number, number / 3);
            if let Some(standing) = other.standing() {
                other = Buffer::resume(mode, 4, standing);
            }
            assert_eq!(one.take(push.clone()).unwrap().update, other.take(push).unwrap().update);
        }
        assert_eq!((one.step(), one.fill(), one.flush()), (GlobalStep(6), 2, other.flush()));
    }
}
