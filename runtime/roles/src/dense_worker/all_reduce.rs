//! Carries out a [`RingAllReduce`]: sends to the next dense worker, receives from the previous one's calls.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rectrain_modes::{GlobalStep, Rank, RingAllReduce};
use rectrain_proto::v1;
use rectrain_wire::{Channel, Tensor};
use tokio::sync::Notify;

use crate::error::RoleError;
use crate::message;
use crate::plan::CALL_DEADLINE;

/// Far beyond a step's rounds.
const MOST_CHUNKS: usize = 65_536;

/// Chunks that the previous rank has sent. Bounded by the ring: it is at most one step's rounds ahead of this rank.
#[derive(Debug, Default)]
pub(crate) struct RingMailbox {
    received: Mutex<Received>,
    arrived: Notify,
}

#[derive(Debug, Default)]
struct Received {
    /// The number of the ring that this rank is part of: chunks of earlier ones were meant for a sum that is not made any more.
    ring: u64,
    /// By ring, step and round.
    chunks: BTreeMap<(u64, u64, u32), Vec<f32>>,
}

impl RingMailbox {
    pub(crate) fn put(&self, ring: u64, step: GlobalStep, round: u32, chunk: Vec<f32>) -> Result<(), RoleError> {
        let mut received = self.lock();
        if ring < received.ring {
            return Ok(());
        }
        if received.chunks.len() >= MOST_CHUNKS {
            let reason = format!("{MOST_CHUNKS} chunks have been sent that nobody waits for");
            return Err(RoleError::Inconsistent { message: "ring_chunk", reason });
        }
        if received.chunks.insert((ring, step.0, round), chunk).is_some() {
            let reason = format!("round {round} of step {step} was sent twice");
            return Err(RoleError::Inconsistent { message: "ring_chunk", reason });
        }
        drop(received);
        self.arrived.notify_waiters();
        Ok(())
    }

    /// This rank is part of ring number `ring` from now on.
    pub(crate) fn begin(&self, ring: u64) {
        let mut received = self.lock();
        received.ring = ring;
        received.chunks = received.chunks.split_off(&(ring, 0, 0));
    }

    async fn take(&self, ring: u64, step: GlobalStep, round: u32) -> Result<Vec<f32>, RoleError> {
        let waiting = async {
            loop {
                let arrived = self.arrived.notified();
                if let Some(chunk) = self.lock().chunks.remove(&(ring, step.0, round)) {
                    return chunk;
                }
                arrived.await;
            }
        };
        tokio::time::timeout(CALL_DEADLINE, waiting).await.map_err(|_| RoleError::Task {
            what: "all-reduce",
            reason: format!("round {round} of step {step} did not come within {CALL_DEADLINE:?}"),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Received> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A rank's place in the ring.
#[derive(Debug, Clone, Copy)]
pub(super) struct RingPart {
    /// Which ring: another each time that one of its dense workers is replaced.
    pub(super) number: u64,
    pub(super) rank: Rank,
    pub(super) ranks: u32,
}

/// Sums `buffer` over all ranks, in place; every rank ends with the same bits. Given up, it leaves a part of the sum there.
pub(super) async fn all_reduce(
    step: GlobalStep,
    part: RingPart,
    buffer: &mut [f32],
    next: &Channel,
    mailbox: &RingMailbox,
) -> Result<(), RoleError> {
    let mut ring = RingAllReduce::new(part.rank, part.ranks, buffer.len());
    for round in 0..ring.rounds() {
        let Some(send) = ring.send() else { break };
        let chunk = Tensor::from(buffer[send.range].to_vec());
        let message = v1::RingChunk { step: step.0, round: send.round, ring: part.number };
        let sent = message::call(next, message, vec![chunk], CALL_DEADLINE);
        let (_done, received) = futures::future::try_join(sent, mailbox.take(part.number, step, round)).await?;
        ring.receive(round, &received, buffer)?;
    }
    Ok(())
}
