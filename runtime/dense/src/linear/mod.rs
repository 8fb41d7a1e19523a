//! Linear layers on the CPU, and the state that a tower keeps for them from step to step.
//! Parameters and gradients are 32-bit floats. In bf16 only the operands of the products are
//! rounded (see `rectrain_gemm`). A hidden layer's output exists only as these operands.
//!
//! Burn's graph has these layers as operations of this crate:
//!
//! - Layers one after another, with ReLU between them, are one operation. Between them no matrix of
//!   32-bit floats is written. Each product leaves its result as operands of the next ones.
//! - Once a step, the weights are packed for the products of all shards, straight from the flat
//!   buffer. They are no leaves of the graph: a placeholder stands there instead.
//! - The pass of a shard leaves the operands of the weights' gradients in a [`Record`]: the layer's
//!   inputs and the derivatives of its outputs, packed for that product. One product for each layer
//!   then sums the gradients over the shards of a wave, straight into the flat buffer, on all
//!   threads.
//!
//! Sums over samples go through the shards in order, so results have the same bits for any number
//! of threads.

mod operation;
mod record;

use std::sync::Arc;

use rectrain_gemm::{Kernel, Matrix, Right, Start};

pub(crate) use self::record::Record;
use self::record::{add_bias, add_weight};
use crate::Precision;
use crate::layout::{LinearParameters, ParameterLayout};
use crate::workers::Workers;

/// Columns of a weight that one thread lays out at a time.
const PACKED_COLUMNS: usize = 512;
/// Fewest shards of a wave, which is the set of shards computed at the same time. Each shard holds
/// 4 bytes for each activation. More shards let the gradients of the weights be summed in fewer
/// passes.
const WAVE_SHARDS: usize = 8;
/// Rows of a weight whose gradient one thread computes at a time, for small and for large layers.
/// Data that the products of a block read again then fits into a core's own cache. Small layers use
/// fewer rows, to keep all threads busy.
const GRADIENT_ROWS: [usize; 2] = [rectrain_gemm::ROW_GRANULE, 2 * rectrain_gemm::ROW_GRANULE];
/// Fewest parts in which the gradient of a large layer's weight is computed.
const GRADIENT_PARTS: usize = 16;

/// The linear layers of a model: packed weights, and records for the shards of a wave.
#[derive(Debug)]
pub(crate) struct Linears {
    kernel: Kernel,
    weights: Arc<Weights>,
    /// Whether `weights` match the present parameters.
    fresh: bool,
    /// The layers that `weights` were packed for. A substitute packs fewer rows than its model.
    packed: Vec<LinearParameters>,
    /// One for each shard of a wave.
    records: Vec<Arc<Record>>,
}

/// The weights of all linear layers, in layout order; none for other parameters.
#[derive(Debug, Default)]
struct Weights(Vec<Option<Layer>>);

/// A linear layer's parameters as the products take them.
#[derive(Debug, Default)]
struct Layer {
    /// `W`, for `X·W`.
    forward: Right,
    /// `Wᵀ`, for `dY·Wᵀ`.
    backward: Right,
    bias: Vec<f32>,
    /// Rows of W, from the first one, that other processes multiply. They are not packed.
    summed: usize,
}

/// The weights for a forward pass and, in training, the record for its backward pass.
#[derive(Debug, Clone)]
pub(crate) struct Packed {
    kernel: Kernel,
    weights: Arc<Weights>,
    record: Option<Arc<Record>>,
}

/// A number of shards. The first wave of a step overwrites the gradients; later waves add to them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wave {
    pub(crate) shards: usize,
    pub(crate) is_first: bool,
}

impl Linears {
    pub(crate) fn new(precision: Precision) -> Self {
        let kernel = match precision {
            Precision::Fp32 => Kernel::fp32(),
            Precision::Bf16 => Kernel::bf16(),
        };
        Self { kernel, weights: Arc::default(), fresh: false, packed: Vec::new(), records: Vec::new() }
    }

    /// Shards of a wave on this many threads.
    pub(crate) fn wave_shards(threads: usize) -> usize {
        WAVE_SHARDS.max(2 * threads)
    }

    /// Marks the packed weights as out of date, because the parameters have changed.
    pub(crate) fn forget(&mut self) {
        self.fresh = false;
    }

