//! Makes one gradient of the gradients of a full buffer (§4.1, algorithm 2 lines 19–23). Dense
//! parameters: weighted sum / M. Embeddings, key by key: weighted sum / the number of workers that
//! met the key. The staleness of a key's gradients counts from the step at which that key was last
//! updated. The parameter server calls this with the pairs of a [`crate::gba::GradientServer`].

use std::collections::{BTreeSet, HashMap};

use rectrain_kinds::KeyDivisor;

use crate::Token;
use crate::barrier::SparseGradients;
use crate::gba::Decay;
use crate::{GlobalStep, Rank};

/// The dense weighted sum of a buffer. It is added up pair by pair, so a server need not keep M
/// gradients.
#[derive(Clone, Debug, Default)]
pub struct DenseSum {
    sum: Vec<f32>,
    counted: u32,
}

impl DenseSum {
    /// Adds `weight` · `gradient`, and skips a gradient of weight 0. All gradients have the same
    /// length.
    pub fn add(&mut self, weight: f32, gradient: &[f32]) {
        if weight == 0.0 {
            return;
        }
        if self.counted == 0 {
            self.sum.clear();
            self.sum.extend(gradient.iter().map(|g| weight * g));
        } else {
            self.sum.iter_mut().zip(gradient).for_each(|(sum, g)| *sum += weight * g);
        }
        self.counted += 1;
    }

    /// Returns the sum / `divisor` and resets the sum. `None` if every gradient was skipped: the
    /// step then changes no dense parameter.
    pub fn take_mean(&mut self, divisor: u32) -> Option<Vec<f32>> {
        if std::mem::take(&mut self.counted) == 0 {
            return None;
        }
        let mut mean = std::mem::take(&mut self.sum);
        let divisor = divisor.max(1) as f32;
        mean.iter_mut().for_each(|g| *g /= divisor);
        Some(mean)
    }
}

/// Σ weight · gradient / `divisor` over pairs (weight, gradient), in their order. `None` if every
/// weight is 0.
pub fn aggregate_dense<'a>(pairs: impl IntoIterator<Item = (f32, &'a [f32])>, divisor: u32) -> Option<Vec<f32>> {
    let mut sum = DenseSum::default();
    pairs.into_iter().for_each(|(weight, gradient)| sum.add(weight, gradient));
    sum.take_mean(divisor)
}

/// The step at which each key last changed. The store of the rows implements it.
pub trait KeySteps {
    /// The first global step that reads the key's present value: one after the step that last
    /// updated the key. `None` if no step has updated it.
    fn changed(&self, key: u64) -> Option<GlobalStep>;
    /// Records that the step before `step` updates the key.
    fn set_changed(&mut self, key: u64, step: GlobalStep);
}

/// [`KeySteps`] in a separate map.
#[derive(Clone, Debug, Default)]
pub struct LastUpdates {
    by_key: HashMap<u64, GlobalStep>,
}

impl LastUpdates {
    /// Drops keys whose gradients can no longer be stale: those last changed at or before step
    /// `oldest` + `tolerance`. The caller guarantees that no gradient with a token below `oldest`
    /// will arrive. With a decay's [`tolerance`](Decay::tolerance), this changes no weight.
    pub fn forget_settled(&mut self, oldest: Token, tolerance: u64) {
        let limit = GlobalStep(oldest.0.saturating_add(tolerance));
        self.by_key.retain(|_, changed| *changed > limit);
    }

    /// The number of keys in the map.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_key.len()
    }

    /// Whether the map is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }
}

impl KeySteps for LastUpdates {
    fn changed(&self, key: u64) -> Option<GlobalStep> {
        self.by_key.get(&key).copied()
    }

    fn set_changed(&mut self, key: u64, step: GlobalStep) {
        self.by_key.insert(key, step);
    }
}

/// One buffered pair's embedding gradients.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingPair<'a> {
    /// The worker that computed them.
    pub rank: Rank,
    /// The token under which they were computed.
    pub token: Token,
    /// Keys in ascending order, without duplicates; values [keys, dim].
    pub gradients: &'a SparseGradients,
}

/// How embedding gradients are aggregated.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingRule {
    /// Values per row.
    pub dim: usize,
    /// f.
    pub decay: Decay,
    /// The divisor of a key's sum.
    pub divisor: KeyDivisor,
    /// M.
    pub buffer: u32,
}

