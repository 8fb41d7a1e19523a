//! How well one feature predicts the label alone: the AUC of its target mean, out of sample.
//!
//! The score of a row is the mean label of the earlier rows with the same value. So no row scores
//! itself, and a value that occurs once tells nothing. Scores are rounded to 1/1024, and equal
//! scores count as half an order.

/// Rows with the mean label that are added to each value, so that the mean of few rows is not
/// extreme.
const PRIOR_ROWS: f64 = 4.0;
/// Scores that are told apart.
const SCORES: usize = 1024;

/// The labels by score.
#[derive(Debug, Clone)]
pub(crate) struct Alone {
    positive: Vec<f64>,
    negative: Vec<f64>,
}

impl Default for Alone {
    fn default() -> Self {
        Self { positive: vec![0.0; SCORES], negative: vec![0.0; SCORES] }
    }
}

/// The mean label of a value that had `rows` rows with labels of this sum, before its next row.
/// `mean` is the mean label of all rows before.
#[inline]
pub(crate) fn target_mean(labels: f64, rows: u64, mean: f64) -> f64 {
    (labels + PRIOR_ROWS * mean) / (rows as f64 + PRIOR_ROWS)
}

impl Alone {
    /// Counts a row with this score and label, both in [0, 1]. A label between 0 and 1 counts as a
    /// part of a positive row and a part of a negative one.
    #[inline]
    pub(crate) fn add(&mut self, score: f64, label: f64) {
        let place = ((score * SCORES as f64) as usize).min(SCORES - 1);
        self.positive[place] += label;
        self.negative[place] += 1.0 - label;
    }

    /// The AUC. `None` without rows of both labels.
    pub(crate) fn auc(&self) -> Option<f64> {
        let (mut ordered, mut below, mut positive) = (0.0, 0.0, 0.0);
        for (p, n) in self.positive.iter().zip(&self.negative) {
            ordered += p * (below + n / 2.0);
            below += n;
            positive += p;
        }
        (positive > 0.0 && below > 0.0).then(|| ordered / (positive * below))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_auc_is_the_share_of_ordered_pairs() {
        let mut random = rectrain_random::SplitMix64::new(11);
        let rows: Vec<(f64, f64)> = (0..400)
            .map(|_| {
                let label = random.below(2) as f64;
                ((random.below(SCORES as u64 / 2) as f64 + label * 200.0) / SCORES as f64, label)
            })
            .collect();
        let mut alone = Alone::default();
        rows.iter().for_each(|(score, label)| alone.add(*score, *label));
        let (mut ordered, mut pairs) = (0.0, 0.0);
        for (a, _) in rows.iter().filter(|row| row.1 == 1.0) {
            for (b, _) in rows.iter().filter(|row| row.1 == 0.0) {
                ordered += if a > b { 1.0 } else { f64::from(u8::from(a == b)) / 2.0 };
                pairs += 1.0;
            }
        }
        assert!((alone.auc().unwrap() - ordered / pairs).abs() < 1e-9);
    }

    #[test]
    fn one_class_has_no_auc() {
        let mut alone = Alone::default();
        assert_eq!(alone.auc(), None);
        alone.add(0.3, 1.0);
        assert_eq!(alone.auc(), None);
        alone.add(1.0, 0.0);
        assert_eq!(alone.auc(), Some(0.0));
    }
}
