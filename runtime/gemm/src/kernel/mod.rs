//! The parts that depend on the processor: rounding, the layout of values, and the innermost loops
//! of a product. A kernel reads packed operands. `product` splits a product into tiles.

mod amx;
mod avx2;
mod avx512;
mod bf16;
pub(crate) mod fetch;
mod fp32;
mod operands;

use std::mem::MaybeUninit;
use std::ops::Range;

pub(crate) use self::fp32::FUSED;
use crate::lines::{LINE, Line};
use crate::matrix::Matrix;

/// Columns of a tile of the result: two vectors of 512 bits. With 12 rows, 24 of the 32 registers
/// hold sums.
pub(crate) const TILE_COLUMNS: usize = 32;
/// Cache lines of a word of the inner dimension in a panel of the right operand.
pub(crate) const PANEL_LINES: usize = 2;
/// Rows of a tile, for the kernels with sums in vector registers.
pub(crate) const VECTOR_ROWS: usize = 12;
/// The most columns of a call of [`Kernel::words`].
pub(crate) const MOST_COLUMNS: usize = 512;

/// The most rows of a tile.
pub(crate) const MOST_TILE_ROWS: usize = 32;
const _: () = assert!(amx::ROWS <= MOST_TILE_ROWS && VECTOR_ROWS <= MOST_TILE_ROWS);

static ZEROS: [f32; MOST_COLUMNS] = [0.0; MOST_COLUMNS];

/// The instructions that compute products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(Kind);

/// Values other than the portable ones are made only if the processor has the instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Bf16Amx,
    Bf16Avx512,
    /// 32-bit floats. With `rounded`, packing rounds the operands to bf16.
    Floats {
        by: Vectors,
        rounded: bool,
    },
}

/// The instructions that multiply 32-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vectors {
    Avx512,
    Avx2,
    Portable,
}

impl Vectors {
    /// The instructions of this processor, the fastest first.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        let all = [(Self::Avx512, avx512::fp32_available()), (Self::Avx2, avx2::available()), (Self::Portable, true)];
        all.into_iter().filter_map(|(vectors, available)| available.then_some(vectors))
    }

    /// Writes the words of a row, one per value: `WIDTH` at the start of `words`, the next `WIDTH`
    /// one `step` later, and so on.
    fn spread<const WIDTH: usize>(self, rounded: bool, values: &[f32], words: &mut [u32], step: usize) {
        match (rounded, self) {
            (false, _) => fp32::spread::<WIDTH, false>(values, words, step),
            (true, Self::Avx512 | Self::Avx2) => avx2::spread_rounded::<WIDTH>(values, words, step),
            (true, Self::Portable) => fp32::spread::<WIDTH, true>(values, words, step),
        }
    }
}

impl Kernel {
    /// The kernels of this processor: bf16 before fp32, and the fastest of each first.
    pub fn all() -> impl Iterator<Item = Self> {
        let bf16 = [(Kind::Bf16Amx, amx::available()), (Kind::Bf16Avx512, avx512::bf16_available())];
        let bf16 = bf16.into_iter().filter_map(|(kind, available)| available.then_some(kind));
        let floats = |rounded| Vectors::all().map(move |by| Kind::Floats { by, rounded });
        bf16.chain(floats(true)).chain(floats(false)).map(Self)
    }

    /// The fastest kernel that rounds operands to bf16.
    pub fn bf16() -> Self {
        Self::fastest(true)
    }

    /// The fastest kernel that does not round operands.
    pub fn fp32() -> Self {
        Self::fastest(false)
    }

    fn fastest(rounded: bool) -> Self {
        let portable = Self(Kind::Floats { by: Vectors::Portable, rounded });
        Self::all().find(|kernel| kernel.is_bf16() == rounded).unwrap_or(portable)
    }

    /// True if the kernel rounds operands to bf16.
    pub fn is_bf16(self) -> bool {
        !matches!(self.0, Kind::Floats { rounded: false, .. })
    }

