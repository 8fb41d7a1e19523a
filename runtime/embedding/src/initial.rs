//! Initial values: a pure function of (store seed, key, column).
//!
//! No generator state passes from row to row. Each value comes from a counter-based generator
//! (SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
//! It is number `column + 1` of the stream of (seed, key). So a row that is lost and inserted again
//! starts from the same values, in any process and any order. Only IEEE additions, multiplications,
//! divisions and square roots are used, never the platform's `ln` or `cos`. So the bits are equal
//! on every machine.

use rectrain_kinds::Initializer;
use rectrain_random::{INCREMENT, SplitMix64, mix};

use crate::{FeatureKey, SpecError};

/// An [`Initializer`] in the form that tables call.
pub(crate) trait InitialValues {
    /// Checks every setting against its range.
    fn validate(&self) -> Result<(), SpecError>;

    /// Writes the initial values of a row. `out` is its `dim` columns; the first `zero_columns`
    /// columns get
    /// 0. A column's value does not depend on the number of columns.
    fn fill(self, seed: u64, key: FeatureKey, zero_columns: usize, out: &mut [f32]);
}

impl InitialValues for Initializer {
    fn validate(&self) -> Result<(), SpecError> {
        let finite = |name, found: f32| {
            let expected = "a finite number";
            let error = SpecError::Initializer { name, found, expected };
            if found.is_finite() { Ok(()) } else { Err(error) }
        };
        match *self {
            Self::Constant(value) => finite("constant", value),
            Self::Uniform { low, high } => {
                finite("low", low)?;
                finite("high", high)?;
                (low <= high).then_some(()).ok_or(SpecError::Initializer {
                    name: "low",
                    found: low,
                    expected: "at most high",
                })
            }
            Self::Normal { standard_deviation } => {
                finite("standard_deviation", standard_deviation)?;
                (standard_deviation >= 0.0).then_some(()).ok_or(SpecError::Initializer {
                    name: "standard_deviation",
                    found: standard_deviation,
                    expected: "0 or more",
                })
            }
        }
    }

    fn fill(self, seed: u64, key: FeatureKey, zero_columns: usize, out: &mut [f32]) {
        let stream = Stream::new(seed, key);
        for (column, value) in out.iter_mut().enumerate() {
            *value = if column < zero_columns { 0.0 } else { initial_value(self, stream, column) };
        }
    }
}

fn initial_value(initializer: Initializer, stream: Stream, column: usize) -> f32 {
    match initializer {
        Initializer::Constant(value) => value,
        Initializer::Uniform { low, high } => {
            let (low, high) = (f64::from(low), f64::from(high));
            (low + (high - low) * stream.unit(column)) as f32
        }
        Initializer::Normal { standard_deviation } => {
            (f64::from(standard_deviation) * normal_quantile(stream.unit(column))) as f32
        }
    }
}

/// The stream of random numbers of one (seed, key).
#[derive(Clone, Copy)]
struct Stream(SplitMix64);

impl Stream {
    fn new(seed: u64, key: FeatureKey) -> Self {
        Self(SplitMix64::new(mix(mix(seed.wrapping_add(INCREMENT)) ^ key.0)))
    }

    /// A number in the open interval (0, 1): the middle of one of 2⁵² equal cells.
    fn unit(self, column: usize) -> f64 {
        ((self.0.nth(column as u64) >> 12) as f64 + 0.5) * (1.0 / (1_u64 << 52) as f64)
    }
}

/// The standard normal quantile of `p` in (0, 1): Wichura, algorithm AS 241 (PPND16), Applied
/// Statistics 37 (1988), relative error about 1e-16.
fn normal_quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let r = 0.180_625 - q * q;
        return q * polynomial(&CENTRE_NUMERATOR, r) / polynomial(&CENTRE_DENOMINATOR, r);
    }
    let tail = if q < 0.0 { p } else { 1.0 - p };
    let r = (-natural_logarithm(tail)).sqrt();
    let magnitude = if r <= 5.0 {
        let r = r - 1.6;
        polynomial(&MIDDLE_NUMERATOR, r) / polynomial(&MIDDLE_DENOMINATOR, r)
    } else {
        let r = r - 5.0;
        polynomial(&FAR_NUMERATOR, r) / polynomial(&FAR_DENOMINATOR, r)
    };
    if q < 0.0 { -magnitude } else { magnitude }
}

