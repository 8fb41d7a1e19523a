//! The kernel for 32-bit floats in plain Rust. The compiler vectorizes it for the target of the
//! build.
#![allow(unsafe_code)] // Loads without bounds checks in the innermost loop.

use super::bf16::rounded;
use super::{PANEL_LINES, Tile, VECTOR_ROWS};
use crate::lines::LINE;

/// The rows of a part. The sums of a part, with a cache line of columns, take 12 of AVX2's 16
/// registers, or 24 of NEON's 32.
const ROWS: usize = 6;

/// Copies a row, rounded to bf16 if `ROUNDED`: `WIDTH` values to the start of `words`, the next
/// `WIDTH` one `step` later, and so on.
#[inline(always)]
pub(super) fn spread<const WIDTH: usize, const ROUNDED: bool>(values: &[f32], words: &mut [u32], step: usize) {
    let put = |values: &[u32], words: &mut [u32]| {
        let word = |value: u32| if ROUNDED { rounded(value) } else { value };
        words.iter_mut().zip(values).for_each(|(to, &value)| *to = word(value));
    };
    let values: &[u32] = bytemuck::cast_slice(values);
    let (whole, rest) = values.as_chunks::<WIDTH>();
    for (chunk, words) in whole.iter().zip(words.chunks_mut(step.max(1))) {
        put(chunk, &mut words[..WIDTH]);
    }
    if !rest.is_empty() {
        put(rest, &mut words[whole.len() * step..][..rest.len()]);
    }
}

/// True if the build's target has fused multiply-add. Without it, `mul_add` would call a slow
/// function.
pub(crate) const FUSED: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

/// Computes a tile in parts whose sums fit into registers.
pub(super) fn tile(tile: &mut Tile<'_>) {
    for half in 0..tile.columns.div_ceil(LINE) {
        for first in (0..tile.rows).step_by(ROWS) {
            // SAFETY: `Tile::check` has passed; the tile has these rows.
            unsafe {
                match tile.rows - first {
                    1 => part::<1>(tile, first, half),
                    2 => part::<2>(tile, first, half),
                    3 => part::<3>(tile, first, half),
                    4 => part::<4>(tile, first, half),
                    5 => part::<5>(tile, first, half),
                    _ => part::<ROWS>(tile, first, half),
                }
            }
        }
    }
}

/// # Safety
/// `Tile::check` has passed. The tile has `COUNT` rows from `first` on, and columns in this half.
#[inline(always)]
unsafe fn part<const COUNT: usize>(tile: &mut Tile<'_>, first: usize, half: usize) {
    let start: [[f32; LINE]; COUNT] = std::array::from_fn(|row| tile.start(first + row, half * LINE));
    // The address of `sums` is never taken, so the compiler can keep it in registers.
    let mut sums = start;
    for word in 0..tile.words {
        // SAFETY: word < words and first + row < rows, and `Tile::check` has checked the lengths of
        // both operands.
        let (right, left) = unsafe {
            let right: &[u32; LINE] = &tile.right.get_unchecked(word * PANEL_LINES + half).0;
            let left: [f32; COUNT] =
                std::array::from_fn(|row| f32::from_bits(*tile.left.get_unchecked(word * VECTOR_ROWS + first + row)));
            (right.map(f32::from_bits), left)
        };
        for (sums, left) in sums.iter_mut().zip(left) {
            for (sum, right) in sums.iter_mut().zip(right) {
                *sum = if FUSED { left.mul_add(right, *sum) } else { left * right + *sum };
            }
        }
    }
    let complete = sums;
    for (row, sums) in complete.iter().enumerate() {
        tile.finish(first + row, half * LINE, sums);
    }
}
