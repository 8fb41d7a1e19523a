//! The operator in a cluster that a test holds in its hand, its decisions under random histories, and its chart.
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod automatic;
mod chart;
mod dashboards;
mod life;
mod members;
mod nodes;
mod phase;
mod switch;
mod trouble;
mod world;
