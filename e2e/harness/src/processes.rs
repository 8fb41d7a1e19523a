//! The processes of this machine, as /proc lists them.

use std::path::PathBuf;

use crate::HarnessError;
use crate::command::{command, output};

/// The path of the running program. Cargo may have replaced the file meanwhile.
pub(crate) fn own_program() -> Result<PathBuf, HarnessError> {
    std::env::current_exe().map_err(HarnessError::io("find", "the path of this program"))
}

/// The ids and command lines of all processes, including those in other namespaces.
pub fn all() -> impl Iterator<Item = (u32, Vec<String>)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let process = entry.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        let words = line.strip_suffix(&[0]).unwrap_or(&line).split(|byte| *byte == 0);
        Some((process, words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()))
    })
}

/// The ids of a process's children, each with the second word of its command line: the role, for a
/// child of `rectrain run --processes`. Zombies are left out.
#[must_use]
pub fn children_of(parent: u32) -> Vec<(u32, String)> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut children = Vec::new();
    for entry in entries.flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // The state and the parent follow the name, which is in brackets.
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let state = fields.next();
        let its_parent = fields.next().and_then(|parent| parent.parse::<u32>().ok());
        if its_parent == Some(parent)
            && state != Some("Z")
            && let Ok(line) = std::fs::read(entry.path().join("cmdline"))
        {
            // Between fork and exec a child has its parent's command line, or none.
            if let Some(role) = line.split(|byte| *byte == 0).nth(1) {
                children.push((process, String::from_utf8_lossy(role).into_owned()));
            }
        }
    }
    children.sort_unstable();
    children
}

/// The process of a pod's container, by the uid of the pod. Its cgroup's name contains the uid.
#[must_use]
pub fn of_pod(uid: &str) -> Option<u32> {
    let belongs = |process: u32| {
        let cgroup = std::fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
        !uid.is_empty() && cgroup.contains(uid)
    };
    // The pod's pause process has fewer words.
    let mut its = all().filter(|(process, words)| words.len() > 2 && belongs(*process));
    its.next().map(|(process, _)| process)
}

/// The resident memory of a process in bytes; `None` if it is gone.
#[must_use]
pub fn resident_bytes(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

/// Sends a signal (`KILL`, `STOP`) to a process.
///
/// # Errors
/// [`HarnessError::Failed`] if the process is gone.
pub fn signal(process: u32, signal: &str) -> Result<(), HarnessError> {
    output(&mut command("kill", [format!("-{signal}"), process.to_string()])).map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_process_has_resident_memory_until_it_is_gone() {
        assert!(resident_bytes(std::process::id()).is_some_and(|bytes| bytes > 100_000));
        assert_eq!(resident_bytes(u32::MAX), None);
    }

    #[test]
    fn a_processes_children_are_found_with_their_role() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let started = Instant::now();
        let mut children = Vec::new();
        while !children.contains(&(child.id(), "60".to_owned())) && started.elapsed() < Duration::from_secs(10) {
            children = children_of(std::process::id());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(children.contains(&(child.id(), "60".to_owned())), "{children:?}");
    }
}
