//! The cluster's addresses. All lie in 198.18.0.0/15, which RFC 2544 sets aside for tests and nobody routes; the machine reaches
//! every one of them (nodes, pods, services) over one virtual cable, and none of their packets leaves the machine.

/// The machine's end of the cable.
pub(super) const LINK: &str = "rectrain-e2e";
/// The machine itself, as the cluster sees it.
pub(super) const MACHINE: &str = "198.18.0.2";
/// The API server, and CoreDNS.
pub(super) const CONTROL_PLANE: &str = "198.18.0.1";
/// ClusterIPs.
pub(super) const SERVICES: &str = "198.19.0.0/16";
/// The service `kubernetes`: the first of them.
pub(super) const KUBERNETES: &str = "198.19.0.1";
/// Pods of all nodes.
pub(super) const PODS: &str = "198.18.128.0/17";

/// A node.
#[derive(Debug)]
pub(super) struct Node {
    /// As `kubectl get nodes` shows it.
    pub(super) name: &'static str,
    /// Its address.
    pub(super) address: &'static str,
    /// The addresses of its pods.
    pub(super) pods: &'static str,
}

/// The nodes.
pub(super) const NODES: [Node; 2] = [
    Node { name: "node0", address: "198.18.0.10", pods: "198.18.128.0/24" },
    Node { name: "node1", address: "198.18.0.11", pods: "198.18.129.0/24" },
];

/// Which addresses are behind which node: its pods, and (as every node can forward to them) the services behind the first.
pub(super) fn routes() -> impl Iterator<Item = (&'static str, &'static str)> {
    NODES.iter().map(|node| (node.pods, node.address)).chain([(SERVICES, NODES[0].address)])
}
