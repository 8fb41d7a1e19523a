//! How a product is cut into tiles.
#![allow(unsafe_code)] // Results need not be zeroed before they are written.

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;

use crate::kernel::{Begin, Kernel, PANEL_LINES, Running, TILE_COLUMNS, Tile, fetch};
use crate::left::Left;
use crate::lines::Line;
use crate::right::Right;

/// Rows and panels of a block of the result, about 264 KiB of sums: with what they are computed from at a time, at most 264 and 256 KiB, they
/// stay in a core's own cache until they are complete.
const BLOCK_ROWS: usize = 264;
const BLOCK_PANELS: usize = 8;

/// The rows of a wide result are so far apart that those of a block fall into a few sets of the caches and drive each other out: from so many
/// columns on, sums lie elsewhere until they are complete.
const KEPT_FROM_COLUMNS: usize = 1024;

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
    sum_products(&[(left, right)], 0..left.rows(), out, start, finish);
}

/// The same in memory that it takes for the result; `start` is not [`Start::Sum`].
///
/// # Panics
/// As [`multiply`], and if there is nothing to start from.
pub fn product(left: &Left, right: &Right, start: Start<'_>, finish: Finish) -> Vec<f32> {
    assert!(!matches!(start, Start::Sum), "a product that is new has nothing to be added to");
    let values = left.rows() * right.columns();
    let mut out = Vec::with_capacity(values);
    compute(&[(left, right)], 0..left.rows(), &mut out.spare_capacity_mut()[..values], start, finish);
    // SAFETY: every row and column of the result was written.
    unsafe { out.set_len(values) };
    out
}

/// `out = start + Σ left · right` over some pairs of operands, one after another, and for some of the rows only: `out` holds these. Their
/// first must be a multiple of [`ROW_GRANULE`].
///
/// # Panics
/// If there are no operands, the shapes do not fit, rows begin elsewhere, or the operands were packed for different kernels.
pub fn sum_products(
    operands: &[(&Left, &Right)],
    rows: Range<usize>,
    out: &mut [f32],
    start: Start<'_>,
    finish: Finish,
) {
    compute(operands, rows, uninit(out), start, finish);
}

/// [`sum_products`] into memory that has been written only where `start` says so.
fn compute(
    operands: &[(&Left, &Right)],
    rows: Range<usize>,
    out: &mut [MaybeUninit<f32>],
    start: Start<'_>,
    finish: Finish,
) {
    let &[(first, right), ..] = operands else { panic!("a sum of no products") };
    let columns = right.columns();
    for (left, right) in operands {
        assert_eq!(left.depth(), right.depth(), "the operands' inner dimensions");
        assert!(rows.end <= left.rows() && rows.start.is_multiple_of(ROW_GRANULE), "rows of the left operand");
        assert_eq!(columns, right.columns(), "the columns of the products");
    }
    assert_eq!(out.len(), rows.len() * columns, "the result of {} rows and {columns} columns", rows.len());
    if let Start::Row(row) = start {
        assert_eq!(row.len(), columns, "the row that is added to every row");
    }
    let (Some(kernel), false) = (first.kernel(), out.is_empty()) else { return };
    for (left, right) in operands {
        let kernels = (left.kernel(), right.kernel());
        assert_eq!(kernels, (Some(kernel), Some(kernel)), "the kernels that the operands were packed for");
    }
    let product = Product {
        kernel,
        running: kernel.start(),
        operands,
        columns,
        first_row: rows.start,
        start,
        relu: finish == Finish::Relu,
        keeps_sums: columns >= KEPT_FROM_COLUMNS,
    };
    let block = BLOCK_ROWS / kernel.tile_rows() * kernel.tile_rows();
    KEPT.with_borrow_mut(|kept| {
        if product.keeps_sums {
            kept.resize(BLOCK_ROWS * BLOCK_PANELS * PANEL_LINES, Line::default());
        }
        let kept = uninit(bytemuck::cast_slice_mut(kept));
        for first in rows.clone().step_by(block) {
            let rows = first..rows.end.min(first + block);
            for first in (0..right.panels()).step_by(BLOCK_PANELS) {
                product.block(rows.clone(), first..right.panels().min(first + BLOCK_PANELS), kept, out);
            }
        }
    });
}

thread_local! {
    /// Sums of a block until they are complete, tile by tile.
    static KEPT: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Memory that kernels write numbers to.
fn uninit(values: &mut [f32]) -> &mut [MaybeUninit<f32>] {
    // SAFETY: of one layout, and nothing but numbers is written.
    unsafe { &mut *(std::ptr::from_mut(values) as *mut [MaybeUninit<f32>]) }
}

/// The inner dimension in blocks of about one size; one block of nothing where it is 0, for what the sums start from.
fn blocks(words: usize, kernel: Kernel) -> impl Iterator<Item = Range<usize>> {
    let count = words.div_ceil(kernel.block_words()).max(1);
    let size = words.div_ceil(count).next_multiple_of(kernel.word_granule());
    (0..count).map(move |block| (block * size).min(words)..words.min((block + 1) * size))
}

struct Product<'a> {
    kernel: Kernel,
    running: Running,
    operands: &'a [(&'a Left, &'a Right)],
    columns: usize,
    first_row: usize,
    start: Start<'a>,
    relu: bool,
    /// Whether the sums of a block lie elsewhere until they are complete.
    keeps_sums: bool,
}

