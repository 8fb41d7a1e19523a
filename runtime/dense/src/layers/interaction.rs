//! Interactions of features by dot products. They have no parameters.

use burn::tensor::{Device, Int, Tensor, TensorData};

use crate::onnx::{Attribute, Graph, Value};

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
/// It is one batched matrix product `Z·Zᵀ`, from which the lower triangle is selected.
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
