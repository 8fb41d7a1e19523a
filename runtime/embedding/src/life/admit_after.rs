//! A key gets its row at its `count`-th sighting, that is, the `count`-th update with a gradient
//! for it. Until then the key reads as its initial values, and its gradients are dropped and
//! counted. The gradient of the `count`-th sighting is applied to the new row.
//!
//! Keys that are seen fewer times take 12 bytes for a while instead of a row for ever. In Kraken's
//! data many ids occur once (§III-A).
//!
//! A block of the side table has room for 21 counters, by rising key; free ones are 0 and come
//! last:
//!
//! ```text
//! word   0            1        2          3          4 …                  63
//!     ┌────────────┬────────┬─────────┬──────────┬─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┐
//!     │ number of  │ key    │ key     │ sightings│ 20 more counters          
//!     │ the block  │ low    │ high    │ 1 or more│                           
//!     └────────────┴────────┴─────────┴──────────┴─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┘
//! ```
//!
//! Counts are exact while a block has room. When a new key comes to a full block, a counter of the
//! fewest sightings is dropped; of several, the new key's hash draws one. The lost sightings are
//! counted in [`UpdateCounts::forgotten`](crate::UpdateCounts::forgotten). So a key is never
//! admitted early, and late only if sightings were lost.

use super::{Numbers, Refusal, RowLife, Side, SightedKey};
use crate::index::Hash;
use crate::key::key_of;
use crate::log::{NoLog, RowLog};
use crate::side_table::{SideLayout, SideTable};
use crate::{FeatureKey, SpecError};

/// Words of a counter: the key, and its sightings.
const COUNTER_WORDS: usize = 3;
/// Counters of a block, which then has 256 bytes with its number.
const COUNTERS: usize = 21;
const BLOCK_WORDS: usize = COUNTERS * COUNTER_WORDS;
/// The most counters of a group.
const MOST_COUNTERS: u64 = 1 << 34;

/// See the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdmitAfter {
    /// Sightings until a key gets its row, at least 1.
    pub count: u32,
    /// Keys counted at a time in all slots together, `1 ..= 2³⁴`, at 12 bytes each. Rounded up to a
    /// multiple of 21 in each slot. The memory is taken as keys come.
    pub counters: u64,
}

impl AdmitAfter {
    pub(super) fn from_numbers([count, counters, ..]: Numbers) -> Option<Self> {
        Some(Self { count: u32::try_from(count).ok()?, counters })
    }
}

impl RowLife for AdmitAfter {
    const SNAPSHOT_TAG: u8 = 1;
    const USES_ROW_WORD: bool = false;

    fn refusal(self) -> Refusal {
        Refusal::TurnedAway { forgotten: 0 }
    }

    fn numbers(self) -> Numbers {
        [u64::from(self.count), self.counters, 0, 0]
    }

    fn validate(self) -> Result<(), SpecError> {
        let refused = |name, found, expected| Err(SpecError::Life { name, found, expected });
        if self.count == 0 {
            return refused("count", 0, "at least 1");
        }
        if self.counters == 0 || self.counters > MOST_COUNTERS {
            return refused("counters", self.counters, "a number from 1 to 2^34");
        }
        Ok(())
    }

    fn side_layout(self, slots: u32) -> Option<SideLayout> {
        let blocks = self.counters.div_ceil(u64::from(slots) * COUNTERS as u64);
        Some(SideLayout { block_words: BLOCK_WORDS, blocks: blocks as u32 })
    }

    #[inline(always)]
    fn admits_at_look_up(self) -> bool {
        false
    }

    fn sighted(
        self,
        SightedKey { key, hash, .. }: SightedKey,
        side: &mut Side<'_, impl RowLog>,
    ) -> Result<(), Refusal> {
        let earlier = side.read(hash).map_or(0, |block| sightings(block, key));
        if earlier.saturating_add(1) >= self.count {
            return Ok(());
        }
        let forgotten = side.change(hash, |block| count(block, key, hash));
        Err(Refusal::TurnedAway { forgotten: forgotten.unwrap_or(0) })
    }

    fn admitted(self, SightedKey { key, hash, .. }: SightedKey, side: &mut Side<'_, impl RowLog>) {
        if side.read(hash).is_some_and(|block| sightings(block, key) > 0) {
            side.change(hash, |block| forget(block, key));
        }
    }

    fn is_block(self, words: &[u32], owns: impl Fn(FeatureKey) -> bool) -> bool {
        let used = len(words);
        let counters = (0..used).all(|counter| {
            let (key, sightings) = (key_at(words, counter), sightings_at(words, counter));
            let rises = counter == 0 || key_at(words, counter - 1) < key;
            rises && sightings < self.count && owns(key)
        });
        counters && words[used * COUNTER_WORDS..].iter().all(|&word| word == 0)
    }

    fn reopened(self, side: &mut SideTable, has_row: impl Fn(FeatureKey) -> bool) {
        let counted = side.blocks().flat_map(|block| (0..len(block)).map(|counter| key_at(block, counter)));
        let admitted: Vec<FeatureKey> = counted.filter(|&key| has_row(key)).collect();
        for key in admitted {
            side.change(Hash::of(key), &mut NoLog, |block| forget(block, key));
        }
    }
}

/// Counters of a block that are in use.
fn len(block: &[u32]) -> usize {
    (0..COUNTERS).take_while(|&counter| sightings_at(block, counter) > 0).count()
}

fn key_at(block: &[u32], counter: usize) -> FeatureKey {
    key_of(&block[counter * COUNTER_WORDS..])
}

