//! The sparse optimizers: what one gradient does to one row. Pure functions on slices; the table
//! calls them with a row's values and state. Element-wise f32 in a fixed order, so that a vector
//! unit of any width gives the same bits as the loops here.
//!
//! For a row w of d columns, its gradient g and the global count t of updates, element-wise unless
//! said otherwise:
//!
//! | optimizer | state | step |
//! |---|---|---|
//! | SGD | none | w ← w − η g |
//! | AdaGrad | a\[d\] | a ← a + g²; w ← w − η g / (√a + ε) |
//! | rAdaGrad | a | a ← a + ‖g‖²/d; w ← w − η g / (√a + ε) |
//! | Adam (lazy) | m\[d\], v\[d\] | m ← m + (1−β₁)(g − m); v ← v + (1−β₂)(g² − v); w ← w − η √(1−β₂ᵗ)/(1−β₁ᵗ) · m / (√v + ε) |
//! | FTRL | z\[d\], n\[d\] | σ = (√(n+g²) − √n)/α; z ← z + g − σ w; n ← n + g²; w ← 0 if abs z ≤ λ₁, else −(z − sgn(z) λ₁) / ((β + √n)/α + λ₂) |

use rectrain_kinds::SparseOptimizer;

use crate::SpecError;
use crate::simd::Simd;

/// A [`SparseOptimizer`] as the table calls it.
pub(crate) trait RowOptimizer: Copy {
    /// Writes the state of a row that starts from `values` (as stored, so after rounding).
    fn initial_state(&self, values: &[f32], state: &mut [f32]);

    /// The step of update number `count`, 1-based, with everything that does not depend on the row
    /// computed once.
    fn step(&self, count: u64) -> Step;

    /// This optimizer with a learning rate of 0 where later runs may change the rate; see
    /// [`RowSpec::continues`](crate::RowSpec::continues).
    fn without_learning_rate(self) -> Self;

    /// Checks every setting against its range.
    fn validate(&self) -> Result<(), SpecError>;
}

impl RowOptimizer for SparseOptimizer {
    fn initial_state(&self, values: &[f32], state: &mut [f32]) {
        match *self {
            Self::Sgd { .. } => {}
            Self::Adam { .. } => state.fill(0.0),
            Self::AdaGrad { initial_accumulator, .. } | Self::RowWiseAdaGrad { initial_accumulator, .. } => {
                state.fill(initial_accumulator as f32)
            }
            Self::Ftrl { learning_rate, beta, l1, l2 } => {
                let (z, n) = state.split_at_mut(values.len());
                n.fill(0.0);
                let scale = beta / learning_rate + l2;
                for (z, &w) in z.iter_mut().zip(values) {
                    *z = initial_linear_term(f64::from(w), scale, l1);
                }
            }
        }
    }

    fn step(&self, count: u64) -> Step {
        match *self {
            Self::Sgd { learning_rate } => Step::Sgd { rate: learning_rate as f32 },
            Self::AdaGrad { learning_rate, epsilon, .. } => {
                Step::AdaGrad { rate: learning_rate as f32, epsilon: epsilon as f32 }
            }
            Self::RowWiseAdaGrad { learning_rate, epsilon, .. } => {
                Step::RowWiseAdaGrad { rate: learning_rate as f32, epsilon: epsilon as f32 }
            }
            Self::Adam { learning_rate, beta1, beta2, epsilon } => {
                let first = 1.0 - power(beta1, count);
                let second = 1.0 - power(beta2, count);
                Step::Adam {
                    rate: (learning_rate * second.sqrt() / first) as f32,
                    gain1: (1.0 - beta1) as f32,
                    gain2: (1.0 - beta2) as f32,
                    epsilon: epsilon as f32,
                }
            }
            Self::Ftrl { learning_rate, beta, l1, l2 } => Step::Ftrl {
                inverse_alpha: (1.0 / learning_rate) as f32,
                beta: beta as f32,
                l1: l1 as f32,
                l2: l2 as f32,
            },
        }
    }

    fn without_learning_rate(mut self) -> Self {
        match &mut self {
            Self::Sgd { learning_rate }
            | Self::AdaGrad { learning_rate, .. }
            | Self::RowWiseAdaGrad { learning_rate, .. }
            | Self::Adam { learning_rate, .. } => *learning_rate = 0.0,
            Self::Ftrl { .. } => {}
        }
        self
    }

    fn validate(&self) -> Result<(), SpecError> {
        match *self {
            Self::Sgd { learning_rate } => positive("learning_rate", learning_rate),
            Self::AdaGrad { learning_rate, initial_accumulator, epsilon }
            | Self::RowWiseAdaGrad { learning_rate, initial_accumulator, epsilon } => {
                positive("learning_rate", learning_rate)?;
                not_negative("initial_accumulator", initial_accumulator)?;
                positive("epsilon", epsilon)
            }
            Self::Adam { learning_rate, beta1, beta2, epsilon } => {
                positive("learning_rate", learning_rate)?;
                decay("beta1", beta1)?;
                decay("beta2", beta2)?;
                positive("epsilon", epsilon)
            }
            Self::Ftrl { learning_rate, beta, l1, l2 } => {
                positive("learning_rate", learning_rate)?;
                positive("beta", beta)?;
                not_negative("l1", l1)?;
                not_negative("l2", l2)
            }
        }
    }
}

