//! Facts about a process of the cluster, from /proc.

use std::path::PathBuf;

/// The identity of the process's PID namespace.
pub(crate) fn pid_namespace(process: u32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{process}/ns/pid")).ok()
}

/// The process's resident memory in bytes.
pub(crate) fn resident_bytes(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}
