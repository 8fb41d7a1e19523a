//! The left operand of a product.

use crate::kernel::{Kernel, MOST_COLUMNS, VECTOR_ROWS};
use crate::lines::{LINE, Line};
use crate::matrix::Matrix;

/// Rows of a transposed operand that are put in panels at a time: they stay in the nearest cache until they are used up.
const PANEL_BLOCK: usize = 16 * VECTOR_ROWS;
/// Rows of a transposed operand that are turned at a time.
const TURNED_BLOCK: usize = 128;
/// Words of a row that are turned at a time.
const TURNED_WORDS: usize = 256;
const _: () = assert!(PANEL_BLOCK <= MOST_COLUMNS && TURNED_BLOCK <= MOST_COLUMNS);

/// A packed left operand: panels of as many rows as a tile has, each word of a row beside those of the panel's other rows; or, for a kernel
/// that reads rows by lines, row by row.
#[derive(Clone, Debug, Default)]
pub struct Left {
    /// None before an operand is packed.
    kernel: Option<Kernel>,
    lines: Vec<Line>,
    rows: usize,
    depth: usize,
}

/// Words from row to row: whole cache lines, and an odd number of them, so that the rows of a tile do not fall into one set of the
/// cache.
fn row_words(words: usize) -> usize {
    (words.div_ceil(LINE) | 1) * LINE
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

    /// Rounds a matrix as the kernel asks and lays it out; what was in the operand before is gone, its memory is used again.
    pub fn pack(&mut self, kernel: Kernel, matrix: Matrix<'_>) {
        self.kernel = Some(kernel);
        (self.rows, self.depth) = (matrix.rows(), matrix.columns());
        let words = kernel.words_of(self.depth);
        match (kernel.wants_rows(), matrix.transposed) {
            (true, false) => self.pack_rows(kernel, matrix, words),
            (true, true) => self.pack_turned(kernel, matrix, words),
            (false, false) => self.pack_panels_of_rows(kernel, matrix, words),
            (false, true) => self.pack_panels(kernel, matrix, words),
        }
    }

    fn pack_rows(&mut self, kernel: Kernel, matrix: Matrix<'_>, words: usize) {
        let (packed, step) = self.lay_rows(kernel, words);
        for (row, packed) in packed.chunks_exact_mut(step).take(matrix.rows()).enumerate() {
            kernel.row(matrix.line(row), &mut packed[..words]);
        }
    }

    fn pack_panels(&mut self, kernel: Kernel, matrix: Matrix<'_>, words: usize) {
        let packed = self.lay_panels(words);
        for first in (0..matrix.rows()).step_by(PANEL_BLOCK) {
            let block = first..matrix.rows().min(first + PANEL_BLOCK);
            for word in 0..words {
                let to = &mut packed[first * words + word * VECTOR_ROWS..];
                kernel.words::<VECTOR_ROWS>(matrix, word, block.clone(), to, words * VECTOR_ROWS);
            }
        }
    }

    fn pack_panels_of_rows(&mut self, kernel: Kernel, matrix: Matrix<'_>, words: usize) {
        let packed = self.lay_panels(words);
        let mut rows = [[0_u32; TURNED_WORDS]; LINE];
        for first in (0..matrix.rows()).step_by(VECTOR_ROWS) {
            for word in (0..words).step_by(TURNED_WORDS) {
                let values = kernel.word_values();
                let values = word * values..matrix.columns().min((word + TURNED_WORDS) * values);
                let panel = first..matrix.rows().min(first + VECTOR_ROWS);
                for (row, to) in panel.zip(&mut rows) {
                    kernel.row(&matrix.line(row)[values.clone()], to);
                }
                for column in (0..words.min(word + TURNED_WORDS) - word).step_by(LINE) {
                    // Of each word 16 rows are written, of which the last four are where the next word, or panel, is written after them.
                    let to = &mut packed[first * words + (word + column) * VECTOR_ROWS..];
                    kernel.turn(&rows.as_flattened()[column..], TURNED_WORDS, to, VECTOR_ROWS);
                }
            }
        }
    }

    fn pack_turned(&mut self, kernel: Kernel, matrix: Matrix<'_>, words: usize) {
        let (packed, step) = self.lay_rows(kernel, words);
        let mut lines = [[0_u32; TURNED_BLOCK]; LINE];
        for first in (0..matrix.rows()).step_by(TURNED_BLOCK) {
            let block = first..matrix.rows().min(first + TURNED_BLOCK);
            for word in (0..words).step_by(LINE) {
                for (line, to) in lines.iter_mut().enumerate() {
                    kernel.words::<TURNED_BLOCK>(matrix, word + line, block.clone(), to, TURNED_BLOCK);
                }
                for row in (0..block.len()).step_by(LINE) {
                    let to = &mut packed[(first + row) * step + word..];
                    kernel.turn(&lines.as_flattened()[row..], TURNED_BLOCK, to, step);
                }
            }
        }
    }

    /// Room for rows of whole tiles, and the words from one to the next: each begins at a cache line.
    fn lay_rows(&mut self, kernel: Kernel, words: usize) -> (&mut [u32], usize) {
        let step = row_words(words);
        (self.room(self.rows.next_multiple_of(kernel.tile_rows()) * step), step)
    }

    /// Room for panels, and for a line of words and what is written beside them after the last.
    fn lay_panels(&mut self, words: usize) -> &mut [u32] {
        self.room(self.rows.div_ceil(VECTOR_ROWS) * words * VECTOR_ROWS + LINE * VECTOR_ROWS + LINE)
    }

    fn room(&mut self, words: usize) -> &mut [u32] {
        self.lines.resize(words.div_ceil(LINE), Line::default());
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..words]
    }

    /// What it was packed for; none if it never was.
    pub(crate) fn kernel(&self) -> Option<Kernel> {
        self.kernel
    }

    /// The words of a tile from its first row, which is a multiple of a tile's, and a word on, of `words` in all; and how many there are from
    /// row to row of a kernel that reads rows by lines. Others find word `w` of row `r` at `12 · w + r`.
    pub(crate) fn tile(&self, kernel: Kernel, row: usize, word: usize, words: usize) -> (&[u32], usize) {
        let packed: &[u32] = bytemuck::cast_slice(&self.lines);
        if kernel.wants_rows() {
            let step = row_words(words);
            (&packed[row * step + word..], step)
        } else {
            (&packed[row * words + word * VECTOR_ROWS..], 1)
        }
    }
}
