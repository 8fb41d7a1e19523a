//! FTRL-proximal (McMahan et al., "Ad click prediction", KDD 2013, algorithm 1).
//!
//! σ = (√(n+g²) − √n)/α; z ← z + g − σ w; n ← n + g²; w ← 0 if abs z ≤ λ₁, else −(z − sgn(z) λ₁) /
//! ((β + √n)/α + λ₂).
//!
//! State: z then n, dim floats each.
//!
//! The paper starts all weights at 0. A row that starts elsewhere gets the z for which the closed
//! form gives its initial value, so a gradient of 0 leaves it unchanged.

use super::{Numbers, Optimizer, RowStep, not_negative, positive};
use crate::SpecError;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Ftrl {
    /// α.
    pub(super) learning_rate: f64,
    pub(super) beta: f64,
    pub(super) l1: f64,
    pub(super) l2: f64,
}

/// 1/α, β, λ₁ and λ₂.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    inverse_alpha: f32,
    beta: f32,
    l1: f32,
    l2: f32,
}

impl Optimizer for Ftrl {
    const SNAPSHOT_TAG: u8 = 4;
    #[cfg(test)]
    const EXAMPLES: &'static [Self] = &[
        Self { learning_rate: 0.25, beta: 1.0, l1: 0.01, l2: 0.125 },
        Self { learning_rate: 0.05, beta: 1.0, l1: 0.01, l2: 0.01 },
    ];
    type Step = Step;

    fn numbers(self) -> Numbers {
        [self.learning_rate, self.beta, self.l1, self.l2]
    }

    fn from_numbers([learning_rate, beta, l1, l2]: Numbers) -> Self {
        Self { learning_rate, beta, l1, l2 }
    }

    fn validate(self) -> Result<(), SpecError> {
        positive("learning_rate", self.learning_rate)?;
        positive("beta", self.beta)?;
        not_negative("l1", self.l1)?;
        not_negative("l2", self.l2)
    }

    fn initial_state(self, values: &[f32], state: &mut [f32]) {
        let (z, n) = state.split_at_mut(values.len());
        n.fill(0.0);
        let scale = self.beta / self.learning_rate + self.l2;
        for (z, &w) in z.iter_mut().zip(values) {
            *z = initial_linear_term(f64::from(w), scale, self.l1);
        }
    }

    fn step(self, _count: u64) -> Step {
        Step {
            inverse_alpha: (1.0 / self.learning_rate) as f32,
            beta: self.beta as f32,
            l1: self.l1 as f32,
            l2: self.l2 as f32,
        }
    }
}

/// The z for which the closed form gives the weight `w` while n is 0. `scale` is β/α + λ₂.
fn initial_linear_term(w: f64, scale: f64, l1: f64) -> f32 {
    if w == 0.0 {
        return 0.0;
    }
    -(w * scale + w.signum() * l1) as f32
}

impl RowStep for Step {
    #[inline(always)]
    fn apply(&self, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        let Self { inverse_alpha, beta, l1, l2 } = *self;
        let (linear, squares) = state.split_at_mut(values.len());
        let terms = linear.iter_mut().zip(squares);
        for ((w, (z, n)), g) in values.iter_mut().zip(terms).zip(gradient) {
            let root = n.sqrt();
            *n += g * g;
            let new_root = n.sqrt();
            let sigma = (new_root - root) * inverse_alpha;
            *z += g - sigma * *w;
            let shrunk = *z - z.signum() * l1;
            let scale = (beta + new_root) * inverse_alpha + l2;
            *w = if z.abs() <= l1 { 0.0 } else { -shrunk / scale };
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::SparseOptimizer;
    use crate::optimizer::formula::{DIM, compare, start};
    use crate::optimizer::{RowOptimizer, RowStep};

    /// Algorithm 1, which keeps no weights but computes them from z and n, started from weights by
    /// the z that gives them.
    fn compare_ftrl(l1: f64, l2: f64) {
        let (alpha, beta) = (0.2, 1.0);
        let optimizer = SparseOptimizer::Ftrl { learning_rate: alpha, beta, l1, l2 };
        let weight = |z: f64, n: f64| {
            if z.abs() <= l1 { 0.0 } else { -(z - z.signum() * l1) / ((beta + n.sqrt()) / alpha + l2) }
        };
        let mut z = start().map(|w| match w {
            0.0 => 0.0,
            w => -w * (beta / alpha + l2) - w.signum() * l1,
        });
        let mut n = [0.0_f64; DIM];
        compare(optimizer, |w, g, _| {
            for i in 0..DIM {
                let sigma = ((n[i] + g[i].powi(2)).sqrt() - n[i].sqrt()) / alpha;
                z[i] += g[i] - sigma * weight(z[i], n[i]);
                n[i] += g[i].powi(2);
                w[i] = weight(z[i], n[i]);
            }
        });
    }

    #[test]
    fn ftrl_is_the_papers_algorithm_1() {
        compare_ftrl(0.0, 0.0);
        compare_ftrl(0.0, 0.5);
        compare_ftrl(0.3, 0.1);
    }

    #[test]
    fn ftrl_with_l1_makes_exact_zeros() {
        let optimizer = SparseOptimizer::Ftrl { learning_rate: 0.1, beta: 1.0, l1: 1.0, l2: 0.0 };
        let (mut values, mut state) = ([0.0_f32; 2], [0.0; 4]);
        optimizer.initial_state(&values, &mut state);
        optimizer.step(1).apply(&mut values, &mut state, &[0.5, 3.0]);
        assert_eq!(values[0], 0.0);
        assert!(values[1] < 0.0);
    }
}
