//! Training whose synchronisation runs beside it: the mode `shadow`. Values in, decisions out: no
//! socket, no clock, no thread.
//!
//! Source: Zheng et al., *ShadowSync: Performing Synchronization in the Background for Highly
//! Scalable Distributed Training*, 2020 (sections 3 and 4.1).
//!
//! Each dense worker trains its own replica w⁽ⁱ⁾ of the dense parameters, with an optimizer state
//! of its own. The parameter servers hold the auxiliary copy w̃ (w_PS in the paper, w_global in
//! algorithms 3 and 4), each server a partition of it. The mode has these parts:
//!
//! - [`interpolate`]: both lines of algorithm 2 (`easgd`). A server moves w̃ towards the replica,
//!   and the dense worker then moves its replica towards w̃.
//! - [`average`]: algorithm 3 (`ma`). w̃ becomes the mean of the replicas.
//! - [`BlockUpdate`]: algorithm 4 (`bmuf`). w̃ makes a step towards the mean of the replicas.
//! - [`Rounds`]: decides which replicas are in a mean, for `ma` and `bmuf`.
//! - [`Fragments`]: the parts of a partition that exchanges move in turn.
//! - [`send_difference`], [`receive_difference`]: values that travel as bf16.
//! - [`ReplicaSync`]: decides when a dense worker begins an exchange, and counts the sync gap.
//! - [`SharedReplica`]: a replica that several threads of a dense worker train without locks.
//! - [`add_to_mean`]: the optimizer state that belongs to w̃ when training pauses.
//! - [`output_model`]: the model that a pause leaves on the servers.
//!
//! Rows are updated as in `async`: the [`Dispatcher`](crate::gba::Dispatcher) hands out batches,
//! and a [`GradientServer`](crate::gba::GradientServer) applies each gradient alone (§3.2,
//! Hogwild).
//!
//! Differences from the paper:
//!
//! 1. By default a dense worker has one training thread, which computes a batch with several
//!    threads. The thread takes the snapshot for an exchange, and applies the reply, between two
//!    batches. It never waits for the network in between. With `threads`, several threads train
//!    one replica, as in the paper (§3.2, Hogwild). Exchanges then read and move it meanwhile.
//! 2. By default the trained model is w̃, and not the replica of the first worker (§4, experimental
//!    setup). The copy has seen the replicas of all workers, and the death of no worker changes
//!    it. `outputModel` chooses the first worker's replica, or the mean of all.
//! 3. When training pauses, every worker makes one more exchange. So w̃ has seen every batch.
//! 4. In `ma` and `bmuf`, the parameter servers form the mean, and not an AllReduce among the
//!    workers. A round of the mean waits for a worker for a bounded time only. w_global is on the
//!    servers once, and not on each worker.
//! 5. An exchange may move one fragment of each partition only. With Nesterov's block momentum,
//!    this is the method of Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512).

mod bmuf;
mod difference;
mod elastic;
mod fragments;
mod hogwild;
mod ma;
mod output;
mod rounds;
mod sync;

use std::num::NonZeroU32;

use rectrain_kinds::{OutputModel, ShadowAlgorithm, WirePrecision};
use serde::{Deserialize, Serialize};

pub use bmuf::BlockUpdate;
pub use difference::{receive_difference, send_difference};
pub use elastic::{add_to_mean, interpolate};
pub use fragments::{Fragments, Part};
pub use hogwild::{Block, Cell, SharedReplica};
pub use ma::average;
pub use output::output_model;
pub use rounds::{Joined, Rounds};
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
    /// η of `bmuf`, from 0.001 to 2.
    pub eta: f32,
    /// The block momentum of `bmuf`, from 0 to 0.99.
    pub momentum: f32,
    /// Whether the momentum of `bmuf` is Nesterov's.
    pub nesterov: bool,
    /// The fragments of each server's partition. An exchange moves one of them.
    pub fragments: Fragments,
    /// How values travel in an exchange.
    pub wire_precision: WirePrecision,
    /// The threads of a dense worker that train its replica, from 1 to 64.
    #[serde(default = "one_thread")]
    pub threads: NonZeroU32,
    /// The model that training results in.
    #[serde(default)]
    pub output_model: OutputModel,
}

const fn one_thread() -> NonZeroU32 {
    NonZeroU32::MIN
}

impl Default for Shadow {
    /// Elastic averaging in the background, with α = 0.5.
    fn default() -> Self {
        Self {
            algorithm: ShadowAlgorithm::Easgd,
            alpha: 0.5,
            every_steps: None,
            eta: 0.5,
            momentum: 0.0,
            nesterov: false,
            fragments: Fragments::default(),
            wire_precision: WirePrecision::Fp32,
            threads: one_thread(),
            output_model: OutputModel::Copy,
        }
    }
}

/// How the copy follows the mean of the replicas.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Average {
    /// The copy becomes the mean (algorithm 3).
    Mean,
    /// The copy makes a step towards the mean (algorithm 4).
    Block(BlockUpdate),
}

impl Shadow {
    /// How the copy follows the mean of the replicas. `None` in `easgd`, which forms no mean.
    #[must_use]
    pub const fn average(&self) -> Option<Average> {
        let Self { eta, momentum, nesterov, .. } = *self;
        match self.algorithm {
            ShadowAlgorithm::Easgd => None,
            ShadowAlgorithm::Ma => Some(Average::Mean),
            ShadowAlgorithm::Bmuf => Some(Average::Block(BlockUpdate { eta, momentum, nesterov })),
        }
    }
}

impl Average {
    /// Moves `global`, the copy, by the replicas, which are in the order of their ranks. `velocity`
    /// is the momentum's state: as long as `global`, and 0 before the first round.
    pub fn apply<'a>(&self, global: &mut [f32], velocity: &mut [f32], replicas: impl IntoIterator<Item = &'a [f32]>) {
        match self {
            Self::Mean => average(global, replicas),
            Self::Block(update) => {
                let mut mean = global.to_vec();
                average(&mut mean, replicas);
                update.apply(global, velocity, &mean);
            }
        }
    }
}
