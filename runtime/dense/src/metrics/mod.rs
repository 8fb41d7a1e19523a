//! Metrics of predictions. Over a whole evaluation: exact AUC, GAUC, log loss, normalised entropy
//! and calibration. For a progress bar: a cheap estimate of the AUC of the last few batches. All
//! are pure functions or plain accumulators. A label counts as positive above ½.

mod evaluation;
mod running_auc;
mod window;

use std::collections::BTreeMap;

use rectrain_kinds::NO_GROUP;

pub use self::evaluation::{Evaluation, EvaluationSummary, Metric, TaskMetrics};
pub use self::running_auc::RunningAuc;
pub use self::window::{QualityWindow, WindowMetrics, WindowPart};

/// Log loss clips probabilities to this distance from 0 and 1, as scikit-learn does for `float32`.
/// Otherwise one prediction of exactly 0 or 1 could make the mean of millions of samples infinite.
const PROBABILITY_MARGIN: f64 = f32::EPSILON as f64;

fn is_positive(label: f32) -> bool {
    label > 0.5
}

/// The area under the ROC curve: the probability that a random positive sample scores above a
/// random negative one. Ties count half (Mann–Whitney U). It is exact, by sorting, in O(n log n).
/// `None` unless both classes occur.
///
/// # Panics
/// When the slices differ in length.
pub fn auc(predictions: &[f32], labels: &[f32]) -> Option<f64> {
    assert_eq!(predictions.len(), labels.len(), "one label a prediction");
    let mut scored: Vec<(f32, f32)> = predictions.iter().copied().zip(labels.iter().copied()).collect();
    scored.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
    auc_of_sorted(&scored)
}

/// AUC of (prediction, label) pairs in ascending order of predictions.
fn auc_of_sorted(scored: &[(f32, f32)]) -> Option<f64> {
    let counts = scored.chunk_by(|a, b| a.0 == b.0).map(|tie| {
        let positives = tie.iter().filter(|(_, label)| is_positive(*label)).count() as u64;
        (positives, tie.len() as u64 - positives)
    });
    auc_of_counts(counts)
}

/// AUC from (positives, negatives) at each score, ascending. It counts in half wins, as integers,
/// so the order of the samples does not matter.
fn auc_of_counts(counts: impl Iterator<Item = (u64, u64)>) -> Option<f64> {
    let (mut positives, mut negatives, mut twice_wins) = (0_u64, 0_u64, 0_u128);
    for (positive, negative) in counts {
        twice_wins += u128::from(positive) * (2 * u128::from(negatives) + u128::from(negative));
        positives += positive;
        negatives += negative;
    }
    let twice_pairs = 2 * u128::from(positives) * u128::from(negatives);
    (twice_pairs > 0).then(|| twice_wins as f64 / twice_pairs as f64)
}

/// Mean binary cross-entropy in nats; `None` without samples. Probabilities are clipped 2^-23 from
/// 0 and 1.
///
/// # Panics
/// When the slices differ in length.
pub fn log_loss(predictions: &[f32], labels: &[f32]) -> Option<f64> {
    assert_eq!(predictions.len(), labels.len(), "one label a prediction");
    let samples = predictions.iter().copied().zip(labels.iter().copied());
    log_loss_of(samples, predictions.len())
}

fn log_loss_of(samples: impl Iterator<Item = (f32, f32)>, count: usize) -> Option<f64> {
    let sum: f64 = samples
        .map(|(prediction, label)| {
            let p = f64::from(prediction).clamp(PROBABILITY_MARGIN, 1.0 - PROBABILITY_MARGIN);
            let y = f64::from(label);
            -(y * p.ln() + (1.0 - y) * (1.0 - p).ln())
        })
        .sum();
    (count > 0).then(|| sum / count as f64)
}

/// Log loss divided by the entropy of the base rate (He et al. 2014, section 3). Below 1, the
/// predictions are better than the mean label alone. `None` unless the mean label lies strictly
/// between 0 and 1.
///
/// # Panics
/// When the slices differ in length.
pub fn normalized_entropy(predictions: &[f32], labels: &[f32]) -> Option<f64> {
    normalize(log_loss(predictions, labels)?, mean(labels.iter().copied())?)
}

