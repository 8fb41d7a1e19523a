//! The operands of the weights' gradients, as the pass of a shard leaves them.

use std::ops::Range;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use rectrain_gemm::{Finish, HiddenDerivatives, Kernel, Left, Matrix, Passes, Right, Start, sum_products};

use crate::layout::ParameterId;

/// The operands that the pass of one shard leaves, by layer in layout order; empty for other
/// parameters.
#[derive(Debug, Default)]
pub(crate) struct Record(Vec<RwLock<Recorded>>);

/// The operands of one layer's gradients.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    /// `Xᵀ`.
    inputs: Left,
    /// Where the ReLU below let `X` through, if a hidden layer made it.
    pub(super) passes: Passes,
    /// `dY`.
    derivatives: Right,
    /// Σ over the samples of `dY`.
    pub(super) bias: Vec<f32>,
    /// Whether the forward pass reached this layer.
    begun: bool,
    /// Whether the backward pass reached this layer.
    complete: bool,
}

impl Recorded {
    /// Takes the layer's inputs, `X`.
    pub(super) fn begin(&mut self, kernel: Kernel, inputs: Matrix<'_>) {
        self.reach();
        self.inputs.pack(kernel, inputs.transpose());
    }

    /// The memory for the layer's inputs, which a hidden layer makes.
    pub(super) fn begin_hidden(&mut self) -> (&mut Left, &mut Passes) {
        self.reach();
        (&mut self.inputs, &mut self.passes)
    }

    fn reach(&mut self) {
        assert!(
            !self.begun,
            "a linear layer was applied twice in one pass: give each application a layer of its own, or multiply by a \
             parameter of `Context::parameter`"
        );
        self.begun = true;
    }

    /// Sets the sums of this many columns to 0.
    pub(super) fn clear_bias(&mut self, columns: usize) {
        self.bias.clear();
        self.bias.resize(columns, 0.0);
    }

    /// Takes the derivatives of the layer's outputs, `dY`. Their sum over the samples is in `bias`.
    pub(super) fn complete(&mut self, kernel: Kernel, derivatives: Matrix<'_>) {
        self.derivatives.pack(kernel, derivatives);
        self.complete = true;
    }

    /// The memory for a hidden layer's derivatives and their sums, of this many columns. The caller
    /// fills it.
    pub(super) fn complete_hidden<'a>(
        &'a mut self,
        left: Option<&'a mut Left>,
        columns: usize,
    ) -> HiddenDerivatives<'a> {
        self.clear_bias(columns);
        self.complete = true;
        HiddenDerivatives { left, right: &mut self.derivatives, sums: &mut self.bias }
    }
}

impl Record {
    pub(super) fn layers(&self) -> usize {
        self.0.len()
    }

    /// Makes room for this many layers, none of them complete. Buffers keep their memory.
    pub(super) fn clear(&mut self, layers: usize) {
        self.0.resize_with(layers, RwLock::default);
        for layer in &mut self.0 {
            let mut layer = write(layer);
            (layer.begun, layer.complete) = (false, false);
        }
    }

    /// The layer with this weight.
    pub(super) fn layer(&self, weight: ParameterId) -> &RwLock<Recorded> {
        &self.0[weight.0]
    }

    /// The layer with this weight, to be written.
    pub(super) fn write(&self, weight: ParameterId) -> RwLockWriteGuard<'_, Recorded> {
        write(self.layer(weight))
    }
}

/// Takes the lock even if it is poisoned. Records are cleared before each wave, so a panic in an
/// earlier step leaves no wrong values.
fn write(recorded: &RwLock<Recorded>) -> RwLockWriteGuard<'_, Recorded> {
    recorded.write()
}

/// The records of these shards that their backward passes completed.
fn complete<'a>(shards: &[&'a RwLock<Recorded>]) -> Vec<RwLockReadGuard<'a, Recorded>> {
    let read = shards.iter().map(|shard| shard.read());
    read.filter(|shard| shard.complete).collect()
}

/// Adds the shards' gradients of a bias, in the order of the shards.
pub(super) fn add_bias(target: &mut [f32], shards: &[&RwLock<Recorded>]) {
    for shard in complete(shards) {
        target.iter_mut().zip(&shard.bias).for_each(|(sum, value)| *sum += value);
    }
}

/// `target = start + Σ over shards of Xᵀ·dY`, for some rows.
pub(super) fn add_weight(target: &mut [f32], rows: Range<usize>, shards: &[&RwLock<Recorded>], start: Start<'_>) {
    let shards = complete(shards);
    let operands: Vec<_> = shards.iter().map(|shard| (&shard.inputs, &shard.derivatives)).collect();
    match (&operands[..], start) {
        ([], Start::Zero) => target.fill(0.0),
        ([], _) => {}
        (operands, start) => sum_products(operands, rows, target, start, Finish::Plain),
    }
}
