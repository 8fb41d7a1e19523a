//! Notices that training diverges. Pure.
//!
//! A value that is not finite ends training at once. But an exploded model may predict finite
//! constants for a while, with an absurd loss. So the mean loss of each batch is compared with a
//! normal one. That is the largest of three: the first batch's loss, the smallest loss so far, and
//! the loss of a model whose logits are all 0. The last one makes labels and outliers of any size
//! normal.

use rectrain_dense::DenseError;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::failure::Divergence;

/// The losses of a worker's batches.
#[derive(Debug)]
pub(crate) struct LossWatch {
    /// `spec.training.divergenceFactor`
    factor: f64,
    /// The smallest mean loss; `None` before the first batch.
    best: Option<f64>,
    /// The largest mean loss that is known to be normal.
    normal: f64,
}

impl LossWatch {
    pub(crate) fn new(factor: f64) -> Self {
        Self { factor, best: None, normal: 0.0 }
    }

    /// Adds the mean loss of a batch. `unlearned` computes the mean loss of a model that has
    /// learned nothing. It is called for few batches.
    ///
    /// # Errors
    /// [`RoleError::Exploded`] if the loss is more than `factor` times a normal one.
    pub(crate) fn check(&mut self, step: u64, loss: f64, unlearned: impl FnOnce() -> f64) -> Result<(), RoleError> {
        let Some(best) = self.best else {
            self.normal = unlearned().max(loss);
            self.best = Some(loss);
            return Ok(());
        };
        if loss > self.factor * self.normal {
            self.normal = self.normal.max(unlearned());
        }
        if loss > self.factor * self.normal {
            let reason = format!(
                "the mean loss of a batch in training step {step} is {loss:.4e}, more than {} times a normal one ({:.4e}; spec.training.divergenceFactor); lower the learning rates in spec.training.optimizer, or scale dense features and labels",
                self.factor, self.normal
            );
            return Err(self.exploded(step, Some(loss), reason));
        }
        self.best = Some(best.min(loss));
        Ok(())
    }

    /// The error for a value that is not finite.
    pub(crate) fn not_finite(&self, step: u64, error: &DenseError) -> RoleError {
        self.exploded(step, None, error.to_string())
    }

    fn exploded(&self, step: u64, loss: Option<f64>, mut reason: String) -> RoleError {
        if let Some(best) = self.best {
            reason += &format!(". The best mean loss of a batch was {best:.4e}");
        }
        RoleError::Exploded { reason, divergence: Divergence { step: Some(step), loss, best_loss: self.best } }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    #[test]
    fn a_loss_beyond_the_factor_diverges_with_its_figures() {
        let mut watch = LossWatch::new(1000.0);
        for (step, loss) in [0.7, 0.5, 600.0, 0.4].into_iter().enumerate() {
            watch.check(step as u64, loss, || 0.69).unwrap();
        }
        let error = watch.check(4, 2.6e18, || 0.69).unwrap_err();
        let figures = Divergence { step: Some(4), loss: Some(2.6e18), best_loss: Some(0.4) };
        assert_eq!(error.divergence(), Some(figures));
        let message = error.to_string();
        for part in ["step 4", "2.6000e18", "more than 1000 times", "lower the learning rates", "4.0000e-1"] {
            assert!(message.contains(part), "{part}: {message}");
        }
    }

    #[test]
    fn an_outlier_among_the_labels_is_no_divergence() {
        let mut watch = LossWatch::new(1000.0);
        watch.check(0, 1e-6, || 0.0).unwrap();
        // The label is 1e3 and the prediction 0: a model that has learned nothing has this loss.
        watch.check(1, 5e5, || 5e5).unwrap();
        watch.check(2, 450.0, || 0.0).unwrap();
        assert!(watch.check(3, 6e8, || 0.0).is_err());
    }

    #[test]
    fn a_bad_first_loss_is_normal() {
        let mut watch = LossWatch::new(10.0);
        for loss in [50.0, 3.0, 400.0] {
            watch.check(0, loss, || 1e-7).unwrap();
        }
        assert!(watch.check(0, 501.0, || 1e-7).is_err());
    }
}
