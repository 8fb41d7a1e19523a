//! The layers that models are made of: each knows which parameters of the flat buffer are its own and maps Burn tensors to Burn
//! tensors. Whether gradients are recorded is a property of the tensors that come in, not of a layer.

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData, activation::relu};

use crate::Precision;
use crate::layout::{Initializer, ParameterId, ParameterLayout};
use crate::linear::Packed;
use crate::random::{Stream, name_key};

/// The parameters of one forward pass.
pub(crate) struct Parameters<'a> {
    /// In layout order. With [`Products::Packed`], in the place of those of linear layers stands one value without meaning.
    pub(crate) tensors: &'a [Tensor<2>],
    pub(crate) products: Products<'a>,
}

/// What the products of linear layers are computed by.
#[derive(Clone, Copy)]
pub(crate) enum Products<'a> {
    /// This crate's, on the CPU.
    Packed(&'a Packed),
    /// Burn's, on a device with memory of its own.
    Device(Precision),
}

impl Parameters<'_> {
    /// A handle on a parameter; no values are copied.
    fn get(&self, id: ParameterId) -> Tensor<2> {
        self.tensors[id.0].clone()
    }
}

/// Which dropout masks a forward pass uses: none outside training.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Dropout {
    /// Probability that an activation is dropped, in `[0, 1)`.
    pub(crate) rate: f32,
    pub(crate) seed: u64,
    pub(crate) step: u64,
    pub(crate) rank: u32,
    /// Position in the batch of the first sample of this pass: a mask does not depend on how the batch is cut up.
    pub(crate) first_sample: usize,
}

impl Dropout {
    /// Inverted dropout (Srivastava et al. 2014, section 10): what stays is scaled by 1/(1−rate), so that nothing is scaled in
    /// prediction. The mask is a pure function of (seed, step, rank, layer, index).
    pub(crate) fn apply(self, layer: u64, activations: Tensor<2>) -> Tensor<2> {
        if self.rate == 0.0 {
            return activations;
        }
        let [samples, units] = activations.dims();
        let stream = Stream::new(&[self.seed, self.step, u64::from(self.rank), layer]);
        let kept = 1.0 / (1.0 - self.rate);
        let first = (self.first_sample * units) as u64;
        let mask = (first..first + (samples * units) as u64)
            .map(|index| if stream.unit(index) < f64::from(self.rate) { 0.0 } else { kept })
            .collect();
        let device = activations.device().without_autodiff();
        activations * matrix(mask, [samples, units], &device)
    }
}

/// A matrix of a shape (rows, columns) from row-major values, which are moved, not copied.
pub(crate) fn matrix(values: Vec<f32>, shape: [usize; 2], device: &Device) -> Tensor<2> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// `x·W + b`.
#[derive(Debug, Clone)]
pub(crate) struct Linear {
    pub(crate) weight: ParameterId,
    pub(crate) bias: ParameterId,
}

impl Linear {
    pub(crate) fn new(layout: &mut ParameterLayout, name: &str, inputs: usize, outputs: usize) -> Self {
        let initializer = Initializer::Linear { fan_in: inputs };
        Self {
            weight: layout.push(format!("{name}.weight"), [inputs, outputs], initializer),
            bias: layout.push(format!("{name}.bias"), [1, outputs], initializer),
        }
    }

    /// `[B, inputs]` to `[B, outputs]`.
    pub(crate) fn forward(&self, parameters: &Parameters<'_>, input: Tensor<2>) -> Tensor<2> {
        let weight = parameters.get(self.weight);
        match parameters.products {
            Products::Packed(packed) => packed.linear(self, weight, input, false),
            Products::Device(precision) => product(input, weight, precision) + parameters.get(self.bias),
        }
    }

    /// The same with ReLU after it.
    pub(crate) fn forward_relu(&self, parameters: &Parameters<'_>, input: Tensor<2>) -> Tensor<2> {
        match parameters.products {
            Products::Packed(packed) => packed.linear(self, parameters.get(self.weight), input, true),
            Products::Device(_) => relu(self.forward(parameters, input)),
        }
    }
}

/// `[B, inputs]` and `[inputs, outputs]` to `[B, outputs]`, on a device. In bf16 the operands are rounded, the device sums in 32 bits, and
/// each sum is rounded as it leaves, forward and backward, as PyTorch's autocast has it on GPUs. A product with one column, a logit's,
/// is as fast in 32 bits, and 8 bits of a logit would make ties of samples that differ.
fn product(input: Tensor<2>, weight: Tensor<2>, precision: Precision) -> Tensor<2> {
    if precision == Precision::Fp32 || weight.dims()[1] == 1 {
        return input.matmul(weight);
    }
    let [input, weight] = [input, weight].map(|operand| operand.cast(FloatDType::BF16));
    input.matmul(weight).cast(FloatDType::F32)
}

/// Linear layers, each followed by ReLU and dropout.
#[derive(Debug, Clone)]
pub(crate) struct Mlp {
    pub(crate) layers: Vec<(Linear, u64)>,
    inputs: usize,
    outputs: usize,
}

impl Mlp {
    pub(crate) fn new(layout: &mut ParameterLayout, name: &str, inputs: usize, sizes: &[usize]) -> Self {
        let mut outputs = inputs;
        let layers = sizes
            .iter()
            .enumerate()
            .map(|(index, &size)| {
                let layer = format!("{name}.{index}");
                let linear = Linear::new(layout, &layer, outputs, size);
                outputs = size;
                (linear, name_key(&layer))
            })
            .collect();
        Self { layers, inputs, outputs }
    }

