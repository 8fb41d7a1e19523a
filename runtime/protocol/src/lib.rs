//! The protocol that all roles of a job share:
//!
//! - the plan that every member computes from the manifest,
//! - the messages between members, and how members find and call each other,
//! - errors, events and metrics.
//!
//! Start reading at [`plan::JobPlan`], then [`message`]. The crates of the roles build on this one,
//! and none of them imports another. `rectrain-member` hosts them.

pub mod batch;
pub mod blocking;
pub mod compression;
pub mod coordinator_channel;
pub mod deadline;
pub mod dense_part;
pub mod embedding_workers;
pub mod error;
pub mod events;
pub mod examples;
pub mod failure;
pub mod key_set;
pub mod layout;
pub mod limits;
pub mod long_wait;
pub mod message;
pub mod metrics;
pub mod outcome;
pub mod placement;
pub mod plan;
pub mod readiness;
pub mod remember;
pub mod round_robin;
pub mod table_budget;
pub mod ticket;
pub mod token_counts;
pub mod unseen;
pub mod watchdog;
pub mod window_part;

pub use error::RoleError;
pub use message::kind_name;
pub use placement::connect;
pub use rectrain_kinds::Role;
