//! The members of a training job:
//!
//! - [`member`]: a process or a task that joins a coordinator and does the work of a role,
//! - [`local`]: a whole job in one process,
//! - [`http`]: the HTTP server of a process.
//!
//! Start reading at [`member::Member`]. Each role has a crate of its own. In the order of a batch,
//! these are `rectrain-loader`, `rectrain-embedding-worker`, `rectrain-parameter-server` and
//! `rectrain-dense-worker`. `rectrain-coordinator` leads them, and all use `rectrain-protocol`.

pub mod http;
pub mod local;
pub mod member;
