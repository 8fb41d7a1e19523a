//! Plain stochastic gradient descent: w ← w − η g. No state.

use super::{Numbers, Optimizer, RowStep, positive};
use crate::SpecError;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Sgd {
    pub(super) learning_rate: f64,
}

/// η.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    rate: f32,
}

impl Optimizer for Sgd {
    const SNAPSHOT_TAG: u8 = 0;
    #[cfg(test)]
    const EXAMPLES: &'static [Self] = &[Self { learning_rate: 0.1 }];
    type Step = Step;

    fn numbers(self) -> Numbers {
        [self.learning_rate, 0.0, 0.0, 0.0]
    }

    fn from_numbers([learning_rate, ..]: Numbers) -> Self {
        Self { learning_rate }
    }

    fn validate(self) -> Result<(), SpecError> {
        positive("learning_rate", self.learning_rate)
    }

    fn initial_state(self, _values: &[f32], _state: &mut [f32]) {}

    fn step(self, _count: u64) -> Step {
        Step { rate: self.learning_rate as f32 }
    }
}

impl RowStep for Step {
    #[inline(always)]
    fn apply(&self, values: &mut [f32], _state: &mut [f32], gradient: &[f32]) {
        for (w, g) in values.iter_mut().zip(gradient) {
            *w -= self.rate * g;
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::SparseOptimizer;
    use crate::optimizer::formula::{DIM, compare};

    #[test]
    fn sgd_is_its_formula() {
        compare(SparseOptimizer::Sgd { learning_rate: 0.1 }, |w, g, _| {
            for i in 0..DIM {
                w[i] -= 0.1 * g[i];
            }
        });
    }
}
