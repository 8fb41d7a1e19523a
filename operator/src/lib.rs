//! The operator: it creates the pods of a `RecTrainingJob` and everything around them, follows the
//! job through its coordinator, and reports its state in the job's status.
//!
//! It knows the manifest (`rectrain-crds`), the policy of automatic decisions (`rectrain-policy`)
//! and the coordinator's public interface (`rectrain-proto`). It knows nothing about the training
//! itself.
//!
//! [`reconcile`] has one reconcile in six steps: gather, decide, write, report, ask, act. The
//! modules it uses, from the inside out:
//!
//! - Pure: [`phase`] decides about the life of a job, with [`failure`], [`switch`], [`members`],
//!   [`path_in_use`], [`decisions`] and [`automatic`].
//! - Requests: [`coordinator_client`] and [`coordinator_poller`] to coordinators, [`scrape`] to the
//!   processes of a job, and [`nodes`] and [`events`] to the API server.
//! - Around it: [`controller`] watches and retries, [`leader`] elects an instance, [`api_server`]
//!   waits for a silent API server, and [`admin`] serves health, [`metrics`] and [`traces`].
//!
//! [`server`] has the reconciler of `RecModelServer`, the servers of a trained model. It shares the
//! application of objects, events and metrics with the reconciler of jobs.
//!
//! Every decision is computed from the present state. No event is counted that could be missed.

pub mod admin;
pub mod api_server;
pub mod attempt_signals;
pub mod automatic;
pub mod blocked;
pub mod budget;
pub mod cache;
pub mod certificates;
pub mod config;
pub mod contested;
pub mod controller;
pub mod coordinator_client;
pub mod coordinator_poller;
pub mod coordinator_view;
pub mod decisions;
mod digest;
pub mod events;
pub mod failure;
pub mod leader;
#[cfg(test)]
#[path = "../tests/operator/manifests.rs"]
mod manifests;
pub mod members;
pub mod metrics;
pub mod names;
pub mod nodes;
pub mod objects;
pub mod path_in_use;
pub mod permits;
pub mod phase;
pub mod pods;
mod quantity;
pub mod reconcile;
pub mod replace_slow;
pub mod scrape;
pub mod server;
pub mod switch;
mod text;
pub mod traces;
