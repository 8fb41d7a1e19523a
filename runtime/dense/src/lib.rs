//! The dense part of training: click-through models in Burn, their parameters in one flat buffer, dense optimizers, the loss, and
//! the metrics. It takes pooled embeddings as inputs and returns their gradients; it knows nothing of where they come from, of
//! networks, manifests or clusters. The dense worker, the parameter server (for its partition of the dense parameters) and
//! inference call it.
//!
//! Start at [`Tower`]; a new model is a variant of [`ModelKind`] and a page in `model`.

mod accelerator;
mod device;
mod error;
mod host;
mod layers;
mod layout;
mod linear;
mod loss;
pub mod metrics;
mod model;
pub mod onnx;
mod optimizer;
mod pass;
mod random;
#[cfg(test)]
mod reference;
mod tower;
mod workers;

pub use device::{ComputeDevice, DeviceMemory, GPU_SUPPORT, Gpu, gpu_count, gpus};
pub use error::DenseError;
pub use layout::{Initializer, ParameterEntry, ParameterLayout};
pub use model::{Model, ModelConfig, ModelKind};
pub use optimizer::FlatOptimizer;
pub use rectrain_kinds::{CrossStructure, DenseOptimizer, Precision};
pub use tower::{Features, StepOutput, Tower, TowerOptions};
