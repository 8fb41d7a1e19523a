//! Logistic regression. Sparse features have first-order weights and no embeddings.

use burn::tensor::Tensor;

use super::{Model, ModelConfig, checks};
use crate::DenseError;
use crate::inputs::{InputWidths, Inputs};
use crate::layers::{Context, FirstOrder};
use crate::layout::ParameterLayout;
use crate::onnx::{Graph, Value};

#[derive(Debug)]
pub(super) struct Lr {
    layout: ParameterLayout,
    widths: InputWidths,
    first_order: FirstOrder,
}

impl Lr {
    pub(super) fn new(config: &ModelConfig) -> Result<Self, DenseError> {
        checks::one_task(config)?;
        let mut layout = ParameterLayout::default();
        let first_order = FirstOrder::new(&mut layout, config.dense_features);
        Ok(Self { layout, widths: config.with_first_order(), first_order })
    }
}

impl Model for Lr {
    fn name(&self) -> &'static str {
        "lr"
    }

    fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    fn input_widths(&self) -> InputWidths {
        self.widths
    }

    fn forward(&self, context: &Context<'_>, inputs: Inputs<Tensor<2>>) -> Tensor<2> {
        self.first_order.forward(context, &inputs)
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        self.first_order.onnx(graph, &inputs)
    }
}

#[cfg(test)]
pub(super) mod reference {
    use crate::models::reference::{Case, Sample};

    pub(in crate::models) const CASES: &[Case] = &[
        (
            r#"{"kind":"lr","denseFeatures":2,"embeddingDims":[0,0,0]}"#,
            [0x38E4_8D0E_3C67_9AF3, 0x5467_B0DA_1D10_6495, 0x5D28_6B2C_C280_CDC2],
        ),
        (
            r#"{"kind":"lr","denseFeatures":0,"embeddingDims":[0,0,0]}"#,
            [0x092D_C98A_A5BE_885A, 0x4D25_767F_9DCE_13F5, 0x36D6_0A00_9E4C_2D4A],
        ),
        (
            r#"{"kind":"lr","denseFeatures":2,"embeddingDims":[]}"#,
            [0x38E4_8D0E_3C67_9AF3, 0x5467_B0DA_1D10_6495, 0xE6F7_D03C_7233_5942],
        ),
    ];

    pub(in crate::models) fn logit(sample: &Sample<'_>) -> f64 {
        sample.first_order()
    }
}
