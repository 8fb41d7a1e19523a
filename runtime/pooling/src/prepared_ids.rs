//! Turns the ids of a batch into pooled embeddings, and gradients of the embeddings into gradients
//! of rows. This is pure arithmetic. The embedding worker calls it, and in `des` the parameter
//! server.
//!
//! [`PreparedIds`] holds one piece of a batch. For each row group it has the keys to look up,
//! ascending and without duplicates. Ascending keys mean ascending slots, so a parameter server's
//! share is a few runs of keys. For each feature it has the rows that each sample pools.
//!
//! Additions follow the order of a feature's unique ids, which depends on the batch alone. Results
//! therefore do not depend on the number of embedding workers, parameter servers or threads.

use rectrain_embedding::Examples;
use rectrain_kinds::Pooling;
use rectrain_protocol::layout::{FeatureLayout, FeaturePlace, Pooled};
use rectrain_protocol::unseen::LookUps;
use rectrain_wire::ids::{SampleIndices, UniqueIds};

/// A sample is a positive example if its label is at least this number.
const POSITIVE: f32 = 0.5;
/// Columns of a row that are added at once.
const BLOCK: usize = 8;

/// The ids of a feature, with the weights of its samples.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightedIds {
    /// The ids with their samples.
    pub unique: UniqueIds,
    /// The weight of the rows of each sample, `[samples]`. `None` if every weight is 1.
    pub weights: Option<Vec<f32>>,
}

#[derive(Debug)]
pub(crate) struct FeatureIds {
    pub(crate) unique: UniqueIds,
    /// The row of each unique id, as an index into the group's keys.
    pub(crate) rows: Vec<u32>,
    /// The weight of the rows of each sample. `None` if every weight is 1.
    pub(crate) weights: Option<Vec<f32>>,
}

/// See the module documentation.
#[derive(Debug)]
pub struct PreparedIds {
    samples: usize,
    keys: Vec<Vec<u64>>,
    pub(crate) features: Vec<FeatureIds>,
}

impl PreparedIds {
    /// Prepares a piece of `samples` samples. `unique` has one entry a feature, in the order of
    /// `layout.features`.
    #[must_use]
    pub fn new(samples: usize, unique: Vec<UniqueIds>, layout: &FeatureLayout) -> Self {
        let weighted = |(unique, place): (UniqueIds, &FeaturePlace)| WeightedIds {
            weights: weights(&unique, samples, place.pooling),
            unique,
        };
        Self::weighted(samples, unique.into_iter().zip(&layout.features).map(weighted).collect(), layout)
    }

    /// As [`Self::new`], with the weights of each feature's samples. The ids may be a part of the
    /// piece's ids, whose weights count all values of a sample.
    #[must_use]
    pub fn weighted(samples: usize, ids: Vec<WeightedIds>, layout: &FeatureLayout) -> Self {
        let mut order: Vec<Vec<(u64, u32, u32)>> = vec![Vec::new(); layout.group_dims.len()];
        for (index, (ids, place)) in ids.iter().zip(&layout.features).enumerate() {
            let group = &mut order[place.group];
            group.extend(ids.unique.keys().iter().enumerate().map(|(i, key)| (*key, index as u32, i as u32)));
        }
        let mut features: Vec<FeatureIds> = ids
            .into_iter()
            .map(|WeightedIds { unique, weights }| FeatureIds { rows: vec![0; unique.keys().len()], weights, unique })
            .collect();
        let keys = order.into_iter().map(|group| rank_keys(group, &mut features)).collect();
        Self { samples, keys, features }
    }

