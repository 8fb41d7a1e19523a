//! The server over HTTP and gRPC, with a model that tests can block. No test depends on a speed: a
//! test waits until the server has reached a state, and only then goes on.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod grpc;
mod host;
mod recorded;
mod rest;
mod tls;
