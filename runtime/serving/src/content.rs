//! The digest of a model's content: the values of its rows, and its dense parameters. A change of
//! some rows changes it in time proportional to their number. So a server that applies deltas can
//! say at each version what it serves, and `rectrain checkpoint export` says the same of a
//! checkpoint. It guards against faults, not against an attacker.

use sha2::{Digest, Sha256};

use crate::hash::hexadecimal;
use crate::versioned_table::VersionedTable;

/// The sum of the SHA-256 of rows, as numbers of 256 bits, modulo 2²⁵⁶. The order of the rows does
/// not matter. The least word comes first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowSum([u64; 4]);

/// The rows of a row group, or of a part of them, as the digest of the content counts them. The
/// content of all shards together is the content of the model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GroupContent {
    /// Their number.
    pub rows: u64,
    /// The sum of their numbers.
    pub sum: RowSum,
}

impl GroupContent {
    /// The content of a table and its sum.
    pub(crate) fn of(table: &VersionedTable, sum: RowSum) -> Self {
        Self { rows: table.len() as u64, sum }
    }

    /// Adds the rows of another part.
    pub fn join(&mut self, other: &Self) {
        self.rows += other.rows;
        self.sum.add_words(other.sum.0);
    }
}

impl RowSum {
    /// The sum over all rows of a table.
    pub(crate) fn of(table: &VersionedTable) -> Self {
        let mut sum = Self::default();
        table.rows().for_each(|(key, values)| sum.add(key, values));
        sum
    }

    /// Adds a row.
    pub(crate) fn add(&mut self, key: u64, values: &[f32]) {
        self.add_words(words_of_row(key, values));
    }

    fn add_words(&mut self, words: [u64; 4]) {
        let mut carry = false;
        for (word, other) in self.0.iter_mut().zip(words) {
            let (sum, first) = word.overflowing_add(other);
            let (sum, second) = sum.overflowing_add(u64::from(carry));
            (*word, carry) = (sum, first || second);
        }
    }

    /// The number, little-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; 32] {
        let mut bytes = [[0; 8]; 4];
        bytes.iter_mut().zip(self.0).for_each(|(bytes, word)| *bytes = word.to_le_bytes());
        *bytes.as_flattened().first_chunk().unwrap_or(&[0; 32])
    }

    /// The sum in [`Self::to_bytes`].
    #[must_use]
    pub fn of_bytes(bytes: &[u8; 32]) -> Self {
        Self(words_of(bytes))
    }

    /// Takes a row away that was added.
    pub(crate) fn subtract(&mut self, key: u64, values: &[f32]) {
        let mut borrow = false;
        for (word, other) in self.0.iter_mut().zip(words_of_row(key, values)) {
            let (difference, first) = word.overflowing_sub(other);
            let (difference, second) = difference.overflowing_sub(u64::from(borrow));
            (*word, borrow) = (difference, first || second);
        }
    }
}

/// Values that are hashed at a time.
const VALUES: usize = 64;

/// SHA-256 of key (u64) and values (f32), little-endian, as a number of 256 bits.
fn words_of_row(key: u64, values: &[f32]) -> [u64; 4] {
    let mut hasher = Sha256::new();
    hasher.update(key.to_le_bytes());
    // The hasher takes whole blocks faster than single values.
    for values in values.chunks(VALUES) {
        let mut bytes = [[0; 4]; VALUES];
        bytes.iter_mut().zip(values).for_each(|(bytes, value)| *bytes = value.to_le_bytes());
        hasher.update(&bytes.as_flattened()[..4 * values.len()]);
    }
    words_of(&hasher.finalize().into())
}

