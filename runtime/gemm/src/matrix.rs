//! A matrix in the caller's memory.

/// A matrix of 32-bit floats in row-major order, or the transpose of one.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(crate) values: &'a [f32],
    /// Rows and columns in memory, before a transposition.
    stored: [usize; 2],
    pub(crate) transposed: bool,
}

impl<'a> Matrix<'a> {
    /// A matrix of `rows` × `columns` in row-major order.
    ///
    /// # Panics
    /// If there are not `rows · columns` values.
    pub fn new(values: &'a [f32], rows: usize, columns: usize) -> Self {
        assert_eq!(values.len(), rows * columns, "a matrix of {rows} × {columns}");
        Self { values, stored: [rows, columns], transposed: false }
    }

    /// The transpose. Nothing is copied.
    #[must_use]
    pub fn transpose(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Rows of the matrix.
    pub fn rows(&self) -> usize {
        self.stored[usize::from(self.transposed)]
    }

    /// Columns of the matrix.
    pub fn columns(&self) -> usize {
        self.stored[usize::from(!self.transposed)]
    }

    /// A row in memory: a row of the matrix, or a column if it is transposed.
    pub(crate) fn line(&self, index: usize) -> &'a [f32] {
        let width = self.stored[1];
        &self.values[index * width..(index + 1) * width]
    }

    /// The number of rows in memory.
    pub(crate) fn lines(&self) -> usize {
        self.stored[0]
    }

    pub(crate) fn line_width(&self) -> usize {
        self.stored[1]
    }
}
