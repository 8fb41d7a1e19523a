//! Random numbers without state. Each number is a pure function of a key and an index, in integer
//! arithmetic: the same on every machine, in any order and on any thread. Initial parameters and
//! dropout masks are made of them. They are not for cryptography.

use rectrain_random::SplitMix64;

/// FNV-1a of a name. The name of a parameter or layer is its identity: parameters and layers that a
/// later version adds before it do not change its numbers.
pub(crate) fn name_key(name: &str) -> u64 {
    name.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// A random sequence, addressed by index.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stream(SplitMix64);

impl Stream {
    /// The stream with these parts as its key, in this order.
    pub(crate) fn new(parts: &[u64]) -> Self {
        Self(SplitMix64::of_words(parts))
    }

    /// 64 random bits.
    pub(crate) fn bits(self, index: u64) -> u64 {
        self.0.nth(index)
    }

    /// Uniform on `[0, 1)`, a multiple of 2^-53.
    pub(crate) fn unit(self, index: u64) -> f64 {
        rectrain_random::unit(self.bits(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_pinned_for_every_machine_and_version() {
        let stream = Stream::new(&[7, name_key("top.0.weight")]);
        assert_eq!(name_key("a"), 0xAF63_DC4C_8601_EC8C, "FNV-1a's published test value");
        assert_eq!(stream.bits(0), stream.bits(0));
        assert_ne!(stream.bits(0), stream.bits(1));
        assert_ne!(stream.bits(0), Stream::new(&[8, name_key("top.0.weight")]).bits(0));
        assert_ne!(Stream::new(&[1, 2]).bits(0), Stream::new(&[2, 1]).bits(0));
    }

    #[test]
    fn units_are_uniform() {
        let stream = Stream::new(&[3]);
        let count = 100_000;
        let values: Vec<f64> = (0..count).map(|index| stream.unit(index)).collect();
        let mean = values.iter().sum::<f64>() / count as f64;
        let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count as f64;
        assert!(values.iter().all(|value| (0.0..1.0).contains(value)));
        assert!((mean - 0.5).abs() < 0.005, "{mean}");
        assert!((variance - 1.0 / 12.0).abs() < 0.002, "{variance}");
    }
}
