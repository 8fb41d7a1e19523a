//! A tower's state and computation on the CPU: flat buffers in memory, shards of the batch on threads.

use std::ops::Range;

use burn::tensor::{Device, Gradients, Tensor, TensorData};

use crate::DenseError;
use crate::layers::{Dropout, Parameters, matrix};
use crate::loss::binary_cross_entropy;
use crate::model::Model;
use crate::optimizer::Rule;
use crate::pass::{Pass, Passed, inputs};
use crate::tower::{Features, StepOutput};
use crate::workers::{Workers, shards};

/// Values that one thread updates at a time.
const UPDATE_CHUNK: usize = 1 << 15;

/// See the module's text.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    workers: Workers,
    pub(crate) parameters: Vec<f32>,
    pub(crate) gradients: Vec<f32>,
    pub(crate) optimizer_state: Vec<f32>,
}

impl Host {
    pub(crate) fn new(threads: usize, parameters: Vec<f32>, optimizer_state: Vec<f32>) -> Result<Self, DenseError> {
        let gradients = vec![0.0; parameters.len()];
        Ok(Self { workers: Workers::new(threads)?, parameters, gradients, optimizer_state })
    }

    pub(crate) fn forward_backward(&mut self, pass: &Pass<'_>) -> Passed {
        let features = &pass.features;
        let mut output = StepOutput {
            loss_sum: 0.0,
            predictions: Vec::with_capacity(features.samples),
            embedding_gradients: Vec::with_capacity(features.embeddings.len()),
            linear_gradients: Vec::with_capacity(features.linear.len()),
        };
        self.gradients.fill(0.0);
        let parameters = self.parameter_tensors(pass.model);
        for wave in shards(features.samples).chunks(2 * self.workers.threads()) {
            let results = self.workers.map(wave.to_vec(), |shard| differentiate(pass, &parameters, shard));
            self.accumulate(pass.model, &results);
            for result in &results {
                output.loss_sum += result.loss_sum;
                output.predictions.extend_from_slice(&result.predictions);
                output.embedding_gradients.extend_from_slice(values(&result.embeddings));
                output.linear_gradients.extend_from_slice(values(&result.linear));
            }
        }
        let broken = self.gradients.iter().position(|value| !value.is_finite());
        let entries = pass.model.layout().entries();
        let broken = broken.and_then(|position| entries.iter().position(|entry| entry.range().contains(&position)));
        Passed { output, broken }
    }

    /// The logits, one a sample, of a pass that drops nothing and remembers nothing.
    pub(crate) fn logits(&self, model: &Model, features: &Features<'_>) -> Vec<f32> {
        let parameters = self.parameter_tensors(model);
        let results = self.workers.map(shards(features.samples), |shard| {
            let inputs = inputs(model, features, &shard, &Device::flex());
            let logits = model.forward(&Parameters(&parameters), inputs, Dropout::default());
            as_slice(&logits.into_data()).to_vec()
        });
        results.concat()
    }

    pub(crate) fn apply(&mut self, rule: Rule) {
        let total = self.parameters.len();
        let mut slots: Vec<_> =
            self.optimizer_state.chunks_exact_mut(total.max(1)).map(|slot| slot.chunks_mut(UPDATE_CHUNK)).collect();
        let work: Vec<_> = self
            .parameters
            .chunks_mut(UPDATE_CHUNK)
            .zip(self.gradients.chunks(UPDATE_CHUNK))
            .map(|(parameters, gradients)| {
                let slots: Vec<_> = slots.iter_mut().filter_map(Iterator::next).collect();
                (parameters, slots, gradients)
            })
            .collect();
        self.workers.map(work, |(parameters, slots, gradients)| {
            rule.apply(parameters, slots, gradients);
        });
    }

    /// The parameters as Burn tensors outside any graph: the one copy of a step.
    fn parameter_tensors(&self, model: &Model) -> Vec<Tensor<2>> {
        let entries = model.layout().entries().iter();
        entries.map(|entry| matrix(self.parameters[entry.range()].to_vec(), entry.shape, &Device::flex())).collect()
    }

    /// Adds the shards' gradients to the flat buffer, in the order of the shards.
    fn accumulate(&mut self, model: &Model, results: &[ShardGradients]) {
        let mut rest = self.gradients.as_mut_slice();
        let mut targets = Vec::new();
        for (index, entry) in model.layout().entries().iter().enumerate() {
            let (values, tail) = rest.split_at_mut(entry.values());
            targets.push((index, values));
            rest = tail;
        }
        self.workers.map(targets, |(index, target)| {
            for result in results {
                for (sum, value) in target.iter_mut().zip(values(&result.parameters[index])) {
                    *sum += value;
                }
            }
        });
    }
}

/// The gradients of one shard, as Burn's buffers.
struct ShardGradients {
    loss_sum: f64,
    predictions: Vec<f32>,
    /// In layout order; none for a parameter that the loss does not depend on.
    parameters: Vec<Option<TensorData>>,
    embeddings: Option<TensorData>,
    linear: Option<TensorData>,
}

/// Forward and backward pass of one shard, in a graph of its own.
fn differentiate(pass: &Pass<'_>, parameters: &[Tensor<2>], shard: Range<usize>) -> ShardGradients {
    let graph = pass.forward(parameters, &shard, &Device::flex());
    let data = graph.logits.clone().inner().into_data();
    let loss = binary_cross_entropy(as_slice(&data), &pass.labels[shard.clone()], pass.scale);
    let derivative = matrix(loss.logit_gradients, [shard.len(), 1], &Device::flex());
    let mut gradients = graph.backward(derivative);
    ShardGradients {
        loss_sum: loss.loss_sum,
        predictions: loss.predictions,
        parameters: graph.parameters.iter().map(|leaf| take(leaf, &mut gradients)).collect(),
        embeddings: graph.embeddings.and_then(|leaf| take(&leaf, &mut gradients)),
        linear: graph.linear.and_then(|leaf| take(&leaf, &mut gradients)),
    }
}

/// Moves a leaf's gradient out of the graph.
fn take(leaf: &Tensor<2>, gradients: &mut Gradients) -> Option<TensorData> {
    leaf.grad_remove(gradients).map(Tensor::into_data)
}

/// The values of a gradient; empty for none.
fn values(gradient: &Option<TensorData>) -> &[f32] {
    gradient.as_ref().map_or(&[], as_slice)
}

fn as_slice(data: &TensorData) -> &[f32] {
    data.as_slice().expect("this crate makes f32 tensors only")
}
