//! The parts of `spec`, one file per concern. Plain data. The meaning of a value is in its doc
//! comment, which becomes `kubectl explain` and the reference. Contradictions are in its CEL rules,
//! and defaults in [`crate::ResolvedJob`].

// kube's derive repeats each struct, with `pub`, inside a function.
#![allow(unreachable_pub)]

mod autoscaling;
mod data;
mod features;
mod follow;
mod memory;
mod model;
mod operation;
mod quality;
mod roles;
mod serving;
mod stream;
mod training;

pub use autoscaling::*;
pub use data::*;
pub use features::*;
pub use follow::*;
pub use memory::*;
pub use model::*;
pub use operation::*;
pub use quality::*;
pub use roles::*;
pub use serving::*;
pub use stream::*;
pub use training::*;
