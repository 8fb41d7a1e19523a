//! What can go wrong in this crate, in sentences a user of the manifest can act on.

/// An error of the dense part of training.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum DenseError {
    /// The model's settings contradict each other.
    #[error("cannot build the `{model}` model: {reason}")]
    InvalidModel {
        /// The model's name as the manifest spells it.
        model: &'static str,
        /// What contradicts what, and what is expected instead.
        reason: String,
    },

    /// An optimizer's setting is outside its range.
    #[error("cannot use the dense optimizer `{optimizer}`: {setting} is {value}, expected {expected}")]
    InvalidOptimizer {
        /// The optimizer's name.
        optimizer: &'static str,
        /// The setting's name.
        setting: &'static str,
        /// The value that was given.
        value: f64,
        /// The range it has to lie in.
        expected: &'static str,
    },

    /// An input slice does not have `samples × columns` values.
    #[error(
        "the {input} input of a batch of {samples} samples has {got} values, but this model takes {columns} a sample ({})",
        samples * columns
    )]
    InputLength {
        /// `dense`, `embeddings`, `linear` or `label`.
        input: &'static str,
        /// Samples of the batch.
        samples: usize,
        /// Values that the model takes for a sample.
        columns: usize,
        /// Values that were given.
        got: usize,
    },

    /// A label outside `[0, 1]`.
    #[error(
        "the label of sample {sample} is {value} in training step {step}; binary cross-entropy takes labels from 0 to 1"
    )]
    InvalidLabel {
        /// Position in the batch.
        sample: usize,
        /// The label.
        value: f32,
        /// The global step.
        step: u64,
    },

    /// A value that is infinite or not a number: training on would spread it into every parameter.
    #[error(
        "{what} is not finite in {during}; check the inputs for missing or unscaled values, or lower the learning rate"
    )]
    NonFinite {
        /// Which value.
        what: String,
        /// The training step, or `prediction`.
        during: String,
    },

    /// Parameters or optimizer state of another size than this model's.
    #[error(
        "cannot restore the {what}: {got} values were given, this model with this optimizer has {expected}; \
         restore with the model settings that wrote the checkpoint"
    )]
    RestoreLength {
        /// `parameters` or `optimizer state`.
        what: &'static str,
        /// Values that this model has.
        expected: usize,
        /// Values that were given.
        got: usize,
    },

    /// The state to be restored was written by another kind of optimizer.
    #[error(
        "cannot restore the optimizer state: it was written by `{saved}`, but the configured dense optimizer is `{configured}`; \
         configure `{saved}`, or start with a fresh optimizer state"
    )]
    OptimizerChanged {
        /// The kind that wrote the state.
        saved: String,
        /// The kind in use.
        configured: &'static str,
    },

    /// Updates are counted from one: bias correction divides by `1 - beta^count`.
    #[error("cannot apply the dense optimizer with update count 0: updates are counted from 1")]
    UpdateCount,

    /// The worker threads could not be started.
    #[error("cannot start {threads} threads for the dense model: {reason}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// The operating system's reason.
        reason: String,
    },

    /// bf16 was asked for on a GPU that has no products of it.
    #[error(
        "cannot compute in bf16 on {device}: its compute capability is {}.{}, and products of bf16 need 8.0 (Ampere) or newer; \
         use fp32, or the CPU", capability.0, capability.1
    )]
    NoBf16 {
        /// The device, such as `cuda:0`.
        device: String,
        /// Major and minor.
        capability: (i32, i32),
    },

    /// A GPU was asked for and cannot be had.
    #[error("cannot compute on a GPU: {reason}")]
    NoGpu {
        /// What is missing.
        reason: String,
    },

    /// A device failed. What it computed since its buffers were last read is lost, and so is the tower.
    #[error("the device {device} failed in {during}: {reason}")]
    Device {
        /// The device, such as `cuda:0`.
        device: String,
        /// What it was doing.
        during: String,
        /// What the driver says.
        reason: String,
    },
}
