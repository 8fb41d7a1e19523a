//! Drives the dense workers through a training order. There is one driver for each family of modes.

use rectrain_kinds::Family;
use rectrain_modes::{Rank, TrainingMode};
use rectrain_proto::v1::order::Order as Kind;
use rectrain_protocol::error::RoleError;

use super::{Training, barrier, pulled, tokens};

/// The coordinator's side of a training order. The driver has no state of its own: [`Training`] has
/// it.
pub(super) trait Driver {
    /// Prepares an order that begins at the present boundary, and returns it.
    fn begin(&self, training: &mut Training) -> Kind;

    /// Advances the order as far as possible. Returns whether training has paused at a boundary.
    fn advance(&self, training: &mut Training) -> Result<bool, RoleError>;

    /// The batch before which training would pause now.
    fn next_batch(&self, training: &Training) -> u64;

    /// How many of the `batches` that all dense workers have reported have their rows trained.
    /// `None` in a family that settles each batch by its own report.
    fn reported_batches(&self, training: &Training, batches: u64) -> Option<u64>;

    /// How many of the `batches` that all dense workers have reported have their gradients applied.
    /// `None` in a family that settles each batch by its own report.
    fn settled_batches(&self, training: &Training, batches: u64) -> Option<u64>;

    /// A replacement of dense worker `rank` joins the order.
    fn rejoin(&self, training: &mut Training, rank: Rank);
}

/// The driver of a mode.
pub(super) fn driver(mode: TrainingMode) -> &'static dyn Driver {
    match mode.family() {
        Family::Barrier if mode == TrainingMode::Pulled => &pulled::Pulled,
        Family::Barrier => &barrier::Barrier,
        Family::Tokens | Family::Replicas => &tokens::Tokens,
    }
}
