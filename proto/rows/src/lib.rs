//! The messages between inference servers and prediction parameter servers. Generated types only;
//! no behaviour lives here. No role of a job knows them, so they are apart from `rectrain-proto`.

#![allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::unwrap_used,
    reason = "generated code"
)]

tonic::include_proto!("rectrain.rows.v1");
