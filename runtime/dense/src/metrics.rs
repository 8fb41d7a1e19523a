//! How good predictions are: exact AUC, GAUC, log loss, normalised entropy and calibration over a whole evaluation, and a cheap
//! estimate of the AUC of the last few batches for a progress bar. Pure functions and plain accumulators; a label counts as
//! positive above ½.

use std::collections::BTreeMap;

/// Where probabilities are cut off in the log loss, as scikit-learn does for `float32`: beyond it a prediction of exactly 0 or 1
/// could make the mean of millions of samples infinite.
const PROBABILITY_MARGIN: f64 = f32::EPSILON as f64;

fn is_positive(label: f32) -> bool {
    label > 0.5
}

/// The area under the ROC curve: the probability that a random positive sample is scored above a random negative one, ties counting
/// half (Mann–Whitney U). Exact, by sorting, in O(n log n); none unless both classes are there.
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

/// AUC from (positives, negatives) at each score, ascending. All in integers, twice the wins, so that the order in which samples
/// came cannot matter.
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

/// Mean binary cross-entropy in nats; none without samples. Probabilities are cut off 2^-23 from 0 and 1.
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

/// Log loss over the entropy of the base rate (He et al. 2014, section 3): below 1 is better than always predicting the mean label.
/// None unless the mean label lies strictly between 0 and 1.
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

/// Σ predictions / Σ labels: 1 is calibrated, above it predictions are too high. None when the labels sum to 0.
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

/// Group AUC (Zhu et al. 2017, equation 5): the mean of the groups' AUCs, each weighted by its number of samples, over the groups
/// that have both classes; none if no group has. A group is usually a user.
///
/// # Panics
/// When the slices differ in length.
pub fn gauc(predictions: &[f32], labels: &[f32], groups: &[u64]) -> Option<f64> {
    assert_eq!(predictions.len(), labels.len(), "one label a prediction");
    assert_eq!(predictions.len(), groups.len(), "one group a prediction");
    let mut members: BTreeMap<u64, Vec<(f32, f32)>> = BTreeMap::new();
    for ((&prediction, &label), &group) in predictions.iter().zip(labels).zip(groups) {
        members.entry(group).or_default().push((prediction, label));
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

/// What an evaluation found. A value is none where it is not defined: see the function of its name.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EvaluationSummary {
    /// Samples evaluated.
    pub samples: u64,
    /// See [`auc`].
    pub auc: Option<f64>,
    /// See [`log_loss`], in nats.
    pub log_loss: Option<f64>,
    /// See [`normalized_entropy`].
    pub normalized_entropy: Option<f64>,
    /// See [`calibration`].
    pub calibration: Option<f64>,
}

/// Collects an evaluation batch by batch. It keeps every prediction and label (8 bytes a sample) because the exact AUC needs them
/// all; the summary does not depend on the order in which they came, not even in its last bit.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Evaluation {
    scored: Vec<(f32, f32)>,
}

impl Evaluation {
    /// Adds a batch.
    ///
    /// # Panics
    /// When the slices differ in length.
    pub fn push(&mut self, predictions: &[f32], labels: &[f32]) {
        assert_eq!(predictions.len(), labels.len(), "one label a prediction");
        self.scored.extend(predictions.iter().copied().zip(labels.iter().copied()));
    }

    /// Adds what another has collected.
    pub fn merge(&mut self, other: Self) {
        self.scored.extend(other.scored);
    }

    /// Samples collected so far.
    pub fn samples(&self) -> usize {
        self.scored.len()
    }

    /// Computes the summary.
    pub fn finish(mut self) -> EvaluationSummary {
        self.scored.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let scored = &self.scored;
        let predictions = || scored.iter().map(|(prediction, _)| *prediction);
        let labels = || scored.iter().map(|(_, label)| *label);
        let log_loss = log_loss_of(scored.iter().copied(), scored.len());
        EvaluationSummary {
            samples: scored.len() as u64,
            auc: auc_of_sorted(scored),
            log_loss,
            normalized_entropy: log_loss.zip(mean(labels())).and_then(|(loss, rate)| normalize(loss, rate)),
            calibration: ratio(sum(predictions()), sum(labels())),
        }
    }
}

/// Score buckets of [`RunningAuc`].
const BUCKETS: usize = 1024;
/// Parts of its window.
const BLOCKS: usize = 8;

/// An estimate of the AUC of the last samples, cheap enough for every batch. Scores are counted in 1,024 buckets of √p (finer
/// towards 0, where click probabilities lie), and samples leave in eighths of the window; scores of one bucket count as ties. Its
/// memory is fixed: 72 KiB.
#[derive(Debug, Clone)]
pub struct RunningAuc {
    /// Counts of the whole window.
    window: Histogram,
    /// Counts of its parts; `current` is being filled, the one after it is the oldest.
    blocks: Vec<Histogram>,
    current: usize,
    block_samples: usize,
    filled: usize,
}

/// (negatives, positives) in each bucket.
type Histogram = Box<[[u32; 2]; BUCKETS]>;

fn empty_histogram() -> Histogram {
    Box::new([[0; 2]; BUCKETS])
}

impl RunningAuc {
    /// An estimator over about this many samples, at least 8 and at most 2^31.
    pub fn new(window_samples: usize) -> Self {
        Self {
            window: empty_histogram(),
            blocks: vec![empty_histogram(); BLOCKS],
            current: 0,
            block_samples: (window_samples.min(1 << 31) / BLOCKS).max(1),
            filled: 0,
        }
    }

