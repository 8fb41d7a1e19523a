//! Medians, means and ranges.

/// The median; NaN for no values.
#[must_use]
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The value that a share of the sorted values does not exceed; `None` for no values.
#[must_use]
pub fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

/// The smallest and the largest value.
#[must_use]
pub fn range(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    (low, values.iter().copied().fold(f64::NEG_INFINITY, f64::max))
}

/// The mean; 0 for no values.
pub fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    sum / f64::from(count.max(1))
}

/// The sample's standard deviation; NaN for fewer than two values.
#[must_use]
pub fn deviation(values: &[f64]) -> f64 {
    let mean = mean(values.iter().copied());
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (values.len() as f64 - 1.0)).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deviation_is_of_a_sample() {
        assert!((deviation(&[1.0, 3.0]) - 2.0_f64.sqrt()).abs() < 1e-12 && deviation(&[1.0]).is_nan());
    }

    #[test]
    fn a_percentile_is_a_value_that_the_share_does_not_exceed() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!((quantile(&values, 0.5), quantile(&values, 0.99)), (Some(100.0), Some(198.0)));
        assert_eq!((quantile(&values[..1], 0.99), quantile(&[], 0.5)), (Some(1.0), None));
    }

    #[test]
    fn the_median_is_the_middle_value() {
        assert!(median(vec![3.0, 1.0, 9.0]).to_bits() == 3.0_f64.to_bits() && median(Vec::new()).is_nan());
    }
}
