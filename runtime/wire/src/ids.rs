//! The lossless id encoding of Persia §4.2.3: the ids of one feature of a batch as unique keys and,
//! for each key, the samples it occurs in. A key travels once however often it occurs, and a sample
//! index takes two bytes instead of the id's eight. In batches of more than 65,536 samples an index
//! takes four bytes: no index is ever cut off. Embedding workers and loaders are the callers.

use std::ops::Range;

use crate::error::WireError;
use crate::tensor::{Tensor, TensorData};

/// The most samples whose indices (0..=65,535) fit a `u16`.
pub const MAX_U16_SAMPLES: usize = 1 << 16;

/// The ids of one feature of a batch.
///
/// Invariants, checked on receipt:
///
/// - `starts` has one element more than `keys`, begins with 0, grows strictly, and ends with the
///   number of `samples`.
/// - Each sample index is below `sample_count`, and the indices of one key do not descend.
///
/// The keys are in the order in which they first appear.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UniqueIds {
    keys: Vec<u64>,
    starts: Vec<u32>,
    samples: SampleIndices,
    sample_count: u32,
}

/// Sample indices as narrow as the batch allows: `U16` up to [`MAX_U16_SAMPLES`] samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SampleIndices {
    U16(Vec<u16>),
    U32(Vec<u32>),
}

impl SampleIndices {
    /// The number of occurrences.
    pub fn len(&self) -> usize {
        match self {
            Self::U16(indices) => indices.len(),
            Self::U32(indices) => indices.len(),
        }
    }

    /// True if no id occurs.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sample of occurrence `i`. Panics if there are not that many.
    pub fn at(&self, i: usize) -> usize {
        match self {
            Self::U16(indices) => indices[i].into(),
            Self::U32(indices) => indices[i] as usize,
        }
    }
}

/// Memory that [`UniqueIds::from_column`] reuses from one column to the next: a hash table, and the
/// index of the unique key of each occurrence.
#[derive(Default)]
pub struct Scratch {
    table: Vec<Entry>,
    /// Entries with another stamp belong to earlier columns and count as empty.
    stamp: u32,
    uniques: Vec<u32>,
}

#[derive(Clone, Copy, Default)]
struct Entry {
    key: u64,
    unique: u32,
    stamp: u32,
}

impl Scratch {
    /// Empties the table and makes it at least twice as large as the number of keys.
    fn prepare(&mut self, keys: usize) {
        let size = (2 * keys).next_power_of_two().max(16);
        if self.table.len() < size {
            self.table = vec![Entry::default(); size];
            self.stamp = 0;
        }
        self.stamp = self.stamp.wrapping_add(1);
        if self.stamp == 0 {
            self.table.fill(Entry::default());
            self.stamp = 1;
        }
    }

    /// The index of a key: `next` if the key is new. There is always an empty entry.
    #[inline]
    fn number(&mut self, key: u64, next: u32) -> u32 {
        let mask = self.table.len() - 1;
        let mut at = mixed(key) & mask;
        loop {
            let entry = &mut self.table[at];
            if entry.stamp != self.stamp {
                *entry = Entry { key, unique: next, stamp: self.stamp };
                return next;
            }
            if entry.key == key {
                return entry.unique;
            }
            at = (at + 1) & mask;
        }
    }
}

/// Spreads keys that differ in only a few bits over the table.
#[inline]
fn mixed(key: u64) -> usize {
    let product = u128::from(key ^ 0x9e37_79b9_7f4a_7c15).wrapping_mul(0xd6e8_feb8_6659_fd93_a076_1d64_78bd_642f);
    ((product >> 64) as u64 ^ product as u64) as usize
}

impl UniqueIds {
    /// Groups the ids of a column by key.
    ///
    /// `keys` holds the ids of sample 0, then the ids of sample 1, and so on. Without `offsets`
    /// each of the `samples` samples has exactly one id. With `offsets`, of length `samples + 1`,
    /// sample `i` has `keys[offsets[i]..offsets[i + 1]]`. An id that occurs several times in a
    /// sample is kept as often.
    ///
    /// # Errors
    /// Lengths that do not match, offsets that descend, more than `u32::MAX` samples or keys.
    pub fn from_column(
        keys: &[u64],
        offsets: Option<&[u32]>,
        samples: usize,
        scratch: &mut Scratch,
    ) -> Result<Self, WireError> {
        check_column(keys.len(), offsets, samples)?;
        let (unique_keys, mut starts) = count(keys, scratch);
        let mut total = 0;
        for start in &mut starts {
            total += std::mem::replace(start, total);
        }
        let samples_by_key = if samples <= MAX_U16_SAMPLES {
            SampleIndices::U16(place(&scratch.uniques, offsets, &mut starts, |i| i as u16))
        } else {
            SampleIndices::U32(place(&scratch.uniques, offsets, &mut starts, |i| i as u32))
        };
        Ok(Self { keys: unique_keys, starts, samples: samples_by_key, sample_count: samples as u32 })
    }

