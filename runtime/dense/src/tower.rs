//! The tower: the owner of a model's parameters, gradients and optimizer state, each one flat buffer of the same layout, and the one
//! place where Burn's tensors meet them. A dense worker calls it once a step: `forward_backward`, then (after it has reduced the
//! gradients with its peers, in place) `apply`; evaluation and inference call `predict`. It knows no other process and no clock.
//!
//! On the CPU (`host`), what is copied in a step: the parameters, from the flat buffer into what linear layers compute with (`linear`) and, of the others,
//! into Burn tensors (Burn owns its buffers), once for all shards of the batch; each shard's rows of the inputs; and the gradients of those others, from
//! Burn's buffers into the flat ones. Nothing else leaves or enters the graph. On a GPU (`accelerator`), all of these stay in its memory.
//!
//! On the CPU, results are bit-equal from run to run and for any number of threads: shards depend on the batch's size only (see `workers`), each
//! shard's graph runs on one thread, and sums over shards are taken in their order. They are not bit-equal between different
//! processors: products in bf16, and Burn's of what is no linear layer, pick their kernel by CPU features at run time, and `exp` comes
//! from the C library. Initial parameters, dropout masks and the optimizer's constants are the same everywhere.
//!
//! Calls block for the length of the computation: on an async runtime, call them from a blocking thread. Activations are allocated
//! anew in every step, so a process that trains should tell glibc's malloc to keep freed memory (`M_MMAP_THRESHOLD`,
//! `M_TRIM_THRESHOLD`); that is up to the program, not to this crate.

use rectrain_kinds::{DenseOptimizer, Precision};

use crate::accelerator::Accelerator;
use crate::device::{ComputeDevice, DeviceMemory, open_cuda};
use crate::host::Host;
use crate::layers::Dropout;
use crate::loss::sigmoid;
use crate::model::Model;
use crate::optimizer::{FlatOptimizer, rule};
use crate::pass::{Pass, Passed};
use crate::{DenseError, ParameterLayout};

/// What the host does with a device's buffers, in errors.
const EXCHANGE: &str = "an exchange with the host";

/// What a tower is besides its model and optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TowerOptions {
    /// Seed of the initial parameters and of the dropout masks; equal on all replicas.
    pub seed: u64,
    /// Which replica this is: replicas drop different activations.
    pub rank: u32,
    /// Threads to compute with, 0 for one a core. Results do not depend on it. Memory does: up to twice as many shards (and eight at
    /// least) of at most 1,024 samples are in work at a time, each with its activations. A GPU takes the whole batch at once.
    pub threads: usize,
    /// What is computed on.
    pub device: ComputeDevice,
    /// What the products of linear layers are computed in.
    pub precision: Precision,
}

/// The inputs of a batch, row-major. An input that the model does not take is empty.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Features<'a> {
    /// Rows of the batch, from 0.
    pub samples: usize,
    /// `[samples, dense_features]`.
    pub dense: &'a [f32],
    /// Pooled embeddings, `[samples, Σ dims]`, concatenated in feature order.
    pub embeddings: &'a [f32],
    /// Pooled first-order weights, `[samples, F]`.
    pub linear: &'a [f32],
}

/// What a training step yields besides the gradients of the parameters.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepOutput {
    /// Σ over the samples of the binary cross-entropy, not scaled.
    pub loss_sum: f64,
    /// Predicted probability a sample, from before the update.
    pub predictions: Vec<f32>,
    /// d(scale·Σ loss)/d(pooled embeddings), `[samples, Σ dims]`.
    pub embedding_gradients: Vec<f32>,
    /// d(scale·Σ loss)/d(pooled first-order weights), `[samples, F]`; empty when the model takes none.
    pub linear_gradients: Vec<f32>,
}

/// A model with its parameters, gradients and optimizer state.
#[derive(Debug, Clone)]
pub struct Tower {
    model: Model,
    optimizer: DenseOptimizer,
    seed: u64,
    rank: u32,
    compute: Compute,
}

/// Where the state is and what computes with it.
#[derive(Debug, Clone)]
enum Compute {
    Host(Host),
    Accelerator(Box<Accelerator>),
}

