//! How the text of an id is written. Programs that hold integers as floats write `5.0`, `5.` or
//! `5.000000e+00` for 5. Such texts are the id 5. Pure functions without an allocation, called for
//! every id of every row.

/// The first integer that a 64-bit float may stand for without being it.
const ROUNDED: u64 = 1 << 53;

/// An id as a text writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Id<'a> {
    /// The id itself. Its key depends on nothing else.
    pub(crate) value: IdValue<'a>,
    /// The form of the text.
    pub(crate) spelling: Spelling,
}

/// An integer or a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IdValue<'a> {
    /// A canonical decimal integer, or the integer of a float.
    Integer(i64),
    /// Any other text, without blanks around it. Empty if the id is missing.
    Text(&'a [u8]),
}

/// The form of the text of an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// None of the others.
    Plain,
    /// An integer with leading zeros, such as `0005`.
    ZeroPadded,
    /// An integer below 2^53 as a float, such as `5.0`.
    Float,
    /// An integer from 2^53 on as a float, such as `1.8e+19`. It may have lost digits.
    RoundedFloat,
}

impl<'a> Id<'a> {
    /// Reads a text, which need not be UTF-8. Blanks around it do not count.
    ///
    /// - A float without an exponent loses its point and the zeros behind it: `5.0` is `5`, and
    ///   `05.0` is `05`. `-0.0` is `0`.
    /// - A float with an exponent is its integer, if that is below 2^53. It has a point, or a sign
    ///   in the exponent, as programs write it. `12e5` has neither, and may be a hexadecimal hash.
    /// - Other spellings of one number are different ids: `05`, `+5`, `5e0`, `5.5`.
    #[inline]
    pub(crate) fn read(text: &'a [u8]) -> Self {
        let text = trim(text);
        match canonical_integer(text) {
            Some(integer) => Self { value: IdValue::Integer(integer), spelling: Spelling::Plain },
            None => Self::read_other(text),
        }
    }

    /// Reads a text that is no canonical integer.
    fn read_other(text: &'a [u8]) -> Self {
        let (is_negative, unsigned) = split_sign(text);
        let (whole, rest) = digits(unsigned);
        let as_it_is = |spelling| Self { value: IdValue::Text(text), spelling };
        match (whole, rest) {
            ([b'0', _, ..], []) => as_it_is(Spelling::ZeroPadded),
            ([_, ..], [b'.' | b'e' | b'E', ..]) => {
                Self::read_float(text, is_negative, unsigned).unwrap_or(as_it_is(Spelling::Plain))
            }
            _ => as_it_is(Spelling::Plain),
        }
    }

    /// Reads `text`, which is `unsigned` behind its sign. `None` if it is no float, or no integer.
    fn read_float(text: &'a [u8], is_negative: bool, unsigned: &'a [u8]) -> Option<Self> {
        let float = Float::read(unsigned)?;
        let magnitude = float.integer()?;
        let spelling = if magnitude < ROUNDED { Spelling::Float } else { Spelling::RoundedFloat };
        let sign = text.len() - unsigned.len();
        let value = match float.exponent {
            None => integer_or_text(&text[..sign + float.whole.len()]),
            Some(_) if magnitude >= ROUNDED => IdValue::Text(text),
            Some(_) if is_negative => IdValue::Integer(-(magnitude as i64)),
            Some(_) => IdValue::Integer(magnitude as i64),
        };
        Some(Self { value, spelling })
    }

    /// Whether the text is a float that may have lost digits of its integer.
    #[inline]
    pub(crate) fn is_rounded(&self) -> bool {
        self.spelling == Spelling::RoundedFloat
    }
}

/// The id of the digits before the point of a float.
fn integer_or_text(digits: &[u8]) -> IdValue<'_> {
    match canonical_integer(digits) {
        Some(integer) => IdValue::Integer(integer),
        None if digits == b"-0" => IdValue::Integer(0),
        None => IdValue::Text(digits),
    }
}

/// The text of a float without its sign: digits, with a fraction, an exponent, or both.
struct Float<'a> {
    whole: &'a [u8],
    fraction: &'a [u8],
    exponent: Option<i64>,
}

impl<'a> Float<'a> {
    /// `None` for a text of another form.
    fn read(unsigned: &'a [u8]) -> Option<Self> {
        let (whole, rest) = digits(unsigned);
        let (fraction, rest, has_point) = match rest {
            [b'.', rest @ ..] => {
                let (fraction, rest) = digits(rest);
                (fraction, rest, true)
            }
            _ => (&rest[..0], rest, false),
        };
        let exponent = match rest {
            [] => None,
            [b'e' | b'E', exponent @ ..] => Some(read_exponent(exponent, has_point)?),
            _ => return None,
        };
        Some(Self { whole, fraction, exponent })
    }

