//! The rows of one row group, values only, in the order of keys. Read-only once it is filled.

/// Rows of one width. Keys are hashes, so they are uniform over 64 bits, and a look-up finds a key
/// near its expected place.
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

/// The first distance that a look-up searches on each side of the expected place. It doubles.
const FIRST_STEP: usize = 16;

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

    /// Keeps the rows for which `is_kept` has true at their position.
    pub(crate) fn keep_rows(&mut self, is_kept: &[bool]) {
        let kept = || is_kept.iter().enumerate().filter(|(_, is_kept)| **is_kept).map(|(row, _)| row);
        let values = kept().filter_map(|row| self.values.get(row * self.dim..(row + 1) * self.dim));
        let values = values.flatten().copied().collect();
        self.keys = kept().filter_map(|row| self.keys.get(row).copied()).collect();
        self.values = values;
    }

    /// The keys and values of all rows, by rising key.
    pub fn rows(&self) -> impl Iterator<Item = (u64, &[f32])> {
        self.keys.iter().copied().zip(self.values.chunks_exact(self.dim.max(1)))
    }

    /// A copy without the rows of the `removed` ranges, which rise and do not overlap. Then the
    /// rows of `changed` replace the ones of their keys, or join. `gone` sees each row that is not
    /// in the copy as it was.
    #[must_use]
    pub(crate) fn with_changes(&self, removed: &[KeyRange], changed: &Self, mut gone: impl FnMut(u64, &[f32])) -> Self {
        let mut next = Self {
            dim: self.dim,
            keys: Vec::with_capacity(self.keys.len() + changed.keys.len()),
            values: Vec::with_capacity(self.values.len() + changed.values.len()),
        };
        let (mut ranges, mut others) = (removed.iter().peekable(), changed.rows().peekable());
        for (key, values) in self.rows() {
            while let Some((other, row)) = others.next_if(|(other, _)| *other < key) {
                next.push(other, row);
            }
            while ranges.next_if(|range| range.last < key).is_some() {}
            let is_replaced = others.peek().is_some_and(|(other, _)| *other == key);
            let is_removed = ranges.peek().is_some_and(|range| range.first <= key);
            if is_replaced || is_removed { gone(key, values) } else { next.push(key, values) }
        }
        others.for_each(|(key, values)| next.push(key, values));
        next
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

    /// The values of a key. `None` if it has no row.
    #[must_use]
    pub fn row(&self, key: u64) -> Option<&[f32]> {
        let row = self.find(key)?;
        Some(&self.values[row * self.dim..(row + 1) * self.dim])
    }

    fn find(&self, key: u64) -> Option<usize> {
        let rows = self.keys.len();
        let expected = ((u128::from(key) * rows as u128) >> 64) as usize;
        let (mut low, mut step) = (expected, FIRST_STEP);
        while low > 0 && self.keys[low] > key {
            low = low.saturating_sub(step);
            step *= 2;
        }
        let (mut high, mut step) = (expected, FIRST_STEP);
        while high < rows && self.keys[high] < key {
            high = (high + step).min(rows);
            step *= 2;
        }
        let end = (high + 1).min(rows);
        self.keys[low..end].binary_search(&key).ok().map(|place| low + place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_found_among_uniform_and_skewed_keys() {
        let uniform: fn(u64) -> u64 = |row| row.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let skewed: fn(u64) -> u64 = |row| u64::MAX - row * row;
        for (name, key_of) in [("uniform", uniform), ("skewed", skewed)] {
            for rows in [0, 1, 2, 17, 1000] {
                let mut keys: Vec<u64> = (0..rows).map(|row| key_of(2 * row)).collect();
                keys.sort_unstable();
                let values = keys.iter().flat_map(|key| [(key >> 40) as f32, 1.0]).collect();
                let table = Table::of(2, keys.clone(), values).unwrap();
                for key in keys {
                    assert_eq!(table.row(key), Some(&[(key >> 40) as f32, 1.0][..]), "{name}, {rows} rows");
                }
                for row in 0..rows {
                    assert_eq!(table.row(key_of(2 * row + 1)), None, "{name}, {rows} rows");
                }
            }
        }
    }

    #[test]
    fn rows_that_are_not_kept_are_gone_with_their_values() {
        let mut table = Table::of(2, vec![1, 5, 9], vec![0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).unwrap();
        table.keep_rows(&[true, false, true]);
        assert_eq!(table, Table::of(2, vec![1, 9], vec![0.1, 0.2, 0.5, 0.6]).unwrap());
        table.keep_rows(&[false]);
        assert_eq!(table, Table::new(2));
    }

    #[test]
    fn changes_remove_ranges_and_then_set_rows() {
        let table = Table::of(1, vec![10, 20, 30, 40, 50], vec![1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        let changed = Table::of(1, vec![5, 30, 35, 50, 60], vec![0.5, 3.5, 3.6, 5.5, 6.0]).unwrap();
        let removed = [KeyRange { first: 0, last: 10 }, KeyRange { first: 25, last: 40 }];
        let mut gone = Vec::new();
        let found = table.with_changes(&removed, &changed, |key, values| gone.push((key, values[0])));
        let expected = [(5, 0.5), (20, 2.0), (30, 3.5), (35, 3.6), (50, 5.5), (60, 6.0)];
        assert_eq!(found.rows().map(|(key, values)| (key, values[0])).collect::<Vec<_>>(), expected);
        assert_eq!(gone, [(10, 1.0), (30, 3.0), (40, 4.0), (50, 5.0)]);
        let none = Table::new(1);
        assert_eq!(table.with_changes(&[], &none, |_, _| ()), table);
        assert_eq!(none.with_changes(&removed, &changed, |_, _| ()), changed);
        let all = [KeyRange { first: 0, last: u64::MAX }];
        assert_eq!(table.with_changes(&all, &none, |_, _| ()), none);
    }

    #[test]
    fn rows_out_of_order_are_no_table() {
        assert!(Table::of(1, vec![2, 1], vec![0.0, 0.0]).is_none());
        assert!(Table::of(1, vec![1, 1], vec![0.0, 0.0]).is_none());
        assert!(Table::of(1, vec![1, 2], vec![0.0]).is_none());
    }
}