    /// The kernel's name in logs and reports.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Bf16Amx => "bf16 by AMX",
            Kind::Bf16Avx512 => "bf16 by AVX512-BF16",
            Kind::Floats { by: Vectors::Avx512, rounded: true } => "bf16 as fp32 by AVX-512",
            Kind::Floats { by: Vectors::Avx2, rounded: true } => "bf16 as fp32 by AVX2",
            Kind::Floats { by: Vectors::Portable, rounded: true } => "bf16 as fp32, portable",
            Kind::Floats { by: Vectors::Avx512, rounded: false } => "fp32 by AVX-512",
            Kind::Floats { by: Vectors::Avx2, rounded: false } => "fp32 by AVX2",
            Kind::Floats { by: Vectors::Portable, rounded: false } => "fp32, portable",
        }
    }

    /// The rows of a tile, and of a panel of the left operand.
    pub(crate) fn tile_rows(self) -> usize {
        if self.0 == Kind::Bf16Amx { amx::ROWS } else { VECTOR_ROWS }
    }

    /// True if a left operand must be stored row by row, and not in panels of rows.
    pub(crate) fn wants_rows(self) -> bool {
        self.0 == Kind::Bf16Amx
    }

    /// The number of words for `depth` values of the inner dimension. Values beyond `depth` are 0.
    pub(crate) fn words_of(self, depth: usize) -> usize {
        depth.div_ceil(self.word_values()).next_multiple_of(self.word_granule())
    }

    /// The number of words of the inner dimension that a tile sums at a time. A panel of the right
    /// operand of this depth stays in or near the nearest cache while all rows of a block use it. A
    /// larger number would load and store sums less often.
    pub(crate) fn block_words(self) -> usize {
        256 / self.word_values()
    }

    /// The number of words of a tile is a multiple of this.
    pub(crate) fn word_granule(self) -> usize {
        if self.0 == Kind::Bf16Amx { LINE } else { 1 }
    }

    /// The number of values in a word.
    pub(crate) fn word_values(self) -> usize {
        if matches!(self.0, Kind::Floats { .. }) { 1 } else { 2 }
    }

    /// Writes the words of a row of values, and fills the remaining words with 0.
    pub(crate) fn row(self, values: &[f32], words: &mut [u32]) {
        let (words, rest) = words.split_at_mut(values.len().div_ceil(self.word_values()));
        rest.fill(0);
        match self.0 {
            Kind::Bf16Amx | Kind::Bf16Avx512 => avx512::round(values, words),
            Kind::Floats { by, rounded } => by.spread::<LINE>(rounded, values, words, LINE),
        }
    }

    /// Writes word number `word` of some columns of a matrix: `WIDTH` columns at the start of
    /// `words`, the next `WIDTH` one `step` later, and so on. Values beyond the matrix are 0.
    ///
    /// # Panics
    /// If there are more than [`MOST_COLUMNS`] columns, or `words` is too short.
    pub(crate) fn words<const WIDTH: usize>(
        self,
        matrix: Matrix<'_>,
        word: usize,
        columns: Range<usize>,
        words: &mut [u32],
        step: usize,
    ) {
        let values = |line: usize| {
            if line < matrix.lines() { &matrix.line(line)[columns.clone()] } else { &ZEROS[..columns.len()] }
        };
        let chunks = columns.len().div_ceil(WIDTH);
        assert!(chunks == 0 || (chunks - 1) * step + columns.len() - (chunks - 1) * WIDTH <= words.len());
        match self.0 {
            Kind::Bf16Amx | Kind::Bf16Avx512 => {
                avx512::pair::<WIDTH>(values(2 * word), values(2 * word + 1), words, step);
            }
            Kind::Floats { by, rounded } => by.spread::<WIDTH>(rounded, values(word), words, step),
        }
    }

    /// Transposes 16 rows of 16 words. Rows are `from_step` words apart in `from`, and `to_step`
    /// words apart in `to`. Rows of `to` are written in order, so a later row overwrites an
    /// overlapping earlier one.
    ///
    /// # Panics
    /// If `from` or `to` is too short.
    pub(crate) fn transpose(self, from: &[u32], from_step: usize, to: &mut [u32], to_step: usize) {
        assert!((LINE - 1) * from_step + LINE <= from.len() && (LINE - 1) * to_step + LINE <= to.len());
        match self.0 {
            Kind::Bf16Amx | Kind::Bf16Avx512 | Kind::Floats { by: Vectors::Avx512, .. } => {
                avx512::transpose(from, from_step, to, to_step);
            }
            Kind::Floats { by: Vectors::Avx2, .. } => avx2::transpose(from, from_step, to, to_step),
            Kind::Floats { by: Vectors::Portable, .. } => {
                for row in 0..LINE {
                    let to = &mut to[row * to_step..][..LINE];
                    to.iter_mut().enumerate().for_each(|(column, to)| *to = from[column * from_step + row]);
                }
            }
        }
    }

    /// True if the kernel has [`Self::lay_outputs`] and [`Self::lay_derivatives`].
    pub(crate) fn lays_tiles(self) -> bool {
        matches!(self.0, Kind::Bf16Amx | Kind::Floats { by: Vectors::Avx512, rounded: false })
    }

    /// Lays ReLU's outputs of a complete tile out as a part of a left operand. `recorded` is the
    /// left operand of the transpose, and a word for each row of the tile: a bit for each column
    /// where ReLU let the value through.
    ///
    /// # Panics
    /// If an operand is too short, or the kernel cannot.
    pub(crate) fn lay_outputs(
        self,
        tile: &mut CompleteTile,
        place: &Place,
        left: &mut Laid<'_>,
        recorded: Option<(&mut Laid<'_>, &mut [u32])>,
    ) {
        match self.0 {
            Kind::Bf16Amx => operands::bf16_outputs(tile, place, left, recorded),
            _ => operands::fp32_outputs(tile, place, left, recorded),
        }
    }

    /// Sets values of a complete tile to 0 where ReLU let nothing through. Adds its rows to sums,
    /// in order. Lays it out as a part of a left and of a right operand.
    ///
    /// # Panics
    /// As [`Self::lay_outputs`].
    pub(crate) fn lay_derivatives(
        self,
        tile: &mut CompleteTile,
        place: &Place,
        (passes, sums): (&[u32], &mut [f32]),
        left: Option<&mut Laid<'_>>,
        right: &mut Laid<'_>,
    ) {
        match self.0 {
            Kind::Bf16Amx => operands::bf16_derivatives(tile, place, (passes, sums), left, right),
            _ => operands::fp32_derivatives(tile, place, (passes, sums), left, right),
        }
    }

    /// Prepares the processor for tiles on this thread.
    pub(crate) fn start(self) -> Running {
        Running { kernel: self, _tiles: (self.0 == Kind::Bf16Amx).then(amx::Configured::new) }
    }
}

