//! Failures of bringing a cluster up, using its parts, and taking it down.

use std::path::PathBuf;

use rectrain_harness::HarnessError;

/// Why the cluster of this machine, or a part of it, cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum BringUpError {
    /// A step of the harness failed; its error names the step.
    #[error(transparent)]
    Harness(#[from] HarnessError),
    /// This machine cannot run the cluster.
    #[error("the cluster needs {needed}: {problem}")]
    Unavailable {
        /// The missing precondition.
        needed: &'static str,
        /// The state of this machine, and the remedy.
        problem: String,
    },
    /// The kernel refused a set of namespaces.
    #[error("the cluster needs namespaces of its own, which this machine refuses: {0}")]
    NoNamespaces(#[source] HarnessError),
    /// No cluster is running.
    #[error("there is no cluster: `cargo xtask cluster up` makes one")]
    NoCluster,
    /// A node of this name does not run.
    #[error("no node {name:?} is running; the nodes are {nodes}")]
    NoNode {
        /// The requested name.
        name: String,
        /// The names of all nodes.
        nodes: String,
    },
    /// The Go programs of this repository do not compile. [`crate::tools::BROKEN`] is a part of the
    /// message.
    #[error("{}: {source}", crate::tools::BROKEN)]
    Broken {
        /// The compiler's failure.
        source: HarnessError,
    },
    /// A Go program's path has no version.
    #[error("the Go program {program} is pinned without a version: expected PATH@VERSION")]
    NoVersion {
        /// The program.
        program: &'static str,
    },
    /// A key or certificate could not be made.
    #[error("cannot make {subject}: {source}")]
    Certificate {
        /// The key or certificate.
        subject: String,
        /// The cause.
        source: rcgen::Error,
    },
    /// A control group could not be made, changed or read.
    #[error("cannot {action} the control group {group}: {source}")]
    ControlGroup {
        /// The operation.
        action: &'static str,
        /// The group's folder.
        group: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The machine's processors cannot be divided among the nodes.
    #[error("cannot give each node processors of its own: {0}")]
    Processors(String),
    /// A package was downloaded and is not there.
    #[error("apt-get downloaded no file for the package {package} into {folder}")]
    NoPackage {
        /// The package.
        package: &'static str,
        /// The download folder.
        folder: PathBuf,
    },
    /// Something survived the end of the cluster.
    #[error("after the cluster was taken down, this is left: processes {processes}; mounts {mounts}; link {link}")]
    Left {
        /// Processes whose command line names a file of the cluster.
        processes: String,
        /// Mounts of the cluster's files.
        mounts: String,
        /// Whether the network link exists.
        link: bool,
    },
}

impl BringUpError {
    /// Turns an error of rcgen into [`BringUpError::Certificate`], for `map_err`.
    pub(crate) fn certificate(subject: impl Into<String>) -> impl FnOnce(rcgen::Error) -> Self {
        let subject = subject.into();
        move |source| Self::Certificate { subject, source }
    }
}
