//! The row optimizers: one gradient applied to one row. Pure functions on slices, which the table
//! calls with a row's values and state.
//!
//! Each optimizer has a file with its formula, its state, the ranges of its settings, its numbers
//! in snapshots and its test. It is registered [below](optimizers), and declared with its settings
//! in `rectrain-kinds`. The page `docs/development/add-a-row-optimizer.md` lists the files to
//! touch.
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
//!
//! All arithmetic is element-wise f32 in a fixed order, so that vector units of every width give
//! the bits of the loops here.

use rectrain_kinds::SparseOptimizer;

use crate::SpecError;

/// An optimizer's settings as numbers, in the order of its file. The learning rate is first, and
/// numbers that the optimizer does not have are 0.
pub(crate) type Numbers = [f64; 4];

/// One optimizer, with its settings as fields.
pub(crate) trait Optimizer: Copy + 'static {
    /// Names the optimizer in snapshots. A tag is never given to another optimizer.
    const SNAPSHOT_TAG: u8;

    /// Settings that the tests of every optimizer run with.
    #[cfg(test)]
    const EXAMPLES: &'static [Self];

    /// One update, with everything computed that does not depend on the row.
    type Step: RowStep;

    /// The settings as a snapshot holds them.
    fn numbers(self) -> Numbers;

    /// The inverse of [`Self::numbers`].
    fn from_numbers(numbers: Numbers) -> Self;

    /// Checks every setting against its range.
    fn validate(self) -> Result<(), SpecError>;

    /// Writes the state of a row that starts from `values`, which are already rounded to the stored
    /// type. `state` has [`SparseOptimizer::state_len`] floats.
    fn initial_state(self, values: &[f32], state: &mut [f32]);

    /// The update of this number, counted from 1 over the whole job.
    fn step(self, count: u64) -> Self::Step;
}

/// One update of one optimizer.
pub(crate) trait RowStep {
    /// Applies one finite gradient to one row: `values` and `gradient` have dim floats, `state` has
    /// [`SparseOptimizer::state_len`]. Implementations are `#[inline(always)]`, because `simd`
    /// compiles them for each kind of vector unit.
    fn apply(&self, values: &mut [f32], state: &mut [f32], gradient: &[f32]);
}

/// A [`SparseOptimizer`] as the rest of the crate calls it.
pub(crate) trait RowOptimizer: Copy + Sized {
    /// See [`Optimizer::initial_state`].
    fn initial_state(self, values: &[f32], state: &mut [f32]);

    /// See [`Optimizer::step`].
    fn step(self, count: u64) -> Step;

    /// See [`Optimizer::validate`].
    fn validate(self) -> Result<(), SpecError>;

    /// The optimizer's tag and settings in a snapshot.
    fn to_snapshot(self) -> (u8, Numbers);

    /// The optimizer of a snapshot. `None` if no optimizer has this tag.
    fn from_snapshot(tag: u8, numbers: Numbers) -> Option<Self>;

    /// This optimizer with a learning rate of 0 if later runs may change the rate; see
    /// [`RowSpec::continues`](crate::RowSpec::continues).
    fn without_learning_rate(self) -> Self;
}

/// Registers the optimizers: for each its file, its type there, and its settings as
/// [`SparseOptimizer`] declares them.
macro_rules! optimizers {
    ($($file:ident::$Kind:ident { $($setting:ident),+ },)+) => {
        $(mod $file;)+

        /// One update of any optimizer, ready to be applied to any number of rows.
        #[derive(Clone, Copy, Debug)]
        pub(crate) enum Step { $($Kind(<$file::$Kind as Optimizer>::Step),)+ }

        impl RowStep for Step {
            #[inline(always)]
            fn apply(&self, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
                match self { $(Self::$Kind(step) => step.apply(values, state, gradient),)+ }
            }
        }

        $(impl From<$file::$Kind> for SparseOptimizer {
            fn from(optimizer: $file::$Kind) -> Self {
                let $file::$Kind { $($setting),+ } = optimizer;
                Self::$Kind { $($setting),+ }
            }
        })+

        impl RowOptimizer for SparseOptimizer {
            fn initial_state(self, values: &[f32], state: &mut [f32]) {
                match self {
                    $(Self::$Kind { $($setting),+ } => $file::$Kind { $($setting),+ }.initial_state(values, state),)+
                }
            }

            fn step(self, count: u64) -> Step {
                match self {
                    $(Self::$Kind { $($setting),+ } => Step::$Kind($file::$Kind { $($setting),+ }.step(count)),)+
                }
            }

            fn validate(self) -> Result<(), SpecError> {
                match self { $(Self::$Kind { $($setting),+ } => $file::$Kind { $($setting),+ }.validate(),)+ }
            }

            fn to_snapshot(self) -> (u8, Numbers) {
                match self {
                    $(Self::$Kind { $($setting),+ } => {
                        ($file::$Kind::SNAPSHOT_TAG, $file::$Kind { $($setting),+ }.numbers())
                    })+
                }
            }

            fn from_snapshot(tag: u8, numbers: Numbers) -> Option<Self> {
                match tag {
                    $($file::$Kind::SNAPSHOT_TAG => Some($file::$Kind::from_numbers(numbers).into()),)+
                    _ => None,
                }
            }

            fn without_learning_rate(self) -> Self {
                if !self.changeable().contains(&"learningRate") {
                    return self;
                }
                let (tag, [_, others @ ..]) = self.to_snapshot();
                let [b, c, d] = others;
                Self::from_snapshot(tag, [0.0, b, c, d]).unwrap_or(self)
            }
        }

        /// Every optimizer with each of its examples, for tests that hold for all of them.
        #[cfg(test)]
        pub(crate) fn examples() -> Vec<SparseOptimizer> {
            let mut examples = Vec::new();
            $(examples.extend($file::$Kind::EXAMPLES.iter().map(|example| SparseOptimizer::from(*example)));)+
            examples
        }
    };
}

