//! The fake negative weighted loss, for labels that come after their rows.

use burn::tensor::{Tensor, activation};

use super::binary_cross_entropy::{BinaryCrossEntropy, cross_entropy, sigmoid};
use super::{Loss, SampleLoss};
use crate::metrics::Metric;

/// −y (1+⟦p⟧) ln p − (1−y) (1−⟦p⟧) (1+⟦p⟧) ln(1−p) for labels y from 0 to 1 (Ktena et al. 2019,
/// "fake negative weighted"). The prediction is p = σ(x). ⟦p⟧ is p as a constant: the derivative
/// does not see it.
///
/// Each row comes with the label 0 first, and once more with the label 1 if it is positive. So of
/// the records of rows with the positive probability P, the share P / (1+P) has the label 1. The
/// weights are the ratios of the true frequencies to these: 1+P, and (1−P) (1+P). The model's own p
/// stands for P. The mean derivative is (1−p²) (p−P) / (1+P), which is 0 at p = P only.
///
/// It has the labels, the predictions and the metrics of [`BinaryCrossEntropy`].
#[derive(Debug, Clone, Copy)]
pub struct FakeNegativeWeighted;

impl Loss for FakeNegativeWeighted {
    fn name(&self) -> &'static str {
        "fake negative weighted cross-entropy"
    }

    fn takes(&self, label: f32) -> bool {
        BinaryCrossEntropy.takes(label)
    }

    fn labels(&self) -> &'static str {
        BinaryCrossEntropy.labels()
    }

    fn predict(&self, logit: f64) -> f64 {
        BinaryCrossEntropy.predict(logit)
    }

    fn evaluate(&self, logit: f64, label: f64) -> SampleLoss {
        // 1−p without cancellation.
        let (prediction, rest) = (sigmoid(logit), sigmoid(-logit));
        let (positive, negative) = (1.0 + prediction, rest * (1.0 + prediction));
        let loss = label * positive * cross_entropy(logit, 1.0) + (1.0 - label) * negative * cross_entropy(logit, 0.0);
        SampleLoss { loss, prediction, derivative: negative * ((1.0 - label) * prediction - label) }
    }

    fn derivative(&self, logits: Tensor<2>, labels: Tensor<2>) -> Tensor<2> {
        let predictions = activation::sigmoid(logits);
        let negative = (predictions.clone() * predictions.clone()).neg().add_scalar(1.0);
        negative * (predictions * labels.clone().neg().add_scalar(1.0) - labels)
    }

    fn onnx_operator(&self) -> &'static str {
        BinaryCrossEntropy.onnx_operator()
    }

    fn metrics(&self) -> &'static [Metric] {
        BinaryCrossEntropy.metrics()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::Tasks;

    fn probability(logit: f64) -> f64 {
        1.0 / (1.0 + (-logit).exp())
    }

    /// The loss as the paper has it, with the weights of the logit `frozen`.
    fn naive(logit: f64, frozen: f64, label: f64) -> f64 {
        let (p, weight) = (probability(logit), probability(frozen));
        -label * (1.0 + weight) * p.ln() - (1.0 - label) * (1.0 - weight) * (1.0 + weight) * (1.0 - p).ln()
    }

    #[test]
    fn the_derivative_is_the_slope_with_constant_weights() {
        for logit in [-4.0, -0.7, 0.0, 0.3, 2.5] {
            for label in [0.0, 0.3, 1.0] {
                let found = FakeNegativeWeighted.evaluate(logit, label);
                assert!((found.loss - naive(logit, logit, label)).abs() < 1e-12, "{logit} {label}: {found:?}");
                let slope = (naive(logit + 1e-5, logit, label) - naive(logit - 1e-5, logit, label)) / 2e-5;
                assert!((found.derivative - slope).abs() < 1e-8, "{logit} {label}: {found:?}, slope {slope}");
                assert!((found.prediction - probability(logit)).abs() < 1e-15);
            }
        }
    }

    #[test]
    fn the_mean_derivative_is_zero_at_the_true_probability() {
        for truth in [0.01, 0.2, 0.5, 0.9] {
            for p in [0.05, 0.2, 0.5, 0.8, truth] {
                let logit = f64::ln(p / (1.0 - p));
                let [negative, positive] =
                    [0.0, 1.0].map(|label| FakeNegativeWeighted.evaluate(logit, label).derivative);
                // A row comes as a negative, and with the probability `truth` as a positive too.
                let mean = (negative + truth * positive) / (1.0 + truth);
                let expected = (1.0 - p * p) * (p - truth) / (1.0 + truth);
                assert!((mean - expected).abs() < 1e-12, "{truth} {p}: {mean} {expected}");
            }
        }
    }

    /// The prediction of a model with one logit, after descent along gradients. Ten rows came as
    /// negatives, and three of them again as positives.
    fn learned(loss: impl Loss + 'static) -> f64 {
        let tasks = Tasks::single(loss);
        let labels = [[0.0; 10].as_slice(), &[1.0; 3]].concat();
        let mut logit = 0.0_f32;
        for _ in 0..5_000 {
            logit -= tasks.evaluate(&[logit; 13], &labels, 1.0 / 13.0).logit_gradients.iter().sum::<f32>();
        }
        probability(f64::from(logit))
    }

    #[test]
    fn a_model_learns_the_true_probability_from_fake_negatives() {
        let (weighted, plain) = (learned(FakeNegativeWeighted), learned(BinaryCrossEntropy));
        assert!((weighted - 0.3).abs() < 1e-4, "{weighted}");
        assert!((plain - 3.0 / 13.0).abs() < 1e-4, "{plain}");
    }

    #[test]
    fn a_device_has_the_derivatives_of_the_host() {
        let device = burn::tensor::Device::flex();
        let (logits, labels) = ([-3.0_f32, 0.0, 0.5, 4.0], [0.0_f32, 1.0, 0.25, 0.0]);
        let tensor = |values: [f32; 4]| {
            let [a, b, c, d] = values;
            Tensor::<2>::from_data([[a], [b], [c], [d]], &device)
        };
        let found = FakeNegativeWeighted.derivative(tensor(logits), tensor(labels));
        let found: Vec<f32> = found.into_data().try_into_vec().unwrap();
        for ((found, logit), label) in found.iter().zip(logits).zip(labels) {
            let expected = FakeNegativeWeighted.evaluate(f64::from(logit), f64::from(label)).derivative;
            assert!((f64::from(*found) - expected).abs() < 1e-6, "{logit} {label}: {found} {expected}");
        }
    }

    #[test]
    fn huge_logits_stay_finite_and_infinite_ones_are_no_certainty() {
        let got = Tasks::single(FakeNegativeWeighted).evaluate(&[1e30, -1e30, 200.0], &[0.0, 1.0, 1.0], 1.0);
        assert!(got.loss_sums[0].is_finite(), "{got:?}");
        assert_eq!((got.predictions, got.logit_gradients), (vec![1.0, 0.0, 1.0], vec![0.0, -1.0, 0.0]));
        let logits = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        let got = Tasks::single(FakeNegativeWeighted).evaluate(&logits, &[1.0, 0.0, 1.0], 1.0);
        assert!(got.predictions.iter().all(|prediction| prediction.is_nan()));
    }
}
