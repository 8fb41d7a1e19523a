//! A training pass over part of a batch, on any device: from the inputs to the logits, and from the
//! derivative of the logits back to every leaf.

use std::ops::Range;

use burn::tensor::{Device, Gradients, Tensor};

use crate::batch::{Features, StepOutput};
use crate::flex::take;
use crate::inputs::Inputs;
use crate::layers::{Context, Masks, Products, matrix};
use crate::models::Model;
use crate::tasks::Tasks;

/// The operands of a training pass, besides the parameters.
pub(crate) struct Pass<'a> {
    pub(crate) model: &'a dyn Model,
    pub(crate) tasks: &'a Tasks,
    pub(crate) features: Features<'a>,
    /// `[samples, tasks]`.
    pub(crate) labels: &'a [f32],
    /// Factor of the weighted Σ loss in the function that is differentiated.
    pub(crate) scale: f32,
    pub(crate) masks: Masks,
}

/// The result of a training pass.
pub(crate) struct Passed {
    pub(crate) output: StepOutput,
    /// The first parameter, in layout order, with a gradient that is not finite.
    pub(crate) broken: Option<usize>,
    pub(crate) finite: KnownFinite,
}

/// What a pass knows to be finite. The tower looks through the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KnownFinite {
    /// The inputs.
    pub(crate) inputs: bool,
    /// The gradients of the inputs.
    pub(crate) gradients: bool,
}

impl KnownFinite {
    /// The knowledge about the parts of a batch, from two of them.
    pub(crate) fn and(self, other: Self) -> Self {
        Self { inputs: self.inputs && other.inputs, gradients: self.gradients && other.gradients }
    }
}

/// A forward pass with its autodiff graph.
pub(crate) struct Recorded {
    /// `[B, tasks]`.
    pub(crate) logits: Tensor<2>,
    /// The leaves: parameters in layout order, and the inputs that have gradients.
    pub(crate) parameters: Vec<Tensor<2>>,
    pub(crate) embeddings: Option<Tensor<2>>,
    pub(crate) linear: Option<Tensor<2>>,
}

impl Pass<'_> {
    /// The forward pass of the samples in `shard`, in a graph of its own.
    pub(crate) fn forward(
        &self,
        parameters: &[Tensor<2>],
        products: Products<'_>,
        shard: &Range<usize>,
        device: &Device,
    ) -> Recorded {
        let leaf = |tensor: Tensor<2>| tensor.autodiff().require_grad();
        let parameters: Vec<Tensor<2>> = parameters.iter().cloned().map(leaf).collect();
        let inputs = inputs(self.model, &self.features, shard, device);
        let embeddings = inputs.embeddings.map(leaf);
        let linear = inputs.linear.map(leaf);
        let inputs = Inputs { dense: inputs.dense, embeddings: embeddings.clone(), linear: linear.clone() };
        let masks = Masks { first_sample: shard.start, ..self.masks };
        let logits = logits(self.model, &Context::training(&parameters, products, masks), inputs, shard.len());
        Recorded { logits, parameters, embeddings, linear }
    }
}

impl Recorded {
    /// The gradients of every leaf. `derivative` is the derivative of the loss by the logits, `[B,
    /// tasks]`.
    pub(crate) fn backward(&self, derivative: Tensor<2>) -> Gradients {
        // The gradient of Σ logit·c with a constant c is c. This puts the loss's derivative into
        // the graph.
        (self.logits.clone() * derivative).sum().backward()
    }
}

/// The logits of some samples, `[samples, tasks]`.
///
/// # Panics
/// If the model makes logits of another shape.
pub(crate) fn logits(model: &dyn Model, context: &Context<'_>, inputs: Inputs<Tensor<2>>, samples: usize) -> Tensor<2> {
    let logits = model.forward(context, inputs);
    let expected = [samples, model.tasks()];
    assert_eq!(logits.dims(), expected, "logits of the `{}` model: one row a sample, one column a task", model.name());
    logits
}

/// The rows of a shard as tensors outside any graph.
pub(crate) fn inputs(
    model: &dyn Model,
    features: &Features<'_>,
    shard: &Range<usize>,
    device: &Device,
) -> Inputs<Tensor<2>> {
    let rows = |values: &[f32], columns: usize| {
        (columns > 0).then(|| {
            let mut rows = take(shard.len() * columns);
            rows.extend_from_slice(&values[shard.start * columns..shard.end * columns]);
            matrix(rows, [shard.len(), columns], device)
        })
    };
    let widths = model.input_widths();
    Inputs {
        dense: rows(features.dense, widths.dense),
        embeddings: rows(features.embeddings, widths.embeddings),
        linear: rows(features.linear, widths.linear),
    }
}
