//! AdaGrad (Duchi, Hazan, Singer, JMLR 2011), as `torch.optim.Adagrad` computes it for sparse
//! gradients: a ← a + g²; w ← w − η g / (√a + ε). State: a, dim floats.

use super::{Numbers, Optimizer, RowStep, not_negative, positive};
use crate::SpecError;

#[derive(Clone, Copy, Debug)]
pub(crate) struct AdaGrad {
    pub(super) learning_rate: f64,
    pub(super) initial_accumulator: f64,
    pub(super) epsilon: f64,
}

/// η and ε.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    rate: f32,
    epsilon: f32,
}

impl Optimizer for AdaGrad {
    const SNAPSHOT_TAG: u8 = 1;
    #[cfg(test)]
    const EXAMPLES: &'static [Self] = &[
        Self { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-10 },
        Self { learning_rate: 0.1, initial_accumulator: 0.0, epsilon: 1e-10 },
    ];
    type Step = Step;

    fn numbers(self) -> Numbers {
        [self.learning_rate, self.initial_accumulator, self.epsilon, 0.0]
    }

    fn from_numbers([learning_rate, initial_accumulator, epsilon, _]: Numbers) -> Self {
        Self { learning_rate, initial_accumulator, epsilon }
    }

    fn validate(self) -> Result<(), SpecError> {
        positive("learning_rate", self.learning_rate)?;
        not_negative("initial_accumulator", self.initial_accumulator)?;
        positive("epsilon", self.epsilon)
    }

    fn initial_state(self, _values: &[f32], state: &mut [f32]) {
        state.fill(self.initial_accumulator as f32);
    }

    fn step(self, _count: u64) -> Step {
        Step { rate: self.learning_rate as f32, epsilon: self.epsilon as f32 }
    }
}

impl RowStep for Step {
    #[inline(always)]
    fn apply(&self, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        for ((w, a), g) in values.iter_mut().zip(state).zip(gradient) {
            *a += g * g;
            *w -= self.rate * (g / (a.sqrt() + self.epsilon));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::SparseOptimizer;
    use crate::optimizer::formula::{DIM, compare};

    #[test]
    fn adagrad_is_its_formula() {
        let optimizer = SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.2, epsilon: 1e-3 };
        let mut sums = [0.2; DIM];
        compare(optimizer, |w, g, _| {
            for i in 0..DIM {
                sums[i] += g[i].powi(2);
                w[i] -= 0.1 * g[i] / (sums[i].sqrt() + 1e-3);
            }
        });
    }
}
