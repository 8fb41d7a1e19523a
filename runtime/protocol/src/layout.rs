//! The position of each feature in rows, in pooled embeddings, and in their messages.

use rectrain_kinds::{Compression, Pooling};
use rectrain_modes::des::SubOperators;
use rectrain_wire::Tensor;

use crate::compression::TensorCodec;
use crate::error::RoleError;

/// The position of a sparse feature's rows and of its pooled embedding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeaturePlace {
    /// The row group of its rows.
    pub group: usize,
    /// Columns of its embedding; 0 if the model uses only first-order weights.
    pub dim: usize,
    /// Its first column in the pooled embeddings.
    pub offset: usize,
    /// How several values are pooled.
    pub pooling: Pooling,
}

/// The features of a job as an embedding worker sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeatureLayout {
    /// The features in the order of the manifest.
    pub features: Vec<FeaturePlace>,
    /// Columns of a row of each group, including the first-order weight.
    pub group_dims: Vec<usize>,
    /// Whether column 0 of every row is a first-order weight.
    pub linear: bool,
    /// Columns of the pooled embeddings: the sum of the features' dims.
    pub embedding_width: usize,
}

impl FeatureLayout {
    /// The first embedding column of a row: 1 after a first-order weight, otherwise 0.
    #[must_use]
    pub fn first_embedding_column(&self) -> usize {
        usize::from(self.linear)
    }

    /// The columns of a piece's pooled embeddings.
    #[must_use]
    pub fn pooled_widths(&self) -> PooledWidths {
        let linear = if self.linear { self.features.len() } else { 0 };
        PooledWidths { embeddings: self.embedding_width, linear }
    }
}

/// The columns of a piece's tensors in a message. A message has no tensor of 0 columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PooledWidths {
    /// Columns of [`Pooled::embeddings`].
    pub embeddings: usize,
    /// Columns of [`Pooled::linear`].
    pub linear: usize,
}

impl PooledWidths {
    /// The columns of sums in the mode `des`, in place of pooled embeddings.
    #[must_use]
    pub const fn of_sums(operators: SubOperators) -> Self {
        Self { embeddings: operators.columns(), linear: operators.sums.is_some() as usize }
    }
}

/// Pooled embeddings of a piece, or their gradients. In the mode `des`: sums, or their gradients.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pooled {
    /// [samples, Σ dims], or sums: outputs of a tower's first layer, and second-order sums
    /// [samples, d + 1] side by side.
    pub embeddings: Vec<f32>,
    /// [samples, features], or first-order sums [samples, 1]. Empty if the model has no first-order
    /// weights.
    pub linear: Vec<f32>,
}

/// Encodes pooled embeddings, or their gradients, for a message between dense and embedding
/// workers.
pub fn encode_pooled(
    pooled: Pooled,
    widths: PooledWidths,
    encode: impl Fn(Vec<f32>, usize) -> Result<Vec<Tensor>, RoleError>,
) -> Result<Vec<Tensor>, RoleError> {
    let mut tensors = Vec::with_capacity(4);
    if widths.embeddings > 0 {
        tensors.extend(encode(pooled.embeddings, widths.embeddings)?);
    }
    if widths.linear > 0 {
        tensors.extend(encode(pooled.linear, widths.linear)?);
    }
    Ok(tensors)
}

/// Decodes the tensors that [`encode_pooled`] encoded, and checks the sizes.
pub fn decode_pooled(
    what: &'static str,
    tensors: &mut impl Iterator<Item = Tensor>,
    samples: usize,
    widths: PooledWidths,
    compression: Compression,
) -> Result<Pooled, RoleError> {
    let mut part = |columns: usize| {
        if columns == 0 {
            return Ok(Vec::new());
        }
        let values = compression.decode(what, tensors, columns)?;
        if values.len() == samples * columns {
            return Ok(values);
        }
        let reason = format!("expected {samples} samples of {columns} columns, found {} values", values.len());
        Err(RoleError::Inconsistent { message: what, reason })
    };
    let embeddings = part(widths.embeddings)?;
    let linear = part(widths.linear)?;
    Ok(Pooled { embeddings, linear })
}
