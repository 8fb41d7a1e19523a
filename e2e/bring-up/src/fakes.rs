//! Nodes that KWOK fakes: real objects and real controllers, without containers.

use std::process::Stdio;

use rectrain_harness::command::{Running, command};
use rectrain_harness::files::log_file;
use serde_json::{Value, json};

use crate::BringUpError;
use crate::paths::{Paths, sources};
use crate::tools::{self, KWOK, sources_of};

/// The annotation that marks a faked node, and the taint that keeps other pods away from it.
pub const FAKE: &str = "kwok.x-k8s.io/node";
/// The addresses of faked pods, which no machine of the cluster has.
const ADDRESSES: &str = "198.19.0.1/16";
/// The behaviour of faked nodes and pods, from KWOK's module.
const STAGES: [&str; 3] = ["node/fast/node-initialize.yaml", "pod/fast/pod-ready.yaml", "pod/fast/pod-delete.yaml"];

/// Builds and starts KWOK for this machine's cluster; it ends with the returned value.
///
/// # Errors
/// See [`tools::build`] and [`Running::start`].
pub fn start(paths: &Paths) -> Result<Running, BringUpError> {
    tools::build(paths, &[KWOK])?;
    // The kernel ends KWOK if this process is killed.
    let mut kwok = command("setpriv", ["--pdeathsig=KILL", "--"]);
    kwok.arg(paths.program("kwok")).arg("--manage-all-nodes=false");
    let stages = sources_of(KWOK)?.join("kustomize/stage");
    kwok.args(STAGES.map(|stage| format!("--config={}", stages.join(stage).display())));
    kwok.arg(format!("--config={}", sources().join("config/kwok-heartbeat.yaml").display()));
    kwok.arg(format!("--kubeconfig={}", paths.kubeconfig().display()));
    kwok.arg(format!("--manage-nodes-with-annotation-selector={FAKE}=fake"));
    kwok.arg(format!("--cidr={ADDRESSES}"));
    kwok.arg("--node-lease-duration-seconds=0");
    kwok.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log_file(&paths.log("kwok"))?);
    Ok(Running::start(&mut kwok)?)
}

/// A node with room for every pod of a trial. Only pods that tolerate [`FAKE`] are scheduled on it.
#[must_use]
pub fn node(name: &str) -> Value {
    let room = json!({"cpu": "256", "memory": "2Ti", "pods": "1000", "ephemeral-storage": "2Ti"});
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {FAKE: "fake"},
            "labels": {"type": "fake", "kubernetes.io/hostname": name},
        },
        "spec": {"taints": [{"key": FAKE, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    })
}

/// The part of a pod template that schedules pods on faked nodes.
#[must_use]
pub fn pod_template() -> Value {
    json!({
        "nodeSelector": {"type": "fake"},
        "tolerations": [{"key": FAKE, "operator": "Exists"}],
    })
}
