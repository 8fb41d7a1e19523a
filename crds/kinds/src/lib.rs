//! Every kind that a manifest names: training modes, roles, models, optimizers, pooling, compression,
//! precision. Each kind is declared once, here, with its name and its documentation.
//!
//! `rectrain-crds` documents the kinds in the CustomResourceDefinition, the runtime computes with
//! them, and the operator makes pods of them. A kind has one spelling everywhere: in manifests,
//! metrics, reports, pictures and checkpoints.

#[macro_use]
mod named;
mod mode;
mod model;
mod optimizer;
mod role;
mod values;

pub use mode::{Family, KeyDivisor, Mode};
pub use model::{CrossStructure, ModelKind};
pub use named::UnknownKind;
pub use optimizer::{DenseOptimizer, DenseOptimizerKind, SparseOptimizer, SparseOptimizerKind};
pub use role::Role;
pub use values::{
    Compression, DeviceKind, Initializer, InitializerKind, MissingValue, Pooling, Precision, Transform, TransformKind,
    ValueType,
};
