//! A dense worker's half of a training mode: fetches, computes and sends in a training order. Each
//! file has one family of modes.

mod barrier;
mod pulled;
mod shadow;
mod tokens;

use rectrain_modes::barrier::StepWindow;
use rectrain_proto::v1;
use rectrain_proto::v1::order::Order as Kind;
use rectrain_protocol::error::RoleError;

use self::barrier::Barrier;
use self::pulled::Pulled;
use self::shadow::Shadow;
use self::tokens::Tokens;
use crate::trainer::Trainer;

/// A dense worker's half of a family of modes.
pub(crate) trait WorkerHalf {
    /// Carries out a training order.
    ///
    /// # Errors
    /// A peer cannot be reached or breaks the protocol; a number leaves the range of floats; the
    /// worker is stopped.
    fn train(&self, trainer: &mut Trainer, order: &v1::Order) -> Result<(), RoleError>;
}

/// The half that carries out an order. `None` if the order is not to train.
pub(crate) fn half_of(order: &Kind) -> Option<Box<dyn WorkerHalf>> {
    match order {
        Kind::Barrier(v1::Barrier { staleness, substitutes }) => {
            Some(Box::new(Barrier { window: StepWindow::new(*staleness), substitutes: *substitutes }))
        }
        Kind::Pulled(_) => Some(Box::new(Pulled)),
        Kind::Tokens(_) => Some(Box::new(Tokens)),
        Kind::Shadow(shadow) => Some(Box::new(Shadow(*shadow))),
        _ => None,
    }
}
