//! Training without a barrier: dense workers pull batches with tokens from the dispatcher, and
//! report each batch. In `shadow` they train replicas meanwhile, which the coordinator need not
//! know.

use std::num::NonZeroU32;

use rectrain_kinds::{OutputModel, WirePrecision};
use rectrain_modes::shadow::Shadow;
use rectrain_modes::switch::SwitchPhase;
use rectrain_modes::{Answers, Rank, TrainingMode};
use rectrain_proto::v1;
use rectrain_proto::v1::order::Order as Kind;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::token_counts::TokenCounts;

use super::driver::Driver;
use super::{ServerCall, Training};

/// The driver of modes without a barrier.
pub(super) struct Tokens;

impl Driver for Tokens {
    fn begin(&self, training: &mut Training) -> Kind {
        let workers = training.config.workers;
        let answers: Answers = training
            .run
            .dispatcher()
            .map_or_else(Vec::new, |dispatcher| (0..workers).flat_map(|rank| dispatcher.join(Rank(rank))).collect());
        training.queue_answers(answers);
        match training.modes.current {
            TrainingMode::Shadow(shadow) => Kind::Shadow(replicas(shadow, workers)),
            _ => Kind::Tokens(v1::Tokens {}),
        }
    }

    fn advance(&self, training: &mut Training) -> Result<bool, RoleError> {
        training.feed();
        let trains = *training.run.phase() == SwitchPhase::Training;
        if trains && (training.must_pause() || is_exhausted(training)) {
            training.choose_next();
            training.run.rest(training.config.run_mode(training.modes.next, training.workers.next))?;
            training.feed();
        }
        if matches!(training.run.phase(), SwitchPhase::Draining { .. }) {
            drain(training)?;
        }
        if !matches!(training.run.phase(), SwitchPhase::Moving { .. }) || !training.all_done() {
            return Ok(false);
        }
        training.enter_pause()?;
        Ok(true)
    }

    fn next_batch(&self, training: &Training) -> u64 {
        training.feed.data.locate(training.run.next_row()).0
    }

    fn reported_batches(&self, _training: &Training, _batches: u64) -> Option<u64> {
        None
    }

    fn settled_batches(&self, _training: &Training, _batches: u64) -> Option<u64> {
        None
    }

    fn rejoin(&self, training: &mut Training, rank: Rank) {
        training.workers.asked.remove(&rank);
        training.workers.answers.remove(&rank);
        let answers = training.run.dispatcher().map(|dispatcher| dispatcher.join(rank));
        training.queue_answers(answers.unwrap_or_default());
    }
}

/// The order to train replicas on this many dense workers.
fn replicas(shadow: Shadow, workers: u32) -> v1::Shadow {
    v1::Shadow {
        alpha: shadow.alpha,
        every_steps: shadow.every_steps.map_or(0, NonZeroU32::get),
        workers,
        needs_all: shadow.average().is_some() || shadow.output_model != OutputModel::Copy,
        fragments: shadow.fragments.count(),
        bf16: shadow.wire_precision == WirePrecision::Bf16,
        threads: shadow.threads.get(),
    }
}

/// Drains the order. If the data ends in an incomplete step, tells the servers once to flush their
/// buffers.
fn drain(training: &mut Training) -> Result<(), RoleError> {
    let counts = training.counts();
    let has_orders = !training.run.advance()?.is_empty();
    let is_draining = matches!(training.run.phase(), SwitchPhase::Draining { .. });
    if has_orders && is_draining && !std::mem::replace(&mut training.flushing, true) {
        training.calls.push(ServerCall::Flush);
    }
    if matches!(training.run.phase(), SwitchPhase::Moving { .. }) {
        training.counts = TokenCounts { dropped_batches: 0, ..counts };
    }
    Ok(())
}

/// Whether all rows before the next pause, or all rows of the data, have been handed out.
fn is_exhausted(training: &Training) -> bool {
    let row = training.run.next_row();
    let pause = training.next_pause().filter(|pause| *pause <= training.feed.data.batches());
    pause.is_some_and(|pause| row >= training.feed.data.row_of(pause))
        || (training.feed.fed_all && row >= training.feed.data.row_of(training.feed.data.batches()))
}
