//! Parses numbers without an allocation. The fast path covers common cells: a few digits, and
//! perhaps a point. The standard library parses all others. The text source calls this for every
//! dense cell.

use arrow_array::ArrowPrimitiveType;
use arrow_array::types::Float16Type;

/// The `f32` nearest to the decimal number in `text`, without spaces around it. `None` if it is not
/// a number. The standard library decides about `inf`, `nan` and the like.
#[inline]
pub(crate) fn parse_f32(text: &[u8]) -> Option<f32> {
    match short_decimal(text, 1 << 24).and_then(Decimal::to_f32) {
        Some(value) => Some(value),
        None => std::str::from_utf8(text).ok()?.trim().parse().ok(),
    }
}

/// The `f64` nearest to the decimal number in `text`, as [`parse_f32`].
#[inline]
pub(crate) fn parse_f64(text: &[u8]) -> Option<f64> {
    match short_decimal(text, 1 << 53).and_then(Decimal::to_f64) {
        Some(value) => Some(value),
        None => std::str::from_utf8(text).ok()?.trim().parse().ok(),
    }
}

/// A bound for values of 32-bit floats: the nearest one, if its shortest decimal is the bound. So
/// values that are 0.7 in 32 bits are at least 0.7. Any other bound stays as it is.
pub(crate) fn as_single(bound: f64) -> f64 {
    let single = bound as f32;
    match single.to_string().parse::<f64>() == Ok(bound) {
        true => f64::from(single),
        false => bound,
    }
}

/// As [`as_single`], for 16-bit floats, which tell apart all decimals of three digits.
pub(crate) fn as_half(bound: f64) -> f64 {
    let half = <Float16Type as ArrowPrimitiveType>::Native::from_f64(bound).to_f64();
    match format!("{half:.2e}").parse::<f64>() == Ok(bound) {
        true => half,
        false => bound,
    }
}

/// Powers of ten that `f32` holds exactly.
const POWERS: [f32; 11] = [1.0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10];

/// The number ± `mantissa` / 10^`decimals`.
#[derive(Clone, Copy)]
struct Decimal {
    negative: bool,
    mantissa: u64,
    decimals: usize,
}

/// The mantissa and the power of ten are exact, so their quotient is rounded once, correctly
/// (Clinger 1990). There is no result for more than ten decimals.
impl Decimal {
    /// For mantissas of at most 2²⁴.
    #[inline]
    fn to_f32(self) -> Option<f32> {
        let value = self.mantissa as f32 / POWERS.get(self.decimals)?;
        Some(if self.negative { -value } else { value })
    }

    /// For mantissas of at most 2⁵³.
    #[inline]
    fn to_f64(self) -> Option<f64> {
        let value = self.mantissa as f64 / f64::from(*POWERS.get(self.decimals)?);
        Some(if self.negative { -value } else { value })
    }
}

/// Parses `[-]digits[.digits]` with a mantissa of at most `limit`, which is at most 2⁵³.
#[inline]
fn short_decimal(text: &[u8], limit: u64) -> Option<Decimal> {
    let (negative, digits) = match text {
        [b'-', rest @ ..] => (true, rest),
        rest => (false, rest),
    };
    let (mut mantissa, mut seen, mut decimals) = (0_u64, 0_usize, None);
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit <= 9 {
            mantissa = mantissa * 10 + u64::from(digit);
            if mantissa > limit {
                return None;
            }
            seen += 1;
            decimals = decimals.map(|count| count + 1);
        } else if byte == b'.' && decimals.is_none() {
            decimals = Some(0_usize);
        } else {
            return None;
        }
    }
    match seen {
        0 => None,
        _ => Some(Decimal { negative, mantissa, decimals: decimals.unwrap_or(0) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn same(text: &str) {
        let expected: Option<f32> = text.trim().parse().ok();
        let found = parse_f32(text.as_bytes());
        assert_eq!(found.map(f32::to_bits), expected.map(f32::to_bits), "{text:?}");
        let expected: Option<f64> = text.trim().parse().ok();
        let found = parse_f64(text.as_bytes());
        assert_eq!(found.map(f64::to_bits), expected.map(f64::to_bits), "{text:?}");
    }

    #[test]
    fn odd_spellings_are_read_as_the_standard_library_reads_them() {
        for text in [
            "",
            "-",
            ".",
            "-.",
            "1.",
            ".5",
            "-0",
            "0.1",
            "16777216",
            "16777217",
            "16777219",
            "9007199254740992",
            "9007199254740993",
            "900719925474.0993",
            "1700000000.123456",
            " 7 ",
            "1e3",
            "abc",
            "1,5",
            "1.2.3",
            "0x10",
            "NaN",
            "inf",
            "-inf",
            "00012",
            "0.00000000001",
            "3.4028236e38",
            "1e39",
            "+4",
            "--1",
            "١",
        ] {
            same(text);
        }
    }

    #[test]
    fn a_bound_is_the_nearest_narrow_float_if_it_is_its_decimal() {
        for bound in [0.7, 0.1, -0.3, 4.5, 1.7e9, 0.123_456, 0.0] {
            assert_eq!(as_single(bound), f64::from(bound as f32), "{bound}");
        }
        for bound in [16_777_217.0, 0.700_000_001, 1e300, 1.7e9 + 1.0] {
            assert_eq!(as_single(bound), bound);
        }
        assert_eq!((as_half(0.7), as_half(0.1), as_half(4.5)), (0.700_195_312_5, 0.099_975_585_937_5, 4.5));
        assert_eq!((as_half(0.7001), as_half(2049.0), as_half(1e300)), (0.7001, 2049.0, 1e300));
    }

    proptest! {
        #[test]
        fn the_fast_path_rounds_correctly(whole in 0_u32..100_000, decimals in 0_usize..12, f in any::<u32>()) {
            let fraction = format!("{f:012}");
            same(&format!("{whole}.{}", &fraction[..decimals]));
            same(&format!("-{whole}"));
        }

        #[test]
        fn any_f32_written_out_is_read_back(bits in any::<u32>()) {
            let value = f32::from_bits(bits);
            prop_assume!(value.is_finite());
            prop_assert_eq!(parse_f32(value.to_string().as_bytes()).unwrap().to_bits(), bits);
        }
    }
}
