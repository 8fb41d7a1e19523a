//! Wide&Deep (Cheng et al. 2016): the sum of a logistic regression and an MLP.

use burn::tensor::Tensor;

use super::{Model, ModelConfig, checks, concatenate, concatenate_onnx};
use crate::DenseError;
use crate::inputs::{InputWidths, Inputs};
use crate::layers::{Context, FirstOrder, MlpLogit};
use crate::layout::ParameterLayout;
use crate::onnx::{Graph, Value};

#[derive(Debug)]
pub(super) struct WideDeep {
    layout: ParameterLayout,
    widths: InputWidths,
    first_order: FirstOrder,
    deep: MlpLogit,
}

impl WideDeep {
    pub(super) fn new(config: &ModelConfig, hidden: &[usize]) -> Result<Self, DenseError> {
        checks::one_task(config)?;
        checks::sizes(config, "hidden", hidden)?;
        let mut layout = ParameterLayout::default();
        let first_order = FirstOrder::new(&mut layout, config.dense_features);
        let deep = config.deep(&mut layout, hidden);
        Ok(Self { layout, widths: config.with_first_order(), first_order, deep })
    }
}

impl Model for WideDeep {
    fn name(&self) -> &'static str {
        "wideDeep"
    }

    fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    fn input_widths(&self) -> InputWidths {
        self.widths
    }

    fn forward(&self, context: &Context<'_>, inputs: Inputs<Tensor<2>>) -> Tensor<2> {
        let first = self.first_order.forward(context, &inputs);
        self.deep.forward(context, concatenate(context, [inputs.embeddings, inputs.dense])) + first
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        let first = self.first_order.onnx(graph, &inputs);
        let input = concatenate_onnx(graph, [inputs.embeddings.as_ref(), inputs.dense.as_ref()]);
        let deep = self.deep.onnx(graph, input);
        graph.op("Add", &[&deep, &first])
    }
}

#[cfg(test)]
pub(super) mod reference {
    use crate::models::reference::{Case, Sample};

    pub(in crate::models) const CASES: &[Case] = &[
        (
            r#"{"kind":"wideDeep","hidden":[6,5],"denseFeatures":2,"embeddingDims":[4,2,3]}"#,
            [0x1ECC_D119_F508_46F9, 0x0776_FE44_D53D_C994, 0xC08B_E9A1_532E_D4C9],
        ),
        (
            r#"{"kind":"wideDeep","hidden":[6,1],"denseFeatures":2,"embeddingDims":[4,2,3]}"#,
            [0xD4D8_55CA_6476_DA1C, 0x0776_958F_4F31_6510, 0x1D1C_8375_FDAB_E76A],
        ),
    ];

    pub(in crate::models) fn logit(sample: &Sample<'_>, hidden: &[usize]) -> f64 {
        sample.first_order() + sample.mlp_logit("deep", hidden, sample.both())
    }
}
