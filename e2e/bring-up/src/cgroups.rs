//! The cluster's control groups: one group for the cluster and below it one for each node, in every
//! hierarchy of the machine. So `down` removes one tree per hierarchy.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rectrain_harness::say;
use rectrain_harness::waiting::eventually;

use crate::BringUpError;

const ROOT: &str = "/sys/fs/cgroup";
/// The cluster's own group.
const CLUSTER: &str = "rectrain-e2e";
/// The period of a limit. The kubelet may give its groups another one.
const PERIOD_MICROSECONDS: u32 = 100_000;
/// How long a group may keep its last process.
const REMOVAL: Duration = Duration::from_secs(20);

/// The group of a node, as the kubelet names it.
pub(crate) fn of_node(node: &str) -> String {
    format!("/{CLUSTER}/{node}")
}

/// Checks that this machine lets groups be made.
pub(crate) fn probe() -> Result<(), BringUpError> {
    const PROBE: &str = "probe";
    create(PROBE)?;
    remove_node(PROBE)?;
    for hierarchy in hierarchies()? {
        // The group of a running cluster is not empty, so it stays.
        let _removed = std::fs::remove_dir(hierarchy.join(CLUSTER));
    }
    Ok(())
}

/// Makes a node's group in every hierarchy.
pub(crate) fn create(node: &str) -> Result<(), BringUpError> {
    for hierarchy in hierarchies()? {
        let cluster = hierarchy.join(CLUSTER);
        for (parent, group) in [(&hierarchy, cluster.clone()), (&cluster, cluster.join(node))] {
            make(parent, &group).map_err(refused("make", &group))?;
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
            // Some controllers cannot be delegated here. The kubelet complains if it needs one of
            // them.
            let _delegated = std::fs::write(parent.join("cgroup.subtree_control"), format!("+{controller}"));
        }
        return Ok(());
    }
    // A new cpuset group has no processors and no memory nodes; it copies its parent's.
    for file in ["cpuset.cpus", "cpuset.mems"] {
        if group.join(file).exists() {
            std::fs::write(group.join(file), std::fs::read(parent.join(file))?)?;
        }
    }
    Ok(())
}

/// Turns a system error into [`BringUpError::ControlGroup`], for `map_err`.
fn refused(action: &'static str, group: &Path) -> impl FnOnce(std::io::Error) -> BringUpError {
    let group = group.to_owned();
    move |source| BringUpError::ControlGroup { action, group, source }
}

fn version_2() -> bool {
    Path::new(ROOT).join("cgroup.controllers").exists()
}

/// Gives each node processors of its own, as separate machines have, until this value is dropped.
#[derive(Debug)]
pub struct OwnProcessors {
    nodes: Vec<String>,
    all: Vec<usize>,
}

impl OwnProcessors {
    /// Divides this machine's processors equally among the nodes. A remainder stays unused.
    ///
    /// # Errors
    /// [`BringUpError::Processors`] without a cpuset controller, or with fewer processors than
    /// nodes.
    pub fn give(nodes: &[String]) -> Result<Self, BringUpError> {
        let root = hierarchies()?.into_iter().map(|hierarchy| effective_cpus(&hierarchy)).find(|file| file.exists());
        let root = root.ok_or_else(|| {
            BringUpError::Processors("the control groups of this machine have no cpuset controller".to_owned())
        })?;
        let text = std::fs::read_to_string(&root).map_err(refused("read the processors of", &root))?;
        let all = processors(&text).ok_or_else(|| {
            BringUpError::Processors(format!("{} contains {text:?}, and no list of processors", root.display()))
        })?;
        let each = all.len() / nodes.len().max(1);
        if each == 0 {
            let (nodes, processors) = (nodes.len(), all.len());
            return Err(BringUpError::Processors(format!("{nodes} nodes share {processors} processors")));
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
                say(format!("{node} stays confined to some processors: {error}"));
            }
        }
    }
}

/// Confines present and future processes of a node's group to these processors.
fn confine(node: &str, processors: &[usize]) -> Result<(), BringUpError> {
    let list = processors.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    for hierarchy in hierarchies()? {
        let group = hierarchy.join(CLUSTER).join(node);
        if group.join("cpuset.cpus").exists() {
            confine_tree(&group, &list).map_err(refused("set the processors of", &group))?;
        }
    }
    Ok(())
}

