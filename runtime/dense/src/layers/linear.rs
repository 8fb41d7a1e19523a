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
        Self(layout.push_linear(name, 0, inputs, outputs))
    }

    /// `[B, inputs]` to `[B, outputs]`.
    ///
    /// # Panics
    /// In training on the CPU, if the pass has applied this layer already. A layer keeps only one
    /// input for its gradient.
    pub fn forward(&self, context: &Context<'_>, input: Tensor<2>) -> Tensor<2> {
        let weight = context.parameter(self.0.weight);
        match context.products {
            Products::Packed(packed) => packed.chain(&[self.0], weight, input, false),
            Products::Device(precision) => product(input, weight, precision) + context.parameter(self.0.bias),
        }
    }

    /// [`Linear::forward`], followed by ReLU.
    ///
    /// # Panics
    /// As [`Linear::forward`].
    pub fn forward_relu(&self, context: &Context<'_>, input: Tensor<2>) -> Tensor<2> {
        match context.products {
            Products::Packed(packed) => packed.chain(&[self.0], context.parameter(self.0.weight), input, true),
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

/// A linear layer that continues sums of other processes (Rong et al. 2020, section 4.3). They have
/// computed `V·W₁ + b` with the first rows of the weight. The layer computes `V·W₁ + b + x·W₂`.
///
/// It has the parameters of a [`Linear`] over V and x side by side. The gradient of W₁ is 0 here,
/// because the other processes compute it.
#[derive(Debug, Clone)]
pub struct SummedLinear {
    parameters: LinearParameters,
    /// Rows of W₁ and W₂.
    inputs: usize,
}

impl SummedLinear {
    /// Adds the parameters of [`Linear::new`]. `summed` is the number of rows of W₁, at most
    /// `inputs`.
    ///
    /// # Panics
    /// If the layout has one of them.
    pub fn new(layout: &mut ParameterLayout, name: &str, summed: usize, inputs: usize, outputs: usize) -> Self {
        Self { parameters: layout.push_linear(name, summed, inputs, outputs), inputs }
    }

    /// Sums `[B, outputs]` and x, `[B, inputs − summed]`, to `[B, outputs]`. Without x, W₂ has no
    /// rows. ReLU follows if `is_relu`.
    ///
    /// # Panics
    /// As [`Linear::forward`].
    pub fn forward(
        &self,
        context: &Context<'_>,
        sums: Tensor<2>,
        input: Option<Tensor<2>>,
        is_relu: bool,
    ) -> Tensor<2> {
        let LinearParameters { weight, bias, summed } = self.parameters;
        let weight = context.parameter(weight);
        match context.products {
            Products::Packed(packed) => packed.summed_linear(self.parameters, weight, (sums, input), is_relu),
            Products::Device(precision) => {
                // The sums include the bias. This term has the value 0 and the bias's gradient.
                let bias = context.parameter(bias);
                let mut output = sums + (bias.clone() - bias.detach());
                if let Some(input) = input {
                    let weight = weight.narrow(0, summed, self.inputs - summed);
                    output = output + product(input, weight, precision);
                }
                if is_relu { relu(output) } else { output }
            }
        }
    }

    /// [`SummedLinear::forward`] in a graph.
    pub fn onnx(&self, graph: &mut Graph<'_>, sums: &Value, input: Option<&Value>, is_relu: bool) -> Value {
        let mut output = sums.clone();
        if let Some(input) = input {
            let weight = graph.parameter(self.parameters.weight);
            let weight = graph.rows(&weight, self.parameters.summed..self.inputs);
            let product = graph.op("MatMul", &[input, &weight]);
            output = graph.op("Add", &[&output, &product]);
        }
        if is_relu { graph.op("Relu", &[&output]) } else { output }
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
        Self::numbered_from(0, layout, name, inputs, sizes, dropout)
    }

    /// As [`Mlp::new`]. The first layer has the number `first`.
    fn numbered_from(
        first: usize,
        layout: &mut ParameterLayout,
        name: &str,
        inputs: usize,
        sizes: &[usize],
        dropout: f32,
    ) -> Self {
        let mut layers = Vec::new();
        let mut outputs = inputs;
        for (index, &size) in (first..).zip(sizes) {
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
        match self.layers.split_last() {
            Some(((last, dropout), below)) => dropout.forward(context, run(context, below, input, last, true)),
            None => input,
        }
    }

    /// The layers, and then `last`, followed by ReLU if `relu`: `[B, inputs]` to the outputs of
    /// `last`.
    ///
    /// # Panics
    /// As [`Linear::forward`].
    pub(crate) fn forward_then(&self, context: &Context<'_>, input: Tensor<2>, last: &Linear, relu: bool) -> Tensor<2> {
        run(context, &self.layers, input, last, relu)
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

/// Hidden layers, and then `last`, followed by ReLU if `relu`. On the CPU they are one operation,
/// unless dropout needs the matrix between them.
fn run(context: &Context<'_>, hidden: &[(Linear, Dropout)], input: Tensor<2>, last: &Linear, relu: bool) -> Tensor<2> {
    let drops = hidden.iter().any(|(_, dropout)| dropout.is_active(context));
    if let (Products::Packed(packed), false) = (context.products, drops) {
        let layers: Vec<LinearParameters> =
            hidden.iter().map(|(linear, _)| linear).chain([last]).map(|x| x.0).collect();
        return packed.chain(&layers, context.parameter(layers[0].weight), input, relu);
    }
    let mut x = input;
    for (linear, dropout) in hidden {
        x = dropout.forward(context, linear.forward_relu(context, x));
    }
    if relu { last.forward_relu(context, x) } else { last.forward(context, x) }
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
        self.hidden.forward_then(context, input, &self.logit, false)
    }

    /// [`MlpLogit::forward`] in a graph.
    pub fn onnx(&self, graph: &mut Graph<'_>, input: Value) -> Value {
        let hidden = self.hidden.onnx(graph, input);
        self.logit.onnx(graph, &hidden)
    }
}

/// An [`MlpLogit`] whose first layer continues sums of other processes. It has the same parameters.
#[derive(Debug, Clone)]
pub struct SummedMlpLogit {
    first: SummedLinear,
    /// The dropout after the first layer, and the layers above it. `None` if the first layer makes
    /// the logits.
    above: Option<(Dropout, MlpLogit)>,
}

impl SummedMlpLogit {
    /// Adds the parameters of [`MlpLogit::new`]. Other processes multiply the first `summed` rows
    /// of the first layer's weight.
    ///
    /// # Panics
    /// As [`Linear::new`].
    pub fn new(layout: &mut ParameterLayout, name: &str, summed: usize, shape: MlpShape<'_>) -> Self {
        let MlpShape { inputs, logits, dropout, .. } = shape;
        let Some((&units, sizes)) = hidden_sizes(shape.hidden).split_first() else {
            let first = SummedLinear::new(layout, &format!("{name}.logit"), summed, inputs, logits);
            return Self { first, above: None };
        };
        let layer = format!("{name}.0");
        let first = SummedLinear::new(layout, &layer, summed, inputs, units);
        let hidden = Mlp::numbered_from(1, layout, name, units, sizes, dropout);
        let logit = Linear::new(layout, &format!("{name}.logit"), hidden.outputs(), logits);
        Self { first, above: Some((Dropout::new(&layer, dropout), MlpLogit { hidden, logit })) }
    }

    /// Sums `[B, units]` and the other inputs of the first layer, if it has some, to `[B, logits]`.
    ///
    /// # Panics
    /// As [`Linear::forward`].
    pub fn forward(&self, context: &Context<'_>, sums: Tensor<2>, input: Option<Tensor<2>>) -> Tensor<2> {
        let output = self.first.forward(context, sums, input, self.above.is_some());
        match &self.above {
            Some((dropout, above)) => above.forward(context, dropout.forward(context, output)),
            None => output,
        }
    }

    /// [`SummedMlpLogit::forward`] in a graph, without dropout.
    pub fn onnx(&self, graph: &mut Graph<'_>, sums: &Value, input: Option<&Value>) -> Value {
        let output = self.first.onnx(graph, sums, input, self.above.is_some());
        match &self.above {
            Some((_, above)) => above.onnx(graph, output),
            None => output,
        }
    }
}

/// Sizes without the logit's own.
pub(crate) fn hidden_sizes(sizes: &[usize]) -> &[usize] {
    sizes.strip_suffix(&[1]).unwrap_or(sizes)
}
