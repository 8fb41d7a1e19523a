//! The layout of one row: the positions of its key, policy word, values and state, and the
//! conversion of values from and to their stored type. It does not know where rows are stored.
//!
//! A row is a run of 32-bit words, the same in memory and in a snapshot:
//!
//! ```text
//! word    0        1        2                3 …             3 + V …
//!     ┌────────┬────────┬─────────────────┬───────────────┬──────────────────┐
//!     │ key    │ key    │ the policy's    │ values        │ optimizer state  │
//!     │ low    │ high   │ word            │ V words       │ S words, f32     │
//!     └────────┴────────┴─────────────────┴───────────────┴──────────────────┘
//!      V = dim for f32, ⌈dim/2⌉ for f16 and bf16 (an odd one is followed by two zero bytes)
//!      S = SparseOptimizer::state_len(dim); if the leading columns have an optimizer of their own,
//!          the state of those columns, and then the state of the others
//! ```
//!
//! Beyond its payload (values and state) a row costs 12 bytes here and 6.4 to 9.6 in the
//! [index](crate::index). There are no LRU links, which would cost every row 8 bytes under any
//! policy. Expiry, feature score, LFU and LRU by age need only the policy's word: 16 bits of time
//! and 16 of score. A policy that needs exact recency can keep links by row number beside the slab.
//! The policy's word is 0 in a new row.

use crate::{FeatureKey, RowSpec, ValueType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// The word of a row that belongs to the group's [policy](crate::life).
pub(crate) const META_WORD: usize = 2;
/// Words before a row's values: two of key, one of the policy.
pub(crate) const HEADER_WORDS: usize = 3;

/// Where the parts of a row of one group lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowLayout {
    dim: usize,
    value_type: ValueType,
    value_words: usize,
    state_words: usize,
}

impl RowLayout {
    pub(crate) fn new(spec: &RowSpec) -> Self {
        Self {
            dim: spec.dim,
            value_type: spec.value_type,
            value_words: (spec.dim * spec.value_type.bytes()).div_ceil(4),
            state_words: spec.state_len(),
        }
    }

    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// Words of a whole row.
    pub(crate) fn stride(&self) -> usize {
        HEADER_WORDS + self.value_words + self.state_words
    }

    /// Bytes of a whole row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.stride() * size_of::<u32>()
    }

    /// Bytes of a row's values and state.
    pub(crate) fn payload_bytes(&self) -> usize {
        self.dim * self.value_type.bytes() + self.state_words * 4
    }

    /// The words that a look-up reads.
    pub(crate) fn look_up_words(&self) -> usize {
        HEADER_WORDS + self.value_words
    }

    /// Reads the values of a row into `out`, `dim` floats.
    pub(crate) fn read_values(&self, row: &[u32], out: &mut [f32]) {
        let words = &row[HEADER_WORDS..HEADER_WORDS + self.value_words];
        match self.value_type {
            ValueType::F32 => out.copy_from_slice(bytemuck::cast_slice(words)),
            ValueType::F16 => f16s(words, self.dim).convert_to_f32_slice(out),
            ValueType::Bf16 => bf16s(words, self.dim).convert_to_f32_slice(out),
        }
    }

    /// Rounds f32 values to the values that would be stored.
    pub(crate) fn round(&self, values: &mut [f32]) {
        match self.value_type {
            ValueType::F32 => {}
            ValueType::F16 => {
                for value in values {
                    *value = f16::from_f32(*value).to_f32();
                }
            }
            ValueType::Bf16 => {
                for value in values {
                    *value = bf16::from_f32(*value).to_f32();
                }
            }
        }
    }

    /// The stored bytes of a row's values, without padding.
    pub(crate) fn value_bytes<'r>(&self, row: &'r [u32]) -> &'r [u8] {
        let words = &row[HEADER_WORDS..HEADER_WORDS + self.value_words];
        &bytemuck::cast_slice(words)[..self.dim * self.value_type.bytes()]
    }

    /// A row's optimizer state.
    pub(crate) fn state<'r>(&self, row: &'r [u32]) -> &'r [f32] {
        bytemuck::cast_slice(&row[HEADER_WORDS + self.value_words..])
    }

    /// Makes `row` the new row of `key`, starting from `values`, which are already rounded.
    /// `spec` is the spec of this layout.
    pub(crate) fn write_new(&self, row: &mut [u32], key: FeatureKey, values: &[f32], spec: &RowSpec) {
        row.fill(0);
        row[0] = key.0 as u32;
        row[1] = (key.0 >> 32) as u32;
        let (words, state) = row[HEADER_WORDS..].split_at_mut(self.value_words);
        match self.value_type {
            ValueType::F32 => bytemuck::cast_slice_mut(words).copy_from_slice(values),
            ValueType::F16 => f16s_mut(words, self.dim).convert_from_f32_slice(values),
            ValueType::Bf16 => bf16s_mut(words, self.dim).convert_from_f32_slice(values),
        }
        spec.initial_state(values, bytemuck::cast_slice_mut(state));
    }

    /// Passes a row's values, as f32, and its state to `change`, and stores them back. f32 values
    /// are changed in place; others in `scratch`, which has dim floats.
    pub(crate) fn modify(&self, row: &mut [u32], scratch: &mut [f32], change: impl FnOnce(&mut [f32], &mut [f32])) {
        let (words, state) = row[HEADER_WORDS..].split_at_mut(self.value_words);
        let state = bytemuck::cast_slice_mut(state);
        match self.value_type {
            ValueType::F32 => change(bytemuck::cast_slice_mut(words), state),
            ValueType::F16 => {
                let stored = f16s_mut(words, self.dim);
                stored.convert_to_f32_slice(scratch);
                change(scratch, state);
                stored.convert_from_f32_slice(scratch);
            }
            ValueType::Bf16 => {
                let stored = bf16s_mut(words, self.dim);
                stored.convert_to_f32_slice(scratch);
                change(scratch, state);
                stored.convert_from_f32_slice(scratch);
            }
        }
    }
}

