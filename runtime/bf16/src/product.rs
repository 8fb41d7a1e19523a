//! How a product is cut into tiles.

use std::ops::Range;

use crate::kernel::{Begin, Kernel, PANEL_LINES, TILE_COLUMNS, TILE_ROWS, Tile};
use crate::left::Left;
use crate::lines::Line;
use crate::right::Right;

/// Pairs of the inner dimension that are summed before the next tile: a panel of the right operand of this depth, 16 KiB, stays in
/// the nearest cache while all rows of a block are multiplied by it.
const BLOCK_PAIRS: usize = 128;
/// Rows and panels of a block of the result, 264 KiB: with what it is computed from at a time, 132 and 128 KiB, it stays in a core's
/// own cache until it is complete.
const BLOCK_ROWS: usize = 22 * TILE_ROWS;
const BLOCK_PANELS: usize = 8;

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
/// If the shapes do not fit.
pub fn multiply(kernel: Kernel, left: &Left, right: &Right, out: &mut [f32], start: Start<'_>, finish: Finish) {
    multiply_rows(kernel, left, 0..left.rows(), right, out, start, finish);
}

/// The same for some of the rows only: `out` holds these. Their first must be a multiple of 12.
///
/// # Panics
/// If the shapes do not fit, or rows begin elsewhere.
pub fn multiply_rows(
    kernel: Kernel,
    left: &Left,
    rows: Range<usize>,
    right: &Right,
    out: &mut [f32],
    start: Start<'_>,
    finish: Finish,
) {
    let columns = right.columns();
    assert_eq!(left.depth(), right.depth(), "the operands' inner dimensions");
    assert!(rows.end <= left.rows() && rows.start.is_multiple_of(TILE_ROWS), "rows of the left operand");
    assert_eq!(out.len(), rows.len() * columns, "the result of {} rows and {columns} columns", rows.len());
    if let Start::Row(row) = start {
        assert_eq!(row.len(), columns, "the row that is added to every row");
    }
    let product = Product { kernel, left, right, first_row: rows.start, start, relu: finish == Finish::Relu };
    for first in rows.clone().step_by(BLOCK_ROWS) {
        let rows = first..rows.end.min(first + BLOCK_ROWS);
        for first in (0..right.panels()).step_by(BLOCK_PANELS) {
            product.block(rows.clone(), first..right.panels().min(first + BLOCK_PANELS), out);
        }
    }
}

/// The inner dimension in blocks of about one size; one block of nothing where it is 0, for what the sums start from.
fn blocks(pairs: usize) -> impl Iterator<Item = Range<usize>> {
    let count = pairs.div_ceil(BLOCK_PAIRS).max(1);
    let size = pairs.div_ceil(count);
    (0..count).map(move |block| block * size..pairs.min((block + 1) * size))
}

struct Product<'a> {
    kernel: Kernel,
    left: &'a Left,
    right: &'a Right,
    first_row: usize,
    start: Start<'a>,
    relu: bool,
}

impl Product<'_> {
    fn block(&self, rows: Range<usize>, panels: Range<usize>, out: &mut [f32]) {
        let steps = blocks(self.left.pairs()).flat_map(|pairs| panels.clone().map(move |panel| (pairs.clone(), panel)));
        let mut steps = steps.peekable();
        while let Some((pairs, panel)) = steps.next() {
            // Each tile asks for a part of what the next step reads.
            let soon = steps
                .peek()
                .map_or(&[][..], |(pairs, panel)| &self.right.panel(*panel, pairs.start)[..pairs.len() * PANEL_LINES]);
            let share = soon.len().div_ceil(rows.len().div_ceil(TILE_ROWS)).max(1);
            let mut soon = soon.chunks(share);
            for row in rows.clone().step_by(TILE_ROWS) {
                let soon = soon.next().unwrap_or_default();
                self.tile(row..rows.end.min(row + TILE_ROWS), panel, pairs.clone(), soon, out);
            }
        }
    }

    fn tile(&self, rows: Range<usize>, panel: usize, pairs: Range<usize>, soon: &[Line], out: &mut [f32]) {
        let column = panel * TILE_COLUMNS;
        let (left, row_step, pair_step) = self.left.tile(rows.start, pairs.start);
        let begin = match self.start {
            _ if pairs.start > 0 => Begin::Sum,
            Start::Zero => Begin::Zero,
            Start::Row(row) => Begin::Row(&row[column..]),
            Start::Sum => Begin::Sum,
        };
        let stride = self.right.columns();
        self.kernel.tile(Tile {
            rows: rows.len(),
            columns: (stride - column).min(TILE_COLUMNS),
            pairs: pairs.len(),
            left,
            row_step,
            pair_step,
            right: self.right.panel(panel, pairs.start),
            soon,
            out: &mut out[(rows.start - self.first_row) * stride + column..],
            stride,
            begin,
            relu: self.relu && pairs.end == self.left.pairs(),
        });
    }
}
