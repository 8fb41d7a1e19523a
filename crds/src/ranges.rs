//! Ranges of column names: `C{1..26}` stands for `C1`, `C2`, … `C26`.

use crate::defaults::MAX_FEATURES;

/// Why a range of names cannot be expanded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExpandError {
    /// The numbers run backwards.
    #[error("the range in `{0}` runs backwards: expected the smaller number first, such as C{{1..26}}")]
    Backwards(String),
    /// More names than a job may have.
    #[error("the range in `{0}` stands for more than {MAX_FEATURES} names")]
    TooLong(String),
    /// Braces that are not one range of numbers.
    #[error("`{0}` has braces that are not a range: expected one such as C{{1..26}}")]
    Malformed(String),
}

/// Expands a range of numbers. A name without braces stands for itself. Numbers keep the width of
/// the first: `C{01..03}` is `C01`, `C02`, `C03`.
///
/// # Errors
/// Braces that are not a range, a range that runs backwards, or more names than a job may have.
pub fn expand(name: &str) -> Result<Vec<String>, ExpandError> {
    if !name.contains(['{', '}']) {
        return Ok(vec![name.to_string()]);
    }
    let malformed = || ExpandError::Malformed(name.to_string());
    let (before, rest) = name.split_once('{').ok_or_else(malformed)?;
    let (range, after) = rest.split_once('}').ok_or_else(malformed)?;
    let (first, last) = range.split_once("..").ok_or_else(malformed)?;
    if before.contains('}') || after.contains(['{', '}']) {
        return Err(malformed());
    }
    let width = if first.starts_with('0') { first.len() } else { 0 };
    let (first, last) = (number(first).ok_or_else(malformed)?, number(last).ok_or_else(malformed)?);
    if first > last {
        return Err(ExpandError::Backwards(name.to_string()));
    }
    if last - first >= MAX_FEATURES as u64 {
        return Err(ExpandError::TooLong(name.to_string()));
    }
    Ok((first..=last).map(|i| format!("{before}{i:0width$}{after}")).collect())
}

fn number(digits: &str) -> Option<u64> {
    let only_digits = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    only_digits.then(|| digits.parse().ok()).flatten().filter(|&n| n < u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_expanded_between_its_prefix_and_suffix() {
        assert_eq!(expand("user_id").unwrap(), ["user_id"]);
        assert_eq!(expand("C{1..3}").unwrap(), ["C1", "C2", "C3"]);
        assert_eq!(expand("f{9..11}_x").unwrap(), ["f9_x", "f10_x", "f11_x"]);
        assert_eq!(expand("{7..7}").unwrap(), ["7"]);
        assert_eq!(expand("C{0..2}").unwrap(), ["C0", "C1", "C2"]);
    }

    #[test]
    fn numbers_keep_the_width_of_the_first() {
        assert_eq!(expand("C{08..11}").unwrap(), ["C08", "C09", "C10", "C11"]);
    }

    #[test]
    fn a_malformed_range_is_refused() {
        for name in ["C{", "C}", "C{}", "C{1}", "C{1..}", "C{a..b}", "C{1..2}{3..4}", "C{1..2", "}{1..2}", "C{-1..2}"] {
            assert_eq!(expand(name), Err(ExpandError::Malformed(name.to_string())), "{name}");
        }
        assert!(matches!(expand("C{3..1}"), Err(ExpandError::Backwards(_))));
        assert!(matches!(expand("C{1..5000}"), Err(ExpandError::TooLong(_))));
        assert!(matches!(expand("C{1..99999999999999999999999}"), Err(ExpandError::Malformed(_))));
    }
}
