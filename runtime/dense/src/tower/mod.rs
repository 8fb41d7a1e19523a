//! The tower owns a model's parameters, gradients and optimizer state. Each is one flat buffer of
//! the same layout. Only the tower converts between these buffers and Burn's tensors.
//!
//! For each step, a dense worker calls `forward_backward`, reduces the gradients with its peers in
//! place, and calls `apply`. Evaluation and inference call `predict`. The tower knows no other
//! process and no clock.
//!
//! On the CPU (`host`), a step makes these copies and no others:
//!
//! - the parameters of linear layers, from the flat buffer to the layout of their products
//!   (`linear`);
//! - the other parameters, to Burn tensors (Burn owns its buffers), once for all shards of the
//!   batch;
//! - each shard's rows of the inputs;
//! - the gradients of those other parameters, from Burn's buffers to the flat one.
//!
//! On a GPU (`accelerator`), all of these stay in the GPU's memory.
//!
//! On the CPU, results are bit-equal from run to run and for any number of threads. Shards depend
//! on the batch's size only (see `workers`), each shard's graph runs on one thread, and sums over
//! shards follow their order. Different processors give different bits. Products in bf16, and
//! Burn's products for other layers, choose their kernel by CPU features at run time, and `exp`
//! comes from the C library. Initial parameters, dropout masks and the optimizer's constants are
//! the same everywhere.
//!
//! Calls block until the computation is done: on an async runtime, make them from a blocking
//! thread. The operations of this crate keep the memory of their activations from step to step, by
//! thread (`flex`). Layers in plain Burn allocate theirs anew. So a process that trains should tell
//! glibc's malloc to keep freed memory (`M_MMAP_THRESHOLD`, `M_TRIM_THRESHOLD`). The program
//! decides that, not this crate.

mod buffers;
mod checks;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use rectrain_kinds::{DenseOptimizer, Precision};

use crate::accelerator::Accelerator;
use crate::batch::{Features, StepOutput};
use crate::device::{ComputeDevice, DeviceMemory, open_cuda};
use crate::host::Host;
use crate::layers::Masks;
use crate::models::Model;
use crate::optimizer::{FlatOptimizer, rule};
use crate::pass::Pass;
use crate::tasks::Tasks;
use crate::{DenseError, ParameterLayout};

/// The settings of a tower, besides its model, tasks and optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TowerOptions {
    /// Seed of the initial parameters and of the dropout masks; equal on all replicas.
    pub seed: u64,
    /// Number of this replica. Replicas drop different activations.
    pub rank: u32,
    /// Threads to compute with; 0 means one for each core. Their number does not change results.
    /// Each thread takes memory for up to two shards, and the tower for eight at least. A shard has
    /// at most 1,024 samples with their activations. A GPU takes the whole batch at once.
    pub threads: usize,
    /// The device to compute on.
    pub device: ComputeDevice,
    /// Precision of the products of linear layers.
    pub precision: Precision,
}

/// A model and its tasks, with parameters, gradients and optimizer state.
#[derive(Debug, Clone)]
pub struct Tower {
    model: Arc<dyn Model>,
    /// The model that is trained instead, on the same parameters.
    substitute: Option<Arc<dyn Model>>,
    tasks: Tasks,
    optimizer: DenseOptimizer,
    seed: u64,
    rank: u32,
    compute: Compute,
}

/// The state and the device that computes with it.
#[derive(Debug, Clone)]
enum Compute {
    Host(Host),
    Accelerator(Box<Accelerator>),
}

impl Tower {
    /// A tower at the start of training.
    ///
    /// # Errors
    /// [`DenseError::InvalidTasks`] unless the model has exactly one logit for each task;
    /// [`DenseError::InvalidOptimizer`], [`DenseError::Threads`], [`DenseError::NoGpu`],
    /// [`DenseError::NoBf16`] and [`DenseError::Device`].
    pub fn new(
        model: Arc<dyn Model>,
        tasks: Tasks,
        optimizer: DenseOptimizer,
        options: TowerOptions,
    ) -> Result<Self, DenseError> {
        tasks.check_model(&*model)?;
        optimizer.validate()?;
        let parameters = model.layout().initialize(options.seed);
        let state = optimizer.initial_state(parameters.len());
        let compute = match options.device {
            ComputeDevice::Cpu => Compute::Host(Host::new(options.threads, options.precision, parameters, state)?),
            ComputeDevice::Cuda(index) => {
                let precision = options.precision;
                let device = (open_cuda(index, precision)?, options.device.to_string());
                Compute::Accelerator(Box::new(Accelerator::new(device, precision, model.layout(), parameters, state)))
            }
        };
        Ok(Self { model, substitute: None, tasks, optimizer, seed: options.seed, rank: options.rank, compute })
    }

