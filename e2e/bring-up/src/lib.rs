//! A Kubernetes of two nodes on this machine, without a container engine and without a registry.
//! API server, scheduler, controller-manager, etcd, kubelets, kube-proxies, containerd and CoreDNS
//! run in namespaces of their own. [`down`] leaves nothing but the cache.
//!
//! **Contributors usually take [kind](https://kind.sigs.k8s.io) instead.** With Docker or Podman,
//! `kind create cluster` is quicker, and `cargo xtask cluster install|demo|operate` use the cluster
//! that KUBECONFIG names. They build the images and print the archives for `kind load
//! image-archive`.
//!
//! This crate exists for machines where no container engine may run, such as the container of a CI
//! job. It also gives the trials control that kind lacks: a node can lose its power, and nodes can
//! be confined to processors of their own. docs/development/cluster.md describes its use.

mod access;
pub mod cgroups;
mod cluster;
mod components;
mod error;
pub mod fakes;
pub mod images;
pub mod metrics_server;
mod namespaces;
pub mod network;
mod paths;
mod pki;
mod process;
pub mod prometheus;
mod status;
pub mod tools;
mod up;

pub use access::{foreign_kubeconfig, kubeconfig, kubectl};
pub use cluster::{Cluster, find};
pub use error::BringUpError;
pub use paths::{Paths, sources};
pub use status::status;
pub use up::{available, down, nothing_is_left, own_nodes, prefetch, programs, stop_node, up};
