//! The dense part of training: click models in Burn, their parameters in one flat buffer, dense
//! optimizers, the losses of tasks, and metrics. It takes pooled embeddings as inputs and returns
//! their gradients. It knows nothing of embedding rows, networks, manifests or clusters. Its
//! callers are the dense worker, the parameter server (for its partition of the dense parameters)
//! and the export of checkpoints.
//!
//! Start at [`Tower`], which trains a [`Model`]. A new model is a file in `models`, or a type in
//! another crate.
//!
//! Each module imports only modules to its left:
//!
//! `random`, `device`, `flex` → `layout` → `linear`, `pairwise`, `concatenation`, `onnx` → `layers`
//! → `models` → `tasks` → `pass` → `host`, `accelerator` → `tower`
//!
//! `models` → `transfer`

mod accelerator;
mod batch;
mod concatenation;
mod device;
mod error;
mod export;
mod finite;
mod flex;
mod host;
mod inputs;
pub mod layers;
mod layout;
mod linear;
pub mod metrics;
mod models;
pub mod onnx;
mod optimizer;
mod pairwise;
mod pass;
mod random;
pub mod tasks;
mod tower;
mod transfer;
mod workers;

pub use batch::{Features, StepOutput};
/// The version of Burn in which models are written.
pub use burn;
pub use device::{ComputeDevice, DeviceMemory, GPU_SUPPORT, Gpu, gpu_count, gpus};
pub use error::DenseError;
pub use export::export_onnx;
pub use inputs::{InputWidths, Inputs};
pub use layout::{Initializer, ParameterEntry, ParameterId, ParameterLayout};
pub use models::{FirstLayer, Model, ModelConfig};
pub use optimizer::FlatOptimizer;
pub use rectrain_kinds::{CrossStructure, DenseOptimizer, LossKind, ModelSettings, Precision, Task};
pub use tasks::Tasks;
pub use tower::{Tower, TowerOptions};
pub use transfer::{NamedModel, Transfer};
