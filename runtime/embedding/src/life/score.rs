//! A score in 16 bits: a floating-point number without sign, 5 bits of exponent and 11 of fraction.
//!
//! ```text
//! code < 4,096                                  code / 256
//! else, e = ⌊code / 2,048⌋, m = code mod 2,048  (2,048 + m) · 2^(e − 1) / 256
//! ```
//!
//! It holds 0 to 1.7 · 10¹⁰ in steps of 1/256 below 16, and of at most 1/2,048 of the score above.
//! Whole scores up to 4,096 are exact. Codes compare as their scores.
//!
//! A score between two codes becomes one of them by chance, so that it is right on average. So a
//! large score still grows by single examples. The chance is a hash of key and update: every
//! machine draws the same. A score of n additions has a relative error of at most 2.2 % (one
//! standard deviation), for any n.

/// No code is larger.
const MOST: u16 = u16::MAX - 1;
const ONE: f64 = 256.0;
const FRACTION_BITS: u32 = 11;

/// The score of a code.
#[inline]
pub(crate) fn score_of(code: u16) -> f64 {
    let exponent = code >> FRACTION_BITS;
    let scaled = match exponent {
        0 | 1 => u64::from(code),
        _ => u64::from(code & 2_047 | 2_048) << (exponent - 1),
    };
    scaled as f64 / ONE
}

/// A code of a score that is not negative. `chance()` decides between two neighbours: 64 random
/// bits.
#[inline]
pub(crate) fn code_of(score: f64, chance: impl FnOnce() -> u64) -> u16 {
    let scaled = score * ONE;
    if scaled >= score_of(MOST) * ONE {
        return MOST;
    }
    // The exponent of an IEEE double. A score of 0 gives a negative one.
    let exponent = ((scaled.to_bits() >> 52) as i64 - 1_023 - i64::from(FRACTION_BITS)).max(0);
    let steps = scaled / (1_u64 << exponent) as f64;
    let whole = steps as u32;
    let part = steps - f64::from(whole);
    let is_next = part > 0.0 && rectrain_random::unit(chance()) < part;
    ((exponent as u32) << FRACTION_BITS).saturating_add(whole + u32::from(is_next)).min(u32::from(MOST)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use rectrain_random::SplitMix64;

    #[test]
    fn every_code_is_the_code_of_its_score_and_codes_rise() {
        let mut earlier = -1.0;
        for code in 0..=MOST {
            let score = score_of(code);
            assert!(score > earlier, "{code}");
            assert_eq!(code_of(score, || panic!("{code} is exact")), code);
            earlier = score;
        }
        assert_eq!(code_of(1e30, || 0), MOST);
        for whole in 0..=4_096_u32 {
            assert_eq!(score_of(code_of(f64::from(whole), || 0)), f64::from(whole));
        }
    }

    #[test]
    fn many_additions_have_the_stated_error() {
        for (target, most) in [(1_000_u32, 0.0), (300_000, 0.1)] {
            for seed in 0..20 {
                let mut random = SplitMix64::new(seed);
                let mut code = 0;
                for _ in 0..target {
                    code = code_of(score_of(code) + 1.0, || random.next_u64());
                }
                let error = (score_of(code) / f64::from(target) - 1.0).abs();
                assert!(error <= most, "{target}: {error}");
            }
        }
    }
}