/// Sets the processors of a group and of all groups below it. In version 1 a group may only have
/// its parent's processors: the parent comes first when it gains some, and last when it loses some.
/// Version 2 enforces that itself.
fn confine_tree(group: &Path, list: &str) -> std::io::Result<()> {
    let file = group.join("cpuset.cpus");
    let is_wider = std::fs::write(&file, list).is_ok();
    if version_2() {
        return if is_wider { Ok(()) } else { std::fs::write(&file, list) };
    }
    for entry in std::fs::read_dir(group)? {
        let path = entry?.path();
        // The group of a container that has just ended is gone.
        if path.is_dir()
            && let Err(error) = confine_tree(&path, list)
            && path.exists()
        {
            return Err(error);
        }
    }
    std::fs::write(&file, list)
}

/// Limits a container to a part of a processor, as a full node would, until this value is dropped.
#[derive(Debug)]
pub struct LimitedProcessor {
    limit: PathBuf,
    /// The files of the former limit and their text, in the order in which they are restored.
    before: Vec<(PathBuf, String)>,
}

impl LimitedProcessor {
    /// Limits the control group of `process` to `percent` percent of one processor.
    ///
    /// # Errors
    /// - [`BringUpError::Processors`] if the group of the process is not known.
    /// - [`BringUpError::ControlGroup`] if its limit cannot be read or written.
    pub fn to(process: u32, percent: u32) -> Result<Self, BringUpError> {
        let list = PathBuf::from(format!("/proc/{process}/cgroup"));
        let groups = std::fs::read_to_string(&list).map_err(refused("read", &list))?;
        let limit = limit_of(&groups, version_2())
            .ok_or_else(|| BringUpError::Processors(format!("{} names no group with processors", list.display())))?;
        let files = limit_files(&limit, PERIOD_MICROSECONDS / 100 * percent, version_2());
        let read = |(file, _): &(PathBuf, String)| {
            let text = std::fs::read_to_string(file).map_err(refused("read the limit of", file))?;
            Ok((file.clone(), text))
        };
        // The files are restored in reverse order: the limit goes before its period changes.
        let before = files.iter().rev().map(read).collect::<Result<_, BringUpError>>()?;
        let limited = Self { limit, before };
        for (file, text) in files {
            std::fs::write(&file, text).map_err(refused("limit the processors of", &file))?;
        }
        Ok(limited)
    }

    /// The number of periods in which the limit has stopped the container so far. It does not grow
    /// if the container needs less than the limit, or has ended.
    ///
    /// # Errors
    /// - [`BringUpError::ControlGroup`] if the group is gone, as after the end of its container.
    /// - [`BringUpError::Processors`] if the kernel does not count the periods.
    pub fn throttled_periods(&self) -> Result<u64, BringUpError> {
        let file = self.limit.with_file_name("cpu.stat");
        let text = std::fs::read_to_string(&file).map_err(refused("read the throttling of", &file))?;
        throttled(&text).ok_or_else(|| BringUpError::Processors(format!("{} has no nr_throttled", file.display())))
    }
}

impl Drop for LimitedProcessor {
    fn drop(&mut self) {
        // The group is gone if its container has ended.
        for (file, text) in &self.before {
            if let Err(error) = std::fs::write(file, text.trim())
                && file.exists()
            {
                say(format!("{} stays limited: {error}", file.display()));
            }
        }
    }
}

/// The files that make a limit, and their text, in the order in which they are written. Version 1
/// keeps the period beside the quota.
fn limit_files(limit: &Path, quota: u32, version_2: bool) -> Vec<(PathBuf, String)> {
    if version_2 {
        return vec![(limit.to_owned(), format!("{quota} {PERIOD_MICROSECONDS}"))];
    }
    let period = (limit.with_file_name("cpu.cfs_period_us"), PERIOD_MICROSECONDS.to_string());
    vec![period, (limit.to_owned(), quota.to_string())]
}

/// The file with the limit of a process's processors, from the list of its control groups. Its
/// lines are `number:controllers:path`.
fn limit_of(groups: &str, version_2: bool) -> Option<PathBuf> {
    let mut groups = groups.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let is_its_own = |controllers: &str| match version_2 {
        true => controllers.is_empty(),
        false => controllers.split(',').any(|controller| controller == "cpu"),
    };
    let (_, path) = groups.find(|(controllers, _)| is_its_own(controllers))?;
    let (hierarchy, file) = if version_2 { ("", "cpu.max") } else { ("cpu", "cpu.cfs_quota_us") };
    Some(Path::new(ROOT).join(hierarchy).join(path.trim_start_matches('/')).join(file))
}

