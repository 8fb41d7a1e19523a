//! A tower's state and computation on a device with memory of its own. Parameters, gradients and optimizer state stay there from
//! step to step; a step brings the inputs and labels to it and the logits and the inputs' gradients back, all of them in one
//! exchange at its end. The host sees parameters or gradients only when it asks (to sum them over workers, to save them, to send
//! them to parameter servers), and what it changed goes back before it is used next.
//!
//! The formulas are those of the CPU; their bits are not: a device adds in another order, and `f32` products on tensor cores round
//! their inputs to TF32. In bf16, what products of linear layers read and give is rounded; all that stays from step to step is in 32 bits.

use burn::tensor::{Device, Tensor, TensorData, Transaction, activation::sigmoid};

use crate::Precision;
use crate::device::{DeviceMemory, guarded};
use crate::layers::{Dropout, Parameters, Products, matrix};
use crate::loss::binary_cross_entropy;
use crate::model::Model;
use crate::optimizer::Rule;
use crate::pass::{Pass, Passed, inputs};
use crate::tower::{Features, StepOutput};
use crate::{DenseError, ParameterLayout};

/// See the module's text.
#[derive(Debug, Clone)]
pub(crate) struct Accelerator {
    device: Device,
    name: String,
    precision: Precision,
    pub(crate) parameters: Mirrored,
    pub(crate) gradients: Mirrored,
    pub(crate) optimizer_state: Mirrored,
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
        let samples = pass.features.samples;
        if samples == 0 {
            self.gradients.host_mut(during)?.fill(0.0);
            return Ok(Passed { output: StepOutput::default(), broken: None });
        }
        let parameters = self.parameters.on_device(during)?;
        let (device, name, products) = (&self.device, &self.name, Products::Device(self.precision));
        let (leaves, read) = guarded(name, during, || {
            let graph = pass.forward(&Parameters { tensors: parameters, products }, &(0..samples), device);
            let logits = graph.logits.clone().inner();
            let labels = matrix(pass.labels.to_vec(), [samples, 1], device);
            let derivative = (sigmoid(logits.clone()) - labels).mul_scalar(pass.scale);
            let mut gradients = graph.backward(derivative);
            let mut take = |leaf: &Tensor<2>| leaf.grad_remove(&mut gradients);
            let inputs = [&graph.embeddings, &graph.linear].map(|leaf| leaf.as_ref().and_then(&mut take));
            let leaves: Vec<Tensor<2>> = graph
                .parameters
                .iter()
                .map(|leaf| take(leaf).unwrap_or_else(|| Tensor::zeros(leaf.dims(), device)))
                .collect();
            let sizes = leaves.iter().map(|gradient| gradient.clone().abs().sum()).collect();
            let mut transaction = Transaction::default().register(logits).register(Tensor::cat(sizes, 0));
            for gradient in inputs.into_iter().flatten() {
                transaction = transaction.register(gradient);
            }
            Ok((leaves, transaction.try_execute().map_err(|error| error.to_string())?))
        })?;
        self.gradients.set(leaves);

        let mut read = read.into_iter().map(|data| self.floats(data, during));
        let mut next = || read.next().unwrap_or_else(|| Ok(Vec::new()));
        let (logits, sizes) = (next()?, next()?);
        let embedding_gradients = if pass.model.needs_embeddings() { next()? } else { Vec::new() };
        let linear_gradients = if pass.model.needs_linear() { next()? } else { Vec::new() };
        let loss = binary_cross_entropy(&logits, pass.labels, pass.scale);
        let output = StepOutput {
            loss_sum: loss.loss_sum,
            predictions: loss.predictions,
            embedding_gradients,
            linear_gradients,
        };
        Ok(Passed { output, broken: sizes.iter().position(|size| !size.is_finite()) })
    }

    /// The logits, one a sample, of a pass that drops nothing and remembers nothing.
    pub(crate) fn logits(
        &mut self,
        model: &Model,
        features: &Features<'_>,
        during: &str,
    ) -> Result<Vec<f32>, DenseError> {
        if features.samples == 0 {
            return Ok(Vec::new());
        }
        let parameters = self.parameters.on_device(during)?;
        let products = Products::Device(self.precision);
        let logits = guarded(&self.name, during, || {
            let inputs = inputs(model, features, &(0..features.samples), &self.device);
            let logits = model.forward(&Parameters { tensors: parameters, products }, inputs, Dropout::default());
            logits.try_into_data().map_err(|error| error.to_string())
        })?;
        self.floats(logits, during)
    }

    /// One update of all parameters. It is queued on the device, where nothing of it waits for the next step; a failure of it shows at what is read
    /// next.
    pub(crate) fn apply(&mut self, rule: Rule, during: &str) -> Result<(), DenseError> {
        self.gradients.on_device(during)?;
        self.optimizer_state.on_device(during)?;
        self.parameters.on_device(during)?;
        let (parameters, mut state) = (self.parameters.take(), self.optimizer_state.take());
        let entries = parameters.len();
        let gradients = &self.gradients.tensors;
        let (updated, state) = guarded(&self.name, during, || {
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
            Ok((updated, new_slots.concat()))
        })?;
        self.parameters.set(updated);
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

/// Which of the two copies of a buffer is the newer one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Newer {
    Neither,
    Device,
    Host,
    /// A failure of the device took both.
    Lost,
}