/// Horner's rule; coefficients from the highest power down.
fn polynomial(coefficients: &[f64], x: f64) -> f64 {
    coefficients.iter().fold(0.0, |sum, &c| sum * x + c)
}

/// ln x for a positive normal x, from IEEE operations only. It splits x = m·2ᵉ with m in [√½, √2).
/// Then ln m = 2 artanh((m − 1)/(m + 1)), summed as a series. 12 terms leave an error below 1e-19.
fn natural_logarithm(x: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    const ONE: u64 = 1023 << 52;
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & MANTISSA) | ONE);
    if mantissa >= std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let series = (0..12).rev().fold(0.0, |sum, k| sum * square + 1.0 / f64::from(2 * k + 1));
    exponent as f64 * std::f64::consts::LN_2 + 2.0 * s * series
}

// The coefficients of AS 241, highest power first.
const CENTRE_NUMERATOR: [f64; 8] = [
    2_509.080_928_730_122_7,
    33_430.575_583_588_13,
    67_265.770_927_008_7,
    45_921.953_931_549_87,
    13_731.693_765_509_46,
    1_971.590_950_306_551_3,
    133.141_667_891_784_38,
    3.387_132_872_796_366_5,
];
const CENTRE_DENOMINATOR: [f64; 8] = [
    5_226.495_278_852_854,
    28_729.085_735_721_943,
    39_307.895_800_092_71,
    21_213.794_301_586_597,
    5_394.196_021_424_751,
    687.187_007_492_057_9,
    42.313_330_701_600_91,
    1.0,
];
const MIDDLE_NUMERATOR: [f64; 8] = [
    0.000_774_545_014_278_341_4,
    0.022_723_844_989_269_184,
    0.241_780_725_177_450_6,
    1.270_458_252_452_368_4,
    3.647_848_324_763_204_5,
    5.769_497_221_460_691,
    4.630_337_846_156_546,
    1.423_437_110_749_683_5,
];
const MIDDLE_DENOMINATOR: [f64; 8] = [
    1.050_750_071_644_416_9e-09,
    0.000_547_593_808_499_534_5,
    0.015_198_666_563_616_457,
    0.148_103_976_427_480_08,
    0.689_767_334_985_1,
    1.676_384_830_183_803_8,
    2.053_191_626_637_759,
    1.0,
];
const FAR_NUMERATOR: [f64; 8] = [
    2.010_334_399_292_288_1e-07,
    2.711_555_568_743_487_6e-05,
    0.001_242_660_947_388_078_4,
    0.026_532_189_526_576_124,
    0.296_560_571_828_504_87,
    1.784_826_539_917_291_3,
    5.463_784_911_164_114,
    6.657_904_643_501_103,
];
const FAR_DENOMINATOR: [f64; 8] = [
    2.044_263_103_389_939_7e-15,
    1.421_511_758_316_446e-07,
    1.846_318_317_510_054_8e-05,
    0.000_786_869_131_145_613_3,
    0.014_875_361_290_850_615,
    0.136_929_880_922_735_8,
    0.599_832_206_555_888,
    1.0,
];

#[cfg(test)]
mod tests {
    use super::*;

    const SEED: u64 = 42;

