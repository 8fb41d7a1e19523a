//! Interactions of features by dot products. They have no parameters.

use burn::tensor::{Device, Int, Tensor, TensorData};
use rectrain_gemm::Pairwise;

use super::{Context, Products};
use crate::onnx::{Attribute, Graph, Value};
use crate::pairwise;

/// The second-order term of a factorization machine over the sparse features,
/// `½(‖Σ_f v_f‖² − Σ_f ‖v_f‖²)` (Rendle 2010, lemma 3.1).
#[derive(Debug, Clone, Copy)]
pub struct FactorizationMachine {
    /// Number of features, at least 1.
    pub features: usize,
    /// Dimension of an embedding.
    pub dim: usize,
}

impl FactorizationMachine {
    /// `[B, F·d]` to `[B, 1]`.
    pub fn forward(&self, embeddings: Tensor<2>) -> Tensor<2> {
        let [samples, _] = embeddings.dims();
        let vectors = embeddings.clone().reshape([samples, self.features, self.dim]);
        let sum = vectors.sum_dim(1).reshape([samples, self.dim]);
        let square_of_sum = (sum.clone() * sum).sum_dim(1);
        let sum_of_squares = (embeddings.clone() * embeddings).sum_dim(1);
        (square_of_sum - sum_of_squares).mul_scalar(0.5)
    }

    /// [`FactorizationMachine::forward`] in a graph.
    pub fn onnx(&self, graph: &mut Graph<'_>, embeddings: &Value) -> Value {
        let vectors = graph.reshape(embeddings, &[0, self.features as i64, self.dim as i64]);
        let axes = graph.integers(&[1]);
        let sum = graph.op_with("ReduceSum", &[&vectors, &axes], &[("keepdims", Attribute::Int(0))]);
        let square = graph.op("Mul", &[&sum, &sum]);
        let square_of_sum = graph.sum_columns(&square);
        let squares = graph.op("Mul", &[embeddings, embeddings]);
        let sum_of_squares = graph.sum_columns(&squares);
        let difference = graph.op("Sub", &[&square_of_sum, &sum_of_squares]);
        let half = graph.float("half", 0.5);
        graph.op("Mul", &[&difference, &half])
    }
}

/// [`FactorizationMachine`] over sums that other processes have computed: `Σ_f v_f` and
/// `Σ_f ‖v_f‖²`, side by side (Rong et al. 2020, equation 6).
#[derive(Debug, Clone, Copy)]
pub struct SummedFactorizationMachine {
    /// Dimension of an embedding.
    pub dim: usize,
}

impl SummedFactorizationMachine {
    /// `[B, d + 1]` to `[B, 1]`.
    pub fn forward(&self, sums: Tensor<2>) -> Tensor<2> {
        let sum = sums.clone().narrow(1, 0, self.dim);
        let sum_of_squares = sums.narrow(1, self.dim, 1);
        let square_of_sum = (sum.clone() * sum).sum_dim(1);
        (square_of_sum - sum_of_squares).mul_scalar(0.5)
    }

    /// [`SummedFactorizationMachine::forward`] in a graph.
    pub fn onnx(&self, graph: &mut Graph<'_>, sums: &Value) -> Value {
        let sum = graph.columns(sums, 0..self.dim);
        let sum_of_squares = graph.columns(sums, self.dim..self.dim + 1);
        let square = graph.op("Mul", &[&sum, &sum]);
        let square_of_sum = graph.sum_columns(&square);
        let difference = graph.op("Sub", &[&square_of_sum, &sum_of_squares]);
        let half = graph.float("half", 0.5);
        graph.op("Mul", &[&difference, &half])
    }
}

/// Dot products of all pairs of vectors (Naumov et al. 2019, section 2.1.3), in the order (1,0),
/// (2,0), (2,1), (3,0), ….
///
/// On a GPU it is one batched matrix product `Z·Zᵀ`, from which the lower triangle is selected. On
/// the CPU, [`PairwiseDots::forward_beside`] has a kernel of its own.
#[derive(Debug, Clone, Copy)]
pub struct PairwiseDots {
    /// Number of vectors.
    pub vectors: usize,
    /// Dimension of a vector.
    pub dim: usize,
}

impl PairwiseDots {
    /// Number of pairs, n(n−1)/2.
    pub fn pairs(&self) -> usize {
        self.vectors * self.vectors.saturating_sub(1) / 2
    }

    /// `[B, n·d]` to `[B, n(n−1)/2]`.
    pub fn forward(&self, vectors: Tensor<2>) -> Tensor<2> {
        let [samples, _] = vectors.dims();
        let lower_triangle = self.lower_triangle(&vectors.device().without_autodiff());
        let vectors = vectors.reshape([samples, self.vectors, self.dim]);
        let products = vectors.clone().matmul(vectors.transpose());
        products.reshape([samples, self.vectors * self.vectors]).select(1, lower_triangle)
    }

