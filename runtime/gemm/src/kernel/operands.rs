//! Lays complete tiles out as operands of the next products, by AVX-512. [`Left`](crate::Left) and
//! [`Right`](crate::Right) describe the layouts. The results have the bits that packing a matrix of
//! the tiles has.
// Intrinsics, and stores through pointers.
#![allow(unsafe_code)]

#[cfg(not(target_arch = "x86_64"))]
mod missing {
    use super::super::{CompleteTile, Laid, Place};

    type Recorded<'a, 'b> = Option<(&'a mut Laid<'b>, &'a mut [u32])>;

    pub(in super::super) fn bf16_outputs(_: &CompleteTile, _: &Place, _: &mut Laid<'_>, _: Recorded<'_, '_>) {
        unreachable!("this platform does not have this kernel")
    }

    pub(in super::super) fn fp32_outputs(_: &mut CompleteTile, _: &Place, _: &mut Laid<'_>, _: Recorded<'_, '_>) {
        unreachable!("this platform does not have this kernel")
    }

    pub(in super::super) fn bf16_derivatives(
        _: &CompleteTile,
        _: &Place,
        _: (&[u32], &mut [f32]),
        _: Option<&mut Laid<'_>>,
        _: &mut Laid<'_>,
    ) {
        unreachable!("this platform does not have this kernel")
    }

    pub(in super::super) fn fp32_derivatives(
        _: &mut CompleteTile,
        _: &Place,
        _: (&[u32], &mut [f32]),
        _: Option<&mut Laid<'_>>,
        _: &mut Laid<'_>,
    ) {
        unreachable!("this platform does not have this kernel")
    }
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) use missing::{bf16_derivatives, bf16_outputs, fp32_derivatives, fp32_outputs};
#[cfg(target_arch = "x86_64")]
pub(super) use x86::{bf16_derivatives, bf16_outputs, fp32_derivatives, fp32_outputs};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::super::avx512::{as_words, lanes, transposed};
    use super::super::{CompleteTile, Laid, MOST_TILE_ROWS, Place, TILE_COLUMNS, VECTOR_ROWS};
    use crate::lines::LINE;

    /// Words of a tile in bf16: pairs of rows, or pairs of columns.
    const PAIRS: usize = MOST_TILE_ROWS / 2;
    const _: () = assert!(MOST_TILE_ROWS == TILE_COLUMNS && PAIRS == LINE);

    /// For a comparison with 0: greater, or NaN.
    const PASSES: i32 = _CMP_NLE_UQ;

