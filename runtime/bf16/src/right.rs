//! The right operand of a product.

use std::ops::Range;

use crate::kernel::{Kernel, PANEL_LINES, TILE_COLUMNS};
use crate::lines::{LINE, Line};
use crate::matrix::Matrix;

/// Panels that are filled at a time where rows are paired: two rows are read in long stretches, and what is written is in a few places.
const BLOCK_PANELS: usize = 16;
/// Values of a row of a transposed operand that are turned at a time.
const TURNED: usize = 64;

/// A packed right operand: panels of as many columns as a tile has, each with the pairs of the inner dimension one after another and
/// the columns of a pair side by side. What the last panel lacks in columns is 0, and so is what the last pair lacks.
#[derive(Clone, Debug, Default)]
pub struct Right {
    lines: Vec<Line>,
    depth: usize,
    columns: usize,
}

/// Some panels of a right operand that are still to be packed: on any thread, in any order.
#[derive(Debug)]
pub struct RightPart<'a> {
    kernel: Kernel,
    matrix: Matrix<'a>,
    /// The first column.
    first: usize,
    lines: &'a mut [Line],
}

impl Right {
    /// An operand without columns.
    pub fn new() -> Self {
        Self::default()
    }

    /// Its rows: the product's inner dimension.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Its columns: those of the product.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Rounds a matrix and lays it out; what was in the operand before is gone, its memory is used again.
    pub fn pack(&mut self, kernel: Kernel, matrix: Matrix<'_>) {
        self.parts(kernel, matrix, usize::MAX).for_each(RightPart::pack);
    }

    /// The same in parts of about `columns` columns; the operand is packed when all of them are.
    pub fn parts<'a>(
        &'a mut self,
        kernel: Kernel,
        matrix: Matrix<'a>,
        columns: usize,
    ) -> impl Iterator<Item = RightPart<'a>> {
        (self.depth, self.columns) = (matrix.rows(), matrix.columns());
        let panel_lines = self.pairs() * PANEL_LINES;
        self.lines.resize(self.columns.div_ceil(TILE_COLUMNS) * panel_lines, Line::default());
        let panels = (columns / TILE_COLUMNS).clamp(1, self.columns.div_ceil(TILE_COLUMNS).max(1));
        let parts = self.lines.chunks_mut((panels * panel_lines).max(1)).enumerate();
        parts.map(move |(index, lines)| RightPart { kernel, matrix, first: index * panels * TILE_COLUMNS, lines })
    }

    /// Pairs of the inner dimension.
    pub(crate) fn pairs(&self) -> usize {
        self.depth.div_ceil(2)
    }

    /// Panels of columns.
    pub(crate) fn panels(&self) -> usize {
        self.columns.div_ceil(TILE_COLUMNS)
    }

    /// The lines of a panel from a pair on.
    pub(crate) fn panel(&self, panel: usize, pair: usize) -> &[Line] {
        &self.lines[(panel * self.pairs() + pair) * PANEL_LINES..(panel + 1) * self.pairs() * PANEL_LINES]
    }
}

impl RightPart<'_> {
    /// Packs these panels.
    pub fn pack(self) {
        let panel_lines = self.matrix.rows().div_ceil(2) * PANEL_LINES;
        let first = |panel: usize| self.first + panel * TILE_COLUMNS;
        if self.matrix.transposed {
            for (panel, lines) in self.lines.chunks_exact_mut(panel_lines).enumerate() {
                let columns = first(panel)..self.matrix.columns().min(first(panel + 1));
                pack_turned(self.kernel, self.matrix, columns, lines);
            }
        } else {
            for (block, lines) in self.lines.chunks_mut(panel_lines * BLOCK_PANELS).enumerate() {
                let panel = block * BLOCK_PANELS;
                let columns = first(panel)..self.matrix.columns().min(first(panel + lines.len() / panel_lines));
                pack_paired(self.kernel, self.matrix, columns, lines);
            }
        }
    }
}

/// Panels of a matrix whose rows lie side by side: two of them are paired at a time.
fn pack_paired(kernel: Kernel, matrix: Matrix<'_>, columns: Range<usize>, lines: &mut [Line]) {
    let pairs = matrix.rows().div_ceil(2);
    let panel_words = pairs * TILE_COLUMNS;
    let words: &mut [u32] = bytemuck::cast_slice_mut(lines);
    let zeros = [0.0; BLOCK_PANELS * TILE_COLUMNS];
    if !columns.len().is_multiple_of(TILE_COLUMNS) {
        let last = words.len() - panel_words;
        words[last..].fill(0);
    }
    for pair in 0..pairs {
        let low = &matrix.line(2 * pair)[columns.clone()];
        let odd = 2 * pair + 1 == matrix.rows();
        let high = if odd { &zeros[..low.len()] } else { &matrix.line(2 * pair + 1)[columns.clone()] };
        kernel.pair::<TILE_COLUMNS>(low, high, &mut words[pair * TILE_COLUMNS..], panel_words);
    }
}

/// A panel of a matrix whose columns lie side by side: pairs are within a column, and words change places.
fn pack_turned(kernel: Kernel, matrix: Matrix<'_>, columns: Range<usize>, lines: &mut [Line]) {
    let mut rounded = [[0_u32; TURNED / 2]; TILE_COLUMNS];
    let lines = lines.as_chunks_mut::<PANEL_LINES>().0;
    for (block, lines) in lines.chunks_mut(TURNED / 2).enumerate() {
        let start = block * TURNED;
        let values = start..matrix.line_width().min(start + TURNED);
        for (column, words) in columns.clone().zip(&mut rounded) {
            kernel.round(&matrix.line(column)[values.clone()], &mut words[..lines.len()]);
        }
        for (pair, lines) in lines.iter_mut().enumerate() {
            for (line, words) in lines.iter_mut().zip(rounded.as_chunks::<LINE>().0) {
                line.0 = std::array::from_fn(|lane| words[lane][pair]);
            }
        }
    }
}