fn words_of(bytes: &[u8; 32]) -> [u64; 4] {
    let mut words = [0; 4];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// The digest of a model, in hexadecimal digits.
pub(crate) fn content_digest(tables: &[VersionedTable], sums: &[RowSum], parameters: &[f32]) -> String {
    let groups = tables.iter().zip(sums).map(|(table, sum)| GroupContent::of(table, *sum));
    digest_of_content(&groups.collect::<Vec<_>>(), parameters)
}

/// The digest of a model, in hexadecimal digits: SHA-256 over the number of rows (u64) and the sum
/// of each row group, and then the dense parameters (f32), all little-endian.
#[must_use]
pub fn digest_of_content(groups: &[GroupContent], parameters: &[f32]) -> String {
    let mut hasher = Sha256::new();
    for group in groups {
        hasher.update(group.rows.to_le_bytes());
        hasher.update(group.sum.to_bytes());
    }
    parameters.iter().for_each(|value| hasher.update(value.to_le_bytes()));
    hexadecimal(&hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Table;

    fn table(dim: usize, keys: Vec<u64>, values: Vec<f32>) -> VersionedTable {
        VersionedTable::from(&Table::of(dim, keys, values).unwrap())
    }

    #[test]
    fn a_row_that_is_added_and_taken_away_leaves_the_sum() {
        let all = table(2, vec![1, 5, 9], vec![0.1, 0.2, 0.3, 0.4, 0.5, 0.6]);
        let smaller = table(2, vec![1, 9], vec![0.1, 0.2, 0.5, 0.6]);
        let mut sum = RowSum::of(&all);
        sum.subtract(5, &[0.3, 0.4]);
        assert_eq!(sum, RowSum::of(&smaller));
        assert_ne!(sum, RowSum::of(&all));
        sum.subtract(1, &[0.1, 0.2]);
        sum.subtract(9, &[0.5, 0.6]);
        assert_eq!(sum, RowSum::default());
    }

    #[test]
    fn the_number_of_a_row_is_the_sha_256_of_its_key_and_values() {
        for dim in [0, 1, VALUES - 1, VALUES, VALUES + 1, 3 * VALUES] {
            let values: Vec<f32> = (0..dim).map(|place| place as f32 - 7.5).collect();
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            let expected = Sha256::digest([&9_u64.to_le_bytes()[..], &bytes].concat());
            let found: Vec<u8> = words_of_row(9, &values).iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(found, expected.to_vec(), "{dim} values");
        }
    }

    #[test]
    fn the_contents_of_parts_join_to_the_content_of_the_whole() {
        let all = table(1, (1..=200).map(|key| key << 56).collect(), (1..=200).map(|key| key as f32).collect());
        let whole = GroupContent::of(&all, RowSum::of(&all));
        let mut joined = GroupContent::default();
        for part in 0..3 {
            let rows: Vec<_> = all.rows().filter(|(key, _)| (*key >> 56) % 3 == part).collect();
            let keys = rows.iter().map(|(key, _)| *key).collect();
            let part = table(1, keys, rows.iter().map(|(_, row)| row[0]).collect());
            let sum = RowSum::of_bytes(&RowSum::of(&part).to_bytes());
            joined.join(&GroupContent::of(&part, sum));
        }
        assert_eq!(joined, whole);
        assert_ne!(digest_of_content(&[joined], &[1.0]), digest_of_content(&[GroupContent::default()], &[1.0]));
    }

    #[test]
    fn carries_and_borrows_cross_words() {
        let mut sum = RowSum([u64::MAX; 4]);
        let before = sum;
        sum.add(7, &[1.0]);
        let words = words_of_row(7, &[1.0]);
        // −1 + w = w − 1, modulo 2²⁵⁶.
        assert_eq!(sum.0[0], words[0].wrapping_sub(1));
        assert_eq!(sum.0[1..], words[1..]);
        sum.subtract(7, &[1.0]);
        assert_eq!(sum, before);
    }

    #[test]
    fn any_other_value_key_or_parameter_is_another_digest() {
        let digest = |keys: Vec<u64>, values: Vec<f32>, parameters: &[f32]| {
            let table = table(1, keys, values);
            content_digest(std::slice::from_ref(&table), &[RowSum::of(&table)], parameters)
        };
        let all = [
            digest(vec![1, 2], vec![0.5, 0.25], &[1.0]),
            digest(vec![1, 2], vec![0.25, 0.5], &[1.0]),
            digest(vec![1, 3], vec![0.5, 0.25], &[1.0]),
            digest(vec![1, 2], vec![0.5, -0.25], &[1.0]),
            digest(vec![1, 2], vec![0.5, 0.25], &[1.5]),
            digest(vec![1], vec![0.5], &[1.0]),
        ];
        for (place, one) in all.iter().enumerate() {
            assert_eq!(one.len(), 64);
            assert!(all[place + 1..].iter().all(|other| other != one), "{place}");
        }
    }
}