    /// The words of 32 rows from `row` on, from the words of this panel of the inner dimension on,
    /// in a left operand of whole lines. They come with the distance of rows.
    fn rows_of<'a>(left: &'a mut Laid<'_>, row: usize, panel: usize) -> (&'a mut [u32], usize) {
        let words = &mut left.words[row * left.step + panel * PAIRS..];
        assert!((MOST_TILE_ROWS - 1) * left.step + PAIRS <= words.len(), "a left operand of these tiles");
        (words, left.step)
    }

    pub(in super::super) fn bf16_outputs(
        tile: &CompleteTile,
        place: &Place,
        left: &mut Laid<'_>,
        recorded: Option<(&mut Laid<'_>, &mut [u32])>,
    ) {
        assert!(place.rows.start.is_multiple_of(MOST_TILE_ROWS), "tiles of 32 rows");
        let (left, step) = rows_of(left, place.rows.start, place.panel);
        let left = (left.as_mut_ptr(), step);
        let recorded = recorded.map(|(transposed, passes)| {
            // The columns of the tile are rows of the transpose.
            let panel = place.rows.start / MOST_TILE_ROWS;
            let (transposed, step) = rows_of(transposed, place.panel * TILE_COLUMNS, panel);
            ((transposed.as_mut_ptr(), step), &mut passes[..MOST_TILE_ROWS])
        });
        // SAFETY: the kernel of AMX exists only with these features. The operands have room for the
        // tile.
        unsafe { outputs_in_bf16(tile, left, recorded) }
    }

    /// # Safety
    /// The processor has the function's target features. `left` points to 32 rows of 16 words, and
    /// comes with their distance. So does the first part of `recorded`.
    #[expect(clippy::needless_range_loop, reason = "a pair is two rows of the tile and one of the columns")]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn outputs_in_bf16(
        tile: &CompleteTile,
        (left, step): (*mut u32, usize),
        recorded: Option<((*mut u32, usize), &mut [u32])>,
    ) {
        let zero = _mm512_setzero_ps();
        // If one operand is NaN, `max` returns the second, so NaN stays.
        let load = |row: usize, half: usize| {
            // SAFETY: a row of a tile has two halves of 16 values.
            unsafe { _mm512_max_ps(zero, _mm512_loadu_ps(tile.0[row].as_ptr().add(half * LINE))) }
        };
        let (transpose, mut passes) = recorded.unzip();
        let mut columns = [[_mm512_setzero_si512(); PAIRS]; 2];
        let order = pair_order();
        for pair in 0..PAIRS {
            let [upper, lower] = [2 * pair, 2 * pair + 1];
            let [a, b] = [[load(upper, 0), load(upper, 1)], [load(lower, 0), load(lower, 1)]];
            // SAFETY: the caller has 32 rows of 16 words.
            unsafe {
                let [upper, lower] = [left.add(upper * step).cast(), left.add(lower * step).cast()];
                _mm512_storeu_si512(upper, as_words(_mm512_cvtne2ps_pbh(a[1], a[0])));
                _mm512_storeu_si512(lower, as_words(_mm512_cvtne2ps_pbh(b[1], b[0])));
            }
            let Some(passes) = &mut passes else { continue };
            passes[upper] = passed(a);
            passes[lower] = passed(b);
            for half in 0..2 {
                let paired = as_words(_mm512_cvtne2ps_pbh(b[half], a[half]));
                columns[half][pair] = _mm512_permutexvar_epi16(order, paired);
            }
        }
        let Some((to, step)) = transpose else { return };
        for (half, columns) in columns.into_iter().enumerate() {
            for (column, words) in transposed(columns).into_iter().enumerate() {
                // SAFETY: the caller has 32 rows of 16 words.
                unsafe { _mm512_storeu_si512(to.add((half * LINE + column) * step).cast(), words) };
            }
        }
    }

    /// A bit for each of 32 columns: whether ReLU lets its value through.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn passed(row: [__m512; 2]) -> u32 {
        let zero = _mm512_setzero_ps();
        let [lower, upper] = row;
        let upper = u32::from(_mm512_cmp_ps_mask::<PASSES>(upper, zero));
        u32::from(_mm512_cmp_ps_mask::<PASSES>(lower, zero)) | upper << LINE
    }

    /// Lane 2i of 16 bits comes from lane i of the lower half, lane 2i + 1 from lane i of the upper
    /// half.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn pair_order() -> __m512i {
        const ORDER: [u16; 32] = {
            let mut order = [0; 32];
            let mut lane = 0;
            while lane < 32 {
                order[lane] = (lane / 2 + lane % 2 * 16) as u16;
                lane += 1;
            }
            order
        };
        // SAFETY: `ORDER` has 64 bytes.
        unsafe { _mm512_loadu_si512(ORDER.as_ptr().cast()) }
    }

    pub(in super::super) fn bf16_derivatives(
        tile: &CompleteTile,
        place: &Place,
        (passes, sums): (&[u32], &mut [f32]),
        left: Option<&mut Laid<'_>>,
        right: &mut Laid<'_>,
    ) {
        assert!(place.rows.start.is_multiple_of(MOST_TILE_ROWS), "tiles of 32 rows");
        assert!(sums.len() <= TILE_COLUMNS, "the sums of a tile's columns");
        let passes = &passes[..MOST_TILE_ROWS];
        let left = left.map(|left| {
            let (left, step) = rows_of(left, place.rows.start, place.panel);
            (left.as_mut_ptr(), step)
        });
        let right = &mut right.words[(place.panel * right.step + place.rows.start / 2) * TILE_COLUMNS..];
        let right = &mut right[..PAIRS * TILE_COLUMNS];
        // SAFETY: the kernel of AMX exists only with these features. The operands have room for the
        // tile.
        unsafe { derivatives_in_bf16(tile, (passes, sums), left, right) }
    }

    /// # Safety
    /// The processor has the function's target features. `passes` has 32 words, `sums` has at most
    /// 32 values, and `right` has 16 · 32 words. `left` points to 32 rows of 16 words, and comes
    /// with their distance.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn derivatives_in_bf16(
        tile: &CompleteTile,
        (passes, sums): (&[u32], &mut [f32]),
        left: Option<(*mut u32, usize)>,
        right: &mut [u32],
    ) {
        let masks = [lanes(sums.len()), lanes(sums.len().saturating_sub(LINE))];
        let at = |half: usize| sums.as_ptr().wrapping_add(half * LINE);
        // SAFETY: only unmasked lanes are read.
        let mut totals = unsafe { [_mm512_maskz_loadu_ps(masks[0], at(0)), _mm512_maskz_loadu_ps(masks[1], at(1))] };
        let load = |row: usize, half: usize| {
            let passes = (passes[row] >> (half * LINE)) as u16;
            // SAFETY: a row of a tile has two halves of 16 values.
            unsafe { _mm512_maskz_loadu_ps(passes, tile.0[row].as_ptr().add(half * LINE)) }
        };
        let order = pair_order();
        for pair in 0..PAIRS {
            let [upper, lower] = [2 * pair, 2 * pair + 1];
            let [a, b] = [[load(upper, 0), load(upper, 1)], [load(lower, 0), load(lower, 1)]];
            if let Some((left, step)) = left {
                // SAFETY: the caller has 32 rows of 16 words.
                unsafe {
                    let [upper, lower] = [left.add(upper * step).cast(), left.add(lower * step).cast()];
                    _mm512_storeu_si512(upper, as_words(_mm512_cvtne2ps_pbh(a[1], a[0])));
                    _mm512_storeu_si512(lower, as_words(_mm512_cvtne2ps_pbh(b[1], b[0])));
                }
            }
            for half in 0..2 {
                totals[half] = _mm512_add_ps(_mm512_add_ps(totals[half], a[half]), b[half]);
                let paired = as_words(_mm512_cvtne2ps_pbh(b[half], a[half]));
                let words = &mut right[pair * TILE_COLUMNS + half * LINE..][..LINE];
                // SAFETY: `words` has 16 words.
                unsafe { _mm512_storeu_si512(words.as_mut_ptr().cast(), _mm512_permutexvar_epi16(order, paired)) };
            }
        }
        for (half, total) in totals.into_iter().enumerate() {
            let to = sums.as_mut_ptr().wrapping_add(half * LINE);
            // SAFETY: only unmasked lanes are written.
            unsafe { _mm512_mask_storeu_ps(to, masks[half], total) };
        }
    }

    /// The words from the tile's first one on in a left operand of panels of rows.
    fn panel_of<'a>(left: &'a mut Laid<'_>, place: &Place) -> &'a mut [u32] {
        assert!(place.rows.start.is_multiple_of(VECTOR_ROWS), "tiles of 12 rows");
        let first = place.rows.start * left.step + place.panel * TILE_COLUMNS * VECTOR_ROWS;
        &mut left.words[first..][..place.columns * VECTOR_ROWS]
    }

    pub(in super::super) fn fp32_outputs(
        tile: &mut CompleteTile,
        place: &Place,
        left: &mut Laid<'_>,
        recorded: Option<(&mut Laid<'_>, &mut [u32])>,
    ) {
        let left = panel_of(left, place);
        assert!(place.rows.len() <= VECTOR_ROWS && place.columns <= TILE_COLUMNS, "at most a tile");
        // SAFETY: a kernel of AVX-512 exists only with its features. The operands have room for the
        // tile.
        unsafe {
            outputs_in_fp32(tile, place, left);
            if let Some((transposed, passes)) = recorded {
                record_in_fp32(tile, place, transposed, &mut passes[..place.rows.len()]);
            }
        }
    }

    /// Applies ReLU to the tile in place, and lays it out.
    ///
    /// # Safety
    /// The processor has the function's target features. `left` has 12 words for each column.
    #[target_feature(enable = "avx512f")]
    unsafe fn outputs_in_fp32(tile: &mut CompleteTile, place: &Place, left: &mut [u32]) {
        let zero = _mm512_setzero_ps();
        for row in &mut tile.0[..place.rows.len()] {
            for half in 0..2 {
                let values = row[half * LINE..][..LINE].as_mut_ptr();
                // SAFETY: `values` points to 16 values. NaN stays, as above.
                unsafe { _mm512_storeu_ps(values, _mm512_max_ps(zero, _mm512_loadu_ps(values))) };
            }
        }
        // SAFETY: the caller upholds the contract of this function.
        unsafe { lay_panel(tile, place, left) }
    }

    /// Lays a tile out as a part of a panel of 12 rows.
    ///
    /// # Safety
    /// The processor has the function's target features. `left` has 12 words for each column.
    #[target_feature(enable = "avx512f")]
    unsafe fn lay_panel(tile: &CompleteTile, place: &Place, left: &mut [u32]) {
        for (half, words) in left.chunks_mut(LINE * VECTOR_ROWS).enumerate().take(place.columns.div_ceil(LINE)) {
            let mut rows = [_mm512_setzero_si512(); LINE];
            for (row, values) in rows.iter_mut().zip(&tile.0).take(VECTOR_ROWS) {
                // SAFETY: a row of a tile has two halves of 16 values.
                *row = unsafe { _mm512_loadu_si512(values.as_ptr().add(half * LINE).cast()) };
            }
            for (words, column) in words.chunks_exact_mut(VECTOR_ROWS).zip(transposed(rows)) {
                // SAFETY: only the 12 unmasked lanes are written.
                unsafe { _mm512_mask_storeu_epi32(words.as_mut_ptr().cast(), lanes(VECTOR_ROWS), column) };
            }
        }
    }

    /// Records the outputs of a tile: the transpose, and the places where ReLU let values through.
    ///
    /// # Safety
    /// The processor has the function's target features. The tile has at most 12 rows.
    #[target_feature(enable = "avx512f")]
    unsafe fn record_in_fp32(tile: &CompleteTile, place: &Place, transposed: &mut Laid<'_>, passes: &mut [u32]) {
        for (row, passes) in tile.0.iter().zip(passes) {
            // SAFETY: a row of a tile has two halves of 16 values.
            *passes = passed(unsafe { [_mm512_loadu_ps(row.as_ptr()), _mm512_loadu_ps(row.as_ptr().add(LINE))] });
        }
        // The columns of a tile are rows of the transpose. They lie in panels of 12.
        let mut column = 0;
        while column < place.columns {
            let row = place.panel * TILE_COLUMNS + column;
            let (panel, first) = (row / VECTOR_ROWS, row % VECTOR_ROWS);
            let count = (VECTOR_ROWS - first).min(place.columns - column);
            let words = panel * VECTOR_ROWS * transposed.step + place.rows.start * VECTOR_ROWS;
            let words = &mut transposed.words[words..][..place.rows.len() * VECTOR_ROWS];
            for (words, index) in words.chunks_exact_mut(VECTOR_ROWS).zip(0..) {
                let from = tile.0.as_flattened()[index * TILE_COLUMNS + column..][..LINE].as_ptr();
                // SAFETY: `from` points to 16 values. Only the unmasked lanes are written.
                unsafe {
                    let values = _mm512_loadu_si512(from.cast());
                    _mm512_mask_storeu_epi32(words[first..].as_mut_ptr().cast(), lanes(count), values);
                }
            }
            column += count;
        }
    }

    pub(in super::super) fn fp32_derivatives(
        tile: &mut CompleteTile,
        place: &Place,
        (passes, sums): (&[u32], &mut [f32]),
        left: Option<&mut Laid<'_>>,
        right: &mut Laid<'_>,
    ) {
        assert!(sums.len() <= TILE_COLUMNS, "the sums of a tile's columns");
        assert!(place.rows.len() <= VECTOR_ROWS && place.columns <= TILE_COLUMNS, "at most a tile");
        let first = (place.panel * right.step + place.rows.start) * TILE_COLUMNS;
        let right = &mut right.words[first..][..place.rows.len() * TILE_COLUMNS];
        // SAFETY: a kernel of AVX-512 exists only with its features. The operands have room for the
        // tile.
        unsafe {
            derivatives_in_fp32(tile, (&passes[..place.rows.len()], sums), right);
            if let Some(left) = left {
                lay_panel(tile, place, panel_of(left, place));
            }
        }
    }

    /// # Safety
    /// The processor has the function's target features. There are at most 32 sums.
    #[target_feature(enable = "avx512f")]
    unsafe fn derivatives_in_fp32(tile: &mut CompleteTile, (passes, sums): (&[u32], &mut [f32]), right: &mut [u32]) {
        for half in 0..2 {
            let mask = lanes(sums.len().saturating_sub(half * LINE));
            let to = sums.as_mut_ptr().wrapping_add(half * LINE);
            // SAFETY: only unmasked lanes are read.
            let mut total = unsafe { _mm512_maskz_loadu_ps(mask, to) };
            let rows = tile.0.iter_mut().zip(passes).zip(right.chunks_exact_mut(TILE_COLUMNS));
            for ((row, passes), words) in rows {
                let values = row[half * LINE..][..LINE].as_mut_ptr();
                let words = words[half * LINE..][..LINE].as_mut_ptr();
                // SAFETY: both point to 16 values.
                unsafe {
                    let passed = _mm512_maskz_loadu_ps((passes >> (half * LINE)) as u16, values);
                    _mm512_storeu_ps(values, passed);
                    _mm512_storeu_ps(words.cast(), passed);
                    total = _mm512_add_ps(total, passed);
                }
            }
            // SAFETY: only unmasked lanes are written.
            unsafe { _mm512_mask_storeu_ps(to, mask, total) };
        }
    }
}
