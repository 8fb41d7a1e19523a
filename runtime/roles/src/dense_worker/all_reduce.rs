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

/// Chunks that the previous rank has sent. Bounded by the ring: it is at most one step's rounds ahead of this rank.
#[derive(Debug, Default)]
pub(crate) struct RingMailbox {
    chunks: Mutex<BTreeMap<(u64, u32), Vec<f32>>>,
    arrived: Notify,
}

impl RingMailbox {
    pub(crate) fn put(&self, step: GlobalStep, round: u32, chunk: Vec<f32>) -> Result<(), RoleError> {
        if self.lock().insert((step.0, round), chunk).is_some() {
            let reason = format!("round {round} of step {step} was sent twice");
            return Err(RoleError::Inconsistent { message: "ring_chunk", reason });
        }
        self.arrived.notify_waiters();
        Ok(())
    }

    async fn take(&self, step: GlobalStep, round: u32) -> Result<Vec<f32>, RoleError> {
        let waiting = async {
            loop {
                let arrived = self.arrived.notified();
                if let Some(chunk) = self.lock().remove(&(step.0, round)) {
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

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(u64, u32), Vec<f32>>> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sums `buffer` over all ranks, in place; every rank ends with the same bits.
pub(crate) async fn all_reduce(
    step: GlobalStep,
    rank: Rank,
    ranks: u32,
    buffer: &mut [f32],
    next: &Channel,
    mailbox: &RingMailbox,
) -> Result<(), RoleError> {
    let mut ring = RingAllReduce::new(rank, ranks, buffer.len());
    for round in 0..ring.rounds() {
        let Some(send) = ring.send() else { break };
        let chunk = Tensor::from(buffer[send.range].to_vec());
        let message = v1::RingChunk { step: step.0, round: send.round };
        let sent = message::call(next, message, vec![chunk], CALL_DEADLINE);
        let (_done, received) = futures::future::try_join(sent, mailbox.take(step, round)).await?;
        ring.receive(round, &received, buffer)?;
    }
    Ok(())
}