    /// The unique keys, in the order in which they first appear.
    pub fn keys(&self) -> &[u64] {
        &self.keys
    }

    /// Where the occurrences of key `k` begin and end in [`UniqueIds::samples`]: at `starts[k]`
    /// and `starts[k + 1]`.
    pub fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// The sample of each occurrence, grouped by key.
    pub fn samples(&self) -> &SampleIndices {
        &self.samples
    }

    /// The number of samples of the batch.
    pub fn sample_count(&self) -> usize {
        self.sample_count as usize
    }

    /// The keys, each with the samples it occurs in.
    pub fn iter(&self) -> impl Iterator<Item = (u64, impl Iterator<Item = usize>)> {
        self.keys.iter().zip(self.starts.windows(2)).map(|(key, range)| {
            let range = range[0] as usize..range[1] as usize;
            (*key, range.map(|i| self.samples.at(i)))
        })
    }

    /// The ids at the positions that `keeps` chooses, with all their occurrences. Positions count
    /// the keys.
    #[must_use]
    pub fn keeping(&self, mut keeps: impl FnMut(usize) -> bool) -> Self {
        let (mut keys, mut starts, mut ranges) = (Vec::new(), vec![0], Vec::new());
        let mut total = 0;
        for (position, (key, bounds)) in self.keys.iter().zip(self.starts.windows(2)).enumerate() {
            if keeps(position) {
                keys.push(*key);
                total += bounds[1] - bounds[0];
                starts.push(total);
                ranges.push(bounds[0] as usize..bounds[1] as usize);
            }
        }
        let samples = match &self.samples {
            SampleIndices::U16(indices) => SampleIndices::U16(concatenated(indices, &ranges)),
            SampleIndices::U32(indices) => SampleIndices::U32(concatenated(indices, &ranges)),
        };
        Self { keys, starts, samples, sample_count: self.sample_count }
    }

    /// Three tensors: keys (`U64`), starts (`U32`), samples (`U16` or `U32`). The caller sends the
    /// number of samples with the batch.
    pub fn into_tensors(self) -> [Tensor; 3] {
        let samples = match self.samples {
            SampleIndices::U16(indices) => Tensor::from(indices),
            SampleIndices::U32(indices) => Tensor::from(indices),
        };
        [Tensor::from(self.keys), Tensor::from(self.starts), samples]
    }

    /// Reads the tensors of [`UniqueIds::into_tensors`] for a batch of `sample_count` samples.
    ///
    /// # Errors
    /// A violated invariant of the type. The keys are not checked for uniqueness (see
    /// [`UniqueIds::check_unique`]). Two-byte indices of a batch that needs four are refused,
    /// because an index that the sender cut off would look valid.
    pub fn from_tensors(tensors: [Tensor; 3], sample_count: u32) -> Result<Self, WireError> {
        let [keys, starts, samples] = tensors;
        let keys = keys.expect_u64("unique keys")?;
        let starts = starts.expect_u32("starts of unique keys")?;
        let samples = match samples.into_data() {
            TensorData::U16(indices) if sample_count as usize <= MAX_U16_SAMPLES => SampleIndices::U16(indices),
            TensorData::U32(indices) => SampleIndices::U32(indices),
            other => {
                let expected = format!("indices wide enough for {sample_count} samples");
                return Err(invalid("sample indices", expected, format!("{:?}", other.dtype())));
            }
        };
        check_starts(&keys, &starts, samples.len())?;
        match &samples {
            SampleIndices::U16(indices) => check_samples(&starts, indices, sample_count)?,
            SampleIndices::U32(indices) => check_samples(&starts, indices, sample_count)?,
        }
        Ok(Self { keys, starts, samples, sample_count })
    }