/// A kernel that computes on this thread.
pub(crate) struct Running {
    kernel: Kernel,
    /// Configures the tile registers of this thread. It cannot be sent to another thread.
    _tiles: Option<amx::Configured>,
}

impl Running {
    /// Computes one tile of a result.
    pub(crate) fn tile(&self, tile: &mut Tile<'_>) {
        tile.check(self.kernel);
        match self.kernel.0 {
            Kind::Bf16Amx => amx::tile(tile),
            Kind::Bf16Avx512 => avx512::bf16_tile(tile),
            Kind::Floats { by: Vectors::Avx512, .. } => avx512::fp32_tile(tile),
            Kind::Floats { by: Vectors::Avx2, .. } => avx2::tile(tile),
            Kind::Floats { by: Vectors::Portable, .. } => fp32::tile(tile),
        }
    }
}

/// The place of a tile in the result.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) rows: Range<usize>,
    /// The number of the panel of columns.
    pub(crate) panel: usize,
    /// The number of its columns.
    pub(crate) columns: usize,
}

/// The memory of an operand that is laid out tile by tile.
pub(crate) struct Laid<'a> {
    pub(crate) words: &'a mut [u32],
    /// For a kernel that reads rows by cache lines, the distance of a left operand's rows in words.
    /// Otherwise the words of the inner dimension.
    pub(crate) step: usize,
}

/// The complete sums of a tile. Rows and columns that the result does not have are 0.
#[repr(C, align(64))]
pub(crate) struct CompleteTile(pub(crate) [[f32; TILE_COLUMNS]; MOST_TILE_ROWS]);

impl CompleteTile {
    pub(crate) fn new() -> Self {
        Self([[0.0; TILE_COLUMNS]; MOST_TILE_ROWS])
    }
}

