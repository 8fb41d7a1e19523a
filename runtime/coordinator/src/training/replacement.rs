//! Replaces dense workers that died: which order the replacement carries out, and how it gets
//! parameters.

use rectrain_modes::{DenseHome, GlobalStep, Rank, TrainingMode};
use rectrain_proto::v1::order::Order as Kind;

use super::driver::driver;
use super::{Stage, Training};
use crate::ring::RingRepair;
use rectrain_protocol::error::RoleError;

/// The result of a ring repair for one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RepairReply {
    /// Another ring is in force.
    Superseded { by: u64 },
    /// All workers continue before `step`, which trains `batch`, with the parameters of `donor`.
    Resume { step: GlobalStep, donor: Rank, batch: u64 },
}

/// What the replacement of a dense worker needs.
struct ReplacementPlan {
    /// It carries out the present order.
    repeats: bool,
    /// It lacks parameters for that order or the next one.
    lacks_parameters: bool,
}

/// Whether the workers hold the dense parameters.
fn on_workers(mode: TrainingMode) -> bool {
    mode.dense_home() == DenseHome::Workers
}

impl Training {
    /// Replaces worker `rank`, which died. `has_done`: it has reported the result of the present
    /// order. Returns whether the job can continue with the replacement.
    /// If the servers hold the parameters, the replacement needs none. If the workers hold them, it
    /// gets them from a worker of its ring. In training, it fetches its batches again from the
    /// embedding workers. They keep batches only if the job started with several dense workers.
    pub(crate) fn replace_worker(&mut self, rank: Rank, has_done: bool) -> bool {
        let in_ring = rank.0 < self.barrier_workers();
        let Some(ReplacementPlan { repeats, lacks_parameters }) = self.plan_replacement(has_done) else { return false };
        let lacks_parameters = lacks_parameters && in_ring;
        let Some(done) = self.workers.done.get_mut(rank.0 as usize) else { return false };
        if lacks_parameters && self.config.barrier_workers() < 2 {
            return false;
        }
        // Training neither pauses nor continues before the replacement has carried out this order.
        *done = if repeats { self.order.number.saturating_sub(1).min(*done) } else { self.order.number };
        *self.workers.replacements.entry(rank).or_default() += 1;
        if lacks_parameters {
            self.workers.ring.replace(rank);
        }
        // The replica died with its worker. The replacement begins with the servers' copy.
        self.counts.lost_replica_batches += self.workers.unseen.remove(&rank).unwrap_or(0);
        if self.stage == Stage::Training {
            driver(self.modes.current).rejoin(self, rank);
        }
        true
    }

    /// What the replacement of a dense worker needs now; `None` if the job has to restart.
    fn plan_replacement(&self, has_done: bool) -> Option<ReplacementPlan> {
        let order = self.order.order.as_ref();
        let reads = matches!(order, Some(Kind::ReadBack(_)));
        let publishes = matches!(order, Some(Kind::Publish(_)));
        // All workers start with the same parameters. They still have them before the first order
        // and in a first publication.
        let is_pristine = self.order.number == 0 || (self.order.number == 1 && publishes);
        let (repeats, lacks) = match self.stage {
            // With a single dense worker, embedding workers keep no batches for its replacement,
            // unless pieces are pulled.
            Stage::Training if self.config.started_workers < 2 && self.modes.current != TrainingMode::Pulled => {
                return None;
            }
            Stage::Training => (true, on_workers(self.modes.current)),
            Stage::Restoring => (self.order.number > 0, false),
            Stage::Evaluating => (!has_done, on_workers(self.modes.current)),
            Stage::Saving => (matches!(order, Some(Kind::Save(_))), on_workers(self.modes.current)),
            Stage::Sharing => (true, true),
            Stage::Joining | Stage::Gathering => (true, false),
            Stage::Moving => (true, publishes),
            Stage::Paused | Stage::Settling => (false, on_workers(self.modes.current)),
            Stage::Flipping => (false, on_workers(self.modes.current) || reads),
            Stage::Beginning => (false, on_workers(self.modes.next)),
            Stage::Ended if has_done => (false, false),
            // Other workers may have finished and can no longer donate parameters.
            Stage::Ended if on_workers(self.modes.current) => return None,
            Stage::Ended => (true, false),
        };
        Some(ReplacementPlan { repeats, lacks_parameters: lacks && !is_pristine })
    }

    /// Whether dense worker 0 has to write its parameters and may not have done so.
    pub(crate) fn is_saving_dense(&self) -> bool {
        self.stage == Stage::Saving && matches!(self.order.order, Some(Kind::Save(_)))
    }

    /// How often this worker was replaced. A request from before the last replacement came from a
    /// process that died.
    pub(crate) fn replacements(&self, rank: Rank) -> u32 {
        self.workers.replacements.get(&rank).copied().unwrap_or(0)
    }

    /// The number of the ring, if it is newer than `known`.
    pub(crate) fn ring_after(&self, known: u64) -> Option<u64> {
        (self.workers.ring.number() > known).then_some(self.workers.ring.number())
    }

    /// Worker `rank` reports the step that its parameters are before, if it has any. `None` until
    /// all workers have reported.
    pub(crate) fn repair_ring(
        &mut self,
        rank: Rank,
        ring: u64,
        step: Option<GlobalStep>,
    ) -> Result<Option<RepairReply>, RoleError> {
        let number = self.workers.ring.number();
        let last = GlobalStep(self.order.step + self.feed.granted.saturating_sub(self.order.batch));
        if let Some(step) = step.filter(|step| ring == number && *step > last) {
            let reason = format!("dense worker {rank} says it is before step {step}, and no one may be beyond {last}");
            return Err(RoleError::Inconsistent { message: "mend", reason });
        }
        match self.workers.ring.report(rank, ring, step, self.barrier_workers()) {
            RingRepair::Waiting => Ok(None),
            RingRepair::Superseded => Ok(Some(RepairReply::Superseded { by: number })),
            RingRepair::Repaired { step, donor } => {
                let batch = self.order.batch + step.0.saturating_sub(self.order.step);
                Ok(Some(RepairReply::Resume { step, donor, batch }))
            }
            RingRepair::Lost => Err(RoleError::Restarted { member: "every dense worker".to_owned() }),
        }
    }
}
