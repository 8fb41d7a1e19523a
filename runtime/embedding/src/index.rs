//! The map from key to row number of one table. It holds no keys, only one tag byte and one row
//! number an entry; its caller compares the key in the row. It knows nothing of rows beyond their
//! numbers, so it can be thrown away and rebuilt from them.
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
//! 2. An entry lies on its key's path: the key's home bucket and those after it, cyclically. `overflow`
//!    counts the entries that passed over this bucket because it was full when they came. A search
//!    that meets a bucket with overflow 0 is done. Removal counts back, so there are no tombstones.
//! 3. At most 10 of 12 entries are taken on average. A table that would go beyond grows by half:
//!    6.4 to 9.6 bytes a row once it is larger than a few buckets.
//! 4. Of an index that grows, keys whose home among the `earlier` buckets lies below `unmoved` have the
//!    path that they had before it grew, cyclic in those buckets; all others have their new one.
//!
//! Growing never stops the world. Buckets lie in pages that are never copied once they are full, and
//! after new pages are added the homes move over one after another, from the last to the first: an
//! entry's new home is never before its old one, so everything stays in one array. Each insertion
//! takes one step ([`Index::insert`]), which adds a page or moves the entries of one home, 10 on
//! average. So an index of n buckets has grown after little more than n insertions, before the last homes
//! to move, which take in new entries meanwhile, hold more than 11 of 12.
//!
//! The home bucket comes from the whole key, mixed again: keys of one slot share their top bits.

use crate::arena::{Arena, Blocks};
use crate::{FeatureKey, prefetch};
use bytemuck::{Pod, Zeroable};
use std::sync::Arc;

const WAYS: usize = 12;
/// Entries a bucket may hold on average before the table grows.
const FULL: usize = 10;
/// Buckets of a page, 4 KiB.
const PAGE: usize = 64;
/// An index of so many buckets or fewer has one page of just as many.
const MOST_SINGLE: usize = 48;

/// The two things a search needs of a key: where it starts and what it looks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hash {
    position: u64,
    tag: u8,
}

impl Hash {
    pub(crate) fn of(key: FeatureKey) -> Self {
        const MULTIPLIER: u64 = 0x9fb2_1c65_1e98_df25;
        const OFFSET: u64 = 0xd6e8_feb8_6659_fd93;
        let product = u128::from(key.0 ^ OFFSET) * u128::from(MULTIPLIER);
        let position = (product >> 64) as u64 ^ product as u64;
        Self { position, tag: (position as u8).max(1) }
    }
}

