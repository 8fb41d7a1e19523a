//! The quality of the latest predictions, each made before its sample was learned (test, then
//! train). Parts of several workers merge exactly, in any order.

use std::collections::VecDeque;

use super::{PROBABILITY_MARGIN, auc_of_counts, is_positive, normalize, ratio};

/// Score buckets of √p, which are finer near 0, where click probabilities lie.
const BUCKETS: usize = 1024;

/// Counts and sums over some samples.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WindowPart {
    /// Samples.
    pub samples: u64,
    /// Sum of the binary cross-entropies, in nats.
    pub loss_sum: f64,
    /// Sum of the predictions.
    pub prediction_sum: f64,
    /// Sum of the labels.
    pub label_sum: f64,
    /// Samples of each class in each bucket: negatives, then positives, `[2 · buckets]`. Empty
    /// without samples.
    pub counts: Vec<u32>,
}

/// Metrics of a window.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct WindowMetrics {
    /// The AUC, with scores of one bucket as ties. `None` unless both classes occur.
    pub auc: Option<f64>,
    /// Log loss over the entropy of the base rate (He et al. 2014, section 3).
    pub normalized_entropy: Option<f64>,
    /// Mean prediction over mean label.
    pub calibration: Option<f64>,
    /// Samples.
    pub samples: u64,
}

impl WindowPart {
    /// Adds a batch.
    ///
    /// # Panics
    /// When the slices differ in length.
    pub fn push(&mut self, predictions: &[f32], labels: &[f32]) {
        assert_eq!(predictions.len(), labels.len(), "one label a prediction");
        self.counts.resize(2 * BUCKETS, 0);
        for (&prediction, &label) in predictions.iter().zip(labels) {
            // A float cast saturates, and takes NaN to 0.
            let bucket = ((prediction.sqrt() * BUCKETS as f32) as usize).min(BUCKETS - 1);
            self.counts[2 * bucket + usize::from(is_positive(label))] += 1;
            let (p, y) = (f64::from(prediction), f64::from(label));
            let clipped = p.clamp(PROBABILITY_MARGIN, 1.0 - PROBABILITY_MARGIN);
            self.loss_sum -= y * clipped.ln() + (1.0 - y) * (1.0 - clipped).ln();
            self.prediction_sum += p;
            self.label_sum += y;
        }
        self.samples += predictions.len() as u64;
    }

    /// Adds the samples of another part. A part with another number of buckets adds no counts.
    pub fn merge(&mut self, other: &Self) {
        self.samples += other.samples;
        self.loss_sum += other.loss_sum;
        self.prediction_sum += other.prediction_sum;
        self.label_sum += other.label_sum;
        if self.counts.is_empty() {
            self.counts.clone_from(&other.counts);
            return;
        }
        for (sum, count) in self.counts.iter_mut().zip(&other.counts) {
            *sum = sum.saturating_add(*count);
        }
    }

    /// The metrics of the samples.
    #[must_use]
    pub fn metrics(&self) -> WindowMetrics {
        let samples = self.samples.max(1) as f64;
        let counts = self.counts.chunks_exact(2).map(|of| (u64::from(of[1]), u64::from(of[0])));
        WindowMetrics {
            auc: auc_of_counts(counts),
            normalized_entropy: normalize(self.loss_sum / samples, self.label_sum / samples),
            calibration: ratio(self.prediction_sum, self.label_sum),
            samples: self.samples,
        }
    }
}

/// The latest samples of all workers.
#[derive(Debug, Default)]
pub struct QualityWindow {
    parts: VecDeque<WindowPart>,
    samples: u64,
}

impl QualityWindow {
    /// Parts of a full window, at most.
    const PARTS: u64 = 64;

    /// Adds a part. Drops the oldest parts while the others have `full` samples, which are a full
    /// window.
    pub fn push(&mut self, part: WindowPart, full: u64) {
        if part.samples == 0 {
            return;
        }
        self.samples += part.samples;
        match self.parts.back_mut() {
            Some(last) if last.samples + part.samples <= full / Self::PARTS => last.merge(&part),
            _ => self.parts.push_back(part),
        }
        while let Some(oldest) = self.parts.front().map(|part| part.samples)
            && self.samples - oldest >= full
        {
            self.samples -= oldest;
            self.parts.pop_front();
        }
    }

    /// Samples in the window.
    #[must_use]
    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// The metrics of the window; `None` without samples.
    #[must_use]
    pub fn metrics(&self) -> Option<WindowMetrics> {
        let mut all = WindowPart::default();
        self.parts.iter().for_each(|part| all.merge(part));
        (all.samples > 0).then(|| all.metrics())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::sample;
    use super::super::{auc, calibration, normalized_entropy};
    use super::*;

    const FULL: u64 = 100_000;

    fn part(predictions: &[f32], labels: &[f32]) -> WindowPart {
        let mut part = WindowPart::default();
        part.push(predictions, labels);
        part
    }

    #[test]
    fn a_window_of_several_workers_has_the_metrics_of_all_samples() {
        let (predictions, labels) = sample(20_000, 1 << 40, 4);
        let mut window = QualityWindow::default();
        for (predictions, labels) in predictions.chunks(700).zip(labels.chunks(700)) {
            window.push(part(predictions, labels), FULL);
        }
        let found = window.metrics().unwrap();
        let near = |found: Option<f64>, exact: Option<f64>, by: f64| (found.unwrap() - exact.unwrap()).abs() < by;
        assert!(near(found.auc, auc(&predictions, &labels), 5e-4), "{found:?}");
        assert!(near(found.normalized_entropy, normalized_entropy(&predictions, &labels), 1e-6), "{found:?}");
        assert!(near(found.calibration, calibration(&predictions, &labels), 1e-6), "{found:?}");
        assert_eq!(found.samples, 20_000);
    }

    #[test]
    fn a_window_forgets_and_stays_bounded() {
        let mut window = QualityWindow::default();
        assert_eq!(window.metrics(), None);
        window.push(part(&[0.9; 1_000], &[0.0; 1_000]), FULL);
        for _ in 0..FULL / 100 + 20 {
            window.push(part(&[0.75, 0.25].repeat(50), &[1.0, 0.0].repeat(50)), FULL);
        }
        let found = window.metrics().unwrap();
        assert_eq!((found.auc, found.calibration), (Some(1.0), Some(1.0)), "the first samples are gone");
        assert!((FULL..FULL + 2_000).contains(&found.samples) && window.samples() == found.samples, "{found:?}");
        assert!(window.parts.len() as u64 <= QualityWindow::PARTS + 8, "{}", window.parts.len());
    }

    #[test]
    fn undefined_metrics_are_none() {
        let metrics = part(&[0.5, f32::NAN], &[0.0; 2]).metrics();
        assert_eq!((metrics.auc, metrics.normalized_entropy, metrics.calibration), (None, None, None));
        assert_eq!(part(&[], &[]).metrics().samples, 0);
    }
}
