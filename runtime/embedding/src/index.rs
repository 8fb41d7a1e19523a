//! The map from key to row number of one table. For each entry it holds one tag byte and one row
//! number, but no key. The caller compares the key in the row. It knows nothing else of rows, so it
//! can be dropped and rebuilt from them.
//!
//! Open addressing over buckets of one cache line (the shape of Facebook's F14 tables):
//!
//! ```text
//! byte   0 … 11          12 … 15         16 … 63
//!     ┌───────────────┬───────────────┬──────────────────────────────────┐
//!     │ 12 tags       │ overflow: u32 │ 12 row numbers: u32              │
//!     └───────────────┴───────────────┴──────────────────────────────────┘
//! ```
//!
//! Invariants:
//! 1. A tag of 0 is a free entry; any other is the tag of the key whose row the entry names.
//! 2. An entry lies in its home bucket or in one after it (cyclically). `overflow` counts the
//!    entries that passed over this bucket because it was full when they were inserted. A search
//!    ends at a bucket with overflow 0. Removal decrements the counts, so there are no tombstones.
//! 3. At most 10 of 12 entries are in use on average. A full index is replaced by one that is
//!    larger by a quarter to a half. An index of more than a few buckets takes 6.4 to 9.6 bytes a
//!    row, and the indexes of a store 7.4 on average.
//!
//! The key that fills an index determines the growth factor, through its hash. The indexes of a
//! store have nearly equal numbers of rows. With one common factor they would all grow at the same
//! time. A request with a few new keys for each index would then wait for many of them.
//!
//! The home bucket comes from the whole key, mixed again: keys of one slot share their top bits.

use crate::arena::{Arena, Array};
use crate::{FeatureKey, prefetch};
use bytemuck::{Pod, Zeroable};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

const WAYS: usize = 12;
/// Entries a bucket may hold on average before the table grows.
const FULL: usize = 10;
const BUCKET_BYTES: usize = size_of::<Bucket>();

/// The hash of a key. It determines the home bucket, and its lowest bits are the tag.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hash {
    position: u64,
}

impl Hash {
    pub(crate) fn of(key: FeatureKey) -> Self {
        const MULTIPLIER: u64 = 0x9fb2_1c65_1e98_df25;
        const OFFSET: u64 = 0xd6e8_feb8_6659_fd93;
        let product = u128::from(key.0 ^ OFFSET) * u128::from(MULTIPLIER);
        Self { position: (product >> 64) as u64 ^ product as u64 }
    }

    fn tag(self) -> u8 {
        (self.position as u8).max(1)
    }

    /// A number below `of`, determined by the key.
    pub(crate) fn remainder(self, of: usize) -> usize {
        (self.position % of.max(1) as u64) as usize
    }

    /// The key's home among this many buckets.
    pub(crate) fn home(self, buckets: usize) -> usize {
        ((u128::from(self.position) * buckets as u128) >> 64) as usize
    }
}

#[derive(Clone, Copy, Zeroable, Pod)]
#[repr(C, align(64))]
struct Bucket {
    tags: [u8; WAYS],
    overflow: u32,
    rows: [u32; WAYS],
}

impl Bucket {
    /// The entries with this tag, lowest first.
    fn matches(&self, tag: u8) -> Matches {
        const LOW: u128 = 0x7f7f_7f7f_7f7f_7f7f_7f7f_7f7f;
        const ONES: u128 = 0x0101_0101_0101_0101_0101_0101;
        let mut bytes = [0; 16];
        bytes[..WAYS].copy_from_slice(&self.tags);
        let difference = u128::from_le_bytes(bytes) ^ (ONES * u128::from(tag));
        // The top bit of a byte is clear here exactly where the byte of `difference` is 0.
        let occupied = ((difference & LOW) + LOW) | difference;
        Matches(!occupied & (ONES << 7))
    }
}

/// The positions of a bucket's matching entries; the bit of entry i is 8·i + 7.
struct Matches(u128);

impl Iterator for Matches {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let entry = self.0.trailing_zeros() as usize / 8;
        self.0 &= self.0 - 1;
        Some(entry)
    }
}

/// See the module's text. Its buckets begin as zeros, which are free entries.
pub(crate) struct Index {
    buckets: Array<Bucket>,
    entries: usize,
}

impl Index {
    /// An index in this memory that takes `rows` entries without growing.
    pub(crate) fn for_rows(memory: &Arc<Arena>, rows: usize) -> Self {
        Self { buckets: Array::new(memory, rows.div_ceil(FULL)), entries: 0 }
    }

    /// Entries after which it must grow.
    pub(crate) fn capacity(&self) -> usize {
        self.buckets.len() * FULL
    }

