//! The mode `des`: distributed equivalent substitution (Rong et al. 2020, section 3.2).
//!
//! A layer with most of a model's weights is replaced by sub-operators. Each parameter server
//! computes them over the weights that it holds. The sum ⊕ of these partial results replaces the
//! rows on the wire. A last operator makes the layer's output of it (algorithm 1). On the way back,
//! the servers get the gradient of the sum, which is also the gradient of each partial result. So
//! no gradient of a partitioned weight travels, and its optimizer state stays on its server.
//!
//! [`Substitution`] has the sub-operators of `lr` and `fm` (sections 4.1 and 4.2). Here x is the
//! weight of an id in the pooling of its feature: 1, 1/n or 1/√n. [`cells`] has the correction for
//! features of several values. [`SubOperators`] adds the first layer of a tower (section 4.3),
//! which `rectrain_pooling` computes.
//!
//! Sums have a fixed order: ids of a cell, then features, then servers. With one server this is the
//! order of `sync`, so the results are equal to the bit.

pub mod cells;

use rectrain_kinds::ModelKind;

/// The substitution of a model's layers with weights of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Substitution {
    /// Number of sparse features.
    pub features: usize,
    /// d of `fm`: columns of an embedding. 0 for `lr`.
    pub dim: usize,
}

/// All sub-operators of a model: what parameter servers compute of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubOperators {
    /// The sums over ids. `wideDeep` has the sums of `lr`, and `deepfm` has the sums of `fm`.
    /// `None` for `dnn` and `dcn`.
    pub sums: Option<Substitution>,
    /// Units of the tower's first layer, and the vectors of the crosses of `dcn`. 0 for a model
    /// without a tower.
    pub units: usize,
}

/// Partial results of the samples of a piece, or their gradients.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Partial {
    /// Σ w·x, `[samples]` (equation 2).
    pub first: Vec<f32>,
    /// Σ v·x and then Σ⟨vx, vx⟩, `[samples, d + 1]` (equation 5). Empty for `lr`.
    pub second: Vec<f32>,
}

/// Gradients of the pooled weights and embeddings of a piece.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PooledGradients {
    /// `[samples, features]`
    pub linear: Vec<f32>,
    /// `[samples, features · d]`
    pub embeddings: Vec<f32>,
}

impl Substitution {
    /// The sums of a model with `features` sparse features and embeddings of `dim` columns. `None`
    /// if the model has none.
    #[must_use]
    pub const fn of(model: ModelKind, features: usize, dim: usize) -> Option<Self> {
        match model {
            ModelKind::Lr | ModelKind::WideDeep => Some(Self { features, dim: 0 }),
            ModelKind::Fm | ModelKind::DeepFm => Some(Self { features, dim }),
            ModelKind::Dlrm | ModelKind::Dnn | ModelKind::Dcn | ModelKind::DcnV2 => None,
        }
    }

    /// Columns of [`Partial::second`].
    #[must_use]
    pub const fn second_columns(self) -> usize {
        if self.dim == 0 { 0 } else { self.dim + 1 }
    }

    /// The sub-operators M₁ and M₂ over the weights of one server, from its pooled first-order
    /// weights `[samples, features]` and its pooled embeddings `[samples, features · d]`.
    #[must_use]
    pub fn reduce(self, samples: usize, linear: &[f32], embeddings: &[f32]) -> Partial {
        let first: Vec<f32> = match self.features {
            0 => vec![0.0; samples],
            features => linear.chunks_exact(features).map(|weights| weights.iter().sum()).collect(),
        };
        let mut second = vec![0.0; samples * self.second_columns()];
        for (results, vectors) in self.rows_of_samples(&mut second, embeddings) {
            self.reduce_vectors(results, vectors);
        }
        Partial { first, second }
    }

    /// Σ v·x and Σ⟨vx, vx⟩ of one sample.
    fn reduce_vectors(self, results: &mut [f32], vectors: &[f32]) {
        let Some((squares, sum)) = results.split_last_mut() else { return };
        for vector in vectors.chunks_exact(self.dim) {
            sum.iter_mut().zip(vector).for_each(|(sum, value)| *sum += value);
        }
        *squares = vectors.iter().map(|value| value * value).sum();
    }

    /// The gradients of one server's pooled weights and embeddings, from the gradient of the sum ⊕
    /// and the embeddings that [`Self::reduce`] had. With `g` and `q` for the gradients of Σ v·x
    /// and Σ⟨vx, vx⟩, the gradient of an embedding e is `g + 2·q·e`.
    #[must_use]
    pub fn spread(self, gradient: &Partial, embeddings: &[f32]) -> PooledGradients {
        let repeated = |value: &f32| std::iter::repeat_n(*value, self.features);
        let linear = gradient.first.iter().flat_map(repeated).collect();
        let mut of_embeddings = embeddings.to_vec();
        for (gradient, vectors) in self.gradients_of_samples(&gradient.second, &mut of_embeddings) {
            self.spread_vectors(gradient, vectors);
        }
        PooledGradients { linear, embeddings: of_embeddings }
    }

    /// Replaces the embeddings of one sample by their gradients.
    fn spread_vectors(self, gradient: &[f32], vectors: &mut [f32]) {
        let Some((squares, sum)) = gradient.split_last() else { return };
        for vector in vectors.chunks_exact_mut(self.dim) {
            for (value, of_sum) in vector.iter_mut().zip(sum) {
                let half = squares * *value;
                *value = of_sum + (half + half);
            }
        }
    }

    /// Pairs the results of each sample with its embeddings. Nothing without embeddings.
    fn rows_of_samples<'a>(
        self,
        second: &'a mut [f32],
        embeddings: &'a [f32],
    ) -> impl Iterator<Item = (&'a mut [f32], &'a [f32])> {
        let (columns, width) = (self.second_columns().max(1), (self.features * self.dim).max(1));
        second.chunks_exact_mut(columns).zip(embeddings.chunks_exact(width))
    }

    /// Pairs the gradients of each sample with its embeddings. Nothing without embeddings.
    fn gradients_of_samples<'a>(
        self,
        second: &'a [f32],
        embeddings: &'a mut [f32],
    ) -> impl Iterator<Item = (&'a [f32], &'a mut [f32])> {
        let (columns, width) = (self.second_columns().max(1), (self.features * self.dim).max(1));
        second.chunks_exact(columns).zip(embeddings.chunks_exact_mut(width))
    }
}

impl SubOperators {
    /// The sub-operators of a model with `features` sparse features, embeddings of `dim` columns
    /// and `units` units in the first layer of its tower. `None` if the model has no substitution.
    #[must_use]
    pub fn of(model: ModelKind, features: usize, dim: usize, units: usize) -> Option<Self> {
        model.has_substitution().then(|| Self { sums: Substitution::of(model, features, dim), units })
    }

    /// Columns of the sums of a sample besides [`Partial::first`]: the output of the first layer,
    /// and then [`Partial::second`].
    #[must_use]
    pub const fn columns(self) -> usize {
        self.units
            + match self.sums {
                Some(sums) => sums.second_columns(),
                None => 0,
            }
    }
}

impl Partial {
    /// The sum ⊕ with the partial results of another server, which has the same samples.
    pub fn add(&mut self, other: &Self) {
        let add = |sums: &mut [f32], values: &[f32]| sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        add(&mut self.first, &other.first);
        add(&mut self.second, &other.second);
    }
}
