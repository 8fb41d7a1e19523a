//! Sums the ranks' sparse gradients of one step into one update. A key that several ranks met is
//! updated once, as if one worker had trained the whole global batch. The parameter server calls
//! this with the contributions of a [`crate::barrier::StepGate`].

/// Gradients of some rows of one group.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SparseGradients {
    /// In ascending order, without duplicates.
    pub keys: Vec<u64>,
    /// Shape [keys, dim].
    pub values: Vec<f32>,
}

/// The sum of `contributions` by key, added in their order. The result does not depend on how keys
/// are spread over servers.
#[must_use]
pub fn sum_by_key(mut contributions: Vec<SparseGradients>, dim: usize) -> SparseGradients {
    if contributions.len() <= 1 {
        return contributions.pop().unwrap_or_default();
    }
    let total = contributions.iter().map(|c| c.keys.len()).sum();
    let mut sum = SparseGradients { keys: Vec::with_capacity(total), values: Vec::with_capacity(total * dim) };
    let mut next = vec![0usize; contributions.len()];
    while let Some(key) = contributions.iter().zip(&next).filter_map(|(c, n)| c.keys.get(*n)).min().copied() {
        let start = sum.values.len();
        for (contribution, next) in contributions.iter().zip(&mut next) {
            if contribution.keys.get(*next) != Some(&key) {
                continue;
            }
            let row = &contribution.values[*next * dim..(*next + 1) * dim];
            if sum.values.len() == start {
                sum.values.extend_from_slice(row);
            } else {
                sum.values[start..].iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
            }
            *next += 1;
        }
        sum.keys.push(key);
    }
    sum
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equals_a_map_of_sums(
            ranks in proptest::collection::vec(proptest::collection::btree_map(0u64..30, -100i16..100, 0..20), 1..5),
        ) {
            let dim = 2;
            let contributions = ranks.iter().map(|rank| SparseGradients {
                keys: rank.keys().copied().collect(),
                values: rank.values().flat_map(|v| [f32::from(*v), f32::from(*v) * 0.5]).collect(),
            }).collect();
            let mut expected: BTreeMap<u64, f32> = BTreeMap::new();
            for rank in &ranks {
                for (key, value) in rank {
                    *expected.entry(*key).or_default() += f32::from(*value);
                }
            }
            let sum = sum_by_key(contributions, dim);
            prop_assert_eq!(&sum.keys, &expected.keys().copied().collect::<Vec<_>>());
            prop_assert_eq!(sum.values, expected.values().flat_map(|v| [*v, *v * 0.5]).collect::<Vec<_>>());
        }
    }
}
