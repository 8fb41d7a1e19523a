//! The division of a model's rows among shards, and the rows of a look-up as bytes. Pure.
//! `docs/reference/rows-protocol.md` describes both for programs in other languages.

use crate::versioned_table::VersionedTable;

/// Bytes of a key.
const KEY: usize = 8;
/// Bytes of a value.
const VALUE: usize = 4;

/// The shard of a key: ⌊key · shards / 2⁶⁴⌋. Keys are hashes, so shards have about equally many
/// rows. Shards in order are keys in order, and [`KeyRange::of_part`](crate::KeyRange::of_part)
/// gives the keys of a shard.
#[must_use]
pub const fn shard_of(key: u64, shards: u32) -> u32 {
    ((key as u128 * shards as u128) >> u64::BITS) as u32
}

/// Appends a key to the keys of a look-up.
pub fn push_key(keys: &mut Vec<u8>, key: u64) {
    keys.extend_from_slice(&key.to_le_bytes());
}

/// The number of keys in these bytes. `None` if the last one is not whole.
#[must_use]
pub const fn key_count(keys: &[u8]) -> Option<usize> {
    if keys.len().is_multiple_of(KEY) { Some(keys.len() / KEY) } else { None }
}

/// The keys in these bytes.
pub fn keys_in(keys: &[u8]) -> impl Iterator<Item = u64> {
    keys.as_chunks::<KEY>().0.iter().map(|key| u64::from_le_bytes(*key))
}

/// The rows of some keys, in their order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FoundRows {
    /// A bit for each key, from the lowest bit of the first byte on: whether it has a row.
    pub present: Vec<u8>,
    /// The values (f32, little-endian) of the keys that have a row.
    pub values: Vec<u8>,
}

impl FoundRows {
    /// The rows that a table has for these keys.
    #[must_use]
    pub fn of(table: &VersionedTable, keys: &[u8]) -> Self {
        let count = keys.len() / KEY;
        let mut found = Self { present: vec![0; count.div_ceil(8)], values: Vec::new() };
        found.values.reserve_exact(count * table.dim() * VALUE);
        for (place, key) in keys_in(keys).enumerate() {
            if let Some(row) = table.row(key) {
                found.present[place / 8] |= 1 << (place % 8);
                row.iter().for_each(|value| found.values.extend_from_slice(&value.to_le_bytes()));
            }
        }
        found
    }

    /// Whether it has the rows of so many keys, each of `dim` values.
    #[must_use]
    pub fn is_of(&self, keys: usize, dim: usize) -> bool {
        let rows: usize = self.present.iter().map(|byte| byte.count_ones() as usize).sum();
        let spare = (8 * self.present.len()).saturating_sub(keys);
        let has_no_spare_row =
            self.present.last().is_none_or(|last| u32::from(*last).leading_zeros() as usize >= 24 + spare);
        self.present.len() == keys.div_ceil(8) && has_no_spare_row && self.values.len() == rows * dim * VALUE
    }

    /// The rows of its keys in their order, each of `dim` values as bytes. `None` for a key without
    /// a row. The rows are sound: see [`Self::is_of`].
    pub fn rows(&self, keys: usize, dim: usize) -> impl Iterator<Item = Option<&[u8]>> {
        let mut rest = &self.values[..];
        (0..keys).map(move |place| {
            let has_row = self.present.get(place / 8).is_some_and(|byte| byte >> (place % 8) & 1 == 1);
            if !has_row {
                return None;
            }
            let (row, others) = rest.split_at_checked(dim * VALUE)?;
            rest = others;
            Some(row)
        })
    }
}

/// Reads the values of a row.
pub fn read_values(bytes: &[u8], out: &mut [f32]) {
    out.iter_mut().zip(bytes.as_chunks::<VALUE>().0).for_each(|(value, bytes)| *value = f32::from_le_bytes(*bytes));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{KeyRange, Table};

    #[test]
    fn the_shard_of_a_key_has_it_in_its_range() {
        for shards in [1, 2, 3, 7, 64, 1000] {
            for number in 0..2000_u64 {
                let key = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
                assert!(KeyRange::of_part(shard_of(key, shards), shards).contains(key), "{key:016x} of {shards}");
            }
        }
    }

    /// The vectors of docs/reference/rows-protocol.md.
    #[test]
    fn the_documented_keys_have_their_shards() {
        let documented = include_str!("../../../docs/reference/rows-protocol.md");
        for (key, shards) in [
            (0, [0, 0, 0]),
            (0x5555_5555_5555_5555, [0, 0, 2]),
            (0x5555_5555_5555_5556, [0, 1, 2]),
            (0x8000_0000_0000_0000, [1, 1, 3]),
            (0xd1b5_4a32_d192_ed03, [1, 2, 5]),
            (u64::MAX, [1, 2, 6]),
        ] {
            assert_eq!([2, 3, 7].map(|count| shard_of(key, count)), shards, "{key:016x}");
            let [two, three, seven] = shards;
            let line = format!("| `{key:016x}` | {two} | {three} | {seven} |");
            assert!(documented.contains(&line), "{line}");
        }
    }

    #[test]
    fn rows_come_back_in_the_order_of_their_keys() {
        let rows = (1..=20_u64).map(|row| row * 10);
        let values = rows.clone().flat_map(|key| [key as f32, -0.5]).collect();
        let table = VersionedTable::from(&Table::of(2, rows.collect(), values).unwrap());
        let asked = [10_u64, 11, 20, 200, 7, 150, 160, 170, 3, 190];
        let mut keys = Vec::new();
        asked.iter().for_each(|key| push_key(&mut keys, *key));
        assert_eq!((key_count(&keys), key_count(&keys[1..])), (Some(10), None));
        assert!(keys_in(&keys).eq(asked));
        let found = FoundRows::of(&table, &keys);
        assert!(found.is_of(10, 2));
        for (row, key) in found.rows(10, 2).zip(asked) {
            let row = row.map(|bytes| {
                let mut row = [0.0; 2];
                read_values(bytes, &mut row);
                row
            });
            assert_eq!(row.as_ref().map(|row| &row[..]), table.row(key), "{key}");
        }
        // Another number of keys or values, and a bit without a key.
        assert!(!found.is_of(9, 2) && !found.is_of(17, 2) && !found.is_of(10, 3));
        let mut wrong = found.clone();
        wrong.present[1] |= 1 << 2;
        wrong.values.extend([0; 8]);
        assert!(!wrong.is_of(10, 2));
        assert!(FoundRows::of(&table, &[]).is_of(0, 2));
    }
}
