//! Where the cluster's files are: programs and images are kept in the user's cache folder, what belongs to a running cluster is
//! below `run` and goes with it.

use std::fs::File;
use std::path::{Path, PathBuf};

/// The cache folder of the cluster.
#[derive(Debug, Clone)]
pub(super) struct Paths {
    root: PathBuf,
}

impl Paths {
    /// `$XDG_CACHE_HOME/rectrain/cluster`, or the same below `~/.cache`.
    pub(super) fn new() -> Result<Self, String> {
        Ok(Self { root: crate::cache()?.join("cluster") })
    }

    /// All of it.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Programs that were built.
    pub(super) fn bin(&self) -> PathBuf {
        self.root.join("bin")
    }

    /// One of them.
    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.bin().join(name)
    }

    /// Images as archives, and what they were built from.
    pub(super) fn images(&self) -> PathBuf {
        self.root.join("images")
    }

    /// The running cluster.
    pub(super) fn run(&self) -> PathBuf {
        self.root.join("run")
    }

    /// Its keys, certificates and kubeconfigs.
    pub(super) fn pki(&self) -> PathBuf {
        self.run().join("pki")
    }

    /// The kubeconfig of its administrator, for programs on this machine.
    pub(super) fn kubeconfig(&self) -> PathBuf {
        self.run().join("kubeconfig")
    }

    /// The configuration of the control plane (`control-plane`) or of a node.
    pub(super) fn config(&self, whose: &str) -> PathBuf {
        self.run().join("config").join(whose)
    }

    /// What a component says.
    pub(super) fn log(&self, component: &str) -> PathBuf {
        self.run().join("log").join(format!("{component}.log"))
    }
}

/// What is written down beside this program's source, in `e2e/cluster`.
pub(super) fn sources() -> PathBuf {
    crate::workspace().join("e2e/cluster")
}

/// Writes a file and the folders above it.
pub(super) fn write(path: &Path, text: impl AsRef<[u8]>) -> Result<(), String> {
    if let Some(folder) = path.parent() {
        make_folder(folder)?;
    }
    std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}

/// Makes a folder and those above it.
pub(super) fn make_folder(folder: &Path) -> Result<(), String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("cannot make the folder {}: {error}", folder.display()))
}

/// One at a time, in whichever process: `up` and `down` (`cluster`), whatever fills the cache (`build`).
pub(super) fn lock(paths: &Paths, what: &str) -> Result<File, String> {
    make_folder(paths.root())?;
    let path = paths.root().join(format!("{what}.lock"));
    let file = File::create(&path).map_err(|error| format!("cannot open {}: {error}", path.display()))?;
    file.lock().map_err(|error| format!("cannot lock {}: {error}", path.display()))?;
    Ok(file)
}

/// Removes a folder if it is there.
pub(super) fn remove_folder(folder: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {error}", folder.display()))
        }
        _ => Ok(()),
    }
}