    /// The capacity to grow to when this key does not fit: a quarter to a half more.
    pub(crate) fn next_capacity(&self, hash: Hash) -> usize {
        grown(self.buckets.len(), hash) * FULL
    }

    pub(crate) fn is_full(&self) -> bool {
        self.entries >= self.capacity()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.buckets.len() * BUCKET_BYTES
    }

    fn home(&self, hash: Hash) -> usize {
        hash.home(self.buckets.len())
    }

    fn after(&self, bucket: usize) -> usize {
        if bucket + 1 == self.buckets.len() { 0 } else { bucket + 1 }
    }

    /// A row that is probably the key's: the first with its tag in its home bucket.
    pub(crate) fn candidate(&self, hash: Hash) -> Option<u32> {
        let bucket = self.buckets.get(self.home(hash))?;
        bucket.matches(hash.tag()).next().map(|entry| bucket.rows[entry])
    }

    /// The row of a key: the first with its tag for which `is_it` returns true.
    pub(crate) fn find(&self, hash: Hash, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let mut position = self.home(hash);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[position];
            for entry in bucket.matches(hash.tag()) {
                if is_it(bucket.rows[entry]) {
                    return Some(bucket.rows[entry]);
                }
            }
            if bucket.overflow == 0 {
                return None;
            }
            position = self.after(position);
        }
        None
    }

    /// Adds an entry. The key must be absent and the index not full.
    pub(crate) fn insert(&mut self, hash: Hash, row: u32) {
        debug_assert!(!self.is_full(), "an index grows before it is full");
        let mut position = self.home(hash);
        loop {
            let next = self.after(position);
            let bucket = &mut self.buckets[position];
            if let Some(entry) = bucket.matches(0).next() {
                bucket.tags[entry] = hash.tag();
                bucket.rows[entry] = row;
                self.entries += 1;
                return;
            }
            bucket.overflow += 1;
            position = next;
        }
    }

    /// Removes the entry of a key and its row, which must be present.
    pub(crate) fn remove(&mut self, hash: Hash, row: u32) {
        let mut position = self.home(hash);
        for _ in 0..self.buckets.len() {
            let next = self.after(position);
            let bucket = &mut self.buckets[position];
            let found = bucket.matches(hash.tag()).find(|&entry| bucket.rows[entry] == row);
            if let Some(entry) = found {
                bucket.tags[entry] = 0;
                self.entries -= 1;
                return;
            }
            bucket.overflow -= 1;
            position = next;
        }
        debug_assert!(false, "only present entries are removed");
    }
}

/// The address of an index, for prefetches without the lock that guards it. It may be out of date:
/// then the wrong lines are prefetched, which costs time only.
#[derive(Debug, Default)]
pub(crate) struct IndexAddress {
    first: AtomicPtr<Bucket>,
    buckets: AtomicUsize,
}

impl IndexAddress {
    /// Records the present address of the index. It writes only on a change, since other threads
    /// read this often.
    pub(crate) fn record(&self, index: &Index) {
        let first = index.buckets.as_ptr().cast_mut();
        if self.first.load(Ordering::Relaxed) != first || self.buckets.load(Ordering::Relaxed) != index.buckets.len() {
            self.first.store(first, Ordering::Relaxed);
            self.buckets.store(index.buckets.len(), Ordering::Relaxed);
        }
    }

    /// Whether no address has been recorded yet.
    #[cfg(test)]
    pub(crate) fn is_unknown(&self) -> bool {
        self.first.load(Ordering::Relaxed).is_null()
    }

    /// Prefetches a key's home bucket.
    pub(crate) fn prefetch(&self, hash: Hash) {
        let home = hash.home(self.buckets.load(Ordering::Relaxed));
        prefetch::at(self.first.load(Ordering::Relaxed).wrapping_add(home));
    }
}

