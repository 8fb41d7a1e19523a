//! The substitutes of models in the mode `des` (Rong et al. 2020, section 4). A substitute takes
//! the summed partial results of the parameter servers instead of pooled rows. It has the
//! parameters of its model, in the same layout, and computes the same logits.

use burn::tensor::Tensor;

use super::{Model, ModelConfig, checks};
use crate::DenseError;
use crate::inputs::{InputWidths, Inputs};
use crate::layers::{Context, FirstOrder, SummedFactorizationMachine};
use crate::layout::ParameterLayout;
use crate::onnx::{Graph, Value};

/// The substitute of `lr`, and with second-order sums of `fm`.
///
/// Its input `linear`, `[B, 1]`, is Σ w·x. Its input `embeddings`, `[B, d + 1]`, is Σ v·x and
/// Σ⟨vx, vx⟩.
#[derive(Debug)]
pub(super) struct Substitute {
    name: &'static str,
    layout: ParameterLayout,
    widths: InputWidths,
    first_order: FirstOrder,
    second_order: Option<SummedFactorizationMachine>,
}

impl Substitute {
    /// The substitute of `lr`.
    pub(super) fn of_lr(config: &ModelConfig) -> Result<Self, DenseError> {
        Self::new(config, None)
    }

    /// The substitute of `fm`.
    pub(super) fn of_fm(config: &ModelConfig) -> Result<Self, DenseError> {
        Self::new(config, Some(SummedFactorizationMachine { dim: checks::one_width(config)? }))
    }

    fn new(config: &ModelConfig, second_order: Option<SummedFactorizationMachine>) -> Result<Self, DenseError> {
        checks::one_task(config)?;
        let mut layout = ParameterLayout::default();
        let first_order = FirstOrder::new(&mut layout, config.dense_features);
        let embeddings = second_order.map_or(0, |second_order| second_order.dim + 1);
        let widths = InputWidths { dense: config.dense_features, embeddings, linear: 1 };
        Ok(Self { name: config.name(), layout, widths, first_order, second_order })
    }
}

impl Model for Substitute {
    fn name(&self) -> &str {
        self.name
    }

    fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    fn input_widths(&self) -> InputWidths {
        self.widths
    }

    fn forward(&self, context: &Context<'_>, inputs: Inputs<Tensor<2>>) -> Tensor<2> {
        let mut sum = self.first_order.forward(context, &inputs);
        if let (Some(second_order), Some(sums)) = (&self.second_order, inputs.embeddings) {
            sum = second_order.forward(sums) + sum;
        }
        sum
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        let mut sum = self.first_order.onnx(graph, &inputs);
        if let (Some(second_order), Some(sums)) = (&self.second_order, &inputs.embeddings) {
            let second = second_order.onnx(graph, sums);
            sum = graph.op("Add", &[&second, &sum]);
        }
        sum
    }
}