    fn values(initializer: Initializer, seed: u64, key: u64, dim: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; dim];
        initializer.fill(seed, FeatureKey(key), 0, &mut out);
        out
    }

    fn standard_normal() -> Initializer {
        Initializer::Normal { standard_deviation: 1.0 }
    }

    #[test]
    fn the_logarithm_agrees_with_the_platforms() {
        for exponent in -55..4 {
            for step in 0..100 {
                let x = (1.0 + f64::from(step) / 100.0) * 2_f64.powi(exponent);
                let error = (natural_logarithm(x) - x.ln()).abs();
                assert!(error <= 4e-16 * x.ln().abs().max(1.0), "ln {x}: off by {error}");
            }
        }
    }

    /// The expected values come from Python's `statistics.NormalDist().inv_cdf`.
    #[test]
    fn the_normal_quantile_agrees_with_known_values() {
        let known = [
            (0.5, 0.0),
            (0.075, -1.4395314709384557),
            (0.07499, -1.4396021182393162),
            (0.925, 1.439531470938456),
            (0.9251, 1.4402382675279632),
            (0.001, -3.090232306167813),
            (0.999, 3.090232306167813),
            (1e-09, -5.9978070150076865),
            (1.1102230246251565e-16, -8.209536151601386),
            (1e-12, -7.034483825301132),
            (0.3, -0.5244005127080407),
            (0.6, 0.2533471031357998),
            (1e-11, -6.706023155495136),
        ];
        for (p, expected) in known {
            let found = normal_quantile(p);
            assert!(
                (found - expected).abs() <= 4e-15 * expected.abs().max(1.0),
                "quantile of {p}: {found}, not {expected}"
            );
        }
    }

    /// Pinned: a change here changes every model that is trained from a seed.
    #[test]
    fn initial_values_are_the_same_bits_on_every_machine() {
        let uniform = Initializer::Uniform { low: -0.5, high: 0.5 };
        let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(values(uniform, SEED, 7, 4)), [0x3e48_b671, 0x3ef8_f8c3, 0xbe67_dee8, 0xbdf8_42d0]);
        assert_eq!(bits(values(standard_normal(), SEED, 7, 4)), [0x3f03_50fe, 0x400d_1eb2, 0xbf1a_2144, 0xbe9e_0c91]);
    }

    #[test]
    fn initial_values_differ_by_seed_key_and_column_and_by_nothing_else() {
        let base = values(standard_normal(), SEED, 7, 8);
        assert_eq!(base, values(standard_normal(), SEED, 7, 8));
        assert_eq!(base[..3], values(standard_normal(), SEED, 7, 3));
        assert_ne!(base, values(standard_normal(), SEED + 1, 7, 8));
        assert_ne!(base, values(standard_normal(), SEED, 8, 8));
        assert!(base.windows(2).all(|pair| pair[0] != pair[1]));
    }

    #[test]
    fn zero_columns_start_at_zero_and_leave_the_others_alone() {
        let mut out = [f32::NAN; 5];
        standard_normal().fill(SEED, FeatureKey(3), 2, &mut out);
        assert_eq!(out[..2], [0.0, 0.0]);
        assert_eq!(out[2..], values(standard_normal(), SEED, 3, 5)[2..]);
    }

    fn moments(initializer: Initializer) -> (f64, f64, f64) {
        let sample: Vec<f64> = (0..20_000).flat_map(|key| values(initializer, SEED, key, 10)).map(f64::from).collect();
        let n = sample.len() as f64;
        let mean = sample.iter().sum::<f64>() / n;
        let moment = |k| sample.iter().map(|x| (x - mean).powi(k)).sum::<f64>() / n;
        (mean, moment(2), moment(4))
    }

    #[test]
    fn the_normal_has_a_normals_moments_even_for_consecutive_keys() {
        let (mean, variance, fourth) = moments(standard_normal());
        assert!(mean.abs() < 0.01, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.02, "variance {variance}");
        assert!((fourth - 3.0).abs() < 0.12, "fourth moment {fourth}");
    }

    #[test]
    fn the_uniform_has_a_uniforms_moments_and_stays_in_its_range() {
        let uniform = Initializer::Uniform { low: -1.0, high: 3.0 };
        let (mean, variance, _) = moments(uniform);
        assert!((mean - 1.0).abs() < 0.02, "mean {mean}");
        assert!((variance - 16.0 / 12.0).abs() < 0.02, "variance {variance}");
        let all = (0..1_000).flat_map(|key| values(uniform, SEED, key, 10));
        assert!(all.into_iter().all(|x| (-1.0..=3.0).contains(&x)));
    }
}
