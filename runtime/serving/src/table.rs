//! Rows of one row group, values only, in the order of keys: the form of files and changes.

/// Rows of one width.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    dim: usize,
    keys: Vec<u64>,
    /// `[rows, dim]`.
    values: Vec<f32>,
}

/// Keys from `first` to `last`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KeyRange {
    /// The least key.
    pub first: u64,
    /// The greatest key.
    pub last: u64,
}

impl Table {
    /// A table without rows. A row has `dim` values.
    #[must_use]
    pub fn new(dim: usize) -> Self {
        Self { dim, keys: Vec::new(), values: Vec::new() }
    }

    /// A table of these rows. `None` unless the keys rise and there are `dim` values a key.
    #[must_use]
    pub fn of(dim: usize, keys: Vec<u64>, values: Vec<f32>) -> Option<Self> {
        let rises = keys.windows(2).all(|pair| pair[0] < pair[1]);
        (rises && values.len() == keys.len() * dim).then_some(Self { dim, keys, values })
    }

    /// Adds a row. Its key is above all keys of the table.
    pub(crate) fn push(&mut self, key: u64, values: &[f32]) {
        self.keys.push(key);
        self.values.extend_from_slice(values);
    }

    /// The keys and values of all rows, by rising key.
    pub fn rows(&self) -> impl Iterator<Item = (u64, &[f32])> {
        self.keys.iter().copied().zip(self.values.chunks_exact(self.dim.max(1)))
    }

    /// Values of a row.
    #[must_use]
    pub fn dim(&self) -> usize {
        self.dim
    }

    /// The keys, rising.
    #[must_use]
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// The values of all rows, `[rows, dim]`.
    #[must_use]
    pub fn values(&self) -> &[f32] {
        &self.values
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_out_of_order_are_no_table() {
        assert!(Table::of(1, vec![2, 1], vec![0.0, 0.0]).is_none());
        assert!(Table::of(1, vec![1, 1], vec![0.0, 0.0]).is_none());
        assert!(Table::of(1, vec![1, 2], vec![0.0]).is_none());
    }
}
