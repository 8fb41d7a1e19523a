//! What a processor has to do itself: rounding, pairing and the innermost loops of a product. A kernel takes operands as they were
//! packed; how a product is cut into tiles is up to `product`.

mod avx512;
mod portable;

use crate::lines::Line;

/// Rows of a tile of the result.
pub(crate) const TILE_ROWS: usize = 12;
/// Columns of a tile of the result: two vectors. With 12 rows, 24 of the 32 registers hold sums.
pub(crate) const TILE_COLUMNS: usize = 32;
/// Cache lines that a pair of the inner dimension takes in a panel of the right operand.
pub(crate) const PANEL_LINES: usize = 2;

/// What products are computed with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(Kind);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// There only where the processor was found to have it.
    Avx512Bf16,
    Portable,
}

impl Kernel {
    /// The fastest that this processor has.
    pub fn best() -> Self {
        Self::avx512_bf16().unwrap_or_else(Self::portable)
    }

    /// The instruction `vdpbf16ps` on vectors of 512 bits, where the processor has it.
    pub fn avx512_bf16() -> Option<Self> {
        avx512::available().then_some(Self(Kind::Avx512Bf16))
    }

    /// Plain Rust: any processor has it.
    pub fn portable() -> Self {
        Self(Kind::Portable)
    }

    /// Its name in logs and reports.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Avx512Bf16 => "avx512-bf16",
            Kind::Portable => "portable",
        }
    }

    /// Rounds a row; `words` are half as many as `values`, rounded up, and a missing second half is 0.
    pub(crate) fn round(self, values: &[f32], words: &mut [u32]) {
        debug_assert_eq!(words.len(), values.len().div_ceil(2));
        match self.0 {
            Kind::Avx512Bf16 => avx512::round(values, words),
            Kind::Portable => portable::round(values, words),
        }
    }

    /// Rounds two rows and puts them together column by column, `first` in the lower halves: `WIDTH` columns at the start of `words`,
    /// the next `WIDTH` a `step` further on, and so on.
    ///
    /// # Panics
    /// If the rows are not of one length or there are not enough words.
    pub(crate) fn pair<const WIDTH: usize>(self, first: &[f32], second: &[f32], words: &mut [u32], step: usize) {
        let panels = first.len().div_ceil(WIDTH);
        assert!(first.len() == second.len());
        assert!(panels == 0 || (panels - 1) * step + first.len() - (panels - 1) * WIDTH <= words.len());
        match self.0 {
            Kind::Avx512Bf16 => avx512::pair::<WIDTH>(first, second, words, step),
            Kind::Portable => portable::pair::<WIDTH>(first, second, words, step),
        }
    }

    /// One tile of a result.
    pub(crate) fn tile(self, tile: Tile<'_>) {
        tile.check();
        match self.0 {
            Kind::Avx512Bf16 => avx512::tile(tile),
            Kind::Portable => portable::tile(tile),
        }
    }
}

/// A tile and what it is computed from: `rows` × `columns` of the result, at most [`TILE_ROWS`] × [`TILE_COLUMNS`].
pub(crate) struct Tile<'a> {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Pairs of the inner dimension.
    pub(crate) pairs: usize,
    /// Pair `p` of row `r` is at `r · row_step + p · pair_step`.
    pub(crate) left: &'a [u32],
    pub(crate) row_step: usize,
    pub(crate) pair_step: usize,
    /// [`PANEL_LINES`] a pair.
    pub(crate) right: &'a [Line],
    /// What will be read soon, to be fetched meanwhile.
    pub(crate) soon: &'a [Line],
    /// Row `r` begins at `r · stride`.
    pub(crate) out: &'a mut [f32],
    pub(crate) stride: usize,
    pub(crate) begin: Begin<'a>,
    pub(crate) relu: bool,
}

/// What a tile's sums start from.
#[derive(Clone, Copy)]
pub(crate) enum Begin<'a> {
    Zero,
    /// A row, the same for all rows of the tile.
    Row(&'a [f32]),
    /// What is in the result.
    Sum,
}

impl Tile<'_> {
    /// What a kernel relies on.
    fn check(&self) {
        let last = |count: usize, step: usize| (count - 1) * step;
        assert!((1..=TILE_ROWS).contains(&self.rows) && (1..=TILE_COLUMNS).contains(&self.columns));
        assert!(self.pairs == 0 || last(self.rows, self.row_step) + last(self.pairs, self.pair_step) < self.left.len());
        assert!(self.pairs * PANEL_LINES <= self.right.len());
        assert!(last(self.rows, self.stride) + self.columns <= self.out.len());
        if let Begin::Row(row) = self.begin {
            assert!(self.columns <= row.len());
        }
    }
}
