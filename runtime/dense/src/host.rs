//! A tower's state and computation on the CPU: flat buffers in memory, shards of the batch on
//! threads.

use std::ops::Range;

use burn::backend::Flex;
use burn::tensor::{Device, Gradients, Tensor, TensorData};

use crate::DenseError;
use crate::Precision;
use crate::batch::{Features, StepOutput};
use crate::finite::first_not_finite;
use crate::flex::{contiguous, floats, reclaim, reclaim_values};
use crate::layers::{Context, Products, matrix};
use crate::layout::{ParameterEntry, ParameterLayout};
use crate::linear::{Linears, Wave};
use crate::models::Model;
use crate::optimizer::Rule;
use crate::pass::{KnownFinite, Pass, Passed, Recorded, inputs, logits};
use crate::workers::{Workers, shards};

/// Values that one thread updates at a time.
const UPDATE_CHUNK: usize = 1 << 15;
/// Values that one thread checks for NaN and infinity at a time.
const FINITE_CHUNK: usize = 1 << 18;

/// A tower's buffers in memory, and the threads that compute with them.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    workers: Workers,
    parameters: Vec<f32>,
    pub(crate) gradients: Vec<f32>,
    pub(crate) optimizer_state: Vec<f32>,
    linears: Linears,
    /// Memory for the next gradient of the embeddings; its values have no meaning.
    spare: Vec<f32>,
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
        Ok(Self { workers: Workers::new(threads)?, parameters, gradients, optimizer_state, linears, spare: Vec::new() })
    }

    /// Keeps memory for the next gradient of the embeddings, unless there is more already.
    pub(crate) fn reuse(&mut self, memory: Vec<f32>) {
        if memory.capacity() > self.spare.capacity() {
            self.spare = memory;
        }
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
        let (features, layout) = (&pass.features, pass.model.layout());
        let mut output = StepOutput {
            loss_sums: vec![0.0; pass.tasks.columns()],
            predictions: vec![0.0; pass.labels.len()],
            embedding_gradients: std::mem::take(&mut self.spare),
            linear_gradients: vec![0.0; features.linear.len()],
        };
        // Shards overwrite all of it.
        output.embedding_gradients.resize(features.embeddings.len(), 0.0);
        if features.samples == 0 {
            self.gradients.fill(0.0);
        }
        let packed = self.linears.weights(layout, &self.parameters, &self.workers);
        let tensors = self.parameter_tensors(layout);
        let mut rest = Targets {
            predictions: &mut output.predictions,
            embeddings: &mut output.embedding_gradients,
            linear: &mut output.linear_gradients,
        };
        let mut finite = KnownFinite { inputs: true, gradients: true };
        for wave in shards(features.samples).chunks(Linears::wave_shards(self.workers.threads())) {
            let records = self.linears.records(wave.len());
            let shards = wave.iter().zip(records);
            let work =
                shards.map(|(shard, record)| (shard.clone(), record, rest.split_off(shard.len(), pass))).collect();
            let results = self.workers.map(work, |(shard, record, targets)| {
                let packed = packed.recording(record);
                differentiate(pass, &tensors, Products::Packed(&packed), shard, targets)
            });
            self.accumulate(layout, &results, wave[0].start == 0);
            for result in &results {
                output.loss_sums.iter_mut().zip(&result.loss_sums).for_each(|(sum, part)| *sum += part);
                finite = finite.and(result.finite);
            }
        }
        Passed { output, broken: self.broken(layout), finite }
    }

    /// Position of the first value that is infinite or not a number.
    pub(crate) fn first_not_finite(&self, values: &[f32]) -> Option<usize> {
        let chunks: Vec<_> = values.chunks(FINITE_CHUNK).enumerate().collect();
        let found = self
            .workers
            .map(chunks, |(index, chunk)| first_not_finite(chunk).map(|position| index * FINITE_CHUNK + position));
        found.into_iter().flatten().next()
    }

    /// The first parameter with a gradient that is not finite.
    fn broken(&self, layout: &ParameterLayout) -> Option<usize> {
        let position = self.first_not_finite(&self.gradients)?;
        layout.entries().iter().position(|entry| entry.range().contains(&position))
    }

    /// The logits of a pass without dropout and autodiff graph.
    pub(crate) fn logits(&mut self, model: &dyn Model, features: &Features<'_>) -> Vec<f32> {
        let packed = self.linears.weights(model.layout(), &self.parameters, &self.workers);
        let parameters = self.parameter_tensors(model.layout());
        let results = self.workers.map(shards(features.samples), |shard| {
            let inputs = inputs(model, features, &shard, &Device::flex());
            let context = Context::new(&parameters, Products::Packed(&packed));
            as_slice(&logits(model, &context, inputs, shard.len()).into_data()).to_vec()
        });
        results.concat()
    }

    /// Updates the parameters and the optimizer state from the gradients.
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

    /// The parameters as Burn tensors outside any graph: the one copy of a step. `linears` has the
    /// parameters of linear layers. Here, a placeholder of one value stands for each.
    fn parameter_tensors(&self, layout: &ParameterLayout) -> Vec<Tensor<2>> {
        let copy =
            |entry: &ParameterEntry| matrix(self.parameters[entry.range()].to_vec(), entry.shape, &Device::flex());
        let placeholder = || matrix(vec![0.0], [1, 1], &Device::flex());
        let entries = layout.entries().iter().zip(in_linears(layout));
        entries.map(|(entry, in_linears)| if in_linears { placeholder() } else { copy(entry) }).collect()
    }

    /// Adds the shards' gradients to the flat buffer, in the order of the shards. The first wave of
    /// a step starts from 0.
    fn accumulate(&mut self, layout: &ParameterLayout, results: &[ShardGradients], is_first: bool) {
        let mut rest = self.gradients.as_mut_slice();
        let mut targets = Vec::new();
        for ((index, entry), in_linears) in layout.entries().iter().enumerate().zip(in_linears(layout)) {
            let (values, tail) = rest.split_at_mut(entry.values());
            // The parameters of linear layers are no leaves of the shards' graphs.
            if !in_linears {
                targets.push((index, values));
            }
            rest = tail;
        }
        self.workers.map(targets, |(index, target)| {
            if is_first {
                target.fill(0.0);
            }
            for result in results {
                for (sum, value) in target.iter_mut().zip(values(&result.parameters[index])) {
                    *sum += value;
                }
            }
        });
        let wave = Wave { shards: results.len(), is_first };
        self.linears.accumulate(layout, wave, &mut self.gradients, &self.workers);
    }
}

