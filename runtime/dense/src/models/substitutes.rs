//! The substitutes of models in the mode `des` (Rong et al. 2020, section 4). A substitute takes
//! the summed partial results of the parameter servers instead of pooled rows. It has the
//! parameters of its model, in the same layout, and computes the same logits.

use std::ops::Range;

use burn::tensor::Tensor;

use super::{Model, ModelConfig, checks};
use crate::DenseError;
use crate::inputs::{InputWidths, Inputs};
use crate::layers::{Context, FirstOrder, MlpShape, SummedFactorizationMachine, SummedMlpLogit, VectorCrosses};
use crate::layout::ParameterLayout;
use crate::onnx::{Graph, Value};

/// The substitute of a model: its first-order part, its second-order part, its tower and its
/// crosses, as far as it has them.
///
/// Its input `linear`, `[B, 1]`, is Σ w·x. Its input `embeddings` has the `units` columns VW + b of
/// the tower's first layer. Then it has the d + 1 columns Σ v·x and Σ⟨vx, vx⟩, or the columns VW of
/// the crosses.
#[derive(Debug)]
pub(super) struct Substitute {
    name: &'static str,
    layout: ParameterLayout,
    widths: InputWidths,
    /// Logits of a sample.
    tasks: usize,
    first_order: Option<FirstOrder>,
    second_order: Option<SummedFactorizationMachine>,
    deep: Option<Deep>,
    crosses: Option<VectorCrosses>,
}

/// The tower of a substitute.
#[derive(Debug)]
struct Deep {
    layers: SummedMlpLogit,
    /// Columns of VW + b.
    units: usize,
}

impl Substitute {
    /// The substitute of `lr`.
    pub(super) fn of_lr(config: &ModelConfig) -> Result<Self, DenseError> {
        checks::one_task(config)?;
        let (layout, first_order) = Self::first_order(config);
        Ok(Self::new(config, layout, Some(first_order), None, None))
    }

    /// The substitute of `fm`.
    pub(super) fn of_fm(config: &ModelConfig) -> Result<Self, DenseError> {
        checks::one_task(config)?;
        let second_order = SummedFactorizationMachine { dim: checks::one_width(config)? };
        let (layout, first_order) = Self::first_order(config);
        Ok(Self::new(config, layout, Some(first_order), Some(second_order), None))
    }

    /// The substitute of `dnn`.
    pub(super) fn of_dnn(config: &ModelConfig, hidden: &[usize]) -> Result<Self, DenseError> {
        checks::sizes(config, "hidden", hidden)?;
        let mut layout = ParameterLayout::default();
        let deep = Deep::new(&mut layout, config, hidden);
        Ok(Self::new(config, layout, None, None, Some(deep)))
    }

    /// The substitute of `wideDeep`.
    pub(super) fn of_wide_deep(config: &ModelConfig, hidden: &[usize]) -> Result<Self, DenseError> {
        checks::one_task(config)?;
        checks::sizes(config, "hidden", hidden)?;
        let (mut layout, first_order) = Self::first_order(config);
        let deep = Deep::new(&mut layout, config, hidden);
        Ok(Self::new(config, layout, Some(first_order), None, Some(deep)))
    }

    /// The substitute of `deepfm`.
    pub(super) fn of_deepfm(config: &ModelConfig, hidden: &[usize]) -> Result<Self, DenseError> {
        checks::one_task(config)?;
        checks::sizes(config, "hidden", hidden)?;
        let second_order = SummedFactorizationMachine { dim: checks::one_width(config)? };
        let (mut layout, first_order) = Self::first_order(config);
        let deep = Deep::new(&mut layout, config, hidden);
        Ok(Self::new(config, layout, Some(first_order), Some(second_order), Some(deep)))
    }

    /// The substitute of `dcn`.
    pub(super) fn of_dcn(config: &ModelConfig, layers: usize, hidden: &[usize]) -> Result<Self, DenseError> {
        checks::crosses_beside_mlp(config, layers, hidden)?;
        let mut layout = ParameterLayout::default();
        let crosses = config.crosses(&mut layout, layers);
        let deep = Deep::new(&mut layout, config, hidden);
        Ok(Self { crosses: Some(crosses), ..Self::new(config, layout, None, None, Some(deep)) })
    }

