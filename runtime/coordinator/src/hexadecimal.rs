//! Bytes as hexadecimal digits.

/// Bytes as hexadecimal digits, two for each.
pub(super) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_byte_has_two_digits() {
        assert_eq!(hexadecimal(&[0, 9, 0xab, 0xff]), "0009abff");
        assert_eq!(hexadecimal(&[]), "");
    }
}
