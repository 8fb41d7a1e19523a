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

/// Nodes that have processors of their own, as machines have; until it is dropped.
pub(super) struct OwnProcessors {
    nodes: Vec<String>,
    all: Vec<usize>,
}

impl OwnProcessors {
    /// Shares this machine's processors out among the nodes; those that remain are nobody's.
    pub(super) fn give(nodes: &[String]) -> Result<Self, String> {
        let root = hierarchies()?.into_iter().map(|hierarchy| effective_cpus(&hierarchy)).find(|file| file.exists());
        let root = root.ok_or("control groups here have no cpuset controller")?;
        let text = std::fs::read_to_string(&root).map_err(|error| format!("{}: {error}", root.display()))?;
        let all = processors(&text).ok_or_else(|| format!("{}: {text:?} is no list of processors", root.display()))?;
        let each = all.len() / nodes.len().max(1);
        if each == 0 {
            return Err(format!("{} nodes and {} processors: each node needs one of its own", nodes.len(), all.len()));
        }
        let given = Self { nodes: nodes.to_vec(), all };
        for (node, own) in nodes.iter().zip(given.all.chunks(each)) {
            confine(node, own)?;
        }
        Ok(given)
    }
}

impl Drop for OwnProcessors {
    fn drop(&mut self) {
        for node in &self.nodes {
            if let Err(error) = confine(node, &self.all) {
                eprintln!("xtask: {node} keeps the processors that it was given: {error}");
            }
        }
    }
}

/// Lets what runs in a node's group, and what will, run on these processors only.
fn confine(node: &str, processors: &[usize]) -> Result<(), String> {
    let list = processors.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    for hierarchy in hierarchies()? {
        let group = hierarchy.join(CLUSTER).join(node);
        if group.join("cpuset.cpus").exists() {
            confine_tree(&group, &list).map_err(|error| format!("{}: {error}", group.display()))?;
        }
    }
    Ok(())
}

/// A group has no processors that the one above has not: the one above first where there are more, last where there are fewer. Version 2
/// looks after that itself.
fn confine_tree(group: &Path, list: &str) -> std::io::Result<()> {
    let file = group.join("cpuset.cpus");
    let is_wider = std::fs::write(&file, list).is_ok();
    if version_2() {
        return if is_wider { Ok(()) } else { std::fs::write(&file, list) };
    }
    for entry in std::fs::read_dir(group)? {
        let path = entry?.path();
        // A container that ends takes its group with it.
        if path.is_dir()
            && let Err(error) = confine_tree(&path, list)
            && path.exists()
        {
            return Err(error);
        }
    }
    std::fs::write(&file, list)
}

fn effective_cpus(hierarchy: &Path) -> PathBuf {
    hierarchy.join(if version_2() { "cpuset.cpus.effective" } else { "cpuset.effective_cpus" })
}

/// The processors of a list as the kernel writes it: `0-3,8`.
fn processors(list: &str) -> Option<Vec<usize>> {
    let ranges = list.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    Some(ranges.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
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

#[cfg(test)]
mod tests {
    use super::processors;

    #[test]
    fn lists_of_processors_are_read_as_the_kernel_writes_them() {
        assert_eq!(processors("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(processors("1"), Some(vec![1]));
        assert_eq!(processors(""), None);
        assert_eq!(processors("0-"), None);
    }
}
