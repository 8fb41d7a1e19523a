//! The kernel for AVX512-BF16.
#![allow(unsafe_code)] // Intrinsics of a processor's own, and loads through pointers in the innermost loop.

use super::Tile;

#[cfg(not(target_arch = "x86_64"))]
mod missing {
    use super::Tile;

    pub(in super::super) fn available() -> bool {
        false
    }

    pub(in super::super) fn round(_: &[f32], _: &mut [u32]) {
        unreachable!("nobody has this kernel here")
    }

    pub(in super::super) fn pair<const WIDTH: usize>(_: &[f32], _: &[f32], _: &mut [u32], _: usize) {
        unreachable!("nobody has this kernel here")
    }

    pub(in super::super) fn tile(_: Tile<'_>) {
        unreachable!("nobody has this kernel here")
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) use missing::{available, pair, round, tile};
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{available, pair, round, tile};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::{Begin, PANEL_LINES, TILE_ROWS};
    use super::Tile;
    use crate::lines::LINE;

    pub(in super::super) fn available() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16")
    }

    pub(in super::super) fn round(values: &[f32], words: &mut [u32]) {
        assert_eq!(words.len(), values.len().div_ceil(2));
        // SAFETY: a `Kernel` of this kind exists only where `available` is true; lengths are as the function asks.
        unsafe { round_rows(values, words) }
    }

    pub(in super::super) fn pair<const WIDTH: usize>(first: &[f32], second: &[f32], words: &mut [u32], step: usize) {
        // SAFETY: a `Kernel` of this kind exists only where `available` is true; `Kernel::pair` has checked the lengths.
        unsafe { pair_rows::<WIDTH>(first, second, words, step) }
    }

    pub(in super::super) fn tile(tile: Tile<'_>) {
        // SAFETY: a `Kernel` of this kind exists only where `available` is true; `Tile::check` has passed.
        unsafe {
            match tile.pair_step {
                1 => dispatch::<1>(tile),
                TILE_ROWS => dispatch::<TILE_ROWS>(tile),
                _ => unreachable!("operands are packed in one of two ways"),
            }
        }
    }

    /// A mask of the first `count` lanes.
    fn lanes(count: usize) -> u16 {
        if count >= LINE { u16::MAX } else { (1 << count) - 1 }
    }

    /// # Safety
    /// The processor has what the function is compiled for, and `words` are half as many as `values`, rounded up.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn round_rows(values: &[f32], words: &mut [u32]) {
        let whole = values.len() / 32;
        for block in 0..whole {
            // SAFETY: block · 32 + 32 values and block · 16 + 16 words are there.
            unsafe {
                let from = values.as_ptr().add(block * 32);
                let rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from.add(16)), _mm512_loadu_ps(from));
                _mm512_storeu_si512(words.as_mut_ptr().add(block * 16).cast(), as_words(rounded));
            }
        }
        let (rest, words) = (&values[whole * 32..], &mut words[whole * 16..]);
        if !rest.is_empty() {
            let upper = rest.len().saturating_sub(16);
            // SAFETY: masked lanes are neither read nor written; those that are not masked are there.
            unsafe {
                let low = _mm512_maskz_loadu_ps(lanes(rest.len()), rest.as_ptr());
                let high = _mm512_maskz_loadu_ps(lanes(upper), rest.as_ptr().wrapping_add(16));
                let rounded = as_words(_mm512_cvtne2ps_pbh(high, low));
                _mm512_mask_storeu_epi32(words.as_mut_ptr().cast(), lanes(words.len()), rounded);
            }
        }
    }

    /// # Safety
    /// The processor has what the function is compiled for, the rows are of one length, and `words` has room for them, `WIDTH` words
    /// every `step`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn pair_rows<const WIDTH: usize>(first: &[f32], second: &[f32], words: &mut [u32], step: usize) {
        // Lane 2i of 16 bits comes from lane i of the first row, lane 2i + 1 from that of the second.
        let order: [u16; 32] = std::array::from_fn(|lane| (lane / 2 + lane % 2 * 16) as u16);
        // SAFETY: 64 bytes are there.
        let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
        let (columns, mut column, mut to) = (first.len(), 0, words.as_mut_ptr());
        while column < columns {
            for start in (0..WIDTH).step_by(LINE) {
                let mask = lanes((columns - column).min(WIDTH).saturating_sub(start));
                let from = column + start;
                // SAFETY: masked lanes are neither read nor written; those that are not masked are there.
                unsafe {
                    let low = _mm512_maskz_loadu_ps(mask, first.as_ptr().wrapping_add(from));
                    let high = _mm512_maskz_loadu_ps(mask, second.as_ptr().wrapping_add(from));
                    let paired = _mm512_permutexvar_epi16(order, as_words(_mm512_cvtne2ps_pbh(high, low)));
                    _mm512_mask_storeu_epi32(to.wrapping_add(start).cast(), mask, paired);
                }
            }
            column += WIDTH;
            to = to.wrapping_add(step);
        }
    }

    fn as_words(rounded: __m512bh) -> __m512i {
        // SAFETY: both are 64 bytes of which every pattern is a value.
        unsafe { std::mem::transmute(rounded) }
    }

    fn as_bf16(words: __m512i) -> __m512bh {
        // SAFETY: both are 64 bytes of which every pattern is a value.
        unsafe { std::mem::transmute(words) }
    }

    /// Calls the function that is compiled for the tile's number of rows.
    ///
    /// # Safety
    /// As [`sum`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn dispatch<const PAIR_STEP: usize>(tile: Tile<'_>) {
        // SAFETY: what is asked of the caller.
        unsafe {
            match tile.rows {
                12 => sum::<12, PAIR_STEP>(tile),
                11 => sum::<11, PAIR_STEP>(tile),
                10 => sum::<10, PAIR_STEP>(tile),
                9 => sum::<9, PAIR_STEP>(tile),
                8 => sum::<8, PAIR_STEP>(tile),
                7 => sum::<7, PAIR_STEP>(tile),
                6 => sum::<6, PAIR_STEP>(tile),
                5 => sum::<5, PAIR_STEP>(tile),
                4 => sum::<4, PAIR_STEP>(tile),
                3 => sum::<3, PAIR_STEP>(tile),
                2 => sum::<2, PAIR_STEP>(tile),
                _ => sum::<1, PAIR_STEP>(tile),
            }
        }
    }

    /// A tile of `ROWS` rows.
    ///
    /// # Safety
    /// The processor has what the function is compiled for, `Tile::check` has passed, and the tile has `ROWS` rows and this step
    /// from pair to pair.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn sum<const ROWS: usize, const PAIR_STEP: usize>(tile: Tile<'_>) {
        // Rows lie side by side where pairs do not.
        let row_step = if PAIR_STEP == 1 { tile.row_step } else { 1 };
        let masks = [lanes(tile.columns), lanes(tile.columns.saturating_sub(LINE))];
        let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
        match tile.begin {
            Begin::Zero => {}
            Begin::Row(row) => {
                for half in 0..2 {
                    // SAFETY: the row has the tile's columns; lanes beyond them are masked and not read.
                    let start = unsafe { _mm512_maskz_loadu_ps(masks[half], row.as_ptr().wrapping_add(half * LINE)) };
                    sums.iter_mut().for_each(|sums| sums[half] = start);
                }
            }
            Begin::Sum => {
                for (row, sums) in sums.iter_mut().enumerate() {
                    let from = tile.out.as_ptr().wrapping_add(row * tile.stride);
                    for half in 0..2 {
                        // SAFETY: the result has the tile's rows and columns; lanes beyond them are masked and not read.
                        sums[half] = unsafe { _mm512_maskz_loadu_ps(masks[half], from.wrapping_add(half * LINE)) };
                    }
                }
            }
        }
        for line in tile.soon {
            _mm_prefetch::<_MM_HINT_T1>(std::ptr::from_ref(line).cast());
        }
        let (left, right) = (tile.left.as_ptr(), tile.right.as_ptr());
        for pair in 0..tile.pairs {
            // SAFETY: pair < pairs and row < rows, for which `Tile::check` has found both operands long enough; lines are aligned.
            unsafe {
                let right = right.add(pair * PANEL_LINES);
                let low = as_bf16(_mm512_load_si512(right.cast()));
                let high = as_bf16(_mm512_load_si512(right.add(1).cast()));
                for (row, sums) in sums.iter_mut().enumerate() {
                    let word = *left.add(row * row_step + pair * PAIR_STEP);
                    let word = as_bf16(_mm512_set1_epi32(word.cast_signed()));
                    sums[0] = _mm512_dpbf16_ps(sums[0], word, low);
                    sums[1] = _mm512_dpbf16_ps(sums[1], word, high);
                }
            }
        }
        let zero = _mm512_setzero_ps();
        for (row, sums) in sums.into_iter().enumerate() {
            let to = tile.out.as_mut_ptr().wrapping_add(row * tile.stride);
            for half in 0..2 {
                // The second operand is what comes out if either is NaN.
                let value = if tile.relu { _mm512_max_ps(zero, sums[half]) } else { sums[half] };
                // SAFETY: the result has the tile's rows and columns; lanes beyond them are masked and not written.
                unsafe { _mm512_mask_storeu_ps(to.wrapping_add(half * LINE), masks[half], value) };
            }
        }
    }
}
