//! Training with a barrier in every step: `sync` and `hybrid` (Persia §3).
//!
//! - [`BarrierCoordinator`]: assigns the global batches to steps, and tracks the steps that are
//!   applied.
//! - [`StepGate`]: a parameter server's half. It decides when to answer a look-up, and when and in
//!   which order to apply a step's gradients.
//! - [`LookAhead`]: a parameter server's half in `sync`. It knows the keys of coming steps.
//! - [`StepWindow`]: how far a dense worker fetches and pushes ahead.
//! - [`sum_by_key`]: how the ranks' gradients of one step become one update.
//! - [`RingAllReduce`]: how dense workers sum their flat gradient buffers.
//! - [`pulled`]: the halves for a job in which free dense workers pull the pieces of a step.

mod coordinator;
mod look_ahead;
pub mod pulled;
mod ring;
mod server;
mod sparse_sum;
mod worker;

pub use coordinator::{BarrierCoordinator, BarrierError};
pub use look_ahead::LookAhead;
pub use ring::{RingAllReduce, RingError, RingSend};
pub use server::{GateError, StepGate};
pub use sparse_sum::{SparseGradients, sum_by_key};
pub use worker::StepWindow;
