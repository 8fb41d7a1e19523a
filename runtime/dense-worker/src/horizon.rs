//! How far a dense worker may fetch. The coordinator knows which batches there are and where an order ends; a worker asks it
//! anew before it has used up what it knows, and does not wait for the answer until it must.

use rectrain_proto::v1;
use tokio::task::JoinHandle;

use super::Trainer;
use rectrain_protocol::batch::BatchKey;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::round_robin::{Piece, RoundRobin};

/// With fewer known batches than this ahead, the coordinator is asked for more.
const ASK_BELOW: u64 = 32;

/// See the module's text.
pub(crate) struct Horizon {
    order: u64,
    until: u64,
    last: bool,
    turns: Option<RoundRobin>,
    /// In an evaluation: the coordinator has been told of the batches before this one, and is told whether or not more are to be known.
    told: Option<u64>,
    asked: Option<JoinHandle<Result<v1::Horizon, RoleError>>>,
}

impl Horizon {
    /// Nothing is known but that order `order` begins before batch `from`.
    pub(crate) fn new(order: u64, from: u64) -> Self {
        Self { order, until: from, last: false, turns: None, told: None, asked: None }
    }

    /// The coordinator is to know how far this worker is, also when that knows all there is.
    pub(crate) fn telling(self) -> Self {
        Self { told: Some(0), ..self }
    }

    /// Batches before this one may be fetched.
    pub(crate) fn until(&self) -> u64 {
        self.until
    }

    /// Those of a batch's pieces before [`Self::until`], and where they are.
    pub(crate) fn place(&self, keys: impl Iterator<Item = BatchKey>, pieces: u32) -> impl Iterator<Item = Piece> {
        keys.filter_map(move |key| Some(self.turns.as_ref()?.assign(key, pieces)))
    }

    /// Whether everything before `batch` is all there is.
    pub(crate) fn ends_at(&self, batch: u64) -> bool {
        self.last && batch >= self.until
    }

    /// Takes an answer in if one is here, and asks for more if less than enough lies ahead of `at`.
    pub(crate) fn keep_ahead(&mut self, trainer: &mut Trainer, at: u64) -> Result<(), RoleError> {
        if self.asked.as_ref().is_some_and(JoinHandle::is_finished) {
            self.take(trainer)?;
        }
        let tells = self.told.is_some_and(|told| told + ASK_BELOW <= at);
        if self.asked.is_none() && (tells || (!self.last && self.until < at + ASK_BELOW)) {
            self.told = self.told.map(|_| at);
            let coordinator = trainer.peers.coordinator.clone();
            let request = v1::HorizonRequest { rank: trainer.rank.0, order: self.order, from: self.until, at };
            let ask = async move { Ok(coordinator.call(request, Vec::new(), CALL_DEADLINE).await?.0) };
            self.asked = Some(trainer.spawn(ask));
        }
        Ok(())
    }

    /// Waits for the answer to what was asked.
    pub(crate) fn take(&mut self, trainer: &mut Trainer) -> Result<(), RoleError> {
        if let Some(asked) = self.asked.take() {
            let horizon = trainer.join("horizon", asked)?;
            self.until = self.until.max(horizon.until);
            self.last = horizon.last;
            if !horizon.turns.is_empty() {
                self.turns = Some(RoundRobin::read("horizon", &horizon.turns)?);
            }
        }
        Ok(())
    }
}