    /// Trains `substitute` from now on, which has the model's parameters and other inputs. `None`
    /// trains the model again. Predictions always use the model.
    ///
    /// # Errors
    /// [`DenseError::InvalidModel`] if the substitute has other parameters than the model.
    pub fn train_substitute(&mut self, substitute: Option<Arc<dyn Model>>) -> Result<(), DenseError> {
        if substitute.as_ref().is_some_and(|substitute| substitute.layout().entries() != self.model.layout().entries())
        {
            let reason = "its substitute has other parameters".to_owned();
            return Err(DenseError::InvalidModel { model: self.model.name().to_owned(), reason });
        }
        self.substitute = substitute;
        Ok(())
    }

    /// The model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// The tasks.
    pub fn tasks(&self) -> &Tasks {
        &self.tasks
    }

    /// The layout of the flat buffers.
    pub fn layout(&self) -> &ParameterLayout {
        self.model.layout()
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &DenseOptimizer {
        &self.optimizer
    }

    /// Draws the dropout masks of this replica from now on. Workers that compute equal gradients of
    /// a piece draw equal masks.
    pub fn set_replica(&mut self, rank: u32) {
        self.rank = rank;
    }

    /// Memory that this process has allocated on its GPU; `None` on the CPU.
    pub fn device_memory(&self) -> Option<DeviceMemory> {
        match &self.compute {
            Compute::Host(_) => None,
            Compute::Accelerator(device) => device.memory(),
        }
    }

    /// Computes the losses and all gradients of `scale · Σ weight · loss`, over samples and tasks,
    /// at the present parameters. The gradients of the parameters are then in [`Tower::gradients`].
    ///
    /// `labels` is `[samples, tasks]`. `scale` is 1 / (samples of the global batch), so that the
    /// gradients summed over replicas are the gradients of the mean. A batch of 0 samples is legal
    /// and has zero gradients. `step` is the global step, on which dropout masks depend.
    ///
    /// # Errors
    /// [`DenseError::InputLength`], [`DenseError::InvalidLabel`], [`DenseError::Device`], and
    /// [`DenseError::NonFinite`] for an input, a prediction or a gradient. The gradients are then
    /// undefined; parameters and optimizer state are untouched.
    ///
    /// # Panics
    /// If the model makes logits of another shape than `[samples, tasks]`.
    pub fn forward_backward(
        &mut self,
        features: Features<'_>,
        labels: &[f32],
        scale: f32,
        step: u64,
    ) -> Result<StepOutput, DenseError> {
        let during = || format!("training step {step}");
        let model = Arc::clone(self.substitute.as_ref().unwrap_or(&self.model));
        let widths = model.input_widths();
        Self::check_lengths(widths, &features)?;
        if let Compute::Accelerator(_) = self.compute {
            self.check_inputs(widths, &features, &during)?;
        }
        self.tasks.check_labels(labels, features.samples, step)?;

        let masks = Masks { seed: self.seed, step, rank: self.rank, first_sample: 0 };
        let pass = Pass { model: &*model, tasks: &self.tasks, features, labels, scale, masks };
        let passed = match &mut self.compute {
            Compute::Host(host) => host.forward_backward(&pass),
            Compute::Accelerator(device) => device.forward_backward(&pass, &during())?,
        };
        self.check_step(widths, &features, passed, &during)
    }

    /// Keeps memory for the gradient of the embeddings of the next step. A caller gives the last
    /// gradient back when it no longer needs it, or the embeddings of a batch that it has trained.
    /// A step then allocates nothing of their size. A GPU does not use it.
    pub fn reuse(&mut self, memory: Vec<f32>) {
        if let Compute::Host(host) = &mut self.compute {
            host.reuse(memory);
        }
    }

    /// Predictions, `[samples, tasks]`, without recording gradients or dropping activations.
    ///
    /// # Errors
    /// [`DenseError::InputLength`], [`DenseError::NonFinite`] and [`DenseError::Device`].
    pub fn predict(&mut self, features: Features<'_>) -> Result<Vec<f32>, DenseError> {
        let during = || "prediction".to_string();
        let widths = self.model.input_widths();
        Self::check_lengths(widths, &features)?;
        self.check_inputs(widths, &features, &during)?;
        let logits = match &mut self.compute {
            Compute::Host(host) => host.logits(&*self.model, &features),
            Compute::Accelerator(device) => device.logits(&*self.model, &features, &during())?,
        };
        let predictions = self.tasks.predict(&logits);
        self.check_finite("the prediction", &predictions, self.tasks.columns(), &during)?;
        Ok(predictions)
    }

    /// Updates the parameters in place from the gradients. `update_count` counts the updates of
    /// these parameters from 1, this one included and across restarts. Adam's bias correction needs
    /// it.
    ///
    /// # Errors
    /// [`DenseError::UpdateCount`] for count 0, and [`DenseError::Device`]; a device may report a
    /// failed update later.
    pub fn apply(&mut self, update_count: u64) -> Result<(), DenseError> {
        let rule = rule(self.optimizer, update_count)?;
        match &mut self.compute {
            Compute::Host(host) => host.apply(rule),
            Compute::Accelerator(device) => device.apply(rule, &format!("update {update_count}"))?,
        }
        Ok(())
    }
}
