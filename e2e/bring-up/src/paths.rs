//! Where the cluster's files are. Programs and images stay in the user's cache folder. Everything
//! that belongs to a running cluster is below `run` and is removed with it.

use std::fs::File;
use std::path::{Path, PathBuf};

use rectrain_harness::workspace::{cache, workspace};
use rectrain_harness::{HarnessError, files};

/// The cluster's folder in the cache.
#[derive(Debug, Clone)]
pub struct Paths {
    root: PathBuf,
}

impl Paths {
    /// `$XDG_CACHE_HOME/rectrain/cluster`, by default below `~/.cache`.
    ///
    /// # Errors
    /// See [`cache`].
    pub fn new() -> Result<Self, HarnessError> {
        Ok(Self { root: cache()?.join("cluster") })
    }

    /// The folder itself.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of built programs.
    #[must_use]
    pub fn bin(&self) -> PathBuf {
        self.root.join("bin")
    }

    /// A built program.
    #[must_use]
    pub fn program(&self, name: &str) -> PathBuf {
        self.bin().join(name)
    }

    /// The folder of images, as archives, with stamps of their sources.
    #[must_use]
    pub fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// The folder of the running cluster.
    #[must_use]
    pub fn run(&self) -> PathBuf {
        self.root.join("run")
    }

    /// The keys, certificates and kubeconfigs of the running cluster.
    #[must_use]
    pub fn pki(&self) -> PathBuf {
        self.run().join("pki")
    }

    /// The administrator's kubeconfig, for programs on this machine.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.run().join("kubeconfig")
    }

    /// The configuration of the control plane (`control-plane`) or of a node.
    #[must_use]
    pub fn config(&self, owner: &str) -> PathBuf {
        self.run().join("config").join(owner)
    }

    /// A component's log.
    #[must_use]
    pub fn log(&self, component: &str) -> PathBuf {
        self.run().join("log").join(format!("{component}.log"))
    }

    /// Waits for an exclusive lock across processes: `cluster` for `up` and `down`, `build` for
    /// filling the cache, `suite` for the tests.
    ///
    /// # Errors
    /// See [`files::lock`].
    pub fn lock(&self, name: &str) -> Result<File, HarnessError> {
        files::lock(&self.root.join(format!("{name}.lock")))
    }
}

/// The cluster's sources in the repository: Go module, configuration, manifests.
#[must_use]
pub fn sources() -> PathBuf {
    workspace().join("e2e/cluster")
}
