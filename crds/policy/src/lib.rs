//! Decisions about a running job: how many replicas its roles should have, how much memory its parameter servers, and in which
//! training mode it should go on. Pure functions of a [`Policy`], what was measured ([`Observations`], which carry the time) and a
//! bounded [`History`]: no clock, no network, no Kubernetes, so that any recorded history can be repeated ([`replay`]). The operator
//! decides with it for jobs in a cluster.
//!
//! A look at a job is three steps, which [`History::advance`] takes at once:
//!
//! 1. [`History::observe`] takes the measurements into the windows that decisions are made over.
//! 2. [`decide`] gives one [`Decision`] a subject, each with the reason in a sentence.
//! 3. [`History::record`] remembers what was decided, which is what cool-downs and limits count from.
//!
//! Carrying a decision out is the caller's. What is decided from what, with all formulas: `docs/operations/autoscaling.md`.

mod decide;
mod decision;
mod history;
mod mode;
mod observations;
mod policy;
mod predict;
mod replay;
mod replicas;

pub use decide::decide;
pub use decision::{Action, Decision, Subject};
pub use history::History;
pub use observations::{
    ClusterLoad, EmbeddingWorkerLoad, ObservationError, Observations, PsLoad, ReplicaCount, Replicas, TrainingMode,
    Worker, with_idle,
};
pub use policy::{
    DenseWorkerPolicy, EmbeddingWorkerPolicy, ModePolicy, Policy, PolicyError, PsPolicy, ReplicaBounds, ScalingPolicy,
};
pub use predict::{Prediction, predict};
pub use replay::{Record, Replay, ReplayCause, ReplayError, Replayed, replay};
pub use replicas::after_a_kill;
