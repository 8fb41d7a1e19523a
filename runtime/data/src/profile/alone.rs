//! How well one feature predicts the label alone: the AUC of its target mean, out of sample.
//!
//! The rows are divided at random into two halves. The score of a row is the mean label of the rows
//! with the same value in the other half. So no row scores itself, and the order of the rows does
//! not count. A value that the other half lacks has the mean label of all rows. So values that
//! occur once tell nothing.
//!
//! The counts of each value in both halves are enough for that. Scores are rounded to 1/1024, and
//! equal scores count as half an order. A row with several ids counts once for each.

use rectrain_random::mix;

/// Rows with the mean label that are added to each value, so that the mean of few rows is not
/// extreme.
const PRIOR_ROWS: f64 = 4.0;
/// Scores that are told apart.
const SCORES: usize = 1024;

/// The half of the row of this number: 0 or 1.
#[inline]
pub(crate) fn half(row: u64) -> usize {
    (mix(row) & 1) as usize
}

/// The rows of one value, by half.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Halves {
    /// Rows, at most 2³² − 1.
    rows: [u32; 2],
    /// The sums of their labels.
    labels: [f64; 2],
}

impl Halves {
    /// Counts a row of a half.
    #[inline]
    pub(crate) fn add(&mut self, half: usize, label: f64) {
        self.rows[half] = self.rows[half].saturating_add(1);
        self.labels[half] += label;
    }

    /// Rows of both halves.
    #[inline]
    pub(crate) fn all_rows(&self) -> u64 {
        u64::from(self.rows[0]) + u64::from(self.rows[1])
    }
}

/// The AUC over the rows of these values. `None` without rows of both labels. A label between 0
/// and 1 counts as a part of a positive row and a part of a negative one.
pub(crate) fn auc<'a>(values: impl Iterator<Item = &'a Halves> + Clone) -> Option<f64> {
    let (labels, rows) = values
        .clone()
        .fold((0.0, 0), |(labels, rows), value| (labels + value.labels[0] + value.labels[1], rows + value.all_rows()));
    let mean = labels / rows.max(1) as f64;
    let (mut positive, mut negative) = ([0.0; SCORES], [0.0; SCORES]);
    for value in values {
        for (half, other) in [(0, 1), (1, 0)] {
            let rows = f64::from(value.rows[half]);
            let score = (value.labels[other] + PRIOR_ROWS * mean) / (f64::from(value.rows[other]) + PRIOR_ROWS);
            let place = ((score * SCORES as f64) as usize).min(SCORES - 1);
            positive[place] += value.labels[half];
            negative[place] += rows - value.labels[half];
        }
    }
    share_of_ordered_pairs(&positive, &negative)
}

/// The share of the pairs of a positive and a negative row in which the positive one has the higher
/// score. `None` without a pair.
fn share_of_ordered_pairs(positive: &[f64], negative: &[f64]) -> Option<f64> {
    let (mut ordered, mut below, mut all) = (0.0_f64, 0.0_f64, 0.0_f64);
    for (p, n) in positive.iter().zip(negative) {
        ordered += p * (below + n / 2.0);
        below += n;
        all += p;
    }
    (all > 0.0 && below > 0.0).then(|| ordered / (all * below))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ordered_pairs_are_counted() {
        let mut random = rectrain_random::SplitMix64::new(11);
        let rows: Vec<(usize, bool)> = (0..400)
            .map(|_| {
                let is_positive = random.below(2) == 1;
                (random.below(8) as usize + usize::from(is_positive), is_positive)
            })
            .collect();
        let of = |label: bool| {
            let mut counts = [0.0; 9];
            rows.iter().filter(|row| row.1 == label).for_each(|row| counts[row.0] += 1.0);
            counts
        };
        let (mut ordered, mut pairs) = (0.0, 0.0);
        for (a, _) in rows.iter().filter(|row| row.1) {
            for (b, _) in rows.iter().filter(|row| !row.1) {
                ordered += if a > b { 1.0 } else { f64::from(u8::from(a == b)) / 2.0 };
                pairs += 1.0;
            }
        }
        let found = share_of_ordered_pairs(&of(true), &of(false)).unwrap();
        assert!((found - ordered / pairs).abs() < 1e-12 && found > 0.5, "{found}");
    }

    #[test]
    fn one_class_has_no_auc() {
        let mut value = Halves::default();
        assert_eq!(auc([value].iter()), None);
        value.add(0, 1.0);
        assert_eq!(auc([value].iter()), None);
        value.add(1, 0.0);
        assert!(auc([value].iter()).is_some());
    }

    #[test]
    fn halves_are_equal_and_not_periodic() {
        for period in [1, 2, 3, 10] {
            let ones = (0..10_000).map(|row| half(row * period)).sum::<usize>();
            assert!((4_800..5_200).contains(&ones), "{period}: {ones}");
        }
    }
}
