//! The cluster's addresses. All lie in 198.18.0.0/15, which RFC 2544 reserves for tests and which
//! no router forwards. The machine reaches nodes, pods and services over one virtual cable; no
//! packet leaves the machine.

/// The machine's end of the cable.
pub(crate) const LINK: &str = "rectrain-e2e";
/// The machine's own address in the cluster's network.
pub const MACHINE: &str = "198.18.0.2";
/// The address of the API server and of CoreDNS.
pub(crate) const CONTROL_PLANE: &str = "198.18.0.1";
/// The range of ClusterIPs.
pub(crate) const SERVICES: &str = "198.19.0.0/16";
/// The service `kubernetes`, which is the first ClusterIP.
pub(crate) const KUBERNETES: &str = "198.19.0.1";
/// The pods of all nodes.
pub(crate) const PODS: &str = "198.18.128.0/17";

/// A node.
#[derive(Debug)]
pub struct Node {
    /// Its name in Kubernetes.
    pub name: &'static str,
    /// Its address.
    pub address: &'static str,
    /// The address range of its pods.
    pub pods: &'static str,
}

/// The nodes.
pub const NODES: [Node; 2] = [
    Node { name: "node0", address: "198.18.0.10", pods: "198.18.128.0/24" },
    Node { name: "node1", address: "198.18.0.11", pods: "198.18.129.0/24" },
];

/// Address ranges and the node that routes them: its pods, and for the first node all services,
/// which any node can forward.
pub(crate) fn routes() -> impl Iterator<Item = (&'static str, &'static str)> {
    NODES.iter().map(|node| (node.pods, node.address)).chain([(SERVICES, NODES[0].address)])
}
