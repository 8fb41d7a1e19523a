//! Linear layers on the CPU: what a tower keeps for them from step to step. Parameters, gradients and everything between layers are
//! 32-bit floats; in bf16, only what the products of linear layers read is rounded (`rectrain_gemm` says how).
//!
//! Burn's graph has them as operations of this crate's:
//!
//! - Weights are laid out for the products once a step for all shards of the batch, straight from the flat buffer, and are no leaves of
//!   the graph: in their place stands a value without meaning.
//! - A shard's pass leaves what the gradients of the weights are made of, its inputs and the derivatives of its outputs, laid out for
//!   that product, in a [`Record`]. The gradients are then summed over the shards of a wave within one product a layer, straight into
//!   the flat buffer, on all threads.
//!
//! Sums over samples go through the shards in order, so results have the same bits for any number of threads.

mod operation;

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rectrain_gemm::{Finish, Kernel, Left, Matrix, ROW_GRANULE, Right, Start, sum_products};

use crate::Precision;
use crate::layers::Linear;
use crate::model::Model;
use crate::workers::Workers;

/// Columns of a weight that one thread lays out at a time.
const PACKED_COLUMNS: usize = 512;
/// Shards in work at a time, at least: each leaves 4 bytes an activation, and with more of them the gradients of the weights are
/// summed in fewer passes.
const WAVE_SHARDS: usize = 8;
/// Rows of a weight whose gradient one thread computes at a time: all that the products of a block of it read again is in a core's own
/// cache, and where a layer has few rows they are few enough to keep all threads busy.
const GRADIENT_ROWS: [usize; 2] = [ROW_GRANULE, 2 * ROW_GRANULE];
/// Parts that the gradient of a large layer's weight is computed in, at least.
const GRADIENT_PARTS: usize = 16;

/// See the module's text.
#[derive(Debug)]
pub(crate) struct Linears {
    kernel: Kernel,
    weights: Arc<Weights>,
    /// Whether `weights` are those of the present parameters.
    fresh: bool,
    /// Of the shards that are in work at a time.
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
}

/// What the pass of one shard leaves for the gradients of the weights, by layer in layout order; empty for other parameters.
#[derive(Debug, Default)]
pub(crate) struct Record(Vec<RwLock<Recorded>>);

#[derive(Debug, Default)]
struct Recorded {
    /// `Xᵀ`.
    inputs: Left,
    /// `dY`.
    derivatives: Right,
    /// Σ over the samples of `dY`.
    bias: Vec<f32>,
    /// Whether the backward pass came to this layer.
    complete: bool,
}

/// What a forward pass needs: the weights, and where to leave what the backward pass finds; nowhere without one.
#[derive(Debug, Clone)]
pub(crate) struct Packed {
    kernel: Kernel,
    weights: Arc<Weights>,
    record: Option<Arc<Record>>,
}

impl Linears {
    pub(crate) fn new(precision: Precision) -> Self {
        let kernel = match precision {
            Precision::Fp32 => Kernel::fp32(),
            Precision::Bf16 => Kernel::bf16(),
        };
        Self { kernel, weights: Arc::default(), fresh: false, records: Vec::new() }
    }

    /// Shards in work at a time with so many threads.
    pub(crate) fn wave(threads: usize) -> usize {
        WAVE_SHARDS.max(2 * threads)
    }

    /// The parameters have changed.
    pub(crate) fn forget(&mut self) {
        self.fresh = false;
    }

    /// The weights of a pass, laid out anew if the parameters have changed.
    pub(crate) fn weights(&mut self, model: &Model, parameters: &[f32], workers: &Workers) -> Packed {
        if !self.fresh {
            if Arc::get_mut(&mut self.weights).is_none() {
                self.weights = Arc::default();
            }
            if let Some(weights) = Arc::get_mut(&mut self.weights) {
                weights.pack(self.kernel, model, parameters, workers);
            }
            self.fresh = true;
        }
        Packed { kernel: self.kernel, weights: Arc::clone(&self.weights), record: None }
    }

    /// Records for the shards of a wave, which overwrite those of the wave before.
    pub(crate) fn records(&mut self, shards: usize) -> &[Arc<Record>] {
        let layers = self.weights.0.len();
        for record in &mut self.records {
            if Arc::get_mut(record).is_none_or(|record| record.0.len() != layers) {
                *record = Arc::default();
            }
        }
        self.records.resize_with(self.records.len().max(shards), Arc::default);
        for record in &mut self.records {
            if let Some(record) = Arc::get_mut(record) {
                record.0.resize_with(layers, RwLock::default);
                record.0.iter_mut().for_each(|layer| write(layer).complete = false);
            }
        }
        &self.records[..shards]
    }

