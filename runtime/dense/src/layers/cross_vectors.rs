//! The cross layers of DCN, whose weights are vectors.

use std::ops::Range;

use burn::tensor::Tensor;

use super::Context;
use crate::layout::{Initializer, ParameterId, ParameterLayout};
use crate::onnx::{Graph, Value};

/// Cross layers `x ← x₀ (x·w) + b + x` (Wang et al. 2017, equation 3), and the products of the last
/// x with the vectors of the logits.
///
/// Every x is α x₀ + β, with a number α for each sample and a vector β for all samples. A layer
/// adds `α (x₀·w) + β·w` to α, and b to β. So one product of x₀ with all vectors is enough, and
/// parameter servers can compute it in the mode `des`.
#[derive(Debug, Clone)]
pub struct VectorCrosses {
    /// `[D, layers + logits]`: a column for each w, and then for each logit.
    weight: ParameterId,
    /// b of each layer, `[1, D]`.
    biases: Vec<ParameterId>,
    shape: CrossShape,
}

/// The sizes of [`VectorCrosses`].
#[derive(Debug, Clone, Copy)]
pub struct CrossShape {
    /// Columns of x₀.
    pub width: usize,
    /// Columns of x₀ that other processes may multiply: the first ones.
    pub summed: usize,
    /// Number of cross layers.
    pub layers: usize,
    /// Logits of a sample.
    pub logits: usize,
}

impl VectorCrosses {
    /// Adds the parameters `{name}.weight`, `[width, layers + logits]`, and `{name}.0.bias` and so
    /// on, `[1, width]`.
    ///
    /// # Panics
    /// If the layout has one of them.
    pub fn new(layout: &mut ParameterLayout, name: &str, shape: CrossShape) -> Self {
        let CrossShape { width, layers, logits, .. } = shape;
        let initializer = Initializer::Linear { fan_in: width };
        let weight = layout.push(format!("{name}.weight"), [width, layers + logits], initializer);
        let mut bias = |layer| layout.push(format!("{name}.{layer}.bias"), [1, width], Initializer::Zeros);
        let biases = (0..layers).map(&mut bias).collect();
        Self { weight, biases, shape }
    }

    /// x₀, `[B, D]`, to `[B, logits]`.
    pub fn forward(&self, context: &Context<'_>, x0: Tensor<2>) -> Tensor<2> {
        let weight = context.parameter(self.weight);
        self.cross(context, x0.matmul(weight.clone()), &weight)
    }

    /// [`Self::forward`], after other processes have multiplied the first columns of x₀. `sums`,
    /// `[B, layers + logits]`, are their products. `rest` has the other columns of x₀, if there are
    /// some.
    pub fn forward_summed(&self, context: &Context<'_>, sums: Tensor<2>, rest: Option<Tensor<2>>) -> Tensor<2> {
        let weight = context.parameter(self.weight);
        let products = match rest {
            Some(rest) => {
                let rows = weight.clone().narrow(0, self.shape.summed, self.shape.width - self.shape.summed);
                rest.matmul(rows) + sums
            }
            None => sums,
        };
        self.cross(context, products, &weight)
    }

    /// `products` are x₀·w for each column of the weight.
    fn cross(&self, context: &Context<'_>, products: Tensor<2>, weight: &Tensor<2>) -> Tensor<2> {
        let mut alpha: Option<Tensor<2>> = None;
        let mut beta: Option<Tensor<2>> = None;
        for (layer, bias) in self.biases.iter().enumerate() {
            let product = columns_product(layer..layer + 1, [&products, weight], alpha.as_ref(), beta.as_ref());
            alpha = Some(match alpha {
                Some(alpha) => alpha + product,
                None => product + 1.0,
            });
            let bias = context.parameter(*bias);
            beta = Some(match beta {
                Some(beta) => beta + bias,
                None => bias,
            });
        }
        let layers = self.biases.len();
        columns_product(layers..layers + self.shape.logits, [&products, weight], alpha.as_ref(), beta.as_ref())
    }

    /// [`Self::forward`] in a graph.
    pub fn onnx(&self, graph: &mut Graph<'_>, x0: &Value) -> Value {
        let weight = graph.parameter(self.weight);
        let products = graph.op("MatMul", &[x0, &weight]);
        self.onnx_cross(graph, &products, &weight)
    }

    /// [`Self::forward_summed`] in a graph.
    pub fn onnx_summed(&self, graph: &mut Graph<'_>, sums: &Value, rest: Option<&Value>) -> Value {
        let weight = graph.parameter(self.weight);
        let Some(rest) = rest else { return self.onnx_cross(graph, sums, &weight) };
        let rows = graph.rows(&weight, self.shape.summed..self.shape.width);
        let product = graph.op("MatMul", &[rest, &rows]);
        let products = graph.op("Add", &[&product, sums]);
        self.onnx_cross(graph, &products, &weight)
    }

    fn onnx_cross(&self, graph: &mut Graph<'_>, products: &Value, weight: &Value) -> Value {
        let mut alpha = graph.float("one", 1.0);
        let mut beta: Option<Value> = None;
        for (layer, bias) in self.biases.iter().enumerate() {
            let product = onnx_columns_product(graph, layer..layer + 1, [products, weight], &alpha, beta.as_ref());
            alpha = graph.op("Add", &[&alpha, &product]);
            let bias = graph.parameter(*bias);
            beta = Some(match beta {
                Some(beta) => graph.op("Add", &[&beta, &bias]),
                None => bias,
            });
        }
        let layers = self.biases.len();
        onnx_columns_product(graph, layers..layers + self.shape.logits, [products, weight], &alpha, beta.as_ref())
    }
}

/// [`columns_product`] in a graph, with the products and the weight.
fn onnx_columns_product(
    graph: &mut Graph<'_>,
    columns: Range<usize>,
    [products, weight]: [&Value; 2],
    alpha: &Value,
    beta: Option<&Value>,
) -> Value {
    let product = graph.columns(products, columns.clone());
    let scaled = graph.op("Mul", &[alpha, &product]);
    let Some(beta) = beta else { return scaled };
    let vectors = graph.columns(weight, columns);
    let offset = graph.op("MatMul", &[beta, &vectors]);
    graph.op("Add", &[&scaled, &offset])
}

/// x·w for some columns of the weight, with x = α x₀ + β. Without α it is 1, and without β it is 0.
fn columns_product(
    columns: Range<usize>,
    [products, weight]: [&Tensor<2>; 2],
    alpha: Option<&Tensor<2>>,
    beta: Option<&Tensor<2>>,
) -> Tensor<2> {
    let product = products.clone().narrow(1, columns.start, columns.len());
    let product = match alpha {
        Some(alpha) => alpha.clone() * product,
        None => product,
    };
    match beta {
        Some(beta) => product + beta.clone().matmul(weight.clone().narrow(1, columns.start, columns.len())),
        None => product,
    }
}
