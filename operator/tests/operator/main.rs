//! The operator in a small cluster in memory, its decisions under random histories, and its chart.
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod automatic;
mod chart;
mod contested;
mod dashboards;
mod endings;
mod life;
mod manifests;
mod members;
mod nodes;
mod phase;
mod server;
mod shortage;
mod switch;
mod trouble;
mod world;