    /// `leading` and the dot products side by side, as a DLRM's top MLP takes them: `[B, d]` and
    /// `[B, (n−1)·d]` to `[B, d + n(n−1)/2]`. `leading` is vector 0. Without it, the layer computes
    /// [`PairwiseDots::forward`] of `others`, `[B, n·d]`.
    ///
    /// # Panics
    /// If there are no other vectors, or a vector has no values.
    pub fn forward_beside(&self, context: &Context<'_>, leading: Option<Tensor<2>>, others: Tensor<2>) -> Tensor<2> {
        let Products::Packed(packed) = context.products else { return self.concatenated(leading, others) };
        let leads = leading.is_some();
        let kernel = Pairwise::new(leads, self.vectors - usize::from(leads), self.dim);
        match packed.is_recording() {
            true => pairwise::forward_recorded(kernel, leading, others),
            false => pairwise::forward(kernel, leading, others),
        }
    }

    /// [`PairwiseDots::forward_beside`] by [`PairwiseDots::forward`].
    fn concatenated(&self, leading: Option<Tensor<2>>, others: Tensor<2>) -> Tensor<2> {
        let Some(leading) = leading else { return self.forward(others) };
        let dots = self.forward(Tensor::cat(vec![leading.clone(), others], 1));
        Tensor::cat(vec![leading, dots], 1)
    }

    /// [`PairwiseDots::forward`] in a graph.
    pub fn onnx(&self, graph: &mut Graph<'_>, vectors: &Value) -> Value {
        let vectors = graph.reshape(vectors, &[0, self.vectors as i64, self.dim as i64]);
        let permutation = [("perm", Attribute::Ints(vec![0, 2, 1]))];
        let transposed = graph.op_with("Transpose", &[&vectors], &permutation);
        let products = graph.op("MatMul", &[&vectors, &transposed]);
        let flat = graph.reshape(&products, &[0, (self.vectors * self.vectors) as i64]);
        let indices: Vec<i64> = self.lower_triangle_indices().map(|index| index as i64).collect();
        let indices = graph.integers(&indices);
        graph.op_with("Gather", &[&flat, &indices], &[("axis", Attribute::Int(1))])
    }

    fn lower_triangle(&self, device: &Device) -> Tensor<1, Int> {
        let indices: Vec<i32> = self.lower_triangle_indices().map(|index| index as i32).collect();
        let shape = [indices.len()];
        Tensor::from_data(TensorData::new(indices, shape), device)
    }

    /// The places of the pairs (1,0), (2,0), (2,1), … in a row-major matrix of n rows and columns.
    fn lower_triangle_indices(&self) -> impl Iterator<Item = usize> {
        let count = self.vectors;
        (1..count).flat_map(move |row| (0..row).map(move |column| row * count + column))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::Precision;
    use crate::layers::{Masks, matrix};
    use crate::layout::ParameterLayout;
    use crate::linear::Linears;
    use crate::random::Stream;
    use crate::workers::Workers;

    const SAMPLES: usize = 9;

    fn values(key: u64, columns: usize) -> Tensor<2> {
        let stream = Stream::new(&[7, key]);
        let values = (0..(SAMPLES * columns) as u64).map(|index| (2.0 * stream.unit(index) - 1.0) as f32).collect();
        matrix(values, [SAMPLES, columns], &Device::flex())
    }

    fn floats(tensor: Tensor<2>) -> Vec<f32> {
        tensor.into_data().try_into_vec().unwrap()
    }

    /// The output of [`PairwiseDots::forward_beside`], and the gradients of its operands.
    fn pass(dots: PairwiseDots, context: &Context<'_>, leads: bool) -> [Vec<f32>; 3] {
        let leaf = |tensor: Tensor<2>| tensor.autodiff().require_grad();
        let leading = leads.then(|| leaf(values(1, dots.dim)));
        let others = leaf(values(2, (dots.vectors - usize::from(leads)) * dots.dim));
        let output = dots.forward_beside(context, leading.clone(), others.clone());
        let weights = values(3, output.dims()[1]);
        let mut gradients = (output.clone() * weights).sum().backward();
        let mut gradient = |leaf: &Tensor<2>| floats(leaf.grad_remove(&mut gradients).unwrap());
        let of_leading = leading.as_ref().map_or_else(Vec::new, &mut gradient);
        [floats(output.inner()), of_leading, gradient(&others)]
    }

    fn assert_close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() <= 1e-5 * (1.0 + expected.abs()), "{found}, expected {expected}");
        }
    }

    #[test]
    fn the_kernel_computes_what_the_concatenated_product_does() {
        let mut linears = Linears::new(Precision::Fp32);
        let packed = linears.weights(&ParameterLayout::default(), &[], &Workers::new(1).unwrap());
        let recording = packed.recording(&Arc::default());
        let masks = Masks { seed: 1, step: 2, rank: 0, first_sample: 0 };
        for (vectors, dim) in [(27, 16), (2, 1), (18, 20), (5, 3)] {
            let dots = PairwiseDots { vectors, dim };
            for leads in [true, false] {
                let own = pass(dots, &Context::training(&[], Products::Packed(&recording), masks), leads);
                let unfused = pass(dots, &Context::training(&[], Products::Device(Precision::Fp32), masks), leads);
                own.iter().zip(&unfused).for_each(|(own, unfused)| assert_close(own, unfused));

                // Without gradients, the same output to the bit.
                let others = values(2, (vectors - usize::from(leads)) * dim);
                let context = Context::new(&[], Products::Packed(&packed));
                let output = dots.forward_beside(&context, leads.then(|| values(1, dim)), others);
                assert_eq!(floats(output), own[0], "{vectors} vectors of {dim}, {leads}");
            }
        }
    }
}
