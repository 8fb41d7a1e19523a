//! Tracks how far a dense worker may fetch. The coordinator knows which batches exist and where an
//! order ends. The worker requests more batches before it has used up the known ones. It waits for
//! the reply only when it has none left.

use rectrain_proto::v1;
use tokio::task::JoinHandle;

use super::Trainer;
use rectrain_protocol::batch::BatchKey;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::round_robin::{Piece, RoundRobin};

/// The worker requests more batches when fewer than this many known ones are left.
const REQUEST_BELOW: u64 = 32;

/// The known batches of one order.
pub(crate) struct Horizon {
    order: u64,
    until: u64,
    /// True if the order ends at `until`.
    last: bool,
    assignment: Option<RoundRobin>,
    /// In an evaluation: the last position that this worker has reported. It then reports its
    /// position even if it needs no more batches.
    reported: Option<u64>,
    pending: Option<JoinHandle<Result<v1::Horizon, RoleError>>>,
}

impl Horizon {
    /// An order that starts at batch `from`, with no batch known yet.
    pub(crate) fn new(order: u64, from: u64) -> Self {
        Self { order, until: from, last: false, assignment: None, reported: None, pending: None }
    }

    /// Reports this worker's position to the coordinator, even when all batches are known.
    pub(crate) fn with_reports(self) -> Self {
        Self { reported: Some(0), ..self }
    }

    /// The worker may fetch batches before this one.
    pub(crate) fn until(&self) -> u64 {
        self.until
    }

    /// The pieces with these keys, and their embedding workers. The batch is before
    /// [`Self::until`].
    pub(crate) fn assign(&self, keys: impl Iterator<Item = BatchKey>, pieces: u32) -> impl Iterator<Item = Piece> {
        keys.filter_map(move |key| Some(self.assignment.as_ref()?.assign(key, pieces)))
    }

    /// True if the order ends at `batch`.
    pub(crate) fn ends_at(&self, batch: u64) -> bool {
        self.last && batch >= self.until
    }

    /// Processes a reply that has arrived, and requests more if too few batches are known ahead of
    /// `at`.
    pub(crate) fn keep_ahead(&mut self, trainer: &mut Trainer, at: u64) -> Result<(), RoleError> {
        if self.pending.as_ref().is_some_and(JoinHandle::is_finished) {
            self.take(trainer)?;
        }
        let has_to_report = self.reported.is_some_and(|reported| reported + REQUEST_BELOW <= at);
        if self.pending.is_none() && (has_to_report || (!self.last && self.until < at + REQUEST_BELOW)) {
            self.reported = self.reported.map(|_| at);
            let coordinator = trainer.peers.coordinator.clone();
            let request = v1::HorizonRequest { rank: trainer.rank.0, order: self.order, from: self.until, at };
            let call = async move { Ok(coordinator.call(request, Vec::new(), CALL_DEADLINE).await?.0) };
            self.pending = Some(trainer.spawn(call));
        }
        Ok(())
    }

    /// Waits for the reply to the pending request, if there is one, and processes it.
    pub(crate) fn take(&mut self, trainer: &mut Trainer) -> Result<(), RoleError> {
        if let Some(pending) = self.pending.take() {
            let horizon = trainer.join("horizon", pending)?;
            self.until = self.until.max(horizon.until);
            self.last = horizon.last;
            if !horizon.turns.is_empty() {
                self.assignment = Some(RoundRobin::read("horizon", &horizon.turns)?);
            }
        }
        Ok(())
    }
}
