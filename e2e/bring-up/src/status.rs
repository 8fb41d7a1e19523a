//! The table that `cargo xtask cluster status` prints.

use rectrain_harness::command::output;
use rectrain_harness::processes::resident_bytes;

use crate::access::own_kubectl;
use crate::cluster::find;
use crate::namespaces::{Daemon, Namespaces};
use crate::paths::Paths;
use crate::{BringUpError, components};

/// Prints the components with their processes and memory, and the nodes.
///
/// # Errors
/// The API server does not answer.
pub fn status(paths: &Paths) -> Result<(), BringUpError> {
    let Some(cluster) = find(paths) else {
        println!("{}", BringUpError::NoCluster);
        return Ok(());
    };
    println!("{:<28} {:>9} {:>9}", "COMPONENT", "PROCESS", "MIB");
    let mut total = 0;
    for daemon in components::api(paths).into_iter().chain(components::controllers(paths)) {
        total += show(&cluster.control_plane, &daemon);
    }
    for (node, namespaces) in &cluster.nodes {
        for daemon in [components::containerd(paths, node)].into_iter().chain(components::node(paths, node)) {
            total += show(namespaces, &daemon);
        }
    }
    println!("{:<28} {:>9} {:>9}", "all", "", total >> 20);
    println!("{}", output(own_kubectl(paths).command().args(["get", "nodes", "--output", "wide"]))?);
    println!("export KUBECONFIG={}", paths.kubeconfig().display());
    Ok(())
}

/// Prints a component's line and returns its memory in bytes.
fn show(namespaces: &Namespaces, daemon: &Daemon) -> u64 {
    let process = namespaces.process_of(daemon);
    let bytes = process.and_then(resident_bytes).unwrap_or(0);
    let process = process.map_or("down".to_owned(), |process| process.to_string());
    println!("{:<28} {process:>9} {:>9}", daemon.name, bytes >> 20);
    bytes
}
