//! Facts about a process of the cluster, from /proc.

use std::path::PathBuf;

/// The identity of the process's PID namespace.
pub(crate) fn pid_namespace(process: u32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{process}/ns/pid")).ok()
}