    fn first_order(config: &ModelConfig) -> (ParameterLayout, FirstOrder) {
        let mut layout = ParameterLayout::default();
        let first_order = FirstOrder::new(&mut layout, config.dense_features);
        (layout, first_order)
    }

    fn new(
        config: &ModelConfig,
        layout: ParameterLayout,
        first_order: Option<FirstOrder>,
        second_order: Option<SummedFactorizationMachine>,
        deep: Option<Deep>,
    ) -> Self {
        let second_columns = second_order.map_or(0, |second_order| second_order.dim + 1);
        let embeddings = config.first_units() + second_columns;
        let linear = usize::from(first_order.is_some());
        let widths = InputWidths { dense: config.dense_features, embeddings, linear };
        Self {
            name: config.name(),
            layout,
            widths,
            tasks: config.tasks,
            first_order,
            second_order,
            deep,
            crosses: None,
        }
    }

    /// The columns of the input `embeddings` after the first layer of the tower: second-order sums,
    /// or products of the crosses.
    fn columns_beside(&self) -> Range<usize> {
        self.deep.as_ref().map_or(0, |deep| deep.units)..self.widths.embeddings
    }
}

impl Deep {
    fn new(layout: &mut ParameterLayout, config: &ModelConfig, hidden: &[usize]) -> Self {
        let summed = config.embedding_width();
        let inputs = summed + config.dense_features;
        let shape = MlpShape { inputs, hidden, logits: config.tasks, dropout: config.dropout };
        Self { layers: SummedMlpLogit::new(layout, "deep", summed, shape), units: config.tower_units() }
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

    fn tasks(&self) -> usize {
        self.tasks
    }

    /// Adds the parts in the order in which the models add them, so that the sums have their bits.
    fn forward(&self, context: &Context<'_>, inputs: Inputs<Tensor<2>>) -> Tensor<2> {
        let mut sum = self.first_order.as_ref().map(|first_order| first_order.forward(context, &inputs));
        let Inputs { dense, embeddings, .. } = inputs;
        if let (Some(second_order), Some(sums)) = (&self.second_order, &embeddings) {
            let columns = self.columns_beside();
            let second = second_order.forward(columns_of(sums, columns));
            sum = Some(plus(second, sum));
        }
        if let (Some(crosses), Some(sums)) = (&self.crosses, &embeddings) {
            let products = columns_of(sums, self.columns_beside());
            sum = Some(plus(crosses.forward_summed(context, products, dense.clone()), sum));
        }
        if let (Some(deep), Some(sums)) = (&self.deep, &embeddings) {
            let logits = deep.layers.forward(context, columns_of(sums, 0..deep.units), dense);
            sum = Some(plus(logits, sum));
        }
        sum.expect("a substitute has a first-order part or a tower")
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        let mut sum = self.first_order.as_ref().map(|first_order| first_order.onnx(graph, &inputs));
        let mut add = |graph: &mut Graph<'_>, part: Value| {
            sum = Some(match sum.take() {
                Some(sum) => graph.op("Add", &[&part, &sum]),
                None => part,
            });
        };
        if let (Some(second_order), Some(sums)) = (&self.second_order, &inputs.embeddings) {
            let columns = graph.columns(sums, self.columns_beside());
            let second = second_order.onnx(graph, &columns);
            add(graph, second);
        }
        if let (Some(crosses), Some(sums)) = (&self.crosses, &inputs.embeddings) {
            let products = graph.columns(sums, self.columns_beside());
            let crossed = crosses.onnx_summed(graph, &products, inputs.dense.as_ref());
            add(graph, crossed);
        }
        if let (Some(deep), Some(sums)) = (&self.deep, &inputs.embeddings) {
            let columns = graph.columns(sums, 0..deep.units);
            let logits = deep.layers.onnx(graph, &columns, inputs.dense.as_ref());
            add(graph, logits);
        }
        sum.expect("a substitute has a first-order part or a tower")
    }
}

/// `part + sum`, if there is a sum.
fn plus(part: Tensor<2>, sum: Option<Tensor<2>>) -> Tensor<2> {
    match sum {
        Some(sum) => part + sum,
        None => part,
    }
}

/// Some columns of a matrix. All of them are the matrix itself.
fn columns_of(matrix: &Tensor<2>, columns: Range<usize>) -> Tensor<2> {
    if columns.len() == matrix.dims()[1] {
        return matrix.clone();
    }
    matrix.clone().narrow(1, columns.start, columns.len())
}