/// For each parameter, in layout order, whether it belongs to a linear layer.
fn in_linears(layout: &ParameterLayout) -> Vec<bool> {
    let mut belongs = vec![false; layout.entries().len()];
    for linear in layout.linears() {
        belongs[linear.weight.0] = true;
        belongs[linear.bias.0] = true;
    }
    belongs
}

/// The part of a step's output that a shard fills.
struct Targets<'a> {
    predictions: &'a mut [f32],
    embeddings: &'a mut [f32],
    linear: &'a mut [f32],
}

impl<'a> Targets<'a> {
    /// Takes the part of the next `samples` off the front.
    fn split_off(&mut self, samples: usize, pass: &Pass<'_>) -> Targets<'a> {
        let part = |rest: &mut &'a mut [f32], columns: usize| {
            rest.split_off_mut(..samples * columns).expect("the shards of a batch have as many samples as the batch")
        };
        let widths = pass.model.input_widths();
        Targets {
            predictions: part(&mut self.predictions, pass.tasks.columns()),
            embeddings: part(&mut self.embeddings, widths.embeddings),
            linear: part(&mut self.linear, widths.linear),
        }
    }
}

/// The gradients of one shard, as Burn's buffers.
struct ShardGradients {
    loss_sums: Vec<f64>,
    finite: KnownFinite,
    /// In layout order; none for a parameter that the loss does not depend on, and for the
    /// parameters of linear layers.
    parameters: Vec<Option<TensorData>>,
}

/// Forward and backward pass of one shard, in a graph of its own.
fn differentiate(
    pass: &Pass<'_>,
    parameters: &[Tensor<2>],
    products: Products<'_>,
    shard: Range<usize>,
    targets: Targets<'_>,
) -> ShardGradients {
    let mut finite = KnownFinite { inputs: inputs_are_finite(pass, &shard), gradients: true };
    let recorded = pass.forward(parameters, products, &shard, &Device::flex());
    let data = recorded.logits.clone().inner().into_data();
    let columns = pass.tasks.columns();
    let labels = &pass.labels[shard.start * columns..shard.end * columns];
    let loss = pass.tasks.evaluate(as_slice(&data), labels, pass.scale);
    let derivative = matrix(loss.logit_gradients, [shard.len(), columns], &Device::flex());
    let mut gradients = recorded.backward(derivative);
    targets.predictions.copy_from_slice(&loss.predictions);
    let Recorded { parameters, embeddings, linear, .. } = recorded;
    for (leaf, target) in [(embeddings, targets.embeddings), (linear, targets.linear)] {
        let Some(leaf) = leaf else { continue };
        match leaf.grad_remove(&mut gradients) {
            Some(gradient) => copy(gradient, target),
            None => target.fill(0.0),
        }
        // The values are still in the core's cache.
        finite.gradients &= first_not_finite(target).is_none();
        reclaim_values(leaf);
    }
    ShardGradients {
        loss_sums: loss.loss_sums,
        finite,
        parameters: parameters.iter().map(|leaf| take(leaf, &mut gradients)).collect(),
    }
}

/// Whether all inputs of a shard are finite. The pass copies them next, from the core's cache.
fn inputs_are_finite(pass: &Pass<'_>, shard: &Range<usize>) -> bool {
    let (features, widths) = (&pass.features, pass.model.input_widths());
    let inputs =
        [(features.dense, widths.dense), (features.embeddings, widths.embeddings), (features.linear, widths.linear)];
    let rows = |(values, columns): (&[f32], usize)| {
        first_not_finite(&values[shard.start * columns..shard.end * columns]).is_none()
    };
    inputs.into_iter().all(rows)
}

/// Copies a gradient out of the graph. The gradient of an input that was concatenated is a part of
/// each row of a wider matrix.
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
        _ => target.copy_from_slice(floats(&contiguous(gradient.clone()))),
    }
    reclaim(gradient);
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
