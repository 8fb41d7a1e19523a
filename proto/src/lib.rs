//! The messages of Rectrain: between roles (`roles.proto`), between a job and its observers
//! (`control.proto`), and between the inference server and its clients (`open_inference_v2.proto`).
//! Generated types and names only; no behaviour lives here.

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

/// The Open Inference Protocol v2.
pub mod inference {
    #![allow(
        missing_docs,
        unreachable_pub,
        unused_qualifications,
        clippy::all,
        clippy::unwrap_used,
        reason = "generated code"
    )]
    tonic::include_proto!("inference");
}
