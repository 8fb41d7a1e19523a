//! De-duplicates a batch as an embedding worker does before its look-up: finds the unique keys in
//! order, and the number of the key of each id.

use rectrain_embedding::FeatureKey;

/// The average number of ids in a bucket. Each bucket is then sorted.
const PER_BUCKET: usize = 8;

/// The unique keys of a batch. The next batch reuses the memory.
#[derive(Default)]
pub(crate) struct Unique {
    /// The unique keys in ascending order.
    pub(crate) keys: Vec<FeatureKey>,
    /// For each id of the batch, the index of its key in `keys`.
    pub(crate) of: Vec<u32>,
    ends: Vec<u32>,
    sorted: Vec<(u64, u32)>,
}

impl Unique {
    /// De-duplicates a batch. Keys are hashes, so the first bits of a key nearly give its position.
    /// Keys with the same first bits are sorted.
    pub(crate) fn take(&mut self, ids: &[FeatureKey]) {
        let bits = (ids.len() / PER_BUCKET).max(1).ilog2() + 1;
        let bucket = |key: u64| (key >> (64 - bits)) as usize;
        self.ends.clear();
        self.ends.resize(1 << bits, 0);
        ids.iter().for_each(|id| self.ends[bucket(id.0)] += 1);
        let mut start = 0;
        for end in &mut self.ends {
            start += std::mem::replace(end, start);
        }
        self.sorted.resize(ids.len(), (0, 0));
        for (id, at) in ids.iter().zip(0..) {
            let next = &mut self.ends[bucket(id.0)];
            self.sorted[*next as usize] = (id.0, at);
            *next += 1;
        }
        let mut start = 0;
        for &end in &self.ends {
            self.sorted[start..end as usize].sort_unstable_by_key(|&(key, _)| key);
            start = end as usize;
        }
        self.keys.clear();
        self.of.resize(ids.len(), 0);
        for &(key, at) in &self.sorted {
            if self.keys.last() != Some(&FeatureKey(key)) {
                self.keys.push(FeatureKey(key));
            }
            self.of[at as usize] = self.keys.len() as u32 - 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zipf::{Random, Zipf, key};

    #[test]
    fn keys_are_unique_and_in_order_and_each_id_finds_its_own() {
        let (zipf, mut random) = (Zipf::new(5_000, 1.05), Random::new(3));
        let mut unique = Unique::default();
        for ids in [1, 2, 7, 8, 1_000, 30_000, 12] {
            let ids: Vec<FeatureKey> = (0..ids).map(|_| key(zipf.rank(&mut random))).collect();
            unique.take(&ids);
            let expected: std::collections::BTreeSet<_> = ids.iter().copied().collect();
            assert!(unique.keys.iter().eq(&expected));
            assert!(ids.iter().zip(&unique.of).all(|(&id, &number)| unique.keys[number as usize] == id));
            assert_eq!(unique.of.len(), ids.len());
        }
    }
}
