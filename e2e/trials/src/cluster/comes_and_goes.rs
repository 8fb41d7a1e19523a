//! `cargo xtask cluster test`: a cluster comes up, has its nodes, and goes without a trace.

use rectrain_bring_up::network::NODES;
use rectrain_bring_up::tools::{KUBE, build};
use rectrain_bring_up::{Paths, available, down, find, foreign_kubeconfig, kubectl, nothing_is_left, own_nodes, up};
use rectrain_harness::command::visible;
use rectrain_harness::{say, skips};

use crate::TrialError;
use crate::error::unmet;

/// Runs the trial. A cluster that was up before stays up.
///
/// # Errors
/// The cluster does not come up with all nodes, or leaves something behind.
pub fn run(paths: &Paths) -> Result<(), TrialError> {
    if let Err(reason) = available(paths) {
        return Ok(skips::skip("the test of the cluster", reason)?);
    }
    if foreign_kubeconfig(paths).is_some() {
        build(paths, &[KUBE])?;
        return Ok(visible(kubectl(paths)?.command().args(["get", "nodes"]))?);
    }
    let was_up = find(paths).is_some();
    up(paths)?;
    let (ready, table) = own_nodes(paths)?;
    if ready.len() != NODES.len() {
        return Err(unmet(format!("{} ready nodes", NODES.len()), format!("{}:\n{table}", ready.len())));
    }
    if was_up {
        return Ok(());
    }
    down(paths)?;
    nothing_is_left(paths)?;
    say(format!("{} nodes were ready, and nothing is left of them", ready.len()));
    Ok(())
}
