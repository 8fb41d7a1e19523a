//! Whether a process takes part in its job, so that others may go: a parameter server has rows, a dense worker has parameters, the others
//! are given work. It is what `/readyz` says, and so what the disruption budget of a role counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// See the module's text. Clones are one.
#[derive(Clone, Debug, Default)]
pub struct Readiness(Arc<AtomicBool>);

impl Readiness {
    /// It does, to the end of the process.
    pub fn begin(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it does.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}
