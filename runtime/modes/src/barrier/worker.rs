//! A dense worker's half of `sync` and `hybrid`: how far it fetches and pushes ahead of the step
//! that it trains.

/// The limits of fetching and pushing ahead; see the module's documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepWindow {
    staleness: u64,
    look_ahead: u64,
}

impl StepWindow {
    /// The window for τ = `staleness`, in global steps; 0 is `sync`.
    #[must_use]
    pub const fn new(staleness: u64) -> Self {
        Self { staleness, look_ahead: 1 }
    }

    /// In `sync`: requests the embeddings of `steps` steps beyond the one to train, at least one.
    /// The mode `hybrid` ignores it.
    #[must_use]
    pub const fn looking_ahead(self, steps: u64) -> Self {
        let look_ahead = if steps > 1 { steps } else { 1 };
        Self { look_ahead, ..self }
    }

    /// The number of steps whose embeddings the worker requests: the step to train and those in
    /// flight beside it. In `sync` that includes the next step at least. The servers answer the
    /// look-ups of later steps as far as no step before changes their rows.
    #[must_use]
    pub fn steps_ahead(self) -> usize {
        let ahead = if self.is_exact() { self.look_ahead } else { self.staleness };
        ahead as usize + 1
    }

    /// The number of pieces whose gradients may be in flight, if this worker has `pieces` pieces
    /// per step.
    #[must_use]
    pub fn pushes_ahead(self, pieces: usize) -> usize {
        (self.staleness as usize + 1) * pieces
    }

    /// The number of earlier steps whose embedding gradients may not have reached every parameter
    /// server. The replacement of a dense worker sends them again.
    #[must_use]
    pub const fn unsettled_steps(self) -> u64 {
        if self.staleness == 0 { 1 } else { self.staleness + 2 }
    }

    /// Whether every look-up waits for the previous update. A step's rows can then be read again
    /// only from a copy.
    #[must_use]
    pub const fn is_exact(self) -> bool {
        self.staleness == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_fetches_one_step_ahead_in_sync_and_tau_in_hybrid() {
        let (sync, hybrid) = (StepWindow::new(0), StepWindow::new(4));
        assert_eq!((sync.steps_ahead(), sync.pushes_ahead(3), sync.is_exact()), (2, 3, true));
        assert_eq!((sync.unsettled_steps(), hybrid.unsettled_steps()), (1, 6));
        assert_eq!((hybrid.steps_ahead(), hybrid.pushes_ahead(3), hybrid.is_exact()), (5, 15, false));
        assert_eq!([0, 1, 4].map(|steps| sync.looking_ahead(steps).steps_ahead()), [2, 2, 5]);
        assert_eq!(sync.looking_ahead(4).pushes_ahead(3), 3, "gradients do not overtake");
        assert_eq!(hybrid.looking_ahead(9).steps_ahead(), 5);
    }
}