    /// The number of samples of the piece.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.samples
    }

    /// The keys to look up by group: ascending, without duplicates.
    #[must_use]
    pub fn keys(&self) -> &[Vec<u64>] {
        &self.keys
    }

    /// Counts the look-ups of each feature, and those without a row. `missing[g][k]` tells whether
    /// key k of group g has no row.
    #[must_use]
    pub fn count_unseen(&self, missing: &[Vec<bool>], layout: &FeatureLayout) -> Vec<LookUps> {
        let count = |(feature, place): (&FeatureIds, &FeaturePlace)| {
            let mut look_ups = LookUps::default();
            for (bounds, row) in feature.unique.starts().windows(2).zip(&feature.rows) {
                let ids = u64::from(bounds[1] - bounds[0]);
                let is_missing = missing[place.group][*row as usize];
                look_ups += LookUps { ids, unseen: if is_missing { ids } else { 0 } };
            }
            look_ups
        };
        self.features.iter().zip(&layout.features).map(count).collect()
    }

    /// Counts the positive and negative examples of each key by the samples' labels, for the groups
    /// that `counted` names. The other groups get empty lists. A value that a cell repeats counts
    /// once. A key that two features of a sample share counts for each of them.
    #[must_use]
    pub fn examples(&self, labels: &[f32], counted: &[bool], layout: &FeatureLayout) -> Vec<Vec<Examples>> {
        let none =
            |(keys, counted): (&Vec<u64>, &bool)| vec![Examples::default(); if *counted { keys.len() } else { 0 }];
        let mut examples: Vec<Vec<Examples>> = self.keys.iter().zip(counted).map(none).collect();
        let features = self.features.iter().zip(&layout.features).filter(|(_, place)| counted[place.group]);
        for (feature, place) in features {
            let group = &mut examples[place.group];
            let mut last = None;
            // The samples of a key do not descend, so repetitions are neighbours.
            feature.for_each(|row, sample, _| {
                if last.replace((row, sample)) == Some((row, sample)) {
                    return;
                }
                match labels[sample] >= POSITIVE {
                    true => group[row].positive += 1,
                    false => group[row].negative += 1,
                }
            });
        }
        examples
    }

    /// Pools looked-up rows. `rows[g]` is `[keys of group g, row dim of g]`.
    #[must_use]
    pub fn pool(&self, rows: &[Vec<f32>], layout: &FeatureLayout) -> Pooled {
        self.pool_groups(rows, layout, |_group| true)
    }

    /// [`Self::pool`] of the features whose row groups are `chosen`. The columns of the others are
    /// 0, and their rows may be absent.
    pub(crate) fn pool_groups(
        &self,
        rows: &[Vec<f32>],
        layout: &FeatureLayout,
        chosen: impl Fn(usize) -> bool,
    ) -> Pooled {
        let width = layout.embedding_width;
        let count = layout.features.len();
        let mut embeddings = vec![0.0; self.samples * width];
        let mut linear = vec![0.0; if layout.linear { self.samples * count } else { 0 }];
        let features = self.features.iter().zip(&layout.features).enumerate();
        for (index, (feature, place)) in features.filter(|(_, (_, place))| chosen(place.group)) {
            let (row_dim, first) = (layout.group_dims[place.group], layout.first_embedding_column());
            feature.for_each(|row, sample, weight| {
                let row = &rows[place.group][row * row_dim..(row + 1) * row_dim];
                let out = &mut embeddings[sample * width + place.offset..][..place.dim];
                add_weighted(out, &row[first..][..place.dim], weight);
                if layout.linear {
                    linear[sample * count + index] += weight * row[0];
                }
            });
        }
        Pooled { embeddings, linear }
    }

    /// The transpose of [`Self::pool`]: turns gradients of pooled embeddings into gradients of the
    /// rows. Each group's result is `[keys, row dim]`.
    #[must_use]
    pub fn scatter(&self, gradients: &Pooled, layout: &FeatureLayout) -> Vec<Vec<f32>> {
        self.scatter_groups(gradients, layout, |_group| true)
    }

    /// [`Self::scatter`] to the rows of the `chosen` groups. The others get none.
    pub(crate) fn scatter_groups(
        &self,
        gradients: &Pooled,
        layout: &FeatureLayout,
        chosen: impl Fn(usize) -> bool,
    ) -> Vec<Vec<f32>> {
        let width = layout.embedding_width;
        let count = layout.features.len();
        let rows = |(group, (keys, dim)): (usize, (&Vec<u64>, &usize))| {
            if chosen(group) { vec![0.0; keys.len() * dim] } else { Vec::new() }
        };
        let mut rows: Vec<Vec<f32>> = self.keys.iter().zip(&layout.group_dims).enumerate().map(rows).collect();
        let features = self.features.iter().zip(&layout.features).enumerate();
        for (index, (feature, place)) in features.filter(|(_, (_, place))| chosen(place.group)) {
            let (row_dim, first) = (layout.group_dims[place.group], layout.first_embedding_column());
            let group = &mut rows[place.group];
            feature.for_each(|row, sample, weight| {
                let row = &mut group[row * row_dim..(row + 1) * row_dim];
                let gradient = &gradients.embeddings[sample * width + place.offset..][..place.dim];
                add_weighted(&mut row[first..][..place.dim], gradient, weight);
                if layout.linear {
                    row[0] += weight * gradients.linear[sample * count + index];
                }
            });
        }
        rows
    }
}