    /// The weights of a pass, packed again if the parameters or the layers have changed.
    pub(crate) fn weights(&mut self, layout: &ParameterLayout, parameters: &[f32], workers: &Workers) -> Packed {
        if !self.fresh || self.packed != layout.linears() {
            if Arc::get_mut(&mut self.weights).is_none() {
                self.weights = Arc::default();
            }
            if let Some(weights) = Arc::get_mut(&mut self.weights) {
                weights.pack(self.kernel, layout, parameters, workers);
            }
            self.fresh = true;
            self.packed = layout.linears().to_vec();
        }
        Packed { kernel: self.kernel, weights: Arc::clone(&self.weights), record: None }
    }

    /// Records for the shards of a wave. They overwrite the records of the wave before.
    pub(crate) fn records(&mut self, shards: usize) -> &[Arc<Record>] {
        let layers = self.weights.0.len();
        for record in &mut self.records {
            if Arc::get_mut(record).is_none_or(|record| record.layers() != layers) {
                *record = Arc::default();
            }
        }
        self.records.resize_with(self.records.len().max(shards), Arc::default);
        for record in &mut self.records {
            if let Some(record) = Arc::get_mut(record) {
                record.clear(layers);
            }
        }
        &self.records[..shards]
    }

    /// Adds the gradients of a wave's shards to the flat buffer, in the order of the shards. The
    /// first wave of a step starts from 0.
    pub(crate) fn accumulate(&self, layout: &ParameterLayout, wave: Wave, gradients: &mut [f32], workers: &Workers) {
        let mut targets = split(layout, gradients);
        let mut work = Vec::new();
        for linear in layout.linears() {
            let recorded: Vec<_> =
                self.records[..wave.shards].iter().map(|record| record.layer(linear.weight)).collect();
            if let Some(bias) = targets[linear.bias.0].take() {
                if wave.is_first {
                    bias.fill(0.0);
                }
                add_bias(bias, &recorded);
            }
            if let Some(weight) = targets[linear.weight.0].take() {
                let columns = layout.entry(linear.weight).shape[1];
                let (summed, weight) = weight.split_at_mut(linear.summed * columns);
                if wave.is_first {
                    summed.fill(0.0);
                }
                let rows = gradient_rows(weight.len(), columns);
                let blocks = weight.chunks_mut(rows * columns).enumerate();
                work.extend(blocks.map(|(block, target)| (recorded.clone(), columns, block * rows, target)));
            }
        }
        workers.map(work, |(recorded, columns, first, target)| {
            let rows = first..first + target.len() / columns;
            add_weight(target, rows, &recorded, if wave.is_first { Start::Zero } else { Start::Sum });
        });
    }
}

/// Rows of a weight whose gradient one thread computes at a time.
fn gradient_rows(values: usize, columns: usize) -> usize {
    let large = values >= GRADIENT_PARTS * GRADIENT_ROWS[1] * columns;
    GRADIENT_ROWS[usize::from(large)]
}

/// The part of each parameter in a flat buffer, in layout order.
fn split<'a>(layout: &ParameterLayout, buffer: &'a mut [f32]) -> Vec<Option<&'a mut [f32]>> {
    let mut rest = buffer;
    let mut parts = Vec::new();
    for entry in layout.entries() {
        let (values, tail) = rest.split_at_mut(entry.values());
        parts.push(Some(values));
        rest = tail;
    }
    parts
}

/// A clone computes at the same time as the original: it has buffers of its own.
impl Clone for Linears {
    fn clone(&self) -> Self {
        let (weights, packed, records) = (Arc::default(), Vec::new(), Vec::new());
        Self { kernel: self.kernel, weights, fresh: false, packed, records }
    }
}

