//! Processes that hang.

use rectrain_harness::jobs::Jobs;
use rectrain_harness::{HarnessError, processes};

/// A process that is stopped (SIGSTOP) until this value is dropped.
pub(crate) struct Stopped(u32);

impl Stopped {
    /// Stops the process of a pod's container.
    pub(crate) fn process_of(jobs: &Jobs, pod: &str) -> Result<Self, HarnessError> {
        let stopped = Self(jobs.process_of(pod)?);
        processes::signal(stopped.0, "STOP")?;
        Ok(stopped)
    }

    /// Stops the kubelet of a node of this machine's cluster.
    pub(crate) fn kubelet_of(node: &str) -> Result<Self, HarnessError> {
        let name = format!("--hostname-override={node}");
        Self::component("kubelet", &format!("the kubelet of {node}"), |words| words.contains(&name))
    }

    /// Stops the API server of this machine's cluster.
    pub(crate) fn api_server() -> Result<Self, HarnessError> {
        Self::component("kube-apiserver", "the API server", |_| true)
    }

    /// Stops the process of a component whose command line fits. `title` names it for the
    /// error.
    fn component(component: &str, title: &str, fits: impl Fn(&[String]) -> bool) -> Result<Self, HarnessError> {
        let is_it = |words: &[String]| words.get(1).is_some_and(|word| word == component) && fits(words);
        let found = processes::all().find(|(_, words)| is_it(words)).map(|(process, _)| process);
        let stopped = Self(found.ok_or_else(|| HarnessError::NoProcess { pod: title.to_owned() })?);
        processes::signal(stopped.0, "STOP")?;
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // The process may have been killed meanwhile.
        let _continued = processes::signal(self.0, "CONT");
    }
}