impl FeatureIds {
    /// Calls `f(row, sample, weight)` for every occurrence, unique id by unique id.
    #[inline]
    pub(crate) fn for_each(&self, f: impl FnMut(usize, usize, f32)) {
        match self.unique.samples() {
            SampleIndices::U16(samples) => self.for_each_in(samples, f),
            SampleIndices::U32(samples) => self.for_each_in(samples, f),
        }
    }

    #[inline]
    fn for_each_in<I: Copy + Into<u32>>(&self, samples: &[I], mut f: impl FnMut(usize, usize, f32)) {
        for (bounds, row) in self.unique.starts().windows(2).zip(&self.rows) {
            for sample in &samples[bounds[0] as usize..bounds[1] as usize] {
                let sample = (*sample).into() as usize;
                f(*row as usize, sample, self.weights.as_ref().map_or(1.0, |weights| weights[sample]));
            }
        }
    }
}

/// `sums += weight · values`, for slices of the same length. The compiler knows the length of a
/// block, so a short row needs no loop for a remainder.
#[inline]
fn add_weighted(sums: &mut [f32], values: &[f32], weight: f32) {
    let (sum_blocks, sums) = sums.as_chunks_mut::<BLOCK>();
    let (value_blocks, values) = values.as_chunks::<BLOCK>();
    for (sums, values) in sum_blocks.iter_mut().zip(value_blocks) {
        *sums = std::array::from_fn(|index| sums[index] + weight * values[index]);
    }
    sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * value);
}

/// Sorts a group's (key, feature, unique id) triples by key and returns the distinct keys. Also
/// sets the rows of each feature's ids.
fn rank_keys(mut group: Vec<(u64, u32, u32)>, features: &mut [FeatureIds]) -> Vec<u64> {
    group.sort_unstable();
    let mut keys: Vec<u64> = Vec::with_capacity(group.len());
    for (key, feature, id) in group {
        if keys.last() != Some(&key) {
            keys.push(key);
        }
        features[feature as usize].rows[id as usize] = (keys.len() - 1) as u32;
    }
    keys
}

/// The weight of each sample: 1/n or 1/√n for a sample with n values. `None` if every weight is 1.
fn weights(unique: &UniqueIds, samples: usize, pooling: Pooling) -> Option<Vec<f32>> {
    if pooling == Pooling::Sum {
        return None;
    }
    let mut counts = vec![0u32; samples];
    match unique.samples() {
        SampleIndices::U16(indices) => indices.iter().for_each(|s| counts[*s as usize] += 1),
        SampleIndices::U32(indices) => indices.iter().for_each(|s| counts[*s as usize] += 1),
    }
    if counts.iter().all(|count| *count <= 1) {
        return None;
    }
    let weight = |count: u32| match pooling {
        Pooling::Sum => 1.0,
        Pooling::Mean => 1.0 / count.max(1) as f32,
        Pooling::SqrtN => 1.0 / (count.max(1) as f32).sqrt(),
    };
    Some(counts.into_iter().map(weight).collect())
}

