//! A matrix as the caller has it.

/// A matrix of 32-bit floats that lies in memory row after row, or the transpose of one.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    pub(crate) values: &'a [f32],
    /// As it lies in memory.
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

    /// Its transpose; nothing is moved.
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

    /// A row as it lies in memory: a column of a transposed matrix.
    pub(crate) fn line(&self, index: usize) -> &'a [f32] {
        let width = self.stored[1];
        &self.values[index * width..(index + 1) * width]
    }

    /// Rows as they lie in memory.
    pub(crate) fn lines(&self) -> usize {
        self.stored[0]
    }

    pub(crate) fn line_width(&self) -> usize {
        self.stored[1]
    }
}
