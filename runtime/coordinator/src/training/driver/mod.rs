//! How the coordinator drives the dense workers through an order, by family of modes: one file a family.

mod barrier;
mod tokens;

use rectrain_kinds::Family;
use rectrain_modes::{Rank, TrainingMode};
use rectrain_proto::v1::order::Order as Kind;
use rectrain_protocol::error::RoleError;

pub(super) use self::barrier::grant;
use super::Training;

/// The coordinator's side of a training order. Where training is stays in [`Training`].
pub(super) trait Driver {
    /// Prepares an order that begins at the boundary, and gives it.
    fn begin(&self, training: &mut Training) -> Kind;

    /// Advances the order as far as possible. Says whether training has paused at a boundary.
    fn advance(&self, training: &mut Training) -> Result<bool, RoleError>;

    /// The batch before which training would pause now.
    fn next_batch(&self, training: &Training) -> u64;

    /// Of the `batches` that all dense workers have reported, those whose rows are trained. `None` in a
    /// family that settles each batch by its own report.
    fn reported_batches(&self, training: &Training, batches: u64) -> Option<u64>;

    /// Of the `batches` that all dense workers have reported, those whose gradients are applied. `None` in
    /// a family that settles each batch by its own report.
    fn settled_batches(&self, training: &Training, batches: u64) -> Option<u64>;

    /// A replacement of dense worker `rank` takes part in the order.
    fn rejoin(&self, training: &mut Training, rank: Rank);
}

/// The driver of a mode.
pub(super) fn driver(mode: TrainingMode) -> &'static dyn Driver {
    match mode.family() {
        Family::Barrier => &barrier::Barrier,
        Family::Tokens => &tokens::Tokens,
    }
}