    /// Adds the gradients that the shards of a wave have left to the flat buffer, in the order of the shards; to 0 with the first wave.
    pub(crate) fn accumulate(
        &self,
        model: &Model,
        shards: usize,
        first_wave: bool,
        gradients: &mut [f32],
        workers: &Workers,
    ) {
        let mut rest = gradients;
        let mut targets: Vec<Option<&mut [f32]>> = Vec::new();
        for entry in model.layout().entries() {
            let (values, tail) = rest.split_at_mut(entry.values());
            targets.push(Some(values));
            rest = tail;
        }
        let mut work = Vec::new();
        for linear in model.linears() {
            let columns = self.weights.0[linear.weight.0].as_ref().map_or(0, |layer| layer.bias.len());
            let (weight, bias) = (targets[linear.weight.0].take(), targets[linear.bias.0].take());
            let recorded: Vec<_> = self.records[..shards].iter().map(|record| &record.0[linear.weight.0]).collect();
            if let Some(bias) = bias {
                if first_wave {
                    bias.fill(0.0);
                }
                add_bias(bias, &recorded);
            }
            let Some(weight) = weight else { continue };
            let large = weight.len() >= GRADIENT_PARTS * GRADIENT_ROWS[1] * columns;
            let rows = GRADIENT_ROWS[usize::from(large)];
            let blocks = weight.chunks_mut(rows * columns).enumerate();
            work.extend(blocks.map(|(block, target)| (recorded.clone(), columns, block * rows, target)));
        }
        workers.map(work, |(recorded, columns, first, target)| {
            let rows = first..first + target.len() / columns;
            add_weight(target, rows, &recorded, if first_wave { Start::Zero } else { Start::Sum });
        });
    }
}

/// A copy computes at the same time as the original: it has buffers of its own.
impl Clone for Linears {
    fn clone(&self) -> Self {
        Self { kernel: self.kernel, weights: Arc::default(), fresh: false, records: Vec::new() }
    }
}

impl Weights {
    fn pack(&mut self, kernel: Kernel, model: &Model, parameters: &[f32], workers: &Workers) {
        let entries = model.layout().entries();
        self.0.resize_with(entries.len(), || None);
        for linear in model.linears() {
            let layer = self.0[linear.weight.0].get_or_insert_default();
            layer.bias.clear();
            layer.bias.extend_from_slice(&parameters[entries[linear.bias.0].range()]);
        }
        let mut parts = Vec::new();
        for (entry, layer) in entries.iter().zip(&mut self.0) {
            let Some(layer) = layer else { continue };
            let weight = Matrix::new(&parameters[entry.range()], entry.shape[0], entry.shape[1]);
            parts.extend(layer.forward.parts(kernel, weight, PACKED_COLUMNS));
            parts.extend(layer.backward.parts(kernel, weight.transpose(), PACKED_COLUMNS));
        }
        workers.map(parts, rectrain_gemm::RightPart::pack);
    }
}

impl Packed {
    /// The same weights for a pass that leaves what gradients are made of.
    pub(crate) fn recording(&self, record: &Arc<Record>) -> Self {
        Self { record: Some(Arc::clone(record)), ..self.clone() }
    }

    fn layer(&self, linear: &Linear) -> &Layer {
        self.weights.0[linear.weight.0].as_ref().expect("the weights of every linear layer are packed")
    }
}

/// Nothing that panics holds it for longer than a copy takes.
fn write(recorded: &RwLock<Recorded>) -> RwLockWriteGuard<'_, Recorded> {
    recorded.write().unwrap_or_else(PoisonError::into_inner)
}

/// What the backward passes of these shards have left.
fn complete<'a>(shards: &[&'a RwLock<Recorded>]) -> Vec<RwLockReadGuard<'a, Recorded>> {
    let read = shards.iter().map(|shard| shard.read().unwrap_or_else(PoisonError::into_inner));
    read.filter(|shard| shard.complete).collect()
}

fn add_bias(target: &mut [f32], shards: &[&RwLock<Recorded>]) {
    for shard in complete(shards) {
        target.iter_mut().zip(&shard.bias).for_each(|(sum, value)| *sum += value);
    }
}

/// `target = start + Σ over shards of Xᵀ·dY`, for some rows.
fn add_weight(target: &mut [f32], rows: Range<usize>, shards: &[&RwLock<Recorded>], start: Start<'_>) {
    let shards = complete(shards);
    let operands: Vec<_> = shards.iter().map(|shard| (&shard.inputs, &shard.derivatives)).collect();
    match (&operands[..], start) {
        ([], Start::Zero) => target.fill(0.0),
        ([], _) => {}
        (operands, start) => sum_products(operands, rows, target, start, Finish::Plain),
    }
}
