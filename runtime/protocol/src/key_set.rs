//! Some of the keys of a look-up, as a message names them: one bit for each key.

use crate::error::RoleError;

/// Some of the keys of a look-up, by their numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeySet {
    keys: usize,
    bits: Vec<u8>,
}

impl KeySet {
    /// None of `keys` keys.
    #[must_use]
    pub fn none_of(keys: usize) -> Self {
        Self { keys, bits: vec![0; keys.div_ceil(8)] }
    }

    /// Adds key number `key`.
    pub fn insert(&mut self, key: usize) {
        if let Some(byte) = self.bits.get_mut(key / 8) {
            *byte |= 1 << (key % 8);
        }
    }

    /// Whether the set has key number `key`.
    #[must_use]
    pub fn contains(&self, key: usize) -> bool {
        self.bits.get(key / 8).is_some_and(|byte| byte >> (key % 8) & 1 == 1)
    }

    /// For a message.
    #[must_use]
    pub fn write(self) -> Vec<u8> {
        self.bits
    }

    /// From a message about `keys` keys.
    ///
    /// # Errors
    /// The message is about another number of keys.
    pub fn read(keys: usize, bits: Vec<u8>) -> Result<Self, RoleError> {
        if bits.len() == keys.div_ceil(8) {
            return Ok(Self { keys, bits });
        }
        let reason = format!("expected one bit for each of {keys} keys, found {} bytes", bits.len());
        Err(RoleError::Inconsistent { message: "lookup", reason })
    }

    /// Whether the set has each key in turn.
    pub fn iter(&self) -> impl Iterator<Item = bool> {
        (0..self.keys).map(move |key| self.contains(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_travel_as_one_bit_each() {
        for keys in [0, 1, 7, 8, 9, 64, 100] {
            let mut set = KeySet::none_of(keys);
            (0..keys).filter(|key| key % 3 == 1).for_each(|key| set.insert(key));
            let bits = set.clone().write();
            assert_eq!(bits.len(), keys.div_ceil(8));
            let read = KeySet::read(keys, bits).unwrap();
            assert!(read.iter().eq((0..keys).map(|key| key % 3 == 1)), "{keys}");
            assert_eq!(read, set);
        }
        assert!(KeySet::read(9, vec![0]).is_err());
    }
}
