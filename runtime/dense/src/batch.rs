//! The input and the output of a training step, on the host.

/// The inputs of a batch, row-major. An input that the model does not take is empty.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Features<'a> {
    /// Rows of the batch, from 0.
    pub samples: usize,
    /// `[samples, dense_features]`.
    pub dense: &'a [f32],
    /// Pooled embeddings, `[samples, Σ dims]`, concatenated in feature order.
    pub embeddings: &'a [f32],
    /// Pooled first-order weights, `[samples, F]`.
    pub linear: &'a [f32],
}

/// The results of a training step, besides the gradients of the parameters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepOutput {
    /// Σ over the samples of the loss, by task, neither weighted nor scaled.
    pub loss_sums: Vec<f64>,
    /// Predictions from before the update, `[samples, tasks]`.
    pub predictions: Vec<f32>,
    /// d(scale·Σ loss)/d(pooled embeddings), `[samples, Σ dims]`.
    pub embedding_gradients: Vec<f32>,
    /// d(scale·Σ loss)/d(pooled first-order weights), `[samples, F]`; empty when the model takes
    /// none.
    pub linear_gradients: Vec<f32>,
}

impl StepOutput {
    /// Σ over the samples of the first task's loss, not scaled: the loss of a job with one label.
    pub fn loss_sum(&self) -> f64 {
        self.loss_sums.first().copied().unwrap_or_default()
    }
}
