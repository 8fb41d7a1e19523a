//! Binary cross-entropy on logits in closed form. It is evaluated outside the autodiff graph: its derivative, σ(x) − y, is known,
//! the loss can then be summed in f64, and a logit of exactly 0 (every logit of a model that starts at zero) has its right
//! gradient, which the usual `max(x, 0) − xy + ln(1 + e^−|x|)` loses to the kinks of its parts.

/// Loss, predictions and derivative of a batch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LossOutput {
    /// Σ over samples, not scaled.
    pub(crate) loss_sum: f64,
    /// σ(x) a sample.
    pub(crate) predictions: Vec<f32>,
    /// scale · (σ(x) − y) a sample.
    pub(crate) logit_gradients: Vec<f32>,
}

/// σ(x) without overflow. An infinite logit is no prediction but an overflow before it, so it yields NaN, which the caller refuses.
pub(crate) fn sigmoid(logit: f64) -> f64 {
    if logit.is_infinite() {
        return f64::NAN;
    }
    let small = (-logit.abs()).exp();
    if logit >= 0.0 { 1.0 / (1.0 + small) } else { small / (1.0 + small) }
}

/// −y ln σ(x) − (1−y) ln(1−σ(x)) without overflow or cancellation.
fn cross_entropy(logit: f64, label: f64) -> f64 {
    logit.max(0.0) - logit * label + (-logit.abs()).exp().ln_1p()
}

/// Evaluates a batch. Labels lie in `[0, 1]`.
pub(crate) fn binary_cross_entropy(logits: &[f32], labels: &[f32], scale: f32) -> LossOutput {
    let mut loss_sum = 0.0;
    let (predictions, logit_gradients) = logits
        .iter()
        .zip(labels)
        .map(|(&logit, &label)| {
            let (logit, label) = (f64::from(logit), f64::from(label));
            let probability = sigmoid(logit);
            loss_sum += cross_entropy(logit, label);
            (probability as f32, (f64::from(scale) * (probability - label)) as f32)
        })
        .unzip();
    LossOutput { loss_sum, predictions, logit_gradients }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_is_the_negative_log_likelihood() {
        for logit in [-3.0, -0.5, 0.0, 0.25, 4.0_f32] {
            for label in [0.0, 0.3, 1.0_f32] {
                let p = 1.0 / (1.0 + (-f64::from(logit)).exp());
                let expected = -f64::from(label) * p.ln() - (1.0 - f64::from(label)) * (1.0 - p).ln();
                let got = binary_cross_entropy(&[logit], &[label], 0.5);
                assert!((got.loss_sum - expected).abs() < 1e-12);
                assert!((f64::from(got.predictions[0]) - p).abs() < 1e-7);
                assert!((f64::from(got.logit_gradients[0]) - 0.5 * (p - f64::from(label))).abs() < 1e-7);
            }
        }
    }

    #[test]
    fn huge_logits_stay_finite() {
        let got = binary_cross_entropy(&[1e30, -1e30, 200.0], &[0.0, 1.0, 1.0], 1.0);
        assert!((got.loss_sum / 2e30 - 1.0).abs() < 1e-6);
        assert_eq!(got.predictions, [1.0, 0.0, 1.0]);
        assert_eq!(got.logit_gradients, [1.0, -1.0, 0.0]);
    }

    #[test]
    fn an_infinite_logit_is_not_taken_for_certainty() {
        let got = binary_cross_entropy(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN], &[1.0, 0.0, 1.0], 1.0);
        assert!(got.predictions.iter().all(|prediction| prediction.is_nan()));
    }

    #[test]
    fn a_logit_of_exactly_zero_has_the_gradient_of_its_neighbours() {
        assert_eq!(binary_cross_entropy(&[0.0, 0.0], &[0.0, 1.0], 1.0).logit_gradients, [0.5, -0.5]);
    }
}
