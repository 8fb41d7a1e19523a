//! Random numbers as pure functions of their purpose. A list of words (seed, epoch, chunk …) seeds
//! a generator. Its numbers are the same on every machine and in every version. It is not for
//! cryptography. The shuffle and the synthetic source use it.

use crate::key::mix;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64 (Steele, Lea, Flood 2014): a counter, mixed.
#[derive(Debug, Clone)]
pub(crate) struct Random(u64);

impl Random {
    /// The generator of these words, in this order.
    pub(crate) fn of(words: &[u64]) -> Self {
        let seed =
            words.iter().fold(GOLDEN, |state, &word| mix(state.wrapping_add(GOLDEN) ^ mix(word.wrapping_add(GOLDEN))));
        Self(seed)
    }

    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// Uniform in [0, 1), 53 bits.
    #[inline]
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
    }

    /// Uniform in [0, bound), without bias (Lemire 2019). `bound` is at least 1.
    #[inline]
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        let mut product = u128::from(self.next()) * u128::from(bound);
        if (product as u64) < bound {
            let threshold = bound.wrapping_neg() % bound;
            while (product as u64) < threshold {
                product = u128::from(self.next()) * u128::from(bound);
            }
        }
        (product >> 64) as u64
    }

    /// Standard normal (Box and Muller).
    #[inline]
    pub(crate) fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

/// The order of the rows of a chunk in an epoch: a permutation of `0..len` (Fisher and Yates) that
/// depends on the arguments only.
pub fn chunk_permutation(seed: u64, epoch: u64, chunk: u64, len: u32) -> Vec<u32> {
    let mut random = Random::of(&[seed, epoch, chunk]);
    let mut order: Vec<u32> = (0..len).collect();
    for last in (1..len).rev() {
        order.swap(last as usize, random.below(u64::from(last) + 1) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_is_a_permutation_by_seed_epoch_and_chunk() {
        for len in [0, 1, 2, 3, 1000] {
            let mut order = chunk_permutation(7, 0, 3, len);
            assert_eq!(order, chunk_permutation(7, 0, 3, len));
            order.sort_unstable();
            assert_eq!(order, (0..len).collect::<Vec<_>>());
        }
        let base = chunk_permutation(7, 0, 3, 1000);
        for other in [(8, 0, 3), (7, 1, 3), (7, 0, 4), (0, 7, 3), (3, 0, 7)] {
            assert_ne!(base, chunk_permutation(other.0, other.1, other.2, 1000));
        }
    }

    #[test]
    fn every_permutation_of_four_is_equally_likely() {
        let mut counts = std::collections::HashMap::new();
        for chunk in 0..24_000 {
            *counts.entry(chunk_permutation(1, 0, chunk, 4)).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 24);
        assert!(counts.values().all(|n| (850..1150).contains(n)), "{counts:?}");
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let mut random = Random::of(&[1]);
        let draws: Vec<f64> = (0..100_000).map(|_| random.normal()).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64;
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }
}
