//! Hot rows of one version of a model. A bounded number of keys is kept, with their row or the word
//! that they have none. The clock algorithm (second chance) chooses the key that makes room: one
//! that was not read since the hand passed it. Pure.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use rectrain_serving::KeyRange;
use rectrain_serving::publication::GroupChanges;

/// Keys are hashes already.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

/// The places of keys.
type Places = HashMap<u64, usize, BuildHasherDefault<KeyHasher>>;

/// A key in the cache.
#[derive(Debug, Clone, Copy)]
struct Entry {
    group: usize,
    key: u64,
    has_row: bool,
    /// Read since the hand passed it.
    is_hot: bool,
}

/// See the module documentation.
pub(crate) struct RowCache {
    /// The most keys.
    capacity: usize,
    /// Values of a row, by row group.
    dims: Vec<usize>,
    /// Values of a place: as many as the longest row has.
    stride: usize,
    /// By row group.
    places: Vec<Places>,
    entries: Vec<Entry>,
    /// `[entries, stride]`.
    values: Vec<f32>,
    /// The place that is looked at next for room.
    hand: usize,
}

impl RowCache {
    /// A cache of at most `capacity` keys of rows of these widths.
    pub(crate) fn new(capacity: usize, dims: Vec<usize>) -> Self {
        Self {
            capacity,
            stride: dims.iter().copied().max().unwrap_or(0),
            places: dims.iter().map(|_| Places::default()).collect(),
            dims,
            entries: Vec::new(),
            values: Vec::new(),
            hand: 0,
        }
    }

    /// The number of keys.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Forgets all keys.
    pub(crate) fn clear(&mut self) {
        self.places.iter_mut().for_each(Places::clear);
        self.entries.clear();
        self.values.clear();
        self.hand = 0;
    }

    /// Reads the row of a key into `out`. Whether it has one; `None` if the key is not here.
    pub(crate) fn read(&mut self, group: usize, key: u64, out: &mut [f32]) -> Option<bool> {
        let place = *self.places[group].get(&key)?;
        let entry = &mut self.entries[place];
        entry.is_hot = true;
        if entry.has_row {
            out.copy_from_slice(&self.values[place * self.stride..][..out.len()]);
        }
        Some(entry.has_row)
    }

    /// Adds a key that is not here, with its row if it has one.
    pub(crate) fn insert(&mut self, group: usize, key: u64, row: Option<&[f32]>) {
        if self.capacity == 0 || self.places[group].contains_key(&key) {
            return;
        }
        let entry = Entry { group, key, has_row: row.is_some(), is_hot: false };
        let place = self.room();
        match self.entries.get_mut(place) {
            Some(old) => {
                self.places[old.group].remove(&old.key);
                *old = entry;
            }
            None => {
                self.entries.push(entry);
                self.values.resize(self.entries.len() * self.stride, 0.0);
            }
        }
        self.places[group].insert(key, place);
        if let Some(row) = row {
            self.values[place * self.stride..][..row.len()].copy_from_slice(row);
        }
    }

    /// The place for another key.
    fn room(&mut self) -> usize {
        if self.entries.len() < self.capacity {
            return self.entries.len();
        }
        // After one round no entry is hot.
        loop {
            let place = self.hand;
            self.hand = (self.hand + 1) % self.entries.len();
            let entry = &mut self.entries[place];
            if !std::mem::take(&mut entry.is_hot) {
                return place;
            }
        }
    }

    /// Follows the changes of a delta, by row group. Returns the number of keys that changed. Takes
    /// time in proportion to the keys here, or to the changes if these are fewer.
    pub(crate) fn apply(&mut self, changes: &[GroupChanges]) -> u64 {
        let mut changed = 0;
        for (group, changes) in changes.iter().enumerate().take(self.places.len()) {
            let are_keys = changes.removed.iter().all(|range| range.first == range.last);
            let count = changes.removed.len() + changes.rows.keys().len();
            changed += match are_keys && count < self.places[group].len() {
                true => self.apply_by_change(group, changes),
                false => self.apply_by_key(group, changes),
            };
        }
        changed
    }

    fn apply_by_change(&mut self, group: usize, changes: &GroupChanges) -> u64 {
        let mut changed = 0;
        for range in &changes.removed {
            if let Some(place) = self.places[group].get(&range.first) {
                self.entries[*place].has_row = false;
                changed += 1;
            }
        }
        for (key, row) in changes.rows.rows() {
            if let Some(place) = self.places[group].get(&key) {
                self.entries[*place].has_row = true;
                self.values[*place * self.stride..][..self.dims[group]].copy_from_slice(row);
                changed += 1;
            }
        }
        changed
    }

    fn apply_by_key(&mut self, group: usize, changes: &GroupChanges) -> u64 {
        let mut changed = 0;
        for (key, place) in &self.places[group] {
            if let Some(row) = changes.rows.row(*key) {
                self.entries[*place].has_row = true;
                self.values[*place * self.stride..][..self.dims[group]].copy_from_slice(row);
            } else if is_removed(&changes.removed, *key) {
                self.entries[*place].has_row = false;
            } else {
                continue;
            }
            changed += 1;
        }
        changed
    }
}

