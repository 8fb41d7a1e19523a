//! The end-to-end trials. Each module at the top level is one `cargo xtask` command, and `cluster`
//! has the trials in a Kubernetes cluster. No trial uses another one: common code is in
//! `rectrain-harness`, and for the cluster in `cluster::support`.

pub mod chaos;
pub mod cluster;
pub mod continual;
pub mod des;
mod error;
pub mod freshness;
pub mod gpu;
pub mod kraken;
pub mod look_ahead;
pub mod migration;
pub mod movielens;
pub mod page;
pub mod peers;
pub mod placement;
pub mod quality;
pub mod serve_soak;
pub mod shadow;
pub mod stragglers;
pub mod stream;
pub mod suite;
pub mod workers;

pub use error::TrialError;
