//! Training with a barrier: dense workers train the batches that the coordinator grants, one global
//! batch a step, until the batch at which the order ends.

use rectrain_modes::{GlobalStep, Rank, TrainingMode};
use rectrain_proto::v1;
use rectrain_proto::v1::order::Order as Kind;
use rectrain_protocol::error::RoleError;

use super::Training;
use super::driver::Driver;

/// The driver of modes with a barrier.
pub(super) struct Barrier;

/// Steps whose gradients may still be on their way, beyond those in flight: the last one computed
/// and the one being computed.
const ON_THEIR_WAY: u64 = 2;

impl Driver for Barrier {
    fn begin(&self, training: &mut Training) -> Kind {
        let mode = training.modes.current;
        Kind::Barrier(v1::Barrier { staleness: mode.staleness(), substitutes: mode == TrainingMode::Des })
    }

    fn advance(&self, training: &mut Training) -> Result<bool, RoleError> {
        if !is_granted(training) || !training.all_done() {
            return Ok(false);
        }
        pause(training, |training| {
            let first = training.order.step;
            let mut steps = first..first + (training.feed.granted - training.order.batch);
            steps.try_for_each(|step| Ok(training.run.sync_step_applied(GlobalStep(step))?))
        })?;
        Ok(true)
    }

    fn next_batch(&self, training: &Training) -> u64 {
        training.feed.granted
    }

    fn reported_batches(&self, training: &Training, batches: u64) -> Option<u64> {
        Some(batches.max(training.order.batch))
    }

    fn settled_batches(&self, training: &Training, batches: u64) -> Option<u64> {
        let unsettled = training.modes.current.staleness() + ON_THEIR_WAY;
        Some(batches.saturating_sub(unsettled).max(training.order.batch))
    }

    // The other dense workers wait for the replacement in the ring repair.
    fn rejoin(&self, _training: &mut Training, _rank: Rank) {}
}

/// Ends an order whose steps are trained. `settle` tells the run which of them are applied, unless
/// it was told before.
pub(super) fn pause(
    training: &mut Training,
    settle: impl FnOnce(&mut Training) -> Result<(), RoleError>,
) -> Result<(), RoleError> {
    training.choose_next();
    training.run.rest(training.config.run_mode(training.modes.next, training.workers.next))?;
    settle(training)?;
    training.run.advance()?;
    training.enter_pause()
}

/// Whether all batches of the order are granted. If a pause is due, decides that the order ends
/// here.
pub(super) fn is_granted(training: &mut Training) -> bool {
    training.feed();
    let ends = training.feed.fed_all && training.feed.granted == training.feed.data.batches();
    let pauses = ends || training.next_pause() == Some(training.feed.granted) || training.must_pause();
    if training.feed.stop_at.is_none() && pauses {
        training.feed.stop_at = Some(training.feed.granted);
    }
    training.feed.stop_at == Some(training.feed.granted)
}

/// Grants the dense workers the batches before `until`, as far as the data and the order reach.
pub(super) fn grant(training: &mut Training, until: u64) -> Result<(), RoleError> {
    training.feed();
    while training.feed.granted < until {
        if training.run.next_sync_step()?.is_none() {
            break;
        }
        training.feed.granted += 1;
    }
    Ok(())
}
