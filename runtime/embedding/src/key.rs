//! The names of things in the store: feature keys, slots and row groups. Plain numbers in types of
//! their own, so that one cannot be passed for another.

use std::fmt;

/// A 64-bit hash of (feature, value), already well mixed: its top bits are uniform, because the
/// slot is taken from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FeatureKey(pub u64);

/// One of the fixed number of virtual shards into which the keys are divided, `0 .. slots`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// A row group: the features whose rows have one [`RowSpec`](crate::RowSpec). It is the position of
/// that spec in [`StoreConfig::groups`](crate::StoreConfig::groups).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u16);

impl fmt::Display for FeatureKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:#018x}", self.0)
    }
}

impl fmt::Display for Slot {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.0)
    }
}

/// The slot of a key: ⌊key · slots / 2⁶⁴⌋. It never falls as the key rises: all keys of slot 0 come
/// before all keys of slot 1. So global key order is slot order, then key order in a slot.
#[must_use]
pub fn slot_of(key: FeatureKey, slots: u32) -> Slot {
    let product = u128::from(key.0) * u128::from(slots);
    Slot((product >> 64) as u32)
}

/// The key of a row.
pub(crate) fn key_of(row: &[u32]) -> FeatureKey {
    FeatureKey(u64::from(row[0]) | u64::from(row[1]) << 32)
}

/// The key of a row, from the row's bytes in memory.
pub(crate) fn key_of_bytes(row: &[u8]) -> FeatureKey {
    FeatureKey(row.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_ends_of_the_key_range_lie_in_the_first_and_the_last_slot() {
        for slots in [1, 2, 3, 1_000, 1_024, 65_536] {
            assert_eq!(slot_of(FeatureKey(0), slots), Slot(0));
            assert_eq!(slot_of(FeatureKey(u64::MAX), slots), Slot(slots - 1));
        }
    }

    proptest! {
        #[test]
        fn slot_order_is_key_order(a: u64, b: u64, slots in 1_u32..100_000) {
            let (low, high) = (a.min(b), a.max(b));
            let (first, second) = (slot_of(FeatureKey(low), slots), slot_of(FeatureKey(high), slots));
            prop_assert!(first <= second);
            prop_assert!(second.0 < slots);
        }
    }
}