optimizers! {
    sgd::Sgd { learning_rate },
    ada_grad::AdaGrad { learning_rate, initial_accumulator, epsilon },
    row_wise_ada_grad::RowWiseAdaGrad { learning_rate, initial_accumulator, epsilon },
    adam::Adam { learning_rate, beta1, beta2, epsilon },
    ftrl::Ftrl { learning_rate, beta, l1, l2 },
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

/// A rate of decay β, for which 1 − β must not vanish in f32.
fn decay(name: &'static str, found: f64) -> Result<(), SpecError> {
    let holds = (0.0..1.0).contains(&found) && (1.0 - found) as f32 != 0.0;
    within(name, found, "at least 0 and below 1", holds)
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

/// `base` to the power `exponent`, by squaring. The bits are the same on every machine, which the
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

/// Whether no element is NaN or infinite.
#[inline(always)]
pub(crate) fn all_finite(gradient: &[f32]) -> bool {
    gradient.iter().fold(true, |finite, g| finite & (g.abs() < f32::INFINITY))
}

/// Compares an optimizer with its formula in f64, for the test in each optimizer's file.
#[cfg(test)]
mod formula {
    use super::*;

    pub(super) const DIM: usize = 5;
    const STEPS: u64 = 20;

    /// A gradient that changes sign and size with step and column.
    fn gradient(step: u64, column: usize) -> f64 {
        let phase = step as f64 * 1.7 + column as f64 * 0.9;
        phase.sin() * 0.5_f64.powi(column as i32 % 3)
    }

    /// The weights that every comparison starts from.
    pub(super) fn start() -> [f64; DIM] {
        [0.0, 0.5, -0.25, 0.125, -1.0]
    }

    /// Runs the optimizer beside a formula written out in f64, whose arguments are the weights, the
    /// gradient and the step.
    pub(super) fn compare(optimizer: SparseOptimizer, mut formula: impl FnMut(&mut [f64], &[f64], u64)) {
        optimizer.validate().unwrap();
        let mut values = start().map(|w| w as f32);
        let mut state = vec![f32::NAN; optimizer.state_len(DIM)];
        optimizer.initial_state(&values, &mut state);
        let mut reference = start();
        for step in 1..=STEPS {
            let exact: Vec<f64> = (0..DIM).map(|c| gradient(step, c)).collect();
            let rounded: Vec<f32> = exact.iter().map(|&g| g as f32).collect();
            optimizer.step(step).apply(&mut values, &mut state, &rounded);
            formula(&mut reference, &exact, step);
            for (column, (w, r)) in values.iter().zip(&reference).enumerate() {
                let error = (f64::from(*w) - r).abs();
                assert!(error < 3e-6, "step {step} column {column}: {w}, not {r}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::formula::{DIM, start};
    use super::*;
    use rectrain_kinds::SparseOptimizerKind;

    #[test]
    fn every_kind_of_optimizer_has_valid_examples() {
        for kind in SparseOptimizerKind::ALL {
            assert!(examples().iter().any(|optimizer| optimizer.kind() == kind), "{kind}");
        }
        for optimizer in examples() {
            assert_eq!(optimizer.validate(), Ok(()), "{optimizer:?}");
        }
    }

    #[test]
    fn a_snapshot_distinguishes_all_optimizers() {
        for optimizer in examples() {
            let (tag, numbers) = optimizer.to_snapshot();
            assert_eq!(SparseOptimizer::from_snapshot(tag, numbers), Some(optimizer));
            let first = format!("learning_rate: {:?}", numbers[0]);
            assert!(format!("{optimizer:?}").contains(&first), "{optimizer:?}: the learning rate is the first number");
            for other in examples() {
                assert_eq!(tag == other.to_snapshot().0, optimizer.kind() == other.kind(), "{optimizer:?}, {other:?}");
            }
        }
        assert_eq!(SparseOptimizer::from_snapshot(u8::MAX, [0.0; 4]), None);
    }

    #[test]
    fn an_optimizer_without_its_rate_keeps_all_else() {
        for optimizer in examples() {
            let ((tag, numbers), (tag_without, without)) =
                (optimizer.to_snapshot(), optimizer.without_learning_rate().to_snapshot());
            assert_eq!((tag, &numbers[1..]), (tag_without, &without[1..]));
            let expected = if optimizer.changeable().is_empty() { numbers[0] } else { 0.0 };
            assert_eq!(without[0], expected, "{optimizer:?}");
        }
    }

    #[test]
    fn a_gradient_of_zero_leaves_a_new_row_where_it_is() {
        for optimizer in examples() {
            let initial = start().map(|w| w as f32);
            let mut values = initial;
            let mut state = vec![0.0; optimizer.state_len(DIM)];
            optimizer.initial_state(&values, &mut state);
            optimizer.step(1).apply(&mut values, &mut state, &[0.0; DIM]);
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
    fn a_setting_that_f32_cannot_hold_is_refused() {
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
