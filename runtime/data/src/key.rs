//! The 64-bit key of a value of a sparse feature. The sources call these pure functions for every
//! id of every row, and so does a server of the trained model. All of them must agree, so a key
//! depends on the name of the table and the value only.
//!
//! - A text is first [normalized](normalize): blanks around it go, and so do the decimals of an
//!   integer such as `5.0`. The rule is the same in all files, whatever their other rows hold.
//! - An integer gets `mix(value XOR table_seed)`. Integers are the values of an integer Parquet
//!   column, the whole values of a Parquet column of floats, and texts that are a *canonical*
//!   decimal `i64` such as `12` or `-3`. A canonical decimal has no plus sign and no leading zero,
//!   and is not `-0`. Both steps are bijections of 64-bit words, so two integers of one table
//!   **never** share a key.
//! - Any other value gets `mix(XXH3_64(bytes, seed = table_seed))`. With n distinct strings in a
//!   table, two of them share a key with a probability of about n² / 2⁶⁵. That is 3 · 10⁻⁸ for a
//!   million strings, and 2.7 % for a billion. The same bound holds for a string against an
//!   integer, and for the values of different tables against each other.
//! - The top bits are as uniform as the low ones. They choose the slot of a key.

use rectrain_random::mix;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

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

    /// The key of a text after [`normalize`]. The bytes need not be UTF-8.
    #[inline]
    pub fn text(self, value: &[u8]) -> u64 {
        self.normalized(normalize(value).0)
    }

    /// The key of a normalized text. If it is a canonical decimal `i64`, it is the key of the
    /// integer, else a hash of the bytes.
    #[inline]
    pub(crate) fn normalized(self, value: &[u8]) -> u64 {
        match canonical_integer(value) {
            Some(integer) => self.integer(integer),
            None => mix(xxh3_64_with_seed(value, self.0)),
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

/// The inverse of [`mix`].
pub fn unmix(word: u64) -> u64 {
    let word = (word ^ (word >> 31) ^ (word >> 62)).wrapping_mul(0x3196_42b2_d24d_8ec3);
    let word = (word ^ (word >> 27) ^ (word >> 54)).wrapping_mul(0x96de_1b17_3f11_9089);
    word ^ (word >> 30) ^ (word >> 60)
}

/// A text without the blanks around it, and without the decimals of an integer. `true` if it had
/// such decimals.
///
/// Programs that hold integers as floats write `5.0` for 5. So digits, perhaps with a sign before
/// them, followed by a point and zeros only, lose the point and the zeros. `-0.0` becomes `0`.
/// Other spellings of one number stay different ids: `05`, `+5`, `5.`, `5e0`.
#[inline]
#[must_use]
pub fn normalize(text: &[u8]) -> (&[u8], bool) {
    let text = trim(text);
    match text {
        [.., b'0'] => without_decimals(text).map_or((text, false), |integer| (integer, true)),
        _ => (text, false),
    }
}

/// A text without white space around it, as `str::trim` removes it.
#[inline]
pub(crate) fn trim(text: &[u8]) -> &[u8] {
    let is_plain = |byte: Option<&u8>| byte.is_none_or(u8::is_ascii_graphic);
    match is_plain(text.first()) && is_plain(text.last()) {
        true => text,
        false => std::str::from_utf8(text).map_or(text.trim_ascii(), |text| text.trim().as_bytes()),
    }
}

/// The integer before a point and zeros. `None` for all other texts.
fn without_decimals(text: &[u8]) -> Option<&[u8]> {
    let zeros = text.iter().rev().take_while(|&&byte| byte == b'0').count();
    let integer = text[..text.len() - zeros].strip_suffix(b".")?;
    let digits = integer.strip_prefix(b"-").or(integer.strip_prefix(b"+")).unwrap_or(integer);
    match integer {
        b"-0" => Some(b"0"),
        _ if !digits.is_empty() && digits.iter().all(u8::is_ascii_digit) => Some(integer),
        _ => None,
    }
}

/// `Some` only for text that `i64::to_string` could have written.
#[inline]
fn canonical_integer(text: &[u8]) -> Option<i64> {
    let (negative, digits) = match text {
        [b'-', digits @ ..] => (true, digits),
        digits => (false, digits),
    };
    match digits {
        [b'0'] if !negative => return Some(0),
        [b'1'..=b'9', ..] if digits.len() <= 19 => {}
        _ => return None,
    }
    let mut magnitude: u64 = 0; // 19 digits are below 10^19 < 2^64
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        magnitude = magnitude * 10 + u64::from(digit);
    }
    if negative {
        (magnitude <= i64::MIN.unsigned_abs()).then(|| (magnitude as i64).wrapping_neg())
    } else {
        i64::try_from(magnitude).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
    fn an_integer_has_one_key_as_text_and_as_number() {
        let seed = TableSeed::of("item");
        for value in [0, 1, -1, 9, 10, -10, i64::MAX, i64::MIN, i64::MAX - 1] {
            assert_eq!(seed.text(value.to_string().as_bytes()), seed.integer(value));
        }
        assert_eq!(seed.unsigned(7), seed.text(b"7"));
        assert_eq!(seed.unsigned(u64::MAX), seed.text(b"18446744073709551615"));
    }

    #[test]
    fn only_canonical_decimals_are_integers() {
        for text in [
            "+1",
            "01",
            "-0",
            "",
            "-",
            "1 ",
            " 1",
            "1a",
            "9223372036854775808",
            "-9223372036854775809",
            "1.0",
            "99999999999999999999",
            "00",
        ] {
            assert_eq!(canonical_integer(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn other_spellings_of_a_number_have_different_keys() {
        let seed = TableSeed::of("item");
        let texts: [&[u8]; 14] =
            [b"1", b"01", b"+1", b"1.", b"1e0", b"1.5", b"1.50", b"", b"0", b"-0", b".0", b"-1", b"1.0.0", b"a.0"];
        let keys: HashSet<u64> = texts.iter().map(|t| seed.text(t)).collect();
        assert_eq!(keys.len(), texts.len());
        assert_eq!(seed.missing(), seed.text(b""));
    }

    #[test]
    fn blanks_and_the_decimals_of_integers_do_not_count() {
        let seed = TableSeed::of("item");
        for (text, same) in [
            (" 5", "5"),
            ("5\t ", "5"),
            ("5.0", "5"),
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
            assert_eq!(normalize(text.as_bytes()).1, text.contains('.'), "{text:?}");
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
            ("-3", seed.integer(-3)),
            ("0", seed.text(b"-0.0")),
            ("9223372036854775807", seed.integer(i64::MAX)),
            ("9223372036854775808", seed.unsigned(1 << 63)),
            ("-0", seed.text(b"-0")),
            ("05", seed.text(b"05")),
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
