//! The first-order part of LR, FM, DeepFM and Wide&Deep.

use burn::tensor::Tensor;

use super::Context;
use crate::inputs::Inputs;
use crate::layout::{Initializer, ParameterId, ParameterLayout};
use crate::onnx::{Graph, Value};

/// `Σ_f w_f + x_dense·w + b`, where `w_f` are the pooled first-order weights of the sparse
/// features. Without dense features, the term `x_dense·w` is absent.
#[derive(Debug, Clone)]
pub struct FirstOrder {
    dense: Option<ParameterId>,
    bias: ParameterId,
}

impl FirstOrder {
    /// Adds the parameters `firstOrder.weight`, `[dense_features, 1]`, and `firstOrder.bias`, `[1,
    /// 1]`. They start at 0, like the first-order weights of ids. Few weights with random initial
    /// values would keep them for many steps at small learning rates.
    ///
    /// # Panics
    /// If the layout has one of them.
    pub fn new(layout: &mut ParameterLayout, dense_features: usize) -> Self {
        let dense =
            (dense_features > 0).then(|| layout.push("firstOrder.weight", [dense_features, 1], Initializer::Zeros));
        let bias = layout.push("firstOrder.bias", [1, 1], Initializer::Zeros);
        Self { dense, bias }
    }

    /// The dense features and first-order weights among `inputs` to `[B, 1]`.
    pub fn forward(&self, context: &Context<'_>, inputs: &Inputs<Tensor<2>>) -> Tensor<2> {
        let mut sum = context.parameter(self.bias);
        if let Some(weights) = &inputs.linear {
            sum = weights.clone().sum_dim(1) + sum;
        }
        if let (Some(dense), Some(weight)) = (&inputs.dense, self.dense) {
            sum = dense.clone().matmul(context.parameter(weight)) + sum;
        }
        sum
    }

    /// [`FirstOrder::forward`] in a graph.
    pub fn onnx(&self, graph: &mut Graph<'_>, inputs: &Inputs<Value>) -> Value {
        let mut sum = graph.parameter(self.bias);
        if let Some(weights) = &inputs.linear {
            let sparse = graph.sum_columns(weights);
            sum = graph.op("Add", &[&sparse, &sum]);
        }
        if let (Some(dense), Some(weight)) = (&inputs.dense, self.dense) {
            let weight = graph.parameter(weight);
            let product = graph.op("MatMul", &[dense, &weight]);
            sum = graph.op("Add", &[&product, &sum]);
        }
        sum
    }
}
