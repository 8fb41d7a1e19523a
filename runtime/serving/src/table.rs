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

impl KeyRange {
    /// All keys.
    pub const ALL: Self = Self { first: 0, last: u64::MAX };

    /// The keys of part `part` of `parts` equal parts: all `k` with ⌊k · parts / 2⁶⁴⌋ = part. Slots
    /// and shards are such parts.
    #[must_use]
    pub fn of_part(part: u32, parts: u32) -> Self {
        let first = |part: u32| (u128::from(part) << 64).div_ceil(u128::from(parts.max(1)));
        // The last part ends with the last key.
        Self { first: first(part) as u64, last: (first(part + 1) - 1) as u64 }
    }

    /// Whether a key is in the range.
    #[must_use]
    pub const fn contains(&self, key: u64) -> bool {
        self.first <= key && key <= self.last
    }
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

    /// The rows with keys in a range.
    #[must_use]
    pub fn within(&self, range: &KeyRange) -> Self {
        let start = self.keys.partition_point(|key| *key < range.first);
        let end = self.keys.partition_point(|key| *key <= range.last).max(start);
        let values = self.values[start * self.dim..end * self.dim].to_vec();
        Self { dim: self.dim, keys: self.keys[start..end].to_vec(), values }
    }

    /// The values of a key. `None` if it has no row.
    #[must_use]
    pub fn row(&self, key: u64) -> Option<&[f32]> {
        let place = self.keys.binary_search(&key).ok()?;
        self.values.get(place * self.dim..(place + 1) * self.dim)
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

    #[test]
    fn parts_cover_all_keys_without_overlap() {
        for parts in [1, 2, 3, 7, 1000, u32::MAX] {
            let ends = [0, 1, parts / 2, parts - 1].map(|part: u32| part.min(parts - 1));
            for part in ends {
                let range = KeyRange::of_part(part, parts);
                assert!(part > 0 || range.first == 0);
                let next = KeyRange::of_part((part + 1).min(parts - 1), parts);
                assert!(if part + 1 == parts { range.last == u64::MAX } else { range.last + 1 == next.first });
            }
        }
    }

    #[test]
    fn rows_within_a_range_keep_their_values() {
        let table = Table::of(2, vec![1, 5, 9], vec![0.1, 0.2, 0.3, 0.4, 0.5, 0.6]).unwrap();
        let part = table.within(&KeyRange { first: 2, last: 9 });
        assert_eq!(part, Table::of(2, vec![5, 9], vec![0.3, 0.4, 0.5, 0.6]).unwrap());
        assert_eq!((part.row(5), part.row(1)), (Some(&[0.3, 0.4][..]), None));
        assert!(table.within(&KeyRange { first: 6, last: 8 }).keys().is_empty());
        assert_eq!(table.within(&KeyRange::ALL), table);
    }
}