#[cfg(test)]
mod tests {
    use rectrain_kinds::Pooling;
    use rectrain_protocol::layout::{FeatureLayout, Pooled};
    use rectrain_wire::ids::Scratch;

    use rectrain_protocol::layout::FeaturePlace;

    use super::*;

    /// Three features over four samples. The first two are in one group and share keys. The last
    /// two have samples with several values.
    fn example() -> (FeatureLayout, Vec<Vec<Vec<u64>>>) {
        let place = |group, dim, offset, pooling| FeaturePlace { group, dim, offset, pooling };
        let layout = FeatureLayout {
            features: vec![place(0, 2, 0, Pooling::Sum), place(0, 2, 2, Pooling::Mean), place(1, 3, 4, Pooling::SqrtN)],
            group_dims: vec![3, 4],
            linear: true,
            embedding_width: 7,
        };
        let values = vec![
            vec![vec![50], vec![7], vec![50], vec![9]],
            vec![vec![7, 50, 7], vec![], vec![3], vec![9, 3]],
            vec![vec![1], vec![2, 1], vec![], vec![8, 2, 1, 4]],
        ];
        (layout, values)
    }

    fn prepare(layout: &FeatureLayout, values: &[Vec<Vec<u64>>]) -> PreparedIds {
        let unique = values
            .iter()
            .map(|samples| {
                let keys: Vec<u64> = samples.concat();
                let offsets: Vec<u32> =
                    (0..=samples.len()).map(|n| samples[..n].iter().map(Vec::len).sum::<usize>() as u32).collect();
                UniqueIds::from_column(&keys, Some(&offsets), samples.len(), &mut Scratch::default()).unwrap()
            })
            .collect();
        PreparedIds::new(values[0].len(), unique, layout)
    }

    fn scale(pooling: Pooling, n: usize) -> f32 {
        match pooling {
            Pooling::Sum => 1.0,
            Pooling::Mean => 1.0 / n as f32,
            Pooling::SqrtN => 1.0 / (n as f32).sqrt(),
        }
    }

    /// A row's value as a function of its key, exact in f32.
    fn value(key: u64, column: usize) -> f32 {
        (key * 8 + column as u64) as f32
    }

    #[test]
    fn pooling_equals_the_definition_sample_by_sample() {
        let (layout, values) = example();
        let prepared = prepare(&layout, &values);
        assert_eq!(prepared.keys(), &[vec![3, 7, 9, 50], vec![1, 2, 4, 8]]);
        let rows: Vec<Vec<f32>> = prepared
            .keys()
            .iter()
            .zip(&layout.group_dims)
            .map(|(keys, dim)| keys.iter().flat_map(|key| (0..*dim).map(|c| value(*key, c))).collect())
            .collect();
        let pooled = prepared.pool(&rows, &layout);
        for (f, (place, values)) in layout.features.iter().zip(&values).enumerate() {
            for (sample, ids) in values.iter().enumerate() {
                let scale = scale(place.pooling, ids.len().max(1));
                let sum = |column| ids.iter().map(|key| value(*key, column)).sum::<f32>() * scale;
                for column in 0..place.dim {
                    let found = pooled.embeddings[sample * 7 + place.offset + column];
                    assert!((found - sum(column + 1)).abs() <= 1e-5 * found.abs());
                }
                let found = pooled.linear[sample * 3 + f];
                assert!((found - sum(0)).abs() <= 1e-5 * found.abs());
            }
        }
    }