/// A part of the inner dimension, of which rows of tiles are computed one after another.
#[derive(Clone)]
struct Step {
    /// Which of the products.
    product: usize,
    words: Range<usize>,
    panel: usize,
}

impl Product<'_> {
    fn panel_columns(&self, panel: usize) -> usize {
        (self.columns - panel * TILE_COLUMNS).min(TILE_COLUMNS)
    }

    /// The steps of a block, in order.
    fn steps(&self, panels: Range<usize>) -> impl Iterator<Item = Step> {
        self.operands.iter().enumerate().flat_map(move |(product, (_, right))| {
            let panels = panels.clone();
            blocks(right.words(), self.kernel)
                .flat_map(move |words| panels.clone().map(move |panel| Step { product, words: words.clone(), panel }))
        })
    }

    fn block(
        &self,
        rows: Range<usize>,
        panels: Range<usize>,
        kept: &mut [MaybeUninit<f32>],
        out: &mut [MaybeUninit<f32>],
    ) {
        let tile_rows = self.kernel.tile_rows();
        let tile_sums = tile_rows * TILE_COLUMNS;
        let mut steps = self.steps(panels.clone()).peekable();
        while let Some(step) = steps.next() {
            // Each tile asks for a part of what the next step reads, and for where the next tile's sums go.
            let soon = steps.peek().map_or(&[][..], |step| self.panel(step));
            let share = soon.len().div_ceil(rows.len().div_ceil(tile_rows)).max(1);
            let mut soon = soon.chunks(share);
            let kept = kept.chunks_exact_mut(tile_sums * rows.len().div_ceil(tile_rows)).nth(step.panel - panels.start);
            let mut kept = kept.unwrap_or_default().chunks_exact_mut(tile_sums);
            let uses_result = match self.keeps_sums {
                true => self.is_last(&step) || (step.is_first() && matches!(self.start, Start::Sum)),
                false => step.is_first(),
            };
            for row in rows.clone().step_by(tile_rows) {
                fetch::lines(soon.next().unwrap_or_default());
                let next = row + tile_rows;
                if uses_result && next < rows.end {
                    let first = &out[(next - self.first_row) * self.columns + step.panel * TILE_COLUMNS..];
                    fetch::rows(first, (rows.end - next).min(tile_rows), self.columns, self.panel_columns(step.panel));
                }
                self.tile(row..rows.end.min(row + tile_rows), &step, kept.next().unwrap_or_default(), out);
            }
        }
    }

    /// Whether sums are complete with it.
    fn is_last(&self, step: &Step) -> bool {
        let (_, right) = self.operands[step.product];
        step.product + 1 == self.operands.len() && step.words.end == right.words()
    }

    /// What a step reads of the right operand.
    fn panel(&self, step: &Step) -> &[Line] {
        let (_, right) = self.operands[step.product];
        &right.panel(step.panel, step.words.start)[..step.words.len() * PANEL_LINES]
    }

    fn tile(&self, rows: Range<usize>, step: &Step, kept: &mut [MaybeUninit<f32>], out: &mut [MaybeUninit<f32>]) {
        let column = step.panel * TILE_COLUMNS;
        let (left, right) = self.operands[step.product];
        let (left, row_step) = left.tile(self.kernel, rows.start, step.words.start, right.words());
        let out = &mut out[(rows.start - self.first_row) * self.columns + column..];
        let (is_first, is_last) = (step.is_first(), self.is_last(step));
        // Sums are in the result before the first step and after the last; in between they may be kept.
        let begin_in_result = is_first || !self.keeps_sums;
        let end_in_result = is_last || !self.keeps_sums;
        let (out, stride, other, other_stride): (&mut [_], _, &[_], _) = match end_in_result {
            true => (out, self.columns, kept, TILE_COLUMNS),
            false => (kept, TILE_COLUMNS, out, self.columns),
        };
        let begin = match self.start {
            Start::Zero if is_first => Begin::Zero,
            Start::Row(row) if is_first => Begin::Row(&row[column..]),
            _ if begin_in_result == end_in_result => Begin::Sum,
            _ => Begin::Elsewhere { sums: other, stride: other_stride },
        };
        self.running.tile(&mut Tile {
            rows: rows.len(),
            columns: self.panel_columns(step.panel),
            words: step.words.len(),
            left,
            row_step,
            right: self.panel(step),
            out,
            stride,
            begin,
            relu: self.relu && is_last,
        });
    }
}

impl Step {
    /// Whether sums start with it.
    fn is_first(&self) -> bool {
        self.product == 0 && self.words.start == 0
    }
}
