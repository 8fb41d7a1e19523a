//! Sorting rows by key.

use crate::FeatureKey;

/// Sorts by key. Keys are hashes and a slot is a range of them, so the position of a key follows
/// nearly from the key. Keys that crowd together cost time and nothing else.
pub(super) fn sorted(rows: Vec<(FeatureKey, u32)>) -> Vec<(FeatureKey, u32)> {
    let keys = || rows.iter().map(|(key, _)| key.0);
    let (Some(first), Some(last)) = (keys().min(), keys().max()) else { return rows };
    // At least as many positions as keys, and at most twice as many.
    let shift = (last - first).checked_ilog2().map_or(0, |bits| (bits + 1).saturating_sub(rows.len().ilog2() + 1));
    let place = |key: FeatureKey| ((key.0 - first) >> shift) as usize;
    let mut ends = vec![0_usize; place(FeatureKey(last)) + 1];
    rows.iter().for_each(|&(key, _)| ends[place(key)] += 1);
    let mut end = 0;
    for count in &mut ends {
        end += *count;
        *count = end;
    }
    let mut ordered = vec![(FeatureKey(0), 0); rows.len()];
    let mut starts = ends.clone();
    for &row in &rows {
        let start = &mut starts[place(row.0)];
        *start -= 1;
        ordered[*start] = row;
    }
    for (start, end) in starts.into_iter().zip(ends) {
        if end - start > 1 {
            ordered[start..end].sort_unstable_by_key(|&(key, _)| key);
        }
    }
    ordered
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Keys that are spread, crowded in one place, or both.
        #[test]
        fn rows_are_sorted_however_their_keys_are_spread(
            keys in prop::collection::btree_set(prop_oneof![any::<u64>(), 0..200_u64, (u64::MAX - 200)..=u64::MAX], 0..300),
            order in any::<u64>(),
        ) {
            let expected: Vec<FeatureKey> = keys.iter().copied().map(FeatureKey).collect();
            let mut rows: Vec<_> = expected.iter().copied().zip(0_u32..).collect();
            rows.sort_by_key(|&(key, _)| key.0.wrapping_mul(order | 1));
            let found = sorted(rows);
            prop_assert!(found.iter().map(|&(key, _)| key).eq(expected));
            prop_assert!(found.iter().map(|&(_, number)| number).eq(0..keys.len() as u32));
        }
    }
}
