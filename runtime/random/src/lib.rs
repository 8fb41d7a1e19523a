//! One generator of random numbers for every crate: SplitMix64 (Steele, Lea, Flood: "Fast
//! splittable pseudorandom number generators", OOPSLA 2014).
//!
//! Its numbers are the same on every machine and in every version. Initial embedding rows, shuffles
//! and dropout masks depend on that, because a restarted process must compute them again. It is not
//! for cryptography.

/// 2^64 / golden ratio: the increment of the generator's counter.
pub const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// The generator's finalizer (Stafford's variant 13). It is a bijection of the 64-bit integers, in
/// which every input bit changes about half of the output bits.
#[inline]
#[must_use]
pub const fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A number in [0, 1), a multiple of 2^-53, from 64 random bits.
#[inline]
#[must_use]
pub const fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1_u64 << 53) as f64)
}

/// The generator: a counter, mixed. [`Self::nth`] reads any number of its sequence without a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// The generator with this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The generator with a list of words as its seed, such as a seed, an epoch and a chunk. Their
    /// order counts.
    #[must_use]
    pub fn of_words(words: &[u64]) -> Self {
        Self(
            words
                .iter()
                .fold(INCREMENT, |state, &word| mix(state.wrapping_add(INCREMENT) ^ mix(word.wrapping_add(INCREMENT)))),
        )
    }

    /// The number at this index of the sequence that starts here: `nth(0)` is the next one.
    #[inline]
    #[must_use]
    pub const fn nth(self, index: u64) -> u64 {
        mix(self.0.wrapping_add(index.wrapping_add(1).wrapping_mul(INCREMENT)))
    }

    /// The next 64 random bits.
    #[inline]
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(INCREMENT);
        mix(self.0)
    }

    /// Uniform in [0, 1), a multiple of 2^-53.
    #[inline]
    pub const fn unit(&mut self) -> f64 {
        unit(self.next_u64())
    }

    /// Uniform in (0, 1], a multiple of 2^-53. Its logarithm is finite.
    #[inline]
    pub const fn positive_unit(&mut self) -> f64 {
        ((self.next_u64() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Uniform in [0, bound), without bias (Lemire 2019). `bound` is at least 1.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        let mut product = u128::from(self.next_u64()) * u128::from(bound);
        if (product as u64) < bound {
            let threshold = bound.wrapping_neg() % bound;
            while (product as u64) < threshold {
                product = u128::from(self.next_u64()) * u128::from(bound);
            }
        }
        (product >> 64) as u64
    }

    /// A number in [0, bound) by the remainder of a division; 0 if `bound` is 0. The bias is below
    /// bound / 2^64. Tests and trials use it; their recorded seeds depend on it.
    #[inline]
    pub const fn remainder(&mut self, bound: u64) -> u64 {
        let bits = self.next_u64();
        if bound == 0 { 0 } else { bits % bound }
    }

    /// Standard normal (Box and Muller 1958).
    #[inline]
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Exponential with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -self.positive_unit().ln() * mean
    }

    /// Pareto with this shape and the minimum 1.
    pub fn pareto(&mut self, shape: f64) -> f64 {
        self.positive_unit().powf(-1.0 / shape)
    }
}

impl Iterator for SplitMix64 {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        Some(self.next_u64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_the_published_one() {
        let first: Vec<u64> = SplitMix64::new(1_234_567).take(5).collect();
        let published = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(first, published);
        assert_eq!(mix(INCREMENT), 0xe220_a839_7b1d_cdaf, "the first output of seed 0");
    }

    #[test]
    fn nth_reads_the_sequence_without_changing_it() {
        let start = SplitMix64::new(9);
        for (index, value) in start.take(100).enumerate() {
            assert_eq!(start.nth(index as u64), value);
        }
    }

    #[test]
    fn the_order_of_words_counts() {
        assert_ne!(SplitMix64::of_words(&[1, 2]), SplitMix64::of_words(&[2, 1]));
        assert_ne!(SplitMix64::of_words(&[1]), SplitMix64::of_words(&[1, 0]));
    }

    #[test]
    fn units_are_uniform_and_normals_standard() {
        let mut random = SplitMix64::of_words(&[1]);
        let moments = |draw: &mut dyn FnMut() -> f64| {
            let draws: Vec<f64> = (0..100_000).map(|_| draw()).collect();
            let mean = draws.iter().sum::<f64>() / draws.len() as f64;
            (mean, draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / draws.len() as f64)
        };
        let (mean, variance) = moments(&mut || random.unit());
        assert!((mean - 0.5).abs() < 0.005 && (variance - 1.0 / 12.0).abs() < 0.002, "{mean} {variance}");
        let (mean, variance) = moments(&mut || random.normal());
        assert!(mean.abs() < 0.02 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        let (mean, _) = moments(&mut || random.exponential(3.0));
        assert!((mean - 3.0).abs() < 0.05, "{mean}");
    }

    #[test]
    fn bounds_hold() {
        let mut random = SplitMix64::new(3);
        for bound in [1, 2, 7, 1 << 40, u64::MAX] {
            for _ in 0..1000 {
                assert!(random.below(bound) < bound && random.remainder(bound) < bound);
                assert!((0.0..1.0).contains(&random.unit()));
                let positive = random.positive_unit();
                assert!(positive > 0.0 && positive <= 1.0 && random.pareto(2.0) >= 1.0);
            }
        }
        assert_eq!(random.remainder(0), 0);
    }
}
