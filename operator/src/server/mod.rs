//! The reconciler of `RecModelServer`: servers that each hold a whole model, or read its rows from
//! [`shards`].
//!
//! One reconcile has three steps. It observes the object, its job, its objects and its pods
//! ([`observe`]). [`decide`](decide::decide) computes the status and the objects ([`build`]). Then
//! the status is written, and the objects that differ are applied ([`act`]). The status comes
//! first, so an operator that is killed afterwards continues from it.

pub mod act;
pub mod build;
pub mod conditions;
pub mod controller;
pub mod decide;
pub mod model;
pub mod observe;
pub mod shards;
