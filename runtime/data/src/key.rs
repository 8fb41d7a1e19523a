//! The 64-bit key of a value of a sparse feature. The sources call these pure functions for every
//! id of every row, and so does a server of the trained model. All of them must agree, so a key
//! depends on the name of the table and the value only.
//!
//! - A text is first read as an id: blanks around it do not count, and a float such as `5.0` or
//!   `5.0e+00` is its integer. The rule is the same in all files, whatever their other rows hold.
//! - An integer gets `mix(value XOR table_seed)`. A value of an integer Parquet column is an
//!   integer, and so is a whole value of a Parquet column of floats. A text is one if it is a
//!   *canonical* decimal `i64` such as `12` or `-3`. A canonical decimal has no plus sign and no
//!   leading zero, and is not `-0`. Both steps are bijections of 64-bit words, so two integers of
//!   one table **never** share a key.
//! - Any other value gets `mix(XXH3_64(bytes, seed = table_seed))`. With n distinct strings in a
//!   table, two of them share a key with a probability of about n² / 2⁶⁵. That is 3 · 10⁻⁸ for a
//!   million strings, and 2.7 % for a billion. The same bound holds for a string against an
//!   integer, and for the values of different tables against each other.
//! - The top bits are as uniform as the low ones. They choose the slot of a key.
//! - In a hashed table of n rows, the key of a value is the key of the integer `key mod n`
//!   ([`TableKeys`]). So the table has at most n keys, which are as uniform as all others.

use std::num::NonZeroU64;

use rectrain_kinds::SparseField;
use rectrain_random::mix;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use crate::spelling::{Id, IdValue};

/// A number that is mixed into every key of one table: XXH3 of the table's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TableSeed(pub u64);

impl TableSeed {
    /// The seed of table `table`. Features that name the same table share their keys.
    pub fn of(table: &str) -> Self {
        Self(xxh3_64(table.as_bytes()))
    }

    /// The key of an integer value. Injective within a table.
    #[inline]
    pub fn integer(self, value: i64) -> u64 {
        mix(value as u64 ^ self.0)
    }

    /// The key of a text, by the rules of the module. The bytes need not be UTF-8.
    #[inline]
    pub fn text(self, value: &[u8]) -> u64 {
        self.id(Id::read(value).value)
    }

    /// The key of an id: of an integer, or a hash of the bytes of a text.
    #[inline]
    pub(crate) fn id(self, id: IdValue<'_>) -> u64 {
        match id {
            IdValue::Integer(integer) => self.integer(integer),
            IdValue::Text(text) => mix(xxh3_64_with_seed(text, self.0)),
        }
    }

    /// The key of an unsigned value: the key of its decimal text.
    pub fn unsigned(self, value: u64) -> u64 {
        match i64::try_from(value) {
            Ok(value) => self.integer(value),
            Err(_) => self.text(value.to_string().as_bytes()),
        }
    }

    /// The key of a missing value if it has one (`MissingValue::Token`): the key of the empty text.
    pub fn missing(self) -> u64 {
        self.text(b"")
    }
}

/// The keys of the values of one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TableKeys {
    seed: TableSeed,
    /// The rows of a hashed table; `None` if every value has a key of its own.
    buckets: Option<NonZeroU64>,
}

impl TableKeys {
    /// The keys of the table `table`. With `buckets`, it is a hashed one of this many rows, at
    /// least 1.
    pub fn new(table: &str, buckets: Option<u64>) -> Self {
        Self { seed: TableSeed::of(table), buckets: buckets.and_then(NonZeroU64::new) }
    }

    /// The keys of a feature's table.
    pub fn of(field: &SparseField) -> Self {
        Self::new(&field.table, field.hash_buckets)
    }

    /// The key of an integer value.
    #[inline]
    pub fn integer(self, value: i64) -> u64 {
        self.within(self.seed.integer(value))
    }

    /// The key of a text, by the rules of the module. The bytes need not be UTF-8.
    #[inline]
    pub fn text(self, value: &[u8]) -> u64 {
        self.within(self.seed.text(value))
    }