fn within(name: &'static str, found: f64, expected: &'static str, holds: bool) -> Result<(), SpecError> {
    // A number that f32 cannot hold would become infinite or 0 in the step.
    let representable = (found as f32).is_finite() && (found == 0.0 || found as f32 != 0.0);
    if holds && representable {
        return Ok(());
    }
    let expected = if holds { "a number that f32 can hold" } else { expected };
    Err(SpecError::Optimizer { name, found, expected })
}

fn positive(name: &'static str, found: f64) -> Result<(), SpecError> {
    within(name, found, "a finite number above 0", found > 0.0)
}

fn not_negative(name: &'static str, found: f64) -> Result<(), SpecError> {
    within(name, found, "a finite number of 0 or more", found >= 0.0)
}

fn decay(name: &'static str, found: f64) -> Result<(), SpecError> {
    let holds = (0.0..1.0).contains(&found) && (1.0 - found) as f32 != 0.0;
    within(name, found, "at least 0 and below 1", holds)
}

/// The z for which FTRL's closed form gives the weight `w` while n is 0; `scale` is β/α + λ₂.
fn initial_linear_term(w: f64, scale: f64, l1: f64) -> f32 {
    if w == 0.0 {
        return 0.0;
    }
    -(w * scale + w.signum() * l1) as f32
}

/// `base` to the power `exponent` by squaring: the same bits on every machine, which the
/// platform's `pow` does not promise.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut product = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            product *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    product
}

/// One update's optimizer, ready to be applied to any number of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Sgd { rate: f32 },
    AdaGrad { rate: f32, epsilon: f32 },
    RowWiseAdaGrad { rate: f32, epsilon: f32 },
    Adam { rate: f32, gain1: f32, gain2: f32, epsilon: f32 },
    Ftrl { inverse_alpha: f32, beta: f32, l1: f32, l2: f32 },
}

impl Step {
    /// Applies one finite gradient to one row: `values` and `gradient` have dim floats, `state` has
    /// [`SparseOptimizer::state_len`].
    #[inline]
    pub(crate) fn apply(&self, simd: Simd, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        simd.apply(self, values, state, gradient);
    }

    /// The computation, for [`Simd`] to compile for each kind of vector unit.
    #[inline(always)]
    pub(crate) fn compute(&self, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        match *self {
            Self::Sgd { rate } => sgd(rate, values, gradient),
            Self::AdaGrad { rate, epsilon } => adagrad(rate, epsilon, values, state, gradient),
            Self::RowWiseAdaGrad { rate, epsilon } => {
                row_wise_adagrad(rate, epsilon, values, state, gradient);
            }
            Self::Adam { rate, gain1, gain2, epsilon } => adam([rate, gain1, gain2, epsilon], values, state, gradient),
            Self::Ftrl { inverse_alpha, beta, l1, l2 } => ftrl([inverse_alpha, beta, l1, l2], values, state, gradient),
        }
    }
}

#[inline(always)]
fn sgd(rate: f32, values: &mut [f32], gradient: &[f32]) {
    for (w, g) in values.iter_mut().zip(gradient) {
        *w -= rate * g;
    }
}

#[inline(always)]
fn adagrad(rate: f32, epsilon: f32, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
    for ((w, a), g) in values.iter_mut().zip(state).zip(gradient) {
        *a += g * g;
        *w -= rate * (g / (a.sqrt() + epsilon));
    }
}

#[inline(always)]
fn row_wise_adagrad(rate: f32, epsilon: f32, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
    let accumulator = &mut state[0];
    *accumulator += squared_norm(gradient) / gradient.len() as f32;
    let denominator = accumulator.sqrt() + epsilon;
    for (w, g) in values.iter_mut().zip(gradient) {
        *w -= rate * (g / denominator);
    }
}

#[inline(always)]
fn adam(coefficients: [f32; 4], values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
    let [rate, gain1, gain2, epsilon] = coefficients;
    let (first, second) = state.split_at_mut(values.len());
    let moments = first.iter_mut().zip(second);
    for ((w, (m, v)), g) in values.iter_mut().zip(moments).zip(gradient) {
        *m += (g - *m) * gain1;
        *v += (g * g - *v) * gain2;
        *w -= rate * (*m / (v.sqrt() + epsilon));
    }
}

