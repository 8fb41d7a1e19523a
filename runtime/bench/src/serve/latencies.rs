//! Latencies in a histogram of high dynamic range: 128 buckets for each power of two nanoseconds.
//! So a percentile is at most 1/128 above the exact one, at any size, in 60 KB of memory.

use std::time::Duration;

/// Buckets of a power of two, as a power of two.
const BITS: u32 = 7;
/// Buckets of a power of two.
const BUCKETS: usize = 1 << BITS;
/// Buckets of all times that 64 bits can hold.
const ALL: usize = BUCKETS * (u64::BITS - BITS + 1) as usize;

/// See the module documentation.
#[derive(Clone, Debug)]
pub(super) struct Latencies {
    counts: Vec<u64>,
    count: u64,
    /// In nanoseconds.
    longest: u64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { counts: vec![0; ALL], count: 0, longest: 0 }
    }
}

/// The bucket of a time. Times below 256 ns have a bucket each.
fn bucket(nanoseconds: u64) -> usize {
    let shift = nanoseconds.max(1).ilog2().saturating_sub(BITS);
    shift as usize * BUCKETS + (nanoseconds >> shift) as usize
}

/// The longest time of a bucket, in nanoseconds.
fn upper(bucket: usize) -> u64 {
    let shift = (bucket / BUCKETS).saturating_sub(1);
    let first = ((bucket - shift * BUCKETS) as u64) << shift;
    first | ((1 << shift) - 1)
}

impl Latencies {
    pub(super) fn push(&mut self, latency: Duration) {
        let nanoseconds = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(nanoseconds)] += 1;
        self.count += 1;
        self.longest = self.longest.max(nanoseconds);
    }

    /// Adds the latencies of another histogram.
    pub(super) fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(own, other)| *own += other);
        self.count += other.count;
        self.longest = self.longest.max(other.longest);
    }

    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// The latency that a share of all latencies does not exceed, in milliseconds. `None` without
    /// latencies.
    pub(super) fn quantile(&self, share: f64) -> Option<f64> {
        let rank = ((share * self.count as f64).ceil() as u64).clamp(1, self.count.max(1));
        let mut below = 0;
        let bucket = self.counts.iter().position(|count| {
            below += count;
            below >= rank
        })?;
        Some(upper(bucket).min(self.longest) as f64 / 1e6)
    }

    /// The longest latency, in milliseconds.
    pub(super) fn longest(&self) -> f64 {
        self.longest as f64 / 1e6
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::zipf::Random;

    #[test]
    fn buckets_are_adjacent_and_end_at_64_bits() {
        assert_eq!((bucket(0), bucket(255), bucket(256), bucket(u64::MAX)), (0, 255, 256, ALL - 1));
        for place in 1..ALL {
            assert_eq!(bucket(upper(place)), place);
            assert_eq!(bucket(upper(place - 1) + 1), place);
        }
        assert_eq!(upper(ALL - 1), u64::MAX);
    }

    #[test]
    fn percentiles_are_those_of_the_sorted_latencies_within_a_bucket() {
        let mut random = Random::new(5);
        // From a microsecond to a hundred seconds.
        let mut exact: Vec<u64> = (0..20_000).map(|_| 10_f64.powf(3.0 + 8.0 * random.unit()) as u64).collect();
        let (mut all, mut odd) = (Latencies::default(), Latencies::default());
        for (place, nanoseconds) in exact.iter().enumerate() {
            let half = if place % 2 == 0 { &mut all } else { &mut odd };
            half.push(Duration::from_nanos(*nanoseconds));
        }
        all.merge(&odd);
        exact.sort_unstable();
        assert_eq!(all.count(), 20_000);
        for (share, rank) in [(0.5, 10_000), (0.9, 18_000), (0.99, 19_800), (0.999, 19_980), (1.0, 20_000)] {
            let expected = exact[rank - 1] as f64 / 1e6;
            let found = all.quantile(share).unwrap();
            assert!(found >= expected && found <= expected * (1.0 + 1.0 / 128.0), "{share}: {found}, not {expected}");
        }
        assert!((all.longest() - exact[19_999] as f64 / 1e6).abs() < 1e-9);
    }

    #[test]
    fn without_latencies_there_is_no_percentile() {
        assert_eq!(Latencies::default().quantile(0.99), None);
    }
}
