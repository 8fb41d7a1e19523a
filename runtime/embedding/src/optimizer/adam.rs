//! Adam (Kingma, Ba, ICLR 2015) for sparse rows, exactly as `torch.optim.SparseAdam` computes it. A
//! row's moments move only when the row has a gradient. The bias correction uses the global count t
//! of updates.
//!
//! m ← m + (1−β₁)(g − m); v ← v + (1−β₂)(g² − v); w ← w − η √(1−β₂ᵗ)/(1−β₁ᵗ) · m / (√v + ε).
//!
//! State: m then v, dim floats each. The powers of β are computed from the count and stored
//! nowhere.

use super::{Numbers, Optimizer, RowStep, decay, positive, power};
use crate::SpecError;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Adam {
    pub(super) learning_rate: f64,
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    pub(super) epsilon: f64,
}

/// η √(1−β₂ᵗ)/(1−β₁ᵗ), 1−β₁, 1−β₂ and ε.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    rate: f32,
    gain1: f32,
    gain2: f32,
    epsilon: f32,
}

impl Optimizer for Adam {
    const SNAPSHOT_TAG: u8 = 3;
    #[cfg(test)]
    const EXAMPLES: &'static [Self] = &[Self { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }];
    type Step = Step;

    fn numbers(self) -> Numbers {
        [self.learning_rate, self.beta1, self.beta2, self.epsilon]
    }

    fn from_numbers([learning_rate, beta1, beta2, epsilon]: Numbers) -> Self {
        Self { learning_rate, beta1, beta2, epsilon }
    }

    fn validate(self) -> Result<(), SpecError> {
        positive("learning_rate", self.learning_rate)?;
        decay("beta1", self.beta1)?;
        decay("beta2", self.beta2)?;
        positive("epsilon", self.epsilon)
    }

    fn initial_state(self, _values: &[f32], state: &mut [f32]) {
        state.fill(0.0);
    }

    fn step(self, count: u64) -> Step {
        let first = 1.0 - power(self.beta1, count);
        let second = 1.0 - power(self.beta2, count);
        Step {
            rate: (self.learning_rate * second.sqrt() / first) as f32,
            gain1: (1.0 - self.beta1) as f32,
            gain2: (1.0 - self.beta2) as f32,
            epsilon: self.epsilon as f32,
        }
    }
}

impl RowStep for Step {
    #[inline(always)]
    fn apply(&self, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let (first, second) = state.split_at_mut(values.len());
        let moments = first.iter_mut().zip(second);
        for ((w, (m, v)), g) in values.iter_mut().zip(moments).zip(gradient) {
            *m += (g - *m) * self.gain1;
            *v += (g * g - *v) * self.gain2;
            *w -= self.rate * (*m / (v.sqrt() + self.epsilon));
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::SparseOptimizer;
    use crate::optimizer::formula::{DIM, compare};
    use crate::optimizer::{RowOptimizer, RowStep};

    #[test]
    fn adam_is_sparse_adams_formula_with_the_global_count() {
        let optimizer = SparseOptimizer::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
        let (mut m, mut v) = ([0.0; DIM], [0.0; DIM]);
        compare(optimizer, |w, g, t| {
            let corrections = (1.0 - 0.999_f64.powi(t as i32)).sqrt() / (1.0 - 0.9_f64.powi(t as i32));
            for i in 0..DIM {
                m[i] = 0.9 * m[i] + 0.1 * g[i];
                v[i] = 0.999 * v[i] + 0.001 * g[i].powi(2);
                w[i] -= 0.01 * corrections * m[i] / (v[i].sqrt() + 1e-8);
            }
        });
    }

    /// A row first met at update 1,000 is corrected for 1,000 updates, as PyTorch does.
    #[test]
    fn adam_corrects_a_late_row_by_the_global_count() {
        let optimizer = SparseOptimizer::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
        let after = |count| {
            let (mut values, mut state) = ([0.0], [0.0; 2]);
            optimizer.step(count).apply(&mut values, &mut state, &[0.5]);
            f64::from(values[0])
        };
        let expected = |t: i32| {
            let corrections = (1.0 - 0.999_f64.powi(t)).sqrt() / (1.0 - 0.9_f64.powi(t));
            -0.01 * corrections * 0.05 / (0.00025_f64.sqrt() + 1e-8)
        };
        assert!((after(1) - expected(1)).abs() < 1e-7);
        assert!((after(1_000) - expected(1_000)).abs() < 1e-7);
        assert!((after(1) - after(1_000)).abs() > 1e-3);
    }
}