    /// The value if it is an integer, or `u64::MAX` if that has more than 16 digits.
    fn integer(&self) -> Option<u64> {
        let digits = self.whole.iter().chain(self.fraction);
        let count = self.whole.len() + self.fraction.len();
        let behind = digits.clone().rev().take_while(|digit| **digit == b'0').count();
        if behind == count {
            return Some(0);
        }
        let before = digits.clone().take_while(|digit| **digit == b'0').count();
        // Zeros that follow the digits up to the last one that is not zero. Below 0: decimals.
        let zeros = self.exponent.unwrap_or(0) - self.fraction.len() as i64 + behind as i64;
        let zeros = u32::try_from(zeros).ok()?;
        let significant = count - before - behind;
        if significant as u64 + u64::from(zeros) > 16 {
            return Some(u64::MAX);
        }
        let digits = digits.skip(before).take(significant);
        let value = digits.fold(0_u64, |value, digit| value * 10 + u64::from(digit - b'0'));
        Some(value * 10_u64.pow(zeros))
    }
}

/// The number behind the `e` of a float. `None` if it is none, or if neither a point before it nor
/// its sign tell a float from a hash.
fn read_exponent(text: &[u8], has_point: bool) -> Option<i64> {
    let (is_negative, unsigned) = split_sign(text);
    let has_sign = unsigned.len() < text.len();
    let (found, rest) = digits(unsigned);
    if !(1..=9).contains(&found.len()) || !rest.is_empty() || !(has_point || has_sign) {
        return None;
    }
    let value = found.iter().fold(0_i64, |value, digit| value * 10 + i64::from(digit - b'0'));
    Some(if is_negative { -value } else { value })
}

/// Whether a text begins with a minus sign, and the text behind its sign.
fn split_sign(text: &[u8]) -> (bool, &[u8]) {
    match text {
        [b'-', rest @ ..] => (true, rest),
        [b'+', rest @ ..] => (false, rest),
        _ => (false, text),
    }
}

/// The digits at the beginning, and the bytes behind them.
fn digits(text: &[u8]) -> (&[u8], &[u8]) {
    text.split_at(text.iter().take_while(|byte| byte.is_ascii_digit()).count())
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

    fn spelling(text: &str) -> Spelling {
        Id::read(text.as_bytes()).spelling
    }

    #[test]
    fn floats_of_2_to_53_and_beyond_may_have_lost_digits() {
        for text in [
            "9007199254740992.0",
            "-9007199254740993.",
            "9.007199254740992e+15",
            "1.2345678901234567e+16",
            "1e+16",
            "-1.8e19",
            "1.0e999999999",
            "0009007199254740992.00",
            "9223372036854775808.0",
        ] {
            assert_eq!(spelling(text), Spelling::RoundedFloat, "{text}");
        }
        for text in ["9007199254740991.0", "9.007199254740991e+15", "0.9e+1", "0.0e+999", "000000000000000000005.0"] {
            assert_eq!(spelling(text), Spelling::Float, "{text}");
        }
    }

    #[test]
    fn texts_that_are_no_whole_floats_stay_as_they_are() {
        for text in [
            "68e12345",
            "12345e67",
            "5e0",
            "1e5",
            "5e+",
            "5.e",
            "5.0e",
            "5.0e1x",
            "1.5",
            "1.5e0",
            "5e-1",
            ".5e1",
            "e5",
            "1.0.0",
            "5.0 0",
            "+5",
            "-",
            "+",
            ".",
            "-.0",
            "1.0e1234567890",
            "05db9164",
            "99999999999999999999",
            "10.0.0.0",
            "",
        ] {
            let id = Id { value: IdValue::Text(text.as_bytes()), spelling: Spelling::Plain };
            assert_eq!(Id::read(text.as_bytes()), id, "{text}");
        }
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
    fn integers_with_leading_zeros_are_noticed() {
        for text in ["0005", " 05 ", "-05", "00"] {
            assert_eq!(spelling(text), Spelling::ZeroPadded, "{text}");
        }
        for text in ["0", "-0", "5", "50", "0a", "0x5"] {
            assert_eq!(spelling(text), Spelling::Plain, "{text}");
        }
    }

    /// Every integer of the first ones, as programs write it.
    #[test]
    fn a_float_is_its_integer_in_every_form() {
        for integer in (-1000..1000_i64).chain([1 << 40, (1 << 53) - 1, 1 - (1 << 53)]) {
            let value = IdValue::Integer(integer);
            for text in [format!("{integer}.0"), format!("{integer}."), format!("{integer}.0e+00")] {
                assert_eq!(Id::read(text.as_bytes()), Id { value, spelling: Spelling::Float }, "{text}");
            }
            // 17 digits, as `%.16e` writes them. Rust writes no plus sign in the exponent.
            let scientific = format!("{:.16e}", integer as f64);
            assert_eq!(Id::read(scientific.as_bytes()).value, value, "{scientific}");
        }
    }
}
