//! The left operand of a product.

use crate::kernel::{Kernel, Laid, MOST_COLUMNS, VECTOR_ROWS};
use crate::lines::{LINE, Line};
use crate::matrix::Matrix;

/// Rows of a transposed operand that are packed together. They stay in the nearest cache meanwhile.
const PANEL_BLOCK: usize = 16 * VECTOR_ROWS;
/// Rows that are transposed together.
const TRANSPOSED_ROWS: usize = 128;
/// Words of a row that are transposed together.
const TRANSPOSED_WORDS: usize = 256;
const _: () = assert!(PANEL_BLOCK <= MOST_COLUMNS && TRANSPOSED_ROWS <= MOST_COLUMNS);

/// A packed left operand. A panel has the rows of a tile, and stores the same word of all its rows
/// side by side. For a kernel that reads rows by cache lines, the operand is stored row by row
/// instead.
#[derive(Clone, Debug, Default)]
pub struct Left {
    /// `None` before an operand is packed.
    kernel: Option<Kernel>,
    lines: Vec<Line>,
    rows: usize,
    depth: usize,
}

/// The distance of rows in words: an odd number of cache lines, so that the rows of a tile fall
/// into different sets of the cache.
fn row_words(words: usize) -> usize {
    (words.div_ceil(LINE) | 1) * LINE
}

impl Left {
    /// An operand without rows.
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of rows of the operand and of the product.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The number of columns: the product's inner dimension.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Replaces the operand by `matrix`, rounded and laid out for `kernel`. Reuses the memory.
    pub fn pack(&mut self, kernel: Kernel, matrix: Matrix<'_>) {
        self.kernel = Some(kernel);
        (self.rows, self.depth) = (matrix.rows(), matrix.columns());
        let words = kernel.words_of(self.depth);
        match (kernel.wants_rows(), matrix.transposed) {
            (true, false) => self.pack_rows(kernel, matrix, words),
            (true, true) => self.pack_transposed(kernel, matrix, words),
            (false, false) => self.pack_panels_of_rows(kernel, matrix, words),
            (false, true) => self.pack_panels(kernel, matrix, words),
        }
    }

    /// Makes room for an operand of this shape, which the caller lays out itself.
    pub(crate) fn lay(&mut self, kernel: Kernel, rows: usize, depth: usize) -> Laid<'_> {
        self.kernel = Some(kernel);
        (self.rows, self.depth) = (rows, depth);
        let words = kernel.words_of(depth);
        match kernel.wants_rows() {
            true => {
                let (words, step) = self.lay_rows(kernel, words);
                Laid { words, step }
            }
            false => Laid { words: self.lay_panels(words), step: words },
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
        let mut rows = [[0_u32; TRANSPOSED_WORDS]; LINE];
        for first in (0..matrix.rows()).step_by(VECTOR_ROWS) {
            for word in (0..words).step_by(TRANSPOSED_WORDS) {
                let values = kernel.word_values();
                let values = word * values..matrix.columns().min((word + TRANSPOSED_WORDS) * values);
                let panel = first..matrix.rows().min(first + VECTOR_ROWS);
                for (row, to) in panel.zip(&mut rows) {
                    kernel.row(&matrix.line(row)[values.clone()], to);
                }
                for column in (0..words.min(word + TRANSPOSED_WORDS) - word).step_by(LINE) {
                    // Each word gets 16 rows. The last four overlap the next word or panel, which
                    // is written later.
                    let to = &mut packed[first * words + (word + column) * VECTOR_ROWS..];
                    kernel.transpose(&rows.as_flattened()[column..], TRANSPOSED_WORDS, to, VECTOR_ROWS);
                }
            }
        }
    }

    fn pack_transposed(&mut self, kernel: Kernel, matrix: Matrix<'_>, words: usize) {
        let (packed, step) = self.lay_rows(kernel, words);
        let mut lines = [[0_u32; TRANSPOSED_ROWS]; LINE];
        for first in (0..matrix.rows()).step_by(TRANSPOSED_ROWS) {
            let block = first..matrix.rows().min(first + TRANSPOSED_ROWS);
            for word in (0..words).step_by(LINE) {
                for (line, to) in lines.iter_mut().enumerate() {
                    kernel.words::<TRANSPOSED_ROWS>(matrix, word + line, block.clone(), to, TRANSPOSED_ROWS);
                }
                for row in (0..block.len()).step_by(LINE) {
                    let to = &mut packed[(first + row) * step + word..];
                    kernel.transpose(&lines.as_flattened()[row..], TRANSPOSED_ROWS, to, step);
                }
            }
        }
    }

    /// Makes room for rows of whole tiles. Returns it and the distance of rows in words. Each row
    /// starts at a cache line.
    fn lay_rows(&mut self, kernel: Kernel, words: usize) -> (&mut [u32], usize) {
        let step = row_words(words);
        (self.room(self.rows.next_multiple_of(kernel.tile_rows()) * step), step)
    }

    /// Makes room for panels, and for the words that are written beyond the last panel.
    fn lay_panels(&mut self, words: usize) -> &mut [u32] {
        self.room(self.rows.div_ceil(VECTOR_ROWS) * words * VECTOR_ROWS + LINE * VECTOR_ROWS + LINE)
    }

    /// Room for this many words, with any values. Memory of a larger operand is kept, and not
    /// cleared for the next one: packing writes every word that a product's result depends on.
    fn room(&mut self, words: usize) -> &mut [u32] {
        let lines = words.div_ceil(LINE);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line::default());
        }
        &mut bytemuck::cast_slice_mut(&mut self.lines)[..words]
    }

    /// The kernel of the packed operand. `None` before an operand is packed.
    pub(crate) fn kernel(&self) -> Option<Kernel> {
        self.kernel
    }

    /// The kernel of the packed operand.
    ///
    /// # Panics
    /// If no operand is packed.
    pub(crate) fn packed_for(&self) -> Kernel {
        let Some(kernel) = self.kernel else { panic!("the left operand is not packed") };
        kernel
    }

    /// The words of a tile from `row`, a multiple of the tile's rows, and from `word` on. `words`
    /// is the number of words per row. For a kernel that reads rows by cache lines, the second
    /// value is the distance of rows in words. Other kernels find word `w` of row `r` at
    /// `12 · w + r`.
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
