//! Common ground of the trials in a cluster: the chart, the object store, Kafka, Prometheus, the
//! members of a job, nodes without power, and comparisons of a job's end.

pub mod chart;
pub(crate) mod costs;
pub(crate) mod kafka;
pub(crate) mod members;
pub(crate) mod monitoring;
pub mod object_store;
pub(crate) mod outcome;
pub(crate) mod power;
pub(crate) mod repairs;
pub(crate) mod stopped;

use rectrain_bring_up::{BringUpError, Paths, foreign_kubeconfig, kubectl};
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::kubectl::Kubectl;
use rectrain_harness::{HarnessError, skips};

/// The cluster under test: its jobs, and the files of this machine's cluster.
#[derive(Debug)]
pub(crate) struct TestCluster {
    pub(crate) paths: Paths,
    pub(crate) jobs: Jobs,
}

impl TestCluster {
    /// The cluster in use, which must be up.
    pub(crate) fn connect(paths: &Paths) -> Result<Self, BringUpError> {
        Ok(Self { paths: paths.clone(), jobs: Jobs::new(kubectl(paths)?, NAMESPACE) })
    }

    /// kubectl for the cluster.
    pub(crate) fn kubectl(&self) -> &Kubectl {
        self.jobs.kubectl()
    }

    /// Whether KUBECONFIG names the cluster, so that its nodes and processes are not this
    /// machine's.
    pub(crate) fn is_foreign(&self) -> bool {
        foreign_kubeconfig(&self.paths).is_some()
    }

    /// Skips a part that needs this machine's cluster; returns whether it was skipped.
    pub(crate) fn skips(&self, part: &str) -> Result<bool, HarnessError> {
        if !self.is_foreign() {
            return Ok(false);
        }
        skips::skip(part, "KUBECONFIG names a cluster on other machines")?;
        Ok(true)
    }
}
