//! The kernel for 32-bit floats with AVX2. It computes a tile in parts of 6 rows and a cache line
//! of columns. The sums of a part take 12 of the 16 registers.
// Intrinsics, and loads without bounds checks in the innermost loop.
#![allow(unsafe_code)]

pub(super) use here::{available, spread_rounded, tile, transpose};

#[cfg(not(target_arch = "x86_64"))]
mod here {
    use crate::kernel::Tile;

    pub(in super::super) fn available() -> bool {
        false
    }

    pub(in super::super) fn tile(_: &mut Tile<'_>) {
        unreachable!("this platform does not have this kernel")
    }

    pub(in super::super) fn spread_rounded<const WIDTH: usize>(_: &[f32], _: &mut [u32], _: usize) {
        unreachable!("this platform does not have this kernel")
    }

    pub(in super::super) fn transpose(_: &[u32], _: usize, _: &mut [u32], _: usize) {
        unreachable!("this platform does not have this kernel")
    }
}

#[cfg(target_arch = "x86_64")]
mod here {
    use std::arch::x86_64::{
        __m256, _mm256_fmadd_ps, _mm256_load_ps, _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_set1_ps,
        _mm256_setzero_ps, _mm256_shuffle_ps, _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };

    use crate::kernel::{PANEL_LINES, Tile, VECTOR_ROWS, fp32};
    use crate::lines::LINE;

    /// The rows of a part, whose sums are in registers.
    const ROWS: usize = 6;
    /// Values of a vector.
    const LANES: usize = LINE / 2;

    pub(in super::super) fn available() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }

    pub(in super::super) fn tile(tile: &mut Tile<'_>) {
        // SAFETY: a `Kernel` of this kind exists only if `available` is true; `Tile::check` has
        // passed.
        unsafe { parts(tile) }
    }

    /// [`fp32::spread`] with rounding, compiled for AVX2.
    pub(in super::super) fn spread_rounded<const WIDTH: usize>(values: &[f32], words: &mut [u32], step: usize) {
        #[target_feature(enable = "avx2")]
        fn compiled<const WIDTH: usize>(values: &[f32], words: &mut [u32], step: usize) {
            fp32::spread::<WIDTH, true>(values, words, step);
        }
        // SAFETY: only kernels for AVX2 and AVX-512 call this, and they exist only if the processor
        // has AVX2.
        unsafe { compiled::<WIDTH>(values, words, step) }
    }

    pub(in super::super) fn transpose(from: &[u32], from_step: usize, to: &mut [u32], to_step: usize) {
        // SAFETY: only kernels for AVX2 call this, and they exist only if the processor has it.
        // `Kernel::transpose` has checked the lengths.
        unsafe { transpose_block(from.as_ptr().cast(), from_step, to.as_mut_ptr().cast(), to_step) }
    }

    /// Transposes 8 columns, and then the other 8, so that each row of `to` is written whole and in
    /// order.
    ///
    /// # Safety
    /// The processor has the function's target features. `from` and `to` have 16 rows of 16 words.
    #[target_feature(enable = "avx2")]
    unsafe fn transpose_block(from: *const f32, from_step: usize, to: *mut f32, to_step: usize) {
        for column in [0, LANES] {
            // SAFETY: the caller upholds the contract of this function.
            unsafe {
                let low = transposed(from.add(column), from_step);
                let high = transposed(from.add(LANES * from_step + column), from_step);
                for (row, (low, high)) in low.into_iter().zip(high).enumerate() {
                    let to = to.add((column + row) * to_step);
                    _mm256_storeu_ps(to, low);
                    _mm256_storeu_ps(to.add(LANES), high);
                }
            }
        }
    }

    /// Transposes 8 rows of 8 words by exchanging pairs, fours and halves. Returns the columns.
    ///
    /// # Safety
    /// The processor has the function's target features. `from` has 8 rows of 8 words.
    #[inline]
    #[target_feature(enable = "avx2")]
    unsafe fn transposed(from: *const f32, step: usize) -> [__m256; LANES] {
        let mut rows = [_mm256_setzero_ps(); LANES];
        for (index, row) in rows.iter_mut().enumerate() {
            // SAFETY: the caller upholds the contract of this function.
            *row = unsafe { _mm256_loadu_ps(from.add(index * step)) };
        }
        let mut pairs = rows;
        for two in 0..LANES / 2 {
            pairs[2 * two] = _mm256_unpacklo_ps(rows[2 * two], rows[2 * two + 1]);
            pairs[2 * two + 1] = _mm256_unpackhi_ps(rows[2 * two], rows[2 * two + 1]);
        }
        let mut fours = pairs;
        for four in [0, 4] {
            for half in 0..2 {
                let (first, second) = (pairs[four + half], pairs[four + 2 + half]);
                fours[four + 2 * half] = _mm256_shuffle_ps::<0b01_00_01_00>(first, second);
                fours[four + 2 * half + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(first, second);
            }
        }
        let mut columns = fours;
        for column in 0..4 {
            columns[column] = _mm256_permute2f128_ps::<0x20>(fours[column], fours[4 + column]);
            columns[4 + column] = _mm256_permute2f128_ps::<0x31>(fours[column], fours[4 + column]);
        }
        columns
    }

    /// # Safety
    /// The processor has the function's target features, and `Tile::check` has passed.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn parts(tile: &mut Tile<'_>) {
        for half in 0..tile.columns.div_ceil(LINE) {
            for first in (0..tile.rows).step_by(ROWS) {
                // SAFETY: the caller upholds the contract of this function; the tile has these
                // rows.
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
    /// As for [`parts`]. The tile has `COUNT` rows from `first` on, and columns in this half.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn part<const COUNT: usize>(tile: &mut Tile<'_>, first: usize, half: usize) {
        let mut sums = [[_mm256_setzero_ps(); 2]; COUNT];
        for (row, sums) in sums.iter_mut().enumerate() {
            let start: [f32; LINE] = tile.start(first + row, half * LINE);
            // SAFETY: a line has two vectors.
            *sums = unsafe { [_mm256_loadu_ps(start.as_ptr()), _mm256_loadu_ps(start[LANES..].as_ptr())] };
        }
        let (left, right) = (tile.left.as_ptr().cast::<f32>(), tile.right.as_ptr());
        for word in 0..tile.words {
            // SAFETY: word < words and first + row < rows, and `Tile::check` has checked the
            // lengths of both operands. Lines are aligned.
            unsafe {
                let line = right.add(word * PANEL_LINES + half).cast::<f32>();
                let columns = [_mm256_load_ps(line), _mm256_load_ps(line.add(LANES))];
                for (row, sums) in sums.iter_mut().enumerate() {
                    let value = _mm256_set1_ps(*left.add(word * VECTOR_ROWS + first + row));
                    for (sum, column) in sums.iter_mut().zip(columns) {
                        *sum = _mm256_fmadd_ps(value, column, *sum);
                    }
                }
            }
        }
        for (row, [low, high]) in sums.into_iter().enumerate() {
            let mut sums = [0.0; LINE];
            // SAFETY: a line has two vectors.
            unsafe {
                _mm256_storeu_ps(sums.as_mut_ptr(), low);
                _mm256_storeu_ps(sums[LANES..].as_mut_ptr(), high);
            }
            tile.finish(first + row, half * LINE, &sums);
        }
    }
}