    /// Width of the output: the last layer's, or the input's without layers.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// `[B, inputs]` to `[B, outputs]`.
    pub(crate) fn forward(&self, parameters: &Parameters<'_>, input: Tensor<2>, dropout: Dropout) -> Tensor<2> {
        debug_assert_eq!(input.dims()[1], self.inputs);
        self.layers.iter().fold(input, |x, (linear, key)| dropout.apply(*key, linear.forward_relu(parameters, x)))
    }
}

/// The first-order part of LR, FM, DeepFM and Wide&Deep: `Σ_f w_f + x_dense·w + b`, where `w_f` are the pooled first-order weights
/// of the sparse features. Without dense features only the bias is left, which then starts at 0.
#[derive(Debug, Clone)]
pub(crate) struct FirstOrder {
    pub(crate) dense: Option<ParameterId>,
    pub(crate) bias: ParameterId,
}

impl FirstOrder {
    pub(crate) fn new(layout: &mut ParameterLayout, dense_features: usize) -> Self {
        // From 0, like the first-order weights of ids: a random start of a few weights outlasts many steps at small rates.
        let dense = (dense_features > 0)
            .then(|| layout.push("firstOrder.weight".into(), [dense_features, 1], Initializer::Zeros));
        let bias = layout.push("firstOrder.bias".into(), [1, 1], Initializer::Zeros);
        Self { dense, bias }
    }

    /// `[B, F]` and `[B, dense_features]` to `[B, 1]`.
    pub(crate) fn forward(
        &self,
        parameters: &Parameters<'_>,
        linear: Option<Tensor<2>>,
        dense: Option<Tensor<2>>,
    ) -> Tensor<2> {
        let sparse = linear.map(|weights| weights.sum_dim(1));
        let dense = dense.zip(self.dense).map(|(x, weight)| x.matmul(parameters.get(weight)));
        let bias = parameters.get(self.bias);
        [sparse, dense].into_iter().flatten().fold(bias, |sum, part| part + sum)
    }
}

/// FM's second-order term over the sparse features, `½(‖Σ_f v_f‖² − Σ_f ‖v_f‖²)` (Rendle 2010, lemma 3.1): `[B, F·d]` to `[B, 1]`.
pub(crate) fn factorization_machine(embeddings: Tensor<2>, features: usize) -> Tensor<2> {
    let [samples, width] = embeddings.dims();
    let dim = width / features;
    let sum = embeddings.clone().reshape([samples, features, dim]).sum_dim(1).reshape([samples, dim]);
    let square_of_sum = (sum.clone() * sum).sum_dim(1);
    let sum_of_squares = (embeddings.clone() * embeddings).sum_dim(1);
    (square_of_sum - sum_of_squares).mul_scalar(0.5)
}

/// Dot products of all pairs of vectors (Naumov et al. 2019, section 2.1.3): `[B, n·d]` to `[B, n(n−1)/2]`, in the order
/// (1,0), (2,0), (2,1), (3,0), …
///
/// One batched matrix product `Z·Zᵀ`, of which the lower triangle is selected.
pub(crate) fn pairwise_dots(vectors: Tensor<2>, count: usize) -> Tensor<2> {
    let [samples, width] = vectors.dims();
    let lower_triangle = lower_triangle(count, &vectors.device().without_autodiff());
    let vectors = vectors.reshape([samples, count, width / count]);
    let products = vectors.clone().matmul(vectors.transpose());
    products.reshape([samples, count * count]).select(1, lower_triangle)
}

/// Pairs of `count` vectors.
pub(crate) fn pairs(count: usize) -> usize {
    count * count.saturating_sub(1) / 2
}

/// Where the pairs (1,0), (2,0), (2,1), … stand in a row-major matrix of `count` rows and columns.
pub(crate) fn lower_triangle_indices(count: usize) -> impl Iterator<Item = usize> {
    (1..count).flat_map(move |row| (0..row).map(move |column| row * count + column))
}

fn lower_triangle(count: usize, device: &Device) -> Tensor<1, Int> {
    let indices: Vec<i32> = lower_triangle_indices(count).map(|index| index as i32).collect();
    let shape = [indices.len()];
    Tensor::from_data(TensorData::new(indices, shape), device)
}

/// One cross layer of DCN-V2 (Wang et al. 2021, equation 1): `x0 ⊙ (x·W + b) + x`; with a low rank r, `W = U·V` of sizes
/// `[D, r]` and `[r, D]` (equation 2).
#[derive(Debug, Clone)]
pub(crate) struct Cross {
    pub(crate) down: Option<ParameterId>,
    pub(crate) up: Linear,
}

impl Cross {
    pub(crate) fn new(layout: &mut ParameterLayout, name: &str, width: usize, rank: Option<usize>) -> Self {
        let down = rank.map(|rank| {
            let initializer = Initializer::Linear { fan_in: width };
            layout.push(format!("{name}.down"), [width, rank], initializer)
        });
        Self { down, up: Linear::new(layout, name, rank.unwrap_or(width), width) }
    }

    /// `[B, D]` twice to `[B, D]`.
    pub(crate) fn forward(&self, parameters: &Parameters<'_>, x0: Tensor<2>, x: Tensor<2>) -> Tensor<2> {
        let reduced = match self.down {
            Some(down) => x.clone().matmul(parameters.get(down)),
            None => x.clone(),
        };
        x0 * self.up.forward(parameters, reduced) + x
    }
}
