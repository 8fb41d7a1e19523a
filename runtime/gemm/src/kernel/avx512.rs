//! The kernels for AVX-512: of bf16 with AVX512-BF16, and of 32-bit floats.
#![allow(unsafe_code)] // Intrinsics of a processor's own, and loads through pointers in the innermost loop.

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
        unreachable!("nobody has this kernel here")
    }

    pub(in super::super) fn pair<const WIDTH: usize>(_: &[f32], _: &[f32], _: &mut [u32], _: usize) {
        unreachable!("nobody has this kernel here")
    }

    pub(in super::super) fn turn(_: &[u32], _: usize, _: &mut [u32], _: usize) {
        unreachable!("nobody has this kernel here")
    }

    pub(in super::super) fn bf16_tile(_: &mut Tile<'_>) {
        unreachable!("nobody has this kernel here")
    }

    pub(in super::super) fn fp32_tile(_: &mut Tile<'_>) {
        unreachable!("nobody has this kernel here")
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) use missing::{bf16_available, bf16_tile, fp32_available, fp32_tile, pair, round, turn};
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{bf16_available, bf16_tile, fp32_available, fp32_tile, pair, round, turn};

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
        // SAFETY: a `Kernel` of this kind exists only where `available` is true; lengths are as the function asks.
        unsafe { round_rows(values, words) }
    }

    pub(in super::super) fn pair<const WIDTH: usize>(first: &[f32], second: &[f32], words: &mut [u32], step: usize) {
        // SAFETY: a `Kernel` of this kind exists only where `available` is true; `Kernel::pair` has checked the lengths.
        unsafe { pair_rows::<WIDTH>(first, second, words, step) }
    }

    pub(in super::super) fn turn(from: &[u32], from_step: usize, to: &mut [u32], to_step: usize) {
        // SAFETY: a `Kernel` of these kinds exists only where AVX-512 is; `Kernel::turn` has checked the lengths.
        unsafe { turn_block(from.as_ptr(), from_step, to.as_mut_ptr(), to_step) }
    }

    pub(in super::super) fn bf16_tile(tile: &mut Tile<'_>) {
        // SAFETY: a `Kernel` of this kind exists only where `bf16_available` is true; `Tile::check` has passed.
        unsafe { bf16::tile(tile) }
    }

    pub(in super::super) fn fp32_tile(tile: &mut Tile<'_>) {
        // SAFETY: a `Kernel` of this kind exists only where `fp32_available` is true; `Tile::check` has passed.
        unsafe { fp32::tile(tile) }
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

    /// Four rounds of putting rows side by side: words, pairs, and lanes of four twice.
    ///
    /// # Safety
    /// The processor has what the function is compiled for, and 16 rows of 16 words are there in both.
    #[target_feature(enable = "avx512f")]
    unsafe fn turn_block(from: *const u32, from_step: usize, to: *mut u32, to_step: usize) {
        let mut rows = [_mm512_setzero_si512(); LINE];
        for (index, row) in rows.iter_mut().enumerate() {
            // SAFETY: what is asked of the caller.
            *row = unsafe { _mm512_loadu_si512(from.add(index * from_step).cast()) };
        }
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
        for (index, column) in columns.into_iter().enumerate() {
            // SAFETY: what is asked of the caller.
            unsafe { _mm512_storeu_si512(to.add(index * to_step).cast(), column) };
        }
    }

    /// The innermost loops for one kind of words: what they are compiled for, and what one of the left operand and a line of the right add
    /// to a line of sums.
    macro_rules! kernel {
        ($name:ident, $features:literal, |$sum:ident, $word:ident, $line:ident| $add:expr) => {
            mod $name {
                use super::*;

                /// Calls the function that is compiled for the tile's number of rows.
                ///
                /// # Safety
                /// The processor has what the function is compiled for, and `Tile::check` has passed.
                #[target_feature(enable = $features)]
                pub(super) unsafe fn tile(tile: &mut Tile<'_>) {
                    // SAFETY: what is asked of the caller.
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

                /// A tile of `ROWS` rows.
                ///
                /// # Safety
                /// The processor has what the function is compiled for, `Tile::check` has passed, and the tile has `ROWS` rows.
                #[target_feature(enable = $features)]
                unsafe fn sum<const ROWS: usize>(tile: &mut Tile<'_>) {
                    let masks = [lanes(tile.columns), lanes(tile.columns.saturating_sub(LINE))];
                    let mut sums = [[_mm512_setzero_ps(); 2]; ROWS];
                    match (tile.begin, tile.sums()) {
                        (Begin::Row(row), _) => {
                            for half in 0..2 {
                                // SAFETY: the row has the tile's columns; lanes beyond them are masked and not read.
                                let start = unsafe {
                                    _mm512_maskz_loadu_ps(masks[half], row.as_ptr().wrapping_add(half * LINE))
                                };
                                sums.iter_mut().for_each(|sums| sums[half] = start);
                            }
                        }
                        (_, Some((begun, stride))) => {
                            for (row, sums) in sums.iter_mut().enumerate() {
                                let from = begun.as_ptr().wrapping_add(row * stride).cast::<f32>();
                                for half in 0..2 {
                                    // SAFETY: they have the tile's rows and columns; lanes beyond them are masked and not read.
                                    sums[half] =
                                        unsafe { _mm512_maskz_loadu_ps(masks[half], from.wrapping_add(half * LINE)) };
                                }
                            }
                        }
                        (_, None) => {}
                    }
                    let (left, right) = (tile.left.as_ptr(), tile.right.as_ptr());
                    for word in 0..tile.words {
                        // SAFETY: word < words and row < rows, for which `Tile::check` has found both operands long enough; lines are
                        // aligned.
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
                            // The second operand is what comes out if either is NaN.
                            let value = if tile.relu { _mm512_max_ps(zero, sums[half]) } else { sums[half] };
                            // SAFETY: the result has the tile's rows and columns; lanes beyond them are masked and not written.
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
