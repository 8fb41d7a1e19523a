//! The messages of Rectrain: what roles say to one another (`roles.proto`) and how a job is followed from outside
//! (`control.proto`). Generated types only; no behaviour lives here.

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
