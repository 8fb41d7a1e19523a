//! The kernels for AVX-512: for bf16 with AVX512-BF16, and for 32-bit floats.
// Intrinsics, and loads through pointers in the innermost loop.
#![allow(unsafe_code)]

use super::Tile;

#[cfg(not(target_arch = "x86_64"))]
mod missing {
    use super::Tile;

    pub(in super::super) fn bf16_available() -> bool {
        false
    }

    pub(in super::super) fn fp32_available() -> bool {
        false
    }

    pub(in super::super) fn round(_: &[f32], _: &mut [u32]) {
        unreachable!("this platform does not have this kernel")
    }

    pub(in super::super) fn pair<const WIDTH: usize>(_: &[f32], _: &[f32], _: &mut [u32], _: usize) {
        unreachable!("this platform does not have this kernel")
    }

    pub(in super::super) fn transpose(_: &[u32], _: usize, _: &mut [u32], _: usize) {
        unreachable!("this platform does not have this kernel")
    }

    pub(in super::super) fn bf16_tile(_: &mut Tile<'_>) {
        unreachable!("this platform does not have this kernel")
    }

    pub(in super::super) fn fp32_tile(_: &mut Tile<'_>) {
        unreachable!("this platform does not have this kernel")
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) use missing::{bf16_available, bf16_tile, fp32_available, fp32_tile, pair, round, transpose};
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{
    as_words, bf16_available, bf16_tile, fp32_available, fp32_tile, lanes, pair, round, transpose, transposed,
};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::{Begin, PANEL_LINES, VECTOR_ROWS};
    use super::Tile;
    use crate::lines::LINE;

    pub(in super::super) fn fp32_available() -> bool {
        is_x86_feature_detected!("avx512f")
    }

