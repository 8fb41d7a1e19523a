//! Sums of a matrix by column, with ReLU's backward pass in front of them: the gradient of a
//! layer's bias. The loops are written once and compiled for each vector unit. They only add and
//! compare, column by column in the order of the rows, so every unit gives the same bits.
// Calls of functions that are compiled for a vector unit.
#![allow(unsafe_code)]

use crate::kernel::Vectors;

/// Sets derivatives to 0 where ReLU let nothing through, and adds their rows to `sums`, in order.
/// `derivatives` and ReLU's `outputs` are `[rows, columns]`, and `sums` is `[columns]`.
///
/// # Panics
/// If the lengths do not fit, or there are no columns.
pub fn relu_backward(derivatives: &mut [f32], outputs: &[f32], sums: &mut [f32]) {
    assert_eq!(derivatives.len(), outputs.len(), "the derivatives of ReLU's outputs");
    assert!(derivatives.len().is_multiple_of(sums.len()), "rows of {} columns", sums.len());
    relu_backward_by(fastest(), derivatives, outputs, sums);
}

/// Adds rows to `sums`, in order. `rows` is `[rows, columns]`, and `sums` is `[columns]`.
///
/// # Panics
/// If there are no whole rows, or no columns.
pub fn add_rows(rows: &[f32], sums: &mut [f32]) {
    assert!(rows.len().is_multiple_of(sums.len()), "rows of {} columns", sums.len());
    add_rows_by(fastest(), rows, sums);
}

fn fastest() -> Vectors {
    Vectors::all().next().unwrap_or(Vectors::Portable)
}

fn relu_backward_by(by: Vectors, derivatives: &mut [f32], outputs: &[f32], sums: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn avx512(derivatives: &mut [f32], outputs: &[f32], sums: &mut [f32]) {
        relu_backward_of(derivatives, outputs, sums);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn avx2(derivatives: &mut [f32], outputs: &[f32], sums: &mut [f32]) {
        relu_backward_of(derivatives, outputs, sums);
    }

    match by {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Vectors::all` makes this only if the processor has AVX-512F.
        Vectors::Avx512 => unsafe { avx512(derivatives, outputs, sums) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Vectors::all` makes this only if the processor has AVX2.
        Vectors::Avx2 => unsafe { avx2(derivatives, outputs, sums) },
        _ => relu_backward_of(derivatives, outputs, sums),
    }
}

#[inline(always)]
fn relu_backward_of(derivatives: &mut [f32], outputs: &[f32], sums: &mut [f32]) {
    let columns = sums.len();
    for (values, outputs) in derivatives.chunks_exact_mut(columns).zip(outputs.chunks_exact(columns)) {
        for ((value, &output), sum) in values.iter_mut().zip(outputs).zip(&mut *sums) {
            // The comparison is false for NaN, so its derivative stays.
            *value = if output <= 0.0 { 0.0 } else { *value };
            *sum += *value;
        }
    }
}

fn add_rows_by(by: Vectors, rows: &[f32], sums: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn avx512(rows: &[f32], sums: &mut [f32]) {
        add_rows_of(rows, sums);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn avx2(rows: &[f32], sums: &mut [f32]) {
        add_rows_of(rows, sums);
    }

    match by {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Vectors::all` makes this only if the processor has AVX-512F.
        Vectors::Avx512 => unsafe { avx512(rows, sums) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `Vectors::all` makes this only if the processor has AVX2.
        Vectors::Avx2 => unsafe { avx2(rows, sums) },
        _ => add_rows_of(rows, sums),
    }
}

#[inline(always)]
fn add_rows_of(rows: &[f32], sums: &mut [f32]) {
    for row in rows.chunks_exact(sums.len()) {
        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows and columns: none, one, odd, and around the lengths of vectors.
    const SHAPES: [[usize; 2]; 8] = [[0, 5], [1, 1], [7, 1], [3, 15], [4, 16], [5, 17], [2, 33], [9, 70]];

    /// Values from −2 to 2, with zeros of both signs.
    fn values(count: usize, seed: u64) -> Vec<f32> {
        let value = |index: u64| {
            let bits = (index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ seed) >> 40;
            match bits % 7 {
                0 => 0.0,
                1 => -0.0,
                _ => bits as f32 / (1 << 22) as f32 - 2.0,
            }
        };
        (0..count as u64).map(value).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn derivatives_pass_where_relu_let_values_through_on_every_unit() {
        for [rows, columns] in SHAPES {
            let (before, start) = (values(rows * columns, 1), values(columns, 3));
            let mut outputs: Vec<f32> = values(rows * columns, 2).iter().map(|value| value.max(0.0)).collect();
            if let Some(last) = outputs.last_mut() {
                *last = f32::NAN;
            }
            let passes = |index: usize| outputs[index].is_nan() || outputs[index] > 0.0;
            let expected: Vec<f32> =
                before.iter().enumerate().map(|(index, &value)| if passes(index) { value } else { 0.0 }).collect();
            let sum = |column: usize| (0..rows).fold(start[column], |sum, row| sum + expected[row * columns + column]);
            let expected_sums: Vec<f32> = (0..columns).map(sum).collect();
            for by in Vectors::all() {
                let (mut derivatives, mut sums) = (before.clone(), start.clone());
                relu_backward_by(by, &mut derivatives, &outputs, &mut sums);
                assert_eq!(bits(&derivatives), bits(&expected), "{rows} × {columns}, {by:?}");
                assert_eq!(bits(&sums), bits(&expected_sums), "{rows} × {columns}, {by:?}");
                let mut sums = start.clone();
                add_rows_by(by, &expected, &mut sums);
                assert_eq!(bits(&sums), bits(&expected_sums), "{rows} × {columns}, {by:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "rows of 4 columns")]
    fn a_part_of_a_row_is_refused() {
        add_rows(&[1.0; 6], &mut [0.0; 4]);
    }
}
