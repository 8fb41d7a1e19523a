//! Training whose synchronisation runs beside it: the mode `shadow`. Values in, decisions out: no
//! socket, no clock, no thread.
//!
//! Source: Zheng et al., *ShadowSync: Performing Synchronization in the Background for Highly
//! Scalable Distributed Training*, 2020 (sections 3 and 4.1).
//!
//! Each dense worker trains its own replica w⁽ⁱ⁾ of the dense parameters, with an optimizer state
//! of its own. The parameter servers hold the auxiliary copy w̃ (w_PS in the paper), each server a
//! partition of it. The mode has three parts:
//!
//! - [`interpolate`]: both lines of algorithm 2. A server moves w̃ towards the replica, and the
//!   dense worker then moves its replica towards w̃.
//! - [`ReplicaSync`]: decides when a dense worker begins an exchange, and counts the sync gap.
//! - [`add_to_mean`]: the optimizer state that belongs to w̃ when training pauses.
//!
//! Rows are updated as in `async`: the [`Dispatcher`](crate::gba::Dispatcher) hands out batches,
//! and a [`GradientServer`](crate::gba::GradientServer) applies each gradient alone (§3.2,
//! Hogwild).
//!
//! Differences from the paper:
//!
//! 1. A dense worker has one training thread, which computes a batch with several threads. So its
//!    replica needs no lock-free updates. The thread takes the snapshot for an exchange, and
//!    applies the reply, between two batches. It never waits for the network in between.
//! 2. The trained model is w̃, and not the replica of the first worker (§4, experimental setup).
//!    The copy has seen the replicas of all workers. It survives the death of every worker.
//! 3. When training pauses, every worker makes one more exchange. So w̃ has seen every batch.

mod elastic;
mod sync;

use std::num::NonZeroU32;

use rectrain_kinds::ShadowAlgorithm;
use serde::{Deserialize, Serialize};

pub use elastic::{add_to_mean, interpolate};
pub use sync::ReplicaSync;

/// The settings of the mode `shadow`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shadow {
    /// How replicas are synchronised.
    pub algorithm: ShadowAlgorithm,
    /// α, from 0.001 to 1.
    pub alpha: f32,
    /// Local batches of a worker between two exchanges that training waits for. `None`: exchanges
    /// take place in the background.
    pub every_steps: Option<NonZeroU32>,
}

impl Default for Shadow {
    /// Elastic averaging in the background, with α = 0.5.
    fn default() -> Self {
        Self { algorithm: ShadowAlgorithm::Easgd, alpha: 0.5, every_steps: None }
    }
}
