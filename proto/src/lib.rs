//! The messages of Rectrain: between roles (`roles.proto`), and between a job and its observers
//! (`control.proto`). Generated types and names only; no behaviour lives here.

pub mod metric_names;
mod roles;

pub use roles::member_role;

/// Version 1 of the messages.
pub mod v1 {
    #![allow(
        missing_docs,
        unreachable_pub,
        unused_qualifications,
        clippy::all,
        clippy::unwrap_used,
        reason = "generated code"
    )]
    tonic::include_proto!("rectrain.v1");
}