#[inline(always)]
fn ftrl(coefficients: [f32; 4], values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
    let [inverse_alpha, beta, l1, l2] = coefficients;
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

/// ‖g‖² in eight partial sums, added pairwise: an order that vector units of four, eight or sixteen
/// lanes can keep.
#[inline(always)]
fn squared_norm(gradient: &[f32]) -> f32 {
    let mut lanes = [0.0_f32; 8];
    for chunk in gradient.chunks(8) {
        for (lane, g) in lanes.iter_mut().zip(chunk) {
            *lane += g * g;
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Whether no element is NaN or infinite.
#[inline(always)]
pub(crate) fn all_finite(gradient: &[f32]) -> bool {
    gradient.iter().fold(true, |finite, g| finite & (g.abs() < f32::INFINITY))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIM: usize = 5;
    const STEPS: u64 = 20;

    /// A gradient that changes sign and size with step and column.
    fn gradient(step: u64, column: usize) -> f64 {
        let phase = step as f64 * 1.7 + column as f64 * 0.9;
        phase.sin() * 0.5_f64.powi(column as i32 % 3)
    }

    fn start() -> [f64; DIM] {
        [0.0, 0.5, -0.25, 0.125, -1.0]
    }

    /// Runs the optimizer beside a formula written out in f64, whose arguments are the weights, the
    /// gradient and the step.
    fn compare(optimizer: SparseOptimizer, mut formula: impl FnMut(&mut [f64], &[f64], u64)) {
        optimizer.validate().unwrap();
        let mut values = start().map(|w| w as f32);
        let mut state = vec![f32::NAN; optimizer.state_len(DIM)];
        optimizer.initial_state(&values, &mut state);
        let mut reference = start();
        for step in 1..=STEPS {
            let exact: Vec<f64> = (0..DIM).map(|c| gradient(step, c)).collect();
            let rounded: Vec<f32> = exact.iter().map(|&g| g as f32).collect();
            optimizer.step(step).compute(&mut values, &mut state, &rounded);
            formula(&mut reference, &exact, step);
            for (column, (w, r)) in values.iter().zip(&reference).enumerate() {
                let error = (f64::from(*w) - r).abs();
                assert!(error < 3e-6, "step {step} column {column}: {w}, not {r}");
            }
        }
    }

    #[test]
    fn sgd_is_its_formula() {
        compare(SparseOptimizer::Sgd { learning_rate: 0.1 }, |w, g, _| {
            for i in 0..DIM {
                w[i] -= 0.1 * g[i];
            }
        });
    }

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
    fn adam_corrects_a_late_row_by_the_global_count_not_its_own() {
        let optimizer = SparseOptimizer::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
        let after = |count| {
            let (mut values, mut state) = ([0.0], [0.0; 2]);
            optimizer.step(count).compute(&mut values, &mut state, &[0.5]);
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

    /// McMahan et al., algorithm 1, which keeps no weights but computes them from z and n; started
    /// from weights by the z that gives them.
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
        optimizer.step(1).compute(&mut values, &mut state, &[0.5, 3.0]);
        assert_eq!(values[0], 0.0);
        assert!(values[1] < 0.0);
    }

    #[test]
    fn a_gradient_of_zero_leaves_a_new_row_where_it_is() {
        let optimizers = [
            SparseOptimizer::Sgd { learning_rate: 0.1 },
            SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.0, epsilon: 1e-10 },
            SparseOptimizer::RowWiseAdaGrad { learning_rate: 0.1, initial_accumulator: 0.0, epsilon: 1e-10 },
            SparseOptimizer::Adam { learning_rate: 0.1, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 },
            SparseOptimizer::Ftrl { learning_rate: 0.05, beta: 1.0, l1: 0.01, l2: 0.01 },
        ];
        for optimizer in optimizers {
            let initial = start().map(|w| w as f32);
            let mut values = initial;
            let mut state = vec![0.0; optimizer.state_len(DIM)];
            optimizer.initial_state(&values, &mut state);
            optimizer.step(1).compute(&mut values, &mut state, &[0.0; DIM]);
            for (w, start) in values.iter().zip(initial) {
                assert!((w - start).abs() <= 1e-6, "{optimizer:?}: {start} became {w}");
            }
        }
    }

    #[test]
    fn the_squared_norm_is_the_sum_of_squares_at_every_length() {
        for len in 0..40 {
            let gradient: Vec<f32> = (0..len).map(|i| (i % 7) as f32 - 3.0).collect();
            let exact: f32 = gradient.iter().map(|g| g * g).sum();
            assert_eq!(squared_norm(&gradient), exact, "length {len}");
        }
    }

    #[test]
    fn powers_agree_with_repeated_multiplication() {
        assert_eq!(power(0.9, 0), 1.0);
        assert_eq!(power(0.5, 10), 0.5_f64.powi(10));
        assert!((power(0.999, 12_345) - (12_345.0 * 0.999_f64.ln()).exp()).abs() < 1e-12);
        assert_eq!(power(0.9, u64::MAX), 0.0);
    }

    #[test]
    fn a_hyper_parameter_that_f32_cannot_hold_is_refused() {
        let with_epsilon = |epsilon| SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.0, epsilon };
        assert!(with_epsilon(1e-10).validate().is_ok());
        assert!(with_epsilon(1e-60).validate().is_err());
        assert!(with_epsilon(1e60).validate().is_err());
        assert!(with_epsilon(f64::NAN).validate().is_err());
    }

    #[test]
    fn all_finite_finds_one_bad_element_anywhere() {
        for position in 0..DIM {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut gradient = [f32::MAX; DIM];
                assert!(all_finite(&gradient));
                gradient[position] = bad;
                assert!(!all_finite(&gradient));
            }
        }
    }
}
