//! The cluster that commands and trials use: the one that KUBECONFIG names, or this machine's.

use std::path::PathBuf;

use rectrain_harness::kubectl::Kubectl;

use crate::BringUpError;
use crate::paths::Paths;

/// kubectl for the cluster in use.
///
/// # Errors
/// [`BringUpError::NoCluster`].
pub fn kubectl(paths: &Paths) -> Result<Kubectl, BringUpError> {
    Ok(Kubectl::new(paths.program("kube"), kubeconfig(paths)?))
}

/// kubectl for this machine's cluster, whether or not it is up.
pub(crate) fn own_kubectl(paths: &Paths) -> Kubectl {
    Kubectl::new(paths.program("kube"), paths.kubeconfig())
}

/// The kubeconfig of the cluster in use.
///
/// # Errors
/// [`BringUpError::NoCluster`] if KUBECONFIG names none and this machine's is not up.
pub fn kubeconfig(paths: &Paths) -> Result<PathBuf, BringUpError> {
    if let Some(foreign) = foreign_kubeconfig(paths) {
        return Ok(foreign);
    }
    let own = paths.kubeconfig();
    if own.exists() { Ok(own) } else { Err(BringUpError::NoCluster) }
}

/// The kubeconfig that KUBECONFIG names, unless it is this machine's cluster's.
#[must_use]
pub fn foreign_kubeconfig(paths: &Paths) -> Option<PathBuf> {
    let named = PathBuf::from(std::env::var_os("KUBECONFIG").filter(|named| !named.is_empty())?);
    (named != paths.kubeconfig()).then_some(named)
}
