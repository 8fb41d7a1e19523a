//! The right operand of a product.

use std::ops::Range;

use crate::kernel::{Kernel, Laid, MOST_COLUMNS, PANEL_LINES, TILE_COLUMNS};
use crate::lines::{LINE, Line};
use crate::matrix::Matrix;

/// Panels that are packed together from a row-major matrix, so that the reads of rows are long and
/// the writes go to few places.
const BLOCK_PANELS: usize = MOST_COLUMNS / TILE_COLUMNS;

/// A packed right operand. A panel has the columns of a tile. It stores the words of the inner
/// dimension in order, each word for all columns side by side. Missing columns of the last panel
/// are 0, and so are missing values of the last word.
#[derive(Clone, Debug, Default)]
pub struct Right {
    /// `None` before an operand is packed.
    kernel: Option<Kernel>,
    lines: Vec<Line>,
    depth: usize,
    columns: usize,
}

/// Panels of a right operand that are not packed yet. Parts may be packed on any thread, in any
/// order.
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

    /// The number of rows: the product's inner dimension.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// The number of columns of the operand and of the product.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Replaces the operand by `matrix`, rounded and laid out for `kernel`. Reuses the memory.
    pub fn pack(&mut self, kernel: Kernel, matrix: Matrix<'_>) {
        self.parts(kernel, matrix, usize::MAX).for_each(RightPart::pack);
    }

    /// As [`Right::pack`], in parts of about `columns` columns. The caller must pack all parts.
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

    /// Makes room for an operand of this shape, which the caller lays out itself.
    pub(crate) fn lay(&mut self, kernel: Kernel, depth: usize, columns: usize) -> Laid<'_> {
        self.kernel = Some(kernel);
        (self.depth, self.columns) = (depth, columns);
        let words = self.words();
        self.lines.resize(self.panels() * words * PANEL_LINES, Line::default());
        Laid { words: bytemuck::cast_slice_mut(&mut self.lines), step: words }
    }

    /// The kernel of the packed operand. `None` before an operand is packed.
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
                pack_transposed(self.kernel, self.matrix, columns, lines);
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

/// Packs panels of a row-major matrix.
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

/// Packs a panel of a transposed matrix: makes words of each column, and transposes the words.
fn pack_transposed(kernel: Kernel, matrix: Matrix<'_>, columns: Range<usize>, lines: &mut [Line]) {
    let mut columns_words = [[0_u32; LINE]; TILE_COLUMNS];
    let mut transposed = [[0_u32; TILE_COLUMNS]; LINE];
    let values = LINE * kernel.word_values();
    for (block, lines) in lines.chunks_mut(LINE * PANEL_LINES).enumerate() {
        let values = (block * values).min(matrix.line_width())..((block + 1) * values).min(matrix.line_width());
        for (column, words) in columns.clone().zip(&mut columns_words) {
            kernel.row(&matrix.line(column)[values.clone()], words);
        }
        for line in 0..PANEL_LINES {
            let from = columns_words[line * LINE..].as_flattened();
            kernel.transpose(from, LINE, &mut transposed.as_flattened_mut()[line * LINE..], TILE_COLUMNS);
        }
        let transposed: &[u32] = transposed.as_flattened();
        let words: &mut [u32] = bytemuck::cast_slice_mut(lines);
        words.copy_from_slice(&transposed[..words.len()]);
    }
}
