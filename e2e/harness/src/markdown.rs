//! Tables, numbers and claims in Markdown.

use std::fmt::Write as _;

/// A table in Markdown, with a line break at its end.
#[must_use]
pub fn table(header: &[&str], rows: Vec<Vec<String>>) -> String {
    let mut text = format!("| {} |\n|{}\n", header.join(" | "), "---|".repeat(header.len()));
    for row in rows {
        // Writing to a string cannot fail.
        let _written = writeln!(text, "| {} |", row.join(" | "));
    }
    text
}

/// A number with a comma before each three digits.
#[must_use]
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Whether a claim is true.
#[must_use]
pub fn verdict(is_true: bool) -> &'static str {
    if is_true { "holds" } else { "does not hold" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_commas() {
        assert_eq!([0, 999, 1_000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
    }
}
