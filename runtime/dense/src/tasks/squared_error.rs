//! Squared error, for labels that are quantities.

use burn::tensor::Tensor;

use super::{Loss, SampleLoss};
use crate::metrics::Metric;

/// ½(x − y)² for finite labels y; the prediction is the logit x itself.
#[derive(Debug, Clone, Copy)]
pub struct SquaredError;

impl Loss for SquaredError {
    fn name(&self) -> &'static str {
        "squared error"
    }

    fn takes(&self, label: f32) -> bool {
        label.is_finite()
    }

    fn labels(&self) -> &'static str {
        "finite labels"
    }

    fn predict(&self, logit: f64) -> f64 {
        if logit.is_infinite() { f64::NAN } else { logit }
    }

    fn evaluate(&self, logit: f64, label: f64) -> SampleLoss {
        let derivative = logit - label;
        SampleLoss { loss: 0.5 * derivative * derivative, prediction: self.predict(logit), derivative }
    }

    fn derivative(&self, logits: Tensor<2>, labels: Tensor<2>) -> Tensor<2> {
        logits - labels
    }

    fn onnx_operator(&self) -> &'static str {
        "Identity"
    }

    fn metrics(&self) -> &'static [Metric] {
        &[Metric::MeanSquaredError, Metric::Calibration]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_derivative_is_the_slope_of_the_loss() {
        for (logit, label) in [(0.0, 0.0), (1.5, -2.0), (-3.0, 7.5)] {
            let at = |logit| SquaredError.evaluate(logit, label);
            let slope = (at(logit + 1e-6).loss - at(logit - 1e-6).loss) / 2e-6;
            assert!((at(logit).derivative - slope).abs() < 1e-6);
            assert_eq!(at(logit).prediction, logit);
        }
        assert!(SquaredError.predict(f64::INFINITY).is_nan());
    }
}
