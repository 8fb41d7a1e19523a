//! Splits a product into tiles.
// Results are written to uninitialized memory.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ops::Range;

use crate::kernel::{Begin, CompleteTile, Kernel, PANEL_LINES, Place, Running, TILE_COLUMNS, Tile, fetch};
use crate::left::Left;
use crate::lines::Line;
use crate::right::Right;

/// Rows and panels of a block of the result. A block has about 264 KiB of sums, and a step reads at
/// most 264 KiB and 256 KiB of the operands. All of it fits in a core's own cache until the sums
/// are complete.
const BLOCK_ROWS: usize = 264;
const BLOCK_PANELS: usize = 8;

/// From this number of columns on, incomplete sums go to a buffer. The rows of a wide result are
/// far apart: in place, the rows of a block would fall into few sets of the caches and evict each
/// other.
const BUFFERED_FROM_COLUMNS: usize = 1024;

/// The first row of a product must be a multiple of this, which is a multiple of every kernel's
/// tile.
pub const ROW_GRANULE: usize = 96;

/// The start values of a product's sums.
#[derive(Clone, Copy, Debug)]
pub enum Start<'a> {
    /// 0: the result is the product.
    Zero,
    /// A row, such as a layer's bias, that is added to every row of the product.
    Row(&'a [f32]),
    /// The present result: the product is added to it.
    Sum,
}

/// The function that is applied to a complete sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The identity.
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

/// As [`multiply`], with a new vector as the result. `start` must not be [`Start::Sum`].
///
/// # Panics
/// As [`multiply`], and if `start` is [`Start::Sum`].
pub fn product(left: &Left, right: &Right, start: Start<'_>, finish: Finish) -> Vec<f32> {
    let mut out = Vec::new();
    product_into(left, right, start, finish, &mut out);
    out
}

/// As [`product`], into a vector that is overwritten and keeps its memory.
///
/// # Panics
/// As [`product`].
pub fn product_into(left: &Left, right: &Right, start: Start<'_>, finish: Finish, out: &mut Vec<f32>) {
    assert!(!matches!(start, Start::Sum), "a new result has no sums to add to");
    let values = left.rows() * right.columns();
    out.clear();
    out.reserve_exact(values);
    let to = Output::Matrix(&mut out.spare_capacity_mut()[..values]);
    compute(&[(left, right)], 0..left.rows(), to, start, finish);
    // SAFETY: every row and column of the result was written.
    unsafe { out.set_len(values) };
}

/// `out = start + Σ left · right`, summed over the pairs of operands in order. Computes only the
/// given rows, and `out` has only these. The first row must be a multiple of [`ROW_GRANULE`].
///
/// # Panics
/// If there are no operands, the shapes do not fit, the first row is no multiple of
/// [`ROW_GRANULE`], or the operands were packed for different kernels.
pub fn sum_products(
    operands: &[(&Left, &Right)],
    rows: Range<usize>,
    out: &mut [f32],
    start: Start<'_>,
    finish: Finish,
) {
    compute(operands, rows, Output::Matrix(uninit(out)), start, finish);
}

/// Computes `start + left · right` tile by tile, and passes each tile to `take` while it is in the
/// nearest cache. Tiles of a panel come in the order of their rows. `start` must not be
/// [`Start::Sum`].
///
/// # Panics
/// As [`product`].
pub(crate) fn tiles(left: &Left, right: &Right, start: Start<'_>, take: &mut dyn FnMut(Place, &mut CompleteTile)) {
    assert!(!matches!(start, Start::Sum), "tiles have no sums to add to");
    let mut complete = CompleteTile::new();
    let to = Output::Tiles { complete: &mut complete, take };
    compute(&[(left, right)], 0..left.rows(), to, start, Finish::Plain);
}

/// The destination of complete sums.
enum Output<'a> {
    /// Row-major. Initialized only if the product starts from [`Start::Sum`].
    Matrix(&'a mut [MaybeUninit<f32>]),
    /// Each tile by itself. All tiles share the memory of their sums.
    Tiles { complete: &'a mut CompleteTile, take: &'a mut dyn FnMut(Place, &mut CompleteTile) },
}

fn compute(operands: &[(&Left, &Right)], rows: Range<usize>, mut out: Output<'_>, start: Start<'_>, finish: Finish) {
    let &[(first, right), ..] = operands else { panic!("a sum of no products") };
    let columns = right.columns();
    for (left, right) in operands {
        assert_eq!(left.depth(), right.depth(), "the operands' inner dimensions");
        assert!(rows.end <= left.rows() && rows.start.is_multiple_of(ROW_GRANULE), "rows of the left operand");
        assert_eq!(columns, right.columns(), "the columns of the products");
    }
    if let Output::Matrix(out) = &out {
        assert_eq!(out.len(), rows.len() * columns, "the result of {} rows and {columns} columns", rows.len());
    }
    if let Start::Row(row) = start {
        assert_eq!(row.len(), columns, "the row that is added to every row");
    }
    let (Some(kernel), false) = (first.kernel(), rows.is_empty() || columns == 0) else { return };
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
        // A complete tile has no place for the incomplete sums of others.
        buffers_sums: columns >= BUFFERED_FROM_COLUMNS || matches!(out, Output::Tiles { .. }),
    };
    let block = BLOCK_ROWS / kernel.tile_rows() * kernel.tile_rows();
    BUFFER.with_borrow_mut(|buffer| {
        if product.buffers_sums {
            buffer.resize(BLOCK_ROWS * BLOCK_PANELS * PANEL_LINES, Line::default());
        }
        let buffer = uninit(bytemuck::cast_slice_mut(buffer));
        for first in rows.clone().step_by(block) {
            let rows = first..rows.end.min(first + block);
            for first in (0..right.panels()).step_by(BLOCK_PANELS) {
                product.block(rows.clone(), first..right.panels().min(first + BLOCK_PANELS), buffer, &mut out);
            }
        }
    });
}

