//! The roles of a training job: coordinator, parameter server, embedding worker, dense worker and loader. Each decides with the
//! state machines of `rectrain-modes`, talks over `rectrain-wire`, and can live in one process with the others or alone.
//!
//! Start reading at [`plan::JobPlan`] (what every member knows), then [`member::Member`] (how each lives), then the roles along
//! the way of a batch: [`loader`], [`embedding_worker`], [`parameter_server`], [`dense_worker`]; [`coordinator`] leads them.

mod batch;
mod blocking;
mod compression;
pub mod computing;
pub mod coordinator;
mod coordinator_channel;
mod dense_worker;
mod embedding_worker;
mod embedding_workers;
mod error;
pub mod events;
mod finished;
pub mod http;
mod loader;
pub mod local;
pub mod member;
mod message;
pub mod metrics;
mod outcome;
mod parameter_server;
mod placement;
pub mod plan;
mod pooling;
pub mod takes_part;
mod ticket;
mod turns;

pub use error::RoleError;
pub use message::kind_name;