    pub(in super::super) fn bf16_available() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512bf16")
    }

    pub(in super::super) fn round(values: &[f32], words: &mut [u32]) {
        assert_eq!(words.len(), values.len().div_ceil(2));
        // SAFETY: a `Kernel` of this kind exists only if `bf16_available` is true. The lengths were
        // asserted.
        unsafe { round_rows(values, words) }
    }

    pub(in super::super) fn pair<const WIDTH: usize>(first: &[f32], second: &[f32], words: &mut [u32], step: usize) {
        // SAFETY: a `Kernel` of this kind exists only if `bf16_available` is true. `Kernel::words`
        // has checked the lengths.
        unsafe { pair_rows::<WIDTH>(first, second, words, step) }
    }

    pub(in super::super) fn transpose(from: &[u32], from_step: usize, to: &mut [u32], to_step: usize) {
        // SAFETY: a `Kernel` of these kinds exists only with AVX-512. `Kernel::transpose` has
        // checked the lengths.
        unsafe { transpose_block(from.as_ptr(), from_step, to.as_mut_ptr(), to_step) }
    }

    pub(in super::super) fn bf16_tile(tile: &mut Tile<'_>) {
        // SAFETY: a `Kernel` of this kind exists only if `bf16_available` is true; `Tile::check`
        // has passed.
        unsafe { bf16::tile(tile) }
    }

    pub(in super::super) fn fp32_tile(tile: &mut Tile<'_>) {
        // SAFETY: a `Kernel` of this kind exists only if `fp32_available` is true; `Tile::check`
        // has passed.
        unsafe { fp32::tile(tile) }
    }

    /// A mask of the first `count` lanes.
    pub(in super::super) fn lanes(count: usize) -> u16 {
        if count >= LINE { u16::MAX } else { (1 << count) - 1 }
    }

    /// # Safety
    /// The processor has the function's target features. `words` has half the length of `values`,
    /// rounded up.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn round_rows(values: &[f32], words: &mut [u32]) {
        let whole = values.len() / 32;
        for block in 0..whole {
            // SAFETY: `values` has block · 32 + 32 values, and `words` has block · 16 + 16 words.
            unsafe {
                let from = values.as_ptr().add(block * 32);
                let rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from.add(16)), _mm512_loadu_ps(from));
                _mm512_storeu_si512(words.as_mut_ptr().add(block * 16).cast(), as_words(rounded));
            }
        }
        let (rest, words) = (&values[whole * 32..], &mut words[whole * 16..]);
        if !rest.is_empty() {
            let upper = rest.len().saturating_sub(16);
            // SAFETY: only unmasked lanes are read and written, and they are inside the slices.
            unsafe {
                let low = _mm512_maskz_loadu_ps(lanes(rest.len()), rest.as_ptr());
                let high = _mm512_maskz_loadu_ps(lanes(upper), rest.as_ptr().wrapping_add(16));
                let rounded = as_words(_mm512_cvtne2ps_pbh(high, low));
                _mm512_mask_storeu_epi32(words.as_mut_ptr().cast(), lanes(words.len()), rounded);
            }
        }
    }

    /// # Safety
    /// The processor has the function's target features. Both rows have the same length. `words`
    /// has room for them, `WIDTH` words at every `step`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn pair_rows<const WIDTH: usize>(first: &[f32], second: &[f32], words: &mut [u32], step: usize) {
        // Lane 2i of 16 bits comes from lane i of the first row, lane 2i + 1 from lane i of the
        // second.
        let order: [u16; 32] = std::array::from_fn(|lane| (lane / 2 + lane % 2 * 16) as u16);
        // SAFETY: `order` has 64 bytes.
        let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
        let (columns, mut column, mut to) = (first.len(), 0, words.as_mut_ptr());
        while column < columns {
            for start in (0..WIDTH).step_by(LINE) {
                let mask = lanes((columns - column).min(WIDTH).saturating_sub(start));
                let from = column + start;
                // SAFETY: only unmasked lanes are read and written, and they are inside the slices.
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

    pub(in super::super) fn as_words(rounded: __m512bh) -> __m512i {
        // SAFETY: both types have 64 bytes, and every bit pattern is valid for both.
        unsafe { std::mem::transmute(rounded) }
    }

    fn as_bf16(words: __m512i) -> __m512bh {
        // SAFETY: both types have 64 bytes, and every bit pattern is valid for both.
        unsafe { std::mem::transmute(words) }
    }

    /// # Safety
    /// The processor has the function's target features. `from` and `to` have 16 rows of 16 words.
    #[target_feature(enable = "avx512f")]
    unsafe fn transpose_block(from: *const u32, from_step: usize, to: *mut u32, to_step: usize) {
        let mut rows = [_mm512_setzero_si512(); LINE];
        for (index, row) in rows.iter_mut().enumerate() {
            // SAFETY: the caller upholds the contract of this function.
            *row = unsafe { _mm512_loadu_si512(from.add(index * from_step).cast()) };
        }
        for (index, column) in transposed(rows).into_iter().enumerate() {
            // SAFETY: the caller upholds the contract of this function.
            unsafe { _mm512_storeu_si512(to.add(index * to_step).cast(), column) };
        }
    }

    /// Transposes 16 rows of 16 words in four rounds: interleaves words, pairs, and twice groups of
    /// four.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(in super::super) fn transposed(rows: [__m512i; LINE]) -> [__m512i; LINE] {
        let mut words = rows;
        for two in 0..8 {
            words[2 * two] = _mm512_unpacklo_epi32(rows[2 * two], rows[2 * two + 1]);
            words[2 * two + 1] = _mm512_unpackhi_epi32(rows[2 * two], rows[2 * two + 1]);
        }
        let mut pairs = words;
        for four in 0..4 {
            for half in 0..2 {
                let (upper, lower) = (words[4 * four + half], words[4 * four + half + 2]);
                pairs[4 * four + 2 * half] = _mm512_unpacklo_epi64(upper, lower);
                pairs[4 * four + 2 * half + 1] = _mm512_unpackhi_epi64(upper, lower);
            }
        }
        let mut columns = pairs;
        for lane in 0..4 {
            const EVEN: i32 = 0x88;
            const ODD: i32 = 0xDD;
            let [a, b, c, d] = [pairs[lane], pairs[4 + lane], pairs[8 + lane], pairs[12 + lane]];
            let even = [_mm512_shuffle_i32x4::<EVEN>(a, b), _mm512_shuffle_i32x4::<EVEN>(c, d)];
            let odd = [_mm512_shuffle_i32x4::<ODD>(a, b), _mm512_shuffle_i32x4::<ODD>(c, d)];
            columns[lane] = _mm512_shuffle_i32x4::<EVEN>(even[0], even[1]);
            columns[4 + lane] = _mm512_shuffle_i32x4::<EVEN>(odd[0], odd[1]);
            columns[8 + lane] = _mm512_shuffle_i32x4::<ODD>(even[0], even[1]);
            columns[12 + lane] = _mm512_shuffle_i32x4::<ODD>(odd[0], odd[1]);
        }
        columns
    }

    /// Makes the innermost loops for one kind of words. The arguments are the module's name, its
    /// target features, and the new value of a line of sums. That value is computed from the old
    /// sums, a word of the left operand and a line of the right operand.
    macro_rules! kernel {
        ($name:ident, $features:literal, |$sum:ident, $word:ident, $line:ident| $add:expr) => {
            mod $name {
                use super::*;

                /// Calls [`sum`] for the tile's number of rows.
                ///
                /// # Safety
                /// The processor has the function's target features, and `Tile::check` has passed.
                #[target_feature(enable = $features)]
                pub(super) unsafe fn tile(tile: &mut Tile<'_>) {
                    // SAFETY: the caller upholds the contract of this function.
                    unsafe {
                        match tile.rows {
                            12 => sum::<12>(tile),
                            11 => sum::<11>(tile),
                            10 => sum::<10>(tile),
                            9 => sum::<9>(tile),
                            8 => sum::<8>(tile),
                            7 => sum::<7>(tile),
                            6 => sum::<6>(tile),
                            5 => sum::<5>(tile),
                            4 => sum::<4>(tile),
                            3 => sum::<3>(tile),
                            2 => sum::<2>(tile),
                            _ => sum::<1>(tile),
                        }
                    }
                }

                /// Computes a tile of `ROWS` rows.
                ///
                /// # Safety
                /// The processor has the function's target features, `Tile::check` has passed, and
                /// the tile has `ROWS` rows.
                #[target_feature(enable = $features)]
                unsafe fn sum<const ROWS: usize>(tile: &mut Tile<'_>) {
                    let masks = [lanes(tile.columns), lanes(tile.columns.saturating_sub(LINE))];
                    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
                    match (tile.begin, tile.sums()) {
                        (Begin::Row(row), _) => {
                            for half in 0..2 {
                                // SAFETY: the row has the tile's columns. Lanes beyond them are
                                // masked and not read.
                                let start = unsafe {
                                    _mm512_maskz_loadu_ps(masks[half], row.as_ptr().wrapping_add(half * LINE))
                                };
                                sums.iter_mut().for_each(|sums| sums[half] = start);
                            }
                        }
                        (_, Some((before, stride))) => {
                            for (row, sums) in sums.iter_mut().enumerate() {
                                let from = before.as_ptr().wrapping_add(row * stride).cast::<f32>();
                                for half in 0..2 {
                                    // SAFETY: the sums have the tile's rows and columns. Lanes
                                    // beyond them are masked and not read.
                                    sums[half] =
                                        unsafe { _mm512_maskz_loadu_ps(masks[half], from.wrapping_add(half * LINE)) };
                                }
                            }
                        }
                        (_, None) => {}
                    }
                    let (left, right) = (tile.left.as_ptr(), tile.right.as_ptr());
                    for word in 0..tile.words {
                        // SAFETY: word < words and row < rows, and `Tile::check` has checked the
                        // lengths of both operands. Lines are aligned.
                        unsafe {
                            let right = right.add(word * PANEL_LINES);
                            let lines = [_mm512_load_si512(right.cast()), _mm512_load_si512(right.add(1).cast())];
                            for (row, sums) in sums.iter_mut().enumerate() {
                                let $word = *left.add(word * VECTOR_ROWS + row);
                                let $word = _mm512_set1_epi32($word.cast_signed());
                                for ($sum, $line) in sums.iter_mut().zip(lines) {
                                    *$sum = $add;
                                }
                            }
                        }
                    }
                    let zero = _mm512_setzero_ps();
                    for (row, sums) in sums.into_iter().enumerate() {
                        let to = tile.out.as_mut_ptr().wrapping_add(row * tile.stride).cast::<f32>();
                        for half in 0..2 {
                            // If one operand is NaN, the instruction returns the second, so NaN
                            // stays.
                            let value = if tile.relu { _mm512_max_ps(zero, sums[half]) } else { sums[half] };
                            // SAFETY: the result has the tile's rows and columns. Lanes beyond them
                            // are masked and not written.
                            unsafe { _mm512_mask_storeu_ps(to.wrapping_add(half * LINE), masks[half], value) };
                        }
                    }
                }
            }
        };
    }

    kernel!(bf16, "avx512f,avx512bw,avx512vl,avx512bf16", |sum, word, line| {
        _mm512_dpbf16_ps(*sum, as_bf16(word), as_bf16(line))
    });
    kernel!(fp32, "avx512f", |sum, word, line| {
        _mm512_fmadd_ps(_mm512_castsi512_ps(word), _mm512_castsi512_ps(line), *sum)
    });
}
