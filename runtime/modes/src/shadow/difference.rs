//! Differences that travel as bf16 in an exchange, and the base that both ends compute alike.
//!
//! The base b of a fragment is what both ends know of it. A sender of values x computes in 32 bits:
//!
//! 1. q ← x − b, rounded to the nearest bf16 (8 bits of precision; ties to even);
//! 2. b ← b + q.
//!
//! It sends q, and the receiver computes line 2. So b has the same bits at both ends, and is the
//! receiver's estimate of x. An exchange sends twice: a dense worker its replica, and the server
//! its copy. It begins with an exchange of whole values.
//!
//! The rounding error of an estimate is at most 2⁻⁸ of the difference. It is not lost: the next
//! difference starts from b, which lacks it. So errors do not add up over exchanges. Streaming
//! DiLoCo rounds outer gradients to 4 bits instead (arXiv 2501.18512).

use half::bf16;

/// The difference of `values` from `base`, as the bits of bf16. `base` becomes the estimate that
/// the receiver has of the values. Both have the same length. A difference above 3.39e38 becomes
/// infinite.
#[must_use]
pub fn send_difference(base: &mut [f32], values: &[f32]) -> Vec<u16> {
    let send = |(base, value): (&mut f32, &f32)| {
        let difference = bf16::from_f32(*value - *base);
        *base += difference.to_f32();
        difference.to_bits()
    };
    base.iter_mut().zip(values).map(send).collect()
}

/// The other end of [`send_difference`]: `base` becomes the estimate of the values. Both have the
/// same length.
pub fn receive_difference(base: &mut [f32], difference: &[u16]) {
    for (base, bits) in base.iter_mut().zip(difference) {
        *base += bf16::from_bits(*bits).to_f32();
    }
}

#[cfg(test)]
mod tests {
    use rectrain_random::SplitMix64;

    use super::*;

    #[test]
    fn both_ends_have_the_same_base_near_the_values() {
        let mut random = SplitMix64::new(3);
        let mut draw = || -> Vec<f32> { (0..50).map(|_| (random.unit() - 0.5) as f32).collect() };
        let (mut sender, mut values) = (draw(), Vec::new());
        let mut receiver = sender.clone();
        for _ in 0..100 {
            let before = sender.clone();
            values = draw();
            receive_difference(&mut receiver, &send_difference(&mut sender, &values));
            assert_eq!(sender, receiver);
            for ((base, value), before) in sender.iter().zip(&values).zip(&before) {
                let bound = (value - before).abs() / 256.0 + f32::EPSILON;
                assert!((base - value).abs() <= bound, "{base} for {value} after {before}");
            }
        }
        // Values that stay are known exactly after some exchanges.
        (0..4).for_each(|_| drop(send_difference(&mut sender, &values)));
        for (base, value) in sender.iter().zip(&values) {
            assert!((base - value).abs() <= f32::EPSILON, "{base} for {value}");
        }
    }
}
