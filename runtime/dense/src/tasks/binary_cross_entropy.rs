//! Binary cross-entropy on a logit.

use burn::tensor::{Tensor, activation};

use super::{Loss, SampleLoss};
use crate::metrics::Metric;

/// −y ln σ(x) − (1−y) ln(1−σ(x)) for labels y from 0 to 1; the prediction is σ(x).
///
/// At a logit of exactly 0, the closed form has the correct derivative, σ(x) − y. A model that
/// starts at zero has only such logits. Automatic differentiation of the usual `max(x, 0) − xy +
/// ln(1 + e^−|x|)` is wrong there, because its parts have kinks at 0.
#[derive(Debug, Clone, Copy)]
pub struct BinaryCrossEntropy;

impl Loss for BinaryCrossEntropy {
    fn name(&self) -> &'static str {
        "binary cross-entropy"
    }

    fn takes(&self, label: f32) -> bool {
        (0.0..=1.0).contains(&label)
    }

    fn labels(&self) -> &'static str {
        "labels from 0 to 1"
    }

    fn predict(&self, logit: f64) -> f64 {
        sigmoid(logit)
    }

    fn evaluate(&self, logit: f64, label: f64) -> SampleLoss {
        let prediction = sigmoid(logit);
        SampleLoss { loss: cross_entropy(logit, label), prediction, derivative: prediction - label }
    }

    fn derivative(&self, logits: Tensor<2>, labels: Tensor<2>) -> Tensor<2> {
        activation::sigmoid(logits) - labels
    }

    fn onnx_operator(&self) -> &'static str {
        "Sigmoid"
    }

    fn metrics(&self) -> &'static [Metric] {
        &[Metric::Auc, Metric::Gauc, Metric::LogLoss, Metric::NormalizedEntropy, Metric::Calibration]
    }
}

/// σ(x) without overflow; NaN for an infinite logit.
pub(super) fn sigmoid(logit: f64) -> f64 {
    if logit.is_infinite() {
        return f64::NAN;
    }
    let small = (-logit.abs()).exp();
    if logit >= 0.0 { 1.0 / (1.0 + small) } else { small / (1.0 + small) }
}

/// The loss without overflow or cancellation.
pub(super) fn cross_entropy(logit: f64, label: f64) -> f64 {
    logit.max(0.0) - logit * label + (-logit.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tasks::Tasks;

    #[test]
    fn the_loss_is_the_negative_log_likelihood() {
        for logit in [-3.0, -0.5, 0.0, 0.25, 4.0_f32] {
            for label in [0.0, 0.3, 1.0_f32] {
                let p = 1.0 / (1.0 + (-f64::from(logit)).exp());
                let expected = -f64::from(label) * p.ln() - (1.0 - f64::from(label)) * (1.0 - p).ln();
                let got = Tasks::single(BinaryCrossEntropy).evaluate(&[logit], &[label], 0.5);
                assert!((got.loss_sums[0] - expected).abs() < 1e-12);
                assert!((f64::from(got.predictions[0]) - p).abs() < 1e-7);
                assert!((f64::from(got.logit_gradients[0]) - 0.5 * (p - f64::from(label))).abs() < 1e-7);
            }
        }
    }

    #[test]
    fn huge_logits_stay_finite() {
        let got = Tasks::single(BinaryCrossEntropy).evaluate(&[1e30, -1e30, 200.0], &[0.0, 1.0, 1.0], 1.0);
        assert!((got.loss_sums[0] / 2e30 - 1.0).abs() < 1e-6);
        assert_eq!(got.predictions, [1.0, 0.0, 1.0]);
        assert_eq!(got.logit_gradients, [1.0, -1.0, 0.0]);
    }

    #[test]
    fn an_infinite_logit_is_not_taken_for_certainty() {
        let logits = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        let got = Tasks::single(BinaryCrossEntropy).evaluate(&logits, &[1.0, 0.0, 1.0], 1.0);
        assert!(got.predictions.iter().all(|prediction| prediction.is_nan()));
    }

    #[test]
    fn a_logit_of_exactly_zero_has_its_right_gradient() {
        let got = Tasks::single(BinaryCrossEntropy).evaluate(&[0.0, 0.0], &[0.0, 1.0], 1.0);
        assert_eq!(got.logit_gradients, [0.5, -0.5]);
    }
}
