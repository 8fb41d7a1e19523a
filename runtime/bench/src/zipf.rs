//! Draws ids as in click logs: few are frequent, most are rare.

use rectrain_embedding::FeatureKey;
use xxhash_rust::xxh3::xxh3_64;

/// A pseudo-random generator. Its numbers depend only on the seed.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed << 32)
    }

    /// The next number, in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(1);
        (xxh3_64(&self.0.to_le_bytes()) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// The continuous Zipf distribution over the ranks `0 .. ids`, sampled by the inverse of its
/// cumulative distribution. The density at rank r is proportional to (r + 1)^−s.
pub(crate) struct Zipf {
    ids: u64,
    power: f64,
    top: f64,
}

impl Zipf {
    /// `exponent` is s. It must not be 1, for which the inverse has another form.
    pub(crate) fn new(ids: u64, exponent: f64) -> Self {
        let power = 1.0 - exponent;
        Self { ids, power, top: (ids as f64 + 1.0).powf(power) }
    }

    pub(crate) fn rank(&self, random: &mut Random) -> u64 {
        let x = (1.0 + random.unit() * (self.top - 1.0)).powf(1.0 / self.power);
        (x as u64).saturating_sub(1).min(self.ids - 1)
    }
}

/// The key of an id. Distinct ids of a benchmark have distinct keys, spread evenly over the slots.
pub(crate) fn key(id: u64) -> FeatureKey {
    FeatureKey(xxh3_64(&id.to_le_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_the_frequencies_of_zipfs_law() {
        let (zipf, mut random) = (Zipf::new(1_000, 1.05), Random::new(1));
        let draws = 400_000;
        let mut counts = vec![0_u32; 1_000];
        (0..draws).for_each(|_| counts[zipf.rank(&mut random) as usize] += 1);
        // The probability of rank r is proportional to the integral of x^−1.05 from r + 1 to r + 2.
        let integral = |from: f64, to: f64| from.powf(-0.05) - to.powf(-0.05);
        let all = integral(1.0, 1_001.0);
        for rank in [0, 1, 9, 99, 500] {
            let expected = f64::from(draws) * integral(rank as f64 + 1.0, rank as f64 + 2.0) / all;
            let found = f64::from(counts[rank]);
            assert!((found - expected).abs() < 6.0 * expected.sqrt(), "rank {rank}: {found}, not {expected}");
        }
    }
}
