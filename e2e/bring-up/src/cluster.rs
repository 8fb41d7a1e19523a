//! The running cluster of this machine, found by its processes.

use crate::namespaces::Namespaces;
use crate::network::{NODES, Node};
use crate::paths::Paths;

/// The name of the control plane's namespaces.
pub(crate) const CONTROL_PLANE_NAME: &str = "control-plane";

/// A cluster that exists, whether or not all of its components run.
#[derive(Debug)]
pub struct Cluster {
    pub(crate) control_plane: Namespaces,
    pub(crate) nodes: Vec<(&'static Node, Namespaces)>,
}

/// The cluster of this machine, if it exists.
#[must_use]
pub fn find(paths: &Paths) -> Option<Cluster> {
    let control_plane = Namespaces::find(paths, CONTROL_PLANE_NAME)?;
    let nodes = NODES.iter().filter_map(|node| Some((node, Namespaces::find(paths, node.name)?)));
    Some(Cluster { control_plane, nodes: nodes.collect() })
}