fn f16s(words: &[u32], dim: usize) -> &[f16] {
    &bytemuck::cast_slice(words)[..dim]
}

fn bf16s(words: &[u32], dim: usize) -> &[bf16] {
    &bytemuck::cast_slice(words)[..dim]
}

fn f16s_mut(words: &mut [u32], dim: usize) -> &mut [f16] {
    &mut bytemuck::cast_slice_mut(words)[..dim]
}

fn bf16s_mut(words: &mut [u32], dim: usize) -> &mut [bf16] {
    &mut bytemuck::cast_slice_mut(words)[..dim]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SparseOptimizer;
    use crate::key::key_of;

    /// A row that learns by plain SGD.
    fn sgd(dim: usize, value_type: ValueType) -> (RowSpec, RowLayout) {
        let spec = RowSpec { value_type, ..RowSpec::plain(dim) };
        (spec, RowLayout::new(&spec))
    }

    fn stored(value_type: ValueType, values: &[f32]) -> Vec<f32> {
        let (spec, layout) = sgd(values.len(), value_type);
        let mut row = vec![u32::MAX; layout.stride()];
        layout.write_new(&mut row, FeatureKey(1), values, &spec);
        let mut out = vec![f32::NAN; values.len()];
        layout.read_values(&row, &mut out);
        out
    }

    #[test]
    fn a_row_holds_key_values_and_state_apart() {
        let adam = SparseOptimizer::Adam { learning_rate: 0.1, beta1: 0.9, beta2: 0.99, epsilon: 1e-8 };
        for value_type in [ValueType::F32, ValueType::F16, ValueType::Bf16] {
            let spec = RowSpec { value_type, optimizer: adam, ..RowSpec::plain(3) };
            let layout = RowLayout::new(&spec);
            let mut row = vec![u32::MAX; layout.stride()];
            let key = FeatureKey(0x0123_4567_89ab_cdef);
            layout.write_new(&mut row, key, &[1.0, 2.0, 3.0], &spec);
            let mut scratch = vec![0.0; layout.dim()];
            layout.modify(&mut row, &mut scratch, |values, state| {
                values[2] = 4.0;
                state.fill(5.0);
            });
            let mut values = [0.0; 3];
            layout.read_values(&row, &mut values);
            assert_eq!(key_of(&row), key);
            assert_eq!(row[2], 0, "score and timestamp start at 0");
            assert_eq!(values, [1.0, 2.0, 4.0]);
            assert_eq!(layout.state(&row), [5.0; 6]);
            assert_eq!(layout.value_bytes(&row).len(), 3 * value_type.bytes());
            assert_eq!(layout.payload_bytes(), 3 * value_type.bytes() + 6 * size_of::<f32>());
        }
    }

    /// bf16 keeps 8 bits of significand: 1 + 2⁻⁸ lies between 1 and 1 + 2⁻⁷, 1 + 3·2⁻⁸ between
    /// 1 + 2⁻⁷ and 1 + 2⁻⁶; f16 keeps 11.
    #[test]
    fn half_types_round_to_nearest_and_ties_to_even() {
        let one_plus = |units: f32, bits: i32| 1.0 + units * 2.0_f32.powi(-bits);
        for (value_type, bits) in [(ValueType::Bf16, 8), (ValueType::F16, 11)] {
            let above = f32::EPSILON;
            let cases = [
                (one_plus(1.0, bits), 1.0),
                (one_plus(3.0, bits), one_plus(4.0, bits)),
                (one_plus(1.0, bits) + above, one_plus(2.0, bits)),
                (one_plus(1.0, bits) - above, 1.0),
                (-one_plus(3.0, bits), -one_plus(4.0, bits)),
            ];
            for (value, expected) in cases {
                assert_eq!(stored(value_type, &[value]), [expected], "{value_type:?} {value}");
            }
        }
    }

    #[test]
    fn rounding_equals_storing() {
        let values: Vec<f32> = (0..1_000).map(|i| (i as f32 - 500.0) * 0.123_457).collect();
        for value_type in [ValueType::F32, ValueType::F16, ValueType::Bf16] {
            let mut rounded = values.clone();
            sgd(values.len(), value_type).1.round(&mut rounded);
            assert_eq!(rounded, stored(value_type, &values), "{value_type:?}");
        }
    }

    #[test]
    fn the_padding_of_an_odd_half_row_is_zero() {
        let (spec, layout) = sgd(3, ValueType::F16);
        let mut row = vec![u32::MAX; layout.stride()];
        layout.write_new(&mut row, FeatureKey(0), &[1.0; 3], &spec);
        assert_eq!(row[HEADER_WORDS + 1] >> 16, 0);
    }
}
