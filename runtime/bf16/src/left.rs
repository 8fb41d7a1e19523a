//! The left operand of a product.

use crate::kernel::{Kernel, TILE_ROWS};
use crate::lines::LINE;
use crate::matrix::Matrix;

/// Columns of a transposed operand that are paired at a time: rows of it stay in the nearest cache until they are used up.
const BLOCK_COLUMNS: usize = 16 * TILE_ROWS;

/// A packed left operand.
///
/// A matrix that lies in memory row by row stays that way, in words of two values of a row: a kernel reads a word of every row of a
/// tile. One that lies column by column is kept in panels of as many rows as a tile has, each pair of its columns side by side for
/// all of these rows.
#[derive(Clone, Debug, Default)]
pub struct Left {
    words: Vec<u32>,
    rows: usize,
    depth: usize,
    panels: bool,
}

/// Words from row to row: whole cache lines, and an odd number of them, so that the rows of a tile do not fall into one set of the
/// cache.
fn row_words(pairs: usize) -> usize {
    (pairs.div_ceil(LINE) | 1) * LINE
}

impl Left {
    /// An operand without rows.
    pub fn new() -> Self {
        Self::default()
    }

    /// Its rows: those of the product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Its columns: the product's inner dimension.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Rounds a matrix and lays it out; what was in the operand before is gone, its memory is used again.
    pub fn pack(&mut self, kernel: Kernel, matrix: Matrix<'_>) {
        (self.rows, self.depth, self.panels) = (matrix.rows(), matrix.columns(), matrix.transposed);
        if self.panels { self.pack_panels(kernel, matrix) } else { self.pack_rows(kernel, matrix) }
    }

    fn pack_rows(&mut self, kernel: Kernel, matrix: Matrix<'_>) {
        let (pairs, step) = (self.pairs(), row_words(self.pairs()));
        self.words.resize(self.rows * step, 0);
        for (row, words) in self.words.chunks_exact_mut(step).enumerate() {
            kernel.round(matrix.line(row), &mut words[..pairs]);
        }
    }

    fn pack_panels(&mut self, kernel: Kernel, matrix: Matrix<'_>) {
        let panel_words = self.pairs() * TILE_ROWS;
        self.words.resize(self.rows.div_ceil(TILE_ROWS) * panel_words, 0);
        let zeros = [0.0; BLOCK_COLUMNS];
        for first in (0..self.rows).step_by(BLOCK_COLUMNS) {
            let block = first..self.rows.min(first + BLOCK_COLUMNS);
            for pair in 0..self.pairs() {
                let low = &matrix.line(2 * pair)[block.clone()];
                let odd = 2 * pair + 1 == self.depth;
                let high = if odd { &zeros[..block.len()] } else { &matrix.line(2 * pair + 1)[block.clone()] };
                let words = &mut self.words[first * self.depth.div_ceil(2) + pair * TILE_ROWS..];
                kernel.pair::<TILE_ROWS>(low, high, words, panel_words);
            }
        }
    }

    /// Pairs of the inner dimension.
    pub(crate) fn pairs(&self) -> usize {
        self.depth.div_ceil(2)
    }

    /// The words of a tile from its first row, which is a multiple of a tile's, and a pair on; steps from row to row and from pair to
    /// pair.
    pub(crate) fn tile(&self, row: usize, pair: usize) -> (&[u32], usize, usize) {
        if self.panels {
            let at = row / TILE_ROWS * self.pairs() * TILE_ROWS + pair * TILE_ROWS;
            (&self.words[at..], 1, TILE_ROWS)
        } else {
            let step = row_words(self.pairs());
            (&self.words[row * step + pair..], step, 1)
        }
    }
}
