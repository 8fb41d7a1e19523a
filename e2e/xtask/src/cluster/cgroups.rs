//! The control groups of the cluster: one for each node below one of the cluster's own, in every hierarchy of the machine, so that
//! taking them away is the removal of one tree.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::process::eventually;

const ROOT: &str = "/sys/fs/cgroup";
/// The cluster's own group.
const CLUSTER: &str = "rectrain-e2e";

/// The group of a node, as the kubelet names it.
pub(super) fn of_node(node: &str) -> String {
    format!("/{CLUSTER}/{node}")
}

/// Whether groups can be made here.
pub(super) fn probe() -> Result<(), String> {
    const PROBE: &str = "probe";
    create(PROBE)?;
    remove_node(PROBE)?;
    for hierarchy in hierarchies()? {
        // Where a cluster runs it is not empty, and stays.
        let _removed = std::fs::remove_dir(hierarchy.join(CLUSTER));
    }
    Ok(())
}

/// Makes a node's group in every hierarchy.
pub(super) fn create(node: &str) -> Result<(), String> {
    for hierarchy in hierarchies()? {
        let cluster = hierarchy.join(CLUSTER);
        for (parent, group) in [(&hierarchy, cluster.clone()), (&cluster, cluster.join(node))] {
            make(parent, &group)
                .map_err(|error| format!("cannot make the control group {}: {error}", group.display()))?;
        }
    }
    Ok(())
}

fn make(parent: &Path, group: &Path) -> std::io::Result<()> {
    if !group.exists() {
        std::fs::create_dir(group)?;
    }
    if version_2() {
        for controller in std::fs::read_to_string(parent.join("cgroup.controllers"))?.split_whitespace() {
            // Some cannot be handed down everywhere; the kubelet says so if it needs one.
            let _handed_down = std::fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
        }
        return Ok(());
    }
    // A new group of this controller has no processors and no memory until it is given some.
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if group.join(file).exists() {
            std::fs::write(group.join(file), std::fs::read(parent.join(file))?)?;
        }
    }
    Ok(())
}

fn version_2() -> bool {
    Path::new(ROOT).join("cgroup.controllers").exists()
}

/// Removes the cluster's groups once their processes have ended.
pub(super) fn remove() -> Result<(), String> {
    remove_everywhere(Path::new(CLUSTER))
}

/// Removes a node's groups once their processes have ended.
pub(super) fn remove_node(node: &str) -> Result<(), String> {
    remove_everywhere(&Path::new(CLUSTER).join(node))
}

fn remove_everywhere(name: &Path) -> Result<(), String> {
    for hierarchy in hierarchies()? {
        let group = hierarchy.join(name);
        let what = format!("the removal of the control group {}", group.display());
        eventually(Duration::from_secs(20), &what, || remove_tree(&group).map_err(|error| error.to_string()))?;
    }
    Ok(())
}

fn remove_tree(group: &Path) -> std::io::Result<()> {
    if !group.exists() {
        return Ok(());
    }
    for entry in std::fs::read_dir(group)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    std::fs::remove_dir(group)
}

/// The one hierarchy of version 2, or those of version 1 (some have two names).
fn hierarchies() -> Result<BTreeSet<PathBuf>, String> {
    if Path::new(ROOT).join("cgroup.controllers").exists() {
        return Ok(BTreeSet::from([PathBuf::from(ROOT)]));
    }
    let entries = std::fs::read_dir(ROOT).map_err(|error| format!("cannot read {ROOT}: {error}"))?;
    let folders = entries.flatten().filter_map(|entry| entry.path().canonicalize().ok());
    Ok(folders.filter(|folder| folder.is_dir() && folder.join("cgroup.procs").exists()).collect())
}