/// A flat buffer of a layout, or several one after another, that lives on a device and is copied to the host for who asks.
#[derive(Debug, Clone)]
pub(crate) struct Mirrored {
    device: Device,
    name: String,
    /// Shape of each tensor, in the buffer's order.
    shapes: Vec<[usize; 2]>,
    tensors: Vec<Tensor<2>>,
    host: Vec<f32>,
    newer: Newer,
}

impl Mirrored {
    fn new(layout: &ParameterLayout, device: &Device, name: &str, host: Vec<f32>) -> Self {
        let copies = host.len() / layout.total().max(1);
        let shapes = (0..copies).flat_map(|_| layout.entries().iter().map(|entry| entry.shape)).collect();
        Self { device: device.clone(), name: name.to_owned(), shapes, tensors: Vec::new(), host, newer: Newer::Host }
    }

    /// The buffer as it is now.
    pub(crate) fn host(&mut self, during: &str) -> Result<&[f32], DenseError> {
        self.check(during)?;
        if self.newer == Newer::Device && !self.tensors.is_empty() {
            let data = guarded(&self.name, during, || {
                let flat =
                    self.tensors.iter().map(|tensor| tensor.clone().reshape([tensor.dims().iter().product::<usize>()]));
                Tensor::<1>::cat(flat.collect(), 0).try_into_data().map_err(|error| error.to_string())
            })?;
            self.host = floats(data, &self.name, during)?;
            self.newer = Newer::Neither;
        }
        Ok(&self.host)
    }

    /// The buffer as it is now, to be changed in place.
    pub(crate) fn host_mut(&mut self, during: &str) -> Result<&mut [f32], DenseError> {
        self.host(during)?;
        self.newer = Newer::Host;
        Ok(&mut self.host)
    }

    /// The buffer as it is now, as tensors in the buffer's order.
    fn on_device(&mut self, during: &str) -> Result<&[Tensor<2>], DenseError> {
        self.check(during)?;
        if self.newer == Newer::Host && !self.shapes.is_empty() {
            self.tensors = guarded(&self.name, during, || {
                let values = TensorData::new(self.host.clone(), [self.host.len()]);
                let flat = Tensor::<1>::from_data(values, &self.device);
                let mut start = 0;
                let tensors = self.shapes.iter().map(|&shape| {
                    let end = start + shape[0] * shape[1];
                    let tensor = flat.clone().narrow(0, start, end - start).reshape(shape);
                    start = end;
                    tensor
                });
                Ok(tensors.collect())
            })?;
            self.newer = Newer::Neither;
        }
        Ok(&self.tensors)
    }

    /// Takes the tensors out, so that an operation on one may reuse its memory; [`Mirrored::set`] has to follow.
    fn take(&mut self) -> Vec<Tensor<2>> {
        self.newer = Newer::Lost;
        std::mem::take(&mut self.tensors)
    }

    #[cfg(test)]
    pub(crate) fn lose(&mut self) {
        drop(self.take());
    }

    fn set(&mut self, tensors: Vec<Tensor<2>>) {
        self.tensors = tensors;
        self.newer = Newer::Device;
    }

    fn check(&self, during: &str) -> Result<(), DenseError> {
        guarded(&self.name, during, || match self.newer {
            Newer::Lost => Err("its memory was lost in an earlier failure; start again from a checkpoint".to_owned()),
            Newer::Neither | Newer::Device | Newer::Host => Ok(()),
        })
    }
}

fn floats(data: TensorData, device: &str, during: &str) -> Result<Vec<f32>, DenseError> {
    guarded(device, during, || data.try_into_vec().map_err(|error| format!("it gave no 32-bit floats: {error:?}")))
}