/// Returns one gradient per key for the update of global step `step`, adding the pairs in their
/// order. A key whose gradients all have weight 0 is left out and does not count as updated. The
/// other keys are recorded in `steps`.
///
/// A key last updated in step j is current for every token from j + 1 on. Its gradients are
/// therefore stale by (j + 1) − τ. A key that every step updates is exactly as stale as the dense
/// parameters, k − τ. A key that no other worker touched meanwhile is not stale at all, however
/// long its worker took.
pub fn aggregate_embeddings(
    pairs: &[EmbeddingPair<'_>],
    rule: EmbeddingRule,
    step: GlobalStep,
    steps: &mut impl KeySteps,
) -> SparseGradients {
    let dim = rule.dim;
    let total = pairs.iter().map(|p| p.gradients.keys.len()).sum();
    let mut result = SparseGradients { keys: Vec::with_capacity(total), values: Vec::with_capacity(total * dim) };
    let mut next = vec![0usize; pairs.len()];
    let mut met = BTreeSet::new();
    let mut sum = DenseSum::default();
    while let Some(key) = pairs.iter().zip(&next).filter_map(|(p, n)| p.gradients.keys.get(*n)).min().copied() {
        let changed = steps.changed(key);
        let mut batches = 0;
        met.clear();
        for (pair, next) in pairs.iter().zip(&mut next) {
            if pair.gradients.keys.get(*next) != Some(&key) {
                continue;
            }
            let read = GlobalStep(pair.token.0);
            sum.add(
                rule.decay.weight(pair.token, changed.unwrap_or(read)),
                &pair.gradients.values[*next * dim..(*next + 1) * dim],
            );
            met.insert(pair.rank);
            batches += 1;
            *next += 1;
        }
        let divisor = match rule.divisor {
            KeyDivisor::Workers => met.len() as u32,
            KeyDivisor::Batches => batches,
            KeyDivisor::Buffer => rule.buffer,
        };
        if let Some(gradient) = sum.take_mean(divisor) {
            result.keys.push(key);
            result.values.extend(gradient);
            steps.set_changed(key, step.next());
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn embedding_sums_equal_a_naive_reference(
            pairs in proptest::collection::vec(
                (0u32..4, 0u64..12, proptest::collection::btree_map(0u64..12, -50i16..50, 0..8)), 1..8),
            changed in proptest::collection::btree_map(0u64..12, 0u64..10, 0..12),
            tolerance in 0u64..6, divisor in 0usize..3,
        ) {
            let divisor = [KeyDivisor::Workers, KeyDivisor::Batches, KeyDivisor::Buffer][divisor];
            let step = GlobalStep(10);
            let gradients: Vec<SparseGradients> = pairs.iter().map(|(_, _, g)| SparseGradients {
                keys: g.keys().copied().collect(), values: g.values().map(|v| f32::from(*v)).collect(),
            }).collect();
            let buffered: Vec<EmbeddingPair<'_>> = pairs.iter().zip(&gradients)
                .map(|((rank, token, _), gradients)| EmbeddingPair { rank: Rank(*rank), token: Token(*token), gradients })
                .collect();
            let mut steps = LastUpdates::default();
            changed.iter().for_each(|(key, step)| steps.set_changed(*key, GlobalStep(*step)));
            let rule = EmbeddingRule { dim: 1, decay: Decay::Threshold { tolerance }, divisor, buffer: pairs.len() as u32 };
            let result = aggregate_embeddings(&buffered, rule, step, &mut steps);
            let mut expected = BTreeMap::new();
            for key in 0..12u64 {
                let met: Vec<_> = pairs.iter().filter(|(_, _, g)| g.contains_key(&key)).collect();
                let kept: Vec<_> = met.iter().filter(|(_, token, _)| changed.get(&key).is_none_or(|c| *c <= token + tolerance)).collect();
                if kept.is_empty() {
                    prop_assert_eq!(steps.changed(key), changed.get(&key).map(|c| GlobalStep(*c)));
                    continue;
                }
                prop_assert_eq!(steps.changed(key), Some(GlobalStep(11)));
                let n = match divisor {
                    KeyDivisor::Workers => met.iter().map(|(rank, ..)| rank).collect::<BTreeSet<_>>().len(),
                    KeyDivisor::Batches => met.len(),
                    KeyDivisor::Buffer => pairs.len(),
                };
                let sum: f32 = kept.iter().map(|(_, _, g)| f32::from(g[&key])).sum();
                expected.insert(key, sum / n as f32);
            }
            prop_assert_eq!(&result.keys, &expected.keys().copied().collect::<Vec<_>>());
            prop_assert_eq!(result.values, expected.into_values().collect::<Vec<_>>());
        }
    }

    #[test]
    fn forgetting_settled_keys_changes_no_weight() {
        let mut steps = LastUpdates::default();
        (0..20).for_each(|key| steps.set_changed(key, GlobalStep(key)));
        let before = steps.clone();
        steps.forget_settled(Token(5), 3);
        assert_eq!(steps.len(), 11);
        let decay = Decay::Threshold { tolerance: 3 };
        for token in 5..20 {
            for key in 0..20 {
                let weight = |s: &LastUpdates| s.changed(key).map_or(1.0, |c| decay.weight(Token(token), c));
                assert_eq!(weight(&before), weight(&steps));
            }
        }
    }
}
