//! The crate's guarantees, by subject.
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod day;
mod decisions;
mod loaders;
mod properties;
mod replay;
mod throughput;
mod world;