    /// Checks that no key occurs twice: its update would be applied twice. Costs one hash look-up
    /// per key.
    pub fn check_unique(&self, scratch: &mut Scratch) -> Result<(), WireError> {
        scratch.prepare(self.keys.len());
        for (i, key) in self.keys.iter().enumerate() {
            let first = scratch.number(*key, i as u32);
            if first != i as u32 {
                let found = format!("{key} at {first} and at {i}");
                return Err(invalid("unique keys", "each key once".into(), found));
            }
        }
        Ok(())
    }
}

/// The values of all ranges, one after the other.
fn concatenated<T: Copy>(values: &[T], ranges: &[Range<usize>]) -> Vec<T> {
    ranges.iter().flat_map(|range| values[range.clone()].iter().copied()).collect()
}

/// The unique keys, and how often each occurs, with a 0 at the end. Leaves the index of each
/// occurrence's unique key in the scratch.
fn count(keys: &[u64], scratch: &mut Scratch) -> (Vec<u64>, Vec<u32>) {
    scratch.prepare(keys.len());
    let mut uniques = std::mem::take(&mut scratch.uniques);
    uniques.clear();
    let (mut unique_keys, mut counts) = (Vec::new(), Vec::<u32>::new());
    for key in keys {
        let next = unique_keys.len() as u32;
        let unique = scratch.number(*key, next);
        if unique == next {
            unique_keys.push(*key);
            counts.push(0);
        }
        counts[unique as usize] += 1;
        uniques.push(unique);
    }
    counts.push(0);
    scratch.uniques = uniques;
    (unique_keys, counts)
}

/// Puts each occurrence's sample behind the earlier ones of its key (a counting sort). It uses
/// `starts` as cursors and restores them.
fn place<T: Copy + Default>(
    uniques: &[u32],
    offsets: Option<&[u32]>,
    starts: &mut [u32],
    index: impl Fn(usize) -> T,
) -> Vec<T> {
    let mut samples = vec![T::default(); uniques.len()];
    let mut put = |unique: u32, sample: usize| {
        let cursor = &mut starts[unique as usize];
        samples[*cursor as usize] = index(sample);
        *cursor += 1;
    };
    match offsets {
        None => uniques.iter().enumerate().for_each(|(sample, unique)| put(*unique, sample)),
        Some(offsets) => {
            for (sample, range) in offsets.windows(2).enumerate() {
                let occurrences = &uniques[range[0] as usize..range[1] as usize];
                occurrences.iter().for_each(|unique| put(*unique, sample));
            }
        }
    }
    // Each cursor has reached the start of the next key.
    starts.copy_within(..starts.len() - 1, 1);
    starts[0] = 0;
    samples
}

fn check_column(keys: usize, offsets: Option<&[u32]>, samples: usize) -> Result<(), WireError> {
    if keys > u32::MAX as usize || samples > u32::MAX as usize {
        let expected = format!("at most {} keys and samples", u32::MAX);
        return Err(invalid("column", expected, format!("{keys} keys of {samples} samples")));
    }
    match offsets {
        None if keys == samples => Ok(()),
        None => {
            let expected = format!("one key for each of {samples} samples");
            Err(invalid("column", expected, format!("{keys} keys")))
        }
        Some(offsets) => {
            let right = offsets.len() == samples + 1
                && offsets.first() == Some(&0)
                && offsets.last().is_some_and(|last| *last as usize == keys)
                && offsets.is_sorted();
            if right {
                return Ok(());
            }
            let expected = format!("{} offsets that rise from 0 to {keys}", samples + 1);
            let (first, last) = (offsets.first(), offsets.last());
            let found = format!("{} from {first:?} to {last:?}", offsets.len());
            Err(invalid("offsets of a column", expected, found))
        }
    }
}

fn check_starts(keys: &[u64], starts: &[u32], occurrences: usize) -> Result<(), WireError> {
    let right = starts.len() == keys.len() + 1
        && starts[0] == 0
        && starts[keys.len()] as usize == occurrences
        && starts.is_sorted_by(|a, b| a < b);
    if right {
        return Ok(());
    }
    let expected =
        format!("{} numbers that grow from 0 to {occurrences}, the number of sample indices", keys.len() + 1);
    let (first, last) = (starts.first(), starts.last());
    let found = format!("{} from {first:?} to {last:?}", starts.len());
    Err(invalid("starts of unique keys", expected, found))
}

