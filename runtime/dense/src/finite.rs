//! The search for values that are infinite or not a number, and the size of many values.

/// Vector instructions check this many values at a time. Only a block with a bad value is searched.
const BLOCK: usize = 1024;
/// The sums of a norm that do not wait for each other.
const LANES: usize = 16;

/// Position of the first value that is infinite or not a number.
pub(crate) fn first_not_finite(values: &[f32]) -> Option<usize> {
    let broken = |block: &[f32]| block.iter().fold(false, |broken, value| broken | !value.is_finite());
    let block = values.chunks(BLOCK).position(broken)? * BLOCK;
    values[block..].iter().position(|value| !value.is_finite()).map(|position| block + position)
}

/// The L2 norm of the values, summed in f64: √Σ v². It overflows for no number of finite values. It
/// is infinite or not a number if a value is.
pub(crate) fn l2_norm(values: &[f32]) -> f64 {
    let (lanes, rest) = values.as_chunks::<LANES>();
    let mut sums = [0.0_f64; LANES];
    for lane in lanes {
        for (sum, value) in sums.iter_mut().zip(lane) {
            *sum += f64::from(*value).powi(2);
        }
    }
    let rest: f64 = rest.iter().map(|value| f64::from(*value).powi(2)).sum();
    (sums.iter().sum::<f64>() + rest).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_value_that_is_not_finite_is_found_in_any_block() {
        for place in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 7] {
            let mut values = vec![1.0; 3 * BLOCK];
            assert_eq!(first_not_finite(&values), None);
            values[place..].fill(f32::NAN);
            assert_eq!(first_not_finite(&values), Some(place));
        }
    }

    #[test]
    fn a_norm_is_the_length_of_the_vector() {
        assert!(l2_norm(&[]).abs() < f64::EPSILON);
        // Each count of lanes, with a rest and without: Σ k² = n (n + 1) (2n + 1) / 6.
        for n in [1, LANES - 1, LANES, LANES + 1, 5 * LANES + 3] {
            let values: Vec<f32> = (1..=n).map(|k| if k.is_multiple_of(2) { k as f32 } else { -(k as f32) }).collect();
            let expected = ((n * (n + 1) * (2 * n + 1) / 6) as f64).sqrt();
            assert!((l2_norm(&values) - expected).abs() < 1e-12 * expected, "{n}");
        }
        let large = l2_norm(&[f32::MAX; 4]);
        assert!((large / (2.0 * f64::from(f32::MAX)) - 1.0).abs() < 1e-12, "{large}");
    }

    #[test]
    fn a_norm_of_a_value_that_is_not_finite_is_not_finite() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, LANES, 2 * LANES + 1] {
                let mut values = vec![1.0; 2 * LANES + 2];
                values[place] = bad;
                assert!(!l2_norm(&values).is_finite(), "{bad} at {place}");
            }
        }
    }
}
