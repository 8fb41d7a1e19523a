//! A tower's state and computation on the CPU: flat buffers in memory, shards of the batch on threads.

use std::ops::Range;

use burn::backend::Flex;
use burn::tensor::{Device, Gradients, Tensor, TensorData};

use crate::DenseError;
use crate::Precision;
use crate::layers::{Dropout, Parameters, Products, matrix};
use crate::layout::ParameterEntry;
use crate::linear::Linears;
use crate::loss::binary_cross_entropy;
use crate::model::Model;
use crate::optimizer::Rule;
use crate::pass::{Pass, Passed, inputs};
use crate::tower::{Features, StepOutput, first_not_finite};
use crate::workers::{Workers, shards};

/// Values that one thread updates at a time.
const UPDATE_CHUNK: usize = 1 << 15;
/// Values that one thread looks for those that are not finite at a time.
const FINITE_CHUNK: usize = 1 << 18;

/// See the module's text.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    workers: Workers,
    parameters: Vec<f32>,
    pub(crate) gradients: Vec<f32>,
    pub(crate) optimizer_state: Vec<f32>,
    linears: Linears,
}

impl Host {
    pub(crate) fn new(
        threads: usize,
        precision: Precision,
        parameters: Vec<f32>,
        optimizer_state: Vec<f32>,
    ) -> Result<Self, DenseError> {
        let gradients = vec![0.0; parameters.len()];
        let linears = Linears::new(precision);
        Ok(Self { workers: Workers::new(threads)?, parameters, gradients, optimizer_state, linears })
    }

    pub(crate) fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// The parameters, to be changed.
    pub(crate) fn parameters_mut(&mut self) -> &mut [f32] {
        self.linears.forget();
        &mut self.parameters
    }

    pub(crate) fn forward_backward(&mut self, pass: &Pass<'_>) -> Passed {
        let (features, threads) = (&pass.features, self.workers.threads());
        let mut output = StepOutput {
            loss_sum: 0.0,
            predictions: vec![0.0; features.samples],
            embedding_gradients: vec![0.0; features.embeddings.len()],
            linear_gradients: vec![0.0; features.linear.len()],
        };
        if features.samples == 0 {
            self.gradients.fill(0.0);
        }
        let packed = self.linears.weights(pass.model, &self.parameters, &self.workers);
        let tensors = self.parameter_tensors(pass.model);
        let mut rest = Targets {
            predictions: &mut output.predictions,
            embeddings: &mut output.embedding_gradients,
            linear: &mut output.linear_gradients,
        };
        for wave in shards(features.samples).chunks(Linears::wave(threads)) {
            let records = self.linears.records(wave.len());
            let shards = wave.iter().zip(records);
            let work = shards
                .map(|(shard, record)| (shard.clone(), record, rest.split_off(shard.len(), pass.model)))
                .collect();
            let results = self.workers.map(work, |(shard, record, targets)| {
                let packed = packed.recording(record);
                let products = Products::Packed(&packed);
                differentiate(pass, &Parameters { tensors: &tensors, products }, shard, targets)
            });
            self.accumulate(pass.model, &results, wave[0].start == 0);
            results.iter().for_each(|result| output.loss_sum += result.loss_sum);
        }
        Passed { output, broken: self.broken(pass.model) }
    }

    /// Position of the first value that is infinite or not a number.
    pub(crate) fn first_not_finite(&self, values: &[f32]) -> Option<usize> {
        let chunks: Vec<_> = values.chunks(FINITE_CHUNK).enumerate().collect();
        let found = self
            .workers
            .map(chunks, |(index, chunk)| first_not_finite(chunk).map(|position| index * FINITE_CHUNK + position));
        found.into_iter().flatten().next()
    }

    /// The first parameter whose gradient is not finite.
    fn broken(&self, model: &Model) -> Option<usize> {
        let position = self.first_not_finite(&self.gradients)?;
        model.layout().entries().iter().position(|entry| entry.range().contains(&position))
    }

    /// The logits, one a sample, of a pass that drops nothing and remembers nothing.
    pub(crate) fn logits(&mut self, model: &Model, features: &Features<'_>) -> Vec<f32> {
        let packed = self.linears.weights(model, &self.parameters, &self.workers);
        let (parameters, products) = (self.parameter_tensors(model), Products::Packed(&packed));
        let results = self.workers.map(shards(features.samples), |shard| {
            let inputs = inputs(model, features, &shard, &Device::flex());
            let logits = model.forward(&Parameters { tensors: &parameters, products }, inputs, Dropout::default());
            as_slice(&logits.into_data()).to_vec()
        });
        results.concat()
    }