/// The throttled periods in a group's `cpu.stat`. Both versions have the same line.
fn throttled(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("nr_throttled "))?.trim().parse().ok()
}

fn effective_cpus(hierarchy: &Path) -> PathBuf {
    hierarchy.join(if version_2() { "cpuset.cpus.effective" } else { "cpuset.effective_cpus" })
}

/// Parses the kernel's notation of a list of processors: `0-3,8`.
fn processors(list: &str) -> Option<Vec<usize>> {
    let ranges = list.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    Some(ranges.collect::<Option<Vec<_>>>()?.into_iter().flatten().collect())
}

/// Removes the cluster's groups once their processes have ended.
pub(crate) fn remove() -> Result<(), BringUpError> {
    remove_everywhere(Path::new(CLUSTER))
}

/// Removes a node's groups once their processes have ended.
pub(crate) fn remove_node(node: &str) -> Result<(), BringUpError> {
    remove_everywhere(&Path::new(CLUSTER).join(node))
}

fn remove_everywhere(name: &Path) -> Result<(), BringUpError> {
    for hierarchy in hierarchies()? {
        let group = hierarchy.join(name);
        let awaited = format!("the removal of the control group {}", group.display());
        eventually(REMOVAL, &awaited, || remove_tree(&group))?;
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

/// The one hierarchy of version 2, or all of version 1, each once although it may have two names.
fn hierarchies() -> Result<BTreeSet<PathBuf>, BringUpError> {
    if Path::new(ROOT).join("cgroup.controllers").exists() {
        return Ok(BTreeSet::from([PathBuf::from(ROOT)]));
    }
    let entries = std::fs::read_dir(ROOT).map_err(refused("read", Path::new(ROOT)))?;
    let folders = entries.flatten().filter_map(|entry| entry.path().canonicalize().ok());
    Ok(folders.filter(|folder| folder.is_dir() && folder.join("cgroup.procs").exists()).collect())
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::{limit_files, limit_of, processors, throttled};

    #[test]
    fn a_limit_has_a_period_of_its_own() {
        let expected = |files: &[(&str, &str)]| -> Vec<(PathBuf, String)> {
            files.iter().map(|(file, text)| (PathBuf::from(file), (*text).to_owned())).collect()
        };
        assert_eq!(
            limit_files(Path::new("/a/cpu.cfs_quota_us"), 3_000, false),
            expected(&[("/a/cpu.cfs_period_us", "100000"), ("/a/cpu.cfs_quota_us", "3000")])
        );
        assert_eq!(limit_files(Path::new("/a/cpu.max"), 3_000, true), expected(&[("/a/cpu.max", "3000 100000")]));
    }

    #[test]
    fn throttled_periods_are_read_from_both_versions() {
        assert_eq!(throttled("nr_periods 12\nnr_throttled 7\nthrottled_time 93\n"), Some(7));
        assert_eq!(throttled("usage_usec 5\nnr_periods 12\nnr_throttled 0\n"), Some(0));
        assert_eq!(throttled("usage_usec 5\n"), None);
    }

    #[test]
    fn the_limit_is_in_the_group_of_the_process() {
        let first = "12:memory:/kubepods/pod7/a\n4:cpu,cpuacct:/rectrain-e2e/node-1/pod7/a\n3:cpuset:/b\n";
        let file = |text: &str, version_2| limit_of(text, version_2).map(|file| file.display().to_string());
        let expected = "/sys/fs/cgroup/cpu/rectrain-e2e/node-1/pod7/a/cpu.cfs_quota_us";
        assert_eq!(file(first, false).as_deref(), Some(expected));
        assert_eq!(file("0::/node-1/pod7/a\n", true).as_deref(), Some("/sys/fs/cgroup/node-1/pod7/a/cpu.max"));
        assert_eq!((file("0::/a\n", false), file("", true)), (None, None));
    }

    #[test]
    fn the_kernels_lists_of_processors_are_parsed() {
        assert_eq!(processors("0-3,8\n"), Some(vec![0, 1, 2, 3, 8]));
        assert_eq!(processors("1"), Some(vec![1]));
        assert_eq!(processors(""), None);
        assert_eq!(processors("0-"), None);
    }
}