/// The next number of buckets after `buckets`: 16/64 to 32/64 more, as the key's hash determines.
fn grown(buckets: usize, hash: Hash) -> usize {
    let parts = 16 + hash.position as usize % 17;
    buckets + (buckets * parts).div_ceil(64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// Keys by row number, as the slab would hold them.
    fn find(index: &Index, keys: &[u64], key: u64) -> Option<u32> {
        index.find(Hash::of(FeatureKey(key)), |row| keys[row as usize] == key)
    }

    fn filled(keys: &[u64]) -> Index {
        let mut index = Index::for_rows(&Arc::default(), keys.len());
        for (row, &key) in keys.iter().enumerate() {
            index.insert(Hash::of(FeatureKey(key)), row as u32);
        }
        index
    }

    #[test]
    fn matches_are_exact_for_every_tag() {
        let mut bucket = Bucket::zeroed();
        for base in 0..=255_u8 {
            bucket.tags = std::array::from_fn(|i| base.wrapping_add((i / 2) as u8));
            for tag in 0..=255_u8 {
                let expected: Vec<_> = (0..WAYS).filter(|&i| bucket.tags[i] == tag).collect();
                assert_eq!(bucket.matches(tag).collect::<Vec<_>>(), expected);
            }
        }
    }

    #[test]
    fn consecutive_keys_spread_as_well_as_random_ones() {
        let keys: Vec<u64> = (0..100_000).collect();
        let index = filled(&keys);
        let displaced: u64 = index.buckets.iter().map(|b| u64::from(b.overflow)).sum();
        assert!(displaced < 30_000, "{displaced} of 100,000 entries passed over a bucket");
        assert!(keys.iter().all(|&key| find(&index, &keys, key).is_some()));
        assert_eq!(find(&index, &keys, 100_000), None);
    }

    #[test]
    fn removing_everything_leaves_no_trace() {
        let keys: Vec<u64> = (0..1_000).map(|i| i * 0x1_0000_0001).collect();
        let mut index = filled(&keys);
        for (row, &key) in keys.iter().enumerate().rev() {
            index.remove(Hash::of(FeatureKey(key)), row as u32);
            assert_eq!(find(&index, &keys, key), None);
        }
        assert_eq!(index.entries, 0);
        assert!(index.buckets.iter().all(|b| b.overflow == 0 && b.tags == [0; WAYS]));
    }

    #[test]
    fn an_empty_index_finds_nothing() {
        let index = Index::for_rows(&Arc::default(), 0);
        assert!(index.is_full());
        assert_eq!(find(&index, &[], 1), None);
        assert_eq!(index.candidate(Hash::of(FeatureKey(1))), None);
    }

    #[test]
    fn a_prefetch_of_a_replaced_index_is_harmless() {
        let address = IndexAddress::default();
        address.prefetch(Hash::of(FeatureKey(1)));
        address.record(&filled(&[1, 2, 3]));
        address.prefetch(Hash::of(FeatureKey(1)));
    }

    #[test]
    fn an_index_costs_less_than_10_bytes_an_entry_after_it_has_grown() {
        let mut index = Index::for_rows(&Arc::default(), 1_000);
        for _ in 0..10 {
            let before = index.capacity();
            index = Index::for_rows(&Arc::default(), index.next_capacity(Hash { position: 16 }));
            let bytes_an_entry = index.bytes() as f64 / before as f64;
            assert!(bytes_an_entry < 9.7, "{bytes_an_entry}");
        }
    }

    /// Fills 1,024 indexes, as a store does, with requests of 8,192 new keys. Counts the rows that
    /// each request indexes again: at 20 ns a row, 50,000 rows take a millisecond.
    #[test]
    fn no_request_waits_for_the_growth_of_many_indexes() {
        let mut indexes = vec![(0_usize, 0_usize); 1_024];
        let mut most = 0;
        for request in 0..1_200_u64 {
            let mut moved = 0;
            for key in request * 8_192..(request + 1) * 8_192 {
                let key = FeatureKey(xxhash_rust::xxh3::xxh3_64(&key.to_le_bytes()));
                let (rows, buckets) = &mut indexes[crate::slot_of(key, 1_024).0 as usize];
                if *rows >= *buckets * FULL {
                    moved += *rows;
                    *buckets = grown(*buckets, Hash::of(key));
                }
                *rows += 1;
            }
            most = most.max(moved);
        }
        let rows: usize = indexes.iter().map(|&(rows, _)| rows).sum();
        assert_eq!(rows, 1_200 * 8_192);
        println!("at most {most} rows are indexed anew for a request of 8,192 new keys");
        assert!(most < 120_000, "{most} rows are indexed anew for one request");
    }

    proptest! {
        /// Few keys in few buckets, so that chains wrap around and cross.
        #[test]
        fn an_index_behaves_as_a_map(
            operations in prop::collection::vec((any::<bool>(), 0_u64..60), 1..400)
        ) {
            let mut index = Index::for_rows(&Arc::default(), 60);
            let mut model = HashMap::new();
            let keys: Vec<u64> = (0..60).collect();
            for (insert, key) in operations {
                let hash = Hash::of(FeatureKey(key));
                if insert && !model.contains_key(&key) {
                    index.insert(hash, key as u32);
                    model.insert(key, key as u32);
                } else if !insert && let Some(row) = model.remove(&key) {
                    index.remove(hash, row);
                }
                for &key in &keys {
                    prop_assert_eq!(find(&index, &keys, key), model.get(&key).copied());
                }
            }
        }
    }
}