#[derive(Clone, Copy, Pod, Zeroable)]
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

    /// The entries that are taken, lowest first.
    fn taken(&self) -> impl Iterator<Item = usize> {
        (0..WAYS).filter(|&entry| self.tags[entry] != 0)
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

/// Where a search for a key begins, and after how many buckets it goes on with the first.
#[derive(Clone, Copy)]
struct Path {
    bucket: usize,
    buckets: usize,
}

impl Path {
    fn advance(&mut self) {
        self.bucket = if self.bucket + 1 == self.buckets { 0 } else { self.bucket + 1 };
    }
}

/// What growing needs of the rows that an index names.
pub(crate) trait Rows {
    fn hash(&self, row: u32) -> Hash;
    /// Asks for what [`Self::hash`] reads to be brought near.
    fn prefetch(&self, row: u32);
}

/// See the module's text.
pub(crate) struct Index {
    pages: Blocks<Bucket>,
    buckets: usize,
    /// Buckets before the index began to grow.
    earlier: usize,
    /// Homes that have not moved over; 0 unless the index grows.
    unmoved: usize,
    entries: usize,
}

impl Index {
    /// An index that takes `rows` entries without growing.
    pub(crate) fn for_rows(memory: &Arc<Arena>, rows: usize) -> Self {
        let buckets = rows.div_ceil(FULL);
        let buckets = if buckets > MOST_SINGLE { buckets.next_multiple_of(PAGE) } else { buckets };
        let mut index = Self { pages: Blocks::new(memory), buckets, earlier: 0, unmoved: 0, entries: 0 };
        while index.held() < buckets {
            index.add_page();
        }
        index
    }

    /// Entries after which it must grow.
    pub(crate) fn capacity(&self) -> usize {
        self.buckets * FULL
    }

    pub(crate) fn bytes(&self) -> usize {
        self.pages.bytes()
    }

    /// Buckets that have memory.
    fn held(&self) -> usize {
        match self.pages.len() {
            0 => 0,
            1 => self.pages[0].len(),
            several => several * PAGE,
        }
    }

    /// Adds memory for at most [`PAGE`] of the buckets that have none.
    fn add_page(&mut self) {
        let buckets = self.buckets.min(PAGE);
        if self.pages.len() == 1 && self.pages[0].len() < PAGE {
            self.pages.replace_only(buckets);
        } else {
            self.pages.push(buckets);
        }
    }

    #[inline]
    fn bucket(&self, bucket: usize) -> &Bucket {
        &self.pages[bucket / PAGE][bucket % PAGE]
    }

    #[inline]
    fn bucket_mut(&mut self, bucket: usize) -> &mut Bucket {
        &mut self.pages[bucket / PAGE][bucket % PAGE]
    }

    /// The path of a key; of no use in an index without buckets.
    #[inline]
    fn path(&self, hash: Hash) -> Path {
        if self.unmoved > 0 {
            let bucket = home(hash, self.earlier);
            if bucket < self.unmoved {
                return Path { bucket, buckets: self.earlier };
            }
        }
        Path { bucket: home(hash, self.buckets), buckets: self.buckets }
    }

    /// Asks for the home bucket to be brought near.
    #[inline]
    pub(crate) fn prefetch(&self, hash: Hash) {
        if self.buckets > 0 {
            prefetch::value(self.bucket(self.path(hash).bucket));
        }
    }

    /// A row that is probably the key's: the first with its tag in its home bucket.
    #[inline]
    pub(crate) fn candidate(&self, hash: Hash) -> Option<u32> {
        if self.buckets == 0 {
            return None;
        }
        let bucket = self.bucket(self.path(hash).bucket);
        bucket.matches(hash.tag).next().map(|entry| bucket.rows[entry])
    }

    /// The row of a key: the one with its tag of which `is_it` is true.
    #[inline]
    pub(crate) fn find(&self, hash: Hash, is_it: impl Fn(u32) -> bool) -> Option<u32> {
        let mut path = self.path(hash);
        for _ in 0..self.buckets {
            let bucket = self.bucket(path.bucket);
            for entry in bucket.matches(hash.tag) {
                if is_it(bucket.rows[entry]) {
                    return Some(bucket.rows[entry]);
                }
            }
            if bucket.overflow == 0 {
                return None;
            }
            path.advance();
        }
        None
    }

    /// Adds an entry, after a step of growing if one is due. The key must be absent, and `rows` know
    /// all rows named so far.
    pub(crate) fn insert(&mut self, hash: Hash, row: u32, rows: &impl Rows) {
        if self.entries >= self.capacity() {
            self.finish_growing(rows);
            self.begin_growing();
        }
        if self.unmoved > 0 {
            self.step(rows);
        }
        if !self.place(hash, row) {
            // The keys crowd on the few buckets of a path that has not moved over.
            self.finish_growing(rows);
            self.place(hash, row);
        }
        self.entries += 1;
    }

    /// Puts an entry into the first bucket of its key's path that is not full. `false`, and no change,
    /// if all are.
    fn place(&mut self, hash: Hash, row: u32) -> bool {
        let mut path = self.path(hash);
        for _ in 0..path.buckets {
            let bucket = self.bucket_mut(path.bucket);
            if let Some(entry) = bucket.matches(0).next() {
                bucket.tags[entry] = hash.tag;
                bucket.rows[entry] = row;
                return true;
            }
            bucket.overflow += 1;
            path.advance();
        }
        for bucket in 0..path.buckets {
            self.bucket_mut(bucket).overflow -= 1;
        }
        false
    }

    /// Takes out the entry of a key and its row, which must be present.
    pub(crate) fn remove(&mut self, hash: Hash, row: u32) {
        self.take(hash, row);
        self.entries -= 1;
    }

    fn take(&mut self, hash: Hash, row: u32) {
        let mut path = self.path(hash);
        for _ in 0..self.buckets {
            let bucket = self.bucket_mut(path.bucket);
            let found = bucket.matches(hash.tag).find(|&entry| bucket.rows[entry] == row);
            if let Some(entry) = found {
                bucket.tags[entry] = 0;
                return;
            }
            bucket.overflow -= 1;
            path.advance();
        }
        debug_assert!(false, "only present entries are taken out");
    }

    fn begin_growing(&mut self) {
        self.earlier = self.buckets;
        self.unmoved = self.buckets;
        self.buckets = grown(self.buckets);
        if self.earlier == 0 {
            self.add_page();
        }
    }

    fn finish_growing(&mut self, rows: &impl Rows) {
        while self.unmoved > 0 {
            self.step(rows);
        }
    }

    /// One step of growing: adds a page, or moves the entries of one home over.
    fn step(&mut self, rows: &impl Rows) {
        if self.held() < self.buckets {
            self.add_page();
            return;
        }
        let home = self.unmoved - 1;
        let moving = self.entries_of(home, rows);
        for &(hash, row) in &moving {
            self.take(hash, row);
        }
        self.unmoved = home;
        for (hash, row) in moving {
            self.place(hash, row);
        }
        if let Some(next) = home.checked_sub(1) {
            let bucket = self.bucket(next);
            bucket.taken().for_each(|entry| rows.prefetch(bucket.rows[entry]));
        }
    }

    /// The entries whose home is this one of the earlier buckets.
    fn entries_of(&self, home: usize, rows: &impl Rows) -> Vec<(Hash, u32)> {
        let mut found = Vec::with_capacity(2 * WAYS);
        let mut path = Path { bucket: home, buckets: self.earlier };
        for _ in 0..self.earlier {
            let bucket = self.bucket(path.bucket);
            for entry in bucket.taken() {
                let hash = rows.hash(bucket.rows[entry]);
                if self::home(hash, self.earlier) == home {
                    found.push((hash, bucket.rows[entry]));
                }
            }
            if bucket.overflow == 0 {
                break;
            }
            path.advance();
        }
        found
    }
}

/// The bucket of `buckets` at which a key's path begins: those of rising positions rise.
#[inline]
fn home(hash: Hash, buckets: usize) -> usize {
    ((u128::from(hash.position) * buckets as u128) >> 64) as usize
}

/// The number of buckets to grow to: half as many again, in whole pages where there are several.
fn grown(buckets: usize) -> usize {
    let wanted = (buckets + buckets.div_ceil(2)).max(1);
    if wanted <= MOST_SINGLE { wanted } else { (wanted / PAGE).max(buckets / PAGE + 1) * PAGE }
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

    /// Rows of which row i has key `self.0[i]`.
    struct Keys<'k>(&'k [u64]);

    impl Rows for Keys<'_> {
        fn hash(&self, row: u32) -> Hash {
            Hash::of(FeatureKey(self.0[row as usize]))
        }

        fn prefetch(&self, _: u32) {}
    }

    fn empty(rows: usize) -> Index {
        Index::for_rows(&Arc::default(), rows)
    }

    fn filled(keys: &[u64]) -> Index {
        let mut index = empty(keys.len());
        for (row, &key) in keys.iter().enumerate() {
            index.insert(Hash::of(FeatureKey(key)), row as u32, &Keys(keys));
        }
        index
    }

    fn buckets(index: &Index) -> impl Iterator<Item = &Bucket> {
        (0..index.pages.len()).flat_map(|page| &index.pages[page])
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
        let displaced: u64 = buckets(&index).map(|b| u64::from(b.overflow)).sum();
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
        assert!(buckets(&index).all(|b| b.overflow == 0 && b.tags == [0; WAYS]));
    }

    #[test]
    fn an_empty_index_finds_nothing() {
        let index = empty(0);
        assert_eq!(find(&index, &[], 1), None);
        assert_eq!(index.candidate(Hash::of(FeatureKey(1))), None);
        index.prefetch(Hash::of(FeatureKey(1)));
    }

    #[test]
    fn an_index_costs_less_than_10_bytes_an_entry_after_it_has_grown() {
        let mut buckets = 1;
        for _ in 0..30 {
            let (before, after) = (buckets, grown(buckets));
            let bytes_an_entry = (after * size_of::<Bucket>()) as f64 / (before * FULL) as f64;
            assert!(before <= 128 || bytes_an_entry < 9.7, "{bytes_an_entry} with {after} buckets after {before}");
            let (steps, room) = (before + (after - before).div_ceil(PAGE), (after - before) * FULL);
            assert!(steps <= room, "{steps} steps from {before} buckets to {after}, and room for {room} entries");
            buckets = after;
        }
    }

    /// The rows that each insertion asks for the hash of, which is what moving them over costs.
    struct Counted<'k> {
        keys: &'k [u64],
        hashed: std::cell::Cell<usize>,
    }

    impl Rows for Counted<'_> {
        fn hash(&self, row: u32) -> Hash {
            self.hashed.set(self.hashed.get() + 1);
            Hash::of(FeatureKey(self.keys[row as usize]))
        }

        fn prefetch(&self, _: u32) {}
    }

    #[test]
    fn no_insertion_moves_more_than_a_few_rows_however_large_the_index_is() {
        let keys: Vec<u64> = (0..300_000).collect();
        let mut index = empty(0);
        let mut growths = 0;
        let (mut all, mut most, mut most_pages) = (0, 0, 0);
        for (row, &key) in keys.iter().enumerate() {
            let rows = Counted { keys: &keys, hashed: 0.into() };
            let (growing, pages) = (index.unmoved > 0, index.pages.len());
            index.insert(Hash::of(FeatureKey(key)), row as u32, &rows);
            growths += usize::from(index.unmoved > 0 && !growing);
            all += rows.hashed.get();
            most = most.max(rows.hashed.get());
            most_pages = most_pages.max(index.pages.len() - pages);
        }
        println!("{growths} growths, at most {most} rows an insertion, {} on average", all / keys.len());
        assert!(growths > 20, "{growths} growths");
        assert!(most <= 100 * WAYS, "{most} rows read by one insertion");
        assert_eq!(most_pages, 1);
        assert!(all <= 5 * keys.len(), "{all} rows read in all");
        assert!((0..keys.len()).all(|row| find(&index, &keys, keys[row]) == Some(row as u32)));
    }

    proptest! {
        /// Few keys in few buckets, so that chains wrap around and cross.
        #[test]
        fn an_index_behaves_as_a_map(
            operations in prop::collection::vec((any::<bool>(), 0_u64..60), 1..400),
            room in prop::sample::select(vec![0_usize, 15, 60]),
        ) {
            let mut index = empty(room);
            let mut model = HashMap::new();
            let keys: Vec<u64> = (0..60).collect();
            for (insert, key) in operations {
                let hash = Hash::of(FeatureKey(key));
                if insert && !model.contains_key(&key) {
                    index.insert(hash, key as u32, &Keys(&keys));
                    model.insert(key, key as u32);
                } else if !insert && let Some(row) = model.remove(&key) {
                    index.remove(hash, row);
                }
                for &key in &keys {
                    prop_assert_eq!(find(&index, &keys, key), model.get(&key).copied());
                }
            }
        }

        /// Enough keys for several growths, of several pages; what is found is looked at while they are under way.
        #[test]
        fn an_index_that_grows_loses_nothing(
            operations in prop::collection::vec((prop::bool::weighted(0.8), any::<prop::sample::Index>()), 500..4_000),
        ) {
            let keys: Vec<u64> = (0..operations.len() as u64).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
            let mut index = empty(0);
            let mut present = Vec::new();
            for (row, (insert, pick)) in operations.into_iter().enumerate() {
                if insert || present.is_empty() {
                    index.insert(Hash::of(FeatureKey(keys[row])), row as u32, &Keys(&keys));
                    present.push(row);
                } else {
                    let row = present.swap_remove(pick.index(present.len()));
                    index.remove(Hash::of(FeatureKey(keys[row])), row as u32);
                    prop_assert_eq!(find(&index, &keys, keys[row]), None);
                }
                if row % 97 == 0 {
                    for &row in &present {
                        prop_assert_eq!(find(&index, &keys, keys[row]), Some(row as u32));
                    }
                }
            }
            for &row in &present {
                prop_assert_eq!(find(&index, &keys, keys[row]), Some(row as u32));
                index.remove(Hash::of(FeatureKey(keys[row])), row as u32);
            }
            prop_assert!(buckets(&index).all(|b| b.overflow == 0 && b.tags == [0; WAYS]));
        }
    }
}
