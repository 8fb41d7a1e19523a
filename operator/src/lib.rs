//! The operator: it makes the pods of a `RecTrainingJob` and everything around them, follows the job through its coordinator, and
//! says in the job's status how it stands. It knows the manifest (`rectrain-crds`) and the coordinator's public face
//! (`rectrain-proto`), and nothing of how training works.
//!
//! The path of one reconcile, in [`reconcile`]:
//!
//! 1. [`reconcile::dereference`] reads: the objects that belong to the job, its pods, its coordinator's report. The job is the watch's, unless
//!    that has another state of it than the operator last read or wrote. A coordinator that takes long puts the job aside ([`questions`]).
//! 2. [`reconcile::validate`] (pure): the manifest with every default filled in, or what is wrong with it.
//!    What is decided automatically ([`automatic`]) is read off the metrics of its processes ([`measure`]) as well.
//! 3. [`phase::decide`] (pure): the job's new status, and whether its pods should be there. Where the training mode is to be
//!    switched the coordinator is asked, and decided again with its answer.
//! 4. The status is written, before anything is done about it: whoever is killed in between is taken over where it was.
//! 5. [`reconcile::build`] (pure): the objects that should be there.
//!    The coordinator is asked for another number of a role's members, if there is to be one ([`members`]).
//! 6. [`reconcile::apply`] and [`reconcile::prune`]: server-side apply of what differs, side by side and what has pods last; deletion of
//!    what is not wanted any more.
//!
//! Everything is computed from what is there now; nothing is counted from events that could be missed.

pub mod admin;
pub mod automatic;
pub mod cache;
pub mod certificates;
pub mod config;
pub mod controller;
pub mod coordinator;
pub mod events;
pub mod failure;
pub mod leader;
pub mod measure;
pub mod members;
pub mod metrics;
pub mod names;
pub mod nodes;
pub mod notice;
pub mod phase;
pub mod places;
pub mod pods;
mod quantity;
pub mod questions;
pub mod reconcile;
pub mod switch;
pub mod traces;