    #[test]
    fn look_ups_without_a_row_count_for_each_sample_and_value() {
        let (layout, values) = example();
        let prepared = prepare(&layout, &values);
        let unseen = [vec![7, 50], vec![1, 8]];
        let missing: Vec<Vec<bool>> = prepared
            .keys()
            .iter()
            .zip(&unseen)
            .map(|(keys, unseen)| keys.iter().map(|key| unseen.contains(key)).collect())
            .collect();
        let naive: Vec<LookUps> = values
            .iter()
            .zip(&layout.features)
            .map(|(samples, place)| {
                let ids = samples.concat();
                let without_row = ids.iter().filter(|id| unseen[place.group].contains(id)).count();
                LookUps { ids: ids.len() as u64, unseen: without_row as u64 }
            })
            .collect();
        assert_eq!(naive[1], LookUps { ids: 6, unseen: 3 });
        assert_eq!(prepared.count_unseen(&missing, &layout), naive);
    }

    #[test]
    fn the_examples_of_a_key_are_the_samples_that_have_it() {
        let (layout, values) = example();
        let prepared = prepare(&layout, &values);
        let labels = [1.0, 0.0, 0.5, 0.25];
        let examples = prepared.examples(&labels, &[true, false], &layout);
        let naive = |key: u64| {
            let has = |feature: usize, sample: usize| u32::from(values[feature][sample].contains(&key));
            let count =
                |samples: [usize; 2]| -> u32 { samples.map(|sample| has(0, sample) + has(1, sample)).iter().sum() };
            (count([0, 2]), count([1, 3]))
        };
        let found: Vec<(u32, u32)> = examples[0].iter().map(|of_key| (of_key.positive, of_key.negative)).collect();
        assert_eq!(found, prepared.keys()[0].iter().map(|key| naive(*key)).collect::<Vec<_>>());
        // The first sample's cell `7, 50, 7` is one example of 7.
        assert_eq!((found[1], examples[1].len()), ((1, 1), 0));
    }

    #[test]
    fn adding_by_blocks_has_the_bits_of_adding_one_by_one() {
        for length in 0..40 {
            let values = |from: usize| (from..from + length).map(|i| (i as f32).sin() / 3.0).collect::<Vec<f32>>();
            for weight in [1.0, 1.0 / 3.0] {
                let mut sums = values(7);
                add_weighted(&mut sums, &values(100), weight);
                let expected = values(7).into_iter().zip(values(100)).map(|(sum, value)| sum + weight * value);
                let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
                assert_eq!(bits(sums), bits(expected.collect()), "{length} columns");
            }
        }
    }

    /// ⟨pool(rows), gradient⟩ = ⟨rows, scatter(gradient)⟩: scatter is the transpose of pool.
    #[test]
    fn scatter_is_the_transpose_of_pool() {
        let (layout, values) = example();
        let prepared = prepare(&layout, &values);
        let wave = |i: usize| ((i * 37 % 17) as f32 - 8.0) / 8.0;
        let rows: Vec<Vec<f32>> = prepared
            .keys()
            .iter()
            .zip(&layout.group_dims)
            .map(|(keys, dim)| (0..keys.len() * dim).map(wave).collect())
            .collect();
        let pooled = prepared.pool(&rows, &layout);
        let gradients = Pooled {
            embeddings: (0..pooled.embeddings.len()).map(|i| wave(i + 5)).collect(),
            linear: (0..pooled.linear.len()).map(|i| wave(i + 11)).collect(),
        };
        let scattered = prepared.scatter(&gradients, &layout);
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let forward = dot(&pooled.embeddings, &gradients.embeddings) + dot(&pooled.linear, &gradients.linear);
        let backward: f64 = rows.iter().zip(&scattered).map(|(a, b)| dot(a, b)).sum();
        assert!((forward - backward).abs() < 1e-4, "{forward} {backward}");
    }
}
