//! DeepFM (Guo et al. 2017): the sum of a factorization machine and an MLP over the same
//! embeddings.

use burn::tensor::Tensor;

use super::{Model, ModelConfig, checks, concatenate, concatenate_onnx};
use crate::DenseError;
use crate::inputs::{InputWidths, Inputs};
use crate::layers::{Context, FactorizationMachine, FirstOrder, MlpLogit};
use crate::layout::ParameterLayout;
use crate::onnx::{Graph, Value};

#[derive(Debug)]
pub(super) struct DeepFm {
    layout: ParameterLayout,
    widths: InputWidths,
    first_order: FirstOrder,
    second_order: FactorizationMachine,
    deep: MlpLogit,
}

impl DeepFm {
    pub(super) fn new(config: &ModelConfig, hidden: &[usize]) -> Result<Self, DenseError> {
        checks::one_task(config)?;
        let second_order = config.second_order()?;
        checks::sizes(config, "hidden", hidden)?;
        let mut layout = ParameterLayout::default();
        let first_order = FirstOrder::new(&mut layout, config.dense_features);
        let deep = config.deep(&mut layout, hidden);
        Ok(Self { layout, widths: config.with_first_order(), first_order, second_order, deep })
    }
}

impl Model for DeepFm {
    fn name(&self) -> &'static str {
        "deepfm"
    }

    fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    fn input_widths(&self) -> InputWidths {
        self.widths
    }

    fn forward(&self, context: &Context<'_>, inputs: Inputs<Tensor<2>>) -> Tensor<2> {
        let mut sum = self.first_order.forward(context, &inputs);
        if let Some(embeddings) = inputs.embeddings.clone() {
            sum = self.second_order.forward(embeddings) + sum;
        }
        self.deep.forward(context, concatenate(context, [inputs.embeddings, inputs.dense])) + sum
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        let mut sum = self.first_order.onnx(graph, &inputs);
        if let Some(embeddings) = &inputs.embeddings {
            let second = self.second_order.onnx(graph, embeddings);
            sum = graph.op("Add", &[&second, &sum]);
        }
        let input = concatenate_onnx(graph, [inputs.embeddings.as_ref(), inputs.dense.as_ref()]);
        let deep = self.deep.onnx(graph, input);
        graph.op("Add", &[&deep, &sum])
    }
}

#[cfg(test)]
pub(super) mod reference {
    use crate::models::reference::{Case, Sample};

    pub(in crate::models) const CASES: &[Case] = &[(
        r#"{"kind":"deepfm","hidden":[6,5],"denseFeatures":2,"embeddingDims":[4,4,4]}"#,
        [0xFDD6_0B66_F8BE_C6C5, 0x598C_8982_D1EF_21C9, 0xC81B_4934_6764_0AA7],
    )];

    pub(in crate::models) fn logit(sample: &Sample<'_>, hidden: &[usize]) -> f64 {
        sample.first_order() + sample.pairwise_sum() + sample.mlp_logit("deep", hidden, sample.both())
    }
}
