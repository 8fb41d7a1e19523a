//! A worker's contribution to a step.

use rectrain_modes::barrier::SparseGradients;

/// The gradients of one piece of a batch: a part for each row group.
pub(crate) type Contribution = Vec<SparseGradients>;
