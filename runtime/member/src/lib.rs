//! The members of a training job: one process, or one task, that joins a coordinator and does the work of
//! a role; a whole job in one process; and the pages that a process serves over HTTP.
//!
//! Start reading at [`member::Member`]. The roles are crates of their own, along the way of a batch:
//! `rectrain-loader`, `rectrain-embedding-worker`, `rectrain-parameter-server`,
//! `rectrain-dense-worker`; `rectrain-coordinator` leads them. All of them speak
//! `rectrain-protocol`.

pub mod http;
pub mod local;
pub mod member;
