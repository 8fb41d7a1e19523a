//! A tower's state and computation on a device with memory of its own.
//!
//! Parameters, gradients and optimizer state stay there from step to step. A step sends the inputs
//! and labels to the device. At its end it reads the logits and the inputs' gradients back, in one
//! exchange. The host reads parameters or gradients only on request: to sum them over workers, to
//! save them, or to send them to parameter servers. A buffer that the host changed goes back to the
//! device before its next use.
//!
//! The formulas are the same as on the CPU, but the bits are not. A device adds in another order,
//! and `f32` products on tensor cores round their inputs to TF32. In bf16 the device rounds the
//! operands and results of linear layers' products. Everything that stays from step to step is in
//! 32 bits.

mod mirrored;

use burn::tensor::{Device, Tensor, TensorData, Transaction};

pub(crate) use self::mirrored::Mirrored;
use self::mirrored::floats;
use crate::Precision;
use crate::batch::{Features, StepOutput};
use crate::device::{DeviceMemory, guarded};
use crate::layers::{Context, Products, matrix};
use crate::models::Model;
use crate::optimizer::Rule;
use crate::pass::{KnownFinite, Pass, Passed, Recorded, inputs, logits};
use crate::{DenseError, ParameterLayout};

/// A tower's buffers on a device.
#[derive(Debug, Clone)]
pub(crate) struct Accelerator {
    device: Device,
    name: String,
    precision: Precision,
    pub(crate) parameters: Mirrored,
    pub(crate) gradients: Mirrored,
    pub(crate) optimizer_state: Mirrored,
}

/// The gradients of a step. The parameters' gradients stay on the device; the host reads the rest.
struct Differentiated {
    /// In layout order.
    parameters: Vec<Tensor<2>>,
    /// Logits, the size of each parameter's gradient, and the gradients of the inputs.
    read: Vec<TensorData>,
}

impl Accelerator {
    /// `name` is the device's in errors.
    pub(crate) fn new(
        (device, name): (Device, String),
        precision: Precision,
        layout: &ParameterLayout,
        parameters: Vec<f32>,
        optimizer_state: Vec<f32>,
    ) -> Self {
        let mirrored = |host| Mirrored::new(layout, &device, &name, host);
        let gradients = mirrored(vec![0.0; parameters.len()]);
        let (parameters, optimizer_state) = (mirrored(parameters), mirrored(optimizer_state));
        Self { device, name, precision, parameters, gradients, optimizer_state }
    }

    pub(crate) fn forward_backward(&mut self, pass: &Pass<'_>, during: &str) -> Result<Passed, DenseError> {
        // The tower has checked the inputs.
        let finite = KnownFinite { inputs: true, gradients: false };
        if pass.features.samples == 0 {
            self.gradients.host_mut(during)?.fill(0.0);
            let output = StepOutput { loss_sums: vec![0.0; pass.tasks.columns()], ..StepOutput::default() };
            return Ok(Passed { output, broken: None, finite });
        }
        let Differentiated { parameters, read } = self.differentiate(pass, during)?;
        self.gradients.set(parameters);

        let mut read = read.into_iter().map(|data| self.floats(data, during));
        let mut next = || read.next().unwrap_or_else(|| Ok(Vec::new()));
        let (logits, sizes) = (next()?, next()?);
        let embedding_gradients = if pass.model.needs_embeddings() { next()? } else { Vec::new() };
        let linear_gradients = if pass.model.needs_linear() { next()? } else { Vec::new() };
        let loss = pass.tasks.evaluate(&logits, pass.labels, pass.scale);
        let output = StepOutput {
            loss_sums: loss.loss_sums,
            predictions: loss.predictions,
            embedding_gradients,
            linear_gradients,
        };
        Ok(Passed { output, broken: sizes.iter().position(|size| !size.is_finite()), finite })
    }

    fn differentiate(&mut self, pass: &Pass<'_>, during: &str) -> Result<Differentiated, DenseError> {
        let samples = pass.features.samples;
        let parameters = self.parameters.on_device(during)?;
        let (device, products) = (&self.device, Products::Device(self.precision));
        guarded(&self.name, during, || {
            let recorded = pass.forward(parameters, products, &(0..samples), device);
            let logits = recorded.logits.clone().inner();
            let labels = matrix(pass.labels.to_vec(), [samples, pass.tasks.columns()], device);
            let derivative = pass.tasks.derivative(logits.clone(), labels, pass.scale);
            gradients(&recorded, logits, derivative, device)
        })
    }

