//! The right operand of a product.

use std::ops::Range;

use crate::kernel::{Kernel, MOST_COLUMNS, PANEL_LINES, TILE_COLUMNS};
use crate::lines::{LINE, Line};
use crate::matrix::Matrix;

/// Panels that are filled at a time from a matrix that lies row by row: rows are read in long stretches, and what is written is in a few
/// places.
const BLOCK_PANELS: usize = MOST_COLUMNS / TILE_COLUMNS;

/// A packed right operand: panels of as many columns as a tile has, each with the words of the inner dimension one after another and
/// the columns of a word side by side. What the last panel lacks in columns is 0, and so is what the last word lacks.
#[derive(Clone, Debug, Default)]
pub struct Right {
    /// None before an operand is packed.
    kernel: Option<Kernel>,
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

    /// Rounds a matrix as the kernel asks and lays it out; what was in the operand before is gone, its memory is used again.
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
        self.kernel = Some(kernel);
        (self.depth, self.columns) = (matrix.rows(), matrix.columns());
        let panel_lines = self.words() * PANEL_LINES;
        self.lines.resize(self.columns.div_ceil(TILE_COLUMNS) * panel_lines, Line::default());
        let panels = (columns / TILE_COLUMNS).clamp(1, self.columns.div_ceil(TILE_COLUMNS).max(1));
        let parts = self.lines.chunks_mut((panels * panel_lines).max(1)).enumerate();
        parts.map(move |(index, lines)| RightPart { kernel, matrix, first: index * panels * TILE_COLUMNS, lines })
    }

    /// What it was packed for; none if it never was.
    pub(crate) fn kernel(&self) -> Option<Kernel> {
        self.kernel
    }

    /// Words of the inner dimension.
    pub(crate) fn words(&self) -> usize {
        self.kernel.map_or(0, |kernel| kernel.words_of(self.depth))
    }

    /// Panels of columns.
    pub(crate) fn panels(&self) -> usize {
        self.columns.div_ceil(TILE_COLUMNS)
    }

    /// The lines of a panel from a word on.
    pub(crate) fn panel(&self, panel: usize, word: usize) -> &[Line] {
        let words = self.words();
        &self.lines[(panel * words + word) * PANEL_LINES..(panel + 1) * words * PANEL_LINES]
    }
}

impl RightPart<'_> {
    /// Packs these panels.
    pub fn pack(self) {
        let words = self.kernel.words_of(self.matrix.rows());
        let panel_lines = words * PANEL_LINES;
        if panel_lines == 0 {
            return;
        }
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
                pack_rows(self.kernel, self.matrix, columns, words, lines);
            }
        }
    }
}

/// Panels of a matrix whose rows lie side by side.
fn pack_rows(kernel: Kernel, matrix: Matrix<'_>, columns: Range<usize>, words: usize, lines: &mut [Line]) {
    let panel_words = words * TILE_COLUMNS;
    let packed: &mut [u32] = bytemuck::cast_slice_mut(lines);
    if !columns.len().is_multiple_of(TILE_COLUMNS) {
        let last = packed.len() - panel_words;
        packed[last..].fill(0);
    }
    for word in 0..words {
        kernel.words::<TILE_COLUMNS>(matrix, word, columns.clone(), &mut packed[word * TILE_COLUMNS..], panel_words);
    }
}

/// A panel of a matrix whose columns lie side by side: values are put into words within a column, and words change places.
fn pack_turned(kernel: Kernel, matrix: Matrix<'_>, columns: Range<usize>, lines: &mut [Line]) {
    let mut columns_words = [[0_u32; LINE]; TILE_COLUMNS];
    let mut turned = [[0_u32; TILE_COLUMNS]; LINE];
    let values = LINE * kernel.word_values();
    for (block, lines) in lines.chunks_mut(LINE * PANEL_LINES).enumerate() {
        let values = (block * values).min(matrix.line_width())..((block + 1) * values).min(matrix.line_width());
        for (column, words) in columns.clone().zip(&mut columns_words) {
            kernel.row(&matrix.line(column)[values.clone()], words);
        }
        for line in 0..PANEL_LINES {
            let from = columns_words[line * LINE..].as_flattened();
            kernel.turn(from, LINE, &mut turned.as_flattened_mut()[line * LINE..], TILE_COLUMNS);
        }
        let turned: &[u32] = turned.as_flattened();
        let words: &mut [u32] = bytemuck::cast_slice_mut(lines);
        words.copy_from_slice(&turned[..words.len()]);
    }
}