    pub(crate) fn apply(&mut self, rule: Rule) {
        self.linears.forget();
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

    /// The parameters as Burn tensors outside any graph: the one copy of a step. Those of linear layers are elsewhere, and what stands
    /// for them is one value.
    fn parameter_tensors(&self, model: &Model) -> Vec<Tensor<2>> {
        let mut tensors: Vec<Option<Tensor<2>>> = vec![None; model.layout().entries().len()];
        for id in model.linears().into_iter().flat_map(|linear| [linear.weight, linear.bias]) {
            tensors[id.0] = Some(matrix(vec![0.0], [1, 1], &Device::flex()));
        }
        let copy =
            |entry: &ParameterEntry| matrix(self.parameters[entry.range()].to_vec(), entry.shape, &Device::flex());
        let entries = model.layout().entries().iter().zip(tensors);
        entries.map(|(entry, tensor)| tensor.unwrap_or_else(|| copy(entry))).collect()
    }

    /// Adds the shards' gradients to the flat buffer, in the order of the shards; to 0 with the first wave.
    fn accumulate(&mut self, model: &Model, results: &[ShardGradients], first_wave: bool) {
        // Those of linear layers are no leaves of the shards' graphs.
        let mut elsewhere = vec![false; model.layout().entries().len()];
        for id in model.linears().into_iter().flat_map(|linear| [linear.weight, linear.bias]) {
            elsewhere[id.0] = true;
        }
        let mut rest = self.gradients.as_mut_slice();
        let mut targets = Vec::new();
        for (index, entry) in model.layout().entries().iter().enumerate() {
            let (values, tail) = rest.split_at_mut(entry.values());
            if !elsewhere[index] {
                targets.push((index, values));
            }
            rest = tail;
        }
        self.workers.map(targets, |(index, target)| {
            if first_wave {
                target.fill(0.0);
            }
            for result in results {
                for (sum, value) in target.iter_mut().zip(values(&result.parameters[index])) {
                    *sum += value;
                }
            }
        });
        self.linears.accumulate(model, results.len(), first_wave, &mut self.gradients, &self.workers);
    }
}

/// Where a shard's part of a step's output goes.
struct Targets<'a> {
    predictions: &'a mut [f32],
    embeddings: &'a mut [f32],
    linear: &'a mut [f32],
}

impl<'a> Targets<'a> {
    /// Takes the part of the next `samples` off the front.
    fn split_off(&mut self, samples: usize, model: &Model) -> Targets<'a> {
        let part = |rest: &mut &'a mut [f32], columns: usize| {
            rest.split_off_mut(..samples * columns).expect("a batch's shards are as many samples as it has")
        };
        Targets {
            predictions: part(&mut self.predictions, 1),
            embeddings: part(&mut self.embeddings, model.embedding_width()),
            linear: part(&mut self.linear, model.linear_width()),
        }
    }
}

/// The gradients of one shard, as Burn's buffers.
struct ShardGradients {
    loss_sum: f64,
    /// In layout order; none for a parameter that the loss does not depend on, or whose gradient is computed elsewhere.
    parameters: Vec<Option<TensorData>>,
}

/// Forward and backward pass of one shard, in a graph of its own.
fn differentiate(
    pass: &Pass<'_>,
    parameters: &Parameters<'_>,
    shard: Range<usize>,
    targets: Targets<'_>,
) -> ShardGradients {
    let graph = pass.forward(parameters, &shard, &Device::flex());
    let data = graph.logits.clone().inner().into_data();
    let loss = binary_cross_entropy(as_slice(&data), &pass.labels[shard.clone()], pass.scale);
    let derivative = matrix(loss.logit_gradients, [shard.len(), 1], &Device::flex());
    let mut gradients = graph.backward(derivative);
    targets.predictions.copy_from_slice(&loss.predictions);
    for (leaf, target) in [(&graph.embeddings, targets.embeddings), (&graph.linear, targets.linear)] {
        if let Some(gradient) = leaf.as_ref().and_then(|leaf| leaf.grad_remove(&mut gradients)) {
            copy(gradient, target);
        }
    }
    ShardGradients {
        loss_sum: loss.loss_sum,
        parameters: graph.parameters.iter().map(|leaf| take(leaf, &mut gradients)).collect(),
    }
}

/// Copies a gradient out of the graph. That of an input which was put beside another is a part of each row of a wider matrix.
fn copy(gradient: Tensor<2>, target: &mut [f32]) {
    let [_, columns] = gradient.dims();
    let gradient = gradient.try_into_primitive::<Flex>().expect("computed on the CPU");
    match (gradient.layout().strides(), usize::try_from(gradient.layout().strides()[0])) {
        (&[_, 1], Ok(stride)) if columns > 0 && stride >= columns => {
            let values = &gradient.storage::<f32>()[gradient.layout().start_offset()..];
            for (target, row) in target.chunks_exact_mut(columns).zip(values.chunks(stride)) {
                target.copy_from_slice(&row[..columns]);
            }
        }
        _ => target.copy_from_slice(as_slice(&gradient.into_data())),
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