    /// The logits of a pass without dropout and autodiff graph.
    pub(crate) fn logits(
        &mut self,
        model: &dyn Model,
        features: &Features<'_>,
        during: &str,
    ) -> Result<Vec<f32>, DenseError> {
        if features.samples == 0 {
            return Ok(Vec::new());
        }
        let parameters = self.parameters.on_device(during)?;
        let context = Context::new(parameters, Products::Device(self.precision));
        let logits = guarded(&self.name, during, || {
            let inputs = inputs(model, features, &(0..features.samples), &self.device);
            let logits = logits(model, &context, inputs, features.samples);
            logits.try_into_data().map_err(|error| error.to_string())
        })?;
        self.floats(logits, during)
    }

    /// Queues one update of all parameters on the device, without waiting for it. The next read
    /// reports a failure.
    pub(crate) fn apply(&mut self, rule: Rule, during: &str) -> Result<(), DenseError> {
        self.gradients.on_device(during)?;
        self.optimizer_state.on_device(during)?;
        self.parameters.on_device(during)?;
        let (parameters, state) = (self.parameters.take(), self.optimizer_state.take());
        let gradients = self.gradients.tensors();
        let (parameters, state) = guarded(&self.name, during, || Ok(updated(rule, parameters, state, gradients)))?;
        self.parameters.set(parameters);
        self.optimizer_state.set(state);
        guarded(&self.name, during, || self.device.flush().map_err(|error| error.to_string()))
    }

    pub(crate) fn memory(&self) -> Option<DeviceMemory> {
        let usage = guarded(&self.name, "asking for its memory", || Ok(self.device.memory_pool_usage())).ok()??;
        Some(DeviceMemory {
            used_bytes: usage.bytes_in_use + usage.bytes_padding,
            reserved_bytes: usage.bytes_reserved,
        })
    }

    fn floats(&self, data: TensorData, during: &str) -> Result<Vec<f32>, DenseError> {
        floats(data, &self.name, during)
    }
}

/// The backward pass. One transaction reads everything that the host needs, so the host waits once.
fn gradients(
    recorded: &Recorded,
    logits: Tensor<2>,
    derivative: Tensor<2>,
    device: &Device,
) -> Result<Differentiated, String> {
    let mut gradients = recorded.backward(derivative);
    let mut take = |leaf: &Tensor<2>| leaf.grad_remove(&mut gradients);
    let inputs = [&recorded.embeddings, &recorded.linear].map(|leaf| leaf.as_ref().and_then(&mut take));
    let parameters: Vec<Tensor<2>> = recorded
        .parameters
        .iter()
        .map(|leaf| take(leaf).unwrap_or_else(|| Tensor::zeros(leaf.dims(), device)))
        .collect();
    let sizes = parameters.iter().map(|gradient| gradient.clone().abs().sum()).collect();
    let mut transaction = Transaction::default().register(logits).register(Tensor::cat(sizes, 0));
    for gradient in inputs.into_iter().flatten() {
        transaction = transaction.register(gradient);
    }
    let read = transaction.try_execute().map_err(|error| error.to_string())?;
    Ok(Differentiated { parameters, read })
}

/// The parameters and the optimizer state after an update. The state has one tensor a parameter for
/// each slot, slot after slot.
fn updated(
    rule: Rule,
    parameters: Vec<Tensor<2>>,
    mut state: Vec<Tensor<2>>,
    gradients: &[Tensor<2>],
) -> (Vec<Tensor<2>>, Vec<Tensor<2>>) {
    let entries = parameters.len();
    let mut slots = Vec::new();
    while !state.is_empty() {
        let rest = state.split_off(entries);
        slots.push(std::mem::replace(&mut state, rest).into_iter());
    }
    let mut updated = Vec::with_capacity(entries);
    let mut new_slots = vec![Vec::with_capacity(entries); slots.len()];
    for (parameter, gradient) in parameters.into_iter().zip(gradients) {
        let own = slots.iter_mut().filter_map(Iterator::next).collect();
        let (parameter, own) = rule.apply_to_tensor(parameter, own, gradient.clone());
        updated.push(parameter);
        new_slots.iter_mut().zip(own).for_each(|(slot, value)| slot.push(value));
    }
    (updated, new_slots.concat())
}
