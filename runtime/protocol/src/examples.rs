//! The training examples of each key in a message of gradients: how many were positive and how
//! many negative.
//!
//! Most keys of a batch occur in a few samples, so a key usually takes one byte. The positive count
//! is in its upper four bits and the negative count in its lower four. The byte `0xff` stands for
//! larger counts. Both follow it as 4 bytes each, little-endian. The counts follow each other in
//! the order of the keys.

use rectrain_embedding::Examples;

use crate::error::RoleError;

/// The byte before counts that do not fit into one.
const WIDE: u8 = 0xff;

/// Encodes the examples of keys, in their order.
#[must_use]
pub fn encode(examples: &[Examples]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(examples.len());
    for Examples { positive, negative } in examples {
        match (u8::try_from(*positive), u8::try_from(*negative)) {
            (Ok(positive @ 0..=15), Ok(negative @ 0..=15)) if (positive, negative) != (15, 15) => {
                bytes.push(positive << 4 | negative);
            }
            _ => {
                bytes.push(WIDE);
                bytes.extend_from_slice(&positive.to_le_bytes());
                bytes.extend_from_slice(&negative.to_le_bytes());
            }
        }
    }
    bytes
}

/// Decodes the examples of `keys` keys.
///
/// # Errors
/// [`RoleError::Inconsistent`] if the bytes are not the examples of this many keys.
pub fn decode(message: &'static str, bytes: &[u8], keys: usize) -> Result<Vec<Examples>, RoleError> {
    let mut examples = Vec::with_capacity(keys.min(bytes.len()));
    let mut rest = bytes;
    while let Some((one, read)) = next(rest) {
        examples.push(one);
        rest = read;
    }
    if rest.is_empty() && examples.len() == keys {
        return Ok(examples);
    }
    let reason = format!("{} bytes are not the examples of {keys} keys", bytes.len());
    Err(RoleError::Inconsistent { message, reason })
}

/// The examples of the next key, and the bytes behind them.
fn next(bytes: &[u8]) -> Option<(Examples, &[u8])> {
    let (&first, rest) = bytes.split_first()?;
    if first != WIDE {
        return Some((Examples { positive: u32::from(first >> 4), negative: u32::from(first & 15) }, rest));
    }
    let (positive, rest) = rest.split_first_chunk()?;
    let (negative, rest) = rest.split_first_chunk()?;
    Some((Examples { positive: u32::from_le_bytes(*positive), negative: u32::from_le_bytes(*negative) }, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(examples: &[Examples]) -> Vec<(u32, u32)> {
        examples.iter().map(|one| (one.positive, one.negative)).collect()
    }

    #[test]
    fn every_count_survives_and_few_examples_take_one_byte() {
        let counts = [(0, 0), (0, 1), (1, 0), (15, 14), (15, 15), (16, 0), (0, 16), (u32::MAX, 7)];
        let examples: Vec<Examples> =
            counts.iter().map(|&(positive, negative)| Examples { positive, negative }).collect();
        assert_eq!(pairs(&decode("update", &encode(&examples), counts.len()).unwrap()), counts);
        assert_eq!(encode(&examples[..4]).len(), 4);
    }

    #[test]
    fn bytes_of_another_number_of_keys_are_refused() {
        let bytes = encode(&[Examples { positive: 1, negative: 0 }, Examples { positive: 99, negative: 3 }]);
        assert!((0..bytes.len()).all(|length| decode("update", &bytes[..length], 2).is_err()));
        assert!(decode("update", &bytes, 1).is_err() && decode("update", &bytes, 3).is_err());
    }
}
