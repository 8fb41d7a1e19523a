//! Dense workers that take the place of others that have died: what they carry out, and where their parameters come from.

use rectrain_modes::{DenseHome, GlobalStep, Rank, TrainingMode};
use rectrain_proto::v1::order::Order as Kind;

use super::driver::driver;
use super::{Stage, Training};
use crate::ring::Mending;
use rectrain_protocol::error::RoleError;

/// A ring of dense workers after one of them was replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mended {
    /// Another ring is in force.
    Superseded { by: u64 },
    /// All go on before `step`, which trains `batch`, with the donor's parameters.
    GoesOn { step: GlobalStep, donor: Rank, batch: u64 },
}

/// How a dense worker takes a dead one's place.
struct Succession {
    /// It carries out the order under way.
    repeats: bool,
    /// Its ring has what it needs for that, or for the next one.
    lacks_parameters: bool,
}

/// Whether each dense worker holds the dense parameters.
fn on_workers(mode: TrainingMode) -> bool {
    mode.dense_home() == DenseHome::Workers
}

impl Training {
    /// Worker `rank` has died, and another is in its place; `has_done`: it has told what the order under way was for. Says whether the job goes
    /// on with the other: where the parameters are on the servers it needs nothing, and where each worker has them it gets them from one of
    /// its ring. While it trains, embedding workers keep what it has to be given where there were several from the first.
    pub(crate) fn replace_worker(&mut self, rank: Rank, has_done: bool) -> bool {
        let in_ring = rank.0 < self.barrier_workers();
        let Some(Succession { repeats, lacks_parameters }) = self.succession(has_done) else { return false };
        let lacks_parameters = lacks_parameters && in_ring;
        let Some(done) = self.workers.done.get_mut(rank.0 as usize) else { return false };
        if lacks_parameters && self.plan.barrier_workers() < 2 {
            return false;
        }
        // Training comes to no rest, and leaves none, before the order was carried out by this one.
        *done = if repeats { self.order.number.saturating_sub(1).min(*done) } else { self.order.number };
        *self.workers.successions.entry(rank).or_default() += 1;
        if lacks_parameters {
            self.workers.ring.replaced(rank);
        }
        if self.stage == Stage::Training {
            driver(self.modes.current).rejoin(self, rank);
        }
        true
    }

    /// What is to be done by a dense worker that takes a dead one's place now; none: the job begins anew.
    fn succession(&self, has_done: bool) -> Option<Succession> {
        let order = self.order.order.as_ref();
        let reads = matches!(order, Some(Kind::ReadBack(_)));
        let publishes = matches!(order, Some(Kind::Publish(_)));
        // Everybody has the same before the first order, and a first publication is of just that.
        let is_pristine = self.order.number == 0 || (self.order.number == 1 && publishes);
        let (repeats, lacks) = match self.stage {
            // Another dense worker's batches are asked for again of embedding workers, which keep none where there was a single one.
            Stage::Training if self.plan.started_workers < 2 => return None,
            Stage::Training => (true, on_workers(self.modes.current)),
            Stage::Restoring => (self.order.number > 0, false),
            Stage::Evaluating => (!has_done, on_workers(self.modes.current)),
            Stage::Saving => (matches!(order, Some(Kind::Save(_))), on_workers(self.modes.current)),
            Stage::Sharing => (true, true),
            Stage::Joining | Stage::Gathering => (true, false),
            Stage::Moving => (true, publishes),
            Stage::Resting | Stage::Settling => (false, on_workers(self.modes.current)),
            Stage::Flipping => (false, on_workers(self.modes.current) || reads),
            Stage::Beginning => (false, on_workers(self.modes.next)),
            Stage::Ended if has_done => (false, false),
            // The others may have told their parameters' digest, and be past giving them.
            Stage::Ended if on_workers(self.modes.current) => return None,
            Stage::Ended => (true, false),
        };
        Some(Succession { repeats, lacks_parameters: lacks && !is_pristine })
    }

    /// Whether dense worker 0 is to save its parameters, and may not have.
    pub(crate) fn saves_dense(&self) -> bool {
        self.stage == Stage::Saving && matches!(self.order.order, Some(Kind::Save(_)))
    }

    /// How often this worker took another's place: who asked before it did is dead.
    pub(crate) fn successions(&self, rank: Rank) -> u32 {
        self.workers.successions.get(&rank).copied().unwrap_or(0)
    }

    /// The number of the ring, if it is another than `known`.
    pub(crate) fn ring_after(&self, known: u64) -> Option<u64> {
        (self.workers.ring.number() > known).then_some(self.workers.ring.number())
    }

    /// Worker `rank` tells before which step its parameters stand, if it has any; `None`: not all have told yet. The batch is the one that is
    /// trained by this step.
    pub(crate) fn mend(
        &mut self,
        rank: Rank,
        ring: u64,
        step: Option<GlobalStep>,
    ) -> Result<Option<Mended>, RoleError> {
        let number = self.workers.ring.number();
        let last = GlobalStep(self.order.step + self.feed.granted.saturating_sub(self.order.batch));
        if let Some(step) = step.filter(|step| ring == number && *step > last) {
            let reason = format!("dense worker {rank} says it is before step {step}, and no one may be beyond {last}");
            return Err(RoleError::Inconsistent { message: "mend", reason });
        }
        match self.workers.ring.tell(rank, ring, step, self.barrier_workers()) {
            Mending::Waits => Ok(None),
            Mending::Superseded => Ok(Some(Mended::Superseded { by: number })),
            Mending::Mended { step, donor } => {
                let batch = self.order.batch + step.0.saturating_sub(self.order.step);
                Ok(Some(Mended::GoesOn { step, donor, batch }))
            }
            Mending::Lost => Err(RoleError::Restarted { member: "every dense worker".to_owned() }),
        }
    }
}