/// Whether one of the ranges, which rise and do not overlap, has a key.
fn is_removed(ranges: &[KeyRange], key: u64) -> bool {
    let next = ranges.partition_point(|range| range.last < key);
    ranges.get(next).is_some_and(|range| range.contains(key))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rectrain_random::SplitMix64;
    use rectrain_serving::Table;

    use super::*;

    fn changes(removed: &[(u64, u64)], rows: &[(u64, f32)]) -> GroupChanges {
        let removed = removed.iter().map(|(first, last)| KeyRange { first: *first, last: *last }).collect();
        let (keys, values) = rows.iter().copied().unzip();
        GroupChanges { removed, rows: Table::of(1, keys, values).unwrap() }
    }

    fn read(cache: &mut RowCache, group: usize, key: u64) -> Option<Option<f32>> {
        let mut row = [f32::NAN];
        Some(cache.read(group, key, &mut row)?.then_some(row[0]))
    }

    #[test]
    fn keys_that_are_read_stay_and_others_make_room() {
        let mut cache = RowCache::new(3, vec![1]);
        (1..=3).for_each(|key| cache.insert(0, key, Some(&[key as f32])));
        assert_eq!((read(&mut cache, 0, 1), read(&mut cache, 0, 3)), (Some(Some(1.0)), Some(Some(3.0))));
        cache.insert(0, 4, None);
        assert_eq!([1, 2, 3, 4].map(|key| read(&mut cache, 0, key).is_some()), [true, false, true, true]);
        assert_eq!((cache.len(), read(&mut cache, 0, 4)), (3, Some(None)));
        // All are hot: one of them goes all the same.
        cache.insert(0, 5, Some(&[5.0]));
        assert_eq!((cache.len(), read(&mut cache, 0, 5)), (3, Some(Some(5.0))));
        cache.clear();
        assert_eq!((cache.len(), read(&mut cache, 0, 5)), (0, None));
        let mut none = RowCache::new(0, vec![1]);
        none.insert(0, 1, Some(&[1.0]));
        assert_eq!(none.len(), 0);
    }

    #[test]
    fn row_groups_have_keys_and_widths_of_their_own() {
        let mut cache = RowCache::new(10, vec![1, 3]);
        cache.insert(0, 7, Some(&[1.0]));
        cache.insert(1, 7, Some(&[2.0, 3.0, 4.0]));
        let mut wide = [0.0; 3];
        assert_eq!((read(&mut cache, 0, 7), cache.read(1, 7, &mut wide)), (Some(Some(1.0)), Some(true)));
        assert_eq!(wide, [2.0, 3.0, 4.0]);
    }

    #[test]
    fn a_range_and_a_row_of_a_delta_change_the_keys_that_are_here() {
        // By the keys that are here, and by the changes.
        for removed in [&[(2, 4), (6, 6), (9, 9)][..], &[(2, 2), (4, 4), (6, 6), (9, 9)]] {
            let mut cache = RowCache::new(1000, vec![1]);
            (1..=6).for_each(|key| cache.insert(0, key, Some(&[key as f32])));
            (0..100).for_each(|key| cache.insert(0, 1000 + key, None));
            assert_eq!(cache.apply(&[changes(removed, &[(3, 0.5), (8, 0.25)])]), 4);
            let found = [1, 2, 3, 4, 5, 6, 8].map(|key| read(&mut cache, 0, key));
            let expected =
                [Some(Some(1.0)), Some(None), Some(Some(0.5)), Some(None), Some(Some(5.0)), Some(None), None];
            assert_eq!(found, expected, "{removed:?}");
        }
    }

    /// After random deltas and reads, each key that is here has the row of a map with the same
    /// deltas.
    #[test]
    fn a_cache_that_follows_deltas_reads_as_a_map() {
        const KEYS: u64 = 60;
        let mut random = SplitMix64::of_words(&[7]);
        for capacity in [1, 20, 200] {
            let (mut cache, mut expected) = (RowCache::new(capacity, vec![1]), BTreeMap::<u64, f32>::new());
            let mut hits = 0;
            for round in 0..400_u64 {
                for _ in 0..20 {
                    let key = random.next_u64() % KEYS;
                    match read(&mut cache, 0, key) {
                        Some(found) => {
                            assert_eq!(found, expected.get(&key).copied(), "key {key}, round {round}");
                            hits += 1;
                        }
                        None => {
                            cache.insert(0, key, expected.get(&key).map(|value| [*value]).as_ref().map(|row| &row[..]))
                        }
                    }
                    assert!(cache.len() <= capacity);
                }
                let first = random.next_u64() % KEYS;
                let last = first + if round % 3 == 0 { random.next_u64() % 20 } else { 0 };
                let rows: BTreeMap<u64, f32> =
                    (0..random.next_u64() % 30).map(|_| (random.next_u64() % KEYS, round as f32)).collect();
                let delta = changes(&[(first, last)], &rows.clone().into_iter().collect::<Vec<_>>());
                cache.apply(&[delta]);
                expected.retain(|key, _| !(first..=last).contains(key));
                expected.extend(rows);
            }
            assert!(hits > 50, "{hits} hits");
        }
    }
}
