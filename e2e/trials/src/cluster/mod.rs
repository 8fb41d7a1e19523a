//! The trials in a Kubernetes cluster, with the real images and the real chart.

pub mod chaos;
pub mod comes_and_goes;
pub mod demo;
pub mod operate;
pub mod smoke;
mod steps;
pub mod support;
