//! The names in a publication path.

/// The folder of a full model.
pub(super) fn full(sequence: u64) -> String {
    format!("full-{sequence:012}")
}

/// The file of a delta.
pub(super) fn delta(sequence: u64) -> String {
    format!("delta-{sequence:012}.bin")
}

/// The sequence number in the name of a full model's folder.
pub(super) fn sequence_of_full(name: &str) -> Option<u64> {
    let sequence = name.strip_prefix("full-")?.parse().ok()?;
    (full(sequence) == name).then_some(sequence)
}

/// The sequence number in the name of a delta's file.
pub(super) fn sequence_of_delta(name: &str) -> Option<u64> {
    let sequence = name.strip_prefix("delta-")?.strip_suffix(".bin")?.parse().ok()?;
    (delta(sequence) == name).then_some(sequence)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_their_sequence_numbers() {
        for sequence in [0, 13, 999_999_999_999, u64::MAX] {
            assert_eq!(sequence_of_full(&full(sequence)), Some(sequence));
            assert_eq!(sequence_of_delta(&delta(sequence)), Some(sequence));
        }
        assert_eq!((full(13), delta(13)), ("full-000000000013".into(), "delta-000000000013.bin".into()));
        for other in ["full-13", "full-", "delta-000000000013", "delta-+00000000013.bin", "latest.json", "full-a"] {
            assert_eq!((sequence_of_full(other), sequence_of_delta(other)), (None, None), "{other}");
        }
    }
}