fn sightings_at(block: &[u32], counter: usize) -> u32 {
    block[counter * COUNTER_WORDS + 2]
}

/// The counter of a key, or the position at which it belongs.
fn find(block: &[u32], key: FeatureKey) -> Result<usize, usize> {
    let used = len(block);
    let position = (0..used).find(|&counter| key_at(block, counter) >= key).unwrap_or(used);
    if position < used && key_at(block, position) == key { Ok(position) } else { Err(position) }
}

/// Sightings of a key that are counted.
fn sightings(block: &[u32], key: FeatureKey) -> u32 {
    find(block, key).map_or(0, |counter| sightings_at(block, counter))
}

/// Counts a sighting of a key. Returns the sightings of another key that were forgotten.
fn count(block: &mut [u32], key: FeatureKey, hash: Hash) -> u32 {
    let mut forgotten = 0;
    let position = match find(block, key) {
        Ok(counter) => {
            block[counter * COUNTER_WORDS + 2] += 1;
            return 0;
        }
        Err(_) if len(block) == COUNTERS => {
            let dropped = least_seen(block, hash);
            forgotten = sightings_at(block, dropped);
            remove(block, dropped);
            find(block, key).unwrap_or_else(|position| position)
        }
        Err(position) => position,
    };
    let (start, used) = (position * COUNTER_WORDS, len(block) * COUNTER_WORDS);
    block.copy_within(start..used, start + COUNTER_WORDS);
    block[start..start + COUNTER_WORDS].copy_from_slice(&[key.0 as u32, (key.0 >> 32) as u32, 1]);
    forgotten
}

/// One of the counters of the fewest sightings, as the hash draws it.
fn least_seen(block: &[u32], hash: Hash) -> usize {
    let fewest = (0..COUNTERS).map(|counter| sightings_at(block, counter)).min();
    let mut least: Vec<usize> = Vec::with_capacity(COUNTERS);
    least.extend((0..COUNTERS).filter(|&counter| Some(sightings_at(block, counter)) == fewest));
    least[hash.remainder(least.len())]
}

/// Removes the counter of a key, if there is one.
fn forget(block: &mut [u32], key: FeatureKey) {
    if let Ok(counter) = find(block, key) {
        remove(block, counter);
    }
}

fn remove(block: &mut [u32], counter: usize) {
    let start = counter * COUNTER_WORDS;
    block.copy_within(start + COUNTER_WORDS.., start);
    block[BLOCK_WORDS - COUNTER_WORDS..].fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn counters(block: &[u32]) -> BTreeMap<u64, u32> {
        (0..len(block)).map(|counter| (key_at(block, counter).0, sightings_at(block, counter))).collect()
    }

    proptest! {
        #[test]
        fn a_block_counts_as_a_map_and_forgets_the_least_seen(
            operations in prop::collection::vec((prop::bool::weighted(0.9), 0_u64..30), 1..300)
        ) {
            let mut block = vec![0; BLOCK_WORDS];
            let mut model: BTreeMap<u64, u32> = BTreeMap::new();
            for (sighted, number) in operations {
                let key = FeatureKey(number << 60 | number);
                if !sighted {
                    forget(&mut block, key);
                    model.remove(&key.0);
                    continue;
                }
                let forgotten = count(&mut block, key, Hash::of(key));
                if model.len() == COUNTERS && !model.contains_key(&key.0) {
                    prop_assert_eq!(Some(&forgotten), model.values().min());
                    let gone: Vec<u64> =
                        model.keys().copied().filter(|other| !counters(&block).contains_key(other)).collect();
                    prop_assert_eq!(gone.len(), 1);
                    prop_assert_eq!(model.remove(&gone[0]), Some(forgotten));
                } else {
                    prop_assert_eq!(forgotten, 0);
                }
                *model.entry(key.0).or_default() += 1;
                prop_assert_eq!(sightings(&block, key), model[&key.0]);
                prop_assert_eq!(&counters(&block), &model);
                let life = AdmitAfter { count: u32::MAX, counters: 1 };
                prop_assert!(life.is_block(&block, |_| true));
            }
        }
    }

    #[test]
    fn equal_counts_are_equal_blocks_whatever_their_history() {
        let (mut first, mut second) = (vec![0; BLOCK_WORDS], vec![0; BLOCK_WORDS]);
        let keys = [5, 1, 3].map(FeatureKey);
        for key in keys {
            count(&mut first, key, Hash::of(key));
        }
        for key in [9, 3, 1, 5].map(FeatureKey) {
            count(&mut second, key, Hash::of(key));
        }
        forget(&mut second, FeatureKey(9));
        assert_eq!(first, second);
    }

    #[test]
    fn words_that_are_no_counters_are_no_block() {
        let life = AdmitAfter { count: 3, counters: 1 };
        let mut block = vec![0; BLOCK_WORDS];
        assert!(life.is_block(&block, |_| false), "an empty block");
        for key in [1, 2, 3] {
            count(&mut block, FeatureKey(key), Hash::of(FeatureKey(key)));
        }
        assert!(life.is_block(&block, |_| true));
        assert!(!life.is_block(&block, |key| key != FeatureKey(2)), "a key of another block");
        let changed = |at: usize, word: u32| {
            let mut block = block.clone();
            block[at] = word;
            life.is_block(&block, |_| true)
        };
        assert!(!changed(2, 3), "a key of 3 sightings has its row");
        assert!(!changed(0, 2), "a key that repeats");
        assert!(!changed(2, 0), "a gap");
        assert!(!changed(BLOCK_WORDS - 1, 1), "a counter after free ones");
    }
}
