//! Training with a barrier in every step: `sync` and `hybrid` (Persia §3).
//!
//! - [`BarrierCoordinator`]: which global batch is which step, and which steps are applied.
//! - [`StepGate`]: a parameter server's half: when a look-up may be answered, when a step's gradients are
//!   applied, and in which order.
//! - [`StepWindow`]: how far a dense worker fetches and pushes ahead.
//! - [`sum_by_key`]: how the ranks' gradients of one step become one update.
//! - [`RingAllReduce`]: how dense workers sum their flat gradient buffers.

mod coordinator;
mod ring;
mod server;
mod sparse_sum;
mod worker;

pub use coordinator::{BarrierCoordinator, BarrierError};
pub use ring::{RingAllReduce, RingError, RingSend};
pub use server::{GateError, StepGate};
pub use sparse_sum::{SparseGradients, sum_by_key};
pub use worker::StepWindow;
