//! Automatic decisions about a running job: how many replicas its roles should have, how much
//! memory its parameter servers, and which training mode it should use.
//!
//! They are pure functions of a [`Policy`], measurements ([`Observations`], which carry the time)
//! and a bounded [`History`]. There is no clock, no network and no Kubernetes, so any recorded
//! history can be repeated ([`replay`]). The operator decides with them for jobs in a cluster, and
//! the coordinator for the training mode of `rectrain run`.
//!
//! A look at a job has three steps, which [`History::advance`] takes at once:
//!
//! 1. [`History::observe`] adds the measurements to the windows that decisions are made over.
//! 2. [`decide`] returns one [`Decision`] per subject, each with its reason in a sentence.
//! 3. [`History::record`] remembers the decisions; cool-downs and limits count from them.
//!
//! The caller carries the decisions out. `docs/operations/autoscaling.md` has all formulas.

mod auto_mode;
mod correction;
mod decide;
mod decision;
mod history;
mod loader_need;
mod loaders;
mod look;
mod memory;
mod mode;
mod needs;
mod observations;
mod observe;
mod policy;
mod predict;
mod pulled;
mod replay;
mod replicas;
mod trial;
mod verdict;
mod window;

pub use auto_mode::{AutoMode, NotAutomatic};
pub use decide::decide;
pub use decision::{Action, Decision, Subject};
pub use history::History;
pub use loader_need::LoaderUse;
pub use loaders::LoaderLoad;
pub use memory::{Kill, after_a_kill};
pub use observations::{
    ClusterLoad, EmbeddingWorkerLoad, ObservationError, Observations, PsLoad, ReplicaCount, Replicas, Worker, with_idle,
};
pub use policy::{
    DenseWorkerPolicy, EmbeddingWorkerPolicy, LoaderPolicy, ModePolicy, Policy, PolicyError, PsPolicy, ReplicaBounds,
    ScalingPolicy,
};
pub use predict::{Prediction, predict};
pub use replay::{Record, Replay, ReplayCause, ReplayError, Replayed, replay};
pub use verdict::Verdict;
