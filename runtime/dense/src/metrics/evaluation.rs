//! The metrics of a whole evaluation: the samples of one task, collected batch by batch.

use super::{auc_of_sorted, gauc, log_loss_of, mean, normalize, ratio, sum};

/// A metric of one task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metric {
    /// [`super::auc`].
    Auc,
    /// [`super::gauc`].
    Gauc,
    /// [`super::log_loss`], in nats.
    LogLoss,
    /// [`super::normalized_entropy`].
    NormalizedEntropy,
    /// [`super::calibration`].
    Calibration,
    /// Mean of (prediction − label)².
    MeanSquaredError,
}

/// The metrics of one task, as its loss names them.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskMetrics {
    /// The task's name.
    pub task: String,
    /// Samples evaluated.
    pub samples: u64,
    /// Each metric; `None` where it is undefined.
    pub values: Vec<(Metric, Option<f64>)>,
}

impl TaskMetrics {
    /// `groups` has one group a sample, or none.
    pub(crate) fn new(task: &str, metrics: &[Metric], predictions: &[f32], labels: &[f32], groups: &[u64]) -> Self {
        let mut all = Evaluation::default();
        all.push(predictions, labels);
        let summary = all.finish();
        let value = |metric: &Metric| match metric {
            Metric::Auc => summary.auc,
            Metric::Gauc if groups.is_empty() => None,
            Metric::Gauc => gauc(predictions, labels, groups),
            Metric::LogLoss => summary.log_loss,
            Metric::NormalizedEntropy => summary.normalized_entropy,
            Metric::Calibration => summary.calibration,
            Metric::MeanSquaredError => summary.mean_squared_error,
        };
        let values = metrics.iter().map(|metric| (*metric, value(metric))).collect();
        Self { task: task.to_owned(), samples: summary.samples, values }
    }

    /// The value of a metric; `None` if it is undefined or not one of the task's.
    pub fn value(&self, metric: Metric) -> Option<f64> {
        self.values.iter().find(|(own, _)| *own == metric).and_then(|(_, value)| *value)
    }
}

/// The result of an evaluation. A value is `None` where it is undefined: see the function of its
/// name.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EvaluationSummary {
    /// Samples evaluated.
    pub samples: u64,
    /// See [`super::auc`].
    pub auc: Option<f64>,
    /// See [`super::log_loss`], in nats.
    pub log_loss: Option<f64>,
    /// See [`super::normalized_entropy`].
    pub normalized_entropy: Option<f64>,
    /// See [`super::calibration`].
    pub calibration: Option<f64>,
    /// Mean of (prediction − label)².
    pub mean_squared_error: Option<f64>,
}

/// Collects an evaluation batch by batch. It keeps every prediction and label (8 bytes a sample),
/// because the exact AUC needs them all. The order of the samples does not change the summary, not
/// even its last bit.
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

    /// Adds the samples of another.
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
        let squares = scored.iter().map(|&(prediction, label)| (f64::from(prediction) - f64::from(label)).powi(2));
        EvaluationSummary {
            samples: scored.len() as u64,
            auc: auc_of_sorted(scored),
            log_loss,
            normalized_entropy: log_loss.zip(mean(labels())).and_then(|(loss, rate)| normalize(loss, rate)),
            calibration: ratio(sum(predictions()), sum(labels())),
            mean_squared_error: (!scored.is_empty()).then(|| squares.sum::<f64>() / scored.len() as f64),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::sample;
    use super::super::{auc, calibration, log_loss, normalized_entropy};
    use super::*;

    #[test]
    fn the_order_of_the_samples_does_not_change_a_summary() {
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
    fn squared_error_has_a_known_value() {
        let mut evaluation = Evaluation::default();
        evaluation.push(&[2.0, 4.0, -1.0], &[3.0, 4.0, 1.0]);
        assert_eq!(evaluation.finish().mean_squared_error, Some(5.0 / 3.0));
    }
}
