//! Linear layers and stacks of them.

use burn::tensor::{FloatDType, Tensor, activation::relu};

use super::{Context, Dropout, Products};
use crate::Precision;
use crate::layout::{LinearParameters, ParameterLayout};
use crate::onnx::{Graph, Value};

/// `x·W + b`. A pass applies a layer once.
#[derive(Debug, Clone)]
pub struct Linear(LinearParameters);

impl Linear {
    /// Adds the parameters `{name}.weight`, `[inputs, outputs]`, and `{name}.bias`, `[1, outputs]`.
    ///
    /// # Panics
    /// If the layout has one of them.
    pub fn new(layout: &mut ParameterLayout, name: &str, inputs: usize, outputs: usize) -> Self {
        Self(layout.push_linear(name, inputs, outputs))
    }

    /// `[B, inputs]` to `[B, outputs]`.
    ///
    /// # Panics
    /// In training on the CPU, if the pass has applied this layer already. A layer keeps only one
    /// input for its gradient.
    pub fn forward(&self, context: &Context<'_>, input: Tensor<2>) -> Tensor<2> {
        let weight = context.parameter(self.0.weight);
        match context.products {
            Products::Packed(packed) => packed.linear(self.0, weight, input, false),
            Products::Device(precision) => product(input, weight, precision) + context.parameter(self.0.bias),
        }
    }

    /// [`Linear::forward`], followed by ReLU.
    ///
    /// # Panics
    /// As [`Linear::forward`].
    pub fn forward_relu(&self, context: &Context<'_>, input: Tensor<2>) -> Tensor<2> {
        match context.products {
            Products::Packed(packed) => packed.linear(self.0, context.parameter(self.0.weight), input, true),
            Products::Device(_) => relu(self.forward(context, input)),
        }
    }

    /// [`Linear::forward`] in a graph.
    pub fn onnx(&self, graph: &mut Graph<'_>, input: &Value) -> Value {
        let (weight, bias) = (graph.parameter(self.0.weight), graph.parameter(self.0.bias));
        graph.op("Gemm", &[input, &weight, &bias])
    }

    /// [`Linear::forward_relu`] in a graph.
    pub fn onnx_relu(&self, graph: &mut Graph<'_>, input: &Value) -> Value {
        let output = self.onnx(graph, input);
        graph.op("Relu", &[&output])
    }
}

/// `[B, inputs]` and `[inputs, outputs]` to `[B, outputs]`, on a device.
///
/// In bf16 the operands are rounded. The device sums in 32 bits and rounds each sum as it stores
/// it, forward and backward, like PyTorch's autocast on GPUs. A product with one column, which
/// makes a logit, stays in 32 bits. It is as fast, and logits of 8 bits would tie samples that
/// differ.
fn product(input: Tensor<2>, weight: Tensor<2>, precision: Precision) -> Tensor<2> {
    if precision == Precision::Fp32 || weight.dims()[1] == 1 {
        return input.matmul(weight);
    }
    let [input, weight] = [input, weight].map(|operand| operand.cast(FloatDType::BF16));
    input.matmul(weight).cast(FloatDType::F32)
}

/// Linear layers, each followed by ReLU and dropout.
#[derive(Debug, Clone)]
pub struct Mlp {
    layers: Vec<(Linear, Dropout)>,
    inputs: usize,
    outputs: usize,
}

impl Mlp {
    /// Adds one layer a size, `{name}.0`, `{name}.1`, …. `dropout` is a probability in `[0, 1)`.
    ///
    /// # Panics
    /// As [`Linear::new`].
    pub fn new(layout: &mut ParameterLayout, name: &str, inputs: usize, sizes: &[usize], dropout: f32) -> Self {
        let mut layers = Vec::new();
        let mut outputs = inputs;
        for (index, &size) in sizes.iter().enumerate() {
            let layer = format!("{name}.{index}");
            layers.push((Linear::new(layout, &layer, outputs, size), Dropout::new(&layer, dropout)));
            outputs = size;
        }
        Self { layers, inputs, outputs }
    }

    /// Width of the output: the last layer's, or the input's without layers.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Whether it has no layers.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// `[B, inputs]` to `[B, outputs]`.
    ///
    /// # Panics
    /// As [`Linear::forward`].
    pub fn forward(&self, context: &Context<'_>, input: Tensor<2>) -> Tensor<2> {
        debug_assert_eq!(input.dims()[1], self.inputs);
        let mut x = input;
        for (linear, dropout) in &self.layers {
            x = dropout.forward(context, linear.forward_relu(context, x));
        }
        x
    }

    /// [`Mlp::forward`] in a graph, without dropout.
    pub fn onnx(&self, graph: &mut Graph<'_>, input: Value) -> Value {
        let mut x = input;
        for (linear, _) in &self.layers {
            x = linear.onnx_relu(graph, &x);
        }
        x
    }
}

/// An MLP and the linear layer that makes logits of its output.
#[derive(Debug, Clone)]
pub struct MlpLogit {
    hidden: Mlp,
    logit: Linear,
}

/// The shape of an [`MlpLogit`].
#[derive(Debug, Clone, Copy)]
pub struct MlpShape<'a> {
    /// Columns of the input.
    pub inputs: usize,
    /// Widths of the hidden layers. A last width of 1 stands for the layer that makes the logit.
    pub hidden: &'a [usize],
    /// Logits a sample.
    pub logits: usize,
    /// Probability that a hidden activation is dropped, in `[0, 1)`.
    pub dropout: f32,
}

impl MlpLogit {
    /// Adds the hidden layers `{name}.0`, `{name}.1`, …, and the layer `{name}.logit`.
    ///
    /// # Panics
    /// As [`Linear::new`].
    pub fn new(layout: &mut ParameterLayout, name: &str, shape: MlpShape<'_>) -> Self {
        let hidden = Mlp::new(layout, name, shape.inputs, hidden_sizes(shape.hidden), shape.dropout);
        let logit = Linear::new(layout, &format!("{name}.logit"), hidden.outputs(), shape.logits);
        Self { hidden, logit }
    }

    /// `[B, inputs]` to `[B, logits]`.
    ///
    /// # Panics
    /// As [`Linear::forward`].
    pub fn forward(&self, context: &Context<'_>, input: Tensor<2>) -> Tensor<2> {
        self.logit.forward(context, self.hidden.forward(context, input))
    }

    /// [`MlpLogit::forward`] in a graph.
    pub fn onnx(&self, graph: &mut Graph<'_>, input: Value) -> Value {
        let hidden = self.hidden.onnx(graph, input);
        self.logit.onnx(graph, &hidden)
    }
}

/// Sizes without the logit's own.
pub(crate) fn hidden_sizes(sizes: &[usize]) -> &[usize] {
    sizes.strip_suffix(&[1]).unwrap_or(sizes)
}