/// A tile of the result and its inputs. It has `rows` × `columns` values, at most
/// [`Kernel::tile_rows`] × [`TILE_COLUMNS`].
pub(crate) struct Tile<'a> {
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Words of the inner dimension.
    pub(crate) words: usize,
    /// The words and the distance of rows from [`Left::tile`](crate::left::Left::tile).
    pub(crate) left: &'a [u32],
    pub(crate) row_step: usize,
    /// [`PANEL_LINES`] cache lines per word.
    pub(crate) right: &'a [Line],
    /// Row `r` starts at `r · stride`. The kernel writes all rows and columns of the tile. With
    /// [`Begin::Sum`] it reads them before.
    pub(crate) out: &'a mut [MaybeUninit<f32>],
    pub(crate) stride: usize,
    pub(crate) begin: Begin<'a>,
    pub(crate) relu: bool,
}

/// The start values of a tile's sums.
#[derive(Clone, Copy)]
pub(crate) enum Begin<'a> {
    Zero,
    /// A row, the same for all rows of the tile.
    Row(&'a [f32]),
    /// The values in `out`, which must be initialized.
    Sum,
    /// Initialized sums in other memory. Row `r` starts at `r · stride`.
    Elsewhere {
        sums: &'a [MaybeUninit<f32>],
        stride: usize,
    },
}

impl Tile<'_> {
    /// Asserts the conditions that kernels rely on.
    fn check(&self, kernel: Kernel) {
        let last = |count: usize, step: usize| (count - 1) * step;
        assert!((1..=kernel.tile_rows()).contains(&self.rows) && (1..=TILE_COLUMNS).contains(&self.columns));
        // A kernel that reads rows by cache lines also reads rows beyond the tile's.
        let (rows, word_step) = if kernel.wants_rows() { (kernel.tile_rows(), 1) } else { (self.rows, VECTOR_ROWS) };
        assert!(self.row_step == 1 || kernel.wants_rows());
        assert!(self.words == 0 || last(rows, self.row_step) + last(self.words, word_step) < self.left.len());
        assert!(self.words.is_multiple_of(kernel.word_granule()));
        assert!(self.words * PANEL_LINES <= self.right.len());
        assert!(last(self.rows, self.stride) + self.columns <= self.out.len());
        match self.begin {
            Begin::Row(row) => assert!(self.columns <= row.len()),
            Begin::Elsewhere { sums, stride } => assert!(last(self.rows, stride) + self.columns <= sums.len()),
            Begin::Zero | Begin::Sum => {}
        }
    }

    /// The sums that the tile adds to and the distance of their rows, if there are any.
    #[inline(always)]
    fn sums(&self) -> Option<(&[MaybeUninit<f32>], usize)> {
        match self.begin {
            Begin::Zero | Begin::Row(_) => None,
            Begin::Sum => Some((self.out, self.stride)),
            Begin::Elsewhere { sums, stride } => Some((sums, stride)),
        }
    }

    /// The start values of some columns of a row; 0 beyond the tile's columns.
    #[inline(always)]
    #[expect(unsafe_code, reason = "results need not be zeroed before they are written")]
    fn start<const COLUMNS: usize>(&self, row: usize, first: usize) -> [f32; COLUMNS] {
        let values = match (self.begin, self.sums()) {
            // SAFETY: sums that a tile adds to are initialized.
            (_, Some((sums, stride))) => unsafe { sums[row * stride..][..self.columns].assume_init_ref() },
            (Begin::Row(values), None) => &values[..self.columns],
            (_, None) => return [0.0; COLUMNS],
        };
        let values = values.get(first..).unwrap_or_default();
        values.first_chunk().copied().unwrap_or_else(|| {
            let mut sums = [0.0; COLUMNS];
            sums[..values.len()].copy_from_slice(values);
            sums
        })
    }

    /// Stores the sums of some columns of a row. Sums beyond the tile's columns are dropped.
    #[inline(always)]
    fn finish<const COLUMNS: usize>(&mut self, row: usize, first: usize, sums: &[f32; COLUMNS]) {
        // The comparison is false for NaN, so NaN stays.
        let least = if self.relu { 0.0 } else { f32::NEG_INFINITY };
        let finished = |sum: f32| MaybeUninit::new(if sum < least { least } else { sum });
        let out = self.out[row * self.stride..][..self.columns].get_mut(first..).unwrap_or_default();
        match out.first_chunk_mut() {
            Some(out) => {
                let out: &mut [_; COLUMNS] = out;
                out.iter_mut().zip(sums).for_each(|(out, &sum)| *out = finished(sum));
            }
            None => out.iter_mut().zip(sums).for_each(|(out, &sum)| *out = finished(sum)),
        }
    }
}
