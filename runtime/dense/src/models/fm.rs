//! Factorization machine of second order (Rendle 2010) over the sparse features. Dense features
//! enter linearly.

use burn::tensor::Tensor;

use super::{Model, ModelConfig, checks};
use crate::DenseError;
use crate::inputs::{InputWidths, Inputs};
use crate::layers::{Context, FactorizationMachine, FirstOrder};
use crate::layout::ParameterLayout;
use crate::onnx::{Graph, Value};

#[derive(Debug)]
pub(super) struct Fm {
    layout: ParameterLayout,
    widths: InputWidths,
    first_order: FirstOrder,
    second_order: FactorizationMachine,
}

impl Fm {
    pub(super) fn new(config: &ModelConfig) -> Result<Self, DenseError> {
        checks::one_task(config)?;
        let second_order = config.second_order()?;
        let mut layout = ParameterLayout::default();
        let first_order = FirstOrder::new(&mut layout, config.dense_features);
        Ok(Self { layout, widths: config.with_first_order(), first_order, second_order })
    }
}

impl Model for Fm {
    fn name(&self) -> &'static str {
        "fm"
    }

    fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    fn input_widths(&self) -> InputWidths {
        self.widths
    }

    fn forward(&self, context: &Context<'_>, inputs: Inputs<Tensor<2>>) -> Tensor<2> {
        let mut sum = self.first_order.forward(context, &inputs);
        if let Some(embeddings) = inputs.embeddings {
            sum = self.second_order.forward(embeddings) + sum;
        }
        sum
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        let mut sum = self.first_order.onnx(graph, &inputs);
        if let Some(embeddings) = &inputs.embeddings {
            let second = self.second_order.onnx(graph, embeddings);
            sum = graph.op("Add", &[&second, &sum]);
        }
        sum
    }
}

#[cfg(test)]
pub(super) mod reference {
    use crate::models::reference::{Case, Sample};

    pub(in crate::models) const CASES: &[Case] = &[
        (
            r#"{"kind":"fm","denseFeatures":2,"embeddingDims":[4,4,4]}"#,
            [0x38E4_8D0E_3C67_9AF3, 0x5467_B0DA_1D10_6495, 0xA432_2375_E742_EF35],
        ),
        (
            r#"{"kind":"fm","denseFeatures":0,"embeddingDims":[4,4,4]}"#,
            [0x092D_C98A_A5BE_885A, 0x4D25_767F_9DCE_13F5, 0xAA03_A9AD_4153_2C76],
        ),
    ];

    pub(in crate::models) fn logit(sample: &Sample<'_>) -> f64 {
        sample.first_order() + sample.pairwise_sum()
    }
}
