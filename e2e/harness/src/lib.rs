//! Common ground of the end-to-end trials: it runs cargo and `rectrain`, reads their events and
//! metrics, drives a cluster with kubectl, and waits for states. It contains no trial and starts no
//! cluster.

pub mod arguments;
pub mod cargo;
pub mod command;
mod error;
pub mod events;
pub mod files;
pub mod http;
pub mod jobs;
pub mod kafka;
pub mod kubectl;
pub mod manifests;
pub mod markdown;
pub mod notebook;
pub mod pace;
pub mod processes;
pub mod rectrain;
pub mod run_processes;
pub mod serving;
pub mod skips;
pub mod statistics;
pub mod times;
pub mod waiting;
pub mod watched;
pub mod workspace;

pub use error::{AnyError, HarnessError, not_yet};

/// Prints a line for the person who runs the command. Standard output is for results.
pub fn say(line: impl std::fmt::Display) {
    eprintln!("xtask: {line}");
}
