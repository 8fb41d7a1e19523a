//! Row-wise AdaGrad, Kraken's rAdaGrad (§III-B): AdaGrad with the mean of g² over the columns, so
//! that a row needs one accumulator: a ← a + ‖g‖²/d; w ← w − η g / (√a + ε). State: a, one float.

use super::{Numbers, Optimizer, RowStep, not_negative, positive, squared_norm};
use crate::SpecError;

#[derive(Clone, Copy, Debug)]
pub(crate) struct RowWiseAdaGrad {
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

impl Optimizer for RowWiseAdaGrad {
    const SNAPSHOT_TAG: u8 = 2;
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
        let accumulator = &mut state[0];
        *accumulator += squared_norm(gradient) / gradient.len() as f32;
        let denominator = accumulator.sqrt() + self.epsilon;
        for (w, g) in values.iter_mut().zip(gradient) {
            *w -= self.rate * (g / denominator);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::SparseOptimizer;
    use crate::optimizer::formula::{DIM, compare};

    #[test]
    fn row_wise_adagrad_is_krakens_formula() {
        let optimizer = SparseOptimizer::RowWiseAdaGrad { learning_rate: 0.1, initial_accumulator: 0.2, epsilon: 1e-3 };
        assert_eq!(optimizer.state_len(DIM), 1);
        let mut sum = 0.2;
        compare(optimizer, |w, g, _| {
            sum += g.iter().map(|g| g * g).sum::<f64>() / DIM as f64;
            for i in 0..DIM {
                w[i] -= 0.1 * g[i] / (sum.sqrt() + 1e-3);
            }
        });
    }
}
