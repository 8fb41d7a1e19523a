//! The ids of an evaluation that have no row, because no training row had them.
//!
//! A parameter server reports its keys without a row as [`MissingKeys`]. The embedding worker
//! counts them for each feature as [`LookUps`], and the dense workers add these up. The coordinator
//! computes the shares.

use std::ops::AddAssign;

use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use crate::error::RoleError;

/// The ids of one feature that an evaluation looked up. An id counts for each sample and each of
/// its values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookUps {
    /// All ids.
    pub ids: u64,
    /// The ids without a row.
    pub unseen: u64,
}

impl LookUps {
    /// The share of the ids that have no row. `None` without ids.
    #[must_use]
    pub fn unseen_share(self) -> Option<f64> {
        (self.ids > 0).then(|| self.unseen as f64 / self.ids as f64)
    }

    /// For a message.
    #[must_use]
    pub fn write(self) -> v1::FeatureLookUps {
        v1::FeatureLookUps { ids: self.ids, unseen: self.unseen }
    }

    /// From a message.
    #[must_use]
    pub fn read(message: v1::FeatureLookUps) -> Self {
        Self { ids: message.ids, unseen: message.unseen }
    }
}

impl AddAssign for LookUps {
    fn add_assign(&mut self, other: Self) {
        self.ids += other.ids;
        self.unseen += other.unseen;
    }
}

/// Adds the look-ups of more samples, by feature. `total` may be empty.
pub fn add(total: &mut Vec<LookUps>, more: &[LookUps]) {
    if total.len() < more.len() {
        total.resize(more.len(), LookUps::default());
    }
    for (total, more) in total.iter_mut().zip(more) {
        *total += *more;
    }
}

/// Which keys of a look-up have no row, one bit for each key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingKeys {
    keys: usize,
    bits: Vec<u8>,
}

impl MissingKeys {
    /// `keys` keys that all have rows.
    #[must_use]
    pub fn none_of(keys: usize) -> Self {
        Self { keys, bits: vec![0; keys.div_ceil(8)] }
    }

    /// Key number `key` has no row.
    pub fn insert(&mut self, key: usize) {
        if let Some(byte) = self.bits.get_mut(key / 8) {
            *byte |= 1 << (key % 8);
        }
    }

    /// Whether key number `key` has no row.
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
        let reason = format!("expected the missing keys of {keys} keys, found {} bytes", bits.len());
        Err(RoleError::Inconsistent { message: "lookup", reason })
    }

    /// Whether each key in turn has no row.
    pub fn iter(&self) -> impl Iterator<Item = bool> {
        (0..self.keys).map(move |key| self.contains(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_keys_travel_as_one_bit_each() {
        for keys in [0, 1, 7, 8, 9, 64, 100] {
            let mut missing = MissingKeys::none_of(keys);
            (0..keys).filter(|key| key % 3 == 1).for_each(|key| missing.insert(key));
            let bits = missing.clone().write();
            assert_eq!(bits.len(), keys.div_ceil(8));
            let read = MissingKeys::read(keys, bits).unwrap();
            assert!(read.iter().eq((0..keys).map(|key| key % 3 == 1)), "{keys}");
            assert_eq!(read, missing);
        }
        assert!(MissingKeys::read(9, vec![0]).is_err());
    }

    #[test]
    fn look_ups_add_up_by_feature() {
        let mut total = Vec::new();
        let look_ups = |ids, unseen| LookUps { ids, unseen };
        add(&mut total, &[look_ups(4, 1), look_ups(0, 0)]);
        add(&mut total, &[]);
        add(&mut total, &[look_ups(4, 2), look_ups(0, 0)]);
        let shares: Vec<_> = total.iter().map(|feature| feature.unseen_share()).collect();
        assert_eq!(shares, [Some(0.375), None]);
    }
}
