//! Nodes that lose their power.

use std::time::{Duration, Instant};

use rectrain_bring_up::{stop_node, up};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};

use crate::TrialError;
use crate::cluster::support::TestCluster;

/// How long the API server may take to notice the loss of a node.
const NOTICED: Duration = Duration::from_secs(180);
/// The taint with which an administrator declares that a node does not come back. The controllers
/// then delete its pods at once.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute";

/// Runs `meanwhile` while a node and all its pods are without power. Then the node returns, empty.
pub(crate) fn without_power<T>(
    cluster: &TestCluster,
    node: &str,
    meanwhile: impl FnOnce() -> Result<T, TrialError>,
) -> Result<T, TrialError> {
    stop_node(&cluster.paths, node)?;
    let done = until_not_ready(cluster, node).map_err(TrialError::from).and_then(|()| meanwhile());
    up(&cluster.paths)?;
    done
}

/// Like [`without_power`], with the taint of an administrator.
pub(crate) fn out_of_service<T>(
    cluster: &TestCluster,
    node: &str,
    meanwhile: impl FnOnce() -> Result<T, TrialError>,
) -> Result<T, TrialError> {
    let taint = |change: &str| cluster.jobs.within(&["taint", "node", node, &format!("{OUT_OF_SERVICE}{change}")]);
    let done = without_power(cluster, node, || {
        taint("")?;
        meanwhile()
    });
    let removed = taint("-");
    let done = done?;
    removed?;
    Ok(done)
}

fn until_not_ready(cluster: &TestCluster, node: &str) -> Result<(), HarnessError> {
    let started = Instant::now();
    eventually(NOTICED, &format!("the loss of {node}"), || {
        let condition = r#"--output=jsonpath={.status.conditions[?(@.type=="Ready")].status}"#;
        match cluster.jobs.within(&["get", "node", node, condition])?.as_str() {
            "True" => Err(not_yet("it is ready")),
            _ => Ok(()),
        }
    })?;
    println!("{node} was not ready after {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}