impl Weights {
    fn pack(&mut self, kernel: Kernel, layout: &ParameterLayout, parameters: &[f32], workers: &Workers) {
        let entries = layout.entries();
        self.0.resize_with(entries.len(), || None);
        for linear in layout.linears() {
            let layer = self.0[linear.weight.0].get_or_insert_default();
            layer.summed = linear.summed;
            layer.bias.clear();
            layer.bias.extend_from_slice(&parameters[layout.entry(linear.bias).range()]);
        }
        let mut parts = Vec::new();
        for (entry, layer) in entries.iter().zip(&mut self.0) {
            let Some(layer) = layer else { continue };
            let [rows, columns] = entry.shape;
            let values = &parameters[entry.range()][layer.summed * columns..];
            let weight = Matrix::new(values, rows - layer.summed, columns);
            parts.extend(layer.forward.parts(kernel, weight, PACKED_COLUMNS));
            parts.extend(layer.backward.parts(kernel, weight.transpose(), PACKED_COLUMNS));
        }
        workers.map(parts, rectrain_gemm::RightPart::pack);
    }
}

impl Packed {
    /// The same weights for a pass that leaves the operands of its gradients in `record`.
    pub(crate) fn recording(&self, record: &Arc<Record>) -> Self {
        Self { record: Some(Arc::clone(record)), ..self.clone() }
    }

    /// Whether the pass records the operands of its gradients.
    pub(crate) fn is_recording(&self) -> bool {
        self.record.is_some()
    }

    fn layer(&self, linear: LinearParameters) -> &Layer {
        self.weights.0[linear.weight.0].as_ref().expect("the weights of every linear layer are packed")
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Tensor};

    use super::*;
    use crate::layers::matrix;
    use crate::random::Stream;

    /// The widths of an input and of layers, and the samples.
    const SHAPES: [(&[usize], usize); 5] =
        [(&[20, 40, 16], 50), (&[300, 270, 70, 33, 1], 130), (&[13, 1, 2], 1), (&[5, 7], 40), (&[64, 96, 64], 256)];

    fn values(key: u64, shape: [usize; 2]) -> Tensor<2> {
        let stream = Stream::new(&[5, key]);
        let values = (0..(shape[0] * shape[1]) as u64).map(|index| (2.0 * stream.unit(index) - 1.0) as f32).collect();
        matrix(values, shape, &Device::flex())
    }

    fn bits(tensor: Tensor<2>) -> Vec<u32> {
        let values: Vec<f32> = tensor.into_data().try_into_vec().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    }

    /// The output, the gradient of the input, if it has one, and the gradients of the parameters.
    fn pass(precision: Precision, (widths, samples): (&[usize], usize), chained: bool, tracked: bool) -> [Vec<u32>; 3] {
        let mut layout = ParameterLayout::default();
        for (layer, widths) in widths.windows(2).enumerate() {
            layout.push_linear(&layer.to_string(), 0, widths[0], widths[1]);
        }
        let (parameters, workers) = (layout.initialize(3), Workers::new(1).unwrap());
        let mut linears = Linears::new(precision);
        let packed = linears.weights(&layout, &parameters, &workers);
        let packed = packed.recording(&linears.records(1)[0]);
        let leaf = |tensor: Tensor<2>| tensor.autodiff().require_grad();
        let anchor = || leaf(matrix(vec![0.0], [1, 1], &Device::flex()));
        let input = values(1, [samples, widths[0]]);
        let input = if tracked { leaf(input) } else { input };
        let layers = layout.linears();
        let output = if chained {
            packed.chain(layers, anchor(), input.clone(), true)
        } else {
            layers.iter().fold(input.clone(), |input, &layer| packed.chain(&[layer], anchor(), input, true))
        };
        let mut gradients = (output.clone() * values(2, output.dims())).sum().backward();
        let of_input = if tracked { bits(input.grad_remove(&mut gradients).unwrap()) } else { Vec::new() };
        let mut of_parameters = vec![f32::NAN; parameters.len()];
        linears.accumulate(&layout, Wave { shards: 1, is_first: true }, &mut of_parameters, &workers);
        [bits(output.inner()), of_input, of_parameters.into_iter().map(f32::to_bits).collect()]
    }

    #[test]
    fn a_chain_of_layers_has_the_bits_of_its_layers_one_by_one() {
        for precision in [Precision::Fp32, Precision::Bf16] {
            for shape in SHAPES {
                for tracked in [true, false] {
                    let [chained, single] = [true, false].map(|chained| pass(precision, shape, chained, tracked));
                    assert_eq!(chained, single, "{shape:?}, {precision:?}, {tracked}");
                }
            }
        }
    }
}
