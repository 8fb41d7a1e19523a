//! The optimizers of a whole row. One optimizer holds for all columns, or the leading columns have
//! one of their own ([`RowSpec::first_order`]), because they are first-order weights. Each
//! optimizer sees its columns as if they were a row of their own, with its own state. Pure
//! functions on slices.
//!
//! The state of the leading columns comes first, as their values do:
//!
//! ```text
//!  values  ┌ first-order weights ┬ other columns       ┐
//!  state   └ of first_order      ┴ of optimizer        ┘
//! ```

use crate::optimizer::{RowOptimizer, Step};
use crate::simd::Simd;
use crate::{RowSpec, SparseOptimizer};

/// One update of the rows of a group, with everything computed that does not depend on the row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowUpdate {
    step: Step,
    first_order: Option<FirstOrderStep>,
}

/// The part of an update that changes the leading columns.
#[derive(Clone, Copy, Debug)]
struct FirstOrderStep {
    step: Step,
    columns: usize,
    state_len: usize,
}

impl RowSpec {
    /// Floats of optimizer state in a row.
    #[must_use]
    pub fn state_len(&self) -> usize {
        match self.first_order {
            None => self.optimizer.state_len(self.dim),
            Some(first_order) => {
                let others = self.dim.saturating_sub(self.zero_columns);
                first_order.state_len(self.zero_columns) + self.optimizer.state_len(others)
            }
        }
    }

    /// Writes the state of a row that starts from `values`, which are already rounded to the stored
    /// type. `state` has [`Self::state_len`] floats.
    pub(crate) fn initial_state(&self, values: &[f32], state: &mut [f32]) {
        let Some(first_order) = self.first_order else { return self.optimizer.initial_state(values, state) };
        let (weights, values) = values.split_at(self.zero_columns);
        let (state_of_weights, state) = state.split_at_mut(first_order.state_len(self.zero_columns));
        first_order.initial_state(weights, state_of_weights);
        self.optimizer.initial_state(values, state);
    }

    /// The update of this number, counted from 1 over the whole job.
    pub(crate) fn step(&self, count: u64) -> RowUpdate {
        let columns = self.zero_columns;
        let of = |optimizer: SparseOptimizer| FirstOrderStep {
            step: optimizer.step(count),
            columns,
            state_len: optimizer.state_len(columns),
        };
        RowUpdate { step: self.optimizer.step(count), first_order: self.first_order.map(of) }
    }
}

impl RowUpdate {
    /// Applies one finite gradient to one row: `values` and `gradient` have dim floats, `state` has
    /// [`RowSpec::state_len`].
    #[inline]
    pub(crate) fn apply(&self, simd: Simd, values: &mut [f32], state: &mut [f32], gradient: &[f32]) {
        match self.first_order {
            None => simd.apply(&self.step, values, state, gradient),
            Some(first_order) => self.apply_apart(first_order, simd, values, state, gradient),
        }
    }

    /// [`Self::apply`] for a row of two optimizers. It is apart, so that the loop over rows of one
    /// optimizer stays as short as it was.
    #[inline(never)]
    fn apply_apart(
        &self,
        first_order: FirstOrderStep,
        simd: Simd,
        values: &mut [f32],
        state: &mut [f32],
        gradient: &[f32],
    ) {
        let (weights, values) = values.split_at_mut(first_order.columns);
        let (state_of_weights, state) = state.split_at_mut(first_order.state_len);
        let (gradient_of_weights, gradient) = gradient.split_at(first_order.columns);
        simd.apply(&first_order.step, weights, state_of_weights, gradient_of_weights);
        simd.apply(&self.step, values, state, gradient);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::{RowStep, examples};

    const DIM: usize = 7;

    fn spec(first_order: SparseOptimizer, optimizer: SparseOptimizer, zero_columns: usize) -> RowSpec {
        RowSpec { optimizer, first_order: Some(first_order), zero_columns, ..RowSpec::plain(DIM) }
    }

    /// Every pair of optimizers: a row equals two shorter rows that never meet.
    #[test]
    fn a_row_of_two_optimizers_equals_two_rows() {
        let pairs = examples().into_iter().flat_map(|one| examples().into_iter().map(move |two| (one, two)));
        for (first_order, optimizer) in pairs {
            for columns in [1, 3] {
                let spec = spec(first_order, optimizer, columns);
                let mut values: Vec<f32> = (0..DIM).map(|c| if c < columns { 0.0 } else { 0.1 * c as f32 }).collect();
                let mut state = vec![f32::NAN; spec.state_len()];
                spec.initial_state(&values, &mut state);
                let (mut weights, mut others) = (values[..columns].to_vec(), values[columns..].to_vec());
                let mut state_of_weights = vec![f32::NAN; first_order.state_len(columns)];
                let mut state_of_others = vec![f32::NAN; optimizer.state_len(DIM - columns)];
                first_order.initial_state(&weights, &mut state_of_weights);
                optimizer.initial_state(&others, &mut state_of_others);
                for count in 1..=5 {
                    let gradient: Vec<f32> = (0..DIM).map(|c| (count as f32 * 1.7 + c as f32 * 0.9).sin()).collect();
                    spec.step(count).apply(Simd::for_columns(DIM), &mut values, &mut state, &gradient);
                    first_order.step(count).apply(&mut weights, &mut state_of_weights, &gradient[..columns]);
                    optimizer.step(count).apply(&mut others, &mut state_of_others, &gradient[columns..]);
                    assert_eq!(values, [&weights[..], &others[..]].concat(), "{first_order:?}, {optimizer:?}");
                    assert_eq!(
                        state,
                        [&state_of_weights[..], &state_of_others[..]].concat(),
                        "{first_order:?}, {optimizer:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_state_of_both_is_counted() {
        let ftrl = SparseOptimizer::Ftrl { learning_rate: 0.05, beta: 1.0, l1: 0.0, l2: 0.0 };
        let row_wise = SparseOptimizer::RowWiseAdaGrad { learning_rate: 0.1, initial_accumulator: 0.0, epsilon: 1e-8 };
        assert_eq!(spec(ftrl, row_wise, 1).state_len(), 3);
        assert_eq!(spec(row_wise, ftrl, 1).state_len(), 1 + 2 * (DIM - 1));
        assert_eq!(RowSpec { first_order: None, ..spec(ftrl, row_wise, 1) }.state_len(), 1);
        // 7 values, z and n of one weight, and one accumulator.
        assert_eq!(spec(ftrl, row_wise, 1).row_bytes().total(), 4 * 7 + 4 * 3 + 22);
    }
}
