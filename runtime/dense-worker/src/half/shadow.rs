//! Trains a replica of the dense parameters without a barrier (`shadow`). Batches and rows take the
//! path of [`super::tokens`]. Dense gradients are applied to the [`Replica`].

use rectrain_proto::v1;

use super::WorkerHalf;
use super::tokens::Run;
use crate::replica::Replica;
use crate::trainer::Trainer;
use rectrain_protocol::error::RoleError;

/// Training of a replica.
pub(super) struct Shadow(pub(super) v1::Shadow);

impl WorkerHalf for Shadow {
    fn train(&self, trainer: &mut Trainer, order: &v1::Order) -> Result<(), RoleError> {
        let replica = Replica::begin(trainer, order, &self.0)?;
        Run::of_replica(trainer, order, replica).run()
    }
}