fn check_samples<T: Copy + Into<u32>>(starts: &[u32], samples: &[T], sample_count: u32) -> Result<(), WireError> {
    let most = samples.iter().map(|sample| (*sample).into()).max().unwrap_or(0);
    if !samples.is_empty() && most >= sample_count {
        let expected = format!("indices below {sample_count}");
        return Err(invalid("sample indices", expected, most.to_string()));
    }
    for range in starts.windows(2) {
        let of_key = &samples[range[0] as usize..range[1] as usize];
        if !of_key.is_sorted_by(|a, b| (*a).into() <= (*b).into()) {
            let expected = "indices of one key that do not descend".to_owned();
            return Err(invalid("sample indices", expected, format!("descending indices at {range:?}")));
        }
    }
    Ok(())
}

fn invalid(name: &str, expected: String, found: String) -> WireError {
    WireError::Tensor { name: name.to_owned(), expected, found }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use half::f16;
    use proptest::prelude::*;

    use super::*;

    /// (key, its samples) in order of first appearance, computed the slow way.
    fn naive(keys: &[u64], offsets: Option<&[u32]>) -> Vec<(u64, Vec<usize>)> {
        let mut order = Vec::new();
        let mut samples = BTreeMap::<u64, Vec<usize>>::new();
        for (i, key) in keys.iter().enumerate() {
            let sample = match offsets {
                None => i,
                Some(offsets) => offsets.iter().filter(|o| **o as usize <= i).count() - 1,
            };
            if !samples.contains_key(key) {
                order.push(*key);
            }
            samples.entry(*key).or_default().push(sample);
        }
        order.into_iter().map(|key| (key, samples.remove(&key).unwrap())).collect()
    }

    fn collected(ids: &UniqueIds) -> Vec<(u64, Vec<usize>)> {
        ids.iter().map(|(key, samples)| (key, samples.collect())).collect()
    }

    fn column() -> impl Strategy<Value = (Vec<u64>, Vec<u32>)> {
        let key = prop_oneof![0u64..20, any::<u64>(), Just(0), Just(u64::MAX)];
        prop::collection::vec(prop::collection::vec(key, 0..5), 0..60).prop_map(|samples| {
            let mut offsets = vec![0];
            offsets.extend(samples.iter().scan(0, |sum, keys| {
                *sum += keys.len() as u32;
                Some(*sum)
            }));
            (samples.concat(), offsets)
        })
    }

    proptest! {
        #[test]
        fn the_fast_way_agrees_with_the_slow_way(columns in prop::collection::vec(column(), 1..4)) {
            let mut scratch = Scratch::default();
            for (keys, offsets) in &columns {
                let multi = UniqueIds::from_column(keys, Some(offsets), offsets.len() - 1, &mut scratch).unwrap();
                prop_assert_eq!(collected(&multi), naive(keys, Some(offsets)));
                let single = UniqueIds::from_column(keys, None, keys.len(), &mut scratch).unwrap();
                prop_assert_eq!(collected(&single), naive(keys, None));
                single.check_unique(&mut scratch).unwrap();
                let back = UniqueIds::from_tensors(multi.clone().into_tensors(), multi.sample_count).unwrap();
                prop_assert_eq!(back, multi);
            }
        }

        #[test]
        fn tensors_of_any_content_are_refused_or_valid(
            keys in prop::collection::vec(any::<u64>(), 0..5),
            starts in prop::collection::vec(0u32..6, 0..7),
            samples in prop::collection::vec(0u16..8, 0..6),
            sample_count in 0u32..8,
        ) {
            let tensors = [keys.into(), starts.into(), samples.into()];
            if let Ok(ids) = UniqueIds::from_tensors(tensors, sample_count) {
                for (_, samples) in ids.iter() {
                    let samples: Vec<_> = samples.collect();
                    prop_assert!(!samples.is_empty());
                    prop_assert!(samples.iter().all(|sample| *sample < ids.sample_count()));
                }
            }
        }
    }

    #[test]
    fn the_last_sample_of_a_large_batch_keeps_its_index() {
        let mut scratch = Scratch::default();
        for samples in [65_535usize, 65_536, 65_537, 200_000] {
            let keys: Vec<u64> = (0..samples as u64).map(|i| i % 1000).collect();
            let ids = UniqueIds::from_column(&keys, None, samples, &mut scratch).unwrap();
            assert_eq!(matches!(ids.samples, SampleIndices::U16(_)), samples <= 65_536);
            let mut seen = vec![false; samples];
            for (key, of_key) in ids.iter() {
                for sample in of_key {
                    assert_eq!(keys[sample], key);
                    assert!(!std::mem::replace(&mut seen[sample], true));
                }
            }
            assert!(seen.iter().all(|seen| *seen), "{samples} samples");
            let back = UniqueIds::from_tensors(ids.clone().into_tensors(), samples as u32);
            assert_eq!(back.unwrap(), ids);
        }
    }

    #[test]
    fn narrow_indices_of_a_batch_too_large_for_them_are_refused() {
        let tensors = || [vec![1u64].into(), vec![0u32, 1].into(), vec![7u16].into()];
        assert!(UniqueIds::from_tensors(tensors(), 65_536).is_ok());
        let message = UniqueIds::from_tensors(tensors(), 65_537).unwrap_err().to_string();
        assert!(message.contains("wide enough for 65537 samples"), "{message}");
    }

    #[test]
    fn a_violated_invariant_is_refused() {
        let refused = |keys: Vec<u64>, starts: Vec<u32>, samples: Tensor| {
            UniqueIds::from_tensors([keys.into(), starts.into(), samples], 4).unwrap_err();
        };
        refused(vec![1, 2], vec![0, 1], vec![0u16].into());
        refused(vec![1, 2], vec![1, 1, 2], vec![0u16, 1].into());
        refused(vec![1, 2], vec![0, 2, 2], vec![0u16, 1].into());
        refused(vec![1, 2], vec![0, 2, 1], vec![0u16].into());
        refused(vec![1, 2], vec![0, 1, 3], vec![0u16, 1].into());
        refused(vec![1], vec![0, 1], vec![4u16].into());
        refused(vec![1], vec![0, 1], vec![4u32].into());
        refused(vec![1], vec![0, 2], vec![3u16, 1].into());
        refused(vec![1], vec![0, 1], vec![0.0f32].into());
        refused(vec![1], vec![0, 1], vec![f16::ZERO].into());
        refused(vec![], vec![], Vec::<u16>::new().into());
        let twice =
            UniqueIds::from_tensors([vec![5u64, 6, 5].into(), vec![0u32, 1, 2, 3].into(), vec![0u16, 1, 2].into()], 4);
        twice.unwrap().check_unique(&mut Scratch::default()).unwrap_err();
    }

    #[test]
    fn a_column_whose_lengths_do_not_fit_is_refused() {
        let mut scratch = Scratch::default();
        let mut refused = |offsets: Option<&[u32]>, samples| {
            UniqueIds::from_column(&[1, 2, 3], offsets, samples, &mut scratch).unwrap_err();
        };
        refused(None, 2);
        refused(Some(&[0, 3]), 2);
        refused(Some(&[0, 1]), 1);
        refused(Some(&[1, 3]), 1);
        refused(Some(&[0, 2, 1, 3]), 3);
        refused(Some(&[]), 0);
    }

    #[test]
    fn chosen_ids_keep_their_order_and_all_their_occurrences() {
        let keys = [9u64, 4, 9, 7, 4, 9, 1];
        let ids = UniqueIds::from_column(&keys, Some(&[0, 3, 3, 7]), 3, &mut Scratch::default()).unwrap();
        for bits in 0..16 {
            let keeps = |position: usize| (bits >> position) & 1 == 1;
            let whole = collected(&ids).into_iter().enumerate();
            let expected: Vec<_> = whole.filter(|(at, _)| keeps(*at)).map(|(_, id)| id).collect();
            let chosen = ids.keeping(keeps);
            assert_eq!(collected(&chosen), expected);
            assert_eq!(UniqueIds::from_tensors(chosen.clone().into_tensors(), 3).unwrap(), chosen);
        }
    }

    #[test]
    fn a_wrapped_stamp_empties_the_scratch() {
        let mut scratch = Scratch::default();
        UniqueIds::from_column(&[7, 7], None, 2, &mut scratch).unwrap();
        scratch.stamp = u32::MAX;
        let ids = UniqueIds::from_column(&[8, 7], None, 2, &mut scratch).unwrap();
        assert_eq!(ids.keys(), [8, 7]);
    }
}
