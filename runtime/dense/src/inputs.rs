//! The three inputs of a click model, by name.

/// One `T` for each of the three inputs; `None` for an input that the model does not take. A
/// forward pass has tensors of a batch here, an ONNX graph its values.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Inputs<T> {
    /// Dense features, `[B, dense]`.
    pub dense: Option<T>,
    /// Pooled embeddings, `[B, Σ dims]`, concatenated in feature order.
    pub embeddings: Option<T>,
    /// Pooled first-order weights, `[B, F]`: one a sparse feature.
    pub linear: Option<T>,
}

/// Columns of each input that a model takes; 0 for an input that it does not take.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct InputWidths {
    /// Dense features.
    pub dense: usize,
    /// Pooled embeddings: Σ dims.
    pub embeddings: usize,
    /// Pooled first-order weights: the number of sparse features.
    pub linear: usize,
}