    /// Adds a batch.
    ///
    /// # Panics
    /// When the slices differ in length.
    pub fn push(&mut self, predictions: &[f32], labels: &[f32]) {
        assert_eq!(predictions.len(), labels.len(), "one label a prediction");
        for (&prediction, &label) in predictions.iter().zip(labels) {
            if self.filled == self.block_samples {
                self.drop_oldest();
            }
            // A float cast saturates, and takes NaN to 0.
            let bucket = ((prediction.sqrt() * BUCKETS as f32) as usize).min(BUCKETS - 1);
            let class = usize::from(is_positive(label));
            self.window[bucket][class] += 1;
            self.blocks[self.current][bucket][class] += 1;
            self.filled += 1;
        }
    }

    fn drop_oldest(&mut self) {
        self.current = (self.current + 1) % BLOCKS;
        self.filled = 0;
        let oldest = &mut self.blocks[self.current];
        for (sum, part) in self.window.iter_mut().flatten().zip(oldest.iter_mut().flatten()) {
            *sum -= *part;
            *part = 0;
        }
    }

    /// The estimate; none unless both classes are in the window.
    pub fn value(&self) -> Option<f64> {
        auc_of_counts(self.window.iter().map(|&[negatives, positives]| (positives.into(), negatives.into())))
    }
}

#[cfg(test)]
mod tests {
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
    fn sample(count: usize, levels: u64, seed: u64) -> (Vec<f32>, Vec<f32>) {
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
    fn always_predicting_the_base_rate_has_normalized_entropy_one_and_is_calibrated() {
        let labels = [1.0, 0.0, 0.0, 0.0];
        assert!((normalized_entropy(&[0.25; 4], &labels).unwrap() - 1.0).abs() < 1e-12);
        assert_eq!(calibration(&[0.25; 4], &labels), Some(1.0));
    }

    #[test]
    fn what_is_not_defined_is_none_and_what_is_certain_but_wrong_is_finite() {
        assert_eq!(log_loss(&[], &[]), None);
        assert_eq!(normalized_entropy(&[0.5, 0.5], &[0.0, 0.0]), None);
        assert_eq!(normalized_entropy(&[0.5, 0.5], &[1.0, 1.0]), None);
        assert_eq!(calibration(&[0.5, 0.5], &[0.0, 0.0]), None);
        let loss = log_loss(&[0.0, 1.0], &[1.0, 0.0]).unwrap();
        assert!((loss - 23.0 * std::f64::consts::LN_2).abs() < 1e-6, "{loss}");
        assert_eq!(Evaluation::default().finish(), EvaluationSummary::default());
    }

    #[test]
    fn gauc_weights_groups_by_samples_and_leaves_out_those_of_one_class() {
        let predictions = [0.9, 0.1, 0.2, 0.3, 0.6, 0.5, 0.9];
        let labels = [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0];
        let groups = [7, 7, 7, 7, 1, 1, 3];
        assert!((gauc(&predictions, &labels, &groups).unwrap() - 4.0 / 6.0).abs() < 1e-12);
        assert_eq!(gauc(&predictions, &labels, &[0; 7]), auc(&predictions, &labels));
        assert_eq!(gauc(&[0.5], &[1.0], &[1]), None);
    }

    #[test]
    fn an_evaluation_is_the_functions_over_everything_in_whatever_order_it_came() {
        for seed in 0..20 {
            let (predictions, labels) = sample(1000, 7, seed);
            let mut whole = Evaluation::default();
            whole.push(&predictions, &labels);
            let mut parts = Evaluation::default();
            let mut second = Evaluation::default();
            second.push(&predictions[..100], &labels[..100]);
            parts.push(&predictions[600..], &labels[600..]);
            parts.push(&predictions[100..600], &labels[100..600]);
            parts.merge(second);
            assert_eq!(parts.samples(), 1000);
            let summary = whole.finish();
            assert_eq!(parts.finish(), summary, "bit for bit");
            assert_eq!((summary.samples, summary.auc), (1000, auc(&predictions, &labels)));
            let close = |a: Option<f64>, b: Option<f64>| (a.unwrap() - b.unwrap()).abs() < 1e-12;
            assert!(close(summary.log_loss, log_loss(&predictions, &labels)));
            assert!(close(summary.normalized_entropy, normalized_entropy(&predictions, &labels)));
            assert!(close(summary.calibration, calibration(&predictions, &labels)));
        }
    }

    #[test]
    fn the_running_estimate_is_near_the_exact_value() {
        let (predictions, labels) = sample(20_000, 1 << 40, 4);
        let rare: Vec<f32> = predictions.iter().map(|p| p * 0.05).collect();
        for predictions in [predictions, rare] {
            let mut running = RunningAuc::new(1 << 20);
            running.push(&predictions, &labels);
            let exact = auc(&predictions, &labels).unwrap();
            assert!((running.value().unwrap() - exact).abs() < 5e-4);
        }
    }

    #[test]
    fn the_running_estimate_forgets_what_is_older_than_its_window() {
        let mut running = RunningAuc::new(800);
        assert_eq!(running.value(), None);
        running.push(&[0.9, 0.1].repeat(500), &[0.0, 1.0].repeat(500));
        assert_eq!(running.value(), Some(0.0));
        running.push(&[0.9, 0.1].repeat(400), &[1.0, 0.0].repeat(400));
        assert_eq!(running.value(), Some(1.0));
        let counted: u32 = running.window.iter().flatten().sum();
        assert_eq!(counted, 800, "the window is full");
        running.push(&[f32::NAN, 2.0, -1.0], &[0.0; 3]);
    }
}