impl Tower {
    /// A tower at the start of training.
    ///
    /// # Errors
    /// [`DenseError::InvalidOptimizer`], [`DenseError::Threads`], [`DenseError::NoGpu`], [`DenseError::NoBf16`] and
    /// [`DenseError::Device`].
    pub fn new(model: Model, optimizer: DenseOptimizer, options: TowerOptions) -> Result<Self, DenseError> {
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
        Ok(Self { model, optimizer, seed: options.seed, rank: options.rank, compute })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The layout of the flat buffers.
    pub fn layout(&self) -> &ParameterLayout {
        self.model.layout()
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &DenseOptimizer {
        &self.optimizer
    }

    /// The flat parameters.
    ///
    /// # Errors
    /// [`DenseError::Device`], like all that copies a device's buffers.
    pub fn parameters(&mut self) -> Result<&[f32], DenseError> {
        match &mut self.compute {
            Compute::Host(host) => Ok(host.parameters()),
            Compute::Accelerator(device) => device.parameters.host(EXCHANGE),
        }
    }

    /// The flat parameters, to be overwritten in place.
    ///
    /// # Errors
    /// [`DenseError::Device`].
    pub fn parameters_mut(&mut self) -> Result<&mut [f32], DenseError> {
        match &mut self.compute {
            Compute::Host(host) => Ok(host.parameters_mut()),
            Compute::Accelerator(device) => device.parameters.host_mut(EXCHANGE),
        }
    }

    /// The flat gradients of the last `forward_backward`, zero before the first.
    ///
    /// # Errors
    /// [`DenseError::Device`].
    pub fn gradients(&mut self) -> Result<&[f32], DenseError> {
        match &mut self.compute {
            Compute::Host(host) => Ok(&host.gradients),
            Compute::Accelerator(device) => device.gradients.host(EXCHANGE),
        }
    }

    /// The flat gradients, to be reduced in place.
    ///
    /// # Errors
    /// [`DenseError::Device`].
    pub fn gradients_mut(&mut self) -> Result<&mut [f32], DenseError> {
        match &mut self.compute {
            Compute::Host(host) => Ok(&mut host.gradients),
            Compute::Accelerator(device) => device.gradients.host_mut(EXCHANGE),
        }
    }

    /// The flat parameters and the flat optimizer state: one vector of the parameters' layout for each of
    /// [`DenseOptimizer::slots`], one after another.
    ///
    /// # Errors
    /// [`DenseError::Device`].
    pub fn state(&mut self) -> Result<(&[f32], &[f32]), DenseError> {
        match &mut self.compute {
            Compute::Host(host) => Ok((host.parameters(), &host.optimizer_state)),
            Compute::Accelerator(device) => {
                Ok((device.parameters.host(EXCHANGE)?, device.optimizer_state.host(EXCHANGE)?))
            }
        }
    }

    /// Memory that this process has taken of its GPU; `None` on the CPU.
    pub fn device_memory(&self) -> Option<DeviceMemory> {
        match &self.compute {
            Compute::Host(_) => None,
            Compute::Accelerator(device) => device.memory(),
        }
    }

    /// Takes parameters and optimizer state from a checkpoint that the optimizer `saved_kind` wrote ([`DenseOptimizer::kind`]).
    /// The update count belongs to the checkpoint as well: pass it on to [`Tower::apply`].
    ///
    /// # Errors
    /// [`DenseError::OptimizerChanged`] and [`DenseError::RestoreLength`], after which the tower is as it was; [`DenseError::Device`].
    pub fn restore(&mut self, parameters: &[f32], saved_kind: &str, optimizer_state: &[f32]) -> Result<(), DenseError> {
        if saved_kind != self.optimizer.kind().name() {
            return Err(DenseError::OptimizerChanged {
                saved: saved_kind.into(),
                configured: self.optimizer.kind().name(),
            });
        }
        let total = self.layout().total();
        for (what, expected, got) in [
            ("parameters", total, parameters.len()),
            ("optimizer state", total * self.optimizer.slots().len(), optimizer_state.len()),
        ] {
            if expected != got {
                return Err(DenseError::RestoreLength { what, expected, got });
            }
        }
        match &mut self.compute {
            Compute::Host(host) => {
                host.parameters_mut().copy_from_slice(parameters);
                host.optimizer_state.copy_from_slice(optimizer_state);
            }
            Compute::Accelerator(device) => {
                device.parameters.host_mut(EXCHANGE)?.copy_from_slice(parameters);
                device.optimizer_state.host_mut(EXCHANGE)?.copy_from_slice(optimizer_state);
            }
        }
        Ok(())
    }

    /// Computes the loss and all gradients of `scale · Σ loss` at the present parameters; those of the parameters are then in
    /// [`Tower::gradients`]. `scale` is 1 / (samples of the global batch), so that gradients summed over replicas are those of the
    /// mean. A batch of 0 samples is legal and has zero gradients. `step` is the global step, on which dropout masks depend.
    ///
    /// # Errors
    /// [`DenseError::InputLength`], [`DenseError::InvalidLabel`], and [`DenseError::NonFinite`] for an input, a prediction or a
    /// gradient. The gradients are then undefined; parameters and optimizer state are untouched. [`DenseError::Device`].
    pub fn forward_backward(
        &mut self,
        features: Features<'_>,
        labels: &[f32],
        scale: f32,
        step: u64,
    ) -> Result<StepOutput, DenseError> {
        let during = || format!("training step {step}");
        self.check_features(&features, &during)?;
        check_labels(labels, features.samples, step)?;

        let dropout =
            Dropout { rate: self.model.config().dropout, seed: self.seed, step, rank: self.rank, first_sample: 0 };
        let pass = Pass { model: &self.model, features, labels, scale, dropout };
        let passed = match &mut self.compute {
            Compute::Host(host) => host.forward_backward(&pass),
            Compute::Accelerator(device) => device.forward_backward(&pass, &during())?,
        };
        self.check_step(passed, &during)
    }

    /// Predicted probabilities, one a sample, without recording gradients or dropping activations.
    ///
    /// # Errors
    /// [`DenseError::InputLength`], [`DenseError::NonFinite`] and [`DenseError::Device`].
    pub fn predict(&mut self, features: Features<'_>) -> Result<Vec<f32>, DenseError> {
        let during = || "prediction".to_string();
        self.check_features(&features, &during)?;
        let logits = match &mut self.compute {
            Compute::Host(host) => host.logits(&self.model, &features),
            Compute::Accelerator(device) => device.logits(&self.model, &features, &during())?,
        };
        let predictions: Vec<f32> = logits.into_iter().map(|logit| sigmoid(f64::from(logit)) as f32).collect();
        self.check_finite("the prediction", &predictions, 1, &during)?;
        Ok(predictions)
    }

    /// Updates the parameters in place from the gradients. `update_count` counts the updates that these parameters have had
    /// including this one, from 1, through restarts: Adam's bias correction is computed from it.
    ///
    /// # Errors
    /// [`DenseError::UpdateCount`] for count 0, and [`DenseError::Device`]; a device may tell of a failed update later.
    pub fn apply(&mut self, update_count: u64) -> Result<(), DenseError> {
        let rule = rule(self.optimizer, update_count)?;
        match &mut self.compute {
            Compute::Host(host) => host.apply(rule),
            Compute::Accelerator(device) => device.apply(rule, &format!("update {update_count}"))?,
        }
        Ok(())
    }

    fn check_features(&self, features: &Features<'_>, during: &dyn Fn() -> String) -> Result<(), DenseError> {
        for (input, values, columns) in [
            ("dense", features.dense, self.model.dense_width()),
            ("embeddings", features.embeddings, self.model.embedding_width()),
            ("linear", features.linear, self.model.linear_width()),
        ] {
            if values.len() != features.samples * columns {
                return Err(DenseError::InputLength { input, samples: features.samples, columns, got: values.len() });
            }
            self.check_finite(&format!("the {input} input"), values, columns, during)?;
        }
        Ok(())
    }

    /// Refuses values that are infinite or not a number, naming the first.
    fn check_finite(
        &self,
        what: &str,
        values: &[f32],
        columns: usize,
        during: &dyn Fn() -> String,
    ) -> Result<(), DenseError> {
        let found = match &self.compute {
            Compute::Host(host) => host.first_not_finite(values),
            Compute::Accelerator(_) => first_not_finite(values),
        };
        match found {
            None => Ok(()),
            Some(position) => {
                let (sample, column) = (position / columns, position % columns);
                let place = if columns == 1 { String::new() } else { format!(", column {column}") };
                Err(DenseError::NonFinite {
                    what: format!("{what} of sample {sample}{place} ({})", values[position]),
                    during: during(),
                })
            }
        }
    }

    fn check_step(&self, passed: Passed, during: &dyn Fn() -> String) -> Result<StepOutput, DenseError> {
        let Passed { output, broken } = passed;
        self.check_finite("the prediction", &output.predictions, 1, during)?;
        if !output.loss_sum.is_finite() {
            return Err(DenseError::NonFinite { what: "the loss".into(), during: during() });
        }
        self.check_finite(
            "the gradient of the embeddings",
            &output.embedding_gradients,
            self.model.embedding_width(),
            during,
        )?;
        self.check_finite(
            "the gradient of the first-order weights",
            &output.linear_gradients,
            self.model.linear_width(),
            during,
        )?;
        match broken.and_then(|index| self.layout().entries().get(index)) {
            None => Ok(output),
            Some(entry) => {
                Err(DenseError::NonFinite { what: format!("the gradient of `{}`", entry.name), during: during() })
            }
        }
    }
}

fn check_labels(labels: &[f32], samples: usize, step: u64) -> Result<(), DenseError> {
    if labels.len() != samples {
        return Err(DenseError::InputLength { input: "label", samples, columns: 1, got: labels.len() });
    }
    match labels.iter().position(|label| !(0.0..=1.0).contains(label)) {
        None => Ok(()),
        Some(sample) => Err(DenseError::InvalidLabel { sample, value: labels[sample], step }),
    }
}

/// Position of the first value that is infinite or not a number. Blocks without one are passed over by vectors.
pub(crate) fn first_not_finite(values: &[f32]) -> Option<usize> {
    const BLOCK: usize = 1024;
    let broken = |block: &[f32]| block.iter().fold(false, |broken, value| broken | !value.is_finite());
    let block = values.chunks(BLOCK).position(broken)? * BLOCK;
    values[block..].iter().position(|value| !value.is_finite()).map(|position| block + position)
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use burn::tensor::Device;

    use super::*;
    use crate::CrossStructure;
    use crate::device::gpus;
    use crate::layers::matrix;
    use crate::model::{ModelConfig, ModelKind};
    use crate::random::Stream;
    use crate::reference::{Batch, DropoutKey, Reference};
    use crate::workers::shards;

    const SEED: u64 = 11;
    const RANK: u32 = 3;
    const STEP: u64 = 17;

    fn config(kind: ModelKind) -> ModelConfig {
        let dims = match kind {
            ModelKind::Lr => vec![0; 3],
            ModelKind::Dlrm { .. } | ModelKind::DeepFm { .. } | ModelKind::Fm => vec![4; 3],
            _ => vec![4, 2, 3],
        };
        ModelConfig { kind, dense_features: 2, embedding_dims: dims, dropout: 0.0 }
    }

    fn dnn() -> ModelConfig {
        config(ModelKind::Dnn { hidden: vec![6, 5] })
    }

    fn dcn(structure: CrossStructure, low_rank: Option<usize>, hidden: Vec<usize>) -> ModelConfig {
        config(ModelKind::DcnV2 { structure, cross_layers: 3, low_rank, hidden })
    }

    /// Every kind, and every branch within the kinds.
    fn all_models() -> Vec<ModelConfig> {
        let without_dense = |kind| ModelConfig { dense_features: 0, ..config(kind) };
        let without_sparse = |kind| ModelConfig { embedding_dims: vec![], ..config(kind) };
        vec![
            config(ModelKind::Lr),
            without_dense(ModelKind::Lr),
            without_sparse(ModelKind::Lr),
            config(ModelKind::Fm),
            without_dense(ModelKind::Fm),
            config(ModelKind::DeepFm { hidden: vec![6, 5] }),
            config(ModelKind::WideDeep { hidden: vec![6, 5] }),
            dnn(),
            without_dense(ModelKind::Dnn { hidden: vec![6] }),
            without_sparse(ModelKind::Dnn { hidden: vec![6] }),
            config(ModelKind::Dnn { hidden: vec![] }),
            config(ModelKind::Dlrm { bottom: vec![5, 4], top: vec![7, 6] }),
            config(ModelKind::Dlrm { bottom: vec![5], top: vec![7] }),
            without_dense(ModelKind::Dlrm { bottom: vec![5], top: vec![7] }),
            dcn(CrossStructure::Parallel, None, vec![6, 5]),
            dcn(CrossStructure::Parallel, Some(2), vec![6]),
            dcn(CrossStructure::Parallel, None, vec![]),
            dcn(CrossStructure::Stacked, None, vec![6, 5]),
            dcn(CrossStructure::Stacked, Some(2), vec![6]),
        ]
    }

    fn tower_with(config: ModelConfig, threads: usize, precision: Precision) -> Tower {
        let options = TowerOptions { seed: SEED, rank: RANK, threads, device: ComputeDevice::Cpu, precision };
        Tower::new(Model::new(config).unwrap(), DenseOptimizer::adam(1e-2), options).unwrap()
    }

    fn tower(config: ModelConfig) -> Tower {
        tower_with(config, 1, Precision::Fp32)
    }

    fn bf16_tower(config: ModelConfig) -> Tower {
        tower_with(config, 1, Precision::Bf16)
    }

    /// How much further than in 32 bits a step in bf16 may be from the exact value: by 2 % of the largest gradient of a parameter (or of
    /// .001) and 20 % of each. An operand of 8 bits is off by up to 0.4 %, there are up to seven of them one after another, and some
    /// gradients are what is left when those of a few samples cancel out.
    /// A device rounds sums as well: twice as far.
    const BF16_SLACK: f64 = 10_000.0;

    /// A device with memory of its own: the machine's GPU where there is one that this build can use, otherwise the CPU's backend,
    /// which does the same in its place.
    fn device() -> Device {
        if gpus().unwrap().is_empty() { Device::flex() } else { open_cuda(0, Precision::Bf16).unwrap() }
    }

    /// How much further from the exact value a device may be than the CPU: products on tensor cores take inputs of 11 bits.
    fn slack() -> f64 {
        if gpus().unwrap().is_empty() { 1.0 } else { 2000.0 }
    }

    /// A tower on a device with memory of its own.
    fn on_device(config: ModelConfig) -> Tower {
        on_device_with(config, DenseOptimizer::adam(1e-2), Precision::Fp32)
    }

    fn bf16_on_device(config: ModelConfig) -> Tower {
        on_device_with(config, DenseOptimizer::adam(1e-2), Precision::Bf16)
    }

    fn on_device_with(config: ModelConfig, optimizer: DenseOptimizer, precision: Precision) -> Tower {
        let model = Model::new(config).unwrap();
        let parameters = model.layout().initialize(SEED);
        let state = optimizer.initial_state(parameters.len());
        let device = Accelerator::new((device(), "device".into()), precision, model.layout(), parameters, state);
        Tower { model, optimizer, seed: SEED, rank: RANK, compute: Compute::Accelerator(Box::new(device)) }
    }

    /// A tower none of whose parameters is 0: a weight that starts at 0 hides what is multiplied by it.
    fn moved(mut tower: Tower) -> Tower {
        let stream = Stream::new(&[98]);
        for (index, parameter) in (0..).zip(tower.parameters_mut().unwrap()) {
            *parameter += (0.2 * stream.unit(index) - 0.1) as f32;
        }
        tower
    }

    /// A tower whose hidden units are far from the kink of ReLU, every other one above it: where one is on the other side of it in
    /// bf16, a gradient is off by all of a sample's part, which says nothing about rounding.
    fn clear_of_kinks(tower: Tower) -> Tower {
        clear_of_kinks_by(1.5, tower)
    }

    fn clear_of_kinks_by(distance: f32, mut tower: Tower) -> Tower {
        let layout = tower.layout().clone();
        let hidden = |name: &str| {
            name.ends_with(".bias") && ["deep.", "top.", "bottom."].iter().any(|mlp| name.starts_with(mlp))
        };
        for entry in layout.entries().iter().filter(|entry| hidden(&entry.name) && !entry.name.contains("logit")) {
            let biases = &mut tower.parameters_mut().unwrap()[entry.range()];
            biases
                .iter_mut()
                .enumerate()
                .for_each(|(unit, bias)| *bias = if unit % 2 == 0 { distance } else { -distance });
        }
        tower
    }

    /// A batch whose values f32 holds exactly.
    #[derive(Clone)]
    struct Sampled {
        samples: usize,
        dense: Vec<f32>,
        embeddings: Vec<f32>,
        linear: Vec<f32>,
        labels: Vec<f32>,
    }

    impl Sampled {
        fn new(model: &Model, samples: usize) -> Self {
            let values = |key: u64, width: usize| -> Vec<f32> {
                let stream = Stream::new(&[99, key]);
                (0..(samples * width) as u64).map(|i| (2.0 * stream.unit(i) - 1.0) as f32).collect()
            };
            Self {
                samples,
                dense: values(0, model.dense_width()),
                embeddings: values(1, model.embedding_width()),
                linear: values(2, model.linear_width()),
                labels: values(3, 1).iter().map(|&x| if x > 0.0 { 1.0 } else { 0.0 }).collect(),
            }
        }

        fn features(&self) -> Features<'_> {
            Features { samples: self.samples, dense: &self.dense, embeddings: &self.embeddings, linear: &self.linear }
        }

        fn batch(&self) -> Batch {
            let wide = |values: &[f32]| values.iter().copied().map(f64::from).collect();
            Batch {
                samples: self.samples,
                dense: wide(&self.dense),
                embeddings: wide(&self.embeddings),
                linear: wide(&self.linear),
                labels: wide(&self.labels),
            }
        }
    }

    fn wide(values: &[f32]) -> Vec<f64> {
        values.iter().copied().map(f64::from).collect()
    }

    /// Central differences of `loss` along each coordinate.
    fn differences(at: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
        const EPSILON: f64 = 1e-5;
        let mut point = at.to_vec();
        (0..at.len())
            .map(|index| {
                let mut moved = |by: f64| {
                    point[index] = at[index] + by;
                    let loss = loss(&point);
                    point[index] = at[index];
                    loss
                };
                (moved(EPSILON) - moved(-EPSILON)) / (2.0 * EPSILON)
            })
            .collect()
    }

    fn assert_close(what: &str, got: &[f32], expected: &[f64]) {
        assert_within(1.0, what, got, expected);
    }

    fn assert_within(slack: f64, what: &str, got: &[f32], expected: &[f64]) {
        assert_eq!(got.len(), expected.len(), "{what}");
        let scale = expected.iter().fold(1e-3_f64, |most, value| most.max(value.abs()));
        for (index, (&got, &expected)) in got.iter().zip(expected).enumerate() {
            let error = (f64::from(got) - expected).abs();
            assert!(
                error <= slack * (2e-6 * scale + 2e-5 * expected.abs()),
                "{what}[{index}]: {got} but {expected} expected"
            );
        }
    }

    /// Compares one training step, on the CPU and on a device, with finite differences of the reference.
    fn check_step(config: ModelConfig, samples: usize, dropout: DropoutKey) {
        // A GPU's tensor cores round to TF32.
        let is_exact = slack() <= 1.0;
        for (slack, tower) in [
            (1.0, tower(config.clone())),
            (BF16_SLACK, clear_of_kinks(bf16_tower(config.clone()))),
            (slack(), if is_exact { on_device(config.clone()) } else { clear_of_kinks(on_device(config.clone())) }),
            (2.0 * BF16_SLACK, clear_of_kinks(bf16_on_device(config.clone()))),
        ] {
            check_step_of(moved(tower), slack, config.clone(), samples, dropout);
        }
    }

    fn check_step_of(mut tower: Tower, slack: f64, config: ModelConfig, samples: usize, dropout: DropoutKey) {
        let name = format!("{config:?}");
        let sampled = Sampled::new(tower.model(), samples);
        let scale = 1.0 / 3.0;
        let output = tower.forward_backward(sampled.features(), &sampled.labels, scale, STEP).unwrap();

        let batch = sampled.batch();
        let parameters = wide(tower.parameters().unwrap());
        let layout = tower.layout().clone();
        let reference = Reference { config: &config, layout: &layout, dropout };
        let logits: Vec<f64> = (0..samples).map(|sample| reference.logit(&parameters, &batch, sample)).collect();
        let probabilities: Vec<f64> = logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
        assert_within(slack, &format!("{name}: predictions"), &output.predictions, &probabilities);
        let loss = reference.loss_sum(&parameters, &batch);
        assert!((output.loss_sum - loss).abs() < slack * 1e-6 * loss, "{name}: loss {} but {loss}", output.loss_sum);

        let scaled = |parameters: &[f64], batch: &Batch| f64::from(scale) * reference.loss_sum(parameters, batch);
        let expected = differences(&parameters, |point| scaled(point, &batch));
        for entry in layout.entries() {
            let what = format!("{name}: {}", entry.name);
            assert_within(slack, &what, &tower.gradients().unwrap()[entry.range()], &expected[entry.range()]);
        }
        let expected = differences(&batch.embeddings, |point| {
            scaled(&parameters, &Batch { embeddings: point.to_vec(), ..batch.clone() })
        });
        assert_within(slack, &format!("{name}: embeddings"), &output.embedding_gradients, &expected);
        let expected =
            differences(&batch.linear, |point| scaled(&parameters, &Batch { linear: point.to_vec(), ..batch.clone() }));
        assert_within(slack, &format!("{name}: linear"), &output.linear_gradients, &expected);
    }

    #[test]
    fn forward_and_all_gradients_of_every_model_match_an_independent_definition() {
        for config in all_models() {
            check_step(config, 5, None);
        }
    }

    #[test]
    fn gradients_in_bf16_are_within_a_few_percent_of_those_in_32_bits() {
        for config in all_models() {
            let gradients = |mut tower: Tower, labels: Option<f32>| {
                let mut sampled = Sampled::new(tower.model(), 200);
                if let Some(label) = labels {
                    sampled.labels.fill(label);
                }
                let output = tower.forward_backward(sampled.features(), &sampled.labels, 1.0 / 200.0, 1).unwrap();
                (tower.layout().clone(), tower.gradients().unwrap().to_vec(), output.embedding_gradients)
            };
            let length = |values: &mut dyn Iterator<Item = f32>| values.map(|value| value * value).sum::<f32>().sqrt();
            let check = |what: &str, most: f32, exact: &[f32], rounded: &[f32]| {
                let error = length(&mut exact.iter().zip(rounded).map(|(exact, rounded)| exact - rounded));
                let size = length(&mut exact.iter().copied());
                assert!(error <= most * size, "{config:?}: {what} is off by {error} of {size}");
            };
            let on_the_cpu =
                [tower, bf16_tower].map(|tower| gradients(clear_of_kinks(moved(tower(config.clone()))), None));
            // Where sums are rounded as well more units would come to be on the other side, and of gradients that cancel out, as those of
            // unlike labels do, no more might be left than of a rounding.
            let on_a_device = [on_device, bf16_on_device]
                .map(|tower| gradients(clear_of_kinks_by(6.0, moved(tower(config.clone()))), Some(1.0)));
            // A device has products with one column in 32 bits.
            for (columns, most, towers) in [(0, 0.02, on_the_cpu), (1, 0.04, on_a_device)] {
                let [(layout, exact, exact_embeddings), (_, rounded, embeddings)] = towers;
                for entry in layout.entries() {
                    check(&entry.name, most, &exact[entry.range()], &rounded[entry.range()]);
                }
                check("the embeddings", most, &exact_embeddings, &embeddings);
                let model = Model::new(config.clone()).unwrap();
                let rounds = model.linears().iter().any(|linear| layout.entries()[linear.weight.0].shape[1] > columns);
                assert_eq!(exact != rounded, rounds, "{config:?}: linear layers round, and nothing else does");
            }
        }
    }

    #[test]
    fn dropout_masks_and_their_gradients_match_an_independent_definition() {
        let key = Some([SEED, STEP, u64::from(RANK)]);
        for config in all_models() {
            check_step(ModelConfig { dropout: 0.4, ..config }, 5, key);
        }
    }

    #[test]
    fn a_batch_cut_into_shards_has_the_gradients_of_the_whole_batch() {
        assert!(shards(600).len() > 1);
        let dropout = Some([SEED, STEP, u64::from(RANK)]);
        let small = ModelConfig { dropout: 0.3, embedding_dims: vec![], ..config(ModelKind::Dnn { hidden: vec![4] }) };
        check_step(small, 600, dropout);
        check_step(ModelConfig { embedding_dims: vec![], ..config(ModelKind::Lr) }, 600, None);
    }

    #[test]
    fn predictions_match_the_definition_and_drop_nothing() {
        for config in all_models() {
            let config = ModelConfig { dropout: 0.5, ..config };
            for (slack, tower) in [
                (1.0, tower(config.clone())),
                (BF16_SLACK, bf16_tower(config.clone())),
                (slack(), on_device(config.clone())),
                (2.0 * BF16_SLACK, bf16_on_device(config.clone())),
            ] {
                let mut tower = moved(tower);
                let sampled = Sampled::new(tower.model(), 300);
                let (parameters, batch) = (wide(tower.parameters().unwrap()), sampled.batch());
                let reference = Reference { config: &config, layout: tower.layout(), dropout: None };
                let expected: Vec<f64> = (0..batch.samples)
                    .map(|sample| 1.0 / (1.0 + (-reference.logit(&parameters, &batch, sample)).exp()))
                    .collect();
                assert_within(slack, &format!("{config:?}"), &tower.predict(sampled.features()).unwrap(), &expected);
            }
        }
    }

    #[test]
    fn dropout_keeps_the_expectation_and_differs_by_step_and_rank() {
        let config = ModelConfig { dropout: 0.3, ..dnn() };
        let model = Model::new(config).unwrap();
        let sampled = Sampled::new(&model, 512);
        let predictions = |rank, step| {
            let options =
                TowerOptions { seed: SEED, rank, threads: 1, device: ComputeDevice::Cpu, precision: Precision::Fp32 };
            let mut tower = Tower::new(model.clone(), DenseOptimizer::adam(1e-3), options).unwrap();
            tower.forward_backward(sampled.features(), &sampled.labels, 1.0, step).unwrap().predictions
        };
        assert_eq!(predictions(0, 1), predictions(0, 1));
        assert_ne!(predictions(0, 1), predictions(0, 2));
        assert_ne!(predictions(0, 1), predictions(1, 1));

        let ones = matrix(vec![1.0; 100_000], [1000, 100], &Device::flex());
        let dropout = Dropout { rate: 0.3, seed: 1, step: 2, rank: 3, first_sample: 0 };
        let dropped: Vec<f32> = dropout.apply(5, ones).into_data().try_into_vec().unwrap();
        let zeros = dropped.iter().filter(|&&x| x == 0.0).count();
        assert!((zeros as f64 / 1e5 - 0.3).abs() < 0.005, "{zeros}");
        assert!(dropped.iter().all(|&x| x == 0.0 || x == 1.0 / 0.7_f32));
    }

    /// Three steps of training; everything that came out, as bits.
    fn train(config: &ModelConfig, threads: usize, precision: Precision, samples: usize) -> Vec<u32> {
        let mut tower = tower_with(config.clone(), threads, precision);
        let sampled = Sampled::new(tower.model(), samples);
        let scale = 1.0 / samples as f32;
        let mut bits = Vec::new();
        for step in 1..=3 {
            let output = tower.forward_backward(sampled.features(), &sampled.labels, scale, step).unwrap();
            tower.apply(step).unwrap();
            let loss = output.loss_sum.to_bits();
            bits.extend([loss as u32, (loss >> 32) as u32]);
            let all = [&output.predictions, &output.embedding_gradients, &output.linear_gradients];
            bits.extend(all.into_iter().flatten().map(|value| value.to_bits()));
        }
        let predictions = tower.predict(sampled.features()).unwrap();
        let gradients = tower.gradients().unwrap().to_vec();
        let (parameters, state) = tower.state().unwrap();
        let flat = [parameters, &gradients, state, &predictions];
        bits.extend(flat.into_iter().flatten().map(|value| value.to_bits()));
        bits
    }

    #[test]
    fn training_is_bit_equal_from_run_to_run_and_for_any_number_of_threads() {
        let models = [
            config(ModelKind::Dlrm { bottom: vec![64, 32], top: vec![96, 64] }),
            config(ModelKind::DeepFm { hidden: vec![96, 64] }),
            dcn(CrossStructure::Parallel, Some(2), vec![96, 64]),
        ];
        for config in models {
            let config = ModelConfig { dropout: 0.1, ..config };
            for precision in [Precision::Fp32, Precision::Bf16] {
                let once = train(&config, 1, precision, 1500);
                for threads in [1, 2, 3] {
                    assert!(
                        once == train(&config, threads, precision, 1500),
                        "{config:?} {precision:?}, {threads} threads"
                    );
                }
            }
        }
    }

    #[test]
    fn towers_that_compute_at_the_same_time_do_not_disturb_each_other() {
        let config = config(ModelKind::Dlrm { bottom: vec![16], top: vec![16] });
        for precision in [Precision::Fp32, Precision::Bf16] {
            let alone = train(&config, 2, precision, 1500);
            std::thread::scope(|scope| {
                let runs: Vec<_> = (0..4).map(|_| scope.spawn(|| train(&config, 2, precision, 1500))).collect();
                for run in runs {
                    assert!(alone == run.join().unwrap());
                }
            });
        }
    }

    #[test]
    fn gradients_in_bf16_have_the_same_bits_however_many_shards_are_in_work_at_a_time() {
        let config = config(ModelKind::Dlrm { bottom: vec![8], top: vec![8] });
        // Nine shards: two waves on one thread, one on five.
        let samples = 9000;
        assert_eq!(shards(samples).len(), 9);
        let once = train(&config, 1, Precision::Bf16, samples);
        assert!(once == train(&config, 5, Precision::Bf16, samples));
        assert!(once != train(&config, 1, Precision::Fp32, samples));
    }

    #[test]
    fn bf16_computes_with_the_parameters_as_they_are_now() {
        let mut tower = bf16_tower(dnn());
        let sampled = Sampled::new(tower.model(), 20);
        let fresh = |parameters: &[f32]| {
            let mut fresh = bf16_tower(dnn());
            fresh.parameters_mut().unwrap().copy_from_slice(parameters);
            fresh.predict(sampled.features()).unwrap()
        };
        let check = |tower: &mut Tower| {
            let parameters = tower.parameters().unwrap().to_vec();
            assert_eq!(tower.predict(sampled.features()).unwrap(), fresh(&parameters));
            tower.predict(sampled.features()).unwrap()
        };
        let first = check(&mut tower);
        tower.forward_backward(sampled.features(), &sampled.labels, 1.0, 1).unwrap();
        tower.apply(1).unwrap();
        let second = check(&mut tower);
        tower.parameters_mut().unwrap().iter_mut().for_each(|value| *value *= 2.0);
        let third = check(&mut tower);
        assert!(first != second && second != third);
        let mut copy = tower.clone();
        copy.parameters_mut().unwrap().fill(0.0);
        assert!(check(&mut copy) != third);
        assert_eq!(check(&mut tower), third);
    }

    #[test]
    fn a_checkpoint_of_either_precision_is_one_of_the_other() {
        for (wrote, reads) in [(Precision::Bf16, Precision::Fp32), (Precision::Fp32, Precision::Bf16)] {
            let mut tower = tower_with(dnn(), 1, wrote);
            let sampled = Sampled::new(tower.model(), 8);
            for step in 1..=3 {
                tower.forward_backward(sampled.features(), &sampled.labels, 0.125, step).unwrap();
                tower.apply(step).unwrap();
            }
            let (parameters, state) = tower.state().unwrap();
            let (parameters, state) = (parameters.to_vec(), state.to_vec());
            let mut restored = tower_with(dnn(), 1, reads);
            restored.restore(&parameters, "adam", &state).unwrap();
            assert_eq!(restored.state().unwrap(), (&parameters[..], &state[..]));
            let [was, is] = [&mut tower, &mut restored].map(|tower| tower.predict(sampled.features()).unwrap());
            assert!(was != is && was.iter().zip(is).all(|(was, is)| (was - is).abs() < 0.01));
        }
    }

    #[test]
    fn an_empty_batch_has_zero_gradients_and_still_applies() {
        let towers = |config: ModelConfig| {
            [tower(config.clone()), bf16_tower(config.clone()), on_device(config.clone()), bf16_on_device(config)]
        };
        for mut tower in all_models().into_iter().flat_map(towers) {
            let sampled = Sampled::new(tower.model(), 4);
            tower.forward_backward(sampled.features(), &sampled.labels, 1.0, 1).unwrap();
            let empty = Sampled::new(tower.model(), 0);
            let output = tower.forward_backward(empty.features(), &[], 1.0, 2).unwrap();
            assert_eq!(output.loss_sum, 0.0);
            assert!(output.predictions.is_empty() && output.embedding_gradients.is_empty());
            assert!(tower.gradients().unwrap().iter().all(|&gradient| gradient == 0.0));
            tower.apply(1).unwrap();
            assert!(tower.predict(empty.features()).unwrap().is_empty());
        }
    }

    #[test]
    fn gradients_of_replicas_sum_to_those_of_the_global_batch() {
        let mut tower = tower(dnn());
        let sampled = Sampled::new(tower.model(), 10);
        tower.forward_backward(sampled.features(), &sampled.labels, 0.1, 1).unwrap();
        let whole = wide(tower.gradients().unwrap());
        let mut sum = vec![0.0_f32; whole.len()];
        for part in [0..4, 4..10] {
            let rows = |values: &[f32], width: usize| values[part.start * width..part.end * width].to_vec();
            let (dense, embeddings) = (rows(&sampled.dense, 2), rows(&sampled.embeddings, 9));
            let features = Features { samples: part.len(), dense: &dense, embeddings: &embeddings, linear: &[] };
            tower.forward_backward(features, &sampled.labels[part.clone()], 0.1, 1).unwrap();
            sum.iter_mut().zip(tower.gradients().unwrap()).for_each(|(sum, gradient)| *sum += gradient);
        }
        assert_close("sum over replicas", &sum, &whole);
    }

    #[test]
    fn values_that_are_not_finite_stop_the_step_and_are_named() {
        for tower in [tower(dnn()), bf16_tower(dnn()), on_device(dnn()), bf16_on_device(dnn())] {
            check_values_that_are_not_finite(tower);
        }
    }

    fn check_values_that_are_not_finite(mut tower: Tower) {
        let sampled = Sampled::new(tower.model(), 4);
        let before = tower.parameters().unwrap().to_vec();
        let error = |tower: &mut Tower, sampled: &Sampled| {
            tower.forward_backward(sampled.features(), &sampled.labels, 1.0, 7).unwrap_err().to_string()
        };

        let mut broken = sampled.clone();
        broken.dense[2 * 2 + 1] = f32::NAN;
        let message = error(&mut tower, &broken);
        assert!(
            message.starts_with("the dense input of sample 2, column 1 (NaN) is not finite in training step 7"),
            "{message}"
        );
        assert!(tower.predict(broken.features()).unwrap_err().to_string().contains("in prediction"));

        let mut broken = sampled.clone();
        broken.embeddings[9 + 8] = f32::NEG_INFINITY;
        let message = error(&mut tower, &broken);
        assert!(message.starts_with("the embeddings input of sample 1, column 8 (-inf)"), "{message}");

        let mut broken = sampled.clone();
        broken.labels[3] = 2.0;
        let message = error(&mut tower, &broken);
        assert!(message.starts_with("the label of sample 3 is 2 in training step 7"), "{message}");

        tower.parameters_mut().unwrap().fill(3e38);
        let message = error(&mut tower, &sampled);
        assert!(message.contains("prediction of sample 0"), "{message}");
        tower.parameters_mut().unwrap().copy_from_slice(&before);
        assert!(tower.forward_backward(sampled.features(), &sampled.labels, 1.0, 8).is_ok());
    }

    #[test]
    fn a_gradient_that_overflows_is_named_by_its_parameter() {
        let config = ModelConfig { embedding_dims: vec![], ..config(ModelKind::Lr) };
        for mut tower in [tower(config.clone()), on_device(config)] {
            let features = Features { samples: 1, dense: &[1e20, -1e20], embeddings: &[], linear: &[] };
            tower.parameters_mut().unwrap().fill(0.0);
            let error = tower.forward_backward(features, &[1.0], 1e20, 1).unwrap_err();
            assert!(error.to_string().starts_with("the gradient of `firstOrder.weight` is not finite"), "{error}");
        }
    }

    #[test]
    fn inputs_of_a_wrong_length_are_refused_with_what_was_expected() {
        let mut tower = tower(dnn());
        let sampled = Sampled::new(tower.model(), 4);
        let short = Features { embeddings: &sampled.embeddings[1..], ..sampled.features() };
        let message = tower.forward_backward(short, &sampled.labels, 1.0, 1).unwrap_err().to_string();
        assert_eq!(
            message,
            "the embeddings input of a batch of 4 samples has 35 values, but this model takes 9 a sample (36)"
        );
        let message = tower.forward_backward(sampled.features(), &[1.0], 1.0, 1).unwrap_err().to_string();
        assert!(message.starts_with("the label input"), "{message}");
    }

    fn steps(tower: &mut Tower, updates: Range<u64>) {
        let sampled = Sampled::new(tower.model(), 32);
        for update in updates {
            tower.forward_backward(sampled.features(), &sampled.labels, 1.0 / 32.0, update).unwrap();
            tower.apply(update).unwrap();
        }
    }

    /// What a device holds, what the host holds and what goes between them, through everything that a dense worker does.
    #[test]
    fn a_tower_on_a_device_trains_as_one_on_the_cpu_does_whoever_looks_at_or_changes_its_buffers() {
        let optimizers = [
            DenseOptimizer::Sgd { learning_rate: 0.1, momentum: 0.0 },
            DenseOptimizer::Sgd { learning_rate: 0.1, momentum: 0.9 },
            DenseOptimizer::AdaGrad { learning_rate: 0.05, initial_accumulator: 0.1, epsilon: 1e-10 },
            DenseOptimizer::Adam { learning_rate: 0.01, beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1 },
            DenseOptimizer::AdamW { learning_rate: 0.01, beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1 },
        ];
        let config = ModelConfig { dropout: 0.2, ..config(ModelKind::Dlrm { bottom: vec![16], top: vec![24] }) };
        for optimizer in optimizers {
            let options = TowerOptions {
                seed: SEED,
                rank: RANK,
                threads: 1,
                device: ComputeDevice::Cpu,
                precision: Precision::Fp32,
            };
            let host = Tower::new(Model::new(config.clone()).unwrap(), optimizer, options).unwrap();
            let mut towers = [host, on_device_with(config.clone(), optimizer, Precision::Fp32)];
            for step in 1..=8 {
                for tower in &mut towers {
                    let sampled = Sampled::new(tower.model(), 64);
                    tower.forward_backward(sampled.features(), &sampled.labels, 1.0 / 64.0, step).unwrap();
                    match step {
                        // Summed over workers.
                        2 => tower.gradients_mut().unwrap().iter_mut().for_each(|gradient| *gradient *= 0.5),
                        3 => drop(tower.gradients().unwrap().to_vec()),
                        _ => {}
                    }
                    tower.apply(step).unwrap();
                    match step {
                        // Taken from parameter servers; saved; restored.
                        4 => tower.parameters_mut().unwrap()[..10].fill(0.25),
                        5 => drop(tower.state().unwrap().0.to_vec()),
                        6 => {
                            let (parameters, state) = tower.state().map(|(p, s)| (p.to_vec(), s.to_vec())).unwrap();
                            steps(tower, 20..22);
                            tower.restore(&parameters, optimizer.kind().name(), &state).unwrap();
                        }
                        _ => {}
                    }
                }
            }
            let [mut host, mut device] = towers;
            let (expected, expected_state) = host.state().unwrap();
            let (got, got_state) = device.state().unwrap();
            assert_within(slack(), &format!("{optimizer:?}: parameters"), got, &wide(expected));
            assert_within(slack(), &format!("{optimizer:?}: state"), got_state, &wide(expected_state));
        }
    }

    #[test]
    fn a_device_whose_memory_was_lost_says_so_instead_of_giving_old_values() {
        let mut tower = on_device(dnn());
        steps(&mut tower, 1..2);
        let Compute::Accelerator(device) = &mut tower.compute else { panic!("it is on a device") };
        device.parameters.lose();
        for error in [tower.parameters().unwrap_err(), tower.apply(2).unwrap_err()] {
            assert!(error.to_string().contains("was lost in an earlier failure"), "{error}");
        }
    }

    #[test]
    fn adam_goes_on_after_a_restore_as_if_nothing_had_happened_but_only_with_its_update_count() {
        let mut uninterrupted = tower(dnn());
        steps(&mut uninterrupted, 1..6);
        let (parameters, state) =
            (uninterrupted.parameters().unwrap().to_vec(), uninterrupted.state().unwrap().1.to_vec());
        steps(&mut uninterrupted, 6..9);

        let mut restored = tower(dnn());
        restored.restore(&parameters, "adam", &state).unwrap();
        steps(&mut restored, 6..9);
        assert_eq!(restored.parameters().unwrap(), uninterrupted.parameters().unwrap());

        let mut forgetful = tower(dnn());
        forgetful.restore(&parameters, "adam", &state).unwrap();
        steps(&mut forgetful, 1..4);
        assert_ne!(
            forgetful.parameters().unwrap(),
            uninterrupted.parameters().unwrap(),
            "the beta powers were lost and nobody saw it"
        );
    }

    #[test]
    fn a_restore_notices_another_optimizer_or_another_model() {
        let mut tower = tower(dnn());
        let (parameters, state) = (tower.parameters().unwrap().to_vec(), tower.state().unwrap().1.to_vec());
        let message = tower.restore(&parameters, "sgd", &state).unwrap_err().to_string();
        assert!(message.contains("written by `sgd`, but the configured dense optimizer is `adam`"), "{message}");
        let message = tower.restore(&parameters[1..], "adam", &state).unwrap_err().to_string();
        assert!(message.contains("cannot restore the parameters"), "{message}");
        let message = tower.restore(&parameters, "adam", &state[1..]).unwrap_err().to_string();
        assert!(message.contains("cannot restore the optimizer state"), "{message}");
    }

    #[test]
    fn training_lowers_the_loss_to_that_of_the_function_behind_the_labels() {
        let config = config(ModelKind::Dlrm { bottom: vec![16], top: vec![32] });
        for tower in [tower(config.clone()), bf16_on_device(config)] {
            check_training(tower);
        }
    }

    fn check_training(mut tower: Tower) {
        let mut sampled = Sampled::new(tower.model(), 512);
        for sample in 0..sampled.samples {
            let score: f32 =
                (0..4).map(|d| sampled.embeddings[sample * 12 + d] * sampled.embeddings[sample * 12 + 8 + d]).sum();
            sampled.labels[sample] = if score > 0.0 { 1.0 } else { 0.0 };
        }
        let mut losses = Vec::new();
        for step in 1..=150 {
            let output = tower.forward_backward(sampled.features(), &sampled.labels, 1.0 / 512.0, step).unwrap();
            losses.push(output.loss_sum / 512.0);
            tower.apply(step).unwrap();
        }
        assert!(losses[0] > 0.6 && losses[149] < 0.15, "{} to {}", losses[0], losses[149]);
    }
}