fn normalize(log_loss: f64, base_rate: f64) -> Option<f64> {
    let entropy = -(base_rate * base_rate.ln() + (1.0 - base_rate) * (1.0 - base_rate).ln());
    (base_rate > 0.0 && base_rate < 1.0).then(|| log_loss / entropy)
}

/// Σ predictions / Σ labels. 1 is calibrated; above 1, predictions are too high. `None` when the
/// labels sum to 0.
///
/// # Panics
/// When the slices differ in length.
pub fn calibration(predictions: &[f32], labels: &[f32]) -> Option<f64> {
    assert_eq!(predictions.len(), labels.len(), "one label a prediction");
    ratio(sum(predictions.iter().copied()), sum(labels.iter().copied()))
}

fn ratio(predicted: f64, observed: f64) -> Option<f64> {
    (observed > 0.0).then(|| predicted / observed)
}

fn sum(values: impl Iterator<Item = f32>) -> f64 {
    values.map(f64::from).sum()
}

fn mean(values: impl ExactSizeIterator<Item = f32>) -> Option<f64> {
    let count = values.len();
    (count > 0).then(|| sum(values) / count as f64)
}

/// Group AUC (Zhu et al. 2017, equation 5): the mean of the groups' AUCs over the groups with both
/// classes. Each is weighted by its number of samples. `None` if there is no such group. A group is
/// usually a user. Samples of [`NO_GROUP`] are left out.
///
/// # Panics
/// When the slices differ in length.
pub fn gauc(predictions: &[f32], labels: &[f32], groups: &[u64]) -> Option<f64> {
    assert_eq!(predictions.len(), labels.len(), "one label a prediction");
    assert_eq!(predictions.len(), groups.len(), "one group a prediction");
    let mut members: BTreeMap<u64, Vec<(f32, f32)>> = BTreeMap::new();
    for ((&prediction, &label), &group) in predictions.iter().zip(labels).zip(groups) {
        if group != NO_GROUP {
            members.entry(group).or_default().push((prediction, label));
        }
    }
    let (mut weighted, mut weights) = (0.0, 0.0);
    for group in members.values_mut() {
        group.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        if let Some(auc) = auc_of_sorted(group) {
            weighted += auc * group.len() as f64;
            weights += group.len() as f64;
        }
    }
    (weights > 0.0).then(|| weighted / weights)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::random::Stream;

    /// The definition: wins of positives over negatives, a tie being half a win.
    fn auc_by_definition(predictions: &[f32], labels: &[f32]) -> Option<f64> {
        let (mut wins, mut pairs) = (0.0, 0.0);
        for (&positive, _) in predictions.iter().zip(labels).filter(|(_, y)| **y == 1.0) {
            for (&negative, _) in predictions.iter().zip(labels).filter(|(_, y)| **y == 0.0) {
                pairs += 1.0;
                wins += if positive > negative { 1.0 } else { 0.0 } + if positive == negative { 0.5 } else { 0.0 };
            }
        }
        (pairs > 0.0).then(|| wins / pairs)
    }

    /// Labels that follow the predictions with noise; predictions on a grid of `levels`, for ties.
    pub(super) fn sample(count: usize, levels: u64, seed: u64) -> (Vec<f32>, Vec<f32>) {
        let stream = Stream::new(&[seed]);
        (0..count as u64)
            .map(|index| {
                let p = (stream.unit(2 * index) * levels as f64).floor() / levels as f64;
                let y = if stream.unit(2 * index + 1) < p { 1.0 } else { 0.0 };
                (p as f32, y)
            })
            .unzip()
    }

    #[test]
    fn auc_is_its_definition_with_and_without_ties() {
        for (seed, levels) in [(1, 5), (2, 50), (3, 1 << 40)] {
            let (predictions, labels) = sample(400, levels, seed);
            let expected = auc_by_definition(&predictions, &labels).unwrap();
            assert!((auc(&predictions, &labels).unwrap() - expected).abs() < 1e-12);
        }
    }

    #[test]
    fn auc_at_its_edges() {
        assert_eq!(auc(&[], &[]), None);
        assert_eq!(auc(&[0.1, 0.9], &[1.0, 1.0]), None);
        assert_eq!(auc(&[0.1, 0.9], &[0.0, 0.0]), None);
        assert_eq!(auc(&[0.1, 0.9], &[0.0, 1.0]), Some(1.0));
        assert_eq!(auc(&[0.1, 0.9], &[1.0, 0.0]), Some(0.0));
        assert_eq!(auc(&[0.5; 4], &[1.0, 0.0, 1.0, 0.0]), Some(0.5));
        assert_eq!(auc(&[0.0, -0.0], &[1.0, 0.0]), Some(0.5), "0 and -0 are one score");
    }

    #[test]
    fn log_loss_and_its_kin_have_known_values() {
        let (predictions, labels) = ([0.8, 0.4, 0.1], [1.0, 1.0, 0.0]);
        let expected = -(0.8_f64.ln() + 0.4_f64.ln() + 0.9_f64.ln()) / 3.0;
        assert!((log_loss(&predictions, &labels).unwrap() - expected).abs() < 1e-7);
        let rate = 2.0 / 3.0_f64;
        let entropy = -(rate * rate.ln() + (1.0 - rate) * (1.0 - rate).ln());
        assert!((normalized_entropy(&predictions, &labels).unwrap() - expected / entropy).abs() < 1e-7);
        assert!((calibration(&predictions, &labels).unwrap() - 1.3 / 2.0).abs() < 1e-7);
    }

    #[test]
    fn the_base_rate_has_normalized_entropy_one_and_is_calibrated() {
        let labels = [1.0, 0.0, 0.0, 0.0];
        assert!((normalized_entropy(&[0.25; 4], &labels).unwrap() - 1.0).abs() < 1e-12);
        assert_eq!(calibration(&[0.25; 4], &labels), Some(1.0));
    }

    #[test]
    fn undefined_metrics_are_none_and_wrong_certainty_is_finite() {
        assert_eq!(log_loss(&[], &[]), None);
        assert_eq!(normalized_entropy(&[0.5, 0.5], &[0.0, 0.0]), None);
        assert_eq!(normalized_entropy(&[0.5, 0.5], &[1.0, 1.0]), None);
        assert_eq!(calibration(&[0.5, 0.5], &[0.0, 0.0]), None);
        let loss = log_loss(&[0.0, 1.0], &[1.0, 0.0]).unwrap();
        assert!((loss - 23.0 * std::f64::consts::LN_2).abs() < 1e-6, "{loss}");
        assert_eq!(Evaluation::default().finish(), EvaluationSummary::default());
    }

    #[test]
    fn gauc_weights_groups_by_samples_and_skips_groups_of_one_class() {
        let predictions = [0.9, 0.1, 0.2, 0.3, 0.6, 0.5, 0.9];
        let labels = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0];
        let groups = [7, 7, 7, 7, 1, 1, 3];
        assert!((gauc(&predictions, &labels, &groups).unwrap() - 4.0 / 6.0).abs() < 1e-12);
        assert_eq!(gauc(&predictions, &labels, &[0; 7]), auc(&predictions, &labels));
        assert_eq!(gauc(&[0.5], &[1.0], &[1]), None);
    }

    /// The definition, over the rows that have a group.
    fn gauc_by_definition(predictions: &[f32], labels: &[f32], groups: &[Option<u64>]) -> Option<f64> {
        let (mut weighted, mut weights) = (0.0, 0.0);
        for group in groups.iter().flatten().collect::<BTreeSet<_>>() {
            let rows: Vec<usize> = (0..groups.len()).filter(|&row| groups[row].as_ref() == Some(group)).collect();
            let pick = |values: &[f32]| rows.iter().map(|&row| values[row]).collect::<Vec<f32>>();
            if let Some(auc) = auc_by_definition(&pick(predictions), &pick(labels)) {
                weighted += auc * rows.len() as f64;
                weights += rows.len() as f64;
            }
        }
        (weights > 0.0).then(|| weighted / weights)
    }

    #[test]
    fn rows_without_a_group_are_left_out_of_gauc() {
        for seed in 0..10 {
            let (predictions, labels) = sample(300, 20, seed);
            let groups: Vec<Option<u64>> = (0..300).map(|row| (row % 4 != 0).then_some(row * 7 % 13)).collect();
            let hashed: Vec<u64> = groups.iter().map(|group| group.unwrap_or(NO_GROUP)).collect();
            let expected = gauc_by_definition(&predictions, &labels, &groups).unwrap();
            assert!((gauc(&predictions, &labels, &hashed).unwrap() - expected).abs() < 1e-12);
        }
        assert_eq!(gauc(&[0.1, 0.9], &[0.0, 1.0], &[NO_GROUP; 2]), None);
    }
}
