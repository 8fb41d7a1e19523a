//! Whether a process is ready: a parameter server has rows, a dense worker has parameters, other
//! members are given work.
//! `/readyz` serves it, so Kubernetes counts it in the disruption budget of the role.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The readiness of this process. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<AtomicBool>);

impl Readiness {
    /// The process is ready from now on, until it ends.
    pub fn set_ready(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether the process is ready.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
