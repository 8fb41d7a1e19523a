//! How a product is cut into tiles.

use std::ops::Range;

use crate::kernel::{Begin, Kernel, PANEL_LINES, Running, TILE_COLUMNS, Tile, fetch};
use crate::left::Left;
use crate::right::Right;

/// Words of the inner dimension that are summed before the next tile: a panel of the right operand of this depth, 16 KiB, stays in
/// the nearest cache while all rows of a block are multiplied by it.
const BLOCK_WORDS: usize = 128;
/// Rows and panels of a block of the result, about 264 KiB: with what it is computed from at a time, 132 and 128 KiB, it stays in a core's
/// own cache until it is complete.
const BLOCK_ROWS: usize = 264;
const BLOCK_PANELS: usize = 8;

/// Rows of the left operand that a product may begin with are multiples of this: of every kernel's tiles.
pub const ROW_GRANULE: usize = 96;

/// What the sums of a product start from.
#[derive(Clone, Copy, Debug)]
pub enum Start<'a> {
    /// 0: the result is the product.
    Zero,
    /// A row, such as a layer's bias, that is added to every row of the product.
    Row(&'a [f32]),
    /// What is in the result: the product is added to it.
    Sum,
}

/// What is done with a sum before it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// Nothing.
    Plain,
    /// Negative numbers become 0. NaN stays.
    Relu,
}

/// `out = start + left · right`, row-major.
///
/// # Panics
/// If the shapes do not fit, or the operands were packed for different kernels.
pub fn multiply(left: &Left, right: &Right, out: &mut [f32], start: Start<'_>, finish: Finish) {
    multiply_rows(left, 0..left.rows(), right, out, start, finish);
}

/// The same for some of the rows only: `out` holds these. Their first must be a multiple of [`ROW_GRANULE`].
///
/// # Panics
/// If the shapes do not fit, rows begin elsewhere, or the operands were packed for different kernels.
pub fn multiply_rows(
    left: &Left,
    rows: Range<usize>,
    right: &Right,
    out: &mut [f32],
    start: Start<'_>,
    finish: Finish,
) {
    let columns = right.columns();
    assert_eq!(left.depth(), right.depth(), "the operands' inner dimensions");
    assert!(rows.end <= left.rows() && rows.start.is_multiple_of(ROW_GRANULE), "rows of the left operand");
    assert_eq!(out.len(), rows.len() * columns, "the result of {} rows and {columns} columns", rows.len());
    if let Start::Row(row) = start {
        assert_eq!(row.len(), columns, "the row that is added to every row");
    }
    let (Some(kernel), false) = (left.kernel(), out.is_empty()) else { return };
    assert_eq!(Some(kernel), right.kernel(), "the kernels that the operands were packed for");
    let product = Product {
        kernel,
        running: kernel.start(),
        left,
        right,
        words: right.words(),
        first_row: rows.start,
        start,
        relu: finish == Finish::Relu,
    };
    let block = BLOCK_ROWS / kernel.tile_rows() * kernel.tile_rows();
    for first in rows.clone().step_by(block) {
        let rows = first..rows.end.min(first + block);
        for first in (0..right.panels()).step_by(BLOCK_PANELS) {
            product.block(rows.clone(), first..right.panels().min(first + BLOCK_PANELS), out);
        }
    }
}

/// The inner dimension in blocks of about one size; one block of nothing where it is 0, for what the sums start from.
fn blocks(words: usize, granule: usize) -> impl Iterator<Item = Range<usize>> {
    let count = words.div_ceil(BLOCK_WORDS).max(1);
    let size = words.div_ceil(count).next_multiple_of(granule);
    (0..count).map(move |block| (block * size).min(words)..words.min((block + 1) * size))
}

struct Product<'a> {
    kernel: Kernel,
    running: Running,
    left: &'a Left,
    right: &'a Right,
    /// Of the inner dimension.
    words: usize,
    first_row: usize,
    start: Start<'a>,
    relu: bool,
}

impl Product<'_> {
    fn panel_columns(&self, panel: usize) -> usize {
        (self.right.columns() - panel * TILE_COLUMNS).min(TILE_COLUMNS)
    }

    fn block(&self, rows: Range<usize>, panels: Range<usize>, out: &mut [f32]) {
        let steps = blocks(self.words, self.kernel.word_granule())
            .flat_map(|words| panels.clone().map(move |panel| (words.clone(), panel)));
        let mut steps = steps.peekable();
        while let Some((words, panel)) = steps.next() {
            // Each tile asks for a part of what the next step reads, and for where the next tile's sums go.
            let soon = steps
                .peek()
                .map_or(&[][..], |(words, panel)| &self.right.panel(*panel, words.start)[..words.len() * PANEL_LINES]);
            let tile_rows = self.kernel.tile_rows();
            let share = soon.len().div_ceil(rows.len().div_ceil(tile_rows)).max(1);
            let mut soon = soon.chunks(share);
            for row in rows.clone().step_by(tile_rows) {
                fetch::lines(soon.next().unwrap_or_default());
                let next = row + tile_rows;
                if words.start == 0 && next < rows.end {
                    let first = &out[(next - self.first_row) * self.right.columns() + panel * TILE_COLUMNS..];
                    let next = (rows.end - next).min(tile_rows);
                    fetch::rows(first, next, self.right.columns(), self.panel_columns(panel));
                }
                self.tile(row..rows.end.min(row + tile_rows), panel, words.clone(), out);
            }
        }
    }

    fn tile(&self, rows: Range<usize>, panel: usize, words: Range<usize>, out: &mut [f32]) {
        let column = panel * TILE_COLUMNS;
        let (left, row_step, word_step) = self.left.tile(rows.start, words.start, self.words);
        let begin = match self.start {
            _ if words.start > 0 => Begin::Sum,
            Start::Zero => Begin::Zero,
            Start::Row(row) => Begin::Row(&row[column..]),
            Start::Sum => Begin::Sum,
        };
        let stride = self.right.columns();
        self.running.tile(&mut Tile {
            rows: rows.len(),
            columns: self.panel_columns(panel),
            words: words.len(),
            left,
            row_step,
            word_step,
            right: self.right.panel(panel, words.start),
            out: &mut out[(rows.start - self.first_row) * stride + column..],
            stride,
            begin,
            relu: self.relu && words.end == self.words,
        });
    }
}
