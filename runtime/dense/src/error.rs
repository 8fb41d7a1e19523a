//! The errors of this crate, in sentences that the author of a job's manifest can act on.

/// An error of the dense part of training.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
#[non_exhaustive]
pub enum DenseError {
    /// The model's settings contradict each other.
    #[error("cannot build the `{model}` model: {reason}")]
    InvalidModel {
        /// The model's name in the manifest.
        model: String,
        /// The contradiction, and the expected value.
        reason: String,
    },

    /// An optimizer's setting is outside its range.
    #[error("cannot use the dense optimizer `{optimizer}`: {setting} is {value}, expected {expected}")]
    InvalidOptimizer {
        /// The optimizer's name.
        optimizer: &'static str,
        /// The setting's name.
        setting: &'static str,
        /// The value found.
        value: f64,
        /// The expected range.
        expected: &'static str,
    },

    /// An input slice does not have `samples × columns` values.
    #[error(
        "the {input} input of a batch of {samples} samples has {got} values, but this model takes {columns} a sample \
         ({})",
        samples * columns
    )]
    InputLength {
        /// `dense`, `embeddings`, `linear` or `label`.
        input: &'static str,
        /// Samples of the batch.
        samples: usize,
        /// Values of a sample that the model takes.
        columns: usize,
        /// Values found.
        got: usize,
    },

    /// The tasks contradict each other or the model.
    #[error("cannot train these tasks: {reason}")]
    InvalidTasks {
        /// The contradiction, and the expected value.
        reason: String,
    },

    /// A label that its loss does not take.
    #[error("the label of sample {sample} is {value} in training step {step}; {loss} takes {expected}")]
    InvalidLabel {
        /// Position in the batch.
        sample: usize,
        /// The label.
        value: f32,
        /// The global step.
        step: u64,
        /// The loss.
        loss: &'static str,
        /// The labels that it takes.
        expected: &'static str,
    },

    /// A value that is infinite or not a number. Another step would spread it into every parameter.
    #[error(
        "{what} is not finite in {during}; check the inputs for missing or unscaled values, or lower the learning rate"
    )]
    NonFinite {
        /// The value.
        what: String,
        /// The training step, or `prediction`.
        during: String,
    },

    /// Parameters or optimizer state of another size than this model's.
    #[error(
        "cannot restore the {what}: found {got} values, expected {expected} for this model and optimizer; restore with \
         the model settings that wrote the checkpoint"
    )]
    RestoreLength {
        /// `parameters` or `optimizer state`.
        what: &'static str,
        /// Values that this model has.
        expected: usize,
        /// Values found.
        got: usize,
    },

    /// Another kind of optimizer wrote the state to be restored.
    #[error(
        "cannot restore the optimizer state: it was written by `{saved}`, but the configured dense optimizer is \
         `{configured}`; configure `{saved}`, or start with a fresh optimizer state"
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

    /// The operating system did not start the worker threads.
    #[error("cannot start {threads} threads for the dense model: {reason}")]
    Threads {
        /// Number of threads.
        threads: usize,
        /// The operating system's reason.
        reason: String,
    },

    /// A job in bf16 on a GPU that has no products in it.
    #[error(
        "cannot compute in bf16 on {device}: its compute capability is {}.{}, and products of bf16 need 8.0 (Ampere) or \
         newer; use fp32, or the CPU", capability.0, capability.1
    )]
    NoBf16 {
        /// The device, such as `cuda:0`.
        device: String,
        /// Major and minor.
        capability: (i32, i32),
    },

    /// A job on a GPU that is not there or cannot be used.
    #[error("cannot compute on a GPU: {reason}")]
    NoGpu {
        /// The missing part.
        reason: String,
    },

    /// A device failed. Its results since the host last read its buffers are lost, and so is the
    /// tower.
    #[error("the device {device} failed in {during}: {reason}")]
    Device {
        /// The device, such as `cuda:0`.
        device: String,
        /// The work in progress.
        during: String,
        /// The driver's reason.
        reason: String,
    },
}
