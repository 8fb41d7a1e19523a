//! A training pass over part of a batch, on any device: inputs to logits, and the logits' derivative back to every leaf.

use std::ops::Range;

use burn::tensor::{Device, Gradients, Tensor};

use crate::layers::{Dropout, Parameters, matrix};
use crate::model::{Inputs, Model};
use crate::tower::{Features, StepOutput};

/// What a training pass is computed from, besides the parameters.
pub(crate) struct Pass<'a> {
    pub(crate) model: &'a Model,
    pub(crate) features: Features<'a>,
    pub(crate) labels: &'a [f32],
    /// What Σ loss is multiplied by before it is differentiated.
    pub(crate) scale: f32,
    pub(crate) dropout: Dropout,
}

/// What a training pass yields.
pub(crate) struct Passed {
    pub(crate) output: StepOutput,
    /// The first parameter, in layout order, whose gradient is not finite.
    pub(crate) broken: Option<usize>,
}

/// A forward pass that remembers how it came about.
pub(crate) struct Graph {
    /// `[B, 1]`.
    pub(crate) logits: Tensor<2>,
    /// The leaves: parameters in layout order, and the inputs that have gradients.
    pub(crate) parameters: Vec<Tensor<2>>,
    pub(crate) embeddings: Option<Tensor<2>>,
    pub(crate) linear: Option<Tensor<2>>,
}

impl Pass<'_> {
    /// The forward pass of the samples in `shard`, in a graph of its own.
    pub(crate) fn forward(&self, parameters: &Parameters<'_>, shard: &Range<usize>, device: &Device) -> Graph {
        let leaf = |tensor: Tensor<2>| tensor.autodiff().require_grad();
        let products = parameters.products;
        let parameters: Vec<Tensor<2>> = parameters.tensors.iter().cloned().map(leaf).collect();
        let inputs = inputs(self.model, &self.features, shard, device);
        let embeddings = inputs.embeddings.map(leaf);
        let linear = inputs.linear.map(leaf);
        let inputs = Inputs { dense: inputs.dense, embeddings: embeddings.clone(), linear: linear.clone() };
        let dropout = Dropout { first_sample: shard.start, ..self.dropout };
        let logits = self.model.forward(&Parameters { tensors: &parameters, products }, inputs, dropout);
        Graph { logits, parameters, embeddings, linear }
    }
}

impl Graph {
    /// The gradients of every leaf, given `[B, 1]`, the loss's derivative by the logits.
    pub(crate) fn backward(&self, derivative: Tensor<2>) -> Gradients {
        // The gradient of Σ logit·c with a constant c is c: this hands the loss's derivative to the graph.
        (self.logits.clone() * derivative).sum().backward()
    }
}

/// The rows of a shard as tensors outside any graph.
pub(crate) fn inputs(model: &Model, features: &Features<'_>, shard: &Range<usize>, device: &Device) -> Inputs {
    let rows = |values: &[f32], columns: usize| {
        (columns > 0).then(|| {
            let rows = values[shard.start * columns..shard.end * columns].to_vec();
            matrix(rows, [shard.len(), columns], device)
        })
    };
    Inputs {
        dense: rows(features.dense, model.dense_width()),
        embeddings: rows(features.embeddings, model.embedding_width()),
        linear: rows(features.linear, model.linear_width()),
    }
}