thread_local! {
    /// The buffer of a block's incomplete sums, tile by tile.
    static BUFFER: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// A view of `values` that kernels write numbers to.
fn uninit(values: &mut [f32]) -> &mut [MaybeUninit<f32>] {
    // SAFETY: both types have the same layout, and kernels write only initialized numbers.
    unsafe { &mut *(std::ptr::from_mut(values) as *mut [MaybeUninit<f32>]) }
}

/// Splits the inner dimension into blocks of similar size. If it is 0, there is one empty block,
/// which writes the start values.
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
    /// True if the incomplete sums of a block are in the buffer.
    buffers_sums: bool,
}

/// A block of the inner dimension for one panel. All tiles of the panel compute it in order of
/// rows.
#[derive(Clone)]
struct Step {
    /// The index of the pair of operands.
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

    fn block(&self, rows: Range<usize>, panels: Range<usize>, buffer: &mut [MaybeUninit<f32>], out: &mut Output<'_>) {
        let tile_rows = self.kernel.tile_rows();
        let tile_sums = tile_rows * TILE_COLUMNS;
        let mut steps = self.steps(panels.clone()).peekable();
        while let Some(step) = steps.next() {
            // Each tile prefetches a share of the next step's panel, and the rows of the next
            // tile's sums.
            let soon = steps.peek().map_or(&[][..], |step| self.panel(step));
            let share = soon.len().div_ceil(rows.len().div_ceil(tile_rows)).max(1);
            let mut soon = soon.chunks(share);
            let buffer =
                buffer.chunks_exact_mut(tile_sums * rows.len().div_ceil(tile_rows)).nth(step.panel - panels.start);
            let mut buffer = buffer.unwrap_or_default().chunks_exact_mut(tile_sums);
            let uses_result = match self.buffers_sums {
                true => self.is_last(&step) || (step.is_first() && matches!(self.start, Start::Sum)),
                false => step.is_first(),
            };
            for row in rows.clone().step_by(tile_rows) {
                fetch::lines(soon.next().unwrap_or_default());
                let next = row + tile_rows;
                if let (Output::Matrix(out), true) = (&*out, uses_result && next < rows.end) {
                    let first = &out[(next - self.first_row) * self.columns + step.panel * TILE_COLUMNS..];
                    fetch::rows(first, (rows.end - next).min(tile_rows), self.columns, self.panel_columns(step.panel));
                }
                self.tile(row..rows.end.min(row + tile_rows), &step, buffer.next().unwrap_or_default(), out);
            }
        }
    }

    /// True if the sums are complete after this step.
    fn is_last(&self, step: &Step) -> bool {
        let (_, right) = self.operands[step.product];
        step.product + 1 == self.operands.len() && step.words.end == right.words()
    }

    /// The part of the right operand that a step reads.
    fn panel(&self, step: &Step) -> &[Line] {
        let (_, right) = self.operands[step.product];
        &right.panel(step.panel, step.words.start)[..step.words.len() * PANEL_LINES]
    }

    fn tile(&self, rows: Range<usize>, step: &Step, buffer: &mut [MaybeUninit<f32>], out: &mut Output<'_>) {
        let column = step.panel * TILE_COLUMNS;
        let (columns, is_last) = (self.panel_columns(step.panel), self.is_last(step));
        match out {
            Output::Matrix(out) => {
                let result = &mut out[(rows.start - self.first_row) * self.columns + column..];
                self.sum(rows, step, buffer, (result, self.columns));
            }
            Output::Tiles { complete, take } => {
                let is_whole = rows.len() == self.kernel.tile_rows() && columns == TILE_COLUMNS;
                if is_last && !is_whole {
                    complete.0.as_flattened_mut().fill(0.0);
                }
                self.sum(rows.clone(), step, buffer, (uninit(complete.0.as_flattened_mut()), TILE_COLUMNS));
                if is_last {
                    take(Place { rows, panel: step.panel, columns }, complete);
                }
            }
        }
    }

    /// Computes a step of a tile. `result` is the tile's place in the result, and the distance of
    /// its rows.
    fn sum(
        &self,
        rows: Range<usize>,
        step: &Step,
        buffer: &mut [MaybeUninit<f32>],
        result: (&mut [MaybeUninit<f32>], usize),
    ) {
        let column = step.panel * TILE_COLUMNS;
        let (left, right) = self.operands[step.product];
        let (left, row_step) = left.tile(self.kernel, rows.start, step.words.start, right.words());
        let (is_first, is_last) = (step.is_first(), self.is_last(step));
        // Sums are in the result before the first step and after the last. In between they may be
        // in the buffer.
        let begin_in_result = is_first || !self.buffers_sums;
        let end_in_result = is_last || !self.buffers_sums;
        let (result, result_stride) = result;
        let (out, stride, other, other_stride): (&mut [_], _, &[_], _) = match end_in_result {
            true => (result, result_stride, buffer, TILE_COLUMNS),
            false => (buffer, TILE_COLUMNS, result, result_stride),
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
    /// True if the sums start with this step.
    fn is_first(&self) -> bool {
        self.product == 0 && self.words.start == 0
    }
}