    /// The key of an id: of an integer, or a hash of the bytes of a text.
    #[inline]
    pub(crate) fn id(self, id: IdValue<'_>) -> u64 {
        self.within(self.seed.id(id))
    }

    /// The key of an unsigned value: the key of its decimal text.
    pub fn unsigned(self, value: u64) -> u64 {
        self.within(self.seed.unsigned(value))
    }

    /// The key of a missing value if it has one (`MissingValue::Token`): the key of the empty text.
    pub fn missing(self) -> u64 {
        self.within(self.seed.missing())
    }

    #[inline]
    fn within(self, key: u64) -> u64 {
        match self.buckets {
            None => key,
            // Below 2⁶³ for every number of rows that a manifest allows. Beyond it, the bits wrap.
            Some(buckets) => self.seed.integer((key % buckets) as i64),
        }
    }
}

/// The inverse of [`mix`].
pub fn unmix(word: u64) -> u64 {
    let word = (word ^ (word >> 31) ^ (word >> 62)).wrapping_mul(0x3196_42b2_d24d_8ec3);
    let word = (word ^ (word >> 27) ^ (word >> 54)).wrapping_mul(0x96de_1b17_3f11_9089);
    word ^ (word >> 30) ^ (word >> 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spelling::Spelling;
    use std::collections::HashSet;

    #[test]
    fn mix_is_undone_by_unmix_so_integers_of_a_table_never_collide() {
        let seed = TableSeed::of("item");
        let mut word = 1_u64;
        for step in 0..200_000_u64 {
            word = mix(word.wrapping_add(step));
            assert_eq!(unmix(mix(word)), word);
            assert_eq!(unmix(seed.integer(word as i64)) ^ seed.0, word);
        }
        let keys: HashSet<u64> = (-50_000..50_000).map(|v| seed.integer(v)).collect();
        assert_eq!(keys.len(), 100_000);
    }

    #[test]
    fn a_hashed_table_has_no_more_keys_than_rows() {
        let (hashed, seed) = (TableKeys::new("item", Some(100)), TableSeed::of("item"));
        let of_integers = (0..5_000).map(|value| hashed.integer(value));
        let of_texts = (0..5_000).map(|value| hashed.text(format!("t{value}").as_bytes()));
        let keys: HashSet<u64> = of_integers.chain(of_texts).chain([hashed.missing()]).collect();
        let rows: HashSet<u64> = (0..100).map(|row| seed.integer(row)).collect();
        assert_eq!(keys, rows);
        assert_eq!((hashed.unsigned(7), hashed.text(b"7")), (hashed.integer(7), hashed.integer(7)));
        let whole = TableKeys::new("item", None);
        assert_eq!((whole.integer(7), whole.missing()), (seed.integer(7), seed.missing()));
    }

    #[test]
    fn an_integer_has_one_key_as_text_and_as_number() {
        let seed = TableSeed::of("item");
        for value in [0, 1, -1, 9, 10, -10, i64::MAX, i64::MIN, i64::MAX - 1] {
            assert_eq!(seed.text(value.to_string().as_bytes()), seed.integer(value));
        }
        assert_eq!(seed.unsigned(7), seed.text(b"7"));
        assert_eq!(seed.unsigned(u64::MAX), seed.text(b"18446744073709551615"));
    }

    #[test]
    fn other_spellings_of_a_number_have_different_keys() {
        let seed = TableSeed::of("item");
        let texts: [&[u8]; 14] =
            [b"1", b"01", b"+1", b"1e", b"1e0", b"1.5", b"1.50", b"", b"0", b"-0", b".0", b"-1", b"1.0.0", b"a.0"];
        let keys: HashSet<u64> = texts.iter().map(|t| seed.text(t)).collect();
        assert_eq!(keys.len(), texts.len());
        assert_eq!(seed.missing(), seed.text(b""));
    }

    #[test]
    fn blanks_and_the_forms_of_floats_do_not_count() {
        let seed = TableSeed::of("item");
        for (text, same) in [
            (" 5", "5"),
            ("5\t ", "5"),
            ("5.0", "5"),
            ("5.", "5"),
            ("-7.", "-7"),
            ("05.", "05"),
            ("5.000e+00", "5"),
            ("1.2345678E7", "12345678"),
            ("-1.5e+1", "-15"),
            ("1250.e-1", "125"),
            ("+1.0E10", "10000000000"),
            ("-0.0e+00", "0"),
            ("9.007199254740991e+15", "9007199254740991"),
            (" 5.000 ", "5"),
            ("-7.0", "-7"),
            ("0.0", "0"),
            ("-0.0", "0"),
            ("05.0", "05"),
            ("+5.0", "+5"),
            ("10.0", "10"),
            ("9223372036854775808.0", "9223372036854775808"),
            ("  ", ""),
            ("\u{a0}Zürich\u{3000}", "Zürich"),
            (" New York ", "New York"),
        ] {
            assert_eq!(seed.text(text.as_bytes()), seed.text(same.as_bytes()), "{text:?}");
            assert_eq!(Id::read(text.as_bytes()).spelling == Spelling::Plain, !text.contains('.'), "{text:?}");
        }
        assert_eq!(seed.text(b" \xff "), seed.text(b"\xff"));
        assert_eq!(seed.text(b"5.0"), seed.integer(5));
        assert_eq!(seed.text(b"9223372036854775808.0"), seed.unsigned(1 << 63));
    }

    /// The reference has these vectors, for programs that look up rows of an export.
    #[test]
    fn keys_are_those_of_the_reference() {
        let reference = include_str!("../../../docs/reference/checkpoint-format.md");
        let seed = TableSeed::of("item");
        for (value, key) in [
            ("5", seed.integer(5)),
            ("5.", seed.text(b"5.")),
            ("5.000e+00", seed.text(b"5.000e+00")),
            ("-3", seed.integer(-3)),
            ("0", seed.text(b"-0.0")),
            ("9223372036854775807", seed.integer(i64::MAX)),
            ("9223372036854775808", seed.unsigned(1 << 63)),
            ("-0", seed.text(b"-0")),
            ("05", seed.text(b"05.0")),
            ("New York", seed.text(b"New York")),
            ("", seed.missing()),
        ] {
            let line = format!("| `{value}` | `{key:016x}` |");
            assert!(reference.contains(&line), "{line}");
        }
    }

    #[test]
    fn tables_do_not_share_keys_unless_they_share_a_name() {
        let (a, b) = (TableSeed::of("user"), TableSeed::of("item"));
        assert_eq!(a, TableSeed::of("user"));
        for value in 0..1000 {
            assert_ne!(a.integer(value), b.integer(value));
        }
        assert_ne!(a.text(b"x"), b.text(b"x"));
    }

    /// Pearson's χ² over 1024 slots, 1023 degrees of freedom: mean 1023, deviation 45.
    fn chi_squared_of_the_top_bits(keys: impl Iterator<Item = u64>) -> f64 {
        let mut slots = [0_u64; 1024];
        let mut count = 0_u64;
        for key in keys {
            slots[(key >> 54) as usize] += 1;
            count += 1;
        }
        let expected = count as f64 / 1024.0;
        slots.iter().map(|&n| (n as f64 - expected).powi(2) / expected).sum()
    }

    #[test]
    fn the_top_bits_are_uniform_for_integers_and_for_text() {
        let seed = TableSeed::of("C1");
        let consecutive = chi_squared_of_the_top_bits((0..200_000).map(|v| seed.integer(v)));
        let strided = chi_squared_of_the_top_bits((0..200_000).map(|v| seed.integer(v << 20)));
        let text = chi_squared_of_the_top_bits((0..200_000_u32).map(|v| seed.text(format!("{v:08x}").as_bytes())));
        for statistic in [consecutive, strided, text] {
            assert!((800.0..1300.0).contains(&statistic), "{statistic}");
        }
    }
}
