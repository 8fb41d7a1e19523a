//! 32-bit floats in plain Rust, which the compiler turns into vectors of whatever the build is for.
#![allow(unsafe_code)] // Loads without bounds checks in the innermost loop.

use super::bf16::rounded;
use super::{PANEL_LINES, Tile, VECTOR_ROWS};
use crate::lines::LINE;

/// Rows whose sums are kept at a time, a line of columns of each: 12 of AVX2's 16 registers, 24 of NEON's 32.
const ROWS: usize = 6;

/// Copies a row, rounded to bf16 if asked: `WIDTH` values to the start of `words`, the next `WIDTH` a `step` further on, and so on.
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

/// Whether the build has the instruction that multiplies and adds: a call of a function in its place would take many times as long.
const FUSED: bool = cfg!(any(target_feature = "fma", target_arch = "aarch64"));

/// The tile in parts whose sums the registers hold.
pub(super) fn tile(tile: &mut Tile<'_>) {
    for half in 0..tile.columns.div_ceil(LINE) {
        for first in (0..tile.rows).step_by(ROWS) {
            // SAFETY: `Tile::check` has passed; these rows are the tile's.
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
/// `Tile::check` has passed, and the tile has `COUNT` rows from `first` on, and this half of its columns.
#[inline(always)]
unsafe fn part<const COUNT: usize>(tile: &mut Tile<'_>, first: usize, half: usize) {
    let start: [[f32; LINE]; COUNT] = std::array::from_fn(|row| tile.start(first + row, half * LINE));
    // Nobody is given the address of what the loop adds to, so it can be in registers.
    let mut sums = start;
    for word in 0..tile.words {
        // SAFETY: word < words and first + row < rows, for which `Tile::check` has found both operands long enough.
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
